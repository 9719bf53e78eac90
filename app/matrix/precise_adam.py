"""Transformer Engine's FusedAdam by its surface and its state, in plain torch.

The precision-aware optimizer: main copies as 16 remainder bits beside bf16 parameters, moments in
fp32, bf16, fp16 or fp8, the last two with a factor a tensor.

Source: transformer_engine/pytorch/optimizers/fused_adam.py; multi_tensor_adam_param_remainder.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch


class Fp8Tensor(torch.Tensor):
    """A tensor over 8-bit data and an inverse factor, as Float8Tensor is."""

    @staticmethod
    def __new__(cls, shape, device):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=device)

    def __init__(self, shape, device):
        self._data = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._scale_inv = torch.ones(1, device=device)
        self._quantizer = SimpleNamespace(scale=torch.ones(1, device=device))

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function} of a quantised tensor")

    def quantise(self, values: torch.Tensor) -> None:
        """Keep `values` with a new factor."""
        factor = (values.abs().max() / 448).clamp(min=1e-20).view(1)
        self._scale_inv.copy_(factor)
        self._quantizer.scale.copy_(1 / factor)
        self._data.copy_((values / factor).to(torch.float8_e4m3fn).view(torch.uint8))

    def values(self) -> torch.Tensor:
        """What is kept, in fp32."""
        return self._data.view(torch.float8_e4m3fn).float() * self._scale_inv


class PreciseAdam(torch.optim.Optimizer):
    """AdamW with FusedAdam's arguments, state and factors."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        *,
        master_weights=False,
        master_weight_dtype=torch.float32,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        use_decoupled_grad=False,
        store_param_remainders=True,
    ):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.master_weights, self.master_weight_dtype = master_weights, master_weight_dtype
        self.exp_avg_dtype, self.exp_avg_sq_dtype = exp_avg_dtype, exp_avg_sq_dtype
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                gradient = param.decoupled_grad if self.use_decoupled_grad else param.grad
                if gradient is not None:
                    self._step(param, gradient.float(), group)

    def _step(self, param, gradient, group) -> None:
        if not self.state[param]:
            self._initialize(param)
        (beta1, beta2), step = group["betas"], group["step"]
        main = self._main(param)
        mean = self._get(param, "exp_avg").mul(beta1).add(gradient, alpha=1 - beta1)
        square = (
            self._get(param, "exp_avg_sq").mul(beta2).addcmul(gradient, gradient, value=1 - beta2)
        )
        denominator = (square / (1 - beta2**step)).sqrt() + group["eps"]
        update = mean / (1 - beta1**step) / denominator + group["weight_decay"] * main
        main = main - group["lr"] * update
        self._put(param, "exp_avg", mean)
        self._put(param, "exp_avg_sq", square)
        self._put_main(param, main)

    def _initialize(self, param) -> None:
        for name, dtype in (("exp_avg", self.exp_avg_dtype), ("exp_avg_sq", self.exp_avg_sq_dtype)):
            kept = (
                Fp8Tensor(param.shape, param.device)
                if dtype == torch.uint8
                else torch.zeros_like(param, dtype=dtype)
            )
            self.state[param][name] = kept
            if dtype != torch.float32:
                self._scales.setdefault(param, {})[name] = torch.ones(1, device=param.device)
        if self.master_weights:
            self.state[param]["master_param"] = (
                torch.zeros_like(param, dtype=torch.int16)
                if self._has_remainders(param)
                else param.detach().float().clone()
            )

    def _has_remainders(self, param) -> bool:
        return self.store_param_remainders and param.dtype == torch.bfloat16

    def _get(self, param, name) -> torch.Tensor:
        kept = self.state[param][name]
        if isinstance(kept, Fp8Tensor):
            return kept.values()
        if kept.dtype == torch.float16:
            return kept.float() * self._scales[param][name]
        return kept.float()

    def _put(self, param, name, values) -> None:
        kept = self.state[param][name]
        if isinstance(kept, Fp8Tensor):
            kept.quantise(values)
            self._scales[param][name].copy_(kept._scale_inv)
        elif kept.dtype == torch.float16:
            factor = (values.abs().max() / 30000).clamp(min=1e-20)
            self._scales[param][name].fill_(factor)
            kept.copy_(values / factor)
        else:
            kept.copy_(values)

    def _main(self, param) -> torch.Tensor:
        if not self.master_weights:
            return param.float()
        kept = self.state[param]["master_param"]
        if not self._has_remainders(param):
            return kept
        high = param.detach().view(torch.int16).to(torch.int32) << 16
        return (high + kept.to(torch.int32)).view(torch.float32)

    def _put_main(self, param, main) -> None:
        if not self.master_weights:
            param.copy_(main)
            return
        kept = self.state[param]["master_param"]
        if not self._has_remainders(param):
            kept.copy_(main)
            param.copy_(main)
            return
        bits = main.view(torch.int32)
        low = bits.to(torch.int16)  # the 16 low bits, signed
        high = (bits - low.to(torch.int32)) >> 16
        kept.copy_(low)
        param.view(torch.int16).copy_(high.to(torch.int16))

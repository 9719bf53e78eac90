"""Grouped linear layers whose experts own more than weights, or compute from derived copies."""

from __future__ import annotations

import torch
from torch import nn

from app.local.cpu_modules import ColumnGroupedLinear, RowGroupedLinear


class _Owning:
    """Registers further parameters of the local experts, as Transformer Engine marks them."""

    def own(self, name: str, shape: tuple[int, ...], scale: float) -> None:
        param = nn.Parameter(torch.randn(shape).to(self.weight0.dtype) * scale)
        param.allreduce = self.weight0.allreduce
        self.register_parameter(name, param)


class _Biased(_Owning):
    """One bias an expert (`bias{i}`), as GPT-OSS has."""

    def __init__(self, num_gemms, input_size, output_size, **settings):
        super().__init__(num_gemms, input_size, output_size, **settings)
        self.skip_bias_add = settings["skip_bias_add"]
        for index in range(num_gemms):
            self.own(f"bias{index}", (output_size,), 0.3)

    def forward(self, x, m_splits):
        out, _ = super().forward(x, m_splits)
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)]
        if self.skip_bias_add:
            return out, biases
        parts = out.split(list(m_splits))
        return torch.cat([part + bias for part, bias in zip(parts, biases)]), None


class _Adapted(_Owning):
    """A low-rank adapter an expert inside the grouped linear (`lora_a{i}`, `lora_b{i}`)."""

    def __init__(self, num_gemms, input_size, output_size, **settings):
        super().__init__(num_gemms, input_size, output_size, **settings)
        for index in range(num_gemms):
            self.own(f"lora_a{index}", (3, input_size), 0.2)
            self.own(f"lora_b{index}", (output_size, 3), 0.2)

    def forward(self, x, m_splits):
        out, _ = super().forward(x, m_splits)
        low = [
            part @ getattr(self, f"lora_a{i}").T @ getattr(self, f"lora_b{i}").T
            for i, part in enumerate(x.split(list(m_splits)))
        ]
        return out + torch.cat(low), None


class _Leading(_Owning):
    """Tensors with a leading dimension of local experts: a trained scale, and a counter."""

    def __init__(self, num_gemms, input_size, output_size, **settings):
        super().__init__(num_gemms, input_size, output_size, **settings)
        self.own("output_scale", (num_gemms, output_size), 1.0)
        self.register_buffer("tokens_seen", torch.zeros(num_gemms, dtype=torch.int64))

    def forward(self, x, m_splits):
        out, _ = super().forward(x, m_splits)
        self.tokens_seen += torch.as_tensor(list(m_splits))
        parts = zip(out.split(list(m_splits)), self.output_scale)
        return torch.cat([part * scale for part, scale in parts]), None


class _Rounding(torch.autograd.Function):
    """Round each row of a matrix to `levels` steps of its maximum; gradients pass straight."""

    @staticmethod
    def forward(ctx, weight, levels):
        step = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-5) / levels
        return (weight / step).round().clamp(-levels, levels) * step

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Quantised:
    """Computes from quantised copies made on the first micro-batch of a step, as fp8 layers do."""

    def __init__(self, *sizes, **settings):
        super().__init__(*sizes, **settings)
        self.is_first_microbatch = True
        self._fp8_workspaces: dict[str, torch.Tensor] = {}

    def forward(self, x, m_splits):
        out = []
        for index, part in enumerate(x.split(list(m_splits))):
            weight = getattr(self, f"weight{index}")
            if self.is_first_microbatch:
                self._fp8_workspaces[f"weight{index}"] = _Rounding.apply(weight.detach(), 127)
            used = weight + (self._fp8_workspaces[f"weight{index}"] - weight).detach()
            out.append(nn.functional.linear(part, used))
        self.is_first_microbatch = False
        return torch.cat(out), None


class _Int4:
    """INT4 quantisation-aware training: every forward rounds, as slime's Megatron patch does."""

    def forward(self, x, m_splits):
        parts = enumerate(x.split(list(m_splits)))
        rounded = [(part, _Rounding.apply(getattr(self, f"weight{i}"), 7)) for i, part in parts]
        return torch.cat([nn.functional.linear(part, weight) for part, weight in rounded]), None


def _pair(mixin: type) -> tuple[type, type]:
    name = mixin.__name__.strip("_")
    return (
        type(f"{name}ColumnGroupedLinear", (mixin, ColumnGroupedLinear), {}),
        type(f"{name}RowGroupedLinear", (mixin, RowGroupedLinear), {}),
    )


VARIANTS: dict[str, tuple[type, type]] = {
    "biases": _pair(_Biased),
    "adapters": _pair(_Adapted),
    "leading dimension": _pair(_Leading),
    "fp8 workspaces": _pair(_Quantised),
    "int4": _pair(_Int4),
}
"""(first, second) linear layer of experts, by what is special about them."""

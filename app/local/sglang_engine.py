"""Real SGLang as the rollout engine: one CPU server for all ranks, the embedded engine's surface.

`start_sglang` runs in the launching process, before the ranks: it saves the starting weights as a
checkpoint, starts the server, checks the capture and closes the server at the end. Each rank then
samples through `SglangEngine(url, hf)`. Weights reach the server by `/update_weights_from_disk`:
`/update_weights_from_tensor` needs SGLang's own serializer in the sending process, and this one
lives in another environment.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from app.config import RunConfig
from app.local.model import MAX_POSITIONS, build_hf
from app.local.tokens import BOS
from app.local.warmup import starting_weights
from app.sglang_cpu.client import post
from app.sglang_cpu.server import serve
from rollout_hooks.routed_experts import CaptureSpec
from rollout_hooks.trajectory import from_response

MAX_RUNNING_REQUESTS = 128
PROMPT_MARKS = 8  # tokens of a prompt beside the string it asks about


class WeightUpdateError(RuntimeError):
    """The server did not take the new weights; it still samples with the old ones."""


class SglangEngine:
    """Samples on a running SGLang server; alike on every rank, all ranks share the server.

    hf: a transformers model of the served architecture. It writes the checkpoints; its own weights
    are replaced by every update.
    Sampling is the server's: it is seeded at launch, but its order depends on what arrives when,
    so that two runs differ. `generator` is there for callers that seed an engine.
    """

    def __init__(self, url: str, hf: PreTrainedModel):
        self.url = url
        self.hf = hf
        self.generator = torch.Generator()
        self.weight_version = 0

    def generate(
        self, prompts: Sequence[np.ndarray], max_new_tokens: int, return_routed_experts: bool = True
    ) -> list[dict]:
        """Sample one response per prompt and return SGLang's JSON for each, in order.

        Raises RequestError with the server's words when it refuses or breaks off.
        """
        payload = {
            "input_ids": [np.asarray(prompt).tolist() for prompt in prompts],
            "sampling_params": {"temperature": 1.0, "max_new_tokens": max_new_tokens},
            "return_logprob": True,
            "return_routed_experts": return_routed_experts,
        }
        return post(self.url, "generate", payload)

    def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Serve exported weights, in logical order, as a new weight version; collective over ranks.

        The prefix cache is flushed: its rows hold the routing of the old weights.
        Raises WeightUpdateError when the server refuses them.
        """
        self.weight_version += 1
        if not dist.is_initialized() or dist.get_rank() == 0:
            self.hf.load_state_dict(tensors)
            with tempfile.TemporaryDirectory(prefix="routepack-weights-") as folder:
                save_checkpoint(self.hf, folder)
                answer = post(
                    self.url,
                    "update_weights_from_disk",
                    {
                        "model_path": folder,
                        "weight_version": str(self.weight_version),
                        "flush_cache": True,
                    },
                )
            if not (isinstance(answer, dict) and answer.get("success")):
                raise WeightUpdateError(f"SGLang refused weights {self.weight_version}: {answer}")
        if dist.is_initialized():
            dist.barrier()


@contextmanager
def start_sglang(
    config: RunConfig, weights: str | Path, *, extra: tuple[str, ...] = ()
) -> Iterator[str]:
    """Serve the model of `config` with the starting `weights`; yield the server's URL.

    extra: further flags of sglang.launch_server.
    Raises FileNotFoundError without the SGLang environment, ServerError when the server does not
    start, CaptureError when it does not return routed experts in the expected shape.
    """
    from app.local.rollout import capture_spec  # here: rollout names the engines

    hf = build_hf(config.model, config.routing_skew, config.seed)
    hf.load_state_dict(starting_weights(weights))
    longest = config.tasks.length_max + PROMPT_MARKS + config.rollout.max_new_tokens
    with tempfile.TemporaryDirectory(prefix="routepack-model-") as folder:
        save_checkpoint(hf, folder)
        with serve(
            folder,
            context_length=min(longest, MAX_POSITIONS),
            max_total_tokens=MAX_RUNNING_REQUESTS * longest,
            max_running_requests=MAX_RUNNING_REQUESTS,
            extra=("--random-seed", str(config.seed), "--weight-version", "0", *extra),
        ) as url:
            check_capture(url, capture_spec(config.model))
            yield url


def check_capture(url: str, spec: CaptureSpec) -> None:
    """Sample two tokens and decode their routing, as every rollout will.

    Raises CaptureError saying what to install or set when routed experts do not come back, or in
    another shape than `spec` says.
    """
    prompt = [BOS, 0, 1]
    payload = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True},
        "return_logprob": True,
        "return_routed_experts": True,
    }
    response = post(url, "generate", payload)
    from_response(response, prompt, 0, spec, "error", sample_id=f"of the start-up check at {url}")


def save_checkpoint(hf: PreTrainedModel, folder: str | Path) -> None:
    """Write a Hugging Face checkpoint, one tensor per expert, that SGLang loads."""
    disable_progress_bar()
    hf.save_pretrained(folder)

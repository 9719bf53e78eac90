"""One completed rollout: tokens, log-probs, routing and demand, from SGLang's `/generate` JSON.

A trajectory of t tokens has t - 1 - start_len routed rows. Its routing is reduced to demand as it
completes. It then holds rows x L x top_k bytes of token-level routing (twice that for E > 256),
once, and L x E x 4 bytes of demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollout_hooks.counts import count
from rollout_hooks.routed_experts import CaptureError, CaptureSpec, compact, decode

Missing = Literal["error", "estimate"]

MISSING_HELP = (
    "start the server with --enable-return-routed-experts and set return_routed_experts: true in "
    "the request (in slime: --use-rollout-routing-replay); sglang-router from PyPI drops that "
    "field, so use slime's build of the router or talk to the server directly; or choose "
    "missing: estimate"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One rollout trajectory S_i as it goes into a sealed window (Section 2.1).

    sample_id: name used in every message about it.
    group: GRPO group, equal for the rollouts of one prompt.
    tokens: int32 `[t]`, prompt and response.
    num_prompt_tokens: leading tokens that are the prompt, 1 to t.
    logprobs: float32 `[t - num_prompt_tokens]`, the sampler's, of the response tokens.
    routed: uint8/16/32 `[t - 1 - start_len, L, top_k]`, logical ids, or None without a capture.
    counts: int32 `[L, E]`, the demand A_i, or None without a capture.
    start_len: leading positions whose routing was not returned.
    reward: None until it is known (`dataclasses.replace(trajectory, reward=...)`).
    finish_reason: `stop`, `length` or `abort`.
    weight_version: of the weights that sampled it, if the server said so.
    num_cached_tokens: prompt tokens served from the prefix cache; their routing is stale when the
        cache outlived a weight update.

    Raises CaptureError naming the sample when the lengths contradict one another.
    """

    sample_id: str
    group: int
    tokens: NDArray[np.int32]
    num_prompt_tokens: int
    logprobs: NDArray[np.float32]
    routed: NDArray[np.unsignedinteger] | None = None
    counts: NDArray[np.int32] | None = None
    start_len: int = 0
    reward: float | None = None
    finish_reason: str = "stop"
    weight_version: str | None = None
    num_cached_tokens: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_prompt_tokens <= len(self.tokens):
            raise CaptureError(
                f"sample {self.sample_id}: num_prompt_tokens {self.num_prompt_tokens} is outside "
                f"[1, {len(self.tokens)}] for {len(self.tokens)} tokens"
            )
        num_new = len(self.tokens) - self.num_prompt_tokens
        if len(self.logprobs) != num_new:
            raise CaptureError(
                f"sample {self.sample_id}: {len(self.logprobs)} log-probs for {num_new} response "
                "tokens; set return_logprob: true in the request"
            )
        if self.routed is not None and len(self.routed) != self.num_routed_rows:
            raise CaptureError(
                f"sample {self.sample_id}: {len(self.routed)} routed rows, expected "
                f"{self.num_routed_rows} ({len(self.tokens)} tokens - 1 - start_len "
                f"{self.start_len}); fewer rows are right only with a start_len that explains them"
            )
        if (self.routed is None) != (self.counts is None):
            raise CaptureError(
                f"sample {self.sample_id}: routed and counts must both be there or both be None"
            )

    @property
    def num_tokens(self) -> int:
        """t, the tokens of the whole trajectory, which capacity and dense cost see."""
        return len(self.tokens)

    @property
    def num_routed_rows(self) -> int:
        """Rows that demand counts: t - 1 - start_len, at least 0."""
        return max(0, len(self.tokens) - 1 - self.start_len)


def from_response(
    response: dict[str, Any],
    prompt_ids: Sequence[int] | NDArray[np.integer],
    group: int,
    spec: CaptureSpec,
    missing: Missing = "error",
    start_len: int = 0,
    *,
    sample_id: str | None = None,
) -> Trajectory:
    """Decode one `/generate` response and count its demand, as the rollout completes.

    response: SGLang's JSON with `output_ids` and `meta_info`.
    prompt_ids: the P tokens that were sent.
    missing: what to do without `routed_experts`: `error`, or `estimate` (routed and counts None).
    start_len: `routed_experts_start_len` of the request; stock SGLang does not echo it.
    sample_id: name for messages; default is SGLang's request id.
    Raises CaptureError naming the sample when a field is missing, malformed or contradicts another.
    A capture that is there but malformed is refused under both policies.
    """
    if missing not in ("error", "estimate"):
        raise ValueError(f"missing: expected 'error' or 'estimate', got {missing!r}")
    meta = response.get("meta_info") if isinstance(response, dict) else None
    name = sample_id
    if name is None:
        name = str(meta["id"]) if isinstance(meta, dict) and "id" in meta else f"of group {group}"
    if not isinstance(meta, dict):
        raise CaptureError(f"sample {name}: the response has no meta_info; is it from /generate?")
    output_ids, logprobs = _output(response, meta, name)
    num_prompt, num_new = len(prompt_ids), len(output_ids)
    for field, actual in (("prompt_tokens", num_prompt), ("completion_tokens", num_new)):
        if field in meta and meta[field] != actual:
            raise CaptureError(
                f"sample {name}: meta_info.{field} is {meta[field]}, expected {actual}; the "
                "response belongs to another request, or was cut"
            )
    echoed = meta.get("routed_experts_start_len")
    if echoed is not None and echoed != start_len:
        raise CaptureError(
            f"sample {name}: the server reports routed_experts_start_len {echoed}, the request "
            f"says {start_len}; pass the start_len that was sent"
        )
    routed = counts = None
    encoded = meta.get("routed_experts")
    if encoded is not None:
        routed = compact(decode(encoded, num_prompt, num_new, spec, name, start_len), spec, name)
        counts = count(routed, spec.num_experts)
    elif missing == "error":
        raise CaptureError(f"sample {name}: the response has no routed_experts; {MISSING_HELP}")
    finish = meta.get("finish_reason")
    version = meta.get("weight_version")
    return Trajectory(
        sample_id=name,
        group=group,
        tokens=np.concatenate([np.asarray(prompt_ids, np.int32), output_ids]),
        num_prompt_tokens=num_prompt,
        logprobs=logprobs,
        routed=routed,
        counts=counts,
        start_len=start_len,
        finish_reason=str(finish.get("type", "stop")) if isinstance(finish, dict) else "stop",
        weight_version=None if version is None else str(version),
        num_cached_tokens=int(meta.get("cached_tokens") or 0),
    )


def _output(
    response: dict[str, Any], meta: dict[str, Any], name: str
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Response tokens int32 `[N]` and their log-probs float32 `[N]`, checked against each other."""
    pairs = meta.get("output_token_logprobs")
    if pairs is None:
        raise CaptureError(
            f"sample {name}: the response has no output_token_logprobs; set return_logprob: true "
            "in the request"
        )
    try:
        logprobs = np.array([pair[0] for pair in pairs], np.float32)
        sampled = np.array([pair[1] for pair in pairs], np.int32)
    except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise CaptureError(
            f"sample {name}: output_token_logprobs must be [logprob, token_id, text] triples, got "
            f"{str(pairs)[:80]}"
        ) from error
    output_ids = response.get("output_ids")
    if output_ids is not None and not np.array_equal(sampled, np.asarray(output_ids)):
        raise CaptureError(
            f"sample {name}: output_ids ({len(output_ids)} tokens) and output_token_logprobs "
            f"({len(sampled)}) are different tokens; the response was cut or merged"
        )
    if np.isnan(logprobs).any():
        raise CaptureError(f"sample {name}: output_token_logprobs holds NaN or null")
    return sampled, logprobs

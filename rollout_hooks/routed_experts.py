"""The wire format of SGLang's `meta_info["routed_experts"]` and its compact form.

On the wire: base64 of raw little-endian int32 `[row, hidden layer, top_k]`, where row i belongs to
position i and the last position has none, so P prompt and N new tokens give P + N - 1 - start_len
rows. The shape is not sent. All hidden layers are present; a dense layer is filled with zeros,
which looks like expert 0, so dense layers are dropped by configuration and never by value.

Peers: sglang `--enable-return-routed-experts`; slime `slime/utils/types.py`.
"""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pybase64
from numba import njit
from numpy.typing import NDArray

_OK, _OUT_OF_RANGE, _REPEATED = 0, 1, 2


class CaptureError(ValueError):
    """A capture that cannot be the routing of its sample; the message names the sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureSpec:
    """What the model's configuration says about the shape of a capture.

    num_hidden_layers: decoder layers on the wire, dense ones included, MTP layers excluded.
    moe_layers: global layer numbers (0-based, ascending) that hold routed experts.
    num_experts: routed experts E of a MoE layer.
    top_k: experts per token.

    Raises ValueError naming the field when the four do not fit together.
    """

    num_hidden_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        layers = list(self.moe_layers)
        if not layers or layers != sorted(set(layers)):
            raise ValueError(
                f"moe_layers: expected ascending, distinct layer numbers, got {self.moe_layers}; "
                "list every MoE layer of the model once"
            )
        if layers[0] < 0 or layers[-1] >= self.num_hidden_layers:
            raise ValueError(
                f"moe_layers: expected numbers in [0, {self.num_hidden_layers}), got "
                f"{self.moe_layers}; layer numbers are global and 0-based"
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"top_k: expected 1 to num_experts={self.num_experts}, got {self.top_k}; "
                "copy both from the model's configuration"
            )

    @classmethod
    def from_moe_layer_freq(
        cls,
        moe_layer_freq: int | Sequence[int],
        *,
        num_hidden_layers: int,
        num_experts: int,
        top_k: int,
    ) -> CaptureSpec:
        """Read the MoE layers from Megatron's `moe_layer_freq`.

        moe_layer_freq: an int n (layer i is MoE when i % n == 0) or one 0/1 flag per layer.
        Raises ValueError when the flags do not cover `num_hidden_layers` or are not 0 or 1.
        """
        if isinstance(moe_layer_freq, int):
            if moe_layer_freq < 1:
                raise ValueError(f"moe_layer_freq: expected >= 1 or a list, got {moe_layer_freq}")
            flags = [int(i % moe_layer_freq == 0) for i in range(num_hidden_layers)]
        else:
            flags = [int(flag) for flag in moe_layer_freq]
        if len(flags) != num_hidden_layers or set(flags) - {0, 1}:
            raise ValueError(
                f"moe_layer_freq: expected {num_hidden_layers} flags of 0 or 1, got {flags}; "
                "give one flag per hidden layer of the whole model, whatever PP and VPP are"
            )
        moe_layers = tuple(layer for layer, flag in enumerate(flags) if flag)
        return cls(
            num_hidden_layers=num_hidden_layers,
            moe_layers=moe_layers,
            num_experts=num_experts,
            top_k=top_k,
        )

    @property
    def num_moe_layers(self) -> int:
        """L, the MoE layers that appear in demand."""
        return len(self.moe_layers)


def encode(routed: NDArray[np.integer]) -> str:
    """Write routing `[row, hidden layer, top_k]` as SGLang sends it: base64 of int32."""
    return pybase64.b64encode(np.ascontiguousarray(routed, dtype="<i4").tobytes()).decode("ascii")


def decode(
    encoded: str | bytes,
    num_prompt_tokens: int,
    num_new_tokens: int,
    spec: CaptureSpec,
    sample_id: str,
    start_len: int = 0,
) -> NDArray[np.int32]:
    """Decode one capture without copying the decoded bytes.

    Returns int32 `[P + N - 1 - start_len, num_hidden_layers, top_k]`, read-only.
    Raises CaptureError naming the sample when the text is not base64, the byte count differs from
    what the token counts imply, or `start_len` is outside [0, P].
    """
    if num_prompt_tokens < 1 or num_new_tokens < 0:
        raise CaptureError(
            f"sample {sample_id}: expected at least 1 prompt token and 0 new tokens, got "
            f"{num_prompt_tokens} and {num_new_tokens}"
        )
    if not 0 <= start_len <= num_prompt_tokens:
        raise CaptureError(
            f"sample {sample_id}: routed_experts_start_len {start_len} is outside "
            f"[0, {num_prompt_tokens}]; send a start within the prompt"
        )
    num_rows = max(0, num_prompt_tokens + num_new_tokens - 1 - start_len)
    try:
        raw = pybase64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise CaptureError(
            f"sample {sample_id}: routed_experts is not base64 ({error}); the response was "
            "truncated or rewritten on its way from the SGLang server"
        ) from error
    expected = num_rows * spec.num_hidden_layers * spec.top_k * 4
    if len(raw) != expected:
        raise CaptureError(
            f"sample {sample_id}: routed_experts holds {len(raw)} bytes, expected {expected} "
            f"({num_rows} rows x {spec.num_hidden_layers} layers x top-{spec.top_k} x 4 bytes; "
            f"prompt {num_prompt_tokens} + new {num_new_tokens} - 1 - start_len {start_len}); "
            "check num_hidden_layers and top_k against the served model, and start_len against "
            "the request"
        )
    return np.frombuffer(raw, dtype="<i4").reshape(num_rows, spec.num_hidden_layers, spec.top_k)


def compact(
    routed: NDArray[np.integer], spec: CaptureSpec, sample_id: str
) -> NDArray[np.unsignedinteger]:
    """Keep the MoE layers of a capture in the smallest unsigned type that holds the ids.

    routed: any integer type that can hold every id, `[row, num_hidden_layers, top_k]`.
    Returns uint8 (E <= 256), else uint16 or uint32, `[row, L, top_k]`: the one copy that is kept,
    rows x L x top_k bytes for E <= 256.
    Raises CaptureError naming sample, layer and row for an id outside [0, E) or an id repeated
    inside one token's top-k, and naming the sample for a wrong shape or a type too narrow for E
    (whose ids have wrapped around).
    """
    array = np.asarray(routed)
    if array.dtype.kind not in "iu":
        raise CaptureError(
            f"sample {sample_id}: routed experts have type {array.dtype}, expected an integer type"
        )
    if array.ndim != 3 or array.shape[1:] != (spec.num_hidden_layers, spec.top_k):
        raise CaptureError(
            f"sample {sample_id}: routed experts have shape {array.shape}, expected "
            f"[rows, {spec.num_hidden_layers}, {spec.top_k}]"
        )
    if np.iinfo(array.dtype).max < spec.num_experts - 1:
        raise CaptureError(
            f"sample {sample_id}: type {array.dtype} cannot hold the ids of "
            f"{spec.num_experts} experts, so ids may have wrapped; keep routed experts in a type "
            f"that holds {spec.num_experts - 1}"
        )
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    narrow = np.min_scalar_type(spec.num_experts - 1)
    out = np.empty((array.shape[0], spec.num_moe_layers, spec.top_k), narrow)
    layers = np.array(spec.moe_layers, np.int64)
    fault, row, layer, value = _compact(array, layers, spec.num_experts, out)
    if fault == _OUT_OF_RANGE:
        raise CaptureError(
            f"sample {sample_id}: layer {layer}, row {row}: expert id {value} is outside "
            f"[0, {spec.num_experts}); check num_experts, and that the engine reports logical ids"
        )
    if fault == _REPEATED:
        raise CaptureError(
            f"sample {sample_id}: layer {layer}, row {row}: expert id {value} appears twice in "
            f"one token's top-{spec.top_k}; check that moe_layers lists no dense layer"
        )
    return out


@njit(cache=True, nogil=True)
def _compact(routed, layers, num_experts, out):  # type: ignore[no-untyped-def]
    """Narrow and check in one pass; returns (fault, row, hidden layer, id) of the first fault."""
    num_rows, top_k = routed.shape[0], routed.shape[2]
    last_seen = np.full(num_experts, -1, np.int64)
    token = 0
    for row in range(num_rows):
        for slot in range(layers.size):
            layer = layers[slot]
            for k in range(top_k):
                expert = np.int64(routed[row, layer, k])
                if expert < 0 or expert >= num_experts:
                    return _OUT_OF_RANGE, row, layer, expert
                if last_seen[expert] == token:
                    return _REPEATED, row, layer, expert
                last_seen[expert] = token
                out[row, slot, k] = expert
            token += 1
    return _OK, 0, 0, 0


def _compact_numpy(
    routed: NDArray[np.integer],
    layers: NDArray[np.int64],
    num_experts: int,
    out: NDArray[np.unsignedinteger],
) -> tuple[int, int, int, int]:
    """Plain twin of `_compact`: the same first fault in (row, layer, k) order, the same output."""
    chosen = routed[:, layers].astype(np.int64)
    outside = (chosen < 0) | (chosen >= num_experts)
    top_k = chosen.shape[2]
    earlier = np.tril(np.ones((top_k, top_k), bool), -1)
    repeated = ((chosen[..., :, None] == chosen[..., None, :]) & earlier).any(-1)
    faults = np.argwhere(outside | repeated)
    if len(faults):
        row, slot, k = (int(i) for i in faults[0])
        kind = _OUT_OF_RANGE if outside[row, slot, k] else _REPEATED
        return kind, row, int(layers[slot]), int(chosen[row, slot, k])
    out[:] = chosen
    return _OK, 0, 0, 0

"""One cell as Megatron eats it: whole trajectories packed back to back (thd)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingTrajectory:
    """What training needs of one trajectory of t tokens.

    tokens: int64 `[t]`. routed: logical expert ids `[layer, t-1, top_k]`, row i for position i, or
    None without a capture of every position. counts: int64 `[layer, expert]`, the captured demand.
    targets: per-position tensors `[t-1]` that the loss reads; position i predicts token i+1.
    """

    tokens: torch.Tensor
    routed: torch.Tensor | None
    counts: torch.Tensor | None
    targets: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """The packed cell of one row on one DP slot.

    tokens, position_ids, labels: `[1, T]`; routed `[layer, T, top_k]`; counts `[layer, expert]` of
    real positions; targets: name -> `[T]`; T = sum of t-1 over the cell (positions 0..t-2 are fed)
    plus `num_padding` positions at the end, a sequence of their own with zero targets. `routed`
    and `counts` are None where a trajectory has no capture: the router then chooses.
    """

    row: int
    tokens: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    packed: PackedSeqParams
    routed: torch.Tensor | None
    counts: torch.Tensor | None
    targets: dict[str, torch.Tensor]
    num_padding: int = 0

    @property
    def num_positions(self) -> int:
        """Positions fed to the model, padding excluded."""
        return self.tokens.size(1) - self.num_padding


def pack(
    row: int, trajectories: Sequence[TrainingTrajectory], *, padding_multiple: int = 1
) -> MicroBatch:
    """Pack whole trajectories into one micro-batch; raises ValueError for an empty cell.

    padding_multiple: T is rounded up to it (sequence parallelism needs the TP size). Padding
    replays the first top_k experts: any valid ids do, since its targets are zero.
    """
    usable = [t for t in trajectories if t.tokens.numel() > 1]
    if not usable:
        raise ValueError(f"row {row} has no position to train on: every cell needs a trajectory")
    lengths = [t.tokens.numel() - 1 for t in usable]
    num_padding = -sum(lengths) % padding_multiple
    if num_padding:
        usable = [*usable, _padding_like(usable[0], num_padding)]
        lengths.append(num_padding)
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
    captured = all(t.routed is not None for t in usable)
    real = usable[:-1] if num_padding else usable
    return MicroBatch(
        row=row,
        tokens=torch.cat([t.tokens[:-1] for t in usable])[None],
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        labels=torch.cat([t.tokens[1:] for t in usable])[None],
        packed=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        ),
        routed=torch.cat([t.routed for t in usable], dim=1) if captured else None,
        counts=torch.stack([t.counts for t in real]).sum(dim=0) if captured else None,
        targets={n: torch.cat([t.targets[n] for t in usable]) for n in usable[0].targets},
        num_padding=num_padding,
    )


def _padding_like(trajectory: TrainingTrajectory, num_padding: int) -> TrainingTrajectory:
    routed = trajectory.routed
    if routed is not None:
        routed = torch.arange(routed.size(2)).expand(routed.size(0), num_padding, -1)
    return TrainingTrajectory(
        tokens=torch.zeros(num_padding + 1, dtype=torch.int64),
        routed=routed,
        counts=trajectory.counts,
        targets={
            name: torch.zeros(num_padding, dtype=value.dtype)
            for name, value in trajectory.targets.items()
        },
    )

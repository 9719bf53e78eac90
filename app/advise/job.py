"""The job that is advised on: its sizes, its topology, and the sizes next to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSize:
    """Parallel sizes as slime's flags give them; None where the source must say."""

    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp: int | None = None
    """Data-parallel ranks without CP: the DP slots."""
    capacity: int | None = None
    """Tokens of a cell: max_tokens_per_gpu x CP."""
    ranks_per_node: int | None = None

    def completed(self, source: str, known: Topology | None) -> JobSize:
        """With every size known: from the preset's topology, TP, PP and CP else 1.

        Raises ValueError naming the flags that are missing.
        """
        if known is not None:
            mine = {name: getattr(self, name) for name in ("tp", "pp", "cp", "ranks_per_node")}
            filled = {n: v if v is not None else getattr(known, n) for n, v in mine.items()}
            return JobSize(
                **filled,
                ep=self.ep or known.num_ep_ranks,
                dp=self.dp or known.num_dp_slots,
                capacity=self.capacity or known.capacity,
            )
        missing = [f"--{name}" for name in ("ep", "dp", "capacity") if getattr(self, name) is None]
        if missing:
            raise ValueError(
                f"{', '.join(missing)}: missing; {source} does not say for which job it is "
                "planned, give --ep, --dp and --capacity (and --tp, --pp, --cp above 1)"
            )
        return replace(self, tp=self.tp or 1, pp=self.pp or 1, cp=self.cp or 1)

    @property
    def ranks_of_slot(self) -> int:
        """TP x CP: GPUs of one stage that share a DP slot's dense work."""
        return self.tp * self.cp

    @property
    def num_gpus(self) -> int:
        """All GPUs of the training job."""
        return self.ranks_of_slot * self.dp * self.pp

    @property
    def words(self) -> str:
        """The sizes for people."""
        return (
            f"TP {self.tp}, PP {self.pp}, CP {self.cp}, EP {self.ep}, DP {self.dp}, C "
            f"{self.capacity:,} tokens; {self.num_gpus} GPUs"
        )

    def topology(self, num_experts: int) -> Topology:
        """The planner's view: EP groups are neighbours in Megatron's rank order, ETP is 1.

        Raises ValueError naming sizes that do not fit together.
        """
        if num_experts % self.ep:
            raise ValueError(f"--ep: got {self.ep}, which does not divide {num_experts} experts")
        stage = self.ranks_of_slot * self.dp
        if stage % self.ep:
            raise ValueError(
                f"--ep: got {self.ep}, which does not divide the {stage} ranks of a pipeline stage "
                f"(TP {self.tp} x CP {self.cp} x DP {self.dp})"
            )
        groups_of_slot, rest = divmod(self.ranks_of_slot, self.ep)
        if groups_of_slot == 0:
            slots_of_group, rest = divmod(self.ep, self.ranks_of_slot)
        if rest:
            raise ValueError(
                f"--ep: got {self.ep} beside TP x CP = {self.ranks_of_slot}; one must be a "
                "multiple of the other, so that EP groups hold whole slots or parts of one"
            )
        return Topology.uniform(
            dp=self.dp,
            ep=self.ep,
            edp=self.dp if groups_of_slot else self.dp // slots_of_group,
            capacity=self.capacity,
            pp=self.pp,
            tp=self.tp,
            cp=self.cp,
            ep_groups_per_shard=max(1, groups_of_slot),
            ranks_per_node=self.ranks_per_node
            if (self.ranks_per_node or self.ep) < self.ep
            else None,
        )

    def neighbours(self) -> Iterator[tuple[str, JobSize]]:
        """(name, sizes) of choices on as many GPUs: one size doubled or halved, DP against it."""
        yield f"EP {2 * self.ep}", replace(self, ep=2 * self.ep)
        if self.ep % 2 == 0:
            yield f"EP {self.ep // 2}", replace(self, ep=self.ep // 2)
        yield f"C {2 * self.capacity:,}", replace(self, capacity=2 * self.capacity)
        if self.capacity % 2 == 0:
            yield f"C {self.capacity // 2:,}", replace(self, capacity=self.capacity // 2)
        for name in ("tp", "pp", "cp"):
            size = getattr(self, name)
            per_cp = 2 if name == "cp" else 1  # tokens per GPU stay
            if size % 2 == 0 and self.capacity % per_cp == 0:
                yield (
                    f"{name.upper()} {size // 2}, DP {2 * self.dp}",
                    replace(
                        self,
                        **{name: size // 2},
                        dp=2 * self.dp,
                        capacity=self.capacity // per_cp,
                    ),
                )
            if self.dp % 2 == 0:
                yield (
                    f"{name.upper()} {2 * size}, DP {self.dp // 2}",
                    replace(
                        self, **{name: 2 * size}, dp=self.dp // 2, capacity=self.capacity * per_cp
                    ),
                )

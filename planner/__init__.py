"""Pure planning decisions: where experts live and which trajectories share a row.

Reads in the order of the paper: `window` and `topology` (what is given), `placement` and
`placing` (Section 3.2), `packing`, `row_count` and the row files (Section 3.1), `cost` and
`score` (Section 3.4), the searches (Section 4.1), `policy` (one call for each decision) and `plan`
(what training executes).

Constants where the paper gives none, each beside its code:

| constant | value | file |
| --- | --- | --- |
| temperatures, in mean row costs | 1.1e-3 (1.5e-3 for long runs) to 1.7e-4 | pair_anneal |
| moves, single-item cells | relocate, cells, subset .03 each, rest swaps; reach 120 | pair_anneal |
| moves, larger cells | relocate .05, cells .05, subset .25, rest swaps; reach 25 | pair_anneal |
| weight of sum_g U_g beside max_g U_g | 0.7 | pair_anneal |
| pairing window and token reward | 64 and 0.40, 32 and 0.33 of a mean row cost | pair_anneal |
| Population-SA temperatures | 1.1e-3 to 1.1e-4 mean row costs, 2 levels | population_annealing |
| Population-SA proposals | relocate .2, 70% targeted by a tournament of 3 | population_annealing |
| seeding trials, choices, shuffle width | 12, 3, 2 to 16 places | diverse_seeds |
| cyclic repair: orders, chains finished | 200, 64 | few_moves |
| backward share of a row's cost | 2/3 | pipeline_sim |
"""

from contextlib import suppress as _suppress
from pathlib import Path as _Path


def _drop_stale_kernels() -> None:
    """Deletes cached kernels older than any source file here.

    numba checks only the file of the outermost kernel, not the files that it calls into.
    """
    here = _Path(__file__).parent
    newest = max(source.stat().st_mtime for source in here.rglob("*.py"))
    for index in here.rglob("__pycache__/*.nbi"):
        with _suppress(OSError):
            if index.stat().st_mtime < newest:
                index.unlink()


_drop_stale_kernels()

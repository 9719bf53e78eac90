"""`routepack verify --matrix`: one line a layout, then the refusals and negative controls."""

from __future__ import annotations

from app.config import RanksConfig, RunConfig
from app.local.ranks import run_ranks
from app.matrix.layouts import RUN, StateLayout
from app.matrix.prove import Proof, prove_rank
from app.matrix.refusals import refusal_messages
from app.matrix.structures import STRUCTURES, prove_structure_rank
from app.results.figures import write_figures
from app.results.progress import print_table, track


def verify_matrix(json_path: str | None = None) -> bool:
    """Prove every layout on real ranks, print and write the figures; return whether all passed."""
    proofs: list[Proof] = []
    jobs = [(prove_rank, RUN, 2), (prove_rank, RUN, 4)]
    jobs += [(prove_structure_rank, STRUCTURES, 2), (prove_structure_rank, STRUCTURES, 4)]
    for function, shapes, world in track(jobs, "layouts"):
        proofs += run_ranks(function, ranks(world), of_world(shapes, world))
    refusals = run_ranks(refusal_messages, ranks(2))
    rows = [
        [
            proof.name,
            proof.kind,
            str(proof.num_tensors),
            str(proof.num_different),
            f"{proof.loss_difference:.1e}" if proof.kind == "run" else "-",
            f"{proof.moved_mb:.2f}",
            f"{proof.seconds:.1f}",
            "noticed" if proof.noticed else "MISSED",
        ]
        for proof in proofs
    ]
    rows += [
        [name, "refused" if text else "NOT REFUSED"] + [""] * 6 for name, text in refusals.items()
    ]
    header = ("layout", "kind", "tensors", "different", "loss diff", "moved MB", "s", "control")
    print_table("Experts moved at random, compared by logical id bit for bit", header, rows)
    figures = {
        "verify.layouts_run": float(sum(p.kind == "run" for p in proofs)),
        "verify.layouts_structure_tested": float(sum(p.kind == "structure" for p in proofs)),
        "verify.layouts_exact": float(sum(p.exact for p in proofs)),
        "verify.layouts_refused": float(sum(bool(text) for text in refusals.values())),
        "verify.negative_controls": float(len(proofs)),
        "verify.negative_controls_failed": float(sum(p.noticed for p in proofs)),
    }
    write_figures(json_path, "verify", figures, details={"refusals": refusals})
    return all(p.exact and p.noticed for p in proofs) and all(refusals.values())


def ranks(world: int) -> RunConfig:
    """A configuration of nothing but `world` ranks; each layout makes its own process groups."""
    return RunConfig(name="matrix", ranks=RanksConfig(world=world, ep=2))


def of_world(shapes: tuple[StateLayout, ...], world: int) -> tuple[StateLayout, ...]:
    """The layouts that need `world` ranks."""
    return tuple(shape for shape in shapes if shape.world == world)

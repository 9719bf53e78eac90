"""`routepack verify --matrix`: one line a layout, then the refusals and negative controls."""

from __future__ import annotations

from app.config import RanksConfig, RunConfig
from app.local.ranks import run_ranks
from app.matrix.layouts import RUN, StateLayout
from app.matrix.prove import Proof, prove_rank
from app.matrix.refusals import refusal_messages
from app.results.figures import write_figures
from app.results.progress import print_table, track


def verify_matrix(json_path: str | None = None) -> bool:
    """Prove every layout on real ranks, print and write the figures; return whether all passed."""
    proofs: list[Proof] = []
    for world in track(sorted({shape.world for shape in RUN}), "worlds"):
        proofs += run_ranks(prove_rank, ranks(world), of_world(RUN, world))
    refusals = run_ranks(refusal_messages, ranks(2))
    rows = [
        [
            proof.name,
            "run",
            str(proof.num_tensors),
            str(proof.num_different),
            f"{proof.loss_difference:.1e}",
            f"{proof.moved_mb:.2f}",
            f"{proof.seconds:.1f}",
            "noticed" if proof.noticed else "MISSED",
            {None: "-", True: "noticed", False: "MISSED"}[proof.forgotten],
        ]
        for proof in proofs
    ]
    rows += [
        [name, "refused" if text else "NOT REFUSED"] + [""] * 7 for name, text in refusals.items()
    ]
    header = (
        "layout",
        "kind",
        "tensors",
        "different",
        "loss diff",
        "moved MB",
        "s",
        "control",
        "forgotten",
    )
    print_table("Experts moved at random, compared by logical id bit for bit", header, rows)
    controls = [p.noticed for p in proofs]
    controls += [p.forgotten for p in proofs if p.forgotten is not None]
    figures = {
        "verify.layouts_run": float(len(proofs)),
        "verify.layouts_exact": float(sum(p.exact for p in proofs)),
        "verify.layouts_refused": float(sum(bool(text) for text in refusals.values())),
        "verify.negative_controls": float(len(controls)),
        "verify.negative_controls_failed": float(sum(controls)),
    }
    write_figures(json_path, "verify", figures, details={"refusals": refusals})
    return all(p.exact for p in proofs) and all(controls) and all(refusals.values())


def ranks(world: int) -> RunConfig:
    """A configuration of nothing but `world` ranks; each layout makes its own process groups."""
    return RunConfig(name="matrix", ranks=RanksConfig(world=world, ep=min(world, 2)))


def of_world(shapes: tuple[StateLayout, ...], world: int) -> tuple[StateLayout, ...]:
    """The layouts that need `world` ranks."""
    return tuple(shape for shape in shapes if shape.world == world)

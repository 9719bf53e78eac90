"""The area of a cluster job: slime, Ray, its SGLang, and a Megatron that carries slime's patch."""

from __future__ import annotations

from pathlib import Path

from app.doctor.check import Check, package_folder, release, satisfies, version_of

REMEDY = (
    "use slime's Docker image, or put its repository on PYTHONPATH; the `slime` on PyPI is another "
    "project"
)
PATCH_REMEDY = "in slime's repository: git apply docker/patch/latest/megatron.patch to Megatron-LM"
PATCH_MARK = "disable_param_buffers_cpu_backup"
"""A name that slime's megatron.patch adds to core/distributed/param_and_grad_buffer.py."""
MIN_SGLANG = (0, 5, 15)
"""Returns routed experts by the wire contract that rollout_hooks reads; slime pins it."""


def check_slime() -> list[Check]:
    """slime, Ray, its SGLang, and a Megatron that carries slime's patch."""
    checks = [_slime(), *(_importable(name) for name in ("ray", "sglang"))]
    folder = package_folder("megatron.core")
    patched = _has_mark(folder)
    checks.append(
        Check(
            name="Megatron with slime's patch",
            found="not installed" if folder is None else ("patched" if patched else "unpatched"),
            wanted="patched",
            passed=patched,
            remedy=PATCH_REMEDY,
        )
    )
    numpy = version_of("numpy")
    checks.append(
        Check(
            name="numpy for slime's Megatron",
            found=numpy or "not installed",
            wanted="< 2",
            passed=numpy is not None and release(numpy) < (2,),
            remedy="pip install 'numpy>=1.26,<2' in slime's environment (not in the local demo's)",
        )
    )
    return checks


def _slime() -> Check:
    folder = package_folder("slime")
    real = folder is not None and (folder / "utils" / "dp_schedule.py").is_file()
    found = "not installed" if folder is None else (str(folder) if real else f"another: {folder}")
    return Check(
        name="slime",
        found=found,
        wanted="THUDM/slime with utils/dp_schedule.py",
        passed=real,
        remedy=REMEDY,
    )


def _importable(name: str) -> Check:
    found = version_of(name)
    wanted = f">= {'.'.join(map(str, MIN_SGLANG))}" if name == "sglang" else "any"
    return Check(
        name=name,
        found=found or "not installed",
        wanted=wanted,
        passed=found is not None and satisfies(found, wanted),
        remedy="comes with slime's Docker image" if name == "sglang" else f"pip install {name}",
    )


def _has_mark(folder: Path | None) -> bool:
    buffers = None if folder is None else folder / "distributed" / "param_and_grad_buffer.py"
    return buffers is not None and buffers.is_file() and PATCH_MARK in buffers.read_text()

"""The area of DeepEP: a GPU and its package."""

from __future__ import annotations

from app.doctor.check import Check, has_gpu, package_folder, version_of


def check_deepep() -> list[Check]:
    """A GPU and the deep_ep package."""
    folder = package_folder("deep_ep")
    return [
        Check(
            name="NVIDIA GPU",
            found="found" if has_gpu() else "none",
            wanted="Hopper or newer",
            passed=has_gpu(),
            remedy="DeepEP has no CPU form; the alltoall dispatcher works everywhere",
        ),
        Check(
            name="deep_ep",
            found=version_of("deep_ep") or ("found" if folder else "not installed"),
            wanted="any",
            passed=folder is not None,
            remedy="build it from github.com/deepseek-ai/DeepEP, or use slime's Docker image",
        ),
    ]

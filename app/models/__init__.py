"""Model families that slime does not know yet, as plug-ins to its tables."""

from __future__ import annotations


def register_models() -> None:
    """Add every family of this package to slime's loader and exporter tables; safe to repeat."""
    from app.models.bailing_moe_v2 import register

    register()

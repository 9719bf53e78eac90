"""What every section of a configuration is: strict, frozen, documented field by field."""

from __future__ import annotations

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True)


def section(cls):
    """A frozen, keyword-only dataclass that refuses unknown fields and wrong values by name."""
    return dataclass(config=_STRICT, frozen=True, kw_only=True)(cls)


def explain(error: dict, listed_in: str) -> str:
    """One line for an error of pydantic: field, value, what is expected; where names are listed."""
    field = ".".join(str(part) for part in error["loc"]) or "(whole file)"
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"  {field}: no such field; {listed_in}"
    return f"  {field}: got {error['input']!r}: {error['msg'].removeprefix('Value error, ')}"

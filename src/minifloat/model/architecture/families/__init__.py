"""The table of families, and the lookup of a config's row.

To add a family, add a row to the file of its kind, or a file of its own if its row needs tables; each test of
`tests/architecture/test_families.py` then covers it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from minifloat.model.architecture.families import dense, encoders, hybrid, mixtures, multimodal
from minifloat.model.architecture.family import GENERAL, Family

#: All rows.
FAMILIES: tuple[Family, ...] = (
    *dense.FAMILIES,
    *mixtures.FAMILIES,
    *hybrid.FAMILIES,
    *multimodal.FAMILIES,
    *encoders.FAMILIES,
)
_BY_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}


def unknown_family_notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a sentence for the user if there is no row for a model; else nothing."""
    family = family_of(config)
    if family.known:
        return ()
    return (
        f"minifloat has no description of model_type {family.name!r}: which tensors are quantized, what servers fuse "
        "and how experts are stored follow from the general rules. Check the table of tensors.",
    )


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the description of a model.

    The row of the config's own ``model_type`` decides. A multimodal model without a row takes the row of its
    ``text_config``, except for the names of modules, which the outer model changes. Any other model gets the general
    rules under the name of its ``model_type``.
    """
    row = _BY_TYPE.get(str(config.get("model_type")))
    if row is not None:
        return row
    nested = config.get("text_config")
    row = _BY_TYPE.get(str(nested.get("model_type"))) if isinstance(nested, dict) else None
    if row is not None:
        return replace(row, renames=None)
    return replace(GENERAL, name=str(config.get("model_type", GENERAL.name)))

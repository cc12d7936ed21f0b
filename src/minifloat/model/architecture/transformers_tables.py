"""Facts from transformers' tables of weight conversions, for families without a row that states them.

transformers, which imports torch, is imported when a function is called.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def merges_single_experts(model_types: Iterable[str]) -> bool:
    """Return whether transformers stacks single experts of a checkpoint for one of these values of ``model_type``.

    False also where transformers does not know the model type, or has no tables (before 5).
    """
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.core_model_loading import MergeModulelist
    except ImportError:
        return False
    mapping_of: Any = get_checkpoint_conversion_mapping
    conversions = (entry for name in model_types for entry in mapping_of(name) or ())
    return any(
        isinstance(operation, MergeModulelist)
        for entry in conversions
        for operation in getattr(entry, "operations", ())
    )

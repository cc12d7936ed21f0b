"""The rows of the matrix."""

from __future__ import annotations

from small_models import Case, model_classes


def all_cases() -> list[Case]:
    """Return a case for each model type of the installed transformers that answers text, then the variants."""
    return [Case(name, name) for name in sorted(model_classes())]

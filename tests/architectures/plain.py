"""Plain transformers: the answers of a checkpoint without minifloat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from small_models import Case
from torch import Tensor

#: Two prompts; none of their tokens is special.
PROMPTS = (tuple(range(40, 64)), tuple((7 * index) % 200 + 20 for index in range(32)))
NEW_TOKENS = 6


class LoadedWrongly(Exception):
    """transformers loaded a checkpoint, but drew some weights at random or left some of the file's out."""


def load_plain(case: Case, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Load a checkpoint by the class that wrote the source."""
    cls = getattr(transformers, case.architecture)
    model, info = cls.from_pretrained(folder, dtype=dtype, output_loading_info=True, local_files_only=True, **options)
    problems = {key: sorted(map(str, value)) for key, value in info.items() if value}
    if problems:
        key, names = next(iter(problems.items()))
        raise LoadedWrongly(f"{len(names)} {key.replace('_', ' ')}: {names[0]}")
    return model.eval()


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    """Return the logits of all positions of both prompts, ``[T, V]`` in float32."""
    outputs = [model(input_ids=torch.tensor([prompt])).logits[0] for prompt in PROMPTS]
    return torch.cat(outputs).float()


@torch.no_grad()
def logits_before(model: Any, texts: list[list[int]]) -> list[Tensor]:
    """Return, for each prompt, the logits before each token of the text behind it, without a cache."""
    inputs = [torch.tensor([[*prompt, *text[:-1]]]) for prompt, text in zip(PROMPTS, texts, strict=True)]
    return [model(input_ids=ids, use_cache=False).logits[0, -NEW_TOKENS:].float() for ids in inputs]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of the expected logits, each row without its mean."""
    if found.shape != expected.shape or not found.isfinite().all():
        return float("inf")
    centered = expected - expected.mean(-1, keepdim=True)
    difference = found - expected
    return float((difference - difference.mean(-1, keepdim=True)).norm() / centered.norm())

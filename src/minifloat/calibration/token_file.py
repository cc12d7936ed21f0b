"""The file that keeps the text that a model wrote: token ids, and what decided them.

Sampling costs a forward pass per token, and its result may depend on the machine: kernels of another instruction set
round otherwise, and a draw near the border of two tokens then takes the other one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minifloat._version import __version__
from minifloat.calibration.stats import ModelIdentity
from minifloat.checkpoint.array_file import ArrayContent, ArrayFormat, numpy_arrays, read_arrays, write_arrays
from minifloat.checkpoint.schema import any_object, exact_fields, integer, map_of, or_null, text
from minifloat.errors import StatsError

_TENSOR = "tokens"
_CURE = "delete the file, and the model writes the text again"


@dataclass(frozen=True)
class TextSettings:
    """What decides the text that a model writes."""

    model: ModelIdentity
    seed: int
    seq_len: int
    tokenizer: str | None  # SHA-256 of the tokenizer's definition; None: the model has no tokenizer
    template: str | None  # SHA-256 of the chat template; None: it has none

    def differences(self, other: TextSettings) -> list[str]:
        """Return the differences in words; an empty list for the same text."""
        names = {"seed": "the seed", "seq_len": "the tokens of a sequence", "tokenizer": "the tokenizer"}
        names["template"] = "the chat template"
        found = self.model.differences(other.model)
        return found + [name for key, name in names.items() if getattr(self, key) != getattr(other, key)]


@dataclass(frozen=True)
class WrittenText:
    """Text that a model wrote."""

    settings: TextSettings
    tokens: npt.NDArray[np.int32]  # int32 ``[sequences, seq_len]``
    weights: Mapping[str, str]
    chat: Mapping[str, Any] = field(default_factory=dict)
    version: str = __version__


_FORMAT = ArrayFormat(
    "text that a model wrote",
    2,
    exact_fields(
        {
            "settings": exact_fields(
                {
                    "model": exact_fields({field.name: text for field in fields(ModelIdentity)}),
                    "seed": integer(-(2**63), 2**63),
                    "seq_len": integer(1),
                    "tokenizer": or_null(text),
                    "template": or_null(text),
                }
            ),
            "weights": map_of(text),
            "chat": any_object,
            "minifloat": text,
        }
    ),
    _CURE,
    {_TENSOR: ("I32", 2)},
)


def write_token_file(written: WrittenText, path: Path) -> None:
    """Write the file in one step."""
    record = {
        "settings": asdict(written.settings),
        "weights": dict(written.weights),
        "chat": dict(written.chat),
        "minifloat": written.version,
    }
    write_arrays(path, _FORMAT, ArrayContent(record, numpy_arrays({_TENSOR: written.tokens.astype(np.int32)})))


def read_token_file(path: Path) -> WrittenText | None:
    """Return the text in a file, or None if there is no such file."""
    try:
        file = read_arrays(path, _FORMAT)
    except FileNotFoundError:
        return None
    record, tokens = file.record, file.array(_TENSOR)
    stated = record["settings"]
    settings = TextSettings(**{**stated, "model": ModelIdentity(**stated["model"])})
    if tokens.shape[1] != settings.seq_len:
        raise StatsError(path, f"sequences of {tokens.shape[1]} tokens, announced as {settings.seq_len}; {_CURE}")
    if tokens.size and tokens.min() < 0:
        raise StatsError(path, f"a token id is {tokens.min()}; {_CURE}")
    return WrittenText(settings, tokens, dict(record["weights"]), dict(record["chat"]), record["minifloat"])

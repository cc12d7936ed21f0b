"""The file that keeps the text that a model wrote: token ids, and what decided them.

Sampling costs a forward pass per token, and its result may depend on the machine: kernels of another instruction set
round otherwise, and a draw near the border of two tokens then takes the other one. The text is therefore kept, so that
a resumed run, and a run for another scheme, use the same tokens.

One safetensors file: the tensor ``tokens``, int32 ``[sequences, seq_len]``, and JSON in the metadata with a SHA-256
over both. A file with fewer sequences than needed is the beginning of a longer text: sequence i depends only on i and
the settings. The content of a file is not trusted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minifloat._version import __version__
from minifloat.calibration.identity import ModelIdentity
from minifloat.checkpoint.files import byte_view, open_regular, parse_object, read_exactly, written_whole
from minifloat.checkpoint.header import encode_header, read_header, strict_json
from minifloat.checkpoint.tensors import OutputTensor, TensorInfo
from minifloat.errors import StatsError

_FORMAT = "minifloat own text"
_VERSION = "1"
_TENSOR = "tokens"
_DTYPE: np.dtype[Any] = np.dtype("<i4")
_CURE = "delete the file, and the model writes the text again"


@dataclass(frozen=True)
class TextSettings:
    """What decides the text that a model writes.

    Attributes:
        tokenizer: SHA-256 of the tokenizer's definition; None: the model has no tokenizer.
        template: SHA-256 of the chat template; None: it has none.
    """

    model: ModelIdentity
    seed: int
    seq_len: int
    tokenizer: str | None
    template: str | None

    def differences(self, other: TextSettings) -> list[str]:
        """Return the differences in words; an empty list for the same text."""
        names = {"seed": "the seed", "seq_len": "the tokens of a sequence", "tokenizer": "the tokenizer"}
        names["template"] = "the chat template"
        found = self.model.differences(other.model)
        return found + [name for key, name in names.items() if getattr(self, key) != getattr(other, key)]


@dataclass(frozen=True)
class WrittenText:
    """Text that a model wrote.

    Attributes:
        tokens: int32 ``[sequences, seq_len]``.
    """

    settings: TextSettings
    tokens: npt.NDArray[np.int32]
    weights: Mapping[str, str]
    chat: Mapping[str, Any] = field(default_factory=dict)
    version: str = __version__


def write_token_file(text: WrittenText, path: Path) -> None:
    """Write the file in one step: write a temporary file beside it, sync the file, and rename it."""
    content = json.dumps(
        {
            "settings": asdict(text.settings),
            "weights": dict(text.weights),
            "chat": dict(text.chat),
            "minifloat": text.version,
        },
        sort_keys=True,
    )
    tokens = np.ascontiguousarray(text.tokens, _DTYPE)
    metadata = {"format": _FORMAT, "version": _VERSION, "content": content, "sha256": _digest(content, tokens)}
    header, _ = encode_header([OutputTensor(_TENSOR, "I32", tokens.shape)], metadata)
    with written_whole(path) as file:
        file.write(header)
        file.write(byte_view(tokens))


def read_token_file(path: Path) -> WrittenText | None:
    """Return the text in a file, or None if there is no such file."""
    try:
        header, _ = read_header(path)
    except FileNotFoundError:
        return None
    metadata = header.metadata
    if metadata.get("format") != _FORMAT or "content" not in metadata:
        raise StatsError(path, "a safetensors file, but not a text that a model wrote; choose another name")
    if metadata.get("version") != _VERSION:
        version = metadata.get("version")
        raise StatsError(path, f"version {version!r}, this minifloat reads version '{_VERSION}'; {_CURE}")
    tokens = _read_tokens(path, header.tensors)
    if metadata.get("sha256") != _digest(metadata["content"], tokens):
        raise StatsError(path, f"damaged: its content does not match its SHA-256; {_CURE}")
    content = parse_object(metadata["content"].encode(), path, StatsError, strict_json)
    try:
        return _decode(content, tokens)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StatsError(path, f"not valid: {type(error).__name__}: {error}; {_CURE}") from None


def _read_tokens(path: Path, infos: Sequence[TensorInfo]) -> npt.NDArray[np.int32]:
    """Return the tensor of a file, read-only."""
    declared = [(info.name, info.dtype, len(info.shape)) for info in infos]
    if declared != [(_TENSOR, "I32", 2)]:
        raise StatsError(path, f"expected one tensor, {_TENSOR} I32 with two dimensions, found {declared}; {_CURE}")
    (info,) = infos
    data = bytearray(info.nbytes)
    descriptor, _ = open_regular(path)
    try:
        read_exactly(descriptor, memoryview(data), info.offset, path)
    finally:
        os.close(descriptor)
    return np.frombuffer(bytes(data), _DTYPE).reshape(info.shape)


def _decode(content: Mapping[str, Any], tokens: npt.NDArray[np.int32]) -> WrittenText:
    settings = dict(content["settings"])
    settings["model"] = ModelIdentity(**settings["model"])
    decoded = TextSettings(**settings)
    if tokens.shape[1] != decoded.seq_len:
        raise ValueError(f"sequences of {tokens.shape[1]} tokens, announced as {decoded.seq_len}")
    if tokens.size and tokens.min() < 0:
        raise ValueError(f"a token id is {tokens.min()}")
    return WrittenText(decoded, tokens, dict(content["weights"]), dict(content["chat"]), str(content["minifloat"]))


def _digest(content: str, tokens: npt.NDArray[np.int32]) -> str:
    """Return the SHA-256 of the JSON, and of the shape and bytes of the tokens."""
    digest = hashlib.sha256(f"{content}\0{list(tokens.shape)}\0".encode())
    digest.update(byte_view(tokens))
    return digest.hexdigest()

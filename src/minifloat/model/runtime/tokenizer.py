"""The tokenizer of a model folder: by transformers, which is imported when a function needs it, or without it."""

from __future__ import annotations

import fnmatch
import functools
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.files import list_folder, refuse_irregular, resolve_folder
from minifloat.checkpoint.layout import CONFIG_FILE, is_sidecar
from minifloat.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from minifloat.model.runtime.tokenizer_files import FileTokenizer

    TextTokenizer: TypeAlias = FileTokenizer | PreTrainedTokenizerBase

_LOG = logging.getLogger(__name__)
#: Name patterns of files that only a folder with a tokenizer has.
_FILES = ("tokenizer*", "tekken.json", "spiece.model", "sentencepiece*.model", "*.tiktoken", "vocab*", "merges.txt")


def serving_tokenizer(path: str | os.PathLike[str]) -> TextTokenizer:
    """Load the tokenizer of a model folder, without transformers where that gives the same tokens."""
    from minifloat.model.runtime.tokenizer_files import read_file_tokenizer

    tokenizer = read_file_tokenizer(resolve_folder(path))
    if not isinstance(tokenizer, str):
        return tokenizer
    _LOG.info("transformers reads the tokenizer, which takes seconds, because %s", tokenizer)
    return load_tokenizer(path)


def load_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder; code in the folder is not run."""
    from transformers import AutoTokenizer

    if Path(path).is_dir():
        root = resolve_folder(path)
        names = [name for name in list_folder(root) if is_sidecar(name) or name == CONFIG_FILE]
        refuse_irregular(root, names)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # tokenizers raises bare Exception for a tokenizer.json that it cannot use
        if Path(path).is_dir() and not has_tokenizer(path):
            Checkpoint.open(path).close()  # raises if the folder is no model at all
            raise CheckpointError(
                os.fspath(path),
                "it has no tokenizer; copy tokenizer.json and tokenizer_config.json of the original model into it",
            ) from error
        reason = " ".join(str(error).split())
        raise CheckpointError(os.fspath(path), f"transformers cannot load a tokenizer from it: {reason}") from error
    return tokenizer


def has_tokenizer(path: str | os.PathLike[str]) -> bool:
    """Return whether a model folder has any file of a tokenizer, whether or not it can be loaded."""
    names = list_folder(Path(path))
    return any(fnmatch.fnmatchcase(name.lower(), pattern) for name in names for pattern in _FILES)


def token_id_tokenizer(*configs: Any) -> PreTrainedTokenizerBase:
    """Return a tokenizer for a model that has none: the text of a token is its id."""
    from tokenizers import Tokenizer, models
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    vocabulary = {str(token): token for token in range(configs[0].vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    special: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token"):
        for token in (getattr(config, f"{name}_id", None) for config in configs):
            first = token[0] if isinstance(token, list) and token else token
            if isinstance(first, int) and str(first) in vocabulary:
                special.setdefault(name, str(first))
    bos = special.get("bos_token")
    if bos is not None:
        tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, int(bos))])
    made: PreTrainedTokenizerBase = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)  # type: ignore[no-untyped-call]
    return made


def end_tokens(generation_config: Any, config: Any, tokenizer: TextTokenizer | None = None) -> frozenset[int]:
    for owner in (generation_config, config.get_text_config(decoder=True), tokenizer):
        tokens = getattr(owner, "eos_token_id", None)
        if tokens is not None:
            return frozenset(token for token in ([tokens] if isinstance(tokens, int) else tokens) if token >= 0)
    return frozenset()


def token_bytes(tokenizer: TextTokenizer, token: int, text: str) -> bytes:
    """Return the bytes of a token; those of its text where the tokenizer's alphabet is not known."""
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if len(piece) == len("<0x00>") and piece.startswith("<0x") and piece.endswith(">"):  # SentencePiece's bytes
        return bytes([int(piece[3:5], 16)])
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text.encode()
    alphabet = _byte_alphabet()
    if all(character in alphabet for character in piece):
        return bytes(alphabet[character] for character in piece)
    return text.encode()


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character by which tokenizers of GPT-2's kind write bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}

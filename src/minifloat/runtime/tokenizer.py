"""The tokenizer of a model folder, by transformers."""

from __future__ import annotations

import os

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from minifloat.errors import CheckpointError


def load_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder; code in the folder is not run.

    Raises:
        CheckpointError: If transformers finds no tokenizer, or cannot load it.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # tokenizers raises bare Exception for a tokenizer.json that it cannot use
        raise CheckpointError(os.fspath(path), f"transformers cannot load a tokenizer from it: {error}") from error
    return tokenizer

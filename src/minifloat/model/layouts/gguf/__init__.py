"""GGUF, the file of llama.cpp: weights, hyperparameters and tokenizer in one.

architectures.py  the table of architectures, and what each writes of its config
places.py         where each tensor of a checkpoint lies in a file
blocks.py         codes and scales of MXFP4 and NVFP4 in ggml's blocks
vocabulary.py     the tokenizer
reading.py        a file as the plain tensors of a checkpoint

All of them need the package gguf (extra: gguf), whose tables say what llama.cpp calls a thing.
"""

from __future__ import annotations

import importlib.util

from minifloat.errors import UsageError

NAME = "gguf"  #: of the layout, which is a file and not a folder
PLAIN = "plain"  #: layout of a source that is not quantized, in reports


def require_package() -> None:
    """Raise UsageError without the package gguf."""
    if importlib.util.find_spec("gguf") is None:
        raise UsageError("GGUF files need pip install 'minifloat[gguf]'")

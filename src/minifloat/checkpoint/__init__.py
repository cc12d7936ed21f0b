"""Checkpoints on disk: a lazy, validating reader of safetensors and a transactional, resumable writer.

The format is in `tensors`, `header` and `index`; the names of a model folder's files in `layout`; reading in `files`
and `reader`; writing in `shard` (one file), `journal`, `lock` and `writer` (the transaction). Everything is numpy and
the standard library; no module here imports torch.
"""

from minifloat.checkpoint.index import encode_index
from minifloat.checkpoint.layout import CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from minifloat.checkpoint.reader import Checkpoint
from minifloat.checkpoint.shard import ShardWriter
from minifloat.checkpoint.tensors import DTYPES, OutputTensor, TensorInfo, dtype_nbytes
from minifloat.checkpoint.writer import CheckpointWriter

__all__ = [
    "CONFIG_FILE",
    "Checkpoint",
    "CheckpointWriter",
    "DTYPES",
    "INDEX_FILE",
    "OutputTensor",
    "SINGLE_FILE",
    "ShardWriter",
    "TensorInfo",
    "dtype_nbytes",
    "encode_index",
]

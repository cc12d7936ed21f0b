"""Checkpoints on disk: a lazy, validating reader of safetensors and a transactional, resumable writer; no torch."""

from minifloat.checkpoint.header import encode_index
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

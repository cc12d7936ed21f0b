"""The identity of the model that a set of activation statistics belongs to.

The scales of one model would make another model worse without any error. The most likely confusion is between a base
model and its fine-tune, which differ only in their weights. The identity therefore holds hashes of the config, of the
tensors that the headers declare, and of a sample of the weights; it takes a few hundred small reads for a model of any
size.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from minifloat.checkpoint import Checkpoint
from minifloat.model.layouts.decoded import DecodedCheckpoint

#: Config keys that do not change what the model computes: who saved it, and how it was quantized.
_INCIDENTAL = frozenset(
    ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "quantization_config", "compression_config")
)
_SAMPLED_TENSORS = 512
_SAMPLE_BYTES = 256


@dataclass(frozen=True)
class ModelIdentity:
    """Hashes that distinguish one unquantized model from another.

    Attributes:
        weights: SHA-256 of a sample of the weights: some bytes from the middle of evenly chosen tensors.
    """

    architecture: str
    config: str
    tensors: str
    weights: str

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ModelIdentity:
        """Return the identity of an open checkpoint; a plain view has that of the quantized checkpoint below it."""
        if isinstance(checkpoint, DecodedCheckpoint):
            checkpoint = checkpoint.stored
        infos = sorted(checkpoint.tensors.values(), key=lambda info: info.name)
        declared = [[info.name, info.dtype, list(info.shape)] for info in infos]
        return cls(
            _architecture(checkpoint.config),
            _digest(_essential(checkpoint.config)),
            _digest(declared),
            _sample(checkpoint),
        )

    def differences(self, other: ModelIdentity) -> list[str]:
        """Return the differences in words; an empty list for the same model."""
        if self.architecture != other.architecture:
            return [f"the architecture ({self.architecture}, {other.architecture})"]
        names = {
            "config": "the config",
            "tensors": "the names, dtypes or shapes of the tensors",
            "weights": "the values of the weights",
        }
        return [name for key, name in names.items() if getattr(self, key) != getattr(other, key)]


def _architecture(config: dict[str, Any]) -> str:
    architectures = config.get("architectures")
    return str(architectures[0] if isinstance(architectures, list) and architectures else config.get("model_type"))


def _essential(config: Any) -> Any:
    """Return the config without incidental keys, also in nested configs."""
    if isinstance(config, dict):
        return {key: _essential(value) for key, value in config.items() if key not in _INCIDENTAL}
    return config


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _sample(checkpoint: Checkpoint) -> str:
    """Return the SHA-256 of bytes from the middle of up to `_SAMPLED_TENSORS` tensors."""
    names = sorted(checkpoint.tensors)
    digest = hashlib.sha256()
    for name in names[:: -(-len(names) // _SAMPLED_TENSORS) or 1]:
        info = checkpoint.tensors[name]
        sample = bytearray(min(_SAMPLE_BYTES, info.nbytes))
        checkpoint.read_into(info, memoryview(sample), (info.nbytes - len(sample)) // 2)
        digest.update(sample)
    return digest.hexdigest()

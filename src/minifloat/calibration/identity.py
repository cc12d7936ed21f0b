"""Which model a set of activation statistics belongs to.

Scales of one model make another wrong in silence, and the likeliest mix-up, a base model and its fine-tune, differs in
nothing but weights. So the identity holds hashes of the config, of what the headers declare, and of a sample of the
weights; reading it costs a few hundred small reads, whatever the model's size.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from minifloat.checkpoint import Checkpoint

#: Config keys that say who saved a model or what was done to it, not what it computes.
_INCIDENTAL = frozenset(
    ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "quantization_config", "compression_config")
)
_SAMPLED_TENSORS = 512
_SAMPLE_BYTES = 256


@dataclass(frozen=True)
class ModelIdentity:
    """What tells one unquantized model from another.

    Attributes:
        architecture: Class name in the config, or its model type.
        config: SHA-256 of the config, without what does not change the result (who saved it, quantization).
        tensors: SHA-256 of the names, dtypes and shapes of all tensors; how they are sharded does not matter.
        weights: SHA-256 of a sample of the weights: some bytes from the middle of evenly chosen tensors.
    """

    architecture: str
    config: str
    tensors: str
    weights: str

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ModelIdentity:
        """The identity of an open checkpoint.

        Raises:
            StorageError: The system refuses a read.
        """
        infos = sorted(checkpoint.tensors.values(), key=lambda info: info.name)
        declared = [[info.name, info.dtype, list(info.shape)] for info in infos]
        return cls(
            _architecture(checkpoint.config),
            _digest(_essential(checkpoint.config)),
            _digest(declared),
            _sample(checkpoint),
        )

    def differences(self, other: ModelIdentity) -> list[str]:
        """What they differ in, in words; empty for the same model."""
        if self.architecture != other.architecture:
            return [f"the architecture ({self.architecture}, {other.architecture})"]
        names = {
            "config": "the config",
            "tensors": "the names, dtypes or shapes of the tensors",
            "weights": "the values of the weights",
        }
        theirs = asdict(other)
        return [names[key] for key, value in asdict(self).items() if key in names and value != theirs[key]]


def _architecture(config: dict[str, Any]) -> str:
    architectures = config.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else config.get("model_type")
    return str(named)


def _essential(config: Any) -> Any:
    """The config without incidental keys, in the configs nested in it too."""
    if isinstance(config, dict):
        return {key: _essential(value) for key, value in config.items() if key not in _INCIDENTAL}
    return config


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _sample(checkpoint: Checkpoint) -> str:
    names = sorted(checkpoint.tensors)
    digest = hashlib.sha256()
    for name in names[:: -(-len(names) // _SAMPLED_TENSORS) or 1]:
        info = checkpoint.tensors[name]
        sample = bytearray(min(_SAMPLE_BYTES, info.nbytes))
        checkpoint.read_into(info, memoryview(sample), (info.nbytes - len(sample)) // 2)
        digest.update(sample)
    return digest.hexdigest()

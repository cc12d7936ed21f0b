"""Activation statistics as data: arrays that can be saved, and turned into scales by any rule.

Statistics are kept per sequence, so one pass over the data serves every rule.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from minifloat.checkpoint import Checkpoint
from minifloat.errors import StatsError, UsageError
from minifloat.model.layouts.decoded import DecodedCheckpoint
from minifloat.numerics.histogram import BINS, FINITE_BINS, Counts, Floats

#: Config keys that do not change what the model computes: who saved it, and how it was quantized.
_INCIDENTAL = frozenset(
    ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "quantization_config", "compression_config")
)
_SAMPLED_TENSORS = 512
_SAMPLE_BYTES = 256


@dataclass(frozen=True)
class ModelIdentity:
    """Hashes that distinguish one unquantized model from another."""

    architecture: str
    config: str
    tensors: str
    weights: str  # SHA-256 of a sample of the weights: some bytes from the middle of evenly chosen tensors

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

    def require(self, checkpoint: Checkpoint, what: str) -> None:
        """Raise an error unless this is the identity of the model in a checkpoint."""
        differences = self.differences(ModelIdentity.of(checkpoint))
        if differences:
            raise StatsError(
                checkpoint.path,
                f"the {what} are of another model, it differs in {', '.join(differences)}; "
                "calibrate this model, from this folder",
            )


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


#: Version of the content of `ActivationStats`; a file of another version is refused.
SCHEMA_VERSION = 2


class _Arrays:
    """A dataclass of arrays; equal if all of them are the same to the bit."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(_same(mine, vars(other)[name]) for name, mine in vars(self).items())


@dataclass(frozen=True, eq=False)
class ModuleStats(_Arrays):
    """Statistics of the input of one linear, per sequence."""

    amax: Floats  # largest magnitude in each sequence, float32 `[S]`; 0 for a sequence without a token for the module
    tokens: Counts  # number of tokens of each sequence that reached the module, int64 `[S]`; few for an expert
    histogram: Counts | None = None  # counts of magnitudes over all sequences, int64 `[BINS]`; None if not recorded
    channel_amax: Floats | None = None  # largest magnitude of each input channel, float32 `[K]`; None if not recorded

    def __post_init__(self) -> None:
        _check("amax", self.amax, np.float32, 1)
        _check("tokens", self.tokens, np.int64, 1)
        if self.amax.shape != self.tokens.shape:
            raise ValueError(f"amax of {len(self.amax)} sequences, tokens of {len(self.tokens)}")
        if self.amax[self.tokens == 0].any():
            raise ValueError("an amax above 0 of a sequence without tokens")
        if self.histogram is not None:
            _check("histogram", self.histogram, np.int64, 1)
            if self.histogram.shape != (BINS,) or self.histogram[FINITE_BINS:].any():
                raise ValueError(f"a histogram has {BINS} bins, the last {BINS - FINITE_BINS} of them empty")
        if self.channel_amax is not None:
            _check("channel_amax", self.channel_amax, np.float32, 1)

    @property
    def max(self) -> float:
        """Largest magnitude of all sequences; 0 if no token reached the module."""
        return float(self.amax.max(initial=0.0))

    @property
    def total_tokens(self) -> int:
        """Number of tokens that reached the module, over all sequences."""
        return int(self.tokens.sum())

    def require_histogram(self, purpose: str) -> Counts:
        if self.histogram is None:
            raise UsageError(f"{purpose}: these statistics have no histograms; calibrate again with histograms")
        return self.histogram


@dataclass(frozen=True, eq=False)
class KVStats(_Arrays):
    """Statistics of the K and V that an attention puts into its cache, after rotary embedding."""

    k_amax: Floats  # largest magnitude of K in each sequence and KV head, float32 `[S, num_kv_heads]`
    v_amax: Floats

    def __post_init__(self) -> None:
        _check("k_amax", self.k_amax, np.float32, 2)
        _check("v_amax", self.v_amax, np.float32, 2)
        if self.k_amax.shape != self.v_amax.shape:
            raise ValueError(f"k_amax is {self.k_amax.shape}, v_amax {self.v_amax.shape}")

    @property
    def heads(self) -> int:
        """Number of KV heads."""
        return int(self.k_amax.shape[1])


@dataclass(frozen=True)
class ActivationStats:
    """Statistics of all linears and KV caches of a model on a calibration set."""

    model: ModelIdentity
    sequences: int
    tokens: int
    data: Mapping[str, Any]
    inputs: Mapping[str, ModuleStats]
    kv: Mapping[str, KVStats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that the statistics of all modules have the same number of sequences."""
        if self.sequences < 0 or self.tokens < 0:
            raise ValueError(f"{self.sequences} sequences of {self.tokens} tokens")
        lengths = {name: len(stats.amax) for name, stats in self.inputs.items()}
        lengths |= {name: len(stats.k_amax) for name, stats in self.kv.items()}
        for name, length in lengths.items():
            if length != self.sequences:
                raise ValueError(f"{name}: {length} sequences, expected {self.sequences}")

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raise an error unless these are the statistics of the model in a checkpoint."""
        self.model.require(checkpoint, "activation statistics")


def _check(name: str, array: npt.NDArray[Any], dtype: type, dimensions: int) -> None:
    if array.dtype != dtype or array.ndim != dimensions:
        raise ValueError(
            f"{name}: expected {np.dtype(dtype)} of {dimensions} dimensions, found {array.dtype} {array.shape}"
        )
    if array.size and not (array.min() >= 0 and array.max() < math.inf):
        raise ValueError(f"{name}: a value that is negative or not finite")


def _same(mine: npt.NDArray[Any] | None, theirs: npt.NDArray[Any] | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return np.array_equal(mine, theirs)

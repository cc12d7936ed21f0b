"""`Decoder` and its layers, validated once when a `Decoder` is created instead of in every step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from minifloat.errors import ShapeError, UnsupportedTensorError
from minifloat.kernels.decoder.attention import Attention, CacheShape, DeltaNet
from minifloat.kernels.decoder.mlp import Experts, LayerInput, LayerInputs, Mlp
from minifloat.kernels.decoder.norm import Norm, Rotary, expect, expect_weights
from minifloat.kernels.decoder_layout import DecoderOptions, LayerOptions
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.native import CONSTANTS
from minifloat.kernels.pack import PackedWeight

#: Tokens of one sequence that share a block of the cache.
BLOCK_TOKENS = CONSTANTS["BLOCK_TOKENS"]


@dataclass(frozen=True, eq=False)
class Layer(LayerOptions):
    input_norm: Norm | None  #: norm of the input of attention; None: attention reads x itself
    attention: Attention | DeltaNet
    mlp_norm: Norm | None  #: None: the MLP reads x, or, where `parallel`, what attention reads
    mlp: Mlp | Experts
    attention_norm: Norm | None = None  #: norm of the result of attention, or None
    result_norm: Norm | None = None  #: norm of the result of the MLP, or None; experts have none
    input: LayerInput | None = None  #: what it does with its part of `Decoder.inputs` after that, or None
    scalar: float = 1.0

    def check(self, name: str, hidden: int) -> None:
        is_shared = isinstance(self.attention, Attention) and self.attention.values == "shared"
        if (self.cache_of is None) == is_shared:
            raise ShapeError(f"{name}.cache_of", "expected a layer where keys and values are shared, else None")
        norms = {
            "input_norm": self.input_norm,
            "attention_norm": self.attention_norm,
            "mlp_norm": self.mlp_norm,
            "result_norm": self.result_norm,
        }
        for field, norm in norms.items():
            if norm is not None:
                norm.check(f"{name}.{field}", hidden)
        self.attention.check(f"{name}.attention", hidden)
        self.mlp.check(f"{name}.mlp", hidden)
        if isinstance(self.mlp, Experts) and self.mlp.norms is None and self.result_norm is not None:
            raise UnsupportedTensorError(f"{name}.result_norm", "expected None for experts without norms")
        if self.input is not None:
            self.input.check(f"{name}.input", hidden)


@dataclass(frozen=True, eq=False)
class Decoder(DecoderOptions):
    dtype: torch.dtype
    embedding: Tensor  #: ``[vocab, hidden]``, bfloat16, float16 or float32
    layers: tuple[Layer, ...]
    norm: Norm
    lm_head: PackedWeight  #: ``[rows, hidden]``, usually one row per token of the vocabulary
    int8_inputs: bool = False
    inputs: LayerInputs | None = None  #: what layers read of a token besides x; None where no layer has an `input`
    batch_invariant: bool = False

    @property
    def hidden(self) -> int:
        return self.embedding.shape[-1]

    @property
    def vocab(self) -> int:
        return self.embedding.shape[0]

    @cached_property
    def rotaries(self) -> tuple[Rotary, ...]:
        """The rotary embeddings of all layers, each once."""
        found = (layer.attention.rotary for layer in self.layers if isinstance(layer.attention, Attention))
        return tuple(dict.fromkeys(rotary for rotary in found if rotary is not None))

    @cached_property
    def caches(self) -> tuple[int, ...]:
        """The index of each layer's cache in `cache_shapes`; without meaning for layers that have none."""
        indices: list[int] = []
        count = 0
        for layer in self.layers:
            indices.append(count if layer.cache_of is None else indices[layer.cache_of])
            count += layer.cache_of is None and isinstance(layer.attention, Attention)
        return tuple(indices)

    @cached_property
    def cache_shapes(self) -> tuple[CacheShape, ...]:
        """The shape of each layer's cache that `KVCache` holds."""
        return tuple(
            layer.attention.cache_shape
            for layer in self.layers
            if isinstance(layer.attention, Attention) and layer.cache_of is None
        )

    @cached_property
    def states_before(self) -> tuple[int, ...]:
        """Where the state of each layer begins in the state of a sequence, and at the end its size."""
        before = [0]
        for layer in self.layers:
            before.append(before[-1] + (layer.attention.state_floats if isinstance(layer.attention, DeltaNet) else 0))
        return tuple(before)

    @property
    def state_floats(self) -> int:
        """Size of the state of a sequence in all layers (`SequenceStates`); 0 if it has none."""
        return self.states_before[-1]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UnsupportedTensorError("dtype", f"expected bfloat16, float16 or float32, got {self.dtype}")
        if self.batch_invariant and self.int8_inputs:
            raise UnsupportedTensorError(
                "batch_invariant", "excludes int8_inputs, which are rounded only where a batch has many rows"
            )
        if self.embedding.ndim != 2:
            raise ShapeError("embedding", f"expected [vocab, hidden], got {list(self.embedding.shape)}")
        expect("embedding", self.embedding, (self.vocab, self.hidden), tuple(DTYPES))
        self.norm.check("norm", self.hidden)
        expect_weights("lm_head", (self.lm_head,), self.lm_head.shape[0], self.hidden)
        if not self.layers:
            raise ShapeError("layers", "expected at least one, got none")
        for i, layer in enumerate(self.layers):
            layer.check(f"layers.{i}", self.hidden)
            source = layer.cache_of
            if source is not None and not 0 <= source < i:
                raise ShapeError(f"layers.{i}.cache_of", f"expected an earlier layer, got {source}")
            if source is not None and _cache_shape(self.layers[source]) != _cache_shape(layer):
                raise ShapeError(f"layers.{i}.cache_of", f"layer {source} has other key-value heads")
        self._check_inputs()

    def _check_inputs(self) -> None:
        if self.inputs is not None:
            self.inputs.check(self.vocab, len(self.layers), self.hidden)
        size = None if self.inputs is None else self.inputs.size
        for i, layer in enumerate(self.layers):
            if layer.input is not None and layer.input.gate.shape[0] != size:
                raise ShapeError(f"layers.{i}.input.gate", f"expected the {size} rows of inputs")


@dataclass(frozen=True, eq=False)
class StepBatch:
    """The input of one step: new tokens of one or more sequences."""

    tokens: Tensor  #: ``[T]``: the new tokens, one sequence after the other
    positions: Tensor  #: ``[T]``: the position of each token in its sequence
    starts: Tensor  #: ``[S + 1]``: sequence s has tokens ``starts[s]`` to ``starts[s + 1] - 1``, at least one
    contexts: Tensor  #: ``[S]``: the number of keys of each sequence after this step
    blocks: Tensor  #: ``[S, B]``: position p of sequence s is in block ``blocks[s, p // BLOCK_TOKENS]``; -1: unused
    logits: Tensor  #: ``[R]``: indices into `tokens` of the tokens whose logits are computed
    slots: Tensor | None = None  #: ``[S]``: the slot of each sequence in `SequenceStates`


def _cache_shape(layer: Layer) -> CacheShape | None:
    return layer.attention.cache_shape if isinstance(layer.attention, Attention) else None

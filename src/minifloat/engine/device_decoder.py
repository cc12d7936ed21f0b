"""A dense model of the Llama family on any device, and one step of it.

Numerics are those of `minifloat.kernels.decoder`: the residual stream and all values between linears are float32, the
inputs and outputs of linears have the model's dtype. q, k and v are one product where their formats allow it, and so
are gate and up: a product of few rows takes as long as reading its weights, and a launch costs as much as a small
product. Mixtures of experts are left out: which experts a step needs is not known before it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from minifloat.engine.blueprint import Blueprint, logged_layers, rotary_frequencies
from minifloat.errors import KernelUnavailable, UsageError
from minifloat.kernels.decoder_layout import AttentionLayout, LayerLayout, LinearLayout, MlpLayout, NormLayout
from minifloat.kernels.linear import scaled_mm
from minifloat.kernels.paged import (
    PagedCache,
    add_norm,
    attend,
    attend_piece,
    rotary_table,
    rotate_and_store,
    silu_and_multiply,
)
from minifloat.model.layouts import StoredWeight
from minifloat.model.runtime.inputs import W8A8, InputQuantization
from minifloat.model.runtime.linear import QuantizedWeight
from minifloat.model.runtime.lm_head import looked_up, quantize_lm_head
from minifloat.model.runtime.tensors import StoredTensors, listing
from minifloat.model.runtime.weights import WeightSource
from minifloat.numerics.formats import FLOAT32
from minifloat.numerics.granularity import CHANNEL, TENSOR
from minifloat.numerics.scheme import WeightSpec
from minifloat.numerics.tensor import QuantizedTensor

_LOG = logging.getLogger(__name__)


class FP8Inputs:
    def __init__(self, tensors: StoredTensors, choice: str) -> None:
        self.nbytes = 0
        self._all = choice == "fp8"
        self._inputs = InputQuantization(tensors.checkpoint, weight_only=False, prefill=W8A8)
        self._without: dict[str, list[str]] = {}

    def weight(
        self, weight: QuantizedTensor, stored: Sequence[StoredWeight], dtype: torch.dtype
    ) -> QuantizedWeight | None:
        """Return a weight whose inputs are quantized; None if there is none."""
        if not self._all and any(part.activation is None for part in stored):
            return None
        found = [self._inputs.prefill_of(part) for part in stored]
        inputs = [each for each in found if each is not None]
        names = [part.module for part in stored]
        if len(inputs) < len(found):
            return None  # `InputQuantization.warn` names them
        spec = inputs[0][0]
        if any(other != spec for other, _ in inputs):
            self._without.setdefault("linears of one product declare different inputs", []).extend(names)
            return None
        reason = scaled_mm.why_not(weight, spec)
        if reason:
            self._without.setdefault(reason, []).extend(names)
            return None
        # Linears of one product share the scale of their inputs: the largest counts, as in vLLM.
        scales = [scale for _, scale in inputs if scale is not None]
        scale = torch.stack(scales).amax().to(weight.codes.device) if scales else None
        made = QuantizedWeight(weight, dtype, spec, scale)
        self.nbytes += made.nbytes
        return made

    def report(self) -> None:
        reasons = "; ".join(f"{reason} ({listing(names)})" for reason, names in self._without.items())
        if self._all and not self.nbytes:
            raise KernelUnavailable(
                f"activations fp8: no weight of the model can have inputs in FP8: {reasons or 'none is E4M3'}"
            )
        self._inputs.warn()
        if reasons:
            _LOG.warning("inputs stay in 16 bits although they could be FP8: %s", reasons)
        if self.nbytes:
            _LOG.info(
                "prompts and large batches are multiplied in FP8, with a second copy of the weights (%d MiB); "
                "--activations bf16 does without",
                self.nbytes >> 20,
            )


def fp8_inputs(tensors: StoredTensors, choice: str) -> FP8Inputs | None:
    """Return what makes weights for inputs in FP8; None if no inputs are quantized."""
    if choice == "fp8" and not tensors.description.weights:
        raise UsageError("activations fp8: the checkpoint has no quantized weights")
    if choice == "fp8" or (choice == "auto" and tensors.description.quantizes_inputs):
        return FP8Inputs(tensors, choice)
    return None


_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class FusedLinear:
    """Linears with the same input, whose results are put side by side."""

    weights: tuple[Tensor | QuantizedWeight, ...]
    biases: tuple[Tensor | None, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply ``[T, K]`` to ``[T, sum of N_i]``."""
        results = [
            functional.linear(x, weight, bias) if isinstance(weight, Tensor) else weight.multiply(x, bias)
            for weight, bias in zip(self.weights, self.biases, strict=True)
        ]
        return results[0] if len(results) == 1 else torch.cat(results, dim=-1)

    @property
    def nbytes(self) -> int:
        """Bytes that one token is multiplied with."""
        return sum(weight.nbytes for weight in self.weights)


@dataclass(frozen=True, eq=False)
class DeviceLayer:
    """``x + out(attention(qkv(norm(x))))``, then ``x + down(silu(gate) * up)``, as in `minifloat.kernels.decoder`."""

    input_norm: Tensor
    qkv: FusedLinear
    head_norms: tuple[Tensor | None, Tensor | None]
    window: int | None
    out: FusedLinear
    mlp_norm: Tensor
    gate_up: FusedLinear
    down: FusedLinear


@dataclass(frozen=True, eq=False)
class DeviceDecoder:
    """A model, from token ids to logits; fields as in `minifloat.kernels.decoder.Decoder`."""

    dtype: torch.dtype
    kv_heads: int
    head_dim: int
    eps: float
    rotary: Tensor
    scale: float
    embedding: Tensor
    layers: tuple[DeviceLayer, ...]
    norm: Tensor
    lm_head: FusedLinear
    vocab: int

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def bytes_per_token(self) -> int:
        return self.lm_head.nbytes + sum(linear.nbytes for linear in self._linears)

    @property
    def prefill_bytes(self) -> int:
        """Bytes of the copies of weights that inputs in FP8 are multiplied with."""
        copies = [
            weight.prefill
            for linear in self._linears
            for weight in linear.weights
            if isinstance(weight, QuantizedWeight)
        ]
        return sum(copy.nbytes for copy in copies if copy is not None)

    @property
    def _linears(self) -> list[FusedLinear]:
        return [p for layer in self.layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down)]


@dataclass(frozen=True, eq=False)
class Piece:
    rows: slice
    start: int
    blocks: Tensor


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of one step: single tokens of sequences first, then pieces of prompts."""

    rows: Tensor  # int32 [T, 3]: token, position, cache row (block times `BLOCK_TOKENS` plus row)
    tables: Tensor  # int32 [D, W]: the blocks of the sequences of the first D tokens
    pieces: tuple[Piece, ...] = ()
    logits: Tensor | None = None  # the tokens whose logits are returned; None: all


def step(decoder: DeviceDecoder, cache: PagedCache, inputs: Inputs) -> Tensor:
    """Put new tokens into the cache and compute logits."""
    # Nothing here waits for the device. Without `pieces` the work depends on shapes only, so a graph can repeat it.
    tokens, positions, cache_rows = inputs.rows.unbind(1)
    x = decoder.embedding[tokens].float()
    delta: Tensor | None = None
    for i, layer in enumerate(decoder.layers):
        normed = add_norm(x, delta, layer.input_norm, decoder.eps, decoder.dtype)
        q = rotate_and_store(
            layer.qkv(normed), layer.head_norms, decoder.eps, decoder.rotary, positions, cache_rows, cache, i
        )
        delta = layer.out(_attention(decoder, layer, i, cache, inputs, positions, q))
        normed = add_norm(x, delta, layer.mlp_norm, decoder.eps, decoder.dtype)
        delta = layer.down(silu_and_multiply(layer.gate_up(normed)))
    if inputs.logits is not None and delta is not None:
        x, delta = x[inputs.logits], delta[inputs.logits]
    return decoder.lm_head(add_norm(x, delta, decoder.norm, decoder.eps, decoder.dtype))


def _attention(
    decoder: DeviceDecoder,
    layer: DeviceLayer,
    index: int,
    cache: PagedCache,
    inputs: Inputs,
    positions: Tensor,
    q: Tensor,
) -> Tensor:
    singles, scale, window = inputs.tables.shape[0], decoder.scale, layer.window
    parts = [
        attend_piece(q[piece.rows], piece.start, piece.blocks, cache, index, scale, window) for piece in inputs.pieces
    ]
    if singles:
        parts.insert(0, attend(q[:singles], positions[:singles], inputs.tables, cache, index, scale, window))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def build_device_decoder(
    blueprint: Blueprint,
    weights: WeightSource,
    positions: int,
    *,
    impl: str,
    lm_head: WeightSpec | None,
    inputs: FP8Inputs | None = None,
) -> DeviceDecoder:
    """Read the weights of a model, and put those side by side that the same input is multiplied with."""
    layout = blueprint.layout
    attention = layout.layers[0].attention
    builder = _Builder(blueprint, weights, impl, inputs)
    with weights.reading_ahead():
        stored = weights.matrix(layout.embedding)
        embedding = looked_up(stored, blueprint.dtype)
        is_tied = weights.is_same_tensor(layout.embedding, layout.lm_head.weight)
        head = builder.lm_head(stored if is_tied else None, lm_head)
        layers = tuple(builder.layer(layer) for layer in logged_layers(layout.layers))
        norm = builder.norm(layout.norm)
    builder.warn()
    assert isinstance(attention, AttentionLayout), "`why_not_on_device` refuses layers without it"
    assert attention.rotary is not None, "`why_not_on_device` refuses models without a rotary embedding"
    inv_freq, attention_scaling = rotary_frequencies(attention.rotary)
    return DeviceDecoder(
        dtype=blueprint.dtype,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        eps=layout.norm.eps,
        rotary=rotary_table(inv_freq.to(embedding.device), attention_scaling, positions),
        scale=attention.scale,
        embedding=embedding,
        layers=layers,
        norm=norm,
        lm_head=head,
        vocab=embedding.shape[0],
    )


class _Builder:
    def __init__(self, blueprint: Blueprint, weights: WeightSource, impl: str, inputs: FP8Inputs | None) -> None:
        self._blueprint, self._weights, self._impl, self._inputs = blueprint, weights, impl, inputs
        self._dequantized: dict[str, list[str]] = {}

    def layer(self, layout: LayerLayout) -> DeviceLayer:
        attention, mlp = layout.attention, layout.mlp
        assert isinstance(attention, AttentionLayout), "`why_not_on_device` refuses layers without it"
        assert isinstance(mlp, MlpLayout), "`why_not_on_device` refuses mixtures of experts"
        assert layout.input_norm is not None, "`why_not_on_device` refuses layers without it"
        assert layout.mlp_norm is not None, "`why_not_on_device` refuses layers without it"
        norms = [None if norm is None else self.norm(norm) for norm in (attention.q_norm, attention.k_norm)]
        return DeviceLayer(
            input_norm=self.norm(layout.input_norm),
            qkv=self._linears(attention.qkv),
            out=self._linears([attention.out]),
            head_norms=(norms[0], norms[1]),
            window=attention.window,
            mlp_norm=self.norm(layout.mlp_norm),
            gate_up=self._linears(mlp.gate_up),
            down=self._linears([mlp.down]),
        )

    def norm(self, layout: NormLayout) -> Tensor:
        """Return the weight of an RMS norm, in float32 after it was rounded to the model's dtype."""
        assert layout.weight is not None, "`why_not_on_device` refuses norms without weights"
        return self._weights.tensor(layout.weight).float().contiguous()

    def lm_head(self, tied: Tensor | QuantizedTensor | None, quantize: WeightSpec | None) -> FusedLinear:
        layout = self._blueprint.layout.lm_head
        weight = self._weights.matrix(layout.weight) if tied is None else tied
        if quantize is not None and isinstance(weight, Tensor):
            weight = quantize_lm_head(weight, quantize, tied=tied is not None)
        return FusedLinear((self._held(weight, layout.name),), (None,))

    def warn(self) -> None:
        """Log the weights that are held dequantized, one warning per reason."""
        self._weights.warn()
        for reason, names in self._dequantized.items():
            _LOG.warning("%d products are held dequantized, because %s: %s", len(names), reason, listing(names))
        if self._inputs is not None:
            self._inputs.report()

    def _linears(self, layouts: Sequences[LinearLayout]) -> FusedLinear:
        """Return linears with the same input: as one weight where that is possible, else as several."""
        weights = [self._weights.matrix(layout.weight) for layout in layouts]
        biases = [None if layout.bias is None else self._weights.tensor(layout.bias).contiguous() for layout in layouts]
        plain = [weight for weight in weights if isinstance(weight, Tensor)]
        quantized = [weight for weight in weights if isinstance(weight, QuantizedTensor)]
        fused: Tensor | QuantizedTensor | None = None
        if len(weights) == len(plain) > 1:
            fused = torch.cat(plain)
        elif len(weights) == len(quantized) > 1:
            fused = _side_by_side(quantized)
        if fused is not None:
            bias = _joined(biases, [weight.shape[0] for weight in weights])
            return FusedLinear((self._held(fused, layouts[0].name, layouts),), (bias,))
        held = tuple(self._held(weight, layout.name, [layout]) for weight, layout in zip(weights, layouts, strict=True))
        return FusedLinear(held, tuple(biases))

    def _held(
        self, weight: Tensor | QuantizedTensor, name: str, layouts: Sequences[LinearLayout] = ()
    ) -> Tensor | QuantizedWeight:
        """Return a weight in the form of the device's kernels, or dequantized."""
        if isinstance(weight, Tensor):
            return weight
        module = QuantizedWeight(weight, self._blueprint.dtype)
        reason = "the reference was asked for" if self._impl == "reference" else module.pack()
        if not reason:
            module.prefill = self._prefill(weight, layouts)
            return module
        if self._impl not in ("auto", "reference"):
            raise KernelUnavailable(f"{name}: the kernels cannot multiply it: {reason}")
        self._dequantized.setdefault(reason, []).append(name)
        return weight.dequantize(self._blueprint.dtype)

    def _prefill(self, weight: QuantizedTensor, layouts: Sequences[LinearLayout]) -> QuantizedWeight | None:
        if self._inputs is None:
            return None
        stored = [self._weights.stored(layout.weight) for layout in layouts]
        known = [each for each in stored if each is not None]
        return self._inputs.weight(weight, known, self._blueprint.dtype) if known else None


def _side_by_side(weights: Sequences[QuantizedTensor]) -> QuantizedTensor | None:
    """Concatenate the rows of several weights; None if their scales do not allow it."""
    first = weights[0]
    spec, rows = first.spec, sum(weight.shape[0] for weight in weights)
    if any((w.spec, w.shape[1], w.global_divides) != (spec, first.shape[1], first.global_divides) for w in weights):
        return None
    if first.global_scale is not None and any(
        w.global_scale is None or not torch.equal(w.global_scale, first.global_scale) for w in weights
    ):
        return None
    scales = [weight.scale for weight in weights]
    if spec.granularity == TENSOR:
        if spec.scale is not FLOAT32:
            return None
        spec = replace(spec, granularity=CHANNEL)  # one scale per row says the same
        scales = [weight.scale.expand(weight.shape[0], 1) for weight in weights]
    multiple = spec.granularity.row_multiple
    if multiple is None or any(weight.shape[0] % multiple for weight in weights[:-1]):
        return None
    codes = torch.cat([weight.codes for weight in weights])
    shape = (rows, first.shape[1])
    return QuantizedTensor(spec, shape, codes, torch.cat(scales), first.global_scale, first.global_divides)


def _joined(biases: Sequences[Tensor | None], rows: Sequences[int]) -> Tensor | None:
    """Concatenate biases, with zeros for those that are None; None if all are."""
    present = [bias for bias in biases if bias is not None]
    if not present:
        return None
    return torch.cat(
        [present[0].new_zeros(count) if bias is None else bias for bias, count in zip(biases, rows, strict=True)]
    )

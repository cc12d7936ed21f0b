"""A dense model of the Llama family on any device, taken out of a transformers model, and one step of it.

Numerics are those of `minifloat.kernels.decoder`: the residual stream and what is between linears is float32, inputs
and outputs of linears have the model's dtype. q, k and v are one product, and gate and up, where their form allows it:
a product of few rows takes as long as reading its weights, and starting it costs as much as a small one. Mixtures of
experts are left out: which experts a step needs is not known before it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from minifloat.architecture.decoder_families import why_not_family
from minifloat.errors import KernelUnavailable
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.paged import (
    PagedCache,
    add_norm,
    attend,
    attend_piece,
    rotary_table,
    rotate_and_store,
    silu_and_multiply,
)
from minifloat.numerics.formats import FLOAT32
from minifloat.numerics.granularity import CHANNEL, TENSOR
from minifloat.numerics.tensor import QuantizedTensor, quantize_tensor
from minifloat.runtime.linear import QuantizedLinear, QuantizedWeight
from minifloat.runtime.names import listing
from minifloat.serve.engine.native import LM_HEAD_FP8, NotNative, bias_of, norm_of, window_of

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Product:
    """Weights that the same input is multiplied with, their results side by side.

    Attributes:
        weights: ``[N_i, K]`` each, in the model's dtype or quantized; mostly one, made of several.
        biases: ``[N_i]`` or None, for each.
    """

    weights: tuple[Tensor | QuantizedWeight, ...]
    biases: tuple[Tensor | None, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, K]`` to ``[T, sum of N_i]``."""
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
    """``x + out(attention(qkv(norm(x))))``, then ``x + down(silu(gate) * up)``; see `minifloat.kernels.decoder`."""

    input_norm: Tensor
    qkv: Product
    head_norms: tuple[Tensor | None, Tensor | None]
    window: int | None
    out: Product
    mlp_norm: Tensor
    gate_up: Product
    down: Product


@dataclass(frozen=True, eq=False)
class DeviceDecoder:
    """A model, from the numbers of tokens to logits; fields as in `minifloat.kernels.decoder.Decoder`.

    Attributes:
        rotary: Of `minifloat.kernels.paged.rotary_table`; its length is the longest sequence.
    """

    dtype: torch.dtype
    kv_heads: int
    head_dim: int
    eps: float
    rotary: Tensor
    scale: float
    embedding: Tensor
    layers: tuple[DeviceLayer, ...]
    norm: Tensor
    lm_head: Product
    vocab: int

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.embedding.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the weights that one token is multiplied with."""
        products = [p for layer in self.layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return self.lm_head.nbytes + sum(product.nbytes for product in products)


@dataclass(frozen=True, eq=False)
class Piece:
    """Several tokens of one sequence, in a row.

    Attributes:
        rows: Their rows in the step.
        start: Position of the first.
        blocks: int32: the sequence's blocks up to its last token.
    """

    rows: slice
    start: int
    blocks: Tensor


@dataclass(frozen=True, eq=False)
class Inputs:
    """What one step computes: single tokens of sequences first, then pieces of prompts.

    Attributes:
        rows: int32 ``[T, 3]``: token, position, and where its key and value go: block times `BLOCK_TOKENS` plus row.
        tables: int32 ``[D, W]``: the blocks of the sequences of the first D tokens, as `attend` takes them.
        pieces: What the other tokens are.
        logits: Integers ``[R]``: which of the tokens logits are wanted of; None: all.
    """

    rows: Tensor
    tables: Tensor
    pieces: tuple[Piece, ...] = ()
    logits: Tensor | None = None


def step(decoder: DeviceDecoder, cache: PagedCache, inputs: Inputs) -> Tensor:
    """Put new tokens into the cache and compute the logits that are asked for.

    Nothing here waits for the device. Without `pieces` the work depends on shapes alone.

    Returns:
        ``[R, vocab]`` in the model's dtype.
    """
    tokens, positions, slots = inputs.rows.unbind(1)
    x = decoder.embedding[tokens].float()
    delta: Tensor | None = None
    for i, layer in enumerate(decoder.layers):
        normed = add_norm(x, delta, layer.input_norm, decoder.eps, decoder.dtype)
        q = rotate_and_store(
            layer.qkv(normed), layer.head_norms, decoder.eps, decoder.rotary, positions, slots, cache, i
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


def why_not_device(model: PreTrainedModel) -> str:
    """Why there is no `DeviceDecoder` of a model; empty where there is, as far as the config tells."""
    config: Any = model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    reason = why_not_family(config.model_type, getattr(config, "hidden_act", None), rope, experts=False)
    if not reason and model.dtype not in DTYPES:
        reason = f"it is {model.dtype}"
    return reason


def device_decoder_of(model: PreTrainedModel, positions: int, *, impl: str, lm_head_fp8: bool) -> DeviceDecoder:
    """Take a model apart.

    Args:
        model: Made by ``load(path, device=..., weight_only=True, impl="reference")``, and of the kind that
            `why_not_device` has nothing against. It cannot be used afterwards.
        positions: Of the longest sequence.
        impl: "auto": quantized weights that have no kernel on the device are dequantized, with a warning. "reference":
            all are. Another: one without is an error.
        lm_head_fp8: Quantize the last linear to FP8 per channel, if it is not quantized.

    Raises:
        NotNative: A module is something else than a linear.
        KernelUnavailable: A weight has no kernel, and `impl` asks for one.
    """
    parts = _Parts(model, impl)
    whole: Any = model
    core: Any = whole.model
    config: Any = model.config
    rotary = core.rotary_emb
    first = core.layers[0].self_attn
    scale, head_dim = float(first.scaling), int(first.head_dim)
    head = parts.product([whole.get_output_embeddings()], quantize=lm_head_fp8)
    layers = []
    for i, layer in enumerate(core.layers):
        layers.append(parts.layer(layer))
        core.layers[i] = nn.Identity()  # its memory, where weights were copied side by side
    parts.warn()
    return DeviceDecoder(
        dtype=model.dtype,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        eps=config.rms_norm_eps,
        rotary=rotary_table(rotary.inv_freq.float(), float(rotary.attention_scaling), positions),
        scale=scale,
        embedding=core.embed_tokens.weight.detach(),
        layers=tuple(layers),
        norm=norm_of(core.norm),
        lm_head=head,
        vocab=int(config.vocab_size),
    )


class _Parts:
    """Moves weights out of a model.

    Args:
        model: As in `device_decoder_of`.
        impl: As there.
    """

    def __init__(self, model: PreTrainedModel, impl: str) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._dtype, self._impl = model.dtype, impl
        self._dequantized: dict[str, list[str]] = {}

    def layer(self, layer: Any) -> DeviceLayer:
        """One layer."""
        attention, mlp = layer.self_attn, layer.mlp
        return DeviceLayer(
            input_norm=norm_of(layer.input_layernorm),
            qkv=self.product([attention.q_proj, attention.k_proj, attention.v_proj]),
            head_norms=(
                norm_of(attention.q_norm) if hasattr(attention, "q_norm") else None,
                norm_of(attention.k_norm) if hasattr(attention, "k_norm") else None,
            ),
            window=window_of(attention),
            out=self.product([attention.o_proj]),
            mlp_norm=norm_of(layer.post_attention_layernorm),
            gate_up=self.product([mlp.gate_proj, mlp.up_proj]),
            down=self.product([mlp.down_proj]),
        )

    def product(self, modules: Sequences[Any], *, quantize: bool = False) -> Product:
        """The weights of linears with one input, as one where that is possible."""
        names = [self._names[id(module)] for module in modules]
        weights = [self._weight(module, name, quantize) for module, name in zip(modules, names, strict=True)]
        biases = [bias_of(module) for module in modules]
        plain = [weight for weight in weights if isinstance(weight, Tensor)]
        quantized = [weight for weight in weights if isinstance(weight, QuantizedTensor)]
        one = torch.cat(plain) if len(weights) == len(plain) > 1 else None
        fused = _side_by_side(quantized) if len(weights) == len(quantized) > 1 else None
        if one is not None or fused is not None:
            bias = _joined(biases, [weight.shape[0] for weight in weights])
            held = one if fused is None else self._held(fused, names[0])
            assert held is not None
            return Product((held,), (bias,))
        return Product(
            tuple(w if isinstance(w, Tensor) else self._held(w, n) for w, n in zip(weights, names, strict=True)),
            tuple(biases),
        )

    def _weight(self, module: Any, name: str, quantize: bool) -> Tensor | QuantizedTensor:
        if isinstance(module, QuantizedLinear):
            return module.quantized
        if type(module) is not nn.Linear:
            raise NotNative(f"{name} is a {type(module).__name__}")
        weight = module.weight.detach()
        return quantize_tensor(weight, LM_HEAD_FP8) if quantize else weight

    def _held(self, weight: QuantizedTensor, name: str) -> Tensor | QuantizedWeight:
        """In the form of the device's kernels, or dequantized."""
        made = QuantizedWeight(weight, self._dtype)
        reason = "the reference was asked for" if self._impl == "reference" else made.pack()
        if not reason:
            return made
        if self._impl not in ("auto", "reference"):
            raise KernelUnavailable(f"{name}: the kernels cannot multiply it: {reason}")
        self._dequantized.setdefault(reason, []).append(name)
        return weight.dequantize(self._dtype)

    def warn(self) -> None:
        """Log what is not held quantized, one warning per reason."""
        for reason, names in self._dequantized.items():
            _LOG.warning("%d products are held dequantized, because %s: %s", len(names), reason, listing(names))


def _side_by_side(weights: Sequences[QuantizedTensor]) -> QuantizedTensor | None:
    """One weight of the rows of several; None where their scales do not allow it."""
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
    """Biases one after the other, zeros where there is none."""
    present = [bias for bias in biases if bias is not None]
    if not present:
        return None
    return torch.cat(
        [present[0].new_zeros(count) if bias is None else bias for bias, count in zip(biases, rows, strict=True)]
    )

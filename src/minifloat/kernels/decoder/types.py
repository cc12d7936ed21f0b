"""The parts of a Llama-like decoder, validated once when a `Decoder` is created instead of in every step.

Supported: RMS norms before attention and MLP, rotary embeddings in the convention of `rotate_half`, grouped queries,
SiLU MLPs or routed experts; optionally biases, norms of q and k, sliding windows and a shared expert. Other decoders
(parallel residuals, attention sinks, soft caps, ALiBi) run by other code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minifloat.errors import ShapeError, UnsupportedTensorError
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.moe import PackedExperts
from minifloat.kernels.pack import FusedWeights, PackedWeight

#: Tokens of one sequence that share a block of the cache.
BLOCK_TOKENS = 16


@dataclass(frozen=True, eq=False)
class Attention:
    """The attention of a layer.

    Attributes:
        qkv: q ``[heads * d, hidden]``, k and v ``[kv_heads * d, hidden]``.
        qkv_bias: A bias or None for each of the three, of one dtype; or None.
        out: ``[hidden, heads * d]``.
        out_bias: ``[hidden]`` or None.
        q_norm: float32 ``[d]``, the weight of an RMS norm of each head before the rotation; or None.
        k_norm: The same for k.
        window: A query sees the last `window` keys, its own included; None for all keys up to its own.
        k_scale: The scale of k in an E4M3 cache; ignored by other caches.
        v_scale: The scale of v in an E4M3 cache; ignored by other caches.
    """

    qkv: FusedWeights
    out: PackedWeight
    qkv_bias: tuple[Tensor | None, ...] | None = None
    out_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    window: int | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    def check(self, name: str, decoder: Decoder) -> None:
        """Validate that the sizes and dtypes fit the decoder; `name` is the prefix of field names in errors."""
        d, heads, kv_heads, hidden = decoder.head_dim, decoder.heads, decoder.kv_heads, decoder.hidden
        _expect_weights(f"{name}.qkv", self.qkv, [(heads * d, hidden), (kv_heads * d, hidden), (kv_heads * d, hidden)])
        _expect_biases(f"{name}.qkv_bias", self.qkv_bias, self.qkv)
        _expect_weights(f"{name}.out", (self.out,), [(hidden, heads * d)])
        _expect_biases(f"{name}.out_bias", (self.out_bias,), (self.out,))
        for field, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                _expect(f"{name}.{field}", norm, (d,))
        if self.window is not None and self.window < 1:
            raise ShapeError(f"{name}.window", f"expected at least 1, got {self.window}")
        for field, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if not 0.0 < scale < float("inf"):
                raise UnsupportedTensorError(f"{name}.{field}", f"expected a positive number, got {scale}")


@dataclass(frozen=True, eq=False)
class Mlp:
    """``down(silu(gate(x)) * up(x))``.

    Attributes:
        gate_up: gate and up, ``[intermediate, hidden]`` each.
        down: ``[hidden, intermediate]``.
        gate_up_bias: A bias or None for each of the two, of one dtype; or None.
        down_bias: ``[hidden]`` or None.
    """

    gate_up: FusedWeights
    down: PackedWeight
    gate_up_bias: tuple[Tensor | None, ...] | None = None
    down_bias: Tensor | None = None

    @property
    def intermediate(self) -> int:
        """Columns of `down`."""
        return self.down.shape[1]

    def check(self, name: str, decoder: Decoder) -> None:
        """Validate that the sizes and dtypes fit the decoder; `name` is the prefix of field names in errors."""
        _expect_weights(f"{name}.down", (self.down,), [(decoder.hidden, self.intermediate)])
        _expect_weights(f"{name}.gate_up", self.gate_up, [(self.intermediate, decoder.hidden)] * 2)
        _expect_biases(f"{name}.gate_up_bias", self.gate_up_bias, self.gate_up)
        _expect_biases(f"{name}.down_bias", (self.down_bias,), (self.down,))


@dataclass(frozen=True, eq=False)
class Experts:
    """A mixture of experts: each token uses `top_k` of many MLPs.

    Attributes:
        router: ``[experts, hidden]``, float32 or bfloat16; multiplied in float32.
        top_k: Number of experts of a token: those with the largest softmax over all experts.
        normalize: Whether the weights of the chosen experts are scaled to sum to 1.
        gate_up: One projection ``[2 * intermediate, hidden]`` per expert, the rows of gate first; or two, gate and up.
        down: ``[hidden, intermediate]`` per expert.
        shared: An MLP that all tokens use in addition, or None.
        shared_gate: float32 ``[hidden]``: the sigmoid of its product with the input multiplies the shared MLP; or None.
    """

    router: Tensor
    top_k: int
    normalize: bool
    gate_up: tuple[PackedExperts, ...]
    down: PackedExperts
    shared: Mlp | None = None
    shared_gate: Tensor | None = None

    @property
    def intermediate(self) -> int:
        """Columns of `down`."""
        return self.down.shape[1]

    def check(self, name: str, decoder: Decoder) -> None:
        """Validate that the sizes and dtypes fit the decoder; `name` is the prefix of field names in errors."""
        hidden, experts = decoder.hidden, len(self.down)
        _expect(f"{name}.router", self.router, (experts, hidden), (torch.float32, torch.bfloat16))
        if not 1 <= self.top_k <= experts:
            raise ShapeError(f"{name}.top_k", f"expected 1 to {experts}, got {self.top_k}")
        if self.down.shape != (hidden, self.intermediate):
            raise ShapeError(f"{name}.down", f"expected {hidden} rows, got {list(self.down.shape)}")
        shapes = [(len(part), *part.shape) for part in self.gate_up]
        rows = 2 * self.intermediate // max(len(shapes), 1)
        if len(shapes) not in (1, 2) or any(shape != (experts, rows, hidden) for shape in shapes):
            expected = f"one of {[experts, 2 * self.intermediate, hidden]}, or two of half the rows"
            raise ShapeError(f"{name}.gate_up", f"expected {expected}, got {shapes}")
        if self.shared is not None:
            self.shared.check(f"{name}.shared", decoder)
        if self.shared_gate is not None:
            _expect(f"{name}.shared_gate", self.shared_gate, (hidden,))


@dataclass(frozen=True, eq=False)
class Layer:
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    Attributes:
        input_norm: float32 ``[hidden]``.
        attention: The attention.
        mlp_norm: float32 ``[hidden]``.
        mlp: The MLP or the experts.
    """

    input_norm: Tensor
    attention: Attention
    mlp_norm: Tensor
    mlp: Mlp | Experts


@dataclass(frozen=True, eq=False)
class Decoder:
    """A model, from token ids to logits.

    Attributes:
        dtype: The dtype of the inputs and outputs of linears: bfloat16, float16 or float32. Everything between them is
            float32.
        heads: Number of query heads.
        kv_heads: Number of key-value heads; divides `heads`.
        head_dim: Size of a head, even, at most `MAX_HEAD_DIM`.
        eps: The epsilon of all norms.
        inv_freq: float32 ``[rotary_dim / 2]``: radians per position; dimension i is rotated with dimension
            ``i + rotary_dim / 2``, dimensions from `rotary_dim` on are not rotated.
        attention_scaling: Factor of cosines and sines.
        scale: Factor of the product of q and k.
        embedding: ``[vocab, hidden]``, bfloat16, float16 or float32.
        layers: At least one.
        norm: float32 ``[hidden]``, the weight of the norm before `lm_head`.
        lm_head: ``[rows, hidden]``, usually one row per token of the vocabulary.
        int8_inputs: Whether the products with packed weights, `lm_head` included, may round their inputs to int8 as
            `minifloat.kernels.linear.linear` does.

    Raises:
        ShapeError: If sizes do not match; the error names the field.
        UnsupportedTensorError: If a field does not support a dtype, or a tensor is not contiguous on the CPU.
    """

    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    inv_freq: Tensor
    attention_scaling: float
    scale: float
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    lm_head: PackedWeight
    int8_inputs: bool = False

    MAX_HEAD_DIM = 512

    @property
    def hidden(self) -> int:
        """Size of the residual stream."""
        return self.embedding.shape[-1]

    @property
    def vocab(self) -> int:
        """Number of rows of the embedding."""
        return self.embedding.shape[0]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UnsupportedTensorError("dtype", f"expected bfloat16, float16 or float32, got {self.dtype}")
        if self.kv_heads < 1 or self.heads < 1 or self.heads % self.kv_heads:
            raise ShapeError("heads", f"expected a multiple of {self.kv_heads} key-value heads, got {self.heads}")
        if not 2 <= self.head_dim <= self.MAX_HEAD_DIM or self.head_dim % 2:
            raise ShapeError("head_dim", f"expected an even number up to {self.MAX_HEAD_DIM}, got {self.head_dim}")
        if self.inv_freq.ndim != 1 or 2 * self.inv_freq.numel() > self.head_dim:
            raise ShapeError("inv_freq", f"expected at most [{self.head_dim // 2}], got {list(self.inv_freq.shape)}")
        _expect("inv_freq", self.inv_freq, (self.inv_freq.numel(),))
        if self.embedding.ndim != 2:
            raise ShapeError("embedding", f"expected [vocab, hidden], got {list(self.embedding.shape)}")
        _expect("embedding", self.embedding, (self.vocab, self.hidden), tuple(DTYPES))
        _expect("norm", self.norm, (self.hidden,))
        _expect_weights("lm_head", (self.lm_head,), [(self.lm_head.shape[0], self.hidden)])
        if not self.layers:
            raise ShapeError("layers", "expected at least one, got none")
        for i, layer in enumerate(self.layers):
            _expect(f"layers.{i}.input_norm", layer.input_norm, (self.hidden,))
            layer.attention.check(f"layers.{i}.attention", self)
            _expect(f"layers.{i}.mlp_norm", layer.mlp_norm, (self.hidden,))
            layer.mlp.check(f"layers.{i}.mlp", self)


@dataclass(frozen=True, eq=False)
class StepBatch:
    """The input of one step: new tokens of one or more sequences. All tensors are int32, contiguous, on the CPU.

    Attributes:
        tokens: ``[T]``: the new tokens, one sequence after the other.
        positions: ``[T]``: the position of each token in its sequence.
        starts: ``[S + 1]``: sequence s has tokens ``starts[s]`` to ``starts[s + 1] - 1``, at least one; the last of
            them is at position ``contexts[s] - 1``.
        contexts: ``[S]``: the number of keys of each sequence after this step.
        blocks: ``[S, B]``: the token at position p of sequence s is in block ``blocks[s, p // BLOCK_TOKENS]``, row
            ``p % BLOCK_TOKENS``. Entries that no query of the step sees are ignored; -1 by convention.
        logits: ``[R]``: indices into `tokens` of the tokens whose logits are computed.
    """

    tokens: Tensor
    positions: Tensor
    starts: Tensor
    contexts: Tensor
    blocks: Tensor
    logits: Tensor


def _expect(name: str, tensor: Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype] = (torch.float32,)) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ShapeError(name, f"expected {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype not in dtypes or not tensor.is_cpu or not tensor.is_contiguous():
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        actual = f"{tensor.dtype} on {tensor.device}{'' if tensor.is_contiguous() else ', not contiguous'}"
        raise UnsupportedTensorError(name, f"expected contiguous {names} on the CPU, got {actual}")


def _expect_weights(name: str, weights: Sequence[PackedWeight], shapes: Sequence[tuple[int, int]]) -> None:
    actual = [tuple(weight.shape) for weight in weights]
    if actual != list(shapes):
        raise ShapeError(name, f"expected {list(shapes)}, got {actual}")
    for weight in weights:
        weight.check()


def _expect_biases(name: str, biases: Sequence[Tensor | None] | None, weights: Sequence[PackedWeight]) -> None:
    if biases is None:
        return
    if len(biases) != len(weights):
        raise ShapeError(name, f"expected {len(weights)}, got {len(biases)}")
    for bias, weight in zip(biases, weights, strict=True):
        if bias is not None:
            _expect(name, bias, (weight.shape[0],), tuple(DTYPES))
    if len({bias.dtype for bias in biases if bias is not None}) > 1:
        raise UnsupportedTensorError(name, "expected one dtype for all")

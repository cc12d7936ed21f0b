"""Small random decoders, and sequences that run through them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from native_cases import VOCAB
from torch import Tensor

from minifloat.kernels.decoder import (
    BLOCK_TOKENS,
    Activation,
    Attention,
    Decoder,
    Experts,
    KVCache,
    Latent,
    Layer,
    Mlp,
    Norm,
    Rotary,
    Router,
    SequenceStates,
    StepBatch,
    step,
)
from minifloat.kernels.moe import PackedExperts
from minifloat.kernels.pack import FusedWeights, PackedWeight, pack
from minifloat.numerics.scheme import SCHEMES
from minifloat.numerics.tensor import quantize_tensor


def _packed(weight: Tensor) -> PackedWeight:
    return pack(weight.detach().bfloat16())


@dataclass
class Session:
    """Sequences in a cache whose blocks are assigned in random order."""

    decoder: Decoder  #: what runs
    cache: KVCache  #: filled with bytes that are NaN in every element
    impl: str  #: of `step`
    contexts: dict[str, int] = field(default_factory=dict)  #: keys of each sequence so far, by its name
    blocks: dict[str, list[int]] = field(default_factory=dict)  #: of each sequence
    states: SequenceStates | None = None  #: filled with NaN, for a decoder that has any

    @classmethod
    def start(cls, decoder: Decoder, impl: str, blocks: int = 64, element: str = "float32") -> Session:
        cache = KVCache(decoder.cache_shapes, blocks, element)
        cache.data.fill_(0xFF)
        states = SequenceStates(decoder.state_floats, 8) if decoder.state_floats else None
        if states is not None:
            states.data.fill_(float("nan"))
        return cls(decoder, cache, impl, states=states)

    def __post_init__(self) -> None:
        order = torch.randperm(self.cache.blocks, generator=torch.Generator().manual_seed(3))
        self._free = order.tolist()

    def batch(self, new: Mapping[str, Sequence[int]], logits: Sequence[int] | None = None) -> StepBatch:
        """Return a batch of new tokens with blocks for them; by default with the logits of all tokens."""
        positions: list[int] = []
        for name, tokens in new.items():
            begin = self.contexts.get(name, 0)
            positions.extend(range(begin, begin + len(tokens)))
            self.contexts[name] = begin + len(tokens)
            table = self.blocks.setdefault(name, [])
            while len(table) * BLOCK_TOKENS < self.contexts[name]:
                table.append(self._free.pop())
        width = max(len(self.blocks[name]) for name in new) + 1
        flat = [token for tokens in new.values() for token in tokens]
        starts = [0]
        for tokens in new.values():
            starts.append(starts[-1] + len(tokens))
        return StepBatch(
            tokens=_int32(flat),
            positions=_int32(positions),
            starts=_int32(starts),
            contexts=_int32([self.contexts[name] for name in new]),
            blocks=_int32([self.blocks[n] + [-1] * (width - len(self.blocks[n])) for n in new]),
            logits=_int32(list(range(len(flat)) if logits is None else logits)),
            slots=_int32([7 - list(self.blocks).index(name) for name in new]),
        )

    def run(self, new: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """Run a step and return the logits of all new tokens of each sequence."""
        logits = step(self.decoder, self.cache, self.batch(new), self.impl, self.states)
        parts = torch.split_with_sizes(logits, [len(tokens) for tokens in new.values()])
        return dict(zip(new, parts, strict=True))


def _int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass(frozen=True)
class Shape:
    """The sizes and options of a random decoder."""

    heads: int = 4  #: of queries
    kv_heads: int = 2  #: of keys and values
    head_dim: int = 16  #: size of a head
    rotary: int | None = None  #: how many dimensions turn; None: all
    windows: tuple[int | None, ...] = (None, None)  #: of each layer
    norms: bool = False  #: whether q and k have norms
    biases: bool = False  #: whether linears have biases
    hidden: int = 72  #: size of the residual stream
    intermediate: int = 88  #: of the MLP, also of each expert
    experts: int = 0  #: how many; 0: a plain MLP
    top_k: int = 2  #: experts of a token
    apart: bool = False  #: whether gate and up of experts are two weights
    shared: bool = False  #: whether experts share an MLP, with a gate
    activation: Activation = field(default_factory=Activation)  #: of the MLP and the experts
    layer: Mapping[str, Any] = field(default_factory=dict)  #: further fields of each `Layer`
    attention: Mapping[str, Any] = field(default_factory=dict)  #: further fields of each `Attention`
    router: Mapping[str, Any] = field(default_factory=dict)  #: further fields of each `Router`
    latent: tuple[int, ...] = ()  #: sizes of latent attention: rank, plain and value_dim, and the rank of queries or 0
    decoder: Mapping[str, Any] = field(default_factory=dict)  #: further fields of the `Decoder`


def _made(fields: Mapping[str, Any], size: int) -> dict[str, Any]:
    return {name: value(size) if inspect.isfunction(value) else value for name, value in fields.items()}


def random_decoder(
    shape: Shape, dtype: torch.dtype, scales: tuple[float, float] = (1.0, 1.0), scheme: str | None = None
) -> Decoder:
    """Return a random decoder; `scales`: scales of keys and values in an E4M3 cache; `scheme`: of weights, not BF16."""
    random = torch.Generator().manual_seed(7)

    def weight(rows: int, cols: int) -> PackedWeight:
        values = torch.randn(rows, cols, generator=random) * 1.5 / cols**0.5
        return _packed(values) if scheme is None else pack(quantize_tensor(values, SCHEMES[scheme].weight))

    def vector(size: int, centre: float = 1.0) -> Tensor:
        return torch.randn(size, generator=random) * 0.2 + centre

    def norm(size: int) -> Norm:
        return Norm(vector(size), 1e-5)

    turned = shape.head_dim if shape.rotary is None else shape.rotary
    rotary = Rotary(100.0 ** -(torch.arange(turned // 2) / max(turned // 2, 1)), 1.1)

    def layer(window: int | None) -> Layer:
        d, hidden, middle = shape.head_dim, shape.hidden, shape.intermediate
        sizes = [shape.heads * d, shape.kv_heads * d, shape.kv_heads * d]
        inner = shape.activation.inputs
        fields: dict[str, Any] = {
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head_dim": d,
            "scale": 1.3 * d**-0.5,
            "qkv": FusedWeights([weight(size, hidden) for size in sizes]),
            "out": weight(hidden, sizes[0]),
            "qkv_bias": tuple(vector(size, 0.0) for size in sizes) if shape.biases else None,
            "out_bias": vector(hidden, 0.0) if shape.biases else None,
            "rotary": rotary,
            "q_norm": norm(d) if shape.norms else None,
            "k_norm": norm(d) if shape.norms else None,
            "window": window,
            "k_scale": scales[0],
            "v_scale": scales[1],
        }
        mlp = Mlp(
            FusedWeights([weight(middle, hidden) for _ in range(inner)]),
            weight(hidden, middle),
            (*[None] * (inner - 1), vector(middle, 0.0)) if shape.biases else None,
            vector(hidden, 0.0) if shape.biases else None,
            shape.activation,
        )
        parts: dict[str, Any] = {
            "input_norm": norm(hidden),
            "attention": Attention(**fields | (latent_fields() if shape.latent else {}) | _made(shape.attention, d)),
            "mlp_norm": norm(hidden),
            "mlp": routed(mlp) if shape.experts else mlp,
        }
        return Layer(**parts | _made(shape.layer, hidden))

    def latent_fields() -> dict[str, Any]:
        rank, plain, value_dim, q_rank = shape.latent
        queries = shape.heads * (plain + shape.head_dim - rank)
        rows = [q_rank or queries, shape.head_dim]
        return {
            "values": "latent",
            "scale": 2.0 * (plain + shape.head_dim - rank) ** -0.5,
            "qkv": FusedWeights([weight(size, shape.hidden) for size in rows]),
            "qkv_bias": tuple(vector(size, 0.0) for size in rows) if shape.biases else None,
            "out": weight(shape.hidden, shape.heads * value_dim),
            "latent": Latent(
                keys=PackedExperts([weight(rank, plain) for _ in range(shape.heads)]),
                values=PackedExperts([weight(value_dim, rank) for _ in range(shape.heads)]),
                key_factors=vector(shape.heads * plain).view(shape.heads, plain) if shape.norms else None,
                kv_norm=norm(rank) if shape.norms or q_rank else None,
                q_up=weight(queries, q_rank) if q_rank else None,
                q_norm=norm(q_rank) if q_rank else None,
            ),
            "q_norm": None,
            "k_norm": None,
        }

    def routed(mlp: Mlp) -> Experts:
        hidden, middle, count = shape.hidden, shape.intermediate, shape.experts
        rows = [middle, middle] if shape.apart else [2 * middle]
        router: dict[str, Any] = {
            "weight": torch.randn(count, hidden, generator=random).to(torch.bfloat16 if shape.apart else torch.float32),
            "top_k": shape.top_k,
            "normalize": not shape.shared,
        }
        return Experts(
            router=Router(**router | _made(shape.router, count)),
            gate_up=tuple(PackedExperts([weight(size, hidden) for _ in range(count)]) for size in rows),
            down=PackedExperts([weight(hidden, middle) for _ in range(count)]),
            gate_up_bias=tuple(vector(count * size, 0.0).view(count, size) for size in rows) if shape.biases else None,
            down_bias=vector(count * hidden, 0.0).view(count, hidden) if shape.biases else None,
            activation=shape.activation,
            shared=mlp if shape.shared else None,
            shared_gate=vector(hidden, 0.0) if shape.shared else None,
        )

    return Decoder(
        dtype=dtype,
        embedding=torch.randn(VOCAB, shape.hidden, generator=random).to(dtype),
        layers=tuple(layer(window) for window in shape.windows),
        norm=norm(shape.hidden),
        lm_head=weight(VOCAB, shape.hidden),
        **shape.decoder,
    )

"""`DecoderPlan`: what a decoder computes, and the names and shapes of its parameters, without any weight.

The decoders of CPUs (`minifloat.kernels.decoder`) and of GPUs are built from it. Each part corresponds to one of the
same name there, which defines what it computes. A parameter's name is that in transformers' model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


class NotNative(Exception):
    """The decoders do not support a model; the message says why."""


@dataclass(frozen=True)
class LinearPlan:
    """A linear."""

    name: str
    shape: tuple[int, int]
    has_bias: bool = False

    @property
    def weight(self) -> str:
        """Name of the weight."""
        return f"{self.name}.weight"

    @property
    def bias(self) -> str | None:
        """Name of the bias, or None."""
        return f"{self.name}.bias" if self.has_bias else None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its parameters by name."""
        shapes: dict[str, tuple[int, ...]] = {self.weight: self.shape}
        return shapes | {self.bias: self.shape[:1]} if self.bias else shapes


@dataclass(frozen=True)
class NormPlan:
    """A norm.

    Attributes:
        weight: Name of the weight; None: it is one.
        bias: Name of the bias, or None.
    """

    weight: str | None
    shape: tuple[int, ...]
    eps: float
    bias: str | None = None
    centered: bool = False
    offset: float = 0.0
    factor: float = 1.0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its parameters by name."""
        return {name: self.shape for name in (self.weight, self.bias) if name is not None}


@dataclass(frozen=True)
class RotaryPlan:
    """A rotary embedding."""

    parameters: tuple[tuple[str, Any], ...]
    head_dim: int
    positions: int
    interleaved: bool = False
    partial: bool = False
    long: bool = False

    @property
    def longest_short_text(self) -> int | None:
        """Tokens of the longest text that has the short factors of "longrope"; None where no text has others."""
        values = dict(self.parameters)
        if values.get("rope_type") != "longrope" or values["original_max_position_embeddings"] >= self.positions:
            return None
        return int(values["original_max_position_embeddings"])


@dataclass(frozen=True)
class LatentPlan:
    """Latent attention; fields as in `minifloat.kernels.decoder.Latent`.

    Attributes:
        up: The linear whose rows are, for each head, those of its keys ``[plain, rank]`` and values ``[value_dim,
            rank]``.
    """

    up: LinearPlan
    plain: int
    value_dim: int
    kv_norm: NormPlan | None
    q_up: LinearPlan | None = None
    q_norm: NormPlan | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its parameters by name, in the order in which they are read."""
        return _shapes(self.up, self.kv_norm, self.q_up, self.q_norm)


@dataclass(frozen=True)
class AttentionPlan:
    """Attention; fields as in `minifloat.kernels.decoder.Attention`.

    Attributes:
        sinks: Name of the scores ``[heads]`` that take part in the softmax, or None.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    qkv: tuple[LinearPlan, ...]
    out: LinearPlan
    rotary: RotaryPlan | None
    q_norm: NormPlan | None = None
    k_norm: NormPlan | None = None
    whole_norms: bool = False
    window: int | None = None
    sinks: str | None = None
    score_cap: float | None = None
    clip: float | None = None
    gated: bool = False
    v_norm: NormPlan | None = None
    values: str = "own"
    latent: LatentPlan | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its parameters by name, in the order in which they are read."""
        sinks: dict[str, tuple[int, ...]] = {} if self.sinks is None else {self.sinks: (self.heads,)}
        latent = {} if self.latent is None else self.latent.shapes()
        return _shapes(*self.qkv, self.out, self.q_norm, self.k_norm, self.v_norm) | sinks | latent


@dataclass(frozen=True)
class DeltaPlan:
    """A gated delta rule in the place of attention; fields as in `minifloat.kernels.decoder.DeltaNet`.

    Attributes:
        conv: Name of the weight ``[channels, 1, conv_width]`` of the convolution.
        decay: Name of the logarithms ``[v_heads]`` of the decays.
        dt_bias: Name of what is added to a, ``[v_heads]``.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int
    qkvz: tuple[LinearPlan, ...]
    ba: tuple[LinearPlan, ...]
    out: LinearPlan
    conv: str
    decay: str
    dt_bias: str
    norm: NormPlan
    grouped: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its parameters by name, in the order in which they are read."""
        channels = 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim
        rest: dict[str, tuple[int, ...]] = {
            self.conv: (channels, 1, self.conv_width),
            self.decay: (self.v_heads,),
            self.dt_bias: (self.v_heads,),
        }
        return _shapes(*self.qkvz, *self.ba, self.out) | rest | self.norm.shapes()


@dataclass(frozen=True)
class ActivationPlan:
    """The function of an MLP; fields as in `minifloat.kernels.decoder.Activation`."""

    name: str = "silu"
    gated: bool = True
    alpha: float = 1.0
    limit: float = float("inf")


@dataclass(frozen=True)
class MlpPlan:
    """An MLP."""

    gate_up: tuple[LinearPlan, ...]
    down: LinearPlan
    activation: ActivationPlan = ActivationPlan()


@dataclass(frozen=True)
class RouterPlan:
    """What chooses experts; other fields as in `minifloat.kernels.decoder.Router`.

    Attributes:
        weight: Name of the weight ``[experts, hidden]``.
        bias: Name of the bias ``[experts]``, or None.
        correction: Name of what is added to the scores for the choice alone, ``[experts]``, or None.
        scales: Name of what multiplies the weights at the end, ``[experts]``, or None.
    """

    weight: str
    top_k: int
    kind: str = "softmax"
    normalize: bool = False
    bias: str | None = None
    correction: str | None = None
    groups: int = 1
    groups_kept: int = 1
    group_best: int = 2
    factor: float = 1.0
    scales: str | None = None


@dataclass(frozen=True)
class ExpertNormsPlan:
    """Norms of experts beside an MLP; fields as in `minifloat.kernels.decoder.ExpertNorms`."""

    router: NormPlan
    input: NormPlan
    experts: NormPlan
    mlp: NormPlan


@dataclass(frozen=True)
class ExpertsPlan:
    """An MLP of which each token uses some of many experts.

    Attributes:
        gate_up_bias: Name of the biases ``[experts, 2 * intermediate]``, or None.
        down_bias: Name of the biases ``[experts, hidden]``, or None.
        transposed: Whether fused projections that are not quantized are ``[experts, K, N]``.
        either: Whether these may be so: they are, where their shape is not ``[experts, N, K]``.
        shared: An MLP that all tokens use besides, or None.
        shared_gate: Name of the weight ``[1, hidden]`` of its gate, or None.
        norms: Norms of their own, where the shared MLP reads another input, or None.
    """

    router: RouterPlan
    gate_up: str
    down: str
    count: int
    shape: tuple[int, int]
    experts: tuple[MlpPlan, ...] = ()
    gate_up_bias: str | None = None
    down_bias: str | None = None
    activation: ActivationPlan = ActivationPlan()
    transposed: bool = False
    either: bool = False
    interleaved: bool = False
    shared: MlpPlan | None = None
    shared_gate: str | None = None
    norms: ExpertNormsPlan | None = None


@dataclass(frozen=True)
class LayerInputPlan:
    """What a layer does with its input; fields as in `minifloat.kernels.decoder.LayerInput`."""

    gate: LinearPlan
    out: LinearPlan
    norm: NormPlan
    activation: ActivationPlan


@dataclass(frozen=True)
class LayerInputsPlan:
    """What layers read of a token besides the residual stream; fields as in `minifloat.kernels.decoder.LayerInputs`.

    Attributes:
        table: Name of the table ``[vocab, layers * size]``.
    """

    table: str
    projection: LinearPlan
    norm: NormPlan
    table_factor: float
    factor: float


@dataclass(frozen=True)
class LayerPlan:
    """A layer; fields as in `minifloat.kernels.decoder.Layer`.

    Attributes:
        scalar: Name of what multiplies the residual stream at the end, ``[1]``; None: nothing does.
    """

    name: str
    input_norm: NormPlan | None
    attention: AttentionPlan | DeltaPlan
    mlp_norm: NormPlan | None
    mlp: MlpPlan | ExpertsPlan
    attention_norm: NormPlan | None = None
    result_norm: NormPlan | None = None
    parallel: bool = False
    residual_factor: float = 1.0
    cache_of: int | None = None
    input: LayerInputPlan | None = None
    scalar: str | None = None

    @property
    def has_cache(self) -> bool:
        """Whether it writes keys and values."""
        return isinstance(self.attention, AttentionPlan) and self.cache_of is None


@dataclass(frozen=True)
class DecoderPlan:
    """A model, from token ids to logits.

    Attributes:
        embedding: Name of the embedding ``[vocab, hidden]``.
        inputs: What layers read of a token besides the residual stream, or None.
    """

    hidden: int
    layers: tuple[LayerPlan, ...]
    embedding: str
    norm: NormPlan
    lm_head: LinearPlan
    embedding_factor: float = 1.0
    rounds_embedding_factor: bool = False
    logits_factor: float = 1.0
    logits_cap: float | None = None
    renamings: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    inputs: LayerInputsPlan | None = None

    @property
    def longest_short_text(self) -> int | None:
        """As `RotaryPlan.longest_short_text`, of all layers."""
        limits = [rotary.longest_short_text for rotary in self._rotaries()]
        return min((limit for limit in limits if limit is not None), default=None)

    def with_long_factors(self) -> DecoderPlan:
        """Return the plan with the factors of long texts, where "longrope" has such."""
        layers = []
        for layer in self.layers:
            attention = layer.attention
            if isinstance(attention, AttentionPlan) and attention.rotary is not None:
                attention = replace(attention, rotary=replace(attention.rotary, long=True))
            layers.append(replace(layer, attention=attention))
        return replace(self, layers=tuple(layers))

    def _rotaries(self) -> list[RotaryPlan]:
        attentions = [layer.attention for layer in self.layers if isinstance(layer.attention, AttentionPlan)]
        return [attention.rotary for attention in attentions if attention.rotary is not None]

    def cached_in(self, layer: LayerPlan) -> LayerPlan:
        """Return the layer whose keys and values a layer reads: itself, unless it shares those of another."""
        return layer if layer.cache_of is None else self.layers[layer.cache_of]


def _shapes(*parts: LinearPlan | NormPlan | None) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts:
        shapes |= {} if part is None else part.shapes()
    return shapes

"""`DecoderLayout`: what a decoder computes, and the names and shapes of its parameters, without any weight."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from minifloat.errors import UnknownNameError

Shapes = dict[str, tuple[int, ...]]

#: Names of activation functions, in the order of ``enum minifloat_activation_kind``.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu")
#: How scores of experts become weights, in the order of ``enum minifloat_router_kind``: softmax over all experts,
#: softmax over the chosen experts, sigmoid.
ROUTERS = ("softmax", "softmax_of_chosen", "sigmoid")
#: Where values come from, in the order of ``enum minifloat_values``: rows of `qkv`; the keys, before their norm and
#: rotation; with the keys, the cache of another layer; the latent, which is the first part of the cached key.
VALUES = ("own", "keys", "shared", "latent")


class NotNative(Exception):
    """The decoders do not support a model; the message says why."""


@dataclass(frozen=True)
class LinearLayout:
    name: str
    shape: tuple[int, int]
    has_bias: bool = False

    @property
    def weight(self) -> str:
        return f"{self.name}.weight"

    @property
    def bias(self) -> str | None:
        return f"{self.name}.bias" if self.has_bias else None

    def shapes(self) -> Shapes:
        shapes: Shapes = {self.weight: self.shape}
        return shapes | {self.bias: self.shape[:1]} if self.bias else shapes


@dataclass(frozen=True)
class NormLayout:
    """A norm; its weight is ``(weight + offset) * factor``, or ones where there is no name."""

    weight: str | None
    shape: tuple[int, ...]
    eps: float
    bias: str | None = None
    centered: bool = False
    offset: float = 0.0
    factor: float = 1.0

    def shapes(self) -> Shapes:
        return {name: self.shape for name in (self.weight, self.bias) if name is not None}


@dataclass(frozen=True)
class RotaryLayout:
    parameters: tuple[tuple[str, Any], ...]  #: those of the config, sorted
    head_dim: int
    positions: int  #: tokens of the longest text
    interleaved: bool = False  #: whether neighbouring dimensions turn together
    partial: bool = False  #: whether ``partial_rotary_factor`` applies
    long: bool = False  #: whether the factors of long texts of "longrope" apply

    @property
    def longest_short_text(self) -> int | None:
        """Tokens of the longest text that has the short factors of "longrope"; None where no text has others."""
        values = dict(self.parameters)
        if values.get("rope_type") != "longrope" or values["original_max_position_embeddings"] >= self.positions:
            return None
        return int(values["original_max_position_embeddings"])


@dataclass(frozen=True)
class LatentLayout:
    up: LinearLayout  #: its rows are, for each head, those of keys ``[plain, rank]`` and values ``[value_dim, rank]``
    plain: int
    value_dim: int
    kv_norm: NormLayout | None
    q_up: LinearLayout | None = None
    q_norm: NormLayout | None = None

    def shapes(self) -> Shapes:
        return shapes_of(self.up, self.kv_norm, self.q_up, self.q_norm)


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """Softmax attention of grouped queries."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    _: KW_ONLY
    whole_norms: bool = False  #: whether the norms of q and k are over all heads together
    window: int | None = None  #: a query sees the last `window` keys, its own included; None for all keys up to its own
    score_cap: float | None = None  #: scores become ``cap * tanh(score / cap)``; None: they do not
    clip: float | None = None  #: q, k and v are clamped to this magnitude after their products; None: they are not
    gated: bool = False  #: whether rows of q are ``[q | gate]`` for each head
    values: str = "own"  #: one of `VALUES`


@dataclass(frozen=True)
class AttentionLayout(AttentionOptions):
    """Attention; `sinks`: name of the scores ``[heads]`` that take part in the softmax."""

    qkv: tuple[LinearLayout, ...]
    out: LinearLayout
    rotary: RotaryLayout | None
    q_norm: NormLayout | None = None
    k_norm: NormLayout | None = None
    v_norm: NormLayout | None = None
    sinks: str | None = None
    latent: LatentLayout | None = None

    def shapes(self) -> Shapes:
        sinks: Shapes = {} if self.sinks is None else {self.sinks: (self.heads,)}
        latent = {} if self.latent is None else self.latent.shapes()
        return shapes_of(*self.qkv, self.out, self.q_norm, self.k_norm, self.v_norm) | sinks | latent


@dataclass(frozen=True, eq=False)
class DeltaOptions:
    """The gated delta rule of a layer, in the place of attention."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    _: KW_ONLY
    grouped: bool = (
        False  #: whether the rows of a product are those of each key head in turn, not those of q, then of k
    )


@dataclass(frozen=True)
class DeltaLayout(DeltaOptions):
    conv_width: int
    qkvz: tuple[LinearLayout, ...]
    ba: tuple[LinearLayout, ...]
    out: LinearLayout
    conv: str  #: name of the weight ``[channels, 1, conv_width]`` of the convolution
    decay: str  #: name of the logarithms ``[v_heads]`` of the decays
    dt_bias: str  #: name of what is added to a, ``[v_heads]``
    norm: NormLayout

    def shapes(self) -> Shapes:
        channels = 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim
        vectors: Shapes = {
            self.conv: (channels, 1, self.conv_width),
            self.decay: (self.v_heads,),
            self.dt_bias: (self.v_heads,),
        }
        return shapes_of(*self.qkvz, *self.ba, self.out) | vectors | self.norm.shapes()


@dataclass(frozen=True)
class Activation:
    """What an MLP does between its products; `alpha` and `limit` are those of "clamped_swiglu"."""

    name: str = "silu"
    gated: bool = True
    alpha: float = 1.0
    limit: float = float("inf")

    @property
    def kind(self) -> str:
        """The name, as the field of the C structure is called."""
        return self.name

    @property
    def inputs(self) -> int:
        """Projections whose results it takes."""
        return 2 if self.gated else 1

    def check(self, name: str) -> None:
        if self.name not in ACTIVATIONS:
            raise UnknownNameError(f"{name}.activation", self.name, ACTIVATIONS)


#: Of most models.
SILU = Activation()


@dataclass(frozen=True)
class MlpLayout:
    """``down(function(gate(x)) * up(x))``, or ``down(function(up(x)))``."""

    gate_up: tuple[LinearLayout, ...]
    down: LinearLayout
    activation: Activation = SILU

    def shapes(self) -> Shapes:
        return shapes_of(*self.gate_up, self.down)


@dataclass(frozen=True, eq=False)
class RouterOptions:
    _: KW_ONLY
    top_k: int
    kind: str = "softmax"  #: one of `ROUTERS`
    normalize: bool = False  #: whether the weights of the chosen experts sum to 1
    groups: int = 1
    groups_kept: int = 1  #: experts of so many best groups alone are chosen
    group_best: int = 2  #: a group counts as the sum of this number of its best scores, 1 or 2
    factor: float = 1.0  #: multiplies the weights


@dataclass(frozen=True)
class RouterLayout(RouterOptions):
    """A router: names of ``[experts, hidden]``, and of ``[experts]`` each."""

    weight: str
    bias: str | None = None
    correction: str | None = None  #: what is added to the scores for the choice alone
    scales: str | None = None  #: what multiplies the weights at the end


@dataclass(frozen=True)
class ExpertNormsLayout:
    router: NormLayout
    input: NormLayout
    experts: NormLayout
    mlp: NormLayout


@dataclass(frozen=True)
class ExpertsLayout:
    """An MLP of which each token uses some of many experts."""

    router: RouterLayout
    gate_up: str  #: name of the fused projections, and of `down` too, whether or not experts are stored one by one
    down: str
    count: int
    shape: tuple[int, int]  #: intermediate and hidden size
    experts: tuple[MlpLayout, ...] = ()
    gate_up_bias: str | None = None  #: name of the biases ``[experts, 2 * intermediate]``, or None
    down_bias: str | None = None  #: name of the biases ``[experts, hidden]``, or None
    activation: Activation = SILU
    transposed: bool = False  #: whether fused projections that are not quantized are ``[experts, K, N]``
    either: bool = False  #: whether these may be so: they are, where their shape is not ``[experts, N, K]``
    interleaved: bool = False  #: whether the rows of gate and up alternate
    shared: MlpLayout | None = None  #: an MLP that all tokens use besides, or None
    shared_gate: str | None = None  #: name of the weight ``[1, hidden]`` of its gate, or None
    norms: ExpertNormsLayout | None = None  #: norms of their own, where the shared MLP reads another input, or None

    def shapes(self) -> Shapes:
        (intermediate, hidden), router = self.shape, self.router
        shapes: Shapes = {router.weight: (self.count, hidden)}
        vectors = (router.bias, router.correction, router.scales)
        shapes |= {name: (self.count,) for name in vectors if name is not None}
        if self.experts:
            shapes |= shapes_of(*(linear for expert in self.experts for linear in expert.gate_up))
            shapes |= shapes_of(*(expert.down for expert in self.experts))
        else:
            shapes |= self.fused_shapes()
        if self.gate_up_bias is not None:
            shapes[self.gate_up_bias] = (self.count, 2 * intermediate)
        if self.down_bias is not None:
            shapes[self.down_bias] = (self.count, hidden)
        shapes |= shapes_of(self.shared)
        if self.shared_gate is not None:
            shapes[self.shared_gate] = (1, hidden)
        if self.norms is not None:
            shapes |= shapes_of(self.norms.router, self.norms.input, self.norms.experts, self.norms.mlp)
        return shapes

    def fused_shapes(self) -> dict[str, tuple[int, int, int]]:
        """Return the shapes of the fused projections by name."""
        intermediate, hidden = self.shape
        return {self.gate_up: (self.count, 2 * intermediate, hidden), self.down: (self.count, hidden, intermediate)}


@dataclass(frozen=True)
class LayerInputLayout:
    """What a layer does with its input: ``x += norm(out(function(gate(x)) * input))``, after the MLP."""

    gate: LinearLayout
    out: LinearLayout
    norm: NormLayout
    activation: Activation

    def shapes(self) -> Shapes:
        return shapes_of(self.gate, self.out, self.norm)


@dataclass(frozen=True, eq=False)
class LayerInputsOptions:
    """``(norm(projection(embedding of the token)) + row of the token in table * table_factor) * factor``."""

    _: KW_ONLY
    table_factor: float = 1.0
    factor: float = 1.0


@dataclass(frozen=True)
class LayerInputsLayout(LayerInputsOptions):
    """What layers read of a token besides the residual stream; `table`: name of ``[vocab, layers * size]``."""

    table: str
    projection: LinearLayout
    norm: NormLayout


@dataclass(frozen=True, eq=False)
class LayerOptions:
    """``x += attention_norm(attention(input_norm(x)))``, then ``x += result_norm(mlp(mlp_norm(x)))``."""

    _: KW_ONLY
    parallel: bool = False  #: whether the MLP does not see the result of attention
    residual_factor: float = 1.0  #: multiplies both results
    cache_of: int | None = None  #: an earlier layer whose keys and values attention reads; None: its own


@dataclass(frozen=True)
class LayerLayout(LayerOptions):
    """A layer; `scalar`: name of what multiplies the residual stream at the end, ``[1]``."""

    name: str
    input_norm: NormLayout | None
    attention: AttentionLayout | DeltaLayout
    mlp_norm: NormLayout | None
    mlp: MlpLayout | ExpertsLayout
    attention_norm: NormLayout | None = None
    result_norm: NormLayout | None = None
    input: LayerInputLayout | None = None
    scalar: str | None = None

    @property
    def has_cache(self) -> bool:
        return isinstance(self.attention, AttentionLayout) and self.cache_of is None

    def shapes(self) -> Shapes:
        before = shapes_of(self.input_norm, self.attention_norm, self.attention, self.mlp_norm, self.result_norm)
        scalar: Shapes = {} if self.scalar is None else {self.scalar: (1,)}
        return before | shapes_of(self.mlp, self.input) | scalar


@dataclass(frozen=True, eq=False)
class DecoderOptions:
    """Factors of a model; `logits_cap`: logits become ``cap * tanh(logit / cap)`` after their factor."""

    _: KW_ONLY
    embedding_factor: float = 1.0
    logits_factor: float = 1.0
    logits_cap: float | None = None


@dataclass(frozen=True)
class DecoderLayout(DecoderOptions):
    hidden: int
    layers: tuple[LayerLayout, ...]
    embedding: str  #: name of the embedding ``[vocab, hidden]``
    norm: NormLayout
    lm_head: LinearLayout
    rounds_embedding_factor: bool = False  #: whether the factor is rounded to the model's dtype
    renamings: tuple[tuple[str, str], ...] = ()  #: patterns of names on disk, and what they become
    unused: tuple[str, ...] = ()  #: patterns of names on disk that no layer reads
    inputs: LayerInputsLayout | None = None  #: what layers read of a token besides the residual stream, or None

    def shapes(self) -> Shapes:
        shapes: Shapes = {self.embedding: self.lm_head.shape} | self.lm_head.shapes()
        if self.inputs is not None:
            projection = self.inputs.projection
            shapes[self.inputs.table] = (self.lm_head.shape[0], projection.shape[0])
            shapes |= shapes_of(projection, self.inputs.norm)
        return shapes | shapes_of(*self.layers, self.norm)

    @property
    def longest_short_text(self) -> int | None:
        """The least `RotaryLayout.longest_short_text` of all layers."""
        attentions = [layer.attention for layer in self.layers if isinstance(layer.attention, AttentionLayout)]
        limits = [attention.rotary.longest_short_text for attention in attentions if attention.rotary is not None]
        return min((limit for limit in limits if limit is not None), default=None)

    def with_long_factors(self) -> DecoderLayout:
        """Return the layout with the factors of long texts, where "longrope" has such."""
        layers = []
        for layer in self.layers:
            attention = layer.attention
            if isinstance(attention, AttentionLayout) and attention.rotary is not None:
                attention = replace(attention, rotary=replace(attention.rotary, long=True))
            layers.append(replace(layer, attention=attention))
        return replace(self, layers=tuple(layers))

    def cached_in(self, layer: LayerLayout) -> LayerLayout:
        """Return the layer whose keys and values a layer reads: itself, unless it shares those of another."""
        return layer if layer.cache_of is None else self.layers[layer.cache_of]


def shapes_of(*parts: Any) -> Shapes:
    """Return the shapes of the parameters of some parts, which may be None."""
    shapes: Shapes = {}
    for part in parts:
        shapes |= {} if part is None else part.shapes()
    return shapes

"""The structure of a model of the Llama family: what its config says, and the names and shapes of its parameters.

Both decoders, that of the CPU (`native_decoder.py`) and that of GPUs (`device/decoder.py`), are built from a
`Blueprint` and a `WeightSource`. No model of transformers is built for that. Structure and names are those of
transformers' classes, which tests/serve/engine/test_blueprint.py compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minifloat.architecture.decoder_families import why_not_family
from minifloat.checkpoint import CONFIG_FILE
from minifloat.errors import ConfigError
from minifloat.kernels.dtypes import DTYPES
from minifloat.runtime.tensors import ignorable_names
from minifloat.runtime.weights import FusedParameter, ModelParameters
from minifloat.serve.engine.rotary import rotary_frequencies

#: ``model_type`` -> the class in transformers.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
#: ``model_type`` -> names on disk that differ from those of the model, as regular expressions and replacements.
_RENAMINGS = {
    "mixtral": (
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
        (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
        (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
    )
}
_EMBEDDING, _NORM, _LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class NotNative(Exception):
    """The decoder does not support a model; the message says why."""


@dataclass(frozen=True)
class LinearPlan:
    """A linear.

    Attributes:
        name: Name of the module.
        shape: ``(N, K)`` of the weight.
        has_bias: Whether it adds a bias.
    """

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
class AttentionPlan:
    """The attention of a layer.

    Attributes:
        q: Projection of queries.
        k: Projection of keys.
        v: Projection of values.
        out: Projection of the result.
        head_norms: Names of the weights of the norms of q and k, or None where there are none.
        window: A query sees the last `window` keys, itself included; None: all before it.
    """

    q: LinearPlan
    k: LinearPlan
    v: LinearPlan
    out: LinearPlan
    head_norms: tuple[str, str] | None
    window: int | None

    @property
    def qkv(self) -> tuple[LinearPlan, LinearPlan, LinearPlan]:
        """The three projections of the input."""
        return self.q, self.k, self.v


@dataclass(frozen=True)
class MlpPlan:
    """``down(silu(gate(x)) * up(x))``."""

    gate: LinearPlan
    up: LinearPlan
    down: LinearPlan


@dataclass(frozen=True)
class ExpertsPlan:
    """An MLP of which each token uses `top_k` of many experts.

    Attributes:
        router: Name of the router's weight ``[experts, hidden]``.
        gate_up: Name of the gate and up projections of all experts, fused.
        down: Name of the down projections of all experts, fused.
        experts: The experts, where they are stored one by one.
        top_k: Experts per token.
        normalizes: Whether the weights of the chosen experts sum to 1.
        shared: An MLP that all tokens use besides, or None.
        shared_gate: Name of the weight ``[1, hidden]`` of its gate, or None.
    """

    router: str
    gate_up: str
    down: str
    experts: tuple[MlpPlan, ...]
    top_k: int
    normalizes: bool
    shared: MlpPlan | None = None
    shared_gate: str | None = None


@dataclass(frozen=True)
class LayerPlan:
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    Attributes:
        name: Name of the layer's module.
        input_norm: Name of the weight of the norm before the attention.
        attention: The first half.
        mlp_norm: Name of the weight of the norm before the MLP.
        mlp: The second half.
    """

    name: str
    input_norm: str
    attention: AttentionPlan
    mlp_norm: str
    mlp: MlpPlan | ExpertsPlan


@dataclass(frozen=True)
class Blueprint:
    """A model of the Llama family, without weights.

    Attributes:
        architecture: Class of the model in transformers.
        config: A `DecoderConfig`, or transformers' config.
        dtype: Dtype of the activations and of the weights that are not quantized.
        heads: Heads of queries.
        kv_heads: Heads of keys and values.
        head_dim: Size of a head.
        inv_freq: float32 ``[head_dim / 2]``: radians per position.
        attention_scaling: Multiplies cosines and sines.
        layers: The layers.
        embedding: Name of the embedding ``[vocab, hidden]``.
        norm: Name of the weight of the norm before `lm_head`.
        lm_head: The last linear.
    """

    architecture: str
    config: Any
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    inv_freq: Tensor
    attention_scaling: float
    layers: tuple[LayerPlan, ...]
    embedding: str
    norm: str
    lm_head: LinearPlan

    @property
    def eps(self) -> float:
        """The epsilon of all norms."""
        return float(self.config.rms_norm_eps)

    @property
    def scale(self) -> float:
        """What multiplies the product of q and k."""
        return float(self.head_dim**-0.5)

    def parameters(self) -> ModelParameters:
        """Return what the model needs from a checkpoint, in the order in which the decoders read it."""
        hidden = int(self.config.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {self.embedding: self.lm_head.shape} | self.lm_head.shapes()
        fused: dict[str, FusedParameter] = {}
        for layer in self.layers:
            attention, mlp = layer.attention, layer.mlp
            shapes |= {layer.input_norm: (hidden,)}
            shapes |= _shapes(*attention.qkv, attention.out)
            shapes |= dict.fromkeys(attention.head_norms or (), (self.head_dim,))
            shapes |= {layer.mlp_norm: (hidden,)}
            if isinstance(mlp, MlpPlan):
                shapes |= _shapes(mlp.gate, mlp.up, mlp.down)
            else:
                shapes |= _experts_shapes(mlp, hidden)
                fused |= _fused_parameters(mlp)
        config = self.config
        return ModelParameters(
            architecture=self.architecture,
            shapes=shapes | {self.norm: (hidden,)},
            fused=fused,
            renamings=_RENAMINGS.get(config.model_type, ()),
            ignorable=ignorable_names(config),
            tied=(self.lm_head.weight, self.embedding) if config.tie_word_embeddings else None,
        )


def why_not_supported(config: Any, dtype: torch.dtype, *, experts: bool = True) -> str:
    """Return why a decoder does not support a model; an empty text if it does, as far as the config tells.

    Args:
        config: A `DecoderConfig`, or transformers' config.
        dtype: Dtype of the activations.
        experts: Whether the decoder supports mixtures of experts.
    """
    if dtype not in DTYPES:
        return f"it is {dtype}"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return why_not_family(config.model_type, getattr(config, "hidden_act", None), rope, experts=experts)


def blueprint_of(config: Any, dtype: torch.dtype) -> Blueprint:
    """Return the structure of a model.

    Args:
        config: A `DecoderConfig`, or transformers' config, of a model that `why_not_supported` has nothing against.
        dtype: Dtype of the activations and of the weights that are not quantized.

    Raises:
        ConfigError: If values are missing from the config, or make no model.
    """
    values: Any = config
    try:
        padding = getattr(values, "pad_token_id", None)
        if padding is not None and not -values.vocab_size <= padding < values.vocab_size:
            raise ValueError(f"pad_token_id: expected a token of {values.vocab_size}, found {padding}")
        head_dim = int(getattr(values, "head_dim", None) or values.hidden_size // values.num_attention_heads)
        inv_freq, attention_scaling = rotary_frequencies(values, head_dim)
        layers = tuple(_layer(values, index, head_dim) for index in range(values.num_hidden_layers))
        return Blueprint(
            architecture=_ARCHITECTURES[values.model_type],
            config=config,
            dtype=dtype,
            heads=int(values.num_attention_heads),
            kv_heads=int(values.num_key_value_heads),
            head_dim=head_dim,
            inv_freq=inv_freq,
            attention_scaling=attention_scaling,
            layers=layers,
            embedding=_EMBEDDING,
            norm=_NORM,
            lm_head=LinearPlan(_LM_HEAD.removesuffix(".weight"), (int(values.vocab_size), int(values.hidden_size))),
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RuntimeError) as error:
        path = f"{values.name_or_path}/{CONFIG_FILE}"
        raise ConfigError(path, f"no {values.model_type} model can be built of it: {error!r}") from error


def _layer(config: Any, index: int, head_dim: int) -> LayerPlan:
    name = f"model.layers.{index}"
    return LayerPlan(
        name=name,
        input_norm=f"{name}.input_layernorm.weight",
        attention=_attention(config, index, head_dim),
        mlp_norm=f"{name}.post_attention_layernorm.weight",
        mlp=_mlp_or_experts(config, index),
    )


def _attention(config: Any, index: int, head_dim: int) -> AttentionPlan:
    name, model_type = f"model.layers.{index}.self_attn", config.model_type
    hidden, rows = config.hidden_size, config.num_attention_heads * head_dim
    kv_rows = config.num_key_value_heads * head_dim
    if model_type in ("llama", "qwen3", "qwen3_moe"):
        qkv_bias = out_bias = bool(config.attention_bias)
    else:
        qkv_bias, out_bias = model_type == "qwen2" or (model_type == "qwen2_moe" and bool(config.qkv_bias)), False
    has_norms = model_type in ("qwen3", "qwen3_moe")
    return AttentionPlan(
        q=LinearPlan(f"{name}.q_proj", (rows, hidden), qkv_bias),
        k=LinearPlan(f"{name}.k_proj", (kv_rows, hidden), qkv_bias),
        v=LinearPlan(f"{name}.v_proj", (kv_rows, hidden), qkv_bias),
        out=LinearPlan(f"{name}.o_proj", (hidden, rows), out_bias),
        head_norms=(f"{name}.q_norm.weight", f"{name}.k_norm.weight") if has_norms else None,
        window=_window(config, index),
    )


def _window(config: Any, index: int) -> int | None:
    """Return the sliding window of a layer: Llama has none, some models have one in some of their layers only."""
    if config.model_type == "llama":
        return None
    if config.model_type in ("qwen2", "qwen2_moe", "qwen3") and config.layer_types[index] != "sliding_attention":
        return None
    window = config.sliding_window
    return None if window is None else int(window)


def _mlp_or_experts(config: Any, index: int) -> MlpPlan | ExpertsPlan:
    name, model_type = f"model.layers.{index}.mlp", config.model_type
    if model_type == "mixtral":
        return _experts(config, name, int(config.intermediate_size), normalizes=True)
    if model_type in ("qwen2_moe", "qwen3_moe"):
        is_sparse = config.num_experts > 0 and (index + 1) % config.decoder_sparse_step == 0
        if is_sparse and index not in config.mlp_only_layers:
            return _experts(config, name, int(config.moe_intermediate_size), normalizes=bool(config.norm_topk_prob))
    return _mlp(config, name, int(config.intermediate_size), has_bias=bool(getattr(config, "mlp_bias", False)))


def _mlp(config: Any, name: str, intermediate: int, *, has_bias: bool = False) -> MlpPlan:
    hidden = int(config.hidden_size)
    return MlpPlan(
        gate=LinearPlan(f"{name}.gate_proj", (intermediate, hidden), has_bias),
        up=LinearPlan(f"{name}.up_proj", (intermediate, hidden), has_bias),
        down=LinearPlan(f"{name}.down_proj", (hidden, intermediate), has_bias),
    )


def _experts(config: Any, name: str, intermediate: int, *, normalizes: bool) -> ExpertsPlan:
    count = int(config.num_local_experts if config.model_type == "mixtral" else config.num_experts)
    has_shared = config.model_type == "qwen2_moe"
    shared = _mlp(config, f"{name}.shared_expert", int(config.shared_expert_intermediate_size)) if has_shared else None
    return ExpertsPlan(
        router=f"{name}.gate.weight",
        gate_up=f"{name}.experts.gate_up_proj",
        down=f"{name}.experts.down_proj",
        experts=tuple(_mlp(config, f"{name}.experts.{index}", intermediate) for index in range(count)),
        top_k=int(config.num_experts_per_tok),
        normalizes=normalizes,
        shared=shared,
        shared_gate=f"{name}.shared_expert_gate.weight" if has_shared else None,
    )


def _experts_shapes(plan: ExpertsPlan, hidden: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {plan.router: (len(plan.experts), hidden)}
    shapes |= _shapes(*(linear for expert in plan.experts for linear in (expert.gate, expert.up)))
    shapes |= _shapes(*(expert.down for expert in plan.experts))
    if plan.shared is not None and plan.shared_gate is not None:
        shapes |= _shapes(plan.shared.gate, plan.shared.up, plan.shared.down) | {plan.shared_gate: (1, hidden)}
    return shapes


def _fused_parameters(plan: ExpertsPlan) -> dict[str, FusedParameter]:
    rows, hidden = plan.experts[0].gate.shape
    count = len(plan.experts)
    gate_up = tuple((expert.gate.weight, expert.up.weight) for expert in plan.experts)
    down = tuple((expert.down.weight,) for expert in plan.experts)
    return {
        plan.gate_up: FusedParameter((count, 2 * rows, hidden), gate_up),
        plan.down: FusedParameter((count, hidden, rows), down),
    }


def _shapes(*linears: LinearPlan) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for linear in linears:
        shapes |= linear.shapes()
    return shapes

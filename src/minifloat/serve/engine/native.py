"""Runs models of the Llama family by `minifloat.kernels.decoder`: all layers of a step in one call.

The model that `minifloat.runtime.load` has made is taken apart: its packed weights become those of a `Decoder`, its
other linears are packed as BF16, and what is left of it is forgotten. Nothing of the model's own code runs afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from minifloat.architecture.decoder_families import why_not_family
from minifloat.errors import MinifloatError
from minifloat.kernels.decoder import Attention, Decoder, Experts, KVCache, Layer, Mlp, StepBatch, step
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.linear.triton import GpuWeight
from minifloat.kernels.moe import PackedExperts
from minifloat.kernels.pack import FusedWeights, PackedWeight, pack
from minifloat.numerics.formats import E4M3, FLOAT32
from minifloat.numerics.granularity import CHANNEL
from minifloat.numerics.scheme import WeightSpec
from minifloat.numerics.tensor import QuantizedTensor, quantize_tensor
from minifloat.runtime.experts import QuantizedExperts
from minifloat.runtime.kv_scales import KVScales
from minifloat.runtime.linear import QuantizedLinear, QuantizedWeight
from minifloat.serve.engine.cache import blocks_for
from minifloat.serve.engine.scheduler import Work
from minifloat.serve.engine.sequence import Sequence

#: What "fp8" makes of the last linear.
LM_HEAD_FP8 = WeightSpec(E4M3, CHANNEL, FLOAT32)


class NotNative(Exception):
    """The native decoder does not cover a model; the message says why."""


def decoder_of(model: PreTrainedModel, scales: KVScales, *, lm_head_fp8: bool = False) -> Decoder:
    """Take a model apart.

    Args:
        model: Made by `minifloat.runtime.load.load`. Its weights are moved out of it: it cannot be used afterwards, not
            where this raises either, unless the reason was found before (`why_not_native`).
        scales: Of an E4M3 cache, of all attention modules; empty for another cache.
        lm_head_fp8: Quantize the last linear to FP8 per channel, if it is not quantized.

    Raises:
        NotNative: It has a weight that cannot be packed.
    """
    reason = why_not_native(model)
    if reason:
        raise NotNative(reason)
    parts = _Parts(model)
    whole: Any = model
    config: Any = model.config
    core = whole.model
    embedding = core.embed_tokens.weight.detach()
    head = parts.weight(whole.get_output_embeddings(), quantize=LM_HEAD_FP8 if lm_head_fp8 else None)
    layers = tuple(
        parts.layer(layer, scales.get(f"model.layers.{index}.self_attn", (1.0, 1.0)))
        for index, layer in enumerate(core.layers)
    )
    first: Any = core.layers[0].self_attn
    try:
        return Decoder(
            dtype=model.dtype,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=first.head_dim,
            eps=config.rms_norm_eps,
            inv_freq=core.rotary_emb.inv_freq.float().contiguous(),
            attention_scaling=float(core.rotary_emb.attention_scaling),
            scale=float(first.scaling),
            embedding=embedding.contiguous(),
            layers=layers,
            norm=norm_of(core.norm),
            lm_head=head,
        )
    except MinifloatError as error:
        raise NotNative(str(error)) from error


def why_not_native(model: PreTrainedModel) -> str:
    """Why the native decoder does not cover a model; empty where it does, as far as the config tells."""
    config: Any = model.config
    if model.dtype not in DTYPES:
        return f"it is {model.dtype}"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return why_not_family(config.model_type, getattr(config, "hidden_act", None), rope)


class _Parts:
    """Moves weights out of a model.

    Args:
        model: As in `decoder_of`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}

    def layer(self, layer: Any, scales: tuple[float, float]) -> Layer:
        """One layer."""
        attention = layer.self_attn
        mlp = layer.mlp
        return Layer(
            norm_of(layer.input_layernorm),
            self._attention(attention, scales),
            norm_of(layer.post_attention_layernorm),
            self._experts(mlp) if hasattr(mlp, "experts") else self._mlp(mlp),
        )

    def weight(self, module: Any, *, quantize: WeightSpec | None = None) -> PackedWeight:
        """The packed weight of a linear, which loses it.

        Raises:
            NotNative: There is no packed form of it.
        """
        name = self._names[id(module)]
        if isinstance(module, QuantizedLinear):
            return self._held(module, name)
        if type(module) is not nn.Linear:
            raise NotNative(f"{name} is a {type(module).__name__}")
        weight = module.weight.detach()
        module.register_parameter("weight", None)
        return self._pack(quantize_tensor(weight, quantize) if quantize is not None else weight, name)

    def _held(self, module: QuantizedWeight, name: str) -> PackedWeight:
        held = module.held
        if isinstance(held, GpuWeight):
            raise NotNative(f"{name} is on a GPU")
        return held if isinstance(held, PackedWeight) else self._pack(held, name)

    def _pack(self, weight: Tensor | QuantizedTensor, name: str) -> PackedWeight:
        if isinstance(weight, Tensor) and weight.dtype != torch.bfloat16:
            rounded = weight.bfloat16()
            if not torch.equal(rounded.to(weight.dtype), weight):
                raise NotNative(f"{name} is {weight.dtype} and BF16, which the kernels multiply, does not hold it")
            weight = rounded
        try:
            return pack(weight)
        except MinifloatError as error:
            raise NotNative(f"{name}: {error}") from error

    def _fused(self, modules: Sequences[Any]) -> FusedWeights:
        try:
            return FusedWeights([self.weight(module) for module in modules])
        except MinifloatError as error:
            raise NotNative(f"{self._names[id(modules[0])]} and those beside it: {error}") from error

    def _attention(self, module: Any, scales: tuple[float, float]) -> Attention:
        qkv = (module.q_proj, module.k_proj, module.v_proj)
        return Attention(
            qkv=self._fused(qkv),
            out=self.weight(module.o_proj),
            qkv_bias=_biases(qkv),
            out_bias=bias_of(module.o_proj),
            q_norm=norm_of(module.q_norm) if hasattr(module, "q_norm") else None,
            k_norm=norm_of(module.k_norm) if hasattr(module, "k_norm") else None,
            window=window_of(module),
            k_scale=scales[0],
            v_scale=scales[1],
        )

    def _mlp(self, module: Any) -> Mlp:
        gate_up = (module.gate_proj, module.up_proj)
        return Mlp(self._fused(gate_up), self.weight(module.down_proj), _biases(gate_up), bias_of(module.down_proj))

    def _experts(self, module: Any) -> Experts:
        shared = getattr(module, "shared_expert", None)
        gate = getattr(module, "shared_expert_gate", None)
        name = self._names[id(module.experts)]
        return Experts(
            router=module.gate.weight.detach().float().contiguous(),
            top_k=module.gate.top_k,
            # Mixtral's router has no such switch: it always does.
            normalize=bool(getattr(module.gate, "norm_topk_prob", True)),
            gate_up=self._stacks(module.experts, "gate_up_proj", name),
            down=self._stacks(module.experts, "down_proj", name)[0],
            shared=None if shared is None else self._mlp(shared),
            shared_gate=None if gate is None else gate.weight.detach().float().flatten(),
        )

    def _stacks(self, owner: Any, leaf: str, name: str) -> tuple[PackedExperts, ...]:
        """The weights of all experts: one stack, or one for each of the parts that they are stored in."""
        held = getattr(owner, leaf)
        if isinstance(held, QuantizedExperts):
            if held.transposed:
                raise NotNative(f"{name}.{leaf} is transposed")
            experts: list[Any] = [list(parts.children()) for parts in held.experts.children()]
            columns = list(zip(*experts, strict=True))
            delattr(owner, leaf)
            return tuple(PackedExperts([self._held(part, f"{name}.{leaf}") for part in column]) for column in columns)
        weights = held.detach()
        owner.register_parameter(leaf, None)
        return (PackedExperts([self._pack(weight, f"{name}.{leaf}") for weight in weights]),)


def norm_of(module: Any) -> Tensor:
    """The weight of an RMS norm, in float32."""
    weight: Tensor = module.weight
    return weight.detach().float().contiguous()


def bias_of(module: Any) -> Tensor | None:
    """The bias of a linear, where it has one."""
    bias: Tensor | None = module.bias
    return None if bias is None else bias.detach().contiguous()


def _biases(modules: Sequences[Any]) -> tuple[Tensor | None, ...] | None:
    biases = tuple(bias_of(module) for module in modules)
    return None if all(bias is None for bias in biases) else biases


def window_of(module: Any) -> int | None:
    """The sliding window of an attention module; Mistral keeps it in its config alone."""
    if hasattr(module, "sliding_window"):
        window = module.sliding_window
    else:
        window = getattr(module.config, "sliding_window", None) if module.config.model_type == "mistral" else None
    return None if window is None else int(window)


class NativeRunner:
    """See `minifloat.serve.engine.runner.Runner`.

    Args:
        decoder: The model.
        blocks: Blocks of the KV cache.
        element: Their format, one of `minifloat.kernels.decoder.cache.ELEMENTS`.
        impl: As in `minifloat.kernels.decoder.step`.
    """

    name = "native"

    def __init__(self, decoder: Decoder, blocks: int, element: str, impl: str = "auto") -> None:
        self._decoder, self._impl = decoder, impl
        self._cache = KVCache(len(decoder.layers), decoder.kv_heads, decoder.head_dim, blocks, element)
        self.weight_bytes = round(_bytes_per_token(decoder))
        self.kv_element, self.kv_bytes = element, self._cache.nbytes
        self.vocab = decoder.lm_head.shape[0]

    def run(self, works: Sequences[Work]) -> Tensor:
        """As the interface says."""
        return step(self._decoder, self._cache, batch_of(works), impl=self._impl)

    def release(self, sequence: Sequence) -> None:
        """Nothing: all is in blocks, which are the scheduler's."""


def batch_of(works: Sequences[Work]) -> StepBatch:
    """What the decoder computes for some works."""
    tokens: list[int] = []
    positions: list[int] = []
    starts, contexts = [0], []
    logits: list[int] = []
    width = max(len(work.sequence.blocks) for work in works)
    blocks = []
    for work in works:
        tokens += work.sequence.tokens[work.start : work.end]
        positions += range(work.start, work.end)
        starts.append(len(tokens))
        contexts.append(work.end)
        used = work.sequence.blocks[: blocks_for(work.end)]
        blocks.append(used + [-1] * (width - len(used)))
        logits += range(len(tokens) - work.logits, len(tokens))
    return StepBatch(
        *(torch.tensor(values, dtype=torch.int32) for values in (tokens, positions, starts, contexts, blocks, logits))
    )


def _bytes_per_token(decoder: Decoder) -> float:
    """Bytes of the weights that one token is multiplied with: of experts only those that it uses."""
    total: float = decoder.lm_head.nbytes
    for layer in decoder.layers:
        mlp = layer.mlp
        weights = [*layer.attention.qkv, layer.attention.out]
        if isinstance(mlp, Experts):
            stacks = (*mlp.gate_up, mlp.down)
            total += sum(weight.nbytes for stack in stacks for weight in stack) * mlp.top_k / len(mlp.down)
            weights += [] if mlp.shared is None else [*mlp.shared.gate_up, mlp.shared.down]
        else:
            weights += [*mlp.gate_up, mlp.down]
        total += sum(weight.nbytes for weight in weights)
    return total

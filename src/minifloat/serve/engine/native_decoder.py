"""Builds the decoder of the CPU, `minifloat.kernels.decoder.Decoder`, straight from a checkpoint.

Each weight is packed as soon as it is read, in the format that it is stored in, or as BF16.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from minifloat.architecture.decoder.plan import (
    ActivationPlan,
    AttentionPlan,
    DeltaPlan,
    ExpertNormsPlan,
    ExpertsPlan,
    LatentPlan,
    LayerInputPlan,
    LayerPlan,
    LinearPlan,
    MlpPlan,
    NormPlan,
    NotNative,
    RotaryPlan,
    RouterPlan,
)
from minifloat.errors import MinifloatError
from minifloat.kernels import native
from minifloat.kernels.decoder import (
    Activation,
    Attention,
    Decoder,
    DeltaNet,
    ExpertNorms,
    Experts,
    Latent,
    Layer,
    LayerInput,
    LayerInputs,
    Mlp,
    Norm,
    Rotary,
    Router,
)
from minifloat.kernels.moe import PackedExperts
from minifloat.kernels.pack import FusedWeights, PackedWeight, pack
from minifloat.numerics.scheme import WeightSpec
from minifloat.numerics.tensor import QuantizedTensor
from minifloat.runtime.kv_scales import KVScales
from minifloat.runtime.linear import QuantizedWeight
from minifloat.runtime.lm_head import quantize_lm_head
from minifloat.runtime.packed_cache import PackedCache, UnusableCache
from minifloat.runtime.packing import Packing
from minifloat.runtime.weights import WeightSource
from minifloat.serve.engine.blueprint import Blueprint
from minifloat.serve.engine.latent_weights import head_formats, head_weights
from minifloat.serve.engine.mapped_weights import MappedWeights, contents
from minifloat.serve.engine.rotary import rotary_frequencies

_LOG = logging.getLogger(__name__)
_CPU = torch.device("cpu")
_Weights = TypeVar("_Weights", FusedWeights, PackedExperts)


def build_native_decoder(
    blueprint: Blueprint,
    weights: WeightSource,
    scales: KVScales,
    *,
    impl: str = "auto",
    lm_head: WeightSpec | None = None,
    int8_inputs: bool = False,
    cache: PackedCache | None = None,
) -> Decoder:
    """Read and pack the weights of a model, or map those that were packed before.

    Args:
        blueprint: The structure of the model.
        weights: Its weights, on the CPU.
        scales: Scales of an E4M3 cache for all attention modules; empty for another cache.
        impl: As in `minifloat.runtime.load.load`.
        lm_head: The format that the last linear is quantized to, unless it is stored quantized; None: it is not.
        int8_inputs: Whether the kernels may round inputs of quantized weights to int8.
        cache: Where packed weights are kept; not used where the kernels cannot run.

    Raises:
        NotNative: If a weight cannot be packed.
        KernelUnavailable: If `impl` asks for the kernels and a weight cannot be packed for them.
        TensorError: If a scale is NaN or Inf, or a tensor has a dtype that is no parameter's.
    """

    def build(mapped: MappedWeights | None) -> tuple[Decoder, _Builder]:
        builder = _Builder(blueprint, weights, Packing(impl, _CPU, int8_inputs=int8_inputs), mapped)
        return _build(builder, scales, lm_head, int8_inputs=int8_inputs), builder

    container = None if cache is None or native.why_unavailable() else cache.load()
    if cache is not None and container is not None:
        try:
            return build(MappedWeights(container))[0]
        except UnusableCache as error:
            cache.refuse(error)
    decoder, builder = build(None)
    if cache is not None:
        builder.keep(cache)
    return decoder


def _build(builder: _Builder, scales: KVScales, lm_head: WeightSpec | None, *, int8_inputs: bool) -> Decoder:
    """Build the decoder, as `build_native_decoder`.

    Raises:
        UnusableCache: If the file of packed weights does not have all of them.
    """
    blueprint, weights = builder.blueprint, builder.weights
    plan = blueprint.plan
    with builder.reading():
        embedding = builder.table(plan.embedding, plan.lm_head.shape)
        inputs = builder.inputs()
        is_tied = weights.is_same_tensor(plan.embedding, plan.lm_head.weight)
        head = builder.lm_head(embedding if is_tied else None, lm_head)
        layers = tuple(
            builder.layer(layer, scales.get(f"{plan.cached_in(layer).name}.self_attn", (1.0, 1.0)))
            for layer in plan.layers
        )
        norm = builder.norm(plan.norm)
    builder.warn()
    try:
        return Decoder(
            dtype=blueprint.dtype,
            embedding=embedding,
            layers=layers,
            norm=norm,
            lm_head=head,
            embedding_factor=embedding_factor(blueprint),
            logits_factor=plan.logits_factor,
            logits_cap=plan.logits_cap,
            int8_inputs=int8_inputs,
            inputs=inputs,
        )
    except MinifloatError as error:
        raise NotNative(str(error)) from error


def embedding_factor(blueprint: Blueprint) -> float:
    """Return what multiplies the embedding, rounded as transformers rounds it."""
    plan = blueprint.plan
    return _rounded(plan.embedding_factor, blueprint.dtype if plan.rounds_embedding_factor else torch.float32)


def _rounded(factor: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(factor).to(dtype))


class _Builder:
    """Packs the weights of a model, part by part, or takes them from a file of packed weights.

    Attributes:
        blueprint: The structure of the model.
        weights: Its weights.
    """

    def __init__(
        self, blueprint: Blueprint, weights: WeightSource, packing: Packing, mapped: MappedWeights | None
    ) -> None:
        self.blueprint, self.weights = blueprint, weights
        self._packing, self._mapped = packing, mapped
        self._made: dict[str, PackedWeight | Tensor] = {}
        self._rotaries: dict[RotaryPlan, Rotary] = {}
        self._keys_in_bf16: list[str] = []
        self._bytes_in_bf16, self._rounds_keys = 0, False

    def reading(self) -> AbstractContextManager[None]:
        """Read weights ahead, if they are read at all."""
        return self.weights.reading_ahead() if self._mapped is None else nullcontext()

    def keep(self, cache: PackedCache) -> None:
        """Write what was packed to a cache, unless the log would have to say more about it at every start."""
        if self._packing.packs_all and not self.weights.dequantized:
            cache.store({name: contents(made) for name, made in self._made.items()})
        else:
            _LOG.warning("the packed weights are not kept: the kernels do not multiply all of them as they are stored")

    def table(self, name: str, shape: tuple[int, int]) -> Tensor:
        """Return an embedding ``[vocab, size]``."""
        if self._mapped is not None:
            return self._mapped.tensor(name, shape, self.blueprint.dtype)
        table = self.weights.tensor(name).contiguous()
        self._made[name] = table
        return table

    def inputs(self) -> LayerInputs | None:
        """Return what layers read of a token besides the residual stream, or None."""
        plan, vocab = self.blueprint.plan.inputs, self.blueprint.plan.lm_head.shape[0]
        if plan is None:
            return None
        return LayerInputs(
            table=self.table(plan.table, (vocab, plan.projection.shape[0])),
            projection=self._linear(plan.projection),
            norm=self.norm(plan.norm),
            table_factor=_rounded(plan.table_factor, self.blueprint.dtype),
            factor=plan.factor,
        )

    def layer(self, plan: LayerPlan, kv_scales: tuple[float, float]) -> Layer:
        return Layer(
            input_norm=self.norm_or_none(plan.input_norm),
            attention_norm=self.norm_or_none(plan.attention_norm),
            attention=self._mixer(plan.attention, kv_scales),
            mlp_norm=self.norm_or_none(plan.mlp_norm),
            result_norm=self.norm_or_none(plan.result_norm),
            mlp=self._mlp(plan.mlp) if isinstance(plan.mlp, MlpPlan) else self._experts(plan.mlp),
            parallel=plan.parallel,
            residual_factor=plan.residual_factor,
            cache_of=plan.cache_of,
            input=None if plan.input is None else self._input(plan.input),
            scalar=1.0 if plan.scalar is None else float(self.weights.tensor(plan.scalar)),
        )

    def _input(self, plan: LayerInputPlan) -> LayerInput:
        return LayerInput(
            gate=self._linear(plan.gate),
            out=self._linear(plan.out),
            norm=self.norm(plan.norm),
            activation=_activation(plan.activation),
        )

    def norm(self, plan: NormPlan) -> Norm:
        """Return a norm, in float32 after its weight was rounded to the model's dtype."""
        weight = torch.ones(plan.shape) if plan.weight is None else self.weights.tensor(plan.weight).float()
        bias = None if plan.bias is None else self.weights.tensor(plan.bias).float().contiguous()
        weight = (weight + plan.offset) * plan.factor
        return Norm(weight.flatten().contiguous(), plan.eps, bias, plan.centered)

    def norm_or_none(self, plan: NormPlan | None) -> Norm | None:
        """Return a norm, or None where there is none."""
        return None if plan is None else self.norm(plan)

    def lm_head(self, tied: Tensor | None, quantize: WeightSpec | None) -> PackedWeight:
        """Return the last linear.

        Args:
            tied: The embedding, if that is also the weight of this linear.
            quantize: The format that the weight is quantized to, unless it is stored quantized; None: it is not.
        """
        plan = self.blueprint.plan.lm_head
        spec = None if tied is not None else self.weights.spec(plan.weight)

        def make() -> PackedWeight:
            weight = self.weights.matrix(plan.weight) if tied is None else tied
            if quantize is not None and isinstance(weight, Tensor):
                weight = quantize_lm_head(weight, quantize, tied=tied is not None)
            return self._pack_stored(weight, plan.name)

        return self._packed(plan.name, spec or quantize, plan.shape, make)

    def warn(self) -> None:
        """Log the weights that have no packed form, and those that had to be dequantized."""
        self.weights.warn()
        self._packing.warn()
        if self._keys_in_bf16:
            _LOG.log(
                logging.WARNING if self._rounds_keys else logging.INFO,
                "the keys of %d layers of latent attention are multiplied in BF16, %s, in %.1f MB",
                len(self._keys_in_bf16),
                "to which they are rounded" if self._rounds_keys else "which holds them exactly",
                self._bytes_in_bf16 / 1e6,
            )

    def _packed(
        self, name: str, spec: WeightSpec | None, shape: tuple[int, int], make: Callable[[], PackedWeight]
    ) -> PackedWeight:
        """Return a weight from the file of packed weights, or make it.

        Raises:
            UnusableCache: If the file has another weight of this name, or none.
        """
        if self._mapped is not None:
            return self._mapped_weight(self._mapped, name, spec, shape, name)
        weight = make()
        self._made[name] = weight
        return weight

    def _mapped_weight(
        self, mapped: MappedWeights, name: str, spec: WeightSpec | None, shape: tuple[int, int], module: str
    ) -> PackedWeight:
        weight = mapped.weight(name, spec, shape)
        if spec is not None:
            self._packing.count(weight, module)
        return weight

    def _linear(self, plan: LinearPlan) -> PackedWeight:
        def make() -> PackedWeight:
            return self._pack_stored(self.weights.matrix(plan.weight), plan.name)

        return self._packed(plan.name, self.weights.spec(plan.weight), plan.shape, make)

    def _pack_stored(self, weight: Tensor | QuantizedTensor, name: str) -> PackedWeight:
        """Pack a weight, and note one that the kernels of this machine do not multiply.

        Raises:
            NotNative: If the weight has no packed form.
            KernelUnavailable: If the kernels were asked for and do not multiply it.
        """
        if isinstance(weight, Tensor):
            return self._pack(weight, name)
        module = QuantizedWeight(weight, self.blueprint.dtype)
        self._packing.pack(module, name)
        held = module.held
        return held if isinstance(held, PackedWeight) else self._pack(weight, name)

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

    def _fused(self, plans: Sequence[LinearPlan]) -> FusedWeights:
        return _grouped(FusedWeights, [self._linear(plan) for plan in plans], plans[0].name)

    def _bias(self, plan: LinearPlan) -> Tensor | None:
        return None if plan.bias is None else self.weights.tensor(plan.bias).contiguous()

    def _biases(self, plans: Sequence[LinearPlan]) -> tuple[Tensor | None, ...] | None:
        biases = tuple(self._bias(plan) for plan in plans)
        return None if all(bias is None for bias in biases) else biases

    def _vector(self, name: str | None) -> Tensor | None:
        return None if name is None else self.weights.tensor(name).float().contiguous()

    def _rotary(self, plan: RotaryPlan | None) -> Rotary | None:
        """Return a rotary embedding, the same for equal plans."""
        if plan is not None and plan not in self._rotaries:
            self._rotaries[plan] = Rotary(*rotary_frequencies(plan), interleaved=plan.interleaved)
        return None if plan is None else self._rotaries[plan]

    def _mixer(self, plan: AttentionPlan | DeltaPlan, kv_scales: tuple[float, float]) -> Attention | DeltaNet:
        return self._delta(plan) if isinstance(plan, DeltaPlan) else self._attention(plan, kv_scales)

    def _delta(self, plan: DeltaPlan) -> DeltaNet:
        return DeltaNet(
            k_heads=plan.k_heads,
            v_heads=plan.v_heads,
            k_dim=plan.k_dim,
            v_dim=plan.v_dim,
            qkvz=self._fused(plan.qkvz),
            ba=self._fused(plan.ba),
            out=self._linear(plan.out),
            conv=self.weights.tensor(plan.conv).float()[:, 0].T.contiguous(),
            decay=self.weights.tensor(plan.decay).float().exp(),
            dt_bias=self.weights.tensor(plan.dt_bias).float().contiguous(),
            norm=self.norm(plan.norm),
            grouped=plan.grouped,
        )

    def _attention(self, plan: AttentionPlan, kv_scales: tuple[float, float]) -> Attention:
        return Attention(
            heads=plan.heads,
            kv_heads=plan.kv_heads,
            head_dim=plan.head_dim,
            scale=plan.scale,
            qkv=self._fused(plan.qkv),
            out=self._linear(plan.out),
            qkv_bias=self._biases(plan.qkv),
            out_bias=self._bias(plan.out),
            rotary=self._rotary(plan.rotary),
            q_norm=self.norm_or_none(plan.q_norm),
            k_norm=self.norm_or_none(plan.k_norm),
            v_norm=self.norm_or_none(plan.v_norm),
            values=plan.values,
            whole_norms=plan.whole_norms,
            window=plan.window,
            sinks=self._vector(plan.sinks),
            score_cap=plan.score_cap,
            clip=plan.clip,
            gated=plan.gated,
            latent=None if plan.latent is None else self._latent(plan.latent, plan.heads),
            k_scale=kv_scales[0],
            v_scale=kv_scales[1],
        )

    def _latent(self, plan: LatentPlan, heads: int) -> Latent:
        keys, values, factors = self._latent_heads(plan, heads)
        return Latent(
            keys=_grouped(PackedExperts, keys, plan.up.name),
            values=_grouped(PackedExperts, values, plan.up.name),
            key_factors=factors,
            kv_norm=self.norm_or_none(plan.kv_norm),
            q_up=None if plan.q_up is None else self._linear(plan.q_up),
            q_norm=self.norm_or_none(plan.q_norm),
        )

    def _latent_heads(
        self, plan: LatentPlan, heads: int
    ) -> tuple[list[PackedWeight], list[PackedWeight], Tensor | None]:
        """Return the keys and values of each head, and the factors of queries."""
        name, (_, rank) = plan.up.name, plan.up.shape
        formats = head_formats(self.weights.spec(plan.up.weight), plan.plain, plan.value_dim, rank)
        factors_name = f"{name}.factors"
        if self._mapped is not None:
            parts = {"keys": (formats.keys, (rank, plan.plain)), "values": (formats.values, (plan.value_dim, rank))}
            keys, values = (
                [self._mapped_weight(self._mapped, f"{name}.{part}.{head}", *kind, name) for head in range(heads)]
                for part, kind in parts.items()
            )
            shape = (heads, plan.plain)
            factors = self._mapped.tensor(factors_name, shape, torch.float32) if formats.has_factors else None
            return keys, values, factors
        divided = head_weights(self.weights.matrix(plan.up.weight), heads, plan.plain, plan.value_dim)
        keys, values = (
            [self._pack_stored(weight, name) for weight in weights] for weights in (divided.keys, divided.values)
        )
        if self.weights.is_quantized(plan.up.weight) and formats.keys is None:
            self._keys_in_bf16.append(name)
            self._bytes_in_bf16 += sum(weight.nbytes for weight in keys)
            self._rounds_keys |= divided.is_rounded
        self._made |= {f"{name}.keys.{head}": weight for head, weight in enumerate(keys)}
        self._made |= {f"{name}.values.{head}": weight for head, weight in enumerate(values)}
        if divided.factors is not None:
            self._made[factors_name] = divided.factors
        return keys, values, divided.factors

    def _mlp(self, plan: MlpPlan) -> Mlp:
        return Mlp(
            self._fused(plan.gate_up),
            self._linear(plan.down),
            self._biases(plan.gate_up),
            self._bias(plan.down),
            _activation(plan.activation),
        )

    def _experts(self, plan: ExpertsPlan) -> Experts:
        gate_up = self._stacks(plan.gate_up, plan.interleaved)
        return Experts(
            router=self._router(plan.router),
            gate_up=gate_up,
            down=self._stacks(plan.down)[0],
            gate_up_bias=self._gate_up_biases(plan, len(gate_up)),
            down_bias=None if plan.down_bias is None else self.weights.tensor(plan.down_bias).contiguous(),
            activation=_activation(plan.activation),
            shared=None if plan.shared is None else self._mlp(plan.shared),
            shared_gate=None if plan.shared_gate is None else self.weights.tensor(plan.shared_gate).float().flatten(),
            norms=None if plan.norms is None else self._expert_norms(plan.norms),
        )

    def _expert_norms(self, plan: ExpertNormsPlan) -> ExpertNorms:
        return ExpertNorms(
            router=self.norm(plan.router),
            input=self.norm(plan.input),
            experts=self.norm(plan.experts),
            mlp=self.norm(plan.mlp),
        )

    def _gate_up_biases(self, plan: ExpertsPlan, stacks: int) -> tuple[Tensor, ...] | None:
        if plan.gate_up_bias is None:
            return None
        biases = self.weights.tensor(plan.gate_up_bias)
        if plan.interleaved:
            biases = torch.cat([biases[:, ::2], biases[:, 1::2]], dim=1)
        return tuple(part.contiguous() for part in biases.chunk(stacks, dim=1))

    def _router(self, plan: RouterPlan) -> Router:
        return Router(
            weight=self.weights.tensor(plan.weight).float().contiguous(),
            top_k=plan.top_k,
            kind=plan.kind,
            normalize=plan.normalize,
            bias=self._vector(plan.bias),
            correction=self._vector(plan.correction),
            groups=plan.groups,
            groups_kept=plan.groups_kept,
            group_best=plan.group_best,
            factor=plan.factor,
            scales=self._vector(plan.scales),
        )

    def _stacks(self, fused: str, interleaved: bool = False) -> tuple[PackedExperts, ...]:
        """Return the weights of all experts: one stack, or one for each of the parts that they are stored in.

        Args:
            fused: Name of the projection.
            interleaved: Whether rows of gate and up alternate; in the result, all rows of gate are first.
        """
        if self._mapped is not None:
            experts = [
                [
                    self._mapped_weight(self._mapped, f"{fused}.{expert}.{part}", spec, shape, fused)
                    for part, (spec, shape) in enumerate(parts)
                ]
                for expert, parts in enumerate(self.weights.expert_specs(fused))
            ]
        else:
            experts = [
                [self._pack_stored(_gate_first(matrix) if interleaved else matrix, fused) for matrix in matrices]
                for matrices in self.weights.experts(fused)
            ]
            self._made |= {
                f"{fused}.{expert}.{part}": weight
                for expert, parts in enumerate(experts)
                for part, weight in enumerate(parts)
            }
        return tuple(_grouped(PackedExperts, list(column), fused) for column in zip(*experts, strict=True))


def _gate_first(matrix: Tensor | QuantizedTensor) -> Tensor | QuantizedTensor:
    """Put the even rows of a matrix before the odd ones.

    Raises:
        NotNative: If rows share scales.
    """
    if isinstance(matrix, Tensor):
        return torch.cat([matrix[::2], matrix[1::2]])
    if matrix.scale.shape[0] != matrix.shape[0]:
        raise NotNative(f"rows of gate and up alternate, and share scales ({matrix.spec.granularity})")
    order = torch.cat([torch.arange(0, matrix.shape[0], 2), torch.arange(1, matrix.shape[0], 2)])
    return replace(matrix, codes=matrix.codes[order], scale=matrix.scale[order])


def _activation(plan: ActivationPlan) -> Activation:
    return Activation(plan.name, plan.gated, plan.alpha, plan.limit)


def _grouped(kind: type[_Weights], weights: list[PackedWeight], name: str) -> _Weights:
    """Put weights together that one call multiplies with.

    Raises:
        NotNative: If they have several formats.
    """
    try:
        return kind(weights)
    except MinifloatError as error:
        raise NotNative(f"{name} and those beside it: {error}") from error

"""`LayerBuilder`: the parts of the decoder of the CPU from their plans."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.engine.native.weights import NativeWeights, grouped
from minifloat.engine.rotary import rotary_frequencies
from minifloat.kernels.decoder import (
    Activation,
    Attention,
    DeltaNet,
    ExpertNorms,
    Experts,
    Latent,
    Layer,
    LayerInput,
    LayerInputs,
    Mlp,
    Rotary,
    Router,
)
from minifloat.kernels.moe import PackedExperts
from minifloat.model.architecture.decoder.plan import (
    ActivationPlan,
    AttentionPlan,
    DeltaPlan,
    ExpertNormsPlan,
    ExpertsPlan,
    LatentPlan,
    LayerInputPlan,
    LayerPlan,
    MlpPlan,
    RotaryPlan,
    RouterPlan,
)


class LayerBuilder:
    """Builds the parts of a decoder in the order in which their weights are read."""

    def __init__(self, packed: NativeWeights) -> None:
        self._packed = packed
        self._rotaries: dict[RotaryPlan, Rotary] = {}

    def inputs(self) -> LayerInputs | None:
        """Return what layers read of a token besides the residual stream, or None."""
        plan = self._packed.blueprint.plan.inputs
        if plan is None:
            return None
        return LayerInputs(
            table=self._packed.table(plan.table),
            projection=self._packed.linear(plan.projection),
            norm=self._packed.norm(plan.norm),
            table_factor=rounded(plan.table_factor, self._packed.blueprint.dtype),
            factor=plan.factor,
        )

    def layer(self, plan: LayerPlan, kv_scales: tuple[float, float]) -> Layer:
        """Return a layer."""
        return Layer(
            input_norm=self._packed.norm_or_none(plan.input_norm),
            attention_norm=self._packed.norm_or_none(plan.attention_norm),
            attention=self._mixer(plan.attention, kv_scales),
            mlp_norm=self._packed.norm_or_none(plan.mlp_norm),
            result_norm=self._packed.norm_or_none(plan.result_norm),
            mlp=self._mlp(plan.mlp) if isinstance(plan.mlp, MlpPlan) else self._experts(plan.mlp),
            parallel=plan.parallel,
            residual_factor=plan.residual_factor,
            cache_of=plan.cache_of,
            input=None if plan.input is None else self._input(plan.input),
            scalar=1.0 if plan.scalar is None else float(self._packed.weights.tensor(plan.scalar)),
        )

    def _input(self, plan: LayerInputPlan) -> LayerInput:
        return LayerInput(
            gate=self._packed.linear(plan.gate),
            out=self._packed.linear(plan.out),
            norm=self._packed.norm(plan.norm),
            activation=_activation(plan.activation),
        )

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
            qkvz=self._packed.fused(plan.qkvz),
            ba=self._packed.fused(plan.ba),
            out=self._packed.linear(plan.out),
            conv=self._packed.weights.tensor(plan.conv).float()[:, 0].T.contiguous(),
            decay=self._packed.weights.tensor(plan.decay).float().exp(),
            dt_bias=self._packed.weights.tensor(plan.dt_bias).float().contiguous(),
            norm=self._packed.norm(plan.norm),
            grouped=plan.grouped,
        )

    def _attention(self, plan: AttentionPlan, kv_scales: tuple[float, float]) -> Attention:
        return Attention(
            heads=plan.heads,
            kv_heads=plan.kv_heads,
            head_dim=plan.head_dim,
            scale=plan.scale,
            qkv=self._packed.fused(plan.qkv),
            out=self._packed.linear(plan.out),
            qkv_bias=self._packed.biases(plan.qkv),
            out_bias=self._packed.bias(plan.out),
            rotary=self._rotary(plan.rotary),
            q_norm=self._packed.norm_or_none(plan.q_norm),
            k_norm=self._packed.norm_or_none(plan.k_norm),
            v_norm=self._packed.norm_or_none(plan.v_norm),
            values=plan.values,
            whole_norms=plan.whole_norms,
            window=plan.window,
            sinks=self._packed.vector(plan.sinks),
            score_cap=plan.score_cap,
            clip=plan.clip,
            gated=plan.gated,
            latent=None if plan.latent is None else self._latent(plan.latent, plan.heads),
            k_scale=kv_scales[0],
            v_scale=kv_scales[1],
        )

    def _latent(self, plan: LatentPlan, heads: int) -> Latent:
        keys, values, factors = self._packed.latent_heads(plan, heads)
        return Latent(
            keys=grouped(PackedExperts, keys, plan.up.name),
            values=grouped(PackedExperts, values, plan.up.name),
            key_factors=factors,
            kv_norm=self._packed.norm_or_none(plan.kv_norm),
            q_up=None if plan.q_up is None else self._packed.linear(plan.q_up),
            q_norm=self._packed.norm_or_none(plan.q_norm),
        )

    def _mlp(self, plan: MlpPlan) -> Mlp:
        return Mlp(
            self._packed.fused(plan.gate_up),
            self._packed.linear(plan.down),
            self._packed.biases(plan.gate_up),
            self._packed.bias(plan.down),
            _activation(plan.activation),
        )

    def _experts(self, plan: ExpertsPlan) -> Experts:
        gate_up = self._packed.stacks(plan.gate_up, plan.interleaved)
        shared_gate = self._packed.vector(plan.shared_gate)
        return Experts(
            router=self._router(plan.router),
            gate_up=gate_up,
            down=self._packed.stacks(plan.down)[0],
            gate_up_bias=self._gate_up_biases(plan, len(gate_up)),
            down_bias=None if plan.down_bias is None else self._packed.weights.tensor(plan.down_bias).contiguous(),
            activation=_activation(plan.activation),
            shared=None if plan.shared is None else self._mlp(plan.shared),
            shared_gate=None if shared_gate is None else shared_gate.flatten(),
            norms=None if plan.norms is None else self._expert_norms(plan.norms),
        )

    def _expert_norms(self, plan: ExpertNormsPlan) -> ExpertNorms:
        return ExpertNorms(
            router=self._packed.norm(plan.router),
            input=self._packed.norm(plan.input),
            experts=self._packed.norm(plan.experts),
            mlp=self._packed.norm(plan.mlp),
        )

    def _gate_up_biases(self, plan: ExpertsPlan, stacks: int) -> tuple[Tensor, ...] | None:
        if plan.gate_up_bias is None:
            return None
        biases = self._packed.weights.tensor(plan.gate_up_bias)
        if plan.interleaved:
            biases = torch.cat([biases[:, ::2], biases[:, 1::2]], dim=1)
        return tuple(part.contiguous() for part in biases.chunk(stacks, dim=1))

    def _router(self, plan: RouterPlan) -> Router:
        return Router(
            weight=self._packed.weights.tensor(plan.weight).float().contiguous(),
            top_k=plan.top_k,
            kind=plan.kind,
            normalize=plan.normalize,
            bias=self._packed.vector(plan.bias),
            correction=self._packed.vector(plan.correction),
            groups=plan.groups,
            groups_kept=plan.groups_kept,
            group_best=plan.group_best,
            factor=plan.factor,
            scales=self._packed.vector(plan.scales),
        )


def rounded(factor: float, dtype: torch.dtype) -> float:
    """Return a factor as a number of a dtype."""
    return float(torch.tensor(factor).to(dtype))


def _activation(plan: ActivationPlan) -> Activation:
    return Activation(plan.name, plan.gated, plan.alpha, plan.limit)

"""`step` by the native library (``csrc/decoder``): all layers in one call.

The structures that C++ reads hold the addresses of a decoder's tensors and are created once per decoder; a step adds
the addresses of its batch. The caller has validated both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from minifloat.kernels import native, threads
from minifloat.kernels.decoder.attention import VALUES, Attention
from minifloat.kernels.decoder.cache import ELEMENTS, KVCache, elements_per_block
from minifloat.kernels.decoder.delta import DeltaNet
from minifloat.kernels.decoder.experts import ROUTERS, ExpertNorms, Experts, Router
from minifloat.kernels.decoder.latent import Latent
from minifloat.kernels.decoder.layer_input import LayerInputs
from minifloat.kernels.decoder.mlp import ACTIVATIONS, Activation, Mlp
from minifloat.kernels.decoder.norm import Norm
from minifloat.kernels.decoder.rotary import Rotary
from minifloat.kernels.decoder.states import SequenceStates
from minifloat.kernels.decoder.types import Decoder, Layer, StepBatch
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.moe import PackedExperts
from minifloat.kernels.native import structs
from minifloat.kernels.pack import PackedWeight

#: Names of ``enum minifloat_step_part``.
PARTS = ("linears", "attention", "rows")
#: ``enum minifloat_cache_element``.
_CACHE_ELEMENTS = {name: number for number, name in enumerate(ELEMENTS)}


def why_not() -> str:
    """Return why the native library cannot run here; empty if it can."""
    return native.why_unavailable() if native.load() is None else ""


def step(
    decoder: Decoder,
    cache: KVCache,
    batch: StepBatch,
    nanoseconds: Tensor | None = None,
    states: SequenceStates | None = None,
) -> Tensor:
    """Implement `minifloat.kernels.decoder.step` for validated arguments."""
    library = native.require()
    described = _DESCRIBED.get(decoder)
    if described is None:
        described = _DESCRIBED[decoder] = _Described(decoder)
    logits = torch.empty(batch.logits.shape[0], decoder.lm_head.shape[0])
    library.step(
        structs.StepArgs(
            decoder=ctypes.addressof(described.decoder),
            cache=cache.data.data_ptr(),
            states=None if states is None else states.data.data_ptr(),
            slots=_address(batch.slots),
            tokens=batch.tokens.data_ptr(),
            positions=batch.positions.data_ptr(),
            starts=batch.starts.data_ptr(),
            contexts=batch.contexts.data_ptr(),
            blocks=batch.blocks.data_ptr(),
            logit_rows=batch.logits.data_ptr(),
            logits=logits.data_ptr(),
            nanoseconds=None if nanoseconds is None else nanoseconds.data_ptr(),
            cache_blocks=cache.blocks,
            state_floats=decoder.state_floats,
            cache_element=_CACHE_ELEMENTS[cache.element],
            token_count=batch.tokens.shape[0],
            sequences=batch.contexts.shape[0],
            block_columns=batch.blocks.shape[1],
            logit_count=batch.logits.shape[0],
            threads=threads.count(),
        )
    )
    return logits


class _Described:
    """The structures of a decoder: addresses of its tensors. They do not keep the decoder itself alive."""

    def __init__(self, decoder: Decoder) -> None:
        self._structures: list[object] = []
        rotaries = (structs.RotaryArgs * len(decoder.rotaries))(*map(_rotary, decoder.rotaries))
        layers = (structs.LayerArgs * len(decoder.layers))(
            *(self._layer(decoder, index) for index in range(len(decoder.layers)))
        )
        self._structures += [rotaries, layers]
        self.decoder = structs.DecoderArgs(
            layers=ctypes.addressof(layers),
            rotaries=ctypes.addressof(rotaries),
            norm=_norm(decoder.norm),
            embedding=decoder.embedding.data_ptr(),
            inputs=self._inputs(decoder.inputs),
            lm_head=self._product((decoder.lm_head,), None),
            hidden=decoder.hidden,
            lm_head_rows=decoder.lm_head.shape[0],
            dtype=DTYPES[decoder.dtype],
            embedding_dtype=DTYPES[decoder.embedding.dtype],
            layer_count=len(decoder.layers),
            rotary_count=len(decoder.rotaries),
            embedding_factor=decoder.embedding_factor,
            logits_factor=decoder.logits_factor,
            logits_cap=decoder.logits_cap or 0.0,
            int8_inputs=decoder.int8_inputs,
            batch_invariant=decoder.batch_invariant,
        )

    def _layer(self, decoder: Decoder, index: int) -> structs.LayerArgs:
        layer: Layer = decoder.layers[index]
        args = structs.LayerArgs(
            input_norm=_norm(layer.input_norm),
            attention_norm=_norm(layer.attention_norm),
            mlp_norm=_norm(layer.mlp_norm),
            result_norm=_norm(layer.result_norm),
            parallel=layer.parallel,
            residual_factor=layer.residual_factor,
            scalar=layer.scalar,
        )
        if layer.input is not None:
            args.input = self._kept(
                structs.LayerInputArgs(
                    gate=self._product((layer.input.gate,), None),
                    out=self._product((layer.input.out,), None),
                    norm=_norm(layer.input.norm),
                    activation=_activation(layer.input.activation),
                )
            )
        if isinstance(layer.attention, DeltaNet):
            delta = self._delta(layer.attention)
            delta.state_before = decoder.states_before[index]
            args.delta = self._kept(delta)
        else:
            rotary = layer.attention.rotary
            args.attention = self._attention(layer.attention)
            args.attention.rotary = -1 if rotary is None else decoder.rotaries.index(rotary)
            args.attention.cache_before = elements_per_block(decoder.cache_shapes[: decoder.caches[index]])
        mlp = layer.mlp
        if isinstance(mlp, Experts):
            args.experts = self._kept(self._experts(mlp))
        shared: Mlp | None = mlp.shared if isinstance(mlp, Experts) else mlp
        if shared is not None:
            args.mlp = self._mlp(shared)
        return args

    def _attention(self, attention: Attention) -> structs.AttentionArgs:
        return structs.AttentionArgs(
            qkv=self._product(attention.qkv, attention.qkv_bias),
            out=self._product((attention.out,), (attention.out_bias,)),
            q_norm=_norm(attention.q_norm),
            k_norm=_norm(attention.k_norm),
            v_norm=_norm(attention.v_norm),
            sinks=_address(attention.sinks),
            window=attention.window or 0,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            whole_norms=attention.whole_norms,
            head_weights=attention.has_head_weights,
            values=VALUES.index(attention.values),
            gated=attention.gated,
            scale=attention.scale,
            score_cap=attention.score_cap or 0.0,
            clip=attention.clip or 0.0,
            k_scale=attention.k_scale,
            v_scale=attention.v_scale,
            latent=None if attention.latent is None else self._latent(attention.latent),
        )

    def _delta(self, delta: DeltaNet) -> structs.DeltaArgs:
        return structs.DeltaArgs(
            qkvz=self._product(delta.qkvz, None),
            ba=self._product(delta.ba, None),
            out=self._product((delta.out,), None),
            conv=delta.conv.data_ptr(),
            decay=delta.decay.data_ptr(),
            dt_bias=delta.dt_bias.data_ptr(),
            norm=_norm(delta.norm),
            k_heads=delta.k_heads,
            v_heads=delta.v_heads,
            k_dim=delta.k_dim,
            v_dim=delta.v_dim,
            conv_width=delta.width,
            grouped=delta.grouped,
        )

    def _latent(self, latent: Latent) -> int:
        """Describe latent attention, and return the address of the structure."""
        args = structs.LatentArgs(
            q_norm=_norm(latent.q_norm),
            kv_norm=_norm(latent.kv_norm),
            keys=latent.keys.pointers.address,
            values=latent.values.pointers.address,
            key_factors=_address(latent.key_factors),
            rank=latent.rank,
            plain=latent.plain,
            value_dim=latent.value_dim,
        )
        if latent.q_up is not None:
            args.q_up, args.q_rank = self._product((latent.q_up,), None), latent.q_up.shape[1]
        self._structures.append(args)
        return ctypes.addressof(args)

    def _mlp(self, mlp: Mlp) -> structs.MlpArgs:
        return structs.MlpArgs(
            gate_up=self._product(mlp.gate_up, mlp.gate_up_bias),
            down=self._product((mlp.down,), (mlp.down_bias,)),
            activation=_activation(mlp.activation),
            intermediate=mlp.intermediate,
        )

    def _experts(self, experts: Experts) -> structs.ExpertsArgs:
        biases = experts.gate_up_bias or (None,) * len(experts.gate_up)
        parts = [self._expert_product(*part) for part in zip(experts.gate_up, biases, strict=True)]
        return structs.ExpertsArgs(
            router=_router(experts.router, len(experts.down)),
            gate=parts[0],
            up=parts[1] if len(parts) > 1 else structs.ExpertProductArgs(),
            down=self._expert_product(experts.down, experts.down_bias),
            activation=_activation(experts.activation),
            shared_gate=_address(experts.shared_gate),
            norms=self._expert_norms(experts.norms),
            intermediate=experts.intermediate,
        )

    def _expert_norms(self, norms: ExpertNorms | None) -> int | None:
        if norms is None:
            return None
        return self._kept(
            structs.ExpertNormsArgs(
                router=_norm(norms.router),
                input=_norm(norms.input),
                experts=_norm(norms.experts),
                mlp=_norm(norms.mlp),
            )
        )

    def _inputs(self, inputs: LayerInputs | None) -> int | None:
        if inputs is None:
            return None
        return self._kept(
            structs.LayerInputsArgs(
                projection=self._product((inputs.projection,), None),
                norm=_norm(inputs.norm),
                table=inputs.table.data_ptr(),
                size=inputs.size,
                table_dtype=DTYPES[inputs.table.dtype],
                table_factor=inputs.table_factor,
                factor=inputs.factor,
            )
        )

    def _expert_product(self, experts: PackedExperts, biases: Tensor | None) -> structs.ExpertProductArgs:
        """Describe a projection of all experts; `biases`: ``[experts, rows]`` or None."""
        args = structs.ExpertProductArgs(weights=experts.pointers.address)
        if biases is not None:
            args.biases = self._table([bias.data_ptr() for bias in biases])
            args.bias_dtype = DTYPES[biases.dtype]
        return args

    def _product(self, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None] | None) -> structs.ProductArgs:
        present = [bias for bias in biases or () if bias is not None]
        return structs.ProductArgs(
            weights=self._table([weight.address for weight in weights]),
            biases=self._table([_address(bias) for bias in biases]) if biases is not None and present else None,
            count=len(weights),
            bias_dtype=DTYPES[present[0].dtype] if present else 0,
        )

    def _table(self, addresses: Sequence[int | None]) -> int:
        return self._kept((ctypes.c_void_p * len(addresses))(*addresses))

    def _kept(self, structure: ctypes.Structure | ctypes.Array[ctypes.c_void_p]) -> int:
        """Keep a structure alive; return its address."""
        self._structures.append(structure)
        return ctypes.addressof(structure)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _norm(norm: Norm | None) -> structs.NormArgs:
    if norm is None:
        return structs.NormArgs()
    return structs.NormArgs(
        weight=norm.weight.data_ptr(), bias=_address(norm.bias), eps=norm.eps, centered=norm.centered
    )


def _rotary(rotary: Rotary) -> structs.RotaryArgs:
    return structs.RotaryArgs(
        inv_freq=rotary.inv_freq.data_ptr(),
        rotary=rotary.dims,
        interleaved=rotary.interleaved,
        scaling=rotary.scaling,
    )


def _activation(activation: Activation) -> structs.ActivationArgs:
    return structs.ActivationArgs(
        kind=ACTIVATIONS.index(activation.name),
        gated=activation.gated,
        alpha=activation.alpha,
        limit=activation.limit,
    )


def _router(router: Router, experts: int) -> structs.RouterArgs:
    return structs.RouterArgs(
        weight=router.weight.data_ptr(),
        bias=_address(router.bias),
        correction=_address(router.correction),
        dtype=DTYPES[router.weight.dtype],
        kind=ROUTERS.index(router.kind),
        experts=experts,
        top_k=router.top_k,
        groups=router.groups,
        groups_kept=router.groups_kept,
        group_best=router.group_best,
        normalize=router.normalize,
        factor=router.factor,
        scales=_address(router.scales),
    )


_DESCRIBED: WeakKeyDictionary[Decoder, _Described] = WeakKeyDictionary()

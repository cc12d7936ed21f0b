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
from minifloat.kernels.decoder.cache import ELEMENTS, KVCache
from minifloat.kernels.decoder.types import Decoder, Experts, Layer, Mlp, StepBatch
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.native import structs
from minifloat.kernels.pack import PackedWeight

#: Names of ``enum minifloat_step_part``.
PARTS = ("linears", "attention", "rows")
#: ``enum minifloat_cache_element``.
_CACHE_ELEMENTS = {name: number for number, name in enumerate(ELEMENTS)}


def why_not() -> str:
    """Return why the native library cannot run here; empty if it can."""
    return native.why_unavailable() if native.load() is None else ""


def step(decoder: Decoder, cache: KVCache, batch: StepBatch, nanoseconds: Tensor | None = None) -> Tensor:
    """Implement `minifloat.kernels.decoder.step` for validated arguments.

    Args:
        decoder: The model.
        cache: The cache; written.
        batch: The new tokens and the requested logits.
        nanoseconds: None, or int64 ``[len(PARTS)]``, to which the time of each part is added.

    Returns:
        float32 ``[R, rows of lm_head]``.

    Raises:
        KernelUnavailable: If there is no native library.
    """
    library = native.require()
    described = _DESCRIBED.get(decoder)
    if described is None:
        described = _DESCRIBED[decoder] = _Described(decoder)
    logits = torch.empty(batch.logits.shape[0], decoder.lm_head.shape[0])
    library.step(
        structs.StepArgs(
            decoder=ctypes.addressof(described.decoder),
            cache=cache.data.data_ptr(),
            tokens=batch.tokens.data_ptr(),
            positions=batch.positions.data_ptr(),
            starts=batch.starts.data_ptr(),
            contexts=batch.contexts.data_ptr(),
            blocks=batch.blocks.data_ptr(),
            logit_rows=batch.logits.data_ptr(),
            logits=logits.data_ptr(),
            nanoseconds=None if nanoseconds is None else nanoseconds.data_ptr(),
            cache_blocks=cache.blocks,
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
        layers = (structs.LayerArgs * len(decoder.layers))(*map(self._layer, decoder.layers))
        self._structures.append(layers)
        self.decoder = structs.DecoderArgs(
            layers=ctypes.addressof(layers),
            inv_freq=decoder.inv_freq.data_ptr(),
            norm=decoder.norm.data_ptr(),
            embedding=decoder.embedding.data_ptr(),
            lm_head=self._product((decoder.lm_head,), None),
            hidden=decoder.hidden,
            lm_head_rows=decoder.lm_head.shape[0],
            dtype=DTYPES[decoder.dtype],
            embedding_dtype=DTYPES[decoder.embedding.dtype],
            layer_count=len(decoder.layers),
            heads=decoder.heads,
            kv_heads=decoder.kv_heads,
            head_dim=decoder.head_dim,
            rotary=2 * decoder.inv_freq.numel(),
            eps=decoder.eps,
            attention_scaling=decoder.attention_scaling,
            scale=decoder.scale,
            int8_inputs=decoder.int8_inputs,
        )

    def _layer(self, layer: Layer) -> structs.LayerArgs:
        attention = layer.attention
        args = structs.LayerArgs(
            input_norm=layer.input_norm.data_ptr(),
            mlp_norm=layer.mlp_norm.data_ptr(),
            q_norm=_address(attention.q_norm),
            k_norm=_address(attention.k_norm),
            qkv=self._product(attention.qkv, attention.qkv_bias),
            out=self._product((attention.out,), (attention.out_bias,)),
            window=attention.window or 0,
            k_scale=attention.k_scale,
            v_scale=attention.v_scale,
        )
        mlp = layer.mlp
        if isinstance(mlp, Experts):
            experts = self._experts(mlp)
            self._structures.append(experts)
            args.experts = ctypes.addressof(experts)
        shared: Mlp | None = mlp.shared if isinstance(mlp, Experts) else mlp
        if shared is not None:
            args.gate_up = self._product(shared.gate_up, shared.gate_up_bias)
            args.down = self._product((shared.down,), (shared.down_bias,))
            args.intermediate = shared.intermediate
        return args

    def _experts(self, experts: Experts) -> structs.ExpertsArgs:
        tables = [part.pointers.address for part in experts.gate_up]
        return structs.ExpertsArgs(
            router=experts.router.data_ptr(),
            gate=tables[0],
            up=tables[1] if len(tables) > 1 else None,
            down=experts.down.pointers.address,
            shared_gate=_address(experts.shared_gate),
            intermediate=experts.intermediate,
            router_dtype=DTYPES[experts.router.dtype],
            experts=len(experts.down),
            top_k=experts.top_k,
            normalize=experts.normalize,
        )

    def _product(self, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None] | None) -> structs.ProductArgs:
        present = [bias for bias in biases or () if bias is not None]
        return structs.ProductArgs(
            weights=self._table([weight.address for weight in weights]),
            biases=self._table([_address(bias) for bias in biases]) if biases is not None and present else None,
            count=len(weights),
            bias_dtype=DTYPES[present[0].dtype] if present else 0,
        )

    def _table(self, addresses: Sequence[int | None]) -> int:
        table = (ctypes.c_void_p * len(addresses))(*addresses)
        self._structures.append(table)
        return ctypes.addressof(table)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


_DESCRIBED: WeakKeyDictionary[Decoder, _Described] = WeakKeyDictionary()

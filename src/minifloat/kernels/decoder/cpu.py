"""`step` by the native library (``csrc/decoder``): all layers in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from minifloat.kernels import native, threads
from minifloat.kernels.decoder.attention import DeltaNet
from minifloat.kernels.decoder.cache import ELEMENTS, KVCache, SequenceStates, elements_per_block
from minifloat.kernels.decoder.mlp import Experts
from minifloat.kernels.decoder.types import Decoder, StepBatch
from minifloat.kernels.decoder_layout import ACTIVATIONS, ROUTERS, VALUES
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.moe import PackedExperts
from minifloat.kernels.native import POINTEES, STRUCTS
from minifloat.kernels.pack import PackedWeight

#: Names of ``enum minifloat_step_part``.
PARTS = ("linears", "attention", "rows")
#: Fields that are numbers of names, in the order of their enumerations.
_NAMES = {("activation", "kind"): ACTIVATIONS, ("router", "kind"): ROUTERS, ("attention", "values"): VALUES}


def why_not() -> str:
    """Return why the native library cannot run here; empty if it can."""
    return native.why_unavailable() if native.load() is None else ""


def step(
    decoder: Decoder,
    cache: KVCache,
    batch: StepBatch,
    nanoseconds: Tensor | None = None,
    states: SequenceStates | None = None,
    memory: Tensor | None = None,
) -> Tensor:
    library = native.require()
    described = _DESCRIBED.get(decoder)
    if described is None:
        described = _DESCRIBED[decoder] = _Described(decoder)
    rows = batch.logits.shape[0]
    if memory is None or len(memory) < rows:
        memory = torch.empty(rows, decoder.lm_head.shape[0])
    logits = memory[:rows]
    library.call(
        "step",
        STRUCTS["step_args"](
            decoder=ctypes.addressof(described.decoder),
            cache=cache.data.data_ptr(),
            states=address_of(None if states is None else states.data),
            slots=address_of(batch.slots),
            tokens=batch.tokens.data_ptr(),
            positions=batch.positions.data_ptr(),
            starts=batch.starts.data_ptr(),
            contexts=batch.contexts.data_ptr(),
            blocks=batch.blocks.data_ptr(),
            logit_rows=batch.logits.data_ptr(),
            logits=logits.data_ptr(),
            nanoseconds=address_of(nanoseconds),
            cache_blocks=cache.blocks,
            state_floats=decoder.state_floats,
            cache_element=list(ELEMENTS).index(cache.element),
            token_count=batch.tokens.shape[0],
            sequences=batch.contexts.shape[0],
            block_columns=batch.blocks.shape[1],
            logit_count=batch.logits.shape[0],
            threads=threads.count(),
        ),
    )
    return logits


class _Described:
    """The structures of a decoder: addresses of its tensors. They do not keep the decoder itself alive."""

    def __init__(self, decoder: Decoder) -> None:
        self._structures: list[object] = []
        rotaries = [self._struct("rotary", rotary, rotary=rotary.dims) for rotary in decoder.rotaries]
        layers = [self._layer(decoder, index) for index in range(len(decoder.layers))]
        self.decoder = self._struct(
            "decoder",
            decoder,
            layers=self._kept((STRUCTS["layer"] * len(layers))(*layers)),
            rotaries=self._kept((STRUCTS["rotary"] * len(rotaries))(*rotaries)),
            lm_head_rows=decoder.lm_head.shape[0],
            embedding_dtype=decoder.embedding.dtype,
            layer_count=len(layers),
            rotary_count=len(rotaries),
        )

    def _layer(self, decoder: Decoder, index: int) -> ctypes.Structure:
        layer = decoder.layers[index]
        attention, delta, experts, mlp = None, None, None, None
        if isinstance(layer.attention, DeltaNet):
            before = decoder.states_before[index]
            delta = self._kept(self._struct("delta", layer.attention, state_before=before))
        else:
            rotary = layer.attention.rotary
            attention = self._struct(
                "attention",
                layer.attention,
                rotary=-1 if rotary is None else decoder.rotaries.index(rotary),
                cache_before=elements_per_block(decoder.cache_shapes[: decoder.caches[index]]),
            )
        if isinstance(layer.mlp, Experts):
            biases = layer.mlp.gate_up_bias or [None] * len(layer.mlp.gate_up)
            parts = [self._expert_product(*part) for part in zip(layer.mlp.gate_up, biases, strict=True)]
            gate, up = parts if len(parts) > 1 else (parts[0], None)
            experts, mlp = self._kept(self._struct("experts", layer.mlp, gate=gate, up=up)), layer.mlp.shared
        else:
            mlp = layer.mlp
        return self._struct("layer", layer, attention=attention, delta=delta, experts=experts, mlp=mlp)

    def _struct(self, name: str, part: object, **given: Any) -> ctypes.Structure:
        """Describe a part of a decoder. A field has the value `given`, or that of the part's attribute of its name."""
        made = STRUCTS[name]()
        fields: Any = made._fields_
        for field, kind in fields:
            value = given[field] if field in given else getattr(part, field)
            biases = getattr(part, f"{field}_bias", None)
            filled: Any
            if value is None or isinstance(value, ctypes.Structure):
                filled = value
            elif kind.__name__ == "product":
                weights, biases = ((value,), (biases,)) if isinstance(value, PackedWeight) else (value, biases)
                filled = self._product(weights, biases)
            elif kind.__name__ == "expert_product":
                filled = self._expert_product(value, biases)
            elif issubclass(kind, ctypes.Structure):
                filled = self._struct(kind.__name__, value)
            elif (type(made), field) in POINTEES and not isinstance(value, int):
                filled = self._kept(self._struct(POINTEES[type(made), field], value))
            else:
                filled = _plain(name, field, value)
            if filled is not None:
                setattr(made, field, filled)
        return made

    def _expert_product(self, experts: PackedExperts, biases: Tensor | None) -> ctypes.Structure:
        made = STRUCTS["expert_product"](weights=experts.pointers.address)
        if biases is not None:
            made.biases, made.bias_dtype = self._table(list(biases)), DTYPES[biases.dtype]
        return made

    def _product(self, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None] | None) -> ctypes.Structure:
        made = STRUCTS["product"](weights=self._table(weights), count=len(weights))
        present = [bias for bias in biases or () if bias is not None]
        if biases is not None and present:
            made.biases, made.bias_dtype = self._table(biases), DTYPES[present[0].dtype]
        return made

    def _table(self, parts: Sequence[PackedWeight | Tensor | None]) -> int:
        addresses = [part.address if isinstance(part, PackedWeight) else address_of(part) for part in parts]
        return self._kept((ctypes.c_void_p * len(addresses))(*addresses))

    def _kept(self, structure: Any) -> int:
        """Keep a structure alive; return its address."""
        self._structures.append(structure)
        return ctypes.addressof(structure)


def address_of(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _plain(name: str, field: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, PackedExperts):
        return value.pointers.address
    if isinstance(value, torch.dtype):
        return DTYPES[value]
    return _NAMES[name, field].index(value) if isinstance(value, str) else value


_DESCRIBED: WeakKeyDictionary[Decoder, _Described] = WeakKeyDictionary()

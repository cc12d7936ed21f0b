"""BF16 linears and output layers, multiplied by our kernels.

vLLM has no table for them. It lets a plugin replace the classes of its layers (`PluggableLayer.register_oot`), and the
classes here differ in one thing: their method packs the weight after loading, where vLLM gives it to oneDNN. The names
of checkpoints, sharding and everything else are those of vLLM's classes.

Only where this was measured to be faster: x86 with AVX-512 BF16 instructions and without AMX. ``VLLM_DISABLED_KERNELS``
with ``MinifloatBf16LinearMethod`` leaves these layers to vLLM.

Source: vLLM 0.32.0, `custom_op.py: PluggableLayer`, `layers/linear.py: UnquantizedLinearMethod`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers import linear, vocab_parallel_embedding
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from minifloat.kernels import native
from minifloat.serve.vllm_plugin import packed

_LOG = init_logger("vllm.minifloat")

LAYERS: tuple[type, ...] = (
    linear.ReplicatedLinear,
    linear.ColumnParallelLinear,
    linear.MergedColumnParallelLinear,
    linear.QKVParallelLinear,
    linear.RowParallelLinear,
    vocab_parallel_embedding.VocabParallelEmbedding,
    vocab_parallel_embedding.ParallelLMHead,
)


class MinifloatBf16LinearMethod(UnquantizedLinearMethod):
    """vLLM's method for unquantized linears, with packed weights."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the weight, if it is a BF16 matrix that is only multiplied."""
        if packed.is_read_elsewhere(layer) or not packed.is_bf16_matrix(layer.weight):
            super().process_weights_after_loading(layer)
            return
        _LOG.info_once("Using %s for BF16 GEMM", type(self).__name__)
        packed.hold(layer, layer.weight.data)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias``: ``[..., K]`` to ``[..., N]``."""
        if packed.is_held(layer):
            return packed.multiply(layer, x, bias)
        theirs: Tensor = super().apply(layer, x, bias)
        return theirs


class MinifloatBf16EmbeddingMethod(UnquantizedEmbeddingMethod):
    """vLLM's method for unquantized embeddings and output layers; the table of an output layer is packed beside it.

    An embedding may be an output layer too. Its table is packed when it is first multiplied, so that an embedding which
    is none needs no second copy.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave a BF16 table as it is."""
        if not packed.is_bf16_matrix(layer.weight):
            super().process_weights_after_loading(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias``: ``[..., K]`` to ``[..., N]``."""
        if not packed.is_bf16_matrix(layer.weight):
            theirs: Tensor = super().apply(layer, x, bias)
            return theirs
        if not packed.is_held(layer):
            packed.hold(layer, layer.weight.data, keep=True)
        return packed.multiply(layer, x, bias)


_METHODS: dict[type, type] = {
    UnquantizedLinearMethod: MinifloatBf16LinearMethod,
    UnquantizedEmbeddingMethod: MinifloatBf16EmbeddingMethod,
}


def why_not() -> str:
    """Return why BF16 layers are left to vLLM; empty if they are replaced."""
    if MinifloatBf16LinearMethod.__name__ in envs.VLLM_DISABLED_KERNELS:
        return "VLLM_DISABLED_KERNELS says so"
    if torch.cpu._is_amx_tile_supported():
        return "the processor has AMX, which vLLM uses and minifloat does not"
    if native.isa() != "avx512_bf16":
        return f"minifloat's kernels for {native.isa()} were not compared with vLLM's"
    return ""


def replace_layers() -> None:
    """Replace the classes of vLLM's layers, except those that another plugin has replaced."""
    for layer in LAYERS:
        if layer.__name__ not in op_registry_oot:
            PluggableLayer.register_oot(name=layer.__name__)(_packing(layer))


def _packing(layer: Any) -> type:
    """Return a subclass of a layer that packs an unquantized weight."""

    class Packing(layer):
        quant_method: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            method = _METHODS.get(type(self.quant_method))
            if method is not None:
                self.quant_method = method()

    Packing.__name__ = Packing.__qualname__ = f"Minifloat{layer.__name__}"
    Packing.__doc__ = layer.__doc__
    return Packing

"""The format of the output layer (lm_head), which may be quantized while it is loaded.

In 16 bits it is a large part of the bytes that a decode step reads beside weights in 4 bits. In FP8 it adds less than a
tenth to the KL divergence of weights rounded to MXFP4, and more to that of others (docs/results.md, "What an FP8 output
layer costs"); there it is quantized only if the user asks.
"""

from __future__ import annotations

import logging
import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.rewrite import NEAREST, rounding_of
from minifloat.errors import NonFiniteError, UnknownNameError, UnsupportedTensorError, UsageError
from minifloat.kernels.quantize import QuantizedRows, quantize_rows
from minifloat.model.architecture.roles import is_embedding
from minifloat.model.layouts import Description
from minifloat.model.layouts.compressed_tensors import NAME as COMPRESSED_TENSORS
from minifloat.model.layouts.inspection import format_name
from minifloat.model.runtime.linear import Packing, QuantizedLinear
from minifloat.numerics.formats import E2M1, E4M3, E8M0, FLOAT32
from minifloat.numerics.granularity import CHANNEL
from minifloat.numerics.scheme import WeightSpec
from minifloat.numerics.tensor import QuantizedTensor
from minifloat.report.text import size_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOG = logging.getLogger(__name__)

#: "auto": FP8 beside weights that `minifloat quantize` rounded to the nearest codes of MXFP4, else "bf16". "bf16": as
#: the checkpoint stores it. "fp8": FP8 per channel, unless the checkpoint stores it quantized.
LM_HEADS = ("auto", "bf16", "fp8")
FP8 = WeightSpec(E4M3, CHANNEL, FLOAT32)
#: Share of the quantized elements that must be in MXFP4 for "auto" to be FP8. Mixtures with more elements in other
#: formats are made for their accuracy.
_MXFP4_SHARE = 0.9
#: Last part of the name of output layers. Some models of transformers have other names for it: see `replace_lm_head`.
_NAME = "lm_head"


def lm_head_spec(choice: str, checkpoint: Checkpoint, description: Description) -> WeightSpec | None:
    """Return the format that the output layer is quantized to while it is loaded."""
    if choice not in LM_HEADS:
        raise UnknownNameError("lm_head", choice, LM_HEADS)
    if choice == "bf16" or any(module.rpartition(".")[2] == _NAME for module in description.weights):
        return None
    has_own = any(name.rpartition(".")[0].rpartition(".")[2] == _NAME for name in checkpoint.tensors)
    if not has_own and any(is_embedding(module) for module in description.weights):  # the output layer is tied to it
        return None
    if choice == "fp8":
        return FP8
    if rounding_of(checkpoint) != NEAREST or description.layout != COMPRESSED_TENSORS:
        return None  # gpt-oss, whose layout is another, was trained in MXFP4: rounding to it may have lost nothing
    elements = {True: 0, False: 0}
    for weight in description.weights.values():
        elements[weight.spec.element is E2M1 and weight.spec.scale is E8M0] += math.prod(weight.shape)
    in_mxfp4 = elements[True] and elements[True] >= _MXFP4_SHARE * sum(elements.values())
    return FP8 if in_mxfp4 else None


def quantize_lm_head(weight: Tensor, spec: WeightSpec, *, tied: bool) -> QuantizedTensor:
    """Quantize the weight of an output layer, and log what that takes and saves."""
    quantized = round_weight(weight, spec, "lm_head.weight", cure="--lm-head bf16 keeps it as it is")
    _LOG.info(
        "lm_head is quantized to %s: %s instead of %s%s; --lm-head bf16 keeps it as it is stored",
        format_name(spec, None),
        size_text(quantized.codes.nbytes + quantized.scale.nbytes),
        size_text(weight.nbytes),
        ", beside the embedding that it is tied to, which stays as it is" if tied else "",
    )
    return quantized


def looked_up(embedding: Tensor | QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Return an embedding as its rows are looked up: dequantized, in the dtype of the model."""
    return (embedding if isinstance(embedding, Tensor) else embedding.dequantize(dtype)).contiguous()


class LoadedLmHead(QuantizedLinear):
    """An output layer that was quantized while it was loaded: no checkpoint stores it so."""


def replace_lm_head(model: PreTrainedModel, spec: WeightSpec, packing: Packing, *, asked: bool) -> None:
    """Quantize the output layer of a transformers model, unless it is quantized already."""
    head = _output_layer(model)
    if isinstance(head, QuantizedLinear):
        return
    if type(head) is not nn.Linear:
        if asked:
            found = "none" if head is None else f"a {type(head).__name__}"
            raise UsageError(
                f"lm_head fp8 needs an output layer that is a plain Linear; {type(model).__name__} has {found}"
            )
        return
    name = next(name for name, module in model.named_modules() if module is head)
    tied = model.all_tied_weights_keys
    is_tied = any(f"{name}.weight" in pair for pair in tied.items())
    replaced = LoadedLmHead(quantize_lm_head(head.weight.detach(), spec, tied=is_tied), head.weight.dtype)
    packing.pack(replaced, name)
    replaced.register_parameter("bias", head.bias)
    model.set_submodule(name, replaced)
    for target, source in list(tied.items()):
        if f"{name}.weight" in (target, source):
            del tied[target]


def lm_head_name(spec: WeightSpec | None, dtype: torch.dtype, *, loaded: bool) -> str:
    """Return the name of the format of an output layer, for reports."""
    if spec is None:
        return str(dtype).removeprefix("torch.")
    return f"{format_name(spec, None)}{' (quantized while loading)' if loaded else ''}"


def lm_head_of(model: PreTrainedModel) -> str:
    """Return the name of the format of a transformers model's output layer; empty if it has none."""
    head = _output_layer(model)
    if head is None:
        return ""
    spec = head.held.spec if isinstance(head, QuantizedLinear) else None
    return lm_head_name(spec, model.dtype, loaded=isinstance(head, LoadedLmHead))


def _output_layer(model: Any) -> nn.Module | None:
    head: nn.Module | None = model.get_output_embeddings()
    return head


_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_SLAB_ELEMENTS = 1 << 22


def round_weight(weight: Tensor, spec: WeightSpec, name: str, *, cure: str = "") -> QuantizedTensor:
    """Round a weight to nearest. The codes and scales are those of `minifloat quantize`."""
    if weight.dtype not in _DTYPES:
        raise UnsupportedTensorError(name, f"expected one of {', '.join(_DTYPES.values())}, found {weight.dtype}")
    rows, cols = weight.shape
    step = max(_SLAB_ELEMENTS // max(cols, 1), 1)
    codes = np.empty((rows, cols * spec.element.bits // 8), np.uint8)

    def quantize(start: int) -> QuantizedRows:
        slab = weight[start : start + step].cpu().contiguous()
        values = slab.view(torch.uint8).flatten().numpy()
        out = codes[start : start + step], None
        return quantize_rows(values, _DTYPES[weight.dtype], (len(slab), cols), spec, out=out)

    starts = range(0, rows, step)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        parts = list(pool.map(quantize, starts))
    nonfinite = sum(part.nonfinite for part in parts)
    if nonfinite:
        raise NonFiniteError(name, f"holds {nonfinite} NaN or Inf{cure and '; '}{cure}")
    scales = torch.from_numpy(np.concatenate([part.scales for part in parts]))
    return QuantizedTensor(spec, (rows, cols), torch.from_numpy(codes).to(weight.device), scales.to(weight.device))

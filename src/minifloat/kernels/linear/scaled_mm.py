"""W8A8 on hardware: one kernel quantizes inputs, and `torch.nn.functional.scaled_mm` multiplies the codes."""

from __future__ import annotations

import enum

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType

from minifloat.kernels.inputs import quantize_inputs
from minifloat.numerics.formats import E4M3, FLOAT32
from minifloat.numerics.granularity import BLOCK_128, CHANNEL, GROUP_128, TENSOR, TOKEN, Granularity
from minifloat.numerics.scheme import ActivationSpec
from minifloat.numerics.tensor import QuantizedTensor

# Source: torch 2.13, `_scaled_mm_v2`: K and N multiples of 16; `TensorWise` scales of one element, `RowWise` ``[M, 1]``
# and ``[1, N]``; `BlockWise1x128` ``[M, K / 128]`` with strides ``(1, M)``; `BlockWise128x128` ``[L, N / 128]`` with
# strides ``(1, L)``, L being K / 128 up to a multiple of 4; the latter two on capability 9.0 and CUDA 12.9 only.

#: Columns and rows of a weight on CUDA must be multiples of this number.
ALIGNMENT = 16
#: The stride between scales of columns of blocks is a multiple of this number.
_SCALE_ALIGNMENT = 4
_MIN_CAPABILITY = (8, 9)
_BLOCK_CAPABILITY = (9, 0)


class Recipe(enum.Enum):
    """Which scales multiply a product of codes."""

    TENSOR = "tensor"
    ROW = "row"
    BLOCK = "block"


def recipe_of(inputs: Granularity, weight: Granularity) -> Recipe | None:
    """Return the recipe for two granularities, or None if `scaled_mm` has none."""
    if inputs == TENSOR and weight == TENSOR:
        return Recipe.TENSOR
    if inputs in (TENSOR, TOKEN) and weight in (TENSOR, CHANNEL):
        return Recipe.ROW
    return Recipe.BLOCK if inputs == GROUP_128 and weight == BLOCK_128 else None


def why_not(weight: QuantizedTensor, activation: ActivationSpec) -> str:
    """Return why `scaled_mm` cannot multiply such inputs with a weight on its device; empty if it can."""
    for element, scale in ((weight.spec.element, weight.spec.scale), (activation.element, activation.scale)):
        if element is not E4M3 or scale is not FLOAT32:
            return f"scaled_mm multiplies E4M3 with float32 scales, not {element.name} with {scale.name} scales"
    recipe = recipe_of(activation.granularity, weight.spec.granularity)
    if recipe is None:
        return f"scaled_mm has no recipe for inputs per {activation.granularity}, weights per {weight.spec.granularity}"
    device = weight.codes.device
    if device.type == "cpu":
        return "scaled_mm multiplies blocks on CUDA devices only" if recipe is Recipe.BLOCK else ""
    if device.type != "cuda":
        return f"the weight is on {device}"
    if torch.version.hip is not None:
        return "this torch is built for ROCm"
    rows, cols = weight.shape
    multiple = (BLOCK_128.cols or 1) if recipe is Recipe.BLOCK else ALIGNMENT
    if rows % ALIGNMENT or cols % multiple:
        return f"scaled_mm needs multiples of {ALIGNMENT} rows and {multiple} columns, the weight has {rows}x{cols}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY or (recipe is Recipe.BLOCK and capability != _BLOCK_CAPABILITY):
        needed = "9.0" if recipe is Recipe.BLOCK else "8.9 or above"
        return f"compute capability {capability[0]}.{capability[1]}; scaled_mm by {recipe.value} needs {needed}"
    return ""


def quantized_linear(
    x: Tensor, weight: QuantizedTensor, bias: Tensor | None, activation: ActivationSpec, input_scale: Tensor | None
) -> Tensor:
    """Compute ``x @ weight.T + bias`` with a quantized `x`; arguments as in `minifloat.kernels.linear.linear`."""
    recipe = recipe_of(activation.granularity, weight.spec.granularity)
    assert recipe is not None, "call why_not first"
    matrix = x.reshape(-1, x.shape[-1])
    rows = matrix.shape[0]
    # The stride of block scales is M: the copy engine needs a multiple of whole vectors.
    codes, scale = quantize_inputs(
        matrix, activation, input_scale, row_multiple=ALIGNMENT if recipe is Recipe.BLOCK else 1
    )
    fused = bias is None or (bias.dtype == x.dtype and x.dtype != torch.float32)
    y = functional.scaled_mm(
        codes,
        weight.codes.view(codes.dtype).t(),
        *input_scales(recipe, scale, codes.shape[0]),
        *weight_scales(recipe, weight),
        bias=bias if fused else None,
        output_dtype=x.dtype if fused else torch.float32,
    )[:rows]
    if not fused and bias is not None:
        y = (y + bias).to(x.dtype)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def input_scales(recipe: Recipe, scale: Tensor, rows: int) -> tuple[Tensor, ScalingType]:
    """Return the scales of inputs as `scaled_mm` takes them, and their scaling type."""
    if recipe is Recipe.TENSOR:
        return scale, ScalingType.TensorWise
    if recipe is Recipe.ROW:
        return scale.expand(rows, 1).contiguous(), ScalingType.RowWise
    return scale, ScalingType.BlockWise1x128


def weight_scales(recipe: Recipe, weight: QuantizedTensor) -> tuple[Tensor, ScalingType]:
    """Return the scales of a weight as `scaled_mm` takes them, and their scaling type."""
    grid = weight.scale.float()
    if recipe is Recipe.TENSOR:
        return grid, ScalingType.TensorWise
    if recipe is Recipe.ROW:
        return grid.reshape(1, -1).expand(1, weight.shape[0]).contiguous(), ScalingType.RowWise
    padded = functional.pad(grid, (0, -grid.shape[1] % _SCALE_ALIGNMENT))
    return padded.contiguous().t(), ScalingType.BlockWise128x128

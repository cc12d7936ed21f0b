"""`quant_method: fp8`: DeepSeek's 128x128 blocks and SGLang's `mxfp8`, written and read; others read only.

"weight_scale_inv" multiplies to dequantize, despite its name. vLLM's form per tensor is read, and DeepSeek-V4, which
names its scales ``scale``, stores them as E8M0, and has experts in MXFP4: int8 ``[N, K / 2]``, scales ``[N, K / 32]``.

Source: DeepSeek's weight documentation; transformers' finegrained_fp8; vLLM's fp8 and `DeepseekV4FP8Config`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from minifloat.checkpoint import Checkpoint, TensorInfo
from minifloat.errors import ConfigError, ShapeError, UsageError
from minifloat.model.layouts.stored import (
    Description,
    StoredWeight,
    by_name_or_parent,
    granularity_of,
    refuse_excluded,
    stored_spec,
    tensors_with_suffix,
    weight_shape,
)
from minifloat.model.layouts.writing import (
    NO_NAMES,
    WeightTensors,
    WriteLayout,
    codes_tensor,
    scale_tensor,
    with_names,
)
from minifloat.numerics.formats import E2M1, E4M3, E8M0, FLOAT32, ElementFormat
from minifloat.numerics.granularity import BLOCK_128, GROUP_32, TENSOR, TOKEN, Granularity, block_granularity
from minifloat.numerics.scheme import ActivationSpec, KVSpec, Scheme, WeightSpec

NAME = "fp8"
MXFP8_NAME = "mxfp8"

#: Names of the scales of a weight and of its input, in the order of preference.
_WEIGHT_SCALES = ("weight_scale_inv", "weight_scale", "scale")
_INPUT_SCALES = ("input_scale", "activation_scale")
#: Element of a weight by the dtype of its codes.
_ELEMENTS = {"F8_E4M3": E4M3, "I8": E2M1}
#: Keys of the lists of unquantized modules: the first is read by vLLM, the second by all servers.
_EXCLUSIONS = ("ignored_layers", "modules_to_not_convert")
_KV_SCALES = (".k_scale", ".v_scale", ".q_scale")


@dataclass(frozen=True)
class Fp8Writer(WriteLayout):
    """Writer of E4M3 in blocks: 128x128 with float32 scales (DeepSeek), or 1x32 with E8M0 scales (SGLang's MXFP8)."""

    cure: ClassVar[str] = "use compressed-tensors"

    name: str
    block: Granularity
    scale: ElementFormat
    scheme: str

    def check(self, scheme: Scheme) -> None:
        """Check that the scheme is E4M3 in this block, with these scales and inputs in groups of the same width."""
        weight = scheme.weight
        if (weight.element, weight.granularity, weight.scale) != (E4M3, self.block, self.scale):
            raise UsageError(
                f"layout {self.name!r} holds {self.scheme} only, not {scheme.name!r}; use compressed-tensors"
            )
        if scheme.activation != _activation(self.block, dynamic=True, weight_scale=self.scale):
            raise UsageError(
                f"layout {self.name!r} requires inputs quantized at run time in groups of {self.block.cols}, unlike "
                f"{scheme.name!r}; use compressed-tensors"
            )

    def weight_tensors(
        self, module: str, spec: WeightSpec, shape: tuple[int, int], experts: int | None = None
    ) -> WeightTensors:
        rows, cols = spec.granularity.block(shape)
        if shape[0] % rows or shape[1] % cols:
            raise ShapeError(
                f"{module}.weight",
                f"{shape[0]}x{shape[1]} is not made of whole {rows}x{cols} blocks, which transformers misreads in "
                f"layout {self.name!r}; use --layout compressed-tensors, or quantize with this weight left in 16 bits",
            )
        return WeightTensors(
            codes_tensor(f"{module}.weight", spec, shape),
            scale_tensor(f"{module}.weight_scale_inv", spec, spec.granularity.scale_shape(shape)),
        )

    def quantization_config(
        self,
        modules: Mapping[str, Scheme],
        kept: Sequence[str],
        kv: KVSpec | None = None,
        names: Mapping[str, Sequence[str]] = NO_NAMES,
    ) -> dict[str, Any]:
        """Return DeepSeek's config, with the unquantized linears under the key that every server reads."""
        self.refuse_kv(kv)
        return {
            "quant_method": self.name,
            **({"fmt": "e4m3"} if self.name == NAME else {}),
            "activation_scheme": "dynamic",
            "weight_block_size": [self.block.rows, self.block.cols],
            "modules_to_not_convert": with_names(kept, names),
        }


WRITER = Fp8Writer(NAME, BLOCK_128, FLOAT32, "fp8-block")
MXFP8_WRITER = Fp8Writer(MXFP8_NAME, GROUP_32, E8M0, "MXFP8 with MXFP8 inputs")


def describe(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Description:
    """Describe a `quant_method: fp8` or `mxfp8` checkpoint."""
    block = _block_size(config)
    if config.get("quant_method") == MXFP8_NAME and block not in (None, GROUP_32):
        raise ConfigError(
            checkpoint.path / "config.json",
            f"weight_block_size: MXFP8 has {GROUP_32}, found {config['weight_block_size']!r}",
        )
    dynamic = config.get("activation_scheme", "dynamic") != "static"
    weights = {}
    for module, codes in tensors_with_suffix(checkpoint, ".weight"):
        scale = _first_present(checkpoint, module, _WEIGHT_SCALES)
        element = _ELEMENTS.get(codes.dtype)
        if element is None or scale is None:
            continue
        shape = weight_shape(codes, element)
        in_groups = element is E2M1 or scale.shape == GROUP_32.scale_shape(shape)
        granularity = GROUP_32 if in_groups else granularity_of(scale, shape, block)
        spec = stored_spec(shape, scale, element, granularity)
        input_scale = _first_present(checkpoint, module, _INPUT_SCALES)
        weights[module] = StoredWeight(
            module=module,
            spec=spec,
            shape=shape,
            codes=codes.name,
            scale=scale.name,
            activation=None if element is E2M1 else _activation(block, dynamic, spec.scale),
            input_scale=None if input_scale is None else input_scale.name,
        )
    for key in _EXCLUSIONS:
        refuse_excluded(checkpoint.path / "config.json", key, config.get(key), weights, by_name_or_parent)
    auxiliary = frozenset(name for name in checkpoint.tensors if name.endswith(_KV_SCALES))
    return Description(str(config.get("quant_method", NAME)), weights, auxiliary)


def _block_size(config: Mapping[str, Any]) -> Granularity | None:
    size = config.get("weight_block_size")
    if size is None:
        return None
    return block_granularity(*size)


def _activation(block: Granularity | None, dynamic: bool, weight_scale: ElementFormat) -> ActivationSpec:
    """Return the format of inputs; the config states no format of their scales, which are E8M0 in MXFP8 alone."""
    if block is not None:
        _, cols = block.block((1, 1))
        scale = E8M0 if block == GROUP_32 and weight_scale is E8M0 else FLOAT32
        return ActivationSpec(E4M3, block_granularity(1, cols), dynamic=True, scale=scale)
    return ActivationSpec(E4M3, TOKEN if dynamic else TENSOR, dynamic)


def _first_present(checkpoint: Checkpoint, module: str, suffixes: Sequence[str]) -> TensorInfo | None:
    for suffix in suffixes:
        info = checkpoint.tensors.get(f"{module}.{suffix}")
        if info is not None:
            return info
    return None

"""Layouts: names, dtypes and shapes of the tensors of quantized weights, and the config, for each server family.

`describe` reads config and headers of a checkpoint of any layout, `reading` its bytes. `WRITERS` holds the layouts that
`quantize` writes, `TARGETS` those that `convert` writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minifloat.checkpoint import Checkpoint
from minifloat.errors import ConfigError, UnsupportedTensorError, lookup
from minifloat.model.architecture.roles import text_config
from minifloat.model.layouts import compressed_tensors, fp8, gpt_oss, mlx, modelopt
from minifloat.model.layouts.contradictions import refuse_contradictions
from minifloat.model.layouts.reading import read_weight
from minifloat.model.layouts.stored import Description, StoredWeight
from minifloat.model.layouts.writing import WeightTensors, WriteLayout
from minifloat.numerics.scheme import Scheme

__all__ = ["READERS", "TARGETS", "WRITERS", "Description", "StoredWeight", "WeightTensors", "WriteLayout"]
__all__ += ["choose_writer", "describe", "get_writer", "read_weight"]

#: Function that describes a checkpoint, by the `quant_method` of its config.
READERS = {
    "compressed-tensors": compressed_tensors.describe,
    "fp8": fp8.describe,
    "mxfp8": fp8.describe,
    "mxfp4": gpt_oss.describe,
    "modelopt": modelopt.describe,
    "modelopt_fp4": modelopt.describe,
    mlx.NAME: mlx.describe,
}

#: Layouts that `quantize` writes, by name on the command line.
WRITERS: dict[str, WriteLayout] = {
    layout.name: layout for layout in (compressed_tensors.WRITER, fp8.WRITER, gpt_oss.WRITER)
}

#: Layouts that `convert` writes. `quantize` cannot write SGLang's MXFP8 and most formats of ModelOpt: they require
#: quantized inputs that no scheme of `quantize` has, or a global scale that multiplies, while its cast writes divisors.
TARGETS: dict[str, WriteLayout] = {
    layout.name: layout
    for layout in (compressed_tensors.WRITER, fp8.WRITER, modelopt.WRITER, fp8.MXFP8_WRITER, mlx.WRITER)
}

#: Integer dtypes of codes, and how the names of codes end.
_PACK_DTYPES = ("U8", "I8", "I32", "U32")
_WEIGHTS = (".weight", ".weight_packed")


def get_writer(name: str) -> WriteLayout:
    return lookup("layout", name, WRITERS)


def choose_writer(name: str | None, config: Mapping[str, Any], scheme: Scheme) -> WriteLayout:
    if name is not None:
        return get_writer(name)
    is_gpt_oss = text_config(config).get("model_type") == gpt_oss.MODEL_TYPE
    return gpt_oss.WRITER if is_gpt_oss and gpt_oss.WRITER.holds(scheme) else compressed_tensors.WRITER


def describe(checkpoint: Checkpoint) -> Description:
    """Describe the quantized weights of a checkpoint from its config and headers."""
    refuse_contradictions(checkpoint.config, checkpoint.tensors, checkpoint.path)
    config = checkpoint.quantization_config
    if config is None:
        description = Description(layout=None)
    else:
        method = _method(config)
        if method not in READERS:
            raise ConfigError(
                checkpoint.path / "config.json", f"quant_method {method!r} is not one of: {', '.join(READERS)}"
            )
        description = READERS[method](checkpoint, config)
    _refuse_orphans(checkpoint, description)
    return description


def _method(config: Mapping[str, Any]) -> str:
    """Return the `quant_method` of a quantization config, or what stands for it in files that name none."""
    if mlx.is_config(config):
        return mlx.NAME
    return str(config.get("quant_method") or ("modelopt" if "quantization" in config else "compressed-tensors"))


def _refuse_orphans(checkpoint: Checkpoint, description: Description) -> None:
    """Raise if a tensor of codes has no scale, so that codes are never read as weights."""
    known = {name for weight in description.weights.values() for name in weight.tensors} | description.auxiliary
    for name, info in checkpoint.tensors.items():
        is_float = info.dtype.startswith(("F8_", "F4"))
        is_pack = info.dtype in _PACK_DTYPES and len(info.shape) > 1 and name.endswith(_WEIGHTS)
        if (is_float or is_pack) and name not in known:
            raise UnsupportedTensorError(
                name,
                f"{info.dtype} codes without a scale that the {description.layout or 'unquantized'} layout names: the "
                "checkpoint is damaged or incomplete, download it again",
            )

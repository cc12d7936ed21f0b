"""`quant_method: mxfp4`: gpt-oss, whose fused experts are MXFP4 and everything else BF16. Read only.

``<experts>.gate_up_proj_blocks`` uint8 ``[E, out, in / 32, 16]`` and ``..._scales`` uint8 ``[E, out, in / 32]``: the
blocks of a row lie one after the other, so a row's bytes are already the packed codes ``[out, in / 2]``. Gate and up
rows are interleaved; that is the model's business and is not undone here.

Source: openai/gpt-oss model card; transformers' mxfp4 integration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minifloat.checkpoint import Checkpoint
from minifloat.errors import ConfigError, ShapeError
from minifloat.layouts.stored import Description, StoredWeight, stored_spec, tensors_with_suffix
from minifloat.numerics.formats import E2M1
from minifloat.numerics.granularity import GROUP_32

NAME = "gpt-oss mxfp4"


def describe(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Description:
    """Describe a gpt-oss checkpoint: one weight per expert, named ``<experts>.gate_up_proj.<index>``.

    Raises:
        ConfigError: The config says mxfp4, yet nothing is stored that way (a dense model saved so is not quantized).
        ShapeError: Blocks that are not 16 bytes.
    """
    del config
    _, group = GROUP_32.block((1, 1))
    weights = {}
    for base, blocks in tensors_with_suffix(checkpoint, "_blocks"):
        scales = checkpoint.tensors.get(f"{base}_scales")
        if scales is None:
            raise ConfigError(checkpoint.path / "config.json", f"{blocks.name} has no {base}_scales beside it")
        block_bytes = group * E2M1.bits // 8
        if len(blocks.shape) != 4 or blocks.shape[3] != block_bytes:
            raise ShapeError(
                blocks.name, f"expected [experts, out, in / 32, {block_bytes}], found {list(blocks.shape)}"
            )
        experts, rows, groups, _ = blocks.shape
        shape = (rows, groups * group)
        spec = stored_spec(shape, scales, E2M1, GROUP_32, experts)
        for expert in range(experts):
            module = f"{base}.{expert}"
            weights[module] = StoredWeight(module, spec, shape, blocks.name, scales.name, expert=expert)
    if not weights:
        raise ConfigError(
            checkpoint.path / "config.json",
            "quant_method mxfp4 covers fused experts only, and no *_blocks tensor is stored; "
            "a dense MXFP4 model is saved as compressed-tensors",
        )
    return Description(NAME, weights)

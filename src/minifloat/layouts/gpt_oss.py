"""`quant_method: mxfp4`, the layout of gpt-oss: fused experts in MXFP4, everything else in BF16. Read only.

``<experts>.gate_up_proj_blocks`` is uint8 ``[E, out, in / 32, 16]`` and ``..._scales`` is uint8 ``[E, out, in / 32]``.
The blocks of a row are contiguous, so the bytes of an expert are its packed codes ``[out, in / 2]``. Rows of gate and
up are interleaved, and this module leaves them so.

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
        ConfigError: If no tensor is stored in MXFP4 (a dense model saved in this layout is not quantized), or blocks
            have no scales.
        ShapeError: If a block does not have 16 bytes.
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

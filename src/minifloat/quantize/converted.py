"""Layouts that `quantize` writes by a conversion, from a checkpoint in its work folder: a GGUF file, mlx-lm's folder.

The checkpoint is resumed and verified as any other, never becomes a folder of its own, and goes when its conversion is
whole. What the layout cannot hold is refused before the first tensor is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.layout import is_gguf
from minifloat.checkpoint.writer import CheckpointWriter
from minifloat.deploy.check.target import LOCAL
from minifloat.errors import ConversionError, DestinationError, UsageError
from minifloat.model.layouts import gguf, mlx
from minifloat.model.layouts.gguf.blocks import BLOCKS, blocks_of
from minifloat.model.plan.overrides import Override
from minifloat.numerics.scheme import Scheme
from minifloat.quantize.options import QuantizeOptions
from minifloat.quantize.report import TensorReport

#: Squared error of a weight, as a share of its squared values, from which on it is lost.
_MOST_NOISE = 0.25
#: Layout -> the engine that reads it; Ollama runs llama.cpp.
ENGINE_OF = {layout: engine for engine, layout in reversed(LOCAL.items())}


def check_source(checkpoint: Checkpoint, destination: Path, options: QuantizeOptions) -> None:
    """Refuse options, a destination or a plain model of which no such output is made."""
    layout = str(options.layout)
    if options.kv_cache:
        raise UsageError(f"--kv-cache: {ENGINE_OF[layout]} reads no scales of a KV cache; leave it out")
    if options.target is not None:
        raise UsageError(f"--target: --layout {layout} is for {ENGINE_OF[layout]} alone; leave it out")
    if layout == mlx.NAME:
        from minifloat.quantize.convert.mlx_plan import require_model_type

        CheckpointWriter.check_destination(destination, overwrite=options.overwrite)
        require_model_type(checkpoint)
        return
    gguf.require_package()
    from minifloat.quantize.convert.gguf_file import check_model

    if not destination.absolute().parent.is_dir():
        raise DestinationError(f"{destination}: the folder to create it in does not exist; create that one first")
    if is_gguf(destination.name) and destination.exists() and not options.overwrite:
        raise DestinationError(f"{destination} exists; --overwrite replaces it")
    check_model(checkpoint, options.gguf)


def schemes_in(layout: str, scheme: Scheme, overrides: Sequence[Override]) -> tuple[Scheme, list[Override]]:
    """Return a scheme and overrides as they are quantized for a layout: mlx has no tensor scales, so these are 1."""

    def adapted(scheme: Scheme) -> Scheme:
        return replace(scheme, weight=replace(scheme.weight, scaled_globally=layout != mlx.NAME))

    return adapted(scheme), [
        item if item.scheme is None else replace(item, scheme=adapted(item.scheme)) for item in overrides
    ]


def require_kept(layout: str, tensors: Iterable[TensorReport]) -> None:
    """Refuse a weight that block scales alone cannot hold: too small or too large for them."""
    for tensor in tensors if layout == mlx.NAME else ():
        if tensor.stats is not None and tensor.stats.noise > _MOST_NOISE * tensor.stats.signal:
            raise ConversionError(
                f"{tensor.name}: {tensor.detail} keeps little of it in mlx, which has no tensor scale (SQNR "
                f"{tensor.stats.sqnr_db:.1f} dB); quantize it to mxfp4 (--override) or keep it (--exclude)"
            )


def check_schemes(layout: str, schemes: dict[Scheme, None], *, within_budget: bool) -> None:
    """Refuse schemes whose codes or scales the layout would have to round; in a GGUF file only within a budget."""
    for scheme in schemes:
        if layout == mlx.NAME:
            mlx.WRITER.check(scheme)
            if within_budget and scheme.weight.has_global_scale:
                raise UsageError(
                    f"{scheme.name}: mlx has no tensor scale, with which a budget measures this format; within a "
                    "budget, use mxfp4 or mxfp8"
                )
        elif within_budget and blocks_of(scheme.weight) is None:
            raise UsageError(
                f"{scheme.name}: GGUF has no type for it, and other types take other bytes than the budget counts; "
                f"within a budget, use {' or '.join(blocks.name.lower() for blocks in BLOCKS)}"
            )

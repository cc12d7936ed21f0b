"""Layouts that `quantize` writes by a conversion, from a checkpoint in its work folder: a GGUF file, mlx-lm's folder.

The checkpoint is resumed and verified as any other, never becomes a folder of its own, and goes when its conversion is
whole. What the layout cannot hold is refused before the first tensor is read.
"""

from __future__ import annotations

from pathlib import Path

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.layout import is_gguf
from minifloat.checkpoint.writer import CheckpointWriter
from minifloat.deploy.check.target import LOCAL
from minifloat.errors import DestinationError, UsageError
from minifloat.model.layouts import gguf, mlx
from minifloat.model.layouts.gguf.blocks import BLOCKS, blocks_of
from minifloat.numerics.scheme import Scheme
from minifloat.quantize.options import QuantizeOptions

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


def check_schemes(layout: str, schemes: dict[Scheme, None], *, within_budget: bool) -> None:
    """Refuse schemes whose codes or scales the layout would have to round; in a GGUF file only within a budget."""
    for scheme in schemes:
        if layout == mlx.NAME:
            mlx.WRITER.check(scheme)
            if scheme.weight.has_global_scale:
                raise UsageError(
                    f"{scheme.name}: mlx has no tensor scale, and rounds it into others; quantize to a folder, then "
                    "minifloat convert --layout mlx --allow-rounding"
                )
        elif within_budget and blocks_of(scheme.weight) is None:
            raise UsageError(
                f"{scheme.name}: GGUF has no type for it, and other types take other bytes than the budget counts; "
                f"within a budget, use {' or '.join(blocks.name.lower() for blocks in BLOCKS)}"
            )

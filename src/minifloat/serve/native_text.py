"""Opens a model for the text of one prompt, on the engine's native decoder where it computes what `load` would.

The decoder starts in a fraction of the time, because it needs no transformers. It never quantizes the inputs of
linears, so checkpoints that declare quantized inputs are left to `load`, unless the caller wants weights only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from minifloat.checkpoint import Checkpoint
from minifloat.errors import MinifloatError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from minifloat.engine import Engine, SamplingParams

_LOG = logging.getLogger(__name__)


def open_text_model(
    folder: Path,
    *,
    device: str = "cpu",
    weight_only: bool = False,
    lm_head: str = "auto",
    activations: str = "bf16",
    deterministic: bool = False,
) -> Engine | PreTrainedModel:
    """Return an engine on the native decoder, or transformers' model where the decoder would compute something else."""
    from minifloat.model.layouts import describe
    from minifloat.model.runtime.devices import device_named

    place = device_named(device)
    with Checkpoint.open(folder) as checkpoint:
        description = describe(checkpoint)
        if place.type == "cpu" and (weight_only or not description.quantizes_inputs):
            from minifloat.engine import Engine, EngineOptions

            try:
                return Engine(
                    folder,
                    EngineOptions(
                        runner="native",
                        lm_head=lm_head,  # type: ignore[arg-type]  # checked by EngineOptions
                        activations=activations,  # type: ignore[arg-type]
                        max_num_seqs=1,
                        prefix_cache=False,
                        deterministic=deterministic,
                    ),
                    checkpoint=checkpoint,
                )
            except UsageError as error:
                if deterministic:
                    raise
                _LOG.info("transformers' code runs this model: %s", error)
        if deterministic:
            cure = "; --weight-only leaves out the quantized inputs that it declares" if place.type == "cpu" else ""
            raise UsageError(
                f"deterministic: only the native decoder of the CPU has it; this model runs elsewhere ({place}){cure}"
            )
        from minifloat.model.runtime.load import load_opened

        return load_opened(
            checkpoint,
            description,
            device=place,
            weight_only=weight_only,
            lm_head=lm_head,
            activations=activations,
        )


def native_pieces(engine: Engine, prompt: str, params: SamplingParams) -> Iterator[str]:
    """Return an iterator over pieces of the continuation of a prompt."""
    tokens = engine.encode(prompt)
    if not tokens:
        raise UsageError("the prompt is empty, and the tokenizer has no token to begin a text with")
    limit = engine.info.max_model_len
    if len(tokens) >= limit:
        raise UsageError(f"the prompt has {len(tokens)} tokens; the model attends to {limit}")
    return _pieces(engine, tokens, params)


def _pieces(engine: Engine, tokens: tuple[int, ...], params: SamplingParams) -> Iterator[str]:
    for delivery in engine.generate([tokens], params, stream=True):
        if delivery.error is not None:
            raise MinifloatError(f"the text ended with an error: {delivery.error}")
        if delivery.text:
            yield delivery.text

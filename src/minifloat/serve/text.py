"""Text from a model, piece by piece: for looking at a quantized model by eye.

The engine's native decoder runs a checkpoint where it computes what `load` would: it starts in a fraction of the time,
because it needs no transformers. It never quantizes the inputs of linears, so checkpoints that declare quantized inputs
are left to transformers' code, unless the caller wants weights only.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import model_folder
from minifloat.engine.options import EngineOptions
from minifloat.errors import MinifloatError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from minifloat.engine import Engine, SamplingParams
    from minifloat.engine.sequence import Sequence

_LOG = logging.getLogger(__name__)
_EMPTY = "the prompt is empty, and the tokenizer has no token to begin a text with"


def generate(
    model: Engine | PreTrainedModel | str | os.PathLike[str],
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    options: EngineOptions | None = None,
    revision: str | None = None,
) -> Iterator[str]:
    """Continue a text.

    Generation ends at an end-of-sequence token, after `max_new_tokens`, or where the model's positions end. Closing the
    iterator, as a KeyboardInterrupt in a loop over it does, ends generation after the token at work.

    Args:
        model: A folder, a model of the hub, an `Engine`, or a model made by `minifloat.load`.
        prompt: The text to continue, without a chat template.
        max_new_tokens: Number of tokens at most.
        temperature: 0 takes the most probable token; otherwise the logits are divided by it and a token is drawn. At
            most 100, as in `SamplingParams`.
        top_p: Draw from the smallest set of most probable tokens that together have this probability.
        seed: Makes draws repeatable on one machine; by default they are not. The global random state is not touched.
        options: Device, output layer, activations and determinism of a model that is opened here.
        revision: Revision of a model of the hub.

    Returns:
        An iterator over pieces of the continuation, without the prompt and without special tokens. A character whose
        bytes are spread over tokens comes whole.

    Raises:
        UsageError: If an argument is out of range, or the prompt does not fit the model.
        CheckpointError: If the folder cannot be loaded.
        HubError: If the hub has no such model, refuses it, or cannot be reached.
    """
    if max_new_tokens < 1 or not 0 <= temperature < math.inf or not 0 < top_p <= 1:
        raise UsageError(
            "expected max_new_tokens >= 1, a finite temperature >= 0 and 0 < top_p <= 1; "
            f"got {max_new_tokens}, {temperature} and {top_p}"
        )
    from minifloat.engine import Engine, SamplingParams

    params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_new_tokens)
    if isinstance(model, (str, os.PathLike)):
        model = open_text_model(model_folder(model, revision=revision), options)
    if isinstance(model, Engine):
        return _native_pieces(model, prompt, params)
    return _transformers_pieces(model, prompt, params)


def open_text_model(
    folder: Path, options: EngineOptions | None = None, *, weight_only: bool = False
) -> Engine | PreTrainedModel:
    """Return an engine on the native decoder, or transformers' model where the decoder would compute something else."""
    options = options or EngineOptions()
    from minifloat.model.layouts import describe
    from minifloat.model.runtime.tensors import device_named

    place = device_named(options.device)
    with Checkpoint.open(folder) as checkpoint:
        description = describe(checkpoint)
        if place.type == "cpu" and (weight_only or not description.quantizes_inputs):
            from minifloat.engine import Engine

            native = replace(options, runner="native", max_num_seqs=1, prefix_cache=False)
            try:
                return Engine(folder, native, checkpoint=checkpoint)
            except UsageError as error:
                if options.deterministic:
                    raise
                _LOG.info("transformers' code runs this model: %s", error)
        if options.deterministic:
            raise UsageError(
                f"deterministic: only the native decoder of the CPU has it; this model runs elsewhere ({place}); "
                "--weight-only leaves out the quantized inputs that it declares"
            )
        from minifloat.model.runtime.load import LoadOptions, load_opened

        return load_opened(
            checkpoint,
            description,
            LoadOptions(
                device=place,
                weight_only=weight_only,
                lm_head=options.lm_head,
                activations="bf16" if options.activations == "auto" else options.activations,
            ),
        )


def _native_pieces(engine: Engine, prompt: str, params: SamplingParams) -> Iterator[str]:
    tokens = engine.encode(prompt)
    if not tokens:
        raise UsageError(_EMPTY)
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


def _transformers_pieces(model: PreTrainedModel, prompt: str, params: SamplingParams) -> Iterator[str]:
    from minifloat.engine.sampling import SamplingState
    from minifloat.engine.sequence import Request, Sequence
    from minifloat.engine.text import TextStream
    from minifloat.model.architecture.full_config import position_limit
    from minifloat.model.runtime.tokenizer import end_tokens, load_tokenizer

    tokenizer = load_tokenizer(str(model.config.name_or_path))
    ids = list(tokenizer(prompt).input_ids) or [tokenizer.bos_token_id]
    if ids == [None]:
        raise UsageError(_EMPTY)
    limit = position_limit(model.config)
    if limit is not None and len(ids) >= limit:
        raise UsageError(f"the prompt has {len(ids)} tokens; the model attends to {limit}")
    longest = min(filter(None, (len(ids) + (params.max_tokens or 0), limit)))
    state, text = SamplingState(params, ids), TextStream(tokenizer, ids, (), include_stop=False)
    sequence = Sequence(Request("", tuple(ids), params), text, state, b"", longest)
    return _computed(model, sequence, end_tokens(model.generation_config, model.config, tokenizer))


def _computed(model: PreTrainedModel, sequence: Sequence, ends: Collection[int]) -> Iterator[str]:
    from minifloat.engine.sampling import sample
    from minifloat.engine.scheduler import WorkItem
    from minifloat.engine.transformers_runner import TransformersRunner

    runner = TransformersRunner(model, 0, 0)
    while len(sequence.tokens) < sequence.max_length:
        length = len(sequence.tokens)
        (choice,) = sample(runner.run([WorkItem(sequence, sequence.computed, length)]), [sequence.sampling])
        if isinstance(choice, Exception):
            raise choice
        if choice.token in ends:
            break
        sequence.computed = length
        sequence.tokens.append(choice.token)
        sequence.sampling.add(choice.token)
        if piece := sequence.text.add(choice.token)[0]:
            yield piece
    if piece := sequence.text.finish()[0]:
        yield piece

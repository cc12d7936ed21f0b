"""Text from transformers' `generate`, for models that the native decoder does not run.

It runs one prompt at a time in a thread of its own, so that the caller gets an ordinary iterator and can leave it at
any token. Tokens are drawn by the engine's sampler.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from minifloat.engine.sampling import SamplingParams, SamplingState, sample
from minifloat.engine.text import Detokenizer
from minifloat.errors import UsageError
from minifloat.model.architecture.full_config import position_limit
from minifloat.model.runtime.tokenizer import end_tokens, load_tokenizer


def transformers_pieces(model: PreTrainedModel, prompt: str, params: SamplingParams) -> Iterator[str]:
    tokenizer = load_tokenizer(str(model.config.name_or_path))
    ids = list(tokenizer(prompt).input_ids) or [tokenizer.bos_token_id]
    if ids == [None]:
        raise UsageError("the prompt is empty, and the tokenizer has no token to begin a text with")
    limit = position_limit(model.config)
    room = None if limit is None else limit - len(ids)
    if room is not None and room < 1:
        raise UsageError(f"the prompt has {len(ids)} tokens; the model attends to {limit}")
    ends = sorted(end_tokens(model.generation_config, model.config, tokenizer))
    options: dict[str, Any] = {
        "max_new_tokens": min(filter(None, (params.max_tokens, room))),
        "do_sample": False,
        "eos_token_id": ends or None,
        "pad_token_id": ends[0] if ends else 0,  # transformers asks for one; a batch of one prompt has no padding
    }
    if not params.is_greedy:
        options["logits_processor"] = LogitsProcessorList([_Sampler(params, ids)])
    return _stream(model, tokenizer, ids, options)


def _stream(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: list[int], options: dict[str, Any]
) -> Iterator[str]:
    feed = _Feed(len(prompt))
    ids = torch.tensor([prompt], device=model.device)
    runner: Any = model
    arguments = {"attention_mask": torch.ones_like(ids), "streamer": feed, **options}
    arguments["stopping_criteria"] = StoppingCriteriaList([_Stop(feed.abandoned)])

    def run() -> None:
        try:
            runner.generate(ids, **arguments)
        except BaseException as error:  # handed to the caller, who raises it
            feed.tokens.put(error)
        feed.tokens.put(None)

    worker = threading.Thread(target=run, name="minifloat-generate", daemon=True)
    worker.start()
    try:
        decoder = Detokenizer(tokenizer, prompt)
        while (item := feed.tokens.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            if piece := decoder.add(item):
                yield piece
        if piece := decoder.rest():
            yield piece
    finally:
        feed.abandoned.set()
        worker.join()


class _Feed(BaseStreamer):  # type: ignore[misc, no-any-unimported, unused-ignore]
    """Puts the tokens of `generate` into a queue, except those of the prompt, which come first."""

    def __init__(self, prompt_tokens: int) -> None:
        self.tokens: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
        self.abandoned = threading.Event()
        self._skip = prompt_tokens

    def put(self, value: Tensor) -> None:
        for token in value.flatten().tolist():
            if self._skip:
                self._skip -= 1
            else:
                self.tokens.put(token)

    def end(self) -> None:
        """Do nothing: the thread itself marks the end."""


class _Stop(StoppingCriteria):
    def __init__(self, abandoned: threading.Event) -> None:
        self.abandoned = abandoned

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self.abandoned.is_set(), dtype=torch.bool, device=input_ids.device)


class _Sampler(LogitsProcessor):
    """Draws a token by the engine's sampler, and leaves `generate` no other token to choose."""

    def __init__(self, params: SamplingParams, prompt: list[int]) -> None:
        self._state = SamplingState(params, prompt)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        (choice,) = sample(scores.float().cpu(), [self._state])
        if isinstance(choice, Exception):
            raise choice
        self._state.add(choice.token)
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, choice.token] = 0
        return chosen

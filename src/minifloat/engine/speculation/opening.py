"""Makes the drafter that the options of an engine ask for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import model_folder
from minifloat.engine.native import NativeRunner
from minifloat.engine.options import EngineOptions
from minifloat.engine.runner import Runner
from minifloat.engine.speculation.draft_model import (
    SelfDraft,
    shares_cache,
    why_not_draft,
    with_cache_scales,
)
from minifloat.engine.speculation.model_drafter import ModelDrafter
from minifloat.engine.speculation.prompt_lookup import PromptLookup
from minifloat.engine.speculation.speculator import Drafter
from minifloat.errors import UsageError
from minifloat.kernels.decoder import Decoder
from minifloat.model.runtime.tokenizer import serving_tokenizer

if TYPE_CHECKING:
    from minifloat.model.runtime.tokenizer import TextTokenizer

_LOG = logging.getLogger(__name__)
#: Bytes of a draft per byte of the model that it copies: four bits and scales over eight.
_SELF_SHARE = 0.55
_MIB = 1 << 20


def open_drafter(
    options: EngineOptions,
    runner: Runner,
    tokenizer: TextTokenizer,
    read_draft: Callable[[Checkpoint], Decoder],
) -> Drafter | None:
    """Make the drafter, or return None if the options ask for none."""
    kind = "draft" if options.draft is not None else options.speculate
    if kind is None:
        return None
    if not isinstance(runner, NativeRunner):
        raise UsageError(
            f"speculate: only the native decoder of the CPU verifies drafts; the {runner.name} runner has this model"
        )
    if runner.states is not None:
        raise UsageError(
            "speculate: this model keeps one state of each sequence (gated delta rule), which cannot go back to before "
            "drafts that are refused; serve it without speculate and draft"
        )
    if kind == "prompt":
        return PromptLookup()
    started = time.perf_counter()
    if kind == "self":
        _check_memory(round(runner.weight_bytes * _SELF_SHARE), "the copy of the model in MXFP4")
        draft = SelfDraft(runner.decoder)
        drafter = ModelDrafter(
            "self", runner.drafting(draft.decoder, shares_cache=True), shares_cache=True, memory=draft.memory
        )
    else:
        assert options.draft is not None
        drafter = _read_draft(model_folder(options.draft), runner, tokenizer, read_draft)
    _LOG.info(
        "drafts by %s: %.0f MiB beside the model%s, made in %.1f s",
        "a copy of the model in MXFP4" if kind == "self" else options.draft,
        drafter.memory / _MIB,
        ", in the KV cache of the model" if drafter.shares_cache else ", its own KV cache included",
        time.perf_counter() - started,
    )
    return drafter


def _read_draft(
    folder: Path, runner: NativeRunner, tokenizer: TextTokenizer, read_draft: Callable[[Checkpoint], Decoder]
) -> ModelDrafter:
    ids = list(range(runner.vocab))
    if serving_tokenizer(folder).convert_ids_to_tokens(ids) != tokenizer.convert_ids_to_tokens(ids):
        raise UsageError(f"draft: {folder} has another vocabulary than the model; its token ids mean other text")
    with Checkpoint.open(folder) as checkpoint:
        _check_memory(sum(info.nbytes for info in checkpoint.tensors.values()), f"the draft {folder}")
        decoder = read_draft(checkpoint)
    reason = why_not_draft(runner.decoder, decoder)
    if reason:
        raise UsageError(f"draft: {folder} cannot draft for the model: {reason}")
    shares = shares_cache(runner.decoder, decoder)
    if shares:
        decoder = with_cache_scales(decoder, runner.decoder)
    drafting = runner.drafting(decoder, shares_cache=shares)
    memory = drafting.weight_bytes + decoder.embedding.nbytes + (0 if shares else drafting.kv_bytes)
    return ModelDrafter("model", drafting, shares_cache=shares, memory=memory)


def _check_memory(nbytes: int, what: str) -> None:
    """Raise UsageError if memory is missing."""
    free = psutil.virtual_memory().available
    if nbytes > free:
        raise UsageError(f"speculate: {what} takes {nbytes / _MIB:.0f} MiB, and {free / _MIB:.0f} MiB are free")

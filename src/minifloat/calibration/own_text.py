"""Calibration text that the model itself writes: ``--data self``.

A sequence begins with BOS, if the tokenizer begins texts with BOS, and one random token; the engine continues it with
draws from the model's own distribution (temperature 1, no other limit).

Source: M. Williams and N. Aletras, "Self-calibration for Language Model Quantization and Pruning", 2024; Z. Liu et al.,
"LLM-QAT: Data-Free Quantization Aware Training for Large Language Models", 2023 (random first token).
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import random
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from minifloat._version import __version__
from minifloat.calibration.data import CalibrationSet, describe_sequences, fingerprint, sequence_prefix
from minifloat.calibration.options import DEFAULT_SAMPLES, TextOptions
from minifloat.calibration.readers import OWN_TEXT, first_line
from minifloat.calibration.stats import ModelIdentity
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.array_file import ArrayContent, ArrayFormat, read_arrays, write_arrays
from minifloat.checkpoint.hub import model_name
from minifloat.checkpoint.progress import Progress
from minifloat.checkpoint.schema import any_object, exact_fields, integer, map_of, or_null, text
from minifloat.engine import Engine, EngineOptions, Request, SamplingParams
from minifloat.errors import AlreadyQuantizedError, ChatTemplateError, DataError, StatsError, StorageError, UsageError
from minifloat.kernels.memory import available_memory
from minifloat.model.architecture.full_config import position_limit
from minifloat.model.runtime.config import plain_config
from minifloat.model.runtime.templates import apply_chat_template

_TENSOR = "tokens"
_CURE = "delete the file, and the model writes the text again"


@dataclass(frozen=True)
class TextSettings:
    """What decides the text that a model writes."""

    model: ModelIdentity
    seed: int
    seq_len: int
    tokenizer: str | None  # SHA-256 of the tokenizer's definition; None: the model has no tokenizer
    template: str | None  # SHA-256 of the chat template; None: it has none

    def differences(self, other: TextSettings) -> list[str]:
        """Return the differences in words; an empty list for the same text."""
        names = {"seed": "the seed", "seq_len": "the tokens of a sequence", "tokenizer": "the tokenizer"}
        names["template"] = "the chat template"
        found = self.model.differences(other.model)
        return found + [name for key, name in names.items() if getattr(self, key) != getattr(other, key)]


@dataclass(frozen=True)
class WrittenText:
    """Text that a model wrote."""

    settings: TextSettings
    tokens: npt.NDArray[np.int32]  # int32 ``[sequences, seq_len]``
    weights: Mapping[str, str]
    chat: Mapping[str, Any] = field(default_factory=dict)
    version: str = __version__


_FORMAT = ArrayFormat(
    "text that a model wrote",
    2,
    exact_fields(
        {
            "settings": exact_fields(
                {
                    "model": exact_fields({field.name: text for field in fields(ModelIdentity)}),
                    "seed": integer(-(2**63), 2**63),
                    "seq_len": integer(1),
                    "tokenizer": or_null(text),
                    "template": or_null(text),
                }
            ),
            "weights": map_of(text),
            "chat": any_object,
            "minifloat": text,
        }
    ),
    _CURE,
    {_TENSOR: ("I32", 2)},
)


def write_token_file(written: WrittenText, path: Path) -> None:
    record = {
        "settings": asdict(written.settings),
        "weights": dict(written.weights),
        "chat": dict(written.chat),
        "minifloat": written.version,
    }
    write_arrays(path, _FORMAT, ArrayContent(record, {_TENSOR: written.tokens.astype(np.int32)}))


def read_token_file(path: Path) -> WrittenText | None:
    try:
        file = read_arrays(path, _FORMAT)
    except FileNotFoundError:
        return None
    record, tokens = file.record, file.array(_TENSOR)
    stated = record["settings"]
    settings = TextSettings(**{**stated, "model": ModelIdentity(**stated["model"])})
    if tokens.shape[1] != settings.seq_len:
        raise StatsError(path, f"sequences of {tokens.shape[1]} tokens, announced as {settings.seq_len}; {_CURE}")
    if tokens.size and tokens.min() < 0:
        raise StatsError(path, f"a token id is {tokens.min()}; {_CURE}")
    return WrittenText(settings, tokens, dict(record["weights"]), dict(record["chat"]), record["minifloat"])


_LOG = logging.getLogger(__name__)

#: Sequences that the engine decodes together.
_TOGETHER = 64
#: Share of the available memory that the weights may take; the rest is for the KV cache and the steps.
_WEIGHTS_SHARE = 0.8
#: Seconds after which finished sequences are written to the file.
_SAVE_SECONDS = 20.0
# The native kernels sum a row the same way for any number of rows but one, so that a sequence of a dense model depends
# on the seed and its number only. Elsewhere a draw near the border of two tokens may go the other way.
#: Request of a sequence that is decoded beside the others and thrown away, so that no step has a single row.
_COMPANION = "companion"
#: Stands for the content of a user's turn when the chat template is rendered.
_CONTENT = "OWNTEXTCONTENT"


def own_text_path(model: str | os.PathLike[str], out: Path, seq_len: int) -> Path:
    """Return the file beside an output that keeps a model's text of one length."""
    return out.absolute().with_name(f"{model_name(model).rpartition('/')[2]}.self-text-{seq_len}.safetensors")


def sequences_written(file: Path, seq_len: int) -> int:
    """Return the number of sequences of a length in a file of own text; 0 for one that cannot be read."""
    try:
        written = read_token_file(file)
    except (StatsError, StorageError):  # said when it is read for the run
        return 0
    return 0 if written is None or written.settings.seq_len != seq_len else len(written.tokens)


class ShortMemoryError(UsageError):
    """The weights do not fit in memory; those of a quantized copy may."""


def write_own_text(
    checkpoint: Checkpoint,
    tokenizer: PreTrainedTokenizerBase,
    options: TextOptions,
    *,
    file: Path | None = None,
    weights: Path | None = None,
    device: str | torch.device = "cpu",
    max_num_seqs: int = _TOGETHER,
    progress: Progress | None = None,
) -> CalibrationSet:
    """Return text that the model writes, or a quantized copy of it in the folder `weights`; packing does not apply."""
    samples, seq_len = options.samples or DEFAULT_SAMPLES, options.seq_len
    prefix = sequence_prefix(tokenizer)
    _check(checkpoint, seq_len, prefix)
    identity = ModelIdentity.of(checkpoint)
    template = tokenizer.chat_template
    digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest() if template else None
    settings = TextSettings(identity, options.seed, seq_len, fingerprint(tokenizer), digest)
    text = None if file is None else _kept(file, settings, samples)
    if text is None or len(text.tokens) < samples:
        engine = Engine(
            weights or _own_weights(checkpoint, device),
            EngineOptions(
                device=str(device),
                max_model_len=seq_len,
                max_num_seqs=max_num_seqs + 1,
                prefix_cache=False,
                task="generate",
            ),
            tokenizer=tokenizer,
        )
        prompts = _Prompts.of(tokenizer, prefix, engine.info.vocab_size, options.seed, seq_len)
        text = _Writer(engine, prompts, settings, file, progress).write(samples, text)
        del engine
        gc.collect()  # the weights of the engine, before the caller loads the model
    return _calibration_set(text, samples)


def _check(checkpoint: Checkpoint, seq_len: int, prefix: list[int]) -> None:
    if checkpoint.quantization_config is not None:
        raise AlreadyQuantizedError(
            f"{checkpoint.path} is quantized already; the original checkpoint writes the text, or its plain weights do "
            "(minifloat convert --dequantize)"
        )
    least = len(prefix) + 2
    if seq_len < least:
        raise DataError(f"own text: expected seq_len >= {least}; got {seq_len}")
    positions = position_limit(plain_config(checkpoint))
    if positions is not None and seq_len > positions:
        raise DataError(f"own text: sequences of {seq_len} tokens, but the model has {positions} positions")


def _kept(file: Path, settings: TextSettings, samples: int) -> WrittenText | None:
    text = read_token_file(file)
    if text is None:
        return None
    differences = text.settings.differences(settings)
    if differences:
        _LOG.warning("%s: the text is written again, because it differs in %s", file, " and ".join(differences))
        return None
    lacking = samples - len(text.tokens)
    more = f"; it writes {lacking} more" if lacking > 0 else ""
    _LOG.info("%s: %d sequences of the model's own text are there already%s", file, len(text.tokens), more)
    return text


def _own_weights(checkpoint: Checkpoint, device: str | torch.device) -> Path:
    """Return the folder of the model, if its weights fit in memory."""
    nbytes, available = sum(info.nbytes for info in checkpoint.tensors.values()), available_memory(device)
    if nbytes > available * _WEIGHTS_SHARE:
        raise ShortMemoryError(
            f"own text: the weights take {nbytes:,} bytes and {available:,} bytes of memory are available; free some "
            "memory, or give the text in a file"
        )
    return checkpoint.path


@dataclass(frozen=True)
class _Prompts:
    """The tokens that sequences begin with."""

    prefix: tuple[int, ...]
    first: tuple[int, ...]
    chat: tuple[int, ...]
    note: str
    seed: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, prefix: list[int], vocab: int, seed: int, seq_len: int) -> _Prompts:
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        first = sorted({token for token in tokenizer.get_vocab().values() if 0 <= token < vocab} - special)
        if not first:
            raise DataError(f"own text: no token to begin with: all {vocab} tokens of the model are special ones")
        chat, note = _chat_prompt(tokenizer, prefix, vocab, seq_len)
        if note:
            _LOG.warning("own text: no sequence begins with the chat template: %s", note)
        return cls(tuple(prefix), tuple(first), tuple(chat), note, seed)

    def is_chat(self, index: int) -> bool:
        """Return whether a sequence begins with the chat template."""
        return bool(self.chat) and index % 2 == 1

    def prompt(self, index: int) -> tuple[int, ...]:
        """Return the tokens that a sequence begins with."""
        if self.is_chat(index):
            return self.chat
        number = random.Random(f"{self.seed}/{index}").random()  # the numbers of random() are the same in all Pythons
        return (*self.prefix, self.first[int(number * len(self.first))])


def _chat_prompt(
    tokenizer: PreTrainedTokenizerBase, prefix: list[int], vocab: int, seq_len: int
) -> tuple[list[int], str]:
    """Return the tokens of the chat template up to the content of a user's turn, or none and the reason."""
    if not tokenizer.chat_template:
        return [], ""
    try:
        rendered = apply_chat_template(tokenizer, [{"role": "user", "content": _CONTENT}])
    except ChatTemplateError as error:
        return [], f"it fails on a user's message: {first_line(error)}"
    before, found, _ = rendered.partition(_CONTENT)
    if not found:
        return [], "it does not render the content of a user's message"
    # Spaces before the content are part of the content's first token in most vocabularies.
    ids = list(tokenizer(before.rstrip(" "), add_special_tokens=False, verbose=False).input_ids)
    if prefix and ids[:1] != prefix:
        ids = prefix + ids
    if not ids:
        return [], "it has nothing before the content of a user's message"
    if max(ids) >= vocab:
        return [], f"its token {max(ids)} is beyond the model's vocabulary of {vocab}"
    if len(ids) > seq_len // 2:
        return [], f"it takes {len(ids)} of {seq_len} tokens before the content of a user's message"
    return ids, ""


class _Writer:
    """Writes sequences in order, and keeps the finished ones in a file."""

    def __init__(
        self, engine: Engine, prompts: _Prompts, settings: TextSettings, file: Path | None, progress: Progress | None
    ) -> None:
        self._engine, self._prompts, self._settings = engine, prompts, settings
        self._file, self._progress = file, progress
        self._companion_ended = True
        info = engine.info
        self._weights = {"dtype": info.dtype, "runner": info.runner, "scheme": info.scheme}  # as the file sorts it
        # transformers' code runs one sequence after the other: fewer at a time are finished, and saved, earlier.
        self._is_batched = info.runner != "transformers"
        self._together = info.max_num_seqs - 1 if self._is_batched else 1

    def write(self, samples: int, kept: WrittenText | None) -> WrittenText:
        """Return a text of `samples` sequences, of which those in `kept` are used as they are."""
        if kept is not None and dict(kept.weights) != self._weights:
            _LOG.warning("%s: the text is written again: %s wrote it before", self._file, dict(kept.weights))
            kept = None
        rows = [] if kept is None else list(kept.tokens)
        saved = time.monotonic()
        while len(rows) < samples:
            rows += self._batch(range(len(rows), min(len(rows) + self._together, samples)), samples)
            if self._file is not None and (len(rows) == samples or time.monotonic() - saved > _SAVE_SECONDS):
                write_token_file(self._text(rows), self._file)
                saved = time.monotonic()
        return self._text(rows)

    def _text(self, rows: list[npt.NDArray[np.int32]]) -> WrittenText:
        chat: dict[str, Any] = {"sequences": sum(map(self._prompts.is_chat, range(len(rows))))}
        if self._prompts.note:
            chat["note"] = self._prompts.note
        return WrittenText(self._settings, np.stack(rows), self._weights, chat)

    def _batch(self, indices: range, samples: int) -> list[npt.NDArray[np.int32]]:
        length = self._settings.seq_len
        tokens = {str(index): list(self._prompts.prompt(index)) for index in indices}
        unfinished = set(tokens)
        for index in indices:
            self._add(str(index), index)
        while unfinished:
            if self._is_batched and self._companion_ended:
                self._add(_COMPANION, 0)
                self._companion_ended = False
            for delivery in self._engine.step():
                name = delivery.request_id
                if delivery.error is not None:
                    raise DataError(f"own text: sequence {name}: {delivery.error}")
                if delivery.finish_reason is not None:
                    unfinished.discard(name)
                if name == _COMPANION:
                    self._companion_ended = delivery.finish_reason is not None
                else:
                    tokens[name] += delivery.tokens
            if self._progress is not None:
                done = indices.start * length + sum(map(len, tokens.values()))
                self._progress(done, samples * length, "writing calibration text")
        return [np.array(tokens[str(index)], np.int32) for index in indices]

    def _add(self, name: str, index: int) -> None:
        """Begin a sequence with the prompt and the draws of an index."""
        seed, length, prompt = self._settings.seed, self._settings.seq_len, self._prompts.prompt(index)
        draws = hashlib.sha256(f"own text {seed}/{index}".encode()).digest()[:8]
        params = SamplingParams(seed=int.from_bytes(draws, "little"), max_tokens=length - len(prompt), ignore_eos=True)
        self._engine.add(Request(name, prompt, params))


def _calibration_set(text: WrittenText, samples: int) -> CalibrationSet:
    """Return the first sequences of a text with their record."""
    sequences = tuple(tuple(row) for row in text.tokens[:samples].tolist())
    described = describe_sequences(sequences)
    source = {
        "name": OWN_TEXT,
        "kind": OWN_TEXT,
        "weight": 1.0,
        **described,
        "seed": text.settings.seed,
        "chat": dict(text.chat),
        "weights": dict(text.weights),
    }
    settings = {"seq_len": text.settings.seq_len, "packing": True, "seed": text.settings.seed}
    record: Mapping[str, Any] = {"sources": [source], **described, **settings, "tokenizer": text.settings.tokenizer}
    return CalibrationSet(sequences, record)

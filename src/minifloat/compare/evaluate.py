"""Two models run in lockstep over the same windows of the same texts.

Windowing: a text is tokenized without special tokens and cut into windows that do not overlap. The first token of a
window has no context and is not scored, so a text of n tokens in windows of w has about n (w - 1) / w scored tokens.
Where the tokenizer begins a text with a BOS token, as Gemma and Llama 3 need, every window begins with one in addition
and all its tokens of text are scored. The last window may be shorter; nothing is padded. Perplexity therefore depends
on the window: compare numbers of the same window only.

Left out: confidence intervals and a verdict.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from minifloat.checkpoint import Checkpoint
from minifloat.compare.metrics import Summary, TokenScores, concatenate, score_tokens, summarize
from minifloat.errors import NonFiniteError, StorageError, UnknownNameError, UsageError
from minifloat.formats import BFLOAT16, FLOAT16, FLOAT32
from minifloat.quantize.activation import describe_activation
from minifloat.quantize.cast import torch_dtype
from minifloat.serve.experts import QuantizedExperts
from minifloat.serve.linear import QuantizedWeight
from minifloat.serve.load import load
from minifloat.serve.text import load_tokenizer

DEFAULT_WINDOW = 256

#: Logits of one model that are held at a time, unless a single window has more.
_BATCH_LOGITS = 2**25

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

#: Called with bytes of text done, bytes in all, and the text at work.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Comparison:
    """The result of `compare_models`.

    Attributes:
        baseline: Folder of the baseline.
        candidate: Folder of the candidate.
        window: Tokens per window.
        dtype: Dtype that both models compute in, for example ``"bfloat16"``.
        activations: How the candidate's quantized weights took their inputs: ``"E4M3 per token (dynamic)"``, the name
            of the 16- or 32-bit format where they ran weight-only (``"BF16"``), or what share of them did what.
        texts: One summary per text.
        overall: All texts together, each token counting the same.
        baseline_bytes: Bytes of the baseline's weights: on disk, or in memory where a loaded model was given.
        candidate_bytes: The same of the candidate.
    """

    baseline: str
    candidate: str
    window: int
    dtype: str
    activations: str
    texts: tuple[Summary, ...]
    overall: Summary
    baseline_bytes: int
    candidate_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON; a number that is not finite becomes None."""
        return {key: _jsonable(value) for key, value in dataclasses.asdict(self).items()}

    def rows(self) -> list[tuple[str, ...]]:
        """One row of text per text, and one for all where there are several.

        Columns: name, tokens, perplexity of the baseline and of the candidate, its change, the candidate's bits per
        byte, KL mean, 99th percentile and maximum in nats, top-1 agreement.
        """
        summaries = [*self.texts, *([self.overall] if len(self.texts) > 1 else [])]
        return [
            (
                summary.name,
                f"{summary.tokens:,}",
                f"{summary.baseline_perplexity:.4g}",
                f"{summary.candidate_perplexity:.4g}",
                f"{summary.candidate_perplexity / summary.baseline_perplexity - 1:+.2%}",
                f"{summary.candidate_bits_per_byte:.4f}",
                f"{summary.kl_mean:.3g}",
                f"{summary.kl_p99:.3g}",
                f"{summary.kl_max:.3g}",
                f"{summary.top1_agreement:.2%}",
            )
            for summary in summaries
        ]


@dataclass(frozen=True)
class _Text:
    """A tokenized text; `bytes_per_token` is that of the whole text, also where `ids` is cut."""

    name: str
    ids: tuple[int, ...]
    bytes_per_token: float


def compare_models(
    baseline: PreTrainedModel | str | os.PathLike[str],
    candidate: PreTrainedModel | str | os.PathLike[str],
    texts: Sequence[str | os.PathLike[str]] | str,
    *,
    window: int | None = None,
    max_tokens: int | None = None,
    dtype: str | None = None,
    device: str | torch.device = "cpu",
    weight_only: bool = False,
    impl: str = "auto",
    progress: Progress | None = None,
) -> Comparison:
    """Measure how far the candidate's predictions are from the baseline's.

    A checkpoint that declares FP8 inputs is run with them, as servers with FP8 hardware run it, so that the numbers are
    those of serving; `weight_only` shows what its weights alone cost, and what servers without such hardware compute.

    Both run at the same time and see the same tokens; of their logits no more than one batch of windows is held.
    Mixture-of-experts models run transformers' eager experts on both sides if one side's experts are quantized, so that
    a different order of summation is not taken for a difference of the weights.

    Args:
        baseline: A folder, or a model made by `minifloat.serve.load.load`.
        candidate: The same.
        texts: Paths of UTF-8 files, or one string that is the text itself.
        window: Tokens per window; by default 256, or what the models can attend to if that is less.
        max_tokens: Use only so many tokens of the start of each text.
        dtype: "bfloat16", "float16" or "float32" for both; by default what each config.json says. Loaded models keep
            theirs.
        device: Where folders are loaded to.
        weight_only: Load folders with all inputs in `dtype`. Loaded models keep what they were loaded with.
        impl: What multiplies the quantized weights of folders, as in `minifloat.serve.load.load`. The kernels do not
            round weights to the 16 bits of `dtype`; "reference" does, as servers that dequantize first.
        progress: Called after each batch.

    Returns:
        Perplexity and bits per byte of both, KL(baseline || candidate) and top-1 agreement, per text and overall.

    Raises:
        UsageError: The two have different vocabularies, or a text, window or dtype cannot be used.
        NonFiniteError: A model's logits are NaN or Inf; says where first.
        CheckpointError: A folder cannot be loaded.
        StorageError: A text cannot be read.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise UnknownNameError("dtype", dtype, _DTYPES)
    contents = _read_texts(texts)
    options = {
        "dtype": None if dtype is None else _DTYPES[dtype],
        "device": device,
        "weight_only": weight_only,
        "impl": impl,
    }
    sides = [_Side.of(side, options) for side in (baseline, candidate)]
    first, second = sides
    tokenizer = _common_tokenizer(first, second)
    prefix = _prefix(tokenizer)
    length = _window(window, sides)
    if any(isinstance(module, QuantizedExperts) for side in sides for module in side.model.modules()):
        for side in sides:
            side.model.set_experts_implementation("eager")
    tokenized = [_tokenize(tokenizer, name, text, max_tokens) for name, text in contents]
    total = sum(round(len(text.ids) * text.bytes_per_token) for text in tokenized)
    done, all_scores, summaries = 0, [], []
    for text in tokenized:
        parts = []
        for scores, tokens in _run(first.model, second.model, text, length, prefix):
            parts.append(scores)
            done += round(tokens * text.bytes_per_token)
            if progress is not None:
                progress(min(done, total), total, text.name)
        all_scores.append(concatenate(parts))
        summaries.append(summarize(text.name, all_scores[-1], len(all_scores[-1]) * text.bytes_per_token))
    return Comparison(
        baseline=first.name,
        candidate=second.name,
        window=length,
        dtype=str(first.model.dtype).removeprefix("torch."),
        activations=_activations(second.model),
        texts=tuple(summaries),
        overall=summarize("all texts", concatenate(all_scores), sum(summary.nbytes for summary in summaries)),
        baseline_bytes=first.nbytes,
        candidate_bytes=second.nbytes,
    )


@dataclass(frozen=True)
class _Side:
    """One of the two models."""

    model: PreTrainedModel
    name: str
    nbytes: int

    @classmethod
    def of(cls, given: PreTrainedModel | str | os.PathLike[str], options: dict[str, Any]) -> _Side:
        if isinstance(given, PreTrainedModel):
            quantized = sum(m.nbytes for m in given.modules() if isinstance(m, QuantizedWeight))
            return cls(given, str(given.config.name_or_path), quantized + sum(p.nbytes for p in given.parameters()))
        with Checkpoint.open(given) as checkpoint:
            nbytes = sum(info.nbytes for info in checkpoint.tensors.values())
        return cls(load(given, **options), str(given), nbytes)


def _activations(model: PreTrainedModel) -> str:
    """What `Comparison.activations` says of a model."""
    weights = [module for module in model.modules() if isinstance(module, QuantizedWeight)]
    counts = Counter(describe_activation(weight.activation) for weight in weights if weight.activation is not None)
    formats = {torch_dtype(fmt): fmt.name for fmt in (BFLOAT16, FLOAT16, FLOAT32)}
    plain = formats.get(model.dtype, str(model.dtype))
    if not counts:
        return plain
    if counts.total() < len(weights):
        counts[plain] = len(weights) - counts.total()
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} for {count} of {len(weights)} quantized weights" for name, count in counts.items())


def _read_texts(texts: Sequence[str | os.PathLike[str]] | str) -> list[tuple[str, str]]:
    """Names and contents."""
    if isinstance(texts, str):
        return [("text", texts)]
    if not texts:
        raise UsageError("no text to compare on")
    contents = []
    for given in texts:
        path = Path(given)
        try:
            contents.append((path.name, path.read_text(encoding="utf-8")))
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}: not UTF-8 text ({error})") from error
    return contents


def _common_tokenizer(first: _Side, second: _Side) -> PreTrainedTokenizerBase:
    """The tokenizer of both; token i must be the same string in both, or their distributions are not over the same."""
    tokenizers = [load_tokenizer(side.name) for side in (first, second)]
    vocabularies = [tokenizer.get_vocab() for tokenizer in tokenizers]
    sizes = [side.model.config.get_text_config().vocab_size for side in (first, second)]
    if vocabularies[0] != vocabularies[1] or sizes[0] != sizes[1]:
        differing = len(set(vocabularies[0].items()) ^ set(vocabularies[1].items()))
        raise UsageError(
            f"{first.name} and {second.name} have different vocabularies (sizes {sizes[0]} and {sizes[1]}, "
            f"{differing} entries differ); only models of one vocabulary can be compared token by token"
        )
    return tokenizers[0]


def _prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What every window begins with: the BOS token, if the tokenizer begins a text with it."""
    begin = tokenizer("a").input_ids[:1]
    return list(begin) if begin == [tokenizer.bos_token_id] else []


def _window(requested: int | None, sides: Sequence[_Side]) -> int:
    """Tokens per window, BOS included."""
    limits = [getattr(side.model.config.get_text_config(), "max_position_embeddings", None) for side in sides]
    longest = min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)
    if requested is None:
        return DEFAULT_WINDOW if longest is None else min(DEFAULT_WINDOW, longest)
    if requested < 2:
        raise UsageError(f"a window has at least 2 tokens, got {requested}")
    if longest is not None and requested > longest:
        raise UsageError(f"a window of {requested} tokens is longer than the {longest} that the models attend to")
    return requested


def _tokenize(tokenizer: PreTrainedTokenizerBase, name: str, text: str, max_tokens: int | None) -> _Text:
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    used = ids if max_tokens is None else ids[:max_tokens]
    if len(used) < 2:
        raise UsageError(f"{name}: {len(used)} tokens; at least 2 are needed, of which the second can be predicted")
    return _Text(name, tuple(used), len(text.encode()) / len(ids))


def _run(
    baseline: PreTrainedModel, candidate: PreTrainedModel, text: _Text, window: int, prefix: list[int]
) -> Iterator[tuple[TokenScores, int]]:
    """The scores of each batch of windows, and the tokens of text in it."""
    step = window - len(prefix)
    windows = [prefix + list(text.ids[start : start + step]) for start in range(0, len(text.ids), step)]
    last = [windows.pop()] if len(windows[-1]) < window else []
    batch = max(_BATCH_LOGITS // (window * baseline.config.get_text_config().vocab_size), 1)
    batches = [windows[start : start + batch] for start in range(0, len(windows), batch)]
    position = 0
    for rows in [*batches, *([last] if last and len(last[0]) > 1 else [])]:
        scores = _score_batch(baseline, candidate, torch.tensor(rows))
        scored = len(rows[0]) - 1
        for who, values in (("baseline", scores.baseline_nll), ("candidate", scores.candidate_nll)):
            if np.isnan(values).any():
                row, column = divmod(int(np.isnan(values).argmax()), scored)
                token = position + row * step + column + 1 - len(prefix)
                raise NonFiniteError(
                    f"logits of the {who}", f"NaN or Inf where token {token} of {text.name} is predicted"
                )
        tokens = sum(len(row) - len(prefix) for row in rows)
        position += tokens
        yield scores, tokens


@torch.inference_mode()
def _score_batch(baseline: PreTrainedModel, candidate: PreTrainedModel, ids: Tensor) -> TokenScores:
    """Scores of windows ``[B, W]``: the tokens after the first of each."""
    logits = []
    for model in (baseline, candidate):
        output = model(input_ids=ids.to(model.device), use_cache=False)
        logits.append(output.logits[:, :-1].flatten(0, 1))
    return score_tokens(logits[0], logits[1], ids[:, 1:].flatten())


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""The models of a comparison: loading, forward passes up to the head, and the head for a few rows at a time.

Logits are by far the largest tensors: 4,096 positions of a vocabulary of 151,936 take 1.2 GB in 16 bits. So a forward
pass stops before the head, whose inputs are small, and the head runs for a few rows at a time. Long windows pass the
layers in pieces (`minifloat.evaluate.compare.pieces`). The head runs inside the
model's own forward, with the layers below it replaced by their result, so that everything a model does to its logits
(Gemma caps them, Granite scales them) is included.
"""

from __future__ import annotations

import copy
import functools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import MoeModelOutputWithPast

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import model_folder
from minifloat.errors import UsageError
from minifloat.evaluate.compare.kv_cache import CacheFactory
from minifloat.evaluate.compare.options import ScoringOptions
from minifloat.evaluate.compare.pieces import continues, piece_tokens, plain_cache, run_in_pieces
from minifloat.model.architecture.full_config import position_limit
from minifloat.model.layouts import describe
from minifloat.model.runtime.build import replace_forward
from minifloat.model.runtime.experts import QuantizedExperts
from minifloat.model.runtime.inputs import INT8_INPUTS
from minifloat.model.runtime.kv_scales import KVScales, kv_scales
from minifloat.model.runtime.linear import QuantizedWeight
from minifloat.model.runtime.lm_head import LoadedLmHead, lm_head_of
from minifloat.model.runtime.load import LoadOptions, load_opened
from minifloat.model.runtime.tokenizer import load_tokenizer
from minifloat.numerics.activation import describe_activation
from minifloat.numerics.cast import torch_dtype
from minifloat.numerics.formats import BFLOAT16, FLOAT16, FLOAT32
from minifloat.report.text import size_text

#: Largest number of logits of one model that are held at a time, unless a single row has more.
_HEAD_LOGITS = 2**25
#: Largest number of log-probabilities and of requests of a task that are computed together, and tokens of a request.
_TASK_LOGITS, _TASK_BATCH, _TASK_TOKENS = 2**27, 16, 1024
#: Tokens of the trial that tells whether the head can run alone.
_TRIAL_TOKENS = 8
#: Largest number of logits that a model whose head cannot run alone may hold at a time: 8 GiB in float32.
_WHOLE_LOGITS = 2**31
#: Largest difference of logits in this trial, relative to the largest logit; rounding alone makes far less.
_TRIAL_TOLERANCE = 1e-2

ModelLike = PreTrainedModel | str | os.PathLike[str]


def load_options(options: ScoringOptions) -> dict[str, Any]:
    """Return the keyword arguments for `minifloat.model.runtime.load.load` of a baseline."""
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    return {"dtype": dtype, "device": options.device, "impl": options.impl}


@dataclass(eq=False)
class Predictor:
    """One of the models of a comparison, as the comparison runs it.

    Several predictors may share one transformers model and run it in different ways.

    Attributes:
        new_cache: Function that returns an empty simulated KV cache; None: no cache is simulated.
        checkpoint: The closed checkpoint, of which config and headers are still known; None if the user gave a loaded
            model.
        kv_scales: Scales of the FP8 KV cache that the checkpoint declares; None if there are none or if they were not
            requested.
    """

    name: str
    folder: str
    model: PreTrainedModel
    nbytes: int
    new_cache: CacheFactory | None = None
    weight_only: bool = False
    checkpoint: Checkpoint | None = None
    kv_scales: KVScales | None = None

    def __post_init__(self) -> None:
        self._runs_whole = not self._head_runs_alone()

    @classmethod
    def of(
        cls,
        model: ModelLike,
        load_options: dict[str, Any],
        revision: str | None = None,
        *,
        read_kv_scales: bool = False,
    ) -> Predictor:
        """Load a folder or a model of the hub, or wrap a loaded model."""
        if isinstance(model, PreTrainedModel):
            quantized = sum(module.nbytes for module in model.modules() if isinstance(module, QuantizedWeight))
            nbytes = quantized + sum(parameter.nbytes for parameter in model.parameters())
            name = str(model.config.name_or_path)
            return cls(name, name, model, nbytes)
        folder = model_folder(model, revision=revision)
        with Checkpoint.open(folder) as checkpoint:
            nbytes = sum(info.nbytes for info in checkpoint.tensors.values())
            description = describe(checkpoint)
            scales = kv_scales(checkpoint, description) if read_kv_scales else None
            loaded = load_opened(checkpoint, description, LoadOptions(**load_options))
        return cls(str(model), str(folder), loaded, nbytes, checkpoint=checkpoint, kv_scales=scales)

    def headers(self) -> Checkpoint:
        """Return the closed checkpoint of the model's folder: config, and names, shapes and dtypes of tensors."""
        if self.checkpoint is None:
            with Checkpoint.open(self.folder) as checkpoint:
                return checkpoint
        return self.checkpoint

    @property
    def vocab_size(self) -> int:
        """Number of logits per token, which may be larger than the tokenizer's vocabulary."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def activations(self) -> str:
        """Formats in which the quantized weights take their inputs, for example ``"E4M3 per token (dynamic)"``."""
        with self.set_up():
            return describe_inputs(self.model)

    @property
    def lm_head(self) -> str:
        """Format of the output layer, for example ``"bfloat16"``; empty if the model has none."""
        return lm_head_of(self.model)

    @property
    def dtype(self) -> str:
        """Dtype of the activations, for example ``"bfloat16"``."""
        return str(self.model.dtype).removeprefix("torch.")

    def features(self, ids: Tensor) -> Tensor:
        """Return the inputs of the head ``[B, W, ...]`` for windows of token ids ``[B, W]``.

        Where the head cannot run alone, these are the logits themselves.
        """
        ids = ids.to(self.model.device)
        piece = piece_tokens(self.model, ids.shape[1])
        if ids.shape[1] <= piece or not self._continues:
            return self._features(ids, None)
        new_cache = self.new_cache or plain_cache(self.model)
        return run_in_pieces(self._features, ids, new_cache and new_cache(), piece)

    def check_window(self, window: int) -> None:
        """Check that the logits of a window fit into memory, where the head cannot run alone."""
        if self._runs_whole and window * self.vocab_size > _WHOLE_LOGITS:
            raise UsageError(
                f"{self.name}: a window of {window:,} tokens has {size_text(window * self.vocab_size * 4)} of "
                f"logits, and the output layer of {type(self.model).__name__} cannot run apart from its other layers: "
                f"use windows of at most {_WHOLE_LOGITS // self.vocab_size:,} tokens"
            )

    @functools.cached_property
    def _continues(self) -> bool:
        return continues(self.model, self.name, self._features, self.new_cache or plain_cache(self.model))

    def _features(self, ids: Tensor, cache: Any) -> Tensor:
        output = self._run(self.model if self._runs_whole else self.model.base_model, ids, cache)
        features: Tensor = output.logits if self._runs_whole else output.last_hidden_state
        return features

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits ``[R, V]`` of rows ``[R, ...]`` of features."""
        if self._runs_whole:
            return features
        unused_ids = torch.zeros((1, len(features)), dtype=torch.long, device=features.device)
        base_output = MoeModelOutputWithPast(last_hidden_state=features[None])
        with self.set_up(), _replaced(self.model.base_model, base_output):
            logits: Tensor = self.model(input_ids=unused_ids, use_cache=False).logits[0]
        return logits

    def head_rows(self) -> int:
        """Return the number of rows to pass to `logits` in one call."""
        return max(_HEAD_LOGITS // self.vocab_size, 1)

    def for_tasks(self, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Return the model for lm-evaluation-harness, which adds a padding token to its tokenizer."""
        from lm_eval.models.huggingface import HFLM

        batch = min(max(_TASK_LOGITS // (_TASK_TOKENS * self.vocab_size), 1), _TASK_BATCH)
        # In the dtype of the model, a document's sum would be rounded to a multiple of 4 or 8.
        return HFLM(
            self.model,
            backend="causal",
            tokenizer=copy.deepcopy(tokenizer),
            batch_size=batch,
            softmax_dtype="float32",
        )

    @contextmanager
    def set_up(self) -> Iterator[None]:
        """Switch off the quantization of inputs while the context lasts, if this predictor is weight-only."""
        quantizing = self._quantizing() if self.weight_only else []
        before = [module.activation for module in quantizing]
        for module in quantizing:
            module.activation = None
        try:
            yield
        finally:
            for module, activation in zip(quantizing, before, strict=True):
                module.activation = activation

    def quantizes_inputs(self) -> bool:
        """Return whether any quantized weight also quantizes its inputs."""
        return not self.weight_only and bool(self._quantizing())

    def _quantizing(self) -> list[QuantizedWeight]:
        weights = (module for module in self.model.modules() if isinstance(module, QuantizedWeight))
        return [weight for weight in weights if weight.activation is not None]

    def _run(self, module: nn.Module, ids: Tensor, cache: Any = None) -> Any:
        """Run a module after the tokens in `cache`; by default with an empty simulated cache, or without one."""
        if cache is None and self.new_cache is not None:
            cache = self.new_cache()
        with self.set_up():
            if cache is None:
                return module(input_ids=ids, use_cache=False)
            return module(input_ids=ids, use_cache=True, past_key_values=cache)

    @torch.inference_mode()
    def _head_runs_alone(self) -> bool:
        """Return whether the head, run alone, gives the logits of the whole model.

        Models of an unusual structure cannot be divided in this way.
        """
        self._runs_whole = False
        if self.model.base_model is self.model:
            return False
        ids = torch.arange(min(_TRIAL_TOKENS, self.vocab_size), device=self.model.device)[None]
        try:
            actual = self.logits(self.features(ids)[0])
        except (TypeError, AttributeError, KeyError, ValueError, RuntimeError):
            return False
        expected = self._run(self.model, ids).logits[0]
        if actual.shape != expected.shape:
            return False
        difference = (actual.float() - expected.float()).abs().max()
        # NaN counts as equal here; `ScoringPass` reports it.
        return not bool(difference > _TRIAL_TOLERANCE * expected.float().abs().max())


@contextmanager
def _replaced(module: nn.Module, output: Any) -> Iterator[None]:
    """Let a module return a fixed output while the context lasts."""
    undo = replace_forward(module, lambda *_, **__: output)
    try:
        yield
    finally:
        undo()


def match_experts_implementation(predictors: Sequence[Predictor]) -> None:
    """Switch all models to transformers' eager experts if a model has quantized experts, which need them.

    With different implementations, a different order of summation would look like a difference of the weights.
    """
    if any(isinstance(module, QuantizedExperts) for model in predictors for module in model.model.modules()):
        for model in predictors:
            model.model.set_experts_implementation("eager")


def common_tokenizer(predictors: Sequence[Predictor]) -> PreTrainedTokenizerBase:
    """Return the tokenizer that all models share.

    Token i must be the same string for every model, so that all distributions are over the same tokens.
    """
    first, *others = predictors
    tokenizer = load_tokenizer(first.folder)
    vocabulary = tokenizer.get_vocab()
    for other in others:
        other_vocabulary = load_tokenizer(other.folder).get_vocab()
        if vocabulary != other_vocabulary or first.vocab_size != other.vocab_size:
            differing = len(set(vocabulary.items()) ^ set(other_vocabulary.items()))
            raise UsageError(
                f"{first.name} and {other.name} have different vocabularies (sizes {first.vocab_size} and "
                f"{other.vocab_size}, {differing} entries differ); only models of one vocabulary can be compared "
                "token by token"
            )
    return tokenizer


def longest_window(predictors: Sequence[Predictor]) -> int | None:
    """Return the number of tokens that every model can attend to; None if no config states a limit."""
    limits = (position_limit(model.model.config) for model in predictors)
    return min((limit for limit in limits if limit is not None), default=None)


def describe_inputs(model: PreTrainedModel) -> str:
    """Describe the formats in which a model's quantized weights take their inputs, without a quantized output layer."""
    weights = [
        module
        for module in model.modules()
        if isinstance(module, QuantizedWeight) and not isinstance(module, LoadedLmHead)
    ]
    counts = Counter(describe_activation(weight.activation) for weight in weights if weight.activation is not None)
    counts += Counter(INT8_INPUTS for weight in weights if weight.activation is None and weight.int8_inputs)
    formats = {torch_dtype(fmt): fmt.name for fmt in (BFLOAT16, FLOAT16, FLOAT32)}
    plain = formats.get(model.dtype, str(model.dtype))
    if not counts:
        return plain
    if counts.total() < len(weights):
        counts[plain] = len(weights) - counts.total()
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} for {count} of {len(weights)} quantized weights" for name, count in counts.items())

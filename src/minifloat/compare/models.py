"""A model as `compare` runs it: windows of tokens become the inputs of its head, and those become logits.

Logits are larger than everything else by far: 4,096 positions of a vocabulary of 151,936 take 1.2 GB in 16 bits. So a
pass stops before the head, whose inputs are small, and the head runs for a few rows at a time. It runs inside the
model's own forward, with the layers below it replaced by their result, so that whatever a model does with its logits
(Gemma caps, Granite scales) is done.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import MoeModelOutputWithPast

from minifloat.checkpoint import Checkpoint
from minifloat.errors import UsageError
from minifloat.hub import model_folder
from minifloat.numerics.activation import describe_activation
from minifloat.numerics.cast import torch_dtype
from minifloat.numerics.formats import BFLOAT16, FLOAT16, FLOAT32
from minifloat.runtime.experts import QuantizedExperts
from minifloat.runtime.linear import QuantizedWeight
from minifloat.runtime.load import load
from minifloat.runtime.tokenizer import load_tokenizer

#: Logits of one model that are held at a time, unless a single row has more.
_HEAD_LOGITS = 2**25
#: Rows of a trial of the head.
_TRIAL_TOKENS = 8
#: Largest difference of logits in that trial, relative to the largest logit; rounding alone makes far less.
_TRIAL_TOLERANCE = 1e-2

ModelLike = PreTrainedModel | str | os.PathLike[str]


@dataclass(eq=False)
class Predictor:
    """One of the models of a comparison.

    Attributes:
        name: Its folder or id as it was given, with what is different about this run of it.
        folder: Its folder.
        model: In eval mode.
        nbytes: Bytes of its weights: on disk, or in memory where a loaded model was given.
        new_cache: Makes the simulated cache that keys and values pass through; None: there is none.
        weight_only: Whether inputs stay as they are, whatever the model was loaded with.
    """

    name: str
    folder: str
    model: PreTrainedModel
    nbytes: int
    new_cache: Callable[[], Any] | None = None
    weight_only: bool = False

    def __post_init__(self) -> None:
        self._whole = not self._head_runs_alone()

    @classmethod
    def of(cls, given: ModelLike, options: dict[str, Any], revision: str | None = None) -> Predictor:
        """Load a folder or a model of the hub with these options of `load`, or take a loaded model as it is."""
        if isinstance(given, PreTrainedModel):
            quantized = sum(m.nbytes for m in given.modules() if isinstance(m, QuantizedWeight))
            nbytes = quantized + sum(p.nbytes for p in given.parameters())
            name = str(given.config.name_or_path)
            return cls(name, name, given, nbytes)
        folder = model_folder(given, revision=revision)
        with Checkpoint.open(folder) as checkpoint:
            nbytes = sum(info.nbytes for info in checkpoint.tensors.values())
        return cls(str(given), str(folder), load(folder, **options), nbytes)

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, with those that the tokenizer does not have."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def activations(self) -> str:
        """How its quantized weights take their inputs, see `describe_inputs`."""
        with self.set_up():
            return describe_inputs(self.model)

    @property
    def dtype(self) -> str:
        """Of the activations, for example ``"bfloat16"``."""
        return str(self.model.dtype).removeprefix("torch.")

    def features(self, ids: Tensor) -> Tensor:
        """What the head needs for every position of windows ``[B, W]``: ``[B, W, ...]``."""
        ids = ids.to(self.model.device)
        output = self._run(self.model if self._whole else self.model.base_model, ids)
        features: Tensor = output.logits if self._whole else output.last_hidden_state
        return features

    def logits(self, features: Tensor) -> Tensor:
        """``[R, V]`` for rows ``[R, ...]`` of features."""
        if self._whole:
            return features
        rows = torch.zeros((1, len(features)), dtype=torch.long, device=features.device)
        known = MoeModelOutputWithPast(last_hidden_state=features[None])
        with self.set_up(), _replaced(self.model.base_model, known):
            logits: Tensor = self.model(input_ids=rows, use_cache=False).logits[0]
        return logits

    def head_rows(self) -> int:
        """Rows that `logits` should be called with."""
        return max(_HEAD_LOGITS // self.vocab_size, 1)

    @contextmanager
    def set_up(self) -> Iterator[None]:
        """The model as this run of it wants it; several may share one."""
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
        """Whether some weight does."""
        return not self.weight_only and bool(self._quantizing())

    def _quantizing(self) -> list[QuantizedWeight]:
        weights = (module for module in self.model.modules() if isinstance(module, QuantizedWeight))
        return [weight for weight in weights if weight.activation is not None]

    def _run(self, module: nn.Module, ids: Tensor) -> Any:
        with self.set_up():
            if self.new_cache is None:
                return module(input_ids=ids, use_cache=False)
            return module(input_ids=ids, use_cache=True, past_key_values=self.new_cache())

    @torch.inference_mode()
    def _head_runs_alone(self) -> bool:
        """Whether the head, run alone, gives what the model gives; a model of unusual build may not be so divided."""
        self._whole = False
        if self.model.base_model is self.model:
            return False
        ids = torch.arange(min(_TRIAL_TOKENS, self.vocab_size), device=self.model.device)[None]
        try:
            found = self.logits(self.features(ids)[0])
        except (TypeError, AttributeError, KeyError, ValueError, RuntimeError):
            return False
        expected = self._run(self.model, ids).logits[0]
        if found.shape != expected.shape:
            return False
        difference = (found.float() - expected.float()).abs().max()
        return not bool(difference > _TRIAL_TOLERANCE * expected.float().abs().max())  # NaN is judged elsewhere


@contextmanager
def _replaced(module: nn.Module, output: Any) -> Iterator[None]:
    """Let a module return something that is already known."""
    module.forward = lambda *_, **__: output
    try:
        yield
    finally:
        del module.forward


def match_experts_implementation(predictors: Sequence[Predictor]) -> None:
    """Let all run transformers' eager experts if one has quantized ones, which need them.

    A different order of summation would be taken for a difference of the weights.
    """
    if any(isinstance(module, QuantizedExperts) for one in predictors for module in one.model.modules()):
        for one in predictors:
            one.model.set_experts_implementation("eager")


def common_tokenizer(predictors: Sequence[Predictor]) -> PreTrainedTokenizerBase:
    """The tokenizer of all; token i must be the same string in each, or their distributions are not over the same.

    Raises:
        UsageError: Two have different vocabularies.
        CheckpointError: A folder has no tokenizer.
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
    """Tokens that all can attend to; None where no config says."""
    limits = [getattr(one.model.config.get_text_config(), "max_position_embeddings", None) for one in predictors]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def describe_inputs(model: PreTrainedModel) -> str:
    """How a model's quantized weights take their inputs.

    ``"E4M3 per token (dynamic)"``, the name of the 16- or 32-bit format where they run weight-only (``"BF16"``), or
    what share of them does what.
    """
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

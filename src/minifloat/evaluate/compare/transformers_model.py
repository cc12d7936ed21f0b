"""Models that transformers' code runs, for what no decoder of the engine covers (`minifloat.evaluate.compare.models`).

Logits are by far the largest tensors, so few tokens run at a time: some windows, or a piece of one after the keys and
values of those before. Models with recurrent states run their windows whole.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import model_folder
from minifloat.checkpoint.progress import Progress
from minifloat.errors import UsageError
from minifloat.evaluate.compare.generation import generate_greedy
from minifloat.evaluate.compare.kv_cache import CacheFactory
from minifloat.evaluate.compare.models import PLAIN_INPUTS, Continuations, Model, ModelLike, ModelRecord
from minifloat.model.architecture.full_config import position_limit
from minifloat.model.layouts import describe
from minifloat.model.runtime.experts import QuantizedExperts
from minifloat.model.runtime.inputs import INT8_INPUTS
from minifloat.model.runtime.kv_scales import KVScales, kv_scales
from minifloat.model.runtime.linear import QuantizedWeight
from minifloat.model.runtime.lm_head import LoadedLmHead, lm_head_of
from minifloat.model.runtime.load import LoadOptions, load_opened
from minifloat.numerics.activation import describe_activation
from minifloat.numerics.formats import E4M3
from minifloat.report.text import size_text

_LOG = logging.getLogger(__name__)

_AS_STORED = LoadOptions()
#: Largest number of logits that are computed at a time, unless a window is to run whole.
_LOGITS = 2**25
#: Largest number of logits of a window that runs whole: 8 GiB in float32.
_WHOLE_LOGITS = 2**31
#: Largest number of attention scores that a layer holds at a time, where attention is not fused.
_ATTENTION_SCORES = 2**28
#: Largest and smallest number of tokens that run at a time.
_MOST_TOKENS, _FEWEST_TOKENS = 2048, 64
#: Tokens of the trial that shows whether pieces give the result of a whole window, and of its first piece.
_TRIAL, _TRIAL_PIECE = 48, 20
#: Largest difference of logits in the trial, relative to the largest one; rounding alone makes far less.
_TRIAL_TOLERANCE = 1e-2


class TransformersModel(Model):
    def __init__(self, name: str, folder: str, model: PreTrainedModel, nbytes: int) -> None:
        self.name, self.folder, self.model, self.nbytes = name, folder, model, nbytes
        self.new_cache: CacheFactory | None = None
        self.weight_only = False
        self.kv_scales: KVScales | None = None
        self._checkpoint: Checkpoint | None = None
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.longest = position_limit(model.config)

    @classmethod
    def of(
        cls,
        model: ModelLike,
        options: LoadOptions = _AS_STORED,
        revision: str | None = None,
        *,
        read_kv_scales: bool = False,
        checkpoint: Checkpoint | None = None,
    ) -> TransformersModel:
        """Load a folder or a model of the hub or wrap a loaded model."""
        if isinstance(model, PreTrainedModel):
            quantized = sum(module.nbytes for module in model.modules() if isinstance(module, QuantizedWeight))
            nbytes = quantized + sum(parameter.nbytes for parameter in model.parameters())
            name = str(model.config.name_or_path)
            return cls(name, name, model, nbytes)
        folder = model_folder(model, revision=revision)
        with Checkpoint.open(folder) if checkpoint is None else nullcontext(checkpoint) as checkpoint:
            nbytes = sum(info.nbytes for info in checkpoint.tensors.values())
            description = describe(checkpoint)
            scales = kv_scales(checkpoint, description) if read_kv_scales else None
            loaded = load_opened(checkpoint, description, options)
        made = cls(str(model), str(folder), loaded, nbytes)
        made.kv_scales, made._checkpoint = scales, checkpoint
        return made

    def variant(
        self, name: str, *, new_cache: CacheFactory | None = None, weight_only: bool = False
    ) -> TransformersModel:
        other = copy.copy(self)
        other.__dict__.pop("_continues", None)
        other.name, other.new_cache, other.weight_only = name, new_cache, weight_only
        return other

    def headers(self) -> Checkpoint:
        return self._checkpoint or super().headers()

    @property
    def record(self) -> ModelRecord:
        with self.set_up():
            inputs = describe_inputs(self.model)
        cache = None if self.new_cache is None else E4M3.name
        return ModelRecord(self.name, self.nbytes, inputs, cache, lm_head_of(self.model))

    def logits(self, ids: Tensor) -> Iterator[Tensor]:
        ids, width = ids.to(self.model.device), ids.shape[1]
        tokens = self._tokens_at_a_time(width)
        if width > tokens and self._continues:
            for window in torch.split(ids, 1):
                new_cache, left = self.new_cache or _plain_cache(self.model), width - 1
                cache = new_cache and new_cache()
                for piece in torch.split(window, tokens, dim=1):
                    logits = self._run(piece, cache)[0]
                    yield logits[:left]
                    left -= len(logits[:left])
        else:
            for windows in torch.split(ids, max(tokens // width, 1)):
                yield self._run(windows)[:, :-1].flatten(0, 1)

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, progress: Progress | None) -> Continuations:
        with self.set_up():
            return generate_greedy(self.model, prompts, new_tokens, cache_factory=self.new_cache, progress=progress)

    def check_window(self, window: int) -> None:
        """Check that the logits of a window fit into memory, where it runs whole."""
        too_large = window * self.vocab_size > _WHOLE_LOGITS
        if too_large and window > self._tokens_at_a_time(window) and not self._continues:
            raise UsageError(
                f"{self.name}: a window of {window:,} tokens has {size_text(window * self.vocab_size * 4)} of logits, "
                f"and {type(self.model).__name__} runs windows whole: use windows of at most "
                f"{_WHOLE_LOGITS // self.vocab_size:,} tokens"
            )

    def _tokens_at_a_time(self, window: int) -> int:
        config = self.model.config.get_text_config(decoder=True)
        most = min(_LOGITS // self.vocab_size, _MOST_TOKENS)
        if getattr(config, "_attn_implementation", None) == "eager":
            most = min(most, _ATTENTION_SCORES // (window * (getattr(config, "num_attention_heads", None) or 1)))
        return max(most, _FEWEST_TOKENS)

    @functools.cached_property
    def _continues(self) -> bool:
        """Whether the model gives the same logits in pieces as at once; if not, a warning says so."""
        new_cache = self.new_cache or _plain_cache(self.model)
        if new_cache is not None:
            ids, cache = torch.arange(_TRIAL, device=self.model.device)[None] % self.vocab_size, new_cache()
            pieces = torch.empty(0)
            with (
                torch.inference_mode(),
                contextlib.suppress(TypeError, AttributeError, KeyError, ValueError, RuntimeError),
            ):
                pieces = torch.cat([self._run(piece, cache) for piece in torch.split(ids, _TRIAL_PIECE, dim=1)], dim=1)
            with torch.inference_mode():
                whole = self._run(ids)
            # NaN counts as equal here; `ScoringPass` reports it.
            bound = _TRIAL_TOLERANCE * whole.abs().max()
            if pieces.shape == whole.shape and not bool((pieces - whole).abs().max() > bound):
                return True
        _LOG.warning(
            "%s runs long windows whole, because it cannot continue after a part: this takes much memory", self.name
        )
        return False

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
        return not self.weight_only and bool(self._quantizing())

    def _quantizing(self) -> list[QuantizedWeight]:
        weights = (module for module in self.model.modules() if isinstance(module, QuantizedWeight))
        return [weight for weight in weights if weight.activation is not None]

    def _run(self, ids: Tensor, cache: Any = None) -> Tensor:
        """Return the logits after the tokens in `cache`; by default with an empty simulated cache, or without one."""
        if cache is None and self.new_cache is not None:
            cache = self.new_cache()
        cached = {} if cache is None else {"past_key_values": cache}
        with self.set_up():
            logits: Tensor = self.model(input_ids=ids, use_cache=cache is not None, **cached).logits
        return logits


def match_experts_implementation(models: Sequence[TransformersModel]) -> None:
    """Switch all models to transformers' eager experts if a model has quantized experts, which need them."""
    if any(isinstance(module, QuantizedExperts) for model in models for module in model.model.modules()):
        for model in models:
            model.model.set_experts_implementation("eager")


def describe_inputs(model: PreTrainedModel) -> str:
    """Describe the formats in which a model's quantized weights take their inputs, without a quantized output layer."""
    weights = [
        module
        for module in model.modules()
        if isinstance(module, QuantizedWeight) and not isinstance(module, LoadedLmHead)
    ]
    counts = Counter(describe_activation(weight.activation) for weight in weights if weight.activation is not None)
    counts += Counter(INT8_INPUTS for weight in weights if weight.activation is None and weight.int8_inputs)
    dtype = str(model.dtype).removeprefix("torch.")
    plain = PLAIN_INPUTS.get(dtype, dtype)
    if not counts:
        return plain
    if counts.total() < len(weights):
        counts[plain] = len(weights) - counts.total()
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} for {count} of {len(weights)} quantized weights" for name, count in counts.items())


def _plain_cache(model: PreTrainedModel) -> CacheFactory | None:
    """Return a function that makes transformers' own KV cache; None if the model has none of plain attention."""
    if not cast(Any, model)._supports_default_dynamic_cache():
        return None
    config = model.config.get_text_config(decoder=True)
    if not all(isinstance(layer, DynamicLayer) for layer in DynamicCache(config=config).layers):
        return None
    return lambda: DynamicCache(config=config)

"""Models that transformers' code runs, for what no decoder of the engine covers (`minifloat.evaluate.compare.models`).

Logits are by far the largest tensors: 4,096 positions of a vocabulary of 151,936 take 1.2 GB in 16 bits. So a forward
pass stops before the head, whose inputs are small, and the head runs for a few rows at a time, inside the model's own
forward, so that everything a model does to its logits is included. Windows beyond 2,048 tokens pass the layers in
pieces, after the keys and values of those before; models with recurrent states, which transformers does not continue
over several tokens at a time, run them whole.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_outputs import MoeModelOutputWithPast

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import model_folder
from minifloat.checkpoint.progress import Progress
from minifloat.errors import UsageError
from minifloat.evaluate.compare.generation import generate_greedy
from minifloat.evaluate.compare.kv_cache import CacheFactory
from minifloat.evaluate.compare.models import PLAIN_INPUTS, Continuations, Model, ModelLike, ModelRecord
from minifloat.model.architecture.full_config import position_limit
from minifloat.model.layouts import describe
from minifloat.model.runtime.build import replace_forward
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

#: Largest number of logits of one model that are held at a time, unless a single row has more.
_HEAD_LOGITS = 2**25
#: Tokens of the trial that tells whether the head can run alone.
_TRIAL_TOKENS = 8
#: Largest number of logits that a model whose head cannot run alone may hold at a time: 8 GiB in float32.
_WHOLE_LOGITS = 2**31
#: Largest difference of results in a trial, relative to the largest one; rounding alone makes far less.
_TRIAL_TOLERANCE = 1e-2
_AS_STORED = LoadOptions()
#: Tokens of a piece; a batch of windows has about as many.
_PIECE_TOKENS = 2048
#: Largest number of attention scores that a layer holds at a time, where attention is not fused.
_ATTENTION_SCORES = 2**28
_FEWEST_TOKENS = 64
#: Tokens of the trial that shows whether pieces give the result of a whole window, and of its first piece.
_PIECES_TRIAL, _PIECE_TRIAL = 48, 20

#: Runs token ids ``[B, T]`` after those in a cache and returns the result ``[B, T, ...]``; without a cache, from 0.
Run = Callable[[Tensor, Any], Tensor]


class TransformersModel(Model):
    """A transformers model, loaded or given by the user.

    Several of them may share one model and run it in different ways.

    Attributes:
        new_cache: Function that returns an empty simulated KV cache; None: no cache is simulated.
        weight_only: Whether quantized weights take their inputs unquantized, whatever the checkpoint declares.
        kv_scales: Scales of the FP8 KV cache that the checkpoint declares; None if there are none or if they were not
            requested.
    """

    def __init__(self, name: str, folder: str, model: PreTrainedModel, nbytes: int) -> None:
        self.name, self.folder, self.model, self.nbytes = name, folder, model, nbytes
        self.new_cache: CacheFactory | None = None
        self.weight_only = False
        self.kv_scales: KVScales | None = None
        self._checkpoint: Checkpoint | None = None
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.longest = position_limit(model.config)
        self._runs_whole = not self._head_runs_alone()

    @classmethod
    def of(
        cls,
        model: ModelLike,
        options: LoadOptions = _AS_STORED,
        revision: str | None = None,
        *,
        read_kv_scales: bool = False,
    ) -> TransformersModel:
        """Load a folder or a model of the hub or wrap a loaded model."""
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
            loaded = load_opened(checkpoint, description, options)
        made = cls(str(model), str(folder), loaded, nbytes)
        made.kv_scales, made._checkpoint = scales, checkpoint
        return made

    def variant(
        self, name: str, *, new_cache: CacheFactory | None = None, weight_only: bool = False
    ) -> TransformersModel:
        """Return the same model, run in another way."""
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
        features = self.features(ids)[:, :-1].flatten(0, 1)
        for start in range(0, len(features), self.head_rows()):
            yield self.head(features[start : start + self.head_rows()])

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, progress: Progress | None) -> Continuations:
        with self.set_up():
            return generate_greedy(self.model, prompts, new_tokens, cache_factory=self.new_cache, progress=progress)

    def features(self, ids: Tensor) -> Tensor:
        """Return the inputs of the head ``[B, W, ...]`` for windows of token ids ``[B, W]``.

        Where the head cannot run alone, these are the logits themselves.
        """
        ids = ids.to(self.model.device)
        piece = _piece_tokens(self.model, ids.shape[1])
        if ids.shape[1] <= piece or not self._continues:
            return self._features(ids, None)
        new_cache = self.new_cache or _plain_cache(self.model)
        return _run_in_pieces(self._features, ids, new_cache and new_cache(), piece)

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
        return _gives_pieces(self.model, self.name, self._features, self.new_cache or _plain_cache(self.model))

    def _features(self, ids: Tensor, cache: Any) -> Tensor:
        output = self._run(self.model if self._runs_whole else self.model.base_model, ids, cache)
        features: Tensor = output.logits if self._runs_whole else output.last_hidden_state
        return features

    def head(self, features: Tensor) -> Tensor:
        """Return the logits ``[R, V]`` of rows ``[R, ...]`` of features."""
        if self._runs_whole:
            return features
        unused_ids = torch.zeros((1, len(features)), dtype=torch.long, device=features.device)
        base_output = MoeModelOutputWithPast(last_hidden_state=features[None])
        with self.set_up(), _replaced(self.model.base_model, base_output):
            logits: Tensor = self.model(input_ids=unused_ids, use_cache=False).logits[0]
        return logits

    def head_rows(self) -> int:
        """Return the number of rows to pass to `head` in one call."""
        return max(_HEAD_LOGITS // self.vocab_size, 1)

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
            actual = self.head(self.features(ids)[0])
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


def match_experts_implementation(models: Sequence[TransformersModel]) -> None:
    """Switch all models to transformers' eager experts if a model has quantized experts, which need them.

    With different implementations, a different order of summation would look like a difference of the weights.
    """
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


def _piece_tokens(model: PreTrainedModel, window: int) -> int:
    """Return the number of tokens of a piece of a window."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "_attn_implementation", None) != "eager":
        return _PIECE_TOKENS
    scores = window * (getattr(config, "num_attention_heads", None) or 1)
    return min(max(_ATTENTION_SCORES // scores, _FEWEST_TOKENS), _PIECE_TOKENS)


def _run_in_pieces(run: Run, ids: Tensor, cache: Any, piece: int) -> Tensor:
    """Return the result ``[B, W, ...]`` of a window ``[B, W]``, computed in pieces into an empty cache."""
    return torch.cat([run(part, cache) for part in torch.split(ids, piece, dim=1)], dim=1)


def _plain_cache(model: PreTrainedModel) -> CacheFactory | None:
    """Return a function that makes transformers' own KV cache; None if the model has none of plain attention."""
    if not cast(Any, model)._supports_default_dynamic_cache():
        return None
    config = model.config.get_text_config(decoder=True)
    if not all(isinstance(layer, DynamicLayer) for layer in DynamicCache(config=config).layers):
        return None
    return lambda: DynamicCache(config=config)


@torch.inference_mode()
def _gives_pieces(model: PreTrainedModel, name: str, run: Run, new_cache: CacheFactory | None) -> bool:
    """Return whether a model gives the same result in pieces as at once; if not, a warning says so."""
    if new_cache is not None:
        vocab_size = int(model.config.get_text_config().vocab_size)
        ids = torch.arange(_PIECES_TRIAL, device=model.device)[None] % vocab_size
        try:
            pieces = _run_in_pieces(run, ids, new_cache(), _PIECE_TRIAL)
        except (TypeError, AttributeError, KeyError, ValueError, RuntimeError):
            pieces = torch.empty(0)
        whole = run(ids, None)
        # NaN counts as equal here; `ScoringPass` reports it.
        bound = _TRIAL_TOLERANCE * whole.abs().max()
        if pieces.shape == whole.shape and not bool((pieces - whole).abs().max() > bound):
            return True
    _LOG.warning("%s runs long windows whole, because it cannot continue after a part: this takes much memory", name)
    return False

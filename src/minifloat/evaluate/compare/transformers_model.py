"""Models that transformers' code runs, for what no decoder of the engine covers (`minifloat.evaluate.compare.models`).

Logits are by far the largest tensors, so few tokens run at a time: some windows, or a piece of one after the keys and
values of those before. Models with recurrent states run their windows whole.

An FP8 KV cache is simulated by transformers' own cache that rounds keys and values as they enter it. A server writes
each as an E4M3 code of ``x / scale`` and attends to ``code * scale`` (vLLM: `csrc/cache_kernels.cu`), which is rounded
here to the model's dtype. Caches that hold something other than keys and values are refused.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
import torch._meta_registrations  # `minifloat compare` leaves it out of torch at first
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import model_folder
from minifloat.checkpoint.progress import Progress
from minifloat.errors import NonFiniteError, UsageError
from minifloat.evaluate.compare.models import PLAIN_INPUTS, Continuations, Model, ModelLike, ModelRecord, require_room
from minifloat.model.architecture.full_config import position_limit
from minifloat.model.layouts import describe
from minifloat.model.runtime.experts import QuantizedExperts
from minifloat.model.runtime.inputs import INT8_INPUTS
from minifloat.model.runtime.linear import QuantizedWeight
from minifloat.model.runtime.lm_head import LoadedLmHead, lm_head_of
from minifloat.model.runtime.load import LoadOptions, load_opened
from minifloat.model.runtime.products import fast_products
from minifloat.model.runtime.tensors import KVScales, kv_scales
from minifloat.model.runtime.tokenizer import end_tokens
from minifloat.numerics.cast import torch_dtype
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
#: Prompts in a batch. Constant, because kernels may sum in another order for another number of rows.
_BATCH = 32
_ACTIVITY = "generation"
#: Function without arguments that returns an empty cache for one batch.
CacheFactory = Callable[[], Any]
#: (k_scale, v_scale) of a layer for which the checkpoint has no scales; servers use the same.
_NO_SCALES = (1.0, 1.0)
_NUMBER = re.compile(r"\.(\d+)(?=\.)")
#: `update` methods that append the new keys and values to the earlier ones and return all of them.
_APPENDING = (DynamicLayer.update, DynamicSlidingWindowLayer.update)


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
        with self.set_up(), fast_products():
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
    counts = Counter(str(weight.activation) for weight in weights if weight.activation is not None)
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


@torch.inference_mode()
def generate_greedy(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    ends: Collection[int] | None = None,
    cache_factory: CacheFactory | None = None,
    progress: Progress | None = None,
) -> Continuations:
    """Continue prompts by the token with the largest logit; of equal logits, by the first token."""
    _check(model, prompts, new_tokens)
    stop = sorted(end_tokens(model.generation_config, model.config) if ends is None else ends)
    continuations: list[tuple[int, ...]] = []
    total = len(prompts) * new_tokens
    for first in range(0, len(prompts), _BATCH):
        rows = torch.tensor([list(prompt) for prompt in prompts[first : first + _BATCH]], device=model.device)
        cache = None if cache_factory is None else cache_factory()
        steps: list[Tensor] = []
        for tokens in _continue(model, rows, stop, cache, first):
            steps.append(tokens)
            if progress is not None:
                progress(first * new_tokens + len(rows) * len(steps), total, _ACTIVITY)
            if len(steps) == new_tokens:
                break
        continuations += [_cut(row, stop) for row in torch.stack(steps, dim=1).tolist()]
    if progress is not None:
        progress(total, total, _ACTIVITY)
    return tuple(continuations)


def _check(model: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
    check_takes_cache(model)
    lengths = {len(prompt) for prompt in prompts}
    if len(lengths) != 1 or 0 in lengths or new_tokens < 1:
        raise UsageError(
            "expected prompts of one length, with at least one token, and at least one token to generate; got "
            f"{len(prompts)} prompts of {sorted(lengths)} tokens and {new_tokens} to generate"
        )
    require_room(max(lengths), new_tokens, position_limit(model.config))


def _continue(model: PreTrainedModel, ids: Tensor, stop: Sequence[int], cache: Any, first: int) -> Iterator[Tensor]:
    """Yield the next token of each row ``[B]``, step by step, until all rows have ended."""
    parameters = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": True}
    if "logits_to_keep" in parameters:
        options["logits_to_keep"] = 1
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    stops = torch.tensor(stop, dtype=torch.long, device=ids.device)
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for step in itertools.count():
        if "position_ids" in parameters:  # not all models count from the length of the cache
            options["position_ids"] = positions
        output: Any = model(input_ids=ids, past_key_values=cache, **options)
        cache = getattr(output, "past_key_values", cache)  # some models do not return their cache
        if cache is None:
            raise UsageError(f"{type(model).__name__} returns no KV cache, so it cannot generate text here")
        best, tokens = output.logits[:, -1].max(dim=-1)
        broken = ~(best.isfinite() | ended)
        if bool(broken.any()):
            prompt = first + int(broken.int().argmax())
            raise NonFiniteError("logits", f"NaN or Inf where token {step} after prompt {prompt} is chosen")
        yield tokens
        ended |= torch.isin(tokens, stops)
        if bool(ended.all()):
            return
        ids, positions = tokens[:, None], positions[:, -1:] + 1


def _cut(row: list[int], stop: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens up to and including the first end token."""
    end = next((index for index, token in enumerate(row) if token in stop), len(row))
    return tuple(row[: end + 1])


def kv_cache_factory(model: PreTrainedModel, scales: KVScales) -> CacheFactory:
    """Return a function that makes simulated FP8 KV caches for a model."""
    name, runner = type(model).__name__, cast(Any, model)
    check_takes_cache(model)
    config = runner.config.get_text_config(decoder=True)
    if not runner._supports_default_dynamic_cache():
        raise UsageError(f"an FP8 KV cache cannot be simulated for {name}: it has a cache of its own kind")
    if getattr(config, "kv_lora_rank", None):
        raise UsageError(
            f"an FP8 KV cache cannot be simulated for {name}: servers hold its latent vectors, transformers holds the "
            "keys and values computed from them"
        )
    attentions = []
    for index, layer in enumerate(DynamicCache(config=config).layers):
        update = getattr(type(layer), "update", None)
        if isinstance(layer, DynamicLayer) and update not in _APPENDING:
            raise UsageError(
                f"an FP8 KV cache cannot be simulated for {name}: layer {index} holds its keys and values in a "
                f"{type(layer).__name__}"
            )
        if isinstance(layer, DynamicLayer):
            attentions.append(index)
    by_layer = _by_layer(scales, config.num_hidden_layers)
    missing = [index for index in attentions if index not in by_layer]
    if missing:
        _LOG.warning(
            "%d of %d attention layers have no k_scale and v_scale: 1.0 is used, as in servers",
            len(missing),
            len(attentions),
        )
    return lambda: SimulatedKVCache(config, by_layer)


def check_takes_cache(model: PreTrainedModel) -> None:
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise UsageError(f"{type(model).__name__} takes no KV cache, so an FP8 cache and generation are impossible")


class SimulatedKVCache(DynamicCache):  # type: ignore[misc, no-any-unimported, unused-ignore]
    def __init__(self, config: Any, scales: Mapping[int, tuple[float, float]]) -> None:
        super().__init__(config=config)
        self._scales = scales

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add keys and values ``[B, kv_heads, T, head_dim]``, and return all of the layer's, rounded."""
        k_scale, v_scale = self._scales.get(layer_idx, _NO_SCALES)
        keys, values = round_to_cache(key_states, k_scale), round_to_cache(value_states, v_scale)
        updated: tuple[Tensor, Tensor] = super().update(keys, values, layer_idx, *args, **kwargs)
        return updated


def round_to_cache(x: Tensor, scale: float) -> Tensor:
    """Round values as an E4M3 cache does: divide by the scale, clamp, round to nearest even, multiply by the scale."""
    # The divisor is a tensor because torch, on some devices, multiplies by the reciprocal of a Python number.
    divisor = torch.tensor(scale, dtype=torch.float32, device=x.device)
    codes = (x.float() / divisor).clamp(-E4M3.max, E4M3.max).to(torch_dtype(E4M3))
    return (codes.float() * divisor).to(x.dtype)


def _by_layer(scales: KVScales, layers: int) -> dict[int, tuple[float, float]]:
    """Return the scales by number of the layer, which the name of the attention module contains."""
    numbered: dict[int, tuple[float, float]] = {}
    for name, pair in scales.items():
        numbers = [int(number) for number in _NUMBER.findall(f".{name}.")]
        if len(numbers) != 1 or not numbers[0] < layers or numbers[0] in numbered:
            raise UsageError(f"{name} has scales of a KV cache, but is none of the model's {layers} layers, once each")
        numbered[numbers[0]] = pair
    return numbered

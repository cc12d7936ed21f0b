"""The models of a comparison, as they are served: by minifloat's engine where one of its decoders computes them.

transformers' code (`transformers_model`) runs models that the user has loaded, architectures that no decoder covers,
checkpoints with quantized inputs (the decoder of the CPU does not multiply in FP8), and an FP8 KV cache without scales.
All models of a comparison run in the same way, so that another order of summation is no difference of the weights.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

from torch import Tensor

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.progress import Progress
from minifloat.engine import Delivery, Engine, EngineOptions, SamplingParams
from minifloat.errors import NonFiniteError, UsageError
from minifloat.model.runtime.inputs import INT8_INPUTS
from minifloat.model.runtime.tokenizer import serving_tokenizer
from minifloat.numerics.formats import BFLOAT16, E4M3, FLOAT16, FLOAT32

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from minifloat.model.runtime.tokenizer import TextTokenizer

#: Dtype of the activations -> what reports call inputs that are not quantized.
PLAIN_INPUTS = {"bfloat16": BFLOAT16.name, "float16": FLOAT16.name, "float32": FLOAT32.name}

ModelLike: TypeAlias = "PreTrainedModel | str | os.PathLike[str]"
#: New token ids of each prompt; a continuation that ended has its end token last.
Continuations = tuple[tuple[int, ...], ...]


def is_named(model: ModelLike) -> TypeGuard[str | os.PathLike[str]]:
    """Return whether a model is a folder or a name, and not one that is loaded already."""
    return isinstance(model, (str, os.PathLike))


@dataclass(frozen=True)
class ServedRecord:
    url: str
    model: str
    alternatives: int
    unnamed_share: float


@dataclass(frozen=True)
class ModelRecord:
    name: str
    nbytes: int | None  # of the weights: on disk, or in memory if the user gave a loaded model; None for a server
    activations: str  # the formats in which the quantized weights take their inputs
    kv_cache: str | None = None
    lm_head: str = ""
    served: ServedRecord | None = None
    runner: str = "transformers"


class Model(ABC):
    """One of the models of a comparison, as the comparison runs it."""

    name: str
    folder: str
    vocab_size: int  # logits per token, which may be more than the tokenizer's vocabulary
    dtype: str
    longest: int | None  # tokens that the model can attend to; None if its config states no limit

    @property
    @abstractmethod
    def record(self) -> ModelRecord:
        """What reports say of the model."""

    @abstractmethod
    def logits(self, ids: Tensor) -> Iterator[Tensor]:
        """Yield the logits ``[R, V]`` of all tokens of windows ``[B, W]`` but the last of each, some rows at a time.

        The next ones may overwrite them.
        """

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, progress: Progress | None) -> Continuations:
        """Continue prompts by the token with the largest logit, up to an end token."""

    def tokenizer(self) -> TextTokenizer:
        """Return the tokenizer of the model's folder."""
        return serving_tokenizer(self.folder)

    def check_window(self, window: int) -> None:  # noqa: B027
        """Refuse a window whose logits do not fit into memory; by default, models run windows in pieces."""

    def headers(self) -> Checkpoint:
        """Return the closed checkpoint of the model's folder: config, and names, shapes and dtypes of tensors."""
        with Checkpoint.open(self.folder) as checkpoint:
            return checkpoint


class EngineModel(Model):
    def __init__(self, name: str, checkpoint: Checkpoint, options: EngineOptions) -> None:
        self.name, self.folder, self._checkpoint = name, str(checkpoint.path), checkpoint
        self.engine = Engine(checkpoint.path, options, checkpoint=checkpoint)
        info = self.engine.info
        self.vocab_size, self.dtype, self.longest = info.vocab_size, info.dtype, info.max_model_len

    def tokenizer(self) -> TextTokenizer:
        return self.engine.tokenizer

    def headers(self) -> Checkpoint:
        return self._checkpoint

    @property
    def record(self) -> ModelRecord:
        info = self.engine.info
        inputs = INT8_INPUTS if info.activations == "int8" else PLAIN_INPUTS.get(info.activations, info.activations)
        kv_cache = E4M3.name if info.kv_element == E4M3.name else None
        return ModelRecord(self.name, info.weight_bytes, inputs, kv_cache, info.lm_head, runner=info.runner)

    def logits(self, ids: Tensor) -> Iterator[Tensor]:
        return self.engine.logits_of_each([window[:-1] for window in ids.tolist()], overwrite=True)

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, progress: Progress | None) -> Continuations:
        require_room(max(map(len, prompts)), new_tokens, self.longest)
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens)
        found: dict[int, tuple[int, ...]] = {}
        for index, delivery in finished(self.engine, prompts, [params] * len(prompts)):
            if delivery.finish_reason == "error":
                raise NonFiniteError(f"logits of {self.name}", f"after prompt {index}: {delivery.error}")
            found[index] = delivery.tokens
            if progress is not None:
                progress(len(found) * new_tokens, len(prompts) * new_tokens, "generation")
        return tuple(found[index] for index in range(len(prompts)))


def require_room(prompt: int, new_tokens: int, longest: int | None) -> None:
    if longest is not None and longest < prompt + new_tokens:
        raise UsageError(
            f"prompts of {prompt} tokens and {new_tokens} new tokens are too long: the model attends to {longest}; "
            "generate fewer tokens"
        )


def finished(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> Iterator[tuple[int, Delivery]]:
    """Run requests together, and yield the number of each with all that it delivered as soon as it is finished."""
    parts: dict[str, list[Delivery]] = {}
    for delivery in engine.generate(prompts, params, stream=True):
        parts.setdefault(delivery.request_id, []).append(delivery)
        if delivery.finish_reason is not None:
            yield int(delivery.request_id), Delivery.joined(parts.pop(delivery.request_id))


def common_tokenizer(models: Sequence[Model]) -> TextTokenizer:
    """Return the tokenizer of all models, for which token i must be the same string."""
    first, *others = models
    tokenizer = first.tokenizer()
    vocabulary = tokenizer.get_vocab()
    for other in others:
        other_vocabulary = other.tokenizer().get_vocab()
        if vocabulary != other_vocabulary or first.vocab_size != other.vocab_size:
            differing = len(set(vocabulary.items()) ^ set(other_vocabulary.items()))
            raise UsageError(
                f"{first.name} and {other.name} have different vocabularies (sizes {first.vocab_size} and "
                f"{other.vocab_size}, {differing} entries differ); only models of one vocabulary can be compared "
                "token by token"
            )
    return tokenizer

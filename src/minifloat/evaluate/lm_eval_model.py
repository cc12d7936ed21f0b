"""The model type: lm-evaluation-harness' model of transformers, with minifloat's engine in the place of the model.

Prompts, tokens, truncation, windows of long documents and the cutting of answers are the harness' own code
(`lm_eval.models.huggingface.HFLM`). Left out: encoder-decoder models, adapters, several devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from minifloat._version import __version__
from minifloat.engine import Delivery, Engine, EngineOptions, SamplingParams
from minifloat.engine.sampling import MAX_STOP_LENGTH, MAX_STOPS
from minifloat.errors import NonFiniteError, UsageError
from minifloat.evaluate.compare.models import finished

#: Requests that are given to the engine together; a quarter of them runs at a time with ``batch_size=auto``.
_TOGETHER = 256
#: Parameters of a task's ``generation_kwargs`` that the engine has, besides those that `HFLM` reads itself.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
#: Parameters that say what the engine does anyway; None: any value.
_STRAIGHT = {"do_sample": None, "use_cache": None, "num_beams": 1}
#: Arguments of `HFLM` that this class has too.
_OF_HARNESS = (
    "tokenizer",
    "truncation",
    "add_bos_token",
    "prefix_token_id",
    "think_end_token",
    "enable_thinking",
    "chat_template_args",
    "trust_remote_code",
)

_Tokens = tuple[tuple[str, str], list[int], list[int]]


class MinifloatLM(HFLM):  # type: ignore[misc]  # the harness has no types
    def __init__(
        self,
        pretrained: str | Engine,
        *,
        batch_size: int | str | None = "auto",
        max_batch_size: int | None = None,
        device: str | None = "cpu",
        dtype: str | None = "auto",
        max_length: int | None = None,
        **options: Any,
    ) -> None:
        """Open a checkpoint, or take an engine; `options` are those in `_OF_HARNESS` and fields of `EngineOptions`."""
        own = {name: options.pop(name) for name in _OF_HARNESS if name in options}
        revision = options.pop("revision", None)
        device = device if device is not None and torch.cuda.is_available() else "cpu"
        if isinstance(pretrained, Engine):
            self._opened, path, sequences = pretrained, pretrained.info.path, pretrained.info.max_num_seqs
        else:
            path, sequences = pretrained, _sequences(batch_size, max_batch_size)
            dtype = None if dtype == "auto" else dtype
            fixed: dict[str, Any] = {"device": device, "dtype": dtype, "max_model_len": max_length}
            self._opened = Engine(path, EngineOptions(max_num_seqs=sequences, **fixed, **options), revision=revision)
        super().__init__(
            pretrained=path,
            backend="causal",
            revision=revision or "main",
            max_length=max_length,
            device=device,
            batch_size=sequences,
            **own,
        )

    @property
    def engine(self) -> Engine:
        engine: Engine = self._model
        return engine

    @property
    def max_length(self) -> int:
        return self.engine.info.max_model_len

    def _get_config(self, pretrained: str, **options: Any) -> None:
        """Keep the config without its quantization, for which transformers would ask for packages."""
        super()._get_config(pretrained, **options)
        if hasattr(self._config, "quantization_config"):
            del self._config.quantization_config

    def _create_model(self, pretrained: str, **_: Any) -> None:
        self._model = self._opened

    def get_model_info(self) -> dict[str, Any]:
        info = self.engine.info
        return {
            "model_dtype": str(info.dtype),
            "model_revision": self.revision,
            "minifloat_scheme": info.scheme,
            "minifloat_runner": info.runner,
            "minifloat_version": __version__,
        }

    # --------------------------------------------------------------------------------------- log-likelihoods

    def _loglikelihood_tokens(
        self, requests: Sequence[_Tokens], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return of each continuation its log-likelihood, and whether its tokens are the most probable ones."""
        del override_bs
        answers: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:

            def answered(index: int, scored: Delivery) -> None:
                texts, _, continuation = requests[index]
                answers[index] = _likelihood(scored, len(continuation))
                if texts is not None:  # windows of a document are no requests of their own
                    self.cache_hook.add_partial("loglikelihood", texts, answers[index])
                bar.update()

            order = sorted(range(len(requests)), key=lambda index: requests[index][1])
            for start in range(0, len(order), _TOGETHER):
                together = order[start : start + _TOGETHER]
                first = {*{tuple(requests[index][1]): index for index in together}.values()}
                for leads in (True, False):
                    indices = [index for index in together if (index in first) is leads]
                    self._run(indices, [self._scoring(requests[index]) for index in indices], answered)
        return [answers[index] for index in range(len(requests))]

    def _scoring(self, request: _Tokens) -> tuple[list[int], SamplingParams]:
        _, context, continuation = request
        tokens = (context + continuation)[-(self.max_length + 1) :]
        start = len(tokens) - len(continuation)
        if start < 1:
            raise UsageError(
                f"a continuation of {len(continuation)} tokens does not fit the context, {self.max_length}"
            )
        return tokens, SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=1, prompt_logprobs_start=start)

    # ------------------------------------------------------------------------------------------- generation

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        answers: dict[int, str] = {}
        end: str = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        stops: list[list[str]] = []
        work = []
        for context, options in (request.args for request in requests):
            known = normalize_gen_kwargs(options, self.max_gen_toks)
            stops.append(handle_stop_sequences(known.pop("until", None), eos=end))
            work.append(self._generating(context, known, [stop for stop in stops[-1] if stop and stop != end]))
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as bar:

            def answered(index: int, generated: Delivery) -> None:
                answers[index] = self._text(generated.tokens, stops[index])
                self.cache_hook.add_partial("generate_until", requests[index].args, answers[index])
                bar.update()

            self._run(range(len(requests)), work, answered)
        return [answers[index] for index in range(len(requests))]

    def _generating(self, context: str, options: dict[str, Any], stop: list[str]) -> tuple[list[int], SamplingParams]:
        most = options.pop("max_gen_toks")
        room = self.max_length - most
        if room < 1:
            raise UsageError(
                f"max_gen_toks: {most} tokens leave no room for a prompt in the context, {self.max_length}"
            )
        tokens, _ = self.tok_batch_encode([context], left_truncate_len=room, truncation=self.truncation)
        given = {name: options.pop(name) for name in _SAMPLING if options.get(name) is not None}
        strange = [name for name, value in options.items() if _STRAIGHT.get(name, ...) not in (None, value)]
        if strange:
            raise UsageError(f"generation_kwargs: minifloat does not have {', '.join(strange)}")
        defaults = {"repetition_penalty": self.engine.generation_defaults.get("repetition_penalty", 1.0)}
        usable = tuple(text for text in stop if len(text) <= MAX_STOP_LENGTH)[:MAX_STOPS]  # `_text` cuts at the others
        return tokens[0].tolist(), SamplingParams(**(defaults | given), max_tokens=most, stop=usable)

    def _text(self, tokens: Sequence[int], stops: list[str]) -> str:
        """Return the text of an answer as `HFLM` returns it: decoded alone, without thoughts, cut at stop strings."""
        thought = self.think_end_token
        if isinstance(thought, int) and thought in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(thought) :]
        text: str = self.tok_decode(tokens)
        if isinstance(thought, int):
            text = text.lstrip()
        cut: str = postprocess_generated_text(text, stops, thought if isinstance(thought, str) else None)
        return cut

    # ------------------------------------------------------------------------------------------- the engine

    def _run(
        self,
        indices: Sequence[int],
        work: Sequence[tuple[list[int], SamplingParams]],
        answered: Callable[[int, Delivery], None],
    ) -> None:
        for index, delivery in finished(self.engine, [prompt for prompt, _ in work], [params for _, params in work]):
            if delivery.finish_reason == "error":
                raise NonFiniteError("logits", f"request {indices[index]}: {delivery.error}")
            answered(indices[index], delivery)


def _likelihood(scored: Delivery, length: int) -> tuple[float, bool]:
    """Return the log-likelihood of the last tokens of a prompt, and whether they are the most probable ones."""
    assert scored.prompt_logprobs is not None
    tokens = [one for one in scored.prompt_logprobs[-length:] if one is not None]
    assert len(tokens) == length
    return math.fsum(one.logprob for one in tokens), all(one.token == one.top[0].token for one in tokens)


def _sequences(batch_size: int | str | None, largest: int | None) -> int:
    if batch_size is None or str(batch_size).startswith("auto"):
        return largest or _TOGETHER // 4
    try:
        return int(batch_size)
    except ValueError:
        raise UsageError(f"batch_size: expected a number or auto, got {batch_size!r}") from None

"""`compare_served`: a running server compared with the baseline, by the log-probabilities of its API.

A server gives the probabilities of few tokens: the set S. The KL divergence of its distribution q from the baseline's p
is the sum over S, which is known, and the sum over the rest R, of which only the total ``q(R) = 1 - q(S)`` is. By the
log-sum inequality (Cover and Thomas, Elements of Information Theory, theorem 2.7.1) the sum over R is at least
``p(R) log(p(R) / q(R))``, and it is that if q is proportional to p there. So R is filled in proportion to p: every KL
divergence is then a lower bound, and every probability of the text is exact, because its token is in S.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minifloat.calibration.data import SourceLike
from minifloat.checkpoint.progress import Progress
from minifloat.errors import UsageError
from minifloat.evaluate.compare.behavior import Behavior
from minifloat.evaluate.compare.corpus import Corpus, WindowBatch
from minifloat.evaluate.compare.metrics import FloatArray, TokenScores, concatenate, score_tokens
from minifloat.evaluate.compare.models import Model, ModelLike, ModelRecord, ServedRecord
from minifloat.evaluate.compare.options import CompareOptions, ScoringOptions, ServedOptions
from minifloat.evaluate.compare.result import Comparison
from minifloat.evaluate.compare.run import as_sources, assembled, cut_text, judged, open_models, opened, read_prompts
from minifloat.evaluate.compare.scoring import BatchTokens, ScoringPass, slabs
from minifloat.kernels.divergence import TOP_K, Distribution
from minifloat.model.runtime.templates import apply_chat_template
from minifloat.model.runtime.tokenizer import load_tokenizer
from minifloat.serve.client import Connection, ServerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from minifloat.evaluate.compare.behavior_prompts import Prompts

#: Text that tokenizers cut differently: words, numbers, spaces, another script, an emoji.
_SAMPLE = "The  year 2024 cost 1,234.50 euros;\n\tdéjà vu, 東京 and 🙂 don't_agree."
_CONVERSATION = [{"role": "user", "content": "What is two plus two?"}]
#: Numbers of alternatives per token that are asked for; servers refuse more than they allow. The first is the largest
#: that vLLM and minifloat allow, the second OpenAI's.
_ALTERNATIVES = (20, 5)
#: Windows that are sent at a time, so that the server can batch them.
_REQUESTS = 4
_TOKEN_ID = re.compile(r"token_id:(\d+)")
_BAD_REQUEST = (400, 422)
#: Logits that are held in float64 at a time: so few that they stay in the processor's caches.
_SLAB_ELEMENTS = 2**18
#: Below the log-probability of any token: servers write these numbers for tokens that cannot be (-Inf is no JSON).
_IMPOSSIBLE = -1e3
#: What is left for R at least. Servers round logarithms, so that the probabilities in S may add up to more than 1.
_LEAST_REST = 1e-6


def compare_served(
    baseline: ModelLike,
    url: str,
    data: SourceLike | Sequence[SourceLike] = (),
    options: ServedOptions | None = None,
    *,
    progress: Progress | None = None,
) -> Comparison:
    """Measure how far a server's predictions are from the baseline's, and judge whether they are close enough.

    Perplexity and the first choice are exact. The KL divergence is a lower bound, because servers give the
    probabilities of few tokens only: it can break its bound, but that it keeps it proves less than for loaded models.
    The record of the candidate says how much of the baseline's probability the server left unnamed.

    Args:
        baseline: A folder, a model of the hub, or a model from `minifloat.model.runtime.load.load`.
        url: Address of a server with OpenAI's API whose ``/v1/completions`` has ``echo`` with ``logprobs`` and takes
            token ids: minifloat, vLLM, SGLang.
        data: Text, as for `compare_models`.
        options: How the baseline runs, and the model on the server; None: `ServedOptions()`.
        progress: Called after each batch with tokens done, tokens in total, and the name of the text.

    Raises:
        ServerError: If the server cannot be reached or refuses a request.
        UsageError: If the server gives no log-probabilities of prompts, or has another tokenizer.
        MinifloatError: As `compare_models`.
    """
    settings = options or ServedOptions()
    shared = {field.name: getattr(settings, field.name) for field in fields(ScoringOptions)}
    sources, prompts = as_sources(data), read_prompts(settings)
    connection = Connection(url, settings.api_key)
    listed = connection.listed_model(settings.model)  # reports a missing server before the model is loaded
    if settings.baseline_url is not None:
        shared["behavior"] = None  # the model that is loaded here does not answer
    with opened(baseline, (), CompareOptions(**shared)) as checkpoints:
        (model,) = open_models(baseline, (), CompareOptions(**shared), [], checkpoints)
    tokenizer = load_tokenizer(model.folder)
    served = ServedModel(connection, str(listed["id"]), tokenizer)
    _check_tokenizer(served, url, tokenizer)
    context = listed.get("max_model_len")  # a server that lists it must have room for a token behind a window
    corpus = cut_text(sources, [model], tokenizer, settings, context - 1 if isinstance(context, int) else None)
    notes = _template_notes(served, tokenizer)
    behavior = None if prompts is None else _behavior(model, served, connection, prompts, settings, progress, notes)
    scoring = _ServedPass(model, served, corpus)
    seconds = scoring.run_until_interrupted(progress)
    share = float(np.mean(np.concatenate(scoring.unnamed)))
    record = ModelRecord(
        f"{served.name} at {url}", None, "", served=ServedRecord(url, served.name, served.alternatives, share)
    )
    return assembled(
        scoring,
        model.record,
        [judged(scoring, 0, record, tokenizer, settings.tolerance, behavior)],
        seconds=seconds,
        command=settings.command,
        notes=notes,
    )


def _behavior(
    model: Model,
    served: ServedModel,
    connection: Connection,
    prompts: Prompts,
    settings: ServedOptions,
    progress: Progress | None,
    notes: list[str],
) -> Behavior:
    from minifloat.evaluate.compare import behavior_answers

    candidate = behavior_answers.served_answers(connection, served.name, prompts, progress)
    if settings.baseline_url is None:
        baseline = behavior_answers.answers_of(model, prompts, progress)
    else:
        other = Connection(settings.baseline_url, settings.api_key)
        name = str(other.listed_model()["id"])
        baseline = behavior_answers.served_answers(other, name, prompts, progress)
    return behavior_answers.behavior(prompts, baseline, candidate, notes)


class _ServedPass(ScoringPass):
    def __init__(self, baseline: Model, served: ServedModel, corpus: Corpus) -> None:
        super().__init__(baseline, 1, corpus)
        self._served = served
        self.unnamed: list[FloatArray] = []

    def _score(self, batch: WindowBatch) -> list[TokenScores]:
        known = [of_token for window in self._served.probabilities(batch.ids.tolist()) for of_token in window]
        tokens, parts = BatchTokens(batch), []
        for where, (logits,) in slabs(_SLAB_ELEMENTS, ((rows,) for rows in self.baseline.logits(batch.ids))):
            p = Distribution(logits)
            q, unnamed = served_distribution(p, known[where])
            scores = score_tokens(p, q, *tokens.at(where))
            self.refuse_nan(self.baseline, scores.baseline_nll)
            self.unnamed.append(unnamed.cpu().numpy())
            self.worst[0].add(scores, p, q, batch, where.start)
            parts.append(scores)
        return [concatenate(parts)]


def _check_tokenizer(served: ServedModel, url: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Compare the server's tokens of a text with the baseline's, where it says them."""
    found = served.tokens(prompt=_SAMPLE, add_special_tokens=False)
    expected = list(tokenizer(_SAMPLE, add_special_tokens=False).input_ids)
    if found is not None and found != expected:
        raise UsageError(
            f"{url}: the server cuts text into other tokens than the baseline: {_difference(expected, found)}; it "
            "serves another model, or another tokenizer"
        )


def _template_notes(served: ServedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return a note if a conversation becomes other tokens on the server than with the baseline's chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        return []
    found = served.tokens(messages=_CONVERSATION)
    text = apply_chat_template(tokenizer, _CONVERSATION, add_generation_prompt=True)
    expected = list(tokenizer(text, add_special_tokens=False).input_ids)
    if found is None or found == expected:
        return []
    return [
        "conversations: the server's chat template makes other tokens of them than the baseline's: "
        f"{_difference(expected, found)}"
    ]


def _difference(expected: Sequence[int], found: Sequence[int]) -> str:
    pairs = zip(expected, found, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
    return f"from token {first} on {list(found[first : first + 4])} instead of {list(expected[first : first + 4])}"


@dataclass(frozen=True)
class KnownProbabilities:
    """The tokens after one position whose probabilities the server gives."""

    ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float64]


class ServedModel:
    def __init__(self, connection: Connection, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self._connection, self.name = connection, name
        self._ids = _ids_by_text(tokenizer)
        ids = list(tokenizer("a b c", add_special_tokens=False).input_ids)
        self.alternatives = self._find_alternatives((ids * 2)[: max(len(ids), 2)])

    def probabilities(self, windows: Sequence[Sequence[int]]) -> list[list[KnownProbabilities]]:
        with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="minifloat-served") as pool:
            return list(pool.map(lambda window: self._window(list(window), self.alternatives), windows))

    def tokens(self, **fields: Any) -> list[int] | None:
        """Return the tokens that the server makes of a prompt or of messages; None if it has no ``/tokenize``."""
        try:
            answer = self._connection.json("POST", "/tokenize", {"model": self.name, **fields})
        except ServerError as error:
            if error.status is None:
                raise
            return None
        tokens = answer.get("tokens")
        is_list = isinstance(tokens, list) and all(isinstance(token, int) for token in tokens)
        return tokens if is_list else None

    def _find_alternatives(self, window: list[int]) -> int:
        refusal: ServerError | None = None
        for count in _ALTERNATIVES:
            try:
                self._window(window, count)
            except ServerError as error:
                if error.status not in _BAD_REQUEST:
                    raise
                refusal = error
            else:
                return count
        raise self._without_logprobs(refusal) from refusal

    def _without_logprobs(self, reason: object) -> UsageError:
        return UsageError(
            f"{self._connection.url} gives no log-probabilities of prompts, without which the served model cannot be "
            f"judged ({reason}). minifloat, vLLM and SGLang do: POST /v1/completions with a prompt of token ids, "
            '"echo": true and "logprobs"'
        )

    def _window(self, window: list[int], count: int) -> list[KnownProbabilities]:
        body = {
            "model": self.name,
            "prompt": window,
            "echo": True,
            "logprobs": count,
            "max_tokens": 1,
            "temperature": 0,
            "return_tokens_as_token_ids": True,
        }
        answer = self._connection.json("POST", "/v1/completions", body)
        try:
            lists = answer["choices"][0]["logprobs"]
            tokens, own, top = lists["tokens"], lists["token_logprobs"], lists["top_logprobs"]
        except (KeyError, IndexError, TypeError):
            raise self._without_logprobs("its answer has none") from None
        if min(len(tokens), len(own), len(top or ())) < len(window):
            raise UsageError(
                f"{self._connection.url}: a prompt of {len(window)} tokens came back with log-probabilities of "
                f"{min(len(tokens), len(own), len(top or ()))}: the server drops tokens, or leaves the prompt out"
            )
        for index, (token, name) in enumerate(zip(window, tokens, strict=False)):
            if self._id_of(str(name)) not in (None, token):  # several tokens may share a text
                raise UsageError(
                    f"{self._connection.url}: token {index} of a prompt was {token} and came back as {name!r}: the "
                    "server has another tokenizer, or adds tokens to prompts"
                )
        return [self._known(token, own[index], top[index] or {}) for index, token in enumerate(window) if index]

    def _known(self, token: int, logprob: Any, top: Mapping[str, Any]) -> KnownProbabilities:
        found = {token: _number(logprob)}
        for name, value in top.items():
            known = self._id_of(name)
            if known is not None:
                found.setdefault(known, _number(value))
        ids = np.fromiter(found, dtype=np.int64)
        logprobs = np.fromiter(found.values(), dtype=np.float64)
        order = np.argsort(-logprobs, kind="stable")
        return KnownProbabilities(ids[order], logprobs[order])

    def _id_of(self, name: str) -> int | None:
        """Return the id of a token by its name in an answer; None if several tokens have this text."""
        match = _TOKEN_ID.fullmatch(name)
        return int(match[1]) if match else self._ids.get(name)


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or value != value or value > 1e-3:
        raise UsageError(f"the server gave {value!r} as the logarithm of a probability")
    return max(float(value), _IMPOSSIBLE)


def _ids_by_text(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the tokens whose text no other token has, by their text."""
    found: dict[str, int | None] = {}
    for token in range(len(tokenizer)):
        text = str(tokenizer.decode([token]))
        found[text] = None if text in found else token
    return {text: token for text, token in found.items() if token is not None}


def served_distribution(p: Distribution, known: Sequence[KnownProbabilities]) -> tuple[Distribution, Tensor]:
    """Return the distributions of a server where the tokens that it does not name share the rest as in `p`."""
    ids, logprobs, is_known = _table(known, p.logits.device)
    logits = p.logits - p.log_total[:, None]
    unnamed = (1 - (logits.gather(1, ids).exp() * is_known).sum(-1)).clamp_min(0)
    rest_of_p = unnamed.clamp_min(torch.finfo(torch.float64).eps)
    rest_of_q = (1 - (logprobs.exp() * is_known).sum(-1)).clamp_min(_LEAST_REST)
    logits += (rest_of_q.log() - rest_of_p.log())[:, None]
    logits.scatter_(1, ids, logprobs)
    q = Distribution(logits)
    # the most probable tokens are those that the server names, whatever share of the rest another token has here
    q.top = ids[:, : min(TOP_K, *(len(of_row.ids) for of_row in known))]
    q.top_logits = q.logits.gather(-1, q.top)
    return q, unnamed


def _table(known: Sequence[KnownProbabilities], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, log-probabilities and whether they count ``[R, k]``; short rows repeat their first token."""
    width = max(len(of_row.ids) for of_row in known)
    ids = np.empty((len(known), width), dtype=np.int64)
    logprobs = np.empty((len(known), width))
    is_known = np.zeros((len(known), width), dtype=np.bool_)
    for row, of_row in enumerate(known):
        count = len(of_row.ids)
        ids[row, :count], ids[row, count:] = of_row.ids, of_row.ids[0]
        logprobs[row, :count], logprobs[row, count:] = of_row.logprobs, of_row.logprobs[0]
        is_known[row, :count] = True
    first, second, third = (torch.from_numpy(array).to(device) for array in (ids, logprobs, is_known))
    return first, second, third

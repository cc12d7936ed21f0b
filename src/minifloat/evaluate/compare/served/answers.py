"""`ServedModel`: the log-probabilities that a server gives the tokens of a prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from minifloat.errors import UsageError
from minifloat.serve.connection import Connection, ServerError

#: Numbers of alternatives per token that are asked for; servers refuse more than they allow. The first is the largest
#: that vLLM and minifloat allow, the second OpenAI's.
_ALTERNATIVES = (20, 5)
#: Windows that are sent at a time, so that the server can batch them.
_REQUESTS = 4
_TOKEN_ID = re.compile(r"token_id:(\d+)")
_BAD_REQUEST = (400, 422)
#: Below the log-probability of any token: servers write these numbers for tokens that cannot be (-Inf is no JSON).
_IMPOSSIBLE = -1e3


@dataclass(frozen=True)
class KnownProbabilities:
    """The tokens after one position whose probabilities the server gives.

    Attributes:
        ids: int64 ``[k]``: token ids, the most probable first; the token of the text is among them.
        logprobs: float64 ``[k]``: natural logarithms of their probabilities.
    """

    ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float64]


class ServedModel:
    """A model behind an API."""

    def __init__(self, connection: Connection, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self._connection, self.name = connection, name
        self._ids = _ids_by_text(tokenizer)
        self.alternatives = self._find_alternatives(_trial_ids(tokenizer))

    def probabilities(self, windows: Sequence[Sequence[int]]) -> list[list[KnownProbabilities]]:
        """Return what the server says of each token of some windows but the first."""
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
        """Return the largest number of alternatives that the server does not refuse."""
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
            if not self._may_be(token, str(name)):
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

    def _may_be(self, token: int, name: str) -> bool:
        """Return whether a name in an answer is that of a token; texts that several tokens share may be."""
        known = self._id_of(name)
        return known is None or known == token


def _number(value: Any) -> float:
    """Return a log-probability."""
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


def _trial_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids = list(tokenizer("a b c", add_special_tokens=False).input_ids)
    return (ids * 2)[: max(len(ids), 2)]

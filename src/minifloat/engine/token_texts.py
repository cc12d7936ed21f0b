"""Log-probabilities with the texts of their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minifloat.engine.sampling import TokenChoice, TokenLogprob
from minifloat.model.runtime.tokenizer import token_bytes

if TYPE_CHECKING:
    from minifloat.model.runtime.tokenizer import TextTokenizer


class TokenTexts:
    """Adds text and bytes to tokens; each token is decoded once, because the tokenizer is slow for a prompt's many."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, tuple[str, bytes]] = {}

    def logprob(self, choice: TokenChoice) -> TokenLogprob:
        """Return a choice whose log-probability was asked for, with the texts of all its tokens."""
        assert choice.logprob is not None
        alternatives = tuple(TokenLogprob(token, *self._text(token), value) for token, value in choice.top)
        return TokenLogprob(choice.token, *self._text(choice.token), choice.logprob, alternatives)

    def _text(self, token: int) -> tuple[str, bytes]:
        if token not in self._texts:
            text = str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))
            self._texts[token] = text, token_bytes(self._tokenizer, token, text)
        return self._texts[token]

"""Turns tokens into text one by one, and never cuts a character in two."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

#: Tokens that one character may be spread over: one for each byte.
_LONGEST_CHARACTER = 4
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Turns tokens into text one by one.

    The text of a token is the text with the token minus the text without it, both decoded from a few tokens back,
    because the first token of a text may be decoded differently (a leading space). Text that ends inside a character is
    held back.

    Args:
        tokenizer: The tokenizer of the model; its special tokens have no text.
        prompt: Token ids before the first token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        # Only the tokens that `_pending` may decode again are kept: a text may be long.
        self._ids = list(prompt[-_LONGEST_CHARACTER:])
        self._num_emitted = len(self._ids)

    def add(self, token: int) -> str:
        """Add a token, and return the text that is now certain; it may be empty."""
        # Special tokens and those that pad the vocabulary have no text, and may stand inside a character.
        if token in self._special or self.tokenizer.convert_ids_to_tokens(token) is None:
            return ""
        self._ids.append(token)
        piece = self._pending()
        kept = self._incomplete(piece) if piece.endswith(_INCOMPLETE) else 0
        if kept == len(self._ids) - self._num_emitted:
            return ""
        if kept:
            piece = piece.removesuffix(_INCOMPLETE)
        emitted = len(self._ids) - kept
        start = max(self._num_emitted - kept, 0)
        self._ids, self._num_emitted = self._ids[start:], emitted - start
        return piece

    def rest(self) -> str:
        """Return the text that is held back at the end."""
        return self._pending()

    def _incomplete(self, piece: str) -> int:
        """Return how many of the last tokens may begin a character, which is U+FFFD at the end of `piece`."""
        pending = self._ids[self._num_emitted :]
        if len(pending) < _LONGEST_CHARACTER:
            return len(pending)
        for count in range(_LONGEST_CHARACTER - 1, 0, -1):
            if self._decode(pending[:-count]) + _INCOMPLETE == piece and self._decode(pending[-count:]) == _INCOMPLETE:
                return count
        return 0

    def _pending(self) -> str:
        before, after = self._decode(self._ids[: self._num_emitted]), self._decode(self._ids)
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

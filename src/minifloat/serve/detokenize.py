"""Tokens become text one by one, without a character cut in two."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

#: Tokens that one character may be spread over: a byte each.
_LONGEST_CHARACTER = 4
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Turns tokens into text one by one.

    What a token adds is the text with it minus the text without it, both decoded from a few tokens back, since the
    first token of a text may be decoded differently (a leading space). Text that ends inside a character waits.

    Args:
        tokenizer: Decodes; special tokens are no text.
        prompt: Token ids before the first one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        # Only what `_pending` may look at again is kept: a text may be long.
        self._ids = list(prompt[-_LONGEST_CHARACTER:])
        self._said = len(self._ids)

    def add(self, token: int) -> str:
        """The text that is certain with one more token; it may be empty."""
        # Without text, and it may stand inside a character: special, or one that pads the model's vocabulary.
        if token in self._special or self.tokenizer.convert_ids_to_tokens(token) is None:
            return ""
        self._ids.append(token)
        piece = self._pending()
        kept = self._incomplete(piece) if piece.endswith(_INCOMPLETE) else 0
        if kept == len(self._ids) - self._said:
            return ""
        if kept:
            piece = piece.removesuffix(_INCOMPLETE)
        said = len(self._ids) - kept
        start = max(self._said - kept, 0)
        self._ids, self._said = self._ids[start:], said - start
        return piece

    def rest(self) -> str:
        """What still waits at the end."""
        return self._pending()

    def _incomplete(self, piece: str) -> int:
        """How many of the last tokens may begin a character, which says U+FFFD at the end of `piece`."""
        pending = self._ids[self._said :]
        if len(pending) < _LONGEST_CHARACTER:
            return len(pending)
        for count in range(_LONGEST_CHARACTER - 1, 0, -1):
            if self._decode(pending[:-count]) + _INCOMPLETE == piece and self._decode(pending[-count:]) == _INCOMPLETE:
                return count
        return 0

    def _pending(self) -> str:
        before, after = self._decode(self._ids[: self._said]), self._decode(self._ids)
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

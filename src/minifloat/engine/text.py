"""Turns tokens into text one by one without cutting a character in two, and finds stop strings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from minifloat.engine.sampling import Thinking, TokenChoice, TokenLogprob
from minifloat.model.runtime.tokenizer import token_bytes
from minifloat.model.runtime.tokenizer_files import FileTokenizer

if TYPE_CHECKING:
    from minifloat.model.runtime.tokenizer import TextTokenizer

#: Tokens that one character may be spread over: one for each byte.
_LONGEST_CHARACTER = 4
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TokenDecoder:
    """Decodes tokens with one tokenizer, for any number of texts. The text of a single token is decoded once."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._single: dict[int, str | None] = {}
        #: Text of several tokens, without special tokens.
        self.text = _decoder_of(tokenizer)

    def single(self, token: int) -> str | None:
        """Return the text of a token alone; None if it has none."""
        try:
            return self._single[token]
        except KeyError:
            # special tokens and those that pad the vocabulary have no text, and may stand inside a character
            is_empty = token in self._special or self._tokenizer.convert_ids_to_tokens(token) is None
            text = self._single[token] = None if is_empty else self.text([token])
            return text

    def name(self, token: int) -> str:
        """Return the text of a special token, which is left out of the text of several."""
        return str(self._tokenizer.convert_ids_to_tokens(token) or "")


def _decoder_of(tokenizer: TextTokenizer) -> Callable[[list[int]], str]:
    """Return the function that decodes tokens without special tokens and without cleaning spaces up."""
    if isinstance(tokenizer, FileTokenizer):
        decode = tokenizer.backend.decode
        return lambda ids: str(decode(ids, skip_special_tokens=True))
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    if (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.decode is PreTrainedTokenizerBase.decode
        and kind._decode is PreTrainedTokenizerFast._decode
    ):
        fast = tokenizer.backend_tokenizer.decode  # transformers adds checks of its arguments, which take longer
        return lambda ids: str(fast(ids, skip_special_tokens=True))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


# The text of a token is the text with it minus the text without it, both decoded from a few tokens back, because the
# first token of a text may be decoded differently (a leading space). Text that ends inside a character is held back.
class Detokenizer:
    def __init__(
        self, tokenizer: TextTokenizer | TokenDecoder, prompt: Sequence[int], visible: Collection[int] = ()
    ) -> None:
        self._visible = visible
        self._decoder = tokenizer if isinstance(tokenizer, TokenDecoder) else TokenDecoder(tokenizer)
        self._decode = self._decoder.text
        # Only the tokens that `_pending` may decode again are kept: a text may be long.
        self._ids = list(prompt[-_LONGEST_CHARACTER:])
        self._num_emitted = len(self._ids)

    def add(self, token: int) -> str:
        """Add a token, and return the text that is now certain; it may be empty."""
        if self._decoder.single(token) is None:
            return self._named(token) if token in self._visible else ""
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
        return self._pending()

    def _named(self, token: int) -> str:
        """Return the text that was held back, which a special token ends, and the name of that token."""
        held = self._pending()
        if held:
            self._ids = []
        self._num_emitted = len(self._ids)
        return held + self._decoder.name(token)

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
        ids, emitted = self._ids, self._num_emitted
        before = self._decoder.single(ids[0]) if emitted == 1 else None
        if before is None:  # several tokens, or one that has no text of its own
            before = self._decode(ids[:emitted])
        return self._decode(ids)[len(before) :]


class StopStrings:
    """Finds the first stop string in a text that comes in pieces, and holds back text that may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._held = ""

    def add(self, piece: str) -> tuple[str, str | None]:
        if not self.stops:
            return piece, None
        text = self._held + piece
        matches = [(index, order) for order, stop in enumerate(self.stops) if (index := text.find(stop)) >= 0]
        if matches:
            index, order = min(matches)
            self._held = ""
            return text[:index], self.stops[order]
        held = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def rest(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    return next(
        (length for length in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-length:])), 0
    )


class ThinkingText:
    """Finds the end of the thinking in a text that comes in pieces; it is over if the text does not begin with it.

    Attributes:
        over: Whether the thinking has ended, or there is none.
        begun: Whether it has begun.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._thinking, self._held = thinking, ""
        self.begun, self.over = thinking.begun, False

    def add(self, piece: str) -> tuple[str, str]:
        """Return the text of the thinking that is now certain, and what follows it."""
        if self.over:
            return "", piece
        text, self._held = self._held + piece, ""
        thought = ""
        if not self.begun:
            blanks = len(text) - len(text.lstrip())
            if not text.startswith(self._thinking.open, blanks):
                if self._thinking.open.startswith(text[blanks:]):
                    self._held = text
                else:
                    self.over = True
                return ("", "") if self._held else ("", text)
            self.begun, end = True, blanks + len(self._thinking.open)
            thought, text = text[:end], text[end:]
        found = [(at, at + len(close)) for close in self._thinking.close if (at := text.find(close)) >= 0]
        if found:
            self.over, end = True, min(found)[1]
            return thought + text[:end], text[end:]
        kept = max(_overlap(text, close) for close in self._thinking.close)
        self._held = text[len(text) - kept :]
        return thought + text[: len(text) - kept], ""

    def rest(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        return (held, "") if self.begun else ("", held)


class TextStream:
    """The text of one request.

    Attributes:
        thinking_tokens: Tokens of the thinking so far, with the texts around it.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer | TokenDecoder,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        include_stop: bool = False,
        *,
        visible: Collection[int] = (),
        thinking: Thinking | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt, visible)
        self._stops = StopStrings(stops)
        self._include_stop = include_stop
        self._thinking = None if thinking is None else ThinkingText(thinking)
        self._budget = None if thinking is None else thinking.budget
        self.thinking_tokens = self._spent = 0

    @property
    def must_close(self) -> bool:
        """Whether the thinking has used up its budget; true once."""
        thinking = self._thinking
        if thinking is None or thinking.over or not thinking.begun or self._budget is None:
            return False
        if self._spent < self._budget:
            return False
        self._budget = None
        return True

    @property
    def thinking_left(self) -> int | None:
        """Tokens until the budget of the thinking is used up; None: there is no such limit, or none any more."""
        if self._thinking is None or self._thinking.over or self._budget is None:
            return None
        return self._budget - self._spent

    def add(self, token: int) -> tuple[str, str | None]:
        """Add a token; return the text that is now certain, and the stop string that the token completed, or None."""
        piece, thinking = self._detokenizer.add(token), self._thinking
        if thinking is None or thinking.over:
            return self._stop_at(piece)
        self._spent += thinking.begun
        self.thinking_tokens += 1
        thought, piece = thinking.add(piece)
        if not thinking.begun and thinking.over:
            self.thinking_tokens = 0
        text, stop = self._stop_at(piece)
        return thought + text, stop

    def finish(self) -> tuple[str, str | None]:
        """Return the text that was held back, and a stop string in it, or None; no more tokens may be added."""
        piece, thought = self._detokenizer.rest(), ""
        if self._thinking is not None:
            thought, piece = self._thinking.add(piece)
            held, rest = self._thinking.rest()
            thought, piece = thought + held, rest + piece
        text, stop = self._stop_at(piece)
        return (thought + text, stop) if stop is not None else (thought + text + self._stops.rest(), None)

    def _stop_at(self, piece: str) -> tuple[str, str | None]:
        text, stop = self._stops.add(piece)
        return text + stop if stop is not None and self._include_stop else text, stop


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

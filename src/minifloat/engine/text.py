"""Turns tokens into text one by one, and finds stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minifloat.engine.detokenize import Detokenizer, TokenDecoder

if TYPE_CHECKING:
    from minifloat.model.runtime.tokenizer import TextTokenizer


class StopStrings:
    """Finds the first stop string in a text that comes in pieces, and holds back text that may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._held = ""

    def add(self, piece: str) -> tuple[str, str | None]:
        """Add a piece of text."""
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
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    return next(
        (length for length in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-length:])), 0
    )


class TextStream:
    """The text of one sequence."""

    def __init__(
        self,
        tokenizer: TextTokenizer | TokenDecoder,
        prompt: Sequence[int],
        stops: Sequence[str],
        include_stop: bool,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stops = StopStrings(stops)
        self._include_stop = include_stop

    def add(self, token: int) -> tuple[str, str | None]:
        """Add a token; return the text that is now certain, and the stop string that the token completed, or None."""
        return self._stop_at(self._detokenizer.add(token))

    def finish(self) -> tuple[str, str | None]:
        """Return the text that was held back, and a stop string in it, or None; no more tokens may be added."""
        text, stop = self._stop_at(self._detokenizer.rest())
        return (text, stop) if stop is not None else (text + self._stops.rest(), None)

    def _stop_at(self, piece: str) -> tuple[str, str | None]:
        text, stop = self._stops.add(piece)
        return text + stop if stop is not None and self._include_stop else text, stop

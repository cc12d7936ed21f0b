"""Tokens become text as they come, and end at a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from minifloat.serve.detokenize import Detokenizer


class StopStrings:
    """Finds the first stop string in a text that comes in pieces, and holds back what may begin one.

    Args:
        stops: Strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._held = ""

    def add(self, piece: str) -> tuple[str, str | None]:
        """Take more text.

        Returns:
            The text that is certain, and the stop string that ended it, or None. Where several begin at the same
            character the first of `stops` counts.
        """
        text = self._held + piece
        found = [(index, order) for order, stop in enumerate(self.stops) if (index := text.find(stop)) >= 0]
        if found:
            index, order = min(found)
            self._held = ""
            return text[:index], self.stops[order]
        held = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def rest(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that begins `stop`, without being all of it."""
    return next(
        (length for length in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-length:])), 0
    )


class TextStream:
    """The text of one sequence.

    Args:
        tokenizer: Decodes.
        prompt: Token ids before the first one of the output.
        stops: Stop strings.
        include_stop: Whether the stop string is part of the text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], stops: Sequence[str], include_stop: bool
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stops = StopStrings(stops)
        self._include_stop = include_stop

    def add(self, token: int) -> tuple[str, str | None]:
        """Take a token: the text that is certain with it, and the stop string that it completed, or None."""
        return self._stop_at(self._detokenizer.add(token))

    def finish(self) -> tuple[str, str | None]:
        """What still waits when no more tokens come; a stop string may be found even here."""
        text, stop = self._stop_at(self._detokenizer.rest())
        return (text, stop) if stop is not None else (text + self._stops.rest(), None)

    def _stop_at(self, piece: str) -> tuple[str, str | None]:
        text, stop = self._stops.add(piece)
        return text + stop if stop is not None and self._include_stop else text, stop

"""`ShortReport`: how a result shows itself in a notebook and at Python's prompt, in place of all its fields."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod


class ShortReport(ABC):
    """Base of the results of public functions. Their dataclasses leave `repr` to it (``repr=False``)."""

    @abstractmethod
    def headline(self) -> dict[str, str]:
        """Return what a reader wants to know first, by its name: at most eight short texts."""

    def __repr__(self) -> str:
        """Return one line: the class and the headline."""
        return f"{type(self).__name__}({', '.join(f'{name}: {text}' for name, text in self.headline().items())})"

    def _repr_html_(self) -> str:
        """Return a table of the headline, which notebooks show."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
            for name, text in self.headline().items()
        )
        return f"<table><caption>{html.escape(type(self).__name__)}</caption>{rows}</table>"

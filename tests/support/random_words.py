"""Text of random words, each of five letters."""

from __future__ import annotations

import random
from pathlib import Path


def write_words(folder: Path, seed: int = 0, letters: str = "abcdefghij", count: int = 400) -> Path:
    """Write a file of words into a folder, and return it."""
    file, words = folder / "words.txt", random.Random(seed)
    file.write_text(" ".join("".join(words.choices(letters, k=5)) for _ in range(count)))
    return file

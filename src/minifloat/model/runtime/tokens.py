"""Facts about single tokens: which of them end a text, and which bytes they stand for."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minifloat.model.runtime.tokenizer import TextTokenizer


def end_tokens(generation_config: Any, config: Any, tokenizer: TextTokenizer | None = None) -> frozenset[int]:
    """Return the tokens at which a model's texts end."""
    for owner in (generation_config, config.get_text_config(decoder=True), tokenizer):
        tokens = getattr(owner, "eos_token_id", None)
        if tokens is not None:
            return frozenset(token for token in ([tokens] if isinstance(tokens, int) else tokens) if token >= 0)
    return frozenset()


def token_bytes(tokenizer: TextTokenizer, token: int, text: str) -> bytes:
    """Return the bytes of a token; those of its text where the tokenizer's alphabet is not known."""
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if len(piece) == len("<0x00>") and piece.startswith("<0x") and piece.endswith(">"):  # SentencePiece's bytes
        return bytes([int(piece[3:5], 16)])
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text.encode()
    alphabet = _byte_alphabet()
    if all(character in alphabet for character in piece):
        return bytes(alphabet[character] for character in piece)
    return text.encode()


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character by which tokenizers of GPT-2's kind write bytes.

    A printable byte is written as itself; the others are written as the characters from U+0100 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}

"""Facts about single tokens: which of them end a text, and which bytes they are."""

from __future__ import annotations

import functools
from typing import Any

from transformers import PreTrainedTokenizerBase


def end_tokens(config: Any, generation_config: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens at which the model's texts end: its generation_config's, else its config's, else the tokenizer's."""
    for owner in (generation_config, config.get_text_config(), tokenizer):
        found = getattr(owner, "eos_token_id", None)
        if found is not None:
            return frozenset([found] if isinstance(found, int) else found)
    return frozenset()


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int, text: str) -> bytes:
    """The bytes of a token; those of its text where the tokenizer's alphabet is not known."""
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
    """What stands for each byte in tokenizers of GPT-2's kind: itself where it is printable, else from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}

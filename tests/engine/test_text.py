"""Text that comes in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minifloat.engine.text import Detokenizer, StopStrings, TextStream
from minifloat.model.runtime.tokenizer import load_tokenizer


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text(alphabet="ab", max_size=4), max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
)
def test_the_text_is_cut_at_the_first_stop_however_it_is_cut_into_pieces(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    # What is said depends on what came first in time: the shortest beginning of the text that holds a stop.
    ends = [end for end in range(len(whole) + 1) if any(stop in whole[:end] for stop in stops)]
    machine, said, found = StopStrings(stops), "", None
    for character in whole:
        text, found = machine.add(character)
        said += text
        if found is not None:
            break
    if not ends:
        assert found is None
        assert said + machine.rest() == whole
        return
    part = whole[: ends[0]]
    assert found is not None
    assert part.endswith(found)
    assert said == part[: min(part.index(stop) for stop in stops if stop in part)]


def test_text_that_may_begin_a_stop_string_is_held_back_and_released() -> None:
    machine = StopStrings(["END"])
    assert machine.add("the E") == ("the ", None)
    assert machine.add("N") == ("", None)
    assert machine.add("E") == ("EN", None)
    assert machine.add("ND now") == ("", "END")
    assert StopStrings([]).add("anything") == ("anything", None)


@pytest.mark.parametrize(
    "data",
    [
        "häuser, 漢字, 🙂🙂 and e\u0301".encode(),
        bytes([0xB1, 0xB2, 0xB3, 0xEB, 0x90, 0x9D, 0x41]),
        bytes([0xE2, 0x82, 0xE2, 0x82, 0xAC]),
        bytes(range(128, 256)) + "ä".encode(),
        bytes([0xF0, 0x9F, 0x99]),
    ],
)
def test_characters_come_whole_and_the_pieces_are_the_text(llama_folder: Path, data: bytes) -> None:
    tokenizer = load_tokenizer(llama_folder)
    alphabet = {bytes([byte]): token for byte, token in _byte_tokens(tokenizer).items()}
    tokens = [alphabet[bytes([byte])] for byte in data]
    stream = Detokenizer(tokenizer, tokenizer("x").input_ids)
    pieces = [stream.add(token) for token in tokens]
    whole = "".join(pieces) + stream.rest()
    assert whole == tokenizer.decode(tokens)


def _byte_tokens(tokenizer: object) -> dict[int, int]:
    from minifloat.model.runtime.tokenizer import _byte_alphabet

    return {byte: tokenizer.convert_tokens_to_ids(character) for character, byte in _byte_alphabet().items()}  # type: ignore[attr-defined]


def test_a_stop_string_may_be_found_only_when_no_more_tokens_come(llama_folder: Path) -> None:
    tokenizer = load_tokenizer(llama_folder)
    tokens = [_byte_tokens(tokenizer)[byte] for byte in b"ok" + bytes([0xC3])]
    stream = TextStream(tokenizer, [], ["\N{REPLACEMENT CHARACTER}"], include_stop=False)
    assert "".join(stream.add(token)[0] for token in tokens) == "ok"
    assert stream.finish() == ("", "\N{REPLACEMENT CHARACTER}")


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(llama_folder)
    monkeypatch.setattr(type(tokenizer), "decode", lambda self, ids, **_: "".join(f"<{token}>" for token in ids))
    stream = Detokenizer(tokenizer, [3])
    assert [stream.add(5), stream.add(6)] == ["<5>", "<6>"]

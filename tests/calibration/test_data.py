"""Calibration data: every kind of source, packing, mixing, determinism, streaming, and every error."""

from __future__ import annotations

import itertools
import json
import pathlib
import random
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from minifloat.calibration import data, readers
from minifloat.calibration.data import CalibrationSet, load_calibration_data
from minifloat.calibration.options import TextOptions
from minifloat.calibration.readers import Source
from minifloat.errors import DataError, StorageError, UnknownNameError

BOS, EOS = 256, 257
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def tokenizer(llama_folder: Path) -> Any:
    """A tokenizer with one token per byte and EOS, which adds no BOS and has no chat template."""
    from minifloat.model.runtime.tokenizer import load_tokenizer

    return load_tokenizer(llama_folder)


@pytest.fixture
def beginning_tokenizer(tokenizer: Any) -> Any:
    """A tokenizer with one token per byte that adds BOS at the start of each text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    assert tokenizer("a").input_ids[0] == BOS
    return tokenizer


def read(sources: Any, tokenizer: Any, **options: Any) -> CalibrationSet:
    return load_calibration_data(sources, tokenizer, TextOptions(**options))


def write(path: Path, content: str | bytes | list[Any]) -> str:
    """Write text, bytes, or a list as JSON lines; return the path."""
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def write_table(path: Path, rows: list[dict[str, Any]], group: int = 2) -> str:
    parquet = pytest.importorskip("pyarrow.parquet", reason="parquet comes with the extra eval")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group)
    return str(path)


def texts(loaded: CalibrationSet, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(sequence) for sequence in loaded.sequences]


def documents(source: Any, tokenizer: Any, samples: int, **options: Any) -> set[str]:
    """Return all documents of a source, after checking that there are exactly `samples` of them."""
    loaded = read(source, tokenizer, samples=samples, packing=False, **options)
    more = read(source, tokenizer, samples=samples + 1, packing=False, **options)
    assert sorted(more.sequences) == sorted(loaded.sequences)
    return set(texts(loaded, tokenizer))


# ------------------------------------------------------------------------------------------------- kinds of sources


TABLE = 'n{comma}text\n1{comma}"a{comma} ""b""\nc"\n\n2{comma}d\n'
ROWS = [{"id": 1, "text": "one\n\nstill one"}, {"id": 2, "text": "zwölf"}, {"text": None}, {"text": "  "}]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("blank lines.txt", "one\nmore\n\n \ntwo\r\n\r\nthree", {"one\nmore", "two", "three"}),
        (
            "marks.md",
            "one\n\nmore\n<|endoftext|>\ntwo<|endoftext|>three<|endoftext|>\n",
            {"one\n\nmore", "two", "three"},
        ),
        ("byte order mark.txt", b"\xef\xbb\xbfhello", {"hello"}),
        ("rows.jsonl", ROWS, {"one\n\nstill one", "zwölf"}),
        ("array.json#column=q", '[{"q": "a"},\n {"q": "b"}]', {"a", "b"}),
        ("lines.json#column=q", '\n{"q": "a"}\n\n{"q": "b"}\n', {"a", "b"}),
        ("quotes.csv", TABLE.format(comma=","), {'a, "b"\nc', "d"}),
        ("quotes.tsv", TABLE.format(comma="\t"), {'a\t "b"\nc', "d"}),
        ("capitals.TSV", TABLE.format(comma="\t"), {'a\t "b"\nc', "d"}),
    ],
)
def test_a_file_gives_its_documents(
    tmp_path: Path, tokenizer: Any, name: str, content: str | bytes | list[Any], expected: set[str]
) -> None:
    file, mark, options = name.partition("#")
    path = write(tmp_path / file, content)
    assert documents(f"{path}{mark}{options}", tokenizer, len(expected)) == expected


def test_a_text_file_without_blank_lines_or_marks_is_cut_at_line_ends(tmp_path: Path, tokenizer: Any) -> None:
    line = "x" * 999 + "\n"
    path = write(tmp_path / "a.txt", line * 40)
    loaded = read(path, tokenizer, samples=3, seq_len=10**6, packing=False)
    assert sorted(len(sequence) for sequence in loaded.sequences) == [5999, 16999, 16999]


def test_parquet_gives_text_and_chats(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE
    rows = [{"n": n, "text": f"t{n}", "messages": [{"role": "user", "content": f"m{n}"}]} for n in range(5)]
    path = write_table(tmp_path / "a.parquet", rows)
    assert documents(path, tokenizer, 5) == {f"t{n}" for n in range(5)}
    assert documents(f"{path}#column=messages", tokenizer, 5) == {f"[user]m{n}</s>" for n in range(5)}


def test_a_folder_gives_all_its_files_but_hidden_ones(tmp_path: Path, tokenizer: Any) -> None:
    write(tmp_path / "b.jsonl", [{"text": "two"}])
    write(tmp_path / "deep" / "a.txt", "one\n\nthree")
    write(tmp_path / ".cache" / "c.txt", "hidden")
    write(tmp_path / "readme.rst", "not a kind")
    assert documents(tmp_path, tokenizer, 3) == {"one", "two", "three"}


def test_chat_messages_go_through_the_chat_template(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT}, {"messages": []}])
    (sequence,) = read(path, tokenizer, samples=1, packing=False).sequences
    assert list(sequence) == tokenizer("[user]hi</s>[assistant]yes</s>", add_special_tokens=False).input_ids
    assert sequence.count(EOS) == 2


def test_a_data_set_of_the_hub_is_streamed(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the hub needs the extra eval")
    rows = [{"answer": f"row {n}", "chat": [{"role": "user", "content": str(n)}]} for n in range(9)]
    path = write(tmp_path / "a.jsonl", rows)
    load_local = datasets.load_dataset
    asked: list[Any] = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> Any:
        asked.append((name, config, split, streaming))
        return load_local("json", data_files=path, split="train", streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    tokenizer.chat_template = TEMPLATE
    loaded = read("some/set#config=main,split=test,column=answer", tokenizer, samples=9, packing=False)
    assert set(texts(loaded, tokenizer)) == {f"row {n}" for n in range(9)}
    (record,) = loaded.record["sources"]
    assert (record["kind"], record["config"], record["split"]) == ("hub", "main", "test")
    loaded = read("set#column=chat", tokenizer, samples=9, packing=False)
    assert set(texts(loaded, tokenizer)) == {f"[user]{n}</s>" for n in range(9)}
    assert asked == [("some/set", "main", "test", True), ("set", None, "train", True)]


def test_a_data_set_of_the_hub_is_read_no_farther_than_needed(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the hub needs the extra eval")
    endless = ({"text": f"row {n}"} for n in itertools.count())
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: endless)
    assert len(read("set", tokenizer, samples=5000, packing=False).sequences) == 5000
    assert next(endless) == {"text": "row 8192"}


# ------------------------------------------------------------------------------------------------- Source


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("a.txt", Source("a.txt")),
        ("C:\\x y\\a@2:0.txt", Source("C:\\x y\\a@2:0.txt")),
        ("gsm8k.jsonl#column=question,weight=2.5", Source("gsm8k.jsonl", column="question", weight=2.5)),
        ("o/n#config=main,split=train[:5%]", Source("o/n", config="main", split="train[:5%]")),
        ("c#.txt#", Source("c#.txt")),
        ("c#.txt#weight=3", Source("c#.txt", weight=3)),
        ("a.csv#column=x=y", Source("a.csv", column="x=y")),
    ],
)
def test_a_source_is_parsed(text: str, source: Source) -> None:
    assert Source.parse(text) == source


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs the path"),
        ("#weight=2", "needs the path"),
        ("a#question", "KEY=VALUE"),
        ("c#.txt", "ends with another #"),
        ("a#column=", "KEY=VALUE"),
        ("a#weight=1,weight=2", "each key once"),
        ("a#weight=heavy", "expected a number for weight"),
        ("a#weight=0", "above 0"),
        ("a#weight=nan", "above 0"),
        ("a#weight=inf", "above 0"),
    ],
)
def test_a_source_that_cannot_be_parsed_says_why(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Source.parse(text)


def test_an_unknown_option_lists_the_valid_ones() -> None:
    with pytest.raises(UnknownNameError, match="valid: column, weight, config, split"):
        Source.parse("a.txt#colum=x")


# ------------------------------------------------------------------------------------------------- sequences


def stream_of(loaded: CalibrationSet, skip: int = 0) -> list[int]:
    return [token for sequence in loaded.sequences for token in sequence[skip:]]


def split_at_eos(stream: list[int]) -> list[tuple[int, ...]]:
    """Return the documents in a stream, without the last one, which may be truncated."""
    ends = [index for index, token in enumerate(stream) if token == EOS]
    return [tuple(stream[a:b]) for a, b in itertools.pairwise([0, *(end + 1 for end in ends)])]


@pytest.mark.parametrize("seq_len", [2, 7, 33])
def test_packing_neither_loses_nor_repeats_a_token(tmp_path: Path, tokenizer: Any, seq_len: int) -> None:
    rng = random.Random(seq_len)
    rows = [f"{n}:" + "x" * rng.randrange(60) for n in range(30)]
    path = write(tmp_path / "a.txt", "\n\n".join(rows))
    expected = {(*tokenizer(row).input_ids, EOS) for row in rows}
    samples = sum(map(len, expected)) // seq_len
    loaded = read(path, tokenizer, samples=samples, seq_len=seq_len)
    assert {len(sequence) for sequence in loaded.sequences} == {seq_len}
    stream = stream_of(loaded)
    found = split_at_eos(stream)
    rest = tuple(stream[sum(map(len, found)) :])
    assert len(found) == len(set(found))
    missing = expected - set(found)
    assert set(found) <= expected
    assert sum(map(len, missing)) - len(rest) < seq_len
    assert not rest or any(document[: len(rest)] == rest for document in missing)


def test_packed_sequences_begin_with_bos_if_the_tokenizer_adds_bos(tmp_path: Path, beginning_tokenizer: Any) -> None:
    path = write(tmp_path / "a.txt", "abcdefgh")
    loaded = read(path, beginning_tokenizer, samples=3, seq_len=4)
    assert {sequence[0] for sequence in loaded.sequences} == {BOS}
    assert beginning_tokenizer.decode(stream_of(loaded, skip=1)) == "abcdefgh</s>"


def test_a_chat_template_that_writes_bos_does_not_double_it(tmp_path: Path, beginning_tokenizer: Any) -> None:
    beginning_tokenizer.chat_template = "<s>" + TEMPLATE
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT}])
    (sequence,) = read(path, beginning_tokenizer, samples=1, packing=False).sequences
    assert sequence[0] == BOS
    assert sequence.count(BOS) == 1


def test_a_document_that_ends_with_eos_gets_no_second_eos(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.txt", "ab</s>\n\nab")
    (sequence,) = read(path, tokenizer, samples=1, seq_len=6).sequences
    assert tokenizer.decode(sequence) == "ab</s>ab</s>"


def test_no_eos_is_added_to_a_chat(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE + "!"
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT[:1]}] * 2)
    (sequence,) = read(path, tokenizer, samples=1, seq_len=20).sequences
    assert tokenizer.decode(sequence) == "[user]hi</s>![user]hi</s>!"


def test_without_packing_each_sequence_is_one_truncated_document(tmp_path: Path, beginning_tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "abcdefgh"}, {"text": "xy"}])
    loaded = read(path, beginning_tokenizer, samples=2, seq_len=5, packing=False)
    assert sorted(texts(loaded, beginning_tokenizer)) == ["<s>abcd", "<s>xy"]
    assert loaded.tokens == 8


def test_no_sequence_is_padded(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.pad_token = "~"
    path = write(tmp_path / "a.jsonl", [{"text": "a" * n} for n in range(1, 20)])
    loaded = read(path, tokenizer, samples=19, packing=False)
    assert sorted(texts(loaded, tokenizer), key=len) == ["a" * n for n in range(1, 20)]


@pytest.mark.parametrize(
    ("weights", "samples", "counts"),
    [
        ((1, 1), 10, (5, 5)),
        ((3, 1), 10, (8, 2)),
        ((1, 1, 1), 10, (4, 3, 3)),
        ((0.7, 0.2, 0.1), 10, (7, 2, 1)),
        ((1.2, 2.8), 4, (1, 3)),
    ],
)
def test_sources_are_mixed_by_weight_and_not_by_length(
    tmp_path: Path, tokenizer: Any, weights: tuple[float, ...], samples: int, counts: tuple[int, ...]
) -> None:
    sources = [
        Source(write(tmp_path / f"{n}.txt", str(n) * 100 * 10**n), weight=weight) for n, weight in enumerate(weights)
    ]
    loaded = read(sources, tokenizer, samples=samples, seq_len=8)
    assert tuple(record["sequences"] for record in loaded.record["sources"]) == counts
    marks = [text[0] for text in texts(loaded, tokenizer)]
    assert tuple(marks.count(str(n)) for n in range(len(weights))) == counts


def test_sources_are_interleaved_evenly(tmp_path: Path, tokenizer: Any) -> None:
    sources = [write(tmp_path / f"{n}.txt", str(n) * 1000) for n in range(2)]
    loaded = read([f"{sources[0]}#weight=3", sources[1]], tokenizer, samples=16, seq_len=8)
    marks = "".join(text[0] for text in texts(loaded, tokenizer))
    assert [marks[start : start + 4].count("1") for start in range(0, 16, 4)] == [1, 1, 1, 1]


def test_a_source_whose_weight_gives_it_no_sequence_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    sources = [write(tmp_path / f"{n}.txt", "x" * 1000) for n in range(2)]
    with pytest.raises(DataError, match=r"1\.txt: its weight gives it none of 2 samples"):
        read([f"{sources[0]}#weight=99", sources[1]], tokenizer, samples=2, seq_len=8)


def test_equal_seeds_give_equal_sets_and_other_seeds_give_others(tmp_path: Path, tokenizer: Any) -> None:
    for n in range(5):
        write(tmp_path / f"{n}.jsonl", [{"text": f"file {n} row {row}"} for row in range(50)])

    def load(seed: int) -> CalibrationSet:
        return read([tmp_path, tmp_path], tokenizer, samples=20, seq_len=16, seed=seed)

    assert load(3) == load(3)
    assert load(3).sequences != load(4).sequences


def test_the_order_of_a_seed_never_changes(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": str(n)} for n in range(8)])
    loaded = read(path, tokenizer, samples=8, packing=False)
    assert "".join(texts(loaded, tokenizer)) == "72630415"


def test_the_blocks_of_a_large_file_are_shuffled_too(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_BLOCK_DOCUMENTS", 8)
    path = write(tmp_path / "a.jsonl", [{"text": chr(ord("a") + n)} for n in range(16)])
    loaded = "".join(texts(read(path, tokenizer, samples=16, packing=False), tokenizer))
    assert sorted(loaded[:8]) == list("abcdefgh") != list(loaded[:8])


# ------------------------------------------------------------------------------------------------- streaming


def test_a_large_file_is_read_no_farther_than_needed(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": f"{n} " + "x" * 100} for n in range(40_000)]
    path = write(tmp_path / "a.jsonl", rows)
    ends: list[int] = []
    opened = pathlib.Path.open

    def counting_open(self: Path, *arguments: Any, **options: Any) -> Any:
        file = opened(self, *arguments, **options)
        close = file.close

        class Counting:
            def __enter__(self) -> Any:
                return file

            def __exit__(self, *_: object) -> None:
                ends.append(file.tell())
                close()

        return Counting()

    monkeypatch.setattr(pathlib.Path, "open", counting_open)
    loaded = read(path, tokenizer, samples=8, seq_len=64)
    assert loaded.tokens == 512
    size = Path(path).stat().st_size
    assert len(ends) == 1
    assert 0 < ends[0] < 0.12 * size
    assert ends[0] == sum(len(json.dumps(row)) + 1 for row in rows[:4096])


def test_a_large_parquet_file_is_read_no_farther_than_needed(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"text": random.Random(n).randbytes(20).hex()} for n in range(12_000)]
    path = Path(write_table(tmp_path / "a.parquet", rows, group=2_000))
    content = bytearray(path.read_bytes())
    half, quarter = len(content) // 2, len(content) // 4
    content[half : half + quarter] = bytes(quarter)
    path.write_bytes(content)
    assert read(path, tokenizer, samples=2, seq_len=8).tokens == 16
    with pytest.raises(DataError, match="not a parquet file that can be read: Corrupt"):
        read(path, tokenizer, samples=12_000, packing=False)


def test_no_more_long_documents_are_read_than_the_character_limit_allows(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_BLOCK_CHARACTERS", 1000)
    path = write(tmp_path / "a.jsonl", b'{"text": "' + b"x" * 500 + b'"}\n' + b'{"text": "' + b"y" * 500 + b'"}\n\xff')
    assert read(path, tokenizer, samples=10, seq_len=100).tokens == 1000


# ------------------------------------------------------------------------------------------------- the record


def test_the_record_holds_the_sources_the_sizes_and_the_hashes(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", [{"q": "abc"}, {"q": "defg"}])
    loaded = read(f"{path}#column=q", tokenizer, samples=3, seq_len=3, seed=9)
    record = json.loads(json.dumps(loaded.record))
    assert record == loaded.record
    (source,) = record.pop("sources")
    assert len(source.pop("sha256")) == len(record.pop("sha256")) == len(record.pop("tokenizer")) == 64
    assert source == {
        "name": path,
        "kind": "jsonl",
        "column": "q",
        "weight": 1.0,
        "documents": 2,
        "sequences": 3,
        "tokens": 9,
    }
    assert record == {"sequences": 3, "tokens": 9, "seq_len": 3, "packing": True, "seed": 9}


def test_a_hash_of_a_source_depends_on_its_text_and_that_of_a_tokenizer_on_its_definition(
    tmp_path: Path, tokenizer: Any
) -> None:
    def load(name: str, text: str) -> dict[str, Any]:
        path = write(tmp_path / name, text)
        return dict(read(path, tokenizer, samples=1, seq_len=4, packing=False).record)

    first, same, other = load("a.txt", "abcdef"), load("b.txt", "abcdef"), load("c.txt", "abcdXX")
    assert first["sources"][0]["sha256"] == same["sources"][0]["sha256"] != other["sources"][0]["sha256"]
    assert first["sha256"] == other["sha256"], "the same tokens after the cut"
    tokenizer.add_tokens(["abc"])
    assert load("a.txt", "abcdef")["tokenizer"] != first["tokenizer"] == same["tokenizer"]


def test_a_set_is_split_into_two_that_share_no_sequence(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.txt", "\n\n".join(f"document {n}" for n in range(100)))
    loaded = read(path, tokenizer, samples=50, packing=False)
    rest, held_out = loaded.held_out(0.2)
    assert (len(rest.sequences), len(held_out.sequences)) == (40, 10)
    assert set(rest.sequences) | set(held_out.sequences) == set(loaded.sequences)
    assert [sequence for sequence in loaded.sequences if sequence in set(rest.sequences)] == list(rest.sequences)
    assert loaded.held_out(0.2) == (rest, held_out)
    assert held_out.record["tokens"] == held_out.tokens
    assert held_out.record["part"] == {"name": "held out", "fraction_held_out": 0.2}
    assert len({loaded.record["sha256"], rest.record["sha256"], held_out.record["sha256"]}) == 3


@pytest.mark.parametrize("fraction", [0, 1, -0.5, 0.99, float("nan")])
def test_a_split_with_an_empty_part_is_refused(fraction: float) -> None:
    with pytest.raises(DataError, match="cannot hold out"):
        CalibrationSet(((1,), (2,))).held_out(fraction)


# ------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "no text in it"),
        ("a.txt", b"\n\n  \n", "no text in it"),
        ("a.jsonl", b"", "no text in it"),
        ("a.jsonl", b'{"text": ""}\n', "no text in it"),
        ("a.json", b"[]", "no text in it"),
        ("a.csv", b"text\n", "no text in it"),
        ("a.txt", b"fine\n\n\xff", r"line 3: not UTF-8: byte 0xff at position 0"),
        ("a.jsonl", b'{"text": "\xe4"}', r"line 1: not UTF-8: byte 0xe4"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', "line 2: not JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1: not JSON"),
        ("a.jsonl", b"[1]", "line 1: expected a JSON object with named columns, found list"),
        ("a.jsonl", b'{"q": "x", "b": 1}', "line 1: no column 'text' and no 'messages'.*of: q, b"),
        ("a.jsonl", b'{"text": "x"}\n{"q": "x"}', "line 2: no column 'text'; columns: q"),
        ("a.jsonl", b'{"text": 5}', "line 1: expected text, or a list of chat messages.*int 5"),
        ("a.jsonl", b'{"text": ["x"]}', "line 1: expected text, or a list of chat messages.*list"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1: half a surrogate pair"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": "x"}]}', "no chat template"),
        ("a.json", b'[{"text": "x"}, 3]', "entry 2: expected a JSON object"),
        ("a.json", b'[{"text": "x"}', "not JSON"),
        ("a.csv", b"id,text\n1,x\n2\n", "line 3: 1 cells, where the first row names 2"),
        ("a.csv", b'text\n"' + b"x" * 200_000, "field larger"),
        ("a.log", b"x", r"a file that ends in one of \.txt"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(
    tmp_path: Path, tokenizer: Any, name: str, content: bytes, message: str
) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(DataError, match=f"(?s){name}.*{message}"):
        read(path, tokenizer, samples=1, seq_len=2)


def test_a_column_that_does_not_exist_lists_those_that_do(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.csv", "question,answer\nx,y\n")
    with pytest.raises(DataError, match="no column 'text'; columns: question, answer"):
        read(f"{path}#column=text", tokenizer)
    table = write_table(tmp_path / "a.parquet", [{"question": "x", "answer": "y"}])
    with pytest.raises(DataError, match="no column 'text'; columns: question, answer"):
        read(f"{table}#column=text", tokenizer)


def test_a_damaged_parquet_file_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    path = Path(write_table(tmp_path / "a.parquet", [{"text": "x" * 100}]))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"a\.parquet: not a parquet file"):
        read(path, tokenizer)


def test_options_that_do_not_fit_the_source_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.txt", "x")
    with pytest.raises(DataError, match="a text file has no columns"):
        read(f"{path}#column=text", tokenizer)
    with pytest.raises(DataError, match="config and split are for data sets of the hub"):
        read(f"{path}#split=train", tokenizer)


@pytest.mark.parametrize("name", ["missing.txt", "./missing", "/no/such/folder", "a/b/c", "x" * 200 + "?"])
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(tokenizer: Any, name: str) -> None:
    with pytest.raises(DataError, match=r"no such file or folder$"):
        read(name, tokenizer)


def test_a_text_passed_as_a_path_raises_a_storage_error(tokenizer: Any) -> None:
    with pytest.raises(StorageError, match="look it up"):
        read("once upon a time " * 1000, tokenizer)


def test_a_folder_without_text_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match="no file in this folder ends in one of"):
        read(tmp_path, tokenizer)


def test_a_line_without_end_is_refused_before_it_is_read_whole(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_LONGEST_LINE", 1 << 20)
    path = write(tmp_path / "a.txt", b"x" * (1 << 20) + b"y")
    with pytest.raises(DataError, match="line 1: longer than 1 MiB"):
        read(path, tokenizer)


def test_a_json_array_that_is_too_large_to_read_whole_is_refused(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_LONGEST_ARRAY", 10)
    path = write(tmp_path / "a.json", '[{"text": "x"}]')
    with pytest.raises(DataError, match=r"convert it to \.jsonl"):
        read(path, tokenizer)


def test_too_little_text_is_all_used_with_a_warning(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.txt", "x" * 99)
    few = read(path, tokenizer, samples=11, seq_len=10)
    assert len(few.sequences) == 10
    assert few.record["sources"][0]["sequences"] == 10
    warning = "a.txt: 10 sequences of 10 tokens, from 1 documents, where 11 were asked for: all of it is used"
    assert [message.endswith(warning) for message in caplog.messages] == [True]
    caplog.clear()
    assert few.sequences == read(path, tokenizer, samples=10, seq_len=10).sequences
    assert not caplog.messages


def test_text_shorter_than_a_sequence_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.txt", "x" * 20)
    with pytest.raises(DataError, match="less than one sequence of 99 tokens, from 1 documents: take shorter"):
        read(path, tokenizer, samples=11, seq_len=99)


def test_a_chat_template_that_raises_is_reported(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT}])
    with pytest.raises(DataError, match="line 1: the chat template refuses the messages: roles must alternate"):
        read(path, tokenizer)


def test_an_empty_list_of_sources_is_refused(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="at least one source"):
        read([], tokenizer)


def test_an_unreachable_hub_asks_for_a_local_file(tokenizer: Any) -> None:
    pytest.importorskip("datasets", reason="the hub needs the extra eval")
    with pytest.raises(DataError, match=r"(?s)^openai/gsm8k: no such file.*without network, give a file \(\.txt"):
        read("openai/gsm8k#config=main", tokenizer)


@pytest.mark.parametrize("kind", ["parquet", "hub"])
def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    name = write(tmp_path / "a.parquet", b"PAR1") if kind == "parquet" else "openai/gsm8k"
    with pytest.raises(DataError, match=r"pip install 'minifloat\[eval\]'"):
        read(name, tokenizer)


def test_files_of_text_need_no_library(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("datasets", "pyarrow", "pandas"):
        monkeypatch.setitem(sys.modules, module, None)
    write(tmp_path / "a.txt", "one")
    write(tmp_path / "b.jsonl", [{"text": "two"}])
    write(tmp_path / "c.json", '[{"text": "three"}]')
    write(tmp_path / "d.csv", "text\nfour\n")
    assert documents(tmp_path, tokenizer, 4) == {"one", "two", "three", "four"}

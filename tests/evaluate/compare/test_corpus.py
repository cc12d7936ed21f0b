"""Windows of text: every token is in one window, batches have one length, and sources are interleaved."""

import json
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from minifloat.errors import DataError, UsageError
from minifloat.evaluate.compare import corpus as corpus_module
from minifloat.evaluate.compare.corpus import Corpus

TEXT = "The quick brown fox jumps over the lazy dog; naïve café. " * 6


@pytest.fixture
def tokenizer(llama_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(llama_folder)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_every_token_of_a_text_is_in_one_window_in_order(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    corpus = Corpus([write(tmp_path / "fox.txt", TEXT)], tokenizer, 50)
    (text,) = corpus.texts
    ids = [token for window in text.windows for token in window.ids.tolist()]
    assert ids == tokenizer(TEXT, add_special_tokens=False).input_ids
    assert (text.documents, text.unit, text.tokens) == (1, "window", len(ids))
    assert [window.start for window in text.windows] == list(range(0, len(ids), 50))
    assert text.bytes_per_token == pytest.approx(len(TEXT.encode()) / len(ids))


def test_batches_hold_every_window_once_in_rows_of_one_length(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "_BATCH_TOKENS", 64)
    rows = [{"text": "abcdefghij"[: 2 + n % 5] * 3} for n in range(40)]
    table = write(tmp_path / "rows.jsonl", "\n".join(map(json.dumps, rows)))
    corpus = Corpus([table, write(tmp_path / "fox.txt", TEXT)], tokenizer, 32)
    batches = corpus.batches
    seen = Counter((batch.text, index) for batch in batches for index in batch.windows)
    assert set(seen.values()) == {1}
    assert len(seen) == sum(len(text.windows) for text in corpus.texts)
    for batch in batches:
        assert batch.ids.shape[0] == len(batch.windows) == len(batch.units)
        for row, index in zip(batch.ids.tolist(), batch.windows, strict=True):
            assert row == corpus.texts[batch.text].windows[index].ids.tolist()
    assert sum(batch.tokens for batch in batches) == corpus.tokens
    half = [batch.text for batch in batches[: len(batches) // 2]]
    assert {0, 1} == set(half)  # an interrupted run has seen of both


def test_units_are_documents_where_there_are_many_and_windows_where_there_are_few(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    many = write(tmp_path / "many.jsonl", "\n".join(json.dumps({"text": TEXT}) for _ in range(15)))
    few = write(tmp_path / "few.txt", f"{TEXT}<|endoftext|>{TEXT}")
    corpus = Corpus([many, few], tokenizer, 50)
    assert [(text.documents, text.unit) for text in corpus.texts] == [(15, "document"), (2, "window")]
    units = [{int(unit) for b in corpus.batches if b.text == n for unit in b.units} for n in (0, 1)]
    assert (len(units[0]), len(units[1])) == (15, len(corpus.texts[1].windows))
    assert not units[0] & units[1]


def test_a_window_of_one_token_is_left_out(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    corpus = Corpus([write(tmp_path / "t.txt", "abcdefghi")], tokenizer, 4)
    assert [len(window.ids) for window in corpus.texts[0].windows] == [4, 4]


def test_max_tokens_limits_each_text(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = write(tmp_path / "rows.jsonl", "\n".join(json.dumps({"text": "abcdefghij"}) for _ in range(9)))
    corpus = Corpus([rows], tokenizer, 32, max_tokens=25)
    assert [len(window.ids) for window in corpus.texts[0].windows] == [10, 10, 5]
    assert corpus.texts[0].documents == 3


def test_without_a_source_the_texts_that_come_with_minifloat_are_used(tokenizer: PreTrainedTokenizerBase) -> None:
    corpus = Corpus([], tokenizer, 128)
    assert [text.name for text in corpus.texts] == ["stories", "prose"]
    assert all(text.tokens > 10_000 for text in corpus.texts)  # a token is a byte here


def test_the_same_text_gives_the_same_batches(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write(tmp_path / "fox.txt", TEXT)
    first, second = (Corpus([path], tokenizer, 16).batches for _ in range(2))
    assert [batch.windows for batch in first] == [batch.windows for batch in second]


@pytest.mark.parametrize(("text", "message"), [("", "0 tokens; at least 2"), ("a", "1 tokens; at least 2")])
def test_a_text_without_a_token_to_predict_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, text: str, message: str
) -> None:
    with pytest.raises(UsageError, match=rf"t\.txt: {message}"):
        Corpus([write(tmp_path / "t.txt", text)], tokenizer, 32)


def test_sources_and_windows_that_cannot_be_used_are_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write(tmp_path / "t.txt", TEXT)
    with pytest.raises(UsageError, match="at least 2 tokens, got 1"):
        Corpus([path], tokenizer, 1)
    with pytest.raises(UsageError, match="beyond the vocabulary of 100"):
        Corpus([path], tokenizer, 32, vocab_size=100)
    with pytest.raises(UsageError, match="two sources of the same name"):
        Corpus([path, path], tokenizer, 32)
    with pytest.raises(DataError, match="no such file"):
        Corpus([tmp_path / "absent.txt"], tokenizer, 32)
    (tmp_path / "latin.txt").write_bytes("Zürich".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.txt: not UTF-8"):
        Corpus([tmp_path / "latin.txt"], tokenizer, 32)

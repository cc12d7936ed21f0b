"""Vectors, rankings and scores through sockets, with openai's client and the real engine."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from embedding_models import PAIRS, change_config, embedding_model, logits_after
from openai.types import CreateEmbeddingResponse
from serving import MODEL, Client, running, wait_for
from transformers import AutoTokenizer

from minifloat.engine import Engine, EngineOptions

OPTIONS = EngineOptions(dtype="float32", kv_cache_memory=8 << 20, max_num_seqs=4)
TEXTS = ["a", "hello world", "something longer than the others"]


@pytest.fixture(scope="module")
def source(make_qwen3: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = make_qwen3(tmp_path_factory.mktemp("vectors") / "qwen3", dtype="float32")
    return folder


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return change_config(
        embedding_model(source, tmp_path_factory.mktemp("vectors") / "m"), matryoshka_dimensions=[16, 32]
    )


@pytest.fixture(scope="module")
def embedding(folder: Path) -> Iterator[Client]:
    with running(Engine(folder, OPTIONS), max_queue=2) as client:
        yield client


@pytest.fixture(scope="module")
def expected(folder: Path) -> torch.Tensor:
    return Engine(folder, OPTIONS).embed(TEXTS)


@pytest.fixture(scope="module")
def scoring(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Path]]:
    copy = tmp_path_factory.mktemp("vectors") / "scoring"
    copy.mkdir()
    for file in source.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    change_config(copy, classifier_from_token=["n", "y"])
    (copy / "chat_template.jinja").write_text(PAIRS)
    with running(Engine(copy, OPTIONS)) as client:
        yield client, source


def ask(client: Client, path: str = "/v1/embeddings", **fields: Any) -> Any:
    return client.post(path, {"model": MODEL} | fields)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare vectors but for the rounding of sums, whose order depends on what else is in a step."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)


def vectors_of(answer: CreateEmbeddingResponse) -> torch.Tensor:
    return torch.tensor([item.embedding for item in answer.data])


@pytest.mark.parametrize("format", ["float", "base64", None])
def test_openai_gets_the_vectors_of_the_engine(embedding: Client, expected: torch.Tensor, format: Any) -> None:
    with openai.OpenAI(base_url=f"{embedding.url}/v1", api_key="none", max_retries=0) as sdk:
        answer = sdk.embeddings.create(
            model=MODEL, input=TEXTS, **({} if format is None else {"encoding_format": format})
        )
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, TEXTS))
    if format == "base64":
        decoded = [np.frombuffer(base64.b64decode(str(item.embedding)), "<f4") for item in answer.data]
        close(torch.from_numpy(np.stack(decoded)), expected)
    else:
        CreateEmbeddingResponse.model_validate(answer.model_dump(), strict=True)
        close(vectors_of(answer), expected)


@pytest.mark.parametrize("form", ["text", "tokens", "lists of tokens"])
def test_an_input_is_a_text_or_tokens_or_a_list_of_either(
    embedding: Client, folder: Path, expected: torch.Tensor, form: str
) -> None:
    tokens = AutoTokenizer.from_pretrained(folder)(TEXTS[1]).input_ids
    given = {"text": TEXTS[1], "tokens": tokens, "lists of tokens": [tokens]}[form]
    (item,) = ask(embedding, input=given).json["data"]
    close(torch.tensor(item["embedding"]), expected[1])


@pytest.mark.parametrize("dimensions", [16, 64])
def test_vectors_are_cut_where_the_config_allows_it(embedding: Client, expected: torch.Tensor, dimensions: int) -> None:
    (item,) = ask(embedding, input=TEXTS[1], dimensions=dimensions).json["data"]
    cut = expected[1][:dimensions]
    close(torch.tensor(item["embedding"]), cut / cut.norm())


def test_more_texts_than_the_queue_holds_come_group_by_group(embedding: Client) -> None:
    texts = [f"text {number}" for number in range(40)]
    data = ask(embedding, input=texts).json["data"]
    (last,) = ask(embedding, input=texts[-1]).json["data"]
    assert [item["index"] for item in data] == list(range(40))
    assert data[-1]["embedding"] == pytest.approx(last["embedding"], abs=1e-6)
    assert embedding.idle()


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"input": []}, "input", "1 to 2048"),
        ({"input": [[]]}, "input", "1 to 2048"),
        ({"input": ["x"] * 2049}, "input", "1 to 2048"),
        ({"input": "x" * 129}, "input", "context of 128"),
        ({"input": [288]}, "input", "288 tokens"),
        ({"input": "\ud800"}, "input", "surrogate"),
        ({"input": "x", "dimensions": 17}, "dimensions", "16, 32, 64"),
        ({"input": "x", "dimensions": 0}, "dimensions", "greater"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "float"),
        ({"input": "x", "truncate": True}, "truncate", "unknown field"),
    ],
)
def test_an_invalid_field_is_a_400_that_names_the_field(
    embedding: Client, fields: dict[str, Any], param: str, word: str
) -> None:
    answer = ask(embedding, **fields)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert word in answer.error["message"]


def test_texts_have_a_bound_on_all_their_tokens(embedding: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minifloat.serve.api.vectors.MAX_INPUT_TOKENS", 10)
    assert ask(embedding, input=["x" * 5] * 2).status == 200
    assert "more than 10 tokens" in ask(embedding, input=["x" * 5, "x" * 6]).error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    ],
)
def test_a_model_that_embeds_generates_nothing(embedding: Client, path: str, body: dict[str, Any]) -> None:
    answer = ask(embedding, path, **body)
    assert answer.status == 400
    assert "makes vectors of texts and generates none" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/rerank", {"query": "x", "documents": ["x"]}),
        ("/v1/score", {"text_1": "x", "text_2": "x"}),
    ],
)
def test_a_model_that_generates_embeds_nothing(client: Client, path: str, body: dict[str, Any]) -> None:
    answer = ask(client, path, **body)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "model", "unsupported_task")
    assert "generates text" in answer.error["message"]
    assert ask(client, path, **body | {"model": "other"}).status == 404


def test_a_model_that_scores_makes_no_vectors(scoring: tuple[Client, Path]) -> None:
    answer = ask(scoring[0], input="x")
    assert (answer.status, answer.error["code"]) == (400, "unsupported_task")
    assert scoring[0].get("/v1/models").json["data"][0]["task"] == "score"


def probability(source: Path, query: str, document: str) -> float:
    """Return the score of a pair by transformers, for the tokens and the template of `scoring`."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    logits = logits_after(source, tuple(tokenizer(f"Judge.\n{query}|{document}?", add_special_tokens=False).input_ids))
    yes, no = (tokenizer.convert_tokens_to_ids(name) for name in "yn")
    return float((logits[yes] - logits[no]).sigmoid())


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_are_ranked_by_their_scores(scoring: tuple[Client, Path], path: str) -> None:
    client, source = scoring
    answer = ask(client, path, query="what", documents=["one", {"text": "</s>two"}, "three"]).json
    scores = [probability(source, "what", text) for text in ("one", "three")]
    found = {entry["index"]: entry["relevance_score"] for entry in answer["results"]}
    assert [found[0], found[2]] == pytest.approx(scores, abs=1e-5)
    assert found[1] != pytest.approx(probability(source, "what", "</s>two"), abs=1e-6)  # no control token, but text
    assert sorted(found.values(), reverse=True) == [entry["relevance_score"] for entry in answer["results"]]
    assert {entry["document"]["text"] for entry in answer["results"]} == {"one", "</s>two", "three"}
    best = ask(client, path, query="what", documents=["one", "three"], top_n=1, return_documents=False).json["results"]
    assert best == [{"index": int(scores[1] > scores[0]), "relevance_score": pytest.approx(max(scores), abs=1e-5)}]


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_pairs_are_scored_one_with_many_or_each_with_its_own(scoring: tuple[Client, Path], names: Any) -> None:
    client, source = scoring
    for first, second in (("a", "b"), ("a", ["b", "c"]), (["a", "d"], ["b", "c"])):
        data = ask(client, "/v1/score", **dict(zip(names, (first, second), strict=True))).json["data"]
        seconds = [second] if isinstance(second, str) else second
        firsts = first if isinstance(first, list) else [first] * len(seconds)
        expected = [probability(source, *pair) for pair in zip(firsts, seconds, strict=True)]
        assert [item["score"] for item in data] == pytest.approx(expected, abs=1e-5)
    refused = ask(client, "/score", **dict(zip(names, (["a", "b", "c"], ["b", "c"]), strict=True)))
    assert (refused.status, refused.error["param"]) == (400, "text_1")


def test_a_model_that_embeds_scores_by_the_angle(embedding: Client, expected: torch.Tensor) -> None:
    cosines = (expected @ expected[1]).tolist()
    ranked = ask(embedding, "/v1/rerank", query=TEXTS[1], documents=TEXTS).json["results"]
    assert {entry["index"]: entry["relevance_score"] for entry in ranked} == pytest.approx(
        dict(enumerate(cosines)), abs=1e-5
    )
    assert ranked[0]["index"] == 1
    data = ask(embedding, "/v1/score", text_1=TEXTS, text_2=[TEXTS[1]] * 3).json["data"]
    assert [item["score"] for item in data] == pytest.approx(cosines, abs=1e-5)


def test_a_query_is_not_multiplied_by_documents_without_a_bound(
    scoring: tuple[Client, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minifloat.serve.api.rerank.MAX_INPUT_CHARACTERS", 100)
    client, _ = scoring
    assert ask(client, "/v1/rerank", query="x" * 10, documents=["y" * 10] * 5).status == 200
    refused = ask(client, "/v1/rerank", query="x" * 19, documents=["y"] * 6)
    assert (refused.status, refused.error["param"]) == (400, "documents")


def test_a_client_that_leaves_cancels_its_texts(folder: Path) -> None:
    engine = Engine(folder, OPTIONS)
    step, released = engine.step, threading.Event()
    engine.step = lambda: step() if released.wait(0.001) else []  # type: ignore[method-assign]
    with running(engine) as client:
        connection = client.connect()
        body = b'{"model": "%s", "input": ["a", "b"]}' % MODEL.encode()
        lines = (b"POST /v1/embeddings HTTP/1.1", b"Host: localhost", b"Content-Type: application/json")
        connection.sendall(b"\r\n".join((*lines, b"Content-Length: %d" % len(body), b"", b"")) + body)
        assert wait_for(lambda: client.engine.waiting == 2)
        connection.close()
        assert wait_for(lambda: client.engine.waiting == 0)
        released.set()
    assert not engine.has_work

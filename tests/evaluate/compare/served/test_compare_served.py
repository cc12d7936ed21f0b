"""`compare_served`: our server and imitated ones, right and wrong."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from comparing import compare_models, compare_served
from safetensors.torch import load_file, save_file
from serving import running

from minifloat.commands.main import main
from minifloat.engine import Engine, EngineOptions
from minifloat.errors import UsageError
from minifloat.evaluate.compare.document import document
from minifloat.evaluate.compare.verdict import Outcome
from minifloat.model.runtime.tokenizer import load_tokenizer
from minifloat.quantize.job import quantize_checkpoint
from minifloat.report import html
from minifloat.serve.client import ServerError

MakeModel = Callable[..., Path]
TEXT = "The quick brown fox jumps over the lazy dog; naïve café. " * 12
NO_TOLERANCE = {"window": 32, "dtype": "float32"}


@pytest.fixture(scope="module")
def model(make_llama: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights large enough that some tokens are much more probable than others."""
    return make_llama(tmp_path_factory.mktemp("served") / "llama", initializer_range=0.3)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "fox.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    with running(Engine(folder, EngineOptions(dtype="float32", max_model_len=128))) as client:
        yield client.url


def test_the_same_model_passes_and_its_perplexity_is_that_of_the_model(model: Path, text: Path) -> None:
    with serving(model) as url:
        result = compare_served(model, url, [text], **NO_TOLERANCE)
    (candidate,) = result.candidates
    alone = compare_models(model, model, [text], prompts=0, **NO_TOLERANCE).candidates[0].overall
    assert result.outcome is Outcome.PASSED
    assert candidate.overall.candidate_perplexity == pytest.approx(alone.candidate_perplexity, rel=1e-5)
    assert candidate.overall.tokens == alone.tokens
    assert candidate.overall.kl_mean.value < 1e-5
    assert candidate.overall.same_top1.value == 1.0
    served = candidate.model.served
    assert served is not None
    assert served.alternatives == 20
    assert 0 < served.unnamed_share < 1


def test_the_numbers_of_a_quantized_model_are_those_of_the_loaded_one(
    make_llama: MakeModel, text: Path, tmp_path: Path
) -> None:
    folder = make_llama(tmp_path / "m", initializer_range=0.3, hidden_size=64)
    quantize_checkpoint(folder, tmp_path / "q", "mxfp8")
    with serving(tmp_path / "q") as url:
        served = compare_served(folder, url, [text], **NO_TOLERANCE).candidates[0].overall
    loaded = compare_models(folder, tmp_path / "q", [text], prompts=0, **NO_TOLERANCE).candidates[0].overall
    assert served.perplexity_ratio.value == pytest.approx(loaded.perplexity_ratio.value, abs=1e-4)
    assert served.same_top1.value == pytest.approx(loaded.same_top1.value, abs=0.02)
    assert 0 < served.kl_mean.value <= loaded.kl_mean.value + 1e-6


def test_scales_that_are_wrong_in_one_layer_fail(model: Path, text: Path, tmp_path: Path) -> None:
    quantize_checkpoint(model, tmp_path / "q", "fp8")
    shutil.copytree(tmp_path / "q", tmp_path / "wrong")
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight_scale"] *= 1.5
    save_file(tensors, tmp_path / "wrong" / "model.safetensors", metadata={"format": "pt"})
    outcomes = {}
    for name in ("q", "wrong"):
        with serving(tmp_path / name) as url:
            arguments = ["compare", str(model), "--served", url, "--data", str(text), "--dtype", "float32"]
            arguments += ["--window", "32", "--max-ppl-increase", "10%", "--min-top1", "75%", "--max-kl", "0.1"]
            outcomes[name] = CliRunner().invoke(main, [*arguments, "--report", str(tmp_path / f"{name}.html")])
    assert outcomes["q"].exit_code == 0, outcomes["q"].output
    assert outcomes["wrong"].exit_code == 1, outcomes["wrong"].output
    assert "every KL divergence is a lower bound" in outcomes["q"].output
    assert "lower bound" in (tmp_path / "wrong.html").read_text(encoding="utf-8")


def test_another_model_is_told_by_its_tokenizer(model: Path, text: Path, make_llama: MakeModel, tmp_path: Path) -> None:
    other = make_llama(tmp_path / "other", initializer_range=0.3)
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.__getitem__)[40:42]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    vocab["e"], vocab["o"] = vocab["o"], vocab["e"]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    with serving(other) as url, pytest.raises(UsageError, match="cuts text into other tokens than the baseline: from"):
        compare_served(model, url, [text], **NO_TOLERANCE)


def test_a_page_is_written_without_a_size(model: Path, text: Path) -> None:
    with serving(model) as url:
        page = html.write(document(compare_served(model, url, [text], **NO_TOLERANCE)))
    assert "weights of unknown size" in page


# ------------------------------------------------------------------------------------------------- imitated servers


class Imitation:
    """A server whose answers a function makes of the bodies of requests."""

    def __init__(self, complete: Callable[[dict[str, Any]], tuple[int, Any]], context: int | None = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        imitation = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._answer(200, {"data": [{"id": "m"} | ({"max_model_len": context} if context else {})]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path != "/v1/completions":
                    return self._answer(404, {})
                imitation.bodies.append(body)
                return self._answer(*complete(body))

            def _answer(self, status: int, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Imitation:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def uniform(body: dict[str, Any], name: Callable[[int], str] = "token_id:{}".format) -> dict[str, Any]:
    """An answer in which all tokens have the probability 1/e."""
    names = [name(token) for token in body["prompt"]]
    tops = [None, *({token: -1.0} for token in names[1:])]
    logprobs = {"tokens": [*names, "x"], "token_logprobs": [None, *[-1.0] * (len(names) - 1), -1.0]}
    return {"choices": [{"logprobs": logprobs | {"top_logprobs": [*tops, {"x": -1.0}]}}]}


def test_a_server_that_allows_five_alternatives_is_asked_for_five(model: Path, text: Path) -> None:
    def complete(body: dict[str, Any]) -> tuple[int, Any]:
        if body["logprobs"] > 5:
            return 400, {"error": {"message": "logprobs must be at most 5"}}
        return 200, uniform(body)

    with Imitation(complete) as server:
        result = compare_served(model, server.url, [text], **NO_TOLERANCE)
    served = result.candidates[0].model.served
    assert served is not None
    assert served.alternatives == 5
    assert result.candidates[0].overall.candidate_perplexity == pytest.approx(2.718281828)
    assert all(body["logprobs"] == 5 for body in server.bodies[1:])


def test_windows_leave_room_for_a_token_in_the_context_of_the_server(model: Path, text: Path) -> None:
    with Imitation(lambda body: (200, uniform(body)), context=24) as server:
        compare_served(model, server.url, [text], max_tokens=100)
    assert max(len(body["prompt"]) for body in server.bodies) == 23
    with (
        Imitation(lambda body: (200, uniform(body)), context=24) as server,
        pytest.raises(UsageError, match="a window of 24 tokens is longer than the 23"),
    ):
        compare_served(model, server.url, [text], max_tokens=100, window=24)


def test_a_server_that_names_tokens_by_their_text_is_understood(model: Path, text: Path) -> None:
    tokenizer = load_tokenizer(model)
    with Imitation(lambda body: (200, uniform(body, lambda token: str(tokenizer.decode([token]))))) as server:
        result = compare_served(model, server.url, [text], **NO_TOLERANCE)
    assert result.candidates[0].overall.candidate_perplexity == pytest.approx(2.718281828)


def without_logprobs(body: dict[str, Any]) -> tuple[int, Any]:
    return 200, {"choices": [{"text": "x", "logprobs": None}]}


def without_echo(body: dict[str, Any]) -> tuple[int, Any]:
    return 200, {"choices": [{"logprobs": {"tokens": ["x"], "token_logprobs": [-1.0], "top_logprobs": [{}]}}]}


def refused(body: dict[str, Any]) -> tuple[int, Any]:
    return 422, {"error": {"message": "prompt: a string is expected"}}


def other_tokens(body: dict[str, Any]) -> tuple[int, Any]:
    return 200, uniform(body | {"prompt": [token + 1 for token in body["prompt"]]})


def impossible(body: dict[str, Any]) -> tuple[int, Any]:
    answer = uniform(body)
    answer["choices"][0]["logprobs"]["token_logprobs"][1] = 0.5
    return 200, answer


@pytest.mark.parametrize(
    ("complete", "message"),
    [
        (without_logprobs, "gives no log-probabilities of prompts.*minifloat, vLLM and SGLang do"),
        (without_echo, "came back with log-probabilities of 1: the server drops tokens, or leaves the prompt out"),
        (refused, "gives no log-probabilities of prompts.*422: prompt: a string is expected"),
        (other_tokens, "the server has another tokenizer, or adds tokens to prompts"),
        (impossible, "0.5 as the logarithm of a probability"),
    ],
)
def test_what_cannot_be_judged_says_why(
    complete: Callable[[dict[str, Any]], tuple[int, Any]], message: str, model: Path, text: Path
) -> None:
    with Imitation(complete) as server, pytest.raises(UsageError, match=message):
        compare_served(model, server.url, [text], **NO_TOLERANCE)


def test_a_server_that_is_not_there_or_has_no_such_model_is_named(model: Path, text: Path) -> None:
    with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:9"):
        compare_served(model, "http://127.0.0.1:9", [text])
    with serving(model) as url, pytest.raises(ServerError, match="404"):
        compare_served(model, url, [text], model="another", **NO_TOLERANCE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MODEL"], "name CANDIDATES, or the address of a server with --served"),
        (["MODEL", "MODEL", "--served", "http://x"], "name CANDIDATES, or the address of a server with --served"),
        (["MODEL", "--served", "http://x", "--lm-head", "fp8"], "--lm-head is about models that are loaded here"),
        (["MODEL", "--served", "ftp://x"], "expected a URL such as"),
    ],
)
def test_options_that_contradict_are_refused(arguments: list[str], message: str, model: Path) -> None:
    words = [str(model) if word == "MODEL" else word for word in arguments]
    result = CliRunner().invoke(main, ["compare", *words])
    assert result.exit_code == 2
    assert message in result.output

"""lm-evaluation-harness over the served API, against `compare --tasks` in this process.

Both compute in float32, where greedy texts do not depend on the other requests of a batch: the scores must be equal,
item by item. Log-likelihoods, which the harness requests as prompt log-probabilities, are equal up to the order of
float32 sums.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from served import Served, served
from tools import environment, python_of
from vllm_cases import STORIES, STORYBOOK

from minifloat.evaluate.compare.tasks import Tasks
from minifloat.evaluate.compare.transformers_model import TransformersModel
from minifloat.model.runtime.load import LoadOptions
from minifloat.model.runtime.tokenizer import load_tokenizer
from minifloat.quantize.job import quantize_checkpoint

pytestmark = pytest.mark.timeout(1200)

ITEMS, CONTEXT_WORDS = 60, 24
#: A task: the next word of a story, which a model trained on stories predicts in part of the cases.
_TASK = """
task: next_word
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{word}}}}"
generation_kwargs: {{until: ["\\n", "."], max_gen_toks: 6, temperature: 0, do_sample: false}}
filter_list:
  - {{name: word, filter: [{{function: regex, regex_pattern: "([A-Za-z']+)"}}, {{function: take_first}}]}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
#: Tasks: the log-likelihood of that word and whether it is the most probable one, and the log-likelihood of the texts.
_PROBABILITY = """
task: next_word_probability
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: loglikelihood
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_target: " {{{{word}}}}"
metric_list:
  - {{metric: perplexity, aggregation: perplexity, higher_is_better: false}}
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""
_WHOLE = """
task: whole_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - {{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}}
"""
_TASKS = {"next_word": _TASK, "next_word_probability": _PROBABILITY, "whole_text": _WHOLE}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    words = re.findall(r"\S+", STORIES.read_text())
    rows = [
        {"text": " ".join(words[at : at + CONTEXT_WORDS]), "word": re.sub(r"[^A-Za-z']", "", words[at + CONTEXT_WORDS])}
        for at in range(0, ITEMS * 50, 50)
    ]
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in _TASKS.items():
        (folder / f"{name}.yaml").write_text(task.format(data=folder / "items.jsonl"))
    return folder


@pytest.fixture(scope="module", params=["bf16", "fp8", "mxfp4"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "bf16":
        return STORYBOOK
    made = tmp_path_factory.mktemp("checkpoints") / request.param
    quantize_checkpoint(STORYBOOK, made, request.param)
    return made


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[Served]:
    with served(folder, tmp_path / "log", "--dtype", "float32") as running:
        yield running


def test_scores_over_the_api_are_those_of_compare(server: Served, folder: Path, tasks: Path, tmp_path: Path) -> None:
    results, samples = harness(server, folder, tasks, tmp_path, "next_word")
    here, items = in_process(folder, tasks, "next_word")
    assert 0 < here["exact_match,word"] < 1, "a score that a wrong answer could change"
    assert [sample["exact_match"] for sample in samples] == [item["exact_match"] for item in items]
    assert results["exact_match,word"] == here["exact_match,word"]
    assert results["exact_match_stderr,word"] == pytest.approx(here["exact_match_stderr,word"], rel=1e-6)


def test_log_likelihoods_over_the_api_are_those_of_compare(
    server: Served, folder: Path, tasks: Path, tmp_path: Path
) -> None:
    results, samples = harness(server, folder, tasks, tmp_path, "next_word_probability", "--batch_size", "8")
    here, items = in_process(folder, tasks, "next_word_probability")
    assert 0 < here["acc,none"] < 1, "a score that a wrong answer could change"
    assert [sample["acc"] for sample in samples] == [item["acc"] for item in items]
    assert results["acc,none"] == here["acc,none"]
    assert [s["perplexity"] for s in samples] == pytest.approx([item["perplexity"] for item in items], abs=1e-3)
    results, samples = harness(server, folder, tasks, tmp_path, "whole_text")
    here, items = in_process(folder, tasks, "whole_text")
    assert results["bits_per_byte,none"] == pytest.approx(here["bits_per_byte,none"], rel=1e-5)
    found, expected = ([number for s in side for number in s["bits_per_byte"]] for side in (samples, items))
    assert found == pytest.approx(expected, rel=1e-5)


def in_process(folder: Path, tasks: Path, name: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return the results and items of `compare --tasks`."""
    model = TransformersModel.of(folder, LoadOptions(dtype=torch.float32, lm_head="auto"))
    run = Tasks([name], tasks).run(model, load_tokenizer(folder))
    return run["results"][name], run["samples"][name]


def harness(
    server: Served, folder: Path, tasks: Path, out: Path, task: str, *options: str
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Run `lm_eval` as users do; return its results and its items in order."""
    address = f"model=served,base_url={server.url}/v1/completions,tokenizer={folder},num_concurrent=4,max_retries=1"
    command = [python_of("lm-eval"), "-m", "lm_eval", "--model", "local-completions", "--model_args", address]
    command += ["--tasks", task, "--include_path", str(tasks), "--output_path", str(out), "--log_samples", *options]
    cache = {"HF_DATASETS_CACHE": str(out / "cache"), "HF_DATASETS_OFFLINE": "1"}
    run = subprocess.run(command, env=environment(**cache), cwd=out, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    written = max(out.rglob("results_*.json"))  # the names end with the time
    (items,) = out.rglob(f"samples_{task}_2*.jsonl")
    samples = [json.loads(line) for line in items.read_text().splitlines()]
    return json.loads(written.read_text())["results"][task], sorted(samples, key=lambda sample: sample["doc_id"])

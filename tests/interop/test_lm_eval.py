"""lm-evaluation-harness over the served API, held to the run of `compare --tasks` in this process.

Both compute in float32, where greedy texts do not depend on who else is in a batch: the scores must be equal, item by
item. Tasks of log-likelihoods need those of the prompt, which our server does not give and refuses by name.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from served import Served, served
from tools import environment, python_of
from vllm_cases import STORIES, STORYBOOK

from minifloat.compare.tasks import run_tasks
from minifloat.quantize.model import quantize_checkpoint
from minifloat.serve.load import load
from minifloat.serve.text import load_tokenizer

pytestmark = pytest.mark.timeout(1200)

ITEMS, CONTEXT_WORDS = 60, 24
#: The next word of a story, which a model that has read such finds in part of the cases.
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


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    words = re.findall(r"\S+", STORIES.read_text())
    rows = [
        {"text": " ".join(words[at : at + CONTEXT_WORDS]), "word": re.sub(r"[^A-Za-z']", "", words[at + CONTEXT_WORDS])}
        for at in range(0, ITEMS * 50, 50)
    ]
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "next_word.yaml").write_text(_TASK.format(data=folder / "items.jsonl"))
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
    results, samples = harness(server, folder, tasks, tmp_path)
    (here,) = run_tasks(
        load(folder, dtype=torch.float32), load_tokenizer(folder), ["next_word"], include_path=tasks
    ).metrics
    assert 0 < here.score.score < 1, "a score that a wrong answer could change"
    assert [sample["exact_match"] for sample in samples] == list(here.results)
    assert results["exact_match,word"] == here.score.score
    assert results["exact_match_stderr,word"] == pytest.approx(here.score.stderr, rel=1e-6)


def harness(server: Served, folder: Path, tasks: Path, out: Path) -> tuple[dict[str, float], list[dict[str, float]]]:
    """`lm_eval` as its users call it: its results, and its items in their order."""
    address = f"model=served,base_url={server.url}/v1/completions,tokenizer={folder},num_concurrent=4,max_retries=1"
    command = [python_of("lm-eval"), "-m", "lm_eval", "--model", "local-completions", "--model_args", address]
    command += ["--tasks", "next_word", "--include_path", str(tasks), "--output_path", str(out), "--log_samples"]
    cache = {"HF_DATASETS_CACHE": str(out / "cache"), "HF_DATASETS_OFFLINE": "1"}
    run = subprocess.run(command, env=environment(**cache), cwd=out, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    (written,), (items,) = out.rglob("results_*.json"), out.rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in items.read_text().splitlines()]
    return json.loads(written.read_text())["results"]["next_word"], sorted(samples, key=lambda sample: sample["doc_id"])

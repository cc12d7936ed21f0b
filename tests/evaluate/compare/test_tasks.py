"""Tasks of lm-evaluation-harness, written by these tests and run with tiny models."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from comparing import compare_models

from minifloat.commands.main import main
from minifloat.errors import DataError, NonFiniteError, UnknownNameError, UsageError
from minifloat.evaluate.compare.intervals import FEWEST_UNITS
from minifloat.evaluate.compare.tasks import TaskDifference, Tasks
from minifloat.evaluate.compare.transformers_model import TransformersModel
from minifloat.model.runtime.load import load
from minifloat.model.runtime.tokenizer import load_tokenizer
from minifloat.quantize.job import quantize_checkpoint

_NO_HARNESS = "needs lm-eval, of the extra `eval`"

_QUESTIONS = [
    {
        "question": f"What is {n} times {n % 7}?",
        "choices": [str(n * (n % 7)), f"about {n}", "nobody knows"],
        "answer": n % 3,
        "page": f"In chapter {n} the cat, the naïve dog and {n * n} mice went out.  " * (1 + n % 5),
    }
    for n in range(24)
]
_CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/questions.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}} Answer:"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
  - {metric: brier_score, aggregation: brier_score, higher_is_better: false}
"""
_LIKELIHOOD = """
task: tiny_likelihood
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/questions.jsonl}}
output_type: loglikelihood
test_split: test
doc_to_text: "{{question}}"
doc_to_target: " {{answer}}"
metric_list: [{metric: perplexity}, {metric: acc}]
"""
_ROLLING = """
task: tiny_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/questions.jsonl}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{page}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
_GENERATION = """
task: tiny_generation
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/questions.jsonl}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}} Answer:"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
filter_list:
  - {name: letter, filter: [{function: regex, regex_pattern: "([a-z])"}, {function: take_first}]}
  - {name: whole, filter: [{function: take_first}]}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
_GROUP = """
group: tiny_group
task: [tiny_choice, tiny_likelihood]
aggregate_metric_list: [{metric: acc, weight_by_size: true}]
"""
_FILES = {"choice": _CHOICE, "likelihood": _LIKELIHOOD, "rolling": _ROLLING, "generation": _GENERATION, "group": _GROUP}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with task files and their data."""
    pytest.importorskip("lm_eval", reason=_NO_HARNESS)
    return write_tasks(tmp_path_factory.mktemp("tasks"), **_FILES)


def write_tasks(folder: Path, **files: str) -> Path:
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _QUESTIONS))
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))
    return folder


@pytest.fixture(scope="module")
def models(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Two models with different weights and the same tokenizer, and the tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    made = make_llama(folder / "first", dtype="float32"), make_llama(folder / "second", dtype="float32", seed=1)
    return [opened(model) for model in made]


def opened(model: Any, folder: Path | None = None) -> tuple[TransformersModel, Any]:
    return TransformersModel.of(model), load_tokenizer(folder or model)


@pytest.fixture(scope="module")
def tasks(folder: Path) -> Tasks:
    return Tasks(["tiny_group", "tiny_rolling", "tiny_generation"], folder)


@pytest.fixture(scope="module")
def runs(tasks: Tasks, models: list[Any]) -> list[dict[str, Any]]:
    """Runs of all tasks with both models; the data is read once."""
    return [tasks.run(*model) for model in models]


def by_name(differences: tuple[TaskDifference, ...]) -> dict[tuple[str, str], TaskDifference]:
    return {(difference.task, difference.metric): difference for difference in differences}


# ------------------------------------------------------------------------------------------------- differences


def test_every_metric_and_filter_of_every_task_and_group_is_compared(tasks: Tasks, runs: list[dict[str, Any]]) -> None:
    differences = by_name(tasks.compare(*runs))
    assert list(differences) == [
        ("tiny_group", "acc"),
        ("tiny_choice", "acc"),
        ("tiny_choice", "acc_norm"),
        ("tiny_choice", "brier_score"),
        ("tiny_likelihood", "perplexity"),
        ("tiny_likelihood", "acc"),
        ("tiny_rolling", "word_perplexity"),
        ("tiny_rolling", "byte_perplexity"),
        ("tiny_rolling", "bits_per_byte"),
        ("tiny_generation", "exact_match,letter"),
        ("tiny_generation", "exact_match,whole"),
    ]
    group = differences["tiny_group", "acc"]
    assert (group.items, group.members) == (2 * len(_QUESTIONS), ("tiny_choice", "tiny_likelihood"))
    assert all(d.items == len(_QUESTIONS) for key, d in differences.items() if key[0] != "tiny_group")
    for (task, metric), difference in differences.items():
        key = metric if "," in metric else f"{metric},none"
        scores = [run["results"][task][key] for run in runs]
        assert [difference.baseline.score, difference.candidate.score] == scores
        assert difference.difference.value == pytest.approx(scores[1] - scores[0], rel=1e-9, abs=1e-12)
        if difference.wins + difference.losses:
            assert difference.difference.low < difference.difference.value < difference.difference.high


def test_a_model_against_itself_has_a_difference_of_exactly_zero(tasks: Tasks, runs: list[dict[str, Any]]) -> None:
    for difference in tasks.compare(runs[0], runs[0]):
        found = difference.difference
        assert found.value == 0
        if difference.mcnemar_p is None:
            assert (found.low, found.high) == (0, 0)
        elif found.known:  # no item differs: at most about 3.7 / n may (rule of three)
            assert found.high == -found.low == pytest.approx(1 - 0.025 ** (1 / difference.items), rel=0.5)
            assert found.high > 0
        assert difference.mcnemar_p in (1, None)
        assert difference.wins == difference.losses == 0
        assert difference.recovery == 100 or difference.baseline.score == 0


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (1, 0), (3, 3), (2, 9)])
def test_wins_losses_and_p_equal_those_counted_by_hand(
    tasks: Tasks, runs: list[dict[str, Any]], wins: int, losses: int
) -> None:
    before = [0.0] * wins + [1.0] * losses + [1.0] * (24 - wins - losses)
    after = [1.0] * wins + [0.0] * losses + before[wins + losses :]
    sides = [with_results(runs[0], values) for values in (before, after)]
    difference = by_name(tasks.compare(*sides))["tiny_choice", "acc"]
    assert (difference.wins, difference.losses) == (wins, losses)
    tail = sum(math.comb(wins + losses, heads) for heads in range(min(wins, losses) + 1))
    assert difference.mcnemar_p == pytest.approx(min(2 * tail / 2 ** (wins + losses), 1), rel=1e-12)
    assert difference.difference.value == pytest.approx((wins - losses) / 24)


def with_results(run: dict[str, Any], values: list[float]) -> dict[str, Any]:
    """Return a run whose items of one task have other results."""
    samples = [sample | {"acc": value} for sample, value in zip(run["samples"]["tiny_choice"], values, strict=True)]
    results = run["results"] | {"tiny_choice": run["results"]["tiny_choice"] | {"acc,none": float(np.mean(values))}}
    return run | {"samples": run["samples"] | {"tiny_choice": samples}, "results": results}


def test_where_less_is_better_a_loss_is_a_recovery_below_100(tasks: Tasks, runs: list[dict[str, Any]]) -> None:
    for pair in (runs, runs[::-1]):
        differences = by_name(tasks.compare(*pair))
        for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
            difference = differences["tiny_rolling", metric]
            assert not difference.higher_is_better
            assert (difference.difference.value > 0) == (difference.recovery < 100)
            assert (difference.losses > difference.wins) == (difference.difference.value > 0)


def test_too_few_items_give_no_interval_and_other_items_are_refused(
    tasks: Tasks, runs: list[dict[str, Any]], models: list[Any]
) -> None:
    few = [tasks.run(*model, limit=FEWEST_UNITS - 1) for model in models]
    for difference in tasks.compare(*few):
        if not difference.members and (difference.wins or difference.losses):
            assert math.isnan(difference.difference.low)
    with pytest.raises(UsageError, match=r"tiny_choice, acc: the two runs have other items or prompts"):
        tasks.compare(few[0], runs[0])


def test_documents_in_bfloat16_are_summed_in_float32(folder: Path, llama_folder: Path) -> None:
    run = Tasks(["tiny_rolling"], folder).run(*opened(llama_folder), limit=4)
    sums = [sample["bits_per_byte"][0] for sample in run["samples"]["tiny_rolling"]]
    assert all(value != round(value) for value in sums)


# ------------------------------------------------------------------------------------------------- errors


def test_an_unknown_task_is_an_error_with_similar_names(folder: Path, no_default_tasks: None) -> None:
    with pytest.raises(UnknownNameError, match="unknown task 'tiny_chioce'; valid: tiny_choice"):
        Tasks(["tiny_chioce"], folder)


@pytest.fixture
def no_default_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the harness' own 14,000 tasks, which take seconds to index."""
    tasks = pytest.importorskip("lm_eval.tasks", reason=_NO_HARNESS)
    make = tasks.TaskManager
    monkeypatch.setattr(
        tasks, "TaskManager", lambda include_path, **_: make(include_path=include_path, include_defaults=False)
    )


def test_tasks_can_be_named_by_pattern_or_file(folder: Path) -> None:
    assert set(Tasks(["tiny_*ing"], folder).loaded["tasks"]) == {"tiny_rolling"}
    assert set(Tasks([str(folder / "choice.yaml")], folder).loaded["tasks"]) == {"tiny_choice"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("questions.jsonl", "missing.jsonl"), "tasks tiny_choice: .*missing.jsonl"),
        (("test_split: test", "test_split: train"), "tasks tiny_choice: cannot be loaded: KeyError"),
    ],
)
def test_the_error_names_a_wrong_task(
    tmp_path: Path, no_default_tasks: None, change: tuple[str, str], expected: str
) -> None:
    write_tasks(tmp_path, broken=_CHOICE.replace(*change))
    with pytest.raises(DataError, match=expected) as caught:
        Tasks(["tiny_choice"], tmp_path)
    assert "\n" not in str(caught.value)


def test_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        Tasks(["tiny_choice"], tmp_path / "nowhere")


def test_a_task_that_fails_while_it_runs_is_a_usage_error(tmp_path: Path, models: list[Any]) -> None:
    write_tasks(tmp_path, long=_GENERATION.replace("max_gen_toks: 8", "max_gen_toks: 8000"))
    with pytest.raises(UsageError, match=r"tiny_generation: lm-eval could not run them: AssertionError: .*8000"):
        Tasks(["tiny_generation"], tmp_path).run(*models[0])


@pytest.mark.parametrize("task", ["tiny_choice", "tiny_rolling"])
def test_a_nan_answer_is_an_error_and_not_a_score(folder: Path, llama_folder: Path, task: str) -> None:
    model = load(llama_folder)
    model.get_output_embeddings().weight.data[5] = math.nan
    with pytest.raises(NonFiniteError, match=r"item 0 of task"):
        Tasks([task], folder).run(*opened(model, llama_folder), limit=3)


def test_without_lm_eval_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(UsageError, match=r"pip install 'minifloat\[eval\]'"):
        Tasks(["tiny_choice"])


def test_nothing_is_printed_to_stdout_and_the_state_of_the_process_is_kept(
    tasks: Tasks, llama_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = load(llama_folder)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    config = str(model.generation_config)
    tasks.run(*opened(model, llama_folder), limit=3)
    assert capfd.readouterr().out == ""
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert str(model.generation_config) == config


# ------------------------------------------------------------------------------------------------- in a comparison


def test_a_comparison_runs_tasks(
    llama_folder: Path, folder: Path, tmp_path: Path, mxfp4_folder: Path, no_default_tasks: None
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 20)
    arguments = ["compare", str(llama_folder), str(mxfp4_folder), "--data", str(text), "--window", "32"]
    arguments += [
        "--prompts",
        "0",
        "--tasks",
        "tiny_choice",
        "--task-path",
        str(folder),
        "--task-limit",
        "10",
        "--json",
    ]
    document = json.loads(CliRunner().invoke(main, arguments).stdout)
    tasks = document["candidates"][0]["tasks"]
    assert [(task["task"], task["metric"], task["items"]) for task in tasks][:1] == [("tiny_choice", "acc", 10)]
    with pytest.raises(UnknownNameError, match="tiny_choise"):
        compare_models(llama_folder, mxfp4_folder, [text], tasks=["tiny_choise"], task_path=folder)


def test_likelihoods_of_a_comparison_equal_those_of_the_harness(
    llama_folder: Path, folder: Path, tmp_path: Path
) -> None:
    """The harness predicts the first token of a document from BOS, so the compared text begins with BOS too."""
    quantize_checkpoint(llama_folder, tmp_path / "q", "mxfp4")
    begin = load_tokenizer(llama_folder).bos_token
    pages = [question["page"][:100] for question in _QUESTIONS]
    write_tasks(tmp_path, rolling=_ROLLING)
    for name, rows in (("questions", pages), ("with_bos", [begin + page for page in pages])):
        lines = (json.dumps({"page": row}) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    result = compare_models(
        llama_folder,
        tmp_path / "q",
        [f"{tmp_path / 'with_bos.jsonl'}#column=page"],
        dtype="float32",
        window=128,
        prompts=0,
        tasks=["tiny_rolling"],
        task_path=tmp_path,
    )
    (candidate,) = result.candidates
    (task,) = (task for task in candidate.tasks if task.metric == "bits_per_byte")
    tokens, nbytes = candidate.overall.tokens, sum(len(page.encode()) for page in pages)
    assert tokens == nbytes  # a token is a byte here
    for perplexity, score in (
        (candidate.overall.baseline_perplexity, task.baseline.score),
        (candidate.overall.candidate_perplexity, task.candidate.score),
    ):
        assert math.log(perplexity) * tokens == pytest.approx(score * math.log(2) * nbytes, rel=1e-5)

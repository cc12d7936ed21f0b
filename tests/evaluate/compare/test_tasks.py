"""Tasks of lm-evaluation-harness, written by these tests and run with tiny models."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import math
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
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
from minifloat.evaluate.compare.tasks import TaskDifference, TaskRun, compare_tasks, load_tasks, run_tasks
from minifloat.evaluate.compare.tasks.difference import mcnemar
from minifloat.evaluate.compare.tasks.quiet import quiet
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
dataset_kwargs: {data_files: {test: questions.jsonl}}
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
dataset_kwargs: {data_files: {test: questions.jsonl}}
output_type: loglikelihood
test_split: test
doc_to_text: "{{question}}"
doc_to_target: " {{answer}}"
metric_list: [{metric: perplexity}, {metric: acc}]
"""
_ROLLING = """
task: tiny_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{page}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
_GENERATION = """
task: tiny_generation
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
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
    """A folder with task files and their data, which they name without a path."""
    pytest.importorskip("lm_eval", reason=_NO_HARNESS)
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder, **_FILES)
    return folder


def write_tasks(folder: Path, **files: str) -> Path:
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _QUESTIONS))
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def models(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models with different weights and the same tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    return make_llama(folder / "first", dtype="float32"), make_llama(folder / "second", dtype="float32", seed=1)


@pytest.fixture(scope="module")
def runs(folder: Path, models: tuple[Path, Path]) -> tuple[TaskRun, TaskRun]:
    """Runs of all tasks with both models; the data is read once."""
    tasks = load_tasks(["tiny_group", "tiny_rolling", "tiny_generation"], include_path=folder)
    first, second = (run_tasks(load(model), load_tokenizer(model), tasks) for model in models)
    return first, second


def by_name(differences: tuple[TaskDifference, ...]) -> dict[tuple[str, str], TaskDifference]:
    return {(difference.task, difference.metric): difference for difference in differences}


# ------------------------------------------------------------------------------------------------- scores


def test_every_metric_and_filter_of_every_task_and_group_is_compared(runs: tuple[TaskRun, TaskRun]) -> None:
    differences = by_name(compare_tasks(*runs))
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
    assert differences["tiny_group", "acc"].items == 2 * len(_QUESTIONS)
    assert differences["tiny_group", "acc"].members == ("tiny_choice", "tiny_likelihood")
    assert all(d.items == len(_QUESTIONS) for key, d in differences.items() if key[0] != "tiny_group")


def test_scores_equal_those_that_the_harness_reports(
    folder: Path, models: tuple[Path, Path], runs: tuple[TaskRun, TaskRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator = pytest.importorskip("lm_eval.evaluator", reason=_NO_HARNESS)
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(evaluator, "add_env_info", lambda _: None)  # runs other programs for seconds
    monkeypatch.chdir(folder)
    with quiet():
        expected = evaluator.simple_evaluate(
            HFLM(pretrained=load(models[0]), tokenizer=load_tokenizer(models[0])),
            tasks=["tiny_group", "tiny_rolling", "tiny_generation"],
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            bootstrap_iters=1000,
        )["results"]
    for run in runs[0].metrics:
        key = run.metric if "," in run.metric else f"{run.metric},none"
        assert run.score.score == pytest.approx(expected[run.task][key], rel=1e-5)
        stderr = expected[run.task][key.replace(",", "_stderr,")]
        assert run.score.stderr == pytest.approx(math.nan if stderr == "N/A" else stderr, rel=1e-5, nan_ok=True)
    (group,) = runs[0].groups
    assert group.score.score == pytest.approx(expected["tiny_group"]["acc,none"], rel=1e-9)
    assert group.score.stderr == pytest.approx(expected["tiny_group"]["acc_stderr,none"], rel=1e-9)


def test_rolling_perplexities_equal_a_float64_calculation(
    folder: Path, models: tuple[Path, Path], runs: tuple[TaskRun, TaskRun]
) -> None:
    model, tokenizer = load(models[0]).double(), load_tokenizer(models[0])
    limit = model.config.max_position_embeddings
    nats = 0.0
    for row in _QUESTIONS:
        ids = tokenizer(row["page"], add_special_tokens=False).input_ids
        # Every token is predicted once, from BOS and as much of the text before its window's end as has room.
        for start in range(0, len(ids), limit):
            targets = ids[start : start + limit]
            context = [tokenizer.bos_token_id, *ids][: start + len(targets)][-limit:]
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([context])).logits[0, -len(targets) :]
            nats -= logits.log_softmax(-1).gather(-1, torch.tensor(targets)[:, None]).sum().item()
    nbytes = sum(len(row["page"].encode()) for row in _QUESTIONS)
    words = sum(len(re.split(r"\s+", row["page"])) for row in _QUESTIONS)
    scores = {run.metric: run.score.score for run in runs[0].metrics if run.task == "tiny_rolling"}
    assert max(len(row["page"].encode()) for row in _QUESTIONS) > limit, "a document must take several windows"
    assert scores["bits_per_byte"] == pytest.approx(nats / math.log(2) / nbytes, rel=1e-5)
    assert scores["byte_perplexity"] == pytest.approx(math.exp(nats / nbytes), rel=1e-5)
    assert scores["word_perplexity"] == pytest.approx(math.exp(nats / words), rel=1e-4)


def test_documents_in_bfloat16_are_summed_in_float32(folder: Path, llama_folder: Path) -> None:
    model, tokenizer = load(llama_folder), load_tokenizer(llama_folder)
    run = run_tasks(model, tokenizer, ["tiny_rolling"], include_path=folder, limit=4)
    sums = [result[0] for result in next(run for run in run.metrics if run.metric == "bits_per_byte").results]
    assert all(value != round(value) for value in sums)


# ------------------------------------------------------------------------------------------------- differences


def test_a_model_against_itself_has_a_difference_of_exactly_zero(
    folder: Path, models: tuple[Path, Path], runs: tuple[TaskRun, TaskRun]
) -> None:
    model, tokenizer = load(models[0]), load_tokenizer(models[0])
    again = run_tasks(model, tokenizer, runs[0].tasks, include_path=folder)
    for difference in compare_tasks(runs[0], again):
        assert (difference.difference.value, difference.difference.low, difference.difference.high) == (0, 0, 0)
        assert difference.mcnemar_p in (1, None)
        assert difference.wins == difference.losses == 0
        assert difference.recovery == 100 or difference.baseline.score == 0


def test_wins_losses_and_p_equal_those_counted_by_hand(runs: tuple[TaskRun, TaskRun]) -> None:
    first, second = (next(run for run in side.metrics if run.metric == "acc") for side in runs)
    right = [1.0] * 11 + [0.0] * 13
    then = [1.0] * 4 + [0.0] * 7 + [1.0] * 2 + [0.0] * 11  # 7 lost, 2 won
    sides = [
        TaskRun((run.task,), "", (replace(run, results=tuple(values), aggregation="mean"),), ())
        for run, values in ((first, right), (second, then))
    ]
    (difference,) = compare_tasks(*sides)
    assert (difference.wins, difference.losses) == (2, 7)
    assert difference.mcnemar_p == pytest.approx(2 * (1 + 9 + 36) / 2**9, rel=1e-15)
    assert difference.difference.value == pytest.approx(-5 / 24)
    assert -12 / 24 < difference.difference.low < -5 / 24 < difference.difference.high < 2 / 24


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (1, 0), (3, 3), (2, 9), (40, 61), (2500, 2700)])
def test_mcnemar_is_the_two_sided_binomial_test(wins: int, losses: int) -> None:
    stats = pytest.importorskip("scipy.stats", reason="compares the exact test with SciPy's")
    expected = stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1
    assert mcnemar(wins, losses) == pytest.approx(expected, rel=1e-9)


def test_too_few_items_give_no_interval(folder: Path, models: tuple[Path, Path]) -> None:
    few = FEWEST_UNITS - 1
    first, second = (
        run_tasks(load(model), load_tokenizer(model), ["tiny_choice"], include_path=folder, limit=few)
        for model in models
    )
    for difference in compare_tasks(first, second):
        assert difference.items == few
        assert difference.mcnemar_p is not None or difference.metric == "brier_score"
        if difference.wins or difference.losses:
            assert math.isnan(difference.difference.low)


def test_where_less_is_better_a_loss_is_a_recovery_below_100(runs: tuple[TaskRun, TaskRun]) -> None:
    for one, other in (runs, runs[::-1]):
        differences = by_name(compare_tasks(one, other))
        for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
            difference = differences["tiny_rolling", metric]
            assert not difference.higher_is_better
            assert (difference.difference.value > 0) == (difference.recovery < 100)
            assert difference.difference.low < difference.difference.value < difference.difference.high
            change = difference.candidate.score - difference.baseline.score
            assert difference.difference.value == pytest.approx(change, rel=1e-9)
            assert (difference.losses > difference.wins) == (difference.difference.value > 0)


def test_a_metric_that_is_not_a_mean_has_an_interval_too(runs: tuple[TaskRun, TaskRun]) -> None:
    difference = by_name(compare_tasks(*runs))["tiny_choice", "brier_score"]
    assert difference.difference.low < difference.difference.value < difference.difference.high
    assert difference.mcnemar_p is None


def test_runs_with_different_items_are_refused(
    folder: Path, models: tuple[Path, Path], runs: tuple[TaskRun, TaskRun]
) -> None:
    model, tokenizer = load(models[0]), load_tokenizer(models[0])
    full, fewer, shots = (
        run_tasks(model, tokenizer, ["tiny_choice"], include_path=folder, limit=limit, num_fewshot=fewshot)
        for limit, fewshot in ((9, None), (8, None), (9, 1))
    )
    with pytest.raises(UsageError, match=r"tiny_choice, acc: .*\(9 and 8\)"):
        compare_tasks(full, fewer)
    with pytest.raises(UsageError, match="the first that differs is item 0"):
        compare_tasks(full, shots)
    with pytest.raises(UsageError, match="different tasks"):
        compare_tasks(full, runs[0])
    assert {run.fewshot for run in shots.metrics} == {1}


# ------------------------------------------------------------------------------------------------- errors


@pytest.fixture
def no_default_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the harness' own 14,000 tasks, which take seconds to index."""
    tasks = pytest.importorskip("lm_eval.tasks", reason=_NO_HARNESS)
    manager = functools.partial(tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", lambda include_path, **_: manager(include_path=include_path))


def test_an_unknown_task_is_an_error_with_similar_names(folder: Path, no_default_tasks: None) -> None:
    with pytest.raises(UnknownNameError, match="unknown task 'tiny_chioce'; valid: tiny_choice") as caught:
        load_tasks(["tiny_chioce"], include_path=folder)
    assert "tiny_rolling" in caught.value.valid


def test_tasks_can_be_named_by_pattern_or_file(folder: Path) -> None:
    assert set(load_tasks(["tiny_*ing"], include_path=folder).loaded["tasks"]) == {"tiny_rolling"}
    assert set(load_tasks([str(folder / "choice.yaml")], include_path=folder).loaded["tasks"]) == {"tiny_choice"}


@pytest.fixture
def deaf_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A hub that accepts connections and never answers; yields the module with the setting HF_HUB_OFFLINE."""
    pytest.importorskip("lm_eval", reason=_NO_HARNESS)
    hub = pytest.importorskip("huggingface_hub.constants")
    with quiet():
        pass  # import lm-eval, which takes seconds
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(hub, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr("minifloat.evaluate.compare.tasks.loaded_tasks._HUB_SECONDS", 0.5)
        for module in (hub, importlib.import_module("datasets.config")):
            monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
        yield hub


@pytest.mark.parametrize("by_choice", [True, False])
def test_a_data_set_that_is_not_cached_fails_within_seconds_with_one_line(
    tmp_path: Path, by_choice: bool, deaf_hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deaf_hub, "HF_HUB_OFFLINE", by_choice)
    write_tasks(tmp_path, far=_CHOICE.replace("json\n", "nobody/has-this-data-set\n"))
    start = time.monotonic()
    with pytest.raises(DataError, match=r"task tiny_choice: .*nobody/has-this-data-set") as caught:
        load_tasks(["tiny_choice"], include_path=tmp_path)
    assert time.monotonic() - start < 10
    assert "\n" not in str(caught.value)
    assert ("HF_HUB_OFFLINE is set" if by_choice else "the hub does not answer") in str(caught.value)
    assert by_choice == deaf_hub.HF_HUB_OFFLINE


def test_local_tasks_send_no_request_to_the_hub(folder: Path, deaf_hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("minifloat.evaluate.compare.tasks.loaded_tasks._hub_answers", lambda: asked.append(1))
    load_tasks(["tiny_group", "tiny_rolling"], include_path=folder)
    assert not asked
    assert not deaf_hub.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("questions.jsonl", "missing.jsonl"), "task tiny_choice: .*missing.jsonl"),
        (("test_split: test", "test_split: train"), "task tiny_choice: cannot be loaded: KeyError"),
        (("metric: acc_norm", "metric: no_such_metric"), "task tiny_choice: .*no_such_metric"),
        (("output_type: multiple_choice", "output_type: [}"), "broken.yaml: not a task file that can be read"),
    ],
)
def test_the_error_names_a_wrong_task_file(tmp_path: Path, change: tuple[str, str], expected: str) -> None:
    pytest.importorskip("lm_eval", reason=_NO_HARNESS)
    write_tasks(tmp_path, broken=_CHOICE.replace(*change))
    with pytest.raises(DataError, match=expected) as caught:
        load_tasks(["tiny_choice"], include_path=tmp_path)
    assert "\n" not in str(caught.value)


def test_a_task_that_fails_while_it_runs_is_a_usage_error(tmp_path: Path, llama_folder: Path) -> None:
    pytest.importorskip("lm_eval", reason=_NO_HARNESS)
    write_tasks(tmp_path, long=_GENERATION.replace("max_gen_toks: 8", "max_gen_toks: 8000"))
    with pytest.raises(UsageError, match=r"tiny_generation: lm-eval could not run them: AssertionError: .*8000"):
        run_tasks(load(llama_folder), load_tokenizer(llama_folder), ["tiny_generation"], include_path=tmp_path)


@pytest.mark.parametrize(
    "options", [{"limit": 0}, {"limit": -3}, {"limit": 2.5}, {"limit": math.nan}, {"batch_size": 0}]
)
def test_options_out_of_range_are_refused(folder: Path, llama_folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"expected|at least"):
        run_tasks(load(llama_folder), load_tokenizer(llama_folder), ["tiny_choice"], include_path=folder, **options)


def test_no_task_and_no_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="names of one or more tasks"):
        load_tasks([], include_path=folder)
    with pytest.raises(DataError, match="no such folder"):
        load_tasks(["tiny_choice"], include_path=tmp_path / "nowhere")


@pytest.mark.parametrize("task", ["tiny_choice", "tiny_rolling", "tiny_generation"])
def test_a_nan_answer_is_an_error_and_not_a_score(folder: Path, llama_folder: Path, task: str) -> None:
    model = load(llama_folder)
    model.get_output_embeddings().weight.data[5] = math.nan
    with pytest.raises(NonFiniteError, match=r"item 0 of task|is generated"):
        run_tasks(model, load_tokenizer(llama_folder), [task], include_path=folder, limit=3)


def test_without_lm_eval_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.evaluator", None)
    with pytest.raises(UsageError, match=r"pip install 'minifloat\[eval\]'"):
        load_tasks(["tiny_choice"], include_path=folder)


# ------------------------------------------------------------------------------------------------- side effects


@pytest.mark.full
def test_importing_compare_imports_no_harness() -> None:
    program = (
        "import sys, minifloat.evaluate.compare, minifloat.evaluate.compare.tasks; sys.exit('lm_eval' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120, check=False).returncode == 0


def test_nothing_is_printed_and_the_state_of_the_process_is_kept(
    folder: Path, llama_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = load(llama_folder), load_tokenizer(llama_folder)
    pad, padding_side, config = tokenizer.pad_token, tokenizer.padding_side, str(model.generation_config)
    logger = logging.getLogger("transformers")
    handlers, environment = logger.handlers[:], dict(os.environ)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    run_tasks(model, tokenizer, ["tiny_group", "tiny_rolling", "tiny_generation"], include_path=folder, limit=9)
    assert capfd.readouterr() == ("", "")
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert (tokenizer.pad_token, tokenizer.padding_side, str(model.generation_config)) == (pad, padding_side, config)
    assert logger.handlers == handlers
    assert {key for key in os.environ if os.environ[key] != environment.get(key)} <= {"HF_XET_HIGH_PERFORMANCE"}


def test_progress_counts_every_request_once(folder: Path, llama_folder: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    run_tasks(
        load(llama_folder),
        load_tokenizer(llama_folder),
        ["tiny_choice", "tiny_rolling", "tiny_generation"],
        include_path=folder,
        limit=4,
        progress=lambda *step: seen.append(step),
    )
    total = 3 * 4 + 4 + 4
    assert [step[:2] for step in seen] == [(done, total) for done in range(1, total + 1)]
    assert list(dict.fromkeys(step[2] for step in seen)) == [
        "scoring answers",
        "scoring documents",
        "generating answers",
    ]


def test_a_quantized_model_runs_and_is_not_changed(
    folder: Path, make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_llama(tmp_path / "model", tie_word_embeddings=True)
    quantize_checkpoint(source, tmp_path / "quantized", "fp8-block")
    model, tokenizer = load(tmp_path / "quantized"), load_tokenizer(source)
    ids = torch.tensor([tokenizer("What is this?").input_ids])
    with torch.inference_mode():
        before = model(input_ids=ids).logits
    quantized = run_tasks(model, tokenizer, ["tiny_choice", "tiny_generation"], include_path=folder, limit=9)
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids).logits, before)
    original = run_tasks(load(source), tokenizer, quantized.tasks, include_path=folder, limit=9)
    assert all(difference.items == 9 for difference in compare_tasks(original, quantized))


# ------------------------------------------------------------------------------------------------- in a comparison


def test_a_comparison_runs_tasks(llama_folder: Path, folder: Path, tmp_path: Path, no_default_tasks: None) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 20)
    quantize_checkpoint(llama_folder, tmp_path / "q", "mxfp4")
    arguments = ["compare", str(llama_folder), str(tmp_path / "q"), "--data", str(text), "--window", "32"]
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
        compare_models(llama_folder, tmp_path / "q", [text], tasks=["tiny_choise"], task_path=folder)


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

"""The model type of lm-evaluation-harness answers as the harness' own model of transformers does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from minifloat.errors import UnknownNameError, UsageError
from minifloat.evaluate.lm_eval import NAME, register
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.quantize.job import quantize_checkpoint

pytest.importorskip("lm_eval")

STORYBOOK = Path(__file__).parents[3] / "examples" / "storybook-4m"
STORIES = Path(__file__).parents[3] / "examples" / "texts" / "stories_calibration.txt"
TOLERANCE = 2e-3  # float32 sums in another order, over as many as 255 tokens
LENGTH = 96


@pytest.fixture(scope="module", params=["bf16", "fp8", "mxfp4"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "bf16":
        return STORYBOOK
    made = tmp_path_factory.mktemp("checkpoints") / request.param
    quantize_checkpoint(STORYBOOK, made, request.param)
    return made


@pytest.fixture(scope="module")
def models(folder: Path) -> tuple[Any, Any]:
    """The harness' own model type and ours, both in float32 and with the same short context."""
    from lm_eval.api.registry import get_model

    register()
    theirs = get_model("hf")(
        pretrained=load(folder, LoadOptions(dtype=torch.float32, weight_only=True)),
        tokenizer=str(folder),
        batch_size=4,
        max_length=LENGTH,
        softmax_dtype="float32",
    )
    ours = get_model(NAME)(pretrained=str(folder), dtype="float32", max_length=LENGTH, lm_head="bf16")
    assert ours.engine.info.runner == "native"
    return theirs, ours


@pytest.fixture(scope="module")
def words() -> list[str]:
    return STORIES.read_text().split()


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=one, idx=index, metadata=("task", index, 1))
        for index, one in enumerate(arguments)
    ]


def test_log_likelihoods_are_those_of_the_harness_own_model(models: tuple[Any, Any], words: list[str]) -> None:
    pairs = [
        (" ".join(words[at : at + length]), " " + " ".join(words[at + length : at + length + answer]))
        for at, length, answer in [(0, 20, 1), (0, 20, 3), (40, 5, 2), (90, 40, 7), (200, 200, 4), (300, 60, 60)]
    ]
    pairs += [(pairs[0][0], " the"), (pairs[0][0], " a"), ("", " Once upon a time"), (pairs[0][0], " the cat")]
    theirs, ours = (model.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True) for model in models)
    assert [found for found, _ in ours] == pytest.approx([wanted for wanted, _ in theirs], abs=TOLERANCE)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    again = models[1].loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)  # from the prefix cache
    assert [found for found, _ in again] == pytest.approx([wanted for wanted, _ in theirs], abs=TOLERANCE)


def test_the_most_probable_continuation_is_greedy(models: tuple[Any, Any], words: list[str]) -> None:
    theirs, ours = models
    context = " ".join(words[:20])
    options = {"until": [], "max_gen_toks": 1, "do_sample": False}
    (word,) = theirs.generate_until(instances("generate_until", [(context, options)]), disable_tqdm=True)
    pairs = [(context, " " + word.strip()), (context, " xylophone")]
    answers = ours.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    assert [greedy for _, greedy in answers] == [True, False]


def test_long_documents_are_scored_in_the_same_windows(models: tuple[Any, Any], words: list[str]) -> None:
    texts: list[tuple[Any, ...]] = [(" ".join(words[:300]),), (" ".join(words[300:310]),)]
    theirs, ours = (
        model.loglikelihood_rolling(instances("loglikelihood_rolling", texts), disable_tqdm=True) for model in models
    )
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_answers_are_cut_at_the_same_places(models: tuple[Any, Any], words: list[str]) -> None:
    arguments = [
        (" ".join(words[at : at + length]), {"until": until, "max_gen_toks": 24, "do_sample": False})
        for at, length, until in [(0, 12, ["."]), (50, 30, ["\n", " the"]), (100, 200, []), (150, 3, ["zzz"])]
    ]
    theirs, ours = (model.generate_until(instances("generate_until", arguments), disable_tqdm=True) for model in models)
    assert ours == theirs
    assert len({*ours}) == 4


def test_what_the_engine_does_not_have_is_refused(models: tuple[Any, Any]) -> None:
    ours = models[1]
    for options, message in (
        ({"num_beams": 4}, "generation_kwargs: minifloat does not have num_beams"),
        ({"typical_p": 0.9}, "generation_kwargs: minifloat does not have typical_p"),
        ({"max_gen_toks": LENGTH}, "max_gen_toks: 96 tokens leave no room for a prompt in the context, 96"),
    ):
        with pytest.raises(UsageError, match=message):
            ours.generate_until(
                instances("generate_until", [("Once", {"until": [], "max_gen_toks": 4} | options)]), disable_tqdm=True
            )


def test_arguments_are_checked(tmp_path: Path) -> None:
    from lm_eval.api.registry import get_model

    register()
    model = get_model(NAME)
    with pytest.raises(UsageError, match="batch_size: expected a number or auto, got 'many'"):
        model(pretrained=str(STORYBOOK), batch_size="many")
    with pytest.raises(TypeError, match="peft"):
        model(pretrained=str(STORYBOOK), peft="adapter")
    with pytest.raises(UnknownNameError, match="int3"):
        model(pretrained=str(STORYBOOK), activations="int3")


def test_the_command_is_that_of_the_harness(words: list[str], tmp_path: Path) -> None:
    rows = [{"text": " ".join(words[at : at + 12]), "word": words[at + 12]} for at in range(0, 120, 20)]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "next_word.yaml").write_text(
        f"""
task: next_word
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "items.jsonl"}}}}}
output_type: loglikelihood
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_target: " {{{{word}}}}"
metric_list: [{{metric: acc}}, {{metric: perplexity}}]
"""
    )
    command = [sys.executable, "-m", "minifloat.evaluate.lm_eval", "--model", "minifloat", "--tasks", "next_word"]
    command += ["--model_args", f"pretrained={STORYBOOK}", "--include_path", str(tmp_path)]
    command += ["--output_path", str(tmp_path / "out"), "--batch_size", "auto"]
    offline = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | offline)
    assert ran.returncode == 0, ran.stderr[-3000:]
    (written,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(written.read_text())
    assert results["results"]["next_word"]["perplexity,none"] > 1
    assert results["config"]["minifloat_runner"] == "native"
    assert results["config"]["model"] == "minifloat"

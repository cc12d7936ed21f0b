"""Vectors and scores of texts, held to the hidden states of transformers in float32."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from embedding_models import change_config, embedding_model, hidden_states, logits_after, write_modules
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from minifloat.engine import Engine, EngineOptions, Request, SamplingParams
from minifloat.errors import ConfigError, UsageError
from minifloat.quantize.job import quantize_checkpoint

OPTIONS = EngineOptions(dtype="float32", kv_cache_memory=8 << 20, max_num_batched_tokens=32, max_num_seqs=3)
#: Longer than a step, of several blocks, of one token; two begin alike.
TEXTS = ["a", "hello world", "one prefix of two blocks, and then this", "one prefix of two blocks, and then that " * 2]


@pytest.fixture(scope="module")
def source(make_qwen3: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = make_qwen3(tmp_path_factory.mktemp("pooled") / "qwen3", dtype="float32")
    return folder


def close(found: torch.Tensor, expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found.double(), torch.stack(expected), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "as it is"])
@pytest.mark.parametrize("kind", ["lasttoken", "mean"])
def test_vectors_are_pooled_hidden_states(source: Path, tmp_path: Path, kind: str, normalize: bool) -> None:
    engine = Engine(embedding_model(source, tmp_path / "m", kind, normalize=normalize), OPTIONS)
    assert (engine.info.task, engine.info.vector_size, engine.info.vocab_size) == ("embed", 64, 288)
    expected = []
    for text in TEXTS:
        states = hidden_states(source, engine.encode(text))
        vector = states[-1] if kind == "lasttoken" else states.mean(dim=0)
        expected.append(vector / vector.norm() if normalize else vector)
    for _ in range(2):  # then prefixes come from the cache where only the last token counts
        close(engine.embed(TEXTS), expected)
    assert (engine._scheduler.prefix_hits > 0) == (kind == "lasttoken")
    assert engine.kv_usage == 0.0


def test_a_head_for_sequence_classification_scores(source: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, pad_token_id=0)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path)
    engine = Engine(tmp_path, OPTIONS)
    with torch.no_grad():
        logits = [model(torch.tensor([engine.encode(text)])).logits[0].double() for text in TEXTS]
    close(engine.embed(TEXTS), [logit.sigmoid() for logit in logits])
    change_config(tmp_path, sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})
    close(Engine(tmp_path, OPTIONS).embed(TEXTS), logits)
    change_config(tmp_path, id2label={"0": "a", "1": "b"})
    with pytest.raises(ConfigError, match="expected one label"):
        Engine(tmp_path, OPTIONS)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("form", ["vLLM", "modules", "one token"])
def test_two_tokens_score(make_qwen3: Any, tmp_path: Path, form: str, tied: bool) -> None:
    folder = make_qwen3(tmp_path, dtype="float32", tie_word_embeddings=tied)
    yes, no = (AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(name) for name in "yn")
    engine = Engine(folder, OPTIONS)
    logits = [logits_after(folder, engine.encode(text)) for text in TEXTS]
    expected = [(logit[yes] - logit[no]).sigmoid()[None] for logit in logits]
    if form == "vLLM":
        change_config(folder, classifier_from_token=["n", "y"], method="from_2_way_softmax")
    elif form == "modules":
        write_modules(folder, "Transformer", "LogitScore", LogitScore={"true_token_id": yes, "false_token_id": no})
    else:
        expected = [logit[yes].sigmoid()[None] for logit in logits]
        write_modules(folder, "Transformer", "LogitScore", LogitScore={"true_token_id": yes, "false_token_id": None})
    close(Engine(folder, OPTIONS).embed(TEXTS), expected)


def test_a_quantized_model_embeds_as_its_source_does(source: Path, tmp_path: Path) -> None:
    folder = embedding_model(source, tmp_path / "m")
    quantize_checkpoint(folder, tmp_path / "q", "fp8")
    assert json.loads((tmp_path / "q" / "1_Pooling" / "config.json").read_text())["pooling_mode_lasttoken"]
    found = Engine(tmp_path / "q", OPTIONS).embed(TEXTS)
    cosines = (found * Engine(folder, OPTIONS).embed(TEXTS)).sum(dim=1)
    assert 0.98 < cosines.min() < 0.999999


def test_a_model_that_embeds_generates_only_when_it_is_asked_to(source: Path, tmp_path: Path) -> None:
    folder = write_modules(
        change_config(source, architectures=["Qwen3ForCausalLM"]),
        "Transformer",
        "Pooling",
        Pooling={"pooling_mode": "lasttoken"},
    )
    try:
        engine = Engine(folder, OPTIONS)
        with pytest.raises(UsageError, match="generates none"):
            engine.generate("a")
        with pytest.raises(UsageError, match="task='generate'"):
            engine.logits([1])
        generating = Engine(folder, dataclasses.replace(OPTIONS, task="generate"))
        assert generating.generate("a", SamplingParams(max_tokens=2, ignore_eos=True))[0].usage.completion_tokens == 2
        with pytest.raises(UsageError, match=r"modules\.json"):
            generating.embed(["a"])
        for runner in ("device", "transformers"):
            with pytest.raises(UsageError, match="only the native decoder"):
                Engine(folder, dataclasses.replace(OPTIONS, runner=runner))
        with pytest.raises(UsageError, match="speculate"):
            Engine(folder, dataclasses.replace(OPTIONS, speculate="prompt"))
    finally:
        (folder / "modules.json").unlink()


def test_a_text_that_is_preempted_or_fails_does_so_alone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(embedding_model(source, tmp_path / "m", "mean"), OPTIONS)
    alone = engine.embed(TEXTS)
    params = SamplingParams(max_tokens=0)
    for number, text in enumerate(TEXTS[:3]):
        engine.add(Request(str(number), engine.encode(text), params))
    found = {delivery.request_id: delivery for delivery in engine.step()}
    (sequence,) = [other for other in engine._scheduler.running if 0 < other.computed < len(other.tokens)]
    engine._scheduler._preempt(sequence)
    run = engine._runner.run
    monkeypatch.setattr(engine._runner, "run", lambda works: run(works) * (float("nan") if len(found) < 2 else 1))
    while engine.has_work:
        found |= {delivery.request_id: delivery for delivery in engine.step()}
    failed = {name for name, delivery in found.items() if delivery.error}
    assert failed <= {"1", "2"}
    for name in found.keys() - failed:
        torch.testing.assert_close(torch.from_numpy(found[name].pooled), alone[int(name)], rtol=1e-5, atol=2e-6)


def test_texts_are_bounded_by_what_the_model_was_made_for(source: Path, tmp_path: Path) -> None:
    folder = embedding_model(source, tmp_path / "m")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 5, "do_lower_case": False}))
    engine = Engine(folder, OPTIONS)
    assert engine.embed([[1] * 5]).shape == (1, 64)
    with pytest.raises(UsageError, match="context of 5"):
        engine.embed([[1] * 6])


@pytest.mark.parametrize(
    ("types", "pooling", "fields", "reason"),
    [
        (("Transformer", "Pooling", "Dense"), {"pooling_mode": "mean"}, {}, "found .*Dense"),
        (("Transformer", "Pooling"), {"pooling_mode": "cls"}, {}, "found cls"),
        (("Transformer", "Pooling"), {"pooling_mode_max_tokens": True}, {}, "pooling_mode_max_tokens"),
        (
            ("Transformer", "Pooling"),
            {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
            {},
            "pooling_mode_lasttoken, pooling_mode_mean_tokens",
        ),
        (("Transformer", "Pooling"), {"pooling_mode_mean_tokens": 1}, {}, "true or false"),
        (("Transformer", "Pooling"), {}, {}, "found neither"),
        (("Transformer", "Pooling"), {"pooling_mode": "mean", "include_prompt": False}, {}, "include_prompt"),
        (("Transformer", "Pooling"), None, {}, "the file is missing"),
        (("Transformer", "Pooling"), {"pooling_mode": "mean"}, {"is_causal": False}, "causal mask"),
        (("Transformer", "Pooling"), {"pooling_mode": "mean"}, {"matryoshka_dimensions": [0]}, "positive integers"),
        (("Transformer", "LogitScore"), None, {}, "the file is missing"),
        ((), None, {"classifier_from_token": ["no such token"]}, "the tokenizer has no token"),
        ((), None, {"classifier_from_token": [5]}, "expected one token"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    source: Path, tmp_path: Path, types: tuple[str, ...], pooling: Any, fields: dict[str, Any], reason: str
) -> None:
    for file in source.iterdir():
        if file.is_file() and file.name != "modules.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    if types:
        write_modules(tmp_path, *types, **({} if pooling is None else {"Pooling": pooling}))
    change_config(tmp_path, **fields)
    with pytest.raises(Exception, match=reason) as caught:
        Engine(tmp_path, OPTIONS)
    assert type(caught.value).__module__ == "minifloat.errors"


@pytest.mark.parametrize("content", ["{}", "[1]", '[{"type": 5}]', "[" * 100_000, "\\", '[{"type": "Transformer"}]'])
def test_a_list_of_modules_that_is_none_is_refused(source: Path, tmp_path: Path, content: str) -> None:
    for file in source.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ConfigError, match=r"modules\.json"):
        Engine(tmp_path, OPTIONS)


@pytest.mark.parametrize("path", ["../out", "/etc", "a/../../out"])
def test_a_module_outside_of_the_folder_is_refused(source: Path, tmp_path: Path, path: str) -> None:
    inside = tmp_path / "in"
    inside.mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text('{"pooling_mode": "mean"}')
    for file in source.iterdir():
        if file.is_file():
            (inside / file.name).write_bytes(file.read_bytes())
    modules = [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": path}]
    (inside / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError.__mro__[1], match="leaves the folder"):
        Engine(inside, OPTIONS)

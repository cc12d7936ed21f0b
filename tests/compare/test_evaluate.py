"""Whole comparisons of tiny models: against transformers' own loss, against themselves, and what is refused."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from minifloat.compare import compare_models, evaluate
from minifloat.errors import MinifloatError, NonFiniteError, StorageError, UsageError
from minifloat.quantize.model import quantize_checkpoint
from minifloat.serve.load import load

MakeModel = Callable[..., Path]

TEXT = "The quick brown fox jumps over the lazy dog; naïve café. " * 6


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "fox.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def changed(folder: Path, copy: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a checkpoint with other weights."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize(("window", "max_tokens"), [(32, None), (50, 101), (128, 60)])
def test_perplexity_is_that_of_the_loss_of_transformers_over_the_same_windows(
    llama_folder: Path, make_llama: MakeModel, tmp_path: Path, text: Path, window: int, max_tokens: int | None
) -> None:
    other = make_llama(tmp_path / "other", seed=1)
    result = compare_models(llama_folder, other, [text], window=window, max_tokens=max_tokens, dtype="float32")
    ids = torch.tensor(AutoTokenizer.from_pretrained(llama_folder)(TEXT, add_special_tokens=False).input_ids)
    ids = ids[:max_tokens]
    for folder, found in (
        (llama_folder, result.overall.baseline_perplexity),
        (other, result.overall.candidate_perplexity),
    ):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        total, count = 0.0, 0
        for part in (part[None] for part in ids.split(window) if len(part) > 1):
            with torch.no_grad():
                total += float(model(part, labels=part).loss) * (part.shape[1] - 1)
            count += part.shape[1] - 1
        assert result.overall.tokens == count
        assert found == pytest.approx(math.exp(total / count), rel=1e-5)


def test_kl_is_that_of_torch(llama_folder: Path, make_llama: MakeModel, tmp_path: Path, text: Path) -> None:
    other = make_llama(tmp_path / "other", seed=1)
    result = compare_models(llama_folder, other, [text], window=128, max_tokens=100, dtype="float32")
    ids = torch.tensor([AutoTokenizer.from_pretrained(llama_folder)(TEXT, add_special_tokens=False).input_ids[:100]])
    with torch.no_grad():
        p, q = (
            load(f, dtype=torch.float32)(ids).logits[0, :-1].double().log_softmax(-1) for f in (llama_folder, other)
        )
    kl = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    assert result.overall.kl_mean == pytest.approx(float(kl.mean()), rel=1e-6)
    assert result.overall.kl_max == pytest.approx(float(kl.max()), rel=1e-6)


def test_a_model_is_itself(llama_folder: Path, text: Path) -> None:
    overall = compare_models(llama_folder, llama_folder, [text], window=32).overall
    assert (overall.kl_mean, overall.kl_max, overall.top1_agreement) == (0, 0, 1)
    assert overall.baseline_perplexity == overall.candidate_perplexity
    assert overall.baseline_bits_per_byte == overall.candidate_bits_per_byte


def test_one_weight_scaled_by_five_percent_is_noticed(llama_folder: Path, tmp_path: Path, text: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    other = changed(llama_folder, tmp_path / "m", lambda tensors: tensors[name].mul_(1.05))
    overall = compare_models(llama_folder, other, [text], window=32, dtype="float32").overall
    assert overall.kl_mean > 1e-5
    assert overall.baseline_perplexity != overall.candidate_perplexity


def test_fewer_bits_diverge_more(llama_folder: Path, tmp_path: Path, text: Path) -> None:
    divergence = []
    for scheme in ("fp8", "mxfp4"):
        quantize_checkpoint(llama_folder, tmp_path / scheme, scheme)
        result = compare_models(llama_folder, tmp_path / scheme, [text], window=32, dtype="float32")
        assert result.candidate_bytes < result.baseline_bytes
        divergence.append(result.overall.kl_mean)
    assert 0 < divergence[0] < divergence[1]


def test_quantized_experts_add_no_difference_of_their_own(make_mixtral: MakeModel, tmp_path: Path, text: Path) -> None:
    plain = make_mixtral(tmp_path / "plain")
    quantize_checkpoint(plain, tmp_path / "q", "fp8", overrides=["self_attn=bf16"])
    model = load(tmp_path / "q", dtype=torch.float32, impl="reference")
    twin = load(plain, dtype=torch.float32)
    for layer, mine in zip(model.model.layers, twin.model.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            experts = getattr(layer.mlp.experts, name).experts
            weights = [torch.cat([part.weight for part in parts]) for parts in experts]
            getattr(mine.mlp.experts, name).copy_(torch.stack(weights))
    assert compare_models(twin, model, [text], window=32).overall.kl_max == 0


@pytest.mark.parametrize(
    ("scheme", "activations"),
    [
        ("fp8", "FP32"),
        ("fp8-dynamic", "E4M3 per token (dynamic)"),
        ("fp8-block", "E4M3 per group 1x128 (dynamic)"),
    ],
)
def test_it_is_recorded_how_the_candidate_took_its_inputs(
    llama_folder: Path, tmp_path: Path, scheme: str, activations: str
) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", scheme)
    served = compare_models(llama_folder, tmp_path / "q", TEXT, dtype="float32")
    weight_only = compare_models(llama_folder, tmp_path / "q", TEXT, dtype="float32", weight_only=True)
    assert (served.activations, weight_only.activations) == (activations, "FP32")
    assert (served.overall == weight_only.overall) == (scheme == "fp8")
    assert served.overall.kl_mean >= weight_only.overall.kl_mean
    assert compare_models(tmp_path / "q", llama_folder, TEXT).activations == "BF16"


def test_a_loaded_model_keeps_its_inputs_and_a_mixture_is_counted(llama_folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", "fp8-dynamic", overrides=["down_proj=fp8"])
    model = load(tmp_path / "q")
    result = compare_models(llama_folder, model, TEXT, weight_only=True)
    expected = "E4M3 per token (dynamic) for 12 of 14 quantized weights, BF16 for 2 of 14 quantized weights"
    assert result.activations == result.to_dict()["activations"] == expected


def test_texts_count_by_their_tokens(llama_folder: Path, make_llama: MakeModel, tmp_path: Path, text: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Zürich, überall.", encoding="utf-8")
    other = make_llama(tmp_path / "other", seed=1)
    result = compare_models(llama_folder, other, [text, short], window=32)
    assert [summary.name for summary in result.texts] == ["fox.txt", "short.txt"]
    weights = [summary.tokens for summary in result.texts]
    assert result.overall.tokens == sum(weights)
    for field in ("kl_mean", "top1_agreement"):
        mean = np.average([getattr(summary, field) for summary in result.texts], weights=weights)
        assert getattr(result.overall, field) == pytest.approx(mean)
    assert len(result.rows()) == 3
    assert {len(row) for row in result.rows()} == {10}


def test_bits_per_byte_are_per_byte_of_utf_8(llama_folder: Path, text: Path) -> None:
    summary = compare_models(llama_folder, llama_folder, [text], window=32).overall
    assert summary.nbytes == pytest.approx(summary.tokens)  # a token is a byte here
    assert summary.baseline_bits_per_byte == pytest.approx(math.log2(summary.baseline_perplexity))


def test_a_tokenizer_that_begins_texts_with_bos_begins_every_window_with_it(
    llama_folder: Path, tmp_path: Path, text: Path
) -> None:
    folder = tmp_path / "bos"
    shutil.copytree(llama_folder, folder)
    config = json.loads((folder / "tokenizer.json").read_text())
    bos = {"id": "<s>", "ids": [256], "tokens": ["<s>"]}
    config["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": bos},
    }
    (folder / "tokenizer.json").write_text(json.dumps(config))
    result = compare_models(folder, folder, [text], window=33, max_tokens=96, dtype="float32")
    assert result.overall.tokens == 96
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(TEXT, add_special_tokens=False).input_ids[:96])
    windows = torch.cat([torch.full((3, 1), 256), ids.view(3, 32)], dim=1)
    with torch.no_grad():
        loss = load(folder, dtype=torch.float32)(windows, labels=windows).loss
    assert result.overall.baseline_perplexity == pytest.approx(math.exp(loss), rel=1e-5)


def test_a_string_is_a_text(llama_folder: Path) -> None:
    assert compare_models(llama_folder, llama_folder, TEXT, max_tokens=20).overall.tokens == 19


def test_batches_change_no_number_of_tokens(llama_folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = compare_models(llama_folder, llama_folder, [text], window=32, dtype="float32").overall
    monkeypatch.setattr(evaluate, "_BATCH_LOGITS", 1)
    alone = compare_models(llama_folder, llama_folder, [text], window=32, dtype="float32").overall
    assert together.tokens == alone.tokens
    assert together.baseline_perplexity == pytest.approx(alone.baseline_perplexity, rel=1e-6)


def test_progress_ends_at_the_bytes_of_the_texts(llama_folder: Path, text: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    compare_models(llama_folder, llama_folder, [text], window=32, progress=lambda *call: calls.append(call))
    done, total, name = calls[-1]
    assert done == total == len(TEXT.encode())
    assert name == "fox.txt"
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)


def test_the_dictionary_is_json_without_inf(llama_folder: Path) -> None:
    result = compare_models(llama_folder, llama_folder, TEXT, max_tokens=64)
    result = replace(result, overall=replace(result.overall, kl_max=math.inf))
    document = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert document["overall"]["kl_max"] is None
    assert document["texts"][0]["tokens"] == 63
    assert document["dtype"] == "bfloat16"


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("batch_logits", [1, 2**25])
def test_the_first_logit_that_is_nan_is_placed(
    llama_folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch, batch_logits: int
) -> None:
    monkeypatch.setattr(evaluate, "_BATCH_LOGITS", batch_logits)
    sound, broken = load(llama_folder), load(llama_folder)
    ids = torch.tensor(AutoTokenizer.from_pretrained(llama_folder)(TEXT, add_special_tokens=False).input_ids)
    window = ids[64:96]
    forward = broken.forward

    def forward_with_nan(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        output = forward(input_ids=input_ids, **kwargs)
        if input_ids.shape[1] == len(window):
            output.logits[(input_ids == window).all(1), 5] = torch.nan
        return output

    monkeypatch.setattr(broken, "forward", forward_with_nan)
    place = r"NaN or Inf where token 70 of fox\.txt is predicted"
    with pytest.raises(NonFiniteError, match=rf"logits of the candidate: {place}"):
        compare_models(sound, broken, [text], window=32)
    with pytest.raises(NonFiniteError, match=rf"logits of the baseline: {place}"):
        compare_models(broken, sound, [text], window=32)


def test_models_of_different_vocabularies_are_refused(
    llama_folder: Path, make_llama: MakeModel, tmp_path: Path
) -> None:
    other = make_llama(tmp_path / "other", vocab_size=300)
    with pytest.raises(UsageError, match="different vocabularies"):
        compare_models(llama_folder, other, TEXT)


def test_tokenizers_that_number_their_tokens_otherwise_are_refused(llama_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(llama_folder, other)
    config = json.loads((other / "tokenizer.json").read_text())
    vocabulary = config["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="4 entries differ"):
        compare_models(llama_folder, other, TEXT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"texts": "a"}, "text: 1 tokens; at least 2"),
        ({"texts": ""}, "text: 0 tokens; at least 2"),
        ({"texts": []}, "no text"),
        ({"window": 1}, "at least 2 tokens"),
        ({"window": 129}, "longer than the 128"),
        ({"max_tokens": 1}, "1 tokens; at least 2"),
        ({"dtype": "int8"}, "unknown dtype 'int8'; valid: bfloat16"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(llama_folder: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compare_models(llama_folder, llama_folder, **{"texts": TEXT, **arguments})


def test_a_text_that_is_not_there_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"absent\.txt: No such file"):
        compare_models(tmp_path / "no_model", tmp_path / "no_model", [tmp_path / "absent.txt"])


def test_a_text_that_is_not_utf_8_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("Zürich".encode("latin-1"))
    with pytest.raises(UsageError, match=r"latin\.txt: not UTF-8"):
        compare_models(llama_folder, llama_folder, [tmp_path / "latin.txt"])


def test_a_folder_that_is_no_model_is_an_error_of_ours(llama_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(MinifloatError):
        compare_models(llama_folder, tmp_path, TEXT)

"""`compare_models` on tiny models: the loss of transformers, a model against itself, interruptions and refusals."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comparing import compare_models
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from minifloat.calibration.calibrate import calibrate
from minifloat.calibration.options import CalibrateOptions
from minifloat.calibration.result import Calibration
from minifloat.calibration.rules import parse_rule
from minifloat.errors import DataError, MinifloatError, NonFiniteError, StorageError, UsageError
from minifloat.evaluate.compare import corpus, models, scoring, transformers_model
from minifloat.evaluate.compare import run as compare_run
from minifloat.evaluate.compare.options import Tolerance
from minifloat.evaluate.compare.verdict import Outcome
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

IN_FLOAT32 = LoadOptions(dtype=torch.float32)

MakeModel = Callable[..., Path]

TEXT = "The quick brown fox jumps over the lazy dog; naïve café. " * 6


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "fox.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def changed(folder: Path, copy: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Copy a checkpoint and change its weights."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize(("window", "max_tokens"), [(32, None), (50, 101), (128, 60)])
def test_perplexity_equals_the_loss_of_transformers_on_the_same_windows(
    llama_folder: Path, make_llama: MakeModel, tmp_path: Path, text: Path, window: int, max_tokens: int | None
) -> None:
    other = make_llama(tmp_path / "other", seed=1)
    result = compare_models(llama_folder, other, [text], window=window, max_tokens=max_tokens, dtype="float32")
    ids = torch.tensor(AutoTokenizer.from_pretrained(llama_folder)(TEXT, add_special_tokens=False).input_ids)
    ids = ids[:max_tokens]
    for folder, found in (
        (llama_folder, result.candidates[0].overall.baseline_perplexity),
        (other, result.candidates[0].overall.candidate_perplexity),
    ):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        total, count = 0.0, 0
        for part in (part[None] for part in ids.split(window) if len(part) > 1):
            with torch.no_grad():
                total += float(model(part, labels=part).loss) * (part.shape[1] - 1)
            count += part.shape[1] - 1
        assert result.candidates[0].overall.tokens == count
        assert found == pytest.approx(math.exp(total / count), rel=1e-5)


def test_kl_equals_torchs_kl(llama_folder: Path, make_llama: MakeModel, tmp_path: Path, text: Path) -> None:
    other = make_llama(tmp_path / "other", seed=1)
    result = compare_models(llama_folder, other, [text], window=128, max_tokens=100, dtype="float32")
    ids = torch.tensor([AutoTokenizer.from_pretrained(llama_folder)(TEXT, add_special_tokens=False).input_ids[:100]])
    with torch.no_grad():
        p, q = (load(f, IN_FLOAT32)(ids).logits[0, :-1].double().log_softmax(-1) for f in (llama_folder, other))
    kl = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    overall = result.candidates[0].overall
    assert overall.kl_mean.value == pytest.approx(float(kl.mean()), rel=1e-6)
    assert overall.kl_max == pytest.approx(float(kl.max()), rel=1e-6)
    worst = result.candidates[0].worst[0]
    assert (worst.kl, worst.position) == (pytest.approx(float(kl.max()), rel=1e-6), int(kl.argmax()) + 1)
    assert worst.context == TEXT.encode()[max(worst.position - 48, 0) : worst.position].decode(errors="replace")
    expected = p[worst.position - 1].exp().topk(5)
    assert [choice.probability for choice in worst.baseline] == pytest.approx(expected.values.tolist(), rel=1e-6)


def test_a_model_against_itself_has_no_difference(llama_folder: Path, text: Path) -> None:
    result = compare_models(llama_folder, llama_folder, [text], window=16)
    overall = result.candidates[0].overall
    assert (overall.kl_mean.value, overall.kl_max, overall.same_top1.value) == (0, 0, 1)
    assert overall.baseline_perplexity == overall.candidate_perplexity
    assert overall.baseline_bits_per_byte == overall.candidate_bits_per_byte
    assert result.outcome is Outcome.PASSED
    assert result.candidates[0].worst == ()


def test_several_candidates_cost_one_pass_of_the_baseline_and_score_as_if_alone(
    llama_folder: Path, fp8_folder: Path, mxfp4_folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [fp8_folder, mxfp4_folder]
    alone = [compare_models(llama_folder, folder, [text], window=32).candidates[0] for folder in folders]
    passes: list[str] = []
    logits = models.EngineModel.logits
    monkeypatch.setattr(
        models.EngineModel, "logits", lambda self, ids: passes.append(Path(self.name).name) or logits(self, ids)
    )
    both = compare_models(llama_folder, folders, [text], window=32)
    assert list(both.candidates) == alone
    assert passes.count(llama_folder.name) == len(passes) / 3


def test_transformers_and_the_engine_give_the_same_scores_in_steps_of_any_size(
    llama_folder: Path, make_llama: MakeModel, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_llama(tmp_path / "other", seed=1)
    expected = compare_models(llama_folder, other, [text], window=64, dtype="float32")
    assert expected.baseline.runner == expected.candidates[0].model.runner == "native"
    monkeypatch.setattr(scoring, "_SLAB_ELEMENTS", 2 * 320)
    slabs = compare_models(llama_folder, other, [text], window=64, dtype="float32")
    monkeypatch.setattr(compare_run, "_why_no_engine", lambda *_: "of this test")
    whole = compare_models(llama_folder, other, [text], window=64, dtype="float32")
    assert whole.baseline.runner == whole.candidates[0].model.runner == "transformers"
    monkeypatch.setattr(transformers_model, "_FEWEST_TOKENS", 5)
    monkeypatch.setattr(transformers_model, "_LOGITS", 5 * 320)
    pieces = compare_models(llama_folder, other, [text], window=64, dtype="float32")
    for result in (slabs, whole, pieces):
        for name in ("candidate_perplexity", "kl_max"):
            found, wanted = (getattr(one.candidates[0].overall, name) for one in (result, expected))
            assert found == pytest.approx(wanted, rel=1e-5)


def test_one_weight_scaled_by_five_percent_is_noticed(llama_folder: Path, tmp_path: Path, text: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    other = changed(llama_folder, tmp_path / "m", lambda tensors: tensors[name].mul_(1.05))
    overall = compare_models(llama_folder, other, [text], window=32, dtype="float32").candidates[0].overall
    assert overall.kl_mean.value > 1e-5
    assert overall.baseline_perplexity != overall.candidate_perplexity
    strict = Tolerance(max_kl=1e-6)
    assert compare_models(llama_folder, other, [text], window=16, tolerance=strict).outcome is Outcome.FAILED
    assert compare_models(other, other, [text], window=16, tolerance=strict).outcome is Outcome.PASSED


def test_fewer_bits_diverge_more(llama_folder: Path, fp8_folder: Path, mxfp4_folder: Path, text: Path) -> None:
    divergence = []
    for folder in (fp8_folder, mxfp4_folder):
        result = compare_models(llama_folder, folder, [text], window=32, dtype="float32")
        assert result.candidates[0].model.nbytes < result.baseline.nbytes
        divergence.append(result.candidates[0].overall.kl_mean.value)
    assert 0 < divergence[0] < divergence[1]


def test_quantized_experts_add_no_difference_of_their_own(make_mixtral: MakeModel, tmp_path: Path, text: Path) -> None:
    plain = make_mixtral(tmp_path / "plain")
    quantize_checkpoint(plain, tmp_path / "q", "fp8", QuantizeOptions(overrides=["self_attn=bf16"]))
    model = load(tmp_path / "q", LoadOptions(dtype=torch.float32, impl="reference"))
    twin = load(plain, IN_FLOAT32)
    for layer, mine in zip(model.model.layers, twin.model.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            experts = getattr(layer.mlp.experts, name).experts
            weights = [torch.cat([part.weight for part in parts]) for parts in experts]
            getattr(mine.mlp.experts, name).copy_(torch.stack(weights))
    assert compare_models(twin, model, [text], window=32).candidates[0].overall.kl_max == 0


@pytest.mark.parametrize(
    ("scheme", "activations"),
    [
        ("fp8", "FP32"),
        ("fp8-dynamic", "E4M3 per token (dynamic)"),
        ("fp8-block", "E4M3 per group 1x128 (dynamic)"),
    ],
)
def test_the_format_of_the_candidates_inputs_is_recorded(
    llama_folder: Path, tmp_path: Path, text: Path, scheme: str, activations: str
) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", scheme)
    served = compare_models(llama_folder, tmp_path / "q", [text], window=32, dtype="float32").candidates[0]
    weight_only = compare_models(
        llama_folder, tmp_path / "q", [text], window=32, dtype="float32", weight_only=True
    ).candidates[0]
    assert (served.model.activations, weight_only.model.activations) == (activations, "FP32")
    assert (served.model.runner, weight_only.model.runner) == (
        "native" if scheme == "fp8" else "transformers",
        "native",
    )
    assert (served.overall == weight_only.overall) == (scheme == "fp8")
    assert served.overall.kl_mean.value >= weight_only.overall.kl_mean.value
    assert compare_models(tmp_path / "q", llama_folder, [text]).candidates[0].model.activations == "BF16"


def test_candidates_have_the_output_layer_that_is_served(llama_folder: Path, mxfp4_folder: Path, text: Path) -> None:

    def compared(**options: Any) -> tuple[str, float]:
        result = compare_models(llama_folder, mxfp4_folder, [text], window=32, prompts=0, **options)
        assert result.baseline.lm_head == "bfloat16"
        candidate = result.candidates[0]
        return candidate.model.lm_head, candidate.overall.kl_mean.value

    assert compared() == compared(lm_head="fp8")
    assert compared()[0] == "fp8 (quantized while loading)"
    assert compared(lm_head="bf16") == ("bfloat16", compared(lm_head="bf16")[1])
    assert compared()[1] != compared(lm_head="bf16")[1]
    with pytest.raises(UsageError, match="unknown lm_head 'int4'"):
        compared(lm_head="int4")
    # the baseline's output layer stays as it is stored, so that this is the divergence that FP8 adds alone
    alone = compare_models(mxfp4_folder, mxfp4_folder, [text], window=32, prompts=0).candidates[0]
    assert 0 < alone.overall.kl_mean.value < compared()[1]


def test_a_loaded_model_keeps_its_inputs_and_different_formats_are_counted(
    llama_folder: Path, tmp_path: Path, text: Path
) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", "fp8-dynamic", QuantizeOptions(overrides=["down_proj=fp8"]))
    model = load(tmp_path / "q")
    result = compare_models(llama_folder, model, [text], weight_only=True)
    expected = "E4M3 per token (dynamic) for 12 of 14 quantized weights, BF16 for 2 of 14 quantized weights"
    assert result.candidates[0].model.activations == expected


def test_texts_are_weighted_by_their_tokens(
    llama_folder: Path, make_llama: MakeModel, tmp_path: Path, text: Path
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Zürich, überall.", encoding="utf-8")
    other = make_llama(tmp_path / "other", seed=1)
    result = compare_models(llama_folder, other, [text, short], window=32)
    (candidate,) = result.candidates
    assert [summary.name for summary in candidate.texts] == ["fox.txt", "short.txt"]
    weights = [summary.tokens for summary in candidate.texts]
    assert candidate.overall.tokens == sum(weights)
    for field in ("kl_mean", "same_top1"):
        mean = np.average([getattr(summary, field).value for summary in candidate.texts], weights=weights)
        assert getattr(candidate.overall, field).value == pytest.approx(mean)
    assert candidate.summaries == (*candidate.texts, candidate.overall)


def test_bits_per_byte_are_per_byte_of_utf_8(llama_folder: Path, text: Path) -> None:
    summary = compare_models(llama_folder, llama_folder, [text], window=32).candidates[0].overall
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
    overall = result.candidates[0].overall
    assert overall.tokens == 96
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(TEXT, add_special_tokens=False).input_ids[:96])
    windows = torch.cat([torch.full((3, 1), 256), ids.view(3, 32)], dim=1)
    with torch.no_grad():
        loss = load(folder, IN_FLOAT32)(windows, labels=windows).loss
    assert overall.baseline_perplexity == pytest.approx(math.exp(loss), rel=1e-5)


def test_the_size_of_batches_does_not_change_the_scores(
    llama_folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = compare_models(llama_folder, llama_folder, [text], window=32, dtype="float32").candidates[0].overall
    monkeypatch.setattr(corpus, "_BATCH_TOKENS", 1)
    alone = compare_models(llama_folder, llama_folder, [text], window=32, dtype="float32").candidates[0].overall
    assert together.tokens == alone.tokens
    assert together.baseline_perplexity == pytest.approx(alone.baseline_perplexity, rel=1e-6)


@pytest.mark.parametrize(("count", "shares"), [(1, []), (2, [1, 1, 2]), (3, [])])
def test_native_models_that_run_at_the_same_time_have_equal_shares_of_the_threads_and_the_same_scores(
    count: int,
    shares: list[int],
    llama_folder: Path,
    mxfp4_folder: Path,
    text: Path,
    small_batches: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kl() -> Any:
        return compare_models(llama_folder, mxfp4_folder, [text], window=16, prompts=0).candidates[0].overall.kl_mean

    alone = kl()
    asked: list[int] = []
    monkeypatch.setattr(scoring.threads, "count", lambda: count)
    monkeypatch.setattr(scoring.threads, "set_threads", asked.append)
    assert kl() == alone
    assert sorted(asked) == shares


def test_progress_ends_at_the_tokens_of_the_texts(llama_folder: Path, text: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    compare_models(llama_folder, llama_folder, [text], window=32, progress=lambda *call: calls.append(call))
    done, total, name = calls[-1]
    assert done == total == len(TEXT.encode())
    assert name == "fox.txt"
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)


def test_the_dictionary_is_valid_json_without_inf(llama_folder: Path, text: Path) -> None:
    result = compare_models(llama_folder, llama_folder, [text], max_tokens=64)
    document = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    (candidate,) = document["candidates"]
    assert candidate["overall"]["margins"][-1]["high"] is None  # where infinity stood
    unknown = dict.fromkeys(["low", "high", "effective_units", "degrees"])  # too few windows
    assert candidate["overall"]["kl_mean"] == {"value": 0, **unknown}
    assert candidate["texts"][0]["tokens"] == 63
    assert candidate["verdict"]["outcome"] == document["outcome"] == "not enough data"
    assert (document["schema_version"], document["dtype"], document["partial"]) == (2, "bfloat16", False)


def test_the_tolerance_decides_the_outcome(llama_folder: Path, mxfp4_folder: Path, text: Path) -> None:
    generous, strict = (
        compare_models(llama_folder, mxfp4_folder, [text], window=16, tolerance=tolerance)
        for tolerance in (Tolerance(1, 10, 0), Tolerance(max_kl=1e-9))
    )
    assert generous.outcome is Outcome.PASSED
    assert strict.outcome is Outcome.FAILED
    assert "mean KL" in {check.quantity for check in strict.candidates[0].verdict.unmet}


def test_beginnings_of_windows_are_continued_by_all_models(llama_folder: Path, mxfp4_folder: Path, text: Path) -> None:
    result = compare_models(llama_folder, [llama_folder, mxfp4_folder], [text], window=40, prompts=5, new_tokens=12)
    itself, quantized = (candidate.generation for candidate in result.candidates)
    assert itself is not None
    assert quantized is not None
    assert (itself.prompts, itself.new_tokens, itself.parted) == (5, 12, 0)
    assert quantized.parted > 0
    assert all(TEXT.find(sample.prompt) >= 0 for sample in quantized.samples)


def test_an_error_of_the_continuations_becomes_a_note_and_the_scores_are_kept(llama_folder: Path, text: Path) -> None:
    text.write_text(TEXT * 2, encoding="utf-8")
    result = compare_models(llama_folder, llama_folder, [text], window=40, prompts=2, new_tokens=97)
    assert result.outcome is Outcome.PASSED
    assert result.candidates[0].generation is None
    (note,) = result.notes
    assert note.startswith("greedy continuations: ")
    assert "128" in note  # positions of the model


def test_a_text_too_short_to_continue_has_no_continuations(llama_folder: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Zürich, überall.", encoding="utf-8")
    assert compare_models(llama_folder, llama_folder, [short], prompts=32).candidates[0].generation is None


def test_variants_leave_out_the_fp8_cache_and_the_quantized_inputs(
    llama_folder: Path, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = calibrate(llama_folder, [text], CalibrateOptions(samples=8, seq_len=32)).stats
    calibration = Calibration(stats, parse_rule("max"))
    quantize_checkpoint(
        llama_folder, tmp_path / "q", "fp8-static", QuantizeOptions(kv_cache=True), calibration=calibration
    )
    result = compare_models(llama_folder, tmp_path / "q", [text], window=32, variants=True)
    whole, plain_cache, weights = result.candidates
    name = str(tmp_path / "q")
    assert [candidate.model.name for candidate in result.candidates] == [
        name,
        f"{name} (KV cache not rounded)",
        f"{name} (weights only)",
    ]
    assert [candidate.model.kv_cache for candidate in result.candidates] == ["E4M3", None, None]
    assert [candidate.model.activations for candidate in result.candidates] == 2 * ["E4M3 per tensor (static)"] + [
        "BF16"
    ]
    divergences = [candidate.overall.kl_mean.value for candidate in (whole, plain_cache, weights)]
    assert len(set(divergences)) == 3
    assert min(divergences) == weights.overall.kl_mean.value
    monkeypatch.setattr(compare_run, "_why_no_engine", lambda *_: "as the variants")
    alone = compare_models(llama_folder, tmp_path / "q", [text], window=32, weight_only=True, kv_cache="none")
    assert alone.candidates[0].overall == weights.overall
    served = compare_models(llama_folder, tmp_path / "q", [text], window=32)
    assert served.candidates == (whole,)


# ------------------------------------------------------------------------------------------------- interruptions


def interrupted_after(batches: int) -> Callable[[int, int, str], None]:
    calls = iter(range(1000))

    def progress(*_: Any) -> None:
        if next(calls) == batches:  # the first call tells of the memory
            raise KeyboardInterrupt

    return progress


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_BATCH_TOKENS", 32)


def test_an_interrupted_run_returns_the_scores_so_far(llama_folder: Path, text: Path, small_batches: None) -> None:
    result = compare_models(llama_folder, llama_folder, [text], window=32, progress=interrupted_after(3))
    assert result.partial
    assert (result.tokens_done, result.tokens_total) == (96, len(TEXT.encode()))
    assert result.candidates[0].overall.tokens == 93


def test_a_run_interrupted_before_every_text_has_a_score_raises(
    llama_folder: Path, tmp_path: Path, text: Path, small_batches: None
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Zürich, überall.", encoding="utf-8")
    with pytest.raises(KeyboardInterrupt):
        compare_models(llama_folder, llama_folder, [text, short], window=32, progress=interrupted_after(1))


def test_an_interrupted_run_resumes_after_the_last_written_batch(
    llama_folder: Path,
    tmp_path: Path,
    mxfp4_folder: Path,
    text: Path,
    small_batches: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments: dict[str, Any] = {"window": 32, "resume": tmp_path / "work"}
    whole = compare_models(llama_folder, mxfp4_folder, [text], window=32)
    monkeypatch.setattr(scoring, "_SECONDS_BETWEEN_PARTS", 0)
    compare_models(llama_folder, mxfp4_folder, [text], **arguments, progress=interrupted_after(3))
    passes: list[int] = []
    logits = models.EngineModel.logits
    monkeypatch.setattr(models.EngineModel, "logits", lambda self, ids: passes.append(1) or logits(self, ids))
    resumed = compare_models(llama_folder, mxfp4_folder, [text], **arguments)
    assert resumed.candidates == whole.candidates
    assert not resumed.partial
    assert len(passes) == 2 * (12 - 3)
    passes.clear()
    assert compare_models(llama_folder, mxfp4_folder, [text], **arguments).candidates == whole.candidates
    assert not passes


def test_resuming_from_the_folder_of_another_comparison_is_refused(
    llama_folder: Path, tmp_path: Path, text: Path
) -> None:
    compare_models(llama_folder, llama_folder, [text], window=32, resume=tmp_path / "work")
    with pytest.raises(UsageError, match="scores of other models, texts or settings"):
        compare_models(llama_folder, llama_folder, [text], window=31, resume=tmp_path / "work")
    with pytest.raises(UsageError, match="neither empty nor"):
        compare_models(llama_folder, llama_folder, [text], window=32, resume=llama_folder)
    with pytest.raises(UsageError, match="resume needs folders"):
        compare_models(llama_folder, load(llama_folder), [text], resume=tmp_path / "other")


def test_a_damaged_part_of_the_measurement_log_is_named(llama_folder: Path, tmp_path: Path, text: Path) -> None:
    compare_models(llama_folder, llama_folder, [text], window=32, resume=tmp_path / "work")
    (part,) = (tmp_path / "work").glob("part-*.npz")
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(StorageError, match=part.name):
        compare_models(llama_folder, llama_folder, [text], window=32, resume=tmp_path / "work")


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("batch", [32, 2048])
def test_the_error_names_the_first_token_with_a_nan_logit(
    llama_folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr(corpus, "_BATCH_TOKENS", batch)
    sound, broken = load(llama_folder), load(llama_folder)
    ids = AutoTokenizer.from_pretrained(llama_folder)(TEXT, add_special_tokens=False).input_ids
    place = TEXT.encode().index("ï".encode())
    first = place // 32 * 32 + 1  # a masked value that is NaN makes every token of its window NaN
    broken.get_input_embeddings().weight[ids[place]] = torch.nan
    sound.config.name_or_path, broken.config.name_or_path = str(llama_folder), f"{llama_folder}/../{llama_folder.name}"
    with pytest.raises(NonFiniteError, match=rf"NaN or Inf where token {first} of fox\.txt is predicted") as caught:
        compare_models(sound, broken, [text], window=32)
    assert str(broken.config.name_or_path) in str(caught.value)
    with pytest.raises(NonFiniteError, match=rf"where token {first} of") as caught:
        compare_models(broken, sound, [text], window=32)
    assert str(broken.config.name_or_path) in str(caught.value)


def test_models_of_different_vocabularies_are_refused(
    llama_folder: Path, make_llama: MakeModel, tmp_path: Path, text: Path
) -> None:
    other = make_llama(tmp_path / "other", vocab_size=300)
    with pytest.raises(UsageError, match="different vocabularies"):
        compare_models(llama_folder, other, [text])


def test_tokenizers_with_different_token_ids_are_refused(llama_folder: Path, tmp_path: Path, text: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(llama_folder, other)
    config = json.loads((other / "tokenizer.json").read_text())
    vocabulary = config["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="4 entries differ"):
        compare_models(llama_folder, other, [text])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 1}, "window: expected at least 2"),
        ({"window": 129}, "longer than the 128"),
        ({"max_tokens": 1}, "max_tokens: expected at least 2"),
        ({"dtype": "int8"}, "unknown dtype 'int8'; valid: bfloat16"),
        ({"candidates": []}, "no model to compare"),
    ],
)
def test_options_that_do_not_fit_the_models_or_the_text_are_refused(
    llama_folder: Path, text: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        compare_models(**{"baseline": llama_folder, "candidates": llama_folder, "data": [text], **arguments})


def test_a_missing_text_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.txt: no such file"):
        compare_models(tmp_path / "no_model", tmp_path / "no_model", [tmp_path / "absent.txt"])


def test_a_folder_without_a_model_raises_a_minifloat_error(llama_folder: Path, tmp_path: Path, text: Path) -> None:
    with pytest.raises(MinifloatError):
        compare_models(llama_folder, tmp_path, [text])


def test_models_in_the_engine_are_compared_without_the_models_of_transformers(llama_folder: Path, text: Path) -> None:
    code = (
        "import sys\n"
        "from minifloat import compare_models\n"
        "result = compare_models(sys.argv[1], sys.argv[1], sys.argv[2])\n"
        "assert result.candidates[0].model.runner == 'native', result.candidates[0].model\n"
        "print({'transformers.modeling_utils', 'transformers.models.auto.configuration_auto'} & set(sys.modules))\n"
    )
    arguments = [sys.executable, "-c", code, str(llama_folder), str(text)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


@pytest.mark.parametrize(("scheme", "needed"), [("mxfp4", False), ("fp8-dynamic", True)])
def test_the_command_imports_the_kernels_of_tensors_without_memory_for_transformers_only(
    scheme: str, needed: bool, llama_folder: Path, tmp_path: Path, text: Path
) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "quantized", scheme)
    code = (
        "import atexit, sys\n"
        "from minifloat.commands.main import main\n"
        "atexit.register(lambda: print('torch._meta_registrations' in sys.modules))\n"
        "main()\n"
    )
    models = [str(llama_folder), str(tmp_path / "quantized")]
    options = ["--data", str(text), "--window", "16", "--prompts", "0", "--no-report"]
    command = [sys.executable, "-c", code, "compare", *models, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == str(needed), done.stderr
    assert "same top-1" in done.stdout

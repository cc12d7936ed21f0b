"""Suggestions: a checkpoint quantized as suggested has the measured distance and size."""

import itertools
import math
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import compare_models
from safetensors.torch import load_file, save_file
from torch import nn

from minifloat.checkpoint import Checkpoint
from minifloat.evaluate.compare.attribution import KeepableGroups, ModuleGroup, Suggestion, attribute, suggest
from minifloat.evaluate.compare.attribution.damage import Distance, Mixtures, TimeBudget
from minifloat.evaluate.compare.attribution.differences import Difference, Location, find_differences
from minifloat.evaluate.compare.options import Tolerance
from minifloat.evaluate.compare.transformers_model import TransformersModel
from minifloat.model.architecture.roles import expert_group, fused_group
from minifloat.model.layouts import describe
from minifloat.model.runtime.load import LoadOptions
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

MakeModel = Callable[..., Path]

WINDOWS = torch.randint(0, 256, (6, 32), generator=torch.Generator().manual_seed(0))
OPTIONS = LoadOptions(dtype=torch.float32)
SECONDS = 60.0


def found_by_search(
    baseline: Path,
    candidate: Path,
    max_kl: float = math.inf,
    seconds: float = SECONDS,
    windows: torch.Tensor = WINDOWS,
    **bounds: float,
) -> Suggestion | None:
    tolerance = Tolerance(**{"max_ppl_increase": math.inf, "min_same_top1": 0.0, "max_kl": max_kl, **bounds})
    models = [TransformersModel.of(folder, OPTIONS) for folder in (baseline, candidate)]
    return attribute(models[0], models[1], windows, tolerance, seconds).suggestion


def suggested(*arguments: Any, **options: Any) -> Suggestion:
    found = found_by_search(*arguments, **options)
    assert found is not None
    return found


def figures(baseline: Path, candidate: Path) -> tuple[float, float, float]:
    """Return KL divergence, perplexity increase and same top-1, computed with torch."""
    models = [TransformersModel.of(folder, OPTIONS).model for folder in (baseline, candidate)]
    with torch.no_grad():
        p, q = (model(WINDOWS).logits[:, :-1].double().log_softmax(-1) for model in models)
    kl = nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1).mean()
    more = (p - q).gather(-1, WINDOWS[:, 1:, None]).mean()
    same = p.argmax(-1) == q.argmax(-1)
    return float(kl), float(more.exp() - 1), float(same.double().mean())


def stored_bytes(folder: Path) -> int:
    with Checkpoint.open(folder) as checkpoint:
        return sum(info.nbytes for info in checkpoint.tensors.values())


def quantized_modules(folder: Path) -> set[str]:
    with Checkpoint.open(folder) as checkpoint:
        return set(describe(checkpoint).weights)


@pytest.mark.parametrize(
    ("model_type", "scheme"),
    [("llama", "mxfp4"), ("llama", "fp8-dynamic"), ("llama", "nvfp4"), ("mixtral", "mxfp4"), ("qwen3_moe", "fp8")],
)
@pytest.mark.parametrize("share", [0.7, 0.3])
def test_a_checkpoint_quantized_as_suggested_has_the_measured_distance(
    make_model: MakeModel, tmp_path: Path, model_type: str, scheme: str, share: float
) -> None:
    plain = make_model(tmp_path / "plain", model_type)
    quantize_checkpoint(plain, tmp_path / "q", scheme)
    before = figures(plain, tmp_path / "q")
    found = suggested(plain, tmp_path / "q", max_kl=share * before[0])
    quantize_checkpoint(plain, tmp_path / "better", scheme, QuantizeOptions(overrides=found.overrides))
    after = figures(plain, tmp_path / "better")
    assert (found.kl_before, found.ppl_increase_before, found.same_top1_before) == pytest.approx(before, rel=1e-4)
    assert (found.kl_after, found.ppl_increase_after, found.same_top1_after) == pytest.approx(after, rel=1e-4)
    assert found.reaches
    assert not found.everything
    assert after[0] <= share * before[0] * 1.0001
    assert found.extra_bytes == stored_bytes(tmp_path / "better") - stored_bytes(tmp_path / "q") > 0
    assert quantized_modules(tmp_path / "better") == quantized_modules(tmp_path / "q") - set(found.modules)
    for grouping in (fused_group, expert_group):
        kept = {grouping(module) for module in found.modules} - {None}
        assert not kept & {grouping(module) for module in quantized_modules(tmp_path / "better")}


@pytest.mark.parametrize(
    ("module", "override"),
    [
        ("model.layers.1.mlp.down_proj", r"\.1\.mlp\.down_proj$=bf16"),
        ("model.layers.0.self_attn.v_proj", r"layers\.0\.self_attn\.(k|q|v)_proj$=bf16"),
    ],
)
def test_only_the_modules_fused_with_a_wrong_one_are_kept(
    llama_folder: Path, tmp_path: Path, fp8_folder: Path, module: str, override: str
) -> None:
    shutil.copytree(fp8_folder, tmp_path / "wrong")
    tensors = load_file(tmp_path / "wrong" / "model.safetensors")
    tensors[f"{module}.weight_scale"] *= 2
    save_file(tensors, tmp_path / "wrong" / "model.safetensors", metadata={"format": "pt"})
    usual = figures(llama_folder, fp8_folder)[0]
    found = suggested(llama_folder, tmp_path / "wrong", max_kl=1.1 * usual)
    assert len(found.overrides) == 1
    assert found.overrides[0].endswith(override.removeprefix(r"\.1"))
    assert module in found.modules


def test_a_suggestion_costs_little_more_than_the_cheapest_sufficient_choice(
    llama_folder: Path, mxfp4_folder: Path
) -> None:
    baseline, candidate = (TransformersModel.of(folder, OPTIONS) for folder in (llama_folder, mxfp4_folder))
    rows = {row.module: row for row in attribute(baseline, candidate, WINDOWS, Tolerance(), SECONDS).rows}
    groups: dict[str, list[Difference]] = {}
    with torch.inference_mode():
        for difference in find_differences(baseline.model, candidate.model):
            groups.setdefault(fused_group(difference.name), []).append(difference)
        assert len(groups) == 8
        mixtures = Mixtures(baseline, candidate, WINDOWS)
        choices = []
        for count in range(9):
            for kept in itertools.combinations(groups.values(), count):
                differences = [difference for group in kept for difference in group]
                cost = sum(rows[difference.name].extra_bytes for difference in differences)
                choices.append((cost, mixtures.measure(differences).kl))
    for share in (0.8, 0.5, 0.2):
        bound = share * choices[0][1]
        found = suggested(llama_folder, mxfp4_folder, max_kl=bound)
        best = min(cost for cost, kl in choices if kl <= bound)
        assert best <= found.extra_bytes <= 1.3 * best


def test_unnecessary_groups_are_dropped_the_most_expensive_first() -> None:
    """Being within the tolerance takes group c and one of a and b, of which b is cheaper."""
    differences = {name: Difference((Location("", name),)) for name in "abcd"}
    damage = {"a": 4.0, "b": 3.0, "c": 2.0, "d": 0.1}
    nbytes = {"a": 4, "b": 3, "c": 20, "d": 10}
    groups = tuple(ModuleGroup((differences[name],), (name,), nbytes[name], damage[name]) for name in "abcd")

    class Fake:
        tokens = 1

        def measure(self, kept: Iterable[Difference]) -> Distance:
            names = {difference.name for difference in kept}
            return Distance(0.0 if "c" in names and names & {"a", "b"} else 1.0, 0.0, 1.0)

        def keeps_quantized(self, kept: Iterable[Difference]) -> bool:
            return len(list(kept)) < 4

    fake: Any = Fake()
    found = suggest(KeepableGroups(groups, tuple("abcd")), fake, Tolerance(), TimeBudget(SECONDS))
    assert found is not None
    assert (found.modules, found.extra_bytes, found.reaches, found.everything) == (("b", "c"), 23, True, False)


class CountedBudget(TimeBudget):
    """Time for a number of questions whether there is any left."""

    def __init__(self, steps: int) -> None:
        super().__init__(SECONDS)
        self._steps = steps

    def until(self, fraction: float = 1.0) -> float:
        self._steps -= 1
        return float(self._steps >= 0)


@pytest.mark.parametrize(
    ("steps", "enough", "kept", "reaches", "finished"),
    [
        (0, 1, 1, True, True),  # one wrong module needs no more than the first step
        (0, 6, 1, False, False),
        (2, 6, 4, False, False),
        (3, 6, 8, True, False),  # 8 of 16 are enough, and 5 to 7 were not tried
        (20, 6, 6, True, True),
        (20, 16, 16, True, True),
    ],
)
def test_few_modules_need_few_steps_and_a_search_that_ends_early_says_so(
    steps: int, enough: int, kept: int, reaches: bool, finished: bool
) -> None:
    differences = [Difference((Location("", str(index)),)) for index in range(16)]
    groups = tuple(ModuleGroup((d,), (f"m{n}",), 1, 16.0 - n) for n, d in enumerate(differences))

    class Fake:
        tokens = 1

        def measure(self, kept: Iterable[Difference]) -> Distance:
            return Distance(0.0 if set(differences[:enough]) <= set(kept) else 1.0, 0.0, 1.0)

        def keeps_quantized(self, kept: Iterable[Difference]) -> bool:
            return len(list(kept)) < 16

    fake: Any = Fake()
    found = suggest(KeepableGroups(groups, tuple(f"m{n}" for n in range(16))), fake, Tolerance(), CountedBudget(steps))
    assert found is not None
    assert (len(found.modules), found.reaches, found.finished) == (kept, reaches, finished)
    assert found.everything == (kept == 16)


def test_the_verdict_on_a_suggestion_is_that_of_a_checkpoint_quantized_as_suggested(
    llama_folder: Path, tmp_path: Path, mxfp4_folder: Path
) -> None:
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 30)
    options: Any = {"data": [tmp_path / "a.txt"], "window": 32, "prompts": 0, "lm_head": "bf16", "dtype": "float32"}
    kl = compare_models(llama_folder, mxfp4_folder, **options).candidates[0].overall.kl_mean.value
    options["tolerance"] = Tolerance(max_kl=kl / 2, max_ppl_increase=math.inf, min_same_top1=0)
    with_attribution = compare_models(llama_folder, mxfp4_folder, **options, attribute=5.0).candidates[0].attribution
    assert with_attribution is not None
    found = with_attribution.suggestion
    assert found is not None
    assert found.verdict is not None
    quantize_checkpoint(llama_folder, tmp_path / "better", "mxfp4", QuantizeOptions(overrides=found.overrides))
    expected = compare_models(llama_folder, tmp_path / "better", **options).candidates[0].verdict
    assert found.verdict.outcome is expected.outcome
    for check, other in zip(found.verdict.checks, expected.checks, strict=True):
        values = [(e.value, e.low, e.high) for e in (check.estimate, other.estimate)]
        assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-7)


def test_a_suggestion_keeps_every_bound(llama_folder: Path, mxfp4_folder: Path) -> None:
    found = suggested(llama_folder, mxfp4_folder, min_same_top1=0.97)
    assert found.same_top1_before < 0.97 <= found.same_top1_after
    torch.manual_seed(0)
    own = TransformersModel.of(llama_folder, OPTIONS).model.generate(
        WINDOWS[:, :1], do_sample=True, max_new_tokens=31, min_new_tokens=31, use_cache=False
    )  # the baseline's own text, of which every other model is less sure
    found = suggested(llama_folder, mxfp4_folder, windows=own, max_ppl_increase=0.01)
    assert found.ppl_increase_before > 0.01 >= found.ppl_increase_after
    assert found.reaches


def test_nothing_is_suggested_for_a_model_within_the_tolerance(llama_folder: Path, fp8_folder: Path) -> None:
    assert found_by_search(llama_folder, fp8_folder, max_kl=100) is None


def test_nothing_is_suggested_where_no_override_can_help(
    llama_folder: Path, make_llama: MakeModel, tmp_path: Path, fp8_folder: Path
) -> None:
    assert found_by_search(llama_folder, make_llama(tmp_path / "other", seed=1), max_kl=1e-9) is None
    quantize_checkpoint(llama_folder, tmp_path / "q4", "mxfp4")
    assert found_by_search(fp8_folder, tmp_path / "q4", max_kl=1e-9) is None


def test_nothing_is_suggested_when_the_time_is_up(llama_folder: Path, mxfp4_folder: Path) -> None:
    assert found_by_search(llama_folder, mxfp4_folder, max_kl=1e-9, seconds=0) is None


def test_a_suggestion_that_keeps_every_module_says_so(llama_folder: Path, mxfp4_folder: Path) -> None:
    found = suggested(llama_folder, mxfp4_folder, max_kl=0)
    assert (found.reaches, found.everything, found.kl_after, len(found.modules)) == (True, True, 0, 14)


def test_a_suggestion_that_is_not_enough_says_so(llama_folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", "mxfp4")
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    tensors["model.norm.weight"] *= torch.linspace(0.5, 1.5, 64)
    save_file(tensors, tmp_path / "q" / "model.safetensors", metadata={"format": "pt"})
    found = suggested(llama_folder, tmp_path / "q", max_kl=1e-6)
    assert (found.reaches, found.everything) == (False, True)
    assert found.kl_after > 1e-6

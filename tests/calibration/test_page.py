from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pages import loads_nothing, parse

from minifloat.calibration.document import document
from minifloat.calibration.result import read_stats, write_stats
from minifloat.calibration.rules import Max, MeanSquaredError, Percentile, Rule
from minifloat.calibration.scales import DEFAULT_WINDOW, activation_scales, kv_scales, saturation
from minifloat.calibration.stats import ActivationStats, KVStats, ModelIdentity, ModuleStats
from minifloat.calibration.summary import summarize
from minifloat.errors import StatsError, UsageError
from minifloat.numerics.histogram import BINS, count_magnitudes
from minifloat.report import html
from minifloat.report.text import name_in_layer
from minifloat.report.text import short as number

MODEL = ModelIdentity("LlamaForCausalLM", "c" * 64, "t" * 64, "w" * 64)
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SVG = "{http://www.w3.org/2000/svg}"


def seen(rng: np.random.Generator, sequences: int, size: float, tokens: int = 100) -> ModuleStats:
    values = np.abs(rng.normal(size=(sequences, 500)) * size).astype(np.float32)
    return ModuleStats(values.max(axis=1), np.full(sequences, tokens), count_magnitudes(values))


def unseen(sequences: int) -> ModuleStats:
    return ModuleStats(np.zeros(sequences, np.float32), np.zeros(sequences, np.int64), np.zeros(BINS, np.int64))


def make_stats(
    seed: int = 0, sequences: int = 40, layers: int = 12, gain: float = 1.0, data: Mapping[str, Any] | None = None
) -> ActivationStats:
    rng = np.random.default_rng(seed)
    inputs, kv = {}, {}
    for layer in range(layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        for size, names in ((1, ("q", "k", "v")), (2, ("o",))):
            shared = seen(rng, sequences, size * gain)
            inputs |= {f"{attention}.{name}_proj": shared for name in names}
        for size, names in ((3, ("gate", "up")), (400, ("down",))):
            shared = seen(rng, sequences, size * gain)
            inputs |= {f"{mlp}.{name}_proj": shared for name in names}
        heads = rng.random((2, sequences, 4), dtype=np.float32) + np.float32(0.5)
        kv[attention] = KVStats(heads[0], heads[1])
    return ActivationStats(MODEL, sequences, 100 * sequences, data or {}, inputs, kv)


def with_experts(sequences: int = 40) -> ActivationStats:
    """Return statistics in which expert 0 has many tokens, expert 1 too few and expert 2 none."""
    stats = make_stats(sequences=sequences, layers=1)
    rng = np.random.default_rng(1)
    few = ModuleStats(
        np.where(np.arange(sequences) == 0, 1, 0).astype(np.float32),
        np.where(np.arange(sequences) == 0, 5, 0),
        count_magnitudes(np.ones(5, np.float32)),
    )
    experts = {0: seen(rng, sequences, 2), 1: few, 2: unseen(sequences)}
    names = {f"model.layers.0.mlp.experts.{index}.down_proj": summary_row for index, summary_row in experts.items()}
    return replace(stats, inputs={**stats.inputs, **names})


def stats_page(stats: ActivationStats, rule: Rule, held_out: ActivationStats | None = None) -> str:
    return html.write(document(stats, rule, held_out))


def cells(page: str, caption: str) -> dict[str, list[str]]:
    """Return the rows of the table whose first heading is `caption`."""
    for table in parse(page).iter("table"):
        head, *rows = [["".join(cell.itertext()).strip() for cell in row] for row in table.iter("tr")]
        if head[0] == caption:
            return {row[0]: row[1:] for row in rows}
    raise AssertionError(f"no table of {caption}")


# Numbers


@pytest.mark.parametrize("rule", [Max(), Percentile(99.0), MeanSquaredError()])
def test_the_scales_are_those_that_quantize_writes(rule: Rule) -> None:
    stats = make_stats()
    expected, by_max = activation_scales(stats, rule), activation_scales(stats)
    rows = summarize(stats, rule).inputs
    assert {summary_row.module: summary_row.scale for summary_row in rows} == {
        name: float(summary_row) for name, summary_row in expected.scales.items()
    }
    for summary_row in rows:
        assert (
            summary_row.against_max
            == float(expected.scales[summary_row.module]) / float(by_max.scales[summary_row.module]) - 1.0
        )


@pytest.mark.parametrize("rule", [Max(), Percentile()])
def test_the_caches_have_the_scales_that_quantize_writes(rule: Rule) -> None:
    stats = make_stats()
    rows = {summary_row.tensor: summary_row for summary_row in summarize(stats, rule).caches}
    assert len(rows) == 2 * len(stats.kv)
    for name, pair in kv_scales(stats).items():
        assert (rows[f"{name}.k"].scale, rows[f"{name}.v"].scale) == (float(pair.k), float(pair.v))
        assert rows[f"{name}.k"].amax == tuple(stats.kv[name].k_amax.max(axis=0).tolist())


def test_saturation_is_that_of_the_rules_scale_on_held_out_text() -> None:
    stats, held_out = make_stats(), make_stats(seed=1, gain=1.5)
    rows = summarize(stats, Max(), held_out).inputs
    assert any(summary_row.lost is not None and summary_row.lost.saturated > 0 for summary_row in rows)
    for summary_row in rows:
        assert summary_row.lost == saturation(held_out.inputs[summary_row.module], summary_row.scale or 0.0)


def test_modules_are_listed_in_the_order_in_which_a_decoder_runs_them(tmp_path: Any) -> None:
    write_stats(make_stats(), tmp_path / "stats.safetensors")
    loaded = summarize(read_stats(tmp_path / "stats.safetensors"), Max())
    names = [summary_row.module for summary_row in loaded.inputs]
    assert [name.rpartition(".")[2] for name in names] == [*KINDS] * 12
    assert [int(name.split(".")[2]) for name in names] == sorted(int(name.split(".")[2]) for name in names)
    assert [summary_row.tensor for summary_row in loaded.caches][-2:] == [
        "model.layers.11.self_attn.k",
        "model.layers.11.self_attn.v",
    ]


def test_a_module_that_was_never_called_has_no_scale_and_is_named() -> None:
    stats = make_stats()
    lost = "model.layers.3.mlp.down_proj"
    summary = summarize(replace(stats, inputs={**stats.inputs, lost: unseen(40)}), Max(), stats)
    (row,) = (summary_row for summary_row in summary.inputs if summary_row.module == lost)
    assert (row.scale, row.against_max, row.lost, row.tokens) == (None, None, None, 0)
    assert "no token" in row.problem
    assert sum(summary_row.scale is None for summary_row in summary.inputs) == 1
    assert any("Never called (1 modules): " + lost in warning for warning in summary.warnings)


def test_an_input_of_zeros_has_no_scale_and_is_named() -> None:
    stats = make_stats()
    silent = "model.layers.3.mlp.down_proj"
    zeros = replace(unseen(40), tokens=np.full(40, 9))
    attention = "model.layers.2.self_attn"
    no_k = replace(stats.kv[attention], k_amax=np.zeros((40, 4), np.float32))
    changed = replace(stats, inputs={**stats.inputs, silent: zeros}, kv={**stats.kv, attention: no_k})
    (warning,) = (text for text in summarize(changed, Max()).warnings if text.startswith("No scale"))
    assert silent in warning
    assert f"{attention}.k" in warning


def test_experts_below_the_floor_are_named_with_their_tokens() -> None:
    summary = summarize(with_experts(), Max())
    (warning,) = (text for text in summary.warnings if text.startswith("Experts"))
    assert "model.layers.0.mlp.experts.1 (5), model.layers.0.mlp.experts.2 (0)" in warning
    assert "experts.0" not in warning
    scales = {
        summary_row.module: summary_row.scale for summary_row in summary.inputs if "experts" in summary_row.module
    }
    assert len(set(scales.values())) == 1


def test_scales_that_have_not_converged_are_named_largest_change_first() -> None:
    stats = make_stats(layers=2)
    amax = np.ones(40, np.float32)
    settled = ModuleStats(amax, np.full(40, 9))
    jump = {
        name: replace(settled, amax=np.where(np.arange(40) == 39, size, amax)) for name, size in (("o", 2), ("down", 8))
    }
    inputs = dict.fromkeys(stats.inputs, settled)
    inputs |= {"model.layers.1.self_attn.o_proj": jump["o"], "model.layers.0.mlp.down_proj": jump["down"]}
    kv = dict.fromkeys(stats.kv, KVStats(amax[:, None], amax[:, None]))
    (warning,) = summarize(replace(stats, inputs=inputs, kv=kv), Max()).warnings
    assert "2 of 18 scales" in warning
    assert "model.layers.0.mlp.down_proj (87.5%), model.layers.1.self_attn.o_proj (50.0%)" in warning


def test_too_few_sequences_to_judge_convergence_give_a_warning() -> None:
    few, enough = (summarize(make_stats(sequences=DEFAULT_WINDOW + more), Max()).warnings for more in (0, 1))
    assert any("Too few sequences" in warning for warning in few)
    assert not any("Too few sequences" in warning for warning in enough)


def test_held_out_text_through_another_model_is_refused() -> None:
    other = replace(make_stats(), model=replace(MODEL, weights="x" * 64))
    with pytest.raises(StatsError, match="values of the weights"):
        summarize(make_stats(), Max(), other)


def test_held_out_text_needs_histograms() -> None:
    bare = make_stats()
    bare = replace(
        bare, inputs={name: replace(summary_row, histogram=None) for name, summary_row in bare.inputs.items()}
    )
    with pytest.raises(UsageError, match="no histograms"):
        summarize(make_stats(), Max(), bare)


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("model.layers.11.self_attn.q_proj", "self_attn.q_proj"),
        ("model.layers.0.mlp.experts.17.down_proj", "mlp.experts.*.down_proj"),
        ("transformer.h.3.attn.c_attn", "attn.c_attn"),
        ("lm_head", "lm_head"),
    ],
)
def test_the_kind_of_a_module_leaves_out_layer_and_expert_numbers(module: str, kind: str) -> None:
    assert name_in_layer(module) == kind


# The page


def test_the_page_shows_every_kind_of_module_and_loads_no_external_resource() -> None:
    page = stats_page(make_stats(), Max(), make_stats(seed=1))
    assert all(kind in page for kind in KINDS)
    assert loads_nothing(page)


def test_the_table_shows_the_amax_and_scale_of_the_rule() -> None:
    stats = make_stats()
    scales = activation_scales(stats, Percentile(99.0)).scales
    own = [float(scale) for name, scale in scales.items() if name.endswith("down_proj")]
    amax = max(summary_row.max for name, summary_row in stats.inputs.items() if name.endswith("down_proj"))
    page = stats_page(stats, Percentile(99.0))
    row = cells(page, "input of")["model.layers.*.mlp.down_proj"]
    assert row[:4] == ["12", "4,000", number(amax), f"{number(min(own))} .. {number(max(own))}"]
    layer = cells(page, "amax; scale")["layer 11"]
    name = "model.layers.11.mlp.down_proj"
    assert layer[-1] == f"{number(stats.inputs[name].max)}; {number(float(scales[name]))}"


def test_modules_with_the_most_saturation_on_held_out_text_come_first() -> None:
    stats, held_out = make_stats(), make_stats(seed=1, gain=1.5)
    page = stats_page(stats, Max(), held_out)
    tables = [
        table for table in parse(page).iter("table") if "flushed to zero" in ElementTree.tostring(table, "unicode")
    ]
    rows = [["".join(cell.itertext()).strip() for cell in row] for row in tables[0].iter("tr")][1:]
    lost = {
        summary_row.module: summary_row.lost
        for summary_row in summarize(stats, Max(), held_out).inputs
        if summary_row.lost is not None
    }
    assert len(rows) == 20
    worst = max(lost.values())
    assert float(rows[0][1]) == pytest.approx(worst.saturated, rel=0.05)
    assert [float(row[1]) for row in rows] == sorted((float(row[1]) for row in rows), reverse=True)
    for row in rows:
        assert float(row[1]) == pytest.approx(lost[row[0].split(" / ")[0]].saturated, rel=0.05)


@pytest.mark.parametrize("rule", [Max(), Percentile()])
@pytest.mark.parametrize(
    "stats",
    [
        make_stats(sequences=1, layers=1),
        replace(make_stats(layers=1), kv={}),
        replace(make_stats(layers=1), inputs={}, kv={}),
        replace(make_stats(layers=1), inputs={"lm_head": unseen(40)}),
        with_experts(),
    ],
    ids=["one sequence", "no caches", "nothing", "never called", "experts"],
)
def test_a_page_of_sparse_statistics_contains_no_nan(stats: ActivationStats, rule: Rule) -> None:
    page = stats_page(stats, rule, stats)
    parse(page)
    assert not re.search(r"\b(nan|inf|None)\b", page)


def test_a_run_without_sequences_makes_a_page() -> None:
    empty = ActivationStats(MODEL, 0, 0, {}, {"model.layers.0.mlp.down_proj": unseen(0)}, {
        "model.layers.0.self_attn": KVStats(np.zeros((0, 2), np.float32), np.zeros((0, 2), np.float32))
    })  # fmt: skip
    assert "Never called" in stats_page(empty, Max())

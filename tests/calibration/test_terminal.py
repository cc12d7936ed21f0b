from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from minifloat.calibration.document import document
from minifloat.calibration.rules import Max, MeanSquaredError, Percentile, Rule
from minifloat.calibration.scales import activation_scales, kv_scales
from minifloat.calibration.stats import ActivationStats, KVStats, ModelIdentity, ModuleStats
from minifloat.numerics.histogram import BINS, count_magnitudes
from minifloat.report import terminal

MODEL = ModelIdentity("LlamaForCausalLM", "c" * 64, "t" * 64, "w" * 64)
SEQUENCES = 40


def module_stats(seed: int, size: float) -> ModuleStats:
    values = np.abs(np.random.default_rng(seed).normal(size=(SEQUENCES, 500)) * size).astype(np.float32)
    return ModuleStats(values.max(axis=1), np.full(SEQUENCES, 100), count_magnitudes(values))


def never_called_stats() -> ModuleStats:
    zeros = np.zeros(SEQUENCES, np.int64)
    return ModuleStats(zeros.astype(np.float32), zeros, np.zeros(BINS, np.int64))


def make_stats(seed: int = 0, size: float = 1.0) -> ActivationStats:
    inputs = {
        f"model.layers.{layer}.{name}": module_stats(10 * seed + 2 * layer + index, size)
        for layer in range(3)
        for index, name in enumerate(("self_attn.o_proj", "mlp.down_proj"))
    }
    heads = np.random.default_rng(seed).random((2, SEQUENCES, 2), dtype=np.float32)
    kv = {"model.layers.0.self_attn": KVStats(heads[0], heads[1])}
    return ActivationStats(MODEL, SEQUENCES, 100 * SEQUENCES, {"sources": [{"name": "stories.txt"}]}, inputs, kv)


def print_stats(stats: ActivationStats, rule: Rule, held_out: ActivationStats | None, *, verbose: bool) -> None:
    terminal.write(document(stats, rule, held_out, verbose=verbose), Console(width=160, highlight=False))


def row(output: str, name: str) -> list[str]:
    (line,) = (line for line in output.splitlines() if line.startswith(f"{name} "))
    return line.split()


def test_a_row_summarizes_a_module_over_all_layers(capsys: pytest.CaptureFixture[str]) -> None:
    stats = make_stats()
    print_stats(stats, Max(), None, verbose=False)
    cells = row(capsys.readouterr().out, "model.layers.*.mlp.down_proj")
    down = [name for name in stats.inputs if name.endswith("down_proj")]
    scales = [float(activation_scales(stats).scales[name]) for name in down]
    assert cells[1:3] == ["3", "4,000"]
    assert cells[3] == f"{max(stats.inputs[name].max for name in down):.4g}"
    assert cells[4:8] == [f"{min(scales):.4g}", "..", f"{max(scales):.4g}", "0"]


def test_verbose_shows_every_module(capsys: pytest.CaptureFixture[str]) -> None:
    stats = make_stats()
    print_stats(stats, Percentile(99.0), None, verbose=True)
    output = capsys.readouterr().out
    for name, scale in activation_scales(stats, Percentile(99.0)).scales.items():
        assert row(output, name)[4] == f"{scale:.4g}"


def test_the_header_names_the_model_the_data_and_the_rule(capsys: pytest.CaptureFixture[str]) -> None:
    print_stats(make_stats(), MeanSquaredError(), make_stats(1), verbose=False)
    header = capsys.readouterr().out.split("\n\n")[0]
    for text in (
        "LlamaForCausalLM",
        "40 sequences, 4,000 tokens",
        "stories.txt",
        "mse:octaves=4",
    ):
        assert text in header


def test_held_out_columns_are_empty_without_held_out_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_stats(make_stats(), Percentile(99.0), None, verbose=True)
    without = row(capsys.readouterr().out, "model.layers.0.mlp.down_proj")
    print_stats(make_stats(), Percentile(99.0), make_stats(1, size=2.0), verbose=True)
    with_held_out = row(capsys.readouterr().out, "model.layers.0.mlp.down_proj")
    assert len(with_held_out) == len(without) + 2
    assert 0 < float(with_held_out[6]) < 1


def test_keys_and_values_have_a_row_per_layer(capsys: pytest.CaptureFixture[str]) -> None:
    stats = make_stats()
    print_stats(stats, Max(), None, verbose=False)
    output = capsys.readouterr().out
    scales = kv_scales(stats)["model.layers.0.self_attn"]
    assert f"{scales.k:.4g}" in row(output, "model.layers.0.self_attn.k")
    assert f"{scales.v:.4g}" in row(output, "model.layers.0.self_attn.v")


def test_statistics_without_keys_and_values_have_no_cache_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_stats(replace(make_stats(), kv={}), Max(), None, verbose=False)
    assert "cache" not in capsys.readouterr().out


def test_with_a_histogram_rule_the_other_rule_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    print_stats(make_stats(), Percentile(), None, verbose=False)
    assert "By the rule max" in capsys.readouterr().out


def test_a_module_that_was_never_called_is_in_the_table_and_in_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    stats = make_stats()
    name = "model.layers.1.mlp.down_proj"
    stats = replace(stats, inputs={**stats.inputs, name: never_called_stats()})
    print_stats(stats, Max(), make_stats(1), verbose=True)
    output = capsys.readouterr().out
    assert row(output, name) == [name, "1", "0", "0", "-", "-", "-", "no", "scale:", "never", "called"]
    assert f"Warning: Never called (1 modules): {name}" in output
    print_stats(stats, Max(), None, verbose=False)
    assert "1 no scale" in capsys.readouterr().out


def test_an_expert_below_the_floor_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    stats = make_stats()
    experts = {
        f"model.layers.0.mlp.experts.{index}.down_proj": member
        for index, member in enumerate((module_stats(9, 1.0), never_called_stats()))
    }
    print_stats(replace(stats, inputs={**stats.inputs, **experts}), Max(), None, verbose=False)
    output = capsys.readouterr().out
    assert "1 borrowed" in output
    assert "model.layers.0.mlp.experts.1 (0)" in output


def test_a_name_in_brackets_is_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    stats = make_stats()
    data = {"sources": [{"name": "[bold]stories[/bold].txt"}]}
    name = "model.layers.0.[red]x"
    print_stats(
        replace(stats, data=data, inputs={**stats.inputs, name: never_called_stats()}), Max(), None, verbose=True
    )
    output = capsys.readouterr().out
    assert "[bold]stories[/bold].txt" in output
    assert output.count(name) == 2

"""The default amount of text follows the widest linear, and a smaller one is refused before there is any text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rounding_cases import write_model

from minifloat.calibration.calibrate import load_texts
from minifloat.calibration.options import TextOptions
from minifloat.checkpoint import Checkpoint, TensorInfo
from minifloat.commands.main import main
from minifloat.errors import DataError
from minifloat.model.architecture.family import Role
from minifloat.model.layouts import compressed_tensors
from minifloat.model.plan.quantization import make_part
from minifloat.model.plan.tensor_plan import QuantizationPlan, TensorPlan
from minifloat.numerics.scheme import SCHEMES
from minifloat.quantize import amount
from minifloat.quantize.amount import enough_text, widest
from minifloat.quantize.estimate import DEFAULT_TEXT, Tokens

#: The widest linear of models: Qwen2.5-7B, Llama 70B, Qwen 72B, Llama 405B.
WIDTHS = (18944, 28672, 29568, 53248)


def plan_of(shapes: dict[str, tuple[int, int]]) -> QuantizationPlan:
    """A plan of linears that no file holds."""
    scheme, layout, tensors = SCHEMES["mxfp4"], compressed_tensors.WRITER, []
    for module, shape in shapes.items():
        info = TensorInfo(f"{module}.weight", "BF16", shape, "model.safetensors", 0, 2 * shape[0] * shape[1])
        tensors.append(TensorPlan(info, Role.LINEAR, (make_part(info, module, shape, scheme, layout),)))
    return QuantizationPlan(scheme, layout, (), tuple(tensors))


def down(width: int) -> QuantizationPlan:
    return plan_of({"model.layers.0.mlp.down_proj": (64, width), "model.layers.0.mlp.up_proj": (width, 64)})


@pytest.mark.parametrize("width", WIDTHS)
def test_the_default_has_four_tokens_per_input_of_the_widest_linear(width: int) -> None:
    text = enough_text(DEFAULT_TEXT, down(width), {})
    assert text.samples is not None
    assert 4 * width <= Tokens.of(text.samples, text).kept < 4 * width + 2 * 256


def test_narrow_models_take_what_they_took_and_a_linear_that_is_left_out_does_not_count() -> None:
    assert enough_text(DEFAULT_TEXT, down(14336), {}).samples == 284
    assert widest(plan_of({"model.layers.0.self_attn.o_proj": (64, 8192)})) == 8192


@pytest.mark.parametrize(
    ("experts", "visited", "hidden", "samples"),
    [(8, 2, 4096, 284), (128, 8, 4096, 284), (256, 8, 7168, 996), (128, 1, 5120, 1138)],
)
def test_an_expert_sees_a_token_for_each_of_its_inputs_within_a_bound(
    experts: int, visited: int, hidden: int, samples: int
) -> None:
    plan = plan_of({"model.layers.0.mlp.experts.0.up_proj": (64, hidden)})
    config: dict[str, Any] = {"num_experts": experts, "num_experts_per_tok": visited}
    assert enough_text(DEFAULT_TEXT, plan, config).samples == samples


def test_a_number_that_the_user_gives_is_kept_or_refused_with_the_number_that_is_needed() -> None:
    given = TextOptions(samples=500, seq_len=256)
    assert enough_text(given, down(28672), {}) is given
    with pytest.raises(DataError, match=r"28,672 input channels: give at least 498 \(--calibration-samples\)"):
        enough_text(TextOptions(samples=284, seq_len=256), down(28672), {})
    assert enough_text(TextOptions(samples=498, seq_len=256), down(28672), {}).samples == 498


SIZES = ("--calibration-samples", "8", "--calibration-seq-len", "16")


@pytest.mark.parametrize(
    "command",
    [
        ("quantize", *SIZES),
        ("quantize", *SIZES, "--target-bits", "5"),
    ],
    ids=["scheme", "budget"],
)
def test_too_small_a_number_is_refused_before_text_is_written_or_read(tmp_path: Path, command: tuple[str, ...]) -> None:
    model = write_model(tmp_path / "llama", "llama")
    for data in ("self", str(tmp_path / "text.txt")):
        (tmp_path / "text.txt").write_bytes(b"\xff")  # reading it fails
        name, *options = command
        result = CliRunner().invoke(main, [name, str(model), str(tmp_path / "out"), "--data", data, *options])
        assert result.exit_code == 2
        assert "linears with 96 input channels: give at least 27 (--" in result.output
        assert {file.name for file in tmp_path.iterdir()} == {"llama", "text.txt"}


def test_a_run_with_the_default_takes_the_sequences_that_the_widest_linear_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal for wide linears came after the text had been written; here 96 inputs are wide."""
    monkeypatch.setattr(amount, "FEWEST_SEQUENCES", 4)
    model = write_model(tmp_path / "llama", "llama")
    options = ("--data", "self", "--calibration-seq-len", "16", "--scheme", "mxfp4", "--no-report")
    result = CliRunner().invoke(main, ["quantize", str(model), str(tmp_path / "out"), *options])
    assert result.exit_code == 0, result.output
    rounding = json.loads((tmp_path / "out" / "minifloat.json").read_text())["rounding"]
    assert (rounding["tokens"], rounding["data"]["sequences"]) == (4 * 96, 27)


def test_stored_text_of_a_narrower_run_is_continued_with_a_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, file = write_model(tmp_path / "llama", "llama"), tmp_path / "text.safetensors"
    with Checkpoint.open(model) as checkpoint, caplog.at_level("INFO"):
        first, second = (
            load_texts(checkpoint, "self", TextOptions(samples, 16), own_text_file=file) for samples in (4, 6)
        )
    assert second.sequences[:4] == first.sequences
    assert "4 sequences of the model's own text are there already; it writes 2 more" in caplog.text

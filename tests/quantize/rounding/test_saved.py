"""Stored Hessians give the codes of a run with the text; damaged ones, or those of another model, are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rounding_cases import correlated_inputs, hessian_of, make_text, round_model, split, write_model

from minifloat.checkpoint import Checkpoint
from minifloat.commands.main import main
from minifloat.errors import DataError, DestinationError, StatsError, UsageError
from minifloat.model.layouts import get_writer
from minifloat.model.plan.quantization import make_plan
from minifloat.numerics.scheme import get_scheme
from minifloat.quantize.rounding.collect import collect_hessians
from minifloat.quantize.rounding.methods import RoundingOptions, get_method
from minifloat.quantize.rounding.run import round_saved
from minifloat.quantize.rounding.saved import SavedHessians, pack_symmetric, unpack_symmetric

KEPT, HELD_OUT = make_text(10), make_text(3, seed=1)


def collected(model: Path, folder: Path, **options: Any) -> SavedHessians:
    with Checkpoint.open(model) as checkpoint:
        return collect_hessians(checkpoint, split(KEPT, HELD_OUT), folder, **options)


def rounded(
    model: Path, folder: Path, work: Path, scheme: str = "mxfp4", method: str = "gptq", *, fold: bool = True
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The output tensors, and how each weight was rounded."""
    options = RoundingOptions(get_method(method), fold=fold)
    with Checkpoint.open(model) as checkpoint:
        plan = make_plan(checkpoint, get_scheme(scheme), get_writer("compressed-tensors"))
        with round_saved(checkpoint, plan, SavedHessians.load(folder), options, work) as found:
            names = [tensor.name for row in plan.tensors for tensor in row.outputs if tensor.name in found]
            return {name: found.read(name).tobytes() for name in names}, dict(found.weights)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and its Hessians."""
    folder = tmp_path_factory.mktemp("saved")
    model = write_model(folder / "llama", "llama")
    collected(model, folder / "stats.hessians")
    return model, folder / "stats.hessians"


def test_a_packed_symmetric_matrix_is_unpacked_to_the_same_bits() -> None:
    matrix = hessian_of(correlated_inputs(64, 37))
    matrix = matrix.triu() + matrix.triu(1).T
    packed = pack_symmetric(matrix)
    assert packed.shape == (37 * 38 // 2,)
    assert torch.equal(unpack_symmetric(packed, 37), matrix)


@pytest.mark.parametrize("fold", [True, False], ids=["folded", "plain"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_codes_are_those_of_a_run_with_the_text_in_every_scheme(tmp_path: Path, model_type: str, fold: bool) -> None:
    model = write_model(tmp_path / "model", model_type, num_experts=24, num_local_experts=24)
    collected(model, tmp_path / "hessians")
    for scheme in ("mxfp4", "nvfp4", "fp8"):
        expected = round_model(model, tmp_path / "work", KEPT, HELD_OUT, scheme, "gptq", fold=fold)
        tensors, weights = rounded(model, tmp_path / "hessians", tmp_path / "work", scheme, fold=fold)
        assert tensors == expected.tensors
        assert weights == expected.weights
    if model_type == "qwen3_moe":
        assert any("hessian_share" in row for row in weights.values())


def test_a_collection_that_is_interrupted_continues_to_the_same_files(llama: tuple[Path, Path], tmp_path: Path) -> None:
    model, hessians = llama
    seen: list[str] = []

    def interrupt(done: int, _: int, __: str) -> None:
        if done == len(KEPT.sequences) + len(HELD_OUT.sequences) + 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collected(model, tmp_path / "hessians", progress=interrupt)
    assert not SavedHessians.exist(tmp_path / "hessians")
    collected(model, tmp_path / "hessians", progress=lambda _, __, what: seen.append(what))
    assert all(what.startswith("layer 2 of 2") for what in seen)
    for file in hessians.iterdir():
        assert (tmp_path / "hessians" / file.name).read_bytes() == file.read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hessians"]


def test_a_run_that_ends_while_it_completes_the_folder_runs_no_layer_again(
    llama: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: SavedHessians) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(SavedHessians, "save", fail)
        with pytest.raises(KeyboardInterrupt):
            collected(llama[0], tmp_path / "hessians")
    assert sorted(file.name for file in (tmp_path / "hessians").iterdir()) == [
        "layer-0.safetensors",
        "layer-1.safetensors",
    ]
    with pytest.raises(StatsError, match="no Hessians"):
        SavedHessians.load(tmp_path / "hessians")
    seen: list[str] = []
    again = collected(llama[0], tmp_path / "hessians", progress=lambda _, __, what: seen.append(what))
    assert not seen
    assert again.layers == SavedHessians.load(llama[1]).layers


def test_a_finished_collection_is_not_repeated_and_another_needs_overwrite(
    llama: tuple[Path, Path], tmp_path: Path
) -> None:
    seen: list[str] = []
    collected(*llama, progress=lambda _, __, what: seen.append(what))
    assert not seen
    other = write_model(tmp_path / "other", "llama", num_hidden_layers=1)
    collected(other, tmp_path / "hessians")
    with pytest.raises(DestinationError, match="--overwrite"):
        collected(llama[0], tmp_path / "hessians")
    collected(llama[0], tmp_path / "hessians", overwrite=True)
    assert SavedHessians.load(tmp_path / "hessians").layers == SavedHessians.load(llama[1]).layers


def test_too_little_text_is_refused(llama: tuple[Path, Path], tmp_path: Path) -> None:
    with (
        Checkpoint.open(llama[0]) as checkpoint,
        pytest.raises(DataError, match="give at least 384"),
    ):
        collect_hessians(checkpoint, split(make_text(3), HELD_OUT), tmp_path / "hessians")


def test_a_method_that_follows_the_quantized_model_is_refused(llama: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="match cannot use stored Hessians"):
        rounded(*llama, tmp_path / "work", method="match")


def test_hessians_of_another_model_are_refused(llama: tuple[Path, Path], tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", "llama", intermediate_size=64)
    with pytest.raises(StatsError, match="of another model"):
        rounded(other, llama[1], tmp_path / "work")


def test_missing_hessians_name_the_command_that_writes_them(llama: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(StatsError, match="--hessians"):
        rounded(llama[0], tmp_path / "none.hessians", tmp_path / "work")


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "manifest", "version"])
def test_damaged_hessians_are_refused(tmp_path: Path, damage: str) -> None:
    model = write_model(tmp_path / "model", "llama")
    folder = tmp_path / "hessians"
    collected(model, folder)
    layer, manifest = folder / "layer-1.safetensors", folder / "hessians.safetensors"
    content = bytearray(layer.read_bytes())
    content[-5] ^= 1
    if damage == "flip":
        layer.write_bytes(content)
    elif damage == "cut":
        layer.write_bytes(content[:-5])
    elif damage == "gone":
        layer.unlink()
    elif damage == "manifest":
        manifest.write_bytes(manifest.read_bytes().replace(b'"run\\":\\"', b'"run\\":\\" ', 1)[:-1])
    else:
        manifest.write_bytes(manifest.read_bytes().replace(b'"version":"2"', b'"version":"9"'))
    with pytest.raises(StatsError, match=r"damaged|incomplete|version '9'"):
        rounded(model, folder, tmp_path / "work")


def test_the_command_stores_hessians_once_and_every_scheme_gives_the_codes_of_a_run_with_the_text(
    tmp_path: Path,
) -> None:
    model = write_model(tmp_path / "model", "llama")
    stats, text = tmp_path / "stats.safetensors", ["--data", "self"]

    def run(*arguments: object) -> None:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output

    run("calibrate", model, stats, *text, "--samples", 12, "--seq-len", 48, "--hessians")
    for scheme in ("nvfp4", "fp8-static"):
        sizes = ["--calibration-samples", 12, "--calibration-seq-len", 48]
        with_text = ["--method", "gptq", *text, *sizes, "--quiet"]
        run("quantize", model, tmp_path / f"{scheme}-text", "--scheme", scheme, *with_text)
        stored = ["--method", "gptq", "--stats", stats, "--quiet"]
        run("quantize", model, tmp_path / f"{scheme}-stored", "--scheme", scheme, *stored)
        with (
            Checkpoint.open(tmp_path / f"{scheme}-text") as expected,
            Checkpoint.open(tmp_path / f"{scheme}-stored") as found,
        ):
            assert found.tensors.keys() == expected.tensors.keys()
            assert all(found.read(n).tobytes() == expected.read(n).tobytes() for n in expected.tensors)
        report = json.loads((tmp_path / f"{scheme}-stored" / "minifloat.json").read_text())
        assert report["rounding"]["held_out"] == {}
        assert "not measured" in " ".join(report["notes"])
        assert "--method gptq --stats STATS" in report["provenance"]["command"]
    result = CliRunner().invoke(
        main, ["quantize", str(model), str(tmp_path / "out"), "--method", "match", "--stats", str(stats)]
    )
    assert result.exit_code == 2
    assert "match cannot use stored Hessians" in result.output

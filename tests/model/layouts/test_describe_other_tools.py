"""Tests that checkpoints of other tools are described as recorded and decode to the recorded weights bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minifloat.checkpoint import Checkpoint
from minifloat.model.layouts import StoredWeight, describe, read_weight
from minifloat.model.layouts.inspection import inspect_checkpoint
from minifloat.model.layouts.reading import read_rows
from minifloat.numerics.formats import E8M0, FLOAT32
from minifloat.numerics.granularity import GROUP_32

FIXTURES = sorted(path.parent for path in (Path(__file__).parents[2] / "data" / "interop").glob("*/expected.json"))


@pytest.fixture(params=FIXTURES, ids=lambda path: path.name)
def fixture(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def expected_modules(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the recorded facts by module, with one entry per expert for fused experts."""
    modules: dict[str, dict[str, Any]] = {}
    for name, facts in json.loads((folder / "expected.json").read_text())["modules"].items():
        if len(facts["shape"]) == 2:
            modules[name] = facts
        else:
            experts, *shape = facts["shape"]
            modules |= {f"{name}.{expert}": facts | {"shape": shape} for expert in range(experts)}
    return modules


def scale_name(stored: StoredWeight, checkpoint: Checkpoint) -> str:
    if stored.spec.scale is FLOAT32:
        return {"F32": "FP32"}.get(checkpoint.tensors[stored.scale].dtype, checkpoint.tensors[stored.scale].dtype)
    return stored.spec.scale.name


def test_there_are_fixtures_of_every_tool() -> None:
    assert len(FIXTURES) >= 24


def test_every_quantized_module_is_described_as_recorded(fixture: Path) -> None:
    expected = expected_modules(fixture)
    with Checkpoint.open(fixture) as checkpoint:
        weights = describe(checkpoint).weights
        assert set(weights) == set(expected)
        for name, facts in expected.items():
            stored = weights[name]
            assert stored.spec.element.name == facts["element"]
            assert stored.spec.granularity.name == facts["granularity"]
            assert list(stored.shape) == facts["shape"]
            assert scale_name(stored, checkpoint) == facts["scale"]
            assert (stored.input_scale is not None) == bool(facts.keys() & {"input_scale", "input_global_scale"})


def test_activations_are_described_as_recorded(fixture: Path) -> None:
    with Checkpoint.open(fixture) as checkpoint:
        weights = describe(checkpoint).weights
    for name, facts in expected_modules(fixture).items():
        activation, recorded = weights[name].activation, facts["activation"]
        assert (activation is None) == (recorded is None), name
        if activation is not None:
            assert activation.element.name == recorded["element"]
            assert activation.granularity.name == recorded["granularity"]
            assert activation.dynamic == (bool(recorded["dynamic"]) or recorded["element"] == "E2M1")
            assert activation.has_global_scale == (recorded["granularity"] == "group 1x16")
            assert (activation.scale is E8M0) == (weights[name].spec.granularity == GROUP_32)


def test_weights_decode_to_the_recorded_values_bit_for_bit(fixture: Path) -> None:
    expected = load_file(fixture / "expected.safetensors")
    compared = 0
    with Checkpoint.open(fixture) as checkpoint:
        for module, stored in describe(checkpoint).weights.items():
            decoded = read_weight(checkpoint, stored).dequantize()
            if f"{module}.weight" in expected:
                recorded = expected[f"{module}.weight"]
            elif stored.expert is not None and module.rpartition(".")[0] in expected:
                recorded = expected[module.rpartition(".")[0]][stored.expert].T
            else:
                continue
            assert torch.equal(decoded, recorded), module
            compared += 1
    assert compared


def test_a_slab_of_rows_dequantizes_to_the_rows_of_the_whole_weight(fixture: Path) -> None:
    with Checkpoint.open(fixture) as checkpoint:
        for stored in describe(checkpoint).weights.values():
            weight = read_weight(checkpoint, stored)
            step, _ = stored.spec.granularity.block(stored.shape)
            whole = weight.dequantize()
            for start in range(0, stored.shape[0], step):
                rows = slice(start, start + step)
                assert torch.equal(weight.dequantize(rows=rows), whole[rows])


def test_rows_that_are_read_without_torch_are_those_of_the_whole_weight(fixture: Path) -> None:
    with Checkpoint.open(fixture) as checkpoint:
        for stored in describe(checkpoint).weights.values():
            whole = read_weight(checkpoint, stored).dequantize()
            for start in range(0, stored.shape[0], 7):
                stop = min(start + 7, stored.shape[0])
                assert torch.equal(torch.from_numpy(read_rows(checkpoint, stored, start, stop)), whole[start:stop])


def test_inspect_counts_every_byte_and_weight(fixture: Path) -> None:
    inspection = inspect_checkpoint(fixture)
    with Checkpoint.open(fixture) as checkpoint:
        assert inspection.nbytes == sum(info.nbytes for info in checkpoint.tensors.values())
    base = fixture.parent / json.loads((fixture / "expected.json").read_text())["base"]
    assert inspection.elements == inspect_checkpoint(base).elements
    assert 4 < inspection.quantized_bits_per_weight < 10


def test_kv_scales_are_auxiliary(fixture: Path) -> None:
    with Checkpoint.open(fixture) as checkpoint:
        description = describe(checkpoint)
        scales = {name for name in checkpoint.tensors if name.endswith((".k_scale", ".v_scale"))}
    assert scales <= description.auxiliary
    assert (description.kv is not None) == ("kv" in fixture.name)


def test_an_unquantized_checkpoint_has_no_layout_and_no_weights() -> None:
    with Checkpoint.open(FIXTURES[0].parent / "base-llama") as checkpoint:
        description = describe(checkpoint)
    assert description.layout is None
    assert description.weights == {}


@pytest.mark.parametrize(
    ("written", "element"),
    [
        ({"kv_cache_quant_algo": "FP8"}, "E4M3"),
        ({"kv_cache_quant_algo": "NVFP4"}, "E2M1"),
        ({"kv_cache_quant_algo": "INT8"}, None),
        ({"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}, "E4M3"),
        ({"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "int"}}, None),
        ({}, None),
    ],
)
def test_the_kv_cache_format_of_modelopt_is_read_from_its_config(
    tmp_path: Path, written: dict[str, Any], element: str | None
) -> None:
    source = next(path for path in FIXTURES if path.name == "modelopt-fp8-kv")
    folder = Path(shutil.copytree(source, tmp_path / "model"))
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    quantization = config["quantization_config"]
    for name in ("kv_cache_quant_algo", "kv_cache_scheme"):
        quantization.pop(name, None)
    config["quantization_config"] = quantization | written
    (folder / "config.json").write_text(json.dumps(config))
    with Checkpoint.open(folder) as checkpoint:
        kv = describe(checkpoint).kv
    assert (None if kv is None else kv.element.name) == element

"""Tests that the servers' libraries accept written checkpoints: names, dtypes, shapes and config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from minifloat.checkpoint import Checkpoint, OutputTensor
from minifloat.errors import ConfigError, ShapeError, UnsupportedTensorError
from minifloat.model.layouts import WRITERS, describe, get_writer, read_weight
from minifloat.numerics.scheme import SCHEMES
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

BASE = Path(__file__).parents[2] / "data" / "interop" / "base-llama"
SHAPE = (160, 64)

#: Tensors of a [160, 64] linear named "m" by scheme, from the table of compressed-tensors' formats.
TENSORS = {
    "fp8-block": [("m.weight", "F8_E4M3", (160, 64)), ("m.weight_scale", "F32", (2, 1))],
    "fp8": [("m.weight", "F8_E4M3", (160, 64)), ("m.weight_scale", "F32", (160, 1))],
    "fp8-static": [("m.weight", "F8_E4M3", (160, 64)), ("m.weight_scale", "F32", (1,))],
    "fp8-dynamic": [("m.weight", "F8_E4M3", (160, 64)), ("m.weight_scale", "F32", (160, 1))],
    "mxfp8": [("m.weight", "F8_E4M3", (160, 64)), ("m.weight_scale", "U8", (160, 2))],
    "mxfp4": [("m.weight_packed", "U8", (160, 32)), ("m.weight_scale", "U8", (160, 2))],
    "nvfp4": [
        ("m.weight_packed", "U8", (160, 32)),
        ("m.weight_scale", "F8_E4M3", (160, 4)),
        ("m.weight_global_scale", "F32", (1,)),
    ],
}
WITH_SMALL_INPUTS = ["mxfp8-w8a8", "mxfp4-w4a8", "mxfp4-w4a4", "nvfp4-w4a4"]
TENSORS |= {name: TENSORS[name.partition("-")[0]] for name in WITH_SMALL_INPUTS}

#: Format, weight strategy and input strategy by scheme.
CONFIGS = {
    "fp8-block": ("float-quantized", "block", "group"),
    "fp8": ("naive-quantized", "channel", None),
    "fp8-static": ("float-quantized", "tensor", "tensor"),
    "fp8-dynamic": ("float-quantized", "channel", "token"),
    "mxfp8": ("mxfp8-quantized", "group", None),
    "mxfp4": ("mxfp4-pack-quantized", "group", None),
    "nvfp4": ("nvfp4-pack-quantized", "tensor_group", None),
    "mxfp8-w8a8": ("mxfp8-quantized", "group", "group"),
    "mxfp4-w4a8": ("mxfp4-pack-quantized", "group", "group"),
    "mxfp4-w4a4": ("mxfp4-pack-quantized", "group", "group"),
    "nvfp4-w4a4": ("nvfp4-pack-quantized", "tensor_group", "tensor_group"),
}
#: Presets of compressed-tensors with the same weights and inputs.
PRESETS = {"mxfp8": "MXFP8A16", "mxfp4": "MXFP4A16", "nvfp4": "NVFP4A16"} | {
    "mxfp8-w8a8": "MXFP8",
    "mxfp4-w4a4": "MXFP4",
    "nvfp4-w4a4": "NVFP4",
}


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_the_compressed_tensors_layout_has_its_names_dtypes_and_shapes(scheme: str) -> None:
    tensors = get_writer("compressed-tensors").weight_tensors("m", SCHEMES[scheme].weight, SHAPE)
    assert list(tensors.all) == [OutputTensor(*facts) for facts in TENSORS[scheme]]


def test_the_fp8_layout_has_its_names_dtypes_and_shapes() -> None:
    tensors = get_writer("fp8").weight_tensors("m", SCHEMES["fp8-block"].weight, (256, 384))
    assert list(tensors.all) == [
        OutputTensor("m.weight", "F8_E4M3", (256, 384)),
        OutputTensor("m.weight_scale_inv", "F32", (2, 3)),
    ]


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_the_config_equals_the_dump_of_compressed_tensors(scheme: str) -> None:
    compressed_tensors = pytest.importorskip("compressed_tensors.quantization")
    config = get_writer("compressed-tensors").quantization_config({"m": SCHEMES[scheme]}, ["lm_head"])
    parsed = compressed_tensors.QuantizationConfig.model_validate(config)
    group = parsed.config_groups["group_0"]
    form, weights, inputs = CONFIGS[scheme]
    assert (parsed.format, group.format) == (form, form)
    assert group.weights.strategy == weights
    assert (group.input_activations.strategy if group.input_activations else None) == inputs
    assert parsed.ignore == ["lm_head"]
    assert parsed.quantization_status == "compressed"
    dumped = parsed.model_dump()["config_groups"]["group_0"]
    ours = config["config_groups"]["group_0"]
    for part in ("weights", "input_activations"):
        assert _without_none(ours[part]) == _without_none(dumped[part])


@pytest.mark.parametrize(("scheme", "preset"), PRESETS.items())
def test_the_config_of_mx_and_nvfp4_is_that_of_the_preset_of_compressed_tensors(scheme: str, preset: str) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    config = get_writer("compressed-tensors").quantization_config({"m": SCHEMES[scheme]}, ["lm_head"])
    ours, theirs = config["config_groups"]["group_0"], quantization.preset_name_to_scheme(preset, ["Linear"])
    for part in ("weights", "input_activations"):
        expected = getattr(theirs, part)
        dumped = None if expected is None else expected.model_dump(exclude={"observer", "observer_kwargs", "zp_dtype"})
        assert _without_none(ours[part]) == _without_none(dumped)


def test_the_inputs_of_mxfp4_w4a8_are_those_of_the_preset_mxfp8() -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    config = get_writer("compressed-tensors").quantization_config({"m": SCHEMES["mxfp4-w4a8"]}, ["lm_head"])
    expected = quantization.preset_name_to_scheme("MXFP8", ["Linear"]).input_activations
    dumped = expected.model_dump(exclude={"observer", "observer_kwargs", "zp_dtype"})
    assert _without_none(config["config_groups"]["group_0"]["input_activations"]) == _without_none(dumped)


def _without_none(arguments: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the arguments that have a value; None and a missing key mean the same."""
    return None if arguments is None else {key: value for key, value in arguments.items() if value not in (None, {})}


def test_several_schemes_become_groups_that_name_their_modules() -> None:
    modules = {"a.q_proj": SCHEMES["fp8"], "a.up_proj": SCHEMES["mxfp4"], "b.q_proj": SCHEMES["fp8"]}
    config = get_writer("compressed-tensors").quantization_config(modules, ["lm_head"])
    assert config["format"] == "mixed-precision"
    assert [group["targets"] for group in config["config_groups"].values()] == [["a.q_proj", "b.q_proj"], ["a.up_proj"]]


def test_a_quantized_head_is_targeted_by_name_because_vllm_does_not_treat_it_as_a_linear() -> None:
    modules = {"model.layers.0.self_attn.q_proj": SCHEMES["fp8-dynamic"], "lm_head": SCHEMES["fp8-dynamic"]}
    config = get_writer("compressed-tensors").quantization_config(modules, [])
    assert [group["targets"] for group in config["config_groups"].values()] == [["Linear", "lm_head"]]


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_transformers_decodes_a_quantized_head_that_is_targeted_by_name(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    quantize_checkpoint(BASE, tmp_path / "out", "fp8-dynamic", QuantizeOptions(overrides=["^lm_head$=fp8-dynamic"]))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=transformers.CompressedTensorsConfig(dequantize=True)
    )
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        head = read_weight(checkpoint, describe(checkpoint).weights["lm_head"])
    assert torch.equal(model.lm_head.weight, head.dequantize(model.lm_head.weight.dtype))


def test_a_group_that_targets_the_head_by_name_does_not_match_other_linears(tmp_path: Path) -> None:
    quantize_checkpoint(BASE, tmp_path / "out", "fp8-dynamic", QuantizeOptions(overrides=["^lm_head$=mxfp8"]))
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    groups = config["quantization_config"]["config_groups"]
    head = next(name for name, group in groups.items() if group["targets"] == ["lm_head"])
    (rest,) = set(groups) - {head}
    groups[rest]["targets"] = ["Linear"]
    config["quantization_config"]["config_groups"] = {"first": groups[head], "second": groups[rest]}
    path.write_text(json.dumps(config))
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        specs = {module: stored.spec.granularity.name for module, stored in describe(checkpoint).weights.items()}
    assert specs.pop("lm_head") == "group 1x32"
    assert set(specs.values()) == {"channel"}


def test_the_fp8_config_lists_the_unquantized_modules() -> None:
    config = get_writer("fp8").quantization_config({"m": SCHEMES["fp8-block"]}, ["lm_head", "model.layers.0.mlp.gate"])
    assert config == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
    }


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_a_written_checkpoint_is_described_as_the_same_scheme(tmp_path: Path, scheme: str) -> None:
    quantize_checkpoint(BASE, tmp_path / "out", scheme)
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        weights = describe(checkpoint).weights
    spec = SCHEMES[scheme].weight
    assert len(weights) == 7
    for stored in weights.values():
        assert (stored.spec.element, stored.spec.granularity, stored.spec.scale) == (
            spec.element,
            spec.granularity,
            spec.scale,
        )


def test_a_written_mixed_checkpoint_is_described_with_the_requested_schemes(tmp_path: Path) -> None:
    quantize_checkpoint(
        BASE, tmp_path / "out", "mxfp4", QuantizeOptions(overrides=["down_proj=nvfp4", "self_attn=fp8", "o_proj=bf16"])
    )
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        weights = describe(checkpoint).weights
    elements = {name.rsplit(".", 1)[-1]: stored.spec.granularity.name for name, stored in weights.items()}
    assert elements == {
        "down_proj": "group 1x16",
        "gate_proj": "group 1x32",
        "up_proj": "group 1x32",
        "q_proj": "channel",
        "k_proj": "channel",
        "v_proj": "channel",
    }


# -------------------------------------------------------------------------- checkpoints that contradict themselves


def edited(tmp_path: Path, scheme: str, edit: Any) -> Path:
    """Quantize the base model and edit its quantization_config; return the folder."""
    quantize_checkpoint(BASE, tmp_path / "out", scheme)
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    edit(config["quantization_config"])
    path.write_text(json.dumps(config))
    return tmp_path / "out"


def describe_folder(path: Path) -> None:
    with Checkpoint.open(path) as checkpoint:
        describe(checkpoint)


def test_an_unknown_method_lists_the_known_ones(tmp_path: Path) -> None:
    path = edited(tmp_path, "fp8", lambda config: config.update(quant_method="awq"))
    with pytest.raises(ConfigError, match=r"'awq' is not one of: compressed-tensors, fp8"):
        describe_folder(path)


def test_a_config_group_of_another_element_than_the_codes_is_refused(tmp_path: Path) -> None:
    path = edited(tmp_path, "fp8", lambda config: config["config_groups"]["group_0"]["weights"].update(type="int"))
    with pytest.raises(ConfigError, match=r"INT8 weights, whose codes are stored as I32, yet \S+weight is F8_E4M3"):
        describe_folder(path)


def test_weights_of_another_width_are_refused(tmp_path: Path) -> None:
    path = edited(tmp_path, "fp8", lambda config: config["config_groups"]["group_0"]["weights"].update(num_bits=6))
    with pytest.raises(ConfigError, match="floats or integers of 4 or 8 bits"):
        describe_folder(path)


def test_a_granularity_that_contradicts_the_scales_is_refused_with_the_name_of_the_tensor(tmp_path: Path) -> None:
    path = edited(
        tmp_path, "fp8", lambda config: config["config_groups"]["group_0"]["weights"].update(strategy="tensor")
    )
    with pytest.raises(ShapeError, match=r"weight_scale: tensor scales .* grid of 1x1; found shape \[\d+, 1\]"):
        describe_folder(path)


def test_a_weight_that_no_group_targets_is_refused(tmp_path: Path) -> None:
    path = edited(tmp_path, "fp8", lambda config: config["config_groups"]["group_0"].update(targets=["re:nothing"]))
    with pytest.raises(ConfigError, match=r"no config group .* targets model\.layers\.0"):
        describe_folder(path)


@pytest.mark.parametrize(
    ("folder", "key", "entry"),
    [
        ("llmc-fp8-dynamic", "ignore", "model.layers.0.mlp.down_proj"),
        ("llmc-mxfp4", "ignore", "re:.*down_proj$"),
        ("deepseek-block128", "modules_to_not_convert", "model.layers.0.mlp.down_proj"),
        ("deepseek-block128", "modules_to_not_convert", "model.layers.0.mlp"),
        ("vllm-fp8-static", "ignored_layers", "model.layers.0.mlp.down_proj"),
        ("modelopt-nvfp4", "ignore", "model.layers.0.mlp.down_proj"),
        ("modelopt-nvfp4", "ignore", "model.layers.0.mlp*"),
    ],
)
def test_a_quantized_weight_on_the_list_of_unquantized_modules_is_refused_by_name(
    tmp_path: Path, folder: str, key: str, entry: str
) -> None:
    path = Path(shutil.copytree(BASE.parent / folder, tmp_path / "model"))
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"][key] = [*config["quantization_config"].get(key, ()), entry]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"{key} lists .*, yet model\.layers\.\d\.mlp\.\w+ is stored as codes"):
        describe_folder(path)


def test_compressed_tensors_reads_a_listed_weight_as_codes_without_scale(tmp_path: Path) -> None:
    """compressed-tensors drops the scale of an ignored weight, which is why minifloat refuses such a checkpoint."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    path = Path(shutil.copytree(BASE.parent / "llmc-fp8-dynamic", tmp_path / "model"))
    with Checkpoint.open(path) as checkpoint:
        right = read_weight(checkpoint, describe(checkpoint).weights["model.layers.0.mlp.down_proj"]).dequantize()
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["ignore"].append("model.layers.0.mlp.down_proj")
    (path / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert model.model.layers[0].mlp.down_proj.weight.float().abs().max() > 100 * right.abs().max()


@pytest.mark.parametrize(
    ("listed", "problem"),
    [("lm_head", "ignore: expected a list of names"), (["re:("], "ignore: 're:\\(' is not a regular expression")],
)
def test_an_invalid_list_of_unquantized_modules_is_refused(tmp_path: Path, listed: Any, problem: str) -> None:
    path = edited(tmp_path, "fp8", lambda config: config.update(ignore=listed))
    with pytest.raises(ConfigError, match=problem):
        describe_folder(path)


def test_codes_without_a_scale_are_refused_by_name(tmp_path: Path) -> None:
    path = edited(tmp_path, "fp8", lambda config: config.clear())
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedTensorError, match=r"_proj\.weight: F8_E4M3 codes without a scale"):
        describe_folder(path)


def test_every_writer_is_found_by_its_name() -> None:
    assert {name: writer.name for name, writer in WRITERS.items()} == {
        "compressed-tensors": "compressed-tensors",
        "fp8": "fp8",
        "gpt-oss": "gpt-oss",
    }

"""A conversion keeps every code and every scale; converting back gives the original tensors, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from converting import (
    INTEROP,
    assert_expected_logits,
    edited,
    loaded_logits,
    meaning,
    quantization_config,
    scalars,
    sharded,
    stored,
    transformers_logits,
)

from minifloat.checkpoint import Checkpoint
from minifloat.model.layouts import describe
from minifloat.model.layouts.reading import read_weight
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.numerics.formats import E4M3, E8M0
from minifloat.numerics.granularity import BLOCK_128, GROUP_32
from minifloat.numerics.scheme import SCHEMES, ActivationSpec, Scheme, weight_only
from minifloat.quantize.convert import ConvertOptions, convert_checkpoint
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions
from minifloat.report.markdown import read_metadata

BASE = INTEROP / "base-llama"
MXFP8 = Scheme("mxfp8-dynamic", "", SCHEMES["mxfp8"].weight, ActivationSpec(E4M3, GROUP_32, dynamic=True, scale=E8M0))

#: Checkpoints of other tools, and the layouts that hold them exactly.
PAIRS = [
    ("deepseek-block128", "compressed-tensors"),
    ("deepseek-block128-bf16-scales", "compressed-tensors"),
    ("deepseek-block32-moe", "compressed-tensors"),
    ("deepseek-block32-ue8m0", "compressed-tensors"),
    ("llmc-fp8-dynamic", "modelopt"),
    ("llmc-fp8-kv", "modelopt"),
    ("llmc-fp8-static", "modelopt"),
    ("llmc-moe-fp8-dynamic", "modelopt"),
    ("llmc-mxfp8", "modelopt"),
    ("llmc-mxfp8", "mxfp8"),
    ("llmc-mixed", "compressed-tensors"),
    ("llmc-nvfp4", "compressed-tensors"),
    ("modelopt-fp8-channel", "compressed-tensors"),
    ("modelopt-fp8-kv", "compressed-tensors"),
    ("modelopt-moe-nvfp4", "modelopt"),
    ("modelopt-mxfp8", "compressed-tensors"),
    ("modelopt-mxfp8", "mxfp8"),
    ("vllm-fp8-static", "compressed-tensors"),
    ("vllm-fp8-static", "modelopt"),
]

INPUT_SCALES = (".input_scale", ".activation_scale")
KEY_SCALES, VALUE_SCALES = (".k_proj.k_scale", ".k_scale"), (".v_proj.v_scale", ".v_scale")


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_codes_scales_and_declared_inputs_are_those_of_the_source(name: str, layout: str, tmp_path: Path) -> None:
    report = convert_checkpoint(INTEROP / name, tmp_path / "out", layout)
    assert meaning(tmp_path / "out") == meaning(INTEROP / name)
    for suffixes in (INPUT_SCALES, KEY_SCALES, VALUE_SCALES):
        assert scalars(tmp_path / "out", *suffixes) == scalars(INTEROP / name, *suffixes)
    with Checkpoint.open(tmp_path / "out") as converted, Checkpoint.open(INTEROP / name) as source:
        assert describe(converted).layout == layout
        assert [tensor.name for tensor in report.tensors] == list(source.tensors)
        assert {tensor.becomes for tensor in report.tensors} == set(converted.tensors)
    assert report.count("dropped") == 0


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_the_converted_model_gives_the_logits_of_an_independent_dequantization(
    name: str, layout: str, tmp_path: Path
) -> None:
    convert_checkpoint(INTEROP / name, tmp_path / "out", layout)
    assert_expected_logits(name, partial(loaded_logits, tmp_path / "out"))


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout)
        for name, layout in PAIRS
        # transformers does not know ModelOpt, multiplies packed FP4 in BF16 for any dtype of the model, and misreads
        # experts in compressed-tensors, including those of llm-compressor
        if layout != "modelopt" and not any(word in name for word in ("nvfp4", "mixed", "moe"))
    ],
)
def test_transformers_reads_the_converted_model_with_the_same_logits(name: str, layout: str, tmp_path: Path) -> None:
    convert_checkpoint(INTEROP / name, tmp_path / "out", layout)
    assert_expected_logits(name, partial(transformers_logits, tmp_path / "out"))


@pytest.mark.parametrize(
    ("scheme", "overrides", "layout", "algorithm"),
    [
        (SCHEMES["fp8-dynamic"], [], "modelopt", "FP8_PER_CHANNEL_PER_TOKEN"),
        (MXFP8, [], "modelopt", "MXFP8"),
        (MXFP8, [], "mxfp8", None),
        (MXFP8, ["self_attn=fp8-dynamic", "o_proj=bf16"], "modelopt", "MIXED_PRECISION"),
        (SCHEMES["fp8-dynamic"], ["^lm_head$=fp8-dynamic"], "modelopt", "FP8_PER_CHANNEL_PER_TOKEN"),
    ],
)
def test_a_conversion_and_its_inverse_give_the_same_tensors_bit_for_bit(
    scheme: Scheme, overrides: list[str], layout: str, algorithm: str | None, tmp_path: Path
) -> None:
    quantize_checkpoint(BASE, tmp_path / "a", scheme, QuantizeOptions(overrides=overrides))
    convert_checkpoint(tmp_path / "a", tmp_path / "b", layout)
    convert_checkpoint(tmp_path / "b", tmp_path / "c", "compressed-tensors")
    assert stored(tmp_path / "c") == stored(tmp_path / "a")
    there, back = quantization_config(tmp_path / "a"), quantization_config(tmp_path / "c")
    assert sorted(back.pop("ignore")) == sorted(there.pop("ignore"))
    groups = [
        {json.dumps(group, sort_keys=True) for group in config.pop("config_groups").values()}
        for config in (there, back)
    ]
    assert len(groups[0]) == len(groups[1])
    if not overrides:
        assert groups[0] == groups[1]
    assert back == there
    assert quantization_config(tmp_path / "b").get("quant_algo") == algorithm
    with Checkpoint.open(tmp_path / "a") as first, Checkpoint.open(tmp_path / "c") as last:
        assert describe(first) == describe(last)


@pytest.fixture(scope="module")
def whole_blocks(make_qwen3: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose projections consist of whole 128x128 blocks."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 32}
    return make_qwen3(tmp_path_factory.mktemp("whole") / "m", **sizes)


def test_fp8_blocks_convert_to_the_fp8_layout_and_back(whole_blocks: Path, tmp_path: Path) -> None:
    quantize_checkpoint(whole_blocks, tmp_path / "a", "fp8-block")
    convert_checkpoint(tmp_path / "a", tmp_path / "b", "fp8")
    convert_checkpoint(tmp_path / "b", tmp_path / "c", "compressed-tensors")
    assert stored(tmp_path / "c") == stored(tmp_path / "a")
    assert quantization_config(tmp_path / "c") == quantization_config(tmp_path / "a")
    quantize_checkpoint(whole_blocks, tmp_path / "direct", "fp8-block", QuantizeOptions(layout="fp8"))
    assert stored(tmp_path / "b") == stored(tmp_path / "direct")
    assert quantization_config(tmp_path / "b") == quantization_config(tmp_path / "direct")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        ours = load(tmp_path / "a", LoadOptions(dtype=torch.float32, weight_only=True))(ids).logits[0]
    theirs = transformers_logits(tmp_path / "b", ids)
    # without FP8 arithmetic transformers decodes quant_method fp8 to the dtype that it was asked for
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


def test_weight_only_blocks_convert_to_modelopt_and_back(whole_blocks: Path, tmp_path: Path) -> None:
    quantize_checkpoint(whole_blocks, tmp_path / "a", weight_only(SCHEMES["fp8-block"]))
    convert_checkpoint(tmp_path / "a", tmp_path / "b", "modelopt")
    with Checkpoint.open(tmp_path / "b") as checkpoint:
        scale = checkpoint.tensors["model.layers.0.mlp.gate_proj.weight_scale"]
        assert scale.shape == (2, 1, 1, 1)
        assert describe(checkpoint).weights["model.layers.0.mlp.gate_proj"].spec.granularity == BLOCK_128
    assert quantization_config(tmp_path / "b")["quant_algo"] == "FP8_PB_WO"
    convert_checkpoint(tmp_path / "b", tmp_path / "c", "compressed-tensors")
    assert stored(tmp_path / "c") == stored(tmp_path / "a")


# --------------------------------------------------------------------------------------------------- NVFP4


def powers_of_two(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Round global scales down to powers of two, which have exact reciprocals."""
    return {
        name: torch.exp2(tensor.log2().floor()) if name.endswith("global_scale") else tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(("name", "algorithm"), [("llmc-nvfp4", "NVFP4"), ("llmc-nvfp4a16", "W4A16_NVFP4")])
def test_nvfp4_with_exact_reciprocals_converts_to_modelopt_and_back(name: str, algorithm: str, tmp_path: Path) -> None:
    source = edited(INTEROP / name, tmp_path / "a", tensors=powers_of_two)
    report = convert_checkpoint(source, tmp_path / "b", "modelopt")
    assert report.rounding.scales == 0
    assert meaning(tmp_path / "b") == meaning(source)
    assert quantization_config(tmp_path / "b")["quant_algo"] == algorithm
    convert_checkpoint(tmp_path / "b", tmp_path / "c", "compressed-tensors")
    assert stored(tmp_path / "c") == stored(source)
    with Checkpoint.open(source) as first, Checkpoint.open(tmp_path / "c") as last:
        assert describe(first) == describe(last)


@pytest.mark.parametrize(
    ("name", "layout", "scales"),
    [("llmc-nvfp4", "modelopt", 14), ("modelopt-nvfp4", "compressed-tensors", 14), ("llmc-nvfp4a16", "modelopt", 7)],
)
def test_rounded_reciprocals_are_counted_and_differ_by_half_a_step_at_most(
    name: str, layout: str, scales: int, tmp_path: Path
) -> None:
    report = convert_checkpoint(INTEROP / name, tmp_path / "out", layout, ConvertOptions(allow_rounding=True))
    before = scalars(INTEROP / name, ".weight_global_scale", ".weight_scale_2")
    after = scalars(tmp_path / "out", ".weight_global_scale", ".weight_scale_2")
    assert before.keys() == after.keys()
    changes = [abs(before[module] * after[module] - 1) for module in before]
    assert 0 < max(changes) <= report.rounding.largest <= 2.0**-24 * 1.0000001
    assert 0 < report.rounding.scales <= scales
    assert "rounded reciprocals" in report.notes[0]
    assert_expected_logits(name, partial(loaded_logits, tmp_path / "out"))


# --------------------------------------------------------------------------------------------------- other files


@pytest.mark.parametrize("name", ["modelopt-fp8-kv", "modelopt-fp8-channel", "modelopt-mxfp8", "modelopt-nvfp4"])
def test_written_modelopt_configs_equal_those_of_modelopt_but_for_the_producer(name: str, tmp_path: Path) -> None:
    convert_checkpoint(INTEROP / name, tmp_path / "out", "modelopt")
    ours, theirs = quantization_config(tmp_path / "out"), quantization_config(INTEROP / name)
    embeddings = "model.embed_tokens"  # listed by ModelOpt too; no reader asks for it
    theirs["ignore"].remove(embeddings)
    assert (ours.pop("producer")["name"], theirs.pop("producer")["name"]) == ("minifloat", "modelopt")
    assert ours == theirs
    ours, theirs = (
        json.loads((folder / "hf_quant_config.json").read_text()) for folder in (tmp_path / "out", INTEROP / name)
    )
    theirs["quantization"]["exclude_modules"].remove(embeddings)
    assert ours["producer"].items() > theirs["producer"].items()
    assert ours == theirs | {"producer": ours["producer"]}
    assert stored(tmp_path / "out") == stored(INTEROP / name)


def test_the_modelopt_config_is_not_copied_into_another_layout(tmp_path: Path) -> None:
    convert_checkpoint(INTEROP / "modelopt-mxfp8", tmp_path / "out", "mxfp8")
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    assert quantization_config(tmp_path / "out") == {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [1, 32],
        "modules_to_not_convert": ["lm_head"],
    }


def test_linears_that_are_not_quantized_are_listed_under_the_key_of_each_layout(tmp_path: Path) -> None:
    source = INTEROP / "llmc-moe-fp8-dynamic"
    convert_checkpoint(source, tmp_path / "out", "modelopt")
    kept = {"model.layers.0.mlp.gate", "lm_head"}
    assert set(quantization_config(source)["ignore"]) == kept
    assert set(quantization_config(tmp_path / "out")["ignore"]) == kept
    hf = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert set(hf["quantization"]["exclude_modules"]) == kept


def test_codes_and_scales_in_different_shards_give_the_same_tensors(tmp_path: Path) -> None:
    source = INTEROP / "modelopt-fp8-kv"
    convert_checkpoint(source, tmp_path / "whole", "compressed-tensors")
    report = convert_checkpoint(sharded(source, tmp_path / "cards", 3), tmp_path / "out", "compressed-tensors")
    assert stored(tmp_path / "out") == stored(tmp_path / "whole")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3
    whole = json.loads((tmp_path / "whole" / "minifloat.json").read_text())
    assert report.provenance["source_digest"] == whole["provenance"]["source_digest"]


def test_sidecars_card_and_provenance_are_carried_over(tmp_path: Path) -> None:
    source = edited(INTEROP / "llmc-fp8-dynamic", tmp_path / "model")
    (source / "tokenizer.json").write_text("{}")
    (source / "README.md").write_text("---\nbase_model: someone/something\nlicense: mit\n---\n\n# A model\n")
    report = convert_checkpoint(source, tmp_path / "out", "modelopt")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "out" / "generation_config.json").exists()
    assert not (tmp_path / "out" / "recipe.yaml").exists()
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nbase_model: someone/something\nlicense: mit\n---\n\n# A model\n")
    assert "converted from layout compressed-tensors to modelopt, with the same codes and scales" in card
    saved = json.loads((tmp_path / "out" / "minifloat.json").read_text())
    assert saved == report.to_dict()
    assert saved["provenance"]["command"] == "minifloat convert model OUT --layout modelopt"


def test_the_deployment_section_is_that_of_the_new_layout(tmp_path: Path) -> None:
    quantize_checkpoint(INTEROP / "base-llama", tmp_path / "source", "fp8-dynamic")
    before = (tmp_path / "source" / "README.md").read_text()
    convert_checkpoint(tmp_path / "source", tmp_path / "out", "modelopt")
    after = (tmp_path / "out" / "README.md").read_text()
    begin = "<!-- minifloat deployment: begin -->"
    assert before.index(begin) < before.index("## Made with")
    assert after.count(begin) == 1
    assert after.index(begin) > after.index("## Converted")
    body = before[before.index("# base-llama") : before.index(begin)]
    assert body.replace("layout compressed-tensors", "layout modelopt") + "## Made with\n" in after


@pytest.mark.parametrize(
    ("target", "tags"),
    [
        ("modelopt", ["fp8", "fp8-dynamic", "minifloat", "modelopt", "vllm"]),
        (None, ["minifloat"]),
    ],
)
def test_the_metadata_of_the_card_is_true_of_the_converted_model(
    tmp_path: Path, target: str | None, tags: list[str]
) -> None:
    quantize_checkpoint(
        INTEROP / "base-llama", tmp_path / "source", "fp8-dynamic", QuantizeOptions(base_model="someone/something")
    )
    before = read_metadata((tmp_path / "source" / "README.md").read_text())
    assert {"vllm", "compressed-tensors"} < set(before["tags"])
    convert_checkpoint(tmp_path / "source", tmp_path / "out", target, ConvertOptions(dequantize=target is None))
    after = read_metadata((tmp_path / "out" / "README.md").read_text())
    relation = {"base_model_relation": "quantized"} if target else {}
    expected = {key: value for key, value in before.items() if key != "base_model_relation"}
    library = "minifloat" if target else "transformers"
    assert after == expected | relation | {"tags": tags, "library_name": library}


def test_nvfp4_of_quantize_decodes_to_the_same_bits_in_both_layouts(tmp_path: Path) -> None:
    quantize_checkpoint(INTEROP / "base-llama", tmp_path / "ours", "nvfp4")
    report = convert_checkpoint(tmp_path / "ours", tmp_path / "modelopt", "modelopt")  # --allow-rounding is not needed
    assert report.rounding.scales == 0
    with Checkpoint.open(tmp_path / "ours") as ours, Checkpoint.open(tmp_path / "modelopt") as theirs:
        for (name, mine), other in zip(describe(ours).weights.items(), describe(theirs).weights.values(), strict=True):
            assert torch.equal(read_weight(ours, mine).dequantize(), read_weight(theirs, other).dequantize()), name

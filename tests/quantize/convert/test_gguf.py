"""GGUF files hold the codes and scales of checkpoints, under llama.cpp's names and in its order of rows."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from comparing import compare_models
from converting import dequantize, edited
from safetensors.torch import load_file

from minifloat.checkpoint import Checkpoint
from minifloat.errors import CheckpointError, ConversionError, DestinationError, MinifloatError, ShapeError, UsageError
from minifloat.model.layouts import describe
from minifloat.model.layouts.decoded import plain_view
from minifloat.model.layouts.gguf.blocks import MXFP4, NVFP4
from minifloat.model.layouts.gguf.reading import GgufCheckpoint
from minifloat.model.layouts.inspection import inspect_checkpoint
from minifloat.model.layouts.reading import read_codes, read_rows, read_scales, value_table, widen
from minifloat.numerics.formats import E2M1, E4M3
from minifloat.quantize.convert import ConvertOptions, GgufOptions, convert_checkpoint
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
#: Model type -> what its small config has beyond the common sizes, and an entry that its file must have.
_MODELS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "llama": ({"attention_bias": True}, "llama.rope.dimension_count", 16),
    "mistral": ({}, "llama.attention.head_count_kv", 2),
    "mixtral": ({"num_local_experts": 4}, "llama.expert_used_count", 2),
    "qwen2": ({}, "qwen2.feed_forward_length", 128),
    "qwen3": ({"head_dim": 16}, "qwen3.attention.key_length", 16),
    "qwen3_moe": ({"num_experts": 4, "norm_topk_prob": True, **_MOE}, "qwen3moe.expert_feed_forward_length", 64),
    "gemma3_text": (
        {"head_dim": 16, "sliding_window": 32, "query_pre_attn_scalar": 16},
        "gemma3.attention.sliding_window",
        32,
    ),
    "phi3": ({"pad_token_id": 0}, "phi3.attention.sliding_window", 0),
    "glm4": ({"head_dim": 16}, "glm4.rope.dimension_count", 8),
    "gpt_oss": ({"head_dim": 16, "num_local_experts": 4}, "gpt-oss.expert_feed_forward_length", 128),
    "olmo2": ({}, "olmo2.block_count", 2),
    "granite": ({"embedding_multiplier": 12.0}, "granite.embedding_scale", 12.0),
    "smollm3": ({"pad_token_id": 0}, "smollm3.context_length", 128),
}
_PAIRS = ("llama", "mistral", "mixtral", "granite", "smollm3")
MakeModel = Callable[..., Path]


def _names(module: str) -> list[tuple[str, slice]]:
    """llama.cpp's names of a module, and its rows in each, by the words of its own documents."""
    layer = re.search(r"layers\.(\d+)\.", module)
    assert layer is not None
    leaf = re.sub(r"\.\d+$", "", module).rpartition(".")[2]
    experts = "_exps" if ".experts." in module else ""
    if leaf == "gate_up_proj" and experts:
        return [
            (f"blk.{layer[1]}.ffn_gate_exps", slice(0, None, 2)),
            (f"blk.{layer[1]}.ffn_up_exps", slice(1, None, 2)),
        ]
    known = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
    attention = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "output", "qkv_proj": "qkv"}
    name = f"attn_{attention[leaf]}" if leaf in attention else f"ffn_{known.get(leaf, 'up')}{experts}"
    return [(f"blk.{layer[1]}.{name}", slice(None))]


def _file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    reader = gguf.GGUFReader(path)
    return {tensor.name: tensor for tensor in reader.tensors}, {
        name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")
    }


def _written(make_model: MakeModel, folder: Path, model_type: str, scheme: str | None) -> tuple[Path, Path]:
    """A small model, quantized unless `scheme` is None, and its GGUF file."""
    size = {"intermediate_size": 128, **_MODELS[model_type][0]}
    source = make_model(folder / "plain", model_type, **size)
    if scheme is not None:
        quantize_checkpoint(source, folder / "quantized", scheme, options=QuantizeOptions(allow_partial=True))
        source = folder / "quantized"
    convert_checkpoint(source, folder / "m.gguf", "gguf")
    return source, folder / "m.gguf"


@pytest.mark.parametrize(
    ("model_type", "scheme"),
    [*((name, "mxfp4") for name in _MODELS), ("llama", "nvfp4"), ("qwen3_moe", "nvfp4"), ("phi3", "nvfp4")],
)
def test_a_file_has_the_codes_and_scales_of_the_checkpoint(
    make_model: MakeModel, tmp_path: Path, model_type: str, scheme: str
) -> None:
    source, path = _written(make_model, tmp_path, model_type, scheme)
    tensors, fields = _file(path)
    blocks = {"mxfp4": MXFP4, "nvfp4": NVFP4}[scheme]
    with Checkpoint.open(source) as checkpoint:
        weights = describe(checkpoint).weights
        for module, weight in weights.items():
            expert = re.search(r"\.experts\.(?:\w+\.)?(\d+)", module)
            count = weight.shape[0]
            parts = [read(checkpoint, weight, 0, count) for read in (read_rows, read_codes, read_scales)]
            leaf = module.rpartition(".")[2]
            if model_type in _PAIRS and leaf in ("q_proj", "k_proj"):  # as llama.cpp's converter has it
                heads = 4 if leaf == "q_proj" else 2
                parts = [part.reshape(heads, 2, -1, part.shape[1]).swapaxes(1, 2).reshape(part.shape) for part in parts]
            for name, rows in _names(module):
                tensor, index = tensors[f"{name}.weight"], ... if expert is None else int(expert[1])
                assert tensor.tensor_type.name == scheme.upper()
                stored = gguf.quants.dequantize(tensor.data[index], tensor.tensor_type)
                if scheme == "nvfp4":
                    stored = stored * tensors[f"{name}.scale"].data[0 if expert is None else index]
                codes, scales = blocks.unpack(tensor.data[index])
                assert all(map(np.array_equal, (stored, codes, scales), (part[rows] for part in parts))), name
    assert len(weights) > 10 or model_type == "phi3"
    names = [name for name, tensor in tensors.items() if tensor.tensor_type.name == "NVFP4"]
    assert fields.get("general.tensor_extra.name", []) == names
    assert fields.get("general.tensor_extra.prec_a4", []) == [False] * len(names)
    key, value = _MODELS[model_type][1:]
    assert fields[key] == value


@pytest.mark.parametrize("blocks", [MXFP4, NVFP4])
def test_blocks_are_those_of_ggml(blocks: Any) -> None:
    codes = np.arange(blocks.elements, dtype=np.uint8)[None] % 16
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    scales = np.arange(blocks.groups, dtype=np.uint8)[None] + 100
    packed = blocks.pack(pairs, scales)
    half = blocks.group // 2
    starts = [group * blocks.group for group in range(blocks.groups)]
    expected = [codes[0, s + j] | codes[0, s + j + half] << 4 for s in starts for j in range(half)]
    assert packed[0].tolist() == [*scales[0].tolist(), *expected]
    assert all(np.array_equal(a, b) for a, b in zip(blocks.unpack(packed), (pairs, scales), strict=True))


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss", "qwen3_moe"])
def test_a_plain_model_is_written_as_it_is(make_model: MakeModel, tmp_path: Path, model_type: str) -> None:
    source, path = _written(make_model, tmp_path, model_type, None)
    tensors, fields = _file(path)
    with Checkpoint.open(source) as checkpoint:
        total = sum(np.prod(info.shape) for info in checkpoint.tensors.values())
        norm = checkpoint.read("model.norm.weight").view(np.uint16).astype(np.uint32) << 16
    assert sum(int(tensor.n_elements) for tensor in tensors.values()) == total
    shift = 1 if model_type == "gemma3_text" else 0
    assert np.array_equal(tensors["output_norm.weight"].data, norm.view(np.float32) + np.float32(shift))
    assert {tensor.tensor_type.name for tensor in tensors.values()} == {"BF16", "F32"}
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert len(fields["tokenizer.ggml.tokens"]) == 288
    assert fields["tokenizer.ggml.eos_token_id"] == 257


@pytest.mark.parametrize(
    ("model_type", "scheme"),
    [
        *(("llama", None), ("gemma3_text", None), ("gpt_oss", None)),
        *(("mixtral", "nvfp4"), ("gpt_oss", "mxfp4"), ("phi3", "mxfp4")),
    ],
)
def test_a_file_reads_as_the_plain_tensors_of_its_model(
    make_model: MakeModel, tmp_path: Path, model_type: str, scheme: str | None
) -> None:
    source, path = _written(make_model, tmp_path, model_type, scheme)
    with Checkpoint.open(source) as stored, Checkpoint.open(tmp_path / "plain") as base:
        expected = stored if scheme is None else plain_view(stored)
        read = GgufCheckpoint(path, base)
        assert read.tensors.keys() == base.tensors.keys()
        for name, info in read.tensors.items():
            values = widen(expected.read(name), expected.tensors[name].dtype)
            found = read.read(name).view(np.float32)
            assert np.array_equal(found, values) or ("norm" in name and np.allclose(found, values, atol=1e-6)), name
            half = np.empty(info.nbytes // 2, np.uint8)
            read.read_into(info, half, info.nbytes - len(half))
            assert np.array_equal(half, read.read(name)[-len(half) :])
        stored_bytes = sum(read.stored_bytes(info) for info in read.tensors.values())
    inspection = inspect_checkpoint(path)
    assert inspection.nbytes == pytest.approx(stored_bytes, abs=len(read.tensors))
    assert {row.format for row in inspection.rows} == {"F32", "BF16", *([] if scheme is None else [scheme.upper()])}


def test_a_file_of_another_model_is_refused(make_model: MakeModel, tmp_path: Path) -> None:
    _, path = _written(make_model, tmp_path, "llama", None)
    for name, model_type, more in (("qwen", "qwen2", {}), ("wide", "llama", {"hidden_size": 128})):
        folder = make_model(tmp_path / name, model_type, **more)
        with Checkpoint.open(folder) as other, pytest.raises(MinifloatError, match=r"m.gguf: "):
            GgufCheckpoint(path, other)
    (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match="no whole GGUF file"):
        inspect_checkpoint(tmp_path / "cut.gguf")
    embedding, dimensions = b"token_embd.weight", struct.pack("<I2Q", 2, 64, 288)
    types = [embedding + dimensions + struct.pack("<I", kind) for kind in (gguf.GGMLQuantizationType.BF16, 99)]
    assert types[0] in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(*types))
    with pytest.raises(CheckpointError, match="newer than the package gguf"):
        inspect_checkpoint(path)


def test_compare_takes_a_file_as_a_candidate(make_llama: MakeModel, tmp_path: Path) -> None:
    source = make_llama(tmp_path / "plain")
    convert_checkpoint(source, tmp_path / "m.gguf", "gguf", gguf=GgufOptions(embedding="q8_0"))
    convert_checkpoint(source, tmp_path / "same.gguf", "gguf")
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    files = [tmp_path / "same.gguf", tmp_path / "m.gguf"]
    same, rounded = compare_models(source, files, [text], window=32).candidates
    assert same.overall.kl_mean.value == 0.0
    assert rounded.overall.kl_mean.value > 0.0
    assert same.model.nbytes is not None
    assert same.model.nbytes > (rounded.model.nbytes or 0)


@pytest.mark.parametrize(("kind", "least"), [("q8_0", 40), ("bf16", 50)])
def test_fp8_weights_have_another_type_and_the_report_says_the_error(
    fp8_dynamic_folder: Path, tmp_path: Path, kind: Any, least: int
) -> None:
    report = convert_checkpoint(fp8_dynamic_folder, tmp_path / "out", "gguf", gguf=GgufOptions(kind, "q8_0"))
    details = {tensor.name: tensor.detail for tensor in report.tensors}
    found = re.fullmatch(rf"{kind.upper()}: from fp8.*, SQNR (\S+) dB", details["model.layers.0.mlp.up_proj.weight"])
    assert found is not None
    assert float(found[1]) > least
    assert details["model.embed_tokens.weight"].startswith("Q8_0: not quantized, SQNR")
    assert report.destination == str(tmp_path / "out" / f"{fp8_dynamic_folder.name}-{kind.upper()}.gguf")


def _changed(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"architectures": ["XForCausalLM"]}, UsageError, "architecture XForCausalLM: no GGUF is written of it"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, UsageError, "'dynamic'"),
        ({"architectures": ["Phi3ForCausalLM"]}, ConversionError, "llama.cpp's phi3 has no place for it"),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]},
            UsageError,
            r"no_rope_layers is \[1, 0\]: llama.cpp runs smollm3 with \[1, 1\] only",
        ),
        ({"vocab_size": 200}, MinifloatError, "its tokenizer has 258 tokens"),
    ],
)
def test_what_llama_cpp_does_not_run_is_refused_before_anything_is_written(
    make_llama: MakeModel, tmp_path: Path, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    source = make_llama(tmp_path / "plain")
    _changed(source, **fields)
    with pytest.raises(error, match=message):
        convert_checkpoint(source, tmp_path / "out.gguf", "gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain"]


def test_rows_that_do_not_fill_blocks_a_missing_tokenizer_and_an_existing_file_are_refused(
    make_llama: MakeModel, tmp_path: Path
) -> None:
    source = make_llama(tmp_path / "plain")  # 96 columns
    quantize_checkpoint(source, tmp_path / "four", "nvfp4")
    with pytest.raises(ShapeError, match=r"96 columns: llama.cpp's NVFP4 has blocks of 64"):
        convert_checkpoint(tmp_path / "four", tmp_path / "out.gguf", "gguf")
    (tmp_path / "out.gguf").write_bytes(b"mine")
    with pytest.raises(DestinationError, match="--overwrite"):
        convert_checkpoint(source, tmp_path / "out.gguf", "gguf")
    convert_checkpoint(source, tmp_path / "out.gguf", "gguf", ConvertOptions(overwrite=True))
    assert (tmp_path / "out.gguf").read_bytes()[:4] == b"GGUF"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    with pytest.raises(CheckpointError, match="it has no tokenizer"):
        convert_checkpoint(source, tmp_path / "other.gguf", "gguf")


def test_sentencepiece_tokens_have_scores_in_the_order_of_merges(make_llama: MakeModel, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    source = make_llama(tmp_path / "plain")
    tokens = ["<unk>", "<s>", "</s>", "<0x41>", "\u2581", "a", "b", "ab", "\u2581ab"]
    merges = [("a", "b"), ("\u2581", "ab")]
    made = Tokenizer(
        models.BPE({t: i for i, t in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    wrapped.save_pretrained(source)
    convert_checkpoint(source, tmp_path / "m.gguf", "gguf")
    fields = _file(tmp_path / "m.gguf")[1]
    assert fields["tokenizer.ggml.model"] == "llama"
    assert fields["tokenizer.ggml.tokens"][:10] == [*tokens, "[PAD9]"]
    assert fields["tokenizer.ggml.scores"][7:9] == [0.0, -1.0]
    assert fields["tokenizer.ggml.token_type"][:5] == [2, 3, 3, 6, 1]
    assert fields["tokenizer.ggml.add_space_prefix"] is True


def _unigram(source: Path, normalizer: Any = None, *, byte_fallback: bool = False) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [
        ("<unk>", 0.0),
        ("<s>", 0.0),
        ("</s>", 0.0),
        ("\u2581a", -1.5),
        ("b", -2.5),
        *_BYTES[: 256 * byte_fallback],
    ]
    made = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=byte_fallback))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    if normalizer is not None:
        made.normalizer = normalizer
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(source)


_BYTES = [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]


def test_a_unigram_tokenizer_keeps_its_scores_and_its_rules(make_llama: MakeModel, tmp_path: Path) -> None:
    from tokenizers import Regex, normalizers

    source = make_llama(tmp_path / "plain")
    for at, normalizer in enumerate((None, normalizers.Replace(Regex(" {2,}"), "\u2581"))):
        _unigram(source, normalizer)
        convert_checkpoint(source, tmp_path / f"{at}.gguf", "gguf")
        fields = _file(tmp_path / f"{at}.gguf")[1]
        assert fields["tokenizer.ggml.model"] == "t5"
        assert fields["tokenizer.ggml.tokens"][:5] == ["<unk>", "<s>", "</s>", "\u2581a", "b"]
        assert fields["tokenizer.ggml.scores"][3:6] == [-1.5, -2.5, -1e6]
        assert fields["tokenizer.ggml.token_type"][:6] == [2, 3, 3, 1, 1, 5]
        assert fields["tokenizer.ggml.add_space_prefix"] is True
        assert fields["tokenizer.ggml.remove_extra_whitespaces"] is bool(at)


def test_what_llama_cpp_s_unigram_does_not_do_is_refused(make_llama: MakeModel, tmp_path: Path) -> None:
    from tokenizers import normalizers

    source = make_llama(tmp_path / "plain", vocab_size=300)
    for options, missing in (({"normalizer": normalizers.NFKC()}, "NFKC"), ({"byte_fallback": True}, "byte_fallback")):
        _unigram(source, **options)
        with pytest.raises(UsageError, match=f"have no {missing}"):
            convert_checkpoint(source, tmp_path / "m.gguf", "gguf")


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4"])
def test_experts_that_are_not_all_quantized_lie_in_a_type_that_holds_them_exactly(
    make_model: MakeModel, tmp_path: Path, scheme: str
) -> None:
    source = make_model(tmp_path / "plain", "qwen3_moe", **_MODELS["qwen3_moe"][0])
    quantize_checkpoint(source, tmp_path / "four", scheme)
    dequantize(tmp_path / "four", tmp_path / "decoded", "bfloat16")
    kept = [f"model.layers.0.mlp.experts.2.{linear}_proj" for linear in ("gate", "up", "down")]
    decoded = load_file(tmp_path / "decoded" / "model.safetensors")

    def with_plain_expert(tensors: dict[str, Any]) -> dict[str, Any]:
        others = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in kept}
        return others | {f"{name}.weight": decoded[f"{name}.weight"] for name in kept}

    mixed = edited(
        tmp_path / "four",
        tmp_path / "mixed",
        tensors=with_plain_expert,
        config=lambda quantization: quantization["ignore"].extend(kept),
    )
    report = convert_checkpoint(mixed, tmp_path / "m.gguf", "gguf")
    assert any("3 tensors of experts are stored in 16 bits" in note for note in report.notes)
    assert not any("SQNR" in tensor.detail for tensor in report.tensors)
    with Checkpoint.open(tmp_path / "decoded") as expected:
        read = GgufCheckpoint(tmp_path / "m.gguf", expected)
        for name in read.tensors:
            if ".experts." in name:
                assert np.array_equal(read.read(name).view(np.float32), widen(expected.read(name), "BF16")), name
    found, _ = _file(tmp_path / "m.gguf")
    types = {name: tensor.tensor_type.name for name, tensor in found.items() if name.endswith("_exps.weight")}
    assert types == {name: "BF16" if name.startswith("blk.0.") else scheme.upper() for name in types}
    assert ("blk.0.ffn_up_exps.scale" in found, "blk.1.ffn_up_exps.scale" in found) == (False, scheme == "nvfp4")


def test_every_scale_of_nvfp4_has_its_value_in_ggml() -> None:
    scales = np.arange(E4M3.max_code + 1, dtype=np.uint8)  # subnormal ones among them
    scales = np.resize(scales, -(-len(scales) // NVFP4.groups) * NVFP4.groups)[None]
    codes = np.resize(np.arange(256, dtype=np.uint8), scales.size * NVFP4.group // 2)[None]
    values = gguf.quants.dequantize(NVFP4.pack(codes, scales), gguf.GGMLQuantizationType.NVFP4)
    elements = np.stack([codes & 0xF, codes >> 4], axis=-1).reshape(1, -1)
    expected = value_table(E2M1)[elements] * np.repeat(value_table(E4M3)[scales], NVFP4.group, axis=1)
    assert np.array_equal(values, expected)

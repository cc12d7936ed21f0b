"""`quantize_checkpoint` writes the weights of the torch oracle, for any number of shards, threads and slabs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from minifloat.checkpoint import Checkpoint
from minifloat.errors import (
    DestinationError,
    NonFiniteError,
    NotACheckpointError,
    PatternError,
    UnknownNameError,
    UsageError,
)
from minifloat.kernels import native
from minifloat.model.layouts import describe, read_weight
from minifloat.numerics.scheme import SCHEMES
from minifloat.numerics.tensor import QuantizedTensor, quantize_tensor
from minifloat.quantize import stream
from minifloat.quantize.convert import convert_checkpoint
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import ConvertOptions, QuantizeOptions

Make = Callable[..., Path]
IMPLS = ["reference", pytest.param("cpu", marks=pytest.mark.skipif(native.load() is None, reason="no native library"))]


def load_source(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def read_all(path: Path) -> dict[str, QuantizedTensor]:
    with Checkpoint.open(path) as checkpoint:
        return {name: read_weight(checkpoint, stored) for name, stored in describe(checkpoint).weights.items()}


def same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    pairs = [(a.codes, b.codes), (a.scale, b.scale)]
    if a.global_scale is not None and b.global_scale is not None:
        pairs.append((a.global_scale.reshape(()), b.global_scale.reshape(())))
    return a.shape == b.shape and all(torch.equal(x, y) for x, y in pairs)


def group_amax(source: Mapping[str, torch.Tensor], module: str) -> torch.Tensor:
    """Return the amax over the layers that a server fuses with a module, computed independently of the product."""
    parent, leaf = module.rsplit(".", 1)
    families = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]
    members = next((family for family in families if leaf in family), [leaf])
    return torch.stack([source[f"{parent}.{name}.weight"].float().abs().max() for name in members]).max()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_the_written_weights_are_those_of_the_oracle(
    make_checkpoint: Make, tmp_path: Path, scheme: str, impl: str
) -> None:
    source = make_checkpoint()
    quantize_checkpoint(source, tmp_path / "out", scheme, QuantizeOptions(impl=impl))
    tensors = load_source(source)
    written = read_all(tmp_path / "out")
    assert len(written) == 14
    for module, weight in written.items():
        expected = quantize_tensor(tensors[f"{module}.weight"], SCHEMES[scheme].weight, group_amax(tensors, module))
        assert same(weight, expected), module


@pytest.mark.parametrize("scheme", ["fp8-block", "fp8-static", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_f16_and_f32_sources_are_quantized_without_conversion(
    make_checkpoint: Make, tmp_path: Path, scheme: str, dtype: str
) -> None:
    source = make_checkpoint(dtype=dtype)
    quantize_checkpoint(source, tmp_path / "out", scheme)
    tensors = load_source(source)
    for module, weight in read_all(tmp_path / "out").items():
        expected = quantize_tensor(tensors[f"{module}.weight"], SCHEMES[scheme].weight, group_amax(tensors, module))
        assert same(weight, expected), module


def test_tensors_that_are_kept_are_copied_bit_for_bit(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint(shards=3)
    quantize_checkpoint(source, tmp_path / "out", "mxfp4")
    before, after = load_source(source), load_source(tmp_path / "out")
    kept = [name for name in before if not name.endswith("_proj.weight")]
    assert len(kept) == 7
    assert all(torch.equal(before[name].view(torch.int16), after[name].view(torch.int16)) for name in kept)


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_sharding_threads_and_slabs_do_not_change_a_bit(
    make_checkpoint: Make, tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize_checkpoint(make_checkpoint("one"), tmp_path / "a", scheme, QuantizeOptions(workers=1))
    monkeypatch.setattr(stream, "SLAB_BYTES", 1000)
    quantize_checkpoint(make_checkpoint("many", shards=4), tmp_path / "b", scheme, QuantizeOptions(workers=3))
    one, many = load_source(tmp_path / "a"), load_source(tmp_path / "b")
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name].view(torch.uint8), many[name].view(torch.uint8)) for name in one)


def test_fused_layers_share_the_scale_of_a_per_tensor_scheme(make_checkpoint: Make, tmp_path: Path) -> None:
    quantize_checkpoint(make_checkpoint(shards=5), tmp_path / "out", "fp8-static")
    written = read_all(tmp_path / "out")
    for layer in ("model.layers.0", "model.layers.1"):
        for family in (["self_attn.q", "self_attn.k", "self_attn.v"], ["mlp.gate", "mlp.up"]):
            scales = {written[f"{layer}.{name}_proj"].scale.item() for name in family}
            assert len(scales) == 1


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scheme", ["fp8-block", "fp8-static", "mxfp4", "nvfp4"])
def test_fused_experts_are_written_as_the_oracle_quantizes_their_slices(
    make_checkpoint: Make, tmp_path: Path, scheme: str, transposed: bool
) -> None:
    experts, hidden, inner = 3, 64, 96
    rng = np.random.default_rng(1)
    gate_up = rng.standard_normal((experts, 2 * inner, hidden)).astype(np.float32)
    down = rng.standard_normal((experts, hidden, inner)).astype(np.float32)
    stored = {"gate_up_proj": gate_up, "down_proj": down}
    if transposed:
        stored = {name: array.transpose(0, 2, 1).copy() for name, array in stored.items()}
    base = "model.layers.0.mlp.experts"
    source = make_checkpoint(
        tensors={f"{base}.{name}": array for name, array in stored.items()},
        dtype="F32",
        config={"model_type": "m", "hidden_size": hidden, "moe_intermediate_size": inner},
    )
    quantize_checkpoint(source, tmp_path / "out", scheme)
    written = read_all(tmp_path / "out")
    spec = SCHEMES[scheme].weight
    for expert in range(experts):
        amax = torch.tensor(np.abs(gate_up[expert]).max())
        for name, rows in (("gate_proj", slice(0, inner)), ("up_proj", slice(inner, None))):
            expected = quantize_tensor(torch.tensor(gate_up[expert][rows]), spec, amax)
            assert same(written[f"{base}.{expert}.{name}"], expected)
        assert same(written[f"{base}.{expert}.down_proj"], quantize_tensor(torch.tensor(down[expert]), spec))


def test_the_report_accounts_for_every_tensor_and_byte(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint(shards=2)
    report = quantize_checkpoint(source, tmp_path / "out", "fp8")
    with Checkpoint.open(source) as before, Checkpoint.open(tmp_path / "out") as after:
        assert [tensor.name for tensor in report.tensors] == list(before.tensors)
        assert report.source_bytes == sum(info.nbytes for info in before.tensors.values())
        assert report.output_bytes == sum(info.nbytes for info in after.tensors.values())
    saved = json.loads((tmp_path / "out" / "minifloat.json").read_text())
    assert saved == json.loads(json.dumps(report.to_dict()))
    assert len(saved["tensors"]) == len(report.tensors)


def test_the_reported_error_is_that_of_the_written_weights(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint()
    report = quantize_checkpoint(source, tmp_path / "out", "mxfp4")
    tensors, written = load_source(source), read_all(tmp_path / "out")
    for tensor in report.quantized:
        weight = tensors[tensor.name].double()
        noise = (weight - written[tensor.name.removesuffix(".weight")].dequantize().double()).square().sum()
        expected = 10 * torch.log10(weight.square().sum() / noise).item()
        assert tensor.stats is not None
        assert tensor.stats.sqnr_db == pytest.approx(expected, abs=1e-3)
        assert tensor.stats.elements == weight.numel()


def test_config_sidecars_card_and_provenance_are_written(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint(shards=2)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "README.md").write_text("---\nlicense: mit\nlicense_link: x\ntags: [a]\n---\n# old\n")
    quantize_checkpoint(source, tmp_path / "out", "mxfp4", QuantizeOptions(overrides=["down_proj=fp8"]))
    out = tmp_path / "out"
    config = json.loads((out / "config.json").read_text())
    assert config["hidden_size"] == 64
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    card = (out / "README.md").read_text()
    assert card.startswith(
        "---\nlicense: mit\nlicense_link: x\npipeline_tag: text-generation\nlibrary_name: transformers\n"
    )
    assert "minifloat quantize source OUT --scheme mxfp4 --override 'down_proj=fp8'" in card
    assert set(json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]) == set(load_source(out))


def test_the_digests_are_those_of_the_source_bytes_however_sharded(make_checkpoint: Make, tmp_path: Path) -> None:
    sources = [make_checkpoint("one"), make_checkpoint("many", shards=3)]
    reports = [quantize_checkpoint(source, tmp_path / f"{source.name}.out", "fp8") for source in sources]
    assert reports[0].provenance["source_digest"] == reports[1].provenance["source_digest"]
    tensors = load_source(sources[0])
    for tensor in reports[0].tensors:
        algorithm, digest = tensor.source_digest.split(":")
        hasher = hashlib.sha256() if algorithm == "sha256" else pytest.importorskip("blake3").blake3()
        hasher.update(tensors[tensor.name].view(torch.uint8).numpy().tobytes())
        assert digest == hasher.hexdigest()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "model.norm.weight"]
)
@pytest.mark.parametrize("scheme", ["fp8-block", "fp8-static"])
def test_a_tensor_with_nan_or_inf_is_refused_by_name_and_nothing_is_left(
    make_checkpoint: Make,
    tmp_path: Path,
    name: str,
    value: float,
    scheme: str,
    llama: Callable[[], dict[str, np.ndarray]],
) -> None:
    tensors = llama()
    tensors[name].reshape(-1)[-3] = value
    source = make_checkpoint("bad", tensors, shards=3)
    with pytest.raises(NonFiniteError, match=name.replace(".", r"\.")):
        quantize_checkpoint(source, tmp_path / "out", scheme)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad"]


def test_bad_requests_are_refused_before_anything_is_written(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint()
    with pytest.raises(UnknownNameError, match="valid: fp8-block"):
        quantize_checkpoint(source, tmp_path / "out", "fp7")
    with pytest.raises(UnknownNameError, match="compressed-tensors, fp8"):
        quantize_checkpoint(source, tmp_path / "out", options=QuantizeOptions(layout="awq"))
    with pytest.raises(NotACheckpointError):
        quantize_checkpoint(tmp_path / "missing", tmp_path / "out")
    with pytest.raises(DestinationError, match="exist"):
        quantize_checkpoint(source, tmp_path / "no" / "parent")
    with pytest.raises(UsageError, match="inside"):
        quantize_checkpoint(source, source / "out")
    with pytest.raises(UsageError, match="at least 1"):
        quantize_checkpoint(source, tmp_path / "out", options=QuantizeOptions(workers=0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_an_existing_destination_is_replaced_only_with_overwrite(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint()
    quantize_checkpoint(source, tmp_path / "out", "fp8")
    with pytest.raises(DestinationError, match="--overwrite"):
        quantize_checkpoint(source, tmp_path / "out", "mxfp4")
    quantize_checkpoint(source, tmp_path / "out", "mxfp4", QuantizeOptions(overwrite=True))
    assert json.loads((tmp_path / "out" / "minifloat.json").read_text())["recipe"]["scheme"] == "mxfp4"


def test_progress_ends_at_the_total(make_checkpoint: Make, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    report = quantize_checkpoint(
        make_checkpoint(), tmp_path / "out", progress=lambda done, total, _: calls.append((done, total))
    )
    assert calls[-1] == (report.source_bytes, report.source_bytes)
    assert calls == sorted(calls)


def test_a_tensor_that_no_model_reads_may_hold_infinity_by_name(
    make_checkpoint: Make, tmp_path: Path, llama: Callable[[], dict[str, np.ndarray]]
) -> None:
    """GPT-J's and CodeGen's files store ``masked_bias``, which holds -inf in some."""
    tensors = llama() | {"model.masked_bias": np.array([-np.inf, 0.0], np.float32)}
    source, out = make_checkpoint("masked", tensors, shards=3), tmp_path / "out"
    with pytest.raises(NonFiniteError, match=r"masked_bias: 1 values are NaN or Inf;.*--allow-nonfinite '\^model"):
        quantize_checkpoint(source, out)
    options = QuantizeOptions(allow_nonfinite=r"\.masked_bias$")
    report = quantize_checkpoint(source, out, options=options)
    assert report.notes[-1] == "NaN or Inf were copied, as allowed: model.masked_bias."
    row = next(row for row in report.tensors if row.name == "model.masked_bias")
    assert row.detail == "norm or bias, 1 NaN or Inf"
    assert "--allow-nonfinite '\\.masked_bias$'" in report.provenance["command"]
    assert load_source(out)["model.masked_bias"].tolist() == [-np.inf, 0.0]
    plain = convert_checkpoint(
        out, tmp_path / "plain", options=ConvertOptions(dequantize=True, allow_nonfinite="masked")
    )
    assert plain.notes[-1] == report.notes[-1]
    with pytest.raises(NonFiniteError, match="allow-nonfinite"):
        convert_checkpoint(out, tmp_path / "refused", options=ConvertOptions(dequantize=True))


def test_quantized_weights_are_never_allowed_to_hold_nan(
    make_checkpoint: Make, tmp_path: Path, llama: Callable[[], dict[str, np.ndarray]]
) -> None:
    tensors = llama()
    tensors["model.layers.0.mlp.up_proj.weight"].reshape(-1)[0] = np.nan
    source = make_checkpoint("bad", tensors)
    with pytest.raises(NonFiniteError, match=r"up_proj.weight: 1 values in rows .* is damaged$"):
        quantize_checkpoint(source, tmp_path / "out", options=QuantizeOptions(allow_nonfinite="weight"))


@pytest.mark.parametrize(("pattern", "problem"), [("masked", "matches no tensor"), ("(", "not a regular expression")])
def test_patterns_of_allowed_tensors_are_checked_before_anything_is_written(
    make_checkpoint: Make, tmp_path: Path, pattern: str, problem: str
) -> None:
    with pytest.raises(PatternError, match=f"allow_nonfinite: .*{problem}"):
        quantize_checkpoint(make_checkpoint(), tmp_path / "out", options=QuantizeOptions(allow_nonfinite=pattern))
    assert not (tmp_path / "out").exists()

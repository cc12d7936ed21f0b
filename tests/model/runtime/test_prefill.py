"""`load(prefill="w8a8")`: few rows are weight-only, many have quantized inputs; nothing of it where nobody asks."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from minifloat.errors import KernelUnavailable, UnknownNameError
from minifloat.kernels.linear import scaled_mm
from minifloat.model.runtime.inputs import InputQuantization
from minifloat.model.runtime.linear import PREFILL_ROWS, QuantizedLinear
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.numerics.granularity import GROUP_128, TENSOR, TOKEN, Granularity
from minifloat.quantize.job import quantize_checkpoint

INTEROP = Path(__file__).parents[2] / "data" / "interop"


def linears(model: PreTrainedModel) -> dict[str, QuantizedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def inputs(rows: int, module: QuantizedLinear) -> torch.Tensor:
    return torch.randn(rows, module.in_features, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize(("scheme", "granularity"), [("fp8", TOKEN), ("fp8-dynamic", TOKEN), ("fp8-block", GROUP_128)])
def test_few_rows_are_weight_only_and_many_have_quantized_inputs(
    llama_folder: Path, tmp_path: Path, scheme: str, granularity: Granularity, impl: str
) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", scheme)
    mixed = load(tmp_path / "q", LoadOptions(dtype=torch.float32, weight_only=True, prefill="w8a8", impl=impl))
    plain = linears(load(tmp_path / "q", LoadOptions(dtype=torch.float32, weight_only=True, impl=impl)))
    for name, module in linears(mixed).items():
        assert module.prefill is not None
        assert module.prefill.activation is not None
        assert module.prefill.activation.granularity == granularity
        few, many = inputs(PREFILL_ROWS - 1, module), inputs(PREFILL_ROWS, module)
        assert torch.equal(module(few), plain[name](few))
        assert not torch.equal(module(many), plain[name](many))
        plain[name].activation = module.prefill.activation
        assert torch.equal(module(many), plain[name](many))
        assert torch.equal(module(many.view(2, -1, module.in_features)), module(many).view(2, -1, module.out_features))


def test_the_static_scale_of_the_checkpoint_is_used() -> None:
    name = INTEROP / "llmc-fp8-static"
    mixed = linears(load(name, LoadOptions(dtype=torch.float32, weight_only=True, prefill="w8a8")))
    whole = linears(load(name, LoadOptions(dtype=torch.float32)))
    for path, module in mixed.items():
        assert module.prefill is not None
        assert module.prefill.activation is not None
        assert module.prefill.activation.granularity == TENSOR
        x = inputs(PREFILL_ROWS, module)
        assert torch.equal(module(x), whole[path](x))


def test_a_module_with_quantized_inputs_has_no_second_copy_for_prefill(llama_folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", "fp8-dynamic")
    assert all(m.prefill is None for m in linears(load(tmp_path / "q", LoadOptions(prefill="w8a8"))).values())
    assert all(m.prefill is None for m in linears(load(tmp_path / "q", LoadOptions(weight_only=True))).values())


def test_weights_that_fp8_inputs_do_not_go_with_are_named(
    llama_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", "mxfp4")
    with caplog.at_level(logging.WARNING, "minifloat"):
        model = load(tmp_path / "q", LoadOptions(prefill="w8a8"))
    assert all(module.prefill is None for module in linears(model).values())
    assert "weight-only at any number of rows, because their weights are not E4M3" in caplog.text


def test_copies_and_moves_keep_it(llama_folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", "fp8")
    module = next(iter(linears(load(tmp_path / "q", LoadOptions(dtype=torch.float32, prefill="w8a8"))).values()))
    x = inputs(PREFILL_ROWS, module)
    expected = module(x)
    assert torch.equal(copy.deepcopy(module)(x), expected)
    assert torch.equal(module.to("cpu")(x), expected)


def test_a_gpu_without_such_a_product_is_an_error(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", "fp8")
    monkeypatch.setattr(scaled_mm, "why_not", lambda *_: "compute capability 8.0")
    with pytest.raises(KernelUnavailable, match=r"_proj: prefill='w8a8' cannot run: compute capability 8\.0"):
        load(tmp_path / "q", LoadOptions(prefill="w8a8", device="meta"))


def test_another_value_is_refused(llama_folder: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown prefill 'fp8'; valid: w8a8"):
        load(llama_folder, LoadOptions(prefill="fp8"))
    with pytest.raises(UnknownNameError):
        InputQuantization(None, False, "W8A8")  # type: ignore[arg-type]

"""The output layer: when it is quantized while it is loaded, to which codes, and what the model then computes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel

from minifloat.calibration.options import TextOptions
from minifloat.checkpoint import Checkpoint
from minifloat.errors import NonFiniteError, UnknownNameError, UnsupportedTensorError, UsageError
from minifloat.model.layouts import describe
from minifloat.model.runtime.linear import Packing
from minifloat.model.runtime.lm_head import (
    FP8,
    LoadedLmHead,
    lm_head_of,
    lm_head_spec,
    quantize_lm_head,
    replace_lm_head,
)
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.numerics.tensor import quantize_tensor
from minifloat.quantize.data import DataOptions
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

MakeModel = Callable[..., Path]
IDS = torch.arange(40)[None]


def chosen(folder: Path, choice: str) -> bool:
    with Checkpoint.open(folder) as checkpoint:
        spec = lm_head_spec(choice, checkpoint, describe(checkpoint))
    assert spec in (None, FP8)
    return spec is not None


@pytest.mark.parametrize(
    ("scheme", "overrides", "is_fp8"),
    [
        ("mxfp4", [], True),
        ("mxfp4-w4a8", [], True),
        ("mxfp4", ["layers.0.self_attn.o_proj=fp8"], True),  # less than a tenth of the elements
        ("mxfp4", ["down_proj=fp8"], False),
        ("mxfp4", ["lm_head=mxfp4"], False),
        ("nvfp4", [], False),
        ("mxfp8", [], False),
        ("fp8", [], False),
    ],
)
def test_auto_is_fp8_beside_mxfp4_only(
    scheme: str, overrides: list[str], is_fp8: bool, llama_folder: Path, tmp_path: Path
) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", scheme, QuantizeOptions(overrides=overrides))
    assert chosen(tmp_path / "q", "auto") == is_fp8
    assert not chosen(tmp_path / "q", "bf16")
    assert chosen(tmp_path / "q", "fp8") == ("lm_head=mxfp4" not in overrides)


def test_auto_keeps_the_layer_beside_codes_that_were_chosen_otherwise(
    llama_folder: Path, make_gpt_oss: MakeModel, tmp_path: Path
) -> None:
    assert not chosen(llama_folder, "auto")
    quantize_checkpoint(
        make_gpt_oss(tmp_path / "gpt"), tmp_path / "gpt_q", "mxfp4", QuantizeOptions(allow_partial=True)
    )
    assert not chosen(tmp_path / "gpt_q", "auto")
    quantize_checkpoint(llama_folder, tmp_path / "q", "mxfp4")
    quantize_checkpoint(tmp_path / "q", tmp_path / "again", "mxfp4", QuantizeOptions(from_quantized=True))
    assert not chosen(tmp_path / "again", "auto")
    text = tmp_path / "text.txt"
    text.write_text("In winter the river froze, and nobody crossed it. " * 60)
    options = DataOptions([text], TextOptions(samples=24, seq_len=32, held_out=0.25))
    quantize_checkpoint(llama_folder, tmp_path / "data", "mxfp4", data=options)
    assert not chosen(tmp_path / "data", "auto")
    shard = tmp_path / "q" / "model.safetensors"
    save_file(load_file(shard), shard, metadata={"format": "pt"})  # as another tool writes it
    assert not chosen(tmp_path / "q", "auto")


def test_an_unknown_choice_lists_the_valid_ones(llama_folder: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown lm_head 'int8'.*auto, bf16, fp8"):
        load(llama_folder, LoadOptions(lm_head="int8"))


def test_what_cannot_be_quantized_is_named(llama_folder: Path) -> None:
    weight = torch.ones(4, 32)
    weight[2, 5] = torch.nan
    with pytest.raises(NonFiniteError, match=r"lm_head.weight.*1 NaN or Inf; --lm-head bf16"):
        quantize_lm_head(weight, FP8, tied=False)
    with pytest.raises(UnsupportedTensorError, match=r"lm_head.weight.*float64"):
        quantize_lm_head(weight.double(), FP8, tied=False)


def logits(folder: Path, choice: str) -> Tensor:
    with torch.no_grad():
        return load(folder, LoadOptions(dtype=torch.float32, lm_head=choice))(IDS).logits


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_rounded_weight(
    tied: bool, make_llama: MakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantize_checkpoint(make_llama(tmp_path / "m", tie_word_embeddings=tied), tmp_path / "q", "mxfp4")
    model = load(tmp_path / "q", LoadOptions(dtype=torch.float32))
    embedding, plain = model.model.embed_tokens.weight.clone(), logits(tmp_path / "q", "bf16")
    model.set_output_embeddings(nn.Linear(*reversed(embedding.shape), bias=False))
    source = load_file(tmp_path / "q" / "model.safetensors")
    weight = source["model.embed_tokens.weight" if tied else "lm_head.weight"].float()
    model.get_output_embeddings().weight = nn.Parameter(quantize_tensor(weight, FP8).dequantize(torch.float32))
    with caplog.at_level(logging.INFO), torch.no_grad():
        torch.testing.assert_close(logits(tmp_path / "q", "auto"), model(IDS).logits, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(logits(tmp_path / "q", "auto"), plain, rtol=1e-3, atol=1e-4)
    loaded = load(tmp_path / "q", LoadOptions(dtype=torch.float32, lm_head="auto"))
    assert torch.equal(loaded.model.embed_tokens.weight, embedding)
    assert lm_head_of(loaded) == "fp8 (quantized while loading)"
    assert "lm_head is quantized to fp8: 19.1 KiB instead of 72.0 KiB" in caplog.text
    assert ("beside the embedding that it is tied to" in caplog.text) == tied
    assert isinstance(loaded.get_output_embeddings(), LoadedLmHead)


def test_a_head_that_is_stored_quantized_stays_as_it_is(llama_folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", "mxfp4", QuantizeOptions(overrides=["lm_head=mxfp4"]))
    assert lm_head_of(load(tmp_path / "q", LoadOptions(lm_head="fp8"))) == "mxfp4"
    assert lm_head_of(load(llama_folder)) == "bfloat16"


def test_a_head_with_a_bias_keeps_it(make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "phi", "phi")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.bias"] = torch.linspace(-1, 1, len(weights["lm_head.bias"])).bfloat16()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(logits(folder, "fp8"), logits(folder, "bf16"), rtol=0.1, atol=0.1)
    assert lm_head_of(load(folder, LoadOptions(lm_head="fp8"))) == "fp8 (quantized while loading)"


def test_a_model_without_a_plain_head_is_refused_only_if_fp8_was_asked_for(llama_folder: Path) -> None:
    model, packing = AutoModel.from_pretrained(llama_folder), Packing("auto", torch.device("cpu"))
    with pytest.raises(
        UsageError, match="lm_head fp8 needs an output layer that is a plain Linear; LlamaModel has none"
    ):
        replace_lm_head(model, FP8, packing, asked=True)
    replace_lm_head(model, FP8, packing, asked=False)
    assert lm_head_of(model) == ""

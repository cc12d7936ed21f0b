"""minifloat reads llm-compressor's checkpoints; transformers with compressed-tensors reads minifloat's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import Noise
from safetensors.torch import load_file
from tools import run_script
from transformers import AutoModelForCausalLM
from vllm_cases import STORIES, STORYBOOK, calibrated

from minifloat.checkpoint import Checkpoint
from minifloat.model.layouts import describe, read_weight
from minifloat.model.layouts.inspection import inspect_checkpoint
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.model.runtime.tokenizer import load_tokenizer
from minifloat.numerics.scheme import SCHEMES
from minifloat.quantize.convert import ConvertOptions, convert_checkpoint
from minifloat.quantize.job import quantize_checkpoint

pytestmark = pytest.mark.timeout(1800)

#: llm-compressor's name of a scheme -> the names that `inspect` must give to its weights and inputs.
THEIRS = {
    "FP8": ("E4M3", "tensor"),
    "FP8_DYNAMIC": ("E4M3", "channel"),
    "FP8_BLOCK": ("E4M3", "block 128x128"),
    "MXFP4A16": ("E2M1", "group 1x32"),
    "MXFP8A16": ("E4M3", "group 1x32"),
    "NVFP4A16": ("E2M1", "group 1x16"),
    "NVFP4": ("E2M1", "group 1x16"),
}
OURS = [*SCHEMES]
LINEARS = 28
#: transformers loads scales in BF16 and rounds the products to BF16: two errors of half the spacing of 2^-7 each.
ROUNDED = 2**-7


@dataclass(frozen=True)
class Exchange:
    """The files that both sides wrote, and the input tokens."""

    folder: Path
    tokens: list[list[int]]
    answers: Mapping[str, Any]


@pytest.fixture(scope="module")
def exchange(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Exchange:
    folder = tmp_path_factory.mktemp("llm-compressor")
    ids = load_tokenizer(STORYBOOK)(STORIES.read_text()[:4000]).input_ids
    tokens = [ids[start : start + 64] for start in range(0, 4 * 64, 64)]
    jobs: list[tuple[str, dict[str, str]]] = [
        ("make", {"source": str(STORYBOOK), "scheme": scheme, "target": str(folder / scheme)}) for scheme in THEIRS
    ]
    for scheme in OURS:
        if scheme == "fp8-static":
            calibrated(scheme)(folder / scheme, make_model)
        else:
            quantize_checkpoint(STORYBOOK, folder / scheme, scheme)
        jobs.append(("read", {"folder": str(folder / scheme), "out": str(folder / f"{scheme}.read")}))
    answers = run_script("llmcompressor", "in_llmcompressor.py", {"jobs": jobs, "tokens": tokens}, folder)
    return Exchange(folder, tokens, dict(zip([*THEIRS, *OURS], answers, strict=True)))


@pytest.mark.parametrize("scheme", THEIRS)
def test_weights_of_llm_compressor_are_read_as_compressed_tensors_decodes_them(scheme: str, exchange: Exchange) -> None:
    assert exchange.answers[scheme]["error"] is None
    wanted = load_file(exchange.folder / f"{scheme}.weights")
    with Checkpoint.open(exchange.folder / scheme) as checkpoint:
        weights = describe(checkpoint).weights
        assert len(weights) == LINEARS
        assert weights.keys() == wanted.keys()
        for module, stored in weights.items():
            assert (stored.spec.element.name, str(stored.spec.granularity)) == THEIRS[scheme]
            assert torch.equal(read_weight(checkpoint, stored).dequantize(), wanted[module]), module
    seen = inspect_checkpoint(exchange.folder / scheme)
    assert seen.layout == "compressed-tensors"
    assert {row.name for row in seen.rows if row.kind == "quantized"} == set(wanted)


@pytest.mark.parametrize("scheme", THEIRS)
def test_logits_of_llm_compressors_checkpoints_are_those_of_its_decoded_weights(
    scheme: str, exchange: Exchange
) -> None:
    model = AutoModelForCausalLM.from_pretrained(STORYBOOK, dtype=torch.float32)
    for module, weight in load_file(exchange.folder / f"{scheme}.weights").items():
        model.get_submodule(module).weight.data = weight
    ours = load(exchange.folder / scheme, LoadOptions(dtype=torch.float32, weight_only=True))
    with torch.inference_mode():
        expected, found = (loaded(torch.tensor(exchange.tokens)).logits for loaded in (model, ours))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("scheme", THEIRS)
def test_llm_compressors_checkpoints_are_converted_code_for_code(
    scheme: str, exchange: Exchange, tmp_path: Path
) -> None:
    wanted = load_file(exchange.folder / f"{scheme}.weights")
    convert_checkpoint(
        exchange.folder / scheme, tmp_path / "plain", options=ConvertOptions(dequantize=True, dtype="float32")
    )
    with Checkpoint.open(tmp_path / "plain") as checkpoint:
        plain = load_file(checkpoint.path / "model.safetensors")
    assert all(torch.equal(plain[f"{module}.weight"], weight) for module, weight in wanted.items())
    if scheme == "FP8_BLOCK":
        convert_checkpoint(exchange.folder / scheme, tmp_path / "fp8", "fp8")
        with Checkpoint.open(tmp_path / "fp8") as checkpoint:
            for module, stored in describe(checkpoint).weights.items():
                assert torch.equal(read_weight(checkpoint, stored).dequantize(), wanted[module])


@pytest.mark.parametrize("scheme", OURS)
def test_our_checkpoints_are_the_same_model_in_llm_compressors_environment(scheme: str, exchange: Exchange) -> None:
    assert exchange.answers[scheme]["error"] is None
    theirs = load_file(exchange.folder / f"{scheme}.read")
    with Checkpoint.open(exchange.folder / scheme) as checkpoint:
        for module, stored in describe(checkpoint).weights.items():
            wanted = read_weight(checkpoint, stored).dequantize()
            torch.testing.assert_close(theirs[module], wanted, rtol=ROUNDED, atol=0, msg=module)
    inputs_too = SCHEMES[scheme].activation is not None
    noise = Noise.of(exchange.folder / scheme, exchange.tokens, inputs_too=inputs_too)
    exact = load(exchange.folder / scheme, LoadOptions(dtype=torch.float32, weight_only=True))
    with torch.inference_mode():
        wanted = exact(torch.tensor(exchange.tokens)).logits.log_softmax(-1)
    likely = wanted.topk(20).indices
    assert noise.covers((theirs["logits"].log_softmax(-1) - wanted).gather(-1, likely).flatten().tolist())

"""Models with latent attention in the engine: the bytes of their cache, FP8 caches, packed weights, drafts, GPUs."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from native_cases import VOCAB, config_of, model_of, quantizable_sizes, write
from safetensors.torch import load_file, save_file

from minifloat.deploy.estimate.shape import cache_bytes, model_shape
from minifloat.engine import Engine, EngineOptions, SamplingParams
from minifloat.kernels.decoder import BLOCK_TOKENS
from minifloat.model.architecture.decoder import decoder_layout, why_not_on_device
from minifloat.numerics.formats import BFLOAT16, E4M3
from minifloat.quantize.job import quantize_checkpoint

NAME = "deepseek_v3"
RANK, TURNED, LAYERS = 40, 16, 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = torch.randint(VOCAB, (50,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(model_of(NAME).bfloat16(), tmp_path_factory.mktemp("m") / "m")


def tokens(engine: Engine) -> list[int]:
    assert engine.info.runner == "native", engine.info.reason_not_native
    return list(engine.generate([PROMPT], GREEDY)[0].tokens)


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "element", "size"),
    [("float32", "auto", None, 4), ("bfloat16", "auto", BFLOAT16, 2), ("bfloat16", "fp8", E4M3, 1)],
)
def test_a_token_takes_the_bytes_of_its_latent(
    dtype: str, kv_cache_dtype: str, element: object, size: int, folder: Path
) -> None:
    memory = LAYERS * (RANK + TURNED) * size * BLOCK_TOKENS * 7
    engine = Engine(folder, EngineOptions(dtype=dtype, kv_cache_dtype=kv_cache_dtype, kv_cache_memory=memory))
    assert engine.info.kv_bytes_per_token == LAYERS * (RANK + TURNED) * size
    assert (engine.info.kv_blocks, engine.info.kv_bytes) == (7, memory)
    if element in (BFLOAT16, E4M3):
        shape = model_shape(config_of(NAME).to_dict(), folder)
        assert cache_bytes(shape.cache, BLOCK_TOKENS, element) * 7 == memory  # type: ignore[arg-type]


def test_an_fp8_cache_without_scales_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "minifloat"):
        engine = Engine(folder, EngineOptions(dtype="float32", kv_cache_dtype="fp8"))
    assert engine.info.kv_element == "E4M3"
    assert "the latents are stored with the scale 1" in caplog.text
    exact = Engine(folder, EngineOptions(dtype="float32"))
    found, expected = (e.generate([PROMPT], SamplingParams(max_tokens=1, logprobs=5, seed=1)) for e in (engine, exact))
    first, second = (completion[0].logprobs[0].logprob for completion in (found, expected))  # type: ignore[index]
    assert first != second
    assert abs(first - second) < 0.5


def test_the_scale_of_keys_is_that_of_latents(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A power of two changes little, except where numbers fall below the smallest; the scale of values is not read."""
    quantize_checkpoint(
        write(model_of(NAME, **quantizable_sizes(NAME)).bfloat16(), tmp_path / "m"), tmp_path / "q", "fp8"
    )
    (shard,) = (tmp_path / "q").glob("*.safetensors")
    weights = load_file(shard)
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    found = {}
    for k_scale, v_scale in ((1.0, 1.0), (1.0, 1e4), (0.25, 1.0), (512.0, 1.0)):
        scales = {
            f"model.layers.{layer}.self_attn.{letter}_scale": torch.tensor(scale)
            for layer in range(LAYERS)
            for letter, scale in (("k", k_scale), ("v", v_scale))
        }
        save_file(weights | scales, shard, {"format": "pt"})
        engine = Engine(tmp_path / "q", EngineOptions(dtype="float32", lm_head="bf16"))
        assert engine.info.kv_element == "E4M3"
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1)
        found[k_scale, v_scale] = engine.generate([PROMPT], params)[0].logprobs[0].logprob  # type: ignore[index]
    assert found[1.0, 1.0] == found[1.0, 1e4]
    assert abs(found[1.0, 1.0] - found[0.25, 1.0]) < 0.05
    assert abs(found[1.0, 1.0] - found[512.0, 1.0]) > 0.1
    assert "with the scale 1" not in caplog.text


def test_kimi_k2_is_a_deepseek_v3_under_another_name(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "kimi")
    file = tmp_path / "kimi" / "config.json"
    config = json.loads(file.read_text()) | {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "code.Config"}}
    file.write_text(json.dumps(config))
    assert tokens(Engine(tmp_path / "kimi", EngineOptions(dtype="float32"))) == tokens(
        Engine(folder, EngineOptions(dtype="float32"))
    )


def test_the_log_says_which_keys_are_in_bf16(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes = quantizable_sizes(NAME)
    quantize_checkpoint(write(model_of(NAME, **sizes).bfloat16(), tmp_path / "m"), tmp_path / "q", "mxfp4")
    with caplog.at_level(logging.INFO, "minifloat"):
        Engine(tmp_path / "q")
    assert "the keys of 3 layers of latent attention are multiplied in BF16, which holds them exactly" in caplog.text


def test_drafts_of_the_model_itself_do_not_change_the_text(folder: Path) -> None:
    expected = tokens(Engine(folder, EngineOptions(dtype="float32")))
    assert tokens(Engine(folder, EngineOptions(dtype="float32", speculate="self"))) == expected


def test_the_decoder_of_gpus_says_what_it_lacks() -> None:
    assert why_not_on_device(decoder_layout(config_of("youtu"))) == (
        "the decoder of GPUs does not have latent attention"
    )

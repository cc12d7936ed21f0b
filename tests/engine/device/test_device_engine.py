"""The engine's way on a GPU makes the tokens that the CPU's makes; here on a CPU, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from engines import GREEDY, Recorder, collect, devices, fail_and_poison, prompts_of, tokens
from safetensors.torch import load_file, save_file

from minifloat.commands.main import main
from minifloat.engine import Engine, EngineListener, EngineOptions, Request, SamplingParams, transfer
from minifloat.errors import KernelUnavailable, UnsupportedTensorError, UsageError
from minifloat.quantize.job import quantize_checkpoint

MakeModel = Callable[..., Path]
DENSE: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 20},
    "qwen2": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
}


def on_device(folder: Path, device: str, observer: EngineListener | None = None, **options: Any) -> Engine:
    engine = Engine(
        folder,
        EngineOptions(**{"dtype": "float32", "runner": "device", "device": device, "max_num_seqs": 9} | options),
        observer=observer,
    )
    assert engine.info.runner == "device"
    assert engine.info.device.startswith(device)
    return engine


@pytest.fixture(scope="module", params=list(DENSE))
def model(request: pytest.FixtureRequest, make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder, prompts, and what the CPU's engine makes of them."""
    folder = make_model(tmp_path_factory.mktemp(request.param), request.param, **DENSE[request.param])
    prompts = prompts_of(17)
    return folder, prompts, tokens(Engine(folder, EngineOptions(dtype="float32")), prompts)


@devices
def test_greedy_tokens_are_those_of_the_cpu_engine_in_every_batch(model: Any, device: str) -> None:
    folder, prompts, answers = model
    engine = on_device(folder, device)
    assert tokens(engine, prompts) == answers
    assert tokens(engine, prompts) == answers  # now from the prefix cache
    assert [tokens(engine, [prompt])[0] for prompt in prompts[:3]] == answers[:3]


@devices
def test_tokens_are_the_same_when_prompts_are_cut_into_pieces(model: Any, device: str) -> None:
    folder, prompts, answers = model
    assert tokens(on_device(folder, device, max_num_seqs=5, max_num_batched_tokens=13), prompts) == answers


@devices
def test_tokens_are_the_same_with_preemptions_and_shared_prefixes(model: Any, device: str) -> None:
    folder, prompts, answers = model
    memory = Engine(folder, EngineOptions(dtype="float32", runner="device")).info.kv_bytes_per_token * 16 * 9
    recorder = Recorder()
    engine = on_device(folder, device, kv_cache_memory=memory, max_model_len=100, observer=recorder)
    assert tokens(engine, prompts) == answers
    assert recorder.preemptions > 0
    assert engine.kv_usage == 0.0
    roomy = on_device(folder, device, observer=recorder)
    assert tokens(roomy, prompts[:6]) + tokens(roomy, prompts[:6]) == answers[:6] * 2
    assert sum(step.prefix_hits for step in recorder.steps) > 0


@devices
@pytest.mark.parametrize("scheme", ["fp8", "fp8-block", "mxfp8", "mxfp4", "nvfp4"])
def test_quantized_models_make_the_tokens_of_the_cpu_engine(
    scheme: str, device: str, make_model: MakeModel, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model", "qwen3", hidden_size=128, intermediate_size=128)
    quantize_checkpoint(folder, tmp_path / "out", scheme)
    prompts = prompts_of(5)
    engine = on_device(tmp_path / "out", device)
    assert engine.info.scheme.startswith(scheme)
    assert tokens(engine, prompts) == tokens(Engine(tmp_path / "out", EngineOptions(dtype="float32")), prompts)
    reference = on_device(tmp_path / "out", device, impl="reference")
    assert tokens(reference, prompts) == tokens(engine, prompts)


def with_kv_scales(folder: Path, out: Path, heads: int | None) -> Path:
    """A copy of a model with scales for an FP8 cache: of tensors, or of heads as compressed-tensors has them."""
    import json
    import shutil

    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    random = torch.Generator().manual_seed(0)
    for layer in range(2):
        for which in "kv":
            scale = torch.rand(1 if heads is None else heads, generator=random) * 0.02 + 0.005
            name = f"model.layers.{layer}.self_attn.{which}_scale"
            tensors[name] = scale if heads is None else scale.view(heads, 1, 1)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    strategy = "tensor" if heads is None else "attn_head"
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False, "symmetric": True},
    }
    (out / "config.json").write_text(json.dumps(config))
    return out


@devices
def test_an_fp8_cache_makes_the_tokens_of_the_cpu_engine(device: str, llama_folder: Path, tmp_path: Path) -> None:
    folder = with_kv_scales(llama_folder, tmp_path / "scales", None)
    engine, prompts = on_device(folder, device), prompts_of(9)
    native = Engine(folder, EngineOptions(dtype="float32"))
    assert engine.info.kv_element == native.info.kv_element == "E4M3"
    assert engine.info.kv_bytes_per_token < on_device(llama_folder, device).info.kv_bytes_per_token
    assert tokens(engine, prompts) == tokens(native, prompts)
    assert tokens(engine, prompts) != tokens(Engine(llama_folder, EngineOptions(dtype="float32")), prompts)


@devices
def test_the_scales_of_an_fp8_cache_may_be_those_of_heads(device: str, llama_folder: Path, tmp_path: Path) -> None:
    engine = on_device(with_kv_scales(llama_folder, tmp_path / "heads", 2), device)
    assert engine.info.kv_element == "E4M3"
    scales = engine._runner._cache.scales  # type: ignore[attr-defined]
    assert len(scales.unique()) == scales.numel() == 8
    plain = tokens(Engine(llama_folder, EngineOptions(dtype="float32")), prompts_of(9))
    assert tokens(engine, prompts_of(9))[0][:2] == plain[0][:2]  # near it


def test_scales_of_another_number_of_heads_are_refused(llama_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedTensorError, match=r"expected one scale of the KV cache, or 2, found F32 \[3, 1, 1\]"
    ):
        on_device(with_kv_scales(llama_folder, tmp_path / "heads", 3), "cpu")


@devices
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_are_near_float32(dtype: str, device: str, llama_folder: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=20, ignore_eos=True)
    found = on_device(llama_folder, device, dtype=dtype).generate(prompts_of(4), params)
    exact = on_device(llama_folder, device).generate(prompts_of(4), params)
    for mine, theirs in zip(found, exact, strict=True):
        assert mine.logprobs is not None
        assert theirs.logprobs is not None
        wanted = {entry.token: entry.logprob for entry in theirs.logprobs[0].top}
        near = [abs(wanted[entry.token] - entry.logprob) for entry in mine.logprobs[0].top if entry.token in wanted]
        assert len(near) > 15
        assert max(near) < 0.03


@devices
def test_a_step_waits_for_the_device_once(device: str, llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = on_device(llama_folder, device)
    waits = 0
    wait = transfer.Fetch.wait

    def counted(fetch: transfer.Fetch) -> list[torch.Tensor]:
        nonlocal waits
        waits += 1
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        found = wait(fetch)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        return found

    monkeypatch.setattr(transfer.Fetch, "wait", counted)
    kinds = [
        GREEDY,
        SamplingParams(temperature=0.8, seed=1, max_tokens=24),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=20, max_tokens=24),
        SamplingParams(temperature=0.8, presence_penalty=1.0, max_tokens=24),
        SamplingParams(temperature=0.0, logprobs=3, max_tokens=24),
    ]
    for index, prompt in enumerate(prompts_of(5, low=20)):
        engine.add(Request(str(index), prompt, kinds[index]))
    steps = 0
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        while engine.has_work:
            engine.step()
            steps += 1
            assert waits == steps
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert steps > 20


@devices
def test_seeded_draws_are_those_of_the_cpu_engine(device: str, llama_folder: Path) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=24, ignore_eos=True)
    native = tokens(Engine(llama_folder, EngineOptions(dtype="float32")), prompts_of(6), params)
    assert tokens(on_device(llama_folder, device), prompts_of(6), params) == native


@devices
def test_failures_stay_with_their_sequence(device: str, llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = on_device(llama_folder, device)
    prompts = prompts_of(5)
    answers = tokens(engine, prompts)
    fail_and_poison(engine, monkeypatch)
    whole = collect(engine, prompts)
    assert whole["2"].error == "injected"
    assert "not finite" in str(whole["1"].error)
    for index in (0, 3, 4):
        assert list(whole[str(index)].tokens) == answers[index]


@devices
def test_mixtures_of_experts_are_run_by_transformers_with_a_reason(
    device: str, make_mixtral: MakeModel, tmp_path: Path
) -> None:
    folder = make_mixtral(tmp_path / "mixtral")
    with pytest.raises(UsageError, match="decoder of GPUs does not have mixtures of experts"):
        Engine(folder, EngineOptions(runner="device", device=device))
    if device == "cuda":
        engine = Engine(folder, EngineOptions(dtype="float32", device=device))
        assert engine.info.runner == "transformers"
        assert "mixtures of experts" in engine.info.reason_not_native
        assert tokens(engine, prompts_of(3)) == tokens(Engine(folder, EngineOptions(dtype="float32")), prompts_of(3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_device_is_refused_in_one_line(llama_folder: Path) -> None:
    with pytest.raises(KernelUnavailable, match=r"device cuda: torch .* sees no NVIDIA GPU here"):
        Engine(llama_folder, EngineOptions(device="cuda"))
    for name in ("gpu", "meta", "cuda:x"):
        with pytest.raises(UsageError, match="device: expected cpu, cuda or cuda:N"):
            Engine(llama_folder, EngineOptions(device=name))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["serve MODEL", "generate MODEL abc", "bench MODEL --baseline MODEL"])
def test_every_command_with_a_device_says_so_in_one_line(command: str, llama_folder: Path) -> None:
    arguments = command.replace("MODEL", str(llama_folder)).split()
    result = CliRunner().invoke(main, [*arguments, "--device", "cuda"])
    assert result.exit_code == 2
    assert result.stderr.startswith("minifloat: error: device cuda: torch ")
    assert result.stderr.count("\n") == 1


@devices
def test_the_last_linear_may_be_fp8(device: str, llama_folder: Path) -> None:
    plain, fp8 = on_device(llama_folder, device), on_device(llama_folder, device, lm_head="fp8")
    assert fp8.info.step_bytes < plain.info.step_bytes
    assert tokens(fp8, prompts_of(3)) == tokens(
        Engine(llama_folder, EngineOptions(dtype="float32", lm_head="fp8")), prompts_of(3)
    )

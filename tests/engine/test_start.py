"""A start on the native path imports neither transformers nor torch's compiler; the log says how far it is."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from native_cases import model_of, write

from minifloat.engine import Engine, EngineOptions, blueprint, opening
from minifloat.engine.grammar import Grammars
from minifloat.errors import UsageError

#: Opens an engine, generates, and makes the server's application; prints which modules were imported.
_START = """
import sys
from minifloat.engine import AsyncEngine, Engine, EngineOptions, SamplingParams
from minifloat.serve.server import ServerSettings, create_app
engine = Engine(sys.argv[1], EngineOptions(kv_cache_memory=1 << 20))
engine.generate("Once", SamplingParams(temperature=0.0, max_tokens=2, logprobs=1))
create_app(AsyncEngine(engine), ServerSettings(model_name="m"))
print(engine.info.runner)
print(*sys.modules)
"""
#: What takes time to import and is not needed; a name stands for its submodules too.
_SLOW = (
    "accelerate",
    "huggingface_hub",
    "pandas",
    "scipy",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "transformers",
    "triton",
)


def start(code: str, folder: Path) -> list[str]:
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(folder)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.splitlines()


def test_the_native_path_imports_neither_transformers_nor_the_compiler(llama_folder: Path) -> None:
    runner, modules = start(_START, llama_folder)
    assert runner == "native"
    found = {name for name in modules.split() if any(name == slow or name.startswith(slow + ".") for slow in _SLOW)}
    assert not found


#: As `serve` does: a decoder opens and answers, then transformers' code, which needs torch's device "meta".
_LEAN = """
import sys
from minifloat.serve.starting import import_torch
import_torch()
import torch
from minifloat.engine import Engine, EngineOptions, SamplingParams
params = SamplingParams(temperature=0.0, max_tokens=4)
answers, lean = [], []
for runner in ("native", "transformers"):
    engine = Engine(sys.argv[1], EngineOptions(kv_cache_memory=1 << 20, runner=runner, dtype="float32"))
    answers.append(engine.generate("Once", params)[0].text)
    lean.append("torch._meta_registrations" not in sys.modules and "torch._refs" not in sys.modules)
print(lean, answers[0] == answers[1], torch.empty(2, 3, device="meta").cumsum(1).shape == (2, 3))
"""


def test_serve_imports_the_kernels_of_tensors_without_memory_for_transformers_only(llama_folder: Path) -> None:
    assert start(_LEAN, llama_folder) == ["[True, False] True True"]


@pytest.mark.parametrize("name", ["gpt_oss", "gemma4_text", "qwen3_vl"])
def test_models_that_transformers_saved_are_opened_without_it(name: str, tmp_path: Path) -> None:
    runner, modules = start(_START, write(model_of(name), tmp_path / "m"))
    assert runner == "native"
    assert "transformers" not in modules.split()


def test_an_unknown_key_of_a_later_release_is_left_to_transformers(llama_folder: Path, tmp_path: Path) -> None:
    for file in llama_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"surprise": 1, "transformers_version": "99.0.0"}))
    runner, modules = start(_START, tmp_path)
    assert runner == "native"
    assert "transformers" in modules.split()


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_the_help_of_a_command_imports_no_torch(command: str) -> None:
    code = "import sys; from click.testing import CliRunner; from minifloat.commands.main import main\n"
    code += f"assert CliRunner().invoke(main, ['{command}', '--help']).exit_code == 0; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"


def test_the_tokenizer_is_read_for_grammars_before_the_weights_where_a_server_asks(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    build = opening.build_native_decoder
    monkeypatch.setattr(Grammars, "prepare_ahead", lambda self: order.append(f"tokenizer {self._vocab}"))
    monkeypatch.setattr(opening, "build_native_decoder", lambda *a, **k: order.append("weights") or build(*a, **k))
    engine = Engine(llama_folder, EngineOptions(kv_cache_memory=1 << 20), grammars=True)
    assert order == [f"tokenizer {engine.info.vocab_size}", "weights"]
    Engine(llama_folder, EngineOptions(kv_cache_memory=1 << 20))
    assert order[2:] == ["weights"]


def test_a_cache_for_which_there_is_no_memory_is_refused_with_what_is_free(llama_folder: Path) -> None:
    with pytest.raises(UsageError, match=r"^kv_cache_memory: 900\.00 GiB were asked for, and [\d.,]+ [MG]iB are free"):
        Engine(llama_folder, EngineOptions(kv_cache_memory=900 << 30))


def test_the_log_names_what_is_loaded_before_it_is_loaded(llama_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="minifloat"):
        Engine(llama_folder, EngineOptions(kv_cache_memory=1 << 20))
    assert any(f"loading {llama_folder.name}: " in message and "to cpu" in message for message in caplog.messages)


def test_the_log_counts_layers_every_few_seconds_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = iter([0.0, 1.0, 4.0, 5.5, 6.0, 11.0])
    monkeypatch.setattr(blueprint.time, "monotonic", lambda: next(clock))
    with caplog.at_level(logging.INFO, logger="minifloat"):
        assert list(blueprint.logged_layers("abcde")) == list("abcde")
    assert caplog.messages == ["loading: 2 of 5 layers", "loading: 4 of 5 layers"]

"""Every command opens each of its checkpoints once, and passes the open checkpoint on.

The processes of `bench` open theirs in `Engine`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from minifloat import Engine, quantize_checkpoint
from minifloat.checkpoint import Checkpoint
from minifloat.commands.main import main
from minifloat.serve.server.settings import ServerSettings
from minifloat.serve.server.start import serve_checkpoint

QUANTIZE = "quantize {plain} {new} --scheme fp8-dynamic"
QUANTIZE_STATIC = "quantize {plain} {new} --scheme fp8-static --calibration {text} --calibration-seq-len 32"
CALIBRATE = "calibrate {plain} {new}.safetensors --data {text} --samples 4 --seq-len 32"
COMPARE = "compare {plain} {quantized} --data {text} --window 64 --prompts 1 --new-tokens 2"

#: Command -> how often it opens the plain and the quantized checkpoint.
OPENINGS: dict[str, dict[str, int]] = {
    # The new checkpoint once, by the report beside it.
    QUANTIZE: {"plain": 1, "new": 1},
    f"{QUANTIZE} --target transformers:cpu": {"plain": 1, "new": 1},
    # Once to calibrate and once to quantize: `quantize_checkpoint` takes a path, and statistics already collected.
    f"{QUANTIZE_STATIC} --calibration-samples 4": {"plain": 2, "new": 1},
    CALIBRATE: {"plain": 1},
    f"{CALIBRATE} --held-out 0": {"plain": 1},
    f"{CALIBRATE} --max-memory 140000B": {"plain": 1},
    # Once by the step that writes the text, once by its engine, and once to calibrate.
    CALIBRATE.replace("{text}", "self"): {"plain": 3},
    "convert {quantized} {new} --dequantize": {"quantized": 1},
    COMPARE: {"plain": 1, "quantized": 1},
    f"{COMPARE} --variants --resume {{new}}": {"plain": 1, "quantized": 1},
    f"{COMPARE} --attribute --attribute-seconds 0.1": {"plain": 1, "quantized": 1},
    "inspect {quantized}": {"quantized": 1},
    "check {quantized} --engine transformers --hardware cpu": {"quantized": 1},
    "plan {quantized} --hardware h100": {"quantized": 1},
    "push {quantized} someone/model --dry-run --license mit --base-model someone/base": {"quantized": 1},
    "generate {quantized} Once -n 2": {"quantized": 1},
}


@pytest.fixture(scope="module")
def folders(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("openings")
    quantize_checkpoint(llama_folder, folder / "quantized", "fp8-dynamic")
    (folder / "text.txt").write_text("Once upon a time there was a checkpoint that nobody opened twice.\n" * 20)
    return {"plain": llama_folder, "quantized": folder / "quantized", "text": folder / "text.txt"}


@pytest.fixture
def openings(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of calls of `Checkpoint.open` so far, by the name of the folder in `folders`, or "new"."""
    names = {path.resolve(): name for name, path in folders.items()} | {(tmp_path / "new").resolve(): "new"}
    counts: Counter[str] = Counter()
    open_checkpoint = Checkpoint.open

    def open_and_count(path: Any, *args: Any, **kwargs: Any) -> Checkpoint:
        counts[names.get(Path(path).resolve(), str(path))] += 1
        return open_checkpoint(path, *args, **kwargs)

    monkeypatch.setattr(Checkpoint, "open", open_and_count)
    return counts


@pytest.mark.parametrize("command", OPENINGS)
def test_a_command_opens_each_checkpoint_once(
    command: str, folders: dict[str, Path], openings: Counter[str], tmp_path: Path
) -> None:
    arguments = [word.format(new=tmp_path / "new", **folders) for word in command.split()]
    result = CliRunner().invoke(main, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    assert result.exit_code in (0, 1, 3), result.output  # 2: an error; 1 and 3: what compare or check judged
    assert openings == OPENINGS[command]


def test_the_engine_opens_its_checkpoint_once(folders: dict[str, Path], openings: Counter[str]) -> None:
    Engine(str(folders["quantized"]))
    assert openings == {"quantized": 1}


def test_serve_opens_its_checkpoint_once(
    folders: dict[str, Path], openings: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minifloat.serve.server.app.serve", lambda *_: None)
    serve_checkpoint(folders["quantized"], ServerSettings("model", port=0))
    assert openings == {"quantized": 1}

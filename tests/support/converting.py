"""Helpers of the tests of `convert` and `quantize`: a checkpoint as plain values, edits, shards, interruptions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.journal import sealed_line
from minifloat.checkpoint.shard import ShardWriter
from minifloat.engine.options import Dtype
from minifloat.errors import StorageError
from minifloat.model.layouts import describe, read_weight
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.quantize.convert import ConvertOptions, ConvertReport, convert_checkpoint
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions
from minifloat.quantize.report import QuantizeReport

INTEROP = Path(__file__).parents[1] / "data" / "interop"
FIXTURES = sorted(path.parent.name for path in INTEROP.glob("*/expected.json"))


#: Stands for a value that is to be removed.
DELETED = object()


def interrupt_after(monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    """Let a number of shards be written, then fail as on a full disk."""
    plain, done = ShardWriter.commit, [0]

    def commit(self: ShardWriter, record: dict[str, object]) -> None:
        if done[0] == shards:
            raise StorageError("disk full")
        plain(self, record)
        done[0] += 1

    monkeypatch.setattr(ShardWriter, "commit", commit)


def interrupted(
    monkeypatch: pytest.MonkeyPatch, shards: int, run: Callable[..., object], *args: Any, **kwargs: Any
) -> None:
    """Call a function that writes a checkpoint, and let it fail as on a full disk after a number of shards."""
    with monkeypatch.context() as patched:
        interrupt_after(patched, shards)
        with pytest.raises(StorageError):
            run(*args, **kwargs)


def change_record(destination: Path, keys: Sequence[str | int], value: object) -> str:
    """Change a value in the first record of an interrupted run's journal, with a right digest of the line."""
    journal = destination.with_name(f"{destination.name}.minifloat-work") / "minifloat-journal.jsonl"
    run, first, *others = journal.read_bytes().splitlines(keepends=True)
    entry = json.loads(first)
    del entry["line"]
    place = entry["record"]
    for key in keys[:-1]:
        place = place[key]
    if value is DELETED:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    journal.write_bytes(run + sealed_line(json.dumps(entry).encode()) + b"".join(others))
    return str(entry["file"])


def stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return every tensor of a checkpoint: dtype, shape and bytes."""
    with Checkpoint.open(folder) as checkpoint:
        return {
            name: (info.dtype, info.shape, checkpoint.read(name).tobytes()) for name, info in checkpoint.tensors.items()
        }


def meaning(folder: Path) -> dict[str, Any]:
    """Return what a checkpoint means in any layout: codes, effective scales, input formats and unquantized tensors."""
    with Checkpoint.open(folder) as checkpoint:
        description = describe(checkpoint)
        content: dict[str, Any] = {"kv": description.kv}
        used = set(description.auxiliary)
        for module, weight in description.weights.items():
            used |= set(weight.tensors)
            decoded = read_weight(checkpoint, weight)
            content[module] = (
                weight.spec.element,
                weight.spec.granularity,
                weight.activation and (weight.activation.element, weight.activation.granularity),
                decoded.codes.numpy().tobytes(),
                decoded.block_scale().numpy().tobytes(),
            )
        for name, info in checkpoint.tensors.items():
            if name not in used:
                content[name] = (info.dtype, info.shape, checkpoint.read(name).tobytes())
    return content


def scalars(folder: Path, *suffixes: str) -> dict[str, float]:
    """Return the scalar tensors whose names end with a suffix, by the name before the first matching suffix."""
    values = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name == "expected.safetensors":
            continue
        for name, tensor in load_file(path).items():
            suffix = next((suffix for suffix in suffixes if name.endswith(suffix)), None)
            if suffix is not None:
                values[name.removesuffix(suffix)] = tensor.float().item()
    return values


def quantization_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return config


def edited(
    source: Path,
    folder: Path,
    *,
    tensors: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]] | None = None,
    config: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """Copy a checkpoint, with changed tensors or a changed quantization_config."""
    shutil.copytree(source, folder)
    if tensors is not None:
        path = folder / "model.safetensors"
        save_file(dict(tensors(load_file(path))), path, metadata={"format": "pt"})
    if config is not None:
        whole = json.loads((folder / "config.json").read_text())
        config(whole["quantization_config"])
        (folder / "config.json").write_text(json.dumps(whole))
    return folder


def sharded(source: Path, folder: Path, count: int) -> Path:
    """Copy a checkpoint into several shards, tensors in turn, so that codes and their scale lie in different shards."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    shard_by_tensor = {name: names[index % count] for index, name in enumerate(sorted(tensors))}
    for shard in names:
        part = {name: tensor for name, tensor in tensors.items() if shard_by_tensor[name] == shard}
        save_file(part, folder / shard, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": shard_by_tensor}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def dequantize(source: Path, out: Path, dtype: Dtype | None = None) -> ConvertReport:
    return convert_checkpoint(source, out, options=ConvertOptions(dequantize=True, dtype=dtype))


def requantize(source: Path, out: Path, scheme: str | None) -> QuantizeReport:
    return quantize_checkpoint(source, out, scheme, QuantizeOptions(from_quantized=True))


def assert_expected_logits(fixture: str, logits_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Assert that logits are those of the independent dequantization of a fixture."""
    expected = load_file(INTEROP / fixture / "expected.safetensors")
    tolerance = 1e-5 * float(expected["logits"].abs().max())
    torch.testing.assert_close(logits_of(expected["input_ids"]), expected["logits"], rtol=0, atol=tolerance)


def loaded_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of `minifloat.load` in float32, without quantized inputs."""
    model = load(folder, LoadOptions(dtype=torch.float32, weight_only=True))
    with torch.no_grad():
        logits: torch.Tensor = model(ids).logits[0]
    return logits


def transformers_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits that transformers and compressed-tensors compute with the weights, without quantized inputs."""
    quantized = "quantization_config" in json.loads((folder / "config.json").read_text())
    options: dict[str, Any] = {}
    if quantized and quantization_config(folder)["quant_method"] == "compressed-tensors":
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **options)
    model = torch.nn.Module.float(model).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(ids).logits[0]
    return logits

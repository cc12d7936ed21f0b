"""The names of modules in config.json, against plain transformers, which matches them by names of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_families import logits_of, relative_difference, save_family_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from minifloat.checkpoint import Checkpoint
from minifloat.model.runtime.engine_names import engine_names
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.quantize.convert.job import convert_checkpoint
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

#: A family, a module in its checkpoint that stays in 16 bits, and the name of that module in transformers.
_RENAMED = (
    ("gemma3", "vision_tower.encoder.layers.0.mlp.fc1", "model.vision_tower.encoder.layers.0.mlp.fc1"),
    ("mistral3", "multi_modal_projector.linear_1", "model.multi_modal_projector.linear_1"),
    ("phimoe", "model.layers.0.block_sparse_moe.gate", "model.layers.0.mlp.router"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {
        name: save_family_model(name, root / name) for name in ("biogpt", "gemma3", "mistral3", "phimoe", "mixtral")
    }


def plain(folder: Path) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the logits of plain transformers, and its record of missing and unexpected tensors.

    Weights are decompressed in the first pass, those of MXFP4 to BF16 only; the second pass is in float32.
    """
    config = json.loads((folder / "config.json").read_text())
    auto = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    dtype = torch.bfloat16 if "mxfp4" in json.dumps(config["quantization_config"]) else torch.float32
    model, info = auto.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    logits_of(model.eval())
    torch.nn.Module.float(model)
    return logits_of(model), {key: value for key, value in info.items() if value}


@pytest.mark.parametrize(("family", "module", "name"), _RENAMED, ids=[family for family, *_ in _RENAMED])
@pytest.mark.parametrize("scheme", ["fp8", "mxfp4"])
def test_plain_transformers_loads_a_checkpoint_whose_modules_have_other_names(
    folders: dict[str, Path], tmp_path: Path, family: str, module: str, name: str, scheme: str
) -> None:
    quantize_checkpoint(folders[family], tmp_path / "out", scheme)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {module, name} <= set(ignored)
    logits, problems = plain(tmp_path / "out")
    assert not problems
    assert relative_difference(logits, logits_of(load(tmp_path / "out", LoadOptions(dtype=torch.float32)))) < 2e-5


def test_several_schemes_target_modules_by_both_names(folders: dict[str, Path], tmp_path: Path) -> None:
    quantize_checkpoint(folders["gemma3"], tmp_path / "out", "mxfp4", QuantizeOptions(overrides=["self_attn=mxfp8"]))
    logits, problems = plain(tmp_path / "out")
    assert not problems
    assert relative_difference(logits, logits_of(load(tmp_path / "out", LoadOptions(dtype=torch.float32)))) < 2e-5


def test_a_tied_head_of_another_name_is_listed_although_the_checkpoint_lacks_it(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    quantize_checkpoint(folders["biogpt"], tmp_path / "out", "fp8")
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "output_projection" in ignored
    logits, problems = plain(tmp_path / "out")
    assert not problems
    assert relative_difference(logits, logits_of(load(tmp_path / "out", LoadOptions(dtype=torch.float32)))) < 2e-5


def test_a_conversion_lists_both_names(folders: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "fp8"
    quantize_checkpoint(folders["phimoe"], source, "mxfp8-w8a8")
    convert_checkpoint(source, tmp_path / "out", "mxfp8")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    ignored = config["modules_to_not_convert"]
    assert {"model.layers.0.block_sparse_moe.gate", "model.layers.0.mlp.router"} <= set(ignored)


def test_declared_names_need_no_torch(folders: dict[str, Path]) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from minifloat.checkpoint import Checkpoint\n"
        "from minifloat.model.runtime.engine_names import engine_names\n"
        f"with Checkpoint.open(Path({str(folders['mixtral'])!r})) as checkpoint:\n"
        "    names = engine_names(checkpoint, ['lm_head', 'model.layers.0.block_sparse_moe.gate'])\n"
        "assert names.others == {'model.layers.0.block_sparse_moe.gate': ('model.layers.0.mlp.gate',)}, names\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_model_keeps_its_names_and_the_report_says_so(folders: dict[str, Path], tmp_path: Path) -> None:
    for file in folders["mixtral"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "never_heard_of"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with Checkpoint.open(tmp_path) as checkpoint:
        names = engine_names(checkpoint, ["model.layers.0.block_sparse_moe.gate"])
    report = quantize_checkpoint(tmp_path, tmp_path.parent / "unknown-out", "fp8")
    assert any("has no description of model_type 'never_heard_of'" in note for note in report.notes)
    assert any(note == names.notes[0] for note in report.notes)
    known = quantize_checkpoint(folders["mixtral"], tmp_path.parent / "known-out", "fp8")
    assert not any("no description" in note for note in known.notes)
    assert names.others == {}
    assert "names of modules in transformers are not known" in names.notes[0]
    assert "never_heard_of" in names.notes[0]

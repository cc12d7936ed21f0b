"""The rules about transformers, held to what the installed transformers does with each checkpoint on this CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers import logging as transformers_logging

from minifloat.check import Verdict, check_checkpoint
from minifloat.checkpoint import Checkpoint
from minifloat.layouts import describe, read_weight
from minifloat.quantize.model import quantize_checkpoint
from minifloat.scheme import SCHEMES

ROOT = Path(__file__).parents[2]
STORYBOOK = ROOT / "examples" / "storybook-4m"
INTEROP = ROOT / "tests" / "data" / "interop"
#: A weight in BF16 is this close to what its codes and scales say; one that is scaled wrongly is percents away.
ROUNDED = 2**-7
TOKENS = torch.arange(1, 9)[None]


@pytest.fixture(autouse=True)
def quiet() -> Any:
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    yield
    transformers_logging.set_verbosity(before)


def what_happens(folder: Path) -> str:
    """Load a checkpoint, run it once and compare its linears with their codes: "right", "wrong" or "refused"."""
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        with torch.no_grad():
            assert model(TOKENS).logits.isfinite().all()
    except (RuntimeError, ValueError):
        return "refused"
    compared = 0
    with Checkpoint.open(folder) as checkpoint:
        for module, stored in describe(checkpoint).weights.items():
            try:
                held: Any = model.get_submodule(module)
            except AttributeError:  # experts are fused in the model
                continue
            wanted = read_weight(checkpoint, stored).dequantize()
            compared += 1
            if (held.weight.float() - wanted).norm() > ROUNDED * wanted.norm():
                return "wrong"
    assert compared
    return "right"


EXPECTED = {Verdict.REFUSED: "refused", Verdict.WRONG: "wrong", Verdict.DEGRADED: "right", Verdict.LOADS: "right"}

FOLDERS = sorted(
    path.name
    for path in INTEROP.iterdir()
    if path.is_dir() and not path.name.startswith("base-") and path.name != "gpt-oss-mxfp4"
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_checkpoints_of_other_tools_do_as_the_rules_say(folder: str) -> None:
    report = check_checkpoint(INTEROP / folder, "transformers:cpu")
    assert what_happens(INTEROP / folder) == EXPECTED[report.verdict], rules_of(report)


@pytest.mark.parametrize(("scheme", "layout"), [*((s, "compressed-tensors") for s in SCHEMES), ("fp8-block", "fp8")])
def test_every_scheme_of_ours_does_as_the_rules_say(scheme: str, layout: str, tmp_path: Path) -> None:
    quantize_checkpoint(STORYBOOK, tmp_path / "out", scheme, layout=layout)
    report = check_checkpoint(tmp_path / "out", "transformers:cpu")
    assert report.verdict is Verdict.DEGRADED
    assert what_happens(tmp_path / "out") == "right", rules_of(report)


def test_dense_mxfp4_gets_random_weights_without_an_error(tmp_path: Path) -> None:
    quantize_checkpoint(STORYBOOK, tmp_path / "made", "mxfp4")
    folder = tmp_path / "dense"
    shutil.copytree(tmp_path / "made", folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert check_checkpoint(folder, "transformers:cpu").verdict is Verdict.WRONG
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    original = AutoModelForCausalLM.from_pretrained(STORYBOOK, dtype=torch.float32)
    name = "model.layers.0.mlp.down_proj.weight"
    held, wanted = model.get_parameter(name), original.get_parameter(name)
    assert (held - wanted).norm() > wanted.norm() / 2


def rules_of(report: Any) -> list[str]:
    return [finding.rule for finding in report.findings]

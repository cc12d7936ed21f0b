"""The model card that is written beside the weights, as hubs read it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from minifloat.deploy.check import ENGINE_HARDWARE, ENGINES, LoadVerdict, check_checkpoint
from minifloat.errors import UsageError
from minifloat.model.layouts.inspection import inspect_checkpoint
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

STORYBOOK = Path(__file__).parents[2] / "examples" / "storybook-4m"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def source(folder: Path, head: str) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((STORYBOOK / name).read_bytes())
    (folder / "README.md").write_text(head)
    return folder


def test_the_metadata_of_the_card_is_accepted_by_the_hub(tmp_path: Path) -> None:
    old = "license: other\nlicense_name: x\nlanguage:\n- en\n- 'no'\nbase_model: a/grandparent\ntags: [a]"
    head = f"---\n{old}\n---\n# old\n"
    quantize_checkpoint(
        source(tmp_path / "in", head), tmp_path / "out", "fp8-dynamic", QuantizeOptions(base_model="org/storybook")
    )
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.to_dict() == {
        "license": "other",
        "license_name": "x",
        "language": ["en", "no"],
        "pipeline_tag": "text-generation",
        "base_model": "org/storybook",
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "tags": ["fp8", "fp8-dynamic", "compressed-tensors", "vllm", "sglang", "minifloat"],
    }


@pytest.mark.parametrize("head", ["", "# no head\n", "---\nlicense: [\n---\n", "---\n- a\n---\n"])
def test_metadata_missing_from_the_source_stays_missing(tmp_path: Path, head: str) -> None:
    quantize_checkpoint(source(tmp_path / "in", head), tmp_path / "out", "mxfp4")
    found = ModelCard.load(tmp_path / "out" / "README.md").data.to_dict()
    assert found.keys() == {"pipeline_tag", "library_name", "tags"}


def test_a_snapshot_in_the_hub_cache_is_its_own_base_model(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--storybook" / "snapshots" / COMMIT
    quantize_checkpoint(source(folder, ""), tmp_path / "out", "mxfp4")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.base_model == "org/storybook"
    assert f"minifloat quantize org/storybook@{COMMIT} OUT --scheme mxfp4" in card.text
    provenance = json.loads((tmp_path / "out" / "minifloat.json").read_text())["provenance"]
    assert (provenance["source"], provenance["source_revision"]) == ("org/storybook", COMMIT)


def test_a_base_model_that_is_no_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="base_model"):
        quantize_checkpoint(STORYBOOK, tmp_path / "out", options=QuantizeOptions(base_model="../storybook"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("scheme", "overrides"),
    [
        ("fp8-block", []),
        ("fp8", []),
        ("mxfp4", []),
        ("nvfp4", []),
        ("fp8-dynamic", [r"layers\.2\.self_attn=bf16", r"layers\.3\.mlp=mxfp4"]),
    ],
)
def test_the_card_has_commands_for_exactly_the_engines_that_load_the_checkpoint(
    tmp_path: Path, scheme: str, overrides: list[str]
) -> None:
    quantize_checkpoint(STORYBOOK, tmp_path / "out", scheme, QuantizeOptions(overrides=overrides))
    text = (tmp_path / "out" / "README.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    table = {row[0]: dict(zip(ENGINE_HARDWARE, row[1:], strict=True)) for row in rows if row[0] in ENGINES.values()}
    commands = {
        "vllm": "vllm serve MODEL",
        "sglang": "sglang.launch_server --model-path MODEL",
        "transformers": 'from_pretrained("MODEL"',
        "minifloat": "minifloat serve MODEL",
    }
    loads = {LoadVerdict.LOADS, LoadVerdict.DEGRADED}
    for engine, command in commands.items():
        verdicts = {name: check_checkpoint(tmp_path / "out", f"{engine}:{name}").verdict for name in ENGINE_HARDWARE}
        assert {name: cell.startswith("yes") for name, cell in table[ENGINES[engine]].items()} == {
            name: verdict in loads for name, verdict in verdicts.items()
        }
        assert (command in text) == any(verdict in loads for verdict in verdicts.values())
        places = ", ".join(name for name, verdict in verdicts.items() if verdict in loads)
        assert not places or f"{ENGINES[engine]}, on {places}" in text
    assert inspect_checkpoint(tmp_path / "out").layout == "compressed-tensors"


def test_the_card_has_no_sections_for_missing_measurements(tmp_path: Path) -> None:
    quantize_checkpoint(STORYBOOK, tmp_path / "out", "fp8")
    text = (tmp_path / "out" / "README.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## What was done",
        "## Where it loads",
        "## Made with",
        "## Error of the weights",
    ]

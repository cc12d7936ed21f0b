"""Tests of commands on ids of models, against a fake hub on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_hub import TOKEN, FakeHub, commit_of
from modes import each_value, full

from minifloat.commands.main import main
from minifloat.quantize.job import quantize_checkpoint

STORYBOOK = Path(__file__).parents[3] / "examples" / "storybook-4m"
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_quantizing_a_model_of_the_hub_writes_the_same_weights_as_quantizing_its_folder(
    hub: FakeHub, home: Path, sharded: Path, tmp_path: Path
) -> None:
    repo = hub.add("org/storybook", sharded)
    # other files of a repository: the same weights in other formats, and code
    extra = {"consolidated.safetensors": b"x" * 100, "pytorch_model.bin": b"x" * 100, "modeling.py": b"x"}
    repo.branches["main"] |= extra | {"onnx/config.json": b"{}"}
    result = hub.run(home, "quantize", "org/storybook", "out", "--scheme", "fp8", "-q")
    assert (result.returncode, result.stderr) == (0, "")
    quantize_checkpoint(sharded, tmp_path / "local", "fp8")
    local, fetched = files_of(tmp_path / "local"), files_of(home / "out")
    assert fetched.pop("report.html")  # `write_report` makes it from Python
    assert fetched.keys() == local.keys()
    assert len([name for name in local if name.endswith(".safetensors")]) == 5
    different = {name for name in local if local[name] != fetched[name]}
    assert different == {"README.md", "minifloat.json"}
    provenance = json.loads(fetched["minifloat.json"])["provenance"]
    commit = commit_of(repo.branches["main"])
    assert (provenance["source"], provenance["source_revision"]) == ("org/storybook", commit)
    assert provenance["command"] == f"minifloat quantize org/storybook@{commit} OUT --scheme fp8"
    for name in (*extra, "onnx"):
        assert not hub.requests_for(name)


def test_a_cached_model_is_used_again_also_when_the_hub_is_offline_or_down(
    hub: FakeHub, home: Path, sharded: Path
) -> None:
    hub.add("org/storybook", sharded)
    assert hub.run(home, "quantize", "org/storybook", "first", "-q").returncode == 0
    hub.requests.clear()
    assert hub.run(home, "quantize", "org/storybook", "second", "-q").returncode == 0
    assert not hub.requests_for("resolve")
    hub.requests.clear()
    offline = hub.run(home, "quantize", "org/storybook", "third", "-q", HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stderr, hub.requests) == (0, "", [])
    hub.down = True
    down = hub.run(home, "quantize", "org/storybook", "fourth", "-q")
    assert (down.returncode, "the copy in its cache is used" in down.stderr) == (0, True)
    first, third, fourth = (files_of(home / name) for name in ("first", "third", "fourth"))
    for files in (first, third, fourth):
        assert files.pop("report.html")  # it has the name of its folder
    assert first == third == fourth


@pytest.mark.parametrize("spelling", [["org/model@other"], full(["org/model", "--revision", "other"])])
def test_the_revision_selects_the_weights(hub: FakeHub, home: Path, sharded: Path, spelling: list[str]) -> None:
    hub.add("org/model", Path(__file__).parents[2] / "data" / "interop" / "base-llama")
    repo = hub.add("org/model", sharded, branch="other")
    result = hub.run(home, "quantize", *spelling[:1], "out", *spelling[1:], "-q")
    assert (result.returncode, result.stderr) == (0, "")
    provenance = json.loads((home / "out" / "minifloat.json").read_text())["provenance"]
    assert provenance["source_revision"] == commit_of(repo.branches["other"])


def test_a_model_with_pickle_files_only_is_refused_before_the_download(
    hub: FakeHub, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    hub.add("org/old", tmp_path)
    result = hub.run(home, "quantize", "org/old", "out")
    assert result.returncode == 2
    assert result.stderr.startswith("minifloat: error: org/old/pytorch_model.bin: a pickle file can run code")
    assert hub.requests == [("GET", "/api/models/org/old")]


@pytest.mark.parametrize("command", ["inspect", "plan", "check", "check --scheme mxfp4"])
def test_plan_check_and_inspect_transfer_headers_only(hub: FakeHub, home: Path, sharded: Path, command: str) -> None:
    hub.add("org/storybook", sharded)
    name, *options = command.split()
    if name == "check":
        options += ["--engine", "minifloat", "--hardware", "cpu"]
    if name == "plan":
        options += ["--hardware", "h100"]
    here = CliRunner().invoke(main, [name, str(sharded), *options, "--json"])
    there = hub.run(home, name, "org/storybook", *options, "--json")
    assert (here.exit_code, there.returncode, there.stderr) == (0, 0, "")
    assert there.stdout == here.stdout.replace(str(sharded), "org/storybook")
    weights = sum(path.stat().st_size for path in sharded.glob("*.safetensors"))
    assert hub.sent < weights / 20
    gets = [path for method, path in hub.requests_for("resolve") if method == "GET"]
    assert len(gets) == len(set(gets)) == 5 + 2  # a request per shard, config and index
    assert not list(home.rglob("*.safetensors"))


def test_a_header_longer_than_the_first_request_is_read_by_a_second_request(
    hub: FakeHub, home: Path, tmp_path: Path
) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    tensors = {f"model.layers.{number}.input_layernorm.weight": np.zeros(1, np.float16) for number in range(1000)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    hub.add("org/wide", tmp_path)
    result = hub.run(home, "inspect", "org/wide", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    assert len(json.loads(result.stdout)["rows"]) == 1000
    assert len([method for method, _ in hub.requests_for("model.safetensors") if method == "GET"]) == 2


def test_headers_are_read_from_a_server_that_ignores_ranges(hub: FakeHub, home: Path, sharded: Path) -> None:
    hub.ranges = False
    hub.add("org/storybook", sharded)
    assert hub.run(home, "inspect", "org/storybook").returncode == 0


def test_a_header_that_contradicts_the_size_on_the_hub_is_refused(hub: FakeHub, home: Path, sharded: Path) -> None:
    repo = hub.add("org/storybook", sharded)
    shard = sorted(name for name in repo.branches["main"] if name.endswith(".safetensors"))[0]
    repo.branches["main"][shard] += b"x"
    result = hub.run(home, "inspect", "org/storybook")
    assert result.returncode == 2
    assert "1 extra" in result.stderr
    assert result.stderr.count("\n") == 1


def test_plan_needs_no_weights(hub: FakeHub, home: Path, tmp_path: Path) -> None:
    repo = hub.add("org/config", STORYBOOK)
    repo.branches["main"] = {"config.json": repo.branches["main"]["config.json"]}
    result = hub.run(home, "plan", "org/config", "--hardware", "h100", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["estimated"] is True


REFUSALS = [
    ("org/none", {}, "org/none: no such folder, and no such model at http://127.0.0.1:"),
    ("org/none", {"HF_TOKEN": TOKEN}, "if it is private, set HF_TOKEN or run `hf auth login`"),
    ("org/gated", {}, "accept its conditions at http://127.0.0.1:"),
    ("org/storybook@v9", {}, "org/storybook: no revision 'v9'; http://127.0.0.1:"),
    ("org/storybook", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set: unset it"),
    ("org/storybook", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached: "),
]


@pytest.mark.parametrize(("refusal", "command"), each_value(REFUSALS, [["quantize", "{}", "out"], ["inspect", "{}"]]))
def test_a_refusal_of_the_hub_is_one_line_with_the_cure_and_status_2(
    hub: FakeHub, home: Path, command: list[str], refusal: tuple[str, dict[str, str], str]
) -> None:
    model, variables, message = refusal
    hub.add("org/storybook", STORYBOOK)
    hub.add("org/gated", STORYBOOK, gated=True)
    result = hub.run(home, *(part.format(model) for part in command), **variables)
    assert result.returncode == 2
    assert result.stderr.startswith("minifloat: error: ")
    assert message in result.stderr
    assert (result.stderr.count("\n"), result.stdout) == (1, "")
    assert not (home / "out").exists()


def test_a_token_gives_access_to_a_private_gated_model(hub: FakeHub, home: Path) -> None:
    hub.add("org/closed", STORYBOOK, private=True, gated=True)
    assert hub.run(home, "inspect", "org/closed").returncode == 2
    assert hub.run(home, "inspect", "org/closed", HF_TOKEN=TOKEN).returncode == 0
    assert hub.run(home, "quantize", "org/closed", "out", "-q", HF_TOKEN=TOKEN).returncode == 0


def test_an_inspected_model_is_not_complete_in_the_cache(hub: FakeHub, home: Path, sharded: Path) -> None:
    hub.add("org/storybook", sharded)
    assert hub.run(home, "inspect", "org/storybook").returncode == 0
    result = hub.run(home, "quantize", "org/storybook", "out", HF_HUB_OFFLINE="1")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "does not hold all of its files" in result.stderr


@pytest.mark.full
def test_models_of_the_hub_are_calibrated_and_compared_by_their_ids(hub: FakeHub, home: Path) -> None:
    hub.add("org/storybook", STORYBOOK)
    (home / "text.txt").write_text("Once upon a time there was a little girl. " * 60)
    calibration = ["--calibration", "text.txt", "--calibration-samples", "2", "--calibration-seq-len", "32"]
    quantized = hub.run(home, "quantize", "org/storybook", "out", "--scheme", "fp8-static", *calibration, "-q")
    assert quantized.returncode == 0, quantized.stderr
    options = ["--data", "text.txt", "--window", "32", "--max-tokens", "128", "--prompts", "0", "--json"]
    compared = hub.run(home, "compare", "org/storybook", "out", "--revision", "main", *options)
    assert compared.returncode in (0, 1, 3), compared.stderr
    assert json.loads(compared.stdout)["baseline"]["name"] == "org/storybook"
    refused = hub.run(home, "compare", "out", "org/storybook", *options, "--update-card")
    assert (refused.returncode, "no such folder" in refused.stderr) == (2, True)

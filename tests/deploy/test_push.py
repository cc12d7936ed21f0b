"""Tests of `push` against a fake hub on this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_hub import TOKEN, FakeHub, Repo
from huggingface_hub import ModelCard

from minifloat.deploy.publish import PushOptions, push_checkpoint
from minifloat.errors import MinifloatError, UnsafeFileError
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import GgufOptions, QuantizeOptions

#: Function that returns a copy of a quantized checkpoint, into which the test may write.
Copy = Callable[[], Path]

OTHER_FILES = (
    ".env",
    ".cache/huggingface/x",
    "notes.txt",
    "out.minifloat-work/journal",
    "consolidated.pth",
    "trace.log",
)


@pytest.fixture(scope="module")
def quantized(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("push") / "storybook-fp8"
    quantize_checkpoint(sharded, folder, "fp8", QuantizeOptions(base_model="org/storybook"))
    return folder


@pytest.fixture
def copy(quantized: Path, home: Path) -> Copy:
    return lambda: shutil.copytree(quantized, home / "model")


@pytest.fixture(autouse=True)
def base(hub: FakeHub) -> None:
    hub.repos["org/storybook"] = Repo()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_exactly_the_listed_files_are_uploaded_unchanged(hub: FakeHub, home: Path, copy: Copy) -> None:
    folder = copy()
    expected = set(contents(folder))
    for name in OTHER_FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("secret")
    result = hub.run(home, "push", "model", "me/storybook-fp8", "--license", "mit", "--json", HF_TOKEN=TOKEN)
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    uploaded = hub.repos["me/storybook-fp8"].branches["main"]
    assert set(uploaded) == set(report["files"]) == expected
    here = contents(folder)
    assert uploaded == {name: here[name] for name in expected}
    assert report["files"] == {name: len(here[name]) for name in sorted(expected)}
    assert set(report["left"]) == {name.partition("/")[0] for name in OTHER_FILES}
    assert report["url"].startswith(f"{hub.url}/me/storybook-fp8/commit/")
    assert all(
        path.startswith("/api/") or "model" in path or "upload" in path or "lfs" in path for _, path in hub.requests
    )


def test_the_card_is_completed_in_the_folder_and_names_the_repository(hub: FakeHub, home: Path, copy: Copy) -> None:
    folder = copy()
    before = (folder / "README.md").read_text()
    assert hub.run(home, "push", "model", "me/storybook-fp8", "--license", "mit", HF_TOKEN=TOKEN).returncode == 0
    card = ModelCard.load(folder / "README.md")
    assert card.data.license == "mit"
    assert card.data.base_model == "org/storybook"
    assert "vllm serve me/storybook-fp8\n" in card.text
    assert "serve MODEL" not in card.text
    after = str(card.content).replace("license: mit\n", "").replace("me/storybook-fp8", "MODEL")
    assert after == before
    again = hub.run(home, "push", "model", "me/storybook-fp8", "--license", "mit", HF_TOKEN=TOKEN)
    assert again.returncode == 0, again.stderr
    assert str(ModelCard.load(folder / "README.md").content) == str(card.content)


def test_a_dry_run_lists_the_files_but_sends_and_writes_nothing(hub: FakeHub, home: Path, copy: Copy) -> None:
    folder = copy()
    before = contents(folder)
    result = hub.run(home, "push", "model", "me/x", "--license", "mit", "--dry-run")
    assert (result.returncode, result.stderr, hub.requests) == (0, "", [])
    for name in before:
        assert name in result.stdout
    assert "Nothing was sent to me/x" in result.stdout
    assert contents(folder) == before


def test_a_push_uses_the_requested_branch_message_and_pull_request(hub: FakeHub, home: Path, copy: Copy) -> None:
    copy()
    options = ("--license", "mit", "--message", "second try")
    branch = hub.run(home, "push", "model", "me/x", *options, "--revision", "fp8", "--private", HF_TOKEN=TOKEN)
    assert branch.returncode == 0, branch.stderr
    assert hub.repos["me/x"].private
    assert "model.safetensors.index.json" in hub.repos["me/x"].branches["fp8"]
    assert not hub.repos["me/x"].branches["main"]
    pull = hub.run(home, "push", "model", "me/x", *options, "--create-pr", HF_TOKEN=TOKEN)
    assert pull.returncode == 0, pull.stderr
    assert pull.stdout.endswith(f"{hub.url}/me/x/discussions/1\n")
    assert [(branch, message) for branch, message, _ in hub.commits] == [
        ("fp8", "second try"),
        ("refs/pr/1", "second try"),
    ]


def test_an_unquantized_checkpoint_is_pushed_with_a_note_and_needs_no_base_model(
    hub: FakeHub, home: Path, sharded: Path
) -> None:
    folder = shutil.copytree(sharded, home / "model")
    result = hub.run(home, "push", folder, "me/plain", "--license", "mit", HF_TOKEN=TOKEN)
    assert result.returncode == 0, result.stderr
    assert "not quantized" in result.stdout
    assert ModelCard.load(folder / "README.md").data.to_dict() == {"license": "mit"}


@pytest.mark.parametrize(
    ("options", "variables", "message"),
    [
        ([], {}, "no license: add it there, or give --license NAME"),
        (
            ["--license", "mit", "--base-model", "org/other"],
            {},
            "is 'org/storybook' in the card, but the option is 'org/other'",
        ),
        (["--license", "mit"], {}, "the hub does not accept the token"),
        (["--license", "mit"], {"HF_TOKEN": "hf_wrong"}, "set HF_TOKEN or run `hf auth login`"),
        (["--license", "mit", "--private"], {"HF_TOKEN": TOKEN}, "exists and is public"),
        (["--license", "mit", "--create-pr", "--revision", "x"], {}, "leave out the revision"),
        (["--license", "mit"], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be reached"),
    ],
)
def test_a_refused_push_is_one_line_and_status_2(
    hub: FakeHub, home: Path, copy: Copy, options: list[str], variables: dict[str, str], message: str
) -> None:
    copy()
    hub.repos["me/public"] = Repo()
    result = hub.run(home, "push", "model", "me/public", *options, **variables)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert message in result.stderr
    assert not hub.commits


def test_a_base_model_that_the_hub_does_not_have_is_refused_before_the_upload(
    hub: FakeHub, home: Path, copy: Copy
) -> None:
    folder = copy()
    before = contents(folder)
    del hub.repos["org/storybook"]
    result = hub.run(home, "push", "model", "me/x", "--license", "mit", HF_TOKEN=TOKEN)
    assert result.returncode == 2
    assert "org/storybook: the hub has no such model, which is base_model in" in result.stderr
    assert "me/x" not in hub.repos
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("README.md", None, "no model card"),
        ("README.md", "---\nlicense: [\n---\n", "cannot be read"),
        ("README.md", "---\nlicense: mit\n---\n", "no base_model: add it there, or give --base-model"),
        ("README.md", "---\nlicense: mit\nbase_model: /home/me/model\n---\n", "expected the id of a model"),
        ("config.json", None, "no config.json"),
        ("model-00002-of-00005.safetensors", None, "missing"),
    ],
)
def test_an_incomplete_folder_is_refused(copy: Copy, name: str, content: str | None, message: str) -> None:
    folder = copy()
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(MinifloatError, match=message):
        push_checkpoint(folder, "me/x", PushOptions(dry_run=True))


def test_a_link_that_leads_out_of_the_folder_is_refused(copy: Copy, tmp_path: Path) -> None:
    folder = copy()
    (tmp_path / "secret").write_text("x")
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(UnsafeFileError, match="leaves the folder"):
        push_checkpoint(folder, "me/x", PushOptions(license="mit", dry_run=True))


def test_gguf_files_are_uploaded_with_their_card_and_modelfile(hub: FakeHub, home: Path, sharded: Path) -> None:
    options = QuantizeOptions(layout="gguf", base_model="org/storybook", gguf=GgufOptions(max_size=2 << 20))
    quantize_checkpoint(sharded, home / "model", "mxfp4", options)
    (home / "model" / "notes.txt").write_text("secret")
    result = hub.run(home, "push", "model", "me/storybook-GGUF", "--license", "mit", "--json", HF_TOKEN=TOKEN)
    assert (result.returncode, result.stderr) == (0, "")
    uploaded = set(hub.repos["me/storybook-GGUF"].branches["main"])
    assert uploaded == set(contents(home / "model")) - {"notes.txt"} >= {"README.md", "Modelfile"}
    assert len([name for name in uploaded if "-MXFP4-0000" in name]) == len(uploaded) - 2 > 1
    data = ModelCard.load(home / "model" / "README.md").data
    found = (data.library_name, data.base_model, data.base_model_relation, data.license, data.quantized_by)
    assert found == ("gguf", "org/storybook", "quantized", "mit", "minifloat")
    assert {"gguf", "mxfp4"} <= set(data.tags)
    assert "compressed-tensors" not in data.tags
    first = min((home / "model").glob("*.gguf"))
    first.write_bytes(first.read_bytes()[:5000])
    with pytest.raises(MinifloatError, match="no whole GGUF file"):
        push_checkpoint(home / "model", "me/x", PushOptions(license="mit", dry_run=True))

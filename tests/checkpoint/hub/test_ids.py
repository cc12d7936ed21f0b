"""Tests of the distinction between folders and ids, without a hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from minifloat.checkpoint.hub import Origin, hub_id, is_hub_id, model_folder, model_name, origin_of
from minifloat.errors import NotACheckpointError, UsageError
from minifloat.model.layouts.inspection import inspect_checkpoint

COMMIT = "8c063a9807430a6ccf1a83a71b223e0a00ba0c25"


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("org/name", Origin("org/name", None)),
        ("gpt2", Origin("gpt2", None)),
        ("org/name@v1.0", Origin("org/name", "v1.0")),
        ("org/name@refs/pr/1", Origin("org/name", "refs/pr/1")),
    ],
)
def test_an_id_may_have_a_revision(text: str, origin: Origin) -> None:
    assert hub_id(text) == origin
    assert str(origin) == text


@pytest.mark.parametrize(
    "text", ["./name", "../name", "/org/name", "~/name", "a/b/c", "org\\name", "org/name@", "a--b", "org/", "x.git"]
)
def test_an_invalid_id_is_a_folder_and_reported_as_missing(text: str) -> None:
    assert hub_id(text) is None
    assert model_folder(text) == Path(text)
    with pytest.raises(NotACheckpointError, match="no such folder"):
        inspect_checkpoint(text)


def test_an_existing_folder_and_every_path_object_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_id("org/name") is not None
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert hub_id("org/name") is None
    assert hub_id(Path("gpt2")) is None
    assert model_name("org/name") == "name"


def test_a_revision_of_a_folder_and_two_different_revisions_are_refused(tmp_path: Path) -> None:
    assert hub_id("org/name", "v2") == Origin("org/name", "v2")
    assert hub_id("org/name@v2", "v2") == Origin("org/name", "v2")
    with pytest.raises(UsageError, match="two revisions, 'v1' and 'v2'"):
        hub_id("org/name@v1", "v2")
    with pytest.raises(UsageError, match="is a folder"):
        hub_id(str(tmp_path), "v2")


def test_a_snapshot_in_the_cache_gives_its_model_and_commit(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--na-me" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    assert origin_of(snapshot) == Origin("org/na-me", COMMIT)
    assert model_name(snapshot) == "org/na-me"
    assert model_name("org/na-me@main") == "org/na-me"
    assert origin_of(tmp_path) is None
    assert model_name(tmp_path) == tmp_path.name


def test_only_names_that_the_hub_allows_are_ids() -> None:
    assert is_hub_id("org/name")
    assert not is_hub_id("org/name@main")
    assert not is_hub_id("a/b/c")

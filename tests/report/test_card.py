"""Sections of model cards: where they go, what is replaced, and what is refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from minifloat.errors import CheckpointError, NotACheckpointError, StorageError, UnsafeFileError
from minifloat.report.markdown import markers, update_card

BEGIN, END = markers("compare")
SECTION = f"{BEGIN}\nnew\n{END}\n"


def test_a_missing_card_is_created(tmp_path: Path) -> None:
    folder = tmp_path / "a*model"
    folder.mkdir()
    assert update_card(folder, SECTION) == folder / "README.md"
    assert (folder / "README.md").read_text() == f"# a&#42;model\n\n{SECTION}"


@pytest.mark.parametrize(("before", "gap"), [("# card", "\n\n"), ("# card\n", "\n"), ("# card\n\n", ""), ("", "")])
def test_the_section_goes_to_the_end_of_a_card_without_one(tmp_path: Path, before: str, gap: str) -> None:
    (tmp_path / "README.md").write_text(before)
    update_card(tmp_path, SECTION)
    assert (tmp_path / "README.md").read_text() == before + gap + SECTION


def test_the_section_of_an_earlier_run_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    before, after = b"---\nlicense: mit\n---\n\xff\x00 bytes\r\n \n", b"\n\n## More\n\ttext  \nno end"
    old = f"{BEGIN}\nold\n## x\n\n{END}".encode()
    (tmp_path / "README.md").write_bytes(before.replace(b"\r", b"") + old + after)
    update_card(tmp_path, SECTION)
    assert (tmp_path / "README.md").read_bytes() == before.replace(b"\r", b"") + SECTION.strip().encode() + after


def test_updating_again_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# card\n")
    update_card(tmp_path, SECTION)
    once = (tmp_path / "README.md").read_bytes()
    update_card(tmp_path, SECTION)
    assert (tmp_path / "README.md").read_bytes() == once


def test_a_card_with_carriage_returns_keeps_them(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(b"# card\r\n")
    update_card(tmp_path, SECTION)
    once = (tmp_path / "README.md").read_bytes()
    assert once == ("# card\n\n" + SECTION).replace("\n", "\r\n").encode()
    update_card(tmp_path, SECTION)
    assert (tmp_path / "README.md").read_bytes() == once


def test_a_marker_within_a_line_is_not_a_marker(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"see {BEGIN}\n    {END}\n")
    update_card(tmp_path, SECTION)
    assert (tmp_path / "README.md").read_text() == f"see {BEGIN}\n    {END}\n\n{SECTION}"


@pytest.mark.parametrize("text", [f"{BEGIN}\nx\n", f"x\n{END}\n", f"{END}\n{BEGIN}\n", 2 * f"{BEGIN}\n{END}\n"])
def test_markers_that_do_not_pair_are_refused(tmp_path: Path, text: str) -> None:
    card = tmp_path / "README.md"
    card.write_text(text)
    with pytest.raises(CheckpointError, match=r"README\.md.*one pair"):
        update_card(tmp_path, SECTION)
    assert card.read_text() == text


def test_the_permissions_of_a_card_stay(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text("x")
    card.chmod(0o640)
    update_card(tmp_path, SECTION)
    assert stat.S_IMODE(card.stat().st_mode) == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_a_write_that_fails_leaves_the_old_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_text("old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match="No space left"):
        update_card(tmp_path, SECTION)
    assert (tmp_path / "README.md").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_a_card_that_links_out_of_the_folder_is_not_touched(tmp_path: Path) -> None:
    folder, outside = tmp_path / "model", tmp_path / "notes.md"
    folder.mkdir()
    outside.write_text("mine")
    (folder / "README.md").symlink_to(outside)
    with pytest.raises(UnsafeFileError, match="leaves the folder"):
        update_card(folder, SECTION)
    assert outside.read_text() == "mine"


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError):
        update_card(tmp_path / "nowhere", SECTION)

"""`scripts/release --check` refuses a checkout that is not ready, and names the reason."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from minifloat import __version__

ROOT = Path(__file__).parents[1]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with the files that the script reads, and a changelog that names the version."""
    for name in ("scripts/release", "src/minifloat/_version.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {__version__} (2026-11-24)\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--quiet", "--message", "all")
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True)


def check(folder: Path) -> tuple[int, str]:
    done = subprocess.run([folder / "scripts" / "release", "--check"], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_a_clean_checkout_with_its_version_in_the_changelog_is_ready(checkout: Path) -> None:
    assert check(checkout) == (0, f"ready to release {__version__}\n")


def test_a_changed_file_a_missing_heading_and_a_tag_are_reasons(checkout: Path) -> None:
    git(checkout, "tag", f"v{__version__}")
    assert check(checkout) == (1, f"not ready: the tag v{__version__} exists\n")
    (checkout / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n")
    assert check(checkout) == (1, "not ready: uncommitted changes\n")
    git(checkout, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--quiet", "--all", "--message", "more")
    assert check(checkout)[1].startswith("not ready: CHANGELOG.md has no heading")


def test_the_changelog_begins_with_what_is_not_released_or_with_this_version() -> None:
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0] == "## Unreleased" or headings[0].startswith(f"## {__version__} (")

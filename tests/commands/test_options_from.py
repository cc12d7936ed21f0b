"""Options made from a dataclass: names, types, defaults, help, groups, and the dataclass made from their values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner, Result

from minifloat.commands.options_from import GroupedCommand, build, options_from
from minifloat.errors import UsageError
from minifloat.numerics.ranges import Bytes, Count, Fraction, Positive, check_fields


@dataclass(frozen=True)
class Base:
    """Fields of a base.

    Attributes:
        limit: Tokens at most; None: what fits, and
            no more.
    """

    limit: Count | None = None


@dataclass(frozen=True)
class Options(Base):
    """Fields of every kind.

    Attributes:
        name: Name to use.
        size: Memory to use; None: all.
        pace: Tokens per second.
        share: Share of the memory.
        kind: Kind of the thing.
        folder: Where to write; None: nowhere.
        texts: Text to read; repeatable.
        packing: Whether to pack texts.
        quiet: Whether to print nothing.

    Raises:
        UsageError: If a number is out of its range.
    """

    name: str = "x"
    size: Bytes = 1 << 20
    pace: Positive = 1.5
    share: Fraction = 0.5
    kind: Literal["one", "two"] = "one"
    folder: Path | None = None
    texts: tuple[str, ...] = ()
    packing: bool = True
    quiet: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


def run(*arguments: str, env: dict[str, str] | None = None, **settings: Any) -> tuple[Result, list[Options]]:
    made: list[Options] = []

    @click.command(cls=GroupedCommand)
    @click.option("--other", is_flag=True, help="Another option.")
    @options_from(Options, **settings)
    def command(**values: Any) -> None:
        made.append(build(Options, values))

    return CliRunner().invoke(command, arguments, env=env), made


def test_without_arguments_the_dataclass_has_its_defaults() -> None:
    assert run()[1] == [Options()]


def test_every_kind_of_field_is_an_option() -> None:
    arguments = "--name y --size 2GiB --pace 2 --share 1 --kind two --folder f --texts a --texts b --limit 7"
    _, made = run(*arguments.split(), "--no-packing", "--quiet")
    assert made == [Options(7, "y", 2 << 30, 2.0, 1.0, "two", Path("f"), texts=("a", "b"), packing=False, quiet=True)]


def test_the_help_is_the_line_of_the_docstring_under_its_group() -> None:
    text = " ".join(run("--help", group="Things", quiet={"flags": ("--silent", "-q")})[0].output.split())
    for words in (
        "Tokens at most. [default: what fits, and no more] [x>=1]",
        "--size SIZE Memory to use. [default: 1MiB]",
        "--no-packing Do not pack texts.",
        "-q, --silent Print nothing.",
        "[one|two] Kind of the thing. [default: one]",
    ):
        assert words in text
    assert text.index("--other") < text.index("Things:") < text.index("--limit")


def test_fields_are_chosen_left_out_renamed_and_read_from_the_environment() -> None:
    output = run("--help", only=("name", "size"))[0].output
    assert "--name" in output
    assert "--pace" not in output
    assert "--pace" not in run("--help", without=("pace",))[0].output
    environment = {"MINIFLOAT_NO_PACKING": "1", "MINIFLOAT_MEMORY": "3MB", "MINIFLOAT_QUIET": "true"}
    _, made = run(environment=True, env=environment, size={"flags": ("--memory",)})
    assert made == [Options(size=3_000_000, packing=False, quiet=True)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"limit": 0}, "limit: expected at least 1, got 0"),
        ({"pace": 0.0}, "pace: expected more than 0, got 0.0"),
        ({"share": 1.5}, "share: expected at least 0 and at most 1, got 1.5"),
    ],
    ids=str,
)
def test_the_range_of_a_number_is_checked_by_the_dataclass_and_the_command(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Options(**values)
    ((name, value),) = values.items()
    assert run(f"--{name}", str(value))[0].exit_code == 2

"""Options, types and helpers that several commands share. Nothing heavy is imported."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from minifloat.report.document import Document

_Command = TypeVar("_Command", bound=Callable[..., Any])
_Result = TypeVar("_Result", bound="Report")

#: MODEL: a folder, or ORG/NAME[@REVISION]. The text stays as typed: ``./NAME`` is a folder, ``NAME`` may be a hub id.
MODEL = click.Path()
FOLDER = click.Path(path_type=Path)
COUNT = click.IntRange(min=1)
POSITIVE = click.FloatRange(min=0, min_open=True)

_SIZE_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE_UNITS |= {f"{letter}iB": factor for letter, factor in _SIZE_UNITS.items()}
_SIZE_UNITS |= {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class Report(Protocol):
    """A report that has a JSON form."""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""


class Size(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """A number of bytes with its unit: ``8G`` and ``8GiB`` are 8 * 2**30 bytes, ``500MB`` is 500 * 10**6."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(value).strip())
        units = {unit.lower(): factor for unit, factor in _SIZE_UNITS.items()}
        if match is None or match[2].lower() not in {*units, ""}:
            self.fail(f"expected a size such as 8G, 8GiB or 500MB, got {value!r}", param, ctx)
        if not match[2]:
            self.fail(f"{value} what? Give the unit: {match[1]}G, {match[1]}MiB, or {match[1]}B for bytes", param, ctx)
        return int(float(match[1]) * units[match[2].lower()])


SIZE = Size()


def format_size(nbytes: int) -> str:
    """Return a number of bytes as `SIZE` reads it: 8388608 is 8MiB."""
    name, factor = max(
        ((unit, factor) for unit, factor in _SIZE_UNITS.items() if len(unit) != 1 and nbytes % factor == 0),
        key=lambda unit: unit[1],
        default=("B", 1),
    )
    return f"{nbytes // factor}{name}"


def env_option(name: str, *names: str, **settings: Any) -> Callable[[_Command], _Command]:
    """Return a click option that can also be set by an environment variable: ``MINIFLOAT_PORT`` for ``--port``."""
    variable = "MINIFLOAT_" + name.removeprefix("--").replace("-", "_").upper()
    return click.option(name, *names, envvar=variable, **settings)


def revision_option(of: str = "MODEL") -> Callable[[_Command], _Command]:
    return click.option(
        "--revision", metavar="REV", help=f"Branch, tag or commit of {of} on the hub; {of}@REV is the same."
    )


def complete_scheme(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the schemes that begin with what was typed, for completion in a shell."""
    from minifloat.numerics.scheme import SCHEMES

    return [
        CompletionItem(scheme.name, help=scheme.summary)
        for scheme in SCHEMES.values()
        if scheme.name.startswith(incomplete)
    ]


def json_option() -> Callable[[_Command], _Command]:
    return click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")


def verbose_option(rows: str = "tensor") -> Callable[[_Command], _Command]:
    return click.option(
        "--verbose", "-v", is_flag=True, help=f"Print every {rows} instead of a summary over all layers."
    )


def device_option() -> Callable[[_Command], _Command]:
    return click.option(
        "--device", default="cpu", show_default=True, metavar="DEVICE", help="Where to compute: cpu, cuda or cuda:N."
    )


def threads_option() -> Callable[[_Command], _Command]:
    return click.option("--threads", type=COUNT, help="Threads to compute with.  [default: torch's]")


def rule_option(text: str) -> Callable[[_Command], _Command]:
    """Return the option of a calibration rule; `text` says what it is for."""
    return click.option(
        "--rule",
        default="max",
        show_default=True,
        metavar="NAME[:OPTION=VALUE]",
        help=f"{text}: max, percentile or mse.",
    )


#: Of `--speculate`, which is "self" without a value.
SPECULATE = {"is_flag": False, "flag_value": "self"}


def use_threads(threads: int | None) -> None:
    """Compute with `threads` threads from now on. None keeps torch's choice, and imports no torch."""
    if threads is not None:
        from minifloat.kernels.threads import set_threads

        set_threads(threads)


def print_json(report: Report | Mapping[str, Any]) -> None:
    """Print a report, or JSON values, as JSON."""
    click.echo(json.dumps(report if isinstance(report, Mapping) else report.to_dict(), indent=2))


def show(result: _Result, document: Callable[[_Result], Document], *, as_json: bool, quiet: bool = False) -> None:
    """Print a result: as JSON, or its document; nothing where `quiet` is set."""
    if as_json:
        print_json(result)
    elif not quiet:
        from minifloat.report import terminal

        terminal.write(document(result))


def override_options(condition: str = "") -> Callable[[_Command], _Command]:
    def decorate(command: _Command) -> _Command:
        exclude = click.option(
            "--exclude", multiple=True, metavar="REGEX", help="Keep these modules: short for --override 'REGEX=bf16'."
        )
        override = click.option(
            "--override",
            multiple=True,
            metavar="REGEX=SCHEME|bf16",
            help=f"{condition}For modules that match; the last wins.",
        )
        return override(exclude(command))

    return decorate


def overrides_of(override: Iterable[str], exclude: Iterable[str]) -> tuple[str, ...]:
    from minifloat.model.plan.overrides import KEEP

    return (*override, *(f"{pattern}={KEEP}" for pattern in exclude))

"""Click options made from a frozen dataclass: a field, its default and its line in the docstring are the option."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import click

from minifloat.commands.options import SIZE, format_size
from minifloat.numerics.ranges import Range, annotation_of, ranges_in

_Command = TypeVar("_Command", bound=Callable[..., Any])
_Options = TypeVar("_Options")


class GroupedOption(click.Option):
    """An option that `--help` lists under the heading `group`."""

    def __init__(self, *arguments: Any, group: str | None = None, **settings: Any) -> None:
        self.group = group
        super().__init__(*arguments, **settings)


class GroupedCommand(click.Command):
    """A command whose `--help` lists its options by group."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)) is not None:
                rows.setdefault(getattr(parameter, "group", None) or "Options", []).append(record)
        for group, records in rows.items():
            with formatter.section(group):
                formatter.write_dl(records)


def options_from(
    options: type,
    *,
    only: Collection[str] = (),
    without: Collection[str] = (),
    group: str | None = None,
    prefix: str = "",
    environment: bool = False,
    **changes: Mapping[str, Any],
) -> Callable[[_Command], _Command]:
    """Return a decorator that adds an option for each field of a dataclass; `prefix` begins the names of options."""
    chosen = [field for field in fields(options) if field.name not in without and (not only or field.name in only)]
    unknown = {*only, *without, *changes} - {field.name for field in fields(options)}
    assert not unknown, f"{options.__name__} has no fields {unknown}"
    texts = attributes_of(options)

    def decorate(command: _Command) -> _Command:
        for field in reversed(chosen):
            settings = _settings(options, field, texts[field.name]) | dict(changes.get(field.name, {}))
            flags = settings.pop("flags", None) or (_flag(field, prefix),)
            if environment:
                settings["envvar"] = "MINIFLOAT_" + flags[0].removeprefix("--").replace("-", "_").upper()
            command = click.option(*flags, prefix + field.name, cls=GroupedOption, group=group, **settings)(command)
        return command

    return decorate


def build(options: type[_Options], values: Mapping[str, Any], prefix: str = "", /, **more: Any) -> _Options:
    """Return the dataclass made of click's values, of which those of other options are ignored, and of `more`."""
    names = {field.name for field in fields(options)}  # type: ignore[arg-type]  # every caller gives a dataclass
    return options(**{name: values[prefix + name] for name in names if prefix + name in values} | more)


def attributes_of(options: type) -> dict[str, str]:
    """Return the text of each field in the ``Attributes:`` of a class and of its bases."""
    texts = {}
    for base in reversed(options.__mro__):
        section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        section = re.split(r"^(?=\S)", section, maxsplit=1, flags=re.MULTILINE)[0]
        for name, text in re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE):
            texts[name] = " ".join(text.split())
    return texts


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _flag(field: Field[Any], prefix: str) -> str:
    return ("--no-" if field.default is True else "--") + (prefix + field.name).replace("_", "-")


def _settings(options: type, field: Field[Any], text: str) -> dict[str, Any]:
    annotation = annotation_of(options, field.name)
    default = _default(field)
    if annotation is bool:
        verb = re.sub(r"^Whether to ", "", text)
        help_text = f"Do not {verb[:1].lower()}{verb[1:]}" if default else verb[:1].upper() + verb[1:]
        return {"is_flag": True, "help": help_text} | ({"callback": _negate} if default else {})
    sentence, separator, of_none = re.sub(r"\.$", "", text).partition("; None: ")
    shows_none = separator and default is None
    settings: dict[str, Any] = {"help": f"{sentence}.  [default: {of_none}]" if shows_none else f"{sentence}."}
    inner = _without_none(annotation)
    if get_origin(inner) is tuple:
        return settings | {"multiple": True, "type": _click_type(get_args(inner)[0])}
    settings["type"] = _click_type(inner)
    if default is MISSING:
        return settings | {"required": True}
    is_shown = default is not None
    return (
        settings
        | {"default": format_size(default) if is_shown and settings["type"] is SIZE else default}
        | ({"show_default": True} if is_shown else {})
        | ({"metavar": "SIZE"} if settings["type"] is SIZE else {})
    )


def _negate(_: click.Context, __: click.Parameter, value: bool) -> bool:
    return not value


def _without_none(annotation: Any) -> Any:
    """Return the only alternative to None, or the annotation itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        alternatives = [part for part in get_args(annotation) if part is not types.NoneType]
        return alternatives[0] if len(alternatives) == 1 else str
    return annotation


def _click_type(annotation: Any) -> Any:
    if get_origin(annotation) is Literal:
        return click.Choice(get_args(annotation))
    for allowed in ranges_in(annotation):
        return _click_range(annotation, allowed)
    return click.Path(path_type=Path) if annotation is Path else annotation


def _click_range(annotation: Any, allowed: Range) -> click.ParamType[Any]:
    if allowed.is_size:
        return SIZE
    is_int = annotation.__origin__ is int
    least = allowed.least if allowed.above is None else allowed.above
    ends: dict[str, Any] = {"min": least, "max": allowed.most, "min_open": allowed.above is not None}
    return click.IntRange(**ends) if is_int else click.FloatRange(**ends)

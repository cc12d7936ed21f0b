"""The answers of `check` on every engine and machine, for the other commands, the model card and the page."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import replace

from minifloat.deploy.check import ENGINE_HARDWARE, ENGINES, CheckReport, LoadVerdict, Target
from minifloat.deploy.check.judge import judge
from minifloat.deploy.check.subject import Case, Subject, Weight
from minifloat.report.text import layer_pattern

_LAYER = re.compile(r".*?\.\d+(?=\.)")

Reports = Mapping[str, Mapping[str, CheckReport]]


def check_everywhere(subject: Subject, model: str) -> dict[str, dict[str, CheckReport]]:
    """Return the report of every engine on one device of every machine: engine -> machine -> report."""
    subject = _distinct_layers(subject)
    return {
        engine: {
            name: judge(model, None, Case(subject, Target(engine, hardware)))
            for name, hardware in ENGINE_HARDWARE.items()
        }
        for engine in ENGINES
    }


def _distinct_layers(subject: Subject) -> Subject:
    """Return the model without layers that equal an earlier one, so that the rules have fewer weights to look at."""
    layers: dict[str, list[Weight]] = {}
    for weight in subject.weights:
        match = _LAYER.match(weight.module)
        layers.setdefault(match[0] if match else weight.module, []).append(weight)
    first: dict[Hashable, list[Weight]] = {}
    for name, weights in layers.items():
        inner = tuple(
            (weight.module.removeprefix(name), weight.shape, weight.spec, weight.activation) for weight in weights
        )
        first.setdefault((layer_pattern(name), inner), weights)
    return replace(subject, weights=tuple(weight for weights in first.values() for weight in weights))


def loads_in(reports: Mapping[str, CheckReport]) -> list[str]:
    """Return the machines on which an engine loads the checkpoint, including those where it is degraded."""
    return [name for name, report in reports.items() if report.verdict in (LoadVerdict.LOADS, LoadVerdict.DEGRADED)]


def engine_tags(reports: Reports) -> list[str]:
    """Return the servers that load the model on some machine, as tags of its card."""
    return [engine for engine in ("vllm", "sglang") if loads_in(reports[engine])]


def library_name(reports: Reports) -> str:
    """Return the library that hubs show a snippet for: transformers only if it loads the model."""
    return "transformers" if loads_in(reports["transformers"]) else "minifloat"

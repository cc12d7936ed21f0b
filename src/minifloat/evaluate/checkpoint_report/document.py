"""What is known of a checkpoint: what was done, whether it is the same model, what was gained, where it loads."""

from __future__ import annotations

from dataclasses import replace

from minifloat.deploy.check.deployment import engine_verdicts
from minifloat.deploy.check.document import engines_section
from minifloat.evaluate.checkpoint_report.results import Results
from minifloat.quantize import document as quantize_document
from minifloat.report.document import Bullets, Code, Document, On, Section, Text, section


def document(results: Results) -> Document:
    """Return the results, then on a page the details of each. A part that was not measured says how to measure it."""
    name = results.path.name
    details: list[Section] = []
    if results.comparison is not None:
        from minifloat.evaluate.compare import document as compare_document  # imports torch

        same = compare_document.verdict_section(results.comparison, results.others)
        details += compare_document.detail_sections(results.comparison)
    else:
        same = _missing("Is it still the same model?", f"minifloat compare MODEL {name}")
    if results.gains is not None:
        from minifloat.evaluate.bench import document as bench_document

        gained = bench_document.gains_section(results.gains)
        details += bench_document.detail_sections(results.gains)
    else:
        gained = _missing("What was gained", f"minifloat bench {name} --baseline MODEL")
    if results.done is None:
        unknown = Text("What was done is not known: the checkpoint has no minifloat.json.")
        done = section("What was done", unknown)
    else:
        done = quantize_document.done_section(results.done)
        details += quantize_document.detail_sections(results.done)
    loads = Bullets([str(verdict) for verdict in engine_verdicts(results.engines)])
    return Document(
        f"{name}: what was done, is it the same model, what was gained",
        [
            done,
            same,
            gained,
            engines_section(results.engines, name),
            section("", loads, on=On.TERMINAL),
            *(replace(detail, on=detail.on & On.PAGE) for detail in details),
        ],
    )


def _missing(title: str, command: str) -> Section:
    return section(title, Text(f"{title.rstrip('?')}: not measured yet. This adds it:"), Code(command))

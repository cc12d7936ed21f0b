"""The one report beside a checkpoint: what was done, whether it is the same model, what was gained, where it loads.

`quantize` leaves minifloat.json; `compare` and `bench` keep their results in report.json. Each of them draws
report.html again from all results that are there. `push` uploads neither file, because they quote texts that the
models were compared on.
"""

from __future__ import annotations

from minifloat.evaluate.checkpoint_report.results import Results, read_results
from minifloat.evaluate.checkpoint_report.update import PAGE_FILE, draw_results, has_report, write_report

__all__ = ["PAGE_FILE", "Results", "draw_results", "has_report", "read_results", "write_report"]

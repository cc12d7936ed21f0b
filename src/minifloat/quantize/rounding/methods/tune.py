"""Tuning: output matching, and then training of all codes and of the norms against the logits of the original model.

The codes are chosen as by output matching. The training that follows the last layer is in
`minifloat.quantize.rounding.tune`; it needs the whole model in memory.
"""

from __future__ import annotations

from minifloat.quantize.rounding.methods.match import Match


class Tune(Match):
    """Output matching, which a training of the whole model follows."""

    name = "tune"
    summary = "match, then codes and norms trained together against the logits of the original model"
    trains = True

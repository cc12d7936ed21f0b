"""The options of a calibration: how text becomes sequences of tokens, how the model runs, and what is recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from minifloat.calibration.data import DEFAULT_SAMPLES, DEFAULT_SEQ_LEN
from minifloat.calibration.rules import Rule
from minifloat.errors import UsageError


@dataclass(frozen=True)
class TextOptions:
    """How text becomes sequences of tokens.

    Attributes:
        samples: Number of sequences, including held-out ones.
        seq_len: Tokens of a sequence.
        seed: Of the choice of documents, and of text that the model itself writes.
        packing: Join documents into sequences of exactly `seq_len` tokens; False: one document per sequence.
        held_out: Fraction of the sequences that only test the scales; 0: none.

    Raises:
        UsageError: The held-out fraction is out of range.
    """

    samples: int = DEFAULT_SAMPLES
    seq_len: int = DEFAULT_SEQ_LEN
    seed: int = 0
    packing: bool = True
    held_out: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise UsageError(f"expected a held-out fraction from 0 to below 1, got {self.held_out}")


@dataclass(frozen=True)
class CalibrateOptions(TextOptions):
    """What `calibrate` can be told besides model and text; it has the options of `TextOptions` too.

    Attributes:
        histogram: Count magnitudes too; the rules ``percentile`` and ``mse``, which need the counts, set this.
        per_channel: Record the amax of each input channel too.
        until_stable: Stop before the end of the data when every scale by the rule ``max`` moved by no more than this
            fraction over the last `convergence.DEFAULT_WINDOW` sequences. A layer-by-layer run cannot stop early,
            because each layer sees all of the data before the next layer starts.
        max_memory: Bytes of weights that may be in memory at a time. A larger model runs layer by layer. None: load the
            whole model.
        work_dir: Where a layer-by-layer run keeps its finished layers, so that the same call continues after an
            interruption. The parent folder must exist; the folder is deleted at the end. None: a temporary folder, from
            which no run continues. A run of the whole model does not use it.
        device: Where the model runs.
        dtype: Of weights and activations; None: that of config.json.
        rule: How scales follow from the statistics: a `Rule`, or the text of one, such as ``percentile``.
        max_saturation: Largest fraction of held-out elements of any module that may saturate; None: no limit.
        own_text_file: Where the source ``self`` keeps its tokens; None: nowhere.
        from_quantized: The model is quantized: it runs with its dequantized weights and 16-bit inputs.
        revision: Of a model of the hub: a branch, tag or commit.
    """

    histogram: bool = False
    per_channel: bool = False
    until_stable: float | None = None
    max_memory: int | None = None
    work_dir: Path | None = None
    device: str | torch.device = "cpu"
    dtype: torch.dtype | None = None
    rule: str | Rule = "max"
    max_saturation: float | None = None
    own_text_file: Path | None = None
    from_quantized: bool = False
    revision: str | None = None


DEFAULT_TEXT = TextOptions()
DEFAULT_OPTIONS = CalibrateOptions()

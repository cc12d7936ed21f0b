"""The options of a calibration: how text becomes sequences of tokens, how the model runs, and what is recorded.

Imports nothing heavy, so that commands can list them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minifloat.numerics.ranges import AtLeastTwo, Bytes, Count, Fraction, FractionBelowOne, Positive, check_fields

if TYPE_CHECKING:
    import torch

    from minifloat.calibration.rules import Rule

DEFAULT_SAMPLES = 512
DEFAULT_SEQ_LEN = 512
#: Tokens that run through a layer together at most: products of 256 rows reach two thirds of the rate of those of
#: 1,024, and small operations take as long for either.
BATCH_TOKENS = 1024


@dataclass(frozen=True)
class TextOptions:
    """How text becomes sequences of tokens.

    Attributes:
        samples: Sequences in all, held-out ones included; None: as many as the job takes by default.
        seq_len: Tokens per sequence.
        seed: For the choice of documents, and of text that the model itself writes.
        packing: Whether to join documents into sequences of the same length; a sequence is never padded.
        held_out: Fraction of the sequences that only test the scales.

    Raises:
        UsageError: A number is out of range.
    """

    samples: Count | None = DEFAULT_SAMPLES
    seq_len: AtLeastTwo = DEFAULT_SEQ_LEN
    seed: int = 0
    packing: bool = True
    held_out: FractionBelowOne = 0.1

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class CalibrateOptions(TextOptions):
    """What `calibrate` can be told besides model and text; it has the options of `TextOptions` too.

    Attributes:
        histogram: Whether to count magnitudes: needed by the rules percentile and mse, which set this.
        per_channel: Whether to record the amax of each input channel.
        until_stable: Stop when no scale by the rule max has moved by more than this fraction for a while, e.g. 0.01. A
            layer-by-layer run cannot stop early, because each layer sees all of the data before the next layer starts.
        max_memory: Weights to hold at a time; a larger model runs layer by layer; None: all.
        work_dir: Where a layer-by-layer run keeps its finished layers, so that the same call continues after an
            interruption. The parent folder must exist; the folder is deleted at the end; None: a temporary folder, from
            which no run continues.
        device: Where the model runs.
        dtype: Of weights and activations; None: that of config.json.
        rule: How scales follow from the statistics: a `Rule`, or the text of one, such as ``percentile``.
        max_saturation: Largest fraction of held-out elements of any module that may saturate; None: no limit.
        own_text_file: Where the source ``self`` keeps its tokens; None: nowhere.
        from_quantized: Whether to accept a quantized model, which runs with its dequantized weights and 16-bit inputs.
        revision: Of a model of the hub: a branch, tag or commit.
    """

    histogram: bool = False
    per_channel: bool = False
    until_stable: Positive | None = None
    max_memory: Bytes | None = None
    work_dir: Path | None = None
    device: str | torch.device = "cpu"
    dtype: torch.dtype | None = None
    rule: str | Rule = "max"
    max_saturation: Fraction | None = None
    own_text_file: Path | None = None
    from_quantized: bool = False
    revision: str | None = None


DEFAULT_TEXT = TextOptions()
DEFAULT_OPTIONS = CalibrateOptions()

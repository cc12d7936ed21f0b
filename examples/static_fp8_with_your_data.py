"""Static FP8 scales for inputs and KV cache, from your own text: calibrate, look at the scales, quantize, compare.

    python examples/static_fp8_with_your_data.py [TEXT]

TEXT is a .txt, .jsonl, .csv or .parquet file; without one, the stories beside the example model. It runs offline. Each
part is what a cell of a notebook would be.
"""

# %% The model and the text
import sys
import tempfile
from pathlib import Path

import minifloat

HERE = Path(__file__).parent
MODEL = HERE / "storybook-4m"
TEXT = sys.argv[1] if len(sys.argv) > 1 else HERE / "texts" / "stories_calibration.txt"
OUT = Path(tempfile.mkdtemp(prefix="minifloat-"))

# %% Run the text through the BF16 model, once. A tenth is held out to test the scales.
calibration = minifloat.calibrate(MODEL, [TEXT], minifloat.CalibrateOptions(samples=32, seq_len=256))
print(calibration)

# %% Quantize with these scales, the KV cache too; refuse if more than one held-out input in a thousand would saturate
report = minifloat.quantize_checkpoint(
    MODEL, OUT / "static", "fp8-static", minifloat.QuantizeOptions(kv_cache=True), calibration=calibration
)
print(f"{report.source_bytes:,} -> {report.output_bytes:,} bytes")

# %% The same without static scales, to see what they cost
minifloat.quantize_checkpoint(MODEL, OUT / "dynamic", "fp8-dynamic")

# %% Compare both on text that the calibration has not seen (the two that come with minifloat)
options = minifloat.CompareOptions(prompts=0, max_tokens=3000)
comparison = minifloat.compare_models(MODEL, [OUT / "static", OUT / "dynamic"], options=options)
for candidate in comparison.candidates:
    loss = candidate.overall.kl_mean.value
    print(f"{candidate.model.name:10} KL {loss:.4f} nats per token, {candidate.verdict.outcome.name}")

"""Static FP8 scales for inputs and KV cache, from your own text: calibrate, look at the scales, quantize, compare.

    python examples/static_fp8_with_your_data.py [TEXT]

TEXT is a .txt, .jsonl, .csv or .parquet file; without one, the stories beside the example model. It runs offline.
"""

# %% The model and the text
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
MODEL = HERE / "storybook-4m"
TEXT = sys.argv[1] if len(sys.argv) > 1 else str(HERE / "texts" / "stories_calibration.txt")
OUT = Path(tempfile.mkdtemp(prefix="minifloat-"))

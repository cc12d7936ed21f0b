"""Print the commands that serve a model with vLLM on two GPUs, after asking whether it would load there.

    python examples/vllm_on_two_gpus.py [MODEL] [HARDWARE]

Nothing is started and no GPU is needed: vLLM is not imported. It runs offline on the example model.
"""

# %% What to serve, and where
import sys
from pathlib import Path

import minifloat

MODEL = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "storybook-4m")
HARDWARE = sys.argv[2] if len(sys.argv) > 2 else "h100"
PREFERRED = ("fp8-block", "fp8-dynamic", "nvfp4")

# %% The first scheme of 8 bits that vLLM loads on two of them, with every matrix divided
for scheme in PREFERRED:
    report = minifloat.check_checkpoint(MODEL, f"vllm:{HARDWARE}:tp2", scheme=scheme)
    print(f"# {scheme} on 2 x {HARDWARE}: {report.verdict.value}")
    if not report.failures:
        break
else:
    sys.exit(f"vLLM loads none of {', '.join(PREFERRED)} on 2 x {HARDWARE}")

# %% The commands
print(f"minifloat quantize {MODEL} OUT --scheme {scheme} --target vllm:{HARDWARE}:tp2")
print("minifloat serve OUT --engine vllm --tensor-parallel-size 2 -- --gpu-memory-utilization 0.9")
print(f"minifloat compare {MODEL} --served http://127.0.0.1:8000 --data TEXT")

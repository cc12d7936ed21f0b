"""From a BF16 checkpoint to a served model: check, quantize, compare, serve, ask.

    python examples/from_checkpoint_to_server.py [OUT]

Each part is what a cell of a notebook would be. It runs offline on the example model.
"""

# %% The model, and where the results go
import sys
import tempfile
import threading
from pathlib import Path

import minifloat

MODEL = Path(__file__).parent / "storybook-4m"
OUT = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="minifloat-")) / "storybook-fp8"

# %% Will an engine load it? Asked before anything is written.
for target in ("minifloat:cpu-no-amx", "vllm:h100", "vllm:cpu-no-amx"):
    report = minifloat.check_checkpoint(MODEL, target, scheme="fp8")
    print(f"{target:22} {report.verdict.value}")

# %% Quantize
quantized = minifloat.quantize_checkpoint(MODEL, OUT, "fp8", minifloat.QuantizeOptions(overwrite=True))
print(f"{quantized.source_bytes:,} -> {quantized.output_bytes:,} bytes, SQNR {quantized.total.sqnr_db:.1f} dB")

# %% Is it still the same model?
comparison = minifloat.compare_models(MODEL, OUT, options=minifloat.CompareOptions(prompts=0, max_tokens=6000))
(candidate,) = comparison.candidates
print(candidate.verdict.outcome.name, f"KL {candidate.overall.kl_mean.value:.4f} nats per token")

# %% Serve it on a free port, in a thread; `minifloat serve OUT` is the same as a program
import socket  # noqa: E402

import uvicorn  # noqa: E402

from minifloat.serve.server import ServerSettings, create_app  # noqa: E402

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
app = create_app(minifloat.AsyncEngine(minifloat.Engine(OUT)), ServerSettings(model_name="storybook"))
server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
thread = threading.Thread(target=server.run)
thread.start()

# %% Ask it as any server with OpenAI's API
import json  # noqa: E402
import time  # noqa: E402
import urllib.request  # noqa: E402

while not server.started:
    time.sleep(0.05)
request = urllib.request.Request(
    f"http://127.0.0.1:{port}/v1/completions",
    json.dumps({"model": "storybook", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}).encode(),
    {"Content-Type": "application/json"},
)
with urllib.request.urlopen(request, timeout=60) as answer:
    print("Once upon a time" + json.load(answer)["choices"][0]["text"])

# %% Stop it
server.should_exit = True
thread.join()

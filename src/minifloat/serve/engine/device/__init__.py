"""The engine on a GPU: a dense decoder in torch's ops and a few Triton kernels, its decode steps in CUDA graphs.

`decoder.py` is the model and its step, `graphs.py` the graphs, `runner.py` what the engine sees, `transfer.py` the way
between host and device. All of it runs on a CPU too, where a graph is a plain call: that is what the tests do.
"""

from minifloat.serve.engine.device.decoder import DeviceDecoder, build_device_decoder
from minifloat.serve.engine.device.runner import DeviceRunner

__all__ = ["DeviceDecoder", "DeviceRunner", "build_device_decoder"]

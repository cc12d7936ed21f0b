"""The engine on a GPU: a dense decoder in torch's ops and a few Triton kernels, its decode steps in CUDA graphs.

`decoder.py` is the model and its step, `graphs.py` the graphs, `runner.py` the interface to the engine, `transfer.py`
the copies between host and device. All of this runs on a CPU too, where a graph is a plain call: the tests do so.
"""

from minifloat.engine.device.decoder import DeviceDecoder, build_device_decoder
from minifloat.engine.device.inputs import fp8_inputs
from minifloat.engine.device.runner import DeviceRunner

__all__ = ["DeviceDecoder", "DeviceRunner", "build_device_decoder", "fp8_inputs"]

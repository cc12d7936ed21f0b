"""The engine on a CPU: the decoder in C++, built from a layout and a checkpoint, and its runner.

`decoder.py` builds it, `weights.py` packs its weights, `runner.py` is the interface to the engine.
"""

from minifloat.engine.native.decoder import build_native_decoder
from minifloat.engine.native.runner import NativeRunner

__all__ = ["NativeRunner", "build_native_decoder"]

"""What vLLM's log says, in bounded memory: its last lines, its first error, and which kernels it chose."""

from __future__ import annotations

import enum
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

#: A piece of a line that is longer than this is taken for a line. vLLM's longest, its config, has about 6,000 bytes.
_LONGEST_PIECE = 1 << 15
_KEPT_LINES = 50
_KEPT_CHARACTERS = 1000
_KEPT_OF_ERROR = 6
#: As much of a line is looked at.
_LOOKED_AT = 1 << 13


class Says(enum.Enum):
    """What a line tells about the weights."""

    QUANTIZED = "a kernel for quantized weights was chosen"
    EMULATED = "quantized weights are decoded at every step and multiplied in 16 bits"
    UNQUANTIZED = "weights run unquantized"
    UNQUANTIZED_EXPERTS = "experts run unquantized"


@dataclass(frozen=True)
class Sign:
    """A line that tells something.

    Attributes:
        says: What.
        pattern: Found in the line; its first group is the kernel.
        source: Where vLLM writes it.
    """

    says: Says
    pattern: re.Pattern[str]
    source: str


def _sign(says: Says, pattern: str, source: str) -> Sign:
    return Sign(says, re.compile(pattern), source)


#: Read from vLLM 0.32.0, below vllm/. The first that is found in a line counts.
SIGNS: tuple[Sign, ...] = (
    _sign(Says.UNQUANTIZED, r"LLM engine \(v[^)]*\) with config: .*?\bquantization=None,", "config/vllm.py: __str__"),
    _sign(
        Says.UNQUANTIZED,
        r"not implemented - falling back to (UnquantizedLinearMethod)",
        "model_executor/layers/quantization/mxfp4.py: get_quant_method",
    ),
    _sign(
        Says.UNQUANTIZED_EXPERTS,
        r"Using '?(\w+)'? Unquantized MoE backend",
        "model_executor/layers/fused_moe/oracle/unquantized.py",
    ),
    _sign(
        Says.UNQUANTIZED_EXPERTS,
        r"(MXFP8->BF16 load-time dequant) complete",
        "model_executor/layers/quantization/modelopt.py",
    ),
    _sign(
        Says.EMULATED,
        r"(?:Selected|Using) (Emulation\w+) for ",
        "model_executor/kernels/linear/__init__.py: init_*_linear_kernel",
    ),
    _sign(
        Says.EMULATED,
        r"Using (\w+Emulation\w*Experts) M[oO]E backend",
        "model_executor/layers/fused_moe/experts/*_emulation_moe.py",
    ),
    _sign(Says.EMULATED, r"Using '?(EMULATION)'? \w+ MoE backend", "model_executor/layers/fused_moe/oracle/*.py"),
    _sign(
        Says.QUANTIZED,
        r"Selected (\w+Kernel) for \w+",
        "model_executor/kernels/linear/__init__.py: init_fp8_linear_kernel, init_int8_linear_kernel",
    ),
    _sign(
        Says.QUANTIZED,
        r"Using (\w+) for (?:MXFP8|MXFP6|MXFP4|NVFP4) GEMM",
        "model_executor/kernels/linear/__init__.py: init_mxfp8_linear_kernel and its kin",
    ),
    _sign(
        Says.QUANTIZED,
        r"Using (\w+) for mixed-precision linear",
        "model_executor/kernels/linear/__init__.py: choose_mp_linear_kernel",
    ),
    _sign(
        Says.QUANTIZED,
        r"Using '?(\w+)'? (?:Fp8|NvFp4|Mxfp4|MxFp8|WNA16|W4A8) MoE backend",
        "model_executor/layers/fused_moe/oracle/{fp8,nvfp4,mxfp4,mxfp8,int_wna16,w4a8}.py",
    ),
)
#: Every sign has one of these: other lines need not be looked at, however many there are.
_WORDS = ("Selected ", "Using ", "LLM engine", "UnquantizedLinearMethod", "load-time dequant")
_ERROR = re.compile(r"(?:^|\s)(\w+(?:\.\w+)*(?:Error|Exception|Interrupt)): \S")


class Log:
    """The output of a child: fed in chunks, it gives lines and remembers little of them."""

    def __init__(self) -> None:
        self.last: deque[str] = deque(maxlen=_KEPT_LINES)
        #: The first line that names an exception, and those after it: of several processes the last lines say less.
        self.error: list[str] = []
        self.found: dict[Says, dict[str, str]] = {says: {} for says in Says}
        #: How much is found; it grows.
        self.told = 0
        self._pending = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The lines that are complete now; of a line that does not end, pieces."""
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            yield self._read(line + b"\n")
        if len(self._pending) > _LONGEST_PIECE:
            yield self.end()

    def end(self) -> bytes:
        """What is left, complete or not."""
        piece, self._pending = self._pending, b""
        return self._read(piece) if piece else piece

    def _read(self, line: bytes) -> bytes:
        text = line[:_LOOKED_AT].decode("utf-8", errors="replace").rstrip()
        self.last.append(text[:_KEPT_CHARACTERS])
        if 0 < len(self.error) < _KEPT_OF_ERROR or (not self.error and _ERROR.search(text)):
            self.error.append(text[:_KEPT_CHARACTERS])
        for sign in SIGNS if any(word in text for word in _WORDS) else ():
            match = sign.pattern.search(text)
            if match is not None:
                self._tell(sign.says, match[1] if match.re.groups else "", text)
                break
        return line

    def _tell(self, says: Says, kernel: str, text: str) -> None:
        kernels = self.found[says]
        if kernel not in kernels and len(kernels) < _KEPT_LINES:
            kernels[kernel] = text[:_KEPT_CHARACTERS]
            self.told += 1

    def unquantized(self, *, experts: bool) -> str | None:
        """The line that says that weights run unquantized; `experts`: that experts do counts too."""
        wanted = (Says.UNQUANTIZED, Says.UNQUANTIZED_EXPERTS) if experts else (Says.UNQUANTIZED,)
        return next((line for says in wanted for line in self.found[says].values()), None)

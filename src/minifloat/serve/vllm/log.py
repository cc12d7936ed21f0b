"""Reads vLLM's log in bounded memory: its last lines, its first error, and the kernels that it chose."""

from __future__ import annotations

import enum
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

#: Bytes after which an unfinished line counts as a line. vLLM's longest line, its config, has about 6,000.
_MAX_LINE_BYTES = 1 << 15
_KEPT_LINES = 50
_KEPT_CHARACTERS = 1000
_KEPT_ERROR_LINES = 6
#: Bytes at the beginning of a line that are searched.
_SEARCHED_BYTES = 1 << 13


class Evidence(enum.Enum):
    """Facts about the weights that a line of the log can state."""

    QUANTIZED = "a kernel for quantized weights was chosen"
    EMULATED = "quantized weights are decoded at every step and multiplied in 16 bits"
    UNQUANTIZED = "weights run unquantized"
    UNQUANTIZED_EXPERTS = "experts run unquantized"


@dataclass(frozen=True)
class Sign:
    """A kind of line that states a fact about the weights."""

    evidence: Evidence
    pattern: re.Pattern[str]
    source: str


def _sign(evidence: Evidence, pattern: str, source: str) -> Sign:
    return Sign(evidence, re.compile(pattern), source)


#: From vLLM 0.32.0; sources are paths below vllm/. The first sign that matches a line counts.
SIGNS: tuple[Sign, ...] = (
    _sign(
        Evidence.UNQUANTIZED, r"LLM engine \(v[^)]*\) with config: .*?\bquantization=None,", "config/vllm.py: __str__"
    ),
    _sign(
        Evidence.UNQUANTIZED,
        r"not implemented - falling back to (UnquantizedLinearMethod)",
        "model_executor/layers/quantization/mxfp4.py: get_quant_method",
    ),
    _sign(
        Evidence.UNQUANTIZED_EXPERTS,
        r"Using '?(\w+)'? Unquantized MoE backend",
        "model_executor/layers/fused_moe/oracle/unquantized.py",
    ),
    _sign(
        Evidence.UNQUANTIZED_EXPERTS,
        r"(MXFP8->BF16 load-time dequant) complete",
        "model_executor/layers/quantization/modelopt.py",
    ),
    _sign(
        Evidence.EMULATED,
        r"(?:Selected|Using) (Emulation\w+) for ",
        "model_executor/kernels/linear/__init__.py: init_*_linear_kernel",
    ),
    _sign(
        Evidence.EMULATED,
        r"Using (\w+Emulation\w*Experts) M[oO]E backend",
        "model_executor/layers/fused_moe/experts/*_emulation_moe.py",
    ),
    _sign(Evidence.EMULATED, r"Using '?(EMULATION)'? \w+ MoE backend", "model_executor/layers/fused_moe/oracle/*.py"),
    _sign(
        Evidence.QUANTIZED,
        r"Selected (\w+Kernel) for \w+",
        "model_executor/kernels/linear/__init__.py: init_fp8_linear_kernel, init_int8_linear_kernel",
    ),
    _sign(
        Evidence.QUANTIZED,
        r"Using (\w+) for (?:MXFP8|MXFP6|MXFP4|NVFP4) GEMM",
        "model_executor/kernels/linear/__init__.py: init_mxfp8_linear_kernel and the like",
    ),
    _sign(
        Evidence.QUANTIZED,
        r"Using (\w+) for mixed-precision linear",
        "model_executor/kernels/linear/__init__.py: choose_mp_linear_kernel",
    ),
    _sign(
        Evidence.QUANTIZED,
        r"Using '?(\w+)'? (?:Fp8|NvFp4|Mxfp4|MxFp8|WNA16|W4A8) MoE backend",
        "model_executor/layers/fused_moe/oracle/{fp8,nvfp4,mxfp4,mxfp8,int_wna16,w4a8}.py",
    ),
)
#: Every line with a sign has one of these words; other lines are skipped quickly.
_WORDS = ("Selected ", "Using ", "LLM engine", "UnquantizedLinearMethod", "load-time dequant")
_ERROR = re.compile(r"(?:^|\s)(\w+(?:\.\w+)*(?:Error|Exception|Interrupt)): \S")


class Log:
    """The output of a child, fed in chunks."""

    def __init__(self) -> None:
        self.last: deque[str] = deque(maxlen=_KEPT_LINES)
        self.error: list[str] = []
        self.kernels: dict[Evidence, dict[str, str]] = {evidence: {} for evidence in Evidence}
        self.num_found = 0
        self._pending = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the lines that the chunk completes, and pieces of a line that does not end."""
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            yield self._scan(line + b"\n")
        if len(self._pending) > _MAX_LINE_BYTES:
            yield self.end()

    def end(self) -> bytes:
        """Return the rest, which is an incomplete line."""
        piece, self._pending = self._pending, b""
        return self._scan(piece) if piece else piece

    def _scan(self, line: bytes) -> bytes:
        text = line[:_SEARCHED_BYTES].decode("utf-8", errors="replace").rstrip()
        self.last.append(text[:_KEPT_CHARACTERS])
        if 0 < len(self.error) < _KEPT_ERROR_LINES or (not self.error and _ERROR.search(text)):
            self.error.append(text[:_KEPT_CHARACTERS])
        for sign in SIGNS if any(word in text for word in _WORDS) else ():
            match = sign.pattern.search(text)
            if match is not None:
                self._add(sign.evidence, match[1] if match.re.groups else "", text)
                break
        return line

    def _add(self, evidence: Evidence, kernel: str, text: str) -> None:
        kernels = self.kernels[evidence]
        if kernel not in kernels and len(kernels) < _KEPT_LINES:
            kernels[kernel] = text[:_KEPT_CHARACTERS]
            self.num_found += 1

    def unquantized(self, *, experts: bool) -> str | None:
        """Return a line which says that weights run unquantized, or None."""
        kinds = (Evidence.UNQUANTIZED, Evidence.UNQUANTIZED_EXPERTS) if experts else (Evidence.UNQUANTIZED,)
        return next((line for evidence in kinds for line in self.kernels[evidence].values()), None)

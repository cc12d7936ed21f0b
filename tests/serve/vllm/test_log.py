"""Reading vLLM's log. The lines are those of vLLM 0.32.0."""

from __future__ import annotations

import pytest

from minifloat.serve.vllm.log import SIGNS, Evidence, Log

CONFIG = "INFO 11-22 07:15:30 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m', seed=0, "
LINES = [
    (Evidence.UNQUANTIZED, "", f"{CONFIG}quantization=None, quantization_config=None, x=1"),
    (
        Evidence.UNQUANTIZED,
        "UnquantizedLinearMethod",
        "MXFP4 linear layer is not implemented - falling back to UnquantizedLinearMethod.",
    ),
    (
        Evidence.UNQUANTIZED_EXPERTS,
        "TRITON",
        "Using TRITON Unquantized MoE backend out of potential backends: ['TRITON'].",
    ),
    (
        Evidence.UNQUANTIZED_EXPERTS,
        "MXFP8->BF16 load-time dequant",
        "MXFP8->BF16 load-time dequant complete (8 experts/layer); MoE now runs in BF16 with no per-step dequant.",
    ),
    (Evidence.EMULATED, "EmulationMxfp4LinearKernel", "Using EmulationMxfp4LinearKernel for MXFP4 GEMM"),
    (
        Evidence.EMULATED,
        "Mxfp8EmulationTritonExperts",
        "Using Mxfp8EmulationTritonExperts MoE backend. Weights are dequantized to BF16 on the fly",
    ),
    (
        Evidence.EMULATED,
        "OCP_MXQuantizationEmulationTritonExperts",
        "Using OCP_MXQuantizationEmulationTritonExperts MOE backend. This will dequantize weights on the fly",
    ),
    (Evidence.EMULATED, "EMULATION", "Using 'EMULATION' NvFp4 MoE backend out of potential backends: ['EMULATION']."),
    (
        Evidence.QUANTIZED,
        "CutlassFP8ScaledMMLinearKernel",
        "(Worker pid=1) INFO [__init__.py:797] Selected CutlassFP8ScaledMMLinearKernel for CompressedTensorsW8A8Fp8",
    ),
    (
        Evidence.QUANTIZED,
        "DeepGemmFp8BlockScaledMMKernel",
        "Selected DeepGemmFp8BlockScaledMMKernel for Fp8LinearMethod",
    ),
    (Evidence.QUANTIZED, "MarlinNvFp4LinearKernel", "Using MarlinNvFp4LinearKernel for NVFP4 GEMM"),
    (Evidence.QUANTIZED, "MarlinLinearKernel", "Using MarlinLinearKernel for mixed-precision linear"),
    (Evidence.QUANTIZED, "MARLIN", "Using 'MARLIN' Mxfp4 MoE backend."),
    (Evidence.QUANTIZED, "TRITON", "Using TRITON Fp8 MoE backend out of potential backends: ['TRITON', 'MARLIN']."),
]


@pytest.mark.parametrize(("evidence", "kernel", "line"), LINES)
def test_a_line_is_evidence_about_the_weights(evidence: Evidence, kernel: str, line: str) -> None:
    log = Log()
    assert b"".join(log.feed(f"{line}\n".encode())) == f"{line}\n".encode()
    assert log.kernels == {kind: {kernel: line} if kind is evidence else {} for kind in Evidence}
    assert (log.unquantized(experts=True) is not None) == (
        evidence in (Evidence.UNQUANTIZED, Evidence.UNQUANTIZED_EXPERTS)
    )
    assert (log.unquantized(experts=False) is not None) == (evidence is Evidence.UNQUANTIZED)


def test_every_sign_has_a_line_here() -> None:
    texts = [line for _, _, line in LINES]
    assert all(any(sign.pattern.search(text) for text in texts) for sign in SIGNS)


@pytest.mark.parametrize(
    "line",
    [
        f"{CONFIG}quantization=compressed-tensors, quantization_config=None, x=1",
        "INFO [utils.py:347] Using LBHNC KV cache layout.",
        "INFO [model.py:2152] Using max model len 256",
        "INFO [cuda.py:1] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN']",
        "speculative quantization=None,",
    ],
)
def test_other_lines_are_no_evidence(line: str) -> None:
    log = Log()
    list(log.feed(f"{line}\n".encode()))
    assert not any(log.kernels.values())


def test_lines_are_whole_wherever_the_chunks_are_cut() -> None:
    text = "first\nζεύς\nthird".encode()
    for cut in range(len(text)):
        log = Log()
        passed = [*log.feed(text[:cut]), *log.feed(text[cut:])]
        assert b"".join([*passed, log.end()]) == text
        assert list(log.last) == ["first", "ζεύς", "third"]


def test_a_line_that_never_ends_is_passed_on_and_not_kept() -> None:
    log = Log()
    passed = sum(len(piece) for _ in range(64) for piece in log.feed(b"x" * (1 << 16)))
    assert passed == 64 << 16
    assert sum(map(len, log.last)) <= 50 * 1000


def test_bytes_that_are_no_text_are_passed_on_unchanged() -> None:
    log = Log()
    assert b"".join(log.feed(b"\xff\xfe\n")) == b"\xff\xfe\n"
    assert list(log.last) == ["\ufffd\ufffd"]


def test_the_first_error_is_kept_with_the_lines_after_it() -> None:
    log = Log()
    lines = ["fine", "(Worker pid=1) ERROR ValueError: Failed to find a kernel", *map(str, range(9)), "KeyError: other"]
    list(log.feed("\n".join([*lines, ""]).encode()))
    assert log.error == ["(Worker pid=1) ERROR ValueError: Failed to find a kernel", "0", "1", "2", "3", "4"]


def test_the_number_of_kernels_kept_is_bounded() -> None:
    log = Log()
    list(log.feed("".join(f"Using Kernel{number} for NVFP4 GEMM\n" for number in range(1000)).encode()))
    assert len(log.kernels[Evidence.QUANTIZED]) <= 50

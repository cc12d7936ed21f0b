"""`minifloat serve --engine vllm` as a process, with a fake vLLM as its child."""

from __future__ import annotations

import contextlib
import http.client
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from vllm_process import PATIENCE, Serving, is_alive, wait_for

from minifloat.quantize.job import quantize_checkpoint

KEY = "a-key-that-nobody-may-see"
CONFIG = "(EngineCore pid=9) INFO 11-22 07:15:30 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: "
SELECTED = "INFO 11-22 07:15:39 [__init__.py:758] Selected CPUFp8BlockScaledMMKernel for CompressedTensorsW8A8Fp8"
Start = Callable[..., Serving]


@pytest.fixture(scope="module")
def fp8_folder(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "fp8"
    quantize_checkpoint(served_folder, folder, "fp8-block")
    return folder


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_vllm_and_leaves_no_process(serving: Start, number: int) -> None:
    server = serving(FAKE_DRAIN="0.3", FAKE_DELAY="0.5")
    server.until("vLLM: ready after")
    server.process.send_signal(number)
    assert server.end() == 0
    assert (server.folder / "drained").exists()
    assert "[shutdown] draining after signal 15" in server.output
    assert "last of its log" not in server.output


def test_a_signal_while_vllm_starts_stops_it(serving: Start) -> None:
    server = serving(FAKE_DELAY="600")
    server.until("the fake starts")
    server.process.send_signal(signal.SIGTERM)
    # the fake sleeps with its SIGTERM handler installed, so it ends with status 0
    assert server.end() == 0
    assert "ready" not in server.output


def test_the_status_of_a_stopped_vllm_is_passed_on(serving: Start) -> None:
    server = serving(FAKE_LAST_STATUS="7")
    server.until("ready after")
    server.process.terminate()
    assert server.end() == 7


def test_a_second_signal_kills_vllm_and_its_workers(serving: Start) -> None:
    server = serving("--shutdown-timeout", "600", FAKE_STUBBORN="1")
    server.until("ready after")
    server.process.terminate()
    server.until("stopping")
    server.process.terminate()
    assert server.end() == 128 + signal.SIGKILL
    assert "killing vLLM: second signal" in server.output


def test_vllm_that_does_not_stop_is_killed_after_the_shutdown_timeout(serving: Start) -> None:
    short_grace = (
        "from minifloat.serve.vllm import launch; launch._GRACE_SECONDS = 0.5;"
        "from minifloat.commands.main import main; main()"
    )
    server = serving("--shutdown-timeout", "0.5", program=("-c", short_grace), FAKE_STUBBORN="1")
    server.until("ready after")
    server.process.terminate()
    assert server.end() == 128 + signal.SIGKILL
    assert "did not end in time" in server.output


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl of Linux")
def test_vllm_stops_if_minifloat_is_killed(serving: Start) -> None:
    server = serving()
    server.until("ready after")
    leader, worker = server.pids
    server.process.kill()
    wait_for(lambda: not is_alive(leader), "the end of vLLM")
    assert (server.folder / "drained").exists()
    os.kill(worker, signal.SIGKILL)  # a real vLLM ends its workers itself


def test_a_failed_start_shows_the_status_the_last_lines_and_the_first_error(serving: Start, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "(Worker pid=1) ERROR 11-22 [m.py:953] ValueError: Failed to find a kernel\n" + "...\n" * 99
    )
    server = serving(FAKE_EXIT="3", FAKE_LOG=str(tmp_path / "log"), FAKE_DELAY="600")
    assert server.end() == 3
    shown = server.output.partition("vLLM ended by itself: exit status 3. The last of its log:")[2]
    assert "    line 99" in shown
    assert "    RuntimeError: Engine core initialization failed." in shown
    assert "line 51\n" in shown
    assert "line 50\n" not in shown
    assert shown.splitlines()[1].endswith("ValueError: Failed to find a kernel")
    assert "Traceback" not in server.output


def test_no_answer_within_the_startup_timeout_is_a_failure(serving: Start) -> None:
    # However slow the machine is, the time is judged only once the fake has written its first line.
    patched = (
        "import time\n"
        "from minifloat.commands.main import main\n"
        "from minifloat.serve.vllm import launch\n"
        "class Patient(launch.Child):\n"
        "    def __init__(self, *arguments):\n"
        "        super().__init__(*arguments)\n"
        "        while not self.log.last:\n"
        "            time.sleep(0.01)\n"
        "launch.Child = Patient\n"
        "main()"
    )
    server = serving("--startup-timeout", "1", program=("-c", patched), FAKE_DELAY="600")
    assert server.end() == 1
    assert "no answer within 1 s (--startup-timeout). The last of its log:\n    INFO" in server.output


def test_a_crash_under_load_is_reported_and_passed_on(serving: Start) -> None:
    server = serving()
    server.until("ready after")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/crash")
        connection.getresponse()
    assert server.end() == 128 + signal.SIGSEGV
    shown = server.output.partition("ended by itself: killed by signal 11. The last of its log:")[2]
    assert "ValueError: crashed under load" in shown


@pytest.mark.parametrize(("kind", "megabytes"), [("lines", "30"), ("endless", "100"), ("binary", "100")])
def test_a_flood_of_log_neither_blocks_the_server_nor_fills_its_memory(
    serving: Start, kind: str, megabytes: str
) -> None:
    server = serving(FAKE_NOISE=megabytes, FAKE_NOISE_KIND=kind)
    server.until("ready after")
    assert psutil.Process(server.process.pid).memory_info().rss < 300 * 2**20
    server.process.terminate()
    assert server.end() == 0


def test_a_reader_that_goes_away_does_not_stop_the_server(serving: Start) -> None:
    # 4 MB of noise follow the line at which the reader leaves: more than pipes hold, so that writes must fail
    server = serving(FAKE_NOISE="4", leaves_at="the fake starts")
    server.wait_until_left()
    wait_for(lambda: answers(server.port), "an answer")
    server.process.terminate()
    assert server.process.wait(PATIENCE) == 0


def answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def test_a_quantized_kernel_in_the_log_is_confirmed(serving: Start, fp8_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"{CONFIG}quantization=compressed-tensors, seed=0\n{SELECTED}\n")
    server = serving(model=fp8_folder, FAKE_LOG=str(tmp_path / "log"))
    server.until("confirmed by its log, quantized weights run on: CPUFp8BlockScaledMMKernel")
    server.process.terminate()
    assert server.end() == 0


def test_a_log_without_the_names_of_kernels_is_a_warning(serving: Start, fp8_folder: Path) -> None:
    server = serving(model=fp8_folder)
    server.until("could not be confirmed")
    server.process.terminate()
    assert server.end() == 0


def test_quantized_weights_that_run_unquantized_end_the_server(
    serving: Start, fp8_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text(f"{CONFIG}model='m', quantization=None, quantization_config=None, seed=0\n")
    server = serving(model=fp8_folder, FAKE_LOG=str(tmp_path / "log"), FAKE_DELAY="600")
    assert server.end() == 1
    assert "the checkpoint is quantized, but vLLM runs its weights unquantized: (EngineCore" in server.output
    allowed = serving("--allow-unquantized", model=fp8_folder, FAKE_LOG=str(tmp_path / "log"))
    allowed.until("ready after")
    allowed.process.terminate()
    assert allowed.end() == 0


def test_a_model_that_is_not_quantized_may_run_unquantized(serving: Start, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"{CONFIG}model='m', quantization=None, quantization_config=None, seed=0\n")
    server = serving(FAKE_LOG=str(tmp_path / "log"))
    server.until("ready after")
    server.process.terminate()
    assert server.end() == 0
    assert "confirmed" not in server.output


def test_the_key_reaches_vllm_and_no_command_line(serving: Start, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    server = serving("--api-key-file", str(tmp_path / "key"))
    server.until("ready after")
    assert server.noted("environment.json")["VLLM_API_KEY"] == KEY
    for process in (server.process.pid, *server.pids):
        assert KEY not in " ".join(psutil.Process(process).cmdline())
    server.process.terminate()
    assert server.end() == 0
    assert KEY not in server.output
    assert "VLLM_API_KEY=... " in server.output
    assert "vLLM asks for the key below /v1, /v2 and /inference only" in server.output


def test_the_printed_command_is_the_one_that_runs(serving: Start, tmp_path: Path) -> None:
    options = (
        "--max-model-len",
        "512",
        "--no-prefix-cache",
        "--kv-cache-memory",
        "1GiB",
        "--tensor-parallel-size",
        "1",
    )
    more = ("--", "--enforce-eager", "--additional-config", '{"a": "b c"}')
    printed = serving(*options, "--print-command", *more)
    assert printed.end() == 0
    assert not (printed.folder / "argv.json").exists()
    (line,) = printed.output.splitlines()
    server = serving(*options, *more)
    server.until("ready after")
    assert server.noted("argv.json") == shlex.split(line)
    assert server.noted("argv.json")[-3:] == list(more[1:])
    server.process.terminate()
    assert server.end() == 0


def test_a_node_without_the_api_runs_until_it_is_stopped(serving: Start) -> None:
    server = serving("--pipeline-parallel-size", "2", "--", "--nnodes", "2", "--node-rank", "1", "--headless")
    assert server.noted("argv.json")[-1] == "--headless"
    server.until("the fake starts")
    server.process.terminate()
    assert server.end() == 0
    assert "ready" not in server.output
    assert "confirmed" not in server.output


def test_quiet_shows_neither_the_command_nor_vllms_log(serving: Start) -> None:
    server = serving("--quiet")
    wait_for(lambda: answers(server.port), "an answer")
    server.process.terminate()
    assert server.end() == 0
    assert "the fake starts" not in server.output
    assert subprocess.list2cmdline(server.noted("argv.json")) not in server.output

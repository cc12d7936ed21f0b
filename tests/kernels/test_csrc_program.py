"""The kernels through their C interface without Python, on this processor and on an emulated ARM processor."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from minifloat.kernels import native

REPOSITORY = Path(__file__).parents[2]
HEADERS = REPOSITORY / "src" / "minifloat" / "kernels" / "native"
SOURCE = Path(__file__).parent / "csrc" / "linear_program.cpp"
COMPILER = os.environ.get("CXX", "g++")
ARM_COMPILER = "aarch64-linux-gnu-g++"
ARM_EMULATOR = "qemu-aarch64"
ARM_ROOT = "/usr/aarch64-linux-gnu"


def run(*command: object) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no {COMPILER}")
def test_a_program_in_c_gets_the_products_of_a_double_loop(tmp_path: Path) -> None:
    library = native.load()
    if library is None:
        pytest.skip(native.why_unavailable())
    files = [folder / name for folder in native.folders() for name in native.FILE_NAMES]
    file = next(file for file in files if file.exists()).absolute()
    program = tmp_path / "program"
    run(COMPILER, "-std=c++17", "-O2", f"-I{HEADERS}", SOURCE, file, f"-Wl,-rpath,{file.parent}", "-o", program)
    assert run(program).split() == list(library.isas)


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no {COMPILER}")
def test_a_thread_multiplies_with_the_bytes_that_it_packed(tmp_path: Path) -> None:
    program, sources = tmp_path / "cut", HEADERS.parent / "csrc" / "linear"
    source = SOURCE.with_name("cut_program.cpp")
    run(COMPILER, "-std=c++17", "-O2", "-DMINIFLOAT_ISA=baseline", f"-I{sources}", source, "-o", program)
    assert run(program) == ""


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_a_build_for_this_processor_alone_has_its_fastest_instruction_set(tmp_path: Path) -> None:
    library = native.load()
    if library is None:
        pytest.skip(native.why_unavailable())
    said = run("cmake", "-S", REPOSITORY, "-B", tmp_path, "-DMINIFLOAT_ISAS=native", f"-DCMAKE_CXX_COMPILER={COMPILER}")
    assert f"instruction sets: {' '.join(dict.fromkeys((library.isas[0], 'baseline')))}\n" in said


@pytest.fixture(scope="module")
def arm_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [tool for tool in ("cmake", ARM_COMPILER, ARM_EMULATOR) if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    target = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={ARM_COMPILER}")
    folder = tmp_path_factory.mktemp("arm")
    run("cmake", "-S", REPOSITORY, "-B", folder, *target)
    run("cmake", "--build", folder, "--target", "minifloat_linear_program", "--parallel")
    return folder / "minifloat_linear_program"


#: "max" has all that the emulator knows, BF16 among it; a Cortex-A72 has none of the extensions.
@pytest.mark.parametrize(("processor", "isas"), [("max", ["neon_bf16", "baseline"]), ("cortex-a72", ["baseline"])])
def test_an_emulated_arm_processor_gets_the_products_of_a_double_loop(
    arm_program: Path, processor: str, isas: list[str]
) -> None:
    assert run(ARM_EMULATOR, "-cpu", processor, "-L", ARM_ROOT, arm_program).split() == isas

"""Finding, loading and choosing the instruction set of the native library."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minifloat.errors import KernelUnavailable
from minifloat.kernels import native

LIBRARY = native.load()
needs_library = pytest.mark.skipif(LIBRARY is None, reason=native.why_unavailable())


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if key != "MINIFLOAT_ISA"}
    path = os.pathsep.join(sys.path)
    return subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@needs_library
def test_every_instruction_set_of_this_processor_can_be_forced() -> None:
    assert LIBRARY is not None
    for isa in LIBRARY.isas:
        result = run("from minifloat.kernels import native; print(native.isa())", MINIFLOAT_ISA=isa)
        assert result.stdout.strip() == isa, result.stderr


@needs_library
def test_the_fastest_instruction_set_is_the_default() -> None:
    assert LIBRARY is not None
    assert run("from minifloat.kernels import native; print(native.isa())").stdout.strip() == LIBRARY.isas[0]


@needs_library
def test_an_unknown_instruction_set_is_an_error_that_lists_the_valid_ones() -> None:
    result = run("from minifloat.kernels import native; native.load()", MINIFLOAT_ISA="avx9")
    assert "KernelUnavailable: unknown instruction set 'avx9'; this build has: " in result.stderr
    assert "baseline" in result.stderr


@needs_library
def test_an_instruction_set_that_the_processor_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class OldProcessor:
        """The library as a processor without vector extensions would see it."""

        def minifloat_isa_count(self) -> int:
            return 2

        def minifloat_isa_name(self, index: int) -> bytes:
            return (b"avx512", b"baseline")[index]

        def minifloat_isa_supported(self, index: int) -> int:
            return index

    with pytest.raises(KernelUnavailable, match="no avx512; it can run: baseline"):
        native.Library(OldProcessor(), "avx512")  # type: ignore[arg-type]


@needs_library
def test_the_library_needs_neither_torch_nor_numpy() -> None:
    result = run("import sys; from minifloat.kernels import native; native.load(); print('numpy' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr


def test_the_op_imports_no_torch() -> None:
    result = run("import sys, minifloat.kernels.quantize; print('torch' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr


def test_a_missing_library_says_what_to_do_and_a_file_that_is_none_says_so(tmp_path: Path) -> None:
    outcome = native.open_library([tmp_path])
    assert outcome.library is None
    assert re.search("not built.*C\\+\\+ compiler", outcome.reason)
    (tmp_path / native.FILE_NAMES[0]).write_bytes(b"not a library")
    outcome = native.open_library([tmp_path])
    assert outcome.library is None
    assert "does not load" in outcome.reason


@needs_library
def test_a_library_of_another_version_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "ABI_VERSION", -1)
    outcome = native.open_library(native.folders())
    assert outcome.library is None
    assert "another version" in outcome.reason


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler on the path")
def test_the_library_was_built_if_there_is_a_compiler() -> None:
    assert native.load() is not None, native.why_unavailable()


class _SystemWithoutOpenmp:
    """`ctypes.CDLL` of a system that finds libgomp only after it was opened by its path."""

    def __init__(self) -> None:
        self.real = ctypes.CDLL
        self.opened: list[str] = []

    def __call__(self, path: str, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
        name = Path(path).name
        if name in native.FILE_NAMES and "libgomp.so.1" not in self.opened:
            raise OSError("libgomp.so.1: cannot open shared object file: No such file or directory")
        self.opened.append(name)
        return self.real(path, mode)


@needs_library
@pytest.mark.skipif(sys.platform != "linux", reason="the loader of Linux")
def test_without_openmp_of_the_system_the_library_takes_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    system = _SystemWithoutOpenmp()
    monkeypatch.setattr(native.ctypes, "CDLL", system)
    library = native.open_library(native.folders()).library
    assert library is not None
    assert system.opened == ["libgomp.so.1", "libminifloat_native.so"]


@needs_library
def test_without_openmp_anywhere_the_reason_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.ctypes, "CDLL", _SystemWithoutOpenmp())
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: None)
    reason = native.open_library(native.folders()).reason
    assert "cannot open shared object file" in reason
    assert "install libgomp.so.1 (Debian and Ubuntu: libgomp1; Fedora: libgomp)" in reason


def test_every_structure_of_the_header_is_read_with_its_fields() -> None:
    header = Path(native.__file__).with_name("api.h").read_text()
    assert set(native.STRUCTS) == set(re.findall(r"^struct minifloat_(\w+) \{", header, re.M))
    assert native.CONSTANTS["ABI_VERSION"] == native.ABI_VERSION
    layer = native.STRUCTS["layer"]
    assert [name for name, *_ in layer._fields_][:2] == ["input_norm", "attention_norm"]
    assert native.POINTEES[layer, "delta"] == "delta"
    assert native.STRUCTS["gram_args"](x_cols=3, y_cols=4).y_cols == 4
    with pytest.raises(AttributeError):
        native.STRUCTS["gram_args"](columns=3)


def test_a_declaration_that_the_reader_does_not_know_is_refused() -> None:
    with pytest.raises(AssertionError, match="no declaration of fields"):
        native._read("unknown", "int32_t numbers[4];")

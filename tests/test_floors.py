"""The floor plan of the package: a package imports only from packages below it, and no two modules import each other.

`FLOORS` is the one place that states the order. Imports inside functions count like those at the top of a module, and
so do those for type checkers alone.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "minifloat"

#: From the ground up. A name is a package, or a module of the package's root.
FLOORS = (
    "errors",
    "_version",
    "numerics",
    "checkpoint",
    "kernels",
    "report",
    "model",
    "transformers",
    "engine",
    "deploy",
    "calibration",
    "quantize",
    "serve",
    "evaluate",
    "commands",
    "__init__",
    "__main__",
)
ROOT_FILES = {"__init__.py", "__main__.py", "_version.py", "errors.py", "py.typed"}


@functools.cache
def modules(package: Path) -> dict[str, Path]:
    """Every module of a package by its dotted name; a package by its own name."""
    named = {}
    for path in sorted(package.rglob("*.py")):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


def imports(package: Path, path: Path) -> Iterator[tuple[int, str]]:
    """The modules of the package that a file imports, each with its line."""
    known = modules(package)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else str(node.module) for name in names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == package.name)


def floor(module: str) -> int:
    """The index of a module's floor."""
    parts = module.split(".")
    return FLOORS.index(parts[1] if len(parts) > 1 else "__init__")


def upward_imports(package: Path) -> list[str]:
    """Each import that runs upward, with its file and line."""
    return [
        f"{path.relative_to(package.parent)}:{line} imports {target}"
        for module, path in modules(package).items()
        for line, target in imports(package, path)
        if floor(target) > floor(module)
    ]


def cycles(package: Path) -> list[str]:
    """Modules that can be reached from themselves; a package's `__init__` is a module of its own."""
    edges = {
        module: {target for _, target in imports(package, path) if target != module}
        for module, path in modules(package).items()
    }
    while True:
        leaves = {module for module, targets in edges.items() if not targets & edges.keys()}
        if not leaves:
            return sorted(edges)
        edges = {module: targets for module, targets in edges.items() if module not in leaves}


def test_no_import_runs_upward() -> None:
    assert upward_imports(PACKAGE) == []


def test_no_two_modules_import_each_other() -> None:
    assert cycles(PACKAGE) == []


def test_every_package_has_a_floor_and_every_floor_a_package() -> None:
    found = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert found == set(FLOORS) - {"errors", "_version", "__init__", "__main__"}


def test_the_root_of_the_package_holds_four_modules() -> None:
    assert {path.name for path in PACKAGE.iterdir() if path.is_file()} == ROOT_FILES


@pytest.mark.parametrize("line", ["from minifloat.serve import run", "def f():\n    import minifloat.serve.run"])
def test_an_import_that_runs_upward_is_named_with_its_file(tmp_path: Path, line: str) -> None:
    package = tmp_path / "minifloat"
    for folder in ("kernels", "serve"):
        (package / folder).mkdir(parents=True)
        (package / folder / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "serve" / "run.py").touch()
    (package / "kernels" / "op.py").write_text(line + "\n")
    (found,) = upward_imports(package)
    assert found.startswith("minifloat/kernels/op.py:")
    assert found.endswith("imports minifloat.serve.run")


def test_modules_that_import_each_other_are_named(tmp_path: Path) -> None:
    package = tmp_path / "minifloat"
    (package / "kernels").mkdir(parents=True)
    for name, other in (("one", "two"), ("two", "one")):
        (package / "kernels" / f"{name}.py").write_text(f"from minifloat.kernels import {other}\n")
    (package / "__init__.py").touch()
    (package / "kernels" / "__init__.py").touch()
    assert cycles(package) == ["minifloat.kernels.one", "minifloat.kernels.two"]

"""Bounds that keep the package readable: lines and parameters of a function, the number of files and packages.

Lines of a function are counted without its docstring, which states shapes and sources where users read it. Triton's
kernels take their arguments one by one, and commands take one for each option: both are exempt.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "minifloat"
MOST_LINES, MOST_PARAMETERS = 60, 8
MOST_FILES, MOST_PACKAGES = 500, 13

Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_exempt(path: Path, function: Function) -> bool:
    if path.parent.name == "commands":
        return any("click" in ast.unparse(decorator) for decorator in function.decorator_list)
    return "triton" in str(path.relative_to(PACKAGE))


def too_large(path: Path) -> list[str]:
    """The functions of a file beyond a bound, with their numbers."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, Function) or is_exempt(path, node):
            continue
        assert node.end_lineno is not None
        lines = node.end_lineno - node.lineno + 1
        if ast.get_docstring(node) is not None:
            first = node.body[0]
            assert first.end_lineno is not None
            lines -= first.end_lineno - first.lineno + 1
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        parameters = sum(argument.arg not in ("self", "cls") for argument in arguments)
        if lines > MOST_LINES or parameters > MOST_PARAMETERS:
            where = f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}"
            found.append(f"{where}: {lines} lines, {parameters} parameters")
    return found


def test_no_function_is_longer_or_takes_more_than_the_bounds() -> None:
    assert [each for path in sorted(PACKAGE.rglob("*.py")) for each in too_large(path)] == []


def test_files_and_packages_are_few() -> None:
    files = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    packages = [path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    assert len(files) <= MOST_FILES
    assert len(packages) <= MOST_PACKAGES


def test_benchmarks_and_support_of_tests_share_no_module_name() -> None:
    """mypy knows a module by its name alone, and benchmarks import some that support tests."""
    benchmarks = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    support = {path.name for path in (ROOT / "tests" / "support").glob("*.py")}
    assert benchmarks
    assert support
    assert benchmarks & support == set()

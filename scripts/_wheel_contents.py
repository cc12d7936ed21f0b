"""Hold a wheel to its sources: every file of src/minifloat but the C++, the native library, and nothing else.

python scripts/_wheel_contents.py dist/minifloat-0.1.0-py3-none-linux_x86_64.whl
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARY = "minifloat/kernels/libminifloat_native.so"


def expected() -> set[str]:
    """Return the files that a wheel has outside its dist-info."""
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {name.removeprefix("src/") for name in listed.splitlines()}
    return {name for name in names if not name.startswith("minifloat/kernels/csrc/")} | {LIBRARY}


def main(wheel: Path) -> None:
    """Print what the wheel has.

    Raises:
        SystemExit: The wheel lacks a file, or has one too many.
    """
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist() if not info.is_dir()}
    found = {name for name in sizes if ".dist-info/" not in name}
    wrong = [f"not in the wheel: {name}" for name in sorted(expected() - found)]
    wrong += [f"not of the package: {name}" for name in sorted(found - expected())]
    if wrong:
        raise SystemExit("\n".join([f"{wheel}:", *wrong]))
    size = wheel.stat().st_size
    print(f"{wheel.name}: {size:,} bytes, {len(found)} files, the native library of {sizes[LIBRARY]:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

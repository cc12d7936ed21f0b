"""Print a SHA-256 digest of the output of `quantize` per scheme, to show that a change does not alter any byte of it.

    python benchmarks/fingerprints.py MODEL [--scheme NAME ...] [--work-dir DIR]

Run the command before and after the change and compare the digests. A digest covers the weights, config.json and
minifloat.json of the output, in the order of their names. It leaves out the model card, whose sentences may change.
`tests/quantize/test_golden.py` holds digests of the example model.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
from pathlib import Path

import click

import minifloat


def digest(folder: Path) -> str:
    """Return the SHA-256 over names and contents of the weights, config.json and minifloat.json of a checkpoint."""
    hasher = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (path.suffix == ".safetensors" or path.name in ("config.json", "minifloat.json")):
            hasher.update(path.name.encode())
            with path.open("rb") as file:
                while block := file.read(1 << 24):
                    hasher.update(block)
    return hasher.hexdigest()


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--scheme", "schemes", multiple=True, help="Repeatable.  [default: all]")
@click.option("--work-dir", type=click.Path(path_type=Path), help="Folder for the outputs until they are hashed.")
def main(model: Path, schemes: tuple[str, ...], work_dir: Path | None) -> None:
    """Quantize MODEL to each scheme and print the digest of the output and the time that quantizing took."""
    for scheme in schemes or minifloat.SCHEMES:
        with tempfile.TemporaryDirectory(dir=work_dir) as folder:
            out = Path(folder) / "out"
            started = time.perf_counter()
            try:
                minifloat.quantize_checkpoint(model, out, scheme)
            except minifloat.MinifloatError as error:
                print(f"{scheme:<14} refused: {error}", flush=True)
                continue
            seconds = time.perf_counter() - started
            print(f"{scheme:<14} {digest(out)} {seconds:8.2f} s", flush=True)
            shutil.rmtree(out)


if __name__ == "__main__":
    main()

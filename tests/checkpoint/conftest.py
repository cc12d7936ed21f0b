"""Fixtures that write valid or deliberately invalid safetensors files and model folders."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def _safetensors(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.fixture(scope="session")
def safetensors_bytes() -> Callable[..., bytes]:
    """Return the bytes of a file with this header (an object or raw JSON); `length` overrides the length field."""
    return _safetensors


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    """Write a folder of these files (bytes, or objects that are encoded as JSON), by default with a config.json."""

    def make(files: dict[str, Any] | None = None, *, name: str = "model", config: Any = None) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        if config is not False:
            (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
        for file_name, content in (files or {}).items():
            path = folder / file_name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return folder

    return make


@pytest.fixture
def shard() -> Callable[..., bytes]:
    """Return the bytes of a file of one-byte tensors of these names."""

    def make(*names: str) -> bytes:
        header = {name: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, name in enumerate(names)}
        return _safetensors(header, bytes(range(1, len(names) + 1)))

    return make

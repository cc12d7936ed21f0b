"""Files of a checkpoint that are no regular files, or hold what sampling cannot use, are errors at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minifloat.checkpoint import Checkpoint
from minifloat.errors import CheckpointError, ConfigError, UnsafeFileError
from minifloat.model.runtime.config import read_generation, read_generation_config
from minifloat.model.runtime.tokenizer import load_tokenizer, serving_tokenizer


@pytest.fixture
def folder(make_llama: Callable[..., Path], tmp_path: Path) -> Path:
    return make_llama(tmp_path / "model")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_fifo_among_the_files_of_a_tokenizer_is_refused_at_once(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for load in (load_tokenizer, serving_tokenizer):
        with pytest.raises(UnsafeFileError, match=rf"{name}: not a regular file"):
            load(folder)


@pytest.mark.timeout(20)
def test_a_fifo_in_the_place_of_the_generation_config_is_refused_at_once(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    os.mkfifo(folder / "generation_config.json")
    with Checkpoint.open(folder) as checkpoint:
        for read in (read_generation, read_generation_config):
            with pytest.raises(UnsafeFileError, match=r"generation_config\.json: not a regular file"):
                read(checkpoint)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"temperature": float("inf")}, "temperature: expected a finite number of at least 0, found inf"),
        ({"temperature": -1}, "temperature: expected"),
        ({"top_p": 2.0}, "top_p: expected a finite number of at least 0 and at most 1, found 2.0"),
        ({"top_k": "50"}, "top_k: expected an integer"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected a finite number of at least 0.01"),
        ({"eos_token_id": {"a": 1}}, "eos_token_id: expected a token or a list of tokens"),
        ({"do_sample": "yes"}, "do_sample: expected true or false"),
        ([], "expected a JSON object"),
        ("[" * 5000, "nested"),
    ],
)
def test_a_generation_config_that_sampling_cannot_use_is_refused(folder: Path, content: Any, message: str) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    with Checkpoint.open(folder) as checkpoint:
        for read in (read_generation, read_generation_config):
            with pytest.raises(ConfigError, match=rf"generation_config\.json: .*{message}"):
                read(checkpoint)


def test_a_tokenizer_config_that_is_nested_deeply_is_an_error(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"a":' * 5000 + "1" + "}" * 5000)
    with pytest.raises(CheckpointError):
        serving_tokenizer(folder)

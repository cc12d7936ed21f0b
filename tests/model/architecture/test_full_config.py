"""What transformers' config of a model states, with the defaults of its class."""

from __future__ import annotations

import subprocess
import sys

import pytest
from transformers import Gemma3Config, LlamaConfig, PreTrainedConfig, XLNetConfig

from minifloat.model.architecture.full_config import position_limit


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (LlamaConfig(max_position_embeddings=512), 512),
        (Gemma3Config(text_config={"max_position_embeddings": 64}), 64),
        (XLNetConfig(), None),  # -1: its positions are relative
        (PreTrainedConfig(), None),
    ],
    ids=["llama", "nested", "xlnet", "none"],
)
def test_position_limit(config: PreTrainedConfig, limit: int | None) -> None:
    assert position_limit(config) == limit


def test_a_config_is_read_after_an_import_of_torch_without_the_kernels_of_its_device_meta() -> None:
    code = (
        "from pathlib import Path\n"
        "from minifloat.serve.starting import import_torch\n"
        "import_torch()\n"
        "from minifloat.model.architecture.full_config import full_config\n"
        "assert full_config({'model_type': 'llama', 'hidden_size': 64}, Path('m')).hidden_size == 64"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

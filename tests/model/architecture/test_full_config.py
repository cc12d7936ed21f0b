"""What transformers' config of a model states, with the defaults of its class."""

from __future__ import annotations

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

"""The runner of transformers' code, for the caches that its models have, against the model without a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plain import load_plain
from small_models import Case, make_model

from minifloat import Engine, EngineOptions, SamplingParams
from minifloat.engine.sequence import Request

_PROMPT, _NEW = tuple(range(40, 64)), 5
#: The cache of attention; positions that start at 0 in each call; a state that each call of several tokens begins anew;
#: states of Mamba and of RWKV; a state in the modules.
_MODEL_TYPES = ("gemma2", "bamba", "jamba", "mamba2", "rwkv", "recurrent_gemma")


@pytest.mark.parametrize("model_type", _MODEL_TYPES)
def test_a_prompt_in_parts_and_its_next_tokens_are_those_of_the_model_without_a_cache(
    model_type: str, tmp_path: Path
) -> None:
    case = Case(model_type, model_type)
    folder = make_model(case, tmp_path / "model")
    model: Any = load_plain(case, folder)
    engine = Engine(
        folder, EngineOptions(dtype="float32", kv_cache_memory=2**24, max_num_seqs=2, max_num_batched_tokens=10)
    )
    engine.add(Request("0", _PROMPT, SamplingParams(temperature=0.0, max_tokens=_NEW, ignore_eos=True, logprobs=1)))
    found = []
    while engine.has_work:
        found += [choice for delivery in engine.step() for choice in delivery.logprobs or ()]
    tokens = [*_PROMPT, *(choice.token for choice in found)]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -_NEW - 1 : -1].float()
    expected = logits.log_softmax(-1)
    assert [choice.token for choice in found] == expected.argmax(-1).tolist()
    assert [choice.logprob for choice in found] == pytest.approx(expected.amax(-1).tolist(), abs=1e-4)

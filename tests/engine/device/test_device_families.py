"""The parts of a plan decide whether the decoder of GPUs runs a family; what it runs, it runs exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
from native_cases import CASES, config_of, greedy, model_of, write

from minifloat.engine import Engine, EngineOptions, SamplingParams
from minifloat.model.architecture.decoder import decoder_layout, why_not_on_device
from minifloat.model.architecture.roles import text_of

#: Cases that have no part which it lacks.
RUN = [
    "llama",
    "mistral",
    "ministral",
    "qwen2",
    "qwen3",
    "seed_oss",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "phi3",
    "phi3 longrope",
]
#: What it lacks of some others, first of all.
LACKS = {
    "gemma4_text": "inputs of layers besides the residual stream",
    "gemma4_text with experts": "factors and caps of embeddings and logits",
    "gpt_oss": "mixtures of experts",
    "glm": "rotary embeddings of neighbouring dimensions",
    "smollm3": "layers with different rotary embeddings",
    "granite": "factors and caps of embeddings and logits",
    "arcee": "the activation 'relu2'",
    "olmo2": "norms behind attention and MLP",
}


def test_the_parts_of_plans_say_which_families_it_runs() -> None:
    found = {name: why_not_on_device(decoder_layout(text_of(config_of(name)).config)) for name in CASES}
    assert [name for name, reason in found.items() if not reason] == RUN
    for name, part in LACKS.items():
        assert found[name].startswith(f"the decoder of GPUs does not have {part}")


@pytest.mark.parametrize("name", RUN)
def test_what_it_does_not_lack_it_runs_exactly(name: str, tmp_path: Path) -> None:
    model, prompts = model_of(name), [list(range(3, 50)), [5, 6, 7]]
    engine = Engine(write(model, tmp_path / "m"), EngineOptions(dtype="float32", runner="device"))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    found = [list(completion.tokens) for completion in engine.generate(prompts, params)]
    assert found == [greedy(model, tokens, 8, guess) for tokens, guess in zip(prompts, found, strict=True)]

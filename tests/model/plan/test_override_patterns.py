"""Override patterns match the chosen modules and no others, also in a plan of `quantize`."""

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from minifloat.checkpoint import Checkpoint
from minifloat.model.architecture.roles import expert_group, fused_group
from minifloat.model.layouts import get_writer
from minifloat.model.plan.overrides import Override, override_patterns
from minifloat.model.plan.quantization import make_plan
from minifloat.numerics.scheme import get_scheme

MakeModel = Callable[..., Path]

PROJECTIONS = [
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
]
NAMES = ["lm_head", "model.embed_tokens", *(f"model.layers.{i}.{name}" for i in range(12) for name in PROJECTIONS)]


@pytest.mark.parametrize(
    ("chosen", "patterns"),
    [
        (r"q_proj", [r"\.self_attn\.q_proj$"]),
        (r"\.3\..*(q|k|v)_proj", [r"layers\.3\.self_attn\.(k|q|v)_proj$"]),
        (r"\.(1|11)\.mlp", [r"layers\.(1|11)\.mlp\."]),
        (r"\.1\.|down", [r"layers\.1\.", r"\.mlp\.down_proj$"]),
        (r"\.(1|2)\.mlp|\.2\..*o_proj", [r"layers\.(1|2)\.mlp\.", r"layers\.2\.self_attn\.o_proj$"]),
        (r"layers", [r"layers\."]),
        (r"lm_head", [r"^lm_head$"]),
    ],
)
def test_patterns_are_short(chosen: str, patterns: list[str]) -> None:
    names = [name for name in NAMES if re.search(chosen, name)]
    assert list(override_patterns(names, NAMES)) == patterns


@pytest.mark.parametrize("seed", range(50))
def test_patterns_match_any_choice_exactly(seed: int) -> None:
    generator = random.Random(seed)
    odd = ["tower.layers.3.mlp.up_proj", "model.layers.1", "h.layers.0.mlp.up_proj.extra", "a+b", "model.norm.1"]
    names = [*NAMES, *odd]
    chosen = generator.sample(names, generator.randint(1, len(names)))
    patterns = override_patterns(chosen, names)
    assert {name for name in names if any(re.search(pattern, name) for pattern in patterns)} == set(chosen)
    assert len(patterns) <= len(chosen)


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("seed", range(5))
def test_a_plan_with_the_patterns_as_overrides_keeps_the_chosen_modules(
    make_model: MakeModel, tmp_path: Path, model_type: str, seed: int
) -> None:
    folder = make_model(tmp_path / "m", model_type)
    with Checkpoint.open(folder) as checkpoint:
        writer, scheme = get_writer("compressed-tensors"), get_scheme("fp8")
        everything = make_plan(checkpoint, scheme, writer)
        groups = sorted({expert_group(module) or fused_group(module) for module in everything.modules})
        kept = random.Random(seed).sample(groups, random.Random(seed).randint(1, len(groups) - 1))
        chosen = [module for module in everything.modules if (expert_group(module) or fused_group(module)) in kept]
        patterns = override_patterns(chosen, [*everything.modules, *everything.kept])
        plan = make_plan(checkpoint, scheme, writer, [Override(pattern, None) for pattern in patterns])
        assert plan.modules.keys() == everything.modules.keys() - set(chosen)
        assert set(plan.kept) == {*everything.kept, *chosen}

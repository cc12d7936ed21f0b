"""The example for Ray Serve's LLM app, by Ray's own validation."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tools import ROOT, run_script

EXAMPLE = ROOT / "examples" / "ray_serve.yaml"
pytestmark = pytest.mark.timeout(1200)


def test_ray_understands_the_example(tmp_path: Path) -> None:
    (answer,) = run_script("ray", "in_ray.py", str(EXAMPLE), tmp_path)
    assert answer["import_path"] == "ray.serve.llm:build_openai_app"
    assert (answer["model"], answer["source"]) == ("OUT", "/models/OUT")
    assert (answer["tensor_parallel_size"], answer["accelerator"]) == (1, "H100")
    assert (answer["autoscaling"]["min_replicas"], answer["autoscaling"]["max_replicas"]) == (2, 8)


@pytest.mark.parametrize("broken", ["autoscaling", "field"])
def test_ray_refuses_an_example_that_is_wrong(broken: str, tmp_path: Path) -> None:
    example = yaml.safe_load(EXAMPLE.read_text())
    (config,) = example["applications"][0]["args"]["llm_configs"]
    if broken == "field":
        config["engine_arguments"] = config.pop("engine_kwargs")
    else:
        config["deployment_config"]["autoscaling_config"]["max_replicas"] = 1
    changed = tmp_path / "broken.yaml"
    changed.write_text(yaml.safe_dump(example))
    assert run_script("ray", "in_ray.py", str(changed), tmp_path) == []
    said = {"field": "engine_arguments", "autoscaling": "max_replicas"}[broken]
    assert said in (tmp_path / "in_ray.py.log").read_text()

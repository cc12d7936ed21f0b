"""Validates a config file of Ray Serve with its LLM app as Ray does, without starting anything.

    python in_ray.py REQUEST ANSWERS

The request names a file; the answer holds what Ray understood.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml
from ray.serve.llm import LLMConfig
from ray.serve.schema import ServeDeploySchema

request, answers = map(Path, sys.argv[1:])
declared = ServeDeploySchema.model_validate(yaml.safe_load(Path(json.loads(request.read_text())).read_text()))
for application in declared.applications:
    for entry in application.args["llm_configs"]:
        config = LLMConfig.model_validate(entry)
        engine = config.get_engine_config()
        deployment = config.get_serve_options(name_prefix="LLM:") if hasattr(config, "get_serve_options") else {}
        answer = {
            "import_path": application.import_path,
            "model": config.model_id,
            "source": engine.actual_hf_model_id,
            "tensor_parallel_size": engine.tensor_parallel_degree,
            "accelerator": config.accelerator_type,
            "autoscaling": dict(config.deployment_config["autoscaling_config"]),
            "deployment": sorted(deployment),
        }
        with answers.open("a") as file:
            file.write(json.dumps(answer) + "\n")

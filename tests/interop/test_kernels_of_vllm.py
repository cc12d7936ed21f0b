"""The kernels that `check` names for vLLM on GPUs, against what vLLM's own code chooses for each machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tools import run_script, vllm_for_gpus
from vllm_cases import STORYBOOK

from minifloat.checkpoint.hub import open_headers
from minifloat.deploy.check.engine_kernels import kernel_for
from minifloat.deploy.check.subject import Case, Subject, kind_of
from minifloat.deploy.check.target import GPUS, Target
from minifloat.model.layouts import WRITERS, compressed_tensors
from minifloat.model.plan.quantization import make_plan
from minifloat.numerics.scheme import SCHEMES

pytestmark = pytest.mark.timeout(3600)

#: vLLM chooses a kernel for these, and stops while it prepares the weights for it; `check` refuses them.
STOPS_LATER = {
    ("a100", "mxfp4-w4a8", "linears"): "HummingMxFp4LinearKernel",
    ("mi300", "mxfp4", "experts"): "MarlinExperts",
    ("mi300", "mxfp4-w4a4", "experts"): "MarlinExperts",
}


def config_of(scheme: str) -> dict[str, Any]:
    """The quantization_config that `quantize` writes."""
    with open_headers(STORYBOOK) as checkpoint:
        plan = make_plan(checkpoint, SCHEMES[scheme], WRITERS[compressed_tensors.NAME], [])
    return plan.layout.quantization_config(plan.modules, plan.kept, plan.kv)


@pytest.mark.parametrize("flashinfer", [True, False], ids=["flashinfer", "without"])
@pytest.mark.parametrize("machine", GPUS)
def test_vllm_chooses_the_kernels_that_check_names(machine: str, flashinfer: bool, tmp_path: Path) -> None:
    configs = {scheme: config_of(scheme) for scheme in SCHEMES}
    request = {"machine": machine, "flashinfer": flashinfer, "configs": configs}
    (chosen,) = run_script("vllm", "in_vllm_kernels.py", request, tmp_path, PYTHONPATH=vllm_for_gpus())
    case = Case(Subject(compressed_tensors.NAME, "llama", 1, 1, {}, ()), Target.of("vllm", machine))
    for scheme, by_part in chosen.items():
        kind = kind_of(SCHEMES[scheme].weight, SCHEMES[scheme].activation)
        for part, name in by_part.items():
            kernel = kernel_for(case, kind, experts=part == "experts")
            if kernel is None:
                assert name.startswith("refused: ") or STOPS_LATER[machine, scheme, part] == name
            else:
                other = "" if flashinfer else kernel.without_flashinfer.partition(",")[0]
                assert name == (other or kernel.name), (scheme, part)

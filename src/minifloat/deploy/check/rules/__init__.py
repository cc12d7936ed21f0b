"""The rules about checkpoints that an engine refuses, degrades or answers wrongly: one table per engine.

A rule is here because the engine's code or a thread of its maintainers says so (`source`), and where the engine could
be run, because the behaviour was observed (`confirmed_with`). A weight that neither a rule nor a row of
`check.engine_kernels.KERNELS` covers is reported as not known. To follow a newer version of an engine, read its
sources again and change `check.target.ENGINES`.

Left out: memory (`plan` counts it), speed beyond "slower than expected", and models that an engine does not implement.
"""

from __future__ import annotations

from collections.abc import Mapping

from minifloat.deploy.check.loading_rule import LoadingRule
from minifloat.deploy.check.rules import minifloat, sglang, transformers, vllm

#: Engine (a name in `check.target.ENGINES`) -> its rules, in the order in which findings are reported.
RULES: Mapping[str, tuple[LoadingRule, ...]] = {
    "vllm": vllm.RULES,
    "sglang": sglang.RULES,
    "transformers": transformers.RULES,
    "minifloat": minifloat.RULES,
}

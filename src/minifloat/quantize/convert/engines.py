"""What engines make of the output of a conversion, by the rules of `check`, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from minifloat.checkpoint import Checkpoint, TensorInfo
from minifloat.deploy.check.deployment import EngineVerdict, Reports, check_everywhere, others_that_load, short_name
from minifloat.deploy.check.subject import Subject
from minifloat.quantize.convert.plan import ConvertPlan


class PlannedCheckpoint(Checkpoint):
    """The config and the headers of a checkpoint that a plan writes; its tensors cannot be read."""

    def __init__(self, source: Checkpoint, plan: ConvertPlan) -> None:
        self.path, self.shards, self.metadata = source.path, source.shards, source.metadata
        self.ignored_files = ()
        self.config = plan.config
        self.quantization_config = plan.config.get("quantization_config")
        outputs = ((conversion.sources[0].shard, conversion.output) for conversion in plan.conversions)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {
                output.name: TensorInfo(output.name, output.dtype, output.shape, shard, 0, output.nbytes)
                for shard, output in outputs
                if output is not None
            }
        )


def check_output(source: Checkpoint, plan: ConvertPlan, model: str) -> Reports:
    """Return the report of every engine on every machine on the output of a plan."""
    return check_everywhere(Subject.of_checkpoint(PlannedCheckpoint(source, plan)), model)


def warnings_of(verdicts: tuple[EngineVerdict, ...]) -> Iterator[str]:
    """Yield a sentence for each engine that would answer wrongly, and one if only minifloat loads the output."""
    for verdict in verdicts:
        if verdict.wrong:
            cure = f"; {verdict.cure}" if verdict.cure else ""
            yield f"{short_name(verdict.engine)} loads the output and answers wrongly: {verdict.problem}{cure}."
    if not others_that_load(verdicts):
        yield "No engine but minifloat is known to load the output."

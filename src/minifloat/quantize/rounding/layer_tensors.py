"""The tensors of a model by their names in the checkpoint, as views of the parameters of a transformers model.

A change of a view changes the model. Experts are stacked in the model and mostly single in the checkpoint, so that a
tensor of the checkpoint is a slice of a parameter. A tensor that transformers converts in another way has no view.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from minifloat.checkpoint import TensorInfo
from minifloat.model.plan.tensor_plan import Part
from minifloat.model.runtime.names import Assignment


def layer_tensors(
    model: nn.Module, assignments: Iterable[Assignment], infos: Mapping[str, TensorInfo]
) -> dict[str, Tensor]:
    """Return the views of a layer's tensors by name in the checkpoint."""
    views: dict[str, Tensor] = {}
    for assignment in assignments:
        views |= assignment_views(assignment, parameter_of(model, assignment).data, infos)
    return views


def parameter_of(model: nn.Module, assignment: Assignment) -> Tensor:
    """Return the parameter or buffer that an assignment fills."""
    owner_path, _, leaf = assignment.target.rpartition(".")
    parameter: Tensor = getattr(model.get_submodule(owner_path), leaf)
    return parameter


def assignment_views(assignment: Assignment, parameter: Tensor, infos: Mapping[str, TensorInfo]) -> dict[str, Tensor]:
    """Return the views of a parameter, or of a tensor of its shape, by name in the checkpoint."""
    if assignment.converter is None:
        return {assignment.sources[0]: parameter}
    views: dict[str, Tensor] = {}
    for expert, sources in enumerate(assignment.expert_parts() or ()):
        matrix, first = parameter[expert], 0
        rows = sum(infos[source].shape[0] for source in sources)
        matrix = matrix if matrix.shape[0] == rows else matrix.T
        for source in sources:
            stop = first + infos[source].shape[0]
            views[source], first = matrix[first:stop], stop
    return views


def part_view(tensor: Tensor, part: Part) -> Tensor:
    """Return the weight ``[N, K]`` of a part, as a view of its source tensor."""
    if tensor.ndim > 2:
        tensor = tensor[part.matrix].T if part.transposed else tensor[part.matrix]
    return tensor[part.first_row : part.first_row + part.shape[0]]

"""The tree of all errors that a user can cause.

    MinifloatError
    ├── UsageError                    the request itself is wrong
    │   ├── UnknownNameError          a scheme, layout or rule does not exist; lists the valid names
    │   ├── PatternError              a regular expression does not compile or matches nothing
    │   ├── DestinationError          the output folder exists, or cannot be created there
    │   ├── DataError                 calibration text is missing, empty, too short or unreadable
    │   ├── ChatTemplateError         a chat template refuses messages, is not valid, or takes too much time or memory
    │   └── ContextLengthError        a prompt leaves no room in the model's context
    ├── CheckpointError               a file of the checkpoint is invalid
    │   ├── NotACheckpointError       no config.json, no safetensors
    │   ├── UnsafeFileError           a pickle file, or a name or link that leads out of the folder
    │   ├── HeaderError               a safetensors header contradicts its file or itself
    │   ├── ShardIndexError           the shard index contradicts the shards
    │   ├── ConfigError               config.json or its quantization_config cannot be read
    │   └── StatsError                activation statistics are damaged, of another version or of another model
    ├── TensorError                   one tensor cannot be handled; `.tensor` names it
    │   ├── NonFiniteError            NaN or Inf where a finite number is needed
    │   ├── ShapeError                the shape does not fit the scheme
    │   └── UnsupportedTensorError    the operation does not support the dtype or the role
    ├── NotCalibratedError            calibration gave some modules too few inputs for a scale; `.modules` names them
    ├── SingularHessianError          the inputs of a linear allow no error compensation; the message names it
    ├── SaturationError               static scales saturate more activations of held-out text than allowed
    ├── ConversionError               a checkpoint cannot be converted to another layout without loss
    ├── AlreadyQuantizedError         the source has a quantization_config already
    ├── KernelUnavailable             the requested implementation cannot run on this machine
    ├── QueueFull                     the engine's waiting queue is full
    ├── EngineStopped                 the engine is shutting down or has failed
    ├── HubError                      a model cannot be fetched from the hub or pushed to it; `.model` names it
    └── StorageError                  the operating system refused a read or write: disk full, no permission

Every message names the file or tensor, what was expected, what was found, and the cure. The command line prints
the message as one line and exits with status 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar


class MinifloatError(Exception):
    """Base class of every error that this package raises on purpose."""


class UsageError(MinifloatError):
    """The request itself is wrong; nothing was read or written."""


class UnknownNameError(UsageError):
    """The requested name does not exist.

    Args:
        kind: Noun for the kind of thing, for example ``"scheme"``.
        name: The requested name.
        valid: All valid names.
    """

    def __init__(self, kind: str, name: str, valid: Iterable[str]) -> None:
        self.kind, self.name, self.valid = kind, name, tuple(valid)
        super().__init__(f"unknown {kind} {name!r}; valid: {', '.join(self.valid)}")


_Entry = TypeVar("_Entry")


def lookup(kind: str, name: str, table: Mapping[str, _Entry]) -> _Entry:
    """Return ``table[name]``; an unknown name is an `UnknownNameError` that lists the valid ones."""
    try:
        return table[name]
    except KeyError:
        raise UnknownNameError(kind, name, table) from None


class PatternError(UsageError):
    """A regular expression does not compile, or matches no module of the checkpoint."""


class DestinationError(UsageError):
    """The output folder exists already, or its parent does not."""


class DataError(UsageError):
    """The text for calibration is missing, empty, too short or unreadable."""


class ChatTemplateError(UsageError):
    """A chat template refuses the messages, is not valid, or takes too much time or memory."""


class ContextLengthError(UsageError):
    """The prompt leaves no room for an answer in the model's context."""


class CheckpointError(MinifloatError):
    """A file of the checkpoint is invalid.

    Args:
        path: The invalid file or folder.
        problem: What was expected and what was found.
    """

    def __init__(self, path: Path | str, problem: str) -> None:
        self.path, self.problem = Path(path), problem
        super().__init__(f"{path}: {problem}")


class NotACheckpointError(CheckpointError):
    """The folder has no config.json or no safetensors files."""


class UnsafeFileError(CheckpointError):
    """The file is a pickle file or not a regular file, or its name or link leads out of the checkpoint's folder."""


class HeaderError(CheckpointError):
    """The safetensors header contradicts its file or itself."""


class ShardIndexError(CheckpointError):
    """model.safetensors.index.json contradicts the shards beside it."""


class ConfigError(CheckpointError):
    """config.json, or its quantization_config, cannot be read or is not supported."""


class StatsError(CheckpointError):
    """The activation statistics are damaged, of another version, or of another model."""


class TensorError(MinifloatError):
    """One tensor cannot be handled.

    Args:
        tensor: Name of the tensor in the checkpoint.
        problem: What was expected, what was found, and the cure.
    """

    def __init__(self, tensor: str, problem: str) -> None:
        self.tensor = tensor
        super().__init__(f"{tensor}: {problem}")


class NonFiniteError(TensorError):
    """NaN or Inf where a finite number is needed."""


class ShapeError(TensorError):
    """The shape of the tensor does not fit the scheme."""


class UnsupportedTensorError(TensorError):
    """The operation does not support the dtype or the role of the tensor."""


_SHOWN_MODULES = 8  #: modules that a message names; the message counts the rest


class NotCalibratedError(MinifloatError):
    """Calibration gave these modules too few inputs to choose a scale.

    Args:
        modules: Names of the modules in the checkpoint.
        problem: What is missing, and the cure.
    """

    def __init__(self, modules: Iterable[str], problem: str) -> None:
        self.modules = tuple(modules)
        shown = ", ".join(self.modules[:_SHOWN_MODULES])
        more = len(self.modules) - _SHOWN_MODULES
        super().__init__(f"{shown}{f' and {more} more' if more > 0 else ''}: {problem}")


class SingularHessianError(MinifloatError):
    """The second moments of the inputs of a linear are not finite, or not positive definite with any damping."""


class SaturationError(MinifloatError):
    """Static scales would saturate more activations of the held-out text than the caller allows."""


class ConversionError(MinifloatError):
    """The quantized checkpoint cannot be converted to the other layout without loss; nothing was written."""


class AlreadyQuantizedError(MinifloatError):
    """The source is quantized already; quantizing it again would round its weights twice."""


class KernelUnavailable(MinifloatError):
    """The requested implementation cannot run on this machine."""


class QueueFull(MinifloatError):
    """The engine's waiting queue is full; the same request may succeed later."""


class EngineStopped(MinifloatError):
    """The engine is shutting down or has failed, and takes no requests."""


class HubError(MinifloatError):
    """The hub has no such model, refuses the request, or cannot be reached.

    Args:
        model: Id of the model.
        problem: What went wrong, and the cure.
    """

    def __init__(self, model: str, problem: str) -> None:
        self.model = model
        super().__init__(f"{model}: {problem}")


class StorageError(MinifloatError):
    """The operating system refused a read or a write (disk full, no permission)."""

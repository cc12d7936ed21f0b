"""Tasks by name with their data, read from task files and the local cache; the hub is the last resort.

Without a network, the hub's libraries retry for half a minute, and longer where packets are lost. So they first read
only their caches. The hub gets a request only for missing data, and only if it answers within seconds.

Left out: tasks that run generated code, and tasks with images; the harness refuses them.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minifloat.calibration.readers import first_line
from minifloat.errors import DataError, MinifloatError, UnknownNameError, UsageError
from minifloat.evaluate.compare.tasks.quiet import harness, quiet, replaced

_LOG = logging.getLogger(__name__)

_HUB_SECONDS = 5.0
#: Smallest HTTP status with which the hub, or a proxy before it, refuses all requests.
_SERVER_ERROR = 500
_NEAR_NAMES = 8


@dataclass(frozen=True)
class LoadedTasks:
    """Tasks with their data, which can be run any number of times."""

    names: tuple[str, ...]
    loaded: dict[str, Any]


# ------------------------------------------------------------------------------------------------- tasks


def load_tasks(
    tasks: Sequence[str], *, include_path: str | os.PathLike[str] | None = None, num_fewshot: int | None = None
) -> LoadedTasks:
    """Find tasks and read their data."""
    if isinstance(tasks, str) or not tasks:
        raise UsageError("tasks: expected the names of one or more tasks")
    if num_fewshot is not None and num_fewshot < 0:
        raise UsageError(f"expected 0 examples or more in each prompt, got {num_fewshot}")
    with quiet():
        manager = _manager(tasks, None if include_path is None else Path(include_path))
        built: list[Any] = []
        for name in _expanded(manager, tasks, include_path):
            entries = _read(manager, name)
            built.extend(list(entries["groups"].values())[:1] or entries["tasks"].values())
        try:
            loaded = manager.load(built)
        except ValueError as error:
            raise UsageError(f"tasks {', '.join(tasks)}: {first_line(error)}") from error
        for task in loaded["tasks"].values():
            if num_fewshot is not None and task.get_config("num_fewshot") != 0:
                task.set_config(key="num_fewshot", value=num_fewshot)
            elif task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
    return LoadedTasks(tuple(tasks), dict(loaded))


def _manager(tasks: Sequence[str], include_path: Path | None) -> Any:
    """Return the harness' index of tasks; its own tasks are indexed only if needed, because that takes seconds."""
    make = harness("lm_eval.tasks").TaskManager
    if include_path is not None and not include_path.is_dir():
        raise DataError(f"{include_path}: no such folder of task files")
    folder = None if include_path is None else str(include_path)
    manager = make(include_path=folder, include_defaults=False)
    missing = [name for name in tasks if not any(_complete(manager.task_index, n) for n in _names(manager, name))]
    if missing:
        _refuse_damaged(include_path)
        manager = make(include_path=folder)
    _find_beside_task_files(manager)
    return manager


def _find_beside_task_files(manager: Any) -> None:
    """Make the harness also find data beside the task file; it looks only in the current folder."""
    factory = manager._factory
    load = factory._load_full_config

    def load_and_find(entry: Any, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
        config: dict[str, Any] = load(entry, overrides)
        options = config.get("dataset_kwargs")
        if entry.yaml_path is not None and options and "data_files" in options:
            files = _beside(options["data_files"], Path(entry.yaml_path).parent)
            config["dataset_kwargs"] = {**options, "data_files": files}
        return config

    factory._load_full_config = load_and_find


def _beside(files: Any, folder: Path) -> Any:
    """Replace names of files, in lists or mappings, by paths in `folder` if the files exist only there."""
    if isinstance(files, dict):
        return {split: _beside(names, folder) for split, names in files.items()}
    if isinstance(files, list):
        return [_beside(name, folder) for name in files]
    return str((folder / files).resolve()) if not Path(files).exists() and (folder / files).exists() else files


def _names(manager: Any, name: str) -> list[str]:
    """Return the names in the index that a name or pattern stands for; for the path of a task file, the path."""
    if name in manager.task_index or _is_task_file(name):
        return [name]
    return sorted(manager.match_tasks([name])) if "*" in name else []


def _is_task_file(name: str) -> bool:
    return Path(name).suffix in (".yaml", ".yml") and Path(name).is_file()


def _complete(index: dict[str, Any], name: Any) -> bool:
    """Return whether an index has a name and all tasks that belong to it; paths of task files count as indexed."""
    entry = index.get(name) if isinstance(name, str) else None
    if entry is None:
        return isinstance(name, str) and _is_task_file(name)
    members = (entry.cfg or {}).get("task")
    for member in members if isinstance(members, list) else []:
        inner = member if isinstance(member, str) else member.get("task", member.get("group"))
        if not _complete(index, inner) and (isinstance(member, str) or "dataset_path" not in member):
            return False
    return True


def _expanded(manager: Any, tasks: Sequence[str], include_path: str | os.PathLike[str] | None) -> Iterator[str]:
    """Yield the names of all requested tasks, with patterns replaced by the names that they match."""
    for name in dict.fromkeys(tasks):
        if names := _names(manager, name):
            yield from names
        else:
            near = difflib.get_close_matches(name, manager.all_tasks, n=_NEAR_NAMES, cutoff=0.5)
            own = [] if include_path is None else [n for n, e in manager.task_index.items() if _within(e, include_path)]
            valid = dict.fromkeys([*near, *own[:_NEAR_NAMES]])
            raise UnknownNameError("task", name, valid or manager.all_tasks[:_NEAR_NAMES])


def _within(entry: Any, folder: str | os.PathLike[str]) -> bool:
    return entry.yaml_path is not None and Path(folder).resolve() in Path(entry.yaml_path).resolve().parents


def _refuse_damaged(include_path: Path | None) -> None:
    """Raise an error for the first task file that cannot be read; the harness skips it, so its task seems missing."""
    read = harness("lm_eval.tasks._yaml_loader").load_yaml
    for path in [] if include_path is None else sorted(include_path.rglob("*.yaml")):
        try:
            read(path, resolve_func=False)
        except Exception as error:  # a class of yaml or of the harness
            raise DataError(f"{path}: not a task file that can be read: {' '.join(str(error).split())}") from error


def _read(manager: Any, name: str) -> dict[str, Any]:
    """Load a task or group with its data, from the cache or else from the hub."""
    try:
        with _cache_only() as offline_requested:
            return _refuse_unknown_metrics(manager.load([name]))
    except MinifloatError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"task {name}: {first_line(error)}") from error
    except (OSError, ValueError) as error:
        if offline_requested or not _hub_answers():
            reason = "HF_HUB_OFFLINE is set" if offline_requested else "the hub does not answer"
            raise DataError(
                f"task {name}: its data cannot be read: {first_line(error)}; it is not cached, and the hub was not "
                f"used because {reason}"
            ) from error
    except Exception as error:  # a task file can be wrong in many ways, and run code of its own
        raise _unusable(name, error) from error
    try:
        return _refuse_unknown_metrics(manager.load([name]))
    except Exception as error:
        raise _unusable(name, error) from error


def _unusable(name: str, error: Exception) -> DataError:
    return DataError(f"task {name}: cannot be loaded: {type(error).__name__}: {first_line(error)}")


def _refuse_unknown_metrics(loaded: dict[str, Any]) -> dict[str, Any]:
    """Raise an error for a metric that does not exist; the harness would fail only after all answers."""
    for name, task in loaded["tasks"].items():
        if task.get_config("process_results") is not None:
            continue
        for metric, function in getattr(task, "_metric_fn_list", {}).items():
            if function is None:
                raise ConnectionError(f"{name}: lm-eval has no metric {metric!r}, and neither has the cache")
    return loaded


@contextlib.contextmanager
def _cache_only() -> Iterator[bool]:
    """Restrict the hub's libraries to their caches; yield whether HF_HUB_OFFLINE had already requested that."""
    hub, datasets, evaluate = map(harness, ("huggingface_hub.constants", "datasets.config", "evaluate.config"))
    with contextlib.ExitStack() as stack:
        offline_requested = bool(hub.HF_HUB_OFFLINE or datasets.HF_HUB_OFFLINE)
        for module, name in ((hub, "HF_HUB_OFFLINE"), (datasets, "HF_HUB_OFFLINE"), (evaluate, "HF_EVALUATE_OFFLINE")):
            stack.enter_context(replaced(module, name, True))
        yield offline_requested


def _hub_answers() -> bool:
    endpoint = harness("huggingface_hub.constants").ENDPOINT
    try:
        response = harness("huggingface_hub.utils").get_session().head(endpoint, timeout=_HUB_SECONDS)
    except Exception as error:  # versions of the client raise different classes without a network
        _LOG.debug("%s does not answer: %s", endpoint, error)
        return False
    return bool(response.status_code < _SERVER_ERROR)

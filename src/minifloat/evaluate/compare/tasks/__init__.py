"""Two models on the same benchmark items, scored by lm-evaluation-harness (package lm-eval, from the extra `eval`).

A quantized model answers most items like the original, so only the items on which they differ tell them apart. The
intervals of the two separate scores are far too wide to show a loss of one percent; the interval of the paired
difference is not. Hence the result of every item is kept, both runs need the same items with the same prompts, and the
difference has an interval of its own. For items that are right or wrong, McNemar's exact test says how likely the
difference is by chance.

Left out: tasks that run generated code, and tasks with images.
"""

from minifloat.evaluate.compare.tasks.difference import TaskDifference, compare_tasks
from minifloat.evaluate.compare.tasks.loaded_tasks import LoadedTasks, load_tasks
from minifloat.evaluate.compare.tasks.results import TaskRun, TaskScore
from minifloat.evaluate.compare.tasks.score import run_tasks

__all__ = ["LoadedTasks", "TaskDifference", "TaskRun", "TaskScore", "compare_tasks", "load_tasks", "run_tasks"]

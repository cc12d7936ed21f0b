"""Two models on the same benchmark items, as lm-evaluation-harness (package lm-eval, of the extra `eval`) scores them.

A quantized model answers most items as the original does, so what tells them apart is the items on which they differ:
scores of the two models come with intervals far too wide to show a loss of one percent, the paired difference does not.
Hence every item's result is kept, both runs must have seen the same items with the same prompts, and the difference has
an interval of its own; for items that are right or wrong McNemar's exact test says how likely it is by chance.

Left out: tasks that run generated code, and tasks with images.
"""

from minifloat.compare.tasks.difference import TaskDifference, compare_tasks
from minifloat.compare.tasks.loaded_tasks import LoadedTasks, load_tasks
from minifloat.compare.tasks.results import TaskRun, TaskScore
from minifloat.compare.tasks.score import run_tasks

__all__ = ["LoadedTasks", "TaskDifference", "TaskRun", "TaskScore", "compare_tasks", "load_tasks", "run_tasks"]

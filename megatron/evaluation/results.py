"""Results of tasks: as JSON in the shape of lm-evaluation-harness's files, and as its table. Without torch."""

import json
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron.core.storage.atomic_file import atomic_file
from megatron.evaluation.eval_task_requests_and_metrics import Task
from megatron.evaluation.perplexity_and_mean_stderr import Metric

_FILTER = "none"  # lm-evaluation-harness has filters of generated text; log-likelihoods have none
VERSION = 1  # of all tasks here, whose formulas have not changed


class TaskResult(NamedTuple):
    """A task's metrics."""

    task: Task
    metrics: Mapping[str, Metric]


def as_json(results: list[TaskResult], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results in the shape of lm-evaluation-harness's result files. config: how they were computed."""
    by_task: dict[str, dict[str, Any]] = {}
    for task, metrics in results:
        values: dict[str, Any] = {"alias": task.name}
        for name, metric in metrics.items():
            values[f"{name},{_FILTER}"] = metric.value
            values[f"{name}_stderr,{_FILTER}"] = "N/A" if metric.stderr is None else metric.stderr
        by_task[task.name] = values
    names = [task.name for task, _ in results]
    return {
        "results": by_task,
        "group_subtasks": {name: [] for name in names},
        "configs": {task.name: {"task": task.name, "output_type": task.kind} for task, _ in results},
        "versions": dict.fromkeys(names, VERSION),
        "n-shot": dict.fromkeys(names, 0),
        "higher_is_better": {
            task.name: {name: metric.higher_is_better for name, metric in metrics.items()} for task, metrics in results
        },
        "n-samples": {task.name: {"original": task.num_samples, "effective": task.num_samples} for task, _ in results},
        "config": dict(config),
        "date": time.time(),
    }


def write_json(path: str, content: Mapping[str, Any]) -> None:
    """Write results to a file, whole or not at all. Numbers that JSON lacks, such as infinity, are strings."""
    text = json.dumps(_finite(content), indent=2, ensure_ascii=False)
    with atomic_file(path) as file:
        file.write((text + "\n").encode())


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def table(results: list[TaskResult]) -> str:
    """Return the results as a table in Markdown, with lm-evaluation-harness's columns."""
    header = ("Tasks", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr")
    rows = []
    for task, metrics in results:
        first = (task.name, str(VERSION), _FILTER, "0")
        for name, metric in sorted(metrics.items()):
            arrow = "↑" if metric.higher_is_better else "↓"
            stderr = "N/A" if metric.stderr is None else f"{metric.stderr:.4f}"
            rows.append((*first, name, arrow, f"{metric.value:.4f}", "±", stderr))
            first = ("", "", _FILTER, "0")
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [_line(header, widths), "|" + "|".join("-" * width for width in widths) + "|"]
    return "\n".join(lines + [_line(row, widths) for row in rows])


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    return "|" + "|".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + "|"

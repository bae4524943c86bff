"""Definitions of lm-evaluation-harness's tasks to ours, where they are simple: local JSONL, templates, no few-shot examples.

    task: geography
    dataset_path: json
    dataset_kwargs: {data_files: {test: geography.jsonl}}      relative to the definition
    test_split: test
    output_type: multiple_choice                                or loglikelihood, loglikelihood_rolling
    doc_to_text: "Question: {{question}}\\nAnswer:"              a template, or the name of a field
    doc_to_choice: "{{[right, wrong]}}"                         a template of a list, a field, or a list
    doc_to_target: 0                                            a number, a field, or a template
    metric_list: [{metric: acc}, {metric: acc_norm}]

All else a definition may say is refused by name: the adapter (tools/evaluate.py --lm-eval-tasks) runs it in
lm-evaluation-harness itself. Templates run in jinja2's sandbox, yaml is read as data.
"""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.lazy_imports import optional_package
from megatron.evaluation.eval_task_requests_and_metrics import (
    ChoiceTask,
    LikelihoodTask,
    Question,
    Task,
    TextTask,
    limited,
    plain_document,
)

Records = list[tuple[int, dict[str, Any]]]  # line number, record

_NEEDED = ("task", "dataset_kwargs", "output_type", "doc_to_target")
_READ = (
    *_NEEDED,
    "dataset_path",
    "doc_to_text",
    "doc_to_choice",
    "test_split",
    "validation_split",
    "target_delimiter",
    "metric_list",
)
# without effect on what is computed here
_IGNORED = (
    "tag",
    "metadata",
    "training_split",
    "fewshot_split",
    "should_decontaminate",
    "doc_to_decontamination_query",
    "dataset_name",
    "num_fewshot",
    "repeats",
)
_METRICS = {
    "multiple_choice": ("acc", "acc_norm", "acc_bytes"),
    "loglikelihood": ("perplexity", "acc"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
}
_ADVICE = "run it by --lm-eval-tasks, in lm-evaluation-harness itself"


def read_harness_task(path: str, text: str, read_records: Callable[[str], Records], limit: int | None) -> Task:
    """Return the task of a definition. read_records(data file) -> its records. Raises ConfigError."""
    yaml = optional_package("yaml", f"the definition {path}")
    try:
        definition = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no yaml that is data alone: {' '.join(str(error).split())}; {_ADVICE}") from None
    if not isinstance(definition, dict):
        raise ConfigError(f"{path} holds no mapping; a definition has {', '.join(_NEEDED)}")
    _check_keys(path, definition)

    # the data
    kind = definition["output_type"]
    records = read_records(_data_file(path, definition))
    if not records:
        raise ConfigError(f"{path}: its data file has no line")
    records = limited(records, limit)
    templates = _Templates(path)

    # the samples
    name = str(definition["task"])
    metrics = _metric_names(path, definition, kind)
    if kind == "loglikelihood_rolling":
        texts = [str(templates.value(definition["doc_to_target"], record)) for _, record in records]
        return TextTask(name, [plain_document(one) for one in texts])
    contexts = [str(templates.value(definition.get("doc_to_text", ""), record)) for _, record in records]
    targets = [templates.value(definition["doc_to_target"], record) for _, record in records]
    if kind == "loglikelihood":
        return LikelihoodTask(name, list(zip(contexts, map(str, targets))), metrics)
    questions = []
    for (number, record), context, target in zip(records, contexts, targets, strict=True):
        choices = templates.value(definition["doc_to_choice"], record)
        choices = _literal(choices) if isinstance(choices, str) else choices
        place = f"{path}, line {number} of its data"
        if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
            raise ConfigError(f"{place}: doc_to_choice gives {choices!r:.60}, not a list of two texts or more")
        gold = target if isinstance(target, int) else (_literal(str(target)) if target not in choices else target)
        if isinstance(gold, str):
            gold = choices.index(gold) if gold in choices else gold
        if isinstance(gold, bool) or not isinstance(gold, int) or not 0 <= gold < len(choices):
            raise ConfigError(f"{place}: doc_to_target gives {target!r:.60}, which is no choice of {len(choices)}")
        questions.append(Question(context, choices, [gold]))
    return ChoiceTask(name, questions, str(definition.get("target_delimiter", " ")), metrics)


def _check_keys(path: str, definition: dict[str, Any]) -> None:
    if missing := [key for key in _NEEDED if key not in definition]:
        raise ConfigError(f"{path} lacks {', '.join(missing)}")
    if unknown := sorted(map(str, definition.keys() - {*_READ, *_IGNORED})):
        raise ConfigError(f"{path} has {', '.join(unknown)}, which is not read here; {_ADVICE}")
    kind = definition["output_type"]
    if kind not in _METRICS:
        raise ConfigError(f"{path}: output_type is {kind!r}, not one of {', '.join(_METRICS)}; {_ADVICE}")
    if kind == "multiple_choice" and "doc_to_choice" not in definition:
        raise ConfigError(f"{path} lacks doc_to_choice, which multiple_choice needs")
    if definition.get("num_fewshot"):
        raise ConfigError(
            f"{path}: num_fewshot is {definition['num_fewshot']}, and no examples are shown here; {_ADVICE}"
        )
    if definition.get("dataset_path", "json") != "json":
        raise ConfigError(
            f"{path}: dataset_path is {definition['dataset_path']!r}, and only json, a local file, is read here"
        )


def _data_file(path: str, definition: dict[str, Any]) -> str:
    """Return the data file of the split to evaluate."""
    kwargs = definition["dataset_kwargs"]
    files = kwargs.get("data_files") if isinstance(kwargs, dict) else None
    split = definition.get("test_split") or definition.get("validation_split")
    if isinstance(files, dict):
        files = files.get(split)
    if isinstance(files, list) and len(files) == 1:
        (files,) = files
    if not isinstance(files, str):
        raise ConfigError(f"{path}: dataset_kwargs has no data_files of one file for the split {split!r}")
    return str(Path(path).parent / files)


def _metric_names(path: str, definition: dict[str, Any], kind: str) -> tuple[str, ...]:
    metrics = definition.get("metric_list")
    if metrics is None:
        return _METRICS[kind]
    names = tuple(metric.get("metric") if isinstance(metric, dict) else metric for metric in metrics)
    if unknown := [str(name) for name in names if name not in _METRICS[kind]]:
        raise ConfigError(f"{path}: metric {', '.join(unknown)} is not one of {', '.join(_METRICS[kind])}; {_ADVICE}")
    return names


def _literal(text: str) -> Any:
    """Return what a Python literal says, such as the list of a template's result; another text as it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


class _Templates:
    """Renders the templates of a definition over records."""

    def __init__(self, path: str):
        self.path = path
        self.environment: Any = None

    def value(self, source: Any, record: dict[str, Any]) -> Any:
        """Return a field's value for its name, a rendered template, or anything else as it is."""
        if not isinstance(source, str):
            return source
        if source in record:
            return record[source]
        if "{{" not in source and "{%" not in source:
            return source
        sandbox = optional_package("jinja2.sandbox", f"the templates of {self.path}")
        jinja = optional_package("jinja2", f"the templates of {self.path}")
        if self.environment is None:
            self.environment = sandbox.ImmutableSandboxedEnvironment(
                undefined=jinja.StrictUndefined, keep_trailing_newline=True
            )
        try:
            return self.environment.from_string(source).render(**record)
        except (jinja.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.path}: the template {source!r:.60} fails: {error}") from None

"""Data files to tasks: what a file is follows from its name and from the keys of its first line. Without torch.

    FILE.jsonl      {"text": ..}                                        texts: perplexities
                    {"page": ..}                                        pages of WikiText, detokenized
                    {"context": .., "continuation": ..}                 log-likelihoods: accuracy and perplexity
                    {"context": .., "choices": [..], "gold": number}    multiple choice; gold may be a list, or a choice
    FILE.yaml       a definition of lm-evaluation-harness (`read_simple_harness_yaml`)
    PREFIX          PREFIX.bin and PREFIX.idx: documents of token ids
    another file    one text

`--task WIKITEXT103` and `--task LAMBADA` read a text, and {"text": ..}, as Megatron's tasks do.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets.mmap_indexed_dataset import IndexedDataset
from megatron.evaluation.eval_task_requests_and_metrics import (
    ChoiceTask,
    LambadaTask,
    LikelihoodTask,
    Question,
    Task,
    TextTask,
    TokenTask,
    WikitextTask,
    limited,
    plain_document,
    wikitext_page,
)
from megatron.evaluation.read_simple_harness_yaml import read_harness_task

TASKS = ("WIKITEXT103", "LAMBADA")  # Megatron's, which need no classification head


class ReadOptions(NamedTuple):
    """How data files are read."""

    task: str | None = None  # of TASKS
    strict_lambada: bool = False
    overlapping_eval: int = 32
    limit: int | None = None  # samples of each file
    target_delimiter: str = " "  # between the context and a choice


def read_tasks(paths: Iterable[str], options: ReadOptions) -> list[Task]:
    """Return the task of each data file. Raises ConfigError for what cannot be read, with the file and the line."""
    tasks = [read_task(path, options) for path in paths]
    names = [task.name for task in tasks]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two data files give results the name {name}; rename one, or evaluate them apart")
    return tasks


def read_task(path: str, options: ReadOptions) -> Task:
    """Return the task of one data file."""
    if os.path.exists(f"{path}.idx") and not os.path.isfile(path):
        if options.task is not None:
            raise ConfigError(f"--task {options.task} needs text, and {path} holds token ids; give the text")
        return _token_task(path, options)
    suffix = Path(path).suffix
    if suffix in (".bin", ".idx"):
        raise ConfigError(f"{path}: give a token file by its prefix, {path.removesuffix(suffix)}")
    text = _read_text(path)
    if suffix in (".yaml", ".yml"):
        return read_harness_task(path, text, lambda data: list(records_of(data, _read_text(data))), options.limit)
    name = Path(path).stem
    if suffix == ".jsonl":
        return _task_of_records(path, name, list(records_of(path, text)), options)
    if options.task == "WIKITEXT103":
        return WikitextTask("WIKITEXT103", text, options.overlapping_eval)
    if options.task == "LAMBADA":
        raise ConfigError(f'--task LAMBADA needs FILE.jsonl with a {{"text": ..}} on each line, not {path}')
    return TextTask(name, [plain_document(text)])


def _read_text(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"--data {path}: there is no such file, nor {path}.idx of a token file") from None
    except IsADirectoryError:
        raise ConfigError(f"--data {path} is a folder; give a file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--data {path} is not UTF-8 at byte {error.start}; give a text, or a token file") from None
    if not text.strip():
        raise ConfigError(f"--data {path} holds no text; give a file with something to evaluate on")
    return text


def records_of(path: str, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, record) of the lines of a JSONL file that are not empty."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number} is no JSON: {error}") from None
        if not isinstance(record, dict):
            raise ConfigError(f"{path}, line {number} is {type(record).__name__}, not an object in braces")
        yield number, record


def _token_task(path: str, options: ReadOptions) -> Task:
    try:
        dataset = IndexedDataset(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--data {path}: {error}") from None
    borders = dataset.document_indices.tolist()
    documents = []
    for first, past in limited(list(itertools.pairwise(borders)), options.limit):
        ids = [id for sequence in dataset[first:past] for id in sequence.tolist()]
        if ids:
            documents.append(ids)
    if not documents:
        raise ConfigError(f"--data {path} holds no token; give a file with something to evaluate on")
    return TokenTask(Path(path).name, documents)


# ---------------------------------------------------------------- records


def _task_of_records(path: str, name: str, records: list[tuple[int, dict[str, Any]]], options: ReadOptions) -> Task:
    """Return the task that the keys of the first record name."""
    keys = records[0][1].keys()
    chosen = [kind for kind in _KINDS if kind.keys <= keys]
    if not chosen:
        known = "; ".join(", ".join(sorted(kind.keys)) for kind in _KINDS)
        raise ConfigError(f"{path} has the keys {', '.join(sorted(keys)) or '(none)'}; a task has one of: {known}")
    kind = chosen[0]
    if options.task is not None and kind.keys != {"text"}:
        raise ConfigError(
            f'--task {options.task} reads {{"text": ..}}, and {path} has {", ".join(sorted(keys))}; leave out --task'
        )
    for number, record in records:
        if missing := sorted(kind.keys - record.keys()):
            raise ConfigError(f"{path}, line {number} lacks {', '.join(missing)}; each line needs what the first has")
        for key in kind.keys & {"text", "page", "context", "continuation"}:
            if not isinstance(record[key], str):
                raise ConfigError(f"{path}, line {number}: {key} is {record[key]!r:.40}, not a text")
    return kind.make(path, name, limited(records, options.limit), options)


def _text_task(path: str, name: str, records: list[tuple[int, dict[str, Any]]], options: ReadOptions) -> Task:
    texts = _filled(path, records, "text")
    if options.task == "LAMBADA":
        return LambadaTask("LAMBADA", texts, options.strict_lambada)
    if options.task == "WIKITEXT103":
        return WikitextTask("WIKITEXT103", "\n".join(texts), options.overlapping_eval)
    return TextTask(name, [plain_document(text) for text in texts])


def _page_task(path: str, name: str, records: list[tuple[int, dict[str, Any]]], options: ReadOptions) -> Task:
    return TextTask(name, [wikitext_page(page) for page in _filled(path, records, "page")])


def _filled(path: str, records: list[tuple[int, dict[str, Any]]], key: str) -> list[str]:
    for number, record in records:
        if not record[key].strip():
            raise ConfigError(f"{path}, line {number}: {key} holds no text; leave the line out")
    return [record[key] for _, record in records]


def _likelihood_task(path: str, name: str, records: list[tuple[int, dict[str, Any]]], options: ReadOptions) -> Task:
    for number, record in records:
        if not record["continuation"]:
            raise ConfigError(f"{path}, line {number}: continuation is empty; give a text")
    return LikelihoodTask(name, [(record["context"], record["continuation"]) for _, record in records])


def _choice_task(path: str, name: str, records: list[tuple[int, dict[str, Any]]], options: ReadOptions) -> Task:
    questions = []
    for number, record in records:
        choices = record["choices"]
        is_list = isinstance(choices, list) and len(choices) > 1
        if not is_list or not all(isinstance(choice, str) and choice for choice in choices):
            raise ConfigError(f"{path}, line {number}: choices is {choices!r:.40}, not a list of two texts or more")
        questions.append(
            Question(record["context"], choices, gold_of(record["gold"], choices, f"{path}, line {number}"))
        )
    return ChoiceTask(name, questions, options.target_delimiter)


def gold_of(gold: Any, choices: list[str], place: str) -> list[int]:
    """Return the numbers of the right choices, of a number, a choice, or a list of numbers. place: for errors."""
    if isinstance(gold, str) and gold in choices:
        return [choices.index(gold)]
    numbers = gold if isinstance(gold, list) else [gold]
    are_numbers = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
    if not numbers or not are_numbers or not all(0 <= number < len(choices) for number in numbers):
        raise ConfigError(
            f"{place}: gold is {gold!r:.40}; it must be the number of a choice, from 0 to {len(choices) - 1}, a list of them, "
            "or a choice"
        )
    return numbers


class _Kind(NamedTuple):
    keys: set[str]
    make: Callable[[str, str, list[tuple[int, dict[str, Any]]], ReadOptions], Task]


_KINDS = (
    _Kind({"context", "choices", "gold"}, _choice_task),
    _Kind({"context", "continuation"}, _likelihood_task),
    _Kind({"text"}, _text_task),
    _Kind({"page"}, _page_task),
)

"""Data files become tasks by their name and first line; what cannot be read is one line: the place, and what to change."""

import json
from pathlib import Path

import pytest
from token_files import write

from megatron.core.base.dataclass_flags import ConfigError
from megatron.evaluation.eval_task_requests_and_metrics import (
    ChoiceTask,
    LambadaTask,
    LikelihoodTask,
    TextTask,
    TokenTask,
    WikitextTask,
    wikitext_page,
)
from megatron.evaluation.read_tasks_by_first_line import ReadOptions, read_task, read_tasks


def lines(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_files_are_read_by_their_first_line(tmp_path: Path):
    (tmp_path / "book.txt").write_text("one\n\ntwo")
    book = read_task(str(tmp_path / "book.txt"), ReadOptions())
    assert isinstance(book, TextTask) and book.name == "book" and [d.text for d in book.documents] == ["one\n\ntwo"]
    texts = lines(tmp_path / "texts.jsonl", {"text": "a b"}, {"text": "c", "more": 1})
    assert [d.text for d in read_task(texts, ReadOptions()).documents] == ["a b", "c"]
    assert read_task(texts, ReadOptions(limit=1)).num_samples == 1
    assert read_task(texts, ReadOptions("LAMBADA", strict_lambada=True)) == LambadaTask("LAMBADA", ["a b", "c"], True)
    assert read_task(str(tmp_path / "book.txt"), ReadOptions("WIKITEXT103")) == WikitextTask(
        "WIKITEXT103", "one\n\ntwo", 32
    )
    pages = lines(tmp_path / "pages.jsonl", {"page": " = A = \n x , y"})
    assert list(read_task(pages, ReadOptions()).documents) == [wikitext_page(" = A = \n x , y")]
    pairs = lines(tmp_path / "pairs.jsonl", {"context": "", "continuation": "b"})
    assert read_task(pairs, ReadOptions()) == LikelihoodTask("pairs", [("", "b")])
    asked = {"context": "q", "choices": ["a", "b"]}
    questions = lines(tmp_path / "q.jsonl", asked | {"gold": 1}, asked | {"gold": "a"}, asked | {"gold": [0, 1]})
    task = read_task(questions, ReadOptions(target_delimiter="\n"))
    assert (
        isinstance(task, ChoiceTask)
        and [q.gold for q in task.questions] == [[1], [0], [0, 1]]
        and task.delimiter == "\n"
    )
    prefix = write(tmp_path / "tokens", [[[1, 2], [3]], [], [[4]]])
    assert read_task(str(prefix), ReadOptions()) == TokenTask("tokens", [[1, 2, 3], [4]])


DEFINITION = """
task: geography
dataset_path: json
dataset_kwargs: {data_files: {test: data.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "Q: {{question}}"
doc_to_choice: "{{[right, wrong]}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""


def test_a_definition_of_the_harness(tmp_path: Path):
    pytest.importorskip("jinja2")
    lines(tmp_path / "data.jsonl", {"question": "where?", "right": "he're", "wrong": "there"})
    path = tmp_path / "geography.yaml"
    path.write_text(DEFINITION)
    task = read_task(str(path), ReadOptions())
    assert (task.name, task.metric_names) == ("geography", ("acc",))
    assert [tuple(question) for question in task.questions] == [("Q: where?", ["he're", "there"], [0])]
    for old, new, said in (
        ("doc_to_target: 0", "doc_to_target: 5", "5"),
        ("output_type: multiple_choice", "output_type: generate_until", "--lm-eval-tasks"),
        ("metric_list: [{metric: acc}]", "process_docs: !function utils.f", "--lm-eval-tasks"),
        ("metric_list: [{metric: acc}]", "process_docs: f", "process_docs"),
        ("metric_list: [{metric: acc}]", "metric_list: [{metric: f1}]", "f1"),
        ("test_split: test", "test_split: other", "other"),
        ("{{question}}", "{{questio}}", "questio"),
        ("{{question}}", "{{''.__class__.__mro__}}", "unsafe"),
        ("dataset_path: json", "dataset_path: allenai/ai2_arc", "local"),
        ("task: geography\n", "", "lacks task"),
        ("{{[right, wrong]}}", "{{right}}", "doc_to_choice"),
    ):
        path.write_text(DEFINITION.replace(old, new))
        with pytest.raises(ConfigError, match=said) as error:
            read_task(str(path), ReadOptions())
        assert "\n" not in str(error.value)


def test_what_cannot_be_read_is_one_line(tmp_path: Path):
    asked = {"context": "q", "choices": ["a", "b"], "gold": 0}
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text"')
    (tmp_path / "t.txt").write_text("a b")
    cases = {
        "empty.txt": "no text",
        "empty.jsonl": "no text",
        "binary.txt": "UTF-8 at byte 0",
        "broken.jsonl": "line 2",
        "missing.jsonl": "no such file",
        lines(tmp_path / "list.jsonl", [1]): "line 1 is list",
        lines(tmp_path / "keys.jsonl", {"prompt": "a"}): "keys prompt; a task has one of",
        lines(tmp_path / "lacks.jsonl", asked, {"context": "q", "choices": ["a", "b"]}): "line 2 lacks gold",
        lines(tmp_path / "gold.jsonl", asked | {"gold": 2}): "from 0 to 1",
        lines(tmp_path / "one.jsonl", asked | {"choices": ["a"]}): "two texts",
        lines(tmp_path / "number.jsonl", {"text": 5}): "text is 5",
        lines(tmp_path / "blank.jsonl", {"text": " "}): "holds no text",
        lines(tmp_path / "nothing.jsonl", {"context": "a", "continuation": ""}): "continuation is empty",
        "": "a folder",
        write(tmp_path / "none", []): "no token",
        f"{tmp_path / 'none'}.bin": "by its prefix",
    }
    for path, said in cases.items():
        with pytest.raises(ConfigError, match=said) as error:
            read_task(str(tmp_path / path), ReadOptions())
        assert "\n" not in str(error.value)
    for path, options, said in (
        ("t.txt", ReadOptions("LAMBADA"), "jsonl"),
        ("gold.jsonl", ReadOptions("LAMBADA"), "leave out --task"),
        ("none", ReadOptions("LAMBADA"), "needs text"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_task(str(tmp_path / path), options)
    with pytest.raises(ConfigError, match="two data files"):
        read_tasks([str(tmp_path / "t.txt")] * 2, ReadOptions())

"""tests/golden.py tells two records apart by the entry and the part that differ, and says the same of the same code."""

import json
import subprocess
import sys
from pathlib import Path

import golden
import golden_entries
import pytest
import torch
from layout_space import covering_cases

GROUPS = {
    *(
        "layout",
        "zero",
        "t5",
        "bert",
        "context",
        "muon",
        "half",
        "regions",
        "engine",
        "generation",
        "convert",
        "memory",
    ),
    *("schedule", "initial", "manifest", "help"),
}


def test_differences_are_named_by_entry_and_part(tmp_path, capsys):
    before = {"a/1": {"losses": ["0x1"], "ledger": [[0]]}, "b": "text", "c": {"x": {"y": {"z": 1}}}, "gone": 1}
    after = {"a/1": {"losses": ["0x2"], "ledger": [[0]]}, "b": "other", "c": {"x": {"y": {"z": 2}}}, "new": 1}
    found = ["a/1: losses", "b: the text", "c: x/y", "gone: only before", "new: only after"]
    assert golden.differences(before, after) == found and golden.differences(before, before) == []
    for name, record in (("before", before), ("after", after)):
        (tmp_path / name).write_text(json.dumps(record))
    assert golden.main(["compare", str(tmp_path / "before"), str(tmp_path / "after")]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "5 of 5 entries differ"
    assert golden.main(["compare", str(tmp_path / "before"), str(tmp_path / "before")]) == 0


def test_help_texts_differ_without_failing_unless_asked(tmp_path, capsys):
    for name, text in (("before", "usage: a"), ("after", "usage: b")):
        (tmp_path / name).write_text(json.dumps({"help/a.py": text, "initial/gpt2": {}}))
    records = [str(tmp_path / "before"), str(tmp_path / "after")]
    assert golden.main(["compare", *records]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == ["0 of 2 entries differ", "help texts differ, which is no failure without --help-too: 1"]
    assert golden.main(["compare", *records, "--help-too"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 2 entries differ"


def test_a_part_is_compared_with_a_whole_record(tmp_path):
    for name, made in (
        ("whole", {"a/1": 1, "a/2": 2}),
        ("part", {"a/1": 1}),
        ("wrong", {"a/2": 1}),
        ("none", {"b": 1}),
    ):
        (tmp_path / name).write_text(json.dumps(made))
    whole = str(tmp_path / "whole")
    assert golden.main(["compare", whole, str(tmp_path / "part")]) == 1
    assert golden.main(["compare", whole, str(tmp_path / "part"), "--shared"]) == 0
    assert golden.main(["compare", whole, str(tmp_path / "wrong"), "--shared"]) == 1
    with pytest.raises(SystemExit, match="nothing to compare"):
        golden.main(["compare", whole, str(tmp_path / "none"), "--shared"])


def test_entries_are_chosen_by_what_their_names_begin_with():
    names = ["zero/a", "zero/b", "zero/c", "t5/a", "help/a"]
    assert golden.chosen_names(names, "zero,t5", quick=False) == names[:4]
    assert golden.chosen_names(names, "zero/b,help", quick=False) == ["zero/b", "help/a"]
    assert golden.chosen_names(names, "", quick=True) == ["zero/a", "zero/b", "t5/a", "help/a"]


def test_an_entry_that_fails_is_left_out_and_says_why(capfd):
    def fails() -> None:
        print("what it printed")
        raise ValueError("what is wrong")

    makers = {"a/1": lambda: {"x": 1}, "a/2": fails, "a/3": lambda: None}
    assert golden.record(makers, processes=2) == ({"a/1": {"x": 1}, "a/3": None}, ["a/2"])
    said = capfd.readouterr().err
    assert "what it printed" in said and "what is wrong" in said and "FAILED: a/2" in said


def test_a_digest_is_of_names_types_shapes_and_bits():
    x = torch.tensor([0.0, 1.0])
    others = [{"b": x}, {"a": x.double()}, {"a": x.view(2, 1)}, {"a": torch.tensor([-0.0, 1.0])}, {"a": x[:1]}]
    assert len({golden_entries.digest(tensors) for tensors in ({"a": x}, *others)}) == 6


@pytest.mark.sweep
def test_tests_from_before_a_move_record_what_was_moved(tmp_path: Path):
    """A module of the product, and all who import it, have another name; its tests are those of now, which know the old one."""
    product, records = tmp_path / "product", [tmp_path / "before.json", tmp_path / "after.json"]
    product.mkdir()
    golden.put_copy(str(golden.ROOT), product)
    for path in [path for folder in ("megatron", "tools") for path in (product / folder).rglob("*.py")]:
        path.write_text(path.read_text().replace("megatron.core.sharding.boxes", "megatron.core.cut_boxes"))
    (product / "megatron/core/sharding/boxes.py").rename(product / "megatron/core/cut_boxes.py")
    table = product / "tests" / golden.TABLE
    only = ["--only", "initial,engine/one,manifest/gpt2-one"]
    subprocess.run(["git", "init", "-q", str(product)], check=True)

    def record_with(entries: dict[str, str]) -> int:
        table.write_text(json.dumps(entries))
        return golden.main(["record", str(records[1]), "--product", str(product), "--harness", str(golden.ROOT), *only])

    assert record_with({}) != 0, "without the table the old name is not found"
    assert record_with({"megatron.core.sharding.boxes": "megatron.core.cut_boxes"}) == 0
    here = [sys.executable, str(golden.ROOT / "tests/golden.py"), "record", str(records[0]), *only]
    subprocess.run(here, check=True)
    assert golden.main(["compare", *map(str, records)]) == 0 and len(json.loads(records[1].read_text())) == 4


@pytest.mark.sweep
def test_the_same_code_has_the_same_record():
    case = min(covering_cases(2), key=lambda case: case.cost)
    assert golden_entries.of_layout(case) == golden_entries.of_layout(case)


@pytest.mark.sweep  # the triples take seconds to find
def test_the_record_has_every_triple_and_an_entry_of_every_kind():
    names = [name for name, _ in golden_entries.entries()]
    assert len(names) == len(set(names)) and sum(name.startswith("layout/") for name in names) == len(covering_cases(3))
    assert {name.split("/")[0] for name in names} == GROUPS

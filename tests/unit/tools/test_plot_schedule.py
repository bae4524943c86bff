"""tools/plot_schedule.py: what it prints and writes, what it says to mistakes, and that it needs no torch."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from said import tells

from megatron.core.pipeline_parallel.schedule.actions import Op
from megatron.core.pipeline_parallel.schedule.registry import SCHEDULES
from tools.plot_context import main as draw_context
from tools.plot_schedule import PlotConfig, main, schedules_page

ROOT = Path(__file__).resolve().parents[3]


def printed(capsys, *arguments):
    assert main(list(arguments)) == 0
    return capsys.readouterr().out.splitlines()


def test_prints_plot_bubble_and_memory(capsys):

    arguments = ["--schedule", "zb-h1", "--pipeline-model-parallel-size", "2", "--microbatches", "3"]
    assert printed(capsys, *arguments) == [
        "zb-h1: 2 ranks, 3 microbatches, 1 chunk per rank; F takes 1, I takes 1, W takes 1",
        "rank 0 |F0F1  I0W0F2I1W1I2W2|",
        "rank 1 |  F0I0F1I1W0F2I2W1W2|",
        "time         10 (10 forwards of a rank's layers)",
        "bubble       11.11% of the compute (closed form: 11.11%)",
        "activations  2 x 2 alive at most, by rank (closed form: 2 x 2)",
    ]
    assert printed(
        capsys, "--schedule", "interleaved", "--pipeline-model-parallel-size", "1", "--microbatches", "1"
    ) == [
        "interleaved: 1 rank, 1 microbatch, 2 chunks per rank; F takes 1, B takes 2",
        "rank 0 |F0f0b0--B0--|",
        "time         6 (3 forwards of a rank's layers)",
        "bubble       0.00% of the compute (closed form: 0.00%)",
        "activations  2 alive at most, by rank (closed form: 2), each 1/2 of a rank's",
    ]


def test_all_prints_every_schedule_that_fits_and_why_another_does_not(capsys):
    names = [line.split(":")[0] for line in printed(capsys, "--all") if " takes " in line]
    assert names == list(SCHEDULES)
    lines = printed(capsys, "--all", "--microbatches", "6", "--transfer-cost", "0.5")
    left_out = [line for line in lines if line.startswith("left out")]
    assert tells(left_out[0], "num_microbatches 6 4")
    assert tells(left_out[0], "1f1b --microbatches")
    assert tells(left_out[1], "zb-interleaved num_microbatches 6 4 zb-v")
    assert any(line.endswith("a transfer 0.5") for line in lines)
    assert any("closed form: none with transfers" in line for line in lines)


def test_writes_svg_and_trace_and_then_prints_the_plot_only_if_told(capsys, tmp_path):
    files = ["--svg", str(tmp_path / "plots/a.svg"), "--trace", str(tmp_path / "a.json")]
    assert not any(line.startswith("rank 0") for line in printed(capsys, *files))
    assert any(line.startswith("rank 0") for line in printed(capsys, *files, "--text"))
    title = ElementTree.parse(tmp_path / "plots/a.svg").getroot().find("{*}text").text
    assert title == "1f1b: p = 4, m = 8, v = 1, bubble 37.5%"
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    printed(capsys, "--all", *files)
    assert sorted(path.name for path in tmp_path.glob("*-*.json")) == sorted(f"a-{name}.json" for name in SCHEDULES)


def boxes_of(svg: Path) -> list[tuple[float, float, str]]:
    """(left, right, fill) of each action's box."""
    found = []
    for group in ElementTree.parse(svg).getroot().findall("{*}g"):
        box = group.find("{*}rect")
        left = float(box.get("x"))
        found.append((left, left + float(box.get("width")), box.get("fill")))
    return found


@pytest.mark.parametrize("names", [["1f1b", "zb-v"], ["zb-h1", "interleaved", "gpipe"], ["zb-interleaved", "1f1b"]])
def test_several_schedules_have_one_axis_on_which_a_rank_has_the_same_work(capsys, tmp_path, names):
    """Work: 4 microbatches of F 1 and B 2 on each of 4 ranks, however many chunks a rank has; by time and by length of the boxes."""
    svg = tmp_path / "several.svg"
    sizes = ["--microbatches", "4", "--chunks", "2"]
    lines = printed(capsys, "--schedule", *names, *sizes, "--svg", str(svg), "--text")
    boxes = boxes_of(svg)
    root = ElementTree.parse(svg).getroot()
    titles = [text.text.split(":")[0] for text in root.findall("{*}text") if text.get("font-size") == "15"]
    assert titles == names
    # the axis: a mark is where its number says
    marks = {text.text: float(text.get("x")) for text in root.findall("{*}text") if text.get("text-anchor") == "middle"}
    scale = (marks["10"] - marks["0"]) / 10
    assert sum(right - left for left, right, _ in boxes) / scale == pytest.approx(len(names) * 4 * 4 * 3, rel=1e-3)
    times = [float(line.split()[1]) for line in lines if line.startswith("time")]
    assert max(right for _, right, _ in boxes) == pytest.approx(marks["0"] + max(times) * scale, rel=1e-3)
    # the text: the cells of a rank are the same time in all
    bars = [len(line.partition("|")[2]) - 1 for line in lines if line.startswith("rank 0")]
    width = 2 * min(1, 1 / (2 if "interleaved" in " ".join(names) or "zb-v" in names else 1))
    assert bars == [pytest.approx(2 * time / (width / 2), abs=2) for time in times]


def test_a_legend_has_the_colour_of_every_kind_of_action(capsys, tmp_path):
    for names in (["1f1b", "zb-h1"], ["zb-v"]):
        printed(capsys, "--schedule", *names, "--svg", str(tmp_path / "a.svg"))
        used = {fill for _, _, fill in boxes_of(tmp_path / "a.svg")}
        squares = {
            box.get("fill") for box in ElementTree.parse(tmp_path / "a.svg").getroot().findall("{*}rect[@height='14']")
        }
        assert used < squares and len(squares) == len(used) + 1  # and that of idle time


@pytest.mark.parametrize("tool", [main, draw_context])
def test_the_ending_says_which_kind_of_file_is_written(capsys, tmp_path, tool):
    assert tool(["--svg", str(tmp_path / "new" / "x.png")]) == 0
    assert (tmp_path / "new" / "x.png").read_bytes().startswith(b"\x89PNG")
    assert tool(["--svg", str(tmp_path / "x.SVG")]) == 0
    assert (tmp_path / "x.SVG").read_text().startswith("<svg")
    capsys.readouterr()
    for name in ("x.pdf", "x", ".svg"):
        assert tool(["--svg", str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert tells(said, f"{name} .svg .png") and said.count("\n") == 1
    (tmp_path / "file").write_text("")
    for name in ("x.svg", "x.png"):
        assert tool(["--svg", str(tmp_path / "file" / name)]) == 1
        assert tells(capsys.readouterr().err, f"--svg {name}")


def test_a_schedule_of_a_fork_is_drawn_from_its_file(capsys, tmp_path):
    fork = f"{ROOT}/examples/minimal_fork/schedule.py:rounds"
    lines = printed(capsys, "--schedule", fork, "--pipeline-model-parallel-size", "2", "--microbatches", "4")
    assert lines[1] == "rank 0 |F0F1      B0--B1--F2F3      B2--B3--|" and "closed form: none known" in lines[-1]
    svg = tmp_path / "rounds.svg"
    printed(capsys, "--schedule", fork, "--svg", str(svg))
    assert "rounds" not in SCHEDULES and ElementTree.parse(svg).getroot().findall("{*}g")


BROKEN = """
from megatron.core.pipeline_parallel.schedule.gpipe_1f1b_zb_h1 import one_f_one_b
def short(p, m, v):
    rows = one_f_one_b(p, m)
    return [rows[0][:-1], *rows[1:]]
no_function = 3
"""


NAMES_AND_SAID = [
    ("broken.py:short", ("short: rank 0 lacks B0.7",)),
    ("broken.py:no_function", ("broken.py has no function no_function",)),
    ("none.py:short", ("no file", "none.py")),
    ("raises.py:short", ("raises.py", "ZeroDivisionError")),
]


@pytest.mark.parametrize(("name", "says"), NAMES_AND_SAID)
def test_a_schedule_of_a_fork_that_cannot_train_is_refused_in_one_line(capsys, tmp_path, name, says):
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "raises.py").write_text("1 / 0")
    assert main(["--schedule", f"{tmp_path}/{name}"]) == 2
    error = capsys.readouterr().err
    assert all(text in error for text in says) and error.count("\n") == 1 and not set(SCHEDULES) & {"short"}


DERIVED_COSTS = [  # of F, B, I, W
    ({}, (1, 2, 1, 1)),
    ({"forward_cost": 3}, (3, 6, 3, 3)),
    ({"backward_cost": 5}, (1, 5, 2.5, 2.5)),
    ({"backward_cost": 5, "input_cost": 3}, (1, 5, 3, 2)),
    ({"weight_cost": 0.5}, (1, 2, 1.5, 0.5)),
    ({"input_cost": 2, "weight_cost": 1}, (1, 3, 2, 1)),
    ({"backward_cost": 2.5, "input_cost": 2, "weight_cost": 1}, (1, 2.5, 2, 1)),  # splitting may cost
]


@pytest.mark.parametrize("given, cost", DERIVED_COSTS)
def test_costs_that_are_not_given_follow_from_those_that_are(given, cost):
    assert PlotConfig(**given).cost == dict(zip((Op.F, Op.B, Op.I, Op.W), cost))


MISTAKES = [
    ("--schedule zb", "--schedule 1f1b zb-h1"),
    ("--chunks 2", "1f1b 2 --chunks"),
    ("--schedule zb-v --chunks 3", "zb-v 2 chunks 3 --chunks"),
    ("--schedule interleaved --chunks 0", "interleaved 0 1 --chunks"),
    ("--pipeline-schedule interleaved --microbatches 6", "num_microbatches 6 4 1f1b --microbatches"),
    ("--all --microbatches 0", "num_microbatches 0 1 --microbatches 1f1b"),
    ("--weight-cost 5", "--input-cost -3"),
    ("--transfer-cost -1", "--transfer-cost -1"),
    ("--transfer-cost inf", "--transfer-cost inf"),
    ("--forward-cost nan", "--forward-cost nan"),
    ("--svg a --trace a", "--svg --trace"),
    ("--microbatch 4", "--microbatch --microbatches"),
    ("--microbatches many", "--microbatches many"),
]


@pytest.mark.parametrize("arguments, message", MISTAKES)
def test_mistakes_are_told_in_one_line(capsys, arguments, message):
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and tells(err, f"plot_schedule {message}") and err.count("\n") == 1


def test_a_file_that_cannot_be_written_is_told_in_one_line(capsys, tmp_path):
    assert main(["--write-docs", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.full
def test_the_page_on_schedules_is_current(capsys, tmp_path):
    page = ROOT / "docs/schedules.md"
    assert page.read_text() == schedules_page(), (
        f"run: python tools/plot_schedule.py --write-docs {page.relative_to(ROOT)}"
    )
    printed(capsys, "--write-docs", str(tmp_path / "page.md"))
    assert (tmp_path / "page.md").read_text() == schedules_page()


def test_runs_where_torch_cannot_be_imported(tmp_path):
    for package in ("torch", "numpy"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('not here')")
    command = [sys.executable, str(ROOT / "tools/plot_schedule.py"), "--all", "--trace", str(tmp_path / "t.json")]
    environment = {"PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr
    assert "zb-h1: 4 ranks" in ran.stdout

"""A watched job over two processes, stopped and resumed: one file of metrics, a trace, and the log lines of an unwatched one."""

import json
import re
import shlex
from pathlib import Path

import pytest
from process_runs import GPT2, STEPS
from processes import Layout, pretrain

WATCHED = shlex.split(
    "--log-throughput --log-params-norm --log-num-zeros-in-grad --log-progress --timing-log-level 2 --timing-log-option max --barrier-with-level-1-timing --inspect 3"
)


@pytest.mark.full
def test_a_job_is_watched_over_a_restart(tmp_path):
    root, metrics = tmp_path / "saved", tmp_path / "metrics.jsonl"
    mock = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--train-iters", "4"]
    often = ["--log-interval", "1", "--eval-interval", "2", "--eval-iters", "1", "--save-interval", "2"]
    folders = ["--save", str(root), "--load", str(root), "--metrics-file", str(metrics)]
    profile = ["--profile", "--profile-step-start", "0", "--profile-step-end", "1"]
    flags, layout = [*GPT2, *STEPS, *mock, *often, *WATCHED, *folders], Layout(pp=2)
    first = pretrain([*flags, *profile], layout)
    entries = read(metrics)
    assert [(e["kind"], e["iteration"]) for e in entries if e["kind"] != "inspect"] == [
        ("interval", 1),
        ("interval", 2),
        ("validation", 2),
        ("interval", 3),
        ("interval", 4),
        ("validation", 4),
        ("validation", 4),
    ]
    assert {e["iteration"] for e in entries if e["kind"] == "inspect"} == {3}
    (root / "latest_checkpointed_iteration.txt").write_text("2\n")
    second = pretrain(flags, layout)
    assert [without_times(e) for e in read(metrics)] == [without_times(e) for e in entries]

    (line, *_) = [line for line in first.stdout[-1].splitlines() if " iteration " in line and "consumed" in line]
    assert re.search(r"\(ms\): \d+\.\d \| throughput per GPU \(TFLOP/s/GPU\): \d+\.\d \| learning rate: ", line)
    assert re.search(
        r"grad norm: \d+\.\d{3} \| num zeros: \d+\.0 \| params norm: \d+\.\d{3} \| number of skipped", line
    )
    assert second.stdout[-1].count("   progress: ") == 2 and "   progress: " not in second.stdout[0]
    assert second.stdout[-1].count("max time across ranks (ms):") == 2
    for name in ("forward-backward", "batch-generator", "forward-recv", "backward-send", "all-grads-sync"):
        assert f"    {name} ." in second.stdout[-1]
    (trace,) = (root / "profile").iterdir()
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"step 1", "F0.0", "B0.3"} <= names and any(str(name).startswith("send pp_forward (") for name in names)
    assert [line.split("\t")[3:] for line in (root / "progress.txt").read_text().splitlines()] == [
        ["Starting job"],
        ["Saved checkpoint", "Iteration: 2"],
        ["Saved checkpoint", "Iteration: 4"],
        ["Starting job"],
        ["Saved checkpoint", "Iteration: 4"],
    ]


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(entry: dict) -> dict:
    return {k: v for k, v in entry.items() if k not in ("iteration-time", "tokens-per-second", "throughput")}

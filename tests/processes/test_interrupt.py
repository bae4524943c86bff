"""Ctrl-C ends every rank with 130, in one line. Processes, because it is they that are signalled."""

import os
import signal
import subprocess
import sys

import pytest
from process_runs import GPT2, STEPS
from processes import PRETRAIN_GPT, ROOT, Layout, start
from said import tells

LONG = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--train-iters", "20000"]
LONG += ["--log-interval", "1", "--eval-iters", "0", "--save-interval", "2"]


@pytest.mark.parametrize(
    "layout, pressed", [(Layout(pp=2), range(2)), pytest.param(Layout(dp=2), [1], marks=pytest.mark.full)], ids=str
)
def test_an_interrupted_job_ends_in_one_line(layout, pressed, tmp_path):
    """Pressed at a terminal all ranks hear of it; of a signal to one of them the others are told."""
    with start([PRETRAIN_GPT, *GPT2, *STEPS, *LONG, "--save", str(tmp_path), *layout.flags], layout.ranks) as job:
        job.wait_for(lambda: "saved checkpoint at iteration 4" in job.stdout(0))
        for rank in pressed:
            job.processes[rank].send_signal(signal.SIGINT)
        ended = job.wait(30)
    saved = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert set(ended.codes) == {130}, ended
    lines = "".join(ended.stderr).splitlines()
    (farewell,) = [line for line in lines if line.startswith("interrupted after iteration ")]
    assert tells(farewell, f"{saved} --load {tmp_path}")
    told = [f"rank {rank}: stopping, because rank {pressed[0]} was interrupted" for rank in range(layout.ranks)]
    assert set(lines) - {farewell} <= set(told), ended
    assert len(pressed) > 1 or lines.count(told[0]) == 1, ended


# A run that is deaf to the signal: the first press leads nowhere.
DEAF = """
import time
from megatron.training.fault_tolerance import exit_on_ctrl_c as interrupt
interrupt._ONE_PRESS, interrupt._PATIENCE = 0.5, {patience}
with interrupt.ExitOnInterrupt(3):
    words = ["ready"]
    while True:
        try:
            print(*words, flush=True)
            words = []
            time.sleep(60)
        except KeyboardInterrupt:
            words = ["heard"]
"""


@pytest.mark.full
@pytest.mark.parametrize("patience, presses, why", [(1, 1, "the run did not end by itself"), (60, 2, "once more")])
def test_a_run_that_does_not_listen_ends_at_the_second_press_or_after_some_seconds(patience, presses, why):
    command = [
        sys.executable,
        "-c",
        "import signal; signal.signal(2, signal.default_int_handler)" + DEAF.format(patience=patience),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # of the launcher, at once: the same press
        assert process.stdout.readline() == "heard\n"
        if presses == 2:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.6)
            process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert tells(process.stderr.read(), f"3 {why}")


@pytest.mark.full
def test_a_background_job_of_a_shell_stays_deaf():
    """As `nohup` and `command &` ask for."""
    script = "import signal; signal.signal(2, signal.SIG_IGN)\nfrom megatron.training.fault_tolerance.exit_immediately_on_ctrl_c import ExitOnInterrupt\n"
    script += "with ExitOnInterrupt(0):\n    signal.raise_signal(2)\nprint('went on')"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "went on\n"), ran.stderr


@pytest.mark.full
def test_interrupted_preprocessing_ends_in_one_line_and_leaves_no_output(tmp_path):
    """Its workers are told nothing, so that one process speaks."""
    (tmp_path / "text.jsonl").write_text('{"text": "1 2 3"}\n' * 300_000)
    command = [str(ROOT / "tools/preprocess_data.py"), "--input", str(tmp_path / "text.jsonl"), "--workers", "2"]
    command += ["--output-prefix", str(tmp_path / "out"), "--log-interval", "1", *LONG[1:5]]
    with start(command) as job:
        job.wait_for(lambda: " docs/s" in job.stderr(0))
        os.killpg(job.processes[0].pid, signal.SIGINT)
        ended = job.wait(30)
    *progress, last = ended.stderr[0].splitlines()
    assert ended.codes == (130,) and tells(last, "preprocess_data")
    assert all(" docs/s" in line for line in progress), ended
    assert {path.name for path in tmp_path.iterdir()} == {"text.jsonl", "out.pieces"}

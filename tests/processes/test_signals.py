"""SIGTERM, SIGHUP, SIGUSR1 and SIGINT in each phase of a run: the exit code, what is said, what is saved. Processes, because they are signalled."""

from pathlib import Path

import pytest
from process_runs import GPT2, STEPS
from processes import run

SCRIPT = str(Path(__file__).with_name("hanging_script.py"))
MOCK = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--train-iters", "4"]
OFTEN = ["--log-interval", "1", "--eval-interval", "3", "--eval-iters", "1", "--save-interval", "2"]
ASKED = "--exit-signal-handler"

# (signal, where and how often before, flags) -> (exit code, what is said, the checkpoints that are there)
CASES = {
    ("SIGTERM building_the_model 1", ASKED): (0, "exiting at iteration 0, after SIGTERM", []),
    ("SIGUSR1 training 1", ""): (0, "SIGUSR1: this job's time may be nearly up. The run goes on", [2, 4]),
    ("SIGUSR1 training 3", ASKED): (0, "exiting at iteration 3, after SIGUSR1", [2, 3]),
    ("SIGUSR1 saving 1", ASKED): (0, "exiting at iteration 3, after SIGUSR1", [2, 3]),
    ("SIGUSR2 validating 1", f"{ASKED} --exit-signal usr2"): (0, "exiting at iteration 3, after SIGUSR2", [2, 3]),
    ("SIGTERM validating 2", ASKED): (0, "exiting before the test loss, after SIGTERM", [2, 4]),
    ("SIGTERM training 3", ""): (-15, "", [2]),
    ("SIGHUP building_the_model 1", ASKED): (0, "exiting at iteration 0, after SIGHUP", []),
    ("SIGHUP training 3", ASKED): (0, "exiting at iteration 3, after SIGHUP", [2, 3]),
    ("SIGHUP saving 1", f"{ASKED} --exit-signal usr2"): (0, "exiting at iteration 3, after SIGHUP", [2, 3]),
    ("SIGHUP validating 2", ASKED): (0, "exiting before the test loss, after SIGHUP", [2, 4]),
    ("SIGHUP training 3", ""): (-1, "", [2]),
    ("SIGINT saving 2", ""): (130, "interrupted after iteration 4; the last checkpoint is that of iteration 2", [2]),
}
THIN = list(CASES)[3]


@pytest.mark.parametrize(
    "sent, flags", [case if case == THIN else pytest.param(*case, marks=pytest.mark.full) for case in CASES]
)
def test_a_signal_ends_or_does_not_end_a_run_as_documented(sent, flags, tmp_path, monkeypatch):
    monkeypatch.setenv("HANG", f"0 {sent}")
    ended = run([SCRIPT, *GPT2, *STEPS, *MOCK, *OFTEN, "--save", str(tmp_path), *flags.split()], timeout=60)
    code, said, saved = CASES[sent, flags]
    assert ended.codes == (code,) and said in ended.everything, ended
    left = sorted(path.name for path in tmp_path.glob("iter_*"))
    assert left == [f"iter_{iteration:07}" for iteration in saved], ended
    assert "Traceback" not in ended.everything, ended

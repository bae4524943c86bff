"""A rank that hangs is named with the call in which it is missed, and ends the job with code 4. tests/campaigns/hang_campaign.py has all cases."""

import os
import re
import signal
from pathlib import Path

import pytest
from process_runs import GPT2, STEPS
from processes import Job, free_port

SCRIPT, LAUNCHER = (str(Path(__file__).with_name(f"{name}.py")) for name in ("hanging_script", "forking_launcher"))
MOCK = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--train-iters", "50"]
SOON = ["--hang-timeout", "3", "--hang-timeout-floor", "1", "--eval-iters", "0", "--log-interval", "50"]


@pytest.mark.parametrize(
    "hang, torchrun, said",
    [
        ("0 stop all_reduce@training 20", False, "over ranks 0, 1, and rank 0 did not come; training, iteration"),
        pytest.param("1 stop connecting 1", True, "has hung, while connecting", marks=pytest.mark.full),
        pytest.param("1 loop all_reduce@training 20", False, "and rank 1 did not come", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_hangs_is_named_and_ends_the_job(hang, torchrun, said, monkeypatch):
    monkeypatch.setenv("HANG", hang)
    words, victim = [SCRIPT, *GPT2, *STEPS, *MOCK, *SOON], int(hang[0])
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    with Job([[*launch, *words]] if torchrun else [words] * 2) as job:
        ended = job.wait(60)
    told = "".join(ended.stderr)
    (process,) = {line.split()[-1] for out in ended.stdout for line in out.splitlines() if "hanging in" in line}
    assert f"rank {victim} (on {os.uname().nodename}, process {process}) has hung" in told and said in told, ended
    assert f"rank {1 - victim}, most recent call first:" in told, ended
    if torchrun:
        assert ended.codes == (1,) and "exitcode  : 4" in told, ended
    else:
        code = -signal.SIGKILL if "stop" in hang else 4
        assert ended.codes == ((code, 4) if victim == 0 else (4, code)), ended
    if "stop" in hang:
        assert f"process {process}), which does not answer" in told and not os.path.exists(f"/proc/{process}"), ended


@pytest.mark.full
def test_a_rank_alone_on_its_machine_is_named_by_the_others(monkeypatch):
    """The agents of two machines, whose ranks see nothing of one another's processes."""
    for name, value in {
        "HANG": "1 stop all_reduce@training 20",
        "NODES": "2",
        "MEETING_PORT": str(free_port()),
    }.items():
        monkeypatch.setenv(name, value)
    jobs = []
    for node in range(2):
        monkeypatch.setenv("NODE_RANK", str(node))
        jobs.append(Job([[LAUNCHER, "1", SCRIPT, *GPT2, *STEPS, *MOCK, *SOON]]))
    with jobs[0], jobs[1]:
        told = jobs[0].wait(60)
        (process,) = re.findall(r"hanging in process (\d+)", jobs[1].stdout(0))
        os.kill(int(process), signal.SIGKILL)
    said = told.stderr[0]
    assert "rank 1 (on another machine) has hung: rank 0 waits in all_reduce, number" in said, told
    assert "and rank 1 did not come; training, iteration" in said and "exitcode  : 4" in said, told

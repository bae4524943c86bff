"""A rank that hangs is named with the call in which it is missed, and ends the job with code 4. tests/hang_campaign.py has all cases."""

import os
import signal
from pathlib import Path

import pytest
from conftest import GPT2, STEPS
from processes import Job, free_port

SCRIPT = str(Path(__file__).with_name("hanging_script.py"))
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

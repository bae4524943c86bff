"""pretrain_gpt.py, of which one rank hangs, or is signalled: HANG="rank how place nth" says who, how and where; of a run that a launcher
starts again "first attempt;second attempt;...", and in the attempts after those nothing happens.

    how     stop (SIGSTOP), loop (in Python), lock (in C, with the interpreter's lock), sleep; pause: for two seconds; or a signal, by its name
    place   a phase of `core/base/rank_status.py` with _ for blanks, or op@phase: before its nth call of a collective in that phase;
            op: a name, or "any"; op+phase: after it has issued the call, before it waits

tests/processes/test_hanging_ranks.py, test_signals.py, test_launchers.py and tests/campaigns/hang_campaign.py run it.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "campaigns"))

import pretrain_gpt
from megatron.core.base import rank_status
from megatron.core.enums import ModelType
from megatron.training import pretrain

ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or os.environ.get("SLURM_RESTART_COUNT") or 0)
NOTHING = "-1 stop none 1"
RANK, HOW, PLACE, NTH = [*os.environ.get("HANG", NOTHING).split(";"), *[NOTHING] * (ATTEMPT + 1)][ATTEMPT].split()


def hang() -> None:
    if HOW.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[HOW])
        return
    if HOW == "pause":
        print("pausing", flush=True)
        time.sleep(2.0)
        return
    print(f"hanging in process {os.getpid()}", flush=True)
    if HOW == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif HOW == "lock":
        ctypes.PyDLL(None).sleep(1000)
    while HOW == "loop":
        pass
    time.sleep(1000)


class Hanging:
    """Stands before the functions by which a rank writes where it is."""

    def __init__(self):
        self.issue, self.enter = rank_status.RankStatusWriter.issue, rank_status.RankStatusWriter.enter
        self.calls, self.phase = 0, ""

    def on_enter(self, here: rank_status.RankStatusWriter, phase: str) -> None:
        self.enter(here, phase)
        self.phase = phase.replace(" ", "_")
        self.count(self.phase == PLACE)

    def on_issue(self, here: rank_status.RankStatusWriter, op: str, *call: object) -> int:
        self.count(any(f"{name}@{self.phase}" == PLACE for name in (op, "any")))
        slot = self.issue(here, op, *call)
        self.count(any(f"{name}+{self.phase}" == PLACE for name in (op, "any")))
        return slot

    def count(self, is_here: bool) -> None:
        self.calls += is_here
        if is_here and self.calls == int(NTH):
            hang()


if __name__ == "__main__":
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == RANK:
        hanging = Hanging()
        rank_status.RankStatusWriter.issue = lambda *words: hanging.on_issue(*words)
        rank_status.RankStatusWriter.enter = lambda *words: hanging.on_enter(*words)
    pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        pretrain_gpt.model_provider,
        ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step,
    )

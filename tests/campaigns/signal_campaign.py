"""Signals one rank, all ranks, or the launcher of small jobs in each phase, and checks how they end, what is saved, and what is left over.

    python tests/campaigns/signal_campaign.py results.jsonl --limit-minutes 30
    python tests/campaigns/signal_campaign.py results.jsonl --write docs/reliability.md

Goes on where it stopped. Rank 0 pauses for two seconds at the place, and meanwhile the signal is sent. What a case must keep is the table of
docs/training_run.md: exit codes, the last checkpoint, no process, no unfinished file, and nothing in the memory that ranks share.
"""

import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from shlex import split

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))

from case_runs import campaign_parser, end_campaign, read_results, sweep
from kill_campaign import lives
from processes import Job

from megatron.training.fault_tolerance.hang_watch_folder import read_statuses

GLOO = Path(__file__).parents[1] / "processes"
SCRIPT, LAUNCHER = str(GLOO / "hanging_script.py"), str(GLOO / "forking_launcher.py")
PATIENCE = 90.0
RUN = split(
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --make-vocab-size-divisible-by 8 --mock-data --lr 1e-3 "
    "--tokenizer-type NullTokenizer --vocab-size 31 --micro-batch-size 1 --global-batch-size 2 --device cpu --train-iters 6 "
    "--log-interval 1 --eval-interval 3 --eval-iters 1 --save-interval 2"
)
# phase -> (where rank 0 pauses, more flags, steps that are done then, the last checkpoint that is complete then, the last step if asked to stop)
PHASES = {
    "start": ("building_the_model 1", "", 0, 0),
    "step": ("training 4", "", 2, 3),
    "validation": ("validating 1", "", 2, 3),
    "save": ("saving 2", "", 2, 5),  # and one more step, which is saved too
    "asynchronous save": ("saving 2", "--async-save", 2, 5),
}
SENT = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGINT")
TO = ("rank 0", "rank 1", "all", "launcher")


@dataclass(frozen=True)
class Case:
    phase: str
    sent: str
    to: str
    asked: bool  # whether the run is given --exit-signal-handler
    launched: bool

    def __str__(self) -> str:
        run = "handled" if self.asked else "plain"
        return f"{self.sent} to {self.to}, {self.phase}, {run}, {'launcher' if self.launched else 'no launcher'}"


def cases() -> list[Case]:
    every = (Case(*choices) for choices in product(PHASES, SENT, TO, (True, False), (True, False)))
    return [case for case in every if case.launched or case.to != "launcher"]


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def run_case(case: Case, folder: Path) -> dict:
    """What happened, and what of it is wrong."""
    result = {"case": str(case)} | asdict(case)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        result |= send_and_watch(case, folder)
        wrong = wrong_with(case, result)
    except AssertionError as error:
        result |= {"codes": [], "saved": 0, "left": [], "seconds": PATIENCE}
        wrong = f"{error}"[:2500]
    return result | {"ok": not wrong, "where": wrong}


def send_and_watch(case: Case, folder: Path) -> dict:
    """The exit codes, the last checkpoint, what is left over, seconds from the signal to the end, and what was printed."""
    place, flags, *_ = PHASES[case.phase]
    os.environ["HANG"] = f"0 pause {place}"
    words = [SCRIPT, *RUN, *flags.split(), "--save", str(folder)] + ["--exit-signal-handler"] * case.asked
    with Job([[LAUNCHER, "2", *words]] if case.launched else [words] * 2) as job:
        streams = range(len(job.processes))
        job.wait_for(lambda: any("pausing" in job.stdout(stream) for stream in streams))
        top = [process.pid for process in job.processes]
        ranks = sorted(children_of(top[0])) if case.launched else top
        victims = {"all": ranks, "launcher": top}.get(case.to) or [ranks[int(case.to[-1])]]
        for pid in victims:
            os.kill(pid, signal.Signals[case.sent])
        began = time.monotonic()
        ended = job.wait(PATIENCE)
        while any(map(lives, ranks)) and time.monotonic() < began + PATIENCE:
            time.sleep(0.05)
        seconds = time.monotonic() - began
        left = [f"process {pid}" for pid in ranks if lives(pid)]
        for pid in ranks:
            if lives(pid):
                os.kill(pid, signal.SIGKILL)
    left += [str(one) for one in Path("/dev/shm").glob("megatron-*") if {p.pid for p in read_statuses(one)} & {*ranks}]
    left += [path.name for path in folder.glob("*.partial*")]
    saved = max((int(path.name[5:]) for path in folder.glob("iter_[0-9]*") if path.name[5:].isdigit()), default=0)
    codes = list(ended.codes)
    if case.launched:
        codes = sorted({int(code) for code in re.findall(r"exitcode  : (-?\d+)", ended.everything)}) + codes
    numbers = {"codes": codes, "saved": saved, "left": left, "seconds": round(seconds, 1)}
    return numbers | {"said": ended.everything[-2500:]}


def wrong_with(case: Case, found: dict) -> str:
    """What is not as docs/training_run.md has it; empty if nothing."""
    _, _, before, last = PHASES[case.phase]
    sent, asked, to = case.sent, case.asked, case.to
    of_agent = found["codes"][-1] if case.launched else None
    ranks = set(found["codes"][:-1] if case.launched else found["codes"])
    killed = (sent in ("SIGTERM", "SIGHUP") and not asked) or (
        sent == "SIGUSR1" and to == "launcher"
    )  # torchrun dies of SIGUSR1
    hung_up = {-1} if sent == "SIGHUP" else set()
    if sent == "SIGINT":
        codes, saved = (
            {130},
            {before, 0} if case.phase == "start" else {before, 4} if "save" in case.phase else {before},
        )
    elif killed:
        codes, saved = {-15, 1, *hung_up}, {before, 4} if "save" in case.phase else {before}
    elif asked:
        codes, saved = {0}, {last}
    else:  # SIGUSR1 is said, and the run goes on
        codes, saved = {0}, {6}
    if case.phase == "asynchronous save" and (killed or sent == "SIGINT"):
        saved = {0, 2, 4}  # the save of iteration 2 may be in flight yet
    problems = []
    if case.launched:
        fine = of_agent == 0 if codes == {0} and to != "launcher" else of_agent != 0
        fine = fine and (ranks <= codes | {-15, -2, *hung_up})  # the agent ends the others of a rank that has failed
    else:
        fine = ranks <= codes
    if not fine:
        problems.append(f"exit codes {found['codes']}")
    if found["saved"] not in saved:
        problems.append(f"the last checkpoint is {found['saved']} instead of {sorted(saved)}")
    unfinished = killed or sent == "SIGINT"  # the next start or save removes what is left
    problems += [one for one in found["left"] if not (unfinished and (".partial" in one or "/dev/shm" in one))]
    if found["seconds"] > 45:
        problems.append(f"{found['seconds']} s")
    return "; ".join(problems)


def table(results: list[dict]) -> str:
    wrong = sum(not one["ok"] for one in results)
    counts = Counter((one["phase"], one["sent"]) for one in results)
    seconds = sorted(one["seconds"] for one in results)
    rows = [f"| {phase} | " + " | ".join(str(counts[phase, sent]) for sent in SENT) + " |" for phase in PHASES]
    return "\n".join(
        [
            f"{len(results)} of {len(cases())} cases, {wrong} not as documented. From the signal to the end of the last process: median "
            f"{seconds[len(seconds) // 2]} s, longest {seconds[-1]} s.",
            "",
            "| phase | " + " | ".join(SENT) + " |",
            "|---|" + "--:|" * len(SENT),
            *rows,
        ]
    )


def main() -> int:
    given = campaign_parser(__doc__).parse_args()
    if given.write is None:
        todo = cases()
        random.Random(1).shuffle(todo)
        run_one = partial(run_case, folder=Path(f"{given.results}.saved"))
        sweep(todo, len(todo), [given.results], 60 * given.limit_minutes, run_one)
    return end_campaign(list(read_results(given.results).values()), given.write, "signals", table)


if __name__ == "__main__":
    sys.exit(main())

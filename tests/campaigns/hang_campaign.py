"""Stops one rank of small jobs (SIGSTOP) at each place of a run, and checks what the others say of it and how the job ends.

    python tests/campaigns/hang_campaign.py results.jsonl
    python tests/campaigns/hang_campaign.py results.jsonl --write docs/reliability.md

Goes on where it stopped. A case is a place (each phase of the start-up, each kind of collective before and after it is issued, a save, a
validation), a rank (the first, the last) and a launcher (none, torchrun). It is right if within the deadline the stopped rank is named with its
process, by operation and axis where there is a call and by phase where there is none, if every other rank ends with code 4 and nothing is left.
`--calm` trains 1,000 steps with validations and saves instead, at a floor of 2 seconds and at the default, and counts alarms.
"""

import os
import re
import shutil
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from shlex import split

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))

from case_runs import campaign_parser, end_campaign, read_results, sweep
from processes import Job, free_port

SCRIPT = str(Path(__file__).parents[1] / "processes" / "hanging_script.py")
FLOOR = 2.0
DEADLINE = FLOOR + 6.0  # seconds from the stop to the end of the last rank; torchrun needs some of them to end itself
MODEL = split(
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --make-vocab-size-divisible-by 96 --device cpu "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --lr 1e-3 --micro-batch-size 2 --global-batch-size 12 "
    "--log-interval 1 --eval-interval 5 --eval-iters 2 --save-interval 3"
)
PHASES = {
    "connecting": "connecting",
    "agreeing on settings": "any@agreeing_on_settings",
    "making groups": "making_groups",
    "building the model": "building_the_model",
    "loading the checkpoint": "loading_the_checkpoint",
    "building the data sets": "building_the_data_sets",
    "validating": "validating",
    "saving": "saving",
    "a collective of a save": "any@saving",
}
# kind of call -> (ranks, flags of a layout that issues it)
CALLS = {
    "all_reduce": (2, ""),
    "all_gather": (3, "--zero-stage 1"),
    "reduce_scatter": (3, "--zero-stage 1"),
    "all_to_all": (2, "--context-parallel-size 2 --cp-comm-type a2a"),
    "broadcast": (2, "--tensor-model-parallel-size 2"),
    "send": (2, "--pipeline-model-parallel-size 2"),
    "recv": (2, "--pipeline-model-parallel-size 2"),
    "send of a ring": (2, "--context-parallel-size 2 --cp-comm-type p2p"),
    "all_reduce of TP 2 x PP 2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "recv of TP 2 x PP 2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "reduce_scatter of TP 2 x DP 2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 3"),
}
# place -> flags: nobody may be blamed
CALM = {"calm": f"--hang-timeout-floor {FLOOR}", "calm at the default floor": ""}


@dataclass(frozen=True)
class Case:
    place: str
    where: str  # the phase or call before or within which the rank stops, and how often it comes there
    ranks: int
    flags: str
    victim: int
    launcher: str

    def __str__(self) -> str:
        return f"{self.place}, rank {self.victim}, launcher {self.launcher}"


def cases() -> list[Case]:
    places = [(name, f"{where} 1", 2, "") for name, where in PHASES.items()]
    for call, (ranks, flags) in CALLS.items():
        for when, sign in (("before", "@"), ("within", "+")):
            places.append((f"{when} {call}", f"{call.split()[0]}{sign}training 30", ranks, flags))
    return [
        Case(place, where, ranks, flags, victim, launcher)
        for place, where, ranks, flags in places
        for victim in (0, ranks - 1)
        for launcher in ("none", "torchrun")
    ]


def run_case(case: Case, folder: str) -> dict:
    """Start the job, and watch it end after one of its ranks has stopped."""
    shutil.rmtree(folder, ignore_errors=True)
    os.environ["HANG"] = f"{case.victim} stop {case.where}"
    limits = ["--train-iters", "60", "--hang-timeout", "3", "--hang-timeout-floor", str(FLOOR)]
    words = [SCRIPT, *MODEL, *limits, *case.flags.split(), "--save", folder]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(case.ranks), "--master-port", str(free_port())]
    with Job([[*launch, *words]] if case.launcher == "torchrun" else [words] * case.ranks) as job:
        streams = range(len(job.processes))

        def stopped() -> list[str]:
            return re.findall(r"hanging in process (\d+)", "".join(job.stdout(stream) for stream in streams))

        while not stopped() and job.running():
            time.sleep(0.02)
        began = time.monotonic()
        ended = job.wait(60)
        seconds = time.monotonic() - began
    stopped_in = re.findall(r"hanging in process (\d+)", ended.everything)
    result = {"case": str(case)} | asdict(case) | _found(case, stopped_in=stopped_in, ended=ended, seconds=seconds)
    return result | {"ok": result["outcome"] == "right", "where": result["said"][:300]}


def _found(case: Case, *, stopped_in: list[str], ended: object, seconds: float) -> dict:
    if not stopped_in:
        return {"outcome": "did not come there", "said": str(ended)[-1500:]}
    said, process = "".join(ended.stderr), stopped_in[0]
    headline = re.search(rf"^rank {case.victim} \(on \S+, process {process}\) has hung.*$", said, re.MULTILINE)
    text = headline[0] if headline else ""
    call = re.search(r"rank \d+ waits in (\w+).* on axis (\w+)", text)
    if case.launcher == "torchrun":
        codes = sorted({int(code) for code in re.findall(r"exitcode  : (-?\d+)", said)})
        right = ended.codes == (1,) and 4 in codes and set(codes) <= {4, -9}
    else:
        codes = list(ended.codes)
        right = codes == [-9 if rank == case.victim else 4 for rank in range(case.ranks)]
    return {
        "outcome": "right" if headline and right and seconds < DEADLINE and not _lives(process) else "wrong",
        "by": " ".join(call.groups()) if call else "phase" if headline else "",
        "seconds": round(seconds, 2),
        "codes": codes,
        "said": text or str(ended)[-3000:],
    }


def _lives(process: str) -> bool:
    return Path(f"/proc/{process}").exists()


def calm(place: str, folder: str) -> dict:
    """1,000 steps with 200 validations and 333 saves, which nobody disturbs."""
    shutil.rmtree(folder, ignore_errors=True)
    os.environ.pop("HANG", None)
    limits = split(f"--train-iters 1000 --hang-timeout 10 {CALM[place]} --keep-checkpoints 2")
    with Job([[SCRIPT, *MODEL, *limits, "--save", folder]] * 2) as job:
        ended = job.wait(1800)
    said = "".join(ended.stderr)
    alarms, slow = said.count("has hung"), said.count("is slow")
    counts = {"codes": list(ended.codes), "alarms": alarms, "slow": slow}
    return {
        "case": place,
        "place": place,
        **counts,
        "ok": not alarms,
        "where": f"{alarms} alarms",
        "said": said[-6000:],
    }


def table(results: list[dict]) -> str:
    """One row a place: cases, how many were right, by what the rank was named, seconds from the stop to the end."""
    rows, by_place = (
        [
            "| where the rank is stopped | cases | rank named and job ended | call or phase named | seconds: median, longest |",
            "|---|--:|--:|---|--:|",
        ],
        defaultdict(list),
    )
    for one in results:
        if one["place"] not in CALM:
            by_place[one["place"]].append(one)
    for place, found in by_place.items():
        right = [one for one in found if one["outcome"] == "right"]
        times = sorted(one["seconds"] for one in right)
        by = ", ".join(sorted({one["by"] for one in right}))
        spread = f"{times[len(times) // 2]:.1f}, {times[-1]:.1f}" if times else ""
        rows.append(f"| {place} | {len(found)} | {len(right)} | {by} | {spread} |")
    for one in results:
        if one["place"] in CALM:
            flags = CALM[one["place"]] or "the default floor"
            rows.append(
                f"\n1,000 steps with 200 validations and 333 saves over two ranks, {flags}: {one['alarms']} alarms, exit codes {one['codes']}."
            )
    return "\n".join(rows)


def main() -> int:
    parser = campaign_parser(__doc__)
    parser.add_argument("--calm", action="store_true", help="train undisturbed, and count alarms")
    given = parser.parse_args()
    if given.write is None:
        todo, run_one = (list(CALM), calm) if given.calm else (cases(), run_case)
        run_one = partial(run_one, folder=f"{given.results}.saved")
        sweep(todo, len(todo), [given.results], 60 * given.limit_minutes, run_one)
    return end_campaign(list(read_results(given.results).values()), given.write, "hangs", table)


if __name__ == "__main__":
    sys.exit(main())

"""Draw settings at random, measure one rank of each on this CPU, and list where the prediction of its memory is wrong.

    python tools/sample_memory.py --cases 300 --log cases.jsonl      goes on where the log ends
    python tools/sample_memory.py --first 17 --cases 1               case 17 alone
    python tools/sample_memory.py --model bert --cases 100           of BERTs

Case n is the same in every run. What the settings' own rules refuse is drawn again. docs/memory.md has the tolerances and the record.
"""

import argparse
import contextlib
import json
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from megatron.core.config import ConfigError
from megatron.training.memory.estimate import KINDS
from tools.estimate_memory import add_model_flag
from tools.measure_memory import Case, Measured, measure

TOLERANCE = {kind: 0.10 if kind == "activations" else 0.03 for kind in KINDS}
_FILE = 0.03
_ALL = 0.97  # of what is there at one moment, the least that the sum of the predicted peaks may be


class Draw:
    """Words of one case, each from a few values."""

    def __init__(self, number: int):
        self._random = random.Random(number)
        self.words: list[str] = []

    def one(self, *values: Any) -> Any:
        return self._random.choice(values)

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def flag(self, words: str, probability: float) -> bool:
        """Give these words, or not."""
        is_given = self.chance(probability)
        self.words += words.split() if is_given else []
        return is_given

    def value(self, flag: str, *values: Any) -> Any:
        """Give a flag one of these values; None: leave it out."""
        value = self.one(*values)
        self.words += [] if value is None else [flag, str(value)]
        return value


def drawn(number: int, model: str = "gpt") -> Case:
    """The case of this number; not every one may run. A BERT's is a GPT's, without what a BERT's data refuse."""
    draw = Draw(number)
    t = draw.one(1, 1, 2, 4)
    p, v, layers = _pipeline(draw)
    ranks, m = draw.one(1, 2, 3, 4, 8), draw.one(1, 2, 3, 5)
    m = m * p if v > 1 else m
    _shape(draw, t, layers)
    micro = draw.value("--micro-batch-size", 1, 2, 3)
    draw.words += ["--global-batch-size", str(micro * ranks * m)]
    draw.words += ["--tensor-model-parallel-size", str(t)] if t > 1 else []
    if t > 1:
        draw.flag("--sequence-parallel", 0.5)
        draw.flag("--no-scatter-gather-tensors-in-pipeline", 0.2)
    _precision(draw)
    _data_parallel(draw, ranks)
    _recompute(draw, layers // (p * v))
    _offload(draw, layers // (p * v))
    world = t * p * ranks
    rank = draw.one(*range(world))
    if model == "bert":
        draw.words = [word for word in draw.words if word not in _OF_GPT]
        draw.flag("--bert-no-binary-head", 0.3)
    return Case(" ".join(draw.words), world, rank, model)


_OF_GPT = ("--reset-attention-mask", "--reset-position-ids")


def _pipeline(draw: Draw) -> tuple[int, int, int]:
    """(pipeline ranks, chunks of each, layers)"""
    p, v = draw.one(1, 1, 2, 2, 4), 1
    layers = p * draw.one(1, 2, 3)
    if p > 1 and draw.chance(0.3):
        v = draw.one(1, 2) if layers // p > 1 else 1
        v = v if layers % (p * v) == 0 else 1
        v, layers = (2, 2 * layers) if v == 1 else (v, layers)
        draw.words += ["--num-layers-per-virtual-pipeline-stage", str(layers // (p * v))]
    elif draw.chance(0.5):
        draw.value("--pipeline-schedule", "1f1b", "gpipe", "zb-h1")
    if p > 1:
        draw.words += ["--pipeline-model-parallel-size", str(p)]
        if (
            v == 1
            and layers > p
            and not draw.flag(f"--decoder-first-pipeline-num-layers {draw.one(1, layers // p)}", 0.2)
        ):
            for flag in ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"):
                layers -= draw.flag(flag, 0.2)
    return p, v, layers


def _shape(draw: Draw, t: int, layers: int) -> None:
    heads = t * draw.one(1, 2, 3)
    width = draw.one(8, 16, 12)
    words = ["--num-layers", layers, "--num-attention-heads", heads, "--hidden-size", heads * width]
    draw.words[:0] = map(str, words)
    draw.value("--seq-length", *([16, 32, 48, 64] if t < 4 else [16, 32, 64]))
    draw.value("--vocab-size", 33, 100, 257, 600, 1000)
    draw.value("--make-vocab-size-divisible-by", None, 1, 8, 7)
    draw.flag(f"--ffn-hidden-size {t * draw.one(24, 40, 56)}", 0.3)
    draw.flag(f"--kv-channels {draw.one(6, 10, 24)}", 0.2)
    groups = [g for g in range(1, heads + 1) if heads % g == 0 and (g % t == 0 or t % g == 0)]
    draw.flag(f"--group-query-attention --num-query-groups {draw.one(*groups)}", 0.3)
    position = draw.value("--position-embedding-type", None, None, "rope", "none")
    if position == "rope":
        draw.flag("--rotary-percent 0.5", 0.3)
    if position is None:
        draw.flag("--max-position-embeddings 80", 0.2)
    for words, probability in (
        ("--untie-embeddings-and-output-weights", 0.4),
        ("--swiglu", 0.3),
        ("--normalization RMSNorm", 0.3),
        ("--disable-bias-linear", 0.3),
        ("--add-qkv-bias", 0.2),
        ("--qk-layernorm", 0.2),
        ("--hidden-dropout 0", 0.4),
        ("--attention-dropout 0", 0.7),
        ("--z-loss-coeff 0.01", 0.1),
        ("--label-smoothing 0.1", 0.1),
        ("--reset-attention-mask", 0.1),
        ("--reset-position-ids", 0.05),
    ):
        draw.flag(words, probability)
    draw.value("--attention-backend", None, None, None, "unfused")


def _precision(draw: Draw) -> None:
    half = draw.value("--precision", None, None, "bf16", "bf16", "fp16", "fp64")
    if half is not None:
        draw.words[-2:] = [f"--{half}"]
    if half in ("bf16", "fp16"):
        draw.flag("--fp32-residual-connection", 0.2)
        draw.flag("--grad-reduce-in-bf16", 0.25)
        draw.flag("--reduce-scatter-with-fp32-accumulation", 0.25)
    if half == "bf16":
        draw.flag("--main-grads-dtype bf16", 0.15)
        draw.flag("--reuse-fp32-param", 0.25)
    if half not in ("bf16", "fp16"):
        draw.flag("--grad-reduce-in-bf16", 0.15)
    draw.flag("--clip-grad 0", 0.1)
    if draw.flag("--optimizer sgd", 0.15):
        draw.flag("--sgd-momentum 0", 0.3)


def _data_parallel(draw: Draw, ranks: int) -> None:
    stage = draw.value("--zero-stage", 0, 1, 2, 3)
    if stage == 0:
        draw.flag("--fixed-order-grad-reduce", 0.2)
    draw.flag("--overlap-grad-reduce", 0.5)
    if stage:
        draw.flag("--overlap-param-gather", 0.5)
        if ranks in (4, 8) and draw.flag("--num-distributed-optimizer-instances 2", 0.3) and stage == 3:
            draw.flag("--outer-dp-sharding-strategy optim", 0.5)
    draw.value("--ddp-bucket-size", None, None, 1000, 5000, 30000)
    draw.flag("--poison-released-buffers", 0.1)


def _recompute(draw: Draw, layers: int) -> None:
    kind = draw.one(None, None, "selective", "uniform", "block")
    if kind == "selective":
        modules = [name for name in ("core_attn", "mlp", "layernorm") if draw.chance(0.5)] or ["core_attn"]
        draw.words += ["--recompute-granularity", "selective", "--recompute-modules", *modules]
    elif kind is not None:
        draw.words += ["--recompute-granularity", "full", "--recompute-method", kind]
        draw.words += ["--recompute-num-layers", str(draw.one(*range(1, layers + 1)))]
        draw.flag("--distribute-saved-activations", 0.25)
        draw.flag("--contiguous-checkpointing", 0.4)


def _offload(draw: Draw, layers: int) -> None:
    if draw.chance(0.3):
        draw.words += ["--cpu-offloading-num-layers", str(draw.one(*range(1, layers + 1)))]
        draw.value("--min-offloaded-tensor-size", None, 1, 1000, 3000)
    tier = draw.one(None, None, None, "--optimizer-cpu-offload", "--offload-dir state")
    if tier is not None:
        draw.words += tier.split()
        if not draw.flag("--offload-params", 0.3):
            draw.value("--optimizer-offload-fraction", None, 0, 0.3, 0.5)


# ---------------------------------------------------------------- what came of it


def wrong_of(got: Measured) -> list[str]:
    """Every kind that is predicted outside its tolerance."""
    expected, wrong = got.expected, []
    for kind in KINDS:
        if abs(expected[kind] - got.bytes[kind]) > TOLERANCE[kind] * got.bytes[kind]:
            wrong.append(f"{kind} {got.bytes[kind]:,}, predicted {expected[kind]:,}")
    if sum(expected.values()) < _ALL * got.total:
        wrong.append(f"all {got.total:,}, predicted {sum(expected.values()):,}")
    in_file = got.predicted.tiers.get("file", 0)
    if abs(in_file - got.in_file) > _FILE * got.in_file:
        wrong.append(f"in a file {got.in_file:,}, predicted {in_file:,}")
    return wrong


def tried(number: int, model: str) -> dict[str, Any]:
    """What came of a case: "within" or "wrong", with the bytes by kind, "refused" or "crashed"."""
    case = drawn(number, model)
    found = {"number": number, "model": model, "words": case.words, "world_size": case.world_size, "rank": case.rank}
    try:
        got = measure(case.arguments, case.world_size, case.rank, model)
        wrong = wrong_of(got)
    except ConfigError as error:
        return found | {"came": "refused", "said": error.problems}
    except Exception:  # whatever it is, the other cases are worth a look
        return found | {"came": "crashed", "said": traceback.format_exc().splitlines()[-12:]}
    sizes = {"measured": got.bytes, "predicted": got.expected, "all": got.total}
    return found | {"came": "wrong" if wrong else "within", "said": wrong} | sizes


def found_in(cases: int, first: int, log: Path | None, model: str) -> Iterator[dict[str, Any]]:
    """What came of the cases from `first` on, until so many have run; from the log, where they are in it."""
    known = {}
    if log is not None and log.exists():
        logged = map(json.loads, log.read_text().splitlines())
        known = {found["number"]: found for found in logged if found.get("model", "gpt") == model}
    left, number = cases, first
    while left > 0:
        found = known.get(number) or tried(number, model)
        if log is not None and number not in known:
            with log.open("a") as lines:
                lines.write(json.dumps(found) + "\n")
        yield found
        left, number = left - (found["came"] != "refused"), number + 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; 1 where a case is wrong or crashed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--cases", type=int, default=100, metavar="N", help="cases that run (default: 100)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first (default: 0)")
    parser.add_argument(
        "--log", metavar="FILE", help="a line of JSON for each case; those that it has are not run again"
    )
    add_model_flag(parser)
    own = parser.parse_args(arguments)
    torch.set_num_threads(1)
    came: Counter[str] = Counter()
    log = Path(own.log).absolute() if own.log else None
    # Where the cases with an --offload-dir have it.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for found in found_in(own.cases, own.first, log, own.model):
            came[found["came"]] += 1
            if found["came"] in ("wrong", "crashed"):
                place = f"rank {found['rank']} of {found['world_size']}"
                print(f"{found['number']}: {found['came']}, {place}: {found['words']}")
                print("\n".join(f"    {line}" for line in found["said"]), flush=True)
    print(", ".join(f"{count} {what}" for what, count in sorted(came.items())))
    return int(came["wrong"] + came["crashed"] > 0)


if __name__ == "__main__":
    sys.exit(main())

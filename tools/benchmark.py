"""Measure a training step: against the device's limits, and side by side with other code at the same work.

    python tools/benchmark.py --model gpt2-small --bf16
    python tools/benchmark.py --model gpt2-small --num-layers 4 --bf16 --peers none --json result.json
    python tools/benchmark.py --model gpt-28m --parallel tp
    python tools/benchmark.py --works readme --peers plain-compiled transformers-compiled --records readme.jsonl

Each contender is a process, or one a rank; they take steps in turns. Prints Markdown.
"""

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, get_args, get_type_hints

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.base.dataclass_flags import BelowOne, Count, FlagConfig, Positive, WholeNumber, option
from megatron.core.ops.compile.compiled_region import CompileConfig
from megatron.core.parallel.accelerator import Device, DeviceName, multiplies_bfloat16
from tools.benchmarking import records, works
from tools.benchmarking.contest import TURN, Contest, Plan, Stopped, ceilings
from tools.benchmarking.picture import draw
from tools.benchmarking.records import Record
from tools.benchmarking.report import markdown, overview
from tools.benchmarking.work import MODELS, PARALLEL, PEERS, Contender, Work
from tools.errors import naming_flag, run_tool

COMPILED = get_args(get_type_hints(CompileConfig)["compile"])


@dataclass(frozen=True)
class BenchmarkConfig(FlagConfig):
    """Benchmark."""

    model: Literal[tuple(MODELS)] = option(  # type: ignore[valid-type]
        "gpt2-small", "model to start from; the flags below override its sizes"
    )
    num_layers: int | None = option(None, "transformer layers")
    hidden_size: int | None = option(None, "hidden size")
    num_attention_heads: int | None = option(None, "attention heads")
    vocab_size: int | None = option(None, "vocabulary size, padded to a multiple of 128")
    seq_length: int | None = option(None, "tokens per sample; default: the model's, else 512")
    micro_batch_size: int | None = option(None, "samples per forward; default: the model's, else 4")
    global_batch_size: int | None = option(
        None, "samples per iteration; default: one micro-batch a replica, four with --parallel pp"
    )
    attention_dropout: BelowOne = option(0.0, "dropout of attention probabilities, of every contender")
    hidden_dropout: BelowOne = option(0.0, "dropout after the embedding and each block, of every contender")
    bf16: bool = option(False, "ours in bfloat16 with float32 masters, peers under bfloat16 autocast; else float32")
    parallel: Literal[tuple(PARALLEL)] = option(  # type: ignore[valid-type]
        "none",
        "on several ranks: dp against DistributedDataParallel, zero3 against fully_shard, tp against DTensor, pp against "
        "torch.distributed.pipelining",
    )
    ranks: Count = option(2, "ranks of --parallel, with equal shares of the cores")
    peers: list[str] = option(
        ["plain", "plain-compiled", "transformers", "transformers-compiled"],
        "plain PyTorch and transformers, eager and compiled, in our precision; fp32, bf16, compiled: transformers in float32, "
        "bfloat16 autocast, compiled with autocast; none",
        metavar="NAME",
    )
    compile: list[str] = option(
        ["off"],
        "ways in which ours competes, each a contender: off, or another choice of training's --compile",
        metavar="NAME",
    )
    same_allocator: bool = option(False, "peers keep freed memory in the process, too, as ours does on a CPU")
    rounds: Count = option(9, "measured turns of each contender")
    warmup: WholeNumber = option(2, "unmeasured iterations of each contender; the first one compiles")
    steps: Count | None = option(None, "iterations of a turn; default: half a second of them")
    limit_seconds: Positive | None = option(None, "begin no turn after so many seconds")
    profile: bool = option(False, "list the operators that take most of an iteration")
    ceilings: bool = option(True, "do not measure the limits of the device", flags=("--no-ceilings",))
    device: DeviceName = option("auto", "device to run on; auto: an accelerator if there is one")
    json: str | None = option(None, "file for all measurements", metavar="FILE")
    works: list[str] = option(
        [],
        "instead of --model: works by name or prefix, in this order; readme: all of README's table, parallel: those on two "
        "ranks. Prints beforehand what each may take, and a row for each",
        metavar="NAME",
    )
    records: str | None = option(
        None,
        "JSON lines with the rounds of --works; rounds that are there, of the same code, machine and contenders, are not taken "
        "again",
        metavar="FILE",
    )
    picture: str | None = option(None, "PNG with a bar for each contender and a dot for each round", metavar="FILE")

    def problems(self) -> Iterator[str]:
        if unknown := [name for name in self.peers if name not in (*PEERS, "none")]:
            yield f"--peers {' '.join(unknown)}: there are {', '.join(PEERS)}, and none"
        if unknown := [name for name in self.compile if name not in COMPILED]:
            yield f"--compile {' '.join(unknown)}: there are {', '.join(COMPILED)}"
        if unknown := works.unknown(self.works):
            yield f"--works {' '.join(unknown)}: there are {', '.join([*works.GROUPS, *works.chosen(works.GROUPS)])}"
        if self.records and not self.works:
            yield "--records holds the rounds of --works; give works, or --json for the measurements of one model"
        if self.picture and Path(self.picture).suffix.lower() != ".png":
            yield f"--picture ({self.picture}) must end in .png: the tool writes a PNG"
        yield from self.work.problems()

    @property
    def work(self) -> Work:
        """The work of --model."""
        given = {f.name: getattr(self, f.name) for f in fields(Work) if getattr(self, f.name, None) is not None}
        given["ranks"] = 1 if self.parallel == "none" else self.ranks
        sizes = {**MODELS[self.model], **given}
        one = Work(**sizes)
        batch = one.micro_batch_size * one.replicas * (4 if self.parallel == "pp" else 1)
        return Work(**{"global_batch_size": batch, **sizes})

    def contenders(self, work: Work) -> list[Contender]:
        peers = [PEERS[name] for name in self.peers if name != "none"]
        if work.ranks > 1:  # transformers leaves the layout to the same parts of torch
            peers = [one for one in peers if one.library == "plain"]
        ours = [Contender("ours", way) for way in dict.fromkeys(self.compile)]
        return [*ours, *(replace(one, same_allocator=self.same_allocator) for one in peers)]


def installed(contenders: list[Contender], work: Work) -> tuple[list[Contender], dict[str, str]]:
    """(contenders that can run, {title of another: reason})"""
    if importlib.util.find_spec("transformers") is not None:
        return contenders, {}
    reason = "transformers is not installed (pip install -e '.[benchmark]')"
    without = {one.title(work.parallel): reason for one in contenders if one.library == "transformers"}
    return [one for one in contenders if one.library != "transformers"], without


def measure(config: BenchmarkConfig, work: Work, limits: dict[str, float], rounds: int, until: float) -> Record:
    """A contest at one work. limits: the ceilings of the device; until: no turn begins later, by `time.monotonic()`."""
    contenders, missing = installed(config.contenders(work), work)
    contest = Contest(contenders, work, config.device, Plan(rounds, config.warmup, config.steps, until, config.profile))
    contest.run()
    return records.record_of(contest, limits, missing)


def limits_of(config: BenchmarkConfig) -> dict[str, float]:
    return ceilings(config.device) if config.ceilings else {}


def measure_works(config: BenchmarkConfig, until: float) -> tuple[dict[str, Record], dict[str, str]]:
    """(the works of --works by name, with rounds from --records and those that are missing there; works that failed, and why)"""
    half = multiplies_bfloat16(Device.select(config.device).torch_device)
    path = Path(config.records) if config.records else None
    chosen = works.chosen(config.works, half=half)
    if lacking := [name for name in works.chosen(config.works) if name not in chosen]:
        print(f"left out, as the device has no units for bfloat16: {', '.join(lacking)}", file=sys.stderr)
    known: dict[str, list[Record]] = {}
    for name, work in chosen.items():
        wanted = records.identity(work, installed(config.contenders(work), work)[0])
        known[name] = records.same(records.read_records(path), wanted) if path else []
    missing = {name: config.rounds - records.rounds_of(mine) for name, mine in known.items()}
    limits = limits_of(config) if any(rounds > 0 for rounds in missing.values()) else {}
    tell_plan(config, {chosen[name]: (name, rounds) for name, rounds in missing.items() if rounds > 0}, limits)
    failed: dict[str, str] = {}
    for name, mine in known.items():
        if missing[name] > 0 and time.monotonic() < until:
            try:
                mine.append(measure(config, chosen[name], limits, missing[name], until))
            except (Stopped, ValueError) as error:  # the works after it are measured all the same
                failed[name] = str(error)
                print(f"{name}: {error}", file=sys.stderr)
                continue
            if path:
                records.append_record(path, mine[-1])
        if mine:
            print(f"{name}: {records.rounds_of(mine)} of {config.rounds} rounds", file=sys.stderr)
    return {name: records.merged(mine) for name, mine in known.items() if mine}, failed


def tell_plan(config: BenchmarkConfig, todo: dict[Work, tuple[str, int]], limits: dict[str, float]) -> None:
    """What each work may take, to stderr. todo: its name and missing rounds. Nothing without --ceilings."""
    total = 0.0
    for work, (name, rounds) in todo.items() if limits else ():
        contenders = len(installed(config.contenders(work), work)[0])
        seconds = seconds_of(work, limits, contenders * (rounds + config.warmup))
        total += seconds
        print(
            f"{name}: {rounds} rounds of {contenders} contenders, about {seconds:.0f} s and their starts",
            file=sys.stderr,
        )
    if total:
        limited = f", and --limit-seconds {config.limit_seconds:g} begins no turn later" if config.limit_seconds else ""
        print(f"all: about {total:.0f} s and the starts, which compile at the first time{limited}", file=sys.stderr)


def seconds_of(work: Work, limits: dict[str, float], turns: int) -> float:
    """Of turns of at least `TURN` seconds, at half the measured GEMM ceiling."""
    ceiling = limits["bf16_tflops" if work.bf16 else "fp32_tflops"] * 1e12
    return turns * max(TURN, 2 * work.flops_per_token * work.tokens / ceiling)


def run(config: BenchmarkConfig) -> None:
    until = time.monotonic() + (config.limit_seconds or float("inf"))
    failed: dict[str, str] = {}
    if config.works:
        measured, failed = measure_works(config, until)
        print(overview(measured))
    else:
        only = records.merged([measure(config, config.work, limits_of(config), config.rounds, until)])
        measured = {config.model: only}
        print(markdown(only))
    if config.json:
        with naming_flag("--json", config.json, "choose a file that can be written"):
            written = measured if config.works else only
            Path(config.json).write_text(json.dumps(written, indent=1) + "\n")
    if config.picture:
        draw(measured, config.picture)
    if failed:
        raise Stopped("; ".join(f"{name} is not measured: {why}" for name, why in failed.items()))


def main(arguments: list[str] | None = None) -> int:
    return run_tool(__file__, __doc__, [BenchmarkConfig], run, arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Measure a training step: against the limits of the device, and side by side with other code that trains the same.

    python tools/benchmark.py --model gpt2-small --bf16
    python tools/benchmark.py --model gpt2-small --num-layers 4 --bf16 --peers none --json result.json
    python tools/benchmark.py --model gpt-28m --parallel tp
    python tools/benchmark.py --works readme --peers plain-compiled transformers-compiled --records readme.jsonl

Each contender is a process, or a process for each rank; they train in turns. The tool prints Markdown.
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
from megatron.core.ops.compile.compile_config import CompileConfig
from megatron.core.parallel.device_and_process_group_config import DeviceName
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
        None, "samples per iteration; default: one microbatch per replica, or four with --parallel pp"
    )
    attention_dropout: BelowOne = option(0.0, "dropout of attention probabilities, in every program that is compared")
    hidden_dropout: BelowOne = option(
        0.0, "dropout after the embedding and each block, in every program that is compared"
    )
    bf16: bool = option(
        False,
        "train in bfloat16: this project with float32 master weights, the peers under bfloat16 autocast; without "
        "it all train in float32",
    )
    parallel: Literal[tuple(PARALLEL)] = option(  # type: ignore[valid-type]
        "none",
        "parallelism on several ranks, and what it is compared with: dp: DistributedDataParallel; zero3: "
        "fully_shard; tp: DTensor; pp: torch.distributed.pipelining",
    )
    ranks: Count = option(2, "number of ranks with --parallel; they share the cores equally")
    peers: list[str] = option(
        ["plain", "plain-compiled", "transformers", "transformers-compiled"],
        "programs to compare with: plain and transformers: PyTorch and transformers in the precision of this run, "
        "eager or -compiled; fp32, bf16, compiled: transformers in float32, under bfloat16 autocast, compiled under "
        "autocast; none",
        metavar="NAME",
    )
    compile: list[str] = option(
        ["off"],
        "how this project runs, each as a program of its own: off, or another choice of --compile in training",
        metavar="NAME",
    )
    same_allocator: bool = option(
        False, "the peers also keep freed memory in the process, as this project does on a CPU"
    )
    rounds: Count = option(9, "measured rounds of each program")
    warmup: WholeNumber = option(2, "iterations of each program before the measurement; the first one compiles")
    steps: Count | None = option(None, "iterations per measurement; default: as many as take half a second")
    limit_seconds: Positive | None = option(None, "begin no measurement after this many seconds")
    profile: bool = option(False, "list the operators that take most of the time of an iteration")
    ceilings: bool = option(True, "do not measure the device's peak rates", flags=("--no-ceilings",))
    device: DeviceName = option("auto", "device to run on; auto: an accelerator if there is one")
    json: str | None = option(None, "JSON file for all measurements", metavar="FILE")
    works: list[str] = option(
        [],
        "models and settings to measure, instead of --model: their names or prefixes of names, in this order; "
        "readme: all in README's table; parallel: those on two ranks. First prints how long each may take, then a "
        "row for each",
        metavar="NAME",
    )
    records: str | None = option(
        None,
        "JSONL file with the rounds of --works; a round that it already has for the same code, machine and programs "
        "is not measured again",
        metavar="FILE",
    )
    picture: str | None = option(None, "PNG file with a bar for each program and a dot for each round", metavar="FILE")

    def problems(self) -> Iterator[str]:
        unknown_peers = [name for name in self.peers if name not in (*PEERS, "none")]
        if unknown_peers:
            yield f"--peers {' '.join(unknown_peers)}: there are {', '.join(PEERS)}, and none"
        unknown_ways = [name for name in self.compile if name not in COMPILED]
        if unknown_ways:
            yield f"--compile {' '.join(unknown_ways)}: there are {', '.join(COMPILED)}"
        unknown_works = works.unknown(self.works)
        if unknown_works:
            known_works = [*works.GROUPS, *works.chosen(works.GROUPS)]
            yield f"--works {' '.join(unknown_works)}: there are {', '.join(known_works)}"
        if self.records and not self.works:
            yield "--records holds the rounds of --works; give works, or --json for the measurements of one model"
        if self.picture and Path(self.picture).suffix.lower() != ".png":
            yield f"--picture ({self.picture}) must end in .png: the tool writes a PNG"
        yield from self.work.problems()

    @property
    def work(self) -> Work:
        """The work of --model."""
        sizes = dict(MODELS[self.model])
        for field in fields(Work):
            value = getattr(self, field.name, None)
            if value is not None:
                sizes[field.name] = value
        sizes["ranks"] = 1 if self.parallel == "none" else self.ranks
        if "global_batch_size" not in sizes:
            work = Work(**sizes)
            num_microbatches = 4 if self.parallel == "pp" else 1
            sizes["global_batch_size"] = work.micro_batch_size * work.replicas * num_microbatches
        return Work(**sizes)

    def contenders(self, work: Work) -> list[Contender]:
        """Return ours and the peers that train this work."""
        peers = [PEERS[name] for name in self.peers if name != "none"]
        if work.ranks > 1:  # on several ranks transformers would be wrapped by the same parts of torch as plain PyTorch
            peers = [peer for peer in peers if peer.library == "plain"]
        ours = [Contender("ours", compile_choice) for compile_choice in dict.fromkeys(self.compile)]
        return [*ours, *(replace(peer, same_allocator=self.same_allocator) for peer in peers)]


def installed(contenders: list[Contender], work: Work) -> tuple[list[Contender], dict[str, str]]:
    """Return (contenders that can run here, {title of a contender that cannot: reason})."""
    if importlib.util.find_spec("transformers") is not None:
        return contenders, {}
    runnable = []
    missing = {}
    for contender in contenders:
        if contender.library == "transformers":
            missing[contender.title(work.parallel)] = "transformers is not installed (pip install -e '.[benchmark]')"
        else:
            runnable.append(contender)
    return runnable, missing


def measure(config: BenchmarkConfig, work: Work, limits: dict[str, float], rounds: int, until: float) -> Record:
    """Measure all contenders at one work. limits: the ceilings of the device; until: time of the last turn's begin."""
    contenders, missing = installed(config.contenders(work), work)
    contest = Contest(contenders, work, config.device, Plan(rounds, config.warmup, config.steps, until, config.profile))
    contest.run()
    return records.record_of(contest, limits, missing)


def limits_of(config: BenchmarkConfig) -> dict[str, float]:
    """Measure the ceilings of the device; none with --no-ceilings."""
    return ceilings(config.device) if config.ceilings else {}


def measure_works(config: BenchmarkConfig, until: float) -> tuple[dict[str, Record], dict[str, str]]:
    """Measure the works of --works, as far as --records does not have their rounds already.

    Returns (records by name of the work, reasons by name of a work that failed).
    """
    # the works that this device can do
    accelerator = importlib.import_module("megatron.core.parallel.accelerator")  # not above: it needs torch
    half = accelerator.multiplies_bfloat16(accelerator.Device.select(config.device).torch_device)
    selected = works.chosen(config.works, half=half)
    skipped = [name for name in works.chosen(config.works) if name not in selected]
    if skipped:
        print(f"left out, as the device has no units for bfloat16: {', '.join(skipped)}", file=sys.stderr)

    # the rounds that are recorded already, of the same code, machine and contenders
    path = Path(config.records) if config.records else None
    records_of: dict[str, list[Record]] = {}
    missing_rounds: dict[str, int] = {}
    for name, work in selected.items():
        records_of[name] = []
        if path:
            identity = records.identity(work, installed(config.contenders(work), work)[0])
            records_of[name] = records.same(records.read_records(path), identity)
        missing_rounds[name] = config.rounds - records.rounds_of(records_of[name])
    todo = {selected[name]: (name, rounds) for name, rounds in missing_rounds.items() if rounds > 0}
    limits = limits_of(config) if todo else {}
    tell_plan(config, todo, limits)

    # measure the others
    failed: dict[str, str] = {}
    for name, records_of_work in records_of.items():
        if missing_rounds[name] > 0 and time.monotonic() < until:
            try:
                record = measure(config, selected[name], limits, missing_rounds[name], until)
            except (Stopped, ValueError) as error:  # go on with the next work
                failed[name] = str(error)
                print(f"{name}: {error}", file=sys.stderr)
                continue
            records_of_work.append(record)
            if path:
                records.append_record(path, record)
        if records_of_work:
            print(f"{name}: {records.rounds_of(records_of_work)} of {config.rounds} rounds", file=sys.stderr)
    merged = {name: records.merged(items) for name, items in records_of.items() if items}
    return merged, failed


def tell_plan(config: BenchmarkConfig, todo: dict[Work, tuple[str, int]], limits: dict[str, float]) -> None:
    """Print to stderr how long each work may take. todo: work -> (its name, missing rounds).

    Without ceilings nothing is known, and nothing is printed.
    """
    if not limits:
        return
    total = 0.0
    for work, (name, rounds) in todo.items():
        num_contenders = len(installed(config.contenders(work), work)[0])
        seconds = seconds_of(work, limits, num_contenders * (rounds + config.warmup))
        total += seconds
        print(
            f"{name}: {rounds} rounds of {num_contenders} contenders, about {seconds:.0f} s and their starts",
            file=sys.stderr,
        )
    if total:
        limited = f", and --limit-seconds {config.limit_seconds:g} begins no turn later" if config.limit_seconds else ""
        print(f"all: about {total:.0f} s and the starts, which compile at the first time{limited}", file=sys.stderr)


def seconds_of(work: Work, limits: dict[str, float], turns: int) -> float:
    """Estimate the seconds of some turns: at half the measured GEMM ceiling, and at least `TURN` seconds each."""
    ceiling = limits["bf16_tflops" if work.bf16 else "fp32_tflops"] * 1e12
    return turns * max(TURN, 2 * work.flops_per_token * work.tokens / ceiling)


def run(config: BenchmarkConfig) -> None:
    """Measure, print, and write the files that were asked for. Raises Stopped if a work failed."""
    until = time.monotonic() + (config.limit_seconds or float("inf"))
    failed: dict[str, str] = {}
    if config.works:
        measured, failed = measure_works(config, until)
        print(overview(measured))
    else:
        record = measure(config, config.work, limits_of(config), config.rounds, until)
        measured = {config.model: records.merged([record])}
        print(markdown(measured[config.model]))
    if config.json:
        with naming_flag("--json", config.json, "choose a file that can be written"):
            content = measured if config.works else measured[config.model]
            Path(config.json).write_text(json.dumps(content, indent=1) + "\n")
    if config.picture:
        draw(measured, config.picture)
    if failed:
        raise Stopped("; ".join(f"{name} is not measured: {why}" for name, why in failed.items()))


def main(arguments: list[str] | None = None) -> int:
    return run_tool(__file__, __doc__, [BenchmarkConfig], run, arguments)


if __name__ == "__main__":
    sys.exit(main())

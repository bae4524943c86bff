"""Measure a training step: against the device's limits, and side by side with other code at the same work.

    python tools/benchmark.py --model gpt2-small --bf16
    python tools/benchmark.py --model gpt2-small --num-layers 4 --bf16 --peers none --json result.json
    python tools/benchmark.py --model gpt-28m --parallel tp

Each contender is a process, or one a rank; they take steps in turns. Prints Markdown.
"""

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config import BelowOne, Count, FlagConfig, Positive, WholeNumber, knob
from tools.benchmarking.contest import Contest, Plan, ceilings
from tools.benchmarking.report import markdown
from tools.benchmarking.work import MODELS, OURS, PARALLEL, PEERS, Contender, Work
from tools.errors import run_tool


@dataclass(frozen=True)
class BenchmarkConfig(FlagConfig):
    """Benchmark."""

    model: Literal[tuple(MODELS)] = knob(  # type: ignore[valid-type]
        "gpt2-small", "model to start from; the flags below override its sizes"
    )
    num_layers: int | None = knob(None, "transformer layers")
    hidden_size: int | None = knob(None, "hidden size")
    num_attention_heads: int | None = knob(None, "attention heads")
    vocab_size: int | None = knob(None, "vocabulary size, padded to a multiple of 128")
    seq_length: int | None = knob(None, "tokens per sample; default: the model's, else 512")
    micro_batch_size: int | None = knob(None, "samples per forward; default: the model's, else 4")
    global_batch_size: int | None = knob(
        None, "samples per iteration; default: one micro-batch a replica, four with --parallel pp"
    )
    attention_dropout: BelowOne = knob(0.0, "dropout of attention probabilities, of every contender")
    hidden_dropout: BelowOne = knob(0.0, "dropout after the embedding and each block, of every contender")
    bf16: bool = knob(False, "ours in bfloat16 with float32 masters, peers under bfloat16 autocast; else float32")
    parallel: Literal[tuple(PARALLEL)] = knob(  # type: ignore[valid-type]
        "none",
        "on several ranks: dp against DistributedDataParallel, zero3 against fully_shard, tp against DTensor, pp against "
        "torch.distributed.pipelining",
    )
    ranks: Count = knob(2, "ranks of --parallel, with equal shares of the cores")
    peers: list[str] = knob(
        ["plain", "plain-compiled", "transformers", "transformers-compiled"],
        "plain PyTorch and transformers, eager and compiled, in our precision; fp32, bf16, compiled: transformers in float32, "
        "bfloat16 autocast, compiled with autocast; none",
        metavar="NAME",
    )
    same_allocator: bool = knob(False, "peers keep freed memory in the process, too, as ours does on a CPU")
    rounds: Count = knob(9, "measured turns of each contender")
    warmup: WholeNumber = knob(2, "unmeasured iterations of each contender; the first one compiles")
    steps: Count | None = knob(None, "iterations of a turn; default: half a second of them")
    limit_seconds: Positive | None = knob(None, "begin no turn after so many seconds")
    profile: bool = knob(False, "list the operators that take most of an iteration")
    ceilings: bool = knob(True, "do not measure the limits of the device", flags=("--no-ceilings",))
    device: Literal["auto", "cpu"] = knob("auto", "device to run on; auto: an accelerator if there is one")
    json: str | None = knob(None, "file for all measurements", metavar="FILE")

    def problems(self) -> Iterator[str]:
        if unknown := [name for name in self.peers if name not in (*PEERS, "none")]:
            yield f"--peers {' '.join(unknown)}: there are {', '.join(PEERS)}, and none"
        yield from self.work.problems()

    @property
    def work(self) -> Work:
        given = {f.name: getattr(self, f.name) for f in fields(Work) if getattr(self, f.name, None) is not None}
        given["ranks"] = 1 if self.parallel == "none" else self.ranks
        sizes = {**MODELS[self.model], **given}
        one = Work(**sizes)
        batch = one.micro_batch_size * one.replicas * (4 if self.parallel == "pp" else 1)
        return Work(**{"global_batch_size": batch, **sizes})

    @property
    def contenders(self) -> list[Contender]:
        peers = [PEERS[name] for name in self.peers if name != "none"]
        if self.parallel != "none":  # transformers' loops leave the layout to torch's parts too
            peers = [one for one in peers if one.library == "plain"]
        return [OURS, *(Contender(**asdict(one) | {"same_allocator": self.same_allocator}) for one in peers)]

    @property
    def plan(self) -> Plan:
        limit = float("inf") if self.limit_seconds is None else self.limit_seconds
        return Plan(self.rounds, self.warmup, self.steps, limit, self.profile)


def measure(config: BenchmarkConfig) -> dict[str, Any]:
    """All measurements, as written to --json."""
    work, contenders = config.work, config.contenders
    missing: dict[str, str] = {}
    if importlib.util.find_spec("transformers") is None:
        without = [one for one in contenders if one.library == "transformers"]
        contenders = [one for one in contenders if one not in without]
        reason = "transformers is not installed (pip install transformers)"
        missing = {one.title(work.parallel): reason for one in without}
    contest = Contest(contenders, work, config.device, config.plan)
    contest.run()
    return {
        "work": asdict(work),
        "parameters": work.parameters,
        "flops_per_token": work.flops_per_token,
        "flops_per_token_full_attention": work.shape.flops_per_token(full_attention=True),
        "ceilings": ceilings(config.device, Work(**asdict(work) | {"ranks": 1})) if config.ceilings else {},
        "results": contest.results(),
        "not_measured": missing | contest.failed,
    }


def run(config: BenchmarkConfig) -> None:
    measured = measure(config)
    if config.json:
        Path(config.json).write_text(json.dumps(measured, indent=1) + "\n")
    print(markdown(measured))


def main(arguments: list[str] | None = None) -> int:
    return run_tool(__file__, __doc__, [BenchmarkConfig], run, arguments)


if __name__ == "__main__":
    sys.exit(main())

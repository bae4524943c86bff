"""Measure a training step: against the device's limits, and side by side with transformers' GPT-2 at the same work.

    python tools/benchmark.py --model gpt2-small --bf16
    python tools/benchmark.py --model gpt2-small --num-layers 4 --bf16 --peers none --json result.json

Each contender is one process; they take steps in turns. Prints Markdown.
"""

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config import Count, FlagConfig, WholeNumber, knob
from tools.benchmarking.contest import Stopped, ceilings, contest
from tools.benchmarking.report import markdown
from tools.benchmarking.work import MODELS, Work
from tools.errors import run_tool

PEERS = {
    "fp32": "transformers fp32",
    "bf16": "transformers bf16 autocast",
    "compiled": "transformers bf16 autocast, compiled",
}


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
    seq_length: int = knob(512, "tokens per sample")
    micro_batch_size: int = knob(4, "samples per forward")
    global_batch_size: int | None = knob(None, "samples per iteration; default: one micro-batch")
    bf16: bool = knob(False, "ours in bfloat16 with float32 masters; else float32")
    peers: list[str] = knob(
        list(PEERS), "transformers' GPT-2 in float32, bfloat16 autocast, compiled; or none", metavar="NAME"
    )
    rounds: Count = knob(7, "measured iterations of each contender")
    warmup: WholeNumber = knob(2, "unmeasured iterations of each contender")
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
        return Work(**{"global_batch_size": self.micro_batch_size, **MODELS[self.model], **given})

    @property
    def contenders(self) -> list[str]:
        return ["ours"] + [PEERS[name] for name in self.peers if name != "none"]


def measure(config: BenchmarkConfig) -> dict[str, Any]:
    """All measurements, as written to --json."""
    work, missing = config.work, {}
    names = config.contenders
    if len(names) > 1 and importlib.util.find_spec("transformers") is None:
        missing = dict.fromkeys(names[1:], "transformers is not installed (pip install transformers)")
        names = names[:1]
    options = {"rounds": config.rounds, "warmup": config.warmup, "profile": config.profile}
    results, failed = contest(names, work, config.device, **options)
    if "ours" in failed:
        raise Stopped(f"our own step failed: {failed['ours']}")
    return {
        "work": asdict(work),
        "parameters": work.parameters,
        "flops_per_token": work.shape.flops_per_token(),
        "flops_per_token_full_attention": work.shape.flops_per_token(full_attention=True),
        "ceilings": ceilings(config.device, work) if config.ceilings else {},
        "results": results,
        "not_measured": missing | failed,
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

"""Say how much memory a run needs on each rank, before anything is allocated and without any process but this one.

    python tools/estimate_memory.py --world-size 1024 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 \\
        --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --micro-batch-size 1 \\
        --global-batch-size 1536 --bf16 --sequence-parallel --use-distributed-optimizer --vocab-size 51200
    python tools/estimate_memory.py --measure --rank 2 --world-size 8 ...    train that rank here, alone, and count
    its tensors beside
    python tools/estimate_memory.py --model mine/pretrain.py ...             a script's own model

Takes the flags of pretrain_gpt.py, or with --model bert of pretrain_bert.py; of data and steps none is needed.
docs/memory.md says what is counted.
"""

import argparse
import json
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from megatron.core.config import ConfigError
from megatron.core.device import Device
from megatron.core.models.rules import BERT_RULES, GPT_RULES, NO_RULES, text_problems
from megatron.core.products import NATIVE, WAYS, Products
from megatron.core.random import DropoutKeys
from megatron.core.tiers.offload_config import make_tier
from megatron.core.tokenizers import build_tokenizer
from megatron.core.tokenizers.tokenizer_config import NO_TOKENIZER
from megatron.core.weight_grads import WeightGradStore
from megatron.training.arguments import ArgumentsError, parse_args
from megatron.training.initialize import collected
from megatron.training.memory.dry_run import Job, alone, dry_run, mesh_of, parts_of
from megatron.training.memory.report import amount, as_json, full_report, table
from megatron.training.memory.room import hint_of_fused
from megatron.training.memory.timeline import IN_MEMORY, KINDS, RankMemory, along, forecast
from megatron.training.memory.tracker import MemoryTracker
from megatron.training.runtime import Runtime
from megatron.training.settings.config import Config
from megatron.training.settings.rules import apart_from, check, filled_in
from megatron.training.train_step import train_step

ROOT = Path(__file__).resolve().parent.parent
_RULES = {"gpt": GPT_RULES, "bert": BERT_RULES}


def add_own_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Estimate")
    group.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks of the job (default: 1)")
    group.add_argument(
        "--model",
        default="gpt",
        metavar="NAME",
        help="gpt, bert, or the path of a script like theirs: what the run trains; the other flags are those of "
        "pretrain_gpt.py, pretrain_bert.py (default: gpt)",
    )
    group.add_argument("--json", action="store_true", help="print JSON instead of a table")
    group.add_argument(
        "--measure", action="store_true", help="train one rank here, the others silent, and count its tensors"
    )
    group.add_argument("--rank", type=int, default=0, metavar="N", help="the one that is measured (default: 0)")


def defaults_for(words: Sequence[str]) -> dict[str, Any]:
    """What a run must say and memory does not depend on."""
    given = {word.split("=")[0] for word in words}
    defaults: dict[str, Any] = {"lr": 1e-4, "tokenizer_type": "NullTokenizer"}
    if not given & {"--train-samples", "--train-iters"}:
        defaults["train_iters"] = 1
    if not any(word.endswith(("data-path", "data-args-path")) for word in given):
        defaults["mock_data"] = True
    return defaults


class Read(NamedTuple):
    """What the tool was asked for."""

    job: Job
    args: Any


def read(words: Sequence[str]) -> Read:
    """Raises ConfigError with all problems."""
    try:
        config, args = parse_args(words, add_own_flags, defaults_for(words))[:2]
    except ArgumentsError as error:
        found: list[str] = []
        with collected(found):
            check(filled_in(error.parts), _world_size_in(words))
        found += text_problems(filled_in(error.parts))
        problems = error.problems + apart_from(error.problems, error.parts, found)
        raise ConfigError([_in_terms_of_words(problem) for problem in problems]) from None
    if args.world_size < 1:
        raise ConfigError(f"--world-size is {args.world_size}; it must be at least 1")
    if not 0 <= args.rank < args.world_size:
        raise ConfigError(f"--rank is {args.rank}; there are ranks 0 to {args.world_size - 1}")
    check_run(config, args.world_size, args.model)
    try:
        tokenizer = build_tokenizer(config.tokenizer)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    way, script = config.transformer.cpu_half_products, script_of(args.model)
    runtime = Runtime(
        config,
        args,
        mesh_of(config, args.world_size, 0),
        Device("cpu"),
        tokenizer,
        DropoutKeys(1),
        WeightGradStore(),
        products=Products.all(way) if way in WAYS else NATIVE,  # by the flags, not by this CPU
    )
    # A laptop plans for the machine that will run it, unless it says that this is a CPU.
    accelerator = config.device.device != "cpu" and not args.measure
    return Read(Job(runtime, script.model_provider, script.forward_step, args.world_size, accelerator), args)


def script_of(model: str) -> SimpleNamespace:
    """The functions of a script, by their names."""
    path = ROOT / f"pretrain_{model}.py" if model in _RULES else Path(model)
    if not path.is_file():
        raise ConfigError(f"--model is {model}; it must be gpt, bert, or the path of a script such as pretrain_gpt.py")
    return SimpleNamespace(**runpy.run_path(str(path), run_name="script"))


def check_run(config: Config, world_size: int, model: str) -> None:
    """Raise ConfigError where so many ranks cannot train this model with these settings."""
    found: list[str] = []
    with collected(found):
        check(config, world_size)
    if found := found + _RULES.get(model, NO_RULES).problems(config, None):
        raise ConfigError([_in_terms_of_words(problem) for problem in found])


def _in_terms_of_words(problem: str) -> str:
    """Of a tokenizer only the number of its words is needed here."""
    enough = (
        "--vocab-size N is required: the number of words is enough, and so are the tokenizer's own flags "
        "(--tokenizer-type ...)"
    )
    return enough if problem == NO_TOKENIZER else problem


def _world_size_in(words: Sequence[str]) -> int:
    """For the rules that can be checked although others are broken."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_own_flags(parser)
    return max(1, parser.parse_known_args(words)[0].world_size)


# ---------------------------------------------------------------- a measurement


class Measured(NamedTuple):
    """One rank of a layout: peaks in a step by kind, of all kinds together, and of the whole time, while it was built too."""

    bytes: dict[str, int]
    total: int
    ever: int
    in_file: int  # state and activations that take none of it
    predicted: RankMemory

    @property
    def expected(self) -> dict[str, int]:
        """By kind, what is predicted for the memory of this machine."""
        return self.predicted.within(*IN_MEMORY)


def batches_of(config: Config, vocab_size: int, model: str) -> Iterator[dict[str, Tensor]]:
    """Microbatches without end."""
    shape = (config.training.micro_batch_size, config.data.seq_length)
    generator = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(0, vocab_size, shape, generator=generator)
        zeros, ones = torch.zeros(shape, dtype=torch.int64), torch.ones(shape, dtype=torch.int64)
        batch = {"tokens": tokens, "labels": tokens, "position_ids": torch.arange(shape[1]).expand(shape)}
        batch |= {"loss_mask": torch.ones(shape), "document_ids": zeros, "text": tokens, "types": zeros}
        yield batch | {"padding_mask": ones, "is_random": zeros[:, 0]}


def measure(words: Sequence[str], world_size: int = 1, rank: int = 0, model: str = "gpt", steps: int = 2) -> Measured:
    """Train this rank for some steps, and count in the last of them. Raises ConfigError."""
    own = ["--measure", "--world-size", str(world_size), "--rank", str(rank), "--model", model]
    job = read([*words, *own, "--device", "cpu"]).job
    config, profile = job.runtime.config, dry_run(job, rank)
    mesh, tier = mesh_of(config, world_size, rank), make_tier(config.offload, rank, torch.device("cpu"))
    try:
        with alone(job.runtime, mesh, tier=tier) as runtime, MemoryTracker() as tracker:
            parts = parts_of(runtime, job)
            tracker.assign_state(parts.chunks.values(), parts.optimizer)
            ever, data = tracker.peak["total"], batches_of(config, runtime.vocab_size, model)
            iterators = dict.fromkeys(parts.chunks, data if mesh["tp"].is_first else None)
            for _ in range(steps):
                tracker.restart()
                train_step(parts.pipeline, parts.optimizer, iterators, first_sample=0, lr=0.0, check_finite=False)
            in_file = sum(tracker.in_file.values()) + parts.bytes_in_file
    finally:
        if tier is not None:
            tier.close()
    pp_rank = mesh["pp"].rank
    predicted = RankMemory(pp_rank, profile.layers, along(profile, pp_rank), profile.parameters)
    kinds, total = {kind: tracker.peak[kind] for kind in KINDS}, tracker.peak["total"]
    return Measured(kinds, total, max(ever, total), in_file, predicted)


def _measured_report(got: Measured) -> list[str]:
    expected = got.expected
    rows = [["", "measured", "predicted"]]
    rows += [[kind, amount(got.bytes[kind]), amount(expected[kind])] for kind in KINDS]
    rows += [["all", amount(got.total), amount(sum(expected.values()))], ["while built too", amount(got.ever), ""]]
    if got.in_file:
        rows.append(["in a file", amount(got.in_file), amount(got.predicted.tiers.get("file", 0))])
    return [f"stage {got.predicted.rank}", *table(rows)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; 0 is success, 2 a mistake in the flags."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        job, args = read(words)
        if args.measure:
            lines = _measured_report(measure(_without_own(words), args.world_size, args.rank, args.model))
        else:
            ranks = forecast(job)
            lines = [json.dumps(as_json(job, ranks), indent=1)] if args.json else full_report(job, ranks)
            lines += [] if args.json else hint_of_fused(job, ranks)
    except ConfigError as error:
        lines = "\n".join(f"  - {problem}" for problem in error.problems)
        print(f"cannot estimate, {len(error.problems)} problem(s):\n{lines}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


def _without_own(words: Sequence[str]) -> list[str]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_own_flags(parser)
    return parser.parse_known_args(words)[1]


if __name__ == "__main__":
    sys.exit(main())

"""Say how much memory a run needs on each rank, before anything is allocated and without any process but this one.

    python tools/estimate_memory.py --world-size 1024 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 \\
        --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --micro-batch-size 1 \\
        --global-batch-size 1536 --bf16 --sequence-parallel --use-distributed-optimizer --vocab-size 51200

Takes the flags of pretrain_gpt.py, or with --model bert of pretrain_bert.py; of data and steps none is needed. docs/memory.md says what is counted.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config import ConfigError
from megatron.core.models.rules import BERT_RULES, GPT_RULES, text_problems
from megatron.core.tokenizers import build_tokenizer
from megatron.core.tokenizers.tokenizer_config import NO_TOKENIZER
from megatron.training.arguments import ArgumentsError, parse_args
from megatron.training.initialize import collected
from megatron.training.memory.estimate import estimate
from megatron.training.memory.report import as_json, full_report
from megatron.training.memory.room import hint_of_fused
from megatron.training.memory.sizes import MODELS, RunSizes
from megatron.training.settings.config import Config
from megatron.training.settings.rules import apart_from, check, filled_in


def add_own_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Estimate")
    group.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks of the job (default: 1)")
    add_model_flag(group)
    group.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_model_flag(group: argparse._ActionsContainer) -> None:
    help_text = "what the run trains: the other flags are those of pretrain_gpt.py, pretrain_bert.py (default: gpt)"
    group.add_argument(
        "--model", choices=MODELS, default="gpt", metavar="NAME", help=f"{', '.join(MODELS)}; {help_text}"
    )


def defaults_for(words: Sequence[str]) -> dict[str, Any]:
    """What a run must say and memory does not depend on."""
    given = {word.split("=")[0] for word in words}
    defaults: dict[str, Any] = {"lr": 1e-4, "tokenizer_type": "NullTokenizer"}
    if not given & {"--train-samples", "--train-iters"}:
        defaults["train_iters"] = 1
    if not any(word.endswith(("data-path", "data-args-path")) for word in given):
        defaults["mock_data"] = True
    return defaults


def read(words: Sequence[str]) -> tuple[RunSizes, bool]:
    """(the sizes of the run, whether JSON is wanted). Raises ConfigError with all problems."""
    try:
        config, args, _ = parse_args(words, add_own_flags, defaults_for(words))
    except ArgumentsError as error:
        found: list[str] = []
        with collected(found):
            check(filled_in(error.parts), _world_size_in(words))
        found += text_problems(filled_in(error.parts))
        problems = error.problems + apart_from(error.problems, error.parts, found)
        raise ConfigError([_in_terms_of_words(problem) for problem in problems]) from None
    if args.world_size < 1:
        raise ConfigError(f"--world-size is {args.world_size}; it must be at least 1")
    check_run(config, args.world_size, args.model)
    try:
        vocab_size = build_tokenizer(config.tokenizer).vocab_size
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    # A laptop plans for the machine that will run it, unless it says that this is a CPU.
    accelerator = config.device.device != "cpu"
    return RunSizes.of(config, vocab_size, args.world_size, accelerator=accelerator, model=args.model), args.json


_RULES = {"gpt": GPT_RULES, "bert": BERT_RULES}


def check_run(config: Config, world_size: int, model: str) -> None:
    """Raise ConfigError where so many ranks cannot train this model with these settings."""
    found: list[str] = []
    with collected(found):
        check(config, world_size)
    if found := found + _RULES[model].problems(config, None):
        raise ConfigError([_in_terms_of_words(problem) for problem in found])


def _in_terms_of_words(problem: str) -> str:
    """Of a tokenizer only the number of its words is needed here."""
    enough = "--vocab-size N is required: the number of words is enough, and so are the tokenizer's own flags (--tokenizer-type ...)"
    return enough if problem == NO_TOKENIZER else problem


def _world_size_in(words: Sequence[str]) -> int:
    """For the rules that can be checked although others are broken."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_own_flags(parser)
    return max(1, parser.parse_known_args(words)[0].world_size)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; 0 is success, 2 a mistake in the flags."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        run, wants_json = read(words)
        ranks = estimate(run)
    except ConfigError as error:
        lines = "\n".join(f"  - {problem}" for problem in error.problems)
        print(f"cannot estimate, {len(error.problems)} problem(s):\n{lines}", file=sys.stderr)
        return 2
    report = [*full_report(run, ranks), *hint_of_fused(run, ranks)]
    print(json.dumps(as_json(run, ranks), indent=1) if wants_json else "\n".join(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())

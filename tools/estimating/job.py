"""Read the job that a command line describes: flags of the training script, and those of tools/estimate_memory.py."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.core.base.dataclass_flags import ConfigError, FlagParser, flags_of, option_fields
from megatron.core.datasets.choose_masked_spans import MaskedDataConfig
from megatron.core.models.common.model_rules import missing_text_settings
from megatron.core.ops.cpu_half_precision_matmul import MATMUL_MODES, NATIVE, MatmulModes
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.ops.weight_grad_store import WeightGradStore
from megatron.core.parallel.accelerator import Device
from megatron.core.tokenizers import build_tokenizer
from megatron.core.tokenizers.tokenizer_config_and_build import NO_TOKENIZER
from megatron.training.arguments.command_line import ArgumentsError, parse_args
from megatron.training.arguments.config import Config
from megatron.training.arguments.hf_config import hf_config_problems, other_model_problem
from megatron.training.arguments.validation import check, drop_doubtful_problems, with_default_components
from megatron.training.global_vars import Runtime
from megatron.training.initialize import as_config_error, collected
from megatron.training.memory.dry_run_of_one_rank import Job, mesh_of
from tools.estimating.flags import add_own_flags
from tools.script import script_at

_VOCAB_SIZE_NEEDED = (
    "--vocab-size N is required: the number of words is enough, and so are the tokenizer's own flags "
    "(--tokenizer-type ...)"
)


def _needed_settings(words: Sequence[str]) -> dict[str, Any]:
    """Return defaults for settings that a run must have and that do not change its memory."""
    flags = {word.split("=")[0] for word in words}
    defaults: dict[str, Any] = {"lr": 1e-4, "tokenizer_type": "NullTokenizer"}
    if not flags & {"--train-samples", "--train-iters"}:
        defaults["train_iters"] = 1
    if not any(word.endswith(("data-path", "data-args-path")) for word in flags):
        defaults["mock_data"] = True
    return defaults


def _flags_of_masks() -> list[str]:
    """Return the flags of masked words."""
    return [flag for field in option_fields(MaskedDataConfig) for flag in flags_of(field)]


class JobAndArgs(NamedTuple):
    """A command line that was read."""

    job: Job
    args: Any  # namespace with all flags, also those of the tool itself


def read(words: Sequence[str], job_defaults: Mapping[str, Any] | None = None) -> JobAndArgs:
    """Read and check the job that `words` describe. Raises ConfigError with all problems at once.

    job_defaults: values of settings, and of --world-size, where neither the command line nor a file gives them.
    """
    tool_flags = own_flags_in(words)
    script = script_at(tool_flags.model)

    def add_flags(parser: argparse.ArgumentParser) -> None:
        add_own_flags(parser)
        if script.extra_args_provider is not None:
            script.extra_args_provider(parser)

    # parse the flags; after an error, check the rest nonetheless, to report all problems at once
    defaults = {**(script.args_defaults or {}), **_needed_settings(words), **(job_defaults or {})}
    try:
        config, args, notes = parse_args(words, add_flags, defaults, script.rules.unread)
    except ArgumentsError as error:
        config = with_default_components(error.parts)
        world_size = max(1, _world_size(tool_flags.world_size, config))
        further_problems = _problems_of(config, world_size) + missing_text_settings(config)
        raise _refusal(error.problems + drop_doubtful_problems(error.problems, error.parts, further_problems)) from None

    # a recipe of a BERT or T5 would be estimated as a GPT without a word
    of_masks = [
        flag for flag in _flags_of_masks() if any(flag in note.split(":")[1].split() for note in notes if ":" in note)
    ]
    if of_masks and not any(word.split("=")[0] == "--model" for word in words):
        raise ConfigError(
            f"{' and '.join(of_masks)} {'are' if len(of_masks) > 1 else 'is'} read by a model of masked words, and the default "
            "--model is gpt; add --model bert or --model t5, or --model gpt if it is a GPT"
        )

    # check the settings as a run does
    world_size = args.world_size = _world_size(args.world_size, config)
    if world_size < 1:
        raise ConfigError(f"--world-size is {world_size}; it must be at least 1")
    if not 0 <= (args.rank or 0) < world_size:
        ranks = f"ranks 0 to {world_size - 1}" if world_size > 1 else "rank 0 alone"
        raise ConfigError(f"--rank is {args.rank}, and a job of --world-size {world_size} has {ranks}; change one")
    other_model = other_model_problem(config, script.rules)
    if other_model is not None:
        raise _refusal([other_model])
    problems = [*_problems_of(config, world_size), *hf_config_problems(config), *script.rules.problems(config, None)]
    if any("pretrain_t5.py" in problem for problem in problems):
        problems.append(f"the model is that of --model {tool_flags.model}; --model t5 has an encoder and a decoder")
    if problems:
        raise _refusal(problems)

    # build what a run has before its model
    with as_config_error():
        tokenizer = None if config.tokenizer.tokenizer_type is None else build_tokenizer(config.tokenizer)
    way = config.transformer.cpu_half_products
    matmul_modes = MatmulModes.all(way) if way in MATMUL_MODES else NATIVE  # by the flags, not by a trial on this CPU
    mesh = mesh_of(config, world_size, 0)
    keys = SampleDropoutKeys(1)
    runtime = Runtime(config, args, mesh, Device("cpu"), tokenizer, keys, WeightGradStore(), matmul_modes=matmul_modes)
    # The prediction is for the accelerators that will train, whatever this machine has, unless the flags choose a CPU.
    accelerator = config.device.device != "cpu" and not args.measure
    job = Job(runtime, script.model_provider, script.forward_step, accelerator, script.group_of)
    return JobAndArgs(job, args)


def _world_size(requested: int | None, config: Config) -> int:
    """Return the ranks of the job: --world-size, or as few as its layout needs."""
    if requested is not None:
        return requested
    return config.parallel.ranks_per_sample * config.data_parallel.num_distributed_optimizer_instances


def _problems_of(config: Config, world_size: int) -> list[str]:
    """Return the validation errors of these settings on `world_size` ranks."""
    problems: list[str] = []
    with collected(problems):
        check(config, world_size)
    return problems


def _refusal(problems: Sequence[str]) -> ConfigError:
    """Return the error of these problems. For a missing tokenizer it asks for --vocab-size, which is enough here."""
    return ConfigError([_VOCAB_SIZE_NEEDED if problem == NO_TOKENIZER else problem for problem in problems])


def own_flags_in(words: Sequence[str]) -> argparse.Namespace:
    """Read the tool's own flags from a command line whose other flags may be invalid. Raises ConfigError."""
    parser = FlagParser(add_help=False)
    add_own_flags(parser)
    return parser.parse_known_args(words)[0]

"""Build the index cache of a training run, without training. The flags are those of the training script.

    python tools/prepare_cache.py --data-path 0.7 A 0.3 B --seq-length 1024 --micro-batch-size 4 --global-batch-size 256 \
        --train-iters 10000 ...

The tool needs one process, no accelerator and no model. A run with the same flags then builds nothing, so that a job of many
nodes does not wait while one rank builds. If the batch size depends on the number of ranks (no --global-batch-size), give
--prepare-cache-world-size. The script is pretrain_gpt.py; with --prepare-cache-model bert or t5 it is pretrain_bert.py or
pretrain_t5.py.
"""
# ruff: noqa: E402  (--help is answered before torch is imported, which takes seconds)

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.base.dataclass_flags import ConfigError, FlagParser, option_fields
from megatron.core.models.common.model_rules import BERT_RULES, GPT_RULES, T5_RULES, ModelRules
from megatron.training.arguments.config import COMPONENTS, Config
from megatron.training.arguments.parser import answer_help
from tools.errors import exit_status


@dataclass(frozen=True)
class Script:
    """The defaults and rules of a training script."""

    tokenizer: str  # default of --tokenizer-type
    rules: ModelRules
    defaults: Mapping[str, Any] = field(default_factory=dict)


SCRIPTS = {
    "gpt": Script("GPT2BPETokenizer", GPT_RULES),
    "bert": Script("BertWordPieceLowerCase", BERT_RULES),
    "t5": Script("BertWordPieceLowerCase", T5_RULES, {"decoder_num_layers": 0}),
}
# The settings on which indices depend: all of these components, and those that determine how many samples a run
# requests. --lr is required as in training.
_DATA_COMPONENTS = ("data", "fim", "masked_data", "tokenizer")
_SIZES = (
    "micro_batch_size global_batch_size rampup_batch_size step_batch_size_schedule decrease_batch_size_if_needed train_iters "
    "train_samples eval_interval eval_iters eval_global_batch_size seed lr tensor_model_parallel_size "
    "pipeline_model_parallel_size num_distributed_optimizer_instances"
)
UNREAD = {}  # setting without effect here -> the reason, for its help
for _component, _config_class in COMPONENTS.items():
    if _component not in _DATA_COMPONENTS:
        for _field in option_fields(_config_class):
            if _field.name not in _SIZES.split():
                UNREAD[_field.name] = "no index depends on it"


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the tool's own flags; return the parser."""
    group = parser.add_argument_group("Cache")
    help_text = "processes of the run to prepare for; needed if its step size depends on them"
    group.add_argument("--prepare-cache-world-size", type=int, metavar="N", help=help_text, default=None)
    names = ", ".join(SCRIPTS)
    help_text = (
        f"what the run trains, one of {names}: the other flags are those of pretrain_gpt.py, pretrain_bert.py, ..."
    )
    group.add_argument("--prepare-cache-model", choices=list(SCRIPTS), metavar="NAME", help=help_text, default="gpt")
    return parser


def script_of(argv: Sequence[str] | None) -> str:
    """Return the name of --prepare-cache-model. Raises ConfigError for an unknown one."""
    options, _ = add_flags(FlagParser(add_help=False)).parse_known_args(argv)
    return options.prepare_cache_model


def defaults_of(script: Script) -> dict[str, Any]:
    """Return the script's defaults of settings."""
    return {"tokenizer_type": script.tokenizer, **script.defaults}


if __name__ == "__main__":
    answer_help(defaults_of(SCRIPTS["gpt"]), UNREAD, add_flags)

from megatron.core.datasets.bert_dataset_builder import build_bert_datasets
from megatron.core.datasets.gpt_dataset_and_builder import build_gpt_datasets
from megatron.core.datasets.index_map import SPLIT_NAMES
from megatron.core.datasets.t5_dataset_builder import build_t5_datasets
from megatron.training.arguments.command_line import parse_args
from megatron.training.checkpointing.train_state_counters import TrainState
from megatron.training.initialize import examine_without_device
from megatron.training.num_samples import samples_to_request


def _build_gpt(config: Config, *request: Any, **callbacks: Any) -> tuple:
    return build_gpt_datasets(config.data, *request, fim=config.fim, **callbacks)


def _build_bert(config: Config, *request: Any, **callbacks: Any) -> tuple:
    return build_bert_datasets(config.data, config.masked_data, *request, **callbacks)


def _build_t5(config: Config, *request: Any, **callbacks: Any) -> tuple:
    return build_t5_datasets(config.data, config.masked_data, *request, **callbacks)


# (settings of the run, tokenizer, samples of each split, seed, say=, progress=) -> the data sets of each split
BUILDERS: dict[str, Callable[..., tuple]] = {"gpt": _build_gpt, "bert": _build_bert, "t5": _build_t5}


def world_size_of(config: Config, requested: int | None) -> int:
    """Return the ranks of the run: --prepare-cache-world-size, or as few as the layout needs.

    Raises ConfigError if the batch size depends on the number of ranks, and it was not requested.
    """
    if requested is not None:
        if requested < 1:
            raise ConfigError(f"--prepare-cache-world-size ({requested}) must be at least 1")
        return requested
    training = config.training
    has_batch_size = training.global_batch_size is not None or training.step_batch_size_schedule is not None
    if not has_batch_size or training.decrease_batch_size_if_needed:
        raise ConfigError("the step size depends on the number of processes; give --prepare-cache-world-size")
    return config.parallel.ranks_per_sample * config.data_parallel.num_distributed_optimizer_instances


def prepare(argv: Sequence[str] | None, say: Callable[[str], None]) -> dict[str, int]:
    """Build the indices of the run of this command line; return {split: samples}. Raises ConfigError or ValueError."""
    # read and check the flags as training does
    name = script_of(argv)
    script = SCRIPTS[name]
    parsed = parse_args(argv, add_flags, defaults_of(script), UNREAD)
    config = parsed.config
    world_size = world_size_of(config, parsed.args.prepare_cache_world_size)
    problems, tokenizer = examine_without_device(config, world_size, script.rules)
    if config.data.mock_data:
        problems.append("--mock-data has no index; give --data-path")
    if problems:
        raise ConfigError(problems)

    # build the data sets that the run would request
    train_iters = config.train_iters(world_size)
    batch_sizes = (config.batch_sizes(world_size).last, config.eval_batch_size(world_size))
    num_samples = samples_to_request(config.training, config.data, train_iters, batch_sizes, TrainState())
    datasets = BUILDERS[name](config, tokenizer, num_samples, config.training.seed, say=say, progress=say)

    lengths = {}
    for split, dataset in zip(SPLIT_NAMES, datasets):
        sets = dataset if isinstance(dataset, list) else [dataset]  # a list: several validation sets
        if sets != [None]:
            lengths[split] = sum(map(len, sets))
    return lengths


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; return the exit status."""
    began = time.monotonic()

    def progress(message: str) -> None:
        print(f"{time.monotonic() - began:8.1f} s  {message}", flush=True)

    def work() -> None:
        lengths = prepare(arguments, progress)
        progress("ready: " + ", ".join(f"{count:,} {name} samples" for name, count in lengths.items()))

    return exit_status("prepare_cache", work, "indices built so far stay; the same command continues")


if __name__ == "__main__":
    sys.exit(main())

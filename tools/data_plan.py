"""Plan the reading of a run: tokens, samples, epochs and bytes of each data set of a blend.

    python tools/data_plan.py --data-path 0.7 data/books_text_document 0.3 data/wiki_text_document \
        --seq-length 1024 --global-batch-size 256 --train-iters 10000

The flags are those of training, with its defaults. Validation and test need --global-batch-size; --eval-iters 0 leaves them
out. Builds and writes nothing.
--yaml-cfg FILE reads them from the file of a training run, whose other settings change no plan. BERT's and T5's samples are
counted by tools/prepare_cache.py, which builds their index.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.base.dataclass_flags import (
    ConfigError,
    Count,
    FlagConfig,
    FlagParser,
    WholeNumber,
    option,
    option_fields,
    read_flags,
)
from megatron.core.datasets.choose_masked_spans import MaskedDataConfig
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.gpt_dataset_and_builder import plan_data_usage
from megatron.core.datasets.index_map import SPLIT_NAMES, requested_samples
from megatron.core.datasets.planned_data_usage import DataUsage, total
from tools.errors import run_tool

EVAL_ITERS = 100  # of a training run


@dataclass(frozen=True)
class PlanConfig(FlagConfig):
    """How much is read."""

    global_batch_size: Count | None = option(None, "samples per iteration")
    train_iters: Count | None = option(None, "training iterations")
    train_samples: Count | None = option(None, "number of training samples, instead of --train-iters")
    eval_interval: int = option(1000, "iterations between validations; 0: validate only after training")
    eval_iters: WholeNumber | None = option(
        None,
        f"global batches per validation; 0: plan the training split only; default: {EVAL_ITERS}, as in training, with "
        "--global-batch-size",
    )
    eval_global_batch_size: Count | None = option(
        None, "samples per global batch of validation and test; default: --global-batch-size"
    )
    start_eval_at_iter: Count | None = option(
        None, "no validation before this iteration; default: from the first --eval-interval on"
    )

    def problems(self) -> Iterator[str]:
        if (self.train_iters is None) == (self.train_samples is None):
            yield "give either --train-iters (with --global-batch-size) or --train-samples"
        elif (self.train_iters is not None or self.eval_iters) and self.global_batch_size is None:
            yield "--train-iters and --eval-iters need --global-batch-size"

    def samples_of(self, data: DataConfig) -> list[int | None]:
        """Return the samples of the training, validation and test split; None for all samples of the split."""
        batch_size = self.global_batch_size or 1
        iters = self.train_iters or self.train_samples // batch_size
        train, valid, test = requested_samples(
            iters,
            self.eval_interval,
            self.batches_per_validation,
            batch_size,
            eval_batch_size=self.eval_global_batch_size,
            start_eval_at_iter=self.start_eval_at_iter,
        )
        return [self.train_samples or train, None if data.full_validation else valid, test]

    @property
    def batches_per_validation(self) -> int:
        """The value of --eval-iters; 0 if neither it nor the size of a batch is given."""
        if self.eval_iters is None:
            return EVAL_ITERS if self.global_batch_size else 0
        return self.eval_iters


def plan(config: PlanConfig, data: DataConfig) -> str:
    """Return a table for each split. Raises ValueError or FileNotFoundError for data that cannot be read."""
    problems = list(data.source_problems())
    if not data.seq_length:
        problems.append("--seq-length is needed")
    if data.mock_data:
        problems.append("--mock-data leaves nothing to plan; give --data-path")
    problems = problems or data.validation_problems()
    if problems:
        raise ConfigError(problems)
    plans = plan_data_usage(data, config.samples_of(data))
    if not plans[0]:
        raise ValueError(f"--split {data.split_shares} leaves nothing to training")
    if not any(plans[1:]):
        is_asked = config.eval_iters == 0 or config.global_batch_size
        return table(plans[0]) + ("" if is_asked else "\nvalidation and test are not planned: give --global-batch-size")
    return "\n\n".join(f"{split}\n{table(usages)}" for split, usages in zip(SPLIT_NAMES, plans) if usages)


def table(usages: Sequence[DataUsage]) -> str:
    """Return a table with a row for each data set, and one for the total."""
    totals = total(usages)
    rows = [("share", "documents", "tokens there", "bytes", "samples read", "tokens read", "repeats", "data set")]
    for r in [*usages, totals]:
        share = f"{100 * r.samples / max(totals.samples, 1):.2f}%"
        numbers = (f"{r.documents:,}", f"{r.tokens:,}", f"{r.bytes:,}", f"{r.samples:,}", f"{r.tokens_read:,}")
        rows.append((share, *numbers, f"{r.epochs:.2f}", r.prefix))

    # align all columns to the right, except the last, the data set
    widths = [max(len(row[column]) for row in rows) for column in range(7)]
    lines = []
    for row in rows:
        aligned = [cell.rjust(width) for cell, width in zip(row, widths)]
        lines.append("  ".join([*aligned, row[-1]]))
    return "\n".join(lines)


def read_flags_and_file(parser: FlagParser, arguments: list[str] | None) -> dict[str, Any]:
    """Return the values of the flags, and of the --yaml-cfg file where no flag gives them."""
    file_help = "read flags from FILE, as training does; the command line takes precedence"
    parser.add_argument_group("File").add_argument("--yaml-cfg", metavar="FILE", default=None, help=file_help)
    values = read_flags(parser, arguments)
    path = values.pop("yaml_cfg")
    if path is None:
        return values

    command_line = import_module("megatron.training.arguments.command_line")  # not above, since a plan needs no torch
    settings = command_line.settings_in_file(path)
    refuse_sentences(path, settings)
    return command_line.merge_settings(values, settings)


def refuse_sentences(path: str, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for the file of a BERT or T5. settings: those in the file, by name."""
    of_t5 = [name for name in ("decoder_num_layers", "decoder_seq_length") if settings.get(name)]
    of_masks = [field.name for field in option_fields(MaskedDataConfig) if field.name in settings]
    if of_t5 or of_masks:
        model = "t5" if of_t5 else "bert"
        raise ConfigError(
            f"{path} describes a {model.upper()} ({', '.join(of_t5 or of_masks)}): its samples are sentences, which only "
            f"their index counts; run tools/prepare_cache.py --prepare-cache-model {model} with the same flags"
        )


def main(arguments: list[str] | None = None) -> int:
    return run_tool(
        __file__,
        __doc__,
        [PlanConfig, DataConfig],
        lambda *configs: print(plan(*configs)),
        arguments,
        read=read_flags_and_file,
    )


if __name__ == "__main__":
    sys.exit(main())

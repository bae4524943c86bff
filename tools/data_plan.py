"""Plan the reading of a run: tokens, samples, epochs and bytes of each data set of a blend.

    python tools/data_plan.py --data-path 0.7 data/books_text_document 0.3 data/wiki_text_document \
        --seq-length 1024 --global-batch-size 256 --train-iters 10000

The data flags are those of training. Plans the training split, and with --eval-iters the others too. Builds and writes nothing.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.base.dataclass_flags import ConfigError, Count, FlagConfig, option
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.gpt_samples import plan_data_usage
from megatron.core.datasets.index_map import SPLIT_NAMES, requested_samples
from megatron.core.datasets.planned_data_usage import DataUsage, total
from tools.errors import run_tool


@dataclass(frozen=True)
class PlanConfig(FlagConfig):
    """How much is read."""

    global_batch_size: Count | None = option(None, "samples per iteration")
    train_iters: Count | None = option(None, "training iterations")
    train_samples: Count | None = option(None, "number of training samples, instead of --train-iters")
    eval_interval: int = option(1000, "iterations between validations; 0: validate only after training")
    eval_iters: int = option(0, "global batches per validation; 0: plan the training split only")

    def problems(self) -> Iterator[str]:
        if (self.train_iters is None) == (self.train_samples is None):
            yield "give either --train-iters (with --global-batch-size) or --train-samples"
        elif (self.train_iters is not None or self.eval_iters) and self.global_batch_size is None:
            yield "--train-iters and --eval-iters need --global-batch-size"

    def samples_of(self, data: DataConfig) -> list[int | None]:
        """Return the samples of the training, validation and test split; None for all samples of the split."""
        batch_size = self.global_batch_size or 1
        iters = self.train_iters or self.train_samples // batch_size
        train, valid, test = requested_samples(iters, self.eval_interval, self.eval_iters, batch_size)
        return [self.train_samples or train, None if data.full_validation else valid, test]


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
        return table(plans[0])  # only the training split
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


def main(arguments: list[str] | None = None) -> int:
    return run_tool(__file__, __doc__, [PlanConfig, DataConfig], lambda *configs: print(plan(*configs)), arguments)


if __name__ == "__main__":
    sys.exit(main())

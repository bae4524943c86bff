"""The settings of log, TensorBoard, wandb, timers, profiles and statistics. Pure."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.base.dataclass_flags import Count, FlagConfig, flag_of, option

_LOG_INTERVAL = 100  # Megatron's default


def read_wandb(text: str) -> str | None:
    """Read a text about Weights & Biases; the empty text is None, since it is Megatron's default and in its files."""
    return text or None


@dataclass(frozen=True)
class LogConfig(FlagConfig):
    """Logging."""

    log_interval: Count | None = option(
        None,
        "iterations between log lines; default: 100, with progress lines in between if iterations are slow",
        metavar="STEPS",
    )
    log_throughput: bool = option(
        False,
        "log TFLOP/s per device, and a line with the remaining time, tokens/s and, if the device's peak is known, MFU",
    )
    log_params_norm: bool = option(False, "log the L2 norm of all parameters")
    log_num_zeros_in_grad: bool = option(False, "log the number of zeros in the gradient")
    log_progress: bool = option(
        False, "append a line to progress.txt in the --save folder at each start of a run and each saved checkpoint"
    )
    metrics_file: str | None = option(
        None,
        "JSONL file to append to: one record per log interval and per validation; a resumed run first deletes the "
        "records after the iteration where it resumes",
        metavar="FILE",
    )
    heartbeat_file: str | None = option(
        None,
        "JSON file for supervisors, rewritten once a second: time, iteration, losses, tokens/s and the last save; at the end "
        "the exit code",
        metavar="FILE",
    )
    prometheus_file: str | None = option(
        None,
        "write the metrics also as a text file for Prometheus' textfile collector, such as DIR/megatron.prom",
        metavar="FILE",
    )
    log_straggler: bool = option(
        False,
        "at each log interval, log which ranks were busy longest and which shortest; time spent waiting for other "
        "ranks does not count",
    )
    straggler_minmax_count: Count = option(
        1, "how many of the slowest and of the fastest ranks --log-straggler lists", metavar="N"
    )
    inspect: Count | None = option(
        None,
        "iterations between lines of statistics (mean, std, max, zeros, non-finite values) of parameters, gradients "
        "and layer outputs",
        metavar="STEPS",
    )
    log_memory_interval: Count | None = option(
        None,
        "iterations between log lines that compare measured and predicted memory; slow on a CPU, where every tensor "
        "is counted",
        metavar="STEPS",
    )
    timing_log_level: Literal[0, 1, 2] = option(
        0, "0: no timers; 1: time the parts of an iteration; 2: also time each forward, backward and transfer"
    )
    timing_log_option: Literal["max", "minmax", "all"] = option(
        "minmax", "which times to print: the longest of all ranks, the shortest and the longest, or those of each rank"
    )
    barrier_with_L1_time: bool = option(
        False,
        "synchronize all ranks before and after each level-1 timer: exact times, but slower training",
        flags=("--barrier-with-level-1-timing",),
    )

    @property
    def steps_between_lines(self) -> int:
        return _LOG_INTERVAL if self.log_interval is None else self.log_interval


@dataclass(frozen=True)
class TensorBoardConfig(FlagConfig):
    """TensorBoard and wandb."""

    tensorboard_dir: str | None = option(None, "folder for TensorBoard event files", metavar="DIR")
    tensorboard_log_interval: Count = option(
        1, "iterations between points of the TensorBoard and Weights & Biases curves"
    )
    tensorboard_queue_size: Count = option(1000, "points buffered before a write")
    log_timers_to_tensorboard: bool = option(False, "log the timers of --timing-log-level 1 or 2")
    log_batch_size_to_tensorboard: bool = option(False, "log the global batch size")
    log_learning_rate_to_tensorboard: bool = option(
        True,
        "do not log the learning rate",
        flags=("--no-log-learning-rate-to-tensorboard", "--no-log-learnig-rate-to-tensorboard"),
    )
    log_loss_scale_to_tensorboard: bool = option(
        True,
        "do not log the loss scale",
        flags=("--no-log-loss-scale-to-tensorboard", "--disable-log-loss-scale-to-tensorboard"),
    )
    log_validation_ppl_to_tensorboard: bool = option(False, "log validation perplexity")
    log_memory_to_tensorboard: bool = option(False, "log device memory")
    log_world_size_to_tensorboard: bool = option(False, "log the world size")
    moe_per_layer_logging: bool = option(
        False,
        "log auxiliary losses, which a model's layers add to the objective, of each layer too, and the largest and the "
        "smallest load of an expert of each layer",
    )
    wandb_project: str | None = option(
        None, "Weights & Biases project for the curves that --tensorboard-dir has", metavar="NAME", read=read_wandb
    )
    wandb_exp_name: str | None = option(None, "name of the run at Weights & Biases", metavar="NAME", read=read_wandb)
    wandb_entity: str | None = option(
        None, "user or team of --wandb-project at Weights & Biases", metavar="NAME", read=read_wandb
    )
    wandb_save_dir: str | None = option(
        None, "folder for wandb's files; default: the working folder", metavar="DIR", read=read_wandb
    )

    def problems(self) -> Iterator[str]:
        for name in ("wandb_exp_name", "wandb_entity", "wandb_save_dir"):
            if self.wandb_project is None and getattr(self, name) is not None:
                yield f"{flag_of(name)} needs --wandb-project"

    @property
    def is_on(self) -> bool:
        """Whether there are curves to draw."""
        return self.tensorboard_dir is not None or self.wandb_project is not None


@dataclass(frozen=True)
class ProfileConfig(FlagConfig):
    """Profiling."""

    profile: bool = option(
        False,
        "write a Chrome trace of the iterations from --profile-step-start to --profile-step-end, in "
        "--tensorboard-dir or --save",
    )
    profile_step_start: int = option(10, "profile after this iteration")
    profile_step_end: int = option(12, "last profiled iteration")
    profile_ranks: list[int] = option([0], "ranks that write a trace")
    use_pytorch_profiler: bool = option(False, "accepted without effect: --profile always uses the PyTorch profiler")
    record_memory_history: bool = option(
        False, "record allocations of device memory; each log line and the exit write a snapshot"
    )
    memory_snapshot_path: str = option(
        "snapshot.pickle",
        "file of the memory snapshot, for pytorch.org/memory_viz; ranks above 0 append their number to its name",
        metavar="FILE",
    )

    def problems(self) -> Iterator[str]:
        if self.profile_step_start < 0 or self.profile_step_end <= self.profile_step_start:
            yield (
                f"--profile-step-start {self.profile_step_start} and --profile-step-end {self.profile_step_end} "
                "select no step; the end must be larger than the start"
            )


def watch_problems(
    log: LogConfig, curves: TensorBoardConfig, profile: ProfileConfig, *, save: str | None, world_size: int
) -> Iterator[str]:
    """Yield problems across these settings, and a missing wandb package. (A missing tensorboard is only a note.)"""
    if curves.wandb_project is not None and not _is_installed("wandb"):
        yield "--wandb-project needs the package wandb (pip install wandb); --metrics-file needs no package"
    if log.log_progress and save is None:
        yield "--log-progress needs --save, the folder of progress.txt"
    writes_curves = can_write_tensorboard(curves) or curves.wandb_project is not None
    if log.inspect is not None and log.metrics_file is None and not writes_curves:
        yield (
            "--inspect needs an output; give --metrics-file FILE (or --tensorboard-dir DIR, with the package "
            "tensorboard)"
        )
    if profile.profile and curves.tensorboard_dir is None and save is None:
        yield "--profile needs a folder for its trace; give --tensorboard-dir or --save"
    wrong = [rank for rank in profile.profile_ranks if not 0 <= rank < world_size]
    if wrong:
        ranks = f"0 to {world_size - 1}" if world_size > 1 else "0 only"
        yield f"--profile-ranks {', '.join(map(str, wrong))}: there is no such rank; this run has the ranks {ranks}"


def watch_notes(curves: TensorBoardConfig, profile: ProfileConfig, train_iters: int | None) -> list[str]:
    """Return warnings about requested outputs that the run will not write."""
    notes = []
    if curves.tensorboard_dir is not None and not can_write_tensorboard(curves):
        notes.append(
            "warning: nothing is written to --tensorboard-dir: the package tensorboard is not installed (pip install "
            "tensorboard); --metrics-file needs no package"
        )
    if profile.profile and train_iters is not None and train_iters <= profile.profile_step_start:
        notes.append(
            f"warning: no profile will be written: the run ends at iteration {train_iters}, before --profile-step-start "
            f"{profile.profile_step_start} is passed"
        )
    return notes


def can_write_tensorboard(curves: TensorBoardConfig) -> bool:
    """Whether event files are asked for, and the package tensorboard is installed."""
    return curves.tensorboard_dir is not None and _is_installed("tensorboard")


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None

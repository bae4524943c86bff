"""The settings of everything that watches a run: the log, TensorBoard and wandb, timers, profiles, statistics. Pure."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.config import Count, FlagConfig, flag_of, knob

_LOG_INTERVAL = 100  # Megatron's default


@dataclass(frozen=True)
class LogConfig(FlagConfig):
    """Logging."""

    log_interval: Count | None = knob(
        None,
        "steps between log lines; when unset 100, and a run whose lines are further apart than a few seconds prints progress "
        "lines between them",
        metavar="STEPS",
    )
    log_throughput: bool = knob(
        False,
        "put TFLOP/s per device into the log line, and print a line with the time left, tokens/s and, where the device's "
        "peak is known, the share of it (MFU)",
    )
    log_params_norm: bool = knob(False, "put the L2 norm of all parameters into the log line")
    log_num_zeros_in_grad: bool = knob(False, "put the number of zeros in the whole gradient into the log line")
    log_progress: bool = knob(False, "note starts and checkpoints of the run in progress.txt in the --save folder")
    metrics_file: str | None = knob(
        None,
        "JSONL file for what the log says, one object per logged step and validation; a resumed run appends, and what it "
        "does again is cut first",
        metavar="FILE",
    )
    inspect: Count | None = knob(
        None,
        "steps between statistics (mean, standard deviation, largest, zeros, not finite) of each parameter, its gradient "
        "and each layer's output, for --metrics-file, --tensorboard-dir or --wandb-project",
        metavar="STEPS",
    )
    log_memory_interval: Count | None = knob(
        None,
        "steps between lines on the memory that was taken beside what was predicted; an accelerator says so after the second "
        "step in any case, on a CPU every tensor of such a step is counted, which takes long",
        metavar="STEPS",
    )
    timing_log_level: Literal[0, 1, 2] = knob(
        0, "what is timed: nothing, the parts of a step, or also each forward, backward and transfer"
    )
    timing_log_option: Literal["max", "minmax", "all"] = knob(
        "minmax", "times of several ranks, as printed: the longest, also the shortest, or each rank's"
    )
    barrier_with_L1_time: bool = knob(
        False,
        "wait for all ranks before each part of a step that is timed: times are exact, and the run is slower",
        flags=("--barrier-with-level-1-timing",),
    )

    @property
    def steps_between_lines(self) -> int:
        return _LOG_INTERVAL if self.log_interval is None else self.log_interval


@dataclass(frozen=True)
class TensorBoardConfig(FlagConfig):
    """TensorBoard and wandb."""

    tensorboard_dir: str | None = knob(None, "folder for TensorBoard's files", metavar="DIR")
    tensorboard_log_interval: Count = knob(1, "steps between the points of a curve")
    tensorboard_queue_size: Count = knob(1000, "points that are held back before they are written to disk")
    log_timers_to_tensorboard: bool = knob(False, "also the timers, with --timing-log-level 1 or 2")
    log_batch_size_to_tensorboard: bool = knob(False, "also the global batch size")
    log_learning_rate_to_tensorboard: bool = knob(
        True,
        "leave out the learning rate",
        flags=("--no-log-learning-rate-to-tensorboard", "--no-log-learnig-rate-to-tensorboard"),
    )
    log_loss_scale_to_tensorboard: bool = knob(True, "leave out the loss scale")
    log_validation_ppl_to_tensorboard: bool = knob(False, "also the perplexity of each validation")
    log_memory_to_tensorboard: bool = knob(False, "also the memory that tensors take on the device")
    log_world_size_to_tensorboard: bool = knob(False, "also the number of ranks")
    wandb_project: str | None = knob(None, "project at Weights & Biases to send the same curves to", metavar="NAME")
    wandb_exp_name: str | None = knob(None, "name of this run there", metavar="NAME")
    wandb_entity: str | None = knob(None, "user or team there", metavar="NAME")
    wandb_save_dir: str | None = knob(
        None, "folder for wandb's own files; the working folder when unset", metavar="DIR"
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

    profile: bool = knob(False, "write a Chrome trace of some steps, under --tensorboard-dir or --save")
    profile_step_start: int = knob(10, "the step after which the profile begins")
    profile_step_end: int = knob(12, "the last step in the profile")
    profile_ranks: list[int] = knob([0], "the ranks that write one")
    use_pytorch_profiler: bool = knob(False, "changes nothing: the profiler of --profile is always PyTorch's")
    record_memory_history: bool = knob(
        False, "keep a record of every allocation, and write it at each log line and at the end; on accelerators"
    )
    memory_snapshot_path: str = knob(
        "snapshot.pickle",
        "file for that record, for pytorch.org/memory_viz; ranks other than 0 add their number",
        metavar="FILE",
    )

    def problems(self) -> Iterator[str]:
        if self.profile_step_start < 0 or self.profile_step_end <= self.profile_step_start:
            yield (
                f"--profile-step-start {self.profile_step_start} and --profile-step-end {self.profile_step_end} leave no step "
                "to profile; the end must be the larger one"
            )


def watch_problems(
    log: LogConfig, curves: TensorBoardConfig, profile: ProfileConfig, *, save: str | None, world_size: int
) -> list[str]:
    """What cannot be watched so, across the settings, and whether wandb, which a run does not do without, is missing."""
    problems = []
    if curves.wandb_project is not None and not _is_installed("wandb"):
        problems.append("--wandb-project needs the package wandb: pip install wandb; --metrics-file needs none")
    if log.log_progress and save is None:
        problems.append("--log-progress needs --save, the folder that progress.txt is in")
    writes_curves = writes_tensorboard(curves) or curves.wandb_project is not None
    if log.inspect is not None and log.metrics_file is None and not writes_curves:
        problems.append(
            "--inspect needs somewhere to write: give --metrics-file FILE (or --tensorboard-dir DIR, with the package "
            "tensorboard)"
        )
    if curves.log_timers_to_tensorboard and log.timing_log_level == 0:
        problems.append("--log-timers-to-tensorboard needs timers: give --timing-log-level 1 or 2")
    if profile.profile and curves.tensorboard_dir is None and save is None:
        problems.append("--profile needs a folder for its trace: give --tensorboard-dir or --save")
    if wrong := [rank for rank in profile.profile_ranks if not 0 <= rank < world_size]:
        ranks = f"0 to {world_size - 1}" if world_size > 1 else "0 alone"
        problems.append(f"--profile-ranks names {', '.join(map(str, wrong))}; there are ranks {ranks}")
    return problems


def watch_notes(curves: TensorBoardConfig, profile: ProfileConfig, train_iters: int | None) -> list[str]:
    """What is asked for and left undone, as the run goes on without it."""
    notes = []
    if curves.tensorboard_dir is not None and not writes_tensorboard(curves):
        notes.append(
            "warning: nothing is written to --tensorboard-dir, since the package tensorboard is not installed (pip install "
            "tensorboard); the log goes on as ever, and --metrics-file needs no package"
        )
    if profile.profile and train_iters is not None and train_iters <= profile.profile_step_start:
        notes.append(
            f"warning: no profile will be written: the run ends with step {train_iters}, and --profile-step-start is "
            f"{profile.profile_step_start}"
        )
    return notes


def writes_tensorboard(curves: TensorBoardConfig) -> bool:
    """Whether TensorBoard's files can be written, and are asked for."""
    return curves.tensorboard_dir is not None and _is_installed("tensorboard")


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None

"""Megatron's calculator of the number of microbatches, constant or with a ramp of the batch size.

In a run of `pretrain` there is nothing to set up: `get_num_microbatches` and its like say what the step that runs has,
also under --rampup-batch-size. A loop of one's own calls `init_num_microbatches_calculator` once, and
`update_num_microbatches` before each step.
"""

import logging
from collections.abc import Sequence

from megatron.core.base.global_batch_size_schedule import BatchSizes, constant_size, ramp
from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.parallel.global_state import GlobalState, get_global_state

logger = logging.getLogger(__name__)


class NumMicroBatchesCalculator:
    """The sizes of a step by the samples consumed.

    num_micro_batches: microbatches of each replica in a step. current_global_batch_size: what the settings ask for.
    current_running_global_batch_size: what runs, rounded down to a multiple of micro batch and replicas if that is allowed.
    """

    def __init__(
        self,
        sizes: BatchSizes,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool,
        rank: int,
    ):
        self.sizes = sizes
        self.micro_batch_size = micro_batch_size
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.decrease_batch_size_if_needed = decrease_batch_size_if_needed
        self.rank = rank
        self.current_global_batch_size = 0
        self.current_running_global_batch_size = 0
        self.num_micro_batches = 0
        self.update(0, consistency_check=False, verbose=True)

    def get(self) -> int:
        return self.num_micro_batches

    def get_current_global_batch_size(self) -> int:
        return self.current_global_batch_size

    def get_micro_batch_size(self) -> int:
        return self.micro_batch_size

    def get_current_running_global_batch_size(self) -> int:
        return self.current_running_global_batch_size

    def update(self, consumed_samples: int, consistency_check: bool, verbose: bool = False) -> None:
        """Set the sizes of the step that begins after `consumed_samples` samples.

        Raises ValueError if the size is no multiple of micro batch and replicas, where `consistency_check` asks for that and
        nothing may be rounded.
        """
        before = self.current_global_batch_size
        size = self.sizes.at(consumed_samples)
        of_all_replicas = self.micro_batch_times_data_parallel_size
        if size % of_all_replicas and consistency_check and not self.decrease_batch_size_if_needed:
            raise ValueError(
                f"global batch size {size} must be a multiple of micro batch size x data-parallel size ({of_all_replicas}); "
                "change one of them, or allow decrease_batch_size_if_needed"
            )
        self.current_global_batch_size = size
        self.num_micro_batches = size // of_all_replicas
        self.current_running_global_batch_size = size
        if self.decrease_batch_size_if_needed:
            self.current_running_global_batch_size = self.num_micro_batches * of_all_replicas
        if verbose and self.rank == 0 and size != before:
            logger.info("global batch size %d, %d microbatches of each replica", size, self.num_micro_batches)


class ConstantNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """The same batch size in every step. Raises ValueError if it does not hold a microbatch of each replica."""

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool,
        rank: int,
    ):
        sizes = constant_size(global_batch_size)
        super().__init__(sizes, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed, rank)
        self.update(0, consistency_check=True)
        if self.num_micro_batches < 1:
            raise ValueError(
                f"global batch size {global_batch_size} is below micro batch size x data-parallel size "
                f"({self.micro_batch_times_data_parallel_size})"
            )


class RampupBatchsizeNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """Megatron's ramp of the batch size over `ramup_samples` samples. Raises ValueError if its numbers do not fit."""

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool,
        rank: int,
        start_global_batch_size: int,
        batch_size_increment: int,
        ramup_samples: int,
    ):
        sizes = ramp(start_global_batch_size, batch_size_increment, ramup_samples, global_batch_size)
        super().__init__(sizes, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed, rank)


_calculator: NumMicroBatchesCalculator | None = None  # of a loop of one's own


def init_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> None:
    """Make the calculator of this process. Raises RuntimeError if there is one, ValueError if the sizes do not fit.

    rank: only rank 0 logs. rampup_batch_size: start, increment and samples of the ramp, or None for a constant size.
    """
    if _calculator is not None:
        raise RuntimeError(
            "num microbatches calculator is already initialized; call reconfigure_num_microbatches_calculator"
        )
    reconfigure_num_microbatches_calculator(
        rank, rampup_batch_size, global_batch_size, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed
    )


def reconfigure_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> None:
    """Replace the calculator of this process; see `init_num_microbatches_calculator`."""
    global _calculator
    common = (global_batch_size, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed, rank)
    if rampup_batch_size is None:
        _calculator = ConstantNumMicroBatchesCalculator(*common)
        return
    numbers = [int(number) for number in rampup_batch_size]
    if len(numbers) != 3:
        raise ValueError(f"rampup_batch_size {rampup_batch_size}: give three numbers, START INCREMENT SAMPLES")
    _calculator = RampupBatchsizeNumMicroBatchesCalculator(*common, *numbers)


def destroy_num_microbatches_calculator() -> None:
    """Forget the calculator of this process."""
    global _calculator
    _calculator = None


unset_num_microbatches_calculator = destroy_num_microbatches_calculator


def get_num_microbatches() -> int:
    """Return the microbatches of each replica in a training step."""
    if _calculator is not None:
        return _calculator.get()
    state = _state_of_a_run()
    return state.num_microbatches or state.run.num_microbatches


def get_current_global_batch_size() -> int:
    """Return the samples of a training step, of all replicas."""
    if _calculator is not None:
        return _calculator.get_current_global_batch_size()
    return get_num_microbatches() * _state_of_a_run().run.samples_at_once


def get_current_running_global_batch_size() -> int:
    """Return the samples that a step runs: fewer than the batch size where that was rounded down."""
    if _calculator is not None:
        return _calculator.get_current_running_global_batch_size()
    return get_current_global_batch_size()


def get_micro_batch_size() -> int:
    """Return the samples of a microbatch of training."""
    if _calculator is not None:
        return _calculator.get_micro_batch_size()
    return _state_of_a_run().run.config.training.micro_batch_size


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True, verbose: bool = False) -> None:
    """Set the sizes of the step that begins after `consumed_samples` samples.

    In a run of `pretrain` the loop has done so: then nothing is left to do.
    """
    if _calculator is not None:
        _calculator.update(consumed_samples, consistency_check, verbose)
    else:
        _state_of_a_run()


def _state_of_a_run() -> GlobalState:
    """Return the state whose `run` is set. Raises RuntimeError outside of a run."""
    try:
        state = get_global_state()
    except RuntimeError:
        state = None
    if state is None or state.run is None:
        raise RuntimeError(
            "the number of microbatches is not known: call init_num_microbatches_calculator, or run under pretrain"
        )
    return state


__getattr__ = names_of_megatron(__name__)

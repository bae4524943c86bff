"""A step with wrong numbers is stopped, skipped or reported, after its gradients are summed and before its update.

    numbers not finite (--check-for-nan-in-loss-and-grad)           stop, or skip with --nan-action
    a loss or a gradient far larger than before                     report, or skip or stop with --spike-action
        (--check-for-spiky-loss, --check-for-large-grads)

With --rerun-mode validate_results such a step is computed again, as by Megatron's rerun state machine. Other numbers
mean that a device computed wrongly. The same numbers mean that data, weights or program are the reason; then the first
tensor that is not finite is named.
"""

import math
import socket
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.parallel import collectives
from megatron.core.pipeline_parallel.loss_func_results import ForwardStep
from megatron.training.checkpointing.train_state_counters import TrainState
from megatron.training.global_vars import Runtime, print_rank_0
from megatron.training.result_checks.base_check import WrongNumbersError
from megatron.training.result_checks.nan_locator import first_nonfinite_tensor
from megatron.training.result_checks.step_dump import dump_step_for_replay
from megatron.training.result_checks.ten_times_largest_loss_rule import SpikeDetector
from megatron.training.rewindable_batches import RewindableBatches
from megatron.training.step import NotFiniteError, StepFigures, StepWork

# Relative, for a norm computed again: some devices' backward kernels add in varying order. The value is Megatron's.
_NORM_TOLERANCE = 1e-3


class Finding(NamedTuple):
    """Something wrong in a step. action: stop, skip or report."""

    text: str
    action: str
    is_finite: bool = True


class BadStepPolicy:
    """Decide what becomes of each step of a run (`NonFiniteStepGuard.judge`). Every rank must call: all get the same answer."""

    def __init__(self, runtime: Runtime, state: TrainState):
        self.runtime = runtime
        self.state = state
        self.config = runtime.config.guard
        self.mesh = runtime.mesh
        self.device = runtime.device.torch_device
        self.loss_spikes = None
        if self.config.check_for_spiky_loss:
            self.loss_spikes = SpikeDetector(state.guard.setdefault("loss", {}))
        self.norm_spikes = None
        if self.config.check_for_large_grads:
            self.norm_spikes = SpikeDetector(state.guard.setdefault("grads", {}))
        # of this rank's microbatches: [2], the sum over its tokens and their number
        self._losses: list[Tensor] = []

    def __call__(self, work: StepWork, figures: StepFigures, problem: str) -> bool:
        """Return whether the step's update is skipped. Every rank must call.

        problem: what is not finite, in words; "" for nothing.
        Raises NotFiniteError or WrongNumbersError, on all ranks, if the run is to stop.
        """
        finding = self._find_wrong_numbers(work, figures, problem)
        if finding is None:
            return False
        text = finding.text
        action = finding.action

        # compute the step again
        can_rerun = all(isinstance(batches, RewindableBatches | None) for batches in work.data_iterators.values())
        if self.config.rerun_mode == "validate_results" and can_rerun:
            rerun_figures = work.compute()
            is_same, explanation = compare_rerun(figures, rerun_figures, self.mesh["world"], self.device)
            text += f". {explanation}"
            if not is_same:  # a device computes wrongly: no setting lets the run continue
                action = "stop"
            elif not finding.is_finite:
                text += f" {first_nonfinite_tensor(work, self.device)}"
        self._losses.clear()  # those of the second computation

        # write it to disk
        if self.config.bad_step_dir is not None:
            text += f". {dump_step_for_replay(self.runtime, self.state, work, figures, finding.text)}"

        # stop, skip or report
        if action == "stop":
            error = WrongNumbersError if finding.is_finite else NotFiniteError
            raise error(text)
        consequence = "its update is left out" if action == "skip" else "training goes on"
        print_rank_0(f"WARNING: iteration {self.state.iteration + 1}: {text.rstrip('.')}. As asked, {consequence}")
        return action == "skip"

    def _find_wrong_numbers(self, work: StepWork, figures: StepFigures, problem: str) -> Finding | None:
        """Return what is wrong with the step's numbers, or None. Every rank must call."""
        losses = self._losses
        self._losses = []
        if problem:
            return Finding(problem, self.config.nan_action, is_finite=False)
        spikes = []
        if self.loss_spikes is not None:
            local = self._loss_sizes(losses) if losses else torch.zeros(1, device=self.device)  # [microbatches]
            largest = collectives.all_reduce(local.max().double()[None], self.mesh["world"], "max").item()
            if self.loss_spikes.is_too_large(largest, work.num_microbatches * self.mesh.samples.size):
                microbatch = self._microbatch_with(local, largest, work)
                spikes.append(f"{microbatch} has a loss of {largest:.6g}, {self.loss_spikes.threshold_text}")
        if self.norm_spikes is not None and self.norm_spikes.is_too_large(figures.norm):
            spikes.append(f"the gradient's norm is {figures.norm:.6g}, {self.norm_spikes.threshold_text}")
        if not spikes:
            return None
        return Finding(", and ".join(spikes), self.config.spike_action)

    def _loss_sizes(self, losses: list[Tensor]) -> Tensor:
        """Return the magnitude of the mean loss of each microbatch: [microbatches]. NaN counts as 0."""
        sums_and_tokens = torch.stack(losses)  # [microbatches, 2]
        if self.mesh.sequence.size > 1:  # ranks that share a sequence share the tokens of a microbatch
            collectives.all_reduce(sums_and_tokens, self.mesh.sequence)
        means = sums_and_tokens[:, 0] / sums_and_tokens[:, 1]  # [microbatches]
        return means.abs().nan_to_num(0.0)

    def _microbatch_with(self, local: Tensor, largest: float, work: StepWork) -> str:
        """Return the first microbatch whose loss is `largest`, in words. Every rank must call.

        local: losses of this rank's microbatches, [microbatches].
        """
        # its number in the order of samples: data-parallel ranks take turns
        samples = self.mesh.samples
        index = local.double().argmax().item()
        has_largest = local[index].double().item() == largest and self.mesh.has_last_stage
        number = int(index) * samples.size + samples.rank if has_largest else 2**62
        negative = torch.tensor([-number], device=self.device)  # so that the maximum is the first microbatch
        first = -collectives.all_reduce(negative, self.mesh["world"], "max").item()

        micro_batch_size = work.pipeline.batch.micro_batch_size
        start = work.first_sample + first * micro_batch_size
        microbatch, rank = divmod(first, samples.size)
        stop = start + micro_batch_size
        return f"microbatch {microbatch} of data-parallel rank {rank} (samples {start} to {stop - 1})"

    def record_losses_of(self, forward_step: ForwardStep) -> ForwardStep:
        """Return the forward step, which also records losses for the spike detector.

        They are those of each microbatch of training.
        """
        if self.loss_spikes is None:
            return forward_step

        def recording_forward_step(data_iterator: Any, model: Any) -> Any:
            result = forward_step(data_iterator, model)
            if not isinstance(result, tuple) or len(result) != 2 or not callable(result[1]):
                return result  # an earlier stage, or an error that the executor reports
            output, loss_func = result

            def recording_loss_func(output: Any, **kwargs: Any) -> Any:
                loss = loss_func(output, **kwargs)
                is_training = torch.is_grad_enabled()
                if is_training and isinstance(loss, tuple):
                    # (loss, reported) is a mean, so of one token; (loss, tokens, reported) a sum
                    value = loss[0].detach().double().squeeze()  # []
                    num_tokens = loss[1] if len(loss) == 3 else 1
                    tokens = torch.as_tensor(num_tokens, device=value.device).detach()
                    self._losses.append(torch.stack((value, tokens.double().squeeze())))  # [2]
                return loss

            return output, recording_loss_func

        return recording_forward_step


def compare_rerun(first: StepFigures, rerun: StepFigures, world: Any, device: torch.device) -> tuple[bool, str]:
    """Return (whether a step computed again has the same numbers, what follows from that). Every rank must call.

    Losses must have the same bits, since forwards are deterministic; the norm may differ by 0.1 %.
    """
    # the ranks whose own losses differ
    first_own = first.rank_totals
    rerun_own = rerun.rank_totals
    is_different = not (_is_same(first_own.value, rerun_own.value) and _is_same(first_own.tokens, rerun_own.tokens))
    local = torch.tensor([is_different], dtype=torch.int32, device=device)  # [1]
    flags = collectives.all_gather(local, world).tolist()  # [world]
    ranks = [rank for rank, differs in zip(world.ranks, flags) if differs]

    tolerance = _NORM_TOLERANCE * abs(first.norm)
    same_norm = _is_same(first.norm, rerun.norm) or abs(first.norm - rerun.norm) <= tolerance
    if not ranks and same_norm and _is_same(first.shared.loss, rerun.shared.loss):
        return True, (
            "Computed again, the numbers are the same: the data, the weights or the program are the reason, and "
            "no device that fails at times."
        )
    where = f"the losses of ranks {' '.join(map(str, ranks))} differ" if ranks else "only gradients differ"
    return False, (
        f"Computed again from the same weights and batches, the sum of the losses is {rerun.shared.loss} instead of "
        f"{first.shared.loss} and the norm {rerun.norm} instead of {first.norm}; {where}: a device computes wrongly, or "
        f"kernels are not deterministic (this is rank {world.rank} on {socket.gethostname()})."
    )


def _is_same(a: Tensor | float, b: Tensor | float) -> bool:
    """Whether two numbers are equal; NaN equals NaN."""
    a = float(a)
    b = float(b)
    return a == b or (math.isnan(a) and math.isnan(b))

"""What becomes of a step with wrong numbers, decided after its gradients are summed and before its update.

    numbers not finite (--check-for-nan-in-loss-and-grad)           stop, or skip with --nan-action
    a loss or a gradient far larger than before                     report, or skip or stop with --spike-action
        (--check-for-spiky-loss, --check-for-large-grads)

With --rerun-mode validate_results such a step is computed again. Other numbers mean that a device computed wrongly. The same
numbers mean that data, weights or program are the reason; then the first tensor that is not finite is named.
"""

import math
import socket
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.parallel import collectives
from megatron.core.pipeline_parallel.loss_func_results import ForwardStep
from megatron.training.batch_cache import KeptBatches
from megatron.training.checkpointing.train_state import TrainState
from megatron.training.global_vars import Runtime, print_rank_0
from megatron.training.rerun.base_check import WrongNumbersError
from megatron.training.rerun.nan_locator import first_bad_tensor
from megatron.training.rerun.spike_detector import LargeValues
from megatron.training.rerun.step_dump import dump_step
from megatron.training.step import NotFiniteError, StepFigures, StepWork

# Of a norm computed again: some devices' backward kernels add in varying order. The tolerance is Megatron's.
_NORM_TOLERANCE = 1e-3


class Finding(NamedTuple):
    """Something wrong in a step. action: stop, skip or report."""

    text: str
    action: str
    is_finite: bool = True


class StepJudge:
    """The judge of a run's steps (`train_step.Judge`). Every rank must call: all get the same verdict."""

    def __init__(self, runtime: Runtime, state: TrainState):
        self.runtime, self.state = runtime, state
        self.config = runtime.config.guard
        self.mesh, self.device = runtime.mesh, runtime.device.torch_device
        self.losses = LargeValues(state.guard.setdefault("loss", {})) if self.config.check_for_spiky_loss else None
        self.norms = LargeValues(state.guard.setdefault("grads", {})) if self.config.check_for_large_grads else None
        self._losses: list[Tensor] = []  # of this rank's microbatches: sum, and count of tokens

    def __call__(self, work: StepWork, figures: StepFigures, problem: str) -> bool:
        finding = self._finding(work, figures, problem)
        if finding is None:
            return False
        text, action = finding.text, finding.action
        can_replay = all(isinstance(kept, KeptBatches | None) for kept in work.data_iterators.values())
        if self.config.rerun_mode == "validate_results" and can_replay:
            again = work.compute()
            is_same, verdict = compared(figures, again, self.mesh["world"], self.device)
            text += f". {verdict}"
            action = action if is_same else "stop"
            if not finding.is_finite and is_same:
                text += f" {first_bad_tensor(work, self.device)}"
        self._losses.clear()
        if self.config.bad_step_dir is not None:
            text += f". {dump_step(self.runtime, self.state, work, figures, finding.text)}"
        if action == "stop":
            raise (WrongNumbersError if finding.is_finite else NotFiniteError)(text)
        what = "its update is left out" if action == "skip" else "training goes on"
        print_rank_0(f"WARNING: iteration {self.state.iteration + 1}: {text.rstrip('.')}. As asked, {what}")
        return action == "skip"

    def _finding(self, work: StepWork, figures: StepFigures, problem: str) -> Finding | None:
        losses, self._losses = self._losses, []
        if problem:
            return Finding(problem, self.config.nan_action, is_finite=False)
        found = []
        if self.losses is not None:
            mine = self._means_of(losses) if losses else torch.zeros(1, device=self.device)
            largest = collectives.all_reduce(mine.max().double()[None], self.mesh["world"], "max").item()
            if self.losses.is_too_large(largest, work.num_microbatches * self.mesh.samples.size):
                found.append(
                    f"{self._microbatch_of(mine, largest, work)} has a loss of {largest:.6g}, {self.losses.than}"
                )
        if self.norms is not None and self.norms.is_too_large(figures.norm):
            found.append(f"the gradient's norm is {figures.norm:.6g}, {self.norms.than}")
        return Finding(", and ".join(found), self.config.spike_action) if found else None

    def _means_of(self, losses: list[Tensor]) -> Tensor:
        """The size of the loss of each microbatch over all its tokens, also where ranks share them."""
        pairs = torch.stack(losses)
        if self.mesh.sequence.size > 1:
            collectives.all_reduce(pairs, self.mesh.sequence)
        return (pairs[:, 0] / pairs[:, 1]).abs().nan_to_num(0.0)

    def _microbatch_of(self, mine: Tensor, largest: float, work: StepWork) -> str:
        """The first microbatch with this loss, in words. Every rank must call."""
        samples = self.mesh.samples
        at = mine.double().argmax().item()
        has_it = mine[at].double().item() == largest and self.mesh.has_last_stage
        number = int(at) * samples.size + samples.rank if has_it else 2**62
        first = -collectives.all_reduce(torch.tensor([-number], device=self.device), self.mesh["world"], "max").item()
        start = work.first_sample + first * (size := work.pipeline.batch.micro_batch_size)
        microbatch, rank = divmod(first, samples.size)
        return f"microbatch {microbatch} of data-parallel rank {rank} (samples {start} to {start + size - 1})"

    def watching_losses(self, forward_step: ForwardStep) -> ForwardStep:
        """The forward step, which also notes the loss of each microbatch of training."""

        def step(data_iterator: Any, model: Any) -> Any:
            result = forward_step(data_iterator, model)
            if not isinstance(result, tuple) or len(result) != 2 or not callable(result[1]):
                return result  # an earlier stage, or an error that the executor reports
            output, loss_func = result

            def noting(given: Any, **named: Any) -> Any:
                loss = loss_func(given, **named)
                if torch.is_grad_enabled() and isinstance(loss, tuple):
                    value = loss[0].detach().double().squeeze()
                    tokens = torch.as_tensor(loss[1] if len(loss) == 3 else 1, device=value.device).detach()
                    self._losses.append(torch.stack((value, tokens.double().squeeze())))
                return loss

            return output, noting

        return step if self.losses is not None else forward_step


def compared(first: StepFigures, again: StepFigures, world: Any, device: torch.device) -> tuple[bool, str]:
    """(whether a step computed again has the same numbers, what follows from that). Every rank must call.

    Losses must have the same bits, since forwards are deterministic; the norm may differ by 0.1 %.
    """
    mine = not _is_same(first.mine.value, again.mine.value) or not _is_same(first.mine.tokens, again.mine.tokens)
    differs = torch.tensor([mine], dtype=torch.int32, device=device)
    ranks = [rank for rank, one in zip(world.ranks, collectives.all_gather(differs, world).tolist()) if one]
    same_norm = _is_same(first.norm, again.norm) or abs(first.norm - again.norm) <= _NORM_TOLERANCE * abs(first.norm)
    if not ranks and same_norm and _is_same(first.shared.loss, again.shared.loss):
        return True, (
            "Computed again, the numbers are the same: the data, the weights or the program are the reason, and "
            "no device that "
            "fails at times."
        )
    where = f"the losses of ranks {' '.join(map(str, ranks))} differ" if ranks else "only gradients differ"
    return False, (
        f"Computed again from the same weights and batches, the sum of the losses is {again.shared.loss} instead of "
        f"{first.shared.loss} and the norm {again.norm} instead of {first.norm}; {where}: a device computes wrongly, or kernels "
        f"are not deterministic (this is rank {world.rank} on {socket.gethostname()})."
    )


def _is_same(a: Tensor | float, b: Tensor | float) -> bool:
    a, b = float(a), float(b)
    return a == b or (math.isnan(a) and math.isnan(b))

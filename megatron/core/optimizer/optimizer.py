"""AdamW over flat tensors: the optimizer sees buffers cut into segments of equal weight decay, and no parallelism.

Per buffer it keeps a master copy in float32 (or the parameters themselves, where they are that precise already) and two
moments, laid out like the parameters. What it must know of other ranks is one number, the norm of the whole gradient.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core import comm
from megatron.core.boxes import flat_run
from megatron.core.config import ConfigError, knob
from megatron.core.device import has_fused_adam
from megatron.core.distributed.memory_buffer import MemoryBuffer, ParamAndGradBuffer
from megatron.core.distributed.plan import runs
from megatron.core.parallel_state import Mesh
from megatron.core.placement import owned_pieces


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer."""

    weight_decay: float = knob(0.01, "decoupled weight decay; biases and norms have none")
    adam_beta1: float = knob(0.9, "decay of the first moment")
    adam_beta2: float = knob(0.999, "decay of the second moment")
    adam_eps: float = knob(1e-8, "added to the root of the second moment")
    clip_grad: float = knob(1.0, "largest norm of the gradient; a longer one is scaled down; 0 for no limit")

    def __post_init__(self) -> None:
        problems = [
            f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be in [0, 1)"
            for name in ("adam_beta1", "adam_beta2")
            if not 0 <= getattr(self, name) < 1
        ]
        for name in ("weight_decay", "adam_eps", "clip_grad"):
            if not 0 <= getattr(self, name) < math.inf:
                problems.append(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must not be negative")
        if problems:
            raise ConfigError(problems)


def decays(parameter: nn.Parameter) -> bool:
    """Matrices and tables decay; biases and norm weights, which are vectors, do not."""
    return len(parameter.placement.shape) > 1


class FlatOptimizer:
    """AdamW (arXiv:1711.05101) with float32 masters over the buffers of all model chunks of this rank."""

    def __init__(self, buffers: Sequence[ParamAndGradBuffer], config: OptimizerConfig, mesh: Mesh):
        self.buffers, self.config, self.mesh = list(buffers), config, mesh
        self.masters = [_master_of(buffer) for buffer in self.buffers]
        self.exp_avg = [MemoryBuffer(m.numel, m.dtype, m.data.device) for m in self.masters]
        self.exp_avg_sq = [MemoryBuffer(m.numel, m.dtype, m.data.device) for m in self.masters]
        self.step_count = 0  # updates that the moments have seen
        self._counted = [_counted_runs(buffer, mesh) for buffer in self.buffers]
        self._adam = self._build_adam()

    def _build_adam(self) -> torch.optim.AdamW:
        """torch's AdamW over the segments, its moments being views of our flat ones."""
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        states = {}
        for i, buffer in enumerate(self.buffers):
            labels = {name: decays(parameter) for name, parameter in buffer.parameters.items()}
            for decay, start, stop in runs(buffer.plan.slots, labels):
                segment = self.masters[i].data[start:stop]
                segment.grad = buffer.grads.data[start:stop]
                groups[decay].append(segment)
                states[segment] = {
                    "step": torch.zeros(
                        (), dtype=torch.float32, device=segment.device if has_fused_adam(segment.device) else "cpu"
                    ),
                    "exp_avg": self.exp_avg[i].data[start:stop],
                    "exp_avg_sq": self.exp_avg_sq[i].data[start:stop],
                }
        decay_of = {True: self.config.weight_decay, False: 0.0}
        adam = torch.optim.AdamW(
            [{"params": segments, "weight_decay": decay_of[key]} for key, segments in groups.items() if segments],
            betas=(self.config.adam_beta1, self.config.adam_beta2),
            eps=self.config.adam_eps,
            fused=all(has_fused_adam(segment.device) for segment in states),
        )
        adam.state.update(states)
        return adam

    def grad_norm(self) -> float:
        """The L2 norm of the whole model's gradient, each parameter counted once. One all-reduce of a number over mp."""
        total = torch.zeros((), dtype=torch.float64, device=self.buffers[0].grads.data.device)
        for buffer, counted in zip(self.buffers, self._counted):
            for start, stop in counted:
                total += torch.linalg.vector_norm(buffer.grads.data[start:stop], dtype=torch.float64) ** 2
        return comm.all_reduce(total, self.mesh["mp"]).sqrt().item()

    def clip_grad_norm(self) -> float:
        """Scale the gradient down to `clip_grad` if it is longer; returns its norm before. Every rank must call."""
        norm = self.grad_norm()
        scale = self.config.clip_grad / (norm + 1e-6)
        if self.config.clip_grad > 0 and scale < 1:
            for buffer in self.buffers:
                buffer.grads.data.mul_(scale)
        return norm

    def step(self, lr: float) -> None:
        """Update masters and parameters with the gradients in the buffers."""
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self.step_count += 1
        self.publish_masters()

    def publish_masters(self) -> None:
        """Round the masters into the parameters."""
        for buffer, master in zip(self.buffers, self.masters):
            if master is not buffer.params:
                buffer.params.data.copy_(master.data)

    def adopt_parameters(self) -> None:
        """Make the masters equal to the parameters, as after loading weights alone."""
        for buffer, master in zip(self.buffers, self.masters):
            if master is not buffer.params:
                master.data.copy_(buffer.params.data)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint must hold to go on exactly: kind -> parameter name -> tensor shaped like the parameter."""
        kinds = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        if any(master is not buffer.params for buffer, master in zip(self.buffers, self.masters)):
            kinds["master"] = self.masters
        return {
            kind: {
                slot.name: flat.get(tuple(buffer.parameters[slot.name].shape), slot.start)
                for buffer, flat in zip(self.buffers, flats)
                for slot in buffer.plan.slots
            }
            for kind, flats in kinds.items()
        }

    def set_step_count(self, steps: int) -> None:
        """How many updates the moments have seen, after loading them."""
        self.step_count = steps
        for state in self._adam.state.values():
            state["step"].fill_(steps)


def _master_of(buffer: ParamAndGradBuffer) -> MemoryBuffer:
    if buffer.params.dtype == buffer.grads.dtype:
        return buffer.params
    master = MemoryBuffer(buffer.plan.numel, buffer.grads.dtype, buffer.params.data.device)
    master.data.copy_(buffer.params.data)
    return master


def _counted_runs(buffer: ParamAndGradBuffer, mesh: Mesh) -> list[tuple[int, int]]:
    """The parts of the buffer that this rank speaks for in sums over the model."""
    slots, counted = buffer.plan.slots, []
    for slot, next_start in zip(slots, [slot.start for slot in slots[1:]] + [buffer.plan.numel]):
        shape = tuple(buffer.parameters[slot.name].shape)
        for _, local in owned_pieces(buffer.parameters[slot.name].placement, shape, mesh):
            start, stop = (slot.start + at for at in flat_run(local, shape))
            stop = next_start if stop == slot.stop else stop  # the gap that alignment leaves is zero
            if counted and counted[-1][1] == start:
                start = counted.pop()[0]
            counted.append((start, stop))
    return counted

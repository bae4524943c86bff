"""Any torch module trained over data-parallel ranks by a loop of one's own, in every ZeRO stage.

    engine = Engine(model, torch.optim.AdamW(model.parameters()), EngineConfig(accumulation=2), mesh, device)
    for batch in loader:                 micro batches of this rank
        loss = engine(batch)             the module's forward
        engine.backward(loss)            of loss x scale / accumulation steps
        engine.step()                    every `accumulation` calls: reduce, clip, update

Buffers, shards, masters and offload are those of `core.distributed` and `core.optimizer`, checkpoints those of every run.
"""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import LocalTensor, open_checkpoint, save_checkpoint
from megatron.core.dist_checkpointing.format import CheckpointError
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.distributed.gathered_parameters import full_state_dict, sync_module_states
from megatron.core.offload.state_offload_config import OffloadConfig, make_offload_store
from megatron.core.ops.main_grad_interface import slot_of
from megatron.core.optimizer import FlatOptimizer, torch_optimizer_wrapper
from megatron.core.optimizer.loss_scaler import LossScaleConfig, make_grad_scaler
from megatron.core.optimizer.torch_optimizer_wrapper import GroupedOptimizer
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.boxes import whole
from megatron.training.checkpointing.save_and_load import read_tensors, sharded_model_state, sharded_optimizer_state


@dataclass(frozen=True)
class EngineConfig:
    """How a module is trained.

    micro_batch: samples of one forward on one rank, for the count of samples. precision: float16, bfloat16 or "", the
    module's
    own. takes_mean: a step's gradient is the mean over its micro batches and over the ranks, else the sum over the ranks of
    the mean over its micro batches. restores_hysteresis: see `DynamicGradScaler`. casts_inputs: to float16.
    """

    micro_batch: int = 1
    accumulation: int = 1  # micro batches of a step
    precision: str = ""
    clipping: float = 0.0  # the greatest norm of the whole gradient; 0: no clipping
    takes_mean: bool = True
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    restores_hysteresis: bool = False
    casts_inputs: bool = False
    offload_optimizer: OffloadConfig = field(default_factory=OffloadConfig)
    offload_param: OffloadConfig = field(default_factory=OffloadConfig)


_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class Engine(nn.Module):
    """Runs `module` over the data-parallel ranks. Every rank must make it, of the same model; the first rank's values count.

    optimizer: torch's Adam, AdamW or SGD, or (name in OPTIMIZERS, groups). Parameters that it does not know are frozen.
    lr_scheduler: an object whose `step()` is called after each update.

    global_steps: updates and skipped ones; skipped_steps: overflows of the loss scale; micro_steps: calls of `step`.
    """

    make_optimizer = GroupedOptimizer

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | tuple[str, torch_optimizer_wrapper.Groups],
        config: EngineConfig,
        mesh: Mesh,
        device: torch.device | str = "cpu",
    ):
        super().__init__()
        self.module, self.settings = module, config
        self.mesh, self.device = mesh, torch.device(device)
        self.global_rank = mesh["world"].rank
        self.global_steps = self.skipped_steps = 0
        self.micro_steps = self.global_samples = 0
        self.lr_scheduler: Any = None
        if any(slot_of(p) is not None for p in module.parameters()):
            raise ConfigError("the module lies in an engine's buffers already; make another, or go on with that engine")
        is_torchs = isinstance(optimizer, torch.optim.Optimizer)
        name, groups = torch_optimizer_wrapper.groups_of_torch(optimizer) if is_torchs else optimizer
        common = torch_optimizer_wrapper.config_of_groups(name, groups, config.clipping)
        number_of = torch_optimizer_wrapper.group_numbers(module, groups)
        sync_module_states(module, mesh, self.device, getattr(torch, config.precision) if config.precision else None)
        of_params, of_state = config.offload_param, config.offload_optimizer
        state_tier = make_offload_store(of_state, self.global_rank, self.device)
        same = (of_params.tier, of_params.offload_dir) == (of_state.tier, of_state.offload_dir)
        offload_store = state_tier if same else make_offload_store(of_params, self.global_rank, self.device)
        self._chunk = (
            DistributedDataParallel(module, mesh, config.data_parallel, offload_store=offload_store),
        )  # no submodule
        scaler = make_grad_scaler(config.loss_scale, fp16=True) if config.precision == "float16" else None
        if scaler is not None:
            scaler.restores = config.restores_hysteresis
        flat = FlatOptimizer(
            self.chunk.buffers,
            common,
            mesh,
            group_of=torch_optimizer_wrapper.by_number(number_of),
            scaler=scaler,
            device=self.device,
            offload_store=state_tier,
            offload_fraction=of_state.optimizer_offload_fraction,
        )
        self.optimizer = self.make_optimizer(flat, groups)
        self._has_forward = False  # a forward with gradients, since the last backward
        self._backwards = 0  # since the last step
        self._begin_step()

    @property
    def chunk(self) -> DistributedDataParallel:
        """The wrapper of the module, with its buffers."""
        return self._chunk[0]

    def _begin_step(self) -> None:
        self.chunk.zero_grad_buffer(self.settings.accumulation)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """The module's forward. In stage 3 every rank must call, also to evaluate."""
        if not self._has_forward:
            self.chunk.begin_microbatch(self.micro_steps % self.settings.accumulation, backward=False)
        self._has_forward |= torch.is_grad_enabled()
        if self.settings.casts_inputs:
            inputs, options = _half(inputs), _half(options)
        return self.chunk(*inputs, **options)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Add the gradients of `loss` x loss scale / accumulation steps; returns the loss. Several losses may be added
        before a
        `step`. scale_wrt_gas: False: the script has divided by the accumulation steps. Every rank must call."""
        if loss.numel() != 1:
            raise ValueError(f"engine.backward(loss): the loss has shape {tuple(loss.shape)}; it must be one number")
        self.chunk.begin_microbatch(self.micro_steps % self.settings.accumulation, backward=True)
        factor = self.optimizer.loss_scale / (self.settings.accumulation if scale_wrt_gas else 1)
        wide = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        (wide * factor).backward(retain_graph=retain_graph)
        self._has_forward, self._backwards = False, self._backwards + 1
        return loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """After every backward; updates at the end of the accumulation. Every rank must call. lr_kwargs: for
        `lr_scheduler.step`,
        such as the metrics of ReduceLROnPlateau."""
        if self._backwards == 0:
            raise RuntimeError(
                "engine.step() without a backward; call engine.backward(loss), not loss.backward(), before it"
            )
        self._backwards = 0
        if self.is_gradient_accumulation_boundary():
            self._update(**(lr_kwargs or {}))
        self.micro_steps += 1

    def _update(self, **lr_kwargs: Any) -> None:
        self.chunk.finish_grad_reduce()
        updated = self.optimizer.update(float(self.mesh.samples.size) if self.settings.takes_mean else 1.0)
        if updated:
            self.chunk.gather_params()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**lr_kwargs)
        self.skipped_steps += not updated
        self.global_steps += 1
        self.global_samples += self.settings.micro_batch * self.settings.accumulation * self.mesh.samples.size
        self._begin_step()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates."""
        return (self.micro_steps + 1) % self.settings.accumulation == 0

    def no_sync(self) -> AbstractContextManager:
        """Nothing to hold back: gradients are reduced by the `step` that updates, or in stages 2 and 3 as they come."""
        return nullcontext()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget what another engine's backward has left in this one's parameters. Gradients of its own are kept for the
        step
        that they belong to, which then forgets them. Every rank must call."""
        is_first = self._backwards == 0 and self.micro_steps % self.settings.accumulation == 0
        if is_first and self.chunk.has_gradients:
            self._has_forward = False
            self._begin_step()

    def module_state_dict(self) -> dict[str, Tensor]:
        """Copies of all weights and buffers, on the CPU, on every rank. Every rank must call."""
        self.chunk.finish_param_gather()
        return full_state_dict(self.module)

    def save(self, folder: Path | str, **more: Any) -> None:
        """Write weights, buffers, optimizer, counters, schedule and `more`, plain JSON, to `folder`. Every rank must
        call."""
        flat = self.optimizer.flat
        state = {name: getattr(self, name) for name in _COUNTERS} | {
            "optimizer_steps": flat.step_count,
            "grad_scaler": {} if flat.scaler is None else flat.scaler.state(),
            "rates": self.optimizer.rates(),
            "groups": [_numbers_of(group) for group in self.optimizer.param_groups],
            "schedule": {} if self.lr_scheduler is None else _plain(self.lr_scheduler.state_dict()),
        }
        self.chunk.finish_param_gather()
        tensors = self._weights() | sharded_optimizer_state(flat, self.mesh)
        save_checkpoint(folder, self.global_steps, tensors, state | more, self.mesh["world"], self.device)

    def load(
        self, folder: Path | str, *, optimizer: bool = True, schedule: bool = True, counters: bool = True
    ) -> tuple[Path, dict[str, Any]]:
        """Fill the engine from `folder`, written by any number of ranks in any stage; returns the checkpoint's own
        folder and
        state. Every rank must call. False: not from the checkpoint, but as they are.

        optimizer: masters, moments, and the numbers of its groups (decay, betas, ...), the rate too unless the engine has a
        schedule that is not loaded. schedule: the state of `lr_scheduler`, and the rates. counters: steps and samples.
        """
        world, flat = self.mesh["world"], self.optimizer.flat
        checkpoint = open_checkpoint(folder, world=world, device=self.device)
        state, tensors = checkpoint.state, sharded_optimizer_state(flat, self.mesh)
        # A checkpoint of earlier versions has of its groups the rates alone.
        groups = state.get("groups") or [{"lr": rate} for rate in state["rates"]]
        if optimizer or schedule:
            self._check_groups(checkpoint.folder, groups, numbers_too=optimizer)
        read_tensors(checkpoint, self._weights(), tensors, world, self.device, load_optimizer=optimizer)
        if counters:
            for name in _COUNTERS:
                setattr(self, name, state[name])
        if optimizer:
            flat.step_count = state["optimizer_steps"]
            if flat.scaler is not None:
                flat.scaler.load_state(state["grad_scaler"])
        if schedule and self.lr_scheduler is not None and state["schedule"]:
            self.lr_scheduler.load_state_dict(_typed_as(self.lr_scheduler.state_dict(), state["schedule"]))
        takes_rates = schedule or (optimizer and self.lr_scheduler is None)
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True) if optimizer or schedule else ():
            for key, value in saved.items():
                if takes_rates if key == "lr" else optimizer:
                    group[key] = _typed_as(group.get(key), value)
        return checkpoint.folder, state

    def _check_groups(self, folder: Path | str, saved: list[dict[str, Any]], *, numbers_too: bool) -> None:
        own = self.optimizer.param_groups
        if len(own) != len(saved):
            raise CheckpointError(
                folder,
                f"its optimizer has {len(saved)} groups of parameters, this engine's has {len(own)}",
                "make the optimizer with the groups of the run that saved it, or load the weights alone",
            )
        if numbers_too and (changed := self.optimizer.changed_fixed(saved)):
            key, was, value = changed
            raise CheckpointError(
                folder,
                f"its optimizer has {key} = {was}, this engine's has {value}, which cannot change within a run",
                f"make the optimizer with {key} = {was}, or load without the optimizer's states",
            )

    def _weights(self) -> dict[str, LocalTensor]:
        """Parameters and buffers by their names in a checkpoint. Every rank has all of a buffer; the first writes its
        own."""
        found, saved = sharded_model_state([self.chunk], self.mesh), self.module.state_dict(keep_vars=True)
        for name, buffer in self.module.named_buffers():
            if name in saved and buffer.numel():
                shape = tuple(buffer.shape)
                pieces = [(whole(shape), whole(shape))]
                found[f"buffer/{name}"] = LocalTensor(buffer, shape, pieces, self.mesh["world"].is_first)
        return found


def _numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What one of torch's groups says beside its parameters, as JSON holds it."""
    numbers = {
        key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value for key, value in group.items()
    }
    plain = {key: _plain(value) for key, value in numbers.items() if key != "params"}
    return {key: value for key, value in plain.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _plain(state: Any) -> Any:
    """The state of an object of torch's as JSON holds it: texts as keys, and as numbers that are not finite."""
    if isinstance(state, Mapping):
        return {str(key): _plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [_plain(one) for one in state]
    return str(state) if isinstance(state, float) and not math.isfinite(state) else state


def _typed_as(own: Any, saved: Any) -> Any:
    """What JSON has kept of a state, with the kinds of keys, lists and numbers that the object's own state has."""
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        kind = int if own and all(isinstance(key, int) for key in own) else str
        return type(own)({kind(key): _typed_as(own.get(kind(key)), value) for key, value in saved.items()})
    if isinstance(own, list | tuple) and isinstance(saved, list):
        # A state of several schedules is a list of theirs. One that is longer than this one's has more of its last kind.
        kinds = [*own, *own[-1:] * (len(saved) - len(own))]
        return type(own)(map(_typed_as, kinds, saved) if kinds else saved)
    if isinstance(own, Tensor) and isinstance(saved, int | float):  # torch takes a rate as a tensor too
        return torch.full_like(own, saved)
    return float(saved) if isinstance(own, float) and isinstance(saved, str) else saved


def _half(values: Any) -> Any:
    """Floating tensors in float16, inside tuples, lists and dicts too."""
    return tree_map(lambda x: x.half() if isinstance(x, Tensor) and x.is_floating_point() else x, values)

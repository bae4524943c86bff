"""An `Engine` trains any torch module over data-parallel ranks, in every ZeRO stage; the script writes the loop.

    engine = Engine(model, torch.optim.AdamW(model.parameters()), EngineConfig(accumulation=2), mesh, device)
    for batch in loader:                 micro batches of this rank
        loss = engine(batch)             the module's forward
        engine.backward(loss)            the backward of loss x scale / accumulation steps
        engine.step()                    every `accumulation` calls: reduce, clip, update

Buffers, shards, masters and offload are those of `core.distributed` and `core.optimizer`; checkpoints have the
format of every run.
"""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import Checkpoint, LocalTensor, open_checkpoint, save_checkpoint
from megatron.core.dist_checkpointing.manifest_format import CheckpointError
from megatron.core.dist_checkpointing.sharded_module_buffers import (
    buffers_of_model,
    saved_buffer_shapes,
    sharded_buffers,
)
from megatron.core.distributed.clear_reduce_divide_gradients import GradientStep
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.distributed.sync_and_gather_params import full_state_dict, sync_module_states
from megatron.core.offload.host_and_file_stores import make_offload_store
from megatron.core.offload.optimizer_and_param_offload_config import OffloadConfig
from megatron.core.ops.aux_loss_collector import (
    AuxLoss,
    AuxLossMeans,
    AuxLossTotals,
    MoEAuxLossAutoScaler,
    declared_aux_losses,
    objective_of,
)
from megatron.core.ops.main_grad_interface import grad_sink_of
from megatron.core.optimizer import FlatOptimizer, flat_optimizer_with_param_groups
from megatron.core.optimizer.flat_optimizer_with_param_groups import FlatOptimizerWithParamGroups
from megatron.core.optimizer.loss_scaler import LossScaleConfig, make_grad_scaler
from megatron.core.optimizer.sharded_model_and_optimizer_state import sharded_model_state, sharded_optimizer_state
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.training.checkpointing.save_and_load_run_state import read_tensors


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine.

    micro_batch: samples of one forward on one rank, for the count of samples.
    precision: float16, bfloat16, or "" for the module's own.
    takes_mean: a step's gradient is the mean over its micro batches and over the ranks; else the sum over the ranks of
        the mean over its micro batches.
    restores_hysteresis: see `DynamicGradScaler`.
    casts_inputs: cast floating inputs to float16.
    """

    micro_batch: int = 1
    accumulation: int = 1  # micro batches of a step
    precision: str = ""
    clipping: float = 0.0  # maximal norm of the whole gradient; 0: no clipping
    takes_mean: bool = True
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    restores_hysteresis: bool = False
    casts_inputs: bool = False
    offload_optimizer: OffloadConfig = field(default_factory=OffloadConfig)
    offload_param: OffloadConfig = field(default_factory=OffloadConfig)


_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class Engine(nn.Module):
    """Trains `module` over the data-parallel ranks.

    Every rank must construct it, with the same model; the initial values are the first rank's.

    optimizer: torch's Adam, AdamW or SGD, or (name in OPTIMIZERS, groups). Parameters in none of its groups are frozen.
    lr_scheduler: an object whose `step()` is called after each update.

    aux_losses: means of the last step's auxiliary losses, by name; aux_losses_by_layer: name -> layer number -> mean.
    global_steps: updates and skipped ones; skipped_steps: overflows of the loss scale; micro_steps: calls of `step`.
    """

    make_optimizer = FlatOptimizerWithParamGroups

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | tuple[str, flat_optimizer_with_param_groups.Groups],
        config: EngineConfig,
        mesh: Mesh,
        device: torch.device | str = "cpu",
    ):
        super().__init__()
        self.module = module
        self.settings = config
        self.mesh = mesh
        self.device = torch.device(device)
        self.global_rank = mesh["world"].rank
        self.global_steps = 0
        self.skipped_steps = 0
        self.micro_steps = 0
        self.global_samples = 0
        self.lr_scheduler: Any = None
        if any(grad_sink_of(p) is not None for p in module.parameters()):
            raise ConfigError(
                "the module's parameters are already in the buffers of an engine; make another module, or use "
                "that engine"
            )

        # read the optimizer's groups, before the parameters change
        if isinstance(optimizer, torch.optim.Optimizer):
            name, groups = flat_optimizer_with_param_groups.groups_of_torch(optimizer)
        else:
            name, groups = optimizer
        optimizer_config = flat_optimizer_with_param_groups.common_config_of_groups(name, groups, config.clipping)
        group_numbers_freezing_others = flat_optimizer_with_param_groups.group_numbers_freezing_others(module, groups)

        # broadcast the first rank's values, in the precision of training
        dtype = getattr(torch, config.precision) if config.precision else None
        sync_module_states(module, mesh, self.device, dtype)

        # open the stores of offloaded state; parameters and optimizer state share one if their settings agree
        param_offload = config.offload_param
        optimizer_offload = config.offload_optimizer
        optimizer_store = make_offload_store(optimizer_offload, self.global_rank, self.device)
        param_place = (param_offload.tier, param_offload.offload_dir)
        if param_place == (optimizer_offload.tier, optimizer_offload.offload_dir):
            param_store = optimizer_store
        else:
            param_store = make_offload_store(param_offload, self.global_rank, self.device)

        # move the parameters into buffers; a tuple hides the wrapper from nn.Module, which would register a submodule
        self._chunk = (DistributedDataParallel(module, mesh, config.data_parallel, offload_store=param_store),)

        # build the optimizer over the buffers, and torch's view of it
        scaler = None
        if config.precision == "float16":
            scaler = make_grad_scaler(config.loss_scale, fp16=True)
        if scaler is not None:
            scaler.restores = config.restores_hysteresis
        flat = FlatOptimizer(
            self.chunk.buffers,
            optimizer_config,
            mesh,
            group_of=flat_optimizer_with_param_groups.by_number(group_numbers_freezing_others),
            scaler=scaler,
            device=self.device,
            offload_store=optimizer_store,
            offload_fraction=optimizer_offload.optimizer_offload_fraction,
        )
        self.optimizer = self.make_optimizer(flat, groups)

        # the auxiliary losses of its layers
        self._declared_aux_losses = declared_aux_losses([module])
        self._collected_aux_losses: list[AuxLoss] = []  # by the forwards since the last backward
        self.aux_losses: dict[str, float] = {}
        self.aux_losses_by_layer: dict[str, dict[int, float]] = {}

        # begin the first step
        self._has_forward = False  # whether there was a forward with gradients since the last backward
        self._backwards = 0  # since the last step
        self._begin_step()

    @property
    def chunk(self) -> DistributedDataParallel:
        """The DistributedDataParallel around the module, with its buffers."""
        return self._chunk[0]

    def _begin_step(self) -> None:
        """Clear the gradients for the next `accumulation` micro batches."""
        self._gradients = GradientStep([self.chunk])
        self._gradients.begin(self.settings.accumulation)
        self._collected_aux_losses = []
        self._aux_totals: AuxLossTotals | None = None  # of this rank's micro batches
        if self._declared_aux_losses:
            self._aux_totals = AuxLossTotals(self._declared_aux_losses[0], self.device)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Run the module's forward, with its own shapes. In stage 3 every rank must call, also to evaluate."""
        # begin the micro batch, unless an earlier forward of the same one has: a loss may need several forwards
        if not self._has_forward:
            self.chunk.begin_microbatch(self.micro_steps % self.settings.accumulation, backward=False)
        self._has_forward |= torch.is_grad_enabled()
        if self.settings.casts_inputs:
            inputs = _half(inputs)
            options = _half(options)
        with ExitStack() as collecting:
            collected = []
            if self.training and torch.is_grad_enabled():
                collected = [collecting.enter_context(aux.collecting()) for aux in self._declared_aux_losses]
            result = self.chunk(*inputs, **options)
        for aux in collected:
            self._collected_aux_losses += aux
        return result

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Add the gradients of `loss` x loss scale / accumulation steps; returns the loss. Every rank must call.

        Auxiliary losses that the forwards since the last backward have added are part of the loss; the result is
        without them. Several losses may be added before a `step`. loss: one number, [] or [1]; ValueError for any other shape.
        scale_wrt_gas: False: the script has divided by the accumulation steps.
        """
        if loss.numel() != 1:
            raise ValueError(f"engine.backward(loss): the loss has shape {tuple(loss.shape)}; it must be one number")
        self.chunk.begin_microbatch(self.micro_steps % self.settings.accumulation, backward=True)
        self._gradients.loss_scale = self.optimizer.loss_scale  # a checkpoint may have been loaded since the step began
        factor = self._gradients.objective_scale / (self.settings.accumulation if scale_wrt_gas else 1)

        # multiply in float32: the scaled loss may leave float16's range
        wide_loss = loss
        if loss.dtype in (torch.float16, torch.bfloat16):
            wide_loss = loss.float()
        roots = [wide_loss * factor]
        aux_objective = objective_of(self._collected_aux_losses)  # []
        if aux_objective is not None:  # in the same backward: a second one would compute recomputed layers twice
            roots.append(aux_objective * factor)
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(factor, dtype=torch.float64))
        if self._aux_totals is not None:
            self._aux_totals.add(self._collected_aux_losses)
        self._collected_aux_losses = []
        torch.autograd.backward(roots, retain_graph=retain_graph)
        self._has_forward = False
        self._backwards += 1
        return loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Count a micro batch; update at the end of the accumulation. Call it after every backward, on every rank.

        lr_kwargs: for `lr_scheduler.step`, such as the metrics of ReduceLROnPlateau.
        """
        if self._backwards == 0:
            raise RuntimeError(
                "engine.step() was called without a backward; call engine.backward(loss) before it, not loss.backward()"
            )
        self._backwards = 0
        if self.is_gradient_accumulation_boundary():
            self._update(**(lr_kwargs or {}))
        self.micro_steps += 1

    def _update(self, **lr_kwargs: Any) -> None:
        # reduce, clip and update; a gradient that overflows its loss scale is skipped
        # a rank's objectives are its share of the mean over micro batches, so each rank counts as one token
        self._gradients.finish(float(self.mesh.samples.size) if self.settings.takes_mean else 1.0)
        updated = self.optimizer.update(self._gradients.divisor)
        self._share_aux_losses()
        if updated:
            self.chunk.gather_params()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**lr_kwargs)

        # count, and begin the next step
        if not updated:
            self.skipped_steps += 1
        self.global_steps += 1
        self.global_samples += self.settings.micro_batch * self.settings.accumulation * self.mesh.samples.size
        self._begin_step()

    def _share_aux_losses(self) -> None:
        """Set the means of the step's auxiliary losses over all ranks. Every rank must call."""
        if self._aux_totals is None:
            return
        sums = collectives.all_reduce(self._aux_totals.sums.flatten(), self.mesh.samples)  # [layers x names x 2]
        means = AuxLossMeans.from_sums(self._aux_totals.names, sums.cpu().tolist())
        self.aux_losses = means.means
        self.aux_losses_by_layer = means.by_layer

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates."""
        return (self.micro_steps + 1) % self.settings.accumulation == 0

    def no_sync(self) -> AbstractContextManager:
        """Return a context that does nothing.

        Gradients are reduced by the `step` that updates, or in stages 2 and 3 when they are computed.
        """
        return nullcontext()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients that another engine's backward has added to this one's parameters. Every rank must call.

        Gradients of this engine's own backward are kept for the step that they belong to, which then clears them.
        """
        is_step_begin = self._backwards == 0 and self.micro_steps % self.settings.accumulation == 0
        if is_step_begin and self.chunk.has_gradients:
            self._has_forward = False
            self._begin_step()

    def module_state_dict(self) -> dict[str, Tensor]:
        """Return copies of all weights and buffers, in their full shapes, on the CPU, on every rank.

        Every rank must call.
        """
        self.chunk.finish_param_gather()
        return full_state_dict(self.module)

    def save(self, folder: Path | str, **more: Any) -> None:
        """Write weights, buffers, optimizer, counters, schedule and `more`, plain JSON, to `folder`.

        Every rank must call.
        """
        # the numbers, as JSON
        flat = self.optimizer.flat
        state: dict[str, Any] = {name: getattr(self, name) for name in _COUNTERS}
        state["optimizer_steps"] = flat.step_count
        state["grad_scaler"] = {} if flat.scaler is None else flat.scaler.state()
        state["rates"] = self.optimizer.rates()
        state["groups"] = [_numbers_of(group) for group in self.optimizer.param_groups]
        state["schedule"] = {} if self.lr_scheduler is None else _plain(self.lr_scheduler.state_dict())

        # the tensors
        self.chunk.finish_param_gather()
        tensors = self._weights() | sharded_optimizer_state(flat, self.mesh)
        save_checkpoint(folder, self.global_steps, tensors, state | more, self.mesh["world"], self.device)

    def load(
        self, folder: Path | str, *, optimizer: bool = True, schedule: bool = True, counters: bool = True
    ) -> tuple[Path, dict[str, Any]]:
        """Load the engine from `folder`, written by any number of ranks in any stage. Every rank must call.

        Returns the checkpoint's own folder, and its state. An argument that is False leaves its part of the
        engine as it is.

        optimizer: masters, moments, and the numbers of its groups (decay, betas, ...); their learning rates too, unless
            the engine has a schedule that is not loaded.
        schedule: the state of `lr_scheduler`, and the learning rates.
        counters: steps and samples.
        """
        # open and check
        world = self.mesh["world"]
        flat = self.optimizer.flat
        checkpoint = open_checkpoint(folder, world=world, device=self.device)
        state = checkpoint.state
        optimizer_tensors = sharded_optimizer_state(flat, self.mesh)
        groups = state.get("groups")
        if not groups:  # a checkpoint of earlier versions has only the learning rates of its groups
            groups = [{"lr": rate} for rate in state["rates"]]
        if optimizer or schedule:
            self._check_groups(checkpoint.folder, groups, numbers_too=optimizer)

        # the tensors
        read_tensors(
            checkpoint, self._weights(checkpoint), optimizer_tensors, world, self.device, load_optimizer=optimizer
        )

        # the counters
        if counters:
            for name in _COUNTERS:
                setattr(self, name, state[name])
        if optimizer:
            flat.step_count = state["optimizer_steps"]
            if flat.scaler is not None:
                flat.scaler.load_state(state["grad_scaler"])

        # the schedule
        if schedule and self.lr_scheduler is not None and state["schedule"]:
            self.lr_scheduler.load_state_dict(_typed_as(self.lr_scheduler.state_dict(), state["schedule"]))

        # the numbers of the groups
        loads_rates = schedule or (optimizer and self.lr_scheduler is None)
        if optimizer or schedule:
            for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
                for key, value in saved.items():
                    is_loaded = loads_rates if key == "lr" else optimizer
                    if is_loaded:
                        group[key] = _typed_as(group.get(key), value)
        return checkpoint.folder, state

    def _check_groups(self, folder: Path | str, saved: list[dict[str, Any]], *, numbers_too: bool) -> None:
        """Raise CheckpointError if the saved groups do not fit the optimizer's.

        numbers_too: compare the numbers that cannot change within a run.
        """
        groups = self.optimizer.param_groups
        if len(groups) != len(saved):
            raise CheckpointError(
                folder,
                f"its optimizer has {len(saved)} groups of parameters, this engine's has {len(groups)}",
                "make the optimizer with the groups of the run that saved it, or load the weights alone",
            )
        changed = self.optimizer.changed_fixed(saved) if numbers_too else None
        if changed:
            key, was, value = changed
            raise CheckpointError(
                folder,
                f"its optimizer has {key} = {was}, this engine's has {value}, which cannot change within a run",
                f"make the optimizer with {key} = {was}, or load without the optimizer's states",
            )

    def _weights(self, checkpoint: Checkpoint | None = None) -> dict[str, LocalTensor]:
        """Return this rank's part of parameters and buffers, by their names in a checkpoint. Every rank must call.

        checkpoint: the one to load, which may be of another number of ranks.
        """
        shapes = None if checkpoint is None else saved_buffer_shapes(checkpoint)
        modules = {0: self.module}
        buffers = buffers_of_model(modules, self.mesh, self.device)
        return sharded_model_state([self.chunk], self.mesh) | sharded_buffers(modules, self.mesh, buffers, shapes)


def _numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group of torch without its parameters, as far as JSON can hold it."""
    numbers = {}
    for key, value in group.items():
        if key == "params":
            continue
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        value = _plain(value)
        if _is_plain(value):
            numbers[key] = value
    return numbers


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _plain(state: Any) -> Any:
    """Return the state of an object of torch's as JSON holds it.

    Keys are strings, and so are numbers that are not finite.
    """
    if isinstance(state, Mapping):
        return {str(key): _plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [_plain(value) for value in state]
    if isinstance(state, float) and not math.isfinite(state):
        return str(state)
    return state


def _typed_as(own: Any, saved: Any) -> Any:
    """Return a state read from JSON with the types of keys, lists and numbers that the object's own state has."""
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        key_type = int if own and all(isinstance(key, int) for key in own) else str
        typed = {}
        for text, value in saved.items():
            key = key_type(text)
            typed[key] = _typed_as(own.get(key), value)
        return type(own)(typed)
    if isinstance(own, list | tuple) and isinstance(saved, list):
        # The state of several schedules is a list of their states; saved entries beyond the own ones have the last's types.
        examples = [*own, *own[-1:] * (len(saved) - len(own))]
        if not examples:
            return type(own)(saved)
        return type(own)(map(_typed_as, examples, saved))
    if isinstance(own, Tensor) and isinstance(saved, int | float):  # torch also takes a tensor as learning rate
        return torch.full_like(own, saved)
    if isinstance(own, float) and isinstance(saved, str):  # a number that is not finite
        return float(saved)
    return saved


def _half(values: Any) -> Any:
    """Cast floating tensors to float16, inside tuples, lists and dicts too."""
    return tree_map(lambda x: x.half() if isinstance(x, Tensor) and x.is_floating_point() else x, values)

"""`initialize` and the engine: forward, backward and step of any torch module, over data-parallel ranks.

    for batch in loader:                 micro batches of this rank
        loss = engine(batch)             the module's forward
        engine.backward(loss)            of loss x scale / accumulation steps
        engine.step()                    every `gradient_accumulation_steps` calls: reduce, clip, update, next rate

The gradient of a step is the mean over its micro batches and over the ranks, or with `gradient_allreduce_op` the sum over the
ranks. Buffers, shards, masters and offload are those of `core.distributed` and `core.optimizer`.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from megatron.core.config import ConfigError
from megatron.core.current_mesh import get_mesh, model_parallel_is_initialized
from megatron.core.device import Device
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.distributed.whole_parameters import start_alike, whole_state_dict
from megatron.core.optimizer import FlatOptimizer, torch_groups
from megatron.core.optimizer.grad_scaler import make_grad_scaler
from megatron.core.tiers.offload_config import make_tier
from megatron.deepspeed import saving
from megatron.deepspeed.comm import get_local_rank
from megatron.deepspeed.optimizer import ZeroOptimizer, make_groups
from megatron.deepspeed.schedules import make_schedule
from megatron.deepspeed.settings import Settings, load_ds_config, read_settings
from megatron.deepspeed.zero import join


class DeepSpeedEngine(nn.Module):
    """Runs `module` over the data-parallel ranks; made by `initialize`.

    global_steps: updates and skipped ones; skipped_steps: overflows of the loss scale; micro_steps: calls of `step`.
    """

    def __init__(self, module: nn.Module, settings: Settings, groups: tuple[str, torch_groups.Groups], device: Device):
        super().__init__()
        self.module, self.settings = module, settings
        self.mesh, self.device = get_mesh(), device.torch_device
        self.global_rank, self.local_rank = self.mesh["world"].rank, get_local_rank()
        self.world_size = self.mesh["world"].size
        self.global_steps = self.skipped_steps = 0
        self.micro_steps = self.global_samples = 0
        self.lr_scheduler: Any = None
        self.training_dataloader: DataLoader | None = None
        number_of = torch_groups.numbers_of(module, groups[1])
        dtype = getattr(torch, settings.precision) if settings.precision else None
        start_alike(module, self.mesh, self.device, dtype)
        of_params, of_state = settings.offload_param, settings.offload_optimizer
        state_tier = make_tier(of_state, self.global_rank, self.device)
        same = (of_params.tier, of_params.offload_dir) == (of_state.tier, of_state.offload_dir)
        tier = state_tier if same else make_tier(of_params, self.global_rank, self.device)
        self._chunk = (DistributedDataParallel(module, self.mesh, settings.data_parallel, tier=tier),)  # no submodule
        scaler = make_grad_scaler(settings.loss_scale, fp16=True) if settings.precision == "float16" else None
        if scaler is not None:
            scaler.restores = settings.restores_hysteresis
        flat = FlatOptimizer(
            self.chunk.buffers,
            torch_groups.config_of_groups(*groups, settings.clipping),
            self.mesh,
            group_of=torch_groups.by_number(number_of),
            scaler=scaler,
            device=self.device,
            tier=state_tier,
            offload_fraction=of_state.optimizer_offload_fraction,
        )
        self.optimizer = ZeroOptimizer(flat, groups[1])
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
        """Add the gradients of `loss` x loss scale / accumulation steps; returns the loss. scale_wrt_gas: False: the script
        has divided by the accumulation steps. Every rank must call."""
        if loss.numel() != 1:
            raise ValueError(f"engine.backward(loss): the loss has shape {tuple(loss.shape)}; it must be one number")
        self.chunk.begin_microbatch(self.micro_steps % self.settings.accumulation, backward=True)
        factor = self.optimizer.loss_scale / (self.settings.accumulation if scale_wrt_gas else 1)
        wide = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        (wide * factor).backward(retain_graph=retain_graph)
        self._has_forward, self._backwards = False, self._backwards + 1
        if self.is_gradient_accumulation_boundary() and not retain_graph:
            self.chunk.start_grad_reduce()
        return loss

    def step(self) -> None:
        """After every backward; updates at the end of the accumulation. Every rank must call."""
        if self._backwards == 0:
            raise RuntimeError(
                "engine.step() without a backward; call engine.backward(loss), not loss.backward(), before it"
            )
        self._backwards = 0
        if self.is_gradient_accumulation_boundary():
            self._update()
        self.micro_steps += 1

    def _update(self) -> None:
        rates = self.optimizer.rates()
        self.chunk.finish_grad_reduce()
        divisor = float(self.mesh.samples.size) if self.settings.takes_mean else 1.0
        updated = self.optimizer.update(divisor)
        if updated:
            self.chunk.gather_params()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self.skipped_steps += not updated
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self._begin_step()
        every = self.settings.steps_per_print
        if every and self.global_steps % every == 0 and self.global_rank == 0:
            print(
                f"step={self.global_steps}, skipped={self.skipped_steps}, lr={rates}, norm={self.optimizer.norm:.6g}",
                flush=True,
            )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates."""
        return (self.micro_steps + 1) % self.settings.accumulation == 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: `step` forgets the gradients of its step."""

    # ---- what the engine was told, under DeepSpeed's names

    def train_batch_size(self) -> int:
        return self.settings.micro_batch * self.settings.accumulation * self.mesh.samples.size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.settings.micro_batch

    def gradient_accumulation_steps(self) -> int:
        return self.settings.accumulation

    def zero_optimization_stage(self) -> int:
        return self.settings.data_parallel.stage

    def get_lr(self) -> list[float]:
        return self.optimizer.rates()

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradient, before clipping."""
        return self.optimizer.norm

    # ---- weights and checkpoints

    def module_state_dict(self) -> dict[str, Tensor]:
        """Copies of all weights and buffers, on the CPU, on every rank. Every rank must call."""
        self.chunk.finish_param_gather()
        return whole_state_dict(self.module)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """Write weights, optimizer, schedule and `client_state` (plain JSON) to save_dir/tag. Every rank must call, with one
        tag; default global_step<N>."""
        saving.save(self, Path(save_dir), tag, client_state or {}, save_latest=save_latest)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """(folder, client state) of what `save_checkpoint` wrote, from any number of ranks and any stage; (None, {}) if
        load_dir names no latest. Every rank must call."""
        del load_module_strict  # every tensor must be there
        goes_on = load_optimizer_states and not load_module_only
        rates = load_lr_scheduler_states and not load_module_only
        return saving.load(self, Path(load_dir), tag, optimizer=goes_on, schedule=rates)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset | None = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, ZeroOptimizer, DataLoader | None, Any]:
    """(engine, optimizer, loader, schedule) of any torch module. Every rank must call, with the same model.

    config: a path or a dict (`config_params` too, or `args.deepspeed_config`). optimizer: torch's Adam, AdamW or SGD, or a
    function of the parameters that makes one; it takes the place of the file's. model_parameters: tensors or groups of them;
    default: all that are trained. lr_scheduler: an object with `step`, or a function of the optimizer that makes one.
    mpu: of a script that has called `initialize_model_parallel`, whose data-parallel ranks are then used.
    """
    if model is None:
        raise ConfigError("initialize(): give model, a torch.nn.Module")
    if mesh_param is not None:
        raise ConfigError("initialize(mesh_param=...): ranks that share a sequence are not supported; leave it out")
    given = [one for one in (config, config_params, getattr(args, "deepspeed_config", None)) if one is not None]
    if len(given) != 1:
        raise ConfigError(f"initialize(): {len(given)} configurations; give one, as config= or --deepspeed_config")
    if mpu is not None and not model_parallel_is_initialized():
        raise ConfigError("initialize(mpu=...): call megatron.core.mpu.initialize_model_parallel() before it")
    join(dist_init_required)
    samples = get_mesh().samples
    settings = read_settings(load_ds_config(given[0]), samples.size)
    device = Device.select(local_rank=get_local_rank())
    if samples.rank == 0:
        for note in settings.notes:
            print(f"ds_config: without effect: {note}", flush=True)
    trained = (p for p in model.parameters() if p.requires_grad)
    held = list(trained if model_parameters is None else model_parameters)
    if optimizer is not None:
        made = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(held)
        groups = torch_groups.groups_of_torch(made)
    elif settings.optimizer is not None:
        groups = make_groups(settings.optimizer, held)
    else:
        raise ConfigError("ds_config names no optimizer; name one, or pass optimizer= to initialize()")
    engine = DeepSpeedEngine(model, settings, groups, device)
    if lr_scheduler is not None:
        engine.lr_scheduler = lr_scheduler if hasattr(lr_scheduler, "step") else lr_scheduler(engine.optimizer)
    elif settings.scheduler is not None:
        engine.lr_scheduler = make_schedule(settings.scheduler, engine.optimizer)
    if training_data is not None:
        order = DistributedSampler(training_data, samples.size, samples.rank)
        options = {"drop_last": settings.drop_last, "collate_fn": collate_fn}
        engine.training_dataloader = DataLoader(training_data, settings.micro_batch, sampler=order, **options)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="for the script to read; changes nothing by itself")
    group.add_argument("--deepspeed_config", metavar="FILE", help="ds_config, a JSON file")
    return parser


def _half(values: Any) -> Any:
    """Floating tensors in float16, inside tuples, lists and dicts too."""
    return tree_map(lambda x: x.half() if isinstance(x, Tensor) and x.is_floating_point() else x, values)

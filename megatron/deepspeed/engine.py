"""Provide DeepSpeed's `initialize` and engine: the `Engine` of
`megatron.training.zero_engine_for_any_module` with the settings of a ds_config.

    for batch in loader:             micro batches of this rank
        loss = engine(batch)         the module's forward
        engine.backward(loss)        gradients of loss x loss scale / accumulation steps
        engine.step()                every `gradient_accumulation_steps` calls: reduce, clip, update, next learning rate

save_dir/latest               the tag
save_dir/<tag>/iter_0000012/  weights, optimizer state, buffers and JSON (docs/checkpoint_format.md), no pickle
"""

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing.manifest_format import CheckpointError
from megatron.core.optimizer.flat_optimizer_with_param_groups import as_torch_optimizer
from megatron.core.parallel import collectives
from megatron.core.parallel.accelerator import Device
from megatron.core.parallel.global_state import get_mesh, model_parallel_is_initialized
from megatron.core.storage import file_layer
from megatron.core.storage.path_or_url import path_of
from megatron.deepspeed.comm import get_local_rank
from megatron.deepspeed.ds_config_scheduler import make_schedule
from megatron.deepspeed.optimizer import ZeroOptimizer, make_groups
from megatron.deepspeed.settings import Settings, load_ds_config, read_settings
from megatron.deepspeed.zero import ensure_data_parallel_groups
from megatron.training.zero_engine_for_any_module import Engine

_MOST_TAG = 1 << 12  # bytes


class DeepSpeedEngine(Engine):
    """An engine that trains `module` over the data-parallel ranks, with DeepSpeed's methods. `initialize` makes it."""

    make_optimizer = ZeroOptimizer
    settings: Settings

    def __init__(self, module: nn.Module, settings: Settings, optimizer: Any, device: Device):
        super().__init__(module, optimizer, settings, get_mesh(), device.torch_device)
        self.world_size = self.mesh["world"].size
        self.local_rank = get_local_rank()
        self.training_dataloader: DataLoader | None = None
        # of this rank's micro batches since the last update, for the line of steps_per_print
        self._loss_sum = torch.zeros((), device=self.device)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        result = super().backward(loss, retain_graph, scale_wrt_gas)
        if self.settings.steps_per_print:
            own = loss.detach().reshape(())
            self._loss_sum += own if scale_wrt_gas else own * self.settings.accumulation
        return result

    def _update(self, **lr_kwargs: Any) -> None:
        rates = self.optimizer.rates()  # of this update: the schedule sets the next ones
        super()._update(**lr_kwargs)
        interval = self.settings.steps_per_print
        if interval and self.global_steps % interval == 0:
            self._print_step(rates)
        self._loss_sum.zero_()

    def _print_step(self, rates: list[float]) -> None:
        """Print the step's line on the first rank. Every rank must call."""
        samples = self.mesh.samples
        loss_sum = collectives.all_reduce(self._loss_sum.reshape(1), samples).item()
        loss = loss_sum / (self.settings.accumulation * samples.size)
        if self.global_rank == 0:
            print(
                f"step={self.global_steps}, skipped={self.skipped_steps}, lr={rates}, norm={self.optimizer.norm:.6g}, "
                f"loss={loss:.6g}",
                flush=True,
            )

    def train_batch_size(self) -> int:
        return self.settings.micro_batch * self.settings.accumulation * self.mesh.samples.size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.settings.micro_batch

    def gradient_accumulation_steps(self) -> int:
        return self.settings.accumulation

    def zero_optimization_stage(self) -> int:
        return self.settings.data_parallel.stage

    def fp16_enabled(self) -> bool:
        return self.settings.precision == "float16"

    def bfloat16_enabled(self) -> bool:
        return self.settings.precision == "bfloat16"

    def get_lr(self) -> list[float]:
        return self.optimizer.rates()

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradient, before clipping; None before the first step."""
        return self.optimizer.norm

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save weights, optimizer, schedule and `client_state` (plain JSON) in save_dir/tag.

        Every rank must call, with the same tag: a text, or a value that becomes one, such as a step's number; None:
        global_step<N>. save_latest: write the tag into save_dir/latest. Raises CheckpointError.
        """
        if exclude_frozen_parameters:
            raise NotImplementedError(
                "save_checkpoint(exclude_frozen_parameters=True) is not built: all weights are saved"
            )
        folder = path_of(save_dir)
        world = self.mesh["world"]
        text = f"global_step{self.global_steps}" if tag is None else _tag_text(folder, tag)
        self._check_same_tag(folder, text)
        self.save(folder / text, client_state=dict(client_state or {}))
        with collectives.raise_together(world, self.device):
            if save_latest and world.is_first:
                file_layer.write_atomically(folder / "latest", text)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint that any number of ranks saved in any ZeRO stage; return (its folder, its client state).

        Every rank must call. tag: as in `save_checkpoint`; None: the one in load_dir/latest; without such a file,
        (None, {}) and a warning. load_module_only: no optimizer, no schedule, and the counters of steps and samples
        stay as they are. load_module_strict: False gives a warning and changes nothing, since every weight
        must be there. Raises CheckpointError.
        """
        if custom_load_fn is not None:
            raise NotImplementedError(
                "load_checkpoint(custom_load_fn=) is not built; load the module's weights in the script"
            )
        root = path_of(load_dir)
        world = self.mesh["world"]
        if not load_module_strict and world.is_first:
            print(
                "deepspeed: WARNING: load_module_strict=False changes nothing: a missing weight is an error", flush=True
            )

        # the tag, which all ranks must agree on
        text = None if tag is None else _tag_text(root, tag)
        self._check_same_tag(root, text or "(none)")
        with collectives.raise_together(world, self.device):
            if text is not None and world.is_first and not file_layer.is_folder(root / text):
                raise CheckpointError(root, f"there is no checkpoint of the tag {text!r}", "give a tag that was saved")
            if text is None and world.is_first:
                text = _latest(root)
        text = collectives.broadcast_text(text, world, self.device)
        if not text:
            if world.is_first:
                print(f"deepspeed: WARNING: {root} has no file latest: nothing is loaded; give a tag", flush=True)
            return None, {}

        folder, state = self.load(
            root / text,
            optimizer=load_optimizer_states and not load_module_only,
            schedule=load_lr_scheduler_states and not load_module_only,
            counters=not load_module_only,
        )
        return str(folder), state["client_state"]

    def _check_same_tag(self, folder: Path, text: str) -> None:
        """Raise CheckpointError on all ranks unless they give one tag. Every rank must call."""
        tags = set(collectives.all_gather_texts(text, self.mesh["world"], self.device))
        if len(tags) > 1:
            raise CheckpointError(folder, f"ranks give different tags: {', '.join(sorted(tags))}", "give one tag")


def _tag_text(folder: Path, tag: Any) -> str:
    """Return a tag as the name of a folder."""
    if not str(tag).strip():
        raise CheckpointError(folder, f"the tag {tag!r} names no folder", "give a name, or leave the tag out")
    if Path(str(tag)) == Path("latest"):
        raise CheckpointError(folder, "the tag 'latest' is the name of the file with the newest tag", "give another")
    return str(tag)


def _latest(root: Path) -> str | None:
    """Read the tag of the newest checkpoint; None if there is no file `latest`."""
    path = root / "latest"
    if not file_layer.is_file(path):
        return None
    text = file_layer.read_start(path, _MOST_TAG).decode().rstrip("\r\n")  # an editor may have added it
    if not text.strip():
        raise CheckpointError(root, "its file latest is empty", "give a tag that was saved")
    return text


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
    """Return (engine, optimizer, data loader, schedule) for any torch module.

    Every rank must call, with the same model.

        config            a path or a dict; `config_params` and `args.deepspeed_config` are other names of it
        optimizer         torch's Adam, AdamW or SGD, or a function that makes one of the parameters; replaces that of
                          the config
        model_parameters  tensors or groups of them; default: all parameters that require gradients
        training_data     a data set, for the data loader
        lr_scheduler      an object with `step`, or a function that makes one of the optimizer; replaces the config's
        mpu               given by a script that has called `initialize_model_parallel`: its data-parallel ranks are
                          used

    Raises ConfigError.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"initialize(): model is a {type(model).__name__}; it must be a torch.nn.Module")
    if mesh_param is not None:
        raise ConfigError("initialize(mesh_param=...): sequence parallelism is not supported; leave it out")
    configs = [x for x in (config, config_params, getattr(args, "deepspeed_config", None)) if x is not None]
    if len(configs) != 1:
        raise ConfigError(
            f"initialize(): {len(configs)} configurations were given; give one, as config= or --deepspeed_config"
        )
    if mpu is not None and not model_parallel_is_initialized():
        raise ConfigError("initialize(mpu=...): call megatron.core.mpu.initialize_model_parallel() before it")

    # process groups, settings, device
    ensure_data_parallel_groups(dist_init_required, distributed_port)
    samples = get_mesh().samples  # the axis of data-parallel ranks
    settings = read_settings(load_ds_config(configs[0]), samples.size)
    device = Device.select(local_rank=get_local_rank())
    if samples.rank == 0:
        for note in settings.notes:
            print(f"ds_config: {note}", flush=True)

    # optimizer: an object, a function that makes one, or the config's
    if model_parameters is None:
        parameters = [p for p in model.parameters() if p.requires_grad]
    else:
        parameters = list(model_parameters)
        if not parameters:
            raise ConfigError(
                "initialize(model_parameters=): it is empty; leave it out to train all parameters that require a "
                "gradient"
            )
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer_or_groups = optimizer
    elif optimizer is not None:
        optimizer_or_groups = optimizer(parameters)
    elif settings.optimizer is not None:
        optimizer_or_groups = make_groups(settings.optimizer, parameters)
    else:
        raise ConfigError("ds_config names no optimizer; name one, or pass optimizer= to initialize()")
    engine = DeepSpeedEngine(model, settings, optimizer_or_groups, device)

    # schedule: an object, a function that makes one, or the config's
    if lr_scheduler is not None and hasattr(lr_scheduler, "step"):
        engine.lr_scheduler = lr_scheduler
    elif lr_scheduler is not None:
        engine.lr_scheduler = lr_scheduler(as_torch_optimizer(engine.optimizer.param_groups))
    elif settings.scheduler is not None:
        engine.lr_scheduler = make_schedule(settings.scheduler, engine.optimizer)

    # data loader
    if training_data is not None:
        engine.training_dataloader = DataLoader(
            training_data,
            settings.micro_batch,
            sampler=DistributedSampler(training_data, samples.size, samples.rank),
            drop_last=settings.drop_last,
            collate_fn=collate_fn,
        )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="for the script to read; changes nothing by itself")
    group.add_argument("--deepspeed_config", metavar="FILE", help="ds_config, a JSON file")
    return parser

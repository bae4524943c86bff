"""Megatron's `MegatronOptimizer` and `get_megatron_optimizer` over our flat optimizer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.from_megatron_config import settings_from
from megatron.core.dist_checkpointing.local_tensor import LocalTensor
from megatron.core.distributed.params_norm_and_zeros import num_zeros_in_grad
from megatron.core.ops.main_grad_interface import grad_sink_of
from megatron.core.optimizer import optimizer_flags_and_registry
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.flat_optimizer_with_param_groups import FlatOptimizerWithParamGroups, by_number
from megatron.core.optimizer.loss_scaler import LossScaleConfig, make_grad_scaler
from megatron.core.optimizer.optimizer_config import NOT_BUILT, OptimizerConfig
from megatron.core.optimizer.param_groups import ParamGroup, default_group
from megatron.core.optimizer.sharded_model_and_optimizer_state import sharded_optimizer_state
from megatron.core.process_groups_config import check_groups


class MegatronOptimizer(FlatOptimizerWithParamGroups):
    """Updates all chunks of this rank. `param_groups`: their `lr` and `weight_decay` are those of the next step."""

    def __init__(self, config: OptimizerConfig, chunks: Sequence[Any], group_of: Callable[[str, Any], ParamGroup]):
        self.config = config
        self.chunks = list(chunks)

        # torch's param_groups: one per kind of parameter
        trained: dict[str, Any] = {}
        for chunk in chunks:
            for name, parameter in chunk.module.named_parameters():
                if grad_sink_of(parameter) is not None:
                    trained[name] = parameter
        kinds = {name: group_of(name, parameter) for name, parameter in trained.items()}
        groups: dict[ParamGroup, dict[str, Any]] = {}
        for name, parameter in trained.items():
            kind = kinds[name]
            if kind not in groups:
                groups[kind] = self._param_group(kind)
            groups[kind]["params"].append(parameter)

        is_l2 = config.optimizer == "adam" and not config.decoupled_weight_decay
        flat = FlatOptimizer(
            [buffer for chunk in chunks for buffer in chunk.buffers],
            settings_from(
                config,
                OptimizerConfig,
                optimizer_flags_and_registry.OptimizerConfig,
                NOT_BUILT,
                muon_nesterov=config.muon_use_nesterov,
                optimizer="adam-l2" if is_l2 else config.optimizer,
            ),
            chunks[0].mesh,
            group_of=by_number({name: list(groups).index(kind) for name, kind in kinds.items()}),
            scaler=make_grad_scaler(
                settings_from(config, OptimizerConfig, LossScaleConfig, NOT_BUILT), fp16=config.fp16
            ),
        )
        super().__init__(flat, list(groups.values()))
        for chunk in chunks:
            chunk.fills_grad = False  # for optimizers of torch.optim alone

    def _param_group(self, kind: ParamGroup) -> dict[str, Any]:
        """Return a group without parameters, with Megatron's keys."""
        config = self.config
        is_decoupled = kind.decoupled and config.decoupled_lr is not None
        max_lr = config.lr
        min_lr = config.min_lr
        if is_decoupled:
            max_lr = config.decoupled_lr
            if config.decoupled_min_lr is not None:
                min_lr = config.decoupled_min_lr
        return {
            "params": [],
            "lr": (max_lr or 0.0) * kind.lr_multiplier,
            "weight_decay": config.weight_decay * kind.weight_decay_multiplier,
            "max_lr": max_lr,
            "min_lr": min_lr,
            "is_decoupled_lr": is_decoupled,
            "wd_mult": kind.weight_decay_multiplier,
            "lr_mult": kind.lr_multiplier,
        }

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of a finished step."""
        del set_to_none
        for chunk in self.chunks:
            if chunk.is_complete:
                chunk.zero_grad_buffer()

    def get_parameters(self) -> list[Tensor]:
        """Return the parameters of all groups, each in its shape on this rank."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, a scalar [] as the given one."""
        return self.flat.scale_loss(loss)

    def get_loss_scale(self) -> Tensor:
        """Return the loss scale: float32 [1], on the device of the gradients."""
        return torch.tensor([self.loss_scale], device=self.flat.device)

    def step(self) -> tuple[bool, float | None, int | None]:
        """Update once. Every rank must call.

        Returns (whether parameters were updated, norm of the gradient, zeros in it with `log_num_zeros_in_grad`);
        (False, None, None) if a gradient overflowed under a loss scale that can fall: then nothing was updated. Raises
        FloatingPointError for another norm that is not finite.
        """
        zeros = None
        if self.config.log_num_zeros_in_grad:
            zeros = num_zeros_in_grad(self.chunks, self.flat.mesh, self.flat.device)
        if not self.update(self.loss_scale):
            return False, None, None
        for chunk in self.chunks:
            chunk.gather_params()
        return True, self.norm, zeros

    def sharded_state_dict(
        self, model_sharded_state_dict: dict[str, Any], is_loading: bool = False, **_: Any
    ) -> dict[str, Any]:
        """Return `state_dict` for `dist_checkpointing`, which loads it in any layout.

        Each tensor says which part of the global tensor it is.
        """
        del model_sharded_state_dict, is_loading  # parameters have placements
        state: dict[str, dict[str, LocalTensor]] = {}  # kind -> parameter name -> tensor
        for key, tensor in sharded_optimizer_state(self.flat, self.flat.mesh).items():
            kind, name = key.removeprefix("optimizer/").split("/", 1)
            state.setdefault(kind, {})[name] = tensor
        return {**self.state_dict(), "state": state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, or of `dist_checkpointing.load`.

        Groups are found by their multipliers: a stage may have other groups than the rank that saved, and those keep
        their numbers until the scheduler's next step.
        """
        kind_of = itemgetter("wd_mult", "lr_mult", "is_decoupled_lr")
        saved = {kind_of(group): group for group in state_dict["param_groups"]}
        groups = [saved.get(kind_of(group), {}) for group in self.param_groups]
        super().load_state_dict({**state_dict, "param_groups": groups})


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[Any],
    no_weight_decay_cond: Callable[[str, Tensor], bool] | None = None,
    scale_lr_cond: Callable[[str, Tensor], bool] | None = None,
    lr_mult: float = 1.0,
    use_gloo_process_groups: bool = True,
    *,
    config_overrides: dict | None = None,
    pg_collection: Any = None,
) -> MegatronOptimizer:
    """Return the optimizer of chunks that DistributedDataParallel wraps. Every rank must call.

    no_weight_decay_cond(name, parameter): whether the parameter does not decay; default: vectors do not.
    scale_lr_cond(name, parameter): whether its rate is multiplied by `lr_mult`. A parameter has its shape on this rank.
    """
    del use_gloo_process_groups  # the mesh knows the groups
    check_groups(pg_collection, "get_megatron_optimizer: pg_collection")
    if config_overrides:
        raise NotImplementedError("config_overrides is not built; give no_weight_decay_cond, scale_lr_cond and lr_mult")
    if any(config.use_distributed_optimizer > chunk.settings.zero.shards_state for chunk in model_chunks):
        raise ConfigError(
            "OptimizerConfig: use_distributed_optimizer needs use_distributed_optimizer=True in "
            "DistributedDataParallelConfig too"
        )

    def group_of(name: str, parameter: Tensor) -> ParamGroup:
        group = default_group(name, parameter.placement)
        if no_weight_decay_cond is not None:
            group = replace(group, weight_decay_multiplier=float(not no_weight_decay_cond(name, parameter)))
        if scale_lr_cond is not None and scale_lr_cond(name, parameter):
            group = replace(group, lr_multiplier=lr_mult)
        return group

    return MegatronOptimizer(config, model_chunks, group_of)

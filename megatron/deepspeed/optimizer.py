"""Provide the optimizer that `initialize` returns, and make the one that a ds_config names."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.optimizer.flat_optimizer_with_param_groups import (
    TORCHS,
    FlatOptimizerWithParamGroups,
    Groups,
    check_arguments,
)


def make_groups(section: Mapping[str, Any], parameters: Iterable[Any]) -> tuple[str, Groups]:
    """Return (name in OPTIMIZERS, parameter groups) for the config's `optimizer` section.

    parameters: tensors of any shapes, or groups of them as torch has. Raises ConfigError.
    """
    kind = str(section.get("type"))
    params = dict(section.get("params") or {})
    if kind.lower() not in ("adam", "adamw", "sgd"):
        raise ConfigError(
            f"ds_config: optimizer {kind!r} is not supported; use Adam, AdamW or SGD, or pass a torch optimizer of "
            "these kinds to initialize()"
        )
    name = "sgd" if kind.lower() == "sgd" else "adam"
    if "max_grad_norm" in params:
        raise ConfigError(
            "ds_config: max_grad_norm is no parameter of an optimizer; give gradient_clipping, beside the section optimizer"
        )
    defaults = dict(TORCHS[name])
    if kind.lower() == "adam" and params.get("adam_w_mode", True) is False:
        name = "adam-l2"
    elif name == "adam" and params.get("torch_adam"):
        # both types are torch's AdamW then, whose default this is; that of DeepSpeed's own Adam is 0
        defaults |= {"weight_decay": 1e-2}
    check_arguments(kind, params, defaults)
    parameters = list(parameters)
    if parameters and isinstance(parameters[0], Mapping):
        groups = [dict(group) for group in parameters]
    else:
        groups = [{"params": parameters}]
    for group in groups:
        tensors = group["params"]
        group["params"] = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        arguments = {key: value for key, value in group.items() if key not in ("params", "name")}
        check_arguments(kind, arguments, defaults)
    common = {key: params.get(key, value) for key, value in defaults.items()}
    return name, [common | group for group in groups]


def FusedAdam(
    params: Iterable[Any],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """Return torch's AdamW (Adam if not `adam_w_mode`) for `initialize`, which updates with the device's fused kernel.

    params: tensors of any shapes, or groups of them.
    """
    if amsgrad or not bias_correction:
        raise ConfigError("FusedAdam: amsgrad=True and bias_correction=False are not built; leave them out")
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def DeepSpeedCPUAdam(
    model_params: Iterable[Any],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """Return what `FusedAdam` does.

    `offload_optimizer` of the config decides where the float32 state is kept and updated.
    """
    return FusedAdam(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)


class ZeroOptimizer(FlatOptimizerWithParamGroups):
    """The optimizer of an engine. `engine.step()` updates, not `step()`; param_groups are those of torch."""

    cur_scale = FlatOptimizerWithParamGroups.loss_scale

    def step(self, *_: Any, **__: Any) -> None:
        raise RuntimeError(
            "optimizer.step() must not be called by itself; call engine.step(), which reduces the gradients first"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: engine.step() zeroes the gradients of its step."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError(
            "a rank has only its shard of the state; call engine.save_checkpoint(folder), which writes all of it"
        )

"""A pytest plugin and a module to import first: what scripts ask of CUDA is done by the CPU, and NCCL's work by gloo.

It names torch's devices and back end, and nothing else.
"""

import functools
import os
from typing import Any

import torch
import torch._dynamo  # looks up torch's functions, before they are replaced
import torch.distributed as dist
from torch import nn

CPU = torch.device("cpu")


def on_cpu(place: Any) -> Any:
    """The CPU for a CUDA device, its name or its number."""
    is_number = isinstance(place, int) and not isinstance(place, bool)
    is_cuda = str(place).startswith("cuda") if isinstance(place, str | torch.device) else is_number
    return CPU if is_cuda else place


def with_devices_mapped(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if "device" in options:
            options["device"] = on_cpu(options["device"])
        return function(*args, **options)

    return call


def moving(function: Any) -> Any:
    """`to` of a tensor or a module."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if "device" in options:
            options["device"] = on_cpu(options["device"])
        return function(self, *map(on_cpu, args), **options)

    return call


def staying(self: Any, *_: Any, **__: Any) -> Any:
    return self


def nothing(*_: Any, **__: Any) -> None:
    return None


def init_process_group(backend: str | None = None, *args: Any, **options: Any) -> None:
    del backend  # nccl, or the default
    _init_process_group("gloo", *args, **options)


_init_process_group, dist.init_process_group = dist.init_process_group, init_process_group
torch.Tensor.cuda = nn.Module.cuda = staying
torch.Tensor.to, nn.Module.to = moving(torch.Tensor.to), moving(nn.Module.to)
for _name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint", "arange", "tensor", "eye"):
    setattr(torch, _name, with_devices_mapped(getattr(torch, _name)))
for _name in ("set_device", "synchronize", "empty_cache", "manual_seed_all"):
    setattr(torch.cuda, _name, nothing)
torch.cuda.device_count = lambda: int(os.environ.get("WORLD_SIZE", "1"))
torch.cuda.manual_seed = torch.default_generator.manual_seed
torch.cuda.current_device = lambda: CPU
torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
torch.cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
torch.cuda.FloatTensor, torch.cuda.LongTensor = torch.FloatTensor, torch.LongTensor

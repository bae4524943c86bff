"""Provide `get_accelerator()`: the device of this process, under DeepSpeed's names."""

from functools import cache

from megatron.core.parallel.accelerator import Device
from megatron.deepspeed.comm import get_local_rank


class Accelerator:
    """An accelerator, or the CPU."""

    def __init__(self, device: Device):
        self.device = device

    def device_name(self, device_index: int | None = None) -> str:
        """Return the name for torch, such as cpu or cuda; with an index that of one device, such as cuda:1."""
        name = self.device.name
        if device_index is None or self.device.module is None:  # a CPU has no index
            return name
        return f"{name}:{device_index}"

    def current_device_name(self) -> str:
        return str(self.device.torch_device)

    def set_device(self, device_index: int) -> None:
        """Use this device of the machine."""
        self.device = Device(self.device.name, device_index)

    def device_count(self) -> int:
        return 1 if self.device.module is None else self.device.module.device_count()

    def is_available(self) -> bool:
        return True

    def communication_backend_name(self) -> str:
        return self.device.backend


@cache
def get_accelerator() -> Accelerator:
    return Accelerator(Device.select(local_rank=get_local_rank()))

"""`get_accelerator()`: the device of this process, under DeepSpeed's names."""

from functools import cache

from megatron.core.parallel.accelerator import Device
from megatron.deepspeed.comm import get_local_rank


class Accelerator:
    """An accelerator, or the CPU."""

    def __init__(self, device: Device):
        self.device = device

    def device_name(self, device_index: int | None = None) -> str:
        """The name for torch, such as cpu, or with a number that of one device."""
        name = self.device.name
        return name if device_index is None or self.device.module is None else f"{name}:{device_index}"

    def current_device_name(self) -> str:
        return str(self.device.torch_device)

    def set_device(self, device_index: int) -> None:
        """Take this device of the machine's."""
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

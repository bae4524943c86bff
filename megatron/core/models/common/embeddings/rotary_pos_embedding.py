"""Megatron's `RotaryEmbedding`."""

import torch
from torch import Tensor, nn

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.parallel.global_state import get_global_state
from megatron.core.process_groups_config import OWN_CP_GROUP
from megatron.core.transformer.rotary_angles_and_frequency_scaling import rotary_angles


class RotaryEmbedding(nn.Module):
    """Compute rotary angles, in radians, float32.

    forward(max_seq_len, offset=0) -> [s, 1, 1, width], each angle for both features of its pair: the angles are
    repeated for both halves of a head, as Megatron's are. offset: the first position. Building it raises
    NotImplementedError for rotary_interleaved.
    """

    @accepts_defaults_only(
        rope_scaling=False, rope_scaling_factor=8.0, use_cpu_initialization=False, cp_group=OWN_CP_GROUP
    )
    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: int = 10000,
    ):
        super().__init__()
        if rotary_interleaved:
            raise NotImplementedError("rotary_interleaved is not built yet; leave it out")
        self.width = int(kv_channels * rotary_percent)
        self.base = rotary_base
        self.factor = seq_len_interpolation_factor or 1.0  # positions are divided by it

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        positions = (torch.arange(max_seq_len)[:, None] + offset) / self.factor
        angles = rotary_angles(positions, self.width, self.base, like=torch.empty(0, device=get_global_state().device))
        return torch.cat((angles, angles), dim=-1)[:, :, None]  # [s, 1, 1, width]


__getattr__ = names_of_megatron(__name__)

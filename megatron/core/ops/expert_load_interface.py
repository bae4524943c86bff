"""What a router tells the log about its experts, without importing it."""

from torch import Tensor, nn


class ReportsExpertLoads(nn.Module):
    """A router that counts the tokens of its experts."""

    layer_number: int  # from 1, over the whole model
    tokens_of_last_step: Tensor | None  # int64 [E], over all ranks; None before the first step
    idle_steps: Tensor  # int64 [E], steps since each expert had a token

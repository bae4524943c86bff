"""Steps of torch's AdamW as tests/support/exchange/record.py takes them, on models read from folders of other projects."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def assert_losses(model: nn.Module, loss_of: Callable[[nn.Module], Tensor], expected: Sequence[float]) -> None:
    """The loss before each step is the recorded one. Rate 0.01; matrices decay by 0.1, vectors do not."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-8)
    for step, recorded in enumerate(expected):
        optimizer.zero_grad()
        loss = loss_of(model)
        assert abs(loss.item() - recorded) < 1e-9, step
        loss.backward()
        optimizer.step()

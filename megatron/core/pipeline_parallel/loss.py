"""What a loss function may return, and what becomes of it: sums and counts that add up over microbatches and ranks."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ForwardStep = Callable[[Iterator | None, Any], tuple[Any, Callable[[Any], Any]]]  # Megatron's: (data iterator, model)


@dataclass
class MicrobatchLoss:
    """The loss of one microbatch as sums."""

    objective: Tensor  # scalar to differentiate: the sum over tokens
    value: Tensor  # the loss as it was returned, in float64
    tokens: Tensor  # scalar: what the sum of all objectives of a step is divided by
    report: dict[str, Tensor]  # name -> (sum, count)


def read_step(result: Any, *, is_last: bool) -> tuple[Any, Any]:
    """(output, loss_func) of what a `forward_step` returned. Raises TypeError with what it should have been."""
    if not isinstance(result, tuple) or len(result) != 2:
        what = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a lone {type(result).__name__}"
        raise TypeError(
            f"forward_step must return (output, loss_func), where loss_func(output) gives the loss, not {what}"
        )
    output, loss_func = result
    if is_last and not callable(loss_func):
        raise TypeError(
            f"forward_step returned (output, {loss_func!r}) on the last stage; there the second must be a function, "
            "loss_func(output) -> (loss_sum, num_tokens, report); other stages may leave it None"
        )
    handed_on = output if isinstance(output, tuple) else (output,)
    if not is_last and not all(isinstance(x, Tensor) for x in handed_on):
        kinds = ", ".join(type(x).__name__ for x in handed_on)
        raise TypeError(f"forward_step handed on {kinds}; before the last stage a model must return its hidden states")
    return output, loss_func


def read_loss(result: Any, nominal_tokens: float = 1.0) -> MicrobatchLoss:
    """From what a `loss_func` returned, in either of two forms.

    (loss_sum, num_tokens, report)   the step's loss is the mean over all its tokens, whatever the masks
    (loss, report)                   the older form: the mean over microbatches and data-parallel ranks of their losses
    A report entry is a scalar (averaged the same way) or a pair (sum, count). The older form is read as the mean of
    `nominal_tokens` tokens, those of a full microbatch, so that both forms give objectives of one size.
    """
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[-1], Mapping):
        raise TypeError(
            "loss_func must return (loss_sum, num_tokens, report) or (loss, report) with report a dictionary, "
            f"not {type(result).__name__} of {len(result) if isinstance(result, tuple) else 1}"
        )
    objective, report = result[0], result[-1]
    if not isinstance(objective, Tensor):
        raise TypeError(f"the loss must be a tensor, to be differentiated, not {type(objective).__name__}")
    if objective.numel() != 1:
        raise TypeError(f"the loss must be one number, not a tensor of shape {tuple(objective.shape)}")
    value = objective.detach().double().squeeze()  # before a product that may overflow float16, which no gradient sees
    if len(result) == 2:
        objective = objective * nominal_tokens
    device = objective.device
    tokens = _numbers("num_tokens, beside the loss,", result[1] if len(result) == 3 else nominal_tokens, device)
    if tokens.numel() != 1:
        raise TypeError(f"num_tokens, beside the loss, must be one number, not {tokens.numel()}")
    pairs = {name: _pair(value, device) for name, value in report.items()}
    return MicrobatchLoss(objective, value, tokens.squeeze(), pairs)


def _numbers(what: str, value: Any, device: torch.device) -> Tensor:
    if isinstance(value, int | float):  # made on the device, since a copy from the host would wait for it
        return torch.full((1,), value, dtype=torch.float64, device=device)
    try:
        return torch.as_tensor(value).detach().double().reshape(-1).to(device)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{what} must be a number or a tensor, not {type(value).__name__}") from None


def _pair(value: Any, device: torch.device) -> Tensor:
    value = _numbers("a report entry", value, device)
    if value.numel() not in (1, 2):
        raise TypeError(f"a report entry is a number or a pair (sum, count), not a tensor of {value.numel()} elements")
    return value if value.numel() == 2 else torch.cat((value, torch.ones_like(value)))


@dataclass
class LossTotals:
    """The sums of a step so far; objectives are gone by then. `value` tells whether each loss was a finite number."""

    tokens: Tensor | float = 0.0
    value: Tensor | float = 0.0
    report: dict[str, Tensor] = field(default_factory=dict)

    def add(self, loss: "MicrobatchLoss | LossTotals") -> None:
        """Add the sums of a microbatch, or those of other microbatches."""
        self.tokens, self.value = self.tokens + loss.tokens, self.value + loss.value
        for name, pair in loss.report.items():
            self.report[name] = self.report[name] + pair if name in self.report else pair


def keep_reports(forward_step: ForwardStep, into: list[Any], *, non_loss: bool = False) -> ForwardStep:
    """The same forward step, whose loss function also leaves its report in `into`. non_loss: what it returns when told
    `non_loss_data=True` instead, the loss being zero."""

    def step(data_iterator: Iterator | None, model: Any) -> tuple[Any, Any]:
        result = forward_step(data_iterator, model)
        if not isinstance(result, tuple) or len(result) != 2 or not callable(result[1]):
            return result  # before the last stage, or an error for the executor to name
        output, loss_func = result

        def keeping(given: Any) -> Any:
            if non_loss:
                into.append(loss_func(given, non_loss_data=True))
                return torch.zeros(()), 0, {}
            loss = loss_func(given)
            if isinstance(loss, tuple) and loss:
                into.append(loss[-1])
            return loss

        return output, keeping

    return step

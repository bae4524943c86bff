"""Results of forward steps and loss functions are read as sums and counts, which add up over microbatches and ranks."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.core.ops.aux_loss_collector import AuxLossTotals

ForwardStep = Callable[[Iterator | None, Any], tuple[Any, Callable[[Any], Any]]]  # Megatron's: (data iterator, model)


@dataclass
class MicrobatchLoss:
    """The loss of one microbatch as sums.

    objective: [] or [1]; value, tokens: float64 []; report: name -> float64 [2].
    """

    objective: Tensor  # scalar to differentiate: the sum over tokens
    value: Tensor  # the loss as returned, in float64
    tokens: Tensor  # scalar: the step's sum of objectives is divided by the step's sum of tokens
    report: dict[str, Tensor]  # name -> (sum, count)


def read_step(result: Any, *, is_last: bool) -> tuple[Any, Any]:
    """Return (output, loss_func) from the result of a `forward_step`. TypeError if the result has another form."""
    if not isinstance(result, tuple) or len(result) != 2:
        form = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a lone {type(result).__name__}"
        raise TypeError(
            f"forward_step must return (output, loss_func), where loss_func(output) returns the loss, not {form}"
        )
    output, loss_func = result
    if is_last and not callable(loss_func):
        raise TypeError(
            f"forward_step returned (output, {loss_func!r}) on the last stage. There the second value must be a "
            "function loss_func(output) -> (loss_sum, num_tokens, report); on other stages it may be None"
        )
    outputs = output if isinstance(output, tuple) else (output,)
    if not is_last and not all(isinstance(x, Tensor) for x in outputs):
        kinds = ", ".join(type(x).__name__ for x in outputs)
        raise TypeError(
            f"forward_step returned {kinds}; on all stages but the last, the model must return its hidden states"
        )
    return output, loss_func


def parse_loss_tuple(result: Any, nominal_tokens: float = 1.0) -> MicrobatchLoss:
    """Read the result of a `loss_func`, in either of two forms:

    (loss_sum, num_tokens, report)   the step's loss is the mean over all tokens that are not masked
    (loss, report)                   Megatron's older form: the mean of losses of microbatches and data-parallel ranks

    The loss is a tensor of one number, num_tokens a number or a tensor of one. A report entry is a scalar (averaged
    like the loss) or a pair (sum, count), a tensor [2]. The older form counts as a mean over `nominal_tokens` tokens, a
    full microbatch, so that both forms give objectives of the same size. Raises TypeError for other results.
    """
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[-1], Mapping):
        raise TypeError(
            "loss_func must return (loss_sum, num_tokens, report) or (loss, report) with report a dictionary, "
            f"not {type(result).__name__} of {len(result) if isinstance(result, tuple) else 1}"
        )

    # the loss
    objective = result[0]
    if not isinstance(objective, Tensor):
        raise TypeError(f"the loss must be a tensor, not {type(objective).__name__}")
    if objective.numel() != 1:
        raise TypeError(f"the loss must be one number, not a tensor of shape {tuple(objective.shape)}")
    value = objective.detach().double().squeeze()  # []; before the product below, which may overflow float16

    # the tokens
    num_tokens = nominal_tokens
    if len(result) == 2:
        objective = objective * nominal_tokens  # a mean becomes a sum
    else:
        num_tokens = result[1]
    device = objective.device
    tokens = _numbers("num_tokens, beside the loss,", num_tokens, device)  # [1]
    if tokens.numel() != 1:
        raise TypeError(f"num_tokens, which is returned with the loss, must be one number, not {tokens.numel()}")

    # the report
    report = {name: _as_pair(entry, device) for name, entry in result[-1].items()}
    return MicrobatchLoss(objective, value, tokens.squeeze(), report)


def _numbers(what: str, value: Any, device: torch.device) -> Tensor:
    """Return a number or a tensor as a flat float64 tensor on the device. what: the name of `value` in errors."""
    if isinstance(value, int | float):  # filled on the device: a copy from the host would synchronize
        return torch.full((1,), value, dtype=torch.float64, device=device)
    try:
        numbers = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{what} must be a number or a tensor, not {type(value).__name__}") from None
    # Outside the try block: a device that fails is not the script's fault.
    return numbers.detach().double().reshape(-1).to(device)  # [numbers]


def _as_pair(entry: Any, device: torch.device) -> Tensor:
    """Return a report entry as (sum, count), of shape [2]."""
    numbers = _numbers("a report entry", entry, device)
    if numbers.numel() not in (1, 2):
        raise TypeError(
            f"a report entry must be a number or a pair (sum, count), not a tensor of {numbers.numel()} elements"
        )
    return numbers if numbers.numel() == 2 else torch.cat((numbers, torch.ones_like(numbers)))


@dataclass
class LossTotals:
    """The sums over the microbatches of a step so far. `value` is finite if each loss was.

    tokens, value: float64 [], or 0.0 before the first microbatch; report: name -> float64 [2]. aux: on every stage, in
    training, if the model declares auxiliary losses.
    """

    tokens: Tensor | float = 0.0
    value: Tensor | float = 0.0
    report: dict[str, Tensor] = field(default_factory=dict)
    aux: AuxLossTotals | None = None

    def add(self, loss: "MicrobatchLoss | LossTotals") -> None:
        """Add the sums of one microbatch, or of several: tokens and value [], report entries [2]."""
        self.tokens = self.tokens + loss.tokens
        self.value = self.value + loss.value
        for name, pair in loss.report.items():
            self.report[name] = self.report[name] + pair if name in self.report else pair


def keep_reports(forward_step: ForwardStep, reports: list[Any], *, non_loss: bool = False) -> ForwardStep:
    """Return the forward step with a loss function that also appends its report to `reports`.

    non_loss: appends loss_func(output, non_loss_data=True) instead, and the loss is zero.
    """

    def step(data_iterator: Iterator | None, model: Any) -> tuple[Any, Any]:
        result = forward_step(data_iterator, model)
        if not isinstance(result, tuple) or len(result) != 2 or not callable(result[1]):
            return result  # an earlier stage, or an error that the executor reports
        output, loss_func = result

        def reporting_loss_func(output: Any) -> Any:
            if non_loss:
                reports.append(loss_func(output, non_loss_data=True))
                return torch.zeros(()), 0, {}
            loss = loss_func(output)
            if isinstance(loss, tuple) and loss:
                reports.append(loss[-1])
            return loss

        return output, reporting_loss_func

    return step

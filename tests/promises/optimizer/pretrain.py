"""A fork with an optimizer of its own under GPT: a momentum, of which each step takes the whole matrix at length 1."""

from torch import Tensor

from megatron.core.enums import ModelType
from megatron.core.optimizer import OPTIMIZERS, UpdateRule
from megatron.core.optimizer.adam_and_sgd import UpdateStep
from megatron.core.optimizer.gather_full_matrices_over_tp import ShardedMatrix
from megatron.training import pretrain
from pretrain_gpt import forward_step, model_provider, train_valid_test_datasets_provider


def level_update(
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: dict[str, list[Tensor]],
    step: UpdateStep,
    wholes: list[ShardedMatrix],
) -> None:
    """m = 0.9 m + g; w -= lr (m / |m| + decay w). The tensors are what this rank holds of each parameter."""
    for parameter, gradient, momentum, whole in zip(parameters, gradients, states["momentum"], wholes):
        momentum.mul_(0.9).add_(gradient)
        matrix = whole.gather(momentum)
        direction = whole.part(matrix / (matrix.norm() + 1e-8))
        parameter.mul_(1 - step.lr * step.weight_decay).sub_(direction, alpha=step.lr)


OPTIMIZERS["level"] = UpdateRule(lambda config: level_update, lambda config: ("momentum",), needs_full_matrix=True)

if __name__ == "__main__":
    pretrain(train_valid_test_datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)

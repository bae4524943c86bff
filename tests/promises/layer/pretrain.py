"""A layer of one's own under GPT: core's transformer layer with another MLP, and a gain of the residual stream that it learns."""

from torch import Tensor, nn

from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.sharding.placement import Constant, Normal
from megatron.core.tensor_parallel.linear_layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.transformer_layer import ParallelTransformerLayer
from megatron.training import get_runtime, pretrain
from pretrain_gpt import forward_step, train_valid_test_datasets_provider


class SquaredReLU(nn.Module):
    """x -> W2 relu(W1 x)^2 (arXiv:2109.08668), three times as wide as the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, context: LayerContext):
        super().__init__()
        h, init = config.hidden_size, Normal(config.init_method_std)
        self.into = ColumnParallelLinear(h, 3 * h, tp=context.tp, init=init, bias=False)
        self.back = RowParallelLinear(3 * h, h, tp=context.tp, init=init)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.into(x)[0].relu().square())[0]


class GainedLayer(ParallelTransformerLayer):
    """The usual layer of gain * x, with a gain for each feature. forward(x [s, b, h] or [s/t, b, h], ...) -> the same shape"""

    def __init__(self, config: ModelConfig, layer: int, context: LayerContext):
        super().__init__(config, layer, context, make_mlp=SquaredReLU)
        self.gain = context.tp.replicated((config.hidden_size,), Constant(1.0))

    def forward(self, x: Tensor, *more) -> Tensor:
        return super().forward(x * self.gain, *more)


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> GPTModel:
    runtime = get_runtime()
    parts = runtime.model_parts(pre_process, post_process, vp_stage)
    return GPTModel(runtime.config.transformer, **parts, make_layer=GainedLayer)


if __name__ == "__main__":
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        rules=GPTModel.rules,
    )

"""A model with a boundary of its own: two residual streams, each layer changing one by the other, and both handed from stage to stage."""

from collections.abc import Iterable

from torch import Tensor, nn

from megatron.core.enums import ModelType
from megatron.core.models.common.embeddings.embedding import Embedding
from megatron.core.models.common.model_rules import GPT_RULES
from megatron.core.models.common.vocab_parallel_lm_head import LanguageModelHead
from megatron.core.pipeline_parallel.stage_transport import TensorSpec
from megatron.core.tensor_parallel.cross_entropy import sharded_cross_entropy
from megatron.core.transformer.attention import ParallelAttention
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.mlp import ParallelMLP
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.norm import make_norm
from megatron.training import get_runtime, pretrain
from pretrain_gpt import forward_step, train_valid_test_datasets_provider


class Coupled(nn.Module):
    """forward(x, y), both [s, b, h] -> x + attention(norm(y)), y + mlp(norm(the new x))"""

    def __init__(self, config: ModelConfig, layer: int, context: LayerContext):
        super().__init__()
        self.norms = nn.ModuleList([make_norm(config, context) for _ in range(2)])
        self.attention, self.mlp = ParallelAttention(config, layer, context), ParallelMLP(config, layer, context)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norms[0](y))
        return x, y + self.mlp(self.norms[1](x))


class TwoStreams(nn.Module):
    """One pipeline stage. forward as that of a GPT; between stages the streams (x, y)."""

    rules = GPT_RULES

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        positions: int,
        layers: Iterable[int],
        context: LayerContext,
        pre_process: bool,
        post_process: bool,
    ):
        super().__init__()
        self.config, self.context, self.vocab_size, self.streams = config, context, vocab_size, None
        self.embedding = Embedding(config, vocab_size, positions, context) if pre_process else None
        self.layers = nn.ModuleDict({str(layer): Coupled(config, layer, context) for layer in layers})
        self.head = LanguageModelHead(config, vocab_size, context) if post_process else None

    def boundary(self, micro_batch_size: int, seq_length: int) -> tuple[TensorSpec, ...]:
        return (self.context.hidden_states(self.config, micro_batch_size, seq_length),) * 2

    def set_input_tensor(self, streams: tuple[Tensor, Tensor] | None) -> None:
        self.streams = streams

    def forward(self, tokens: Tensor, positions: Tensor, mask: None = None, labels: Tensor | None = None):
        x, y = (self.embedding(tokens, positions),) * 2 if self.embedding is not None else self.streams
        for layer in self.layers.values():
            x, y = layer(x, y)
        if self.head is None:
            return x, y
        return sharded_cross_entropy(self.head(x + y), labels.t(), self.context.tp.axis, self.vocab_size).t()


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> TwoStreams:
    runtime = get_runtime()
    return TwoStreams(runtime.config.transformer, **runtime.model_parts(pre_process, post_process, vp_stage))


if __name__ == "__main__":
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        rules=TwoStreams.rules,
    )

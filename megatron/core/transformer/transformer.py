"""The layers of one pipeline stage."""

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from megatron.core.random import DropoutKeys
from megatron.core.tensor_parallel.layers import TensorParallel
from megatron.core.transformer.norm import make_norm
from megatron.core.transformer.rotary import rotary_angles
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import ParallelTransformerLayer

MakeLayer = Callable[[int], nn.Module]


class ParallelTransformer(nn.Module):
    """The layers numbered `layers` (from 0, over the whole model) and, behind the last layer of all, the final norm.

    Layers are kept under their global number, so that a parameter's name is the same in every layout. `make_layer(i)` builds
    layer i; a fork passes its own. forward(x [s, b, h] ([s/t, b, h] under sequence parallelism), mask) -> the same shape.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layers: Iterable[int],
        *,
        tp: TensorParallel,
        keys: DropoutKeys,
        post_process: bool = True,
        make_layer: MakeLayer | None = None,
    ):
        super().__init__()
        self.config, self.sequence_ranks = config, tp.axis.size if tp.sequence_parallel else 1
        make_layer = make_layer or (lambda layer: ParallelTransformerLayer(config, layer, tp=tp, keys=keys))
        self.layers = nn.ModuleDict({str(layer): make_layer(layer) for layer in layers})
        self.final_layernorm = None
        if post_process:
            self.final_layernorm = make_norm(config.normalization, config.hidden_size, config.norm_epsilon, tp)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        config, angles = self.config, None
        if config.position_embedding_type == "rope":
            length = x.shape[0] * self.sequence_ranks
            angles = rotary_angles(length, config.rotary_width, config.rotary_base, like=x)
        for layer in self.layers.values():
            x = layer(x, mask, angles)
        return x if self.final_layernorm is None else self.final_layernorm(x)

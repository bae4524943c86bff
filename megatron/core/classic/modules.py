"""Small modules of Megatron core: identities, norms, dropout, embeddings, and the wrappers of a model."""

from collections.abc import Callable
from dataclasses import make_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron.core.base.signatures import takes
from megatron.core.classic.transformer_config import model_config
from megatron.core.models.common.embeddings.embedding import Embedding
from megatron.core.ops.dropout import DropoutKeys
from megatron.core.ops.matmul import NATIVE
from megatron.core.parallel.global_state import current
from megatron.core.transformer.layer_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.rotary import rotary_angles

AttnMaskType = Enum(
    "AttnMaskType", ["padding", "causal", "no_mask", "padding_causal", "arbitrary", "causal_bottom_right"]
)
AttnType = Enum("AttnType", ["self_attn", "cross_attn"])
AttnBackend = Enum("AttnBackend", ["flash", "fused", "unfused", "local", "auto"])
LayerType = Enum("LayerType", ["embedding", "loss", "encoder", "decoder", "mtp"])


_OF_PACKED = (
    "qkv_format cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q "
    "max_seqlen_kv local_cp_size cp_group"
)
# Several texts in one sequence, which our layers refuse.
PackedSeqParams = make_dataclass("PackedSeqParams", [(name, Any, None) for name in _OF_PACKED.split()])


def settings_of(config: Any, **options: Any) -> ModelConfig:
    """Our settings for Megatron's config; inside a run, the run's for what Megatron's has no field for."""
    run = current().run
    return model_config(config, None if run is None else run.config.transformer, **options)


def context_of(ours: ModelConfig, config: Any) -> LayerContext:
    """The context of layers on the current mesh; the layers of a process draw dropout from one set of keys."""
    here = current()
    if here.run is not None:
        return here.run.layer_context
    if here.dropout_keys is None:
        here.dropout_keys = DropoutKeys(here.seed or torch.initial_seed() % 2**31)
    of_tensors = {"device": here.device, "products": here.products or NATIVE, "fills": not here.fills_by_name}
    asked = here.sequence_parallel or getattr(config, "sequence_parallel", False)
    divided = asked and here.mesh["tp"].size > 1
    return LayerContext.on(here.mesh, ours.params_dtype, here.dropout_keys, sequence_parallel=divided, **of_tensors)


class IdentityOp(nn.Module):
    """forward(x, ...) -> x. The constructor takes any arguments."""

    def __init__(self, *_: Any, **__: Any):
        super().__init__()

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        return x


class IdentityFuncOp(IdentityOp):
    """forward(...) -> a function that returns its first argument."""

    def forward(self, *_: Any, **__: Any) -> Callable[..., Any]:
        return super().forward


def get_bias_dropout_add(training: bool, fused: bool) -> Callable[..., Tensor]:
    """f((x, bias or None), residual, probability) -> residual + dropout(x + bias), with torch's generator.

    In a `TransformerLayer` it stands for the dropout of our layers, whose masks are those of one process in every layout.
    """
    del fused  # in Megatron's signature

    def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        x, bias = x_with_bias
        return residual + functional.dropout(x if bias is None else x + bias, prob, training)

    return add


class FusedLayerNorm(Norm):
    """The norm of `config.normalization` over the last dimension. forward(x) -> the shape of x"""

    @takes(sequence_parallel=False, zero_centered_gamma=False)
    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = True,
        *,
        normalization: str = "LayerNorm",
    ):
        del persist_layer_norm, normalization  # in Megatron's signature
        ours = settings_of(config, norm_epsilon=eps)
        super().__init__(ours, context_of(ours, config), hidden_size)
        self.config = config


WrappedTorchNorm = FusedLayerNorm


class MegatronModule(nn.Module):
    """A module with a config."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Tensor]:
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Tensor]:
        """The parameters of this rank by name; each knows by its `placement` which part of the whole it is."""
        if sharded_offsets:
            raise NotImplementedError(
                "sharded_offsets: parameters are named by their layer's number here; leave it out"
            )
        return {f"{prefix}{name}": parameter for name, parameter in self.named_parameters()}


class Float16Module(MegatronModule):
    """A module in the half precision of its config: inputs are rounded, outputs are float32."""

    def __init__(self, config: Any, module: nn.Module):
        super().__init__(config)
        self.dtype = torch.float16 if config.fp16 else torch.bfloat16
        if not (config.fp16 or config.bf16):
            raise ValueError("Float16Module: config has neither fp16 nor bf16; set one")
        self.module = module.to(self.dtype)

    def set_input_tensor(self, input_tensor: Tensor) -> Any:
        return self.module.set_input_tensor(input_tensor)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        round_one = lambda x: _cast(x, self.dtype)  # noqa: E731
        results = self.module(*map(round_one, inputs), **{name: round_one(x) for name, x in options.items()})
        if not getattr(self.module, "post_process", True):
            return results
        of_one = [_cast(x, torch.float32) for x in (results if isinstance(results, tuple) else (results,))]
        return tuple(of_one) if isinstance(results, tuple) else of_one[0]


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


class LanguageModelEmbedding(Embedding):
    """Words and positions. forward(input_ids [b, s], position_ids, tokentype_ids) -> [s, b, h]"""

    @takes(scatter_to_sequence_parallel=True, tp_group=None)
    def __init__(
        self,
        config: Any,
        vocab_size: int,
        max_sequence_length: int,
        position_embedding_type: str = "learned_absolute",
        num_tokentypes: int = 0,
    ):
        options = {"position_embedding_type": position_embedding_type, "make_vocab_size_divisible_by": 1}
        ours = settings_of(config, untie_embeddings_and_output_weights=True, **options)
        super().__init__(ours, vocab_size, max_sequence_length, context_of(ours, config), num_tokentypes=num_tokentypes)
        self.config, self.max_sequence_length = config, max_sequence_length

    def zero_parameters(self) -> None:
        for parameter in self.parameters():
            parameter.data.zero_()


class RotaryEmbedding(nn.Module):
    """The rotary angles. forward(max_seq_len, offset=0) -> [s, 1, 1, width], each angle for both features of its pair."""

    @takes(rope_scaling=False, rope_scaling_factor=8.0, use_cpu_initialization=False, cp_group=None)
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
        self.width, self.base = int(kv_channels * rotary_percent), rotary_base
        self.factor = seq_len_interpolation_factor or 1.0

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        positions = (torch.arange(max_seq_len)[:, None] + offset) / self.factor
        angles = rotary_angles(positions, self.width, self.base, like=torch.empty(0, device=current().device))
        return torch.cat((angles, angles), dim=-1)[:, :, None]

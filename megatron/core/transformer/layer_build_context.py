"""LayerContext: every layer is built from the config of its model, its number, and this."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.context_parallel.cp_attention import ContextParallel
from megatron.core.context_parallel.cp_prefill_cache import SharedCache
from megatron.core.offload.offload_tiers import Tier
from megatron.core.ops.attention.kv_cache import KeyValueCache
from megatron.core.ops.dropout import DropoutKeys, HiddenDropout
from megatron.core.ops.shard_sequence import positions_of
from megatron.core.parallel.grid import ALONE, Axis
from megatron.core.parallel.sequence_shard import SequenceRows
from megatron.core.pipeline_parallel.stage_transport import TensorSpec
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.tensor_parallel.linear_layers import TensorParallel
from megatron.core.transformer.model_config import ModelConfig


@dataclass(frozen=True)
class LayerContext:
    """The place of a model chunk in the layout, made once and passed to all of its layers.

    A layer looks up neither the current mesh nor the settings of the run. A new axis is a new field here.
    """

    tp: TensorParallel  # the ranks that share a layer; dtype, device and products of its tensors
    keys: DropoutKeys
    ends: Axis | None = None  # the first and the last stage, which share a tied word table
    tier: Tier | None = None  # storage of offloaded activations; None: host memory
    cp: ContextParallel = ContextParallel()  # the ranks that share each sample
    # Rotary angles follow the position_ids of the batch, which restart; False: the place in the sample.
    restarts_positions: bool = False

    @classmethod
    def on(
        cls,
        mesh: Mapping[str, Axis],
        dtype: torch.dtype,
        keys: DropoutKeys | None = None,
        *,
        tier: Tier | None = None,
        cp_types: tuple[str, ...] = ("p2p",),
        longest: int | None = None,
        restarts_positions: bool = False,
        **of_tensors: Any,
    ) -> "LayerContext":
        """The context of this rank's chunks. cp_types, longest: of `ContextParallel`. restarts_positions: as the field.
        of_tensors: further fields of `TensorParallel`, by name."""
        tp = TensorParallel(mesh["tp"], dtype=dtype, kv=mesh["kv"], **of_tensors)
        cp = ContextParallel(mesh["cp"], cp_types, longest, heads=mesh["cp_heads"], ring=mesh["cp_ring"])
        return cls(tp, keys or DropoutKeys(0), mesh["embd"], tier, cp, restarts_positions)

    @property
    def rows(self) -> SequenceRows:
        """The rows of each sample that this rank holds between layers."""
        return SequenceRows(self.cp.axis, self.tp.sequence_axis or ALONE)

    def check_length(self, length: int) -> None:
        """Raises ValueError if samples of `length` tokens cannot be: a rank was given more than its own."""
        self.cp.check(length)

    def positions(self, held: int, device: torch.device) -> Tensor:
        """[held], the place in its sample of each row that this rank holds inside a layer."""
        return positions_of(self.rows.within_layers, held, device)

    def first_token(self, x: Tensor) -> Tensor:
        """[b, h], the first row of whole samples, of hidden states x between two layers, on every rank that has rows of
        them. All
        of these must call."""
        mine = autograd_collectives.whole_sequence(x[:1], self.tp.axis) if self.tp.sequence_parallel else x[:1]
        return autograd_collectives.gather_sequence(mine[:1], self.cp.axis)[0]

    def cache(self, starts: Sequence[int], capacity: int, device: torch.device | str) -> KeyValueCache:
        """The cache of a chunk's layers; arguments as of `KeyValueCache`."""
        given = starts, capacity, device
        return KeyValueCache(*given) if self.cp.axis.size == 1 else SharedCache(*given, self.cp.axis)

    def hidden_dropout(self, probability: float, site: str, layer: int) -> HiddenDropout:
        """Dropout of hidden states. site: a unique name for each place in a layer."""
        return HiddenDropout(probability, self.keys, site, layer, self.rows)

    def hidden_states(self, config: ModelConfig, micro_batch_size: int, seq_length: int) -> TensorSpec:
        """The residual stream of a microbatch between two layers: [s, b, h], or of this rank's rows."""
        return TensorSpec((self.rows.held_of(seq_length), micro_batch_size, config.hidden_size), config.residual_dtype)


MakePart = Callable[[ModelConfig, int, LayerContext], nn.Module]  # int: the layer's number in the whole model

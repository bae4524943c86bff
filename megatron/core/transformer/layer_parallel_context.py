"""LayerContext: the place of a model chunk in the layout.

A layer is built from (config, its number, a LayerContext).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.context_parallel.cp_attention import ContextParallel
from megatron.core.context_parallel.cp_prefill_allgather_kv_cache import PromptShardedCache
from megatron.core.context_parallel.ring_and_allgather_attention import zigzag_to_sample_order
from megatron.core.offload.host_and_file_stores import OffloadAllocator
from megatron.core.ops.attention.kv_cache import CACHES, AttentionCache
from megatron.core.ops.aux_loss_collector import AuxLosses
from megatron.core.ops.layout_invariant_dropout import HiddenDropout, SampleDropoutKeys
from megatron.core.ops.shard_sequence import positions_of
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import ALONE, Axis
from megatron.core.parallel.zigzag_sequence_row_ranges import SequenceShard
from megatron.core.pipeline_parallel.stage_transport import TensorSpec
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.tensor_parallel.linear_layers import TensorParallel
from megatron.core.tensor_parallel.matmul_backend_interface import MatmulBackend
from megatron.core.transformer.model_config import ModelConfig


@dataclass(frozen=True)
class ExpertParallel:
    """The ranks among which the experts of a layer are distributed; together they have one copy of all experts.

    ep: each rank has an equal share of the experts. etp: the ranks of one share; each has a part of every expert in it.
    ep_etp: both, etp varying fastest. These are ranks of one pipeline stage, which hold different tokens where
    sequences are sharded over the tensor-parallel ranks, and a parameter of experts has a copy for each rank of "edp":
    Placement(shape, init, shard={"ep": 0, "etp": 1}, reduce_over=EXPERT_DATA_PARALLEL).
    """

    ep: Axis = Axis("ep", (0,), 0)
    etp: Axis = Axis("etp", (0,), 0)
    ep_etp: Axis = Axis("ep_etp", (0,), 0)


@dataclass(frozen=True)
class LayerContext:
    """The axes, dtype, device and dropout keys of a model chunk, built once and passed to all of its layers.

    So a layer reads neither the current mesh nor the settings of the run. A new axis is a new field here.
    """

    tp: TensorParallel  # the ranks that share a layer; dtype, device and matmul modes of its tensors
    keys: SampleDropoutKeys
    ends: Axis | None = None  # the first and the last stage, which share a tied embedding weight
    offload_store: OffloadAllocator | None = None  # storage of offloaded activations; None: host memory
    cp: ContextParallel = ContextParallel()  # the ranks that share each sample
    # Rotary angles follow the batch's position_ids, which restart at each document; False: the index in the sample.
    restarts_positions: bool = False
    masks_documents: bool = False  # in training every batch has a mask that keeps attention within documents
    aux_losses: AuxLosses = field(default_factory=AuxLosses, compare=False)  # that the chunk's layers add
    experts: ExpertParallel = ExpertParallel()  # the ranks that share experts
    samples: Axis = Axis("dp", (0,), 0)  # the ranks that read other samples of a step

    @classmethod
    def from_mesh(
        cls,
        mesh: Mesh,
        dtype: torch.dtype,
        keys: SampleDropoutKeys | None = None,
        *,
        offload_store: OffloadAllocator | None = None,
        cp_types: tuple[str, ...] = ("p2p",),
        longest: int | None = None,
        restarts_positions: bool = False,
        masks_documents: bool = False,
        **tensor_parallel_fields: Any,
    ) -> "LayerContext":
        """Return the context of this rank's chunks on a mesh.

        keys: default: of seed 0. cp_types, longest: fields of `ContextParallel`. tensor_parallel_fields: of
        `TensorParallel`, by name.
        """
        tp = TensorParallel(mesh["tp"], dtype=dtype, kv=mesh["kv"], **tensor_parallel_fields)
        cp = ContextParallel(mesh["cp"], cp_types, longest, heads=mesh["cp_heads"], ring=mesh["cp_ring"])
        return cls(
            tp,
            keys or SampleDropoutKeys(0),
            mesh["embd"],
            offload_store,
            cp,
            restarts_positions,
            masks_documents,
            experts=ExpertParallel(mesh["ep"], mesh["etp"], mesh["ep_etp"]),
            samples=mesh.samples,
        )

    def with_matmul_backend(self, backend: MatmulBackend) -> "LayerContext":
        """Return this context with other products in all linear layers and the output layer of what is built with it.

        Raises TypeError if `backend` is no object of a MatmulBackend class.
        """
        return replace(self, tp=replace(self.tp, matmul_backend=backend))

    @property
    def rows(self) -> SequenceShard:
        """The part of each sample that this rank holds between layers."""
        return SequenceShard(self.cp.axis, self.tp.sequence_axis or ALONE)

    @property
    def divided_rows(self) -> SequenceShard:
        """The same if tensor-parallel ranks divide the rows among them in any case, as before tokens go to experts."""
        return SequenceShard(self.cp.axis, self.tp.axis)

    def check_length(self, length: int) -> None:
        """Raise ValueError if samples of `length` tokens are too long: a rank was given more than its own part."""
        if self.cp.axis.size > 1:
            self.cp.check(length)

    def positions(self, num_rows: int, device: torch.device) -> Tensor:
        """Return the index in its sample of each of this rank's rows inside a layer: int64 [num_rows]."""
        return positions_of(self.rows.within_layers, num_rows, device)

    def first_token(self, x: Tensor) -> Tensor:
        """Return the hidden states [b, h] of the first token of each sample, on every rank of tp and cp; all must call.

        x: [s, b, h] between two layers, or this rank's rows of it.
        """
        first = x[:1]  # [1, b, h]
        if self.tp.sequence_parallel:
            first = autograd_collectives.gather_replicated_sequence(first, self.tp.axis)[:1]  # that of rank 0 of tp
        return autograd_collectives.gather_sequence(first, self.cp.axis)[0]  # that of rank 0 of cp

    def check_attends_over_whole_samples(self, part: nn.Module, layer: int, *, whole_layer: bool = False) -> None:
        """Raise ConfigError for a script's own attention, or layer, that would see this context-parallel rank's tokens alone.

        layer: its number over the whole model, from 0. A part asks the other ranks if one of its modules is a
        `CoreAttention`, or says so by `attends_over_whole_samples = True`.
        """
        ranks = self.cp.axis.size
        if ranks > 1 and not any(getattr(module, "attends_over_whole_samples", False) for module in part.modules()):
            what = "" if whole_layer else "the attention of "
            alone = ", which a layer that treats each token by itself sets too" if whole_layer else ""
            raise ConfigError(
                f"--context-parallel-size is {ranks}, and {what}layer {layer} ({type(part).__name__}) has "
                "no CoreAttention, which asks the other ranks for their tokens; attend by one, or gather keys and values "
                f"by context.whole_samples and set attends_over_whole_samples = True in the class{alone}"
            )

    def whole_samples(self, x: Tensor) -> Tensor:
        """Return the rows of all context-parallel ranks in the order of the sample: [s/c, b, ..] -> [s, b, ..].

        x: this rank's rows inside a layer, such as its keys; `positions` says which they are. The gradient of x is the sum
        of what the ranks have for these rows. Every rank of cp must call.
        """
        if self.cp.axis.size == 1:
            return x
        return zigzag_to_sample_order(autograd_collectives.gather_sequence(x, self.cp.axis).chunk(self.cp.axis.size))

    def sum_over_sample(self, x: Tensor) -> Tensor:
        """Return the sums of x, of any shape, over the ranks that hold other rows of the same samples between layers.

        The gradient of x is that of the result. For an auxiliary loss: x contains sums over this rank's rows. Every
        rank of tp and cp must call.
        """
        if self.tp.sequence_parallel:
            x = autograd_collectives.reduce(x, self.tp.axis)
        return autograd_collectives.reduce(x, self.cp.axis)

    def cache(
        self, starts: Sequence[int], capacity: int, device: torch.device | str, kind: str = "contiguous"
    ) -> AttentionCache:
        """Return the cache of a chunk's layers; starts and capacity: see `AttentionCache`. kind: a name in `CACHES`.

        Raises ConfigError for a cache without `append` where context-parallel ranks share the prompts.
        """
        cache = CACHES[kind](starts, capacity, device)
        if self.cp.axis.size == 1:
            return cache
        if type(cache).append is AttentionCache.append:
            raise ConfigError(
                f"the cache {kind!r} ({type(cache).__name__}) defines no append(layer, entries), which context-parallel ranks "
                "call with the entries of all prompts; define it, or generate with --context-parallel-size 1"
            )
        return PromptShardedCache(cache, self.cp.axis)

    def hidden_dropout(self, probability: float, site: str, layer: int) -> HiddenDropout:
        """Return the dropout of hidden states. site: a unique name for each place in a layer, which seeds its masks."""
        return HiddenDropout(probability, self.keys, site, layer, self.rows)

    def hidden_states(self, config: ModelConfig, micro_batch_size: int, seq_length: int) -> TensorSpec:
        """Return the shape and dtype of a microbatch's residual stream between two layers.

        The shape is that of this rank's rows, [s / c, b, h], or [s / c / t, b, h] under sequence parallelism.
        """
        return TensorSpec(
            (self.rows.local_length(seq_length), micro_batch_size, config.hidden_size), config.residual_dtype
        )


MakePart = Callable[[ModelConfig, int, LayerContext], nn.Module]  # int: the layer's number in the whole model

"""The options of parallelism give the sizes of the axes for a world size. Pure integers."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from megatron.core.base.dataclass_flags import ConfigError, Count, FlagConfig, flag_of, option
from megatron.core.parallel.parse_pipeline_layout_string import read_layout
from megatron.core.parallel.rank_grid import ORDER, AxisSizes

_UNEVEN_STAGES = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


@dataclass(frozen=True)
class ParallelConfig(FlagConfig):
    """Parallelism."""

    tensor_model_parallel_size: Count = option(1, "tensor-parallel ranks, which shard each layer")
    pipeline_model_parallel_size: Count = option(1, "pipeline-parallel ranks, which shard the sequence of layers")
    sequence_parallel: bool = option(
        False, "sequence parallelism: tensor-parallel ranks shard norms and dropout along the sequence"
    )
    context_parallel_size: Count = option(1, "context-parallel ranks, which shard each sequence")
    cp_comm_type: list[str] = option(
        ["p2p"],
        "communication of context-parallel attention: p2p (keys and values are passed around a ring), all_gather "
        "(keys and values are gathered), a2a (an all-to-all trades a shard of tokens for a shard of heads), a2a+p2p "
        "(a2a among neighbours, p2p between groups of neighbours); give one for all layers, or one for each layer",
        metavar="TYPE",
    )
    hierarchical_context_parallel_sizes: list[int] | None = option(
        None,
        "two numbers for --cp-comm-type a2a+p2p: how many neighbouring ranks exchange heads, and how many such "
        "groups form the ring; their product is --context-parallel-size",
    )
    expert_model_parallel_size: Count = option(
        1,
        "expert-parallel ranks, among which the experts of each layer are distributed; they are ranks of a pipeline "
        "stage that are data-, context- or tensor-parallel elsewhere",
    )
    expert_tensor_parallel_size: Count | None = option(
        None, "ranks that shard each expert; default: --tensor-model-parallel-size"
    )
    num_layers_per_virtual_pipeline_stage: Count | None = option(
        None,
        "layers per model chunk, for the schedules interleaved and zb-interleaved; zb-v always has 2 chunks per rank",
    )
    num_virtual_stages_per_pipeline_rank: Count | None = option(
        None, "model chunks per pipeline rank, for the schedules interleaved and zb-interleaved; zb-v always has 2"
    )
    pipeline_schedule: str | None = option(
        None,
        "1f1b, interleaved, gpipe, zb-h1, zb-interleaved (as interleaved, but weight gradients fill the bubble), zb-v "
        "(two chunks per rank, placed in a V; has the smallest bubble and uses as much memory as 1f1b), or the name of "
        "a schedule that the script registers; default: 1f1b, or interleaved with several chunks per rank",
    )
    microbatch_group_size_per_vp_stage: Count | None = option(
        None,
        "microbatches that pass a model chunk before its rank turns to the next chunk, in the schedules interleaved and "
        "zb-interleaved; the microbatches of a step must be a multiple of it, or leave a last group of at least the "
        "pipeline size. Default: the pipeline size",
        flags=("--microbatch-group-size-per-virtual-pipeline-stage",),
    )
    pipeline_model_parallel_layout: str | None = option(
        None,
        "parts of each pipeline stage, in the order of the model: E embedding, t layer, L output layer and loss, with | "
        "between two stages; x*n and (...)*n repeat: 'Et*3|(tt|)*6L'. With several times as many stages as pipeline "
        "ranks, each rank has that many chunks",
        metavar="TEXT",
        read=read_layout,
    )
    decoder_first_pipeline_num_layers: int | None = option(
        None, "layers on the first pipeline rank; default: an equal share"
    )
    decoder_last_pipeline_num_layers: int | None = option(
        None, "layers on the last pipeline rank; default: an equal share"
    )
    pipeline_model_parallel_split_rank: Count | None = option(
        None,
        "pretrain_t5.py: first pipeline rank of the decoder; the ranks before it have the encoder. Default: the "
        "layers of both are shared evenly by all ranks",
    )
    account_for_embedding_in_pipeline_split: bool = option(False, "count the embedding as a layer of the first stage")
    account_for_loss_in_pipeline_split: bool = option(False, "count output layer and loss as a layer of the last stage")
    scatter_gather_tensors_in_pipeline: bool = option(
        True, "between stages, send the full activations from each tensor-parallel rank instead of one shard per rank"
    )
    use_tp_pp_dp_mapping: bool = option(
        False,
        "order ranks as tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp, so that all pipeline stages of a data-parallel "
        "replica have consecutive ranks",
    )

    def problems(self) -> Iterator[str]:
        parts = self.hierarchical_context_parallel_sizes
        if parts is not None and (len(parts) != 2 or min(parts) < 1 or prod(parts) != self.context_parallel_size):
            yield (
                f"--hierarchical-context-parallel-sizes {' '.join(map(str, parts))} must be two numbers whose product is "
                f"--context-parallel-size ({self.context_parallel_size}); change one"
            )
        split = self.pipeline_model_parallel_split_rank
        uneven = [flag_of(name) for name in _UNEVEN_STAGES if getattr(self, name)]
        if split is not None and uneven:
            yield (
                f"--pipeline-model-parallel-split-rank {split} divides encoder and decoder each evenly among its "
                f"ranks, which contradicts {' and '.join(uneven)}; leave out one or the other"
            )
        if self.pipeline_model_parallel_layout is not None:
            chunks = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
            names = (*chunks, "pipeline_model_parallel_split_rank", *_UNEVEN_STAGES)
            others = [flag_of(name) for name in names if getattr(self, name)]
            if others:
                yield (
                    f"--pipeline-model-parallel-layout gives the layers of every stage, which contradicts "
                    f"{' and '.join(others)}; leave out one or the other"
                )
        if None not in (self.num_layers_per_virtual_pipeline_stage, self.num_virtual_stages_per_pipeline_rank):
            yield (
                "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank exclude each "
                "other; give only one of them"
            )

    @property
    def ranks_per_sample(self) -> int:
        """Ranks that share each sample."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def sizes(self, world_size: int, replicas: int = 1, order: str | None = None) -> AxisSizes:
        """Return the axis sizes of a job; data parallelism takes the remaining factor.

        replicas: --num-distributed-optimizer-instances. order: as in `AxisSizes`; default: `self.order`. ConfigError if
        the world size is no multiple of the ranks that the other sizes take.
        """
        tensor = self.tensor_model_parallel_size
        pipeline = self.pipeline_model_parallel_size
        divisor = self.ranks_per_sample * replicas
        if world_size % divisor:
            more = ""
            if self.context_parallel_size > 1:
                more += f" x context-parallel-size ({self.context_parallel_size})"
            if replicas > 1:
                more += f" x num-distributed-optimizer-instances ({replicas})"
            raise ConfigError(
                f"world size {world_size} is not a multiple of {divisor} = tensor-model-parallel-size ({tensor}) x "
                f"pipeline-model-parallel-size ({pipeline}){more}; "
                "change the number of processes (torchrun --nproc-per-node) or the sizes"
            )
        return AxisSizes(
            tp=tensor,
            pp=pipeline,
            dp=world_size // self.ranks_per_sample,
            cp=self.context_parallel_size,
            cp_heads=(self.hierarchical_context_parallel_sizes or [1])[0],
            ep=self.expert_model_parallel_size,
            etp=self.expert_tensor_parallel_size,
            replicas=replicas,
            order=order or self.order,
        )

    @property
    def sequence_parallel_on(self) -> bool:
        """Whether sequence parallelism has an effect: it shards over tensor-parallel ranks."""
        return self.sequence_parallel and self.tensor_model_parallel_size > 1

    def comm_type_of_layer(self, layer: int) -> str:
        """Return how the attention of a layer, from 0 over the whole model, sees keys of ranks that share its samples."""
        return self.cp_comm_type[layer % len(self.cp_comm_type)]

    @property
    def without_effect(self) -> dict[str, str]:
        """The flags that are given and change nothing, with the reason."""
        found = {}
        if self.sequence_parallel and not self.sequence_parallel_on:
            found["--sequence-parallel"] = "it needs --tensor-model-parallel-size above 1"
        if self.context_parallel_size == 1:
            given = {
                "--cp-comm-type": self.cp_comm_type != ["p2p"],
                "--hierarchical-context-parallel-sizes": self.hierarchical_context_parallel_sizes is not None,
            }
            found |= {flag: "it needs --context-parallel-size above 1" for flag, is_given in given.items() if is_given}
        return found

    @property
    def order(self) -> str:
        return "tp-cp-ep-pp-dp" if self.use_tp_pp_dp_mapping else ORDER

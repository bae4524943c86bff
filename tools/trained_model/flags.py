"""The flags of tools that run a trained model: which model, in which layout, on which device. Loads without torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm, prod

from megatron.core.base.dataclass_flags import ConfigError, Count, FlagConfig, WholeNumber, option
from megatron.core.parallel.device_and_process_group_config import DeviceName

LAYOUT_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


class RefusedFlags(ConfigError):
    """Flags that the model of --load does not allow. Every rank raises it, since every rank knows both."""


@dataclass(frozen=True)
class TrainedModelConfig(FlagConfig):
    """Model and layout."""

    load: str | None = option(
        None, "checkpoint folder, of adapters too, or a Hugging Face folder", metavar="DIR", required=True
    )
    pretrained_checkpoint: str | None = option(
        None,
        "the base, if --load holds adapters alone: a Hugging Face or checkpoint folder; default: that of the training",
        metavar="DIR",
    )
    model: str | None = option(
        None,
        "script that trained the model, whose model_provider builds it; needed if the model is its own, or if it adds a "
        "tokenizer, an attention kernel or a cache; it runs up to its call of pretrain()",
        metavar="FILE",
    )
    iteration: WholeNumber | None = option(
        None, "iteration to load; default: the latest", flags=("--iteration", "--ckpt-step")
    )
    tensor_model_parallel_size: Count = option(1, "tensor-parallel ranks")
    pipeline_model_parallel_size: Count = option(1, "pipeline-parallel ranks")
    context_parallel_size: Count = option(1, "context-parallel ranks, which shard each text")
    cp_comm_type: list[str] = option(
        ["p2p"], "communication of context-parallel attention, as in training", metavar="TYPE"
    )
    expert_model_parallel_size: Count = option(
        1, "expert-parallel ranks; if they are more than the others of a stage, several replicas compute the same texts"
    )
    expert_tensor_parallel_size: Count | None = option(
        None, "ranks that shard each expert; default: --tensor-model-parallel-size"
    )
    hierarchical_context_parallel_sizes: list[int] | None = option(
        None, "two numbers for --cp-comm-type a2a+p2p, as in training"
    )
    device: DeviceName = option("auto", "device to run on; auto: an accelerator if there is one")
    distributed_timeout_minutes: Count = option(10, "minutes after which an unfinished collective is an error")
    local_rank: int | None = option(
        None, "rank of the process on its node; set by launchers", flags=("--local-rank", "--local_rank")
    )

    def problems(self) -> Iterator[str]:
        if not self.load:
            yield "--load is needed: a folder that pretraining wrote with --save, or a Hugging Face folder"

    @property
    def replica_size(self) -> int:
        """The ranks of one replica of the layers without experts."""
        return prod(getattr(self, name) for name in LAYOUT_SIZES)

    @property
    def expert_replicas(self) -> int:
        """How many replicas of the other layers the ranks of the experts are. They compute the same texts."""
        ranks = self.tensor_model_parallel_size * self.context_parallel_size  # of a stage
        etp = self.expert_tensor_parallel_size or self.tensor_model_parallel_size
        return lcm(self.expert_model_parallel_size * etp, ranks) // ranks

    @property
    def fewer_processes(self) -> str:
        """The flag with which experts need fewer processes, and how many: the end of an error about their number; or ""."""
        without_etp = replace(self, expert_tensor_parallel_size=1)
        needed = without_etp.replica_size * without_etp.expert_replicas
        if needed == self.replica_size * self.expert_replicas:
            return ""
        return f", or give --expert-tensor-parallel-size 1, which takes {needed}"

"""How a run is spread over ranks and time: of ranks that are threads, and of processes."""

from dataclasses import dataclass, field, replace

from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.offload.optimizer_and_param_offload_config import OffloadConfig
from megatron.core.parallel.stage_to_rank import StageMap
from megatron.core.pipeline_parallel.schedule.registry import stage_map
from megatron.core.transformer.model_config import ModelConfig


@dataclass(frozen=True)
class Layout:
    """How a run is spread over ranks and time; one process by default."""

    tp: int = 1
    sp: bool = False
    pp: int = 1
    dp: int = 1
    cp: int = 1
    cp_types: tuple[str, ...] = ("p2p",)
    cp_heads: int = 1  # of a2a+p2p: neighbours that exchange heads
    ep: int = 1  # of experts; etp: None: tp
    etp: int | None = None
    m: int = 1  # microbatches of one rank and step
    v: int = 1  # model chunks of each pipeline rank
    first: int | None = None  # layers of the first stage, where stages differ
    split: int | None = None  # of an encoder and a decoder: the pipeline rank where the decoder begins
    schedule: str = "1f1b"
    recompute: str = (
        "none"  # "selective", "all parts", "uniform 2", "block 1": full recomputation by method and number of layers
    )
    scatter: bool = True
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    delayed: bool = False
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    poison: bool = True  # NaN where memory would be released

    def __str__(self) -> str:
        parts = [f"tp{self.tp}{'sp' if self.sp else ''}-pp{self.pp}-dp{self.dp}-m{self.m}"]
        parts += (
            ["cp" + str(self.cp) + "-" + "-".join(self.cp_types)] * (self.cp > 1)
            + [f"ep{self.ep}"] * (self.ep > 1)
            + [f"etp{self.etp}"] * (self.etp is not None)
            + [f"v{self.v}"] * (self.v > 1)
            + [self.schedule] * (self.schedule != "1f1b")
        )
        parts += [self.recompute.replace(" ", "")] * (self.recompute != "none") + ["delayed"] * self.delayed
        parts += [f"split{self.split}"] * (self.split is not None)
        parts += ["whole"] * (not self.scatter) + ["overlap"] * self.data_parallel.overlap_grad_reduce
        return "-".join([*parts, *["fixed"] * self.data_parallel.fixed_order_grad_reduce])

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def stages(self) -> StageMap:
        """The pipeline rank of each stage."""
        return stage_map(self.schedule, self.pp, self.v)

    @property
    def flags(self) -> list[str]:
        """Of a command line: tp, sp, pp and v."""
        chunks = f" --num-virtual-stages-per-pipeline-rank {self.v}" * (self.v > 1) + " --sequence-parallel" * self.sp
        return f"--tensor-model-parallel-size {self.tp} --pipeline-model-parallel-size {self.pp}{chunks}".split()

    @property
    def sizes(self) -> dict[str, int | None]:
        """Of the axes, as `run_ranks` takes them."""
        replicas = self.data_parallel.num_distributed_optimizer_instances
        return {
            "tp": self.tp,
            "pp": self.pp,
            "dp": self.dp,
            "cp": self.cp,
            "cp_heads": self.cp_heads,
            "ep": self.ep,
            "etp": self.etp,
            "replicas": replicas,
        }

    def applied_to(self, config: ModelConfig) -> ModelConfig:
        """The model with this layout's recomputation."""
        if self.recompute in ("none", "selective"):
            return replace(config, recompute_granularity=None if self.recompute == "none" else "selective")
        if self.recompute == "all parts":
            return replace(
                config, recompute_granularity="selective", recompute_modules=["core_attn", "mlp", "layernorm"]
            )
        method, number = self.recompute.split()
        return replace(config, recompute_granularity="full", recompute_method=method, recompute_num_layers=int(number))

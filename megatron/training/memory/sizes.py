"""The integers that a rank's memory follows from. Pure.

Shapes are those of one rank: with t tensor-parallel ranks a layer holds heads / t, and between the layers, under sequence
parallelism, s / t positions.
"""

from dataclasses import dataclass, replace
from typing import Any

from megatron.core.pipeline_parallel.schedule import stage_map

MODELS = ("gpt", "bert")


@dataclass(frozen=True)
class LayerSizes:
    """What one rank computes of a layer, and of the ends of the model. Elements, but where bytes are said."""

    s: int  # positions of a sample
    b: int  # samples of a microbatch
    h: int  # width of the residual stream
    model: str = "gpt"  # of MODELS; a BERT's tokens see all but padding
    binary_head: bool = False  # of a BERT, with its two kinds of token
    t: int = 1  # tensor-parallel ranks
    sequence_parallel: bool = False
    heads: int = 1  # query heads of this rank
    kv_heads: int = 1  # key and value heads of this rank
    all_kv_heads: int = 1  # of all ranks
    d: int = 1  # width of a head
    f: int = 4  # width inside the MLP of this rank
    words: int = 0  # rows of the word table of this rank, padding included
    all_real_words: int | None = None  # of all ranks; None: nothing is padded
    tensor_rank: int = 0  # whose real words are counted: the first has as many as any
    positions: int = 0  # rows of the learned position table; 0: there is none
    rotary_width: int = 0
    gated: bool = False
    rms: bool = False  # RMSNorm instead of LayerNorm
    qk_norm: bool = False
    linear_bias: bool = True
    qkv_bias: bool = True
    tied: bool = True
    hidden_dropout: bool = False
    attention_dropout: bool = False
    fused_attention: bool = True
    unfused_by_dropout: bool = False  # for nothing but the dropout of attention weights
    by_document: bool = False  # documents of a sample do not see each other
    recompute: str | None = None  # "selective", "uniform" or "block"
    recompute_layers: int = 1
    recompute_modules: tuple[str, ...] = ("core_attn",)  # of "selective"
    saves_parts: bool = False  # of the inputs of recomputed layers each tensor-parallel rank keeps a part
    offloaded_layers: int = 0  # the first of each stage, what of them waits for a backward being in a tier
    smallest_offloaded: int = 2**20  # elements
    contiguous: bool = False  # the inputs of other recomputed layers lie in slots
    z_loss: bool = False
    param_bytes: int = 4  # of an activation too
    residual_bytes: int = 4
    grad_bytes: int = 4  # of sums of gradients, masters and moments
    main_grad_bytes: int = 4  # of the gradients that a rank adds up itself
    widened: tuple[str, ...] = ()  # of the kinds of `core/products.py`
    accelerator: bool = True  # whose kernels run: an accelerator's, or the CPU's
    cached_elements: int = 2**18  # of a loss' widened rows at once

    @property
    def stream(self) -> int:
        """Elements of the residual stream of a microbatch: [s, b, h], or [s/t, b, h] under sequence parallelism."""
        return self.tokens * self.h

    @property
    def tokens(self) -> int:
        """Tokens between the layers."""
        return self.s * self.b // (self.t if self.sequence_parallel else 1)

    @property
    def real_words(self) -> int:
        """Rows without padding."""
        if self.all_real_words is None:
            return self.words
        return min(self.words, max(self.all_real_words - self.tensor_rank * self.words, 0))

    @property
    def is_bert(self) -> bool:
        return self.model == "bert"

    @property
    def token_types(self) -> int:
        """Rows of the table of kinds of token; 0: there is none."""
        return 2 if self.binary_head else 0

    @property
    def is_half(self) -> bool:
        return self.param_bytes < self.grad_bytes

    def recomputes(self, module: str) -> bool:
        """Whether this part of a layer is computed again in its backward."""
        return self.recompute == "selective" and module in self.recompute_modules

    @property
    def hands_on_gradient(self) -> bool:
        """Whether the gradient of the stream is, as it is, that of a block's last product: nothing behind it changes it."""
        return not (self.hidden_dropout or self.sequence_parallel) and self.param_bytes == self.residual_bytes

    @property
    def undivided(self) -> "LayerSizes":
        """The same model on one tensor-parallel rank."""
        t = self.t
        return replace(
            self,
            t=1,
            sequence_parallel=False,
            heads=self.heads * t,
            kv_heads=self.all_kv_heads,
            f=self.f * t,
            words=self.words * t,
        )

    @property
    def ranks_per_kv_head(self) -> int:
        """Ranks that hold the same key and value head."""
        return self.t * self.kv_heads // self.all_kv_heads

    @classmethod
    def of(
        cls,
        config: Any,
        vocab_size: int,
        *,
        accelerator: bool,
        threads: int = 1,
        model: str = "gpt",
        widened: tuple[str, ...] = (),
    ) -> "LayerSizes":
        """The sizes of a `Config`, of whose words `vocab_size` are real. threads: those of a rank on a CPU."""
        kind, model, parallel = model, config.transformer, config.parallel
        t = parallel.tensor_model_parallel_size
        learned = model.position_embedding_type == "learned_absolute"
        full = model.recompute_granularity == "full"
        return cls(
            s=config.data.seq_length,
            b=config.training.micro_batch_size,
            h=model.hidden_size,
            model=kind,
            binary_head=kind == "bert" and config.masked_data.bert_binary_head,
            t=t,
            sequence_parallel=parallel.sequence_parallel_on,
            heads=model.num_attention_heads // t,
            kv_heads=max(1, model.query_groups // t),
            all_kv_heads=model.query_groups,
            d=model.head_width,
            f=model.ffn_size // t,
            words=model.padded_vocab_size(vocab_size, t) // t,
            all_real_words=vocab_size,
            positions=config.positions if learned else 0,
            rotary_width=model.rotary_width if model.position_embedding_type == "rope" else 0,
            gated=model.swiglu,
            rms=model.normalization == "RMSNorm",
            qk_norm=model.qk_layernorm,
            linear_bias=model.add_bias_linear,
            qkv_bias=model.add_bias_linear or model.add_qkv_bias,
            tied=not model.untie_embeddings_and_output_weights,
            hidden_dropout=model.hidden_dropout > 0,
            attention_dropout=model.attention_dropout > 0,
            fused_attention=model.attention_dropout == 0 and model.attention_backend not in ("unfused", "local"),
            unfused_by_dropout=model.attention_dropout > 0 and model.attention_backend not in ("unfused", "local"),
            by_document=config.data.reset_attention_mask,
            recompute=model.recompute_method if full else model.recompute_granularity,
            recompute_layers=model.recompute_num_layers or 1,
            recompute_modules=tuple(model.recompute_modules),
            saves_parts=model.distribute_saved_activations and t > 1,
            offloaded_layers=model.cpu_offloading_num_layers,
            smallest_offloaded=model.min_offloaded_tensor_size,
            contiguous=model.contiguous_checkpointing,
            z_loss=model.z_loss_coeff > 0 and kind == "gpt",
            param_bytes=model.params_dtype.itemsize,
            residual_bytes=model.residual_dtype.itemsize,
            grad_bytes=max(4, model.params_dtype.itemsize),
            main_grad_bytes=2
            if config.data_parallel.main_grads_dtype == "bf16"
            else max(4, model.params_dtype.itemsize),
            widened=widened,
            accelerator=accelerator,
            cached_elements=2**25 if accelerator else 2**18 * threads,
        )


@dataclass(frozen=True)
class RunSizes:
    """How a run is spread over ranks and time."""

    layer: LayerSizes
    layers: tuple[range, ...]  # the numbers of the layers of each stage
    p: int = 1  # pipeline ranks
    m: int = 1  # microbatches of a step, the largest there will be
    schedule: str = "1f1b"
    scatter: bool = True  # equal copies of what passes between stages are sent in parts
    replicas: int = 1  # data-parallel ranks that hold each other's copy of a shard
    shards: int = 1  # data-parallel ranks over which a copy may be divided
    zero_stage: int = 0
    bucket_numel: int | None = None
    overlap_reduce: bool = False
    overlap_gather: bool = False
    reduce_in_bf16: bool = False
    sums_wide: bool = False  # what travels in bfloat16 is summed in float32
    divides_outer: bool = False  # masters and moments are divided over the replicas too
    poison: bool = False  # what passes stays
    fixed_order: bool = False
    moments: int = 2
    splits_masters: bool = False  # of a master only what the parameter lacks is kept
    tier: str = "device"  # where masters and moments live, or this share of them
    offload_fraction: float = 1.0
    offload_params: bool = False  # the shards of stage 3 too
    part: int = (
        0  # of each bucket, that the rank updates: shares of offloaded state are rounded up to other parameters in each
    )

    @property
    def chunks(self) -> int:
        """Stages of a pipeline rank."""
        return len(self.layers) // self.p

    @property
    def world_size(self) -> int:
        return self.p * self.layer.t * self.replicas * self.shards

    @property
    def rounds(self) -> bool:
        """Whether a rounded copy of the gradients is made, to travel."""
        return self.reduce_in_bf16 and self.replicas * self.shards > 1 and self.layer.main_grad_bytes > 2

    @property
    def sent_bytes(self) -> int:
        """Of a gradient that travels."""
        return 2 if self.rounds else self.layer.main_grad_bytes

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on a pipeline rank."""
        return stage_map(self.schedule, self.p, self.chunks).of_rank(rank)

    @classmethod
    def of(cls, config: Any, vocab_size: int, world_size: int, **of_layer: Any) -> "RunSizes":
        """The sizes of a checked `Config` on so many ranks. of_layer: as `LayerSizes.of` takes it."""
        parallel, data_parallel = config.parallel, config.data_parallel
        ranks, replicas = config.data_parallel_size(world_size), data_parallel.num_distributed_optimizer_instances
        return cls(
            layer=LayerSizes.of(config, vocab_size, **of_layer),
            layers=tuple(config.layer_split),
            p=parallel.pipeline_model_parallel_size,
            m=max(config.batch_sizes(world_size).sizes) // config.samples_at_once(world_size),
            schedule=config.schedule_name,
            scatter=parallel.scatter_gather_tensors_in_pipeline and not parallel.sequence_parallel_on,
            replicas=replicas,
            shards=ranks // replicas,
            zero_stage=data_parallel.stage,
            bucket_numel=data_parallel.bucket_numel(ranks),
            overlap_reduce=data_parallel.overlap_grad_reduce,
            overlap_gather=data_parallel.overlap_param_gather,
            reduce_in_bf16=data_parallel.grad_reduce_in_bf16,
            sums_wide=data_parallel.reduce_scatter_with_fp32_accumulation,
            divides_outer=data_parallel.divides_over_outer,
            poison=data_parallel.poison_released_buffers,
            fixed_order=data_parallel.fixed_order_grad_reduce,
            moments=len(config.optimizer.moments),
            splits_masters=config.optimizer.reuse_fp32_param,
            tier=config.offload.tier,
            offload_fraction=config.offload.optimizer_offload_fraction,
            offload_params=config.offload.offload_params,
        )

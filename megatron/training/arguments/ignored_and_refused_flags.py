"""The flags of Megatron that are no settings here are listed by their effect, beside other spellings of settings.

One question decides: would the flag change the numbers, the model, the files, or the checks that guard the run?

    no              accepted, and listed once at the start                                          NO_EFFECT
                    accepted in silence, since it is given beside a flag that already says it       SILENT
    yes, and        it is common in scripts: accepted with a WARNING that says what happens         WARNED
                    it is not: refused, with an alternative                                         REFUSED

Each table has a row for a reason, with the flags that it applies to.

No flag of Megatron's scripts may be unknown: tests/unit/training/classic_flags.txt lists them with their effects.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OtherFlag:
    """A flag of one of the tables."""

    flag: str
    values: str  # their number, as in argparse: 0 (a switch), 1 or *
    metavar: str
    harmless: tuple[str, ...]  # values that ask for what happens anyway
    reason: str

    def is_harmless(self, given: Any) -> bool:
        """Whether the given value asks for what happens anyway: `0`, or `0.0`, if 0 is harmless."""
        texts = given if isinstance(given, list) else [str(given)]
        return bool(self.harmless) and all(_plain(text) in self.harmless for text in texts)


def _plain(text: str) -> str:
    """Return 4 for 4.0, and any other text unchanged."""
    is_decimal = "." in text and text.replace(".", "", 1).isdigit()
    if is_decimal:
        return text.rstrip("0").rstrip(".")
    return text


@dataclass(frozen=True)
class OtherFlags:
    """The flags that have one reason in common."""

    reason: str
    switches: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)  # flags of one value -> its metavar
    lists: Mapping[str, str] = field(default_factory=dict)  # flags of any number of values -> their metavar
    harmless: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # flag -> values that ask for what happens anyway


def by_flag(*rows: OtherFlags) -> dict[str, OtherFlag]:
    """Return the flags of a table by name."""
    flags: dict[str, OtherFlag] = {}
    for row in rows:
        kinds = {"0": dict.fromkeys(row.switches, ""), "1": row.values, "*": row.lists}
        for count, metavars in kinds.items():
            for flag, metavar in metavars.items():
                assert flag not in flags, f"{flag} is there twice"
                flags[flag] = OtherFlag(flag, count, metavar, row.harmless.get(flag, ()), row.reason)
    return flags


NO_EFFECT = by_flag(
    # ---- the model and its numbers
    OtherFlags(
        "samples are read ahead by threads of the run itself, which hear no signal",
        switches=("--exit-signal-handler-for-dataloader",),
    ),
    OtherFlags(
        "nothing listens on a port: --log-straggler measures from the start", values={"--straggler-ctrlr-port": "N"}
    ),
    OtherFlags(
        "there is one implementation", switches=("--use-mcore-models", "--use-legacy-models", "--enable-experimental")
    ),
    OtherFlags(
        "--compile regions fuses this work, for all kinds at once",
        switches=(
            "--no-bias-dropout-fusion",
            "--no-bias-gelu-fusion",
            "--no-bias-swiglu-fusion",
            "--no-rope-fusion",
            "--disable-jit-fuser",
            "--fused-residual-rmsnorm",
            "--use-transformer-engine-op-fuser",
        ),
    ),
    OtherFlags(
        "kernels are chosen by what the device can do",
        switches=(
            "--no-masked-softmax-fusion",
            "--no-persist-layer-norm",
            "--use-te-activation-func",
            "--use-fused-weighted-squared-relu",
            "--no-scaled-masked-softmax-fusion",
            "--scaled-masked-softmax-fusion",
            "--scaled-upper-triang-masked-softmax-fusion",
            "--use-grouped-gemm-for-dense-mlp",
        ),
        values={"--flash-attention-version": "N"},
    ),
    OtherFlags("the fused attention kernel is used wherever it can do the work", switches=("--use-flash-attn",)),
    OtherFlags(
        "weight gradients are written straight into their buffer", switches=("--no-gradient-accumulation-fusion",)
    ),
    OtherFlags(
        "there is one cross entropy, and it never gathers the vocabulary",
        switches=("--cross-entropy-loss-fusion",),
        values={"--cross-entropy-fusion-impl": "NAME"},
    ),
    OtherFlags(
        "queries are scaled before the product and the softmax is taken in float32, so float16 scores do not overflow",
        switches=("--apply-query-key-layer-scaling", "--no-query-key-layer-scaling"),
    ),
    OtherFlags("the softmax is always taken in float32", switches=("--attention-softmax-in-fp32",)),
    OtherFlags(
        "float32 is the rule; --main-grads-dtype bf16 and --grad-reduce-in-bf16 are the exceptions",
        switches=("--accumulate-allreduce-grads-in-fp32", "--fp32-allreduce"),
    ),
    OtherFlags(
        "a loss that counts its tokens is always the mean over all tokens of the step",
        switches=("--calculate-per-token-loss",),
    ),
    OtherFlags("initial weights are always the same in every layout", switches=("--use-cpu-initialization",)),
    OtherFlags(
        "initial weights are always drawn; a checkpoint then takes their place",
        switches=("--no-initialization", "--init-model-with-meta-device"),
    ),
    # ---- parallelism and communication
    OtherFlags(
        "there is one data-parallel wrapper, with contiguous gradient buffers",
        switches=("--use-contiguous-buffers-in-ddp", "--no-contiguous-buffers-in-local-ddp"),
        values={"--DDP-impl": "NAME"},
    ),
    OtherFlags(
        "buckets are cut by size: --ddp-bucket-size",
        switches=("--ddp-pad-buckets-for-high-nccl-busbw",),
        values={"--ddp-num-buckets": "N"},
    ),
    OtherFlags(
        "gradients are summed, and divided once, by the tokens of the step",
        switches=("--ddp-average-in-collective", "--no-gradient-reduce-div-fusion"),
    ),
    OtherFlags(
        "every stage starts its reduction when it is ready",
        switches=(
            "--no-align-grad-reduce",
            "--disable-align-grad-reduce",
            "--no-align-param-gather",
            "--delay-grad-reduce",
            "--no-delay-grad-reduce",
            "--delay-param-gather",
        ),
    ),
    OtherFlags(
        "the all-reduce overlaps the weight gradient, which changes no number",
        switches=("--no-async-tensor-model-parallel-allreduce", "--disable-async-tensor-model-parallel-allreduce"),
    ),
    OtherFlags(
        "transfers between stages are always begun early and waited for late",
        switches=(
            "--overlap-p2p-communication",
            "--no-overlap-p2p-communication",
            "--overlap-p2p-communication-warmup-flush",
            "--use-ring-exchange-p2p",
        ),
    ),
    OtherFlags(
        "--pipeline-schedule zb-h1, zb-interleaved and zb-v are the schedules that defer weight gradients",
        switches=("--defer-embedding-wgrad-compute",),
        values={"--wgrad-deferral-limit": "N"},
    ),
    OtherFlags(
        "--overlap-param-gather gathers after the update, behind the next forward, which changes no number",
        switches=("--overlap-param-gather-with-optimizer-step",),
    ),
    OtherFlags(
        "tensor-parallel communication and products are overlapped where the code can, which changes no number",
        switches=(
            "--tp-comm-overlap",
            "--disable-tp-comm-overlap-ag",
            "--disable-tp-comm-overlap-rs",
            "--tp-comm-overlap-rs-dgrad",
            "--disable-tp-comm-bulk-dgrad",
            "--disable-tp-comm-bulk-wgrad",
            "--disable-tp-comm-split-ag",
            "--disable-tp-comm-split-rs",
            "--tp-comm-bulk-dgrad",
            "--tp-comm-bulk-wgrad",
            "--tp-comm-split-ag",
            "--tp-comm-split-rs",
            "--no-tp-comm-bulk-dgrad",
            "--no-tp-comm-bulk-wgrad",
            "--no-tp-comm-overlap-ag",
            "--no-tp-comm-overlap-rs",
            "--no-tp-comm-split-ag",
            "--no-tp-comm-split-rs",
        ),
        values={"--tp-comm-overlap-cfg": "FILE", "--tp-comm-bootstrap-backend": "NAME"},
    ),
    OtherFlags(
        "every group has the back end and the timeout of --distributed-backend and --distributed-timeout-minutes",
        switches=(
            "--use-nccl-ub",
            "--nccl-ub",
            "--disable-symmetric-registration",
            "--use-sharp",
            "--disable-gloo-process-groups",
            "--enable-gloo-process-groups",
            "--create-all-gather-group",
            "--high-priority-a2a-comm-stream",
        ),
        values={
            "--pipeline-model-parallel-comm-backend": "NAME",
            "--nccl-communicator-config-path": "FILE",
            "--sharp-enabled-group": "NAME",
        },
        lists={"--high-priority-stream-groups": "NAME"},
    ),
    OtherFlags(
        "memory stays as it is",
        switches=("--no-clone-scatter-output-in-embedding", "--disable-clone-scatter-output-in-embedding"),
    ),
    OtherFlags(
        "Python collects its garbage as it always does",
        switches=("--manual-gc", "--no-manual-gc-eval", "--disable-manual-gc-eval"),
        values={"--manual-gc-interval": "N"},
    ),
    OtherFlags("every rank keeps in step with its device as it is", values={"--train-sync-interval": "N"}),
    OtherFlags("the log has one level", values={"--logging-level": "N"}),
    OtherFlags("nothing is sent to NVIDIA's one_logger", switches=("--no-one-logger",)),
    OtherFlags(
        "files are read and written as they are, without NVIDIA's multi-storage client", switches=("--disable-msc",)
    ),
    # ---- data
    OtherFlags(
        "no mask is ever made for causal attention",
        switches=("--no-create-attention-mask-in-dataloader", "--create-attention-mask-in-dataloader"),
    ),
    OtherFlags("one process builds all indices", values={"--num-dataset-builder-threads": "N"}),
    OtherFlags(
        "an index is read as it is needed, and --data-cache-path keeps the order of samples, which changes no number",
        switches=("--dataloader-defer-npy-index-mmap", "--dataloader-fast-cache-load"),
        values={"--per-dataset-sequences-path": "FILE"},
    ),
    OtherFlags(
        "an epoch of --dataloader-type cyclic is shuffled as a whole, in every layout", switches=("--no-data-sharding",)
    ),
    OtherFlags(
        "only retrieval and models of pictures read it, and they are not built yet",
        values={"--sample-rate": "X", "--retriever-seq-length": "N"},
    ),
    OtherFlags(
        "a tokenizer is its files, and no code that comes with them is run",
        switches=("--legacy-tokenizer", "--trust-remote-code"),
    ),
    OtherFlags(
        "data files hold token ids: pretraining turns no text into tokens",
        switches=(
            "--tokenizer-hf-include-special-tokens",
            "--tokenizer-hf-no-include-special-tokens",
            "--tokenizer-hf-use-fast",
            "--tokenizer-hf-no-use-fast",
            "--tokenizer-sentencepiece-legacy",
        ),
    ),
    # ---- checkpoints
    OtherFlags(
        "random numbers follow from --seed and the position in the run; there is no state to save or to load",
        switches=("--no-load-rng", "--no-save-rng", "--te-rng-tracker", "--inference-rng-tracker"),
    ),
    OtherFlags(
        "there is one format, which any layout loads and every rank writes its share of",
        switches=(
            "--auto-detect-ckpt-format",
            "--ckpt-fully-parallel-save",
            "--no-ckpt-fully-parallel-save",
            "--ckpt-fully-parallel-load",
            "--no-ckpt-fully-parallel-load",
            "--ckpt-assume-constant-structure",
            "--dist-ckpt-optim-fully-reshardable",
            "--distrib-optim-fully-reshardable-mem-efficient",
            "--ckpt-convert-update-legacy-dist-opt-format",
            "--disable-ckpt-fully-parallel-save",
            "--ckpt-fully-parallel-load-per-rank-objects",
            "--ckpt-pg-tensors-cache-create",
            "--ckpt-drop-redundant-extra-state",
        ),
        values={
            "--ckpt-fully-parallel-save-process-group": "NAME",
            "--ckpt-fully-parallel-load-process-group": "NAME",
            "--ckpt-fully-parallel-load-exchange-algo": "NAME",
            "--ckpt-pg-tensors-cache-path": "DIR",
            "--dist-ckpt-workers": "N",
        },
    ),
    OtherFlags(
        "every load checks that each part of each tensor is there once",
        switches=("--no-ckpt-load-validate-sharding-integrity", "--disable-ckpt-load-validate-sharding-integrity"),
    ),
    OtherFlags(
        "masters that are not loaded are made from the weights as they were saved, with all their digits",
        switches=("--load-main-params-from-ckpt",),
    ),
    OtherFlags(
        "the process that --async-save starts lives as long as the run", switches=("--use-persistent-ckpt-worker",)
    ),
    OtherFlags(
        "--async-save writes in one way, in a process of its own",
        switches=("--async-ckpt-use-cpu-shm",),
        values={"--async-strategy": "NAME", "--async-ckpt-cpu-priority": "N", "--async-ckpt-io-priority": "N"},
    ),
    OtherFlags(
        "every part of a checkpoint has its SHA-256 in the manifest, and is checked when it is read",
        switches=("--verify-integrity",),
    ),
    OtherFlags(
        "only --replication reads it, and it is not built yet",
        values={"--replication-jump": "N", "--replication-factor": "N"},
    ),
    OtherFlags(
        "the tokenizer is always the command line's",
        switches=(
            "--no-use-tokenizer-model-from-checkpoint-args",
            "--disable-use-tokenizer-model-from-checkpoint-args",
        ),
    ),
    # ---- companions of flags that are refused
    OtherFlags(
        "only fp8 and fp4 read it, and they are not built yet",
        switches=(
            "--no-fp8-wgrad",
            "--disable-fp8-wgrad",
            "--fp4-param-gather",
            "--fp8-output-proj",
            "--no-stream-ckpt-dequant",
            "--disable-stream-ckpt-dequant",
            "--keep-fp8-transpose-cache-when-using-custom-fsdp",
            "--fp8-param-gather",
            "--fp8-param",
            "--first-last-layers-bf16",
            "--keep-fp8-transpose-cache",
            "--reuse-grad-buf-for-mxfp8-param-ag",
            "--fp4-param",
        ),
        values={
            "--fp8-amax-history-len": "N",
            "--fp8-amax-compute-algo": "NAME",
            "--fp8-margin": "N",
            "--fp8-interval": "N",
            "--fp8-recipe": "NAME",
            "--num-layers-at-start-in-bf16": "N",
            "--num-layers-at-end-in-bf16": "N",
            "--fp4-recipe": "NAME",
            "--fp4-quantizer-factory": "NAME",
            "--fp8-quantizer-factory": "NAME",
        },
    ),
    OtherFlags(
        "an offloaded update is torch's, slice by slice, with the next slice on its way",
        switches=("--use-torch-optimizer-for-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d"),
    ),
    OtherFlags(
        "host memory that an accelerator reads is pinned",
        switches=("--no-pin-cpu-grads", "--no-pin-cpu-params", "--cpu-offloading-retain-pinned-cpu-buffers"),
    ),
    OtherFlags(
        "ZeRO 3 has buffers and an order of its own, which change no number",
        switches=(
            "--fsdp-double-buffer",
            "--fsdp-db-use-persist-buf-on-alloc-fail",
            "--fsdp-manual-registration",
            "--megatron-fsdp-enable-fine-grained-param-gather",
            "--megatron-fsdp-max-pool-double-buffer",
            "--torch-fsdp2-no-reshard-after-forward",
        ),
        values={"--suggested-communication-unit-size": "N"},
    ),
    OtherFlags(
        "--num-distributed-optimizer-instances with --outer-dp-sharding-strategy optim shards over all groups",
        switches=("--enable-full-sharding-in-hsdp",),
    ),
    OtherFlags(
        "only multi-latent attention reads it, and that is not built yet",
        switches=("--cache-mla-latents", "--mla-down-proj-fusion"),
        values={
            "--q-lora-rank": "N",
            "--kv-lora-rank": "N",
            "--qk-head-dim": "N",
            "--qk-pos-emb-head-dim": "N",
            "--v-head-dim": "N",
            "--rotary-scaling-factor": "X",
            "--mscale": "X",
            "--mscale-all-dim": "X",
        },
    ),
    OtherFlags(
        "only state-space models read it, and they are not built yet",
        switches=("--disable-mamba-mem-eff-path",),
        values={
            "--mamba-state-dim": "N",
            "--mamba-head-dim": "N",
            "--mamba-num-groups": "N",
            "--mamba-num-heads": "N",
            "--mamba-inference-conv-states-dtype": "NAME",
            "--mamba-inference-ssm-states-dtype": "NAME",
            "--mamba-training-ssm-states-dtype": "NAME",
        },
    ),
    OtherFlags(
        "only retrieval reads it, and that is not built yet",
        switches=(
            "--retro-no-verify-neighbor-count",
            "--biencoder-shared-query-context-model",
            "--use-one-sent-docs",
            "--retriever-score-scaling",
        ),
        values={
            "--retro-cyclic-train-iters": "N",
            "--retro-encoder-layers": "N",
            "--retro-encoder-hidden-dropout": "X",
            "--retro-encoder-attention-dropout": "X",
            "--retro-num-neighbors": "N",
            "--retro-num-retrieved-chunks": "N",
            "--retro-attention-gate": "X",
            "--biencoder-projection-dim": "N",
            "--titles-data-path": "FILE",
            "--query-in-block-prob": "X",
            "--evidence-data-path": "FILE",
            "--block-data-path": "FILE",
            "--embedding-path": "FILE",
            "--indexer-batch-size": "N",
            "--indexer-log-interval": "N",
        },
        lists={"--retriever-report-topk-accuracies": "N"},
    ),
    OtherFlags(
        "only models of pictures read it, and they are not built yet",
        switches=("--dino-norm-last-layer",),
        values={
            "--num-classes": "N",
            "--img-h": "N",
            "--img-w": "N",
            "--img-dim": "N",
            "--num-channels": "N",
            "--patch-dim": "N",
            "--classes-fraction": "X",
            "--data-per-class-fraction": "X",
            "--head-lr-mult": "X",
            "--vision-backbone-type": "NAME",
            "--swin-backbone-type": "NAME",
            "--mask-type": "NAME",
            "--mask-factor": "X",
            "--iter-per-epoch": "N",
            "--dino-local-img-size": "N",
            "--dino-local-crops-number": "N",
            "--dino-head-hidden-size": "N",
            "--dino-bottleneck-size": "N",
            "--dino-freeze-last-layer": "X",
            "--dino-warmup-teacher-temp": "X",
            "--dino-teacher-temp": "X",
            "--dino-warmup-teacher-temp-epochs": "N",
        },
    ),
    OtherFlags(
        "only reinforcement learning reads it, and that is not built yet",
        switches=(
            "--grpo-filter-groups-with-same-reward",
            "--langrl-external-server",
            "--no-langrl-external-server",
            "--rl-offload-optimizer-during-inference",
            "--rl-offload-kv-cache-during-training",
            "--rl-remove-kv-cache-during-training",
            "--rl-reset-cuda-graphs",
            "--rl-partial-rollouts",
            "--rl-inference-logprobs-is-correction",
            "--rl-calculate-intra-group-similarity",
            "--rl-use-sequence-packing",
            "--no-rl-calculate-intra-group-similarity",
            "--no-rl-inference-logprobs-is-correction",
            "--rl-offload-inference-model-weights-when-idle",
            "--no-rl-offload-inference-model-weights-when-idle",
            "--no-rl-offload-kv-cache-during-training",
            "--no-rl-partial-rollouts",
            "--rl-persist-cuda-graphs",
            "--no-rl-persist-cuda-graphs",
            "--no-rl-remove-kv-cache-during-training",
            "--no-rl-reset-cuda-graphs",
            "--rl-skip-bos-token",
            "--no-rl-skip-bos-token",
            "--rl-training-cuda-graphs",
            "--no-rl-training-cuda-graphs",
            "--no-rl-use-sequence-packing",
            "--rl-verify-model-weights-swap",
            "--no-rl-verify-model-weights-swap",
            "--rl-profile",
            "--rl-durable-rollout-bank",
            "--use-same-sampling-seed-across-dp-ranks",
        ),
        values={
            "--rl-prompts-per-eval": "N",
            "--grpo-prompts-per-step": "N",
            "--grpo-group-size": "N",
            "--grpo-iterations": "N",
            "--grpo-clamp-eps-lower": "X",
            "--grpo-clamp-eps-upper": "X",
            "--grpo-kl-beta": "X",
            "--grpo-entropy-term-weight": "X",
            "--grpo-default-temperature": "X",
            "--grpo-default-top-p": "X",
            "--langrl-inference-server-type": "NAME",
            "--langrl-inference-server-conversation-template": "NAME",
            "--langrl-env-config": "FILE",
            "--rl-importance-sampling-truncation-coef": "X",
            "--rl-sequence-packing-bin-size": "N",
            "--rl-sequence-packing-algo": "NAME",
            "--refit-method": "NAME",
            "--rl-consumption-granularity": "NAME",
            "--rl-default-temperature": "X",
            "--rl-default-top-k": "N",
            "--rl-default-top-p": "X",
            "--rl-generation-batch-size": "N",
            "--rl-generation-lag": "N",
            "--rl-inference-expert-model-parallel-size": "N",
            "--rl-inference-expert-tensor-model-parallel-size": "N",
            "--rl-inference-model-unified-memory-level": "N",
            "--rl-inference-pipeline-model-parallel-size": "N",
            "--rl-inference-tensor-model-parallel-size": "N",
            "--rl-kv-cache-management-mode": "NAME",
            "--rl-num-parallel-generation-batches": "N",
            "--rl-num-parallel-generations": "N",
            "--rl-parallel-generation-tasks": "N",
            "--rl-profile-dir": "DIR",
            "--rl-sequence-packing-max-sequences-per-bin": "N",
            "--rl-submission-granularity": "NAME",
            "--rl-max-inflight-requests": "N",
            "--rl-rollout-bank-dir": "DIR",
            "--rl-rollout-bank-max-bytes": "N",
        },
        lists={"--rl-inference-parsers": "NAME"},
    ),
    OtherFlags(
        "a whole matrix lies in one shard, and the rest is cut into equal shards",
        switches=("--no-use-layer-wise-param-layout",),
    ),
    OtherFlags("Muon's products of a matrix with itself are PyTorch's", switches=("--muon-use-syrk",)),
    OtherFlags("there is one implementation of each tokenizer", switches=("--use-gigatoken",)),
    OtherFlags(
        "a checkpoint has the hash of the tokenizer's files, not the files; folders of --save-hf have them",
        switches=("--no-save-tokenizer-assets", "--disable-save-tokenizer-assets"),
    ),
    OtherFlags("there is one implementation of sharded weights", values={"--megatron-fsdp-version": "N"}),
    OtherFlags(
        "only Lion reads it, and that optimizer is not built yet", values={"--lion-beta1": "X", "--lion-beta2": "X"}
    ),
    OtherFlags(
        "only an option that is refused reads it",
        switches=(
            "--one-logger-async",
            "--inprocess-empty-cuda-cache",
            "--mtp-detach-heads",
            "--mtp-hsm",
            "--mtp-standalone",
            "--mtp-use-repeated-layer",
            "--gdp-cutedsl-kernel",
            "--gtp-remat-nccl-ub",
            "--gtp-expert-remat-nccl-ub",
            "--gtp-remat-reduce-scatter-with-fp32-accumulation",
        ),
        values={
            "--mtp-loss-scaling-factor": "X",
            "--mtp-hybrid-override-pattern": "TEXT",
            "--ft-num-warmup-iters": "N",
            "--kitchen-attention-backend": "NAME",
            "--qk-clip-alpha": "X",
            "--qk-clip-threshold": "X",
            "--cuda-graph-warmup-steps": "N",
            "--sft-tokenizer-prompt-format": "NAME",
            "--adlr-autoresume-interval": "N",
            "--inprocess-max-iterations": "N",
            "--inprocess-monitor-thread-interval": "X",
            "--inprocess-monitor-process-interval": "X",
            "--inprocess-progress-watchdog-interval": "X",
            "--inprocess-heartbeat-interval": "X",
            "--inprocess-soft-timeout": "X",
            "--inprocess-hard-timeout": "X",
            "--inprocess-heartbeat-timeout": "X",
            "--inprocess-barrier-timeout": "X",
            "--inprocess-completion-timeout": "X",
            "--inprocess-last-call-wait": "X",
            "--inprocess-termination-grace-time": "X",
            "--inprocess-granularity": "NAME",
            "--inprocess-active-world-size": "N",
            "--batch-invariant-backend": "NAME",
            "--gdp-num-householder": "N",
            "--gdp-num-chunk-states-to-recompute": "N",
            "--mhc-num-residual-streams": "N",
            "--mhc-sinkhorn-iterations": "N",
            "--mhc-init-gating-factor": "X",
            "--mhc-recompute-layer-num": "N",
            "--otel-service-name": "NAME",
            "--otel-span-groups": "LIST",
        },
        lists={
            "--gtp-remat-opt-in-modules": "NAME",
            "--mrope-section": "N",
            "--cuda-graph-scope": "NAME",
            "--cuda-graph-modules": "NAME",
        },
    ),
    OtherFlags(
        "only inference reads it; tools/generate.py has flags of its own",
        switches=(
            "--flash-decode",
            "--inference-dynamic-batching",
            "--inference-dynamic-batching-track-paused-request-events",
            "--decode-only-cuda-graphs",
            "--use-legacy-static-engine",
            "--nccl-all-reduce-for-prefill",
            "--disable-chunked-prefill",
            "--enable-chunked-prefill",
            "--inference-cuda-graph-all-prefills",
            "--inference-disable-ep-consensus",
            "--no-inference-disable-ep-consensus",
            "--inference-disable-triton-nvls-kernels",
            "--inference-dynamic-batching-prefix-caching",
            "--no-inference-dynamic-batching-prefix-caching",
            "--inference-dynamic-batching-track-generated-token-events",
            "--inference-fuse-tp-communication",
            "--inference-moe-disable-fused-quant-kernels",
            "--inference-text-gen-server-logging",
            "--no-inference-text-gen-server-logging",
            "--inference-use-synchronous-zmq-collectives",
            "--no-inference-use-synchronous-zmq-collectives",
            "--inference-wandb-logging",
            "--no-inference-wandb-logging",
        ),
        values={
            "--inference-batch-times-seqlen-threshold": "N",
            "--max-tokens-to-oom": "N",
            "--inference-max-requests": "N",
            "--inference-max-seq-length": "N",
            "--inference-max-batch-size": "N",
            "--inference-dynamic-batching-buffer-size-gb": "X",
            "--inference-dynamic-batching-block-size": "N",
            "--inference-dynamic-batching-buffer-guaranteed-fraction": "X",
            "--inference-dynamic-batching-buffer-overflow-factor": "X",
            "--inference-dynamic-batching-max-requests-override": "N",
            "--inference-dynamic-batching-max-tokens-override": "N",
            "--inference-dynamic-batching-num-cuda-graphs": "N",
            "--inference-dynamic-batching-unified-memory-level": "N",
            "--inference-wandb-logging-step-interval": "N",
            "--symmetric-ar-type": "NAME",
            "--mlp-chunks-for-prefill": "N",
            "--bert-embedder-type": "NAME",
            "--inference-coordinator-port": "N",
            "--inference-cuda-graph-max-tokens": "N",
            "--inference-cuda-graph-scope": "NAME",
            "--inference-dynamic-batching-async-sched-mode": "NAME",
            "--inference-dynamic-batching-chunk-size": "N",
            "--inference-dynamic-batching-cuda-graph-max-tokens": "N",
            "--inference-dynamic-batching-cuda-graph-mixed-prefill-count": "N",
            "--inference-dynamic-batching-cuda-graph-sizing-distribution": "NAME",
            "--inference-dynamic-batching-logprobs-mode": "NAME",
            "--inference-dynamic-batching-mamba-memory-ratio": "X",
            "--inference-dynamic-batching-max-requests": "N",
            "--inference-dynamic-batching-max-tokens": "N",
            "--inference-dynamic-batching-paused-buffer-size-gb": "X",
            "--inference-dynamic-batching-prefix-caching-coordinator-policy": "NAME",
            "--inference-dynamic-batching-prefix-caching-eviction-policy": "NAME",
            "--inference-dynamic-batching-prefix-caching-mamba-gb": "X",
            "--inference-dynamic-batching-prefix-caching-routing-alpha": "X",
            "--inference-dynamic-batching-sampling-backend": "NAME",
            "--inference-grouped-gemm-backend": "NAME",
            "--inference-logging-step-interval": "N",
            "--inference-moe-token-dispatcher-type": "NAME",
            "--inference-shards": "TEXT",
            "--num-speculative-tokens": "N",
        },
    ),
    OtherFlags(
        "only --experimental-attention-variant reads it, and that is not built yet",
        switches=(
            "--dsa-indexer-k-norm-fp32",
            "--dsa-indexer-rope-interleaved",
            "--dsa-indexer-use-sparse-loss",
            "--no-dsa-indexer-rotate-activation",
            "--disable-dsa-indexer-rotate-activation",
            "--no-dsa-indexer-scoring-relu",
            "--disable-dsa-indexer-scoring-relu",
        ),
        values={
            "--dsa-indexer-head-dim": "N",
            "--dsa-indexer-k-norm-epsilon": "X",
            "--dsa-indexer-loss-coeff": "X",
            "--dsa-indexer-n-heads": "N",
            "--dsa-indexer-skip-topk-offset": "N",
            "--dsa-indexer-topk": "N",
            "--dsa-indexer-topk-freq": "N",
            "--dsa-kernel-backend": "NAME",
            "--linear-attention-freq": "N|LIST",
            "--linear-conv-kernel-dim": "N",
            "--linear-key-head-dim": "N",
            "--linear-num-key-heads": "N",
            "--linear-num-value-heads": "N",
            "--linear-value-head-dim": "N",
        },
    ),
    OtherFlags(
        "only --fine-grained-activation-offloading reads it, and that is not built yet",
        switches=("--delay-offload-until-cuda-graph",),
        values={
            "--activation-offload-fraction": "X",
            "--delta-offload-bytes-across-pp-ranks": "N",
            "--fine-grained-offloading-max-inflight-offloads": "N",
        },
        lists={"--offload-modules": "NAME"},
    ),
    OtherFlags(
        "only --logits-save-dir and --logits-load-dir read it, and distillation is not built yet",
        switches=("--logits-load-ignore-errors",),
        values={
            "--logits-load-decode-threads": "N",
            "--logits-load-kd-loss-alpha": "X",
            "--logits-load-msc-prefetch-depth": "N",
            "--logits-load-prefetch-factor": "N",
            "--logits-save-dtype": "NAME",
            "--logits-save-top-k": "N",
            "--logits-save-top-p": "X",
            "--logits-save-top-p-min-k": "N",
        },
    ),
    OtherFlags(
        "only --use-mup reads it, and that is not built yet",
        values={
            "--mup-attn-scale-power": "X",
            "--mup-base-head-dim": "X",
            "--mup-embedding-mult": "X",
            "--mup-output-mult": "X",
            "--mup-width-mult": "X",
        },
    ),
    OtherFlags(
        "only --position-embedding-type yarn reads it; here YaRN is --position-embedding-type rope --rope-scaling",
        switches=("--yarn-correction-range-round-to-int", "--no-yarn-correction-range-round-to-int"),
        values={"--yarn-beta-fast": "X", "--yarn-beta-slow": "X", "--yarn-original-max-position-embeddings": "N"},
    ),
    OtherFlags(
        "only --flight-recorder-dump-path reads it, and that is not built yet",
        switches=(
            "--flight-recorder-include-stack-trace",
            "--no-flight-recorder-dump-on-timeout",
            "--disable-flight-recorder-dump-on-timeout",
            "--no-flight-recorder-extra-dump-on-exec",
            "--disable-flight-recorder-extra-dump-on-exec",
            "--no-flight-recorder-include-only-active",
            "--disable-flight-recorder-include-only-active",
        ),
        values={"--flight-recorder-trace-buffer-size": "N"},
    ),
    OtherFlags("nothing is exported to ONNX", values={"--onnx-safe": "BOOL"}),
    # ---- watching a run
    OtherFlags(
        "a run that is interrupted ends with one line and the signal's exit code in any case",
        switches=("--exit-signal-handler-for-training",),
    ),
    OtherFlags(
        "it is among the curves unless the --no- form is given",
        switches=("--log-learning-rate-to-tensorboard", "--log-loss-scale-to-tensorboard"),
    ),
    OtherFlags(
        "timers wait for nobody unless --barrier-with-level-1-timing is given",
        switches=("--no-barrier-with-level-1-timing",),
    ),
)

# Scripts give several of these beside --num-experts; they choose kernels, or nothing.
SILENT = by_flag(
    OtherFlags(
        "it chooses kernels of experts, routers and permutations, which are torch's here: the same formulas",
        switches=(
            "--moe-use-legacy-grouped-gemm",
            "--moe-router-fusion",
            "--moe-permute-fusion",
            "--moe-use-grouped-tensor",
            "--use-grouped-gemm-for-shared-expert",
        ),
        values={"--moe-deepep-num-sms": "N", "--moe-hybridep-num-sms": "N", "--moe-flex-dispatcher-backend": "NAME"},
    ),
    OtherFlags(
        "only --moe-token-dispatcher-type flex reads it, and that is refused",
        switches=(
            "--moe-hybridep-pad-uneven-dispatch-inputs",
            "--moe-ncclep-static-shape",
            "--moe-ncclep-zero-copy",
            "--moe-permute-fusion-into-hybridep",
        ),
        values={
            "--moe-flex-dispatcher-num-sms": "N",
            "--moe-dispatch-fwd-dtype": "NAME",
            "--moe-combine-bwd-dtype": "NAME",
            "--moe-hybridep-num-blocks-permute": "N",
            "--moe-hybridep-num-blocks-unpermute": "N",
            "--moe-hybridep-num-sms-preprocessing": "N",
        },
    ),
    OtherFlags(
        "only an option of experts that is refused reads it",
        switches=(
            "--moe-routing-trace-capture-hidden-states",
            "--moe-routing-trace-capture-logits",
            "--moe-routing-trace-dump-weights",
        ),
        values={
            "--moe-paged-stash-buffer-size-factor-cpu": "X",
            "--moe-paged-stash-buffer-size-factor-cuda": "X",
            "--moe-paged-stash-page-size": "N",
            "--moe-router-quantile-balancing-ema": "X",
            "--moe-routing-trace-max-training-iters": "N",
        },
    ),
    OtherFlags(
        "the experts of a rank are one tensor for each of their two products in any case",
        switches=("--moe-single-grouped-bias", "--moe-single-grouped-weight"),
    ),
    OtherFlags(
        "there is no fp8 or CUDA graph here for which rows of experts would be padded",
        switches=(
            "--moe-router-padding-for-fp8",
            "--moe-router-padding-for-quantization",
            "--moe-pad-experts-for-cuda-graph-inference",
        ),
    ),
    OtherFlags("only --moe-use-upcycling reads it", values={"--moe-upcycling-granularity": "N"}),
    OtherFlags("Megatron does not read it either", switches=("--moe-token-dropping",)),
    OtherFlags(
        "weight gradients and the sending of tokens overlap as the schedule and --moe-shared-expert-overlap say",
        switches=(
            "--overlap-moe-expert-parallel-comm",
            "--delay-wgrad-compute",
            "--ep-overlap-early-attn-memory-release",
            "--overlap-dispatch-backward-with-experts-wgrad",
        ),
    ),
)

WARNED = by_flag(
    OtherFlags(
        "each expert is divided over --expert-tensor-parallel-size ranks, and the numbers are the same; to divide all experts "
        "over TP x EP ranks, give that product as --expert-tensor-parallel-size, and leave out --expert-model-parallel-size",
        switches=("--moe-extended-tp",),
    ),
    OtherFlags(
        "layers are PyTorch's: the same formulas, in other kernels' speed and rounding, and without fp8",
        values={"--transformer-impl": "NAME"},
        harmless={"--transformer-impl": ("local",)},
    ),
    OtherFlags(
        "checkpoints are written as raw files and a manifest, for any layout, which Megatron does not read; its own, of both "
        "formats, are read by --load",
        switches=("--use-dist-ckpt", "--dist-ckpt-save-pre-mcore-014"),
        values={"--ckpt-format": "NAME", "--dist-ckpt-format": "NAME"},
    ),
    OtherFlags(
        "only files of --data-impl mmap are read, and they are memory-mapped; tools/preprocess_data.py writes them",
        values={"--data-impl": "NAME"},
        harmless={"--data-impl": ("mmap", "infer")},
    ),
)

_TASKS = "downstream tasks are not built yet: this script pretrains; leave it out"
_GENERATES = (
    "pretraining writes no text; tools/generate.py has --num-samples, --max-new-tokens, --temperature and --top-p"
)
_BERT = "there is pretrain_bert.py, but nothing that starts from a BERT or writes what it makes of texts; leave it out"

REFUSED = by_flag(
    # ---- old names
    OtherFlags("was renamed; use --micro-batch-size", values={"--batch-size": "N"}),
    OtherFlags("was renamed; use --tensor-model-parallel-size", values={"--model-parallel-size": "N"}),
    OtherFlags("was renamed; use --lr-warmup-fraction", values={"--warmup": "X"}),
    OtherFlags(
        "was renamed; use --recompute-granularity full --recompute-method",
        values={"--activations-checkpoint-method": "NAME"},
    ),
    OtherFlags("was renamed; use --recompute-num-layers", values={"--activations-checkpoint-num-layers": "N"}),
    # ---- the model
    OtherFlags(
        "tools/checkpoint_convert.py --num-experts turns a dense checkpoint into experts, before the run; leave it out",
        switches=("--moe-use-upcycling",),
    ),
    OtherFlags("experts in a latent width are not built yet; leave it out", values={"--moe-latent-size": "N"}),
    OtherFlags(
        "is not built; --moe-router-force-load-balancing chooses experts in turn",
        values={"--moe-router-force-biased": "X"},
    ),
    OtherFlags(
        "would drop tokens by the rank that they are sent to, so the layout would change numbers; use "
        "--moe-expert-capacity-factor",
        values={"--moe-expert-rank-capacity-factor": "X"},
    ),
    OtherFlags(
        "the weights of all gates are followed by those of all linear units; leave it out: a checkpoint whose blocks "
        "alternate would compute another model",
        values={"--moe-mlp-glu-interleave-size": "N", "--moe-shared-expert-glu-interleave-size": "N"},
    ),
    OtherFlags(
        "is not built yet; leave it out, and use --recompute-modules moe_act, which keeps no activations inside experts",
        switches=("--moe-paged-stash",),
    ),
    OtherFlags(
        "is not written; leave it out, or let a script record the choices with --moe-enable-routing-replay",
        values={"--moe-routing-trace-path": "DIR"},
    ),
    OtherFlags(
        "is not written; leave it out, or use --moe-per-layer-logging, which logs the largest and the smallest load of each "
        "layer",
        values={"--save-tokens-per-expert-interval": "N"},
    ),
    OtherFlags(_BERT, switches=("--output-bert-embeddings",), values={"--bert-load": "DIR", "--ict-load": "DIR"}),
    OtherFlags(
        "retrieval is not built yet; leave it out",
        switches=("--retro-add-retriever",),
        values={"--retro-project-dir": "DIR", "--ict-head-size": "N"},
    ),
    OtherFlags(
        "models of pictures are not built yet; leave it out",
        switches=("--vision-pretraining",),
        values={"--vision-pretraining-type": "NAME"},
    ),
    OtherFlags(
        "multi-latent attention is not built yet; use --group-query-attention", switches=("--multi-latent-attention",)
    ),
    OtherFlags(
        "state-space models are not built yet; leave it out",
        switches=("--is-hybrid-model",),
        values={
            "--hybrid-override-pattern": "TEXT",
            "--hybrid-layer-pattern": "TEXT",
            "--hybrid-attention-ratio": "X",
            "--hybrid-mlp-ratio": "X",
        },
        harmless={"--hybrid-attention-ratio": ("0",), "--hybrid-mlp-ratio": ("0",)},
    ),
    OtherFlags(
        "a model is chosen by its flags or written as model_provider, see docs/adding_a_model.md; leave it out",
        lists={"--spec": "TEXT"},
        harmless={"--spec": ("local",)},
    ),
    OtherFlags(
        "layers that differ from one another are not built yet; leave it out",
        values={"--heterogeneous-layers-config-path": "FILE", "--heterogeneous-layers-config-encoded-json": "TEXT"},
    ),
    OtherFlags(
        "prediction of several tokens is not built yet; leave it out",
        values={"--mtp-num-layers": "N"},
        harmless={"--mtp-num-layers": ("0",)},
    ),
    OtherFlags(
        "is not built yet; leave it out, or use --position-embedding-type rope, with --rope-scaling for YaRN and others",
        values={"--rope-type": "NAME"},
        harmless={"--rope-type": ("rope",)},
    ),
    OtherFlags("is not built yet; use --qk-layernorm", switches=("--qk-l2-norm",)),
    OtherFlags(
        "rates and initial weights that scale with the width are not built yet; leave it out, and give --lr and "
        "--init-method-std for this width",
        switches=("--use-mup",),
        values={"--mup-base-hidden-size": "N"},
    ),
    OtherFlags(
        "is not built yet; leave it out: initial weights are the same in every layout",
        switches=("--data-parallel-random-init",),
    ),
    OtherFlags(
        "is set by --make-vocab-size-divisible-by and the tensor-parallel size; leave it out",
        values={"--padded-vocab-size": "N"},
    ),
    # ---- training
    OtherFlags(
        "would make Muon's update depend on the tensor-parallel size; leave it out: every matrix is orthogonalized whole",
        values={"--muon-tp-mode": "NAME"},
        harmless={"--muon-tp-mode": ("duplicated", "distributed")},
    ),
    OtherFlags(
        "the loss is taken in float32, whatever the model's precision; leave it out",
        switches=("--fp16-lm-cross-entropy",),
    ),
    OtherFlags(
        "how a device sums products is PyTorch's choice; leave it out",
        switches=("--disable-bf16-reduced-precision-matmul",),
    ),
    # ---- what guards a run
    OtherFlags(
        "is not built yet; leave it out: a wrong number is told in the log",
        values={"--result-rejected-tracker-filename": "FILE"},
    ),
    OtherFlags(
        "is not switched while a run goes; leave it out: --log-straggler measures from the start",
        switches=("--disable-straggler-on-startup",),
    ),
    OtherFlags("is not measured; leave it out", switches=("--log-energy",)),
    OtherFlags(
        "one timeout holds for the whole run; use --distributed-timeout-minutes",
        values={"--distributed-timeout-seconds-after-init": "N"},
    ),
    OtherFlags(
        "is not built yet; use --wandb-project, --tensorboard-dir or --metrics-file",
        values={
            "--one-logger-project": "TEXT",
            "--one-logger-run-name": "TEXT",
            "--app-tag-run-name": "TEXT",
            "--app-tag-run-version": "TEXT",
        },
    ),
    OtherFlags(
        "is not written; leave it out: the start of the log and each checkpoint's manifest.json hold all settings",
        values={"--config-logger-dir": "DIR"},
    ),
    OtherFlags(
        "is not written; leave it out: weight decay is for tensors of two dimensions or more",
        values={"--dump-param-to-param-group-map": "FILE"},
    ),
    OtherFlags(
        "no server is started; leave it out, and see docs/watching.md", switches=("--run-workload-inspector-server",)
    ),
    OtherFlags(
        "fp8 and fp4 are not built yet; use --bf16",
        switches=("--fp8-e4m3", "--fp8-hybrid"),
        values={
            "--fp8-format": "NAME",
            "--fp4-format": "NAME",
            "--transformer-engine-precision-config": "FILE",
            "--te-precision-config-file": "FILE",
            "--kitchen-config-file": "FILE",
            "--kitchen-recipe-number": "N",
        },
    ),
    OtherFlags(
        "CUDA graphs are not built yet; leave it out, the numbers are the same",
        switches=("--enable-cuda-graph", "--external-cuda-graph", "--optimizer-cuda-graph"),
        values={"--cuda-graph-impl": "NAME"},
        harmless={"--cuda-graph-impl": ("none",)},
    ),
    OtherFlags(
        "moments and masters are always float32; leave it out (--reuse-fp32-param takes two bytes of a master away)",
        switches=("--use-precision-aware-optimizer",),
        values={"--main-params-dtype": "NAME", "--exp-avg-dtype": "NAME", "--exp-avg-sq-dtype": "NAME"},
        harmless={"--main-params-dtype": ("fp32",), "--exp-avg-dtype": ("fp32",), "--exp-avg-sq-dtype": ("fp32",)},
    ),
    OtherFlags(
        "is not built yet; leave it out",
        switches=(
            "--enable-ft-package",
            "--calc-ft-timeouts",
            "--inprocess-restart",
            "--adlr-autoresume",
            "--perform-rl-step",
            "--replication",
        ),
        lists={"--lazy-mpu-init": "BOOL"},
    ),
    # ---- parallelism
    OtherFlags(
        "is not built yet; leave it out, and use --zero-stage 3 to shard weights over data-parallel ranks",
        values={"--tensor-parallel-num-weight-shards": "N", "--expert-tensor-parallel-num-weight-shards": "N"},
    ),
    OtherFlags(
        "the parts of FSDP have one precision each; use --grad-reduce-in-bf16 for gradients that are sent, and "
        "--main-grads-dtype bf16 for those that are summed; masters are float32",
        values={
            "--megatron-fsdp-grad-comm-dtype": "NAME",
            "--megatron-fsdp-main-grads-dtype": "NAME",
            "--megatron-fsdp-main-params-dtype": "NAME",
        },
        harmless={
            "--megatron-fsdp-grad-comm-dtype": ("fp32",),
            "--megatron-fsdp-main-grads-dtype": ("fp32",),
            "--megatron-fsdp-main-params-dtype": ("fp32",),
        },
    ),
    OtherFlags(
        "use --pipeline-model-parallel-layout, which gives the embedding a stage of its own: 'E|tt|ttL'",
        switches=("--standalone-embedding-stage",),
    ),
    OtherFlags(
        "a decoder on ranks of its own is not built yet; leave it out",
        values={"--encoder-tensor-model-parallel-size": "N", "--encoder-pipeline-model-parallel-size": "N"},
        harmless={"--encoder-tensor-model-parallel-size": ("0",), "--encoder-pipeline-model-parallel-size": ("0",)},
    ),
    # ---- data
    OtherFlags("every sample has --seq-length tokens; leave it out", switches=("--variable-seq-lengths",)),
    OtherFlags(
        "every sample is cut over all --context-parallel-size ranks alike; leave it out",
        switches=("--hybrid-context-parallel",),
        values={"--max-seqlen-per-dp-cp-rank": "N"},
    ),
    OtherFlags(
        "a pad that is also a word of the text is never masked; leave it out",
        switches=("--allow-ambiguous-pad-tokens",),
    ),
    OtherFlags(
        "the tokenizer is what --tokenizer-type and its files say; leave it out",
        switches=(
            "--no-tokenizer-sentencepiece-ignore-extra-whitespaces",
            "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces",
        ),
        values={"--tokenizer-metadata": "FILE", "--null-tokenizer-pad-id": "N"},
        lists={"--tokenizer-special-tokens": "TOKEN"},
        harmless={"--null-tokenizer-pad-id": ("-1",)},
    ),
    OtherFlags(
        "data are read from local files; copy them, and give --data-path and --data-cache-path",
        values={"--s3-cache-path": "DIR", "--object-storage-cache-path": "DIR"},
    ),
    # ---- checkpoints
    OtherFlags(
        "its format is not built; leave it out, and use --dist-ckpt-strictness log_all to load what a checkpoint has",
        switches=("--no-strict-fsdp-dtensor-load", "--disable-strict-fsdp-dtensor-load"),
    ),
    OtherFlags(
        "other formats are not built yet; leave it out",
        values={"--ckpt-convert-format": "NAME", "--ckpt-convert-save": "DIR"},
    ),
    OtherFlags(
        "NVIDIA's multi-storage client is not used; leave it out: --save and --load take s3:// URLs themselves",
        switches=("--enable-msc",),
    ),
    OtherFlags(
        "checkpoints of its own kind are not read; leave it out, and see docs/models.md for those that are",
        switches=("--load-model-opt-format",),
    ),
    # ---- of core 0.16 to 0.19
    OtherFlags(
        "is not built yet; leave it out: another kind of attention would be another model",
        switches=("--attention-output-gate", "--use-kitchen-attention"),
        values={"--experimental-attention-variant": "NAME"},
    ),
    OtherFlags(
        "is not built yet; leave it out, or use --attn-logit-softcapping or --qk-layernorm against large scores",
        switches=("--qk-clip",),
    ),
    OtherFlags("is not measured; leave it out, or use --qk-layernorm", switches=("--log-max-attention-logit",)),
    OtherFlags(
        "weight decay is for tensors of two dimensions or more; leave it out",
        switches=("--apply-wd-to-qk-layernorm",),
        values={"--no-weight-decay-cond-type": "NAME"},
    ),
    OtherFlags(
        "hyper-connections are not built yet; leave it out: they would be another model",
        switches=("--enable-mhc-connections",),
    ),
    OtherFlags(
        "logits have the dtype of the model, and the loss is taken in float32; leave it out",
        values={"--output-logit-dtype": "NAME"},
    ),
    OtherFlags(
        "is not built yet; use --wandb-project, --tensorboard-dir or --metrics-file", switches=("--otel-enabled",)
    ),
    OtherFlags(
        "is not built yet; leave it out: the last digits of a product may depend on the size of a microbatch",
        switches=("--batch-invariant-mode",),
    ),
    OtherFlags(
        "use --tiled-mlp N, which computes the MLP in N tiles, also in validation",
        values={"--mlp-chunks-for-training": "N"},
        harmless={"--mlp-chunks-for-training": ("1",)},
    ),
    OtherFlags(
        "is not built yet; use --cpu-offloading-num-layers N, which offloads the activations of whole layers",
        switches=("--fine-grained-activation-offloading",),
    ),
    OtherFlags(
        "leave it out: gradients are accumulated in float32 unless --main-grads-dtype bf16 is given",
        lists={"--ddp-param-name-patterns-for-fp32-local-accumulation": "TEXT"},
    ),
    OtherFlags(
        "is not built yet; leave it out: the weights would not be trained. --skip-train evaluates them",
        switches=("--freeze-all-layers",),
    ),
    OtherFlags(
        "is not built yet; leave it out: the order of samples of one phase does not depend on the others",
        values={"--phase-transition-iterations": "LIST"},
    ),
    OtherFlags(
        "distillation is not built yet; leave it out", values={"--logits-save-dir": "DIR", "--logits-load-dir": "DIR"}
    ),
    OtherFlags(
        "is not built yet; leave it out: python pretrain_gpt.py ... --world-size N plans a run of N processes",
        switches=("--fake-process-group",),
    ),
    OtherFlags(
        "no faults are injected; leave it out, or use --error-injection-rate with --rerun-interval",
        values={
            "--fault-injector-delay-start-iteration": "N",
            "--fault-injector-fault-delay": "X",
            "--fault-injector-fault-probabilities": "LIST",
            "--fault-injector-fault-types": "LIST",
            "--fault-injector-mtti-seconds": "X",
            "--fault-injector-num-ranks": "N",
            "--fault-injector-offset-seconds": "X",
            "--fault-injector-ranks": "LIST",
            "--fault-injector-seed": "N",
        },
    ),
    OtherFlags(
        "is not built yet; leave it out, and use --log-straggler, which compares the ranks in each step",
        values={"--gpu-sniff-test-interval": "N"},
    ),
    OtherFlags(
        "is not written; leave it out: --hang-timeout N names the rank and the call that a job hangs in",
        values={"--flight-recorder-dump-path": "DIR"},
    ),
    OtherFlags("is not logged; use --log-memory-to-tensorboard", switches=("--log-device-memory-used",)),
    OtherFlags(
        "is not in the trace of --profile; leave it out",
        switches=(
            "--nvtx-ranges",
            "--record-shapes",
            "--pytorch-profiler-collect-callstack",
            "--pytorch-profiler-collect-chakra",
            "--pytorch-profiler-collect-shapes",
        ),
    ),
    OtherFlags(
        "is not written; leave it out, or use --inspect N, which logs figures of weights, gradients and activations",
        values={
            "--save-activations-interval": "N",
            "--save-dgrads-interval": "N",
            "--save-params-interval": "N",
            "--save-wgrads-interval": "N",
        },
    ),
    # ---- flags of forks
    OtherFlags(
        "a run is set up by flags alone; use --zero-stage, --bf16 or --fp16, --micro-batch-size, --global-batch-size and "
        "--clip-grad for what the file says. docs/deepspeed.md has the keys; megatron.deepspeed.initialize reads the file, in "
        "a loop of your own",
        switches=("--deepspeed",),
        values={"--deepspeed_config": "FILE", "--deepspeed-config": "FILE"},
    ),
    OtherFlags(
        "use --train-samples, the tokens divided by --seq-length; docs/training_run.md has the length of a run",
        values={"--train-tokens": "N"},
    ),
    OtherFlags(
        "leave it out: there is a pipeline with --pipeline-model-parallel-size 2 or more alone, and --zero-stage goes with or "
        "without one, see docs/parallelism.md",
        switches=("--no-pipeline-parallel",),
    ),
    # ---- scripts other than pretraining
    OtherFlags(
        _TASKS,
        switches=("--strict-lambada",),
        values={"--task": "NAME", "--epochs": "N"},
        lists={"--train-data": "FILE", "--valid-data": "FILE"},
    ),
    OtherFlags(
        _GENERATES,
        switches=("--greedy",),
        values={
            "--out-seq-length": "N",
            "--num-samples": "N",
            "--genfile": "FILE",
            "--temperature": "X",
            "--top_p": "X",
            "--top_k": "N",
        },
    ),
)

OTHERS = NO_EFFECT | SILENT | WARNED | REFUSED

# Other spellings of settings: flag -> the fields that it stands for. Aliases of one field stand in its option.
SHORTHAND: dict[str, dict[str, Any]] = {
    "--use-rotary-position-embeddings": {"position_embedding_type": "rope"},
    "--recompute-activations": {"recompute_granularity": "selective"},
    "--checkpoint-activations": {"recompute_granularity": "full", "recompute_method": "uniform"},
    "--squared-relu": {"activation": "squared-relu"},
    "--openai-gelu": {"activation": "gelu-tanh"},
    "--quick-geglu": {"activation": "quick-gelu", "gated": True},
    "--no-position-embedding": {},  # classic scripts give it beside the rotary flag
}

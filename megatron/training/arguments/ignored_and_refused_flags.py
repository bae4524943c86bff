"""The flags of Megatron that are no settings here are listed by their effect, beside other spellings of settings.

One question decides: would the flag change the numbers, the model, the files, or the checks that guard the run?

    no              accepted, and listed once at the start                                          NO_EFFECT
                    accepted in silence, since it is given beside a flag that already says it       SILENT
    yes, and        it is common in scripts: accepted with a WARNING that says what happens         WARNED
                    it is not: refused, with an alternative                                         REFUSED

Each is a table from a reason to the flags that it applies to, written as in a usage line:

    --flag                a switch
    --flag N              one value
    --flag N...           any number of values
    --flag 0|1|N          a warning or a refusal, unless the value is 0 or 1, which ask for what happens anyway

No flag of Megatron's scripts may be unknown: tests/unit/training/classic_flags.txt lists them with their effects.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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


def parse_table(table: Mapping[str, str]) -> dict[str, OtherFlag]:
    """Return the flags of a table by name."""
    flags: dict[str, OtherFlag] = {}
    for reason, line in table.items():
        words = line.split()
        for word, following in zip(words, [*words[1:], "--"]):
            if not word.startswith("--"):
                continue
            value = "" if following.startswith("--") else following
            *harmless, metavar = value.split("|")
            if value.endswith("..."):
                count = "*"
            elif value:
                count = "1"
            else:
                count = "0"
            assert word not in flags, f"{word} is there twice"
            flags[word] = OtherFlag(word, count, metavar.removesuffix("..."), tuple(harmless), reason)
    return flags


NO_EFFECT_BY_REASON: dict[str, str] = {
    # ---- the model and its numbers
    "samples are read ahead by threads of the run itself, which hear no signal": "--exit-signal-handler-for-dataloader",
    "nothing listens on a port: --log-straggler measures from the start": "--straggler-ctrlr-port N",
    "there is one implementation": "--use-mcore-models --use-legacy-models --enable-experimental",
    "--compile regions fuses this work, for all kinds at once": """
        --no-bias-dropout-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-rope-fusion""",
    "kernels are chosen by what the device can do": """
        --no-masked-softmax-fusion --no-persist-layer-norm --use-te-activation-func --use-fused-weighted-squared-relu
        --no-scaled-masked-softmax-fusion --scaled-masked-softmax-fusion --scaled-upper-triang-masked-softmax-fusion""",
    "the fused attention kernel is used wherever it can do the work": "--use-flash-attn",
    "weight gradients are written straight into their buffer": "--no-gradient-accumulation-fusion",
    "there is one cross entropy, and it never gathers the vocabulary": """
        --cross-entropy-loss-fusion --cross-entropy-fusion-impl NAME""",
    "queries are scaled before the product and the softmax is taken in float32, so float16 scores do not overflow": """
        --apply-query-key-layer-scaling --no-query-key-layer-scaling""",
    "the softmax is always taken in float32": "--attention-softmax-in-fp32",
    "float32 is the rule; --main-grads-dtype bf16 and --grad-reduce-in-bf16 are the exceptions": """
        --accumulate-allreduce-grads-in-fp32 --fp32-allreduce""",
    "a loss that counts its tokens is always the mean over all tokens of the step": "--calculate-per-token-loss",
    "initial weights are always the same in every layout": "--use-cpu-initialization",
    "initial weights are always drawn; a checkpoint then takes their place": """
        --no-initialization --init-model-with-meta-device""",
    # ---- parallelism and communication
    "there is one data-parallel wrapper, with contiguous gradient buffers": """
        --DDP-impl NAME --use-contiguous-buffers-in-ddp --no-contiguous-buffers-in-local-ddp""",
    "buckets are cut by size: --ddp-bucket-size": "--ddp-num-buckets N --ddp-pad-buckets-for-high-nccl-busbw",
    "gradients are summed, and divided once, by the tokens of the step": """
        --ddp-average-in-collective --no-gradient-reduce-div-fusion""",
    "every stage starts its reduction when it is ready": """
        --no-align-grad-reduce --no-align-param-gather --delay-grad-reduce --no-delay-grad-reduce
        --delay-param-gather""",
    "the all-reduce overlaps the weight gradient, which changes no number": """
        --no-async-tensor-model-parallel-allreduce""",
    "transfers between stages are always begun early and waited for late": """
        --overlap-p2p-communication --no-overlap-p2p-communication --overlap-p2p-communication-warmup-flush
        --use-ring-exchange-p2p""",
    "--pipeline-schedule zb-h1, zb-interleaved and zb-v are the schedules that defer weight gradients": """
        --defer-embedding-wgrad-compute --wgrad-deferral-limit N""",
    "tensor-parallel communication and products are overlapped where the code can, which changes no number": """
        --tp-comm-overlap --tp-comm-overlap-cfg FILE --disable-tp-comm-overlap-ag --disable-tp-comm-overlap-rs
        --tp-comm-overlap-rs-dgrad --disable-tp-comm-bulk-dgrad --disable-tp-comm-bulk-wgrad
        --disable-tp-comm-split-ag --disable-tp-comm-split-rs --tp-comm-bulk-dgrad --tp-comm-bulk-wgrad
        --tp-comm-split-ag --tp-comm-split-rs --tp-comm-bootstrap-backend NAME""",
    "every group has the back end and the timeout of --distributed-backend and --distributed-timeout-minutes": """
        --pipeline-model-parallel-comm-backend NAME --high-priority-stream-groups NAME...
        --nccl-communicator-config-path FILE --use-nccl-ub --nccl-ub --disable-symmetric-registration --use-sharp
        --sharp-enabled-group NAME --disable-gloo-process-groups --enable-gloo-process-groups""",
    "memory stays as it is": "--no-clone-scatter-output-in-embedding",
    "Python collects its garbage as it always does": "--manual-gc --manual-gc-interval N --no-manual-gc-eval",
    "every rank keeps in step with its device as it is": "--train-sync-interval N",
    "the log has one level": "--logging-level N",
    "nothing is sent to NVIDIA's one_logger": "--no-one-logger",
    "files are read and written as they are, without NVIDIA's multi-storage client": "--disable-msc",
    # ---- data
    "no mask is ever made for causal attention": """
        --no-create-attention-mask-in-dataloader --create-attention-mask-in-dataloader""",
    "one process builds all indices": "--num-dataset-builder-threads N",
    "an epoch of --dataloader-type cyclic is shuffled as a whole, in every layout": "--no-data-sharding",
    "only retrieval and models of pictures read it, and they are not built yet": """
        --sample-rate X --retriever-seq-length N""",
    "a tokenizer is its files, and no code that comes with them is run": "--legacy-tokenizer --trust-remote-code",
    # ---- checkpoints
    "random numbers follow from --seed and the position in the run; there is no state to save or to load": """
        --no-load-rng --no-save-rng --te-rng-tracker --inference-rng-tracker""",
    "there is one format, which any layout loads and every rank writes its share of": """
        --auto-detect-ckpt-format --ckpt-fully-parallel-save --no-ckpt-fully-parallel-save
        --ckpt-fully-parallel-load --no-ckpt-fully-parallel-load --ckpt-assume-constant-structure
        --dist-ckpt-optim-fully-reshardable --distrib-optim-fully-reshardable-mem-efficient
        --ckpt-convert-update-legacy-dist-opt-format""",
    "masters that are not loaded are made from the weights as they were saved, with all their digits": """
        --load-main-params-from-ckpt""",
    "the process that --async-save starts lives as long as the run": "--use-persistent-ckpt-worker",
    "only --replication reads it, and it is not built yet": "--replication-jump N --replication-factor N",
    "the tokenizer is always the command line's": "--no-use-tokenizer-model-from-checkpoint-args",
    # ---- companions of flags that are refused
    "only fp8 and fp4 read it, and they are not built yet": """
        --fp8-amax-history-len N --fp8-amax-compute-algo NAME --fp8-margin N --fp8-interval N --no-fp8-wgrad
        --fp8-recipe NAME --fp8-param-gather --fp8-param --first-last-layers-bf16 --num-layers-at-start-in-bf16 N
        --num-layers-at-end-in-bf16 N --keep-fp8-transpose-cache --reuse-grad-buf-for-mxfp8-param-ag
        --fp4-recipe NAME --fp4-param""",
    "an offloaded update is torch's, slice by slice, with the next slice on its way": """
        --use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d""",
    "host memory that an accelerator reads is pinned": "--no-pin-cpu-grads --no-pin-cpu-params",
    "only fully sharded data parallelism reads it, and that is not built yet": """
        --fsdp-double-buffer --suggested-communication-unit-size N --enable-full-sharding-in-hsdp
        --torch-fsdp2-no-reshard-after-forward""",
    "only multi-latent attention reads it, and that is not built yet": """
        --q-lora-rank N --kv-lora-rank N --qk-head-dim N --qk-pos-emb-head-dim N --v-head-dim N
        --rotary-scaling-factor X --mscale X --mscale-all-dim X --cache-mla-latents""",
    "only state-space models read it, and they are not built yet": """
        --mamba-state-dim N --mamba-head-dim N --mamba-num-groups N --mamba-num-heads N --disable-mamba-mem-eff-path""",
    "only retrieval reads it, and that is not built yet": """
        --retro-cyclic-train-iters N --retro-encoder-layers N --retro-encoder-hidden-dropout X
        --retro-encoder-attention-dropout X --retro-num-neighbors N --retro-num-retrieved-chunks N
        --retro-attention-gate X --retro-no-verify-neighbor-count --biencoder-projection-dim N
        --biencoder-shared-query-context-model --titles-data-path FILE --query-in-block-prob X --use-one-sent-docs
        --evidence-data-path FILE --retriever-report-topk-accuracies N... --retriever-score-scaling
        --block-data-path FILE --embedding-path FILE --indexer-batch-size N --indexer-log-interval N""",
    "only models of pictures read it, and they are not built yet": """
        --num-classes N --img-h N --img-w N --img-dim N --num-channels N --patch-dim N --classes-fraction X
        --data-per-class-fraction X --head-lr-mult X --vision-backbone-type NAME --swin-backbone-type NAME
        --mask-type NAME --mask-factor X --iter-per-epoch N --dino-local-img-size N --dino-local-crops-number N
        --dino-head-hidden-size N --dino-bottleneck-size N --dino-freeze-last-layer X --dino-norm-last-layer
        --dino-warmup-teacher-temp X --dino-teacher-temp X --dino-warmup-teacher-temp-epochs N""",
    "only reinforcement learning reads it, and that is not built yet": """
        --rl-prompts-per-eval N --grpo-prompts-per-step N --grpo-group-size N --grpo-iterations N
        --grpo-clamp-eps-lower X --grpo-clamp-eps-upper X --grpo-kl-beta X --grpo-entropy-term-weight X
        --grpo-filter-groups-with-same-reward --grpo-default-temperature X --grpo-default-top-p X
        --langrl-inference-server-type NAME --langrl-inference-server-conversation-template NAME
        --langrl-external-server --no-langrl-external-server --langrl-env-config FILE
        --rl-offload-optimizer-during-inference --rl-offload-kv-cache-during-training
        --rl-remove-kv-cache-during-training --rl-reset-cuda-graphs --rl-partial-rollouts
        --rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef X
        --rl-calculate-intra-group-similarity --rl-use-sequence-packing --rl-sequence-packing-bin-size N
        --rl-sequence-packing-algo NAME""",
    "a whole matrix lies in one shard, and the rest is cut into equal shards": """
        --no-use-layer-wise-param-layout""",
    "Muon's products of a matrix with itself are PyTorch's": "--muon-use-syrk",
    "only Lion reads it, and that optimizer is not built yet": "--lion-beta1 X --lion-beta2 X",
    "only an option that is refused reads it": """
        --mrope-section N... --mtp-loss-scaling-factor X --cuda-graph-warmup-steps N
        --cuda-graph-scope NAME --sft-tokenizer-prompt-format NAME
        --adlr-autoresume-interval N --one-logger-async --inprocess-max-iterations N --inprocess-monitor-thread-interval X
        --inprocess-monitor-process-interval X --inprocess-progress-watchdog-interval X
        --inprocess-heartbeat-interval X --inprocess-soft-timeout X --inprocess-hard-timeout X
        --inprocess-heartbeat-timeout X --inprocess-barrier-timeout X --inprocess-completion-timeout X
        --inprocess-last-call-wait X --inprocess-termination-grace-time X --inprocess-granularity NAME
        --inprocess-active-world-size N --inprocess-empty-cuda-cache""",
    "only inference reads it; tools/generate.py has flags of its own": """
        --inference-batch-times-seqlen-threshold N --max-tokens-to-oom N --flash-decode --inference-max-requests N
        --inference-max-seq-length N --inference-max-batch-size N --inference-dynamic-batching
        --inference-dynamic-batching-buffer-size-gb X --inference-dynamic-batching-block-size N
        --inference-dynamic-batching-buffer-guaranteed-fraction X
        --inference-dynamic-batching-buffer-overflow-factor X --inference-dynamic-batching-max-requests-override N
        --inference-dynamic-batching-max-tokens-override N --inference-dynamic-batching-num-cuda-graphs N
        --inference-dynamic-batching-track-paused-request-events --inference-dynamic-batching-unified-memory-level N
        --inference-wandb-logging-step-interval N --decode-only-cuda-graphs --use-legacy-static-engine
        --symmetric-ar-type NAME --nccl-all-reduce-for-prefill --mlp-chunks-for-prefill N --disable-chunked-prefill
        --bert-embedder-type NAME""",
    # ---- watching a run
    "it is among the curves unless the --no- form is given": """
        --log-learning-rate-to-tensorboard --log-loss-scale-to-tensorboard""",
    "timers wait for nobody unless --barrier-with-level-1-timing is given": "--no-barrier-with-level-1-timing",
}

# Scripts give a dozen of these at once; to train a dense model a user takes out the one flag that switches them on.
SILENT_BY_REASON: dict[str, str] = {
    "only mixtures of experts read it, and there are none without --num-experts": """
        --moe-router-topk N --moe-router-load-balancing-type NAME... --moe-aux-loss-coeff X... --moe-grouped-gemm
        --moe-token-dispatcher-type NAME --moe-extended-tp --moe-layer-freq TEXT --moe-ffn-hidden-size N
        --moe-shared-expert-intermediate-size N --moe-shared-expert-overlap --moe-use-legacy-grouped-gemm
        --moe-layer-recompute --moe-router-dtype NAME --moe-router-fusion --moe-router-score-function NAME
        --moe-router-pre-softmax --moe-router-num-groups N --moe-router-group-topk N
        --moe-router-topk-scaling-factor X --moe-router-enable-expert-bias --moe-router-bias-update-rate X
        --moe-router-force-load-balancing --moe-router-padding-for-fp8 --moe-z-loss-coeff X --moe-input-jitter-eps X
        --moe-per-layer-logging --moe-enable-deepep --moe-deepep-num-sms N --moe-permute-fusion
        --moe-expert-capacity-factor X --moe-pad-expert-input-to-capacity --moe-token-drop-policy NAME
        --moe-apply-probs-on-input --moe-upcycling-granularity N --moe-pad-experts-for-cuda-graph-inference
        --moe-token-dropping --moe-router-topk-limited-devices N --overlap-moe-expert-parallel-comm
        --delay-wgrad-compute"""
}

WARNED_BY_REASON: dict[str, str] = {
    "layers are PyTorch's: the same formulas, in other kernels' speed and rounding, and without fp8": """
        --transformer-impl local|NAME""",
    "checkpoints are raw files and a manifest, for any layout; Megatron reads none of them, and its own are not read": """
        --ckpt-format NAME --use-dist-ckpt --dist-ckpt-format NAME""",
    "only files of --data-impl mmap are read, and they are memory-mapped; tools/preprocess_data.py writes them": """
        --data-impl mmap|infer|NAME""",
}

_TASKS = "downstream tasks are not built yet: this script pretrains; leave it out"
_GENERATES = (
    "pretraining writes no text; tools/generate.py has --num-samples, --max-new-tokens, --temperature and --top-p"
)
_BERT = "there is pretrain_bert.py, but nothing that starts from a BERT or writes what it makes of texts; leave it out"

REFUSED_BY_REASON: dict[str, str] = {
    # ---- old names
    "was renamed; use --micro-batch-size": "--batch-size N",
    "was renamed; use --tensor-model-parallel-size": "--model-parallel-size N",
    "was renamed; use --lr-warmup-fraction": "--warmup X",
    "was renamed; use --recompute-granularity full --recompute-method": "--activations-checkpoint-method NAME",
    "was renamed; use --recompute-num-layers": "--activations-checkpoint-num-layers N",
    # ---- the model
    "mixtures of experts are not built yet; leave it out": """
        --num-experts 0|1|N --expert-tensor-parallel-size 1|N --moe-use-upcycling""",
    _BERT: "--output-bert-embeddings --bert-load DIR --ict-load DIR",
    "retrieval is not built yet; leave it out": "--retro-add-retriever --retro-project-dir DIR --ict-head-size N",
    "models of pictures are not built yet; leave it out": "--vision-pretraining --vision-pretraining-type NAME",
    "multi-latent attention is not built yet; use --group-query-attention": "--multi-latent-attention",
    "state-space models are not built yet; leave it out": """
        --hybrid-override-pattern TEXT --hybrid-attention-ratio 0|X --hybrid-mlp-ratio 0|X --is-hybrid-model""",
    "a model is chosen by its flags or written as model_provider, see docs/adding_a_model.md; leave it out": """
        --spec local|TEXT...""",
    "layers that differ from one another are not built yet; leave it out": """
        --heterogeneous-layers-config-path FILE --heterogeneous-layers-config-encoded-json TEXT""",
    "prediction of several tokens is not built yet; leave it out": "--mtp-num-layers 0|N",
    "is not built yet; leave it out, or use --position-embedding-type rope, with --rope-scaling for YaRN and others": """
        --rope-type rope|NAME""",
    "is not built yet; use --qk-layernorm": "--qk-l2-norm",
    "is not built yet; leave it out: initial weights are the same in every layout": "--data-parallel-random-init",
    "is set by --make-vocab-size-divisible-by and the tensor-parallel size; leave it out": "--padded-vocab-size N",
    # ---- training
    "would make Muon's update depend on the tensor-parallel size; leave it out: every matrix is orthogonalized whole": """
        --muon-tp-mode duplicated|distributed|NAME""",
    "the loss is taken in float32, whatever the model's precision; leave it out": "--fp16-lm-cross-entropy",
    "how a device sums products is PyTorch's choice; leave it out": "--disable-bf16-reduced-precision-matmul",
    # ---- what guards a run
    "is not built yet; leave it out: a wrong number is told in the log": "--result-rejected-tracker-filename FILE",
    "is not switched while a run goes; leave it out: --log-straggler measures from the start": """
        --disable-straggler-on-startup""",
    "is not measured; leave it out": "--log-energy",
    "one timeout holds for the whole run; use --distributed-timeout-minutes": """
        --distributed-timeout-seconds-after-init N""",
    "is not built yet; use --wandb-project, --tensorboard-dir or --metrics-file": """
        --one-logger-project TEXT --one-logger-run-name TEXT --app-tag-run-name TEXT --app-tag-run-version TEXT""",
    "is not written; leave it out: the start of the log and each checkpoint's manifest.json hold all settings": """
        --config-logger-dir DIR""",
    "is not written; leave it out: weight decay is for tensors of two dimensions or more": """
        --dump-param-to-param-group-map FILE""",
    "no server is started; leave it out, and see docs/watching.md": "--run-workload-inspector-server",
    "fp8 and fp4 are not built yet; use --bf16": """
        --fp8-format NAME --fp8-e4m3 --fp8-hybrid --fp4-format NAME --transformer-engine-precision-config FILE
        --te-precision-config-file FILE --kitchen-config-file FILE --kitchen-recipe-number N""",
    "CUDA graphs are not built yet; leave it out, the numbers are the same": """
        --enable-cuda-graph --external-cuda-graph --cuda-graph-impl none|NAME""",
    "moments and masters are always float32; leave it out (--reuse-fp32-param takes two bytes of a master away)": """
        --use-precision-aware-optimizer --main-params-dtype fp32|NAME --exp-avg-dtype fp32|NAME
        --exp-avg-sq-dtype fp32|NAME""",
    "is not built yet; leave it out: on a CPU a layout repeats its numbers, and --fixed-order-grad-reduce makes "
    "data-parallel layouts agree": "--deterministic-mode",
    "is not built yet; leave it out": """
        --enable-ft-package --calc-ft-timeouts --inprocess-restart --adlr-autoresume
        --test-mode --sft --perform-rl-step --lazy-mpu-init X --replication""",
    # ---- parallelism
    "there is one data-parallel wrapper; use --zero-stage 3 for parameters in shards": """
        --use-megatron-fsdp --use-custom-fsdp --use-torch-fsdp2""",
    "is not built yet; leave it out, the numbers are the same": """
        --overlap-param-gather-with-optimizer-step --microbatch-group-size-per-virtual-pipeline-stage N""",
    "is not built yet; use --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers, or the two "
    "--account-for-...-in-pipeline-split": "--pipeline-model-parallel-layout TEXT",
    "a decoder on ranks of its own is not built yet; leave it out": """
        --standalone-embedding-stage --encoder-tensor-model-parallel-size 0|N
        --encoder-pipeline-model-parallel-size 0|N""",
    # ---- data
    "every sample has --seq-length tokens; leave it out": "--variable-seq-lengths",
    "every sample is cut over all --context-parallel-size ranks alike; leave it out": """
        --hybrid-context-parallel --max-seqlen-per-dp-cp-rank N""",
    "a pad that is also a word of the text is never masked; leave it out": "--allow-ambiguous-pad-tokens",
    "the tokenizer is what --tokenizer-type and its files say; leave it out": "--tokenizer-metadata FILE",
    "data are read from local files; copy them, and give --data-path and --data-cache-path": """
        --s3-cache-path DIR --object-storage-cache-path DIR""",
    # ---- checkpoints
    "what is missing from a checkpoint, or too much in it, is always an error; leave it out": """
        --dist-ckpt-strictness raise_all|NAME --no-strict-fsdp-dtensor-load""",
    "other formats are not built yet; leave it out": """
        --ckpt-convert-format NAME --ckpt-convert-save DIR --dist-ckpt-save-pre-mcore-014""",
    # ---- scripts other than pretraining
    _TASKS: "--task NAME --train-data FILE... --valid-data FILE... --epochs N --strict-lambada",
    _GENERATES: "--out-seq-length N --num-samples N --genfile FILE --temperature X --top_p X --top_k N --greedy",
}

NO_EFFECT = parse_table(NO_EFFECT_BY_REASON)
SILENT = parse_table(SILENT_BY_REASON)
WARNED = parse_table(WARNED_BY_REASON)
REFUSED = parse_table(REFUSED_BY_REASON)
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

"""Bad input of every kind: what is given, on how many ranks, and what the refusal names, as said.py takes it.

tests/unit/project/test_refusals.py reads each line in one process that was told of others; tests/processes/test_refused_on_layouts.py refuses each in
jobs of real processes, over tensor and pipeline parallel ranks, and what is found only once there are processes.
"""

BASE = (
    "--num-layers 4 --hidden-size 48 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 10 --lr 1e-3 "
    "--device cpu"
)
MOCK = " --mock-data --tokenizer-type NullTokenizer --vocab-size 60 "
REAL = " --tokenizer-type NullTokenizer --vocab-size 60 "

# What is wrong: (ranks, flags after BASE, what the message names). {tmp} is a folder with a file "file" in it.
REFUSALS = {
    # ---- the line itself
    "unknown flag": (1, MOCK + "--num-layer 3", "--num-layer --num-layers"),
    "abbreviation": (1, MOCK + "--micro-batch 3", "--micro-batch --micro-batch-size"),
    "unlike anything": (1, MOCK + "--xyzzy", "--xyzzy --help"),
    "word without a flag": (1, MOCK + "--bf16 yes", "yes"),
    "not a number": (1, MOCK + "--lr fast", "--lr fast"),
    "not a whole number": (1, MOCK + "--train-iters 1e3", "--train-iters 1e3"),
    "infinite": (1, MOCK + "--lr inf", "--lr inf"),
    "no value": (1, MOCK + "--seed", "--seed"),
    "empty value": (1, MOCK + "--save ''", "--save"),
    "not a choice": (1, MOCK + "--normalization Batch", "--normalization Batch LayerNorm RMSNorm"),
    "renamed": (1, MOCK + "--batch-size 4", "--batch-size --micro-batch-size"),
    "not built": (1, MOCK + "--multi-latent-attention", "--multi-latent-attention --group-query-attention"),
    "experts of a rank": (
        2,
        MOCK + "--num-experts 3 --expert-model-parallel-size 2",
        "--num-experts (3) --expert-model-parallel-size (2)",
    ),
    "experts of a token": (1, MOCK + "--num-experts 4 --moe-router-topk 5", "--moe-router-topk 5 --num-experts 4"),
    "one expert": (1, MOCK + "--num-experts 4 --moe-router-topk 1", "--moe-router-topk 1 --moe-router-pre-softmax"),
    "sinkhorn": (
        1,
        MOCK + "--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1",
        "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1",
    ),
    "sinkhorn and a loss": (
        1,
        MOCK + "--num-experts 4 --moe-router-load-balancing-type sinkhorn aux_loss --moe-aux-loss-coeff 0 0",
        "--moe-router-load-balancing-type sinkhorn aux_loss",
    ),
    "sinkhorn with a capacity": (
        1,
        MOCK + "--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-expert-capacity-factor 1",
        "sinkhorn --moe-expert-capacity-factor",
    ),
    "sinkhorn with scores": (
        1,
        MOCK + "--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-router-score-function sigmoid",
        "sinkhorn --moe-router-score-function sigmoid",
    ),
    "quantile balancing": (
        1,
        MOCK + "--num-experts 4 --moe-router-load-balancing-type quantile_balancing",
        "--moe-router-load-balancing-type quantile_balancing aux_loss",
    ),
    "flex": (1, MOCK + "--num-experts 4 --moe-token-dispatcher-type flex", "flex --moe-token-dispatcher-type alltoall"),
    "padding without a capacity": (
        1,
        MOCK + "--num-experts 4 --moe-pad-expert-input-to-capacity",
        "--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor",
    ),
    "capacity of nothing": (
        1,
        MOCK + "--num-experts 4 --moe-expert-capacity-factor 0",
        "--moe-expert-capacity-factor 0",
    ),
    "experts recomputed within their layer": (
        1,
        MOCK + "--num-experts 4 --moe-layer-recompute --recompute-granularity full --recompute-method uniform",
        "--moe-layer-recompute --recompute-granularity full",
    ),
    "a layer of one expert": (
        1,
        MOCK + "--num-experts 1 --moe-ffn-hidden-size 8",
        "--num-experts 1 --moe-ffn-hidden-size 8 --ffn-hidden-size",
    ),
    "groups that are not numbered": (
        1,
        MOCK + "--num-experts 4 --moe-router-group-topk 1",
        "--moe-router-group-topk 1 --moe-router-num-groups",
    ),
    "limited devices": (
        1,
        MOCK + "--num-experts 4 --moe-router-topk-limited-devices 2",
        "--moe-router-topk-limited-devices 2 --moe-router-group-topk 2 --moe-router-num-groups",
    ),
    "router dtype": (1, MOCK + "--num-experts 4 --moe-router-dtype bf16", "--moe-router-dtype bf16 fp32 fp64"),
    "bias of a softmax": (
        1,
        MOCK + "--num-experts 4 --moe-router-enable-expert-bias",
        "--moe-router-enable-expert-bias --moe-router-score-function sigmoid",
    ),
    "groups of experts": (
        1,
        MOCK + "--num-experts 4 --moe-router-num-groups 3 --moe-router-group-topk 1",
        "--num-experts 4 --moe-router-num-groups 3",
    ),
    "width of an expert": (
        2,
        MOCK + "--num-experts 4 --moe-ffn-hidden-size 9 --tensor-model-parallel-size 2",
        "9 --moe-ffn-hidden-size --expert-tensor-parallel-size (2)",
    ),
    "layers with experts": (1, MOCK + "--num-experts 4 --moe-layer-freq [1,0]", "--moe-layer-freq 2 --num-layers 4"),
    "fixed order": (
        2,
        MOCK + "--num-experts 4 --expert-model-parallel-size 2 --fixed-order-grad-reduce",
        "--fixed-order-grad-reduce --expert-model-parallel-size 2",
    ),
    "expert parallel": (2, MOCK + "--expert-model-parallel-size 2", "--expert-model-parallel-size 2 1 --num-experts"),
    "expert ranks": (
        2,
        MOCK + "--expert-model-parallel-size 2 --expert-tensor-parallel-size 2",
        "4 expert-tensor-parallel-size (2) expert-model-parallel-size (2)",
    ),
    "experts in fixed order": (
        2,
        MOCK + "--expert-tensor-parallel-size 2 --fixed-order-grad-reduce",
        "--fixed-order-grad-reduce --expert-tensor-parallel-size 2",
    ),
    "flag of a T5": (1, MOCK + "--no-scale-decoder-outputs", "--no-scale-decoder-outputs pretrain_t5.py"),
    "chunks of a sequence": (
        2,
        MOCK + "--context-parallel-size 2 --seq-length 30",
        "--seq-length 30 4 --context-parallel-size 2",
    ),
    "heads of context-parallel ranks": (
        3,
        MOCK + "--context-parallel-size 3 --cp-comm-type a2a --seq-length 36",
        "--cp-comm-type a2a 4 --context-parallel-size 3 p2p all_gather",
    ),
    "a context-parallel communication for each layer": (
        1,
        MOCK + "--cp-comm-type p2p a2a a2a",
        "--cp-comm-type 3 --num-layers 4",
    ),
    "context-parallel communication": (1, MOCK + "--cp-comm-type ring", "--cp-comm-type ring p2p all_gather a2a"),
    "tiles without tokens": (1, MOCK + "--tiled-loss 33", "--tiled-loss 33 32"),
    "an MLP computed again twice": (
        1,
        MOCK + "--tiled-mlp 2 --recompute-granularity selective --recompute-modules mlp",
        "--tiled-mlp 2 --recompute-modules mlp",
    ),
    "a ring of groups": (
        4,
        MOCK + "--context-parallel-size 4 --cp-comm-type a2a+p2p",
        "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4",
    ),
    "sizes of groups": (
        4,
        MOCK + "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 3",
        "--hierarchical-context-parallel-sizes 2 3 --context-parallel-size 4",
    ),
    "contradiction": (
        1,
        MOCK + "--recompute-activations --checkpoint-activations",
        "--checkpoint-activations --recompute-granularity --recompute-activations",
    ),
    "samples without a number": (
        1,
        MOCK + "--iterations-to-skip 3 --dataloader-type external",
        "--iterations-to-skip --dataloader-type external",
    ),
    "dumps among checkpoints": (1, MOCK + "--save {tmp}/s --bad-step-dir {tmp}/s", "--bad-step-dir --save"),
    "dumps in a store": (1, MOCK + "--bad-step-dir memory://b/dumps", "--bad-step-dir memory://b/dumps"),
    "dumps among checkpoints of a URL": (
        1,
        MOCK + "--save file://{tmp}/s --bad-step-dir {tmp}/s",
        "--bad-step-dir --save",
    ),
    "folders of another form among checkpoints": (1, MOCK + "--save {tmp}/s --save-hf {tmp}/s", "--save-hf --save"),
    "an interval of no folder": (1, MOCK + "--save-hf-interval 2", "--save-hf-interval --save-hf"),
    "another form of what is not trained": (1, MOCK + "--save-hf {tmp}/s --skip-train", "--save-hf --skip-train"),
    "iteration 0": (1, MOCK + "--iterations-to-skip 0 3", "--iterations-to-skip 0 1"),
    "no check to act on": (
        1,
        MOCK + "--nan-action skip --no-check-for-nan-in-loss-and-grad",
        "--nan-action --no-check-for-nan-in-loss-and-grad",
    ),
    "no spike to act on": (1, MOCK + "--spike-action stop", "--spike-action stop --check-for-spiky-loss"),
    "settings file missing": (1, MOCK + "--yaml-cfg {tmp}/no.yaml", "--yaml-cfg {tmp}/no.yaml YAML"),
    # ---- one component
    "out of range": (1, MOCK + "--seed -1", "--seed -1 0 2^32"),
    "negative": (1, MOCK + "--weight-decay -1", "--weight-decay -1"),
    "dropout": (1, MOCK + "--hidden-dropout 1", "--hidden-dropout 1.0 0 1"),
    "no width": (1, MOCK + "--swiglu --hidden-size 20", "--swiglu --hidden-size 20 MLP 0 --ffn-hidden-size"),
    "local rank": (1, MOCK + "--local-rank -1", "--local-rank -1"),
    "loss scale": (1, MOCK + "--initial-loss-scale 3", "--initial-loss-scale 3.0"),
    "two precisions": (1, MOCK + "--bf16 --fp16", "--bf16 --fp16"),
    "narrow gradients of a wide model": (
        1,
        MOCK + "--main-grads-dtype bf16 --zero-stage 1",
        "--main-grads-dtype --bf16",
    ),
    "masters in halves of another kind": (1, MOCK + "--reuse-fp32-param --fp16", "--reuse-fp32-param --bf16 --fp16"),
    "masters in halves of float32": (1, MOCK + "--reuse-fp32-param", "--reuse-fp32-param --bf16 float32"),
    "masters in halves of float64": (1, MOCK + "--reuse-fp32-param --fp64", "--reuse-fp32-param --bf16 float64"),
    "parts of whole matrices": (
        1,
        MOCK + "--optimizer muon --zero-stage 2 --bf16 --reuse-fp32-param",
        "--optimizer muon --zero-stage 1 --reuse-fp32-param",
    ),
    "parts of matrices in files": (
        1,
        MOCK + "--optimizer muon --offload-dir {tmp}/o",
        "--optimizer muon --offload-dir",
    ),
    "matrices by blocks": (1, MOCK + "--optimizer muon --muon-tp-mode blockwise", "--muon-tp-mode tensor-parallel"),
    "Muon by Megatron's other name": (
        1,
        MOCK + "--optimizer dist_muon",
        "--optimizer dist_muon muon --use-distributed-optimizer ZeRO 1",
    ),
    "more steps than coefficients": (
        1,
        MOCK + "--optimizer muon --muon-coefficient-type aol",
        "--muon-num-ns-steps 5 --muon-coefficient-type aol 4",
    ),
    "matrices alone": (
        1,
        MOCK + "--optimizer muon --muon-scalar-optimizer muon",
        "--muon-scalar-optimizer muon adam sgd",
    ),
    "recomputed experts": (
        1,
        MOCK + "--recompute-granularity selective --recompute-modules mlp moe_act",
        "--recompute-modules moe_act --num-experts",
    ),
    "recomputed what": (
        1,
        MOCK + "--recompute-granularity selective --recompute-modules attn",
        "--recompute-modules attn core_attn mlp layernorm",
    ),
    "modules of whole layers": (
        1,
        MOCK + "--recompute-granularity full --recompute-method uniform --recompute-modules mlp",
        "--recompute-modules --recompute-granularity selective",
    ),
    "parts of nothing": (
        1,
        MOCK + "--distribute-saved-activations",
        "--distribute-saved-activations --recompute-granularity",
    ),
    "parts of what is whole": (
        1,
        MOCK + "--distribute-saved-activations --recompute-granularity full --recompute-method uniform",
        "--distribute-saved-activations --tensor-model-parallel-size",
    ),
    "parts of parts": (
        2,
        MOCK + "--distribute-saved-activations --recompute-granularity full --recompute-method uniform "
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--sequence-parallel",
    ),
    "slots for nothing": (1, MOCK + "--contiguous-checkpointing", "--contiguous-checkpointing --recompute-granularity"),
    "slots for what is offloaded": (
        1,
        MOCK
        + "--contiguous-checkpointing --recompute-granularity full --recompute-method block --recompute-num-layers 2 "
        "--cpu-offloading-num-layers 2",
        "--contiguous-checkpointing --cpu-offloading-num-layers 2",
    ),
    "offloaded layers": (1, MOCK + "--cpu-offloading-num-layers -1", "--cpu-offloading-num-layers -1"),
    "offloaded layers of a stage": (
        2,
        MOCK + "--cpu-offloading-num-layers 3 --pipeline-model-parallel-size 2",
        "--cpu-offloading-num-layers 3 2",
    ),
    "freed and moved": (
        1,
        MOCK + "--cpu-offloading-num-layers 1 --recompute-granularity selective --recompute-modules layernorm",
        "--recompute-modules --cpu-offloading-num-layers",
    ),
    "size of nothing": (
        1,
        MOCK + "--min-offloaded-tensor-size 5",
        "--min-offloaded-tensor-size --cpu-offloading-num-layers 0",
    ),
    "shards that are not there": (
        1,
        MOCK + "--offload-dir {tmp}/o --offload-params --zero-stage 2",
        "--offload-params 2 --zero-stage 3",
    ),
    "a part of nothing": (
        1,
        MOCK + "--optimizer-offload-fraction 0.5",
        "--optimizer-offload-fraction --offload-dir --optimizer-cpu-offload",
    ),
    "a middle that is not filled in": (1, REAL + "--data-path x --fim-rate 0.3", "--fim-rate --fim-data"),
    "two places": (1, MOCK + "--offload-dir {tmp}/o --optimizer-cpu-offload", "--offload-dir --optimizer-cpu-offload"),
    "offload below a file": (1, MOCK + "--offload-dir {tmp}/file/a", "--offload-dir {tmp}/file/a"),
    "hidden by heads": (1, MOCK + "--hidden-size 50", "--hidden-size 50 --num-attention-heads 4"),
    "query groups": (
        1,
        MOCK + "--group-query-attention --num-query-groups 3",
        "--num-attention-heads 4 --num-query-groups 3",
    ),
    "groups without a switch": (1, MOCK + "--num-query-groups 2", "--num-query-groups --group-query-attention"),
    "minimum rate": (1, MOCK + "--min-lr 1", "--min-lr 1.0 0 --lr 0.001"),
    "two warm-ups": (
        1,
        MOCK + "--lr-warmup-iters 2 --lr-warmup-fraction 0.1",
        "--lr-warmup-fraction --lr-warmup-iters",
    ),
    "recompute what": (
        1,
        MOCK + "--recompute-granularity selective --recompute-method block",
        "--recompute-method --recompute-granularity",
    ),
    "split": (1, REAL + "--data-path x --split 1e3,1", "--split 1e3,1 1e3 969,30,1"),
    "split of nan": (1, REAL + "--data-path x --split 1,nan,0", "--split 1,nan,0 nan"),
    "blend": (1, REAL + "--data-path 0.5 a 0 b", "--data-path 0.0"),
    "tokenizer without files": (
        1,
        " --mock-data --tokenizer-type GPT2BPETokenizer",
        "--tokenizer-type GPT2BPETokenizer --vocab-file --merge-file",
    ),
    # ---- several components, and the number of processes
    "world size": (3, MOCK + "--tensor-model-parallel-size 2", "3 2"),
    "heads by ranks": (
        3,
        MOCK + "--tensor-model-parallel-size 3",
        "--num-attention-heads 4 --tensor-model-parallel-size 3",
    ),
    "groups by ranks": (
        4,
        MOCK + "--num-attention-heads 12 --group-query-attention --num-query-groups 6 --tensor-model-parallel-size 4",
        "--num-query-groups 6 --tensor-model-parallel-size 4",
    ),
    "layers by stages": (3, MOCK + "--pipeline-model-parallel-size 3", "4 3 --num-layers"),
    "layers by chunks": (
        2,
        MOCK + "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
        "--num-layers 4 6 --num-layers-per-virtual-pipeline-stage 3",
    ),
    "chunks without a pipeline": (
        1,
        MOCK + "--num-virtual-stages-per-pipeline-rank 2",
        "--pipeline-model-parallel-size 2",
    ),
    "uneven stages": (
        2,
        MOCK + "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 5",
        "--decoder-first-pipeline-num-layers 5 -1 --num-layers 4",
    ),
    "microbatches by stages": (
        4,
        MOCK
        + "--pipeline-model-parallel-size 4 --num-layers 8 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 12",
        "interleaved 6 4 --global-batch-size",
    ),
    "V without a pipeline": (1, MOCK + "--pipeline-schedule zb-v", "zb-v 2 chunks --pipeline-model-parallel-size"),
    "V of four chunks": (
        2,
        MOCK
        + "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --num-virtual-stages-per-pipeline-rank 4 --num-layers 8",
        "zb-v 2 chunks 4 --num-virtual-stages-per-pipeline-rank --num-layers-per-virtual-pipeline-stage",
    ),
    "layers of a V": (
        2,
        MOCK + "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --num-layers 6",
        "6 4 --num-layers --pipeline-model-parallel-size",
    ),
    "microbatches by stages, split": (
        4,
        MOCK
        + "--pipeline-model-parallel-size 4 --num-layers 8 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 12 "
        + "--pipeline-schedule zb-interleaved",
        "zb-interleaved 6 4 zb-v --global-batch-size",
    ),
    "sequence by ranks": (
        4,
        MOCK + "--seq-length 30 --tensor-model-parallel-size 4 --sequence-parallel",
        "--seq-length 30 --tensor-model-parallel-size 4",
    ),
    "positions": (1, MOCK + "--max-position-embeddings 16", "--max-position-embeddings 16 --seq-length 32"),
    "batch": (4, MOCK + "--global-batch-size 12", "--global-batch-size 12 8 --micro-batch-size 2 4"),
    "recomputed layers": (
        2,
        MOCK
        + "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method block --recompute-num-layers 99",
        "--recompute-num-layers 99 2",
    ),
    "warm-up past the decay": (1, MOCK + "--lr-warmup-iters 10", "10 --lr-warmup-iters"),
    "a validation batch that does not divide": (
        2,
        MOCK + "--eval-global-batch-size 6",
        "--eval-global-batch-size 6 4 --micro-batch-size",
    ),
    "names of mismatches for a caller": (
        1,
        MOCK + "--dist-ckpt-strictness return_all --load {tmp}",
        "--dist-ckpt-strictness return_all log_all",
    ),
    "checkpoints kept of none": (1, MOCK + "--keep-checkpoints 2", "--keep-checkpoints --save"),
    "retained checkpoints of none": (1, MOCK + "--save-retain-interval 2", "--save-retain-interval --save"),
    "an iteration of no folder": (1, MOCK + "--ckpt-step 5", "--ckpt-step --load"),
    "weights from nowhere": (1, MOCK + "--finetune", "--finetune --load DIR"),
    "missing where": (1, MOCK + "--exit-on-missing-checkpoint", "--exit-on-missing-checkpoint --load"),
    "nothing to do": (1, MOCK + "--skip-train --eval-iters 0", "--skip-train --eval-iters 0"),
    "data twice": (1, MOCK + "--data-path x", "--data-path --mock-data"),
    "no data": (1, REAL, "--data-path PREFIX --mock-data"),
    # ---- files and devices
    "data file": (1, REAL + "--data-path {tmp}/no", "--data-path {tmp}/no {tmp}/no.idx"),
    "vocabulary": (
        1,
        " --mock-data --tokenizer-type GPT2BPETokenizer --vocab-file {tmp}/v.json --merge-file {tmp}/m.txt",
        "--vocab-file {tmp}/v.json",
    ),
    "tokenizer file": (
        1,
        " --mock-data --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp}/file",
        "{tmp}/file tokenizer.json",
    ),
    "save into a file": (1, MOCK + "--save {tmp}/file", "--save {tmp}/file"),
    "save below a file": (1, MOCK + "--save {tmp}/file/a/b", "--save {tmp}/file/a/b {tmp}/file"),
    "load a file": (1, MOCK + "--load {tmp}/file", "--load {tmp}/file"),
    "device": (1, MOCK + "--device xpu", "--device xpu cpu"),
}

# Likewise, for pretrain_bert.py; several mistakes are said together.
BERT_REFUSALS = {
    "order of its own": (1, MOCK + "--reset-position-ids", "--reset-position-ids BERT"),
    "documents apart": (2, MOCK + "--reset-attention-mask", "--reset-attention-mask BERT"),
    "end of a document": (1, MOCK + "--eod-mask-loss", "--eod-mask-loss BERT"),
    "middle of nothing": (1, MOCK + "--fim-data --vocab-size 60", "--fim-data --mock-data"),
    "no room": (2, MOCK + "--seq-length 4", "--seq-length 4 5 3"),
    "no word to hide": (1, MOCK + "--seq-length 9", "--mask-prob 0.15 --seq-length 9 3"),
    "few words": (1, MOCK + "--vocab-size 9", "10 16"),
    "another tokenizer": (
        2,
        REAL + "--data-path {tmp}/no --seq-length 4 --global-batch-size 3",
        "--global-batch-size 3 --data-path {tmp}/no --seq-length 4 CLS SEP MASK PAD BertWordPieceCase",
    ),
}

T5 = MOCK + "--decoder-seq-length 16 "
T5_REFUSALS = {
    "order of its own": (1, T5 + "--reset-position-ids", "--reset-position-ids T5"),
    "no length": (1, MOCK, "--decoder-seq-length"),
    "too short": (1, MOCK + "--decoder-seq-length 5 --seq-length 32", "--decoder-seq-length 5 --mask-prob 0.15 32 4 9"),
    "no text": (1, T5 + "--seq-length 3", "--seq-length 3 4 2"),
    "few words": (1, T5 + "--vocab-size 9", "10 4 20"),
    "gpt's": (
        1,
        T5 + "--context-parallel-size 1 --window-size 4,0 --compile regions",
        "--window-size --compile regions",
    ),
    "rotation": (1, T5 + "--position-embedding-type rope", "--position-embedding-type rope"),
    "places of norms": (1, T5 + "--norm-placement post", "--norm-placement post"),
    "shared keys": (1, T5 + "--group-query-attention --num-query-groups 2", "--group-query-attention"),
    "norms of heads": (1, T5 + "--qk-layernorm", "--qk-layernorm"),
    "caps and sinks": (
        1,
        T5 + "--attn-logit-softcapping 3 --softmax-type learnable",
        "--attn-logit-softcapping --softmax-type learnable",
    ),
    "buckets": (1, T5 + "--relative-attention-num-buckets 6", "--relative-attention-num-buckets 6 4"),
    "far": (
        1,
        T5 + "--relative-attention-max-distance 16",
        "--relative-attention-max-distance 16 --relative-attention-num-buckets",
    ),
    "no rank to split at": (
        1,
        T5 + "--pipeline-model-parallel-split-rank 1",
        "--pipeline-model-parallel-split-rank 1 1",
    ),
    "uneven stacks": (
        4,
        T5 + "--pipeline-model-parallel-split-rank 3 --pipeline-model-parallel-size 4",
        "--pipeline-model-parallel-split-rank 3 4 encoder",
    ),
    "another tokenizer": (
        1,
        REAL + "--decoder-seq-length 16 --data-path {tmp}/no",
        "--data-path {tmp}/no sentinels BertWordPieceCase",
    ),
}
_SPLIT = "--pipeline-model-parallel-split-rank 1 --pipeline-model-parallel-size 2 "
# Flags that cannot stand together in a T5: (ranks, flags, what the message names). docs/t5_matrix.md has the messages.
T5_APART = {
    "a split, and virtual stages": (
        2,
        _SPLIT + "--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 4",
        "--pipeline-model-parallel-split-rank 1 2",
    ),
    "a split, and ZB-V": (2, _SPLIT + "--pipeline-schedule zb-v", "--pipeline-model-parallel-split-rank 1 2"),
    "a split, and uneven stages": (
        2,
        _SPLIT + "--decoder-first-pipeline-num-layers 2 --account-for-loss-in-pipeline-split",
        "--pipeline-model-parallel-split-rank 1 --decoder-first-pipeline-num-layers --account-for-loss-in-pipeline-split",
    ),
    "zero bubble, and one stage": (1, "--pipeline-schedule zb-v", "zb-v 2 chunks --pipeline-model-parallel-size"),
    "sequence parallelism, and a decoder's text that it does not divide": (
        2,
        "--decoder-seq-length 15 --tensor-model-parallel-size 2 --sequence-parallel",
        "--sequence-parallel --decoder-seq-length 15 --tensor-model-parallel-size 2",
    ),
    "context parallelism, and a decoder's text that it does not divide": (
        4,
        "--context-parallel-size 4 --decoder-seq-length 12",
        "--decoder-seq-length 12 8 --context-parallel-size 4",
    ),
    "a2a, and tensor parallelism that leaves fewer heads": (
        8,
        "--context-parallel-size 2 --cp-comm-type a2a --tensor-model-parallel-size 4",
        "--cp-comm-type a2a --context-parallel-size 2 p2p",
    ),
    "tiles, and too few tokens": (1, "--tiled-loss 17", "--tiled-loss 17 16"),
    "tiles, and an MLP computed again": (
        1,
        "--tiled-mlp 2 --recompute-granularity selective --recompute-modules mlp",
        "--tiled-mlp 2 --recompute-modules mlp",
    ),
    "offloaded activations, and norms computed again": (
        1,
        "--cpu-offloading-num-layers 1 --recompute-granularity selective --recompute-modules layernorm",
        "--recompute-modules layernorm --cpu-offloading-num-layers",
    ),
    "Muon, and ZeRO 2 or 3": (2, "--optimizer muon --zero-stage 2", "--optimizer muon 2 --zero-stage 1"),
    "Muon, and offload": (
        2,
        "--optimizer muon --zero-stage 1 --optimizer-cpu-offload",
        "--optimizer muon --optimizer-cpu-offload",
    ),
    "sums in a fixed order, and ZeRO 2 or 3": (
        2,
        "--fixed-order-grad-reduce --zero-stage 2",
        "--fixed-order-grad-reduce 0 1",
    ),
    "sums in a fixed order, and overlap": (
        2,
        "--fixed-order-grad-reduce --overlap-grad-reduce",
        "--fixed-order-grad-reduce --overlap-grad-reduce",
    ),
    "parameters offloaded, and no shards of them": (
        2,
        "--zero-stage 2 --optimizer-cpu-offload --offload-params",
        "--offload-params 2 --zero-stage 3",
    ),
}
T5_REFUSALS |= {f"together: {what}": (ranks, T5 + flags, said) for what, (ranks, flags, said) in T5_APART.items()}
# Flags of two stacks, for a model that has one.
ONE_STACK = "--decoder-num-layers 2 --decoder-seq-length 9 --pipeline-model-parallel-split-rank 1 --position-embedding-type relative"

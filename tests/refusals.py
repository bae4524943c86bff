"""Bad input of every kind: what is given, on how many ranks, and what the refusal says.

tests/pure/test_refusals.py reads each line in one process that was told of others; tests/gloo/test_refused_on_layouts.py refuses each in
jobs of real processes, over tensor and pipeline parallel ranks, and what is found only once there are processes.
"""

BASE = (
    "--num-layers 4 --hidden-size 48 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 10 --lr 1e-3 "
    "--device cpu"
)
MOCK = " --mock-data --tokenizer-type NullTokenizer --vocab-size 60 "
REAL = " --tokenizer-type NullTokenizer --vocab-size 60 "

# What is wrong: (ranks, flags after BASE, what the message says). {tmp} is a folder with a file "file" in it.
REFUSALS = {
    # ---- the line itself
    "unknown flag": (1, MOCK + "--num-layer 3", ["unknown flag --num-layer", "did you mean --num-layers?"]),
    "abbreviation": (1, MOCK + "--micro-batch 3", ["unknown flag --micro-batch", "--micro-batch-size"]),
    "unlike anything": (1, MOCK + "--xyzzy", ["unknown flag --xyzzy", "--help"]),
    "word without a flag": (1, MOCK + "--bf16 yes", ["yes does not belong to any flag"]),
    "not a number": (1, MOCK + "--lr fast", ["--lr", "'fast' is not a number"]),
    "not a whole number": (1, MOCK + "--train-iters 1e3", ["--train-iters", "'1e3' is not a whole number"]),
    "infinite": (1, MOCK + "--lr inf", ["--lr", "inf is not a finite number"]),
    "no value": (1, MOCK + "--seed", ["--seed", "expected one argument"]),
    "empty value": (1, MOCK + "--save ''", ["--save", "the value is empty", "leave the flag out"]),
    "not a choice": (1, MOCK + "--normalization Batch", ["--normalization", "'Batch'", "LayerNorm, RMSNorm"]),
    "renamed": (1, MOCK + "--batch-size 4", ["--batch-size: was renamed", "use --micro-batch-size"]),
    "not built": (
        1,
        MOCK + "--use-megatron-fsdp",
        ["--use-megatron-fsdp: there is one data-parallel wrapper", "use --zero-stage 3"],
    ),
    "experts": (1, MOCK + "--num-experts 8", ["--num-experts: mixtures of experts are not built yet", "leave it out"]),
    "context parallel": (2, MOCK + "--context-parallel-size 2", ["--context-parallel-size is 2", "use 1"]),
    "contradiction": (
        1,
        MOCK + "--recompute-activations --checkpoint-activations",
        ["--checkpoint-activations stands for --recompute-granularity full", "--recompute-activations", "give one"],
    ),
    "settings file missing": (1, MOCK + "--yaml-cfg {tmp}/no.yaml", ["--yaml-cfg {tmp}/no.yaml", "name a YAML file"]),
    # ---- one component
    "out of range": (1, MOCK + "--seed -1", ["--seed is -1", "[0, 2^32)"]),
    "negative": (1, MOCK + "--weight-decay -1", ["--weight-decay is -1", "not be negative"]),
    "dropout": (1, MOCK + "--hidden-dropout 1", ["--hidden-dropout is 1.0", "[0, 1)"]),
    "no width": (
        1,
        MOCK + "--swiglu --hidden-size 20",
        ["--swiglu and --hidden-size 20 make an MLP of width 0", "give --ffn-hidden-size"],
    ),
    "local rank": (1, MOCK + "--local-rank -1", ["--local-rank is -1", "must not be negative"]),
    "loss scale": (1, MOCK + "--initial-loss-scale 3", ["--initial-loss-scale is 3.0", "power of two"]),
    "two precisions": (1, MOCK + "--bf16 --fp16", ["--bf16 and --fp16 exclude each other", "give one"]),
    "narrow gradients of a wide model": (
        1,
        MOCK + "--main-grads-dtype bf16 --zero-stage 1",
        ["--main-grads-dtype bf16 is for models of --bf16", "leave it out"],
    ),
    "masters in halves of another kind": (
        1,
        MOCK + "--reuse-fp32-param --fp16",
        ["--reuse-fp32-param is for models of --bf16", "--fp16, whose", "leave it out"],
    ),
    "masters in halves of float32": (
        1,
        MOCK + "--reuse-fp32-param",
        ["--reuse-fp32-param is for models of --bf16", "whose weights are the masters", "leave it out"],
    ),
    "recomputed experts": (
        1,
        MOCK + "--recompute-granularity selective --recompute-modules mlp moe_act",
        [
            "--recompute-modules moe_act: there is no mixture of experts (--num-experts) to compute again",
            "leave it out",
        ],
    ),
    "recomputed what": (
        1,
        MOCK + "--recompute-granularity selective --recompute-modules attn",
        ["--recompute-modules attn is not one of core_attn, mlp, layernorm"],
    ),
    "modules of whole layers": (
        1,
        MOCK + "--recompute-granularity full --recompute-method uniform --recompute-modules mlp",
        ["--recompute-modules needs --recompute-granularity selective"],
    ),
    "parts of nothing": (
        1,
        MOCK + "--distribute-saved-activations",
        ["inputs that --recompute-granularity full keeps"],
    ),
    "parts of what is whole": (
        1,
        MOCK + "--distribute-saved-activations --recompute-granularity full --recompute-method uniform",
        [
            "--distribute-saved-activations divides what tensor-parallel ranks hold copies of",
            "use --tensor-model-parallel-size",
        ],
    ),
    "parts of parts": (
        2,
        MOCK + "--distribute-saved-activations --recompute-granularity full --recompute-method uniform "
        "--tensor-model-parallel-size 2 --sequence-parallel",
        ["leave it out with --sequence-parallel, where they hold parts"],
    ),
    "slots for nothing": (1, MOCK + "--contiguous-checkpointing", ["inputs that --recompute-granularity full keeps"]),
    "slots for what is offloaded": (
        1,
        MOCK
        + "--contiguous-checkpointing --recompute-granularity full --recompute-method block --recompute-num-layers 2 "
        "--cpu-offloading-num-layers 2",
        ["--contiguous-checkpointing is left with nothing by --cpu-offloading-num-layers 2", "offload fewer layers"],
    ),
    "offloaded layers": (
        1,
        MOCK + "--cpu-offloading-num-layers -1",
        ["--cpu-offloading-num-layers is -1", "not be negative"],
    ),
    "offloaded layers of a stage": (
        2,
        MOCK + "--cpu-offloading-num-layers 3 --pipeline-model-parallel-size 2",
        ["--cpu-offloading-num-layers is 3; it must be at most 2, the layers of the largest stage"],
    ),
    "freed and moved": (
        1,
        MOCK + "--cpu-offloading-num-layers 1 --recompute-granularity selective --recompute-modules layernorm",
        ["--recompute-modules layernorm frees what --cpu-offloading-num-layers would move", "leave one of them out"],
    ),
    "size of nothing": (
        1,
        MOCK + "--min-offloaded-tensor-size 5",
        ["--min-offloaded-tensor-size", "--cpu-offloading-num-layers moves, which is 0"],
    ),
    "shards that are not there": (
        1,
        MOCK + "--offload-dir {tmp}/o --offload-params --zero-stage 2",
        ["--offload-params keeps shards of parameters", "stage 2", "give --zero-stage 3"],
    ),
    "a part of nothing": (
        1,
        MOCK + "--optimizer-offload-fraction 0.5",
        ["--optimizer-offload-fraction needs --offload-dir DIR or --opt"],
    ),
    "a middle that is not filled in": (
        1,
        REAL + "--data-path x --fim-rate 0.3",
        ["--fim-rate is about", "--fim-data rearranges; give it too"],
    ),
    "two places": (
        1,
        MOCK + "--offload-dir {tmp}/o --optimizer-cpu-offload",
        ["--offload-dir exclude each other", "give one"],
    ),
    "offload below a file": (
        1,
        MOCK + "--offload-dir {tmp}/file/a",
        ["--offload-dir {tmp}/file/a", "is a file", "another folder"],
    ),
    "hidden by heads": (1, MOCK + "--hidden-size 50", ["--hidden-size 50", "--num-attention-heads 4", "change one"]),
    "query groups": (
        1,
        MOCK + "--group-query-attention --num-query-groups 3",
        ["--num-attention-heads 4", "--num-query-groups 3", "change one"],
    ),
    "groups without a switch": (1, MOCK + "--num-query-groups 2", ["--num-query-groups needs --group-query-attention"]),
    "minimum rate": (1, MOCK + "--min-lr 1", ["--min-lr is 1.0", "between 0 and --lr (0.001)"]),
    "two warm-ups": (
        1,
        MOCK + "--lr-warmup-iters 2 --lr-warmup-fraction 0.1",
        ["--lr-warmup-fraction and --lr-warmup-iters exclude each other", "give one"],
    ),
    "recompute what": (
        1,
        MOCK + "--recompute-method block",
        ["--recompute-method", "need --recompute-granularity full"],
    ),
    "split": (1, REAL + "--data-path x --split 1e3,1", ["--split 1e3,1", "'1e3' is not a number", "969,30,1"]),
    "split of nan": (1, REAL + "--data-path x --split 1,nan,0", ["--split 1,nan,0", "'nan' is not a number"]),
    "blend": (1, REAL + "--data-path 0.5 a 0 b", ["--data-path: weight 0.0 of b must be a positive number"]),
    "tokenizer without files": (
        1,
        " --mock-data --tokenizer-type GPT2BPETokenizer",
        [
            "--tokenizer-type GPT2BPETokenizer needs --vocab-file",
            "--tokenizer-type GPT2BPETokenizer needs --merge-file",
        ],
    ),
    # ---- several components, and the number of processes
    "world size": (
        3,
        MOCK + "--tensor-model-parallel-size 2",
        ["world size 3 is not a multiple of 2", "tensor-model-parallel-size (2)", "another number of processes"],
    ),
    "heads by ranks": (
        3,
        MOCK + "--tensor-model-parallel-size 3",
        ["--num-attention-heads (4) must be a multiple of --tensor-model-parallel-size (3)"],
    ),
    "groups by ranks": (
        4,
        MOCK + "--num-attention-heads 12 --group-query-attention --num-query-groups 6 --tensor-model-parallel-size 4",
        ["--num-query-groups (6)", "--tensor-model-parallel-size (4)", "change one"],
    ),
    "layers by stages": (
        3,
        MOCK + "--pipeline-model-parallel-size 3",
        ["the number of layers (4) must be a multiple of the number of stages (3", "change --num-layers"],
    ),
    "layers by chunks": (
        2,
        MOCK + "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
        ["--num-layers (4) must be a multiple of 6", "--num-layers-per-virtual-pipeline-stage (3)"],
    ),
    "chunks without a pipeline": (
        1,
        MOCK + "--num-virtual-stages-per-pipeline-rank 2",
        ["several chunks per rank need a pipeline", "--pipeline-model-parallel-size to 2 or more"],
    ),
    "uneven stages": (
        2,
        MOCK + "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 5",
        ["--decoder-first-pipeline-num-layers (5) leaves -1 of --num-layers (4)", "change one"],
    ),
    "microbatches by stages": (
        4,
        MOCK
        + "--pipeline-model-parallel-size 4 --num-layers 8 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 12",
        ["interleaved", "6", "multiple", "4", "--global-batch-size"],
    ),
    "sequence by ranks": (
        4,
        MOCK + "--seq-length 30 --tensor-model-parallel-size 4 --sequence-parallel",
        ["--seq-length (30)", "--tensor-model-parallel-size (4)", "change one"],
    ),
    "positions": (
        1,
        MOCK + "--max-position-embeddings 16",
        ["--max-position-embeddings (16) must be at least --seq-length (32)"],
    ),
    "batch": (
        4,
        MOCK + "--global-batch-size 12",
        ["--global-batch-size (12) must be a multiple of 8", "--micro-batch-size (2) x data-parallel size (4)"],
    ),
    "recomputed layers": (
        2,
        MOCK
        + "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method block --recompute-num-layers 99",
        ["--recompute-num-layers is 99", "at most 2"],
    ),
    "warm-up past the decay": (
        1,
        MOCK + "--lr-warmup-iters 10",
        ["warm-up (10 iterations)", "(10)", "lower --lr-warmup-iters"],
    ),
    "save interval without a folder": (1, MOCK + "--save-interval 5", ["--save-interval needs --save"]),
    "weights from nowhere": (
        1,
        MOCK + "--finetune",
        ["--finetune needs weights to load: give --load DIR", "initial weights"],
    ),
    "missing where": (1, MOCK + "--exit-on-missing-checkpoint", ["--exit-on-missing-checkpoint needs --load"]),
    "nothing to do": (
        1,
        MOCK + "--skip-train --eval-iters 0",
        ["--skip-train with --eval-iters 0 leaves nothing to do", "raise --eval-iters"],
    ),
    "data twice": (1, MOCK + "--data-path x", ["--data-path and --mock-data exclude each other", "give one"]),
    "no data": (1, REAL, ["no data", "--data-path PREFIX", "--mock-data"]),
    # ---- files and devices
    "data file": (1, REAL + "--data-path {tmp}/no", ["--data-path {tmp}/no", "{tmp}/no.idx does not exist", "prefix"]),
    "vocabulary": (
        1,
        " --mock-data --tokenizer-type GPT2BPETokenizer --vocab-file {tmp}/v.json --merge-file {tmp}/m.txt",
        ["--vocab-file {tmp}/v.json", "no such file"],
    ),
    "tokenizer file": (
        1,
        " --mock-data --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp}/file",
        ["{tmp}/file is no tokenizer.json"],
    ),
    "save into a file": (
        1,
        MOCK + "--save {tmp}/file",
        ["--save {tmp}/file cannot be written", "is a file", "another folder"],
    ),
    "save below a file": (
        1,
        MOCK + "--save {tmp}/file/a/b",
        ["--save {tmp}/file/a/b", "{tmp}/file is a file", "another folder"],
    ),
    "load a file": (1, MOCK + "--load {tmp}/file", ["--load {tmp}/file is a file", "folder"]),
    "device": (1, MOCK + "--device xpu", ["--device xpu is not available", "--device cpu"]),
}

# Likewise, for pretrain_bert.py; several mistakes are said together.
BERT_REFUSALS = {
    "order of its own": (
        1,
        MOCK + "--reset-position-ids",
        ["--reset-position-ids has no meaning for BERT", "leave it out"],
    ),
    "documents apart": (
        2,
        MOCK + "--reset-attention-mask",
        ["--reset-attention-mask has no meaning for BERT", "leave it out"],
    ),
    "end of a document": (1, MOCK + "--eod-mask-loss", ["--eod-mask-loss has no meaning for BERT", "leave it out"]),
    "middle of nothing": (
        1,
        MOCK + "--fim-data --vocab-size 60",
        ["--fim-data rearranges", "--mock-data", "has masked words instead"],
    ),
    "no room": (2, MOCK + "--seq-length 4", ["--seq-length (4) must be at least 5: 3 tokens of a sample are not text"]),
    "no word to hide": (
        1,
        MOCK + "--seq-length 9",
        ["--mask-prob (0.15) of --seq-length (9) - 3 tokens is less than one word", "raise"],
    ),
    "few words": (1, MOCK + "--vocab-size 9", ["a vocabulary of 10 is too small for made-up data; give at least 16"]),
    "another tokenizer": (
        2,
        REAL + "--data-path {tmp}/no --seq-length 4 --global-batch-size 3",
        [
            "--global-batch-size (3)",
            "--data-path {tmp}/no",
            "--seq-length (4)",
            "has no [CLS], [SEP], [MASK] or [PAD]",
            "BertWordPieceCase",
        ],
    ),
}

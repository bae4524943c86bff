#!/usr/bin/env bash
# From nothing to a trained GPT on a laptop: installs, makes data, trains over 4 processes, stops, resumes, samples.
#
#   bash examples/quickstart.sh
#
# Needs Python 3.11 or newer with pip, and bash; no GPU. Everything is written below runs/quickstart. Run again, it keeps the
# data it has prepared and trains anew: the checkpoints, log and picture of the run before are removed first.
#
# From the environment:
#   TRAIN_ITERS  steps of the whole run (300); it stops in the middle and resumes from its checkpoint
#   VOCAB_SIZE   of the tokenizer (2048)
#   MAX_MB       of text (32, which is more than the standard library has)
#   DEVICE       cpu, or cuda where there are four GPUs (cpu)
#   PROMPT       that the sample continues ("def ")
#   VENV PYTHON  see examples/setup_env.sh
set -euo pipefail

# --help prints the lines above, before anything is made.
case " $* " in *" --help "* | *" -h "*)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit ;;
esac

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/.venv}
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac
TRAIN_ITERS=${TRAIN_ITERS:-300}
VOCAB_SIZE=${VOCAB_SIZE:-2048}
MAX_MB=${MAX_MB:-32}
DEVICE=${DEVICE:-cpu}
PROMPT=${PROMPT:-"def "}

if [ $# -gt 0 ]; then
    echo "quickstart: it takes no arguments, and was given: $*; --help says what it takes from the environment" >&2
    exit 2
fi
if ! [ "$TRAIN_ITERS" -ge 4 ] 2>/dev/null; then
    echo "quickstart: TRAIN_ITERS ($TRAIN_ITERS) must be a number from 4 up: the run is divided into quarters" >&2
    exit 2
fi

say() { printf '\n== %s\n' "$*"; }

say "1/7 Python environment"
VENV=$VENV bash "$ROOT/examples/setup_env.sh"
python() { "$VENV/bin/python" "$@"; }
cd "$ROOT"
install_seconds=$SECONDS

RUN=runs/quickstart
CORPUS=$RUN/stdlib-${MAX_MB}mb.jsonl
TOKENIZER=$RUN/tokenizer-${MAX_MB}mb-$VOCAB_SIZE.json
TOKENS=$RUN/stdlib-${MAX_MB}mb-$VOCAB_SIZE
CHECKPOINTS=$RUN/checkpoints
LOG=$RUN/train.log
mkdir -p "$RUN"

say "2/7 corpus: the source text of Python's standard library"
if [ -e "$CORPUS" ]; then echo "kept $CORPUS"; else
    python tools/stdlib_corpus.py --output "$CORPUS" --max-mb "$MAX_MB"
fi

say "3/7 tokenizer: byte-level BPE with $VOCAB_SIZE ids"
if [ -e "$TOKENIZER" ]; then echo "kept $TOKENIZER"; else
    python tools/train_tokenizer.py --input "$CORPUS" --vocab-size "$VOCAB_SIZE" --output "$TOKENIZER"
fi

TOKENIZER_ARGS=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")

say "4/7 token files: text to ids"
if [ -e "${TOKENS}_text_document.idx" ]; then echo "kept ${TOKENS}_text_document.bin and .idx"; else  # .idx appears last
    python tools/preprocess_data.py --input "$CORPUS" --output-prefix "$TOKENS" --append-eod --workers 2 \
        "${TOKENIZER_ARGS[@]}"
fi

GPT_ARGS=(
    --num-layers 4
    --hidden-size 128
    --num-attention-heads 4
    --seq-length 128
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --hidden-dropout 0
    --attention-dropout 0
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --sequence-parallel
    --device "$DEVICE"
)
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 16
    --train-iters "$TRAIN_ITERS"
    --lr 4e-3
    --min-lr 4e-4
    --lr-decay-style cosine
    --lr-warmup-iters $((TRAIN_ITERS / 20))
    --weight-decay 0.1
    --adam-beta2 0.95
)
DATA_ARGS=(
    --data-path "${TOKENS}_text_document"
    --split 95,5,0
    "${TOKENIZER_ARGS[@]}"
)
OUTPUT_ARGS=(
    --log-interval 10
    --eval-interval $((TRAIN_ITERS / 4))
    --eval-iters 10
    --save "$CHECKPOINTS"
)

# 4 processes; one thread each, since they share the cores of one machine.
train() {
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} python -m torch.distributed.run --standalone --nproc-per-node 4 \
        pretrain_gpt.py "${GPT_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" \
        "$@" 2>&1 | tee -a "$LOG"
}

HALF=$((TRAIN_ITERS / 2))
[ ! -e "$CHECKPOINTS" ] || echo "removing the checkpoints, log and picture of the run before from $RUN"
rm -rf "$CHECKPOINTS" "$LOG" "$RUN/loss.png"

say "5/7 training: TP 2 x PP 2 with sequence parallelism, to iteration $HALF of $TRAIN_ITERS"
train --exit-interval "$HALF"

say "6/7 resuming from the checkpoint of iteration $HALF"
train --load "$CHECKPOINTS"

say "7/7 loss curve and sample"
python tools/plot_run.py --log "$LOG" --output "$RUN/loss.png"
echo "sample (after so short a training: Python by its looks, not by its sense):"
python tools/generate.py --load "$CHECKPOINTS" --prompt "$PROMPT" --max-new-tokens 100 --temperature 0.8 --top-k 40 --seed 1

say "done in $((SECONDS - install_seconds)) s, after $install_seconds s for the Python environment; see $RUN/"

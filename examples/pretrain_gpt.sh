#!/usr/bin/env bash
# Pretrains a GPT in one process: on a GPU if there is one, else on the CPU.
#
#   bash examples/pretrain_gpt.sh                       made-up data and a tiny model, to see that it runs
#   DATA_PATH=data/books_text_document TOKENIZER_MODEL=tokenizer.json bash examples/pretrain_gpt.sh
#   bash examples/pretrain_gpt.sh --train-iters 1000    further flags come last, so they win
#
# From the environment:
#   DATA_PATH         prefix of .bin and .idx, as tools/preprocess_data.py writes them; unset: made-up data
#   TOKENIZER_MODEL   the tokenizer.json that made them
#   CHECKPOINT_PATH   where to save, and where to go on from (checkpoints/pretrain_gpt)
#   VENV              the virtual environment of examples/setup_env.sh (.venv in the repository)
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${VENV:-$ROOT/.venv}/bin/python
CHECKPOINT_PATH=${CHECKPOINT_PATH:-$ROOT/checkpoints/pretrain_gpt}
if ! [ -x "$PYTHON" ]; then
    echo "pretrain_gpt: there is no $PYTHON; run 'bash examples/setup_env.sh' first, or say where the environment is: VENV=..." >&2
    exit 1
fi

GPT_ARGS=(
    --num-layers 4
    --hidden-size 128
    --num-attention-heads 4
    --seq-length 128
    --max-position-embeddings 128
    --micro-batch-size 4
    --global-batch-size 8
    --lr 1e-3
    --min-lr 1e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --train-iters 100
    --weight-decay 0.01
    --clip-grad 1.0
)

if [ -n "${DATA_PATH:-}" ]; then
    DATA_ARGS=(
        --data-path "$DATA_PATH"
        --split 949,50,1
        --tokenizer-type HuggingFaceTokenizer
        --tokenizer-model "${TOKENIZER_MODEL:?DATA_PATH is set; TOKENIZER_MODEL must name the tokenizer.json that made it}"
    )
else
    DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer --vocab-size 1000)
fi

OUTPUT_ARGS=(
    --log-interval 10
    --eval-interval 50
    --eval-iters 5
    --save-interval 50
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
)

exec "$PYTHON" "$ROOT/pretrain_gpt.py" "${GPT_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@"

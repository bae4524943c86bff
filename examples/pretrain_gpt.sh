#!/usr/bin/env bash
# Pretrains a GPT in one process: on a GPU if there is one, else on the CPU.
#
#   bash examples/pretrain_gpt.sh                       made-up data and a tiny model, to see that it runs
#   DATA_PATH=data/books_text_document TOKENIZER_MODEL=tokenizer.json bash examples/pretrain_gpt.sh
#   bash examples/pretrain_gpt.sh --train-iters 1000    further flags come last, so they win
#
# examples/arguments.sh lists what it takes from the environment.
set -euo pipefail

RUN_NAME=pretrain_gpt
DEVICE=${DEVICE:-auto}
source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"
training_args 2

exec "$PYTHON" "$ROOT/pretrain_gpt.py" \
    "${GPT_MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@"

#!/usr/bin/env bash
# Pretrains a BERT in one process: on a GPU if there is one, else on the CPU.
#
#   bash examples/pretrain_bert.sh                       made-up data and a tiny model, to see that it runs
#   DATA_PATH=data/docs_text_sentence VOCAB_FILE=vocab.txt bash examples/pretrain_bert.sh
#   bash examples/pretrain_bert.sh --train-iters 1000    further flags come last, so they win
#
# docs/bert.md makes such data. examples/arguments.sh lists what it takes from the environment.
set -euo pipefail

RUN_NAME=pretrain_bert
DEVICE=${DEVICE:-auto}
source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"
training_args 2

exec "$PYTHON" "$ROOT/pretrain_bert.py" \
    "${BERT_MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@"

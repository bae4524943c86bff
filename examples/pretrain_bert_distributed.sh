#!/usr/bin/env bash
# Pretrains a BERT over several processes that hold the whole model each and share the batch (data parallel).
#
#   bash examples/pretrain_bert_distributed.sh                                      4 processes on this machine's CPU
#   DEVICE=auto GPUS_PER_NODE=8 bash examples/pretrain_bert_distributed.sh --bf16   8 GPUs
#
# On several machines: as examples/pretrain_bert_distributed_with_mp.sh. examples/arguments.sh lists what it takes from the
# environment; further flags come last, so they win.
set -euo pipefail

RUN_NAME=pretrain_bert_distributed
source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"
training_args $((GPUS_PER_NODE * NNODES))

launch "$ROOT/pretrain_bert.py" "${BERT_MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" --overlap-grad-reduce \
    "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@"

#!/usr/bin/env bash
# Pretrains a model in the style of Llama over several processes: tensor parallel with sequence parallelism, the rest data parallel.
#
#   bash examples/pretrain_llama.sh                                 4 processes on this machine's CPU, made-up data
#   DEVICE=auto GPUS_PER_NODE=8 NUM_LAYERS=32 HIDDEN_SIZE=4096 NUM_HEADS=32 NUM_QUERY_GROUPS=8 SEQ_LENGTH=4096 \
#       bash examples/pretrain_llama.sh --ffn-hidden-size 14336 --rotary-base 500000 --bf16
#
# Further flags come last, so they win. From the environment, besides what examples/arguments.sh lists:
#   TENSOR_MP_SIZE      ranks that share a layer (2)
#   NUM_QUERY_GROUPS    key/value heads, which the query heads share (2)
set -euo pipefail

RUN_NAME=pretrain_llama
source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"
training_args $((GPUS_PER_NODE * NNODES))

PARALLEL_ARGS=(--tensor-model-parallel-size "${TENSOR_MP_SIZE:-2}" --sequence-parallel)

launch "$ROOT/pretrain_gpt.py" "${LLAMA_MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@"

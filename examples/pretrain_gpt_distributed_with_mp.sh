#!/usr/bin/env bash
# Pretrains a GPT over several processes, and several machines: tensor x pipeline parallel ranks, the rest data parallel.
#
#   bash examples/pretrain_gpt_distributed_with_mp.sh                   4 processes on this machine's CPU, made-up data
#   DEVICE=auto GPUS_PER_NODE=8 NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 MASTER_PORT=6000 \
#       DATA_PATH=data/books_text_document TOKENIZER_MODEL=tokenizer.json CHECKPOINT_PATH=/shared/run1 \
#       bash examples/pretrain_gpt_distributed_with_mp.sh --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --bf16
#
# On each machine the same command, with its own NODE_RANK; examples/slurm and examples/kubernetes do that. Further flags come
# last, so they win. examples/arguments.sh lists what it takes from the environment, TENSOR_MP_SIZE and PIPELINE_MP_SIZE among it.
set -euo pipefail

RUN_NAME=pretrain_gpt_mp
source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"
training_args $((GPUS_PER_NODE * NNODES))

launch "$ROOT/pretrain_gpt.py" "${GPT_MODEL_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@"

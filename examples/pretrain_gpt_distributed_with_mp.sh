#!/usr/bin/env bash
# Pretrains a GPT over several processes, and several machines: tensor x pipeline parallel ranks, the rest data parallel.
#
#   bash examples/pretrain_gpt_distributed_with_mp.sh                   4 processes on this machine's CPU, made-up data
#   DEVICE=auto GPUS_PER_NODE=8 NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 MASTER_PORT=6000 \
#       DATA_PATH=data/books_text_document TOKENIZER_MODEL=tokenizer.json CHECKPOINT_PATH=/shared/run1 \
#       bash examples/pretrain_gpt_distributed_with_mp.sh --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --bf16
#
# On each machine the same command, with its own NODE_RANK. Further flags come last, so they win. From the environment:
#   GPUS_PER_NODE NNODES NODE_RANK MASTER_ADDR MASTER_PORT     as torchrun names them (4, 1, 0, localhost, 6000)
#   TENSOR_MP_SIZE PIPELINE_MP_SIZE                            ranks that share a layer, and stages (2, 2)
#   DEVICE            cpu, or auto for the accelerator (cpu)
#   DATA_PATH         prefix of .bin and .idx, as tools/preprocess_data.py writes them; unset: made-up data
#   TOKENIZER_MODEL   the tokenizer.json that made them
#   CHECKPOINT_PATH   where to save, and where to go on from; all machines must see it (checkpoints/pretrain_gpt_mp)
#   VENV              the virtual environment of examples/setup_env.sh (.venv in the repository)
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${VENV:-$ROOT/.venv}/bin/python
GPUS_PER_NODE=${GPUS_PER_NODE:-4}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
TENSOR_MP_SIZE=${TENSOR_MP_SIZE:-2}
PIPELINE_MP_SIZE=${PIPELINE_MP_SIZE:-2}
DEVICE=${DEVICE:-cpu}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-$ROOT/checkpoints/pretrain_gpt_mp}
if ! [ -x "$PYTHON" ]; then
    echo "pretrain_gpt: there is no $PYTHON; run 'bash examples/setup_env.sh' first, or say where the environment is: VENV=..." >&2
    exit 1
fi

# Processes that share CPU cores: one thread each, unless the caller knows better.
[ "$DEVICE" = cpu ] && export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

DISTRIBUTED_ARGS=(
    --nproc-per-node "$GPUS_PER_NODE"
    --nnodes "$NNODES"
    --node-rank "$NODE_RANK"
    --master-addr "$MASTER_ADDR"
    --master-port "$MASTER_PORT"
)

GPT_ARGS=(
    --tensor-model-parallel-size "$TENSOR_MP_SIZE"
    --pipeline-model-parallel-size "$PIPELINE_MP_SIZE"
    --sequence-parallel
    --device "$DEVICE"
    --num-layers 4
    --hidden-size 128
    --num-attention-heads 4
    --seq-length 128
    --max-position-embeddings 128
    --micro-batch-size 2
    --global-batch-size $((GPUS_PER_NODE * NNODES * 4))
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

exec "$PYTHON" -m torch.distributed.run "${DISTRIBUTED_ARGS[@]}" "$ROOT/pretrain_gpt.py" \
    "${GPT_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@"

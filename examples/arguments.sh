# The argument blocks that the pretrain_*.sh scripts share. They source it, after they have said RUN_NAME; it is not run by itself.
# Each script picks blocks and adds its own; the flags of its command line come last, so they win.
#
# From the environment:
#   DATA_PATH         prefix of .bin and .idx, as tools/preprocess_data.py writes them; unset: made-up data
#   TOKENIZER_MODEL   the tokenizer.json that made them; for BERT it is VOCAB_FILE, a vocab.txt, and the data are sentences
#   CHECKPOINT_PATH   where to save, and where to go on from; all machines must see it (checkpoints/RUN_NAME)
#   NUM_LAYERS HIDDEN_SIZE NUM_HEADS SEQ_LENGTH         the model (4, 128, 4, 128)
#   MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE TRAIN_ITERS      the run (2, 4 for each process, 100)
#   DEVICE            cpu, or auto for the accelerator, if any
#   GPUS_PER_NODE NNODES NODE_RANK MASTER_ADDR MASTER_PORT     of scripts over several processes, as torchrun names them
#   RESTARTS          how often torchrun starts all processes again after one has failed (0)
#   TENSOR_MP_SIZE PIPELINE_MP_SIZE     ranks that share a layer, and stages, of scripts that divide the model (2, 2)
#   LAUNCHER          what starts the processes; unset: torchrun. Another: LAUNCHER="python -m torch.distributed.launch"
#   VENV              the virtual environment of examples/setup_env.sh (.venv in the repository; if there is none, the python3
#                     of the PATH is used, should it have torch, as in a container)

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

find_python() {
    local own=${VENV:-$ROOT/.venv}/bin/python has_torch='import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'
    if [ -x "$own" ]; then
        echo "$own"
    elif [ -z "${VENV:-}" ] && python3 -c "$has_torch" 2>/dev/null; then
        echo python3
    else
        echo "$RUN_NAME: there is no $own; run 'bash examples/setup_env.sh' first, or say where the environment is: VENV=..." >&2
        return 1
    fi
}
PYTHON=$(find_python)

GPUS_PER_NODE=${GPUS_PER_NODE:-4}
NNODES=${NNODES:-1}
DISTRIBUTED_ARGS=(
    --nproc-per-node "$GPUS_PER_NODE"
    --nnodes "$NNODES"
    --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-6000}"
)
[ -z "${RESTARTS:-}" ] || DISTRIBUTED_ARGS+=(--max-restarts "$RESTARTS")

# As GPT-2: learned positions, LayerNorm, GELU, biases, tied embeddings.
GPT_MODEL_ARGS=(
    --num-layers "${NUM_LAYERS:-4}"
    --hidden-size "${HIDDEN_SIZE:-128}"
    --num-attention-heads "${NUM_HEADS:-4}"
    --seq-length "${SEQ_LENGTH:-128}"
    --max-position-embeddings "${SEQ_LENGTH:-128}"
)

# As BERT: the same blocks, looking at both sides.
BERT_MODEL_ARGS=("${GPT_MODEL_ARGS[@]}")

# As Llama: rotary positions, RMSNorm, gated MLP, shared key/value heads, no biases, no dropout, an output layer of its own.
LLAMA_MODEL_ARGS=(
    --num-layers "${NUM_LAYERS:-4}"
    --hidden-size "${HIDDEN_SIZE:-128}"
    --num-attention-heads "${NUM_HEADS:-4}"
    --group-query-attention
    --num-query-groups "${NUM_QUERY_GROUPS:-2}"
    --seq-length "${SEQ_LENGTH:-128}"
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --hidden-dropout 0
    --attention-dropout 0
)

# A model over several ranks: its layers divided among some, its stages among others.
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "${TENSOR_MP_SIZE:-2}"
    --pipeline-model-parallel-size "${PIPELINE_MP_SIZE:-2}"
    --sequence-parallel
)

# training_args N: for N processes in all.
training_args() {
    TRAINING_ARGS=(
        --device "${DEVICE:-cpu}"
        --micro-batch-size "${MICRO_BATCH_SIZE:-2}"
        --global-batch-size "${GLOBAL_BATCH_SIZE:-$(($1 * 4))}"
        --train-iters "${TRAIN_ITERS:-100}"
        --lr 1e-3
        --min-lr 1e-4
        --lr-decay-style cosine
        --lr-warmup-fraction 0.05
        --weight-decay 0.01
        --clip-grad 1.0
    )
}

if [ -n "${DATA_PATH:-}" ]; then
    DATA_ARGS=(--data-path "$DATA_PATH" --split 949,50,1)
    case $RUN_NAME in
        pretrain_bert*)
            DATA_ARGS+=(
                --tokenizer-type BertWordPieceLowerCase
                --vocab-file "${VOCAB_FILE:?DATA_PATH is set; VOCAB_FILE must name the vocab.txt that made it}"
            ) ;;
        *)
            DATA_ARGS+=(
                --tokenizer-type HuggingFaceTokenizer
                --tokenizer-model "${TOKENIZER_MODEL:?DATA_PATH is set; TOKENIZER_MODEL must name the tokenizer.json that made it}"
            ) ;;
    esac
else
    DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer --vocab-size 1000)
fi

CHECKPOINT_PATH=${CHECKPOINT_PATH:-$ROOT/checkpoints/$RUN_NAME}
OUTPUT_ARGS=(
    --log-interval 10
    --eval-interval 50
    --eval-iters 5
    --save-interval 50
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
)

# launch SCRIPT FLAGS...: as the processes that DISTRIBUTED_ARGS describe. Takes the place of the shell.
launch() {
    local launcher
    read -r -a launcher <<<"${LAUNCHER:-}"
    [ ${#launcher[@]} -gt 0 ] || launcher=("$PYTHON" -m torch.distributed.run)  # torchrun, of this very environment
    # Processes that share CPU cores: one thread each, unless the caller knows better.
    [ "${DEVICE:-cpu}" != cpu ] || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    exec "${launcher[@]}" "${DISTRIBUTED_ARGS[@]}" "$@"
}

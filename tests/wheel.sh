#!/usr/bin/env bash
# What is installed works away from the checkout: the commands, and a recipe that the documents name.
set -euo pipefail

# --help prints the lines above, before anything is made.
case " $* " in *" --help "* | *" -h "*)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit ;;
esac

cd "$(mktemp -d)"
python -m megatron
examples=$(python -m megatron examples)
megatron-pretrain-gpt --yaml-cfg "$examples/recipes/tiny.yaml" --train-iters 2 --lr-warmup-iters 1 --log-interval 1
megatron-plot-schedule --all
megatron-estimate-memory --yaml-cfg "$examples/recipes/llama-2-7b.yaml"

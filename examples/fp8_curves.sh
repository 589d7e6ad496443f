#!/usr/bin/env bash
# One small Llama on real text in bf16 and in every FP8 recipe: do the losses stay together? About a minute each on a CPU,
# where casts are exact and products are computed from what they stand for.
#
#   examples/fp8_curves.sh                     bf16 and all recipes
#   examples/fp8_curves.sh bf16 tensorwise     some of them
#
# Losses go to runs/fp8-*.jsonl. The text is the docstrings of Python's standard library, prepared once in .corpus/.
set -euo pipefail
cd "$(dirname "$0")/.."

declare -A RECIPE=(
    [bf16]=""
    [delayed]="--fp8-format hybrid"
    [delayed1024]="--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max"
    [tensorwise]="--fp8-format hybrid --fp8-recipe tensorwise"
    [blockwise]="--fp8-format e4m3 --fp8-recipe blockwise"
    [mxfp8]="--fp8-format e4m3 --fp8-recipe mxfp8"
)
for names in "${@:-bf16 delayed delayed1024 tensorwise blockwise mxfp8}"; do
    for name in $names; do
        rm -f "runs/fp8-$name.jsonl"
        OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "${PYTHON:-python}" -m minimegatron.commands.pretrain_gpt \
            --corpus stdlib-docs --vocab-size 2048 \
            --num-layers 4 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 384 --normalization RMSNorm \
            --swiglu --disable-bias-linear --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 \
            --seq-length 128 --micro-batch-size 4 --global-batch-size 8 --train-iters 100 --lr 3e-3 --lr-warmup-iters 10 \
            --bf16 ${RECIPE[$name]} --log-interval 10 --log-file "runs/fp8-$name.jsonl"
    done
done

#!/usr/bin/env bash
# Train a 9 M-parameter Llama on the sources of Python's standard library: nothing is downloaded, two CPU cores suffice.
#
#   examples/pretrain_stdlib.sh              tp2 x dp2, 4 ranks
#   NPROC=1 examples/pretrain_stdlib.sh      the same run in one process: the same losses
#   examples/pretrain_stdlib.sh --lr 2e-3    further flags win over those below
#
# The first call trains a tokenizer and prepares the tokens (about 20 s); they stay in .corpus/.
set -euo pipefail
cd "$(dirname "$0")/.."

NPROC=${NPROC:-4}
LAYOUT=(--tensor-model-parallel-size 2 --sequence-parallel)
if [ "$NPROC" -eq 1 ]; then LAYOUT=(); fi

OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} torchrun --standalone --nproc-per-node "$NPROC" -m minimegatron.commands.pretrain_gpt \
    --preset laptop-10m --corpus stdlib "${LAYOUT[@]}" \
    --seq-length 128 --micro-batch-size 4 --global-batch-size 16 --train-iters 50 \
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 5 --weight-decay 0.1 --clip-grad 1.0 \
    --log-file "runs/stdlib-$NPROC.jsonl" "$@"

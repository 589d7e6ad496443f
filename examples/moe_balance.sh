#!/usr/bin/env bash
# Eight experts on real text, three times: with a balancing loss, with a bias on the scores, and with neither.
# The first two stay balanced; the third collapses onto a few experts. Two ranks share the experts; a minute or two each.
#
#   examples/moe_balance.sh              all three
#   examples/moe_balance.sh aux          one of them: aux, bias, none; or sinkhorn, which deals tokens out
#   NPROC=1 examples/moe_balance.sh      in one process
#   minimegatron experts runs/moe-none.jsonl --last 20        the table again, of any log and any steps
#
# The text is the docstrings of Python's standard library; tokens are prepared once and stay in .corpus/.
set -euo pipefail
cd "$(dirname "$0")/.."

NPROC=${NPROC:-2}
declare -A BALANCE=(
    [aux]="--moe-router-pre-softmax --moe-aux-loss-coeff 1e-2"
    [bias]="--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 3e-3"
    [none]="--moe-router-pre-softmax --moe-router-load-balancing-type none"
    [sinkhorn]="--moe-router-load-balancing-type sinkhorn"
)
for balance in "${@:-aux bias none}"; do
    for name in $balance; do
        rm -f "runs/moe-$name.jsonl"
        OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} torchrun --standalone --nproc-per-node "$NPROC" \
            -m minimegatron.commands.pretrain_gpt --corpus stdlib-docs --vocab-size 1024 \
            --num-layers 2 --hidden-size 96 --num-attention-heads 4 --ffn-hidden-size 192 --normalization RMSNorm \
            --swiglu --disable-bias-linear --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 \
            --num-experts 8 --moe-router-topk 1 ${BALANCE[$name]} \
            --moe-token-dispatcher-type alltoall --expert-model-parallel-size "$NPROC" \
            --seq-length 128 --micro-batch-size $((8 / NPROC)) --global-batch-size 8 --train-iters 300 \
            --lr 1e-2 --lr-decay-style constant --clip-grad 1.0 --log-interval 20 \
            --log-file "runs/moe-$name.jsonl"
    done
done

#!/usr/bin/env bash
# A small model learns to add two numbers of one digit from rewards alone: from one right answer in thirteen to 95 in 100
# and more, in three minutes and a quarter of one core.
#
#   examples/grpo_sums.sh            seed 1
#   examples/grpo_sums.sh 7          another seed, of weights, lines and draws
#
# The base is taught by lines like `7+5=` and any number from 6 to 18: it knows how large a sum is, and cannot know which of
# these numbers is right. That makes rewards work: now and then one of 16 answers to a prompt is right. A base that knows
# half of the sums and nothing of the others learns these late or never, since no answer to them is rewarded.
# Two things keep a prompt alive whose answers have become equal and wrong: the weight of the entropy, and that of the
# divergence from the base, which has not forgotten the right answer. Without the latter one seed of three ended at 0.92,
# with all sums of 10 answered by 11. The learning rate falls to 0: at a constant one the reward passes 0.9 and falls back.
# Rewards, entropies and the gap to the engine stand in runs/grpo-sums-SEED.jsonl.
set -euo pipefail
cd "$(dirname "$0")/.."

SEED=${1:-1}
RUN=runs/grpo-sums-$SEED
rm -rf "$RUN" "$RUN.jsonl"
mkdir -p "$RUN"
minimegatron() { OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "${PYTHON:-python}" -m minimegatron "$@"; }

"${PYTHON:-python}" - "$SEED" > "$RUN/near.jsonl" <<'PYTHON'
import json, random, sys

draw = random.Random(int(sys.argv[1]))
for _ in range(20_000):
    a, b = draw.randrange(10), draw.randrange(10)
    said = draw.randint(max(0, a + b - 6), a + b + 6)
    print(json.dumps({"prompt": f"{a}+{b}=", "completion": str(said)}))
PYTHON

minimegatron sft --data-path "$RUN/near.jsonl" --split 100 --tokenizer-type ByteLevelTokenizer \
    --num-layers 3 --hidden-size 128 --num-attention-heads 4 --normalization RMSNorm --swiglu --disable-bias-linear \
    --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 \
    --seq-length 128 --sequence-packing --micro-batch-size 16 --global-batch-size 16 --train-iters 250 \
    --lr 1e-3 --lr-decay-style constant --weight-decay 0 --seed "$SEED" --log-interval 50 --save "$RUN/base"

minimegatron grpo --load "$RUN/base" --use-checkpoint-args --finetune --tokenizer-type ByteLevelTokenizer \
    --environment sums --grpo-prompts-per-step 64 --grpo-group-size 16 --max-completion-length 3 --seq-length 16 \
    --global-batch-size 256 --micro-batch-size 256 --rl-max-num-seqs 512 --train-iters 600 \
    --grpo-clamp-eps-upper 0.28 --grpo-entropy-term-weight 0.02 --grpo-kl-beta 0.03 \
    --lr 6e-4 --lr-decay-style cosine --min-lr 0 --weight-decay 0 --seed "$SEED" --log-interval 20 --log-file "$RUN.jsonl" --save "$RUN/policy"

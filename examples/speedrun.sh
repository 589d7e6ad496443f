#!/usr/bin/env bash
# From text to a model that answers in the browser, and a page about the whole run, on two CPU cores: 27 minutes of an AMD
# with AVX2, of which pretrain takes 19. The times of your stages stand on the page.
#
#   examples/speedrun.sh                 everything, in runs/speedrun; what is done is not done again
#   examples/speedrun.sh runs/mine       in another folder
#   QUICK=1 examples/speedrun.sh runs/quick   to a model that has learned little: 3 minutes of an AMD with AVX-512
#   GPU=1 examples/speedrun.sh           on a node with NVIDIA GPUs: 124 M parameters, 2.6 billion tokens of FineWeb-Edu
#   GPU=1 QUICK=1 examples/speedrun.sh runs/quick   the GPU form with the text and sizes of QUICK=1: try it first
# The GPU form has run on simulated devices only (tests/rehearsal), not on a GPU yet.
#
# Stages: text, tokenizer, tokens, pretrain, evaluate, chat (supervised fine-tuning), evaluate-chat, samples, report.
# Stop it whenever you like: the same line goes on where it was, also in the middle of a training.
# CORPUS=hf:roneneldan/TinyStories (or any name that `train --corpus` takes) trains on another text, in another folder.
# Python is that of the active environment, else that of `.venv`; PYTHON=... names another.
set -euo pipefail
cd "$(dirname "$0")/.."

RUN=${1:-runs/speedrun}
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python
    if [ -z "${VIRTUAL_ENV:-}" ] && [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$RUN"

BLOCK=(--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0
    --attention-dropout 0 --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95)
if [ -n "${GPU:-}" ]; then
    NPROC=${NPROC:-$(nvidia-smi -L | wc -l)}
    BLOCK+=(--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
fi
NPROC=${NPROC:-2}
if [ -n "${GPU:-}" ] && [ -z "${QUICK:-}" ]; then
    CORPUS=${CORPUS:-hf:HuggingFaceFW/fineweb-edu/sample-10BT} MEGABYTES=12000 VOCABULARY=32768
    LENGTH=1024 ITERATIONS=5000 CHAT_ITERATIONS=400 CHAT_RATE=1e-3
    MODEL=(--num-layers 12 --hidden-size 768 --num-attention-heads 12 --ffn-hidden-size 2048)
    BATCH=(--micro-batch-size 16 --global-batch-size 512 --lr 1e-3 --min-lr 1e-4) CHAT_BATCH=64
else
    CORPUS=${CORPUS:-stdlib} MEGABYTES=20 VOCABULARY=4096
    LENGTH=256 ITERATIONS=${ITERATIONS:-${QUICK:+60}} CHAT_ITERATIONS=${CHAT_ITERATIONS:-${QUICK:+60}} CHAT_RATE=${QUICK:+3e-3}
    ITERATIONS=${ITERATIONS:-600} CHAT_ITERATIONS=${CHAT_ITERATIONS:-200} CHAT_RATE=${CHAT_RATE:-1e-3}
    MODEL=(--num-layers 6 --hidden-size 192 --num-attention-heads 6 --ffn-hidden-size 512)
    CHAT_BATCH=$((NPROC > 2 ? 8 * NPROC : 16))
    BATCH=(--micro-batch-size 8 --global-batch-size "$CHAT_BATCH" --lr 3e-3 --min-lr 3e-4)
fi
begun="CORPUS=$CORPUS, $VOCABULARY ids, $ITERATIONS and $CHAT_ITERATIONS steps"
if [ -f "$RUN/begun" ] && [ "$(cat "$RUN/begun")" != "$begun" ]; then
    echo "$RUN was begun with $(cat "$RUN/begun"), now $begun: give another folder, or remove this one" >&2
    exit 2
fi
echo "$begun" > "$RUN/begun"
mm() { "$PYTHON" -m minimegatron "$@"; }
ranks() { "$PYTHON" -m minimegatron torchrun --standalone --nproc-per-node "$NPROC" -m minimegatron "$@"; }

# stage NAME COMMAND...: run it unless it is done, and write down how long it took.
stage() {
    local name=$1 took
    shift
    if grep -qs "\"stage\": \"$name\"" "$RUN/stages.jsonl"; then
        echo "== $name: done before"
        return
    fi
    echo "== $name"
    TIMEFORMAT='"seconds": %R, "user": %U, "system": %S'
    { time "$@" 1>&3 2>&4; } 3>&1 4>&2 2> "$RUN/.time"
    took=$(grep -o '"seconds".*' "$RUN/.time")
    echo "{\"stage\": \"$name\", $took}" >> "$RUN/stages.jsonl"
}

text() { "$PYTHON" examples/speedrun_data.py "$RUN" "$CORPUS" "$MEGABYTES"; }
tokenizer() {
    mm train-tokenizer --input "$RUN/train.jsonl" --vocab-size "$VOCABULARY" --chat-template plain --save "$RUN/tokenizer"
}
tokens() {
    mm preprocess --input "$RUN/train.jsonl" --output-prefix "$RUN/train" --append-eod \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$RUN/tokenizer" \
        --train-iters "$ITERATIONS" --global-batch-size "${BATCH[3]}" --seq-length "$LENGTH"
}
pretrain() {
    ranks train --data-path "$RUN/train_text_document" --split 99,1,0 \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$RUN/tokenizer" \
        "${BLOCK[@]}" "${MODEL[@]}" "${BATCH[@]}" --seq-length "$LENGTH" --max-position-embeddings "$LENGTH" \
        --train-iters "$ITERATIONS" --lr-decay-style cosine --lr-warmup-iters $((ITERATIONS / 20)) \
        --eval-interval $((ITERATIONS / 10)) --eval-iters 4 --log-interval 10 --log-file "$RUN/pretrain.jsonl" \
        --save "$RUN/base" --load "$RUN/base" --save-interval $((ITERATIONS / 5)) --async-save
}
evaluate() { mm evaluate "$RUN/$1" --text "$RUN/held-out.txt" --choices "$RUN/continuations.jsonl" \
    --choices "$RUN/sums.jsonl" --json > "$RUN/$1-tasks.jsonl"; }
chat() {
    local begin=(--load "$RUN/base" --finetune)
    if [ -d "$RUN/chat" ]; then begin=(--load "$RUN/chat"); fi
    ranks sft --use-checkpoint-args "${begin[@]}" --data-path "$RUN/chats.jsonl" --split 98,2,0 \
        --seq-length "$LENGTH" --sequence-packing --micro-batch-size 8 --global-batch-size "$CHAT_BATCH" \
        --train-iters "$CHAT_ITERATIONS" --lr "$CHAT_RATE" --lr-decay-style cosine --min-lr 0 --lr-warmup-iters 10 \
        --eval-interval $((CHAT_ITERATIONS / 5)) --eval-iters 2 --log-interval 10 --log-file "$RUN/chat.jsonl" \
        --save "$RUN/chat" --save-interval $((CHAT_ITERATIONS / 3))
}
samples() {
    printf '%s\n' 'Return a' 'This module' 'The default value is' > "$RUN/prompts.txt"
    mm generate "$RUN/base" --prompts-file "$RUN/prompts.txt" --max-new-tokens 48 --temperature 0.7 --top-p 0.9 --seed 1 \
        > "$RUN/base-samples.jsonl"
    printf '%s\n' 'Who are you?' 'What does `textwrap.dedent` do?' 'What does `os.walk` do?' '12 + 7 =' '41 + 8 =' \
        > "$RUN/questions.txt"
    mm generate "$RUN/chat" --chat --prompts-file "$RUN/questions.txt" --max-new-tokens 64 \
        > "$RUN/chat-samples.jsonl"
}

stage text text
stage tokenizer tokenizer
stage tokens tokens
stage pretrain pretrain
stage evaluate evaluate base
stage chat chat
stage evaluate-chat evaluate chat
stage samples samples
mm report "$RUN" --cluster h100 --world-size 8
echo "Talk to it:   $PYTHON -m minimegatron serve $RUN/chat     and open the address that it prints"

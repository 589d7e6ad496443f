#!/usr/bin/env bash
# A published model, trained further and published again: the way of Megatron-LM's Qwen2.5 tutorial, in four commands.
#
#   examples/continue_qwen.sh Qwen2.5-0.5B text.jsonl out              a folder from Hugging Face, {"text": ...} a line
#   NPROC=8 TP=4 ITERS=1000 examples/continue_qwen.sh ...             ranks, of which so many share each matrix
#
# out/ gets the checkpoint to start from, the one that was trained, and out/hf, which transformers loads. Nothing is
# downloaded. Steps 2 and 4 may be left out: `minimegatron train --load Qwen2.5-0.5B` reads the published folder itself.
# The model's vocabulary (151,936 rows) is larger than the tokenizer's, and stays as it is. Do not give the tokenizer a
# new pad token: it would have an id that no row of the embedding has, and is refused; Qwen2.5 pads with <|endoftext|>.
set -euo pipefail
FOLDER=$1 TEXT=$2 OUT=$3
NPROC=${NPROC:-2} TP=${TP:-2} ITERS=${ITERS:-100} SEQ=${SEQ:-512} BATCH=${BATCH:-8}
mkdir -p "$OUT"

# 1  text becomes tokens of the model's own tokenizer
python -m minimegatron preprocess --input "$TEXT" --output-prefix "$OUT/data" --append-eod \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$FOLDER"

# 2  the model becomes a checkpoint; the sizes for which Megatron's tool cuts it are accepted and change nothing
python -m minimegatron convert --model-type GPT --loader llama_mistral --saver core --checkpoint-type hf \
    --load-dir "$FOLDER" --save-dir "$OUT/start" --target-tensor-parallel-size "$TP"

# 3  it is trained further; what the model is, the checkpoint says
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} python -m torch.distributed.run --standalone --nproc-per-node "$NPROC" \
    -m minimegatron train --load "$OUT/start" --use-checkpoint-args --save "$OUT/trained" \
    --tensor-model-parallel-size "$TP" --sequence-parallel --use-distributed-optimizer \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$FOLDER" --data-path "$OUT/data_text_document" \
    --seq-length "$SEQ" --micro-batch-size 1 --global-batch-size "$BATCH" --train-iters "$ITERS" \
    --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --lr-warmup-fraction 0.1 --clip-grad 1.0 --weight-decay 0.1

# 4  and published, with the config.json and the tokenizer that it came with
python -m minimegatron convert --load "$OUT/trained" --save "$OUT/hf" --to hf

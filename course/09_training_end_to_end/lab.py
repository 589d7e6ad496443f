# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Lab 09 · Training end to end
#
# The other labs take a trainer apart. This one uses it: from lines of text to a model that continues them, and from a
# plan to a run that went as planned. What goes wrong on the way is seldom an error message. It is a log that looks
# nearly right.
#
# **You build** the numbers that a run is planned and judged by: its FLOPs and its MFU; a round of byte-pair encoding;
# how often the data is read, and which document a sample came from; the rate of each step; a law through four small
# models that says what a fifth will reach; the work of a step before you change its layout. Then a run is killed, and
# resumed by a colleague. At the end you find three faults of famous runs in logs of your own: a NaN, a spike, and a
# resume that forgot something.
#
# **You need** gradients and cross entropy; tp and dp (labs 01 and 02); what a checkpoint is (lab 08). No GPU.
#
# | part | sections | time |
# |---|---|---|
# | A | 1 The problem · 2 Predict | 35 min |
# | B | 3 Implement: tokens, samples, rates | 1 h |
# | C | 3 Implement: a scaling law, the work of a step | 40 min |
# | D | 4 Run · 5 See | 20 min |
# | E | 6 Break it · 7 Explain | 40 min |
#
# Together 3 h 15 min. Each part ends at a place to stop. After a kernel restart: run the first cell, then go on where
# you were. A picture needs the run above it.

# %%
# %load_ext course
# %lab 09_training_end_to_end

# %% [markdown]
# First two guesses. Llama 3 405B was trained on 15.6·10¹² tokens by up to 16,384 H100. How many days would that take
# if each of them computed at its peak all the time?

# %%
guess("days", None, "405B parameters, 15.6·10¹² tokens, 16,384 H100 at their peak: how many days?")

# %% [markdown]
# And a small one. Five models learn the same text, the largest with seven times as many parameters as the smallest.
# Four of them have been trained. A law through their losses predicts the fifth's, which has twice as many parameters
# as the fourth. How far off is it, in percent of the loss?

# %%
guess("off", None, "A law through four small models predicts the loss of a larger one: how many percent off?")

# %% [markdown]
# ## 1 · The problem
#
# A run of this size happens once. In 54 days of that one its authors counted 466 interruptions. Nobody can try the
# plan first and see. What can be tried are small runs, and what can be computed is arithmetic. This is how the days
# depend on what the machines do with their time:

# %%
from course.figures.posttraining import curves

PARAMETERS, TOKENS, GPUS, PEAK = 405.9e9, 15.6e12, 16_384, 989.5e12
SHARES = [s / 100 for s in range(15, 101)]
days = [6 * PARAMETERS * TOKENS / (GPUS * PEAK * share) / 86_400 for share in SHARES]
guessed("days", round(days[-1], 1), "days at the peak")
print(f"with 41 % of it: {days[26]:.0f} days")
curves({"Llama 3 405B on 16,384 H100": {"": days}}, xs=[100 * s for s in SHARES],
       xlabel="percent of the peak (MFU)", ylabel="days")  # fmt: skip

# %% [markdown]
# A run that reaches 30 % where another reaches 40 % costs a third more. So the share is the first number that people
# compare, and the first that is computed wrongly.
#
# ## 2 · Predict
#
# ### MFU, by hand
#
# *Model FLOPs utilisation* is the work that the model's formula asks for, divided by what the machines could have
# done in the same time. Three things are argued about:
#
# * **Which work?** The matrix products of the formula: for each multiply-add 2 FLOPs, three times, since the backward
#   pass has two products for each of the forward pass. Looking up an embedding is no product. Scores and values of
#   attention are products without weights: query i meets i keys, half of s on average.
# * **Whose work?** What is computed twice (recompute) counts once. If it counts twice, the share is called HFU, of
#   the *hardware*. It is larger, and the run is not faster.
# * **Which peak?** The dense one. A data sheet may state the number "with sparsity", which is twice that.
#
# A layer here has queries of a heads and keys and values of g heads, each of d channels, an output matrix, and an MLP
# of three matrices: gate, up and down.
#
# An example: one layer, h = 4, a = 2, g = 1, d = 2, f = 6, and a vocabulary of 10. The products have 4 · 4 + 2 · (4 ·
# 2) + 4 · 4 + 3 · (4 · 6) = 120 weights in the layer, and 40 behind it: 160. A token costs 6 · 160 = 960 FLOPs for
# them. With s = 8 it meets 4 keys on average; scores and values cost 3 · 2 · (2 · 2 · 2) · 4 = 192 more. So 1152
# FLOPs a token. A thousand tokens a second on two GPUs of 10⁶ FLOP/s each: MFU 0.576.
#
# **Exercise.** Return `parameters`, the weights that a token is multiplied by; `flops` of a token, forward and
# backward; `mfu`; and `hfu`, where the forward pass of every layer is computed a second time (that of the output
# layer is not). `rate` is tokens a second on all `gpus` together, `sheet` the peak of one of them as its data sheet
# has it, and `sparse` whether that is the number with sparsity.

# %%
# %%exercise mfu
def mfu(model: dict[str, int], s: int, rate: float, gpus: int, sheet: float, sparse: bool) -> dict[str, float]:
    """model: layers, h, a, g, d, f, v. {"parameters": 160, "flops": 1152, "mfu": 0.576, ...} in the example."""
    ### BEGIN SOLUTION
    h, wide = model["h"], model["a"] * model["d"]
    layer = h * (wide + 2 * model["g"] * model["d"]) + wide * h + 3 * h * model["f"]
    parameters = model["layers"] * layer + h * model["v"]
    attention = model["layers"] * 6 * wide * s
    flops = 6 * parameters + attention
    again = (6 * model["layers"] * layer + attention) / 3
    peak = gpus * sheet / (2 if sparse else 1)
    return {"parameters": parameters, "flops": flops, "mfu": flops * rate / peak, "hfu": (flops + again) * rate / peak}
    ### END SOLUTION


# %%
check("mfu")

# %% [markdown]
# Llama 3 405B is said to have reached 400 TFLOP/s on each of 16,384 H100, with sequences of 8,192. Your function
# knows how many tokens a second that is, and what the careless would have said. And minimegatron counts by running
# each layer without memory: does it count what you count?

# %%
# %%needs mfu
from minimegatron.models.families import family_config
from minimegatron.training.flops import step_flops

LLAMA = {"layers": 126, "h": 16384, "a": 128, "g": 8, "d": 128, "f": 53248, "v": 128256}
token = mfu(LLAMA, 8192, 1.0, GPUS, PEAK, False)
rate = 400e12 * GPUS / token["flops"]
for said, one in (("model, dense peak", mfu(LLAMA, 8192, rate, GPUS, 989.5e12, False)["mfu"]),
                  ("with recompute", mfu(LLAMA, 8192, rate, GPUS, 989.5e12, False)["hfu"]),
                  ("sparse peak taken for dense", mfu(LLAMA, 8192, rate, GPUS, 1979e12, False)["mfu"])):  # fmt: skip
    print(f"{said:28} {one:.1%}")
share = 6 * PARAMETERS / token["flops"]
print(f"{rate / 1e6:.2f} million tokens a second; 6 N alone would be {share:.1%} of your FLOPs")
tiny = {"layers": 3, "h": 64, "a": 4, "g": 2, "d": 16, "f": 96, "v": 128}
config = family_config("llama", num_layers=3, hidden_size=64, num_attention_heads=4, num_query_groups=2,
                       ffn_hidden_size=96, vocab_size=128)  # fmt: skip
print("the package counts the same:", step_flops(config, 1, 32) == 32 * mfu(tiny, 32, 1.0, 1, 1.0, False)["flops"])

# %% [markdown]
# ### How often is the data read?
#
# All documents, in a random order and with an end-of-document token behind each, are one stream of T tokens. A sample
# is s inputs and s labels; the labels are the inputs moved by one. So it takes s + 1 tokens of the stream, and the
# next sample begins with the token that was its last label.
#
# A run that wants more samples than one stream holds reads the documents again, in another order, behind the first.
# It takes as few epochs as give enough. Then all samples are shuffled. But the last epoch may be needed for a few
# samples only: if it were shuffled with the others, chance would decide which samples of *all* epochs are never read.
# So if less than 80 % of an epoch's samples (rounded down) are needed of the last one, its samples stay apart, and
# come last.
#
# An example: T = 25, s = 4, and the run wants 13 samples. Three epochs are 75 tokens. They hold 18 samples, and two
# epochs hold 12. So one sample is needed of the third epoch. An epoch alone holds 6, and 80 % of that is 4: the third
# epoch stays apart.
#
# **Exercise.** Return `epochs`; `samples`, how many these epochs hold; `needed`, how many of them the run takes that
# do not end in earlier epochs; and `apart`, whether the last epoch is kept apart (it is not if it is the only one).

# %%
# %%exercise epochs
def epochs(tokens: int, s: int, samples: int) -> dict[str, int | bool]:
    """tokens: of one epoch; samples: that the run wants. {"epochs": 3, "samples": 18, "needed": 1, "apart": True}."""
    ### BEGIN SOLUTION
    count = -(-(samples * s + 1) // tokens)
    before, there = max(0, (count - 1) * tokens - 1) // s, (count * tokens - 1) // s
    needed = samples - before
    return {
        "epochs": count,
        "samples": there,
        "needed": needed,
        "apart": count > 1 and needed < int(0.8 * ((tokens - 1) // s)),
    }
    ### END SOLUTION


# %%
check("epochs")

# %% [markdown]
# The same question to the package, which lays out Megatron's order for 200 runs. And what the rule is good for: 12
# documents of 25 tokens make 74 samples with s = 4, and a run wants 78. How often does it read each document, with the
# rule and without?

# %%
# %%needs epochs
import numpy as np

from course.figures.posttraining import bars_of_rows
from minimegatron.data.indices import build_sample_indices

rng = np.random.RandomState(1)
agree = 0
for _ in range(200):
    lengths, s = rng.randint(3, 30, 12).astype(np.int32), int(rng.randint(2, 12))
    wanted = int(rng.randint(1, 5 * lengths.sum() // s))
    laid = build_sample_indices(lengths, np.arange(12), wanted, s, 7)
    agree += laid.shuffle_index.size == epochs(int(lengths.sum()), s, wanted)["samples"]
print(f"runs for which the package lays out as many samples: {agree} of 200")


def times_read(wanted, s, lengths, apart, seed):
    """How often each document's tokens are read, on average over a document."""
    mine, rng = epochs(int(lengths.sum()), s, wanted), np.random.RandomState(seed)
    rounds = [rng.permutation(len(lengths)) for _ in range(mine["epochs"])]
    owner = np.concatenate([np.repeat(one, lengths[one]) for one in rounds])
    order = rng.permutation(mine["samples"])
    if apart:
        early = wanted - mine["needed"]
        order = np.concatenate([rng.permutation(early), early + rng.permutation(mine["samples"] - early)])
    read = np.zeros(len(lengths))
    for i in order[:wanted]:
        np.add.at(read, owner[i * s : i * s + s], 1)
    return (read / lengths).tolist()


lengths = np.full(12, 25)
ways = {"shuffled together": False, "the last epoch apart": True}
runs = {name: times_read(78, 4, lengths, apart, 3) for name, apart in ways.items()}
bars_of_rows(runs, [str(n) for n in range(12)], what="times read", rows="document")

# %% [markdown]
# With the last epoch apart every document is read once; what differs are the four samples of the second epoch, and
# the one that lies across the border. Shuffled together, nearly half of the samples are never read, and chance says
# which. It matters in runs of few epochs, and all large runs are.
#
# *This is a good place to stop: the end of part A.*
#
# ## 3 · Implement
#
# ### A language whose best loss is known
#
# The corpus is made here: stories in a little language. Each word is drawn by the word before it, from a list of its
# own with Zipf's chances. So there is much to learn, common pairs and rare ones, and nobody needs a download. And
# somebody knows the best possible loss: the entropy of the rules.

# %%
from course.lab09 import language

STORIES = language.stories(3000)
print(STORIES[3])
print()
nats, each = language.nats_of_a_story(), language.tokens_of_a_story()
print(f"the best possible loss: {nats / each:.3f} nats a token, if each word is one token")

# %% [markdown]
# ### Tokens
#
# A model could read bytes. Then it needs no vocabulary, and five times as many positions for the same text. Byte-pair
# encoding begins with letters and joins, round by round, the pair of neighbours that is seen most often.
#
# An example: the words `low` (5 times), `lower` (2) and `new` (6). The pair l, o is seen 7 times, and so is o, w; n,
# e and e, w 6 times; w, e and e, r 2 times. Of equally frequent pairs the first by the alphabet is taken: (l, o)
# comes before (o, w). After this round the words are `lo w`, `lo w e r` and `n e w`.
#
# **Exercise.** One round. Return the pair, and the words after it. `aaa` has the pair (a, a) twice, and `aa a` is
# what becomes of it: joining goes from left to right. If no word has two pieces, the pair is `[]`.

# %%
# %%exercise merge_round
from collections import Counter


def merge_round(words: list[list[str]], counts: list[int]) -> tuple[list[str], list[list[str]]]:
    """Words as lists of pieces, and how often each is seen -> [left, right], the words with it joined."""
    ### BEGIN SOLUTION
    seen = Counter()
    for word, n in zip(words, counts):
        for pair in zip(word, word[1:]):
            seen[pair] += n
    if not seen:
        return [], words
    best = min(seen, key=lambda pair: (-seen[pair], pair))
    joined = []
    for word in words:
        pieces, at = [], 0
        while at < len(word):
            wide = 2 if tuple(word[at : at + 2]) == best else 1
            pieces.append("".join(word[at : at + wide]))
            at += wide
        joined.append(pieces)
    return list(best), joined
    ### END SOLUTION


# %%
check("merge_round")

# %% [markdown]
# All rounds on the words of the stories. A larger vocabulary makes fewer tokens of the same text, and more columns of
# the output matrix. Which size costs the fewest FLOPs a *byte*? Guess a number of merges, for a model of two layers
# with h = 64.

# %%
guess("merges", None, "Two layers, h = 64: after how many merges does a byte of the stories cost the fewest FLOPs?")

# %%
# %%needs merge_round mfu
import re
from collections import Counter

counted = Counter(word for text in STORIES[:1000] for word in re.findall(r" ?[a-z]+|[.]|\n", text))
words, counts = [list(word) for word in counted], list(counted.values())
letters, nbytes = len({letter for word in words for letter in word}), sum(len(w) * n for w, n in counted.items())
sizes, per_token, per_byte = [], [], []
while True:
    sizes.append(len(sizes))
    per_token.append(nbytes / sum(len(word) * n for word, n in zip(words, counts)))
    model = {"layers": 2, "h": 64, "a": 4, "g": 4, "d": 16, "f": 128, "v": letters + sizes[-1]}
    per_byte.append(mfu(model, 32, 1.0, 1, 1.0, False)["flops"] / per_token[-1])
    pair, words = merge_round(words, counts)
    if not pair:
        break
guessed("merges", per_byte.index(min(per_byte)), "merges")
print(f"{letters} letters and {sizes[-1]} merges: {per_token[-1]:.2f} bytes a token, and every word is one token")
curves({"bytes of a token": {"": per_token}, "FLOPs of a byte": {"": per_byte}}, xs=sizes, xlabel="merges")

# %% [markdown]
# Here more merges always pay: the language has few words, and the last merge of a word still saves a token of every
# sentence that has it. In real text the curve turns where a merge is so rare that its column of the output matrix
# costs more than the tokens that it saves.
#
# Since tokens differ, a loss in nats a token cannot be compared between tokenizers. *Bits per byte* can: nats a
# token, divided by ln 2, divided by bytes a token.
#
# minimegatron writes the stories as JSONL, learns its own merges, and turns the lines into a stream. Look at the
# folded cell: it also repairs what a corpus always has, and says what was dropped.

# %% jupyter={"source_hidden": true}
import hashlib
import json
import math
from pathlib import Path

from course.lab09 import recipe

HOME = Path(".work/09_training_end_to_end/data")
HOME.mkdir(parents=True, exist_ok=True)
dirty = [json.dumps({"text": text}) for text in STORIES]
dirty[70:70] = ["", '{"text": "a broken li', json.dumps({"text": ""}), json.dumps({"title": "no text"}), *dirty[:40]]
kept, dropped, seen = [], Counter(), set()
for line in dirty:
    try:
        text = json.loads(line)["text"] if line else ""
    except json.JSONDecodeError:
        dropped["is no JSON"] += 1
        continue
    except KeyError:
        dropped["has no text"] += 1
        continue
    digest = hashlib.sha256(text.encode()).digest()
    why = "is empty" if not text else "is there twice" if digest in seen else ""
    seen.add(digest)
    if why:
        dropped[why] += 1
    else:
        kept.append(text)
corpus = recipe.prepare(HOME, kept)
bits = nats / each / math.log(2) / (sum(map(len, kept)) / corpus.tokens)
print(f"{len(dirty):,} lines, {len(kept):,} stories kept; of the others")
for why, n in sorted(dropped.items()):
    print(f"{n:4} {why}")
print(f"vocabulary {corpus.vocab_size}; tokens of a story as computed, within 2 %:",
      abs(corpus.tokens / len(kept) / each - 1) < 0.02)  # fmt: skip
print(f"the best possible loss is {bits:.2f} bits a byte")

# %% [markdown]
# ### Which document was that?
#
# A sample is cut out of the stream without asking where documents end. When something is wrong with a sample,
# somebody has to say which documents it is made of.
#
# An example: documents of 3, 2, 6 and 1 tokens in this order, and s = 4. Sample 0 has the tokens 0 to 4 of the
# stream, all of the first two documents. Sample 1 has the tokens 4 to 8: the last one of document 1, and the first
# four of document 2.
#
# **Exercise.** The pieces of sample i of the stream, `[document, first, last]`, in their order; `first` and `last`
# are places in the document, and `last` is not included. Sample 1 of the example is `[[1, 1, 2], [2, 0, 4]]`. A
# document may be empty; then it has no piece. A corpus has 10⁹ documents: do not build the stream.

# %%
# %%exercise pieces
import itertools


def pieces(lengths: list[int], s: int, i: int) -> list[list[int]]:
    """lengths: tokens of the documents, in the order of the stream -> [[document, first, last], ...]."""
    ### BEGIN SOLUTION
    first, end, found = i * s, i * s + s + 1, []
    for document, stop in enumerate(itertools.accumulate(lengths)):
        start = stop - lengths[document]
        if max(first, start) < min(end, stop):
            found.append([document, max(first, start) - start, min(end, stop) - start])
    return found
    ### END SOLUTION


# %%
check("pieces")

# %% [markdown]
# In the package a sample has a number before shuffling and one after it. Your function reads a training set through
# minimegatron's hook `spans`, and the batches are the same:

# %%
# %%needs pieces
import torch

trainer = recipe.trainer(HOME, iters=150)
theirs = trainer.train_set.batch(range(64))["tokens"]


def spans(k):
    indices, i = trainer.train_set.epochs.find(k)
    lengths = trainer.train_set.dataset.sequence_lengths[indices.document_index].tolist()
    return [(int(indices.document_index[at]), a, z - a) for at, a, z in pieces(lengths, 32, i)]


trainer.train_set.spans = spans
print("64 samples by your pieces are the package's:", torch.equal(trainer.train_set.batch(range(64))["tokens"], theirs))
print(f"150 steps of 16 samples read {list(trainer.train_set.read_epochs(150 * 16).values())[0]:.1f} epochs of it")
trainer.close()

# %% [markdown]
# ### The rate of a step
#
# At first Adam's averages are noise: the rate rises from 0 to its peak, `warmup` steps long. At the end the weights
# should settle: it falls to a floor. Two ways are in use for what lies between, and they differ in what you must know
# beforehand.
#
# * *Cosine*: from the end of the warm-up to `end` the rate falls along half a cosine, slowly, then fast, then slowly.
# * *WSD*: warm-up, stable, decay. The rate stays at the peak until `fall` steps before `end`. Then it falls as 1 - √x
#   does, where x is the part of the fall that is behind it: fast first.
#
# An example: peak 10, floor 2, `warmup` 4, `end` 12, `fall` 4. At step 3 both have 7.5, at step 4 both have 10. At
# step 8 the cosine is half-way down, at 6, and WSD still has 10. At step 9 a quarter of WSD's fall is over, and half
# of the way down: 6. Beyond `end` both have 2.
#
# **Exercise.** The rate of step `n`. `warmup` may be 0, and WSD may have no plateau.

# %%
# %%exercise rate
import math


def rate(n: int, plan: dict) -> float:
    """plan: style ("cosine" or "wsd"), peak, floor, warmup, end, fall."""
    ### BEGIN SOLUTION
    peak, floor, warmup, end = plan["peak"], plan["floor"], plan["warmup"], plan["end"]
    if n < warmup:
        return peak * n / warmup
    begin = warmup if plan["style"] == "cosine" else end - plan["fall"]
    if n <= begin:
        return peak
    if n >= end:
        return floor
    part = (n - begin) / (end - begin)
    left = (1 + math.cos(math.pi * part)) / 2 if plan["style"] == "cosine" else 1 - math.sqrt(part)
    return floor + (peak - floor) * left
    ### END SOLUTION


# %%
check("rate")

# %% [markdown]
# Somebody wants the run to be twice as long, after it has ended. What does each plan say about the steps that it has
# taken already? And a question: where the plan of 100 steps and the plan of 200 have the same warm-up, how many of
# the first 100 rates are the same?

# %%
guess("same", None, "WSD, warm-up 10, fall 20, planned for 100 and for 200 steps: how many of 100 rates agree?")

# %%
# %%needs rate
shape = {"peak": 1.0, "floor": 0.0, "warmup": 10, "fall": 20}
plans = {style: [{"style": style, "end": end, **shape} for end in (100, 200)] for style in ("cosine", "wsd")}
shared = {style: sum(abs(rate(n, a) - rate(n, b)) < 1e-12 for n in range(1, 101)) for style, (a, b) in plans.items()}
guessed("same", shared["wsd"], f"with WSD, and {shared['cosine']} with a cosine")
curves({style: {f"planned for {plan['end']}": [rate(n, plan) for n in range(201)] for plan in both}
        for style, both in plans.items()}, ylabel="rate")  # fmt: skip

# %% [markdown]
# A WSD run goes on from the end of its plateau, and nothing was done in vain. A loss in the middle of a cosine is not
# the loss of a run of half the length: its rate is still high. Laws that were fitted to such losses were wrong
# (Hoffmann et al. 2022 trained each model with a plan of its own).
#
# *This is a good place to stop: the end of part B.*

# %% [markdown]
# ### A law through small models
#
# Train models of several sizes N on the same tokens. Their losses fall on a curve
#
# > L(N) = E + A / N^α
#
# E is what no model of any size gets below with this data: the entropy of the text, and what so few tokens do not
# tell. Who leaves E out and draws a straight line through the logarithms of the losses promises larger models a loss
# that they do not reach.
#
# An example: the losses 4, 3, 2.5 and 2.25 of models with 16, 64, 256 and 1024 parameters. Their differences are
# halved each time. So they fall towards 2, and what is above 2 is 8 / √N.
#
# **Exercise.** Find E, A and α from four or five losses, in any order of sizes. How you do it is up to you: a
# search may take a few seconds, and there are numpy and torch. You are judged by what your law says about a model four
# times as large as the largest, with exact losses, and with losses that have a little noise.

# %%
# %%exercise fit
import torch


def fit(sizes: list[int], losses: list[float]) -> dict[str, float]:
    """{"E": 2.0, "A": 8.0, "alpha": 0.5} in the example."""
    ### BEGIN SOLUTION
    n, loss = torch.tensor(sizes, dtype=torch.float64), torch.tensor(losses, dtype=torch.float64)
    low, spread = loss.min(), loss.max() - loss.min()
    below = spread * torch.logspace(-4, 1.5, 6000, dtype=torch.float64)
    floors = torch.cat([low - below[below < low], torch.zeros(1, dtype=torch.float64)])[:, None]
    x, y = n.log() - n.log().mean(), (loss - floors).log()
    slope = (x * y).sum(1) / (x * x).sum()
    shown = floors + (y.mean(1)[:, None] + slope[:, None] * x).exp()
    best = (shown - loss).square().sum(1).argmin()
    a = (y[best].mean() - slope[best] * n.log().mean()).exp()
    return {"E": floors[best].item(), "A": a.item(), "alpha": -slope[best].item()}
    ### END SOLUTION


# %%
check("fit")

# %% [markdown]
# Now four models, of widths 4, 6, 8 and 12, on two ranks, 120 steps each. Each is trained four times, with another
# seed: a single loss is a draw. The mean losses on held-out stories are your data.

# %%
# %%ranks 2 --name four --out four --timeout 120
from pathlib import Path

from course.lab09 import recipe
from minimegatron.comm.mesh import Mesh

HOME = Path(__file__).parent / "data"
found = []
SEEDS = (1, 2, 3, 4)
for h, seed in [(h, seed) for h in ((4, 12), (6, 8))[rank] for seed in SEEDS]:
    trainer = recipe.trainer(HOME, "--eval-interval 120", h, seed=seed, mesh=Mesh.serial())
    trainer.train()
    found.append((sum(p.numel() for p in trainer.model.parameters()), trainer.state.validation_loss))
    trainer.close()
report(found)

# %% [markdown]
# Predict the fifth before you train it: width 24. Beside your law stand the two guesses of those who fit none: "a
# straight line through the logarithms", and "as the largest one so far".

# %%
# %%needs fit
import math

SEEDS = (1, 2, 3, 4)
fifth, *others = (recipe.trainer(HOME, "--eval-interval 120", 24, seed=seed) for seed in SEEDS)
runs = [tuple(point) for of_rank in four for point in of_rank]
sizes = sorted({n for n, _ in runs})
losses = [sum(loss for n, loss in runs if n == size) / len(SEEDS) for size in sizes]
n5 = sum(p.numel() for p in fifth.model.parameters())
law = fit(sizes, losses)
x, y = [math.log(n) for n in sizes], [math.log(loss) for loss in losses]
mx, my = sum(x) / 4, sum(y) / 4
slope = sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)
predicted = {"your law": law["E"] + law["A"] * n5 ** -law["alpha"],
             "a straight line": math.exp(my + slope * (math.log(n5) - mx)),
             "as the largest so far": losses[-1]}  # fmt: skip
print(f"{sizes[0]:,} to {sizes[-1]:,} parameters were trained; the fifth has {n5:,}")

# %%
# %%needs fit
from course.figures.training import law_of_sizes

for trainer in (fifth, *others):
    trainer.train()
runs += [(n5, trainer.state.validation_loss) for trainer in (fifth, *others)]
reached = sum(loss for n, loss in runs if n == n5) / len(SEEDS)
for trainer in others:
    trainer.close()
guessed("off", "less than 2" if abs(predicted["your law"] / reached - 1) < 0.02 else "more than 2", "percent")
missed = {said: abs(value - reached) for said, value in predicted.items()}
print("your law is nearer than a straight line:", missed.pop("your law") < missed["a straight line"])
ways = {said: predicted[said] for said in missed}
law_of_sizes(list(zip(sizes, losses)), (n5, reached), law, floor=nats / each, runs=runs, others=ways)

# %% [markdown]
# A pale dot is a single run. At width 4 a seed moves the loss by more than a percent, as much as a doubling of the
# larger sizes. So a law through one run of each is a draw as well: for 19 seeds, taken one by one, it was off by up to
# 2.7 percent, and only in 12 of them nearer than "as the largest so far". Through means of four it was off by 0.4 to
# 0.9 percent, and "as the largest so far" by 1.2 to 1.3. A straight line promised too much with every seed, by 1.8 to
# 6.6 percent.
#
# The dotted line is the entropy of the language. E should lie above it: with 61,000 tokens a model of any size has not
# seen the rare pairs often enough. But four sizes do not fix E: from one four of seeds to the next it moves by 0.07,
# and in two of four it lies below the dotted line, where no model comes. A law is good for what lies near its data.
# More tokens lower E, more parameters do not: the second part of the law, B / D^β, is hidden in it. Minimise both parts
# with C = 6 N D FLOPs, and N and D grow together: about 20 tokens a parameter, in the fit of Hoffmann et al. 2022.
# (Besiroglu et al. 2024 fitted its points once more: the third of the paper's three fits did not agree with the other
# two, nor with its own conclusion.)

# %% [markdown]
# ### The work of a step
#
# A hunt for throughput begins with what is counted, because a second has many causes and a count has one. Four ranks
# train a Llama of two layers. Every layer is recomputed, "to be safe", tp is 4, "so that it fits", and a microbatch
# has one sample. In which order would you change that, and what does each change save?
#
# From lab 02: with tp a layer sums two results over the ranks in the forward pass and two gradients in the backward
# pass. The embedding sums its result, and the output layer the gradient of its input. Each sum is one all-reduce of a
# tensor [b, s, h] in fp32. (The few numbers a token of the loss are left out here.) Recompute runs each layer forward
# once more, as far as its backward pass needs: is the result of the layer's *last* sum needed? dp sums all gradients,
# fp32, once a step, whatever the number of microbatches.
#
# An example: one layer of 100 weights, an output matrix of 40 weights and an embedding of as many, h = 4, s = 5, tp
# 2, dp 2, three microbatches of one sample. A microbatch has 6 sums; so there are 18 messages, of 80 bytes each: 1440
# bytes. A rank computes 3 · 5 · 6 · 140 / 2 = 6300 FLOPs, and sums 4 · 180 / 2 = 360 bytes over dp.
#
# **Exercise.** What one rank does in a step: `flops` of products with weights, forward, backward and recompute (of
# layers alone); `messages` over tp; `tp_bytes`, the sizes of the tensors that are summed, together; and `dp_bytes`.
# An axis of one rank sends nothing. `layer` and `head` are weights of a layer and of the output matrix, `b` and `m`
# the samples of a microbatch and the microbatches of this rank.

# %%
# %%exercise step_work
def step_work(run: dict) -> dict[str, float]:
    """run: layers, h, layer, head, s, tp, dp, b, m, recompute. {"flops": 6300, "messages": 18, ...} in the example."""
    ### BEGIN SOLUTION
    again, tokens = int(run["recompute"]), run["b"] * run["s"]
    weights = run["layers"] * run["layer"]
    messages = run["m"] * (2 + run["layers"] * (4 + again)) if run["tp"] > 1 else 0
    return {
        "flops": run["m"] * tokens * (6 * run["head"] + (6 + 2 * again) * weights) / run["tp"],
        "messages": messages,
        "tp_bytes": messages * tokens * run["h"] * 4,
        "dp_bytes": 4 * (weights + 2 * run["head"]) / run["tp"] if run["dp"] > 1 else 0,
    }
    ### END SOLUTION


# %%
check("step_work")

# %% [markdown]
# *This is a good place to stop: the end of part C.*
#
# ## 4 · Run
#
# ### The hunt
#
# Five runs with the same eight samples a step. Write down your prediction of each change before you look: by what
# factor do FLOPs, messages and bytes change?

# %%
# %%needs step_work
SIZES = {"layers": 2, "h": 64, "layer": 4 * 64 * 64 + 3 * 64 * 128, "head": 64 * 512, "s": 32}
HUNT = {"as found": {"tp": 4, "dp": 1, "b": 1, "m": 8, "recompute": True},
        "no recompute": {"tp": 4, "dp": 1, "b": 1, "m": 8, "recompute": False},
        "tp 2, dp 2": {"tp": 2, "dp": 2, "b": 1, "m": 4, "recompute": False},
        "dp 4": {"tp": 1, "dp": 4, "b": 1, "m": 2, "recompute": False},
        "two samples at once": {"tp": 1, "dp": 4, "b": 2, "m": 1, "recompute": False}}  # fmt: skip
expected = {name: step_work({**SIZES, **run}) for name, run in HUNT.items()}
for name, one in expected.items():
    print(f"{name:20} {one['flops'] / 1e6:5.1f} MFLOPs  {one['messages']:3} messages",
          f" {one['tp_bytes'] / 1e3:6.1f} kB over tp  {one['dp_bytes'] / 1e3:6.1f} kB over dp")  # fmt: skip

# %% [markdown]
# The folded cell runs them on four ranks. `minimegatron.trace` notes each message.

# %% jupyter={"source_hidden": true}
# %%ranks 4 --name hunt --out hunt --timeout 120
import time

import torch

from minimegatron import trace
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config
from minimegatron.parallel.data.ddp import data_parallel
from minimegatron.parallel.data.finalize import finalize_model_grads
from minimegatron.training.step import forward_backward, forward_step

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
found = []
for tp, b, m, recompute in ((4, 1, 8, True), (4, 1, 8, False), (2, 1, 4, False), (1, 1, 2, False), (1, 2, 1, False)):
    config = family_config("llama", num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=4,
                           ffn_hidden_size=128, vocab_size=512, **(RECOMPUTE if recompute else {}))  # fmt: skip
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=tp))
    model = data_parallel(build_model(config, mesh, 1), mesh)
    tokens = torch.randint(0, 512, (8, 33), generator=torch.Generator().manual_seed(2))
    mine = tokens[mesh.dp.rank * b * m :]
    batches = [{"tokens": mine[i * b : (i + 1) * b, :-1], "labels": mine[i * b : (i + 1) * b, 1:],
                "loss_mask": torch.ones(b, 32)} for i in range(m)]  # fmt: skip
    seconds = []
    for _ in range(4):
        model.zero_grad_buffer()
        begun = time.perf_counter()
        with trace.record(rank) as log:
            counted, _ = forward_backward(forward_step, iter(batches), model, m, lambda loss: loss)
            finalize_model_grads(model, mesh, counted)
        seconds.append(time.perf_counter() - begun)
    sums = [event.nbytes for event in log.select("all_reduce", axis="tp") if event.nbytes >= b * 32 * 64 * 4]
    found.append({"messages": len(sums), "tp_bytes": sum(sums), "dp_bytes": log.nbytes("all_reduce", axis="dp_cp"),
                  "seconds": min(seconds)})  # fmt: skip
report(found)

# %%
# %%needs step_work
for name, one, told in zip(expected, expected.values(), hunt[0]):
    same = (one["messages"], one["tp_bytes"]) == (told["messages"], told["tp_bytes"])
    near = abs(told["dp_bytes"] - one["dp_bytes"]) < 0.01 * one["dp_bytes"] or told["dp_bytes"] == one["dp_bytes"]
    print(f"{name:20} messages and bytes over tp as predicted: {same!s:6} bytes over dp within 1 %: {near}")

# %% [markdown]
# ### The run, killed and resumed
#
# Your model: 120 steps on two ranks with dp, saved every 30, with your rate. At step 80 rank 1 is killed by SIGKILL,
# which nothing can catch. What is on disk then, and how many steps are lost?

# %%
guess("lost", None, "Saved every 30 steps, killed at step 80: how many steps are computed twice?")

# %%
# %%ranks 2 --needs rate --name killed --expect-failure --timeout 120
import os
import shutil
import signal
from pathlib import Path

from exercises.rate import rate

from course.lab09 import recipe

HERE = Path(__file__).parent
PLAN = {"style": "wsd", "peak": 0.012, "floor": 0.0002, "warmup": 20, "end": 120, "fall": 48}
if rank == 0:
    shutil.rmtree(HERE / "saved", ignore_errors=True)
flags = f"--attention-dropout 0.1 --hidden-dropout 0.1 --save {HERE}/saved --save-interval 30"
trainer = recipe.trainer(HERE / "data", flags, ranks=2, seed=1)
recipe.follow(trainer, lambda n: rate(n, PLAN))
step = trainer.forward_step


def dies(*args):
    if rank == 1 and trainer.state.iteration == 80:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*args)


trainer.forward_step = dies
trainer.train()

# %% [markdown]
# The same command again finds the newest whole checkpoint and goes on. Beside it runs one that was never stopped.
# Both have dropout. How many of their losses agree to the last bit?

# %%
# %%ranks 2 --needs rate --name resumed --out both --timeout 120
from pathlib import Path

from exercises.rate import rate

from course.lab09 import recipe

HERE = Path(__file__).parent
PLAN = {"style": "wsd", "peak": 0.012, "floor": 0.0002, "warmup": 20, "end": 120, "fall": 48}
found = []
for load in ("", f" --load {HERE}/saved"):
    flags = f"--attention-dropout 0.1 --hidden-dropout 0.1{load}"
    trainer = recipe.trainer(HERE / "data", flags, ranks=2, seed=1)
    recipe.follow(trainer, lambda n: rate(n, PLAN))
    first = trainer.state.iteration
    trainer.train()
    trainer.close()
    weights = [p.detach().double().square().sum().item() for p in trainer.model.parameters()]
    losses = [one.losses["lm loss"] for one in trainer.history]
    found.append({"first": first, "losses": losses, "weights": weights})
report(found)

# %%
# %%needs rate
straight, resumed = both[0]
guessed("lost", 80 - resumed["first"], "steps")
same = sum(a == b for a, b in zip(straight["losses"][resumed["first"] :], resumed["losses"], strict=True))
print(f"resumed after step {resumed['first']}: {same} of {len(resumed['losses'])} losses are the same to the last bit,",
      "and so are the weights:", straight["weights"] == resumed["weights"])  # fmt: skip

# %% [markdown]
# All of them, with dropout. The checkpoint has the weights, Adam's averages, the loss scale, the random streams of
# every rank, and one number that says where the run was: how many samples it has consumed. Order of the samples,
# batch size and rate are functions of that number, so nothing of them is stored, and the same checkpoint goes on with
# another dp.
#
# ## 5 · See
#
# ### The hunt

# %%
# %%needs step_work
from course.figures.training import panels_of_bars

panels_of_bars({"MFLOPs of a rank": [one["flops"] / 1e6 for one in expected.values()],
                "messages": [one["messages"] + (one["dp_bytes"] > 0) for one in expected.values()],
                "ms, measured here": [1e3 * max(of[i]["seconds"] for of in hunt) for i in range(len(expected))]},
               list(expected))  # fmt: skip

# %% [markdown]
# FLOPs fall once, by the recompute. Then only messages fall, and the seconds with them: products this small wait for
# each other. The last change saves no FLOP, no message and no byte: it halves the number of products, each of them
# twice as large. On a GPU the counts are the same, and the seconds are others; lab 12 has them. A gain that nobody
# predicted is a question, not a success: is the work still the same?
#
# ### A model that continues sentences

# %%
# %%needs fit
import torch

from minimegatron.data.tokenizer import HuggingFaceTokenizer

tokenizer = HuggingFaceTokenizer(str(HOME / "tokenizer"))


def continued(prompt, rows, length=27, seed=3):
    """Stories that the model draws behind the prompt, up to their end or to the length."""
    g, model = torch.Generator().manual_seed(seed), fifth.model.module.eval()
    ids = torch.tensor([[tokenizer.eod, *tokenizer.tokenize(prompt)]] * rows)
    with torch.no_grad():
        while ids.shape[1] <= length:
            ids = torch.cat([ids, torch.multinomial(model(ids)[-1].softmax(-1), 1, generator=g)], 1)
    rows = [row[1:] + [tokenizer.eod] for row in ids.tolist()]
    return [tokenizer.detokenize(row[: row.index(tokenizer.eod)]) for row in rows]


texts = continued("old sailor", 100)
whole = [line for text in texts for line in text.split("\n") if line.endswith(".")]
good = sum(map(language.is_sentence, whole)) / len(whole)
print("more than nine of ten lines are sentences of the language:", good > 0.9)

# %% [markdown]
# The rules that a sentence has five kinds of words, and which come after which, were in no place but the stories.
#
# *This is a good place to stop: the end of part D.*
#
# ## 6 · Break it
#
# ### A NaN
#
# When all labels of a row are masked, the mean over its tokens is 0 / 0. So it is in PyTorch since 1.11, and it is
# asked about in many trackers: a fine-tuning runs for an hour, and then the loss is NaN. It is no accident of the
# seed: somewhere there is a row in which nothing counts, for example since the prompt fills it.
#
# A colleague does not want to learn from texts whose beginning was cut off. So labels count behind the first
# end-of-story token of a row, and a row's loss is the mean over those. The folded cell is the run, on two ranks with
# two microbatches of four samples each. minimegatron takes a bad step again and names the sample; `--rerun-mode
# disabled` turns that off here, since this search is yours.

# %% jupyter={"source_hidden": true}
# %%ranks 2 --name nan --out nan --timeout 120
from pathlib import Path

import torch

from course.lab09 import recipe
from minimegatron.errors import BadStep

LONG = "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 4 --rerun-mode disabled"
trainer = recipe.trainer(Path(__file__).parent / "data", LONG, 8, iters=80, ranks=2)
eod = 0


def colleagues_step(batches, model):
    batch = next(batches)
    output = model(batch["tokens"], batch.get("position_ids"), batch["labels"])
    counts = ((batch["tokens"] == eod).cumsum(1) > 0).float()

    def summed(losses):
        total = ((losses * counts).sum(1) / counts.sum(1)).sum()
        rows = torch.tensor(float(len(losses)), dtype=torch.float64)
        return total, rows, {"lm loss": torch.stack([total.detach().double(), rows])}

    return output, summed


trainer.forward_step = colleagues_step
try:
    trainer.train()
except BadStep as error:
    print(f"step {trainer.state.iteration}: {error}")
    report({"step": trainer.state.iteration, "text": str(error)})

# %% [markdown]
# The error names a rank. Of the 16 samples of the step this rank has 8, in two microbatches: with four samples on
# each of two ranks, microbatch j of rank r has the samples 16 · step + 8 j + 4 r, and the three behind it. Which of
# them is it? A replay costs a forward pass of the samples that it is given. On a real cluster it costs minutes.
#
# **Exercise.** `replay(samples)` gives the loss of these samples together, NaN if any one of them is bad. Return all
# bad samples of a list, in any order. There may be none, one or a few. Asking for each of them is too many: let r be
# log₂ n, rounded up. Where k of n samples are bad you need at most 1 + 2 k r replays.

# %%
# %%exercise bad_samples
import math


def bad_samples(replay, samples: list[int]) -> list[int]:
    """replay(list of samples) -> a float; the samples that make it NaN."""
    ### BEGIN SOLUTION
    if not math.isnan(replay(samples)):
        return []
    if len(samples) == 1:
        return list(samples)
    half = len(samples) // 2
    return bad_samples(replay, samples[:half]) + bad_samples(replay, samples[half:])
    ### END SOLUTION


# %%
check("bad_samples")

# %%
# %%needs bad_samples pieces
LONG = "--seq-length 128 --max-position-embeddings 128"
replayed = recipe.trainer(HOME, LONG, 8, iters=80)
step, rank = nan[0]["step"], int("rank 1" in nan[0]["text"])
asked = []


def replay(samples):
    asked.append(len(samples))
    batch = replayed.train_set.batch(samples)
    with torch.no_grad():
        losses = replayed.model.module(batch["tokens"], None, batch["labels"])
    counts = ((batch["tokens"] == 0).cumsum(1) > 0).float()
    return float(((losses * counts).sum(1) / counts.sum(1)).mean())


mine = [16 * step + 8 * j + 4 * rank + i for j in range(2) for i in range(4)]
found = bad_samples(replay, mine)
print(f"step {step}, rank {rank}: of samples {mine[:4]} and {mine[4:]} it is {found}, by {len(asked)} replays")
for sample in found:
    indices, i = replayed.train_set.epochs.find(sample)
    lengths = replayed.train_set.dataset.sequence_lengths[indices.document_index].tolist()
    for at, first, last in pieces(lengths, 128, i):
        print(f"  tokens {first} to {last} of a story of {lengths[at]} tokens")
replayed.close()

# %% [markdown]
# A long story fills the row: no story ends in its inputs, so nothing counts. The repair is to sum losses and counts
# over all rows and ranks, and to divide once, as minimegatron does (section 2 of lab 11 has what the ways of dividing
# do).
#
# ### A spike
#
# PaLM's authors saw the loss jump about twenty times. Each time they went back 100 steps, and left out 200 to 500
# batches; the same batches did no harm elsewhere. OPT-175B's logbook has weeks of such days. The authors of OLMo 2
# looked into the batches, and found texts in which a few tokens are repeated over and over; they leave out sequences
# with 32 or more repeats of up to 13 tokens. Here is the log of another run, saved every 45 steps. After the first 40
# steps, at which one is it?

# %% jupyter={"source_hidden": true}
import shutil

shutil.rmtree(HOME / "loud", ignore_errors=True)
loud = [*kept[:2437], "\n".join(["old sailor paints" + " boats" * 60 + "."] * 2), *kept[2437:]]
recipe.prepare(HOME, loud, "loud")
watched = recipe.trainer(HOME, f"--save {HOME}/loud --save-interval 45 --no-save-optim", 16, iters=130, name="loud")
watched.train()
watched.close()
norms = [one.grad_norm for one in watched.history]
spike = 40 + norms[40:].index(max(norms[40:]))
curves({"loss": {"": [one.losses["lm loss"] for one in watched.history]}, "norm of the gradient": {"": norms}})

# %% [markdown]
# The loss shows it hardly: it is a mean over 512 tokens, of which a few are strange. The norm of the gradient shows
# it, four times as large as its neighbours. (It is the norm before clipping, which is off here.)
#
# To replay the step take the checkpoint before it. And give your own search another replay, since nothing is NaN: in
# a batch a bad sample hides behind good ones. So this replay returns NaN where *any* sample has a loss above 3.5 nats
# a token.

# %%
# %%needs bad_samples pieces
saved = f"--load {HOME}/loud --ckpt-step 90 --no-load-optim --no-load-rng"
before = recipe.trainer(HOME, saved, 16, iters=130, name="loud")
asked = []


def loud_replay(samples):
    asked.append(len(samples))
    batch = before.train_set.batch(samples)
    with torch.no_grad():
        losses = before.model.module(batch["tokens"], None, batch["labels"]).mean(1)
    return float("nan") if bool((losses > 3.5).any()) else float(losses.mean())


found = bad_samples(loud_replay, list(range(16 * spike, 16 * spike + 16)))
stories = set()
for sample in found:
    indices, i = before.train_set.epochs.find(sample)
    lengths = before.train_set.dataset.sequence_lengths[indices.document_index].tolist()
    stories |= {int(indices.document_index[at]) for at, a, z in pieces(lengths, 32, i) if z - a > 8}
print(f"step {spike}: {len(found)} of 16 samples, by {len(asked)} replays of {sum(asked)} samples in all")
for story in sorted(stories):
    [(word, times)] = Counter(loud[story].split()).most_common(1)
    print(f"story {story} has {times} times {word!r}: {loud[story][:44]!r} ...")

# %% [markdown]
# Here the run recovers at once. The cause is a document, and not the step, so the cure is a filter before the run.
# While it runs, `--spiky-loss-factor 2 --bad-step skip` leaves out a batch whose loss is twice that of the steps
# before; this one it would have missed.
#
# ### A resume
#
# The third fault is a colleague's code that resumes. "I take the rate that the optimizer has, and build the schedule
# from it." The folded cell saves a run at step 45, lets it go on, and resumes it beside. The logs differ from some
# step on. What has been forgotten: a part of the state, which one?

# %% jupyter={"source_hidden": true}
import dataclasses

shutil.rmtree(HOME / "saved", ignore_errors=True)
first = recipe.trainer(HOME, f"--save {HOME}/saved --save-interval 45 --exit-interval 45", 16, iters=60, seed=1)
first.train()
first.close()


def gone_on(change):
    """The log of 15 more steps of a run that was resumed, and changed by somebody."""
    run = recipe.trainer(HOME, f"--load {HOME}/saved", 16, iters=60, seed=1)
    change(run)
    with torch.no_grad():
        batch = run.train_set.batch(range(64))
        held = run.model.module(batch["tokens"], None, batch["labels"]).mean().item()
    run.train()
    run.close()
    return {"check": held, **recipe.log_of(run, 15)}


def colleagues_resume(run):
    peak = run.scheduler.lr  # "the optimizer knows its rate"
    run.scheduler.schedule = dataclasses.replace(run.scheduler.schedule, max_lr=peak)


sound, doubtful = gone_on(lambda run: None), gone_on(colleagues_resume)
for name in sound:
    print(f"{name:6} the same: {sound[name] == doubtful[name]!s:6}",
          "" if name == "check" else f"in the first step: {sound[name][0] == doubtful[name][0]}")  # fmt: skip

# %% [markdown]
# Every part of a run's state leaves a trace of its own: in the first step or later, in this column or in that one.
# Think of a run that has dropout, and for each of these six of what the log of the resumed run would show:
#
# > weights · moments (Adam's) · schedule · position (in the data) · streams (of random numbers) · scale (of the loss)
#
# A log has lists with an entry for each step since the resume: `first`, the number of the step's first sample;
# `rate`; `scale`, the loss scale; `loss`, with dropout; `norm`, of the gradient. And a number `check`: the loss of
# fixed samples before the first of these steps, without dropout. Resumed right, all numbers are the same to the last
# bit.
#
# **Exercise.** Return the name of the part that was forgotten, or "nothing". One part at most is forgotten. If a part
# is forgotten that does nothing (streams without dropout), nothing is.

# %%
# %%exercise forgotten
def forgotten(straight: dict, resumed: dict) -> str:
    """"weights", "moments", "schedule", "position", "streams", "scale" or "nothing"."""
    ### BEGIN SOLUTION
    for column, part in (("check", "weights"), ("first", "position"), ("rate", "schedule"), ("scale", "scale")):
        if straight[column] != resumed[column]:
            return part
    if straight["loss"][0] != resumed["loss"][0]:
        return "streams"
    return "moments" if straight["loss"] != resumed["loss"] else "nothing"
    ### END SOLUTION


# %%
check("forgotten")

# %%
# %%needs forgotten
print("it has forgotten:", forgotten(sound, doubtful))
curves({"rate": {"never stopped": sound["rate"], "resumed": doubtful["rate"]},
        "loss": {"never stopped": sound["loss"], "resumed": doubtful["loss"]}}, xs=list(range(45, 60)))  # fmt: skip

# %% [markdown]
# The new plan falls from where the old one had fallen to, so the rate falls twice. That is nanotron's issue 233: the
# optimizer's state was loaded before the schedule was built, and the schedule took the rate in it for the peak. A
# loss curve does not show it. (minimegatron stores the plan's numbers, and refuses a resume with others, unless a
# flag says which shall win.)
#
# ## 7 · Explain
#
# Questions that an interviewer asks. Say your answer aloud before you open the one here.
#
# 1. *Two papers report an MFU of 50 % and of 55 % for the same model and the same cards. Which run was faster?*
#    <details><summary>answer</summary>Nobody knows before both say what they counted: the causal half of attention or
#    all of it, recompute or not, the dense peak or another. Tokens a second and card can be compared.</details>
# 2. *Which epoch am I in?*
#    <details><summary>answer</summary>Consumed samples times s, divided by the tokens of the stream. But Megatron
#    shuffles all epochs of a run together, except a last one that is needed for less than 80 %: then there is no
#    moment at which one ends. minimegatron shuffles epoch by epoch unless it is told otherwise.</details>
# 3. *The log says "grad norm 12", and clipping is at 1. Is it broken?*
#    <details><summary>answer</summary>No: what is logged is the norm before clipping, in Megatron and here.</details>
# 4. *Why not simply the largest vocabulary?*
#    <details><summary>answer</summary>Each token costs 2 h parameters and a column of the output product for every
#    position. A rare one saves few positions, and is seen too seldom to be learned.</details>
# 5. *Your law predicts 2.05, the run ends at 2.15. What do you check first?*
#    <details><summary>answer</summary>Whether the large run had what the small ones had: the whole of its plan of
#    rates, a rate scaled to its width, the same data and tokenizer, the same loss. Then whether the fit had a
#    floor.</details>
# 6. *Gradients are accumulated over microbatches with 10 and 1000 counted tokens, each by its own mean. What
#    happens?*
#    <details><summary>answer</summary>A token of the first weighs 100 times as much as one of the second. So it was
#    in Hugging Face's Trainer and others until October 2024. The loss falls all the same. But the first gradient
#    depends on how the batch was cut, and that is a test: compute it for two cuts.</details>
# 7. *A run is resumed on half of the GPUs. What changes in its losses?*
#    <details><summary>answer</summary>The order of sums, so last digits, and random streams of dropout. Samples,
#    rates and batch sizes do not change.</details>
# 8. *The fp16 loss scale is halved again and again. What does that mean?*
#    <details><summary>answer</summary>Gradients overflow at every scale: one of them is not finite for another
#    reason, or they grow. Below 1 nothing is left to save. OPT-175B's team took a scale that ran towards 0 as the
#    sign to go back and lower the rate. bf16 has the range of fp32 and needs no scale.</details>
#
# **Exercise.** Numbers for a run. Return a dict:
#
# * `days`: of `parameters` · `tokens` · 6 FLOPs on `gpus` with a peak of `peak` TFLOP/s each, at `mfu`;
# * `best_parameters`, `best_tokens`: the model that has 20 tokens a parameter and costs as many FLOPs;
# * `bits_per_byte`: of a loss of `nats` a token, with `token_bytes` bytes a token;
# * `times`: microbatches with `counts` counted tokens are each averaged by themselves. How many times as much as the
#   token that weighs least does the one weigh that weighs most?
# * `saved`: those of `parts`, in their order, that must be in a checkpoint, so that a run in fp16 with dropout goes
#   on bit for bit in the same layout. What can be computed from the configuration and from other saved parts, at the
#   moment of the save between two steps, is not saved. Possible parts: `weights`, `Adam's moments`, `consumed
#   samples`, `dropout's random streams`, `loss scale`, `gradients`, `learning rate`, `order of the samples`, `batch
#   size of the ramp-up`, `gradient norm`, `epoch`.

# %%
# %%exercise answers
import math


def answers(
    parameters: float, tokens: float, gpus: int, peak: float, mfu: float, nats: float, token_bytes: float,
    counts: list[int], parts: list[str],
) -> dict[str, object]:  # fmt: skip
    """{"days": ..., "best_parameters": ..., ..., "saved": ["weights"]}"""
    ### BEGIN SOLUTION
    flops = 6 * parameters * tokens
    best = math.sqrt(flops / 120)
    state = {"weights", "Adam's moments", "consumed samples", "dropout's random streams", "loss scale"}
    return {
        "days": flops / (gpus * peak * 1e12 * mfu) / 86_400,
        "best_parameters": best,
        "best_tokens": 20 * best,
        "bits_per_byte": nats / math.log(2) / token_bytes,
        "times": max(counts) / min(counts),
        "saved": [part for part in parts if part in state],
    }
    ### END SOLUTION


# %%
check("answers")

# %%
progress()

# %% [markdown]
# ## Where this lives
#
# | here | minimegatron | Megatron-LM |
# |---|---|---|
# | MFU | `training/flops.py` | `num_floating_point_operations` in `megatron/training/training.py` |
# | merges, vocabulary | `data/tokenizer_training.py`, `tokenizers` | `megatron/core/tokenizers/` |
# | epochs, pieces | `data/indices.py`, `data/gpt_dataset.py` | `megatron/core/datasets/gpt_dataset.py` |
# | lines that are dropped | `data/jsonl.py`, `minimegatron.data.preprocess --on-bad-line skip` | `tools/preprocess_data.py` |
# | rates | `optim/schedule.py` | `megatron/core/optimizer_param_scheduler.py` |
# | messages of a step | `trace.py`, `planner/traffic.py` | |
# | what a resumed run needs | `training/run_state.py`, `same_run.py` | `generate_state_dict` in `megatron/training/checkpointing.py` |
# | NaN and spikes | `training/trainer.py` (`--bad-step`), `training/reports.py` | `megatron/core/rerun_state_machine.py` |
# | ranks beside one process | `--check-first-step`, `--check-replicas-interval` | `--check-weight-hash-across-dp-replicas-interval` |
#
# Llama Team 2024 (arXiv 2407.21783), for the 405B run, its interruptions in 54 days and its MFU; Sennrich et al. 2016, BPE
# (1508.07909); Hu et al. 2024, MiniCPM, for WSD (2404.06395); Kaplan et al. 2020 (2001.08361), Hoffmann et al. 2022
# (2203.15556) and Besiroglu et al. 2024 (2404.10102), laws of scale; Chowdhery et al. 2022, PaLM (2204.02311); Zhang
# et al. 2022, OPT (2205.01068), and its logbook; OLMo Team 2024, 2 OLMo 2 Furious (2501.00656); nanotron's issue 233
# and PyTorch's issue 70348.
#
# Next: lab 10, inference and serving.

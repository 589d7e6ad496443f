# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Lab 10 · Inference and serving
#
# A trained model answers one token at a time. Each token needs all weights once more, and the keys and values of
# everything that was said before. A server does this for many people at once, who come and go as they like.
#
# **You build** the parts of an engine that decide how many tokens a second come out: a prediction from bytes and
# bandwidth; attention over pages, and an index that finds pages again; a scheduler, which then plans the steps of
# minimegatron's own engine behind an HTTP server; and the rule by which tokens that a cheap proposer has guessed are
# accepted. At the end you find two bugs in a colleague's engine, which answers wrongly only in company.
#
# **You need** attention with query heads and groups (lab 02) and softmax. No GPU.
#
# | part | sections | time |
# |---|---|---|
# | A | 1 The problem · 2 Predict | 20 min |
# | B | 3 Implement: pages, steps, proposals | 1 h 20 min |
# | C | 4 Run · 5 See | 20 min |
# | D | 6 Break it · 7 Explain | 25 min |
#
# Together about 2 and a half hours. Each part ends at a place to stop. After a kernel restart: run the first cell, then go on
# where you were. A picture needs the run above it.

# %%
# %load_ext course
# %lab 10_inference_serving

# %% [markdown]
# First two guesses. Llama 3 8B runs on one H100 and answers one person. Which share of the GPU's arithmetic does it
# use, in percent?

# %%
guess("share", None, "Llama 3 8B answers one person on an H100: percent of the peak FLOP/s?")

# %% [markdown]
# A server takes four requests, computes them together until all four answers are complete, and then takes the next
# four. The answers have 12, 3, 5 and 2 tokens, then 9, 2, 4 and 3. A step makes one token of each answer that is not
# complete. How much of the four places is in use, on average, in percent?

# %%
guess("used", None, "Batches of 12, 3, 5, 2 and of 9, 2, 4, 3 tokens in 4 places: percent in use?")

# %% [markdown]
# ## 1 · The problem
#
# Llama 3 8B has 8.03·10⁹ parameters, in bf16 16 GB. For one token each parameter is read, multiplied and added: 2
# FLOPs for 2 bytes. An H100 reads 3.35·10¹² bytes a second and computes 989·10¹² FLOPs a second, so in the time of
# one byte it could do 295 FLOPs. One token at a time asks for 1.

# %%
from minimegatron.viz.roofline import roofline

H100 = {"memory": 80e9, "bandwidth": 3.35e12, "flops": 989e12}
points = {"one answer": (1.0, None), "32 answers together": (32.0, None), "a prompt of 1,000 tokens": (1000.0, None)}
roofline({"H100": (H100["flops"], H100["bandwidth"])}, points, title="FLOPs for each byte of a weight")

# %% [markdown]
# A prompt of 1,000 tokens is no problem: all of its tokens are there, so each weight that is read serves 1,000 of
# them. (To read the prompt is called *prefill*, to make the answer *decode*.) An answer's tokens come one after the
# other, since each depends on the one before. Only the answers of *different* requests can share the reading of the
# weights. So everything below is about putting many requests into one step: where their keys and values lie, and who
# is computed when.
#
# ## 2 · Predict
#
# A decode step makes one token for each of n sequences. It reads all weights once, and for each sequence the keys and
# values of all its tokens: the *KV cache*. Each layer keeps for each token a key and a value in each of its groups, d
# numbers each. The step computes 2 FLOPs for each parameter and sequence. Reading and computing go on at the same
# time, so the longer of the two is the time of the step. (The FLOPs of attention itself are left out.)
#
# The cache lies in *pages* of, say, 16 tokens. A sequence takes whole pages, one after the other, as it grows.
#
# An example: 1000 parameters of 2 bytes, 2 layers, 1 group, d = 5. A token leaves 2 · 2 · 1 · 5 = 20 numbers, 40
# bytes. 4 sequences of 25 tokens have 4000 bytes, so a step reads 6000. A GPU that reads 1000 bytes and computes 4000
# FLOPs a second needs 6 seconds for the bytes, 2 for the FLOPs: 6 seconds, 4/6 tokens a second. It has 10,000 bytes
# of memory: beside the weights there is room for 8000, which is 20 pages of 10 tokens. A sequence of 25 tokens takes
# 3 of them, so 6 sequences fit.
#
# **Exercise.** Return a dict: `token`, the bytes that a token leaves in the cache; `read`, the bytes that a decode
# step reads for `sequences` of `length` tokens each; `seconds`, its time; `rate`, the tokens a second of all
# sequences together; and `most`, how many sequences of this length fit into the memory, beside the weights, in pages
# of `page` tokens. `model` has parameters, layers, groups, d, and bytes (of one number); `gpu` has memory, bandwidth
# and flops.

# %%
# %%exercise decode_step
def decode_step(
    model: dict[str, int], sequences: int, length: int, page: int, gpu: dict[str, float]
) -> dict[str, float]:
    """{"token": 40, "read": 6000, "seconds": 6.0, "rate": 4 / 6, "most": 6} in the example."""
    ### BEGIN SOLUTION
    token = 2 * model["layers"] * model["groups"] * model["d"] * model["bytes"]
    weights = model["parameters"] * model["bytes"]
    read = weights + sequences * length * token
    flops = 2 * model["parameters"] * sequences
    seconds = max(read / gpu["bandwidth"], flops / gpu["flops"])
    pages = (gpu["memory"] - weights) // (page * token)
    most = pages // -(-length // page)
    return {"token": token, "read": read, "seconds": seconds, "rate": sequences / seconds, "most": most}
    ### END SOLUTION


# %%
check("decode_step")

# %% [markdown]
# Llama 3 8B, 32 layers of 8 groups with d = 128, when every sequence has 2,000 tokens. (The table of words is read by
# the row, not whole; it is 1/15 of this model, and counted here like the rest.)

# %%
# %%needs decode_step
LLAMA = {"parameters": 8_030_261_248, "layers": 32, "groups": 8, "d": 128, "bytes": 2}
alone = decode_step(LLAMA, 1, 2000, 16, H100)
guessed("share", 100 * 2 * LLAMA["parameters"] * alone["rate"] / H100["flops"], "percent of the peak")
print(f"a token leaves {alone['token']:,} bytes; {int(alone['most'])} sequences of 2,000 tokens fit")
print(f"with memory for 8,192 tokens kept free for each: {int((H100['memory'] - 16.06e9) // (8192 * alone['token']))}")
for n in (1, 16, 64, 243):
    step = decode_step(LLAMA, n, 2000, 16, H100)
    print(f"{n:3} sequences: {step['rate']:6.0f} tokens a second, {1 / step['seconds']:4.0f} for each of them")

# %% [markdown]
# Sixteen people together get 13 times as many tokens as one person. From about 60 sequences on, their caches take
# longer to read than the weights, and more sequences gain less. How many fit at all is decided by memory. Engines
# without pages keep free for each sequence what the longest answer would need, and most of it is never used.
#
# *This is a good place to stop: the end of part A.*
#
# ## 3 · Implement
#
# ### A cache, and pages for it
#
# Attention compares the query of the newest token with the keys of all tokens. Keys of earlier tokens do not change,
# so they are computed once and kept. The cell makes six tokens of one head in both ways.

# %%
import torch

torch.manual_seed(0)
x, (wq, wk, wv) = torch.randn(6, 4), torch.randn(3, 4, 4)


def newest(q, k, v):
    """The output of the newest token: its query q, the keys k and values v of all tokens."""
    return (q @ k.T / 2).softmax(-1) @ v


keys, values, same, computed = [], [], [], 0
for n in range(1, 7):
    anew = newest(x[n - 1] @ wq, x[:n] @ wk, x[:n] @ wv)
    computed += n
    keys.append(x[n - 1] @ wk)
    values.append(x[n - 1] @ wv)
    same.append(torch.allclose(anew, newest(x[n - 1] @ wq, torch.stack(keys), torch.stack(values)), atol=1e-5))
print(f"{sum(same)} of 6 outputs are the same; keys computed: {computed} without a cache, {len(keys)} with one")

# %% [markdown]
# For 1,000 tokens it would be 500,500 keys in place of 1,000.
#
# A list that grows is no good on a GPU: memory is taken once, at the start, and nobody knows how long an answer
# becomes. So it is cut into pages of a few tokens. A sequence has a *block table*, the list of its pages. Token j
# lies in page `table[j // size]`, row `j % size`. In the picture pages have 4 rows; a7 is token 7 of sequence a.

# %%
from course.figures.inference import block_tables

block_tables({"a": [4, 1, 2], "b": [0]}, {"a": 9, "b": 3}, pages=6, size=4)

# %% [markdown]
# If a gets three more tokens they fill page 2. The next one needs a page: 3 or 5, either will do. A sequence wastes
# less than one page, whatever its length.
#
# **Exercise.** Attention of one head for the `n` new tokens of one sequence: one token of an answer, or a piece of a
# prompt. First write their keys and values into `keys` and `values`, in place, behind the `kept` tokens that are
# there. Then return the output of each new token, [n, d]. It sees all tokens of its sequence up to itself, with
# weights softmax(q kᵀ / √d). The table has enough pages. Other rows, also those behind the last token, hold somebody
# else's numbers, or NaN.
#
# An example: pages of 2 rows, the table is [2, 0], and 2 tokens are kept. The new one is token 2 of the sequence. Its
# key goes into page 0, row 0, and it sees three keys: both rows of page 2, and its own.

# %%
# %%exercise attend
import math

import torch


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    table: list[int], kept: int,
) -> torch.Tensor:  # fmt: skip
    """q, k, v [n, d] of the new tokens; keys, values [pages, size, d], written in place -> [n, d]."""
    ### BEGIN SOLUTION
    n, d = q.shape
    size = keys.shape[1]
    for i in range(n):
        page, row = table[(kept + i) // size], (kept + i) % size
        keys[page, row], values[page, row] = k[i], v[i]
    seen_k = keys[table].flatten(0, 1)[: kept + n]
    seen_v = values[table].flatten(0, 1)[: kept + n]
    hidden = torch.arange(kept + n) > torch.arange(kept, kept + n)[:, None]
    scores = (q @ seen_k.T / math.sqrt(d)).masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ seen_v
    ### END SOLUTION


# %%
check("attend")

# %% [markdown]
# ### Pages that are there already
#
# Twenty users ask about the same document, and each of their prompts begins with it. To compute its keys and values
# twenty times is a waste: an engine that finds the pages of earlier requests lets a new one begin with them (*prefix
# caching*). So it needs an index: from tokens to pages.
#
# When does a page hold just what the new request would compute? Its tokens must be the same. Is that enough? Think of
# the second layer: what are its keys computed from? And which pages must not be shared, because somebody still writes
# into them? One more thing: what is found need not be computed. But the first token of the answer comes out of the
# model, and something has to go into it.
#
# **Exercise.** The index of an engine, for pages of `size` tokens:
#
# * `keep(tokens, pages)`: a sequence has these tokens, and their keys and values lie in `pages`, in order. If there is
#   a page with the same contents already, the older one stays in the index.
# * `known(tokens)`: the pages, in order, that a new request with these tokens can begin with; as many as possible.
# * `forget(page)`: this page gets other contents. It may be one that the index never had.
#
# For example, with pages of 2: after `keep([1, 2, 3, 4, 5], [7, 3, 9])` a request `[1, 2, 3, 9]` begins with `[7]`.

# %%
# %%exercise prefixes
class Prefixes:
    """Pages of earlier requests, found by their contents."""

    def __init__(self, size: int):
        self.size = size
        ### BEGIN SOLUTION
        self.pages = {}  # by all tokens up to the end of the page
        ### END SOLUTION

    def keep(self, tokens: list[int], pages: list[int]) -> None:
        ### BEGIN SOLUTION
        for end, page in zip(range(self.size, len(tokens) + 1, self.size), pages):
            self.pages.setdefault(tuple(tokens[:end]), page)
        ### END SOLUTION

    def known(self, tokens: list[int]) -> list[int]:
        ### BEGIN SOLUTION
        pages = []
        for end in range(self.size, len(tokens), self.size):
            page = self.pages.get(tuple(tokens[:end]))
            if page is None:
                break
            pages.append(page)
        return pages
        ### END SOLUTION

    def forget(self, page: int) -> None:
        ### BEGIN SOLUTION
        self.pages = {key: known for key, known in self.pages.items() if known != page}
        ### END SOLUTION


# %%
check("prefixes")

# %% [markdown]
# The twenty users: a document of 1,000 tokens, and a question of 30 for each. How many of the 20,600 tokens are
# computed?

# %%
guess("computed", None, "Of 20,600 tokens of prompts, how many are computed, in pages of 16?")

# %%
# %%needs prefixes
index, fresh, left = Prefixes(16), 1, []
for user in range(20):
    prompt = [*range(1000), *range(10_000 + 30 * user, 10_030 + 30 * user)]
    found = index.known(prompt)
    more = -(-len(prompt) // 16) - len(found)
    index.keep(prompt, [*found, *range(fresh, fresh + more)])
    fresh += more
    left.append(len(prompt) - 16 * len(found))
guessed("computed", sum(left), f"tokens: {left[0]} for the first user, {left[1]} for each of the others")

# %% [markdown]
# The document fills 62 pages; its last 8 tokens share a page with each user's question, and are computed again. An
# index by whole beginnings holds each token many times over. Engines keep less: a page's tokens together with the
# *number of the page before* (minimegatron, and vLLM as a chain of hashes), or a tree (SGLang). What all of them have
# in common is that a page counts its users, and is nobody's only when the last of them has gone. Section 6 shows what
# happens otherwise.
#
# ### Who is computed in a step
#
# The second guess was about *static batching*: a batch is computed until its longest answer is complete. In the
# picture a grey place is a place that nobody uses.

# %%
from course.figures.inference import seats

ANSWERS = {"a": 12, "b": 3, "c": 5, "d": 2, "e": 9, "f": 2, "g": 4, "h": 3}


def static(answers, places):
    """Who is computed in each step, in batches that are computed to their end."""
    names, steps = list(answers), []
    for first in range(0, len(names), places):
        batch = names[first : first + places]
        longest = max(answers[name] for name in batch)
        steps += [[name for name in batch if answers[name] > step] for step in range(longest)]
    return steps


def used(steps, places):
    """Percent of the places that are in use."""
    return 100 * sum(map(len, steps)) / (places * len(steps))


by_batches = static(ANSWERS, 4)
print(f"{len(by_batches)} steps")
guessed("used", used(by_batches, 4), "percent in use")
seats({"static batches": by_batches}, 4)

# %% [markdown]
# One sequence does not need another one beside it. So when one is complete, the next can take its place in the very next
# step: *continuous batching*. And a step need not be all prompts or all answers. Two counts say
# how far a sequence is: `tokens`, how many tokens it has, those of the prompt and those of the answer so far, and
# `computed`, how many of these have their keys and values in pages. A sequence that generates lacks one, its newest
# token; a prompt that has just come lacks all of its tokens. Both are the same thing: tokens that are not computed yet.
# A step computes up to `budget` of them, and a long prompt takes several steps, in *chunks*, while others get their tokens.
#
# The rules, those of minimegatron's engine:
#
# 1. **Those that run**, oldest first. Each gets as many of the tokens it lacks as the budget allows, and takes the
#    pages that are needed beyond those it has.
# 2. If too few pages are free, the *newest* of those that run is *preempted*: it gives back all its pages, which are
#    free at once, and will be computed again later. This is repeated until there are enough pages. The newest may be
#    the sequence itself; then it gets nothing.
# 3. **Those that wait**, in the order of arrival, unless somebody was preempted in this step. Each needs a seat (at
#    most `seats` run at once), some budget, and as many free pages as *all* its tokens and the next one would fill.
#    It gets the tokens that the budget allows, and takes the pages for these only. If it lacks anything, all those
#    behind it wait too.
#
# An example: pages of 4 tokens, 5 of them free, budget 6. a has 9 tokens, 8 of them computed, 2 pages; b 6 tokens, 5
# computed, 2 pages; c and d wait, with 7 and 3 tokens. a's token takes one page, b's has room. 4 tokens are left of
# the budget. c's 7 tokens and the next would fill 2 pages, and 4 are free; so c gets 4 tokens and takes 1 page. Now
# the budget is used up, and d waits.
#
# A second one: three run, no page is free. a, the oldest, needs one, so c, the newest, gives back its page, and a takes
# it. b needs one, too, and is now the newest itself: it gives back what it has, and gets nothing in this step.
#
# **Exercise.** Return the plan of a step: `preempted`, the names in the order in which they lose their pages;
# `chunks`, (name, how many tokens) in the order above, without those that get none. `running` is sorted, the oldest
# first, `waiting` by arrival. A row is a dict with a `name` and three counts: `tokens`, how many tokens the sequence has;
# `computed`, how many of them have their keys and values; `pages`, how many pages it holds. Those that wait have
# `computed` 0 and `pages` 0. `budget`, `seats`, `free` and `size` are numbers, too.

# %%
# %%exercise schedule
def schedule(running: list[dict], waiting: list[dict], budget: int, seats: int, free: int, size: int) -> dict:
    """Rows are {"name": "a", "tokens": 9, "computed": 8, "pages": 2}: counts, not lists.

    {"preempted": [], "chunks": [("a", 1), ("b", 1), ("c", 4)]} in the example.
    """
    ### BEGIN SOLUTION
    chunks, preempted, left = [], [], list(running)
    for one in running:
        count = min(one["tokens"] - one["computed"], budget)
        if count == 0:
            continue
        more = -(-(one["computed"] + count) // size) - one["pages"]
        while free < more and one in left:
            newest = left.pop()
            free += newest["pages"]
            preempted.append(newest["name"])
        if one in left:
            free, budget = free - more, budget - count
            chunks.append((one["name"], count))
    for one in waiting:
        pages = -(-(one["tokens"] + 1) // size)
        if preempted or budget == 0 or len(left) == seats or free < pages:
            break
        count = min(one["tokens"], budget)
        free, budget = free - -(-count // size), budget - count
        left.append(one)
        chunks.append((one["name"], count))
    return {"preempted": preempted, "chunks": chunks}
    ### END SOLUTION


# %%
check("schedule")

# %% [markdown]
# Nobody waits for ever under these rules, if each request alone fits into the memory: the oldest never loses its
# pages to another one and advances in every step, and when it is complete there is another oldest.
#
# ### Proposed tokens
#
# One answer uses 1/295 of the arithmetic. So five tokens of one sequence could be computed in the time of one, if
# somebody knew which. *Speculative decoding*: a cheap proposer (a smaller model, or what followed when the same tokens
# came before) guesses the next k tokens. The model computes all of them in one pass, which gives its own distribution
# at each of their places, and at one more. Then it accepts those that it might have said itself.
#
# The answers must stay as they were, token for token as likely. The proposer draws its token x with the probabilities q;
# at this place the model has the probabilities p. Some tokens q proposes too often, others too seldom. So a proposal is
# accepted with a certain chance, as often as can be, and where it is not, another token is drawn. In the end each token x
# must come with p(x), whatever q is. With which chance do you accept a token that is proposed too often? And one that is
# not? Then add up how likely each token is so far: which are still lacking, and how much of each?
#
# Behind a rejected token the other proposals continue another text, so for this step the answer ends there. If all k
# are accepted, one more token is drawn from p at the place behind them.
#
# An example with three tokens and k = 2. The proposer says 0, then 0 again:
#
# | place | p | q | verdict |
# |---|---|---|---|
# | 0 | 0.5, 0.25, 0.25 | 0.5, 0.5, 0 | 0 is proposed as often as it should be said: accepted, whatever u is |
# | 1 | 0.25, 0.5, 0.25 | 0.75, 0.25, 0 | 0 is proposed three times as often; u = 0.6: rejected. 1 and 2 lack equally much; with v = 0.4 the draw is 1 |
#
# The answer gets the tokens 0 and 1.
#
# **Exercise.** Return the tokens that the answer gets. `proposed` has k tokens. `p` [k + 1, V] and `q` [k, V] are
# probabilities, not logits: each row adds up to 1. `u` (k of them) and `v` (k + 1) are random numbers between 0 and 1:
# proposal i is accepted if its chance is above `u[i]`, and what is drawn at place i is `draw(weights, v[i])`. The weights
# for `draw` need not add up to 1.

# %%
# %%exercise verify
import torch


def draw(weights: torch.Tensor, number: float) -> int:
    """The first token whose share, with those before it, is more than `number`."""
    mass = weights.cumsum(0)
    return int((mass <= number * mass[-1]).sum())


def verify(
    p: torch.Tensor, q: torch.Tensor, proposed: list[int], u: list[float], v: list[float]
) -> list[int]:
    """Probabilities p [k + 1, V] and q [k, V], not logits -> 1 to k + 1 tokens; [0, 1] in the example."""
    ### BEGIN SOLUTION
    tokens = []
    for i, token in enumerate(proposed):
        if u[i] * q[i, token] >= p[i, token]:
            return [*tokens, draw((p[i] - q[i]).clamp(min=0), v[i])]
        tokens.append(token)
    return [*tokens, draw(p[len(proposed)], v[len(proposed)])]
    ### END SOLUTION


# %%
check("verify")

# %% [markdown]
# Why is it right, whatever q is? As an accepted proposal x comes with the chance q(x) · min(1, p(x) / q(x)) = min(p(x),
# q(x)). As a draw after a rejection it comes with max(0, p(x) - q(x)): the chance of a rejection is exactly the sum by
# which `draw` divides the weights. Together this is p(x). A bad proposer costs time, and no quality.
#
# The next cell makes 8,000 draws with a proposer that is quite wrong. Which share of its tokens will be accepted?

# %%
# %%needs verify
from course.figures.inference import shares

p = torch.tensor([0.30, 0.25, 0.20, 0.15, 0.07, 0.03], dtype=torch.float64)
q = torch.tensor([0.10, 0.45, 0.20, 0.05, 0.05, 0.15], dtype=torch.float64)
g = torch.Generator().manual_seed(1)
numbers = torch.rand(8000, 3, generator=g, dtype=torch.float64).tolist()
proposals = torch.multinomial(q, 8000, replacement=True, generator=g).tolist()
found = [verify(torch.stack([p, p]), q[None], [x], [u], [v, 0.5]) for x, (u, v, _) in zip(proposals, numbers)]
first = torch.bincount(torch.tensor([tokens[0] for tokens in found]), minlength=6) / 8000
accepted = sum(len(tokens) == 2 for tokens in found) / 8000
print(f"accepted, predicted: {torch.minimum(p, q).sum():.2f}; counted: the same within 0.03:",
      bool(abs(accepted - torch.minimum(p, q).sum()) < 0.03))  # fmt: skip
print("what comes out is p, within 0.03:", bool((first - p).abs().max() < 0.03))
shares({"the model, p": p.tolist(), "the proposer, q": q.tolist(), "what comes out": first.tolist()})

# %% [markdown]
# A token is proposed and accepted with min(p, q), so the predicted share is the sum of these over all tokens.
#
# If each proposal is accepted with the chance a, a step gives 1 + a + a² + ... + aᵏ tokens on average: with a = 0.8
# and k = 4 that is 3.4. Such a step computes 5 tokens of each sequence. It costs hardly more as long as reading takes
# longer than computing. 200 sequences have 1,000 tokens in a step, more than the 295 of this GPU: if their caches are
# short, each rejected token costs its time.
#
# *This is a good place to stop: the end of part B.*
#
# ## 4 · Run
#
# ### Your attention in the model
#
# A small Llama, whose weights are drawn and not trained: its answers are nonsense, but they are computed as any
# others are. `CoreAttention.generate` is the place where minimegatron writes keys and values of new tokens into pages
# and reads all of a sequence. In the cell your `attend` does it, for each sequence of a step and each head.
# `state.context` says how many tokens of each sequence are new, how many there are then, and what its table is.

# %%
# %%needs attend
from minimegatron.comm.mesh import Mesh
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.generate import generate
from minimegatron.layers.attention.core_attention import CoreAttention
from minimegatron.layers.attention.self_attention import SelfAttention
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config
from minimegatron.models.gpt_layer_specs import decoder_layer_spec
from minimegatron.models.spec import ModuleSpec

config = family_config("llama", num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2,
                       vocab_size=258, init_method_std=0.2)  # fmt: skip


class MyAttention(CoreAttention):
    def inference_state(self):
        return super().inference_state()

    def generate(self, q, k, v, mask, state):
        context, begin, out = state.context, 0, torch.empty_like(q[:, 0])
        share = q.shape[2] // k.shape[2]  # query heads of a group
        for new, total, table in zip(context.new, context.totals, context.page_table.tolist()):
            rows = slice(begin, begin + new)
            for head in range(q.shape[2]):
                keys, values = (state.pages(name)[:, :, head // share] for name in ("key", "value"))
                mine = q[rows, 0, head], k[rows, 0, head // share], v[rows, 0, head // share]
                out[rows, head] = attend(*mine, keys, values, table, total - new)
            begin += new
        return out.flatten(1).unsqueeze(1)


# %%
# %%needs attend
spec = decoder_layer_spec(config)
spec.submodules["self_attention"] = ModuleSpec(SelfAttention, params={"core_attention": MyAttention})
prompts = [list(range(40, 40 + n)) for n in (3, 17, 9, 1)]
answers = {}
for name, layers in (("mine", spec), ("the package's", None)):
    model = build_model(config, Mesh.serial(), 1, layers).eval()
    answers[name] = generate(Engine(model, EngineConfig(page_size=4, max_num_batched_tokens=32)), prompts, 12)
mine, theirs = answers.values()
apart = max(abs(a - b) for one, other in zip(mine, theirs) for a, b in zip(one.log_probs, other.log_probs))
print("the same tokens:", [a.tokens for a in mine] == [b.tokens for b in theirs],
      "  log-probabilities apart by less than 1e-4:", apart < 1e-4)  # fmt: skip

# %% [markdown]
# ### Your scheduler in the engine
#
# `Engine(..., scheduler_cls=...)` takes another scheduler. `planned_by` makes one of your function: before each step
# it hands you the rows, and does what your plan says. Pages, tables and draws stay the engine's. The folded cell also
# keeps each step, for the pictures. First as many requests as before, then five with pages for 44 tokens and a budget
# of 8.

# %% jupyter={"source_hidden": true}
# %%needs schedule
from course.lab10.own_scheduler import planned_by
from minimegatron.comm.mesh import Mesh
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.scheduler import Scheduler
from minimegatron.inference.sequence import Request
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config

config = family_config("llama", num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2,
                       vocab_size=258, init_method_std=0.2)  # fmt: skip


def tokens_of(prompts):
    """Some ids for a prompt of each length."""
    g = torch.Generator().manual_seed(2)
    return {name: tuple(torch.randint(0, 256, (length,), generator=g).tolist()) for name, length in prompts.items()}


def served(asked, scheduler_cls, **sizes):
    """{request: its sequence}, and for each step the chunks (name, tokens, whether of an answer) and the tables.

    Args:
        asked: {request: (tokens of the prompt, tokens of the answer)}, all there at the start.
    """
    config = EngineConfig(max_model_len=64, page_size=4, enable_prefix_caching=False, **sizes)
    engine = Engine(llama, config, scheduler_cls=scheduler_cls)
    ids, found, steps = tokens_of({name: length for name, (length, _) in asked.items()}), {}, []
    for name, (_, new) in asked.items():
        engine.add_request(Request(ids[name], new, log_probs=0), name)
        found[name] = engine.sequences[name][0]
    plan = engine.scheduler.schedule

    def kept():
        step = plan()
        chunks = [(one.sequence.request_id, one.count, one.start >= one.sequence.prompt_length) for one in step.chunks]
        steps.append((chunks, {one.request_id: list(one.pages) for one in engine.scheduler.running}))
        return step

    engine.scheduler.schedule = kept
    while engine.has_work:
        engine.step()
    return found, steps


llama = build_model(config, Mesh.serial(), 1).eval()
MANY = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_pages": 40}
TIGHT = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "num_pages": 11}
FIVE = {"a": (10, 9), "b": (5, 12), "c": (13, 6), "d": (4, 5), "e": (7, 4)}
runs = {}
EIGHT = {name: (2, new) for name, new in ANSWERS.items()}
for name, asked, sizes in (("many", EIGHT, MANY), ("tight", FIVE, TIGHT)):
    mine, steps = served(asked, planned_by(schedule), **sizes)
    theirs, _ = served(asked, Scheduler, **sizes)
    equal = sum(mine[one].answer == theirs[one].answer for one in asked)
    lost = sum(one.preemptions for one in mine.values())
    print(f"{name}: {equal} of {len(asked)} answers are those of the engine's own scheduler;",
          f"{len(steps)} steps, {lost} preempted")  # fmt: skip
    runs[name] = steps

# %% [markdown]
# ### Served
#
# Now the same scheduler behind minimegatron's HTTP server, which speaks OpenAI's protocol. Eight clients ask at the
# same time, each for a text of its own; four seats and few pages. In which order their requests arrive differs from
# run to run. The words of an answer must not.

# %% jupyter={"source_hidden": true}
# %%needs schedule
import asyncio
import json
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from tokenizers import models, pre_tokenizers

from minimegatron.data.tokenizer import HuggingFaceTokenizer, byte_level
from minimegatron.serving.app import Server
from minimegatron.serving.service import ServerConfig, Service
from minimegatron.serving.protocol import Defaults

letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
fast = byte_level(models.BPE(letters, []))
fast.add_special_tokens(["<eos>"])
with tempfile.TemporaryDirectory() as folder:
    fast.save(f"{folder}/tokenizer.json")
    with open(f"{folder}/tokenizer_config.json", "w") as file:
        json.dump({"eos_token": "<eos>"}, file)
    tokenizer = HuggingFaceTokenizer(folder)

TEXTS = ["To be", "A page", "Once upon a time", "x", "Who has which page?", "In the beginning", "42", "The end"]


def ask(port, text):
    """What a client gets: the text, how many tokens it has, and why it ends."""
    body = {"model": "llama", "prompt": text, "max_tokens": 12, "temperature": 0}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})  # fmt: skip
    with urllib.request.urlopen(request, timeout=60) as answer:
        said = json.loads(answer.read())
    return said["choices"][0]["text"], said["usage"]["completion_tokens"], said["choices"][0]["finish_reason"]


def through_a_server(scheduler_cls, at_once):
    """What the clients get, so many of them at once, and how often a sequence was preempted."""
    config = EngineConfig(max_model_len=48, page_size=4, enable_prefix_caching=False, **TIGHT)
    engine = Engine(llama, config, scheduler_cls=scheduler_cls)
    server = Server(Service(engine, tokenizer, [], Defaults(), ServerConfig("llama")), port=0)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        with ThreadPoolExecutor(at_once) as clients:
            return list(clients.map(lambda text: ask(port, text), TEXTS))
    finally:
        server.should_exit = True
        thread.join(30)


together = through_a_server(planned_by(schedule), at_once=8)
one_by_one = through_a_server(Scheduler, at_once=1)
print("tokens:", [tokens for _, tokens, _ in together], " ends:", sorted({reason for *_, reason in together}))
print("the texts of 8 clients at once are those of one after the other:", together == one_by_one)

# %% [markdown]
# ## 5 · See
#
# The seats first: in batches, and with your scheduler.

# %%
# %%needs schedule
continuous = [[name for name, *_ in chunks] for chunks, _ in runs["many"]]
for name, steps in (("static", by_batches), ("continuous", continuous)):
    print(f"{name}: {len(steps)} steps, {used(steps, 4):.0f} % of the places in use")
seats({"static batches": by_batches, "continuous batching": continuous}, 4)

# %% [markdown]
# No order of these answers needs less than 12 steps: a has 12 tokens. Now the tight run. Each bar is a step, with its
# tokens in the order of the row. Look for a prompt that is read in chunks beside somebody's answer; for the step in
# which a sequence is preempted; and for what its return costs.

# %%
# %%needs schedule
from course.figures.inference import pages_over_time, rows_of_steps

rows_of_steps([chunks for chunks, _ in runs["tight"]], 8)

# %%
# %%needs schedule
pages_over_time([tables for _, tables in runs["tight"]], 12)

# %% [markdown]
# In step 7 c needs a fifth page, none is free, and c is the newest itself: it loses all four. In step 10 a is complete
# and c comes back. In steps 10 to 12 its prompt and the tokens that it had said already are computed again, as if they
# were a prompt: 17 tokens. The pages of a sequence need not stand side by side: a has 1, 2, 3, 10 and 9. Page 0 belongs
# to nobody: the engine uses it for padding.
#
# ### Tokens a second, predicted
#
# First Llama 3 8B on the H100, by your formula, with 2,000 tokens a sequence.

# %%
# %%needs decode_step
from course.figures.inference import tokens_per_second

COUNTS = [1, 2, 4, 8, 16, 32, 64, 128, 243]
steps = [decode_step(LLAMA, n, 2000, 16, H100) for n in COUNTS]
bounds = {"if the weights alone were read": [n * H100["bandwidth"] / 16.06e9 for n in COUNTS],
          "if only FLOPs counted": [H100["flops"] / (2 * LLAMA["parameters"])] * len(COUNTS)}  # fmt: skip
tokens_per_second(COUNTS, [step["rate"] for step in steps], limits=bounds, title="Llama 3 8B on one H100, predicted")

# %% [markdown]
# ### What a user waits for
#
# Tokens a second are what the owner of the server sees. A user waits twice: for the first token, and between one token
# and the next. Both depend on the budget of a step. A small one reads a prompt in many short steps. A large one reads
# it in a single long step, and everybody else waits for the end of it.
#
# The folded cell lets your `schedule` plan 200 requests for Llama 3 8B on an H100: prompts of 500 to 3,500 tokens,
# answers of 50 to 250, fourteen requests a second at times of their own. A step takes as long as its bytes or its
# FLOPs, as in your formula. Budgets go from 128 to 16,384 tokens. Which of the two waits grows with the budget, and
# from where on does the other one no longer fall? If in 95 of 100 requests no gap between two tokens may be longer than
# 10 ms, which of the budgets 128, 256, 512, 1024, ... is the largest?

# %%
guess("budget", None, "The largest power of two whose gaps between tokens stay below 10 ms?")

# %% jupyter={"source_hidden": true}
# %%needs schedule
import random

import matplotlib.pyplot as plt

from minimegatron.viz.picture import styled


def waits(budget, count=200, rate=14, size=16, seats=128):
    """Seconds that 95 of 100 requests wait at most: for the first token, and for another one."""
    numbers, now, coming = random.Random(3), 0.0, []
    for name in range(count):
        now += numbers.expovariate(rate)
        prompt = numbers.randint(500, 3500)
        row = {"name": name, "tokens": prompt, "computed": 0, "pages": 0}
        coming.append((now, row, prompt + numbers.randint(50, 250)))
    ends = {row["name"]: end for _, row, end in coming}
    times = {row["name"]: [came] for came, row, _ in coming}  # of its arrival, and of each token
    token, weights = 2 * LLAMA["layers"] * LLAMA["groups"] * LLAMA["d"] * 2, 2 * LLAMA["parameters"]
    free, now, running, waiting = int((H100["memory"] - weights) // (size * token)), 0.0, [], []
    while coming or running or waiting:
        if not running and not waiting:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            waiting.append(coming.pop(0)[1])
        plan, rows = schedule(running, waiting, budget, seats, free, size), {}
        for row in running + waiting:
            rows[row["name"]] = row
        for name in plan["preempted"]:
            free += rows[name]["pages"]
            rows[name].update(computed=0, pages=0)
            running.remove(rows[name])
            waiting.insert(0, rows[name])
        chunks = [(rows[name], number) for name, number in plan["chunks"]]
        for row, number in chunks:
            if row in waiting:
                waiting.remove(row)
                running.append(row)
            row["computed"] += number
            free -= -(-row["computed"] // size) - row["pages"]
            row["pages"] = -(-row["computed"] // size)
        read = weights + token * sum(row["computed"] for row, _ in chunks)
        flops = 2 * LLAMA["parameters"] * sum(number for _, number in chunks)
        now += max(read / H100["bandwidth"], flops / H100["flops"])
        for row, _ in chunks:
            if row["computed"] == row["tokens"]:
                times[row["name"]].append(now)
                row["tokens"] += 1
                if row["tokens"] == ends[row["name"]]:
                    running.remove(row)
                    free += row["pages"]
    first = sorted(at[1] - at[0] for at in times.values())
    gaps = sorted(max(b - a for a, b in zip(at[1:], at[2:])) for at in times.values())
    return first[int(0.95 * count)], gaps[int(0.95 * count)]


BUDGETS = [2**k for k in range(7, 15)]
first, gaps = zip(*(waits(budget) for budget in BUDGETS))
guessed("budget", max(budget for budget, gap in zip(BUDGETS, gaps) if gap < 0.01), "tokens a step")
with styled():
    fig, ax = plt.subplots(figsize=(7, 3))
    for name, values, line in (("the first token", first, "s--"), ("the longest gap between two", gaps, "o-")):
        ax.plot(BUDGETS, [1000 * value for value in values], line, color="0.2", linewidth=1.6, label=name)
    ax.axvline(H100["flops"] / H100["bandwidth"], color="0.5", linestyle=":", label="the ridge, 295")
    ax.set(xscale="log", yscale="log", xlabel="budget of a step, tokens", ylabel="ms that 95 of 100 wait at most")
    ax.set_xticks(BUDGETS, [f"{budget:,}" for budget in BUDGETS])
    ax.minorticks_off()
    ax.legend()
    plt.show()

# %% [markdown]
# The dotted line is the 295 of section 1. Below it a step takes as long as its bytes, whatever its tokens: a smaller
# budget makes no step shorter, only prompts slower, until the queue grows without end. Above it a step takes as long
# as its tokens: at twice the budget somebody who generates waits twice as long while a prompt is read, and the first
# token comes no sooner. So a good budget lies a little above the ridge, and it can be predicted.
#
# ### Measured here
#
# Tokens a second again, on this computer, with one core. The folded cell measures how fast it reads and how fast it
# multiplies, puts both into your formula, and lets a model of 31 million parameters in fp32 (125 MB, too much for most
# caches) generate 1 to 32 answers at once. Times are of this core, whatever else runs on the machine.

# %% jupyter={"source_hidden": true}
# %%needs decode_step
import time

from minimegatron.comm.mesh import Mesh
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.sequence import Request
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config


def least(function, times=3):
    """Seconds of the fastest of some calls."""
    found = []
    for _ in range(times):
        begun = time.thread_time()
        function()
        found.append(time.thread_time() - begun)
    return min(found)


threads = torch.get_num_threads()
torch.set_num_threads(1)
large, row, square = torch.ones(8192, 4096), torch.ones(4096), torch.randn(768, 768)
flops = 2 * 768**3 / least(lambda: square @ square)
cpu = {"memory": 4e9, "bandwidth": large.nbytes / least(lambda: large @ row), "flops": flops}
wide = family_config("llama", num_layers=2, hidden_size=1024, num_attention_heads=16, num_query_groups=4,
                     ffn_hidden_size=4096, vocab_size=258)  # fmt: skip
model = build_model(wide, Mesh.serial(), 1).eval()
counts = {"parameters": sum(p.numel() for p in model.parameters()), "layers": 2, "groups": 4, "d": 64, "bytes": 4}
engine = Engine(model, EngineConfig(max_model_len=64, num_pages=160, max_num_seqs=32))
here, predicted, measured = [1, 2, 4, 8, 16, 32], [], []
for n in here:
    for i in range(n):
        engine.add_request(Request((7, 11, i), 6, log_probs=None), f"{n}/{i}")
    engine.step()
    seconds = least(engine.step, 4)
    measured.append(n / seconds)
    predicted.append(decode_step(counts, n, 8, 16, cpu)["rate"])
    while engine.has_work:
        engine.step()
torch.set_num_threads(threads)
tokens_per_second(here, predicted, measured, title="31 million parameters on one core of this computer")

# %% [markdown]
# The predicted line turns flat where computing begins to take longer than reading: on one core of a CPU at some ten to
# twenty sequences, where an H100 needs 295. Where the lines part, the formula has left something out. At the left it is
# what each operation costs beside its bytes: Python, and the start of each kernel. At the right a product of 32 rows
# does not yet reach the rate of a large one.
#
# On a GPU the left end is the interesting one: a step of this size launches hundreds of kernels, each of which waits
# for Python. A CUDA graph launches all of them at once. With a GPU the next cell measures a model of about a billion
# parameters in bf16 both ways. Without one it says so, and the lab goes on.

# %% jupyter={"source_hidden": true}
# %%torchrun -n 1 --gpus --name decode --timeout 200
import time
import torch
from minimegatron.comm.mesh import Mesh
from minimegatron.cuda_graphs import CudaRecorder
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.sequence import Request
from minimegatron.launch.rank import finish, init, report
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config

HIDDEN, LAYERS, COUNTS = 2048, 16, (1, 8, 64)

init()
config = family_config("llama", num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=16, num_query_groups=4,
                       ffn_hidden_size=4 * HIDDEN, vocab_size=258, params_dtype="bf16")
model = build_model(config, Mesh.serial(device="cuda"), 1).eval()
parameters, found = sum(p.numel() for p in model.parameters()), []
for graph in (False, True):
    recorder = CudaRecorder(torch.device("cuda", 0)) if graph else None
    engine = Engine(model, EngineConfig(max_model_len=64, max_num_seqs=64, num_pages=320), recorder=recorder)
    for n in COUNTS:
        for i in range(n):
            engine.add_request(Request((7, 11, i), 30), f"{n}/{i}")
        times = []
        while engine.has_work:
            begun = time.perf_counter()
            engine.step()  # it ends when the ids are on the host
            times.append(time.perf_counter() - begun)
        rate = n / sorted(times)[len(times) // 2]
        found.append((graph, n, rate))
        print(f"{'as a graph' if graph else 'launch by launch':16} {n:2} sequences: {rate:7.0f} tokens a second")
most = 3.35e12 / (2 * parameters)
print(f"{2 * parameters / 1e9:.1f} GB of weights: an H100 reads them {most:.0f} times a second, so one sequence gets no more")
report(found)
finish()

# %% [markdown]
# *This is a good place to stop: the end of part C.*
#
# ## 6 · Break it
#
# A colleague has made two changes to the engine. "A page goes back when a sequence gives it back. Counting who else
# uses it is over-cautious. And one random generator for the engine is enough: each draw takes its next number." All
# tests of single requests pass. With some load, users report odd answers.
#
# The folded cell has the colleague's engine, and six requests with three seats and few pages. a and b begin with the
# same system prompt of 8 tokens, so they share its two pages: keys and values of equal beginnings are equal, and the
# engine finds them by their tokens. c and e are sampled, the others greedy. One request arrives in each step.

# %% jupyter={"source_hidden": true}
import dataclasses
import random

import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.inference.block_manager import BlockManager
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.generate import score
from minimegatron.inference.sampling import GREEDY, SamplingParams
from minimegatron.inference.scheduler import Scheduler
from minimegatron.inference.sequence import Request
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config


class CarelessPages(BlockManager):
    def release(self, page):
        self._users[page] = 1  # whoever gives it back was its user
        super().release(page)


class CarelessScheduler(Scheduler):
    def __init__(self, blocks, *args, **kwargs):
        super().__init__(CarelessPages(blocks.num_pages, blocks.page_size), *args, **kwargs)


class OneGenerator(Engine):
    def _run(self, batch):
        self.numbers = getattr(self, "numbers", None) or random.Random(0)
        draws = tuple(dataclasses.replace(one, u=self.numbers.random()) for one in batch.draws)
        return super()._run(dataclasses.replace(batch, draws=draws))


tiny = family_config("llama", num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2,
                     vocab_size=258, init_method_std=0.2)  # fmt: skip
small = build_model(tiny, Mesh.serial(), 1).eval()
FEW = EngineConfig(max_model_len=32, page_size=4, num_pages=14, max_num_seqs=3, max_num_batched_tokens=16)
WARM = SamplingParams(temperature=0.7)
some = iter(torch.randint(0, 256, (29,), generator=torch.Generator().manual_seed(6)).tolist())
SYSTEM = tuple(range(100, 108))
REQUESTS = {
    name: Request((*begin, *(next(some) for _ in range(own))), new, sampling, seed=number, log_probs=0)
    for number, (name, begin, own, new, sampling) in enumerate([
        ("a", SYSTEM, 2, 3, GREEDY), ("b", SYSTEM, 3, 14, GREEDY), ("c", (), 6, 12, WARM), ("d", (), 9, 8, GREEDY),
        ("e", (), 5, 10, WARM), ("f", (), 4, 6, GREEDY)])
}  # fmt: skip


def answered(names, engine_cls=OneGenerator, scheduler_cls=CarelessScheduler, watch=None):
    """{name: tokens and log-probabilities}, one more request arriving in each step."""
    engine, waiting, found = engine_cls(small, FEW, scheduler_cls=scheduler_cls), list(names), {}
    if watch:
        watch(engine)
    while waiting or engine.has_work:
        if waiting:
            name = waiting.pop(0)
            engine.add_request(REQUESTS[name], name)
            found[name] = engine.sequences[name][0]
        engine.step()
    return {name: {"tokens": one.answer, "log_probs": one.log_probs} for name, one in found.items()}


def evidence(**classes):
    """(request, its answer in company, its answer alone, what a sound pass says of the former's tokens) of each."""
    together = answered(REQUESTS, **classes)
    for name, request in REQUESTS.items():
        given = request.prompt, together[name]["tokens"]
        [scored] = score(Engine(small, FEW), [given], temperature=request.sampling.temperature)
        yield name, together[name], answered([name], **classes)[name], scored


for name, company, alone, _ in evidence():
    same = company["tokens"] == alone["tokens"]
    print(f"{name}: {'the same answer as' if same else 'another answer than'} if it is served alone")

# %% [markdown]
# Three of six answers depend on their neighbours. Which of the two changes has spoiled which?
#
# The engine also reports the log-probability of each token that it drew. There is a second way to that number: give
# the tokens of the answer to a sound engine, and let it compute in one pass how likely each of them was
# (`score`). If the numbers agree, the engine saw the right keys and values, and the model's distribution was
# right: then another token means another *draw*. If they do not agree, the engine has read wrong numbers: its
# *memory* is damaged.
#
# **Exercise.** Return `("memory", i)` if at place i of the answer the log-probability as served differs by more than
# 1e-3 from `scored[i]`, `("draw", i)` if at place i the token is not the one that the request gets alone. The first
# place counts; if both are so at the same place, it is memory. Return `("right", None)` if there is no such place.
# (Two passes add up in another order, so values that differ by less than 1e-3 are the same.)

# %%
# %%exercise diagnose
def diagnose(served: dict[str, list], alone: dict[str, list], scored: list[float]) -> tuple:
    """`served` and `alone` have "tokens" and "log_probs"; `scored`: the log-probabilities of `served`'s tokens."""
    ### BEGIN SOLUTION
    for i, value in enumerate(served["log_probs"]):
        if abs(value - scored[i]) > 1e-3:
            return ("memory", i)
        if served["tokens"][i] != alone["tokens"][i]:
            return ("draw", i)
    return ("right", None)
    ### END SOLUTION


# %%
check("diagnose")

# %%
# %%needs diagnose
ways = {
    "the colleague's": {}, "the package's draws": {"engine_cls": Engine},
    "the package's pages": {"scheduler_cls": Scheduler}, "both": {"engine_cls": Engine, "scheduler_cls": Scheduler},
}  # fmt: skip
for way, classes in ways.items():
    found = {name: diagnose(*given) for name, *given in evidence(**classes)}
    told = (f"{name} {what}{'' if at is None else f' at {at}'}" for name, (what, at) in found.items())
    print(f"{way:20}", ", ".join(told))

# %% [markdown]
# e suffers from both: only the first place shows, and the second bug appears when the first is gone.
#
# - **The draw.** One generator gives its next number to whoever draws next. So a request's numbers depend on who else
#   is in the step. In minimegatron the number is a function of (seed of the request, answer, place) and nothing else.
# - **The memory.** Which page, and when? The next cell puts a *canary* into each row of the memory: who has written
#   it, and with which tokens up to there. Before each step it compares what a sequence is about to read with its own
#   tokens.

# %%
def canaries(engine):
    """Say when a sequence reads a row that does not hold what its own tokens have left there."""
    written, plan, size, said = {}, engine.scheduler.schedule, FEW.page_size, set()

    def watched():
        step = plan()
        for chunk in step.chunks:
            tokens, pages, name = chunk.sequence.tokens, chunk.sequence.pages, chunk.sequence.request_id
            for j in range(chunk.start):
                page = pages[j // size]
                who, those = written[page, j % size]
                if those != tokens[: j + 1] and (name, page) not in said:
                    said.add((name, page))
                    print(f"step {engine.steps:2}: {name} reads page {page} for its token {j}, and finds {who}'s")
        for chunk in step.chunks:
            tokens, pages, name = chunk.sequence.tokens, chunk.sequence.pages, chunk.sequence.request_id
            for j in range(chunk.start, chunk.start + chunk.count):
                written[pages[j // size], j % size] = name, tokens[: j + 1]
        return step

    engine.scheduler.schedule = watched


_ = answered(REQUESTS, watch=canaries)

# %% [markdown]
# b is still at work when a ends and gives back the pages of the system prompt. They count as free, a later request
# takes one, and b reads the keys of a stranger: a wrong answer, and a leak from one user to another. When b ends, it
# gives back these pages once more, though they are e's now. So e gets a page that it has already, and writes over its
# own keys. That is why a page has a count of its users, and is free when the count is 0.
#
# ## 7 · Explain
#
# Questions that an interviewer asks. Say your answer aloud before you open the one here.
#
# 1. *Why is prefill bound by arithmetic and decode by memory?*
#    <details><summary>answer</summary>Prefill uses each weight that is read for all tokens of the prompt, decode for
#    one token a sequence. On an H100 some 295 tokens have to share a weight before the arithmetic takes
#    longer.</details>
# 2. *Two servers have the same throughput. One makes users wait for the first token, the other stutters. What
#    differs?*
#    <details><summary>answer</summary>The budget of a step, perhaps. A large one reads prompts at once, and meanwhile
#    no answer gets its token: a long time between tokens. One far below the ridge reads prompts slowly: a first token
#    comes late. A prompt that waits for a seat or for pages looks the same from outside: look at the queue.</details>
# 3. *Why preempt the newest and not the one with the most pages?*
#    <details><summary>answer</summary>So that nobody starves: the oldest always goes on, so each becomes the oldest
#    and ends. The one with the most pages may be nearly complete, and to compute it again costs most.</details>
# 4. *8 groups of keys and values in place of 64: what does it change in decode?*
#    <details><summary>answer</summary>The cache of a token is 8 times smaller. So 8 times as many tokens fit, and at
#    many or long sequences, where the caches are most of what is read, a step is up to 8 times faster. With one short
#    sequence next to nothing: the weights are read all the same.</details>
# 5. *Weights in 4 bits in place of 16: what gets faster?*
#    <details><summary>answer</summary>Decode with few sequences, up to 4 times: fewer bytes are read. Prefill hardly,
#    since the products are computed in 16 bits all the same. And there is more room for pages.</details>
# 6. *When does speculative decoding make a server slower?*
#    <details><summary>answer</summary>When steps are bound by arithmetic already, with many sequences: each proposal
#    costs its FLOPs, and the rejected ones were for nothing. Or when the proposer is slow, or seldom right.</details>
# 7. *A system prompt of 2,000 tokens begins every request. What does the engine do, and what must it not do?*
#    <details><summary>answer</summary>It computes the prompt once and shares its full pages, counted. It must not
#    share a page that somebody still writes: the last page, not full, is each one's own, or copied before it is
#    written. And nothing of before a change of weights may be found.</details>
# 8. *The same request with the same seed gave another answer today. Name three causes.*
#    <details><summary>answer</summary>Draws that depend on neighbours. Damaged memory. Other weights or another
#    version of the tokenizer. Or sums in another order, with another number of rows in a step: the last digits
#    differ, and once in a while a token that was nearly as likely wins. Log-probabilities tell these apart.</details>

# %%
progress()

# %% [markdown]
# ## Where this lives
#
# | here | minimegatron | Megatron-LM, `megatron/core/inference/` | vLLM |
# |---|---|---|---|
# | bytes and seconds of a step | `docs/serving.md`, `inference/paged_cache.py` | | |
# | attention over pages | `kernels/paged.py`, `layers/attention/core_attention.py` | `contexts/dynamic_context.py` | `v1/attention/backends/` |
# | who has which page, equal beginnings | `inference/block_manager.py` | `contexts/kv_block_allocator.py` | `v1/core/block_pool.py` |
# | the plan of a step | `inference/scheduler.py` | `engines/dynamic_engine.py` | `v1/core/sched/scheduler.py` |
# | proposed tokens | `inference/speculative.py` | `text_generation_controllers/` | `v1/sample/rejection_sampler.py` |
# | draws | `inference/sampling.py` | `sampling_params.py` | `v1/sample/sampler.py` |
# | the server | `serving/app.py`, `service.py`; `minimegatron serve` | `text_generation_server/` | `entrypoints/openai/` |
#
# Kwon et al. 2023, Efficient memory management for large language model serving with PagedAttention (arXiv
# 2309.06180); Yu et al. 2022, Orca: a distributed serving system for transformer-based generative models (OSDI);
# Agrawal et al. 2024, Taming throughput-latency tradeoff in LLM inference with Sarathi-Serve (arXiv 2403.02310);
# Zheng et al. 2023, SGLang (arXiv 2312.07104), for prefixes in a tree; Leviathan et al. 2023, Fast inference from
# transformers via speculative decoding (arXiv 2211.17192).
#
# Next: lab 11 lets an engine draw what a trainer learns from. Lab 12 plans a run.

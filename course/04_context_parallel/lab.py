# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Lab 04 · Context parallelism
#
# The activations of 128 k tokens do not fit on one GPU, so the sequence itself is cut: each rank holds some of the
# tokens. Most of a transformer works on one token at a time and needs no change. Attention does: a token needs the keys
# and values of all tokens before it, and most of them are on other ranks.
#
# **You build** attention that works through the keys block by block; a ring that brings every block of keys and values
# to every rank, forward and backward; and an all-to-all that exchanges heads for tokens. At the end a GPT trains with
# your functions and has the gradients of a single process.
#
# **You need** softmax and its gradient, causal attention, `torch.autograd.Function`, and one fact about rotary position
# embeddings (RoPE): they turn a query and a key by angles that are proportional to the token's place. Lab 01 explains
# ranks, groups and messages; lab 02 explains grouped queries, sequence parallelism, and what a layer keeps for its
# backward pass. No GPU.
#
# **Time**: 5 to 7 hours.
#
# | part | sections | minutes |
# |---|---|---|
# | I | 1 the problem · 2 predict · 3 softmax block by block, merge | 80–110 |
# | II | 3 zigzag · the ring, forward · two timed pictures · packed documents | 90–130 |
# | III | 3 the ring, backward · Ulysses | 80–115 |
# | IV | 4 run · 5 see · 6 break it · 7 explain | 60–90 |
#
# Run the cells from top to bottom. Where a cell says `your code here`, write yours; cells that need it wait until its
# check has passed. After a kernel restart: run the first cell, then go on where you were.

# %%
# %load_ext course
# %lab 04_context_parallel

# %% [markdown]
# ### Two guesses first
#
# Do not compute; put down the numbers that feel right.
#
# 1. A model of the size of Llama-3 8B trains on one sequence of 128 k tokens. How many GPUs of 80 GB do its
#    *activations* fill, everything that the forward pass keeps for the backward pass?
# 2. H100s share that sequence and compute at their peak speed. Meanwhile keys and values travel from machine to machine
#    at 50 GB a second. The more tokens a GPU holds, the longer it computes for each byte that it sends. With how many
#    tokens on each GPU does computing take as long as the messages, so that these cost no time? You compute this number
#    at the end of the lab.

# %%
guess("gpus", None, "How many 80-GB GPUs do the activations of one sequence of 128 k tokens fill?")
guess("tokens", None, "How many tokens must each H100 hold so that computing takes as long as the messages?")

# %% [markdown]
# ## 1 · The problem
#
# The model has 32 layers and h = 4096. Lab 02 counts what one layer of a GPT keeps for its backward pass, without the
# scores of attention: `34·s·b·h` bytes for b sequences of s tokens. The weights do not enter.

# %% tags=["hide-output"]
s, h, layers = 128 * 1024, 4096, 32
kept = 34 * s * h * layers
guessed("gpus", round(kept / 80e9, 1), "GPUs, by the formula of lab 02")

# %% [markdown]
# (The formula is that of a GPT layer with dropout. A layer of Llama has no dropout and fewer key and value heads, but
# an MLP of three matrices: the package's Llama layer, in bf16 and with nothing fused, keeps 55·s·b·h. The problem is
# the same.)
#
# What could help?

# %%
import matplotlib.pyplot as plt
from minimegatron.viz.picture import INK, PREDICTED

ways = {
    "as it is": kept,
    "tensor and sequence parallelism on 8 GPUs": kept / 8,
    "recompute every layer": 2 * s * h * layers + 34 * s * h,
    "context parallelism on 8 GPUs": kept / 8,
    "context parallelism on 8, with recompute": (2 * s * h * layers + 34 * s * h) / 8,
}
fig, ax = plt.subplots(figsize=(7.5, 2.2))
names = [f"{name}: {need / 1e9:.0f} GB" for name, need in ways.items()]
ax.barh(names, [need / 1e9 for need in ways.values()], color=PREDICTED[0], hatch=PREDICTED[1], edgecolor=INK)
ax.axvline(80, color=INK, linestyle="--", label="one GPU has 80")
ax.set(xlabel="GB on one rank", title="Activations of one sequence of 128 k tokens")
ax.grid(axis="y", visible=False)
ax.invert_yaxis()
ax.legend(loc="lower right")
plt.show()

# %% [markdown]
# * **Data parallelism** does not help: a batch has at least one sequence.
# * **A pipeline** cuts the layers. With one sequence only one stage works at a time. It takes p sequences to keep p
#   stages busy, and then the first stage keeps a p-th of the layers for each of p sequences: 584 GB again.
# * **Tensor parallelism** with sequence parallelism (lab 02) cuts all of it by its degree. It needs the fast links
#   inside a machine. With eight GPUs there it cuts to an eighth: 73 GB. Twice the tokens do not fit.
# * **Recompute** everything: keep only each layer's input, `2·s·b·h`, and run the layer forward again when its backward
#   pass comes. That is 34.4 GB instead of 584 GB, plus 18.3 GB for the one layer that is being recomputed: the
#   activations fit. (The weights of 8B parameters, their gradients and Adam's state need GPUs of their own: lab 03.)
#   The price is a second forward pass, a third more arithmetic. And the *time* is still that of one GPU. Attention's
#   work grows with s²: at 128 k tokens it is 68 % of all arithmetic. One step of this one sequence is 2.0·10¹⁶
#   operations, with recompute 2.6·10¹⁶: 66 seconds on a GPU that reaches 400 TFLOP/s. Recompute saves memory. It does
#   not share the work.
#
# **Context parallelism** gives each of C ranks s/C tokens: memory *and* time are divided by C. Norms, MLPs, embedding
# and loss work on one token at a time and need no change. Attention does.
#
# ### Which tokens?
#
# The simplest cut gives rank r the r-th piece. Below, each bar is a query, and as long as the number of keys that it
# sees; its colour says which rank holds the query. A query and a key that it sees are a *pair*. The other cut is called
# *zigzag*.

# %%
from course.figures.context_parallel import causal_map

contiguous = [range(4 * r, 4 * r + 4) for r in range(4)]
zigzag = [[2 * r, 2 * r + 1, 14 - 2 * r, 15 - 2 * r] for r in range(4)]
causal_map({"contiguous": contiguous, "zigzag": zigzag})

# %% [markdown]
# The area of a colour is the work of its rank. With the contiguous cut the last rank has 5.8 times the work of the
# first (seven times, when the sequence is long), and in every layer all ranks wait for it. Zigzag cuts the sequence
# into 2C chunks and gives rank r one from the cheap end and one from the expensive end: chunks r and 2C-1-r.
#
# ## 2 · Predict
#
# ### Work
#
# **Exercise.** The pairs (query, key) that each rank's queries see, as a list by rank. A token sees itself and all
# tokens before it. Eight tokens on two ranks, contiguous: rank 0 has 1 + 2 + 3 + 4 = 10 pairs, rank 1 has 26. With
# zigzag rank 0 has 1 + 2 + 7 + 8 = 18, and rank 1 has as many. `s` is a multiple of cp, for zigzag of 2·cp.

# %%
# %%exercise work
def work(s: int, cp: int, zigzag: bool) -> list[int]:
    """Visible pairs of each of cp ranks."""
    ### BEGIN SOLUTION
    chunks = 2 * cp if zigzag else cp
    n = s // chunks
    pairs = [sum(range(c * n + 1, (c + 1) * n + 1)) for c in range(chunks)]
    return [pairs[r] + pairs[-1 - r] for r in range(cp)] if zigzag else pairs
    ### END SOLUTION

# %%
check("work")

# %%
# %%needs work
import matplotlib.pyplot as plt
from minimegatron.viz.picture import INK, rank_colours

fig, axes = plt.subplots(1, 2, figsize=(8, 2.3), sharey=True)
for ax, way in zip(axes, (False, True)):
    pairs = work(131072, 8, way)
    ax.bar(range(8), [p / 1e9 for p in pairs], color=rank_colours(8), edgecolor=INK)
    ax.set(title="zigzag" if way else "contiguous", xlabel="rank", xticks=range(8))
    print(f"{'zigzag' if way else 'contiguous':10}  slowest over mean: {8 * max(pairs) / sum(pairs):.3f}")
axes[0].set_ylabel("10⁹ pairs")
plt.show()

# %% [markdown]
# ### Bytes
#
# How does every query meet every key? This lab builds two ways, and compares them with a third:
#
# * **Ring**: the blocks of K and V go round. At each of C-1 steps every rank sends one block to the next rank.
# * **All-gather**: every rank gets all blocks at once, before it computes. The bytes are those of the ring.
# * **Ulysses**: exchange heads for tokens. An all-to-all leaves each rank with *all* tokens of a C-th of the heads.
#   After attention a second all-to-all brings the output back.
#
# **Exercise.** Bytes that *one rank* sends in the forward pass of one attention, of b sequences. The layer has `heads`
# query heads and `groups` key and value heads, each d wide; both are multiples of C. In an all-to-all a rank keeps its
# own share. By hand: four tokens on two ranks, 4 heads, 2 groups, d = 1, one byte an element. A rank's part of the
# queries and of the output has 8 bytes, that of the keys and of the values 4. The ring sends 8 bytes, Ulysses 12.

# %%
# %%exercise bytes_per_layer
def bytes_per_layer(s: int, b: int, heads: int, groups: int, d: int, cp: int, element_size: int) -> dict[str, float]:
    """{"ring": ..., "ulysses": ...}; s is the whole sequence."""
    ### BEGIN SOLUTION
    a_head = s // cp * b * d * element_size  # of this rank's tokens
    return {"ring": (cp - 1) * 2 * groups * a_head, "ulysses": (cp - 1) / cp * (2 * heads + 2 * groups) * a_head}
    ### END SOLUTION

# %%
check("bytes_per_layer")

# %%
# %%needs bytes_per_layer
for c in (2, 4, 8):
    sent = bytes_per_layer(131072, 1, 32, 8, 128, c, 2)
    print(f"cp {c}: ring {sent['ring'] / 2**20:4.0f} MiB   ulysses {sent['ulysses'] / 2**20:4.0f} MiB")

# %% [markdown]
# Ulysses sends less as C grows. The ring sends more as C grows, up to all keys and values once, 512 MiB here. But the
# ring can send while the rank computes. Your second guess says from how many tokens on its messages cost no time.
# Ulysses needs at least one key/value head on each rank; on more ranks than key/value heads these must be copied.
#
# ## 3 · Implement
#
# Tensors here have no batch: q, k, v are `[a, n, d]`, that is heads, tokens, width. Each comes with the *places* of its
# tokens in the whole sequence. The rule is the same for every cut: **a query at place i sees a key at place j when j
# ≤ i.** Inputs belong to the caller: do not change them. They are fp32 or float64, and what you return has their dtype,
# lse too. (The ring's backward pass alone gets bf16 as well, and lse is fp32 there.)
#
# ### Softmax, block by block
#
# Softmax divides by a sum over the whole row, and no rank will have the whole row. So you build it block by block. For
# every query keep the largest score so far **m**, the sum **l** of e^(S-m), and the sum **O** of the values, each value
# times its e^(S-m). Here is one query with four keys in blocks of two. All numbers can be checked by hand:

# %%
from course.figures.context_parallel import running_softmax

running_softmax(weights=[2, 1, 8, 4], values=[3, 6, 1, 2], block=2)

# %% [markdown]
# Read the columns from left to right. Block 2 brings a larger score, ln 8. What was summed before was measured against
# ln 2, so it shrinks by e^(ln 2 - ln 8) = 1/4 before the block is added. The end is what the whole row gives at once:
# (2·3 + 1·6 + 8·1 + 4·2) / (2 + 1 + 8 + 4) = 28/15. **lse** is the logarithm of the row's sum of e^S, here ln 15.
#
# Why the maximum at all? e^S overflows for a score of 89 in float32; e^(S-m) is never above 1.
#
# **Exercise.** The same for tensors, with the scores S = q·kᵀ/√d, in which a hidden key is -∞. Before you type: what
# becomes of each column of the picture when its whole block is hidden from the query?
#
# Go through the keys in blocks of `block` (the last may be shorter). Never hold all scores of a head,
# neither in one tensor nor in a list of pieces; the check measures torch's memory, so compute with torch. Skip a block
# that no query sees; places come in any order. A query that sees nothing has out 0 and lse -∞.

# %%
# %%exercise attend
import torch


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_at: torch.Tensor, k_at: torch.Tensor, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [a, n, d] at places q_at [n], k and v [a, m, d] at k_at [m] -> out [a, n, d], lse [a, n]."""
    ### BEGIN SOLUTION
    top = q.new_full((*q.shape[:2], 1), -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for keys, values, at in zip(k.split(block, 1), v.split(block, 1), k_at.split(block)):
        if at.min() > q_at.max():
            continue
        scores = (q @ keys.mT / q.shape[-1] ** 0.5).masked_fill(at > q_at[:, None], -torch.inf)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        finite = higher.masked_fill(higher == -torch.inf, 0.0)
        p, shrink = torch.exp(scores - finite), torch.exp(top - finite)
        total, out, top = total * shrink + p.sum(-1, keepdim=True), out * shrink + p @ values, higher
    return out / total.masked_fill(total == 0, 1.0), (top + total.log()).squeeze(-1)
    ### END SOLUTION

# %%
check("attend")

# %% [markdown]
# ### Merge
#
# Now the blocks are on different ranks. Each piece has its own `out`, already divided by its own sum, and `lse`, the
# logarithm of that sum. Two such results make one. A piece with sum 2 and out 4, and a piece with sum 6 and out 8: the
# new sum is 8, the new out 2/8·4 + 6/8·8 = 7.
#
# **Exercise.** Merge two pieces, given the logarithms of their sums. An lse may be 1000 or -1000, where no sum can be
# computed. Either piece, or both, may have seen nothing (lse = -∞), in some rows or in all.

# %%
# %%exercise merge
import torch


def merge(
    out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two pieces, out and more [a, n, d] with lse and more_lse [a, n] -> out and lse of both."""
    ### BEGIN SOLUTION
    total = torch.logaddexp(lse, more_lse)
    finite = total.masked_fill(total == -torch.inf, 0.0)
    return torch.exp(lse - finite)[..., None] * out + torch.exp(more_lse - finite)[..., None] * more, total
    ### END SOLUTION

# %%
check("merge")

# %%
# %%needs attend merge
import torch
import torch.nn.functional as F

torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 12, 4).unbind()
at = torch.arange(12)
first = attend(q, k[:, :5], v[:, :5], at, at[:5], 3)
second = attend(q, k[:, 5:], v[:, 5:], at, at[5:], 3)
out, lse = merge(*first, *second)
want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
print("two pieces, merged, are the whole attention:", torch.allclose(out, want, atol=1e-6))

# %% [markdown]
# ### In which dtype?
#
# In a bf16 model the out that a ring returns is bf16: it is rounded once, at the end. This error is always there, so
# it is the unit here. But a ring of C ranks also merges C-1 times. What if out is rounded after every merge? What if
# lse is? The next cell tries each by itself, with the other one in fp32, and measures the error beside attention in
# float64.

# %%
guess("lse", None, "16 ranks, lse kept in bf16: the error of out is how many times that of one rounding at the end?")

# %%
# %%needs attend merge
import matplotlib.pyplot as plt
import torch

g = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(2, n, 32, generator=g) for n in (128, 1024, 1024))
at, last = torch.arange(1024), torch.full((128,), 1024)  # these queries see all keys
exact, _ = attend(q.double(), k.double(), v.double(), last, at, 1024)


def error(pieces, keep_out, keep_lse):
    """Of out in bf16, where a rank keeps out and lse in these dtypes between two merges."""
    out, lse = pieces[0]
    for more in pieces[1:]:
        out, lse = merge(out.to(keep_out).float(), lse.to(keep_lse).float(), *more)
    return (out.bfloat16() - exact).norm().item()


kept = {"out in bf16": (torch.bfloat16, torch.float32), "lse in bf16": (torch.float32, torch.bfloat16)}
ranks, times = [1, 2, 4, 8, 16, 32], {name: [] for name in kept}
for c in ranks:
    pieces = [attend(q, k[:, some], v[:, some], last, some, 128) for some in at.chunk(c)]
    for name, dtypes in kept.items():
        times[name].append(error(pieces, *dtypes) / error(pieces, torch.float32, torch.float32))
fig, ax = plt.subplots(figsize=(7, 2.6))
for (name, values), marker in zip(times.items(), "os"):
    ax.plot(ranks, values, marker=marker, label=f"{name}, the other in fp32")
ax.set_xscale("log", base=2)
ax.set_xticks(ranks, [str(c) for c in ranks])
ax.set(xlabel="ranks", ylabel="times one rounding", title="Error of the merged output", ylim=(0, None))
ax.legend()
plt.show()
guessed("lse", round(times["lse in bf16"][4], 1), "times one rounding")
print("lse in bf16 costs more than out in bf16:", all(b > a for a, b in zip(*times.values()) if a > 1))

# %% [markdown]
# lse is a logarithm, and what counts is its absolute error. Near ln 1024 = 6.9 the numbers of bf16 are 1/32 apart, so
# a rounded lse is off by up to 1/64, and a share exp(lse - lse_new) by 1.6 percent. Rounding out once is off by 0.4
# percent at most. So flash attention of bf16 inputs returns lse in fp32; PyTorch's ring merges both in fp32
# (`convert_to_f32`), and Transformer Engine's keeps lse in fp32 at least.
#
# *A good place to stop: part I ends here.*
#
# ### Zigzag
#
# **Exercise.** The places of a rank's tokens under the zigzag cut, ascending.
#
# All that depends on a place uses them: tokens and labels are picked by them, the mask compares them, and RoPE turns by
# *their* angles. A rank that numbers its tokens 0, 1, 2, ... instead trains a model whose positions depend on C.

# %%
# %%exercise positions
import torch


def positions(s: int, cp: int, rank: int) -> torch.Tensor:
    """Places of this rank's tokens in the sequence, [s / cp] int64."""
    ### BEGIN SOLUTION
    chunks = torch.arange(s).chunk(2 * cp)
    return torch.cat((chunks[rank], chunks[2 * cp - 1 - rank]))
    ### END SOLUTION

# %%
check("positions")

# %%
# %%needs positions
from course.figures.context_parallel import causal_map

display(causal_map({"your zigzag: who holds which tokens": [positions(24, 3, r).tolist() for r in range(3)]}))

# %% [markdown]
# ### The ring, forward
#
# Each rank starts with its own block of K and V. At every step it computes with the block that it has, and the blocks
# move on by one rank. At step i rank r has the block of rank (r-i) mod C:

# %%
from course.figures.context_parallel import ring_steps

contiguous = [range(4 * r, 4 * r + 4) for r in range(4)]
zigzag = [[2 * r, 2 * r + 1, 14 - 2 * r, 15 - 2 * r] for r in range(4)]
ring_steps({"contiguous": contiguous, "zigzag": zigzag})

# %% [markdown]
# With the contiguous cut, rank 0 has nothing to do from step 1 on. With zigzag every rank computes half of a block at
# every step. Which half? Find the three cases in the picture: the block is yours, of an earlier rank, of a later one.
#
# Do not program these three cases. They are those of zigzag, and your ring also runs with the contiguous cut, for
# comparison. Let `attend` find out: it compares places, and skips a block of keys if *no* query of the call sees one
# of them. So much depends on the call. Which queries do you pass together, and in blocks of how many keys, so that no
# quarter is computed that is empty in the picture? (A quarter that the mask cuts is computed whole.) Places need not
# travel: `at` holds those of all ranks.
#
# **The message hides behind the work** only if it travels while you compute. `Shift(x, cp)` starts to send x to the
# next rank and to receive from the rank before; `.wait()` returns what has come.
#
# `cp` describes the ranks that share the sequence: `cp.rank` is this rank's number among them, `cp.size` how many they
# are, `cp.group` their process group. There may be other ranks in the world: rank j of `cp` is rank `cp.ranks[j]` of
# the world. `Shift` takes care of this; `dist.isend` needs `cp.ranks[j]` and `group=cp.group`. (The pictures below
# show messages of `Shift` alone.) Inputs may be views that are not contiguous; what is sent must be contiguous.
#
# **Exercise.** `at[j]` are the places of rank j's tokens, zigzag or contiguous. No block travels further than it must.
# The check counts bytes, multiply-adds, and those multiply-adds that are done while a block travels. It also counts what
# a rank holds of its own at a time: as much as eight blocks of K and V at most, with any number of ranks.

# %%
# %%exercise ring_forward
import torch
from exercises.attend import attend
from exercises.merge import merge

from minimegatron.comm.ring import Shift


def ring_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: list[torch.Tensor], cp
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k, v [a, n, d] of this rank -> out [a, n, d] and lse [a, n] over the whole sequence."""
    ### BEGIN SOLUTION
    half, mine = q.shape[1] // 2, at[cp.rank]
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    block = torch.stack((k, v))
    for step in range(cp.size):
        shift = Shift(block, cp) if step < cp.size - 1 else None
        owner = (cp.rank - step) % cp.size
        for rows in (slice(0, half), slice(half, None)):
            piece = attend(q[:, rows], block[0], block[1], mine[rows], at[owner], half)
            out[:, rows], lse[:, rows] = merge(out[:, rows], lse[:, rows], *piece)
        if shift:
            block = shift.wait()
    return out, lse
    ### END SOLUTION

# %%
check("ring_forward")

# %% [markdown]
# ### Is zigzag faster, and are the messages hidden?
#
# The folded cell times your ring on four ranks in four ways: with the contiguous cut; with zigzag; and with zigzag on a
# slow link, first with a wait for each block before computing, then as you wrote it. Each way runs three times, in
# turns, and the fastest run counts.
#
# The computing is real, the rest is simulated. Your machine may have fewer than four cores, so the ranks compute one
# after the other, and each has a clock of its own that runs only while a core works for this rank. Ranks on one machine
# send through its memory, far faster than through a network, so each block is delivered a fixed time after both ranks
# started the exchange: on the slow link 0.8 times the computing of a step. What is computed between sending and waiting
# is decided by your code.

# %% jupyter={"source_hidden": true}
# %%ranks 4 --needs attend,merge,positions,ring_forward --name timelines --out timelines
import fcntl
import time

import exercises.ring_forward as ring
import torch
import torch.distributed as dist
from exercises.positions import positions

from labkit.evidence import Witness
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig

HEADS, TOKENS, WIDTH, RUNS = 2, 1024, 64, 3  # tokens of a rank
cp = Mesh.build(ParallelConfig(context_parallel_size=world)).cp
contiguous = list(torch.arange(TOKENS * world).chunk(world))
zigzag = [positions(TOKENS * world, world, r) for r in range(world)]
q, k, v = torch.randn(3, HEADS, TOKENS, WIDTH).unbind()
attend, shift = ring.attend, ring.Shift
turn = open(ring.__file__)  # the rank that has locked it computes


class Clock:
    """Seconds of this rank: those in which a core works for it, and those that it waits for the link."""

    def restart(self):
        self.zero, self.bars = time.thread_time(), []

    def now(self):
        return time.thread_time() - self.zero

    def wait_until(self, moment):
        self.zero -= max(0.0, moment - self.now())


class Link:
    """A Shift whose block arrives `seconds` after both ranks have started; the sender's clock travels along."""

    seconds, at_once = 0.0, False

    def __init__(self, x, cp, tag=0):
        self.start, self.got = clock.now(), None
        self.block = shift(x, cp, tag)
        self.sender = shift(torch.tensor([self.start], dtype=torch.float64), cp, tag + 10)
        if self.at_once:
            self.got = self.wait()

    def wait(self):
        if self.got is not None:
            return self.got
        block, there = self.block.wait(), self.sender.wait().item()
        arrived = max(self.start, there) + self.seconds
        clock.wait_until(arrived)
        clock.bars.append(("comm", self.start, arrived))
        return block


def timed(*inputs):
    """One rank at a time, so that none takes caches and memory from another."""
    fcntl.flock(turn, fcntl.LOCK_EX)
    start = clock.now()
    found = attend(*inputs)
    clock.bars.append(("compute", start, clock.now()))
    fcntl.flock(turn, fcntl.LOCK_UN)
    return found


def run(at, seconds, at_once):
    """Seconds of the slowest rank, and this rank's bars."""
    Link.seconds, Link.at_once = seconds, at_once
    dist.barrier()
    clock.restart()
    ring.ring_forward(q, k, v, at, cp)
    last = torch.tensor(clock.now())
    dist.all_reduce(last, dist.ReduceOp.MAX)
    return last.item(), clock.bars


def multiply_adds(at):
    """In the matrix products of this rank."""
    with Witness(rank) as witness:
        ring.ring_forward(q, k, v, at, cp)
    return sum(much for what, much in witness.evidence().order if what == "matmul")


counted = {"contiguous": multiply_adds(contiguous), "zigzag": multiply_adds(zigzag)}
clock = Clock()
ring.attend, ring.Shift = timed, Link
alone = [sum(b - a for kind, a, b in run(zigzag, 0.0, False)[1] if kind == "compute") for _ in range(RUNS)]
step = torch.tensor(min(alone) / world)
dist.broadcast(step, 0)
ways = {
    "contiguous": (contiguous, 0.0, False),
    "zigzag": (zigzag, 0.0, False),
    "wait": (zigzag, 0.8 * step.item(), True),
    "yours": (zigzag, 0.8 * step.item(), False),
}
runs = [{name: run(*how) for name, how in ways.items()} for _ in range(RUNS)]
ring.attend, ring.Shift = attend, shift
report(({name: min(one[name] for one in runs) for name in ways}, counted))

# %%
# %%needs attend merge positions ring_forward
from minimegatron.trace import Event
from minimegatron.viz.timeline import beside


def drawn(titles, kinds, title):
    """The fastest runs below each other: {name: title}, and the kinds of bars to draw."""
    panels = {}
    for name, said in titles.items():
        bars = [(r, *bar) for r, (fastest, _) in enumerate(timelines) for bar in fastest[name][1] if bar[0] in kinds]
        seconds = timelines[0][0][name][0]
        panels[f"{said}, {1000 * seconds:.0f} ms"] = [Event(k, k, r, a, b) for r, k, a, b in bars]
    figure = beside(panels, labels=False, title=title)
    figure.axes[0].set_xlim(right=1.005 * figure.axes[0].get_xlim()[1])
    return figure


most = {name: max(counted[name] for _, counted in timelines) for name in ("contiguous", "zigzag")}
print(f"most multiply-adds of a rank: contiguous {most['contiguous'] / most['zigzag']:.2f} times those of zigzag")
both = {name: f"{name}: up to {much / 1e6:,.0f} million multiply-adds on a rank" for name, much in most.items()}
display(drawn(both, ("compute",), "Four ranks; a bar is one call of your attend, a sliver a call that skips all"))

# %% [markdown]
# Count pairs, and the last of four contiguous ranks has 1.75 times the mean. Your code computes a little more: a
# quarter on the diagonal is computed whole, and then masked. So count quarters, four to each block, as in the ring
# picture. The last contiguous rank computes 3 of its own block and all 4 of each of three others, 3 + 4·3 = 15. A
# zigzag rank computes 3 of its own and 2 of each other, 3 + 2·3 = 9. The titles give the multiply-adds of the rank
# that has most: 15 to 9, 1.67, on every machine. This ratio is the result.
#
# The times show it less exactly. Merging and messages cost the same with both cuts, so on a quiet machine the ratio is
# a little smaller than 1.67; other programs change it from run to run. Two bars of the same work differ by as much as
# your machine was disturbed. If they differ much, run the cell again.

# %%
# %%needs attend merge positions ring_forward
both = {"wait": "wait, then compute", "yours": "yours"}
display(drawn(both, ("compute", "comm"), "A ring of four ranks on a slow link"))

# %% [markdown]
# A dark bar begins when a rank starts to send a block and ends when the next block has arrived. In the upper picture
# the rank rests meanwhile. In yours it computes, and a message costs only the time by which it is longer than the work
# beside it.
#
# ### Packed documents
#
# Few samples are 128 k tokens long. Training packs many documents into one sequence, and a query should see keys of its
# own document only: j ≤ i, and both in one document. (Llama 3 found that this matters once sequences are very long:
# section 3.2 of its paper, arXiv 2407.21783. In Megatron-LM: `--reset-attention-mask`, or `PackedSeqParams`.) The
# triangle falls apart into one for each document. Here a document has half of the sequence, and four short ones share
# the rest:

# %%
from course.figures.context_parallel import causal_map

contiguous = [range(8 * r, 8 * r + 8) for r in range(4)]
zigzag = [[*range(4 * r, 4 * r + 4), *range(28 - 4 * r, 32 - 4 * r)] for r in range(4)]
causal_map({"contiguous": contiguous, "zigzag": zigzag}, documents=[16, 4, 4, 4, 4])

# %% [markdown]
# Now two sequences on 8 ranks. In the first one document has half of the tokens, and 16 equal ones share the rest. The
# second has four equal documents: there zigzag gives each rank the same number of pairs. Guess how long the slowest
# rank of each computes. The unit is the mean: 1 is perfect.
#
# For the second, think of the ring's steps. Each rank waits for the next block, so at every step all wait for the rank
# that has most to do *with the block it has now*.

# %%
guess("half", None, "half one document, half 16 short ones; zigzag on 8 ranks: the slowest rank takes how many means?")
guess("quarters", None, "four equal documents; zigzag on 8 ranks, in a ring: how many means does it take?")

# %% tags=["hide-output"]
import torch

CP, PACKED = 8, {"half": [2048] + 16 * [128], "quarters": 4 * [1024]}  # 4096 tokens; only the proportions matter


def head_tail(places):
    """Zigzag, by its name in PyTorch."""
    chunks = places.chunk(2 * CP)
    return [torch.cat((chunks[r], chunks[-1 - r])) for r in range(CP)]


def times(lengths, held):
    """In means: the slowest rank, if each computes with all keys at once; and a ring, step by step."""
    document, place = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)), torch.arange(sum(lengths))
    seen = (document[:, None] == document) & (place[:, None] >= place)
    pairs = torch.stack([seen[q][:, k].sum() for q in held for k in held]).view(CP, CP)  # [rank, owner of the keys]
    steps = [max(pairs[r, (r - i) % CP] for r in range(CP)) for i in range(CP)]
    return [round((CP * took / pairs.sum()).item(), 2) for took in (pairs.sum(1).max(), sum(steps))]


cuts = {}
for name, lengths in PACKED.items():
    whole = torch.arange(sum(lengths))
    by_document = zip(*(head_tail(places) for places in whole.split(lengths)))
    cuts[name] = {"contiguous": whole.chunk(CP), "zigzag": head_tail(whole), "zigzag in each document": [
        torch.cat(parts) for parts in by_document]}  # fmt: skip
    for cut, held in cuts[name].items():
        print("{:10}{:25} all-gather {:.2f}   ring {:.2f}".format(name, cut, *times(lengths, held)))
guessed("half", times(PACKED["half"], cuts["half"]["zigzag"])[0], "means")
guessed("quarters", times(PACKED["quarters"], cuts["quarters"]["zigzag"])[1], "means")

# %% [markdown]
# With four equal documents zigzag balances the *sum* of each rank, and the ring still takes 1.75 means. A ring needs
# balance at every step. Who gathers all keys and values first waits once. Llama 3 gathers: that is simple with masks of
# documents, and with grouped queries K and V are small (section 3.3.2).
#
# **Zigzag in each document** is perfect in both columns. Transformer Engine does it for packed sequences (`thd`). It has
# a price. Each document's length must be a multiple of 2C, so short ones are padded. And on 16 ranks a document of
# 2,048 tokens is cut into slices of 64, half a tile of a usual flash kernel. So WLB-LLM estimates for every batch
# whether this cut or that of the whole sequence is faster (arXiv 2503.17924).
#
# A third cut keeps larger chunks, wherever documents begin and end, and deals them out by their work. PyTorch has such
# a dealer for FlexAttention. It is yours to write now.
#
# **Exercise.** Deal out the chunks. `lengths` are those of the documents, in their order. The packed sequence is cut
# into chunks of `chunk` tokens, numbered from 0; a chunk may hold the end of one document and the beginning of the
# next. Return for each rank the numbers of its chunks, in any order. Each chunk is on one rank; all ranks hold the same
# number, because memory is full everywhere; and no rank has more than 1.03 times the mean number of pairs. This is
# possible in every case that is tried. There are at least 16 chunks for each rank.

# %%
# %%exercise deal
def deal(lengths: list[int], chunk: int, cp: int) -> list[list[int]]:
    """The numbers of each rank's chunks; chunk * cp divides the sum of the lengths."""
    ### BEGIN SOLUTION
    seen = [i + 1 for n in lengths for i in range(n)]
    work = [sum(seen[i : i + chunk]) for i in range(0, len(seen), chunk)]
    order = sorted(range(len(work)), key=lambda c: work[c], reverse=True)
    rounds = [order[i : i + cp] for i in range(0, len(order), cp)]
    return [[one[-1 - r if i % 2 else r] for i, one in enumerate(rounds)] for r in range(cp)]
    ### END SOLUTION

# %%
check("deal")

# %%
# %%needs deal
for name, lengths in PACKED.items():
    chunks = torch.arange(sum(lengths)).split(32)
    held = [torch.cat([chunks[int(c)] for c in numbers]) for numbers in deal(lengths, 32, CP)]
    print("{:10}{:25} all-gather {:.2f}   ring {:.2f}".format(name, "yours", *times(lengths, held)))

# %% [markdown]
# Your chunks are balanced for an all-gather. For the ring they may not be: who deals by work alone does not ask whose
# keys a chunk needs at which step. So the cut, the mask and the way to exchange keys are one decision.
#
# *A good place to stop: part II ends here.*
#
# ### A piece, backward
#
# Nothing was kept of the scores. The backward pass computes P again, and here lse pays off: `P = exp(S - lse)`, with
# the *final* lse of the whole row, is right for any piece of the keys by itself. Nothing has to be merged. The
# gradients are plain sums over pieces.
#
# One thing looks impossible. With dP = dout·Vᵀ, softmax's gradient is P·(dP - D): from each dP it subtracts D, the mean
# of dP over the row, weighted with P. This row has keys on *all* ranks, and you see one piece.
#
# By hand: one query sees four keys and every score is 0, so P = 1/4 for each and lse = log 4. Let d = 4, and let only
# the first number of the values and of dout differ from 0: values 2, 4, 9, 1, so out = 4, and dout = 8. Then dP = 16,
# 32, 72, 8, and their mean is 32. A rank that has only the first two keys must use this 32, too. From which of its
# arguments does it get it?
#
# Go on by hand: dV is 2 for every key; the gradient of the scores before they are divided by √d is -4, 0, 10, -6. Its
# sum is 0: adding the same number to all scores changes no softmax. The check's first case has these numbers.
#
# **Exercise.** One piece's terms of dq, dk and dv. You may hold this piece's scores whole. The score of a hidden key may
# be hundreds above lse; its P is 0.

# %%
# %%exercise piece_backward
import torch


def piece_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    q_at: torch.Tensor, k_at: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dout, q, out [a, n, d], lse [a, n]; k, v [a, m, d], some of the keys -> dq, dk, dv."""
    ### BEGIN SOLUTION
    sigma = q.shape[-1] ** -0.5
    scores = (q @ k.mT * sigma).masked_fill(k_at > q_at[:, None], -torch.inf)
    p = torch.exp(scores - lse[..., None])
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * sigma
    return ds @ k, ds.mT @ q, p.mT @ dout
    ### END SOLUTION

# %%
check("piece_backward")

# %% [markdown]
# ### The ring, backward
#
# K and V go round again, and each rank adds up the pieces of its dQ. With dK and dV it is not so easy. They belong to
# the *owner* of a block, and every rank that the block visits computes a part of them. How do these parts come
# together on the owner, if messages go to the next rank only, and no rank keeps a part of another's block for later?
# Take three ranks and the block of rank 0. Write down for each step: where the block is; which ranks have computed
# their part; what must be sent now.
#
# **Exercise.** Only messages to the next rank. A rank sends 2C blocks at most, a block being K and V, or dK and dV, and
# holds as much as twelve of them at a time at most, with any number of ranks. Two conditions more, each with a row of
# the check:
#
# * *Every* message travels beside work, on two ranks as on four: between its start and the wait for it your rank does
#   the multiply-adds of a quarter of a piece at least. That is `piece_backward` for half the queries and half the keys,
#   with five products. The tokens are cut by zigzag.
# * In a bf16 model q, k, v, out and dout are bf16, and lse is fp32. The ring returns dq, dk and dv in bf16. On eight
#   ranks their error (the norm of the difference from gradients in float64) is at most 1.1 times that of rounding those
#   once. K and V travel in bf16.
#
# `Shift(x, cp, tag=1)` keeps a second stream apart from the first. There are at least two ranks. (For brevity you may
# compute hidden halves here; the package does not.)

# %%
# %%exercise ring_backward
import torch
from exercises.piece_backward import piece_backward

from minimegatron.comm.ring import Shift


def ring_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    at: list[torch.Tensor], cp,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All of this rank, [a, n, d] (lse [a, n]); out and lse of the whole row -> dq, dk, dv in the dtype of q."""
    ### BEGIN SOLUTION
    half, wide, first = q.shape[1] // 2, lse.dtype, torch.stack((k, v))
    dq, block = torch.zeros_like(q, dtype=wide), first

    def add(rows, block, owner):
        """Add these queries' dq; return their terms of the block's dk and dv."""
        of_rows = [t[:, rows].to(wide) for t in (out, lse)] + [at[cp.rank][rows], at[owner]]
        more, dk, dv = piece_backward(dout[:, rows].to(wide), q[:, rows].to(wide), *block.to(wide), *of_rows)
        dq[:, rows] += more
        return torch.stack((dk, dv))

    shift = Shift(block, cp)
    own = add(slice(0, half), first, cp.rank)
    for step in range(1, cp.size):
        block = shift.wait()
        if step < cp.size - 1:
            shift = Shift(block, cp)
        part = add(slice(None), block, (cp.rank - step) % cp.size)
        if step > 1:
            part += behind.wait()
        behind = Shift(part, cp, tag=1)
    own += add(slice(half, None), first, cp.rank)
    own += behind.wait()
    return dq.to(q.dtype), *own.to(k.dtype)
    ### END SOLUTION

# %%
check("ring_backward")

# %% [markdown]
# ### Ulysses
#
# Before the exchange a rank has some tokens of all heads, afterwards all tokens of some heads. Four ranks, four heads,
# eight chunks in zigzag:

# %%
from course.figures.context_parallel import heads_for_tokens as exchange

exchange(heads=4, held=[[r, 7 - r] for r in range(4)])

# %% [markdown]
# `all_to_all_single(output, input, group=cp.group)` cuts dim 0 of `input` into C pieces, sends piece j to rank j, and
# stacks what arrives in `output`, in the order of the ranks. Let dim 0 be the heads: rank r gets its a/C heads of all
# ranks' tokens. They arrive rank by rank, as in the second drawing: chunks 0 7 1 6 2 5 3 4. Ordinary attention wants
# them in the order of the sequence, as in the third.
#
# `all_to_all_single` copies memory as it lies: both of its tensors must be contiguous, and x need not be.
# (`torch.empty_like` of a view that is not contiguous is not contiguous either.) `cp` is the same object as in the
# ring; without `group=cp.group` the call would go to all ranks of the world.
#
# Your `positions` tells which places rank j's tokens have; use it or do without.
#
# **Exercise.** Both ways. The second undoes the first; it is also its backward pass, since both only move numbers.

# %%
# %%exercise ulysses
import torch
import torch.distributed as dist

# If you want the places of a rank's tokens: they are `positions` in exercises.positions.


def heads_for_tokens(x: torch.Tensor, cp) -> torch.Tensor:
    """x [a, n, d], this rank's tokens -> [a/C, s, d], this rank's heads, tokens in the order of the sequence."""
    ### BEGIN SOLUTION
    arrived = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(arrived, x.contiguous(), group=cp.group)
    halves = arrived.unflatten(0, (cp.size, -1)).unflatten(2, (2, -1))  # [C, a/C, 2, n/2, d]
    chunks = torch.cat((halves[:, :, 0], halves[:, :, 1].flip(0)))
    return chunks.transpose(0, 1).flatten(1, 2)
    ### END SOLUTION


def tokens_for_heads(y: torch.Tensor, cp) -> torch.Tensor:
    """y [a/C, s, d] -> [a, n, d]."""
    ### BEGIN SOLUTION
    chunks = y.unflatten(1, (2 * cp.size, -1)).transpose(0, 1)  # [2C, a/C, n/2, d]
    for_each = torch.stack((chunks[: cp.size], chunks[cp.size :].flip(0)), dim=2).flatten(2, 3).flatten(0, 1)
    arrived = torch.empty_like(for_each)
    dist.all_to_all_single(arrived, for_each, group=cp.group)
    return arrived
    ### END SOLUTION

# %%
check("ulysses")

# %% [markdown]
# *A good place to stop: part III ends here.*
#
# ## 4 · Run
#
# ### Four ranks, one attention
#
# The four ranks are compared with a *serial twin*: one process with the whole sequence and torch's own attention.

# %%
# %%ranks 4 --needs positions,ring_forward,ring_backward,ulysses
import torch
import torch.nn.functional as F
from exercises.positions import positions
from exercises.ring_backward import ring_backward
from exercises.ring_forward import ring_forward
from exercises.ulysses import heads_for_tokens, tokens_for_heads

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig

s, heads, d = 64, 4, 8
cp = Mesh.build(ParallelConfig(context_parallel_size=world)).cp
at = [positions(s, world, r) for r in range(world)]
g = torch.Generator().manual_seed(0)
q, k, v, dout = torch.randn(4, heads, s, d, generator=g).unbind()
twin = [t.clone().requires_grad_() for t in (q, k, v)]
want = F.scaled_dot_product_attention(*twin, is_causal=True)
want.backward(dout)

mine = [t[:, at[rank]] for t in (q, k, v)]
out, lse = ring_forward(*mine, at, cp)
grads = ring_backward(dout[:, at[rank]], *mine, out, lse, at, cp)
same = [torch.allclose(out, want[:, at[rank]], atol=1e-5)]
same += [torch.allclose(got, t.grad[:, at[rank]], atol=1e-5) for got, t in zip(grads, twin)]
print("ring:    out, dq, dk, dv as in one process:", *same)
y = F.scaled_dot_product_attention(*(heads_for_tokens(t, cp) for t in mine), is_causal=True)
print("ulysses: out as in one process:", torch.allclose(tokens_for_heads(y, cp), want[:, at[rank]], atol=1e-5))

# %% [markdown]
# ### In a GPT
#
# The package builds its attention from a class that you can name. The folded cell makes two such classes of your
# functions: `RingCore` calls `ring_forward` and `ring_backward`, `UlyssesCore` exchanges heads, attends, and exchanges
# back. Batch and heads fold into one dim, because attention treats them alike.

# %% jupyter={"source_hidden": true}
# %%ranks 1 --needs positions,ring_forward,ring_backward,ulysses --name context_cores
import torch
import torch.nn.functional as F
from exercises.positions import positions
from exercises.ring_backward import ring_backward
from exercises.ring_forward import ring_forward
from exercises.ulysses import heads_for_tokens, tokens_for_heads

from minimegatron.layers.attention.self_attention import SelfAttention
from minimegatron.models.gpt_layer_specs import decoder_layer_spec
from minimegatron.models.spec import ModuleSpec


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, at, cp):
        out, lse = ring_forward(q, k, v, at, cp)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.at, ctx.cp = at, cp
        return out

    @staticmethod
    def backward(ctx, dout):
        return *ring_backward(dout.contiguous(), *ctx.saved_tensors, ctx.at, ctx.cp), None, None


class Swap(torch.autograd.Function):
    """Heads for tokens, or back; each is the other's gradient."""

    @staticmethod
    def forward(ctx, x, cp, there):
        ctx.cp, ctx.there = cp, there
        return heads_for_tokens(x, cp) if there else tokens_for_heads(x, cp)

    @staticmethod
    def backward(ctx, dy):
        return (tokens_for_heads if ctx.there else heads_for_tokens)(dy, ctx.cp), None, None


class RingCore(torch.nn.Module):
    supports_context_parallel = True
    function = Ring

    def __init__(self, config, mesh, rng=None):
        super().__init__()
        self.cp = mesh.cp

    def forward(self, q, k, v, mask=None):
        """q, k, v [n, b, heads, d] -> [n, b, heads * d]."""
        b = q.shape[1]
        out = self.attention(*(t.permute(1, 2, 0, 3).flatten(0, 1) for t in (q, k, v)))
        return out.unflatten(0, (b, -1)).permute(2, 0, 1, 3).flatten(2)

    def attention(self, q, k, v):
        s = q.shape[1] * self.cp.size
        return self.function.apply(q, k, v, [positions(s, self.cp.size, r) for r in range(self.cp.size)], self.cp)


class UlyssesCore(RingCore):
    def attention(self, q, k, v):
        q, k, v = (Swap.apply(t, self.cp, True) for t in (q, k, v))
        return Swap.apply(F.scaled_dot_product_attention(q, k, v, is_causal=True), self.cp, False)


def layer_with(core, config):
    """The package's layer with another core of attention."""
    return decoder_layer_spec(config).with_submodule(
        "self_attention", ModuleSpec(SelfAttention, {"core_attention": core})
    )


if __name__ == "__main__":
    print("two cores:", RingCore.__name__, UlyssesCore.__name__)

# %% [markdown]
# Now a Llama of two layers. Each rank embeds its tokens, turns queries and keys by the angles of *its* places, and
# computes the losses of its tokens. The loss is a sum over all tokens divided by their number; a rank has some terms of
# the sum. So its gradient is a part as well: **sum the gradients over cp**. Without this sum nothing crashes.
#
# The folded cell compares loss and every gradient of one step with the serial twin, for both cores and for 2 and 4
# ranks. Its last run makes a mistake on purpose: each rank turns its queries and keys as if its tokens stood at places
# 0, 1, 2, ...

# %% jupyter={"source_hidden": true}
# %%ranks 4 --needs positions,ring_forward,ring_backward,ulysses --name gpt
import torch
from context_cores import RingCore, UlyssesCore, layer_with
from exercises.positions import positions

from minimegatron.comm import collectives
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config

s, b = 64, 2
config = family_config(
    "llama", num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=4, vocab_size=256,
    init_method_std=0.2,
)
ids = torch.randint(0, 256, (b, s + 1), generator=torch.Generator().manual_seed(0))
tokens, labels = ids[:, :-1], ids[:, 1:]


def step(mesh, core=None, places=None):
    """Loss and gradients of one step, summed over cp."""
    model = build_model(config, mesh, 1, None if core is None else layer_with(core, config))
    mine = positions(s, mesh.cp.size, mesh.cp.rank) if mesh.cp.size > 1 else torch.arange(s)
    turned_by = (mine if places is None else places).expand(b, -1)
    loss = model(tokens[:, mine], turned_by, labels[:, mine]).sum() / (b * s)
    loss.backward()
    if mesh.cp.size > 1:
        loss = collectives.all_reduce(loss.detach(), mesh.cp)
        for p in model.parameters():
            p.grad = collectives.all_reduce(p.grad, mesh.cp)
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def norm(grads):
    return torch.stack([g.norm() for g in grads.values()]).norm().item()


twin_loss, twin = step(Mesh.serial())
print(f"{'serial twin':30} loss {twin_loss:.3f}   gradient norm {norm(twin):.3f}")
for c in (2, 4):
    mesh = Mesh.build(ParallelConfig(context_parallel_size=c))
    for core in (RingCore, UlyssesCore):
        loss, grads = step(mesh, core)
        worst = max(((grads[n] - g).norm() / g.norm()).item() for n, g in twin.items())
        print(
            f"{core.__name__ + f', cp {c}':30} loss {loss:.3f}   gradient norm {norm(grads):.3f}   "
            f"every gradient right: {worst < 1e-4}"
        )
loss, grads = step(mesh, RingCore, torch.arange(s // 4))
print(f"{'RoPE by places on the rank':30} loss {loss:.3f}   gradient norm {norm(grads):.3f}")

# %% [markdown]
# The last line is the mistake: RoPE by places on the rank. There is no error, and the loss looks plausible, but it is
# the loss of another model. Only the comparison with the twin shows it.
#
# ## 5 · See
#
# ### Bytes: predicted and counted
#
# One attention, forward, on two and on four ranks. The folded cell counts what your functions and the package's send.

# %% jupyter={"source_hidden": true}
# %%ranks 4 --needs bytes_per_layer,positions,ring_forward,ring_backward,ulysses --out moved
import torch
from exercises.bytes_per_layer import bytes_per_layer
from exercises.positions import positions
from exercises.ring_backward import ring_backward
from exercises.ring_forward import ring_forward
from exercises.ulysses import heads_for_tokens, tokens_for_heads

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from labkit.evidence import Witness
from minimegatron.layers.attention.core_attention import CoreAttention
from minimegatron.models.families import family_config

s, heads, d = 128, 8, 16
config = family_config("llama", num_layers=1, hidden_size=heads * d, num_attention_heads=heads, num_query_groups=heads,
                       vocab_size=256)  # fmt: skip


def counted(function, size):
    """Bytes that this rank sends."""
    with Witness(rank) as witness:
        function()
    seen = witness.evidence()
    return seen.nbytes("send") + seen.nbytes("all_to_all") * (size - 1) / size


rows = {}
for size in (2, 4):
    at = [positions(s, size, r) for r in range(size)]
    q, k, v = torch.randn(3, heads, s // size, d).unbind()
    predicted = bytes_per_layer(s, 1, heads, heads, d, size, 4)
    for way, kind in (("ring", "p2p"), ("ulysses", "a2a")):
        mesh = Mesh.build(ParallelConfig(context_parallel_size=size, cp_comm_type=kind))
        cp, core = mesh.cp, CoreAttention(config, mesh)
        there = [t.transpose(0, 1).unsqueeze(1) for t in (q, k, v)]  # [n, b, heads, d]
        if way == "ring":
            yours = counted(lambda: ring_forward(q, k, v, at, cp), size)
        else:
            yours = counted(lambda: tokens_for_heads([heads_for_tokens(t, cp) for t in (q, k, v)][0], cp), size)
        rows[way, size] = predicted[way], yours, counted(lambda: core(*there), size)
        print(f"{way:7} cp {size}   predicted {predicted[way] / 1024:.0f} KiB   yours {yours / 1024:.0f} KiB   "
              f"the package {rows[way, size][2] / 1024:.0f} KiB")  # fmt: skip
    if size == 4:
        out, lse = q.clone(), q.new_zeros(q.shape[:2])
        back = counted(lambda: ring_backward(out, q, k, v, out, lse, at, cp), size)
        print(f"ring, your backward on 4 ranks: {back / predicted['ring']:.2f} times the forward")
report(rows)

# %%
# %%needs bytes_per_layer positions ring_forward ring_backward ulysses
from course.figures.counts import against_ranks


def kib(way):
    return lambda cp: bytes_per_layer(128, 1, 8, 8, 16, cp, 4)[way] / 1024


yours = {way: {c: got[1] / 1024 for (of, c), got in moved[0].items() if of == way} for way in ("ring", "ulysses")}
display(against_ranks({way: kib(way) for way in ("ring", "ulysses")}, yours, ranks=(2, 4, 8), ylabel="KiB of one rank",
                      title="Bytes that a rank sends in one attention, forward"))  # fmt: skip

# %% [markdown]
# Here there are as many key/value heads as query heads. On two ranks both ways send the same; then the ring's bytes
# grow towards all keys and values, and those of Ulysses fall.
#
# The gradients of K and V need C-1 hops, if what your own queries add stays at home: with those of K and V 6 blocks
# for 3 on four ranks, twice the forward's bytes. With C hops it is 7 blocks, 2.33 times. In a bf16 model the gradients
# travel in fp32, and C-1 hops of both make three times. The package sends as much as that. But it computes with its own
# block at once, so nothing is left beside its last message.
#
# ### Memory
#
# What does a whole layer keep for its backward pass, on one rank, with your ring inside? The folded cell counts as in
# lab 02: each piece of memory that autograd saves, once, parameters left out. It does so for 1, 2 and 4 ranks and three
# lengths, and fits the slope of log(bytes) against log(cp): bytes that fall as 1/cp have slope -1.

# %% jupyter={"source_hidden": true}
# %%ranks 4 --needs positions,ring_forward,ring_backward,ulysses --name memory --out layer_bytes
import math

import torch
from context_cores import RingCore, layer_with

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.attention.self_attention import AttentionContext
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config

config = family_config("gpt2", num_layers=1, hidden_size=64, num_attention_heads=4, vocab_size=256,
                       max_position_embeddings=1024)  # fmt: skip


def kept_bytes(layer, x):
    """Bytes of the tensors that autograd keeps, parameters not counted."""
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x, AttentionContext())
    return sum(storage.nbytes() for storage in kept.values())


def slope(xs, ys):
    """Least squares through (log x, log y)."""
    x, y = [math.log(v) for v in xs], [math.log(v) for v in ys]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)


degrees, lengths, table = (1, 2, 4), (128, 256, 512), {}
for c in degrees:
    mesh = Mesh.build(ParallelConfig(context_parallel_size=c))
    layer = build_model(config, mesh, 1, layer_with(RingCore, config)).decoder.layers["0"]
    for s in lengths:
        table[s, c] = kept_bytes(layer, torch.randn(s // c, 1, 64, requires_grad=True))
for s in lengths:
    found = slope(degrees, [table[s, c] for c in degrees])
    sizes = "  ".join(f"cp {c}: {table[s, c] / 1024:6.1f} KiB" for c in degrees)
    print(f"s {s}:  {sizes}   slope {found:.2f}, within 3 % of -1: {abs(found + 1) < 0.03}")
along = slope(lengths, [table[s, 4] for s in lengths])
print(f"against s at cp 4: slope {along:.2f}, within 3 % of 1: {abs(along - 1) < 0.03}")
report([[s, c, nbytes] for (s, c), nbytes in table.items()])

# %%
# %%needs positions ring_forward ring_backward ulysses
import matplotlib.pyplot as plt
from minimegatron.viz.picture import MEASURED_LINE

fig, ax = plt.subplots(figsize=(7, 2.8))
for c, marker in ((1, "o"), (2, "s"), (4, "^")):
    points = [(s, nbytes / 1024) for s, of, nbytes in layer_bytes[0] if of == c]
    ax.plot(*zip(*points), marker=marker, label=f"counted, cp {c}", **MEASURED_LINE)
ax.set(xlabel="tokens of the sequence", ylabel="KiB kept by one rank", title="Activations of one layer")
ax.set_xticks([128, 256, 512])
ax.legend()
plt.show()

# %% [markdown]
# Twice the ranks, twice the sequence, the same memory. Nothing of size s × s is left.
#
# On a machine with GPUs the next cell runs the package's attention over 128 k tokens on all of them.

# %%
# %%torchrun --gpus 2 --name long_sequence --out long_sequence
import torch
from minimegatron.launch.rank import finish, init, report
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.attention.core_attention import CoreAttention
from minimegatron.models.families import family_config

TOKENS, HEADS = 131072, 32

rank, world = init()
config = family_config("llama", num_layers=1, hidden_size=128 * HEADS, num_attention_heads=HEADS, num_query_groups=8,
                       vocab_size=256, params_dtype="bf16")  # fmt: skip
mesh = Mesh.build(ParallelConfig(context_parallel_size=world))
n, core = TOKENS // world, CoreAttention(config, mesh)
q, k, v = (torch.randn(n, 1, a, 128, device=mesh.device, dtype=torch.bfloat16, requires_grad=True)
           for a in (HEADS, 8, 8))  # fmt: skip
torch.cuda.reset_peak_memory_stats()
core(q, k, v).sum().backward()
report(torch.cuda.max_memory_allocated())
finish()

# %%
if long_sequence:
    print(f"peak on each of {long_sequence.nproc} GPUs: {max(long_sequence.reports) / 2**30:.1f} GiB")

# %% [markdown]
# ## 6 · Break it
#
# A colleague has simplified the ring: "`block` is at hand when the forward pass ends, so save that." Read the class.
# Where is the mistake? If you do not see it, go on: the runs below show what it does.

# %%
# %%ranks 1 --needs positions,attend,merge,ring_forward,ring_backward,ulysses --name simplified
import torch
from context_cores import RingCore
from exercises.attend import attend
from exercises.merge import merge
from exercises.ring_backward import ring_backward

from minimegatron.comm.ring import Shift


class SimplerRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, at, cp):
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
        block = torch.stack((k, v))
        for step in range(cp.size):
            shift = Shift(block, cp) if step < cp.size - 1 else None
            owner = (cp.rank - step) % cp.size
            piece = attend(q, block[0], block[1], at[cp.rank], at[owner], q.shape[1])
            out, lse = merge(out, lse, *piece)
            if shift:
                block = shift.wait()
        ctx.save_for_backward(q, block, out, lse)
        ctx.at, ctx.cp = at, cp
        return out

    @staticmethod
    def backward(ctx, dout):
        q, (k, v), out, lse = ctx.saved_tensors
        return *ring_backward(dout.contiguous(), q, k, v, out, lse, ctx.at, ctx.cp), None, None


class SimplerCore(RingCore):
    function = SimplerRing

# %% [markdown]
# The folded cell trains two small Llamas for 41 steps on the same data: one on two ranks with `SimplerCore`, one in a
# single process. It prints the losses, the norm of the first gradient, and which gradients of the last layer are right.

# %% jupyter={"source_hidden": true}
# %%ranks 2 --needs positions,attend,merge,ring_forward,ring_backward,ulysses --name suspect
import torch
from context_cores import layer_with
from exercises.positions import positions
from simplified import SimplerCore

from minimegatron.comm import collectives
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config

s, b = 32, 4
config = family_config(
    "llama", num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=4, vocab_size=64, init_method_std=0.1
)


def some_batch(step):
    """Every id depends on the one before."""
    g = torch.Generator().manual_seed(step)
    ids = [torch.randint(0, 64, (b,), generator=g)]
    for _ in range(s):
        ids.append((ids[-1] * 5 + 7 + torch.randint(0, 4, (b,), generator=g)) % 64)
    return torch.stack(ids, 1)


mesh = Mesh.build(ParallelConfig(context_parallel_size=world))
model, twin = build_model(config, mesh, 1, layer_with(SimplerCore, config)), build_model(config, Mesh.serial(), 1)
mine = positions(s, world, rank)
optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (model, twin)]
for step in range(41):
    ids = some_batch(step)
    loss = model(ids[:, :-1][:, mine], mine.expand(b, -1), ids[:, 1:][:, mine]).sum() / (b * s)
    twin_loss = twin(ids[:, :-1], labels=ids[:, 1:]).mean()
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    twin_loss.backward()
    for p in model.parameters():
        p.grad = collectives.all_reduce(p.grad, mesh.cp)
    total = collectives.all_reduce(loss.detach(), mesh.cp).item()
    if step == 0:
        pairs = [(name, p.grad.clone(), t.grad.clone()) for (name, p), t in zip(model.named_parameters(),
                 twin.parameters())]  # fmt: skip
    if step % 20 == 0:
        print(f"step {step:2}  loss   cp 2 {total:.2f}   serial {twin_loss.item():.2f}")
    for optimizer in optimizers:
        optimizer.step()
norms = [torch.stack([pair[i].norm() for pair in pairs]).norm().item() for i in (1, 2)]
print(f"gradient norm at the first step:   cp 2 {norms[0]:.3f}   serial {norms[1]:.3f}")
for name, got, want in pairs:
    if name.startswith("decoder.layers.1."):
        right = ((got - want).norm() / want.norm()).item() < 1e-3
        print(f"  {name.removeprefix('decoder.layers.1.'):40} {'right' if right else 'wrong'}")

# %% [markdown]
# The loss of step 0 equals that of the twin, and then it falls. But the gradient norm is off at the first step. And the
# list says where to look: in the last layer everything *after* the core of attention is right, `linear_qkv` and the
# norm before it are wrong. So the forward pass is right and the core's backward pass is not.
#
# Look at each step of it. Below, four ranks walk the ring with what `SimplerRing` saves and keep every step's share of
# dq. At step i rank r *should* use the block of rank (r-i) mod C, and it does use the places of that rank.
#
# **Exercise.** Whose keys and values did it really use? `dqs[i]` is step i's share; `ks[j]`, `vs[j]` are the blocks
# of all ranks. Return a list of ranks, one for each step. Your `piece_backward` is the tool. The gradients may be of any
# size, 1e-5 or 1e4: no fixed tolerance tells the blocks apart.

# %%
# %%exercise blocks_used
import torch
from exercises.piece_backward import piece_backward


def blocks_used(
    dqs: list[torch.Tensor], dout: torch.Tensor, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    ks: list[torch.Tensor], vs: list[torch.Tensor], at: list[torch.Tensor], rank: int,
) -> list[int]:
    """The rank whose keys and values gave dqs[i], for every step i."""
    ### BEGIN SOLUTION
    used = []
    for step, got in enumerate(dqs):
        k_at = at[(rank - step) % len(ks)]
        apart = [(piece_backward(dout, q, k, v, out, lse, at[rank], k_at)[0] - got).norm() for k, v in zip(ks, vs)]
        used.append(int(torch.stack(apart).argmin()))
    return used
    ### END SOLUTION

# %%
check("blocks_used")

# %%
# %%ranks 4 --needs positions,attend,merge,ring_forward,ring_backward,ulysses,piece_backward,blocks_used
import torch
from exercises.blocks_used import blocks_used
from exercises.piece_backward import piece_backward
from exercises.positions import positions
from simplified import SimplerRing

from minimegatron.comm.mesh import Mesh
from minimegatron.comm.ring import Shift
from minimegatron.config import ParallelConfig

cp = Mesh.build(ParallelConfig(context_parallel_size=world)).cp
at = [positions(32, world, r) for r in range(world)]
g = torch.Generator().manual_seed(0)
q, k, v, dout = (t.split(8, 1) for t in torch.randn(4, 2, 32, 8, generator=g).unbind())  # a block for each rank
result = SimplerRing.apply(q[rank].clone().requires_grad_(), k[rank], v[rank], at, cp)
_, block, out, lse = result.grad_fn.saved_tensors
dqs = []
for step in range(world):
    shift, places = Shift(block.detach(), cp), at[(rank - step) % world]
    dqs.append(piece_backward(dout[rank], q[rank], *block, out, lse, at[rank], places)[0].detach())
    block = shift.wait()
used = blocks_used(dqs, dout[rank], q[rank], out.detach(), lse.detach(), list(k), list(v), at, rank)
print(f"rank {rank} should use {[(rank - i) % world for i in range(world)]}, used {used}")

# %% [markdown]
# Every rank is one ahead. After the forward pass `block` is the last block *received*, that of the next rank; the
# backward pass takes it for its own. Places, mask and the way home are right; the keys and values are another rank's.
# The cure is to save `k, v`, as `Ring` does above.
#
# The mistake is easy to make: when the loop began, `block` was this rank's own. And it is hard to see: shapes are
# right, nothing raises an error, no number is NaN, and the loss falls.

# %% [markdown]
# ## 7 · Explain
#
# Say your answer aloud before you read on.
#
# 1. *Why does the ring send K and V, not Q?* With grouped queries K and V have fewer heads. And Q would have to carry
#    its unfinished output along.
# 2. *Why is the gradient of K and V summed and the output merged?* The output is divided by a sum over all keys. The
#    backward pass has that sum already (lse); each piece's gradient is a term.
# 3. *Do dropout or a sliding window break the balance?* Dropout does not. With a window of w tokens nearly every token
#    sees w keys, wherever it stands, so nearly all tokens cost the same and every cut is balanced. Only the first w
#    tokens see fewer: for 1,024 tokens, 8 ranks and w = 128 the slowest rank has 1.066 times the mean, with either cut.
#    Zigzag is not needed there, and the contiguous cut needs the blocks of fewer other ranks.
# 4. *Ring, all-gather or Ulysses?* Ulysses inside a machine, up to as many ranks as there are key/value heads; it takes
#    any kernel and any mask. The ring where each rank has tokens enough to hide its messages, and every step is
#    balanced. The all-gather for masks of documents, if K and V of the whole sequence fit. Or two of them:
#    all-to-all inside a machine, a ring across (`--cp-comm-type a2a+p2p`).
# 5. *What else must know about cp?* Data loading: tokens and labels are cut by places, after labels were shifted. Shifted
#    afterwards, the last token of each chunk has a wrong label: one in s/2C, and no loss curve shows it. RoPE. The loss:
#    divide by all tokens. The gradient sum: over dp *and* cp.
# 6. *Why not recompute instead?* It saves memory for a third more arithmetic, and one GPU still does all of it. The two
#    go together well: context parallelism first, then recompute for what still does not fit.
#
# **Exercise.** Numbers for any run. Return a dict:
#
# * `slowest_over_mean`: with a contiguous cut, the work of the slowest rank over the mean, in the limit of a long
#   sequence;
# * `ring_over_ulysses`: bytes of the ring over bytes of Ulysses, forward;
# * `largest_ulysses`: the largest cp with which Ulysses need not copy heads, when tp has already divided them (tp
#   divides `groups`);
# * `sequence_multiple`: s must be a multiple of this number, so that zigzag over cp gives 2·cp equal chunks *and* each
#   chunk can be cut into tp equal pieces for sequence parallelism;
# * `tokens_to_hide`: tokens *of one rank* from which the forward ring is hidden: a step of zigzag computes for as long
#   as a block travels. A rank does `flops` operations a second and sends `bandwidth` bytes a second; a multiply-add is
#   two operations. Not rounded.

# %%
# %%exercise answers
def answers(
    s: int, cp: int, tp: int, heads: int, groups: int, element_size: int, flops: float, bandwidth: float
) -> dict[str, float]:
    """{"slowest_over_mean": ..., "ring_over_ulysses": ..., "largest_ulysses": ..., ...}"""
    ### BEGIN SOLUTION
    return {
        "slowest_over_mean": (2 * cp - 1) / cp,
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        # 2 products, 2 operations, half of n² pairs: 2 n² heads d / flops = 2 n groups d element_size / bandwidth
        "tokens_to_hide": groups * element_size * flops / (heads * bandwidth),
    }
    ### END SOLUTION

# %%
check("answers")

# %% [markdown]
# ### What you guessed
#
# The last number for real links: heads and groups of Llama-3 8B in bf16, on an H100 at its peak of 989 TFLOP/s and on
# one that reaches 400.

# %%
# %%needs answers
links = {"NVLink, 450 GB/s": 450e9, "InfiniBand, 50 GB/s": 50e9, "Ethernet, 12.5 GB/s": 12.5e9}
llama = dict(s=131072, cp=8, tp=1, heads=32, groups=8, element_size=2)
print(f"{'tokens of a rank':20} {'at peak':>8} {'at 400 TFLOP/s':>16}")
for link, speed in links.items():
    at_peak, at_400 = (answers(**llama, flops=f, bandwidth=speed)["tokens_to_hide"] for f in (989e12, 400e12))
    print(f"{link:20} {at_peak:8,.0f} {at_400:16,.0f}")
guessed("tokens", round(answers(**llama, flops=989e12, bandwidth=50e9)["tokens_to_hide"]),
        "tokens on each GPU, by your formula")
guessed("gpus", round(34 * 131072 * 4096 * 32 / 80e9, 1), "GPUs, by the formula of lab 02")

# %% [markdown]
# 128 k tokens on 8 ranks are 16,384 tokens for each: the ring hides at 50 GB/s, and on 16 ranks, with 8,192 tokens for
# each, not quite. A slower GPU needs fewer tokens. Inside a machine about 1,100 tokens are enough.

# %%
progress()

# %% [markdown]
# ## Where this lives
#
# | here | minimegatron | Megatron-LM |
# |---|---|---|
# | online softmax | `kernels/blockwise.py` | the flash-attn package, Transformer Engine |
# | merge | `layers/attention/pieces.py` | Transformer Engine, `dot_product_attention/context_parallel.py` |
# | what is hidden | `layers/attention/mask.py` | the same file |
# | zigzag | `comm/sequence.py` | `get_batch_on_this_cp_rank` in `core/utils.py` |
# | packed documents | `layers/attention/mask.py` | `core/packed_seq_params.py`; Transformer Engine, `thd` |
# | the ring | `comm/ring.py`, `layers/attention/context_parallel.py` | Transformer Engine, as above |
# | Ulysses | `layers/attention/context_parallel.py` | Transformer Engine, `cp_comm_type="a2a"` |
# | RoPE by rank | `layers/rope.py`, `models/decoder.py` | `get_pos_emb_on_this_cp_rank` |
# | the sum over cp | `parallel/data/finalize.py` | the `dp_cp` group of `core/distributed` |
#
# You turn it on with `--context-parallel-size 8 --cp-comm-type p2p` (`all_gather`, `a2a`, `a2a+p2p`). In PyTorch it is
# `torch.distributed.tensor.experimental.context_parallel`, whose ring rotates by all-gather or all-to-all
# (`set_rotate_method`); zigzag is called head-tail there, and the dealer of chunks is `_PTRRLoadBalancer`. All of this
# is experimental in PyTorch 2.13. Llama 3 405B trains on 128 k tokens with tp 8, cp 16, pp 16 and dp 8 on 16,384 GPUs
# (table 4 of its paper).
#
# Softmax block by block: Milakov, Gimelshein 2018 (arXiv 1805.02867). Flash attention, the same on one GPU: Dao et al.
# 2022 (arXiv 2205.14135). The ring: Liu et al. 2023 (arXiv 2310.01889). A balanced cut, striped: Brandon et al. 2023
# (arXiv 2311.09431). Ulysses: Jacobs et al. 2023 (arXiv 2309.14509).
#
# Next: lab 05, experts, where tokens travel to the weights.

# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Lab 13 · State-space layers
#
# An attention layer keeps the keys and values of all tokens, and reads all of them for each new one. A state-space
# layer keeps one matrix for each head, its *state*: each token changes it and reads from it, whatever came before.
# Models such as Nemotron-H have many layers of this kind and a few of attention. They are called *hybrids*.
#
# **You build** the recurrence of Mamba-2 in three forms that give the same numbers: token by token, as attention with
# decays, and chunk by chunk, as it is trained; the state that passes between ranks when a sequence is cut over them;
# and the cut of a hybrid into stages of a pipeline. You also count what each kind of layer costs at a thousand and at a
# million tokens.
#
# **You need** causal attention, matrix products in PyTorch, and the messages of lab 01 (`isend`, `irecv`). Labs 03 and
# 04, pipelines and context parallelism, help. No GPU.
#
# **Time**: 75 to 90 minutes.
#
# Run the cells from top to bottom. Where a cell says `your code here`, write yours; cells that need it wait until its
# check has passed. After a kernel restart: run the first cell, then go on where you were.

# %%
# %load_ext course
# %lab 13_state_space

# %% [markdown]
# ### Two guesses first
#
# Two layers of Nemotron-H 8B read the same tokens. Attention keeps 8 heads of keys and values, 128 channels each, in
# bf16, and its cache grows with each token. Mamba-2 keeps 128 heads, 64 × 128 numbers each, in fp32, and its state does
# not grow. And the more tokens there are, the more a token computes in attention.

# %%
guess("bytes", None, "From how many tokens on does attention keep more bytes than the state?")
guess("flops", None, "From how many tokens on does a token compute more in attention, on the average?")

# %% [markdown]
# ## 1 · The problem
#
# A hybrid is written as a pattern, a letter a layer: `M` is Mamba-2, `*` attention, `-` an MLP, `E` experts. Here is
# Nemotron-H 8B, with the FLOPs of a token's forward pass in a layer of each letter. The package counts them by running
# a layer on tensors without memory.

# %%
import dataclasses

from minimegatron.config import TransformerConfig
from minimegatron.models.families import preset
from minimegatron.training.flops import forward_flops

NEMOTRON = TransformerConfig.from_dict(preset("nemotron-h-8b"))


def flops(letter, s):
    """FLOPs of one token in a layer of this letter, on the average over a sequence of s tokens."""
    one = dataclasses.replace(NEMOTRON, hybrid_override_pattern=letter, num_layers=1)
    counted = forward_flops(one, s)
    return (counted["attention"] + counted["mlp"]) / s


K = 1024
print(NEMOTRON.hybrid_override_pattern)
tokens = [K, 8 * K, 64 * K, 512 * K, 1024 * K]
cost = {letter: [flops(letter, s) for s in tokens] for letter in "M*-"}
for s, *each in zip(tokens, *cost.values()):
    print(f"{s // K:5} k tokens:", ", ".join(f"{a} {n / 1e6:6,.0f} MFLOPs" for a, n in zip(cost, each)))

# %%
import matplotlib.pyplot as plt

fig, ax = plt.subplots(figsize=(7.0, 2.8))
for (letter, each), style, name in zip(cost.items(), ("-", "--", ":"), ("Mamba-2", "attention", "MLP")):
    ax.loglog(tokens, [n / 1e6 for n in each], style, color="#222222", label=f"{letter}  {name}")
ax.set(xlabel="tokens of the sequence", ylabel="MFLOPs of a token", title="One layer of Nemotron-H 8B, forward")
ax.set_xticks(tokens, [f"{s // K} k" for s in tokens])
ax.tick_params(axis="x", which="minor", bottom=False)
ax.legend()
plt.show()

# %% [markdown]
# At a thousand tokens a layer of attention is the cheapest of the three. At a million it costs nearly forty times as
# much as one of Mamba-2, which does not change. So a hybrid keeps only a few layers of attention. And stages of
# a pipeline that are equally slow at a thousand tokens are not at a million. You will mend that at the end.
#
# ## 2 · Predict: what is kept
#
# While a model generates, a sequence keeps in each layer of attention the key and the value of every token: `groups`
# heads of `d` channels each. In each layer of Mamba-2 it keeps
#
# * the state, `p` · `n` numbers for each of `heads` heads, always in fp32;
# * what a short convolution before it needs: the last `taps` - 1 inputs of each channel. Three things pass it (section
#   3 says what for): x has `p` channels a head, B and C have `n` each for every one of `state_groups` groups of heads.
#
# Keys, values and the convolution's inputs have `element_size` bytes a number. MLPs and experts keep nothing.
#
# An example: 1 group, d 4; 2 heads, p 3, n 5, 1 state group, 3 taps; 2 bytes. A token leaves 16 bytes in attention. The
# state has 120 bytes, the convolution keeps 2 inputs of 6 + 5 + 5 channels, 64 bytes: together 184. After 11 tokens the
# cache has 176 bytes, after 12 it is larger.
#
# **Exercise.** Return {"*": bytes of s tokens in one layer of attention, "M": in one of Mamba-2, "model": in all layers
# of `pattern`, "from": the fewest tokens of which the layer of attention keeps more}.

# %%
# %%exercise kept_bytes
def kept_bytes(pattern: str, s: int, sizes: dict[str, int]) -> dict[str, int]:
    """{"*": 1600, "M": 184, "model": 1968, "from": 12} in the example, for MM*- and 100 tokens."""
    ### BEGIN SOLUTION
    size = sizes["element_size"]
    token = 2 * sizes["groups"] * sizes["d"] * size
    channels = sizes["heads"] * sizes["p"] + 2 * sizes["state_groups"] * sizes["n"]
    state = 4 * sizes["heads"] * sizes["p"] * sizes["n"] + (sizes["taps"] - 1) * channels * size
    model = pattern.count("*") * s * token + pattern.count("M") * state
    return {"*": s * token, "M": state, "model": model, "from": state // token + 1}
    ### END SOLUTION


# %%
check("kept_bytes")

# %%
# %%needs kept_bytes
SIZES = {"groups": 8, "d": 128, "heads": 128, "p": 64, "n": 128, "state_groups": 8, "taps": 4, "element_size": 2}
pattern = NEMOTRON.hybrid_override_pattern
dense = pattern.replace("M", "*")
for s in (K, K * K):
    kept, all_attention = kept_bytes(pattern, s, SIZES), kept_bytes(dense, s, SIZES)
    print(f"{s:9,} tokens: a layer keeps  * {kept['*'] / K**2:8,.1f} MiB   M {kept['M'] / K**2:.1f} MiB")
    print(f"{'':17} the hybrid {kept['model'] / K**2:9,.0f} MiB, with attention for each M"
          f" {all_attention['model'] / K**2:9,.0f} MiB")
guessed("bytes", kept["from"], "tokens")

# %% [markdown]
# At a thousand tokens both keep nearly the same, at a million attention keeps a thousand times as much. (A short chat
# gains nothing: its state is as large after the first token as after the last.) Now your second guess. Both costs are
# straight lines in s, so two points of each say where they meet:

# %% tags=["hide-output"]
slope = (cost["*"][-1] - cost["*"][0]) / (tokens[-1] - tokens[0])
guessed("flops", round((cost["M"][0] - cost["*"][0]) / slope + tokens[0], -3), "tokens")

# %% [markdown]
# ## 3 · Implement
#
# ### Token by token
#
# One head has a state h, a matrix [p, n], and one number A < 0. Each token brings four things: x [p], what it writes; B
# [n], where it is written; C [n], where the token reads; and a time step dt > 0. (All of them are made from the layer's
# input by one matrix product; then x, B and C pass the convolution, and a softplus makes dt positive. Here all heads
# share B and C.) Then
#
# $$h_t = e^{dt_t A}\, h_{t-1} + dt_t\, x_t B_t^T \qquad\qquad y_t = h_t C_t + D\, x_t$$
#
# With a large dt a head forgets what was, and writes the token; with a dt near 0 it passes the token by. D is one
# number a head, a path around the state.
#
# An example: one head, p = n = 1, A = -ln 2, so e^(dt A) = 2^-dt. B = C = 1, D = 0. Three tokens with x = 4, 2, 6 and
# dt = 1, 1, 2, and h = 0 before them. h = 4, then 4/2 + 2 = 4, then 4/4 + 2 · 6 = 13.
#
# **Exercise.** x [s, heads, p], dt [s, heads], A and D [heads], B and C [s, n], and the state h [heads, p, n] before
# the first token. Return y [s, heads, p] and the state after the last token, in the dtype of the inputs. Inputs belong
# to the caller: do not change them.

# %%
# %%exercise recurrence
import torch


def recurrence(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor,
    h: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y = 4, 4, 13 and h = 13 in the example."""
    ### BEGIN SOLUTION
    y = torch.empty_like(x)
    for t in range(len(x)):
        faded = torch.exp(dt[t] * A)[:, None, None] * h
        h = faded + (dt[t][:, None] * x[t])[:, :, None] * B[t]
        y[t] = h @ C[t] + D[:, None] * x[t]
    return y, h
    ### END SOLUTION


# %%
check("recurrence")

# %% [markdown]
# This is how a model generates: one step a token, at the same cost after ten tokens and after a million. It is a poor
# way to train. The steps of s tokens wait for each other, and each is too small for a GPU.
#
# ### As attention
#
# From here on D is left out, and h = 0 before the first token. Look at what token i reads of token j. Token j wrote
# dt_j x_j at B_j. Since then it has faded at each of the tokens j + 1 to i. So y is a weighted sum of the dt_j x_j with
# j ≤ i, and nothing else. The weight is one number for each head and pair. It is attention with C as queries, B as keys
# and dt x as values, and with a decay in place of the softmax.
#
# In the example the weights of the third token are 1/8, 1/4 and 1, and dt x is 4, 2, 12: 1/2 + 1/2 + 12 = 13. Why 1/8
# for the first token? Find the whole 3 × 3 matrix before you write code.

# %%
from course.figures.state_space import weights_map

weights_map([1, 1, 2, 1, 1, 1, 3, 1], 4)

# %% [markdown]
# Each row is a token that reads, each column one that wrote, and the number is what is left: here e^A = 1/2, and the
# tokens' dt stand above. The first three tokens are the example's, so the top left corner is your 3 × 3 matrix. (The
# frames are for the next exercise.)
#
# **Exercise.** The same y by products of whole matrices, without a loop over tokens. Decays may be strong: of what the
# first token wrote e^-150 may be left, and e^150 overflows in fp32.

# %%
# %%exercise as_attention
import torch


def as_attention(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor
) -> torch.Tensor:
    """y [s, heads, p]: 4, 4, 13 in the example."""
    ### BEGIN SOLUTION
    a = (dt * A).cumsum(0).mT
    later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    left = (a[:, :, None] - a[:, None]).masked_fill(later, -torch.inf).exp()
    values = (dt[..., None] * x).transpose(0, 1)
    return ((left * (C @ B.mT)) @ values).transpose(0, 1)
    ### END SOLUTION


# %%
check("as_attention")

# %% [markdown]
# These are large products. But the matrix has s² weights, as in attention.
#
# ### In chunks
#
# Cut the sequence into chunks of l tokens: the frames of the picture. Inside a frame use the second form. All that lies
# left of a frame comes from earlier chunks, and all of it passed through the state at the chunk's border. So there no
# pair of tokens is needed: what a token reads of all chunks before its own, it reads from that state. A chunk is given
# one state and hands one on. Neither takes a loop over its tokens.
#
# An example: the three tokens above in chunks of 2, with h = 8 before them. Their own part is 4, 4. Of the state they
# read 8/2 = 4 and 8/4 = 2, so y = 8, 6. The state handed on is 8/4 + 4/2 + 2 = 6. The second chunk has one token: 6/4 +
# 12 = 13.5.
#
# **Exercise.** Return y [s, heads, p] and the state after the last token, in chunks of `size` tokens; the last one may
# be shorter. A loop over chunks is fine. The check looks at sizes, too: 1,024 tokens must make no matrix of 1,024²
# weights, and no chunk a state for each of its tokens. `as_attention` is yours.

# %%
# %%exercise chunked
import torch
from exercises.as_attention import as_attention


def chunked(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, h: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """y = 8, 6, 13.5 and h = 13.5 in the example."""
    ### BEGIN SOLUTION
    parts = []
    for start in range(0, len(x), size):
        xs, dts, Bs, Cs = (t[start : start + size] for t in (x, dt, B, C))
        a = (dts * A).cumsum(0)
        read = a.exp()[..., None] * torch.einsum("hpn,ln->lhp", h, Cs)
        parts.append(as_attention(xs, dts, A, Bs, Cs) + read)
        written = ((a[-1] - a).exp() * dts)[..., None] * xs
        h = a[-1].exp()[:, None, None] * h + torch.einsum("lhp,ln->hpn", written, Bs)
    return torch.cat(parts), h
    ### END SOLUTION


# %%
check("chunked")

# %%
# %%needs recurrence as_attention chunked
import torch

torch.manual_seed(0)
s, heads, p, n = 300, 4, 8, 16
x, B, C = (torch.randn(s, *shape, dtype=torch.float64) for shape in ((heads, p), (n,), (n,)))
dt, A = torch.rand(s, heads, dtype=torch.float64), -torch.rand(heads, dtype=torch.float64)
zeros, no_D = torch.zeros(heads, p, n, dtype=torch.float64), torch.zeros(heads, dtype=torch.float64)
y, last = recurrence(x, dt, A, B, C, no_D, zeros)
print("as attention:", torch.allclose(as_attention(x, dt, A, B, C), y))
for size in (1, 7, 64, 300):
    y_size, last_size = chunked(x, dt, A, B, C, zeros, size)
    print(f"in chunks of {size}:", torch.allclose(y_size, y) and torch.allclose(last_size, last))

# %% [markdown]
# Heads multiply and add about s (l (n + heads p) + 2 heads p n) times: the first term inside chunks, where one product
# of C and B serves all heads, the second for the states. Small chunks have the least arithmetic, and large ones the
# largest products. Mamba-2 is trained with 128 or 256.
#
# ### Between ranks
#
# 1 M tokens are cut over R ranks, each with one piece, in order. A rank needs the state before its piece, which depends
# on all ranks before it. Attention would send keys and values of all tokens round a ring (lab 04). A state has one
# size, however long the piece is.
#
# Whatever a piece of a sequence does to a state, it is h → d h + u, with one number d for each head and u [p, n]. A
# rank finds both before anything arrives: u is the last state of its piece begun with zeros, and d is what is left of
# any state after all of its tokens. Three ways to go on:
#
# | way | messages that wait for one another | a rank sends |
# |---|---|---|
# | rank by rank: wait for the state, send d h + u on | R - 1 | one state |
# | all-gather: each sends its pair to all | 1 collective | R - 1 pairs in a ring |
# | in rounds | ⌈log₂ R⌉ | at most one pair a round |
#
# The last way uses that two pieces, one behind the other, are a piece again: h → d₂ (d₁ h + u₁) + u₂. So two pairs make
# one, and two of those make one of four ranks. After one round a rank may know the pair of itself and the rank before
# it, after two that of four ranks up to itself. What must be sent in the second round, and to whom, so that *every*
# rank gets it, and not only each fourth?
#
# An example on 4 ranks, one head, p = n = 1: d = 1/2, 1/4, 1/2, 1 and u = 8, 4, 6, 1. The states before the ranks are
# 0, 8, 8/4 + 4 = 6 and 6/2 + 6 = 9. Two rounds are enough for them.
#
# **Exercise.** Return the state before this rank's piece, zeros on rank 0. `decay` is d [heads], `own` is u. Use sends
# and receives alone, of `torch.distributed`. R may be any number. No more than ⌈log₂ R⌉ messages may wait for one
# another, and no rank sends more than ⌈log₂ R⌉ pairs. After a long piece d may be 0: what has faded cannot be divided
# back. `own` need not be contiguous, a message must be. `cp.rank` and `cp.size` say where this rank stands; `group_dst`
# and `group_src` take such a rank.

# %%
# %%exercise state_before
import torch
import torch.distributed as dist

from minimegatron.comm.axis import Axis


def state_before(decay: torch.Tensor, own: torch.Tensor, cp: Axis) -> torch.Tensor:
    """decay [heads], own [heads, p, n] -> [heads, p, n]: 0, 8, 6, 9 on the ranks of the example."""
    ### BEGIN SOLUTION
    def join(first, second):
        """What two pieces make of a state, one after the other; d stands in column 0."""
        d, u = second[:, :1], second[:, 1:]
        return torch.cat([d * first[:, :1], d * first[:, 1:] + u], 1)

    whole = torch.cat([decay[:, None], own.flatten(1)], 1)
    before = torch.zeros_like(whole)
    before[:, 0] = 1.0
    step = 1
    while step < cp.size:
        works, come = [], torch.empty_like(whole)
        if cp.rank + step < cp.size:
            works.append(dist.isend(whole, group=cp.group, group_dst=cp.rank + step))
        if cp.rank >= step:
            works.append(dist.irecv(come, group=cp.group, group_src=cp.rank - step))
        for work in works:
            work.wait()
        if cp.rank >= step:
            before, whole = join(come, before), join(come, whole)
        step *= 2
    return before[:, 1:].reshape(own.shape)
    ### END SOLUTION


# %%
check("state_before")

# %% [markdown]
# ### In a pipeline
#
# A pipeline is as fast as its slowest stage: all others wait for it in every microbatch (lab 03). Layers of a GPT are
# alike, so equal numbers of layers make equal stages. Those of a hybrid are not alike, and which is the dearest depends
# on the length of the sequence.
#
# An example: `M-M*M*M-` in 3 stages, where `M` costs 3, `*` 2 and `-` 4, the first stage has an embedding for 1, and
# the last one an output layer for 3. Together they cost 28, so no slowest stage is below 28/3. `M- | M*M* | M-` costs
# 8, 10 and 10. In a long sequence `*` costs 12, and this cut 8, 30 and 10. Find one by hand whose slowest stage costs
# 22.
#
# **Exercise.** Cut `pattern` into `p` stages, so that the slowest is as fast as it can be. Return the stages as a list
# of texts; joined they are the pattern, and none is empty. `costs` has a whole number for each letter, and `first` and
# `last` for the ends (both are on the only stage of one). The longest pattern has 118 layers and 16 stages: there are
# too many cuts to try all of them.

# %%
# %%exercise stages
def stages(pattern: str, costs: dict[str, int], p: int) -> list[str]:
    """["M-", "M*M*", "M-"] in the example."""
    ### BEGIN SOLUTION
    sums = [0]
    for letter in pattern:
        sums.append(sums[-1] + costs[letter])
    best = {0: (0, [])}  # the first i layers, cut into the stages so far: the slowest, and the cut
    for stage in range(p):
        end = costs["first"] * (stage == 0) + costs["last"] * (stage == p - 1)
        longer = {}
        for i in range(stage + 1, len(pattern) + 1):
            ways = [(max(slowest, sums[i] - sums[j] + end), j) for j, (slowest, _) in best.items() if j < i]
            slowest, j = min(ways)
            longer[i] = slowest, [*best[j][1], pattern[j:i]]
        best = longer
    return best[len(pattern)][1]
    ### END SOLUTION


# %%
check("stages")

# %% [markdown]
# ## 4 · Run
#
# Four ranks share 2,000 tokens. Each begins its piece with a state of zeros, asks your `state_before` for the right
# one, and runs it again with that. Each also runs all tokens by itself, to compare with.

# %%
# %%ranks 4 --needs recurrence,chunked,state_before
import torch
from exercises.chunked import chunked
from exercises.recurrence import recurrence
from exercises.state_before import state_before

from minimegatron.comm.axis import Axis

cp = Axis.world("cp")
g = torch.Generator().manual_seed(1)
s, heads, p, n = 2000, 4, 8, 16
x, B, C = (torch.randn(s, *shape, generator=g, dtype=torch.float64) for shape in ((heads, p), (n,), (n,)))
dt, A = 0.01 * torch.rand(s, heads, generator=g, dtype=torch.float64), -torch.ones(heads, dtype=torch.float64)
zeros, no_D = torch.zeros(heads, p, n, dtype=torch.float64), torch.zeros(heads, dtype=torch.float64)
want, _ = recurrence(x, dt, A, B, C, no_D, zeros)

mine = slice(s // cp.size * cp.rank, s // cp.size * (cp.rank + 1))
here = x[mine], dt[mine], A, B[mine], C[mine]
alone, own = chunked(*here, zeros, 64)
decay = (dt[mine] * A).sum(0).exp()
before = state_before(decay, own, cp)
y, _ = chunked(*here, before, 64)
print(f"its piece by itself is right: {torch.allclose(alone, want[mine])}, "
      f"with the state before it: {torch.allclose(y, want[mine])}")

# %% [markdown]
# (A whole second run is not needed. It adds only what the tokens read of `before`, and the package computes that alone:
# `Scan.outputs`.) What does a rank send in one layer of Nemotron-H 8B, for a million tokens on 8 ranks?

# %%
# %%needs kept_bytes state_before
keys_and_values = 2 * SIZES["groups"] * SIZES["d"] * SIZES["element_size"] * K * K // 8  # of a rank's tokens
ring = 7 * keys_and_values
pair = 4 * SIZES["heads"] * (SIZES["p"] * SIZES["n"] + 1)
print(f"attention, keys and values round a ring: {ring / K**2:7,.0f} MiB")
print(f"Mamba-2, three rounds of a pair:         {3 * pair / K**2:7,.0f} MiB")

# %% [markdown]
# The package takes the all-gather of the table: R is small, and it is one call. A rank sends R - 1 pairs, still few
# bytes. Megatron-LM exchanges heads for tokens, as Ulysses does (lab 04).
#
# ## 5 · See
#
# ### Three forms, timed
#
# Left is what each form multiplies and adds, right how long yours takes on this machine. The first form has the least
# arithmetic. Is it the fastest?

# %%
# %%needs recurrence as_attention chunked
import time

import matplotlib.pyplot as plt
import torch

heads, p, n, l = 4, 16, 32, 64
lengths = [64, 128, 256, 512, 1024]
zeros, no_D = torch.zeros(heads, p, n), torch.zeros(heads)
forms = {
    "token by token": (lambda *t: recurrence(*t, no_D, zeros), lambda s: 2 * heads * s * p * n),
    "as attention": (as_attention, lambda s: s * s * (n + heads * p)),
    "in chunks of 64": (lambda *t: chunked(*t, zeros, l), lambda s: s * (l * (n + heads * p) + 2 * heads * p * n)),
}
fig, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.0))
for (name, (form, work)), style in zip(forms.items(), (":", "--", "-")):
    seconds = []
    for s in lengths:
        x, B, C = torch.randn(s, heads, p), torch.randn(s, n), torch.randn(s, n)
        inputs = x, torch.rand(s, heads), -torch.rand(heads), B, C
        took = []
        for _ in range(3):
            began = time.perf_counter()
            form(*inputs)
            took.append(time.perf_counter() - began)
        seconds.append(min(took))
    left.loglog(lengths, [work(s) / 1e6 for s in lengths], style, color="#222222", label=name)
    right.loglog(lengths, [1000 * t for t in seconds], style, color="#222222", label=name)
for ax in (left, right):
    ax.set_xticks(lengths, lengths)
    ax.minorticks_off()
left.set(title="predicted work", xlabel="tokens", ylabel="million multiply-adds")
right.set(title="measured", xlabel="tokens", ylabel="ms")
left.legend()
plt.show()

# %% [markdown]
# Token by token takes long: each of its steps is small and waits for the one before. As attention the work grows with
# s²: however fast its products are, from some length on it is the slowest. In chunks it grows with s, in products of 64
# tokens.
#
# ### A pipeline at two lengths
#
# Nemotron-H 8B on 4 stages. The costs are those of section 1 in MFLOPs a token; the last stage has the output layer. An
# even cut has 13 layers a stage. The cell simulates 1F1B (lab 03) with 16 microbatches.

# %%
# %%needs stages
from minimegatron.parallel.pipeline.schedule_sim import Costs, simulate
from minimegatron.parallel.pipeline.schedules import build_schedule


def costs_at(s):
    """Whole MFLOPs of a token."""
    output = 2 * NEMOTRON.hidden_size * NEMOTRON.vocab_size
    return {letter: round(flops(letter, s) / 1e6) for letter in "M*-"} | {"first": 0, "last": round(output / 1e6)}


def loads(cut, costs):
    """What each stage costs."""
    found = [sum(costs[letter] for letter in stage) for stage in cut]
    return [found[0] + costs["first"], *found[1:-1], found[-1] + costs["last"]]


def step_time(each):
    return simulate(build_schedule("1f1b", len(each), 16), Costs(each, each, each)).makespan


even = [pattern[i : i + 13] for i in range(0, 52, 13)]
short, long = costs_at(8 * K), costs_at(512 * K)
cuts = {"even": even, "yours for 8 k": stages(pattern, short, 4), "yours for 512 k": stages(pattern, long, 4)}
for length, costs in (("8 k", short), ("512 k", long)):
    best = min(step_time(loads(cut, costs)) for cut in cuts.values())
    print(f"{length} tokens")
    for name, cut in cuts.items():
        each = loads(cut, costs)
        print(f"  {name:16} slowest over mean {4 * max(each) / sum(each):.2f}, "
              f"step {float(step_time(each) / best):.2f} of the best  {' | '.join(cut)}")

# %%
# %%needs stages
from minimegatron.viz.bars import stacked

KINDS, bars = {"M": "Mamba-2", "*": "attention", "-": "MLP"}, {}
for name, cut in cuts.items():
    for number, stage in enumerate(cut):
        parts = {kind: stage.count(letter) * long[letter] for letter, kind in KINDS.items()}
        bars[f"{name}, stage {number}"] = {**parts, "output layer": long["last"] * (number == 3)}
stacked(bars, title="Stages at 512 k tokens", what="MFLOPs of a token, forward")

# %% [markdown]
# At 8 k tokens the last stage has no layer of attention, because of its output layer. So one of the others has two of
# the four. At 512 k all wait for that one, and even equal numbers of layers are better. A run that goes on with longer
# sequences is cut anew.
#
# ## 6 · Break it
#
# A colleague halves the memory of the states: she keeps them in bf16, as the rest of the model. Her tests pass: a
# prompt of 100 tokens gives the same words as before. Here is a head of p = n = 1 with A = -1 and dt = 0.001, which
# remembers about a thousand tokens. x, B and C are 1 all the time, so the state should rise to 1. What does hers show
# after 10,000 tokens?

# %%
guess("bf16", None, "The state in bf16 after 10,000 tokens, where fp32 has 1?")

# %% tags=["hide-output"]
import torch

h32, h16 = torch.zeros(()), torch.zeros((), dtype=torch.bfloat16)
A, dt = torch.tensor(-1.0), torch.tensor(0.001)
for t in range(1, 10_001):
    h32 = torch.exp(dt * A) * h32 + dt
    h16 = (torch.exp(dt * A) * h16.float() + dt).bfloat16()
    if t in (10, 100, 1_000, 10_000):
        print(f"after {t:6,} tokens: fp32 {h32.item():.2f}, bf16 {h16.item():.2f}")
guessed("bf16", round(h16.item(), 2), "in bf16")

# %% [markdown]
# She computes each step in fp32 and rounds only what she keeps. At 0.25 the numbers of bf16 are 0.002 apart, and a step
# adds 0.001 · (1 - 0.25): less than half of that, so it rounds back. The state stands still, at a quarter of where it
# should be. Nothing is NaN, and a short test cannot show it, for 100 tokens lead to 0.1 only. Attention in bf16 has no
# such error: a key is rounded once, when it is written, and never added to. So a state is fp32, whatever the model
# is, and a test of it is longer than its memory.
#
# ## 7 · Explain
#
# Say your answer aloud before you open the one here.
#
# 1. *Why has a state-space layer no KV cache, and what does it pay?*
#    <details><summary>answer</summary>What is kept of all tokens is p · n numbers a head. Many tokens share this room,
#    so an early one can be recalled only as far as later ones left it. Attention keeps each token by itself. Hybrids
#    keep a few layers of it for recall.</details>
# 2. *Why is it trained in chunks, and not by one of the two simpler forms?*
#    <details><summary>answer</summary>Token by token has the least arithmetic, but s steps that wait for each other,
#    none of them a large product. As attention it is large products alone, but s² weights. Chunks have products of l
#    tokens, and s/l states to carry.</details>
# 3. *What of prefix caching, whose pages may be shared at any token?*
#    <details><summary>answer</summary>Keys and values of a prefix are the first part of a longer cache. A state is that
#    of one length: it cannot be shortened. So a server keeps copies of it at some borders, and goes on from the last
#    copy within the common prefix.</details>
# 4. *A batch of prompts is padded on the right, then decoded. What must a padded token do to the state?*
#    <details><summary>answer</summary>Nothing: dt = 0 makes its decay 1 and what it writes 0. Attention masks keys by
#    the length; a state has no length that could be masked. The convolution's inputs must be those of real tokens,
#    too.</details>
# 5. *How does tensor parallelism cut such a layer?*
#    <details><summary>answer</summary>By heads: each has a state of its own, and nothing passes between heads. B and C
#    belong to groups of heads, so a rank takes whole groups. The input product is column-parallel, the output one
#    row-parallel, as in attention (lab 02).</details>
# 6. *Packed documents: what changes at their border?*
#    <details><summary>answer</summary>The state begins with zeros there. In the second form no weight crosses the
#    border, in the third the state is not read behind it, and the convolution has no taps before it. A decay of 0 at
#    the first token does all but the last.</details>

# %%
progress()

# %% [markdown]
# ## Where this lives
#
# | here | minimegatron | Megatron-LM |
# |---|---|---|
# | the layer | `layers/ssm/mixer.py` | `megatron/core/ssm/mamba_mixer.py` |
# | one token, chunks | `layers/ssm/scan.py`: `step`, `Scan` | calls `mamba_chunk_scan_combined` of the mamba-ssm package |
# | between ranks | `layers/ssm/pieces.py` | `megatron/core/ssm/mamba_context_parallel.py`: exchanges heads |
# | what is kept | `inference_state` in `layers/ssm/mixer.py` | `mamba_state_shapes_per_request` in `mamba_mixer.py` |
# | patterns | `config/hybrid.py`: `--hybrid-override-pattern` | `megatron/core/models/hybrid/hybrid_layer_allocation.py`, where `\|` in a pattern ends a stage |
# | stages | `config/stages.py`: `--pipeline-model-parallel-layout` | the same file |
# | a second kind of state | `layers/ssm/gated_delta_net.py`, `delta_rule.py` | `megatron/core/ssm/gated_delta_net.py` |
# | Nemotron-H | `models/families/nemotron.py` | |
#
# Mamba-2 and its two forms: Dao and Gu 2024 (arXiv 2405.21060), section 6 for chunks, section 8 for tensor and sequence
# parallelism. Mamba: Gu and Dao 2023 (arXiv 2312.00752). Nemotron-H: NVIDIA 2025 (arXiv 2504.03624). Sums in ⌈log₂ R⌉
# rounds: Hillis and Steele 1986, Data parallel algorithms.
#
# Next: the capstones.

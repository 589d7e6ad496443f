# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Lab 04 · Context parallelism
#
# So far every rank held whole sequences. Now the sequence itself is cut. Only one thing in a transformer minds:
# attention, where a token needs the keys and values of all tokens before it. You build two ways to bring them together,
# a ring and an all-to-all, forward and backward, and put both into a GPT.
#
# The seven steps: **the problem, predict, implement, run, see, break it, explain**. No GPU is needed.

# %%
# %load_ext course
# %lab 04_context_parallel

# %% [markdown]
# ## 1 · The problem
#
# A model the size of Llama-3 8B (32 layers, h = 4096) reads 128 k tokens. Lab 02's formula for what a GPT layer keeps
# for its backward pass, without the scores, is `34·s·b·h` bytes. Weights do not enter.

# %%
import matplotlib.pyplot as plt

s, h, layers, gpu = 128 * 1024, 4096, 32, 80e9
kept = 34 * s * h * layers
degrees = [1, 2, 4, 8, 16, 32]

fig, ax = plt.subplots(figsize=(7, 2.6))
ax.bar([f"cp {c}" for c in degrees], [kept / c / 1e9 for c in degrees], color="0.6", edgecolor="black")
ax.axhline(gpu / 1e9, color="black", linestyle="--", label="a GPU has 80")
ax.set(ylabel="GB on one rank", title="Activations of one sequence of 128 k tokens")
ax.legend()
plt.show()
print(f"one sequence: {kept / 1e9:.0f} GB of activations, {kept / gpu:.1f} GPUs full")

# %% [markdown]
# Data parallelism cannot help: a batch has no less than one sequence. A pipeline cuts the layers, but its first stage
# keeps the activations of p microbatches. Tensor parallelism cuts to an eighth; then the machine ends.
#
# **Context parallelism** gives each of C ranks s/C tokens. Norms, MLPs, embedding and loss work on one token at a time
# and notice nothing. Attention does.
#
# Which tokens? The simplest cut gives rank r the r-th piece. Below, each bar is a query, and as long as the keys that it
# sees; its colour says whose query it is. The other cut is called *zigzag*.

# %%
from minimegatron.viz.sequence import causal_map

contiguous = [range(4 * r, 4 * r + 4) for r in range(4)]
zigzag = [[2 * r, 2 * r + 1, 14 - 2 * r, 15 - 2 * r] for r in range(4)]
causal_map({"contiguous": contiguous, "zigzag": zigzag})

# %% [markdown]
# The area of a colour is the work of its rank. Under the plain cut the last rank works almost six times as long as the
# first (seven times, when the sequence is long), and at every layer all wait for it. Zigzag cuts the sequence into 2C
# chunks and gives rank r a cheap one and a dear one: chunks r and 2C-1-r.
#
# ## 2 · Predict
#
# ### Work
#
# **Exercise.** The pairs (query, key) that each rank's queries see, as a list by rank. A token sees itself and all
# before it.

# %%
# %%exercise work
def work(s: int, cp: int, zigzag: bool) -> list[int]:
    """Visible pairs of each of cp ranks."""
    ### BEGIN SOLUTION
    n = s // (2 * cp)  # tokens of a chunk
    pairs = [sum(range(c * n + 1, (c + 1) * n + 1)) for c in range(2 * cp)]
    if zigzag:
        return [pairs[r] + pairs[2 * cp - 1 - r] for r in range(cp)]
    return [pairs[2 * r] + pairs[2 * r + 1] for r in range(cp)]
    ### END SOLUTION


# %%
check("work")

# %%
# %%needs work
fig, axes = plt.subplots(1, 2, figsize=(8, 2.3), sharey=True)
for ax, way in zip(axes, (False, True)):
    pairs = work(131072, 8, way)
    ax.bar(range(8), [p / 1e9 for p in pairs], color="0.6", edgecolor="black")
    ax.set(title="zigzag" if way else "contiguous", xlabel="rank")
    print(f"{'zigzag' if way else 'contiguous':10}  slowest over mean: {8 * max(pairs) / sum(pairs):.3f}")
axes[0].set_ylabel("10⁹ pairs")
plt.show()

# %% [markdown]
# ### Bytes
#
# Two ways to let every query meet every key:
#
# * **Ring**: the blocks of K and V go round. At each of C-1 steps every rank sends one block to the next rank.
# * **Ulysses**: exchange heads for tokens. An all-to-all leaves each rank with *all* tokens of a C-th of the heads.
#   After attention a second one brings the output back.
#
# **Exercise.** Bytes that *one rank* sends in the forward pass of one attention. The layer has `heads` query heads and
# `groups` key and value heads, each d wide; both are multiples of C. In an all-to-all a rank keeps its own share.

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
# Ulysses sends less as C grows. The ring sends more, up to all keys and values once, 512 MiB here; but they travel while
# the rank computes. And Ulysses cannot go beyond the number of key/value heads without copies.
#
# ## 3 · Implement
#
# Tensors here have no batch: q, k, v are `[a, n, d]`, heads, tokens, width. Each comes with the *places* of its
# tokens in the whole sequence. The rule is the same for every cut: **a query at place i sees a key at place j when j
# ≤ i.** Inputs belong to the caller: do not change them. What you return has their dtype, float64 included.
#
# ### Softmax, block by block
#
# Softmax divides by a sum over the whole row. No rank will have the whole row. So build it block by block: keep the
# largest score so far m, the sum l, and the weighted sum of values O. With the scores S = q·kᵀ/√d of the next block:
#
# $$m' = \max(m, \text{rowmax}\,S)\qquad P = e^{S-m'}\qquad l \leftarrow l\,e^{m-m'} + \text{rowsum}\,P\qquad
# O \leftarrow O\,e^{m-m'} + P\,V$$
#
# They start as m = -∞, l = 0, O = 0. At the end out = O/l, and **lse** = m + log l, the log of the row's sum of
# exponentials.
#
# **Exercise.** Go through the keys in blocks of `block` (the last may be shorter), and never hold all scores of a head,
# not in pieces either: the check measures torch's memory, so compute with torch. Skip a block that no query sees;
# places come in any order. A query that sees nothing has out 0 and lse -∞.

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
# Now the blocks are on different ranks. Each gives its own `out`, already divided by its own sum, and that sum's
# logarithm `lse`. Two such results make one: the sums add, and each `out` counts with its share of the new sum.
#
# $$\text{lse}' = \log(e^{\text{lse}_1} + e^{\text{lse}_2}) \qquad
# \text{out}' = e^{\text{lse}_1-\text{lse}'}\,\text{out}_1 + e^{\text{lse}_2-\text{lse}'}\,\text{out}_2$$
#
# **Exercise.** That, without overflow. Either piece, or both, may have seen nothing (lse = -∞).

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
# ### Zigzag
#
# **Exercise.** The places of a rank's tokens, ascending: chunk r and chunk 2C-1-r of 2C.
#
# Everything that depends on a place uses them: tokens and labels are picked by them, the mask compares them, and RoPE
# turns by *their* angles. A rank that numbers its tokens 0, 1, 2, ... instead trains a model whose positions depend
# on C.

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
display(causal_map({"your zigzag: who holds which tokens": [positions(24, 3, r).tolist() for r in range(3)]}))

# %% [markdown]
# ### The ring, forward
#
# At step i rank r holds the block of rank (r-i) mod C. Three cases. In each, about half of the pairs are visible:
#
# | owner | your early half sees | your late half sees |
# |---|---|---|
# | you | itself | your early half, itself |
# | an earlier rank | its early half | its early half |
# | a later rank | nothing | both its halves |
#
# The places decide all that by themselves, if you attend with *each half of q apart* and in blocks of half a block:
# `attend` skips what is hidden. (Python knows the places; no rank asks another.)
#
# A block leaves before the work on it begins, and is waited for after. `Shift(x, cp)` starts to send x to the next rank
# and to receive from the one before; `.wait()` returns what has come.
#
# `cp` is the axis of ranks that share the sequence: `cp.rank`, `cp.size`, `cp.group`. They may be a part of the world:
# `cp.ranks[j]` is the rank in the world of rank j of `cp`. `Shift` knows that; with `dist.isend` of your own say
# `group=cp.group`. Inputs may be views that are not contiguous; what travels must be contiguous.
#
# **Exercise.** `at[j]` are the places of rank j's tokens. Let K and V travel in one tensor. The check looks at bytes
# and at the order of events.

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
# ### A piece, backward
#
# Nothing was kept of the scores. The backward pass computes P again, and here lse pays off: `P = exp(S - lse)`, with
# the *final* lse, is right for any piece of the keys by itself. Nothing has to be merged. The gradients are plain
# sums over pieces.
#
# $$dV = P^T\,dout \qquad dP = dout\,V^T \qquad dS = P\,(dP - D)/\sqrt d \qquad dQ = dS\,K \qquad dK = dS^T Q$$
#
# where D = rowsum(dout · out), with the final out.
#
# **Exercise.** One piece's terms. You may hold this piece's scores whole.

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
# K and V go round again. dQ stays here: add up the pieces. dK and dV belong to the block's *owner*, but every rank
# has a part of them. So they travel too, one step behind their block: add your part to what has come, send the sum
# on. After C hops the gradient is home.
#
# **Exercise.** `Shift(x, cp, tag=1)` keeps the second stream apart from the first. There are at least two ranks. (For
# brevity you may compute hidden halves here; the package does not.)

# %%
# %%exercise ring_backward
import torch
from exercises.piece_backward import piece_backward

from minimegatron.comm.ring import Shift


def ring_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    at: list[torch.Tensor], cp,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All of this rank, [a, n, d] (lse [a, n]); out and lse as your forward returned them -> dq, dk, dv."""
    ### BEGIN SOLUTION
    dq, block = torch.zeros_like(q), torch.stack((k, v))
    for step in range(cp.size):
        shift = Shift(block, cp) if step < cp.size - 1 else None
        owner = (cp.rank - step) % cp.size
        more, dk, dv = piece_backward(dout, q, block[0], block[1], out, lse, at[cp.rank], at[owner])
        dq += more
        part = torch.stack((dk, dv))
        if step > 0:
            part += behind.wait()
        behind = Shift(part, cp, tag=1)
        if shift:
            block = shift.wait()
    dk, dv = behind.wait()
    return dq, dk, dv
    ### END SOLUTION


# %%
check("ring_backward")

# %% [markdown]
# ### Ulysses
#
# `all_to_all_single` cuts dim 0 into C pieces, sends piece j to rank j, and stacks what comes, by rank. Let dim 0 be
# the heads: rank r gets its a/C heads of everybody's tokens. But they arrive rank by rank, and rank r holds chunks r
# and 2C-1-r. Four ranks: chunks 0 7 1 6 2 5 3 4. Ordinary attention wants them in order.
#
# It copies memory as it lies: both of its tensors must be contiguous, and x need not be. (`torch.empty_like` of a view
# that is not contiguous is not contiguous either.) Say `group=cp.group`.
#
# **Exercise.** Both ways. The second undoes the first; it is also its backward pass, since both only move numbers.

# %%
# %%exercise ulysses
import torch
import torch.distributed as dist


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
# ## 4 · Run
#
# ### Four ranks, one attention
#
# Beside the serial twin: one process with the whole sequence and torch's own attention.

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
# The package builds its attention from a class that you can name. Here are two, made of your functions. Batch and heads
# fold into one dim: attention treats them alike.

# %%
# %%ranks 1 --needs positions,ring_forward,ring_backward,ulysses --name context_cores
import torch
import torch.nn.functional as F
from exercises.positions import positions
from exercises.ring_backward import ring_backward
from exercises.ring_forward import ring_forward
from exercises.ulysses import heads_for_tokens, tokens_for_heads

from minimegatron.layers.attention import SelfAttention
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
# has its tokens' losses. The loss is a sum over all tokens divided by their number; a rank has some terms of the sum.
# So its gradient is a part as well: **sum the gradients over cp**. Forget that and nothing crashes.

# %%
# %%ranks 4 --needs positions,ring_forward,ring_backward,ulysses --name gpt
import torch
from context_cores import RingCore, UlyssesCore, layer_with
from exercises.positions import positions

from minimegatron.comm import collectives
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.models.decoder import build_model
from minimegatron.models.zoo import family_config

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
# The last line is the mistake from above: each rank turns by 0, 1, 2, ... It is a fine loss, of another model. Only the
# twin can tell.

# %% [markdown]
# ## 5 · See
#
# ### Bytes: predicted and counted
#
# One attention, forward, on four ranks: your functions and the package's.

# %%
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
from minimegatron.layers.core_attention import CoreAttention
from minimegatron.models.zoo import family_config

s, heads, d = 128, 8, 16
config = family_config("llama", num_layers=1, hidden_size=heads * d, num_attention_heads=heads, num_query_groups=heads,
                       vocab_size=256)  # fmt: skip
at = [positions(s, world, r) for r in range(world)]
q, k, v = torch.randn(3, heads, s // world, d).unbind()


def counted(function):
    """Bytes that this rank sends."""
    with Witness(rank) as witness:
        function()
    seen = witness.evidence()
    return seen.nbytes("send") + seen.nbytes("all_to_all") * (world - 1) / world


def ulysses():
    tokens_for_heads([heads_for_tokens(t, cp) for t in (q, k, v)][0], cp)


predicted = bytes_per_layer(s, 1, heads, heads, d, world, 4)
rows = {}
for way, kind in (("ring", "p2p"), ("ulysses", "a2a")):
    mesh = Mesh.build(ParallelConfig(context_parallel_size=world, cp_comm_type=kind))
    cp, core = mesh.cp, CoreAttention(config, mesh)
    there = [t.transpose(0, 1).unsqueeze(1) for t in (q, k, v)]  # [n, b, heads, d]
    yours = counted((lambda: ring_forward(q, k, v, at, cp)) if way == "ring" else ulysses)
    rows[f"{way}, yours"] = predicted[way], yours
    rows[f"{way}, the package's"] = predicted[way], counted(lambda: core(*there))
out, lse = ring_forward(q, k, v, at, cp)
back = counted(lambda: ring_backward(out, q, k, v, out, lse, at, cp))
for name, (want, got) in rows.items():
    print(f"{name:22} predicted {want / 1024:.0f} KiB   counted {got / 1024:.0f} KiB")
print(f"{'ring, your backward':22} {back / predicted['ring']:.2f} times the forward")
report(rows)

# %%
# %%needs bytes_per_layer positions ring_forward ring_backward ulysses
from minimegatron.viz.volume import bars

predicted, measured = ({name: row[i] for name, row in moved[0].items()} for i in (0, 1))
display(bars(predicted, measured, title="One attention, forward, four ranks"))

# %% [markdown]
# Your backward makes C-1 hops with K, V and C with their gradients: 7 for 3. The package saves one: the gradient of a
# rank's own part never leaves, so C-1 are enough.
#
# ### Memory
#
# What does a whole layer keep for its backward pass, on one rank, with your ring inside? Count as in lab 02: each piece
# of memory that autograd saves, once, parameters left out. Then fit the slope of log(bytes) against log(cp): 1/cp is a
# slope of -1.

# %%
# %%ranks 4 --needs positions,ring_forward,ring_backward,ulysses --name memory --out kept
import math

import torch
from context_cores import RingCore, layer_with

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.attention import AttentionContext
from minimegatron.models.decoder import build_model
from minimegatron.models.zoo import family_config

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
fig, ax = plt.subplots(figsize=(7, 2.8))
for c, style in ((1, "o-"), (2, "s--"), (4, "^:")):
    points = [(s, nbytes / 1024) for s, of, nbytes in kept[0] if of == c]
    ax.plot(*zip(*points), style, color="black", label=f"cp {c}")
ax.set(xlabel="tokens of the sequence", ylabel="KiB kept by one rank", title="Activations of one layer")
ax.set_xticks([128, 256, 512])
ax.legend()
plt.show()

# %% [markdown]
# Twice the ranks, twice the sequence, the same memory. Nothing of s × s is left.
#
# On a machine with GPUs the next cell runs the package's attention over 128 k tokens on all of them.

# %%
# %%torchrun --gpus 2 --name long_sequence --out long_sequence
import torch
from minimegatron.launch.rank import finish, init, report
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.core_attention import CoreAttention
from minimegatron.models.zoo import family_config

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
# Somebody simplified the ring: "`block` is at hand when the forward ends, so save that". Read the class, then the run.

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


if __name__ == "__main__":
    print("one core:", SimplerCore.__name__)

# %%
# %%ranks 2 --needs positions,attend,merge,ring_forward,ring_backward,ulysses --name suspect
import torch
from context_cores import layer_with
from exercises.positions import positions
from simplified import SimplerCore

from minimegatron.comm import collectives
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.models.decoder import build_model
from minimegatron.models.zoo import family_config

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
# The loss of step 0 is right to the last digit, and then it falls. The gradient norm is off at the first step. And
# the list says where to look: in the last layer everything *after* the core of attention is right, `linear_qkv` and
# the norm before it are wrong. So the forward pass is right and the core's backward is not.
#
# Look at each step of it. Below, four ranks walk the ring with what `SimplerRing` saves and keep every step's share of
# dq. At step i rank r *should* use the block of rank (r-i) mod C, and it does use those places.
#
# **Exercise.** Whose keys and values did it really use? `dqs[i]` is step i's share; `ks[j]`, `vs[j]` are the blocks
# of all ranks. Return a list of ranks, one a step. Your `piece_backward` is the tool.

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
# Every rank is one ahead. After the forward's last step `block` is the last block *received*, that of the next rank;
# the backward takes it for its own. With its places, its mask and its way home it does everything right, with another
# rank's keys. The cure is to save `k, v`, as `Ring` does above.
#
# It is a natural mistake: the variable was right when the loop began. And no shape, no error, no NaN and no loss curve
# tells.

# %% [markdown]
# ## 7 · Explain
#
# Say your answer aloud before you read on.
#
# 1. *Why does the ring send K and V, not Q?* With grouped queries K and V have fewer heads. And Q would have to carry
#    its unfinished output along.
# 2. *Why is the gradient of K and V summed and the output merged?* The output is divided by a sum over all keys. The
#    backward pass has that sum already (lse); each piece's gradient is a term.
# 3. *Can dropout or a sliding window break the balance?* Dropout no. A window does: both chunks of a rank then cost the
#    same, and a contiguous cut would do.
# 4. *Ring or Ulysses?* Ulysses inside a machine, up to as many ranks as there are key/value heads; the ring across
#    machines, where it hides. Or both: all-to-all inside, a ring outside.
# 5. *What else must know about cp?* Data loading (cut by places, labels shifted before), RoPE, the loss (divide by all
#    tokens), and the gradient sum: over dp *and* cp.
#
# **Exercise.** Numbers for any run. Return a dict:
#
# * `slowest_over_mean`: with a contiguous cut, the work of the slowest rank over the mean;
# * `ring_over_ulysses`: bytes of the ring over bytes of Ulysses, forward;
# * `largest_ulysses`: the largest cp for Ulysses without copies, when tp has already shared the heads (tp divides
#   `groups`);
# * `sequence_multiple`: what s must be a multiple of, with zigzag over cp, when sequence parallelism over tp cuts each
#   *chunk* evenly, as Megatron asks;
# * `tokens_to_hide`: tokens *per rank* from which the forward ring is hidden: a step of zigzag computes for as long
#   as a block travels. `flops` a second, `bandwidth` in bytes a second; a multiply-add is two operations.

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

# %%
progress()

# %% [markdown]
# ## Where this lives
#
# | here | minimegatron | Megatron-LM |
# |---|---|---|
# | online softmax | `layers/flash.py` | the flash-attn package, Transformer Engine |
# | merge | `layers/tiles.py` | Transformer Engine, `dot_product_attention/context_parallel.py` |
# | what is hidden | `layers/mask.py` | the same file |
# | zigzag | `comm/sequence.py` | `get_batch_on_this_cp_rank` in `core/utils.py` |
# | the ring | `comm/ring.py`, `layers/context.py` | Transformer Engine, as above |
# | Ulysses | `layers/context.py` | Transformer Engine, `cp_comm_type="a2a"` |
# | RoPE by rank | `layers/rope.py`, `models/decoder.py` | `get_pos_emb_on_this_cp_rank` |
# | the sum over cp | `parallel/finalize.py` | the `dp_cp` group of `core/distributed` |
#
# Milakov, Gimelshein 2018 (arXiv 1805.02867); Liu et al. 2023 (arXiv 2310.01889); Brandon et al. 2023 (arXiv
# 2311.09431); Jacobs et al. 2023 (arXiv 2309.14509).
#
# Next: lab 05, experts, where tokens travel to the weights.

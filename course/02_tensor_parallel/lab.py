# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Lab 02 · Tensor and sequence parallelism
#
# A matrix product can be cut. Cut all of them in the right way and a transformer layer runs on eight ranks that talk
# four times: twice on the way forward, twice on the way back. Here you build every piece of that, and your pieces
# train a GPT.
#
# The seven steps: **the problem, predict, implement, run, see, break it, explain**. No GPU is needed.

# %%
# %load_ext course
# %lab 02_tensor_parallel

# %% [markdown]
# ## 1 · The problem
#
# One layer of Llama-3 70B has 856 million weights. With gradients and optimizer state that is 13.7 GB: five layers fill
# a GPU, and there are eighty. A pipeline would give each GPU a few layers. But then one GPU computes at a time, unless
# you feed it many small batches. Cutting *inside* the layer shares the memory and the time.

# %%
import matplotlib.pyplot as plt

h, f, rows_qkv = 8192, 28672, 8192 + 2 * 1024
matrices = {"QKV": h * rows_qkv, "projection": h * h, "gate and up": h * 2 * f, "down": h * f}
ranks = [1, 2, 4, 8]

fig, ax = plt.subplots(figsize=(7, 2.6))
left = [0.0] * len(ranks)
for (name, weights), grey in zip(matrices.items(), ("0.25", "0.5", "0.7", "0.88")):
    gigabytes = [16 * weights / t / 1e9 for t in ranks]
    ax.barh([f"tp {t}" for t in ranks], gigabytes, left=left, color=grey, edgecolor="black", label=name)
    left = [a + b for a, b in zip(left, gigabytes)]
ax.invert_yaxis()
ax.set(xlabel="GB on one rank: weights, gradients, optimizer state", title="One layer of Llama-3 70B")
ax.legend(ncols=2, loc="lower right")
plt.show()
weights = sum(matrices.values())
print(f"one layer: {16 * weights / 1e9:.1f} GB on one rank, {16 * weights / 8 / 1e9:.1f} GB on each of eight")

# %% [markdown]
# ### Two ways to cut a matrix
#
# A linear layer is $y = x A^T$. PyTorch stores $A$ as `[out, in]`.
#
# * **Column-parallel**: cut the *output* features. Rank r computes some features of y, for all tokens. It needs all of
#   x.
# * **Row-parallel**: cut the *input* features. Rank r has some features of x, and computes a *partial sum* of all of y.
#
# The names speak of $A^T$, as the paper does: its columns are the rows of the stored matrix.
#
# The picture shows the weights of a small Llama on two ranks, as the package cuts them. The first row is one layer: two
# pairs, QKV and projection, `fc1` (gate and up) and `fc2` (down). What leaves the first of a pair is exactly what the
# second wants. Then the two ends of the model, and a norm; all norms look like this one.

# %%
import torch

from minimegatron.comm.mesh import Axis, Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.param import layout_of
from minimegatron.models.decoder import GPTModel
from minimegatron.models.zoo import family_config
from minimegatron.viz.mesh import Shards, weight_shards

mesh = Mesh.serial()
mesh.parallel, mesh.tp = ParallelConfig(tensor_model_parallel_size=2), Axis("tp", (0, 1), 0)
llama = family_config("llama", num_layers=1, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=256)
with torch.device("meta"):
    model = GPTModel(llama, mesh)


layouts = {name.split(".")[-2]: layout_of(p) for name, p in model.named_parameters()}
names = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "word_embeddings", "output_layer", "input_layernorm"]
weight_shards([Shards(name, layouts[name].shape, layouts[name].dim, layouts[name].parts) for name in names])

# %% [markdown]
# Two things to notice.
#
# * `linear_fc1` is a stack of two matrices, gate and up. Each rank holds *the same rows of both*: two ranges. One cut
#   through the middle would give rank 0 all the gates and no values.
# * Norms are not cut. Every rank holds them whole. They will make trouble in a later section.

# %% [markdown]
# ## 2 · Predict
#
# ### Bytes
#
# A layer is two column-row pairs. A pair sums once forward (the partial sums of y) and once backward (the partial sums
# of ∂loss/∂x). Each sum is an all-reduce of an activation: `s·b·h` elements.
#
# Sequence parallelism replaces every all-reduce by a reduce-scatter and an all-gather, which together send the same
# bytes. It also stores each column layer's input cut over the sequence. The backward pass needs that input whole, to
# compute dW. So it is gathered a second time.
#
# **Exercise.** The bytes that *each rank* sends for one layer, forward and backward. Rings, as in lab 01: an all-reduce
# of n bytes sends `2n(t-1)/t`; an all-gather or a reduce-scatter, n being the whole tensor, sends `n(t-1)/t`. Do not
# round.

# %%
# %%exercise bytes_per_layer
def bytes_per_layer(s: int, b: int, h: int, t: int, element_size: int, sequence_parallel: bool) -> float:
    """Bytes one rank sends over tp for one layer, forward and backward; s is the whole sequence."""
    ### BEGIN SOLUTION
    all_gather = reduce_scatter = s * b * h * element_size * (t - 1) / t
    forward = backward = 2 * (all_gather + reduce_scatter)
    return forward + backward + (2 * all_gather if sequence_parallel else 0)
    ### END SOLUTION


# %%
check("bytes_per_layer")

# %% [markdown]
# ### Memory
#
# The forward pass keeps tensors for the backward pass. These are a GPT layer's, in 16 bits with dropout, in bytes per
# `s·b·h`. One more depends on the length of the sequence: attention scores, `5·a·s/h`.
#
# | kept | bytes |
# |---|---|
# | input of the first norm | 2 |
# | input of the QKV layer | 2 |
# | queries and keys | 4 |
# | values | 2 |
# | softmax, its dropout mask, the result: `5·a·s²·b` in all | 5·a·s/h |
# | input of the projection | 2 |
# | dropout mask after the projection | 1 |
# | input of the second norm | 2 |
# | input of `fc1` | 2 |
# | input of the GELU | 8 |
# | input of `fc2` | 8 |
# | dropout mask after `fc2` | 1 |
#
# Tensor parallelism divides what belongs to some heads or to some features of the MLP. The rest is whole on every rank.
# Sequence parallelism then cuts the rest over the sequence. (Korthikanti et al. 2022, figure 5.)
#
# **Exercise.** Activation bytes of one layer on one rank, with tensor parallelism alone and with both. Do not round.

# %%
# %%exercise activation_bytes
def activation_bytes(s: int, b: int, h: int, a: int, t: int, sequence_parallel: bool) -> float:
    """Bytes that one layer keeps on one rank: 16 bits, dropout, attention scores stored."""
    ### BEGIN SOLUTION
    whole, divided = 10 * s * b * h, (24 * h + 5 * a * s) * s * b
    return (whole + divided) / t if sequence_parallel else whole + divided / t
    ### END SOLUTION


# %%
check("activation_bytes")

# %% [markdown]
# With t = 1 it is the famous `s·b·h·(34 + 5·a·s/h)`. For GPT-3 on eight ranks your function says 2.87 GB undivided,
# 0.58 with tensor parallelism, 0.36 with both. On eight ranks 23 bytes remain of 114: 13 that were divided, and the 10
# that tensor parallelism cannot touch.

# %% [markdown]
# ## 3 · Implement
#
# Every function gets `tp`, the axis of ranks that share the layer: `tp.rank`, `tp.size`, and `tp.group` for
# `torch.distributed`. These ranks may be a part of the world, so say `group=tp.group`, and use `tp.rank`, not
# `dist.get_rank()`. Inputs may be views that are not contiguous, or float64, and so is then what you return; they belong
# to the caller: do not change them. Collectives want contiguous tensors.
#
# Lab 01 built the conjugate pair; here you may take the package's:
#
# | | forward | backward |
# |---|---|---|
# | **f** `copy_to_region(x, tp)` | nothing | all-reduce |
# | **g** `reduce_from_region(x, tp)` | all-reduce | nothing |
#
# ### Column
#
# `weight` is this rank's `[o/t, i]`, `bias` its `[o/t]` or None. x is the same on every rank. Do not gather y.
#
# **Exercise.** The layer, so that autograd finds the right ∂loss/∂x. Which of the two goes where?

# %%
# %%exercise column_linear
import torch
import torch.nn.functional as F

from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def column_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp) -> torch.Tensor:
    """x [s, b, i], the same on all ranks -> this rank's features of y, [s, b, o/t]."""
    ### BEGIN SOLUTION
    return F.linear(copy_to_region(x, tp), weight, bias)
    ### END SOLUTION


# %%
check("column_linear")

# %% [markdown]
# ### Row
#
# `weight` is this rank's `[o, i/t]`, x its features `[s, b, i/t]`. The bias `[o]` is the same on every rank.
#
# **Exercise.** The layer. Mind where the bias goes.

# %%
# %%exercise row_linear
import torch
import torch.nn.functional as F

from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def row_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp) -> torch.Tensor:
    """x [s, b, i/t] -> the whole y [s, b, o], the same on all ranks."""
    ### BEGIN SOLUTION
    y = reduce_from_region(F.linear(x, weight), tp)
    return y if bias is None else y + bias
    ### END SOLUTION


# %%
check("row_linear")

# %% [markdown]
# ### The pair
#
# Put anything elementwise between the two and nothing travels there. GELU of some features is some features of the
# GELU. Four ranks, one MLP, beside the same MLP in one process:

# %%
# %%ranks 4 --needs column_linear,row_linear
import torch
import torch.nn.functional as F
from exercises.column_linear import column_linear
from exercises.row_linear import row_linear

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from labkit.evidence import Witness

tp = Mesh.build(ParallelConfig(tensor_model_parallel_size=4)).tp
g = torch.Generator().manual_seed(0)
x, A, B = (torch.randn(*n, generator=g) for n in ((10, 2, 16), (64, 16), (16, 64)))

with Witness(rank) as witness:
    mine = x.clone().requires_grad_()
    y = row_linear(F.gelu(column_linear(mine, A.chunk(4)[rank], None, tp)), B.chunk(4, 1)[rank], None, tp)
    y.square().sum().backward()

whole = x.clone().requires_grad_()
want = F.linear(F.gelu(F.linear(whole, A)), B)
want.square().sum().backward()
print("y as in one process: ", torch.allclose(y, want, rtol=1e-4, atol=1e-3))
print("dx as in one process:", torch.allclose(mine.grad, whole.grad, rtol=1e-4, atol=1e-2))
print("communication:", [call.name for call in witness.evidence().calls])

# %% [markdown]
# ### Attention: which heads
#
# Heads do not talk to each other. So give each rank some of them: `QKV` is a column layer, the projection a row layer.
#
# With grouped queries, `a/g` query heads share one key and one value head. A rank must hold whole groups, or its
# queries miss their keys. Megatron therefore stores the rows of the QKV matrix *group by group*. With 4 query heads in
# 2 groups:
#
# | rows | q0 | q1 | k0 | v0 | q2 | q3 | k1 | v1 |
# |---|---|---|---|---|---|---|---|---|
# | rank | 0 | 0 | 0 | 0 | 1 | 1 | 1 | 1 |
#
# Now an equal cut is the right cut. Checkpoints from elsewhere hold three matrices, `wq` `[a·d, h]`, `wk` and `wv`
# `[g·d, h]`.
#
# **Exercise.** Pack them, and return block `tp_rank` of `tp_size` equal blocks. (With fewer groups than ranks a block
# is part of a group. The same cut holds; question 3 of step 7 asks what happens then.)

# %%
# %%exercise qkv_part
import torch


def qkv_part(wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor, d: int, tp_rank: int, tp_size: int) -> torch.Tensor:
    """This rank's rows of the packed QKV matrix; d rows are one head."""
    ### BEGIN SOLUTION
    groups = wk.shape[0] // d
    by_group = [w.unflatten(0, (groups, -1)) for w in (wq, wk, wv)]
    return torch.cat(by_group, dim=1).flatten(0, 1).chunk(tp_size)[tp_rank]
    ### END SOLUTION


# %%
check("qkv_part")

# %% [markdown]
# ### Attention: the layer
#
# **Exercise.** Causal self-attention on this rank's heads. `qkv` and `proj` are pairs `(weight, bias)`. After the
# column layer every group has `queries_per_group` queries, then one key, then one value, each `d` wide.
# `F.scaled_dot_product_attention` wants `[b, heads, s, d]`; with `enable_gqa=True` it lets several queries share a key.

# %%
# %%exercise attention
import torch
import torch.nn.functional as F
from exercises.column_linear import column_linear
from exercises.row_linear import row_linear


def attention(x: torch.Tensor, qkv: tuple, proj: tuple, d: int, queries_per_group: int, tp) -> torch.Tensor:
    """x [s, b, h] -> [s, b, h]; both the same on all ranks."""
    ### BEGIN SOLUTION
    packed = column_linear(x, *qkv, tp).unflatten(-1, (-1, queries_per_group + 2, d))  # [s, b, groups, n + 2, d]
    q, k, v = packed.split([queries_per_group, 1, 1], dim=3)
    q, k, v = (part.flatten(2, 3).permute(1, 2, 0, 3) for part in (q, k, v))  # [b, heads, s, d]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=queries_per_group > 1)
    return row_linear(out.permute(2, 0, 1, 3).flatten(2), *proj, tp)
    ### END SOLUTION


# %%
check("attention")

# %% [markdown]
# ### Vocabulary: the way in
#
# The embedding table is cut by rows: rank r owns the ids from `r·n` to `(r+1)·n - 1`, where n is the number of rows it
# holds. Each token's row is on exactly one rank.
#
# **Exercise.** Look up what you own, let the sum over ranks do the rest.

# %%
# %%exercise embedding
import torch
import torch.nn.functional as F

from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def embedding(ids: torch.Tensor, weight: torch.Tensor, tp) -> torch.Tensor:
    """ids [s, b], weight [n, h] of this rank -> [s, b, h], the same on all ranks."""
    ### BEGIN SOLUTION
    local = ids - tp.rank * weight.shape[0]
    foreign = (local < 0) | (local >= weight.shape[0])
    rows = F.embedding(local.masked_fill(foreign, 0), weight).masked_fill(foreign.unsqueeze(-1), 0.0)
    return reduce_from_region(rows, tp)
    ### END SOLUTION


# %%
check("embedding")

# %% [markdown]
# ### Vocabulary: the way out
#
# The output layer is a column layer, so each rank has the logits of its own words. Gathering them would send `s·b·V`
# numbers. For Llama-3 70B that is what two whole layers send, and every rank would store all of them: 4.2 GB for 8192
# tokens in fp32. The loss needs far less:
#
# $$\text{loss} = \log \sum_j e^{z_j - M} - (z_\text{target} - M), \qquad M = \max_j z_j$$
#
# The sum runs over all ranks; so does the maximum; the target's logit is on one rank. Three numbers a token, summed or
# gathered.
#
# The gradient is $\text{softmax}_j - [\,j = \text{target}\,]$, times what arrives from above. Every rank can compute
# its columns of that by itself.
#
# **Exercise.** Loss and gradient. The simplest form is one `torch.autograd.Function` with raw all-reduces
# (`op=dist.ReduceOp.MAX` for the first).

# %%
# %%exercise cross_entropy
import torch
import torch.distributed as dist


class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, tp):
        ### BEGIN SOLUTION
        n = logits.shape[-1]
        highest = logits.amax(-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=tp.group)
        z = logits - highest.unsqueeze(-1)

        local = target - tp.rank * n
        own = (local >= 0) & (local < n)
        local = local.masked_fill(~own, 0).unsqueeze(-1)
        picked = z.gather(-1, local).squeeze(-1) * own
        sums = torch.stack([picked, z.exp().sum(-1)])
        dist.all_reduce(sums, group=tp.group)
        picked, partition = sums

        ctx.save_for_backward(z.exp() / partition.unsqueeze(-1), local, own)
        return partition.log() - picked
        ### END SOLUTION

    @staticmethod
    def backward(ctx, dloss):
        ### BEGIN SOLUTION
        softmax, local, own = ctx.saved_tensors
        dz = softmax.scatter_add(-1, local, -own.unsqueeze(-1).to(softmax.dtype))
        return dz * dloss.unsqueeze(-1), None, None
        ### END SOLUTION


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, tp) -> torch.Tensor:
    """logits [s, b, V/t] in fp32, target [s, b] of global ids -> loss of every token, [s, b]."""
    return VocabParallelCrossEntropy.apply(logits, target, tp)


# %%
check("cross_entropy")

# %% [markdown]
# ## 4 · Run
#
# You have all pieces of a tensor-parallel GPT. The package builds a layer from a *specification*, which says what class
# stands where. So your layers go in without touching the package. This cell is also a module: later cells import it.

# %%
# %%ranks 1 --name my_model --needs column_linear,row_linear,attention,embedding,cross_entropy
import dataclasses

import torch
from exercises.attention import attention
from exercises.column_linear import column_linear
from exercises.cross_entropy import cross_entropy
from exercises.embedding import embedding
from exercises.row_linear import row_linear

from minimegatron.layers.attention import SelfAttention
from minimegatron.layers.mlp import MLP
from minimegatron.layers.logical import draw
from minimegatron.layers.param import Init, layout_of
from minimegatron.models.decoder import build_model
from minimegatron.models.gpt_layer_specs import decoder_layer_spec
from minimegatron.models.spec import ModuleSpec
from minimegatron.models.zoo import family_config

config = family_config(
    "gpt2", num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=256,
    max_position_embeddings=128, make_vocab_size_divisible_by=64,
)


class MyMLP(MLP):
    def forward(self, x):
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        y = self.activation(column_linear(x, fc1.weight, fc1.bias, fc1.tp))
        return row_linear(y, fc2.weight, fc2.bias, fc2.tp)


class MyAttention(SelfAttention):
    def forward(self, x, context):
        qkv, proj = self.linear_qkv, self.linear_proj
        return attention(x, (qkv.weight, qkv.bias), (proj.weight, proj.bias), self.d, self.per_group, self.tp)


def my_model(mesh, seed=1):
    spec = decoder_layer_spec(config).with_submodule("mlp", ModuleSpec(MyMLP))
    model = build_model(config, mesh, seed, spec.with_submodule("self_attention", ModuleSpec(MyAttention)))
    words = model.embedding.word_embeddings
    words.forward = lambda ids: embedding(ids.t(), words.weight, words.tp)
    return model


def my_losses(model, tokens, labels):
    """Loss of every token, from logits that never meet on one rank."""
    return cross_entropy(model(tokens), labels.t(), model.mesh.tp).t()


def shake(model):
    """Weights as after some training: no bias is 0 and no norm is 1, so that a mistake in either can be seen."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            layout = layout_of(p)
            p += layout.take(draw(name, dataclasses.replace(layout, init=Init(std=0.1)), seed=2))
    return model


if __name__ == "__main__":
    print("your layers stand in for:", [base.__name__ for base in (*MyMLP.__bases__, *MyAttention.__bases__)])

# %% [markdown]
# ### Beside the serial twin
#
# Same weights, same batch, one process: the **serial twin**. Compare gradients, not losses. The package's own layers
# run in the twin, so this also compares your code with somebody else's.

# %%
# %%ranks 4 --needs column_linear,row_linear,attention,embedding,cross_entropy --name beside_the_twin
import torch
from my_model import config, my_losses, my_model, shake

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.logical import gather_logical
from minimegatron.layers.param import layout_of
from minimegatron.models.decoder import build_model

g = torch.Generator().manual_seed(0)
ids = torch.randint(0, 256, (4, 33), generator=g)
tokens, labels = ids[:, :-1], ids[:, 1:]

twin = shake(build_model(config, Mesh.serial(), seed=1))
want = twin(tokens, labels=labels).mean()
want.backward()
serial = {name: p.grad for name, p in twin.named_parameters()}

mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=2))  # tp 2 x dp 2: two pairs do the same
model = shake(my_model(mesh))
loss = my_losses(model, tokens, labels).mean()
loss.backward()
yours = {name: gather_logical(p.grad, layout_of(p), mesh.tp) for name, p in model.named_parameters()}


def norm(grads):
    return torch.stack([g.norm() for g in grads.values()]).norm().item()


off = {name: ((yours[name] - g).abs().max() / g.abs().max()).item() for name, g in serial.items()}
print(f"loss           yours {loss.item():.3f}   serial {want.item():.3f}")
print(f"gradient norm  yours {norm(yours):.3f}   serial {norm(serial):.3f}")
print("parameters compared:", len(off), "  all gradients equal to 4 digits:", max(off.values()) < 1e-4)

# %% [markdown]
# ### Train
#
# Your model on two real processes, started by the real `torchrun`, on the documentation of Python's standard library.
# Rank 0 trains the serial twin as well, with the same batches.

# %%
# %%torchrun -n 2 --needs column_linear,row_linear,attention,embedding,cross_entropy --name train --timeout 99 --out run
import itertools

import torch
from my_model import config, my_losses, my_model

from minimegatron.launch.rank import finish, init, report
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.data.corpus import documents
from minimegatron.models.decoder import build_model

rank, world = init()
mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=2))
text = "\n".join(itertools.islice((t for _, t in documents("docs")), 60)).encode()
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def train(model, losses_of, steps=40, seq=64, batch=8):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    g, curve = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        starts = torch.randint(0, len(data) - seq - 1, (batch,), generator=g)
        rows = torch.stack([data[i : i + seq + 1] for i in starts])
        loss = losses_of(model, rows[:, :-1].to(mesh.device), rows[:, 1:].to(mesh.device)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


yours, serial = train(my_model(mesh), my_losses), []
if rank == 0:
    twin = build_model(config, Mesh.serial(device=mesh.device), 1)
    serial = train(twin, lambda model, tokens, labels: model(tokens, labels=labels))
report({"yours": yours, "serial": serial})
if rank == 0:
    print(f"the loss fell by more than a quarter: {yours[-1] < yours[0] * 3 / 4}")
    print(f"never apart by more than 0.01: {max(abs(a - b) for a, b in zip(yours, serial)) < 0.01}")
finish()

# %%
# %%needs column_linear row_linear attention embedding cross_entropy
fig, ax = plt.subplots(figsize=(7, 2.8))
ax.plot(run.reports[0]["serial"], color="0.7", linewidth=5, label="one process")
ax.plot(run.reports[0]["yours"], color="black", linewidth=1.2, label="yours, tp 2")
ax.set(xlabel="step", ylabel="loss per byte", title="Two curves, one line")
ax.legend()
plt.show()

# %% [markdown]
# ### Sequence parallelism
#
# Between a row layer and the next column layer stand norm, dropout and residual. Every rank computes them on *all*
# tokens: the same work and the same memory t times. But each of them looks at one token at a time. So cut the tokens.
#
# Take an all-reduce apart. Its first half, the reduce-scatter, leaves each rank the finished sum of *some tokens*. Do
# norm and residual there. Then the second half, the all-gather, before the next column layer.
#
# | | forward | backward |
# |---|---|---|
# | `gather_sequence`, before a column layer | all-gather over tokens | reduce-scatter |
# | `reduce_scatter_sequence` (ḡ), after a row layer | reduce-scatter | all-gather |
#
# Why does the gather's backward *sum*? For f's reason: each rank used the tokens for other features.
#
# **Exercise.** Both, along dim 0, with `dist.all_gather_into_tensor(out, x)` and `dist.reduce_scatter_tensor(out, x)`,
# or others that send as little. x, and the gradient that arrives, may be views; what the collectives get must be
# contiguous.

# %%
# %%exercise sequence_pair
import torch
import torch.distributed as dist


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ### BEGIN SOLUTION
        ctx.tp = tp
        return all_gather(x, tp)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        return reduce_scatter(grad, ctx.tp), None
        ### END SOLUTION


class ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ### BEGIN SOLUTION
        ctx.tp = tp
        return reduce_scatter(x, tp)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        return all_gather(grad, ctx.tp), None


def all_gather(x, tp):
    out = x.new_empty(x.shape[0] * tp.size, *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=tp.group)
    return out


def reduce_scatter(x, tp):
    out = x.new_empty(x.shape[0] // tp.size, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=tp.group)
    return out
    ### END SOLUTION


def gather_sequence(x: torch.Tensor, tp) -> torch.Tensor:
    """[s/t, b, h] -> [s, b, h]."""
    return GatherSequence.apply(x, tp)


def reduce_scatter_sequence(x: torch.Tensor, tp) -> torch.Tensor:
    """The sum over ranks of [s, b, h], this rank's tokens of it: [s/t, b, h]."""
    return ReduceScatterSequence.apply(x, tp)


# %%
check("sequence_pair")

# %% [markdown]
# ### Gradients that are only a part
#
# There is a price, and it is silent. A norm's weight is *replicated*. With sequence parallelism each rank's norm sees
# only its own tokens, so its gradient is only a part. Nobody sums it for you; each replica would go its own way.
#
# Which parameters? Think of each in the list below: is it replicated, and what part of the work does it see?
#
# * The bias of a row layer is added after the reduce-scatter.
# * Positions are added after the embedding's reduce-scatter.
# * `q_layernorm` and `k_layernorm` (Qwen3) norm each head after the column layer. Every rank has the whole weight, and
#   some of the heads.
#
# **Exercise.** From a list of names, those whose gradients must still be summed over tp, in the order of the list.

# %%
# %%exercise partial_gradients
def partial_gradients(names: list[str], sequence_parallel: bool) -> list[str]:
    """names are those of the package, e.g. layers.0.self_attention.linear_proj.bias"""
    ### BEGIN SOLUTION
    def partial(name: str) -> bool:
        if "q_layernorm" in name or "k_layernorm" in name:
            return True
        row_bias = name.endswith(("linear_proj.bias", "linear_fc2.bias"))
        return sequence_parallel and ("layernorm" in name or row_bias or "position_embeddings" in name)

    return [name for name in names if partial(name)]
    ### END SOLUTION


# %%
check("partial_gradients")

# %% [markdown]
# Now see the price. The package's model runs with sequence parallelism, your pair inside its MLPs. Once as it is after
# `backward()`, once with the gradients you named summed.

# %%
# %%ranks 2 --needs sequence_pair,partial_gradients --name sequence
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercises.partial_gradients import partial_gradients
from exercises.sequence_pair import gather_sequence, reduce_scatter_sequence

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.mlp import MLP
from minimegatron.layers.logical import gather_logical
from minimegatron.layers.param import layout_of
from minimegatron.models.decoder import build_model
from minimegatron.models.gpt_layer_specs import decoder_layer_spec
from minimegatron.models.spec import ModuleSpec
from minimegatron.models.zoo import family_config

config = family_config(
    "gpt2", num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=256, qk_layernorm=True,
    max_position_embeddings=128,
)


class MySequenceMLP(MLP):
    def forward(self, x):
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        y = self.activation(F.linear(gather_sequence(x, fc1.tp), fc1.weight, fc1.bias))
        return reduce_scatter_sequence(F.linear(y, fc2.weight), fc2.tp) + fc2.bias


g = torch.Generator().manual_seed(0)
ids = torch.randint(0, 256, (4, 33), generator=g)
spec = decoder_layer_spec(config).with_submodule("mlp", ModuleSpec(MySequenceMLP))
mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True))
model, twin = build_model(config, mesh, 1, spec), build_model(config, Mesh.serial(), 1)
for m in (model, twin):
    m(ids[:, :-1], labels=ids[:, 1:]).mean().backward()
serial = {name: p.grad for name, p in twin.named_parameters()}


def compare(title):
    logical = {n: gather_logical(p.grad, layout_of(p), mesh.tp) for n, p in model.named_parameters()}
    off = [n for n, g in serial.items() if (logical[n] - g).abs().max() > 1e-3 * g.abs().max() + 1e-7]
    copies = [p.grad for p in model.parameters() if not layout_of(p).sharded]
    flat = torch.cat([g.flatten() for g in copies])
    both = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(both, flat)
    print(f"{title:17} wrong gradients: {len(off):2} of {len(serial)}   replicas agree: {torch.equal(*both)}")


compare("after backward:")
params = dict(model.named_parameters())
for name in partial_gradients(list(params), sequence_parallel=True):
    dist.all_reduce(params[name].grad)
compare("your sums added:")

# %% [markdown]
# Your list has 23 names here, and 21 gradients were wrong. The two others are the biases of `k_layernorm`: what is added
# to all keys alike shifts a whole row of scores, softmax does not see it, and the gradient is 0 on every rank.
#
# This bug is silent: the loss of the first step is exactly right either way.

# %% [markdown]
# ## 5 · See
#
# ### Bytes: predicted and counted
#
# One layer, forward and backward, four ranks: the package's layers, and yours. The witness, which also checks your
# exercises, sees every message; the package counts its own in `trace`.

# %%
# %%ranks 4 --needs bytes_per_layer,column_linear,row_linear,attention,embedding,cross_entropy --name volume --out moved
import torch
from exercises.bytes_per_layer import bytes_per_layer
from my_model import MyAttention, MyMLP

from minimegatron import trace
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from labkit.evidence import Witness
from minimegatron.layers.attention import AttentionContext
from minimegatron.models.decoder import build_model
from minimegatron.models.gpt_layer_specs import decoder_layer_spec
from minimegatron.models.spec import ModuleSpec
from minimegatron.models.zoo import family_config

s, b, h, t = 64, 2, 64, 4
config = family_config("gpt2", num_layers=1, hidden_size=h, num_attention_heads=4, vocab_size=256)
mine = decoder_layer_spec(config).with_submodule("mlp", ModuleSpec(MyMLP))
mine = mine.with_submodule("self_attention", ModuleSpec(MyAttention))
rows = {}
for name, sp, spec in (("tp", False, None), ("tp, your layers", False, mine), ("tp and sp", True, None)):
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=t, sequence_parallel=sp))
    layer = build_model(config, mesh, 1, spec).decoder.layers["0"]
    x = torch.randn(s // t if sp else s, b, h, requires_grad=True)
    with trace.record(rank) as log, Witness(rank) as witness:
        layer(x, AttentionContext()).sum().backward()
    seen, share = witness.evidence(), (t - 1) / t
    sent = sum(call.nbytes * share * (2 if call.name == "all_reduce" else 1) for call in seen.calls)
    if not name.endswith("your layers"):
        assert sent == sum(event.wire_bytes for event in log.events)  # the package's own count says the same
    rows[name] = (bytes_per_layer(s, b, h, t, 4, sp), sent)
    kinds = ", ".join(f"{seen.count(n)} {n}" for n in ("all_reduce", "all_gather", "reduce_scatter") if seen.count(n))
    print(f"{name:15}  predicted {rows[name][0] / 1024:.0f} KiB  counted {sent / 1024:.0f} KiB: {kinds}")
report(rows)

# %%
# %%needs bytes_per_layer column_linear row_linear attention embedding cross_entropy
from minimegatron.viz.volume import bars

rows = moved[0]
predicted, measured = ({n: row[i] for n, row in rows.items()} for i in (0, 1))
display(bars(predicted, measured, title="One layer, forward and backward"))

# %% [markdown]
# ### Memory: predicted and measured
#
# Autograd tells what it keeps: `saved_tensors_hooks` sees every tensor on its way into the store. Count each piece of
# memory once, leave the parameters out, and you have the activation bytes of a layer, to the byte.
#
# The published formula is for 16 bits, dropout, and stored attention scores. This model differs in three ways:
#
# * **fp32**: 4 bytes where the paper has 2;
# * **no dropout**: no masks, which are 1 byte an element, two of them;
# * **SDPA** (flash attention) recomputes the scores, so the term `5·a·s/h` is gone; it keeps one number per head and
#   token.
#
# So your function says, for this model: twice what it gives for a = 0 without the two masks.

# %%
# %%ranks 4 --needs activation_bytes --name memory --out kept
import torch
from exercises.activation_bytes import activation_bytes

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.attention import AttentionContext
from minimegatron.models.decoder import build_model
from minimegatron.models.zoo import family_config

s, b, h, a = 128, 2, 64, 4
config = family_config("gpt2", num_layers=1, hidden_size=h, num_attention_heads=a, vocab_size=256)


def kept_bytes(layer, x):
    """Bytes of the tensors that autograd keeps for the backward pass, parameters not counted."""
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


rows = {}
for t, sp in ((1, False), (2, False), (2, True), (4, False), (4, True)):
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=t, sequence_parallel=sp))
    cut = t if sp else 1
    layer = build_model(config, mesh, 1).decoder.layers["0"]
    measured = kept_bytes(layer, torch.randn(s // cut, b, h, requires_grad=True))
    predicted = 2 * (activation_bytes(s, b, h, 0, t, sp) - 2 * s * b * h / cut)
    statistics = 4 * (4 * s * b / cut + s * b * a / t)  # mean and 1/std of two norms; a number per head of SDPA
    name = f"tp {t}{' and sp' if sp else ''}" if t > 1 else "one rank"
    rows[name] = (predicted, measured)
    exact = measured - predicted == statistics
    print(f"{name:12} predicted {predicted:7.0f}   measured {measured:7}   the rest is statistics: {exact}")
report(rows)

# %%
# %%needs activation_bytes
rows = kept[0]
predicted, measured = ({n: row[i] for n, row in rows.items()} for i in (0, 1))
display(bars(predicted, measured, title="Activations of one layer", what="kept by one rank"))

# %% [markdown]
# Doubling tp without sequence parallelism helps less each time: the four tensors that are whole on every rank stay.
# With it, everything is divided.
#
# For GPT-3 in 16 bits, by your formula, with scores (as in the paper) and without (flash attention):

# %%
# %%needs activation_bytes
fig, ax = plt.subplots(figsize=(7, 2.8))
degrees = [1, 2, 4, 8, 16]
for heads, style in ((96, "-"), (0, "--")):
    for sp, colour, name in ((False, "0.6", "tp"), (True, "black", "tp and sp")):
        values = [activation_bytes(2048, 1, 12288, heads, t, sp) / 1e9 for t in degrees]
        label = f"{name}, {'scores kept' if heads else 'flash'}"
        ax.plot(degrees, values, style, marker="o", color=colour, label=label)
ax.set(xscale="log", yscale="log", xlabel="tp", ylabel="GB", title="One layer of GPT-3, activations on one rank")
ax.set_xticks(degrees, degrees)
ax.minorticks_off()
ax.set_yticks([0.05, 0.1, 0.2, 0.5, 1, 2], ["0.05", "0.1", "0.2", "0.5", "1", "2"])
ax.legend(fontsize=8)
plt.show()

# %% [markdown]
# ### Hide the sum
#
# The backward pass of a column layer computes two products:
#
# $$dx = \sum_\text{ranks} dy\,A \qquad\qquad dA = dy^T x$$
#
# Only dx must be summed. dA needs neither dx nor the sum. So compute dx first, *start* its all-reduce, compute dA while
# it travels, then wait.
#
# **Exercise.** That. `dist.all_reduce(..., async_op=True)` returns a handle. The check looks at the order of events: all
# that dA is made of must be multiplied between start and wait, by operations of torch.

# %%
# %%exercise column_backward
import torch
import torch.distributed as dist


def column_backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, tp) -> tuple[torch.Tensor, torch.Tensor]:
    """dy [s, b, o/t], x [s, b, i], weight [o/t, i] -> dx [s, b, i] summed over tp, dW [o/t, i]."""
    ### BEGIN SOLUTION
    dx = dy @ weight
    handle = dist.all_reduce(dx, group=tp.group, async_op=True)
    dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)
    handle.wait()
    return dx, dw
    ### END SOLUTION


# %%
check("column_backward")

# %% [markdown]
# On a timeline, beside a version that waits at once:

# %%
# %%ranks 2 --needs column_backward --name overlap --out timelines
import time

import torch
import torch.distributed as dist
from exercises.column_backward import column_backward
from torch.utils._python_dispatch import TorchDispatchMode

from minimegatron import trace
from minimegatron.comm.mesh import Axis

tp = Axis("tp", (0, 1), rank, dist.group.WORLD)
dy, x, weight = torch.randn(1536, 1, 640), torch.randn(1536, 1, 1024), torch.randn(640, 1024)
names = {x.numel(): "dx", weight.numel(): "dW"}


class Products(TorchDispatchMode):
    """Every matrix product is an event."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        start = time.monotonic()
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::mm", "aten::bmm"):
            trace.emit(names.get(out.numel(), "product"), "compute", start, time.monotonic())
        return out


def waiting_at_once(dy, x, weight, tp):
    dx = dy @ weight
    dist.all_reduce(dx, async_op=True).wait()
    return dx, dy.flatten(0, 1).t() @ x.flatten(0, 1)


def timed(function):
    real, travelled = dist.all_reduce, []

    def all_reduce(tensor, *args, **kwargs):
        start, handle = time.monotonic(), real(tensor, *args, **{**kwargs, "async_op": True})
        handle.get_future().then(lambda _: travelled.append((start, time.monotonic())))
        return handle

    dist.all_reduce = all_reduce
    dist.barrier()
    with trace.record(rank) as log, Products():
        function(dy, x, weight, tp)
        for start, end in travelled:
            trace.emit("sum of dx", "comm", start, end)
    dist.all_reduce = real
    return [(e.name, e.kind, e.rank, e.start, e.end) for e in log.events if e.kind in ("compute", "comm")]


for function in (waiting_at_once, column_backward):  # warm up
    timed(function)
report({"wait at once": timed(waiting_at_once), "yours": timed(column_backward)})

# %%
# %%needs column_backward
from minimegatron.trace import Event
from minimegatron.viz.timeline import gantt

for name in ("wait at once", "yours"):
    display(gantt([Event(*e) for says in timelines for e in says[name]], title=name))

# %% [markdown]
# On a CPU both share the same cores, so you see the overlap and hardly a gain. On GPUs the network works by itself.
# There the next two cells measure how fast one MLP is on 1, 2, 4 … GPUs, with this overlap in its column layer, and plot
# it.

# %%
# %%torchrun --gpus 2 --name speed --out speed
import time

import torch
from minimegatron.launch.rank import finish, init, report
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.mlp import MLP
from minimegatron.models.zoo import family_config

HIDDEN, SEQUENCE = 8192, 4096

rank, world = init()
config = family_config("gpt2", num_layers=1, hidden_size=HIDDEN, num_attention_heads=8, vocab_size=256,
                       params_dtype="bf16")  # fmt: skip
points = []
for t in (n for n in (1, 2, 4, 8) if n <= world):
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=t))
    with torch.device(mesh.device):
        mlp = MLP(config, mesh)
        x = torch.randn(SEQUENCE, 1, HIDDEN, dtype=config.dtype, requires_grad=True)
    for p in mlp.parameters():
        torch.nn.init.normal_(p, std=0.02)
    for timed in (False, True):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            mlp(x).sum().backward()
        torch.cuda.synchronize()
    points.append([t, (time.perf_counter() - start) / 10])
report(points)
finish()

# %%
if speed:
    degrees, seconds = zip(*speed.reports[0])
    fig, ax = plt.subplots(figsize=(7, 2.8))
    ax.plot(degrees, [seconds[0] / s for s in seconds], "o-", color="black", label="measured")
    ax.plot(degrees, degrees, "--", color="0.6", label="ideal")
    ax.set(xlabel="tp", ylabel="times as fast", title="One MLP, h = 8192, forward and backward")
    ax.legend()
    plt.show()

# %% [markdown]
# ## 6 · Break it
#
# Somebody wrote this initialisation. Replicated parameters must be equal on all ranks; so every rank uses the same
# seed. The comment says so. It sounds right, the run starts, and the loss falls nicely.

# %%
# %%ranks 1 --name careless
import zlib

import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.layers.param import layout_of
from minimegatron.models.decoder import build_model
from minimegatron.models.zoo import family_config

config = family_config(
    "gpt2", num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=256, max_position_embeddings=128
)


def careless(name, layout):
    """Every rank uses the same seed, so that replicas are equal."""
    g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(layout.local_shape, generator=g) * 0.1


def model_from(mesh, initial):
    model = build_model(config, mesh, seed=1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p.copy_(initial(name, layout_of(p)))
    return model


def some_batch(step):
    """Text that can be learned: every id depends on the one before."""
    g = torch.Generator().manual_seed(step)
    ids = [torch.randint(0, 256, (8,), generator=g)]
    for _ in range(32):
        ids.append((ids[-1] * 5 + 7 + torch.randint(0, 4, (8,), generator=g)) % 256)
    return torch.stack(ids, 1)


def loss_of(model, step):
    ids = some_batch(step)
    return model(ids[:, :-1], labels=ids[:, 1:]).mean()


if __name__ == "__main__":
    print("parameters:", sum(p.numel() for p in model_from(Mesh.serial(), careless).parameters()))

# %%
# %%ranks 2 --name suspect --out curves
import torch
from careless import careless, loss_of, model_from

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig


def train(mesh, steps=60):
    model = model_from(mesh, careless)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    curve = []
    for step in range(steps):
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


parallel = train(Mesh.build(ParallelConfig(tensor_model_parallel_size=2)))
print("the loss falls:", parallel[-1] < parallel[0] - 0.5)
report(parallel)

# %%
fig, ax = plt.subplots(figsize=(7, 2.4))
ax.plot(curves[0], color="black")
ax.set(xlabel="step", ylabel="loss", title="Would you stop this run?")
plt.show()

# %% [markdown]
# Nothing to see. You suspect tensor parallelism all the same. What would you compare, and with what? Decide before you
# read on.
#
# The twin is the same program on one rank. Compare the first step: loss, gradient norm, and what each rank holds.

# %%
# %%ranks 2 --name evidence_found
import torch
from careless import careless, loss_of, model_from

from minimegatron.comm.collectives import all_gather
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.logical import gather_logical
from minimegatron.layers.param import layout_of


def first_step(mesh):
    model = model_from(mesh, careless)
    loss = loss_of(model, 0)
    loss.backward()
    return model, loss.item(), {n: gather_logical(p.grad, layout_of(p), mesh.tp) for n, p in model.named_parameters()}


def norm(grads):
    return torch.stack([g.norm() for g in grads.values()]).norm().item()


mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=2))
model, loss, grads = first_step(mesh)
_, twin_loss, twin_grads = first_step(Mesh.serial())
print(f"loss           tp 2 {loss:.3f}   serial {twin_loss:.3f}")
print(f"gradient norm  tp 2 {norm(grads):.3f}   serial {norm(twin_grads):.3f}")


def equal_shards(tensor_of):
    same = []
    for name, p in model.named_parameters():
        if layout_of(p).sharded and p.dim() == 2:
            first, second = all_gather(tensor_of(p).detach()[None], mesh.tp)
            same.append(torch.equal(first, second))
    return f"{sum(same)} of {len(same)}"


print("matrices whose two shards are equal:   ", equal_shards(lambda p: p))
print("whose shards have equal gradients:     ", equal_shards(lambda p: p.grad))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(20):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    optimizer.step()
print("whose shards are equal after 20 steps: ", equal_shards(lambda p: p))

# %% [markdown]
# The loss is that of some other model. The gradient norm says so, and the shards say why: both ranks hold *the same*
# half of every matrix that is cut. The heads of rank 1 are copies of the heads of rank 0; so are the features of the
# MLP.
#
# Equal weights get equal gradients. So they stay equal for ever: every column and row layer has half of its width, at
# full price. Only the embedding can tell its halves apart, because they own different words. No replica check finds
# this, because no *replica* is wrong.
#
# **Exercise.** Repair it: this rank's part of an initial matrix, such that *every tp gives the same logical model*. The
# serial matrix is `torch.randn(*shape) * std` from a generator with `seed`.

# %%
# %%exercise initial_part
import torch


def initial_part(shape: list[int], dim: int | None, tp_rank: int, tp_size: int, seed: int, std: float) -> torch.Tensor:
    """This rank's part; shape is that of the whole matrix, dim is where it is cut, None if it is replicated."""
    ### BEGIN SOLUTION
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(*shape, generator=generator) * std
    return whole if dim is None else whole.chunk(tp_size, dim)[tp_rank].contiguous()
    ### END SOLUTION


# %%
check("initial_part")

# %%
# %%ranks 2 --needs initial_part --name repaired
import zlib

import torch
from careless import loss_of, model_from
from exercises.initial_part import initial_part

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.logical import gather_logical
from minimegatron.layers.param import layout_of


def first_step(mesh):
    def careful(name, layout):
        return initial_part(list(layout.shape), layout.dim, mesh.tp.rank, mesh.tp.size, zlib.crc32(name.encode()), 0.1)

    model = model_from(mesh, careful)
    loss = loss_of(model, 0)
    loss.backward()
    grads = [gather_logical(p.grad, layout_of(p), mesh.tp) for p in model.parameters()]
    return loss.item(), torch.stack([g.norm() for g in grads]).norm().item()


loss, norm = first_step(Mesh.build(ParallelConfig(tensor_model_parallel_size=2)))
twin_loss, twin_norm = first_step(Mesh.serial())
print(f"loss           tp 2 {loss:.3f}   serial {twin_loss:.3f}")
print(f"gradient norm  tp 2 {norm:.3f}   serial {twin_norm:.3f}")
print("equal to 5 digits:", abs(norm / twin_norm - 1) < 1e-5)

# %% [markdown]
# Adding the rank to the seed would have made the shards different. The model would still depend on tp, and the twin
# would still disagree.

# %% [markdown]
# ## 7 · Explain
#
# Say your answer aloud before you read on.
#
# 1. *Why is there no communication between fc1 and fc2?* The activation is elementwise, and fc2 wants exactly the
#    features that fc1 left here.
# 2. *Could you cut row first, then column?* Yes, with two messages in place of one: the partial sums must be added
#    before the activation (GELU of a part of a sum is no part of GELU), and what leaves the column layer must be
#    gathered.
# 3. *GQA has 2 key/value heads, tp is 8. What does a rank hold?* An eighth of the packed rows. Here the ranks gather
#    the packed *output* and pick their queries and their one key/value head. Others keep copies of the key/value rows;
#    then their gradients must be summed.
# 4. *Why is tp kept inside one machine?* It talks four times a layer, and each message is on the critical path.
# 5. *What does sequence parallelism cost?* Two more all-gathers a layer: 10 payloads instead of 8. And, once a step,
#    the sum of the partial gradients of norms and row biases.
# 6. *When does ZeRO-3 send less than tp?* When a rank has many tokens: it moves weights, tp moves activations.
#
# **Exercise.** The ones that compute, for any model. Return a dict:
#
# * `query_heads`: the query heads of this rank, in order; `kv_heads`: the key/value heads they use, in order;
# * `gate_up_rows`: the ranges `[start, stop]` of the stacked `[gate; up]` matrix, `2·ffn` rows, that this rank holds;
# * `payloads_forward`: how many all-reduces of `s·b·h` a forward pass makes, embedding included, loss not;
# * `logits_over_three`: bytes sent to all-gather the logits `[s, b, V]`, over those of all-reducing three numbers a
#   token (the same bytes an element, rings);
# * `zero3_sends_less_from`: the tokens `b·s` per rank at which both send the same; from there on ZeRO-3 sends less. A
#   layer has `12·h²` weights, which ZeRO-3 gathers twice and reduces once; tp sends `8·b·s·h`. Leave `(t-1)/t` out on
#   both sides.

# %%
# %%exercise answers
def answers(
    heads: int, groups: int, ffn: int, tp: int, rank: int, layers: int, hidden: int, vocab: int
) -> dict[str, object]:
    """{"query_heads": [...], "kv_heads": [...], "gate_up_rows": [[...], ...], "payloads_forward": ..., ...}"""
    ### BEGIN SOLUTION
    queries = list(range(rank * heads // tp, (rank + 1) * heads // tp))
    return {
        "query_heads": queries,
        "kv_heads": sorted({q // (heads // groups) for q in queries}),
        "gate_up_rows": [[half + rank * ffn // tp, half + (rank + 1) * ffn // tp] for half in (0, ffn)],
        "payloads_forward": 2 * layers + 1,
        "logits_over_three": vocab / (2 * 3),
        "zero3_sends_less_from": 3 * 12 * hidden**2 / (8 * hidden),
    }
    ### END SOLUTION


# %%
check("answers")

# %%
progress()

# %% [markdown]
# ## Where this lives
#
# | in minimegatron | in Megatron-LM |
# |---|---|
# | column and row: `layers/linear.py` | `core/tensor_parallel/layers.py` |
# | f, g and the sequence pair: `comm/collectives.py` | `core/tensor_parallel/mappings.py` |
# | overlap: `layers/products.py`, `both_gradients` | `LinearWithGradAccumulationAndAsyncCommunication`, in the same file |
# | heads and packed QKV: `layers/attention.py` | `core/transformer/attention.py` |
# | gate and up: `layers/mlp.py` | `core/transformer/mlp.py` |
# | vocabulary in: `layers/embedding.py` | `VocabParallelEmbedding` in `core/tensor_parallel/layers.py` |
# | vocabulary out: `layers/loss.py` | `core/tensor_parallel/cross_entropy.py` |
# | partial gradients: `layers/param.py`, `parallel/finalize.py` | `core/distributed/finalize_model_grads.py` |
# | initial values: `layers/logical.py` | `core/tensor_parallel/random.py` |
#
# Shoeybi et al. 2019 (arXiv 1909.08053); Korthikanti et al. 2022 (arXiv 2205.05198).
#
# Next: lab 03, pipelines, where the layers themselves are divided.

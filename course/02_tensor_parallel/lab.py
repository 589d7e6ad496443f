# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Lab 02 · Tensor and sequence parallelism
#
# Most of a transformer layer's work is matrix products. Here you cut these products over several ranks, so that each
# rank stores and computes a part of every layer.
#
# | | |
# |---|---|
# | **You build** | a GPT cut over ranks: layers, attention, embedding, loss; sequence parallelism; an overlap |
# | **You need** | lab 01 (collectives, f and g); the backward pass of $y = xA$; `torch.autograd.Function` |
# | **Time** | 5 to 7 hours in four parts, with a place to stop after each |
#
# | part | sections | hours |
# |---|---|---|
# | A · cut a matrix | 1 to 3, up to "The pair" | 1 to 1½ |
# | B · cut a model | attention, vocabulary, 4 (Run) | 2 to 2½ |
# | C · cut the sequence | the pair of collectives, partial gradients | ½ to 1 |
# | D · look, break, explain | 5 to 7 | 1½ to 2 |
#
# No GPU is needed. After a kernel restart: run the first cell, then go on where you were.

# %%
# %load_ext course
# %lab 02_tensor_parallel

# %% [markdown]
# ### Before anything else, a guess
#
# Tensor parallelism cuts a layer over 4 ranks. Each rank then holds a quarter of the weights. But what about the
# activations, the tensors that the forward pass keeps for the backward pass? Guess from the gut, for a GPT layer with
# flash attention and without dropout. You meet your number again at the end.

# %%
guess("kept", None, "How many percent of a layer's activations does each of 4 ranks keep, with tensor parallelism?")

# %% [markdown]
# # Part A · Cut a matrix
#
# ## 1 · The problem
#
# One layer of Llama-3 70B has 856 million weights. Training in mixed precision takes 16 bytes for each of them: weight,
# gradient, and optimizer state. That is 13.7 GB a layer. Five layers fill a GPU of 80 GB, and the model has 80 layers.
#
# You could give each GPU a few whole layers. That is a pipeline, the subject of lab 03. But a batch passes the layers
# one after the other, so one GPU works while the others wait, unless many small batches are under way. If you cut
# *inside* a layer, all ranks work on the same layer at the same time.

# %%
from minimegatron.viz.bars import stacked

h, ffn, rows_qkv = 8192, 28672, 8192 + 2 * 1024
matrices = {"QKV": h * rows_qkv, "projection": h * h, "gate and up": h * 2 * ffn, "down": h * ffn}
weights = sum(matrices.values())
print(f"one layer: {16 * weights / 1e9:.1f} GB on one rank, {16 * weights / 8 / 1e9:.1f} GB on each of eight")
bars = {f"tp {t}": {name: 16 * n / t / 1e9 for name, n in matrices.items()} for t in (1, 2, 4, 8)}
stacked(bars, title="One layer of Llama-3 70B", what="GB on one rank: weights, gradients, optimizer state")

# %% [markdown]
# ### Two ways to cut a product
#
# Take $y = xA$ with 2×2 matrices and two ranks. You can cut A between its columns or between its rows. Check the
# numbers by hand: 19 = 1·5 + 2·7.

# %%
from course.figures.tensor_parallel import cut_product

cut_product(x=[[1, 2], [3, 4]], a=[[5, 6], [7, 8]])

# %% [markdown]
# * **Column-parallel**: each rank needs all of x and computes some *columns of y*. They are finished numbers.
# * **Row-parallel**: each rank needs some columns of x and computes a *partial sum* of all of y. The partial sums must
#   be added: 19 = 5 + 14.
#
# Now chain them: the columns of y that a column-parallel product leaves on a rank are exactly the columns of x that a
# row-parallel product needs there. An elementwise function between the two needs no other rank's numbers. So a pair of
# products needs one sum at its end, and no message in between.
#
# PyTorch stores the transposed matrix, `[out, in]`. The columns of A are *rows of the stored tensor*, so a
# column-parallel layer cuts dim 0 of its weight and a row-parallel layer cuts dim 1. Here are the weights of a small
# Llama on two ranks, as the package cuts them:

# %%
import torch

from minimegatron.comm.mesh import Axis, Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.param import layout_of
from minimegatron.models.decoder import GPTModel
from minimegatron.models.families import family_config
from course.figures.tensor_parallel import Shards, weight_shards

mesh = Mesh.serial()  # one process, which is told that it is rank 0 of 2; on "meta" tensors have shapes and no numbers
mesh.parallel, mesh.tp = ParallelConfig(tensor_model_parallel_size=2), Axis("tp", (0, 1), 0)
llama = family_config("llama", num_layers=1, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=256)
with torch.device("meta"):
    model = GPTModel(llama, mesh)

layouts = {name.split(".")[-2]: layout_of(p) for name, p in model.named_parameters()}
names = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "word_embeddings", "output_layer", "input_layernorm"]
bands = {"linear_fc1": ("gate", "up")}
cuts = {name: layouts[name] for name in names}
weight_shards([Shards(name, cut.shape, cut.dim, cut.parts, bands.get(name, ())) for name, cut in cuts.items()])

# %% [markdown]
# The upper row is one layer: two pairs, QKV with projection, and `fc1` (gate and up) with `fc2` (down). Notice:
#
# * `linear_fc1` is a stack of two matrices, gate and up. Each rank holds *the same rows of both*, so it has two ranges.
#   The MLP multiplies feature i of gate with feature i of up, so the two must meet on one rank. One cut through the
#   middle would give rank 0 all of gate and rank 1 all of up.
# * Norms are not cut: every rank holds them whole. Part C comes back to them.

# %% [markdown]
# ### f and g
#
# Follow a pair on two ranks: y = xA, u = GELU(y), z = uB. The forward pass is the upper half, the backward pass the
# lower. y₀ is the part of y on rank 0, dx is the gradient ∂loss/∂x.

# %%
from course.figures.tensor_parallel import flow

flow()

# %% [markdown]
# * At the end of the forward pass each rank has a partial sum of z. **g** adds them: an all-reduce forward. Backward,
#   every rank already has the same dz, so g sends nothing and returns dz.
# * At the end of the backward pass each rank has a partial sum of dx, because x went into different products on each
#   rank. **f** adds them: an all-reduce backward. Forward, every rank already has x, so f sends nothing and returns x.
#
# You built both in lab 01.

# %% [markdown]
# ## 2 · Predict
#
# ### Bytes
#
# A layer is two such pairs, attention and MLP. The upper row of this picture is tensor parallelism alone. In the lower
# row, sequence parallelism also cuts the tensors *between* the pairs, by tokens. (Part C builds it.) A square is an
# activation: a row of it is a token, a column is a feature.

# %%
from course.figures.tensor_parallel import regions

regions()

# %% [markdown]
# Count the arrows: each all-reduce becomes a reduce-scatter and an all-gather, which together send the same bytes.
#
# The picture leaves out what dW needs. dW of a column layer is a sum over all tokens of x, and with sequence parallelism
# a rank stores only its own tokens of x, as they are before the arrow.
#
# Recompute saves memory: a part of the layer keeps only its input, and the backward pass first runs this part forward a
# second time. The second run keeps its tensors as the first would have kept them, and ends as soon as all that the
# backward pass needs are there (so does PyTorch's `checkpoint`). Parts in use:
#
# | `recompute` | the part | its input |
# |---|---|---|
# | `"none"` | none | |
# | `"core_attn"` | scores, softmax, weighted values | queries, keys, values |
# | `"mlp"` | `fc1`, GELU, `fc2`, with their arrows | output of the second norm |
# | `"full"` | the layer | input of the layer |
#
# **Exercise.** The bytes that *each rank* sends for one layer without dropout, forward and backward, a second run
# included. Every bold arrow carries an activation of `s·b·h` elements. Collectives run as rings, as in lab 01: an
# all-reduce of n bytes sends `2n(t-1)/t`; an all-gather or a reduce-scatter, n being the whole tensor, sends
# `n(t-1)/t`. Do not round. Section 5 counts what four ranks really send.

# %%
# %%exercise bytes_per_layer
def bytes_per_layer(
    s: int, b: int, h: int, t: int, element_size: int, sequence_parallel: bool, recompute: str = "none"
) -> float:
    """Bytes one rank sends over tp for one layer, forward and backward; s is the whole sequence."""
    ### BEGIN SOLUTION
    all_gather = reduce_scatter = s * b * h * element_size * (t - 1) / t
    pair = all_gather + reduce_scatter  # as much as an all-reduce
    for_dw = 2 * all_gather if sequence_parallel else 0
    # A second run ends with the input of fc2: it makes the arrows before that.
    again = {"mlp": all_gather, "full": pair + all_gather} if sequence_parallel else {"full": pair}
    return 2 * pair + 2 * pair + for_dw + again.get(recompute, 0)
    ### END SOLUTION


# %%
check("bytes_per_layer")

# %% [markdown]
# ### Memory
#
# The forward pass keeps tensors for the backward pass. The table lists those of a GPT layer in 16 bits with dropout, in
# bytes per `s·b·h`. With h = 4 and one token, `s·b·h` = 4, and the input of the first norm takes 2·4 = 8 bytes.
#
# | kept | bytes |
# |---|---|
# | input of the first norm | 2 |
# | input of the QKV layer | 2 |
# | queries and keys | 4 |
# | values | 2 |
# | softmax output (2), dropout mask (1), dropout output (2): `5·a·s²·b` for a heads, cut by heads | 5·a·s/h |
# | input of the projection | 2 |
# | dropout mask after the projection | 1 |
# | input of the second norm | 2 |
# | input of `fc1` | 2 |
# | input of the GELU | 8 |
# | input of `fc2` | 8 |
# | dropout mask after `fc2` | 1 |
#
# In the picture above, find the square in which each row of the table lies. The inputs of QKV and of `fc1` lie in the
# square before the arrow: with sequence parallelism they are kept as they are there, not as they arrive. Tensor
# parallelism divides what lies in a square that is cut by features. The rest is whole on every rank, until sequence
# parallelism cuts it by tokens. (Korthikanti et al. 2022, figure 5.)
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
# With t = 1 it is the well-known `s·b·h·(34 + 5·a·s/h)`. For GPT-3 with 2048 tokens your function says 2.87 GB a layer
# on one rank; on each of eight ranks 0.58 GB with tensor parallelism and 0.36 GB with both.

# %% [markdown]
# ## 3 · Implement
#
# Every function gets `tp`, the axis of ranks that share the layer.
#
# * Use `tp.rank`, `tp.size`, and `group=tp.group` with `torch.distributed`. These ranks may be a part of all ranks, so
#   `dist.get_rank()` can be another number.
# * Inputs belong to the caller: do not change them. They may be views that are not contiguous, which some collectives
#   refuse: `x.contiguous()` is a copy that all of them take.
# * Inputs may be float64, and what you return has the same dtype. The loss is the exception: its logits are fp32.
# * The checks count what travels, too: for a column layer or a row layer one all-reduce, as in the picture of f and g.
#
# You may use the package's f and g:
#
# | | forward | backward |
# |---|---|---|
# | **f** `copy_to_region(x, tp)` | returns x | all-reduce |
# | **g** `reduce_from_region(x, tp)` | all-reduce | returns the gradient |
#
# ### Column
#
# `weight` is this rank's `[o/t, i]`, `bias` its `[o/t]` or None. x is the same on every rank. Do not gather y. In the
# 2×2 example rank 0 has the weight `[[5, 7]]` and returns the column 19, 43.
#
# **Exercise.** The layer, in such a way that autograd finds the right ∂loss/∂x.

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
# `weight` is this rank's `[o, i/t]`, x its features `[s, b, i/t]`. The bias `[o]` is the same on every rank, or None,
# and y gets it once. In the 2×2 example rank 0 has the weight `[[5], [6]]` and the x 1, 3.
#
# **Exercise.** The layer.

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
# Your two layers with a GELU between them are an MLP. The next cell runs it on four ranks, and compares it with the
# same MLP in one process. Before you run it: which collectives will it make, forward and backward together?

# %%
# %%ranks 4 --needs column_linear,row_linear --name pair
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

with Witness(rank) as witness:  # writes down every collective
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
# The first all-reduce is g, in the forward pass; the second is f, in the backward pass.
#
# **End of part A.** A good place to stop.

# %% [markdown]
# # Part B · Cut a model
#
# ### Attention: which heads
#
# Heads do not depend on each other. So each rank gets some of them: QKV is a column layer, the projection a row layer.
#
# With grouped-query attention (GQA), `a` query heads form `g` groups, and the `a/g` query heads of a group share one
# key head and one value head. A rank that holds whole groups has the keys and values of all its queries. Megatron
# therefore stores the rows of the QKV matrix *group by group*. With 4 query heads in 2 groups, on 2 ranks:
#
# | rows | q0 | q1 | k0 | v0 | q2 | q3 | k1 | v1 |
# |---|---|---|---|---|---|---|---|---|
# | rank | 0 | 0 | 0 | 0 | 1 | 1 | 1 | 1 |
#
# Each rank now holds an equal block of rows. Checkpoints from elsewhere hold three matrices, `wq` `[a·d, h]`, `wk` and
# `wv` `[g·d, h]`.
#
# **Exercise.** Pack them, and return block `tp_rank` of `tp_size` equal blocks. (With fewer groups than ranks a block
# is a part of a group. Cut in the same way; question 3 of section 7 says what a rank does with it.)

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
# After the column layer, each group of this rank has `queries_per_group` queries, then one key, then one value, each
# `d` wide. `F.scaled_dot_product_attention` wants `[b, heads, s, d]`; with `enable_gqa=True` several queries share a
# key.
#
# A case to check by hand: if all queries are 0, all scores are 0, and each token gets the mean of the values that it
# sees. Values 2 and 4 give 2 and 3.
#
# **Exercise.** Causal self-attention on this rank's heads. `qkv` and `proj` are pairs `(weight, bias)`.

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
# ### A layer with fewer sums
#
# Your attention makes one sum forward and one backward, and an MLP of your two layers makes as many: four all-reduces a
# layer. GPT-J, PaLM and Command R have another layer, whose attention and MLP read *the same* norm:
#
# $$y = x + \text{attention}(\text{norm}(x)) + \text{mlp}(\text{norm}(x))$$
#
# PaLM's authors report 15 % faster training at large scale (Chowdhery et al. 2022), because the products that read the
# norm can be joined. Over tp this layer also sends less, if you write it so. Your `column_linear` and `row_linear` as
# they are give the right numbers and save nothing.
#
# `heads` stands between QKV and the projection: from the QKV features of this rank, `[s, b, ·]`, it makes the results of
# this rank's heads, and needs no other rank. The MLP has a GELU between `fc1` and `fc2`. `norm` is the `(weight, bias)`
# of a LayerNorm, the same on every rank; `qkv`, `proj`, `fc1`, `fc2` are `(weight, bias)` as before.
#
# **Exercise.** The layer, with as few all-reduces as it needs. How many are these? Does f stand before the norm or
# behind it? Think of *all* gradients, those of the norm's weight and bias, too: every rank holds the norm whole, and
# nothing sums its gradients afterwards.

# %%
# %%exercise parallel_layer
import torch
import torch.nn.functional as F

from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def parallel_layer(x: torch.Tensor, norm: tuple, qkv: tuple, proj: tuple, fc1: tuple, fc2: tuple, heads, tp):
    """x [s, b, h] -> [s, b, h]; both the same on all ranks."""
    ### BEGIN SOLUTION
    whole = copy_to_region(F.layer_norm(x, x.shape[-1:], *norm), tp)
    part = F.linear(heads(F.linear(whole, *qkv)), proj[0]) + F.linear(F.gelu(F.linear(whole, *fc1)), fc2[0])
    return x + reduce_from_region(part, tp) + proj[1] + fc2[1]
    ### END SOLUTION


# %%
check("parallel_layer")

# %% [markdown]
# That is half of the bytes of section 2, and one norm less. The price is another model, whose MLP does not see what
# attention of the same layer found: PaLM's authors measured a small loss of quality at 8B and none at 62B.
#
# ### Vocabulary: the embedding
#
# The embedding table is cut by rows. Rank r owns the ids from `r·n` to `(r+1)·n - 1`, where n is the number of rows
# that it holds. Each token's row is on exactly one rank, every rank has all ids, and all ranks need all rows of the
# output. The table is far larger than the output: it stays where it is.
#
# The number of rows must be divisible by tp. GPT-2 has 50,257 words, an odd number. So Megatron pads the table to a
# multiple of 128·tp rows (`--make-vocab-size-divisible-by 128`): 50,304 rows with tp 1, 51,200 with tp 8. The further
# rows are never a target, but the softmax runs over them, too: training pushes their logits down, and a sampler must
# leave them out. A checkpoint that was saved with another tp may hold a table of another size.
#
# **Exercise.** The rows of all ids, by one all-reduce of `[s, b, h]`.

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
# ### Vocabulary: the loss
#
# The output layer is a column layer, so each rank has the logits of its own words. Gathering them would send `s·b·V`
# numbers. For Llama-3 70B, with V = 128256, that is about what two whole layers send, and every rank would store all of
# them: 4.2 GB for 8192 tokens in fp32. The loss needs far less:
#
# $$\text{loss} = \log \sum_j e^{z_j - M} - (z_\text{target} - M), \qquad M = \max_j z_j$$
#
# The sum and the maximum run over the words of all ranks; the target's logit is on one rank. That makes three numbers a
# token, which are reduced or gathered over ranks.
#
# The gradient is $\text{softmax}_j - [\,j = \text{target}\,]$, times the gradient that arrives. Every rank can compute
# it for its own words without a message.
#
# A case to check by hand: two words, one on each rank, with logits 0 and ln 3. Their probabilities are 1/4 and 3/4. If
# the second is the target, the loss is -ln(3/4) = 0.2877, and the gradient is 1/4 on rank 0 and 3/4 - 1 = -1/4 on rank
# 1.
#
# Words that must not be said, and rows that only pad the table, have a logit of $-\infty$ here. That can be all words of
# a rank. The target's logit is finite.
#
# **Exercise.** Loss and gradient. The simplest form is one `torch.autograd.Function` with raw all-reduces
# (`op=dist.ReduceOp.MAX` for the maximum).

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
        picked = z.gather(-1, local).squeeze(-1).masked_fill(~own, 0.0)  # 0 * -inf would be nan
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
# You have all pieces of a tensor-parallel GPT. The next cell has subclasses of the package's layers that call your
# functions. This cell and the one below it are also modules: later cells import them.

# %%
# %%ranks 1 --name my_layers --needs column_linear,row_linear,attention
from exercises.attention import attention
from exercises.column_linear import column_linear
from exercises.row_linear import row_linear

from minimegatron.layers.attention.self_attention import SelfAttention
from minimegatron.layers.mlp import MLP


class MyMLP(MLP):
    def forward(self, x):
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        y = self.activation(column_linear(x, fc1.weight, fc1.bias, fc1.tp))
        return row_linear(y, fc2.weight, fc2.bias, fc2.tp)


class MyAttention(SelfAttention):
    def forward(self, x, context):
        qkv, proj = self.linear_qkv, self.linear_proj
        return attention(x, (qkv.weight, qkv.bias), (proj.weight, proj.bias), self.d, self.per_group, self.tp)


if __name__ == "__main__":
    print("your layers stand in for:", [base.__name__ for base in (*MyMLP.__bases__, *MyAttention.__bases__)])

# %% [markdown]
# The package builds a layer from a *specification*, which says what class stands where. So your layers go in without a
# change to the package.

# %%
# %%ranks 1 --name my_model --needs column_linear,row_linear,attention,embedding,cross_entropy
from exercises.cross_entropy import cross_entropy
from exercises.embedding import embedding
from my_layers import MyAttention, MyMLP

from minimegatron.comm.mesh import Mesh
from minimegatron.models.decoder import build_model
from minimegatron.models.gpt_layer_specs import decoder_layer_spec
from minimegatron.models.spec import ModuleSpec
from minimegatron.models.families import family_config

config = family_config(
    "gpt2", num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=256,
    max_position_embeddings=128, make_vocab_size_divisible_by=64,
)


def my_model(mesh, seed=1):
    spec = decoder_layer_spec(config).with_submodule("mlp", ModuleSpec(MyMLP))
    model = build_model(config, mesh, seed, spec.with_submodule("self_attention", ModuleSpec(MyAttention)))
    words = model.embedding.word_embeddings
    words.forward = lambda ids: embedding(ids.t(), words.weight, words.tp)
    return model


def my_losses(model, tokens, labels):
    """Loss of every token; each rank keeps the logits of its own words."""
    return cross_entropy(model(tokens), labels.t(), model.mesh.tp).t()


if __name__ == "__main__":
    print("parameters:", sum(p.numel() for p in my_model(Mesh.serial()).parameters()))

# %% [markdown]
# ### Beside the serial twin
#
# The **serial twin** is the package's own model in one process, with the same weights and the same batch. Compare
# gradients, not only losses: a wrong backward pass leaves the first loss as it is. `shake` adds noise to all weights,
# so that no bias is 0 and no norm is 1; otherwise a mistake in either could hide.

# %%
# %%ranks 4 --needs column_linear,row_linear,attention,embedding,cross_entropy --name beside_the_twin
import torch
from my_model import config, my_losses, my_model

from course.lab02.twins import departing, gradients, norm, shake
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.models.decoder import build_model

ids = torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(0))
tokens, labels = ids[:, :-1], ids[:, 1:]

twin = shake(build_model(config, Mesh.serial(), seed=1))
want = twin(tokens, labels=labels).mean()
want.backward()
serial = gradients(twin)

mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=2))  # 4 ranks: two pairs do the same
model = shake(my_model(mesh))
loss = my_losses(model, tokens, labels).mean()
loss.backward()
yours = gradients(model, mesh)  # the shards of all ranks, put together

print(f"loss           yours {loss.item():.3f}   serial {want.item():.3f}")
print(f"gradient norm  yours {norm(yours):.3f}   serial {norm(serial):.3f}")
print("gradients compared:", len(serial), "  that differ:", departing(yours, serial, share=1e-4))

# %% [markdown]
# ### What a mistake looks like there
#
# This comparison is the tool that finds mistakes at work. Three mistakes, each made in both MLPs of such a model on two
# ranks. The model has 28 parameters: two tables of embeddings, 12 a layer, and the last norm's weight and bias.
#
# | | the mistake |
# |---|---|
# | no f | the column layer takes x as it is |
# | a sum on the way back | g is an all-reduce backward as well, as `torch.distributed.nn.functional.all_reduce` is |
# | bias inside | the row layer's bias is added before the sum, on every rank |
#
# Before you run it: without f, whose gradients are wrong, from the loss back to the embedding?

# %%
guess("no f", None, "f is missing in the MLPs of both layers. How many of the 28 gradients of rank 0 are wrong?")

# %% jupyter={"source_hidden": true}
# %%ranks 2 --name mistakes --out wrong_without_f
import torch
import torch.nn.functional as F

from course.lab02.twins import departing, gradients, norm, replicas_agree, shake
from minimegatron.comm.collectives import copy_to_region, reduce_from_region
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.mlp import MLP
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config
from minimegatron.models.gpt_layer_specs import decoder_layer_spec
from minimegatron.models.spec import ModuleSpec

config = family_config("gpt2", num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=256)


class NoF(MLP):
    f, g, inside = staticmethod(lambda x, tp: x), staticmethod(reduce_from_region), False

    def forward(self, x):
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        y = self.activation(F.linear(self.f(x, fc1.tp), fc1.weight, fc1.bias))
        if self.inside:
            return self.g(F.linear(y, fc2.weight, fc2.bias), fc2.tp)
        return self.g(F.linear(y, fc2.weight), fc2.tp) + fc2.bias


class SumBack(NoF):  # g forward, and on the way back an all-reduce as f makes it
    f, g = staticmethod(copy_to_region), staticmethod(lambda x, tp: copy_to_region(reduce_from_region(x, tp), tp))


class BiasInside(NoF):
    f, inside = staticmethod(copy_to_region), True


ids = torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(0))


def first_step(mesh, spec=None):
    model = shake(build_model(config, mesh, 1, spec))
    loss = model(ids[:, :-1], labels=ids[:, 1:]).mean()
    loss.backward()
    return model, loss.item()


twin, twin_loss = first_step(Mesh.serial())
serial = gradients(twin)
mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=2))
off = {}
for name, mlp in (("no f", NoF), ("a sum on the way back", SumBack), ("bias inside", BiasInside)):
    model, loss = first_step(mesh, decoder_layer_spec(config).with_submodule("mlp", ModuleSpec(mlp)))
    found = gradients(model, mesh)
    off[name] = departing(found, serial)
    print(f"{name:21} loss right: {abs(loss - twin_loss) < 1e-4!s:5}  norm right: "
          f"{abs(norm(found) / norm(serial) - 1) < 1e-3!s:5}  wrong gradients: {len(off[name])} of {len(serial)}  "
          f"replicas agree: {replicas_agree(model)}")  # fmt: skip
report(len(off["no f"]))

# %%
guessed("no f", wrong_without_f[0], "of the 28")

# %% [markdown]
# Read a line as a fingerprint. A loss that is right says that the forward pass is. Without f only six gradients are
# right: those that the backward pass reaches before the first missing sum, of the last norm and of `fc1` and `fc2` in
# the last layer. Each rank has another part of the sum, so replicas differ as well. The sum on
# the way back doubles what passes through it, on every rank alike: replicas agree, and only the twin shows it. It
# leaves three right: the last norm's two, and the bias of `fc2` in the last layer, which is added after it.
#
# ### Train
#
# Your model on two real processes, started by the real `torchrun`, on the documentation of Python's standard library.
# Rank 0 trains the serial twin as well, with the same batches.

# %%
# %%torchrun -n 2 --needs column_linear,row_linear,attention,embedding,cross_entropy --name train --timeout 99 --out run
import itertools

import torch
from my_model import config, my_losses, my_model

from course.lab02.twins import train
from minimegatron.launch.rank import finish, init, report
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.data.corpus import documents
from minimegatron.models.decoder import build_model

rank, world = init()
mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=2))
text = "\n".join(itertools.islice((t for _, t in documents("docs")), 60)).encode()
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(mesh.device)


def batch(step):
    """8 sequences of 64 tokens, and the token after each of them."""
    starts = torch.randint(0, len(data) - 65, (8,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([data[i : i + 65] for i in starts])
    return rows[:, :-1], rows[:, 1:]


model, serial = my_model(mesh), []
yours = train(model, lambda step: my_losses(model, *batch(step)).mean(), steps=40, learning_rate=1e-3)
if rank == 0:
    twin = build_model(config, Mesh.serial(device=mesh.device), 1)
    serial = train(twin, lambda step: twin(batch(step)[0], labels=batch(step)[1]).mean(), 40, learning_rate=1e-3)
    print(f"the loss fell by more than a quarter: {yours[-1] < yours[0] * 3 / 4}")
    print(f"never apart by more than 0.01: {max(abs(a - b) for a, b in zip(yours, serial)) < 0.01}")
report({"yours": yours, "serial": serial})
finish()

# %%
# %%needs column_linear row_linear attention embedding cross_entropy
from minimegatron.viz.curves import beside

beside(run.reports[0]["yours"], run.reports[0]["serial"], "your model, tp 2", "serial twin", "loss per byte")

# %% [markdown]
# The lower curve is the distance of the two. It is not 0 in every step, because two ranks add numbers in another order
# than one, and fp32 rounds each sum.
#
# ### In bf16
#
# At work activations are bf16, and the distance is larger. One GPU adds up the products of a row layer in fp32 and
# rounds y once. With tensor parallelism each rank rounds its partial sum, and a ring all-reduce rounds again after each
# of its t-1 additions. What does that make of the rounding error of y?

# %%
guess("bf16", None, "A row layer in bf16: how many times the rounding error of one rank has the y of eight ranks?")

# %%
import torch
from minimegatron.viz.curves import over_degrees

g = torch.Generator().manual_seed(0)
x, weight = torch.randn(64, 4096, generator=g).bfloat16().float(), torch.randn(4096, 128, generator=g).bfloat16().float()
exact, degrees = x.double() @ weight.double(), [1, 2, 4, 8, 16, 32]
errors = {"parts and sums in bf16": [], "parts in bf16, summed in fp32": []}
for t in degrees:
    parts = [(a @ b).bfloat16() for a, b in zip(x.chunk(t, 1), weight.chunk(t))]
    total = parts[0]
    for part in parts[1:]:
        total = total + part  # in bf16, as a ring does it
    for name, y in zip(errors, (total, sum(part.float() for part in parts).bfloat16())):
        errors[name].append((y.double() - exact).norm().item())
times = {name: [error / all_of[0] for error in all_of] for name, all_of in errors.items()}
guessed("bf16", round(times["parts and sums in bf16"][3], 1), "times the rounding error of one rank")
over_degrees(degrees, times, title="Rounding error of a row layer's y", what="times that of one rank")

# %% [markdown]
# The sums make most of it. If the parts are rounded and their sum is not, the error is √2 of one rank's for every t:
# t errors, each smaller by √t, are together as large as one, and the last rounding adds another. Megatron sends bf16
# over tp all the same, because fp32 doubles the bytes.
#
# So a loss in bf16 with tp 8 that is not that of tp 1 proves no mistake, and one that is close does not rule it out.
# Compare in fp32 or float64 first, as you did here.
#
# **End of part B.** A good place to stop.

# %% [markdown]
# # Part C · Cut the sequence
#
# Between a row layer and the next column layer stand norm, dropout and residual. With tensor parallelism every rank
# computes them on *all* tokens: each of t ranks does the same work and keeps the same tensors. But each of these
# functions looks at one token at a time, so the tokens can be cut:

# %%
from course.figures.tensor_parallel import LAYER, regions

regions({title: cuts for title, cuts in LAYER.items() if "sequence" in title})

# %% [markdown]
# Take the all-reduce after a row layer apart. Its first half, the reduce-scatter, leaves each rank the finished sum of
# *some tokens*. Do dropout, residual and norm there. Before the next column layer comes the second half, the
# all-gather.
#
# | | forward | backward |
# |---|---|---|
# | `gather_sequence`, before a column layer | all-gather over tokens | reduce-scatter |
# | `reduce_scatter_sequence`, after a row layer | reduce-scatter | all-gather |
#
# The gather's backward *sums*, as f does: each rank used the tokens for other features, so each has a part of their
# gradient.
#
# With one token of one number on each of two ranks, 1 and 2: `gather_sequence` returns 1, 2 on both. If the gradients
# that arrive are 10, 20 on rank 0 and 30, 40 on rank 1, then rank 0 returns 10 + 30 = 40 and rank 1 returns 60.
#
# `reduce_scatter_sequence` is the other way round: if rank 0 has 1, 2 and rank 1 has 10, 20, it returns 1 + 10 = 11 on
# rank 0 and 22 on rank 1. If the gradients that arrive are 3 on rank 0 and 4 on rank 1, both return 3, 4.
#
# Not all that reads gathered tokens is cut over tp. The pooler of BERT is whole on every rank, and all ranks do *the
# same* with all tokens. There Megatron calls its gather with `tensor_parallel_output_grad=False`. Which gradients
# arrive on the ranks now? What does a rank return, and what does it send?
#
# **Exercise.** Both, along dim 0, with `dist.all_gather_into_tensor(out, x)` and `dist.reduce_scatter_tensor(out, x)`,
# or others that send as little. x, and the gradient that arrives, may be views that are not contiguous. NCCL refuses to
# send them, so send `x.contiguous()`. (The check runs on gloo, which would take them.)

# %%
# %%exercise sequence_pair
import torch
import torch.distributed as dist


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp, tensor_parallel_output_grad):
        ### BEGIN SOLUTION
        ctx.tp, ctx.parts = tp, tensor_parallel_output_grad
        return all_gather(x, tp)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        tp = ctx.tp
        return reduce_scatter(grad, tp) if ctx.parts else grad.chunk(tp.size)[tp.rank], None, None
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


def gather_sequence(x: torch.Tensor, tp, tensor_parallel_output_grad: bool = True) -> torch.Tensor:
    """[s/t, b, h] -> [s, b, h]; False if all ranks do the same with it."""
    return GatherSequence.apply(x, tp, tensor_parallel_output_grad)


def reduce_scatter_sequence(x: torch.Tensor, tp) -> torch.Tensor:
    """The sum over ranks of [s, b, h], this rank's tokens of it: [s/t, b, h]."""
    return ReduceScatterSequence.apply(x, tp)


# %%
check("sequence_pair")

# %% [markdown]
# ### Gradients that are only a part
#
# A norm's weight is *replicated*: every rank holds the whole of it. With sequence parallelism each rank's norm sees
# only its own tokens, so its gradient is only a part of the whole gradient. Autograd does not sum these parts. Without
# the sum, the ranks' copies of the weight drift apart, and no error is raised.
#
# Which parameters are concerned? Ask of each: is it replicated, and what part of the work does this rank's copy see?
#
# * The bias of a row layer is added after the reduce-scatter.
# * Positions are added after the embedding's reduce-scatter.
# * `q_layernorm` and `k_layernorm` (Qwen3) norm each head after the column layer, all heads with the same weight.
#
# Names look like these: `embedding.word_embeddings.weight`, `embedding.position_embeddings.weight`,
# `layers.0.input_layernorm.weight`, `layers.0.self_attention.linear_qkv.bias`,
# `layers.0.self_attention.q_layernorm.weight`, `layers.0.self_attention.linear_proj.bias`,
# `layers.0.pre_mlp_layernorm.bias`, `layers.0.mlp.linear_fc1.weight`, `final_layernorm.weight`.
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
# Now count the wrong gradients. The package's model runs with sequence parallelism, your pair inside its MLPs. The cell
# compares its gradients with the serial twin's twice: as they are after `backward()`, and with those that you named
# summed over ranks.

# %% jupyter={"source_hidden": true}
# %%ranks 2 --needs sequence_pair,partial_gradients --name sequence
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exercises.partial_gradients import partial_gradients
from exercises.sequence_pair import gather_sequence, reduce_scatter_sequence

from course.lab02.twins import departing, gradients, replicas_agree
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.mlp import MLP
from minimegatron.models.decoder import build_model
from minimegatron.models.gpt_layer_specs import decoder_layer_spec
from minimegatron.models.spec import ModuleSpec
from minimegatron.models.families import family_config

config = family_config(
    "gpt2", num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=256, qk_layernorm=True,
    max_position_embeddings=128,
)


class MySequenceMLP(MLP):
    def forward(self, x):
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        y = self.activation(F.linear(gather_sequence(x, fc1.tp), fc1.weight, fc1.bias))
        return reduce_scatter_sequence(F.linear(y, fc2.weight), fc2.tp) + fc2.bias


ids = torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(0))
spec = decoder_layer_spec(config).with_submodule("mlp", ModuleSpec(MySequenceMLP))
mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True))
model, twin = build_model(config, mesh, 1, spec), build_model(config, Mesh.serial(), 1)
for m in (model, twin):
    m(ids[:, :-1], labels=ids[:, 1:]).mean().backward()
serial = gradients(twin)


def compare(title):
    off = departing(gradients(model, mesh), serial)
    print(f"{title:17} wrong gradients: {len(off):2} of {len(serial)}   replicas agree: {replicas_agree(model)}")


compare("after backward:")
params = dict(model.named_parameters())
for name in partial_gradients(list(params), sequence_parallel=True):
    dist.all_reduce(params[name].grad)
compare("your sums added:")

# %% [markdown]
# Your list has 23 names here, and 21 gradients were wrong. The two others are the biases of `k_layernorm`. A bias adds
# the same vector to all keys, which adds the same number to all scores of a query. Softmax does not change then, so the
# gradient of this bias is 0 on every rank.
#
# The loss of the first step is right with and without the sums. Only the gradients show the mistake.
#
# **End of part C.** A good place to stop.

# %% [markdown]
# # Part D · Look, break, explain
#
# ## 5 · See
#
# ### Bytes: predicted and counted
#
# One layer, forward and backward, on four ranks: the package's layers, then yours, then the package's with sequence
# parallelism, and with recompute. A witness writes down every collective that the layer asks for, and how large its
# tensor is. Its bytes follow from the rule of the ring in section 2.

# %% jupyter={"source_hidden": true}
# %%ranks 4 --needs bytes_per_layer,column_linear,row_linear,attention,embedding,cross_entropy --name volume --out moved
import torch
from exercises.bytes_per_layer import bytes_per_layer
from my_layers import MyAttention, MyMLP

from labkit.evidence import Witness
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.attention.self_attention import AttentionContext
from minimegatron.models.decoder import build_model
from minimegatron.models.gpt_layer_specs import decoder_layer_spec
from minimegatron.models.spec import ModuleSpec
from minimegatron.models.families import family_config

s, b, h, t = 64, 2, 64, 4
options = {
    "none": {},
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "full": {"recompute_granularity": "full"},
}
rows = {}


def asked(evidence, sp):
    """Collectives in the order in which they began."""
    events = sorted((e for e in evidence.events if e.kind == "comm"), key=lambda e: e.start)
    return events if sp else evidence.calls


def yours(config):
    mine = decoder_layer_spec(config).with_submodule("mlp", ModuleSpec(MyMLP))
    return mine.with_submodule("self_attention", ModuleSpec(MyAttention))


for name, sp, spec, again in (
    ("tp", False, None, "none"),
    ("tp, your layers", False, yours, "none"),
    ("tp and sp", True, None, "none"),
    ("tp, full", False, None, "full"),
    ("tp and sp, mlp", True, None, "mlp"),
    ("tp and sp, full", True, None, "full"),
):
    config = family_config(
        "gpt2", num_layers=1, hidden_size=h, num_attention_heads=4, vocab_size=256, **options[again]
    )
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=t, sequence_parallel=sp))
    block = build_model(config, mesh, 1, spec and spec(config)).decoder
    x = torch.randn(s // t if sp else s, b, h, requires_grad=True)
    with Witness(rank) as forward:
        y = block(x, AttentionContext())
    with Witness(rank) as backward:
        y.sum().backward()
    seen = [(c, back) for back, w in enumerate((forward, backward)) for c in asked(w.evidence(), sp)]
    messages = [(c.name, c.nbytes * (t - 1) / t * (2 if c.name == "all_reduce" else 1), bool(back)) for c, back in seen]
    rows[name] = (float(bytes_per_layer(s, b, h, t, 4, sp, again)), messages)
    counted = sum(sent for _, sent, _ in messages)
    print(f"{name:15}  predicted {rows[name][0] / 1024:.0f} KiB  counted {counted / 1024:.0f} KiB")
report(rows)

# %%
# %%needs bytes_per_layer column_linear row_linear attention embedding cross_entropy
from course.figures.tensor_parallel import Message, strips

def drawn(messages):
    """In the backward pass of a column layer x is gathered again, after dz and before dx leaves."""
    kinds = [None, *(kind for kind, _, _ in messages), None]
    row = ["all_gather", "all_gather", "reduce_scatter"]
    return [Message(*one, again=kinds[i : i + 3] == row) for i, one in enumerate(messages)]


programs = {name: drawn(messages) for name, (_, messages) in moved[0].items()}
strips(programs, {name: row[0] for name, row in moved[0].items()}, title="What one rank sends for one layer, in KiB")

# %% [markdown]
# A box is a message, as wide as its bytes. The dashed all-gathers are those for dW: in the backward pass x is gathered
# again, once for each column layer.
#
# With `full` the backward pass begins with the second run, and the arrow behind `fc2` is not in it. The backward pass of
# `fc2` needs its input and its weight, and a residual needs nothing. PyTorch's `checkpoint` stops there. With dropout
# behind `fc2` its mask is needed, so this sum is made twice as well: 12 in place of 10 with tensor parallelism, 14 in
# place of 13 with both. Megatron's own checkpoint function always runs to the end.
#
# ### Memory: predicted and measured
#
# Autograd tells what it keeps: with `saved_tensors_hooks` a function sees every tensor that is saved for the backward
# pass. `kept_sizes` counts each piece of memory once and leaves the parameters out. That gives the activation bytes of
# a layer, to the byte.
#
# The published formula is for 16 bits, dropout, and stored attention scores. This model differs in three ways:
#
# * **fp32**: 4 bytes where the paper has 2;
# * **no dropout**: two masks of 1 byte an element are not there;
# * **SDPA** (flash attention) computes the scores again in the backward pass, so the term `5·a·s/h` is gone; it keeps
#   one number per head and token.
#
# So take the value of your function for a = 0, subtract the two masks, and double the rest. The masks take `2·s·b·h`
# bytes; with sequence parallelism, `2·s·b·h/t`. To this the cell adds the "statistics": the norms keep a mean and a
# deviation for each token, and SDPA keeps its number.

# %%
# %%ranks 4 --needs activation_bytes --name memory --out kept
import torch
from exercises.activation_bytes import activation_bytes

from course.lab02.fastest import kept_sizes
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.attention.self_attention import AttentionContext
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config

s, b, h, a = 128, 2, 64, 4
config = family_config("gpt2", num_layers=1, hidden_size=h, num_attention_heads=a, vocab_size=256)
rows = {}
for t, sp in ((1, False), (2, False), (2, True), (4, False), (4, True)):
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=t, sequence_parallel=sp))
    cut = t if sp else 1
    layer = build_model(config, mesh, 1).decoder.layers["0"]
    sizes = kept_sizes(layer, torch.randn(s // cut, b, h, requires_grad=True), AttentionContext())
    predicted = 2 * (float(activation_bytes(s, b, h, 0, t, sp)) - 2 * s * b * h / cut)
    statistics = 4 * (4 * s * b / cut + s * b * a / t)  # mean and deviation of two norms; a number per head of SDPA
    name = f"tp {t}{' and sp' if sp else ''}" if t > 1 else "one rank"
    rows[name] = (predicted + statistics, sizes)
    exact = "  equal" if sum(sizes) == predicted + statistics else "  not equal"
    print(f"{name:12} predicted {predicted:7.0f} + statistics {statistics:4.0f}", f"  measured {sum(sizes):7}", exact)
report(rows)

# %%
# %%needs activation_bytes
from minimegatron.viz.bars import stacked

alone = kept[0]["one rank"][1]
whole = [now == before for now, before in zip(kept[0]["tp 4"][1], alone)]  # as large on one of 4 ranks as alone
parts = ("divided by sp only: whole with tp alone", "divided by tp")
bars = {
    name: {part: sum(n for n, w in zip(sizes, whole) if w == (part == parts[0])) / 1024 for part in parts}
    for name, (_, sizes) in kept[0].items()
}
predicted = {name: row[0] / 1024 for name, row in kept[0].items()}
title = "Activations of one layer, kept by one rank"
stacked(bars, predicted=predicted, whole=parts[0], title=title, what="KiB kept by one rank")

# %% [markdown]
# The hatched part is why doubling tp alone helps less each time: four tensors of `s·b·h` stay whole on every rank.
# Sequence parallelism divides them, too.
#
# For GPT-3 in 16 bits, by your formula, with stored scores (as in the paper) and without (flash attention):

# %%
# %%needs activation_bytes
from minimegatron.viz.curves import over_degrees

degrees = [1, 2, 4, 8, 16]
over_degrees(
    degrees,
    {
        f"{'tp and sp' if sp else 'tp'}, {'scores stored' if a else 'flash'}": [
            activation_bytes(2048, 1, 12288, a, t, sp) / 1e9 for t in degrees
        ]
        for a in (96, 0)
        for sp in (False, True)
    },
    title="One layer of GPT-3: activations on one rank",
    what="GB",
)

# %% [markdown]
# With stored scores, in bytes per `s·b·h`, eight ranks with tensor parallelism keep 23 of 114: 13 for what was divided
# by 8, and 10 that tensor parallelism cannot divide.

# %% [markdown]
# ### Hide the messages
#
# The backward pass of a column layer makes two products:
#
# $$dx = \sum_\text{ranks} dy\,W \qquad\qquad dW = dy^T x$$
#
# With tensor parallelism alone one message is needed, the all-reduce of dx, and dW needs neither dx nor the sum. So
# Megatron makes dx first, starts its all-reduce, and makes dW while the sum is under way.
#
# With sequence parallelism there are two messages. A rank has kept only its own tokens of x, so x must be gathered
# again. And dx is reduce-scattered: of the sum each rank gets its tokens. In which order do you start the messages and
# make the products, so that *each* message is under way while a whole product is made?
#
# **Exercise.** The backward pass with sequence parallelism. The check wants one gather and one reduce-scatter, each
# under way while this rank makes as many multiply-adds as dx has. With `async_op=True` a collective of
# `torch.distributed` returns a handle at once; its result is there after `handle.wait()`.

# %%
# %%exercise column_backward
import torch
import torch.distributed as dist


def column_backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, tp) -> tuple[torch.Tensor, torch.Tensor]:
    """dy [s, b, o/t], x [s/t, b, i], weight [o/t, i] -> dx [s/t, b, i], this rank's tokens of the sum; dW [o/t, i]."""
    ### BEGIN SOLUTION
    whole, dx = x.new_empty(dy.shape[0], *x.shape[1:]), x.new_empty(x.shape)
    arriving = dist.all_gather_into_tensor(whole, x.contiguous(), group=tp.group, async_op=True)
    partial = dy @ weight
    arriving.wait()
    leaving = dist.reduce_scatter_tensor(dx, partial, group=tp.group, async_op=True)
    dw = dy.flatten(0, 1).t() @ whole.flatten(0, 1)
    leaving.wait()
    return dx, dw
    ### END SOLUTION


# %%
check("column_backward")

# %% [markdown]
# The picture shows your version below one that waits at once. Each way runs five times, in turn; the fastest run of
# each is drawn, on the same axis. A message is drawn from its start until the rank has waited for it.

# %%
# %%ranks 2 --needs column_backward --name overlap --out timelines
import dataclasses

import torch
import torch.distributed as dist
from exercises.column_backward import column_backward

from course.lab02.fastest import best_of
from minimegatron.comm.mesh import Axis

tp = Axis("tp", (0, 1), rank, dist.group.WORLD)
dy, x, weight = torch.randn(1024, 1, 640), torch.randn(512, 1, 1024), torch.randn(640, 1024)


def waiting_at_once(dy, x, weight, tp):
    whole, dx = torch.empty(1024, 1, 1024), torch.empty_like(x)
    dist.all_gather_into_tensor(whole, x)
    dist.reduce_scatter_tensor(dx, dy @ weight)
    return dx, dy.flatten(0, 1).t() @ whole.flatten(0, 1)


ways = {"wait at once": waiting_at_once, "yours": column_backward}
products = {1024 * 1024: "dx", weight.numel(): "dW"}
messages = {"all_gather": "gather of x", "reduce_scatter": "sum of dx"}
best = best_of(ways, (dy, x, weight, tp), rank, names=products, messages=messages)
report({way: [dataclasses.astuple(event) for event in events] for way, events in best.items()})

# %%
# %%needs column_backward
from minimegatron.trace import Event
from minimegatron.viz.timeline import beside

beside({way: [Event(*e) for says in timelines for e in says[way]] for way in timelines[0]})

# %% [markdown]
# On a CPU a message takes the same cores as the product. So you see the overlap and hardly a gain: a product lasts longer
# while a message is under way, and the whole may last as long as with waiting, or longer. Read the order here, not the
# lengths. On GPUs a message takes only a few of the processors. There an order in your program is not yet an order on the GPU: the message must
# get its processors *before* the product takes all of them. Megatron asks for `CUDA_DEVICE_MAX_CONNECTIONS=1` on GPUs
# before Blackwell: kernels then start in the order of the program. Forget it, and the overlap is gone from the profile.
# The forward pass has no second product to hide behind; there one cuts the product itself into pieces, each of which
# travels while the next is made (`--tp-comm-overlap`; async TP in PyTorch).
#
# With two GPUs or more, the next two cells measure how fast one MLP is on 1, 2, 4 …
# GPUs, with this overlap in its column layer, and plot it. With fewer they do nothing.

# %% jupyter={"source_hidden": true}
# %%torchrun --gpus 2 --name speed --out speed
import time

import torch
from minimegatron.launch.rank import finish, init, report
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.mlp import MLP
from minimegatron.models.families import family_config

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
from minimegatron.viz.curves import over_degrees

if speed:
    degrees, seconds = zip(*speed.reports[0])
    curves = {"measured": [seconds[0] / s for s in seconds], "ideal": degrees}
    display(over_degrees(degrees, curves, title="One MLP, h = 8192, forward and backward", what="times as fast"))

# %% [markdown]
# ## 6 · Break it
#
# A colleague wrote the following initialisation. Its comment gives the reason: replicated parameters must be equal on
# all ranks, so every rank uses the same seed. The run starts, and the loss falls.

# %%
# %%ranks 1 --name careless
import zlib

import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.layers.param import layout_of
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config

config = family_config(
    "gpt2", num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=256, max_position_embeddings=128
)


def careless(name, layout):
    """Every rank uses the same seed, so that replicas are equal."""
    g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(layout.local_shape, generator=g) * 0.1


def model_from(mesh, initial):
    """A model whose matrices are what `initial(name, layout)` returns."""
    model = build_model(config, mesh, seed=1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p.copy_(initial(name, layout_of(p)))
    return model


if __name__ == "__main__":
    print("parameters:", sum(p.numel() for p in model_from(Mesh.serial(), careless).parameters()))

# %% [markdown]
# This cell holds the batches. The next one trains the model for 60 steps on two ranks.

# %%
# %%ranks 1 --name batches
import torch


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


# %%
# %%ranks 2 --name suspect --out suspected
from batches import loss_of
from careless import careless, model_from

from course.lab02.twins import train
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig

model = model_from(Mesh.build(ParallelConfig(tensor_model_parallel_size=2)), careless)
parallel = train(model, lambda step: loss_of(model, step), steps=60)
print("the loss falls:", parallel[-1] < parallel[0] - 0.5)
report(parallel)

# %%
from minimegatron.viz.curves import losses

losses({"tp 2": suspected[0]}, title="Would you stop this run?")

# %% [markdown]
# The curve looks healthy. Suppose you suspect tensor parallelism all the same. What would you compare with what, to
# find out? Write down two comparisons before you run the next cell.

# %% tags=["hide-output"]
# %%ranks 2 --name evidence_found --out careless_shards
from batches import loss_of
from careless import careless, model_from

from course.lab02.twins import equal_shards, gradients, norm, shards_of, train
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig


def first_step(mesh):
    model = model_from(mesh, careless)
    loss = loss_of(model, 0)
    loss.backward()
    return model, loss.item(), norm(gradients(model, mesh))


mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=2))
model, loss, size = first_step(mesh)
_, twin_loss, twin_size = first_step(Mesh.serial())
print(f"loss           tp 2 {loss:.3f}   serial {twin_loss:.3f}")
print(f"gradient norm  tp 2 {size:.3f}   serial {twin_size:.3f}")
print("matrices whose two shards are equal:   ", equal_shards(model, mesh, lambda p: p))
print("whose shards have equal gradients:     ", equal_shards(model, mesh, lambda p: p.grad))
train(model, lambda step: loss_of(model, step), steps=60)
print("whose shards are equal after 60 steps: ", equal_shards(model, mesh, lambda p: p))
fc1 = model.decoder.layers["0"].mlp.linear_fc1.weight
report([part[:10, :20].tolist() for part in shards_of(fc1, mesh, lambda p: p)])

# %% [markdown]
# The cell makes three comparisons: the loss and the gradient norm of the first step, each with the serial twin's, and
# the shards of the two ranks with each other. The loss differs from the twin's, so this is another model; the gradient
# norm differs as well. The shards say why: both ranks hold *the same* half of every matrix that is cut. The heads of
# rank 1 are copies of the heads of rank 0, and so are the features of the MLP.
#
# Equal weights get equal gradients, so they stay equal in every step: each column and row layer does the work of
# half its width and costs all of it. Only the halves of the embedding become different, because each rank owns other
# words. A check of replicas finds nothing, because no *replicated* parameter is wrong.
#
# **Exercise.** Repair it: return this rank's part of an initial matrix, such that the parts of all ranks, put together,
# are the serial matrix *for every number of ranks*. The serial matrix is `torch.randn(*shape) * std` from a generator
# with `seed`. A matrix that is replicated (`dim` is None) is whole on every rank.

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
# %%ranks 2 --needs initial_part --name repaired --out repaired
import zlib

from batches import loss_of
from careless import model_from
from exercises.initial_part import initial_part

from course.lab02.twins import equal_shards, gradients, norm, shards_of, train
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig


def first_step(mesh):
    def careful(name, layout):
        return initial_part(list(layout.shape), layout.dim, mesh.tp.rank, mesh.tp.size, zlib.crc32(name.encode()), 0.1)

    model = model_from(mesh, careful)
    loss = loss_of(model, 0)
    loss.backward()
    return model, loss.item(), norm(gradients(model, mesh))


mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=2))
model, loss, size = first_step(mesh)
_, twin_loss, twin_size = first_step(Mesh.serial())
print(f"loss           tp 2 {loss:.3f}   serial {twin_loss:.3f}")
print(f"gradient norm  tp 2 {size:.3f}   serial {twin_size:.3f}")
print("equal to 5 digits:", abs(size / twin_size - 1) < 1e-5)
curve = train(model, lambda step: loss_of(model, step), steps=60)
print("matrices whose shards are equal after 60 steps:", equal_shards(model, mesh, lambda p: p))
fc1 = model.decoder.layers["0"].mlp.linear_fc1.weight
report({"curve": curve, "shards": [part[:10, :20].tolist() for part in shards_of(fc1, mesh, lambda p: p)]})

# %%
# %%needs initial_part
from minimegatron.viz.curves import losses
from course.figures.tensor_parallel import shards

halves = {"same seed on every rank": careless_shards[0], "repaired": repaired[0]["shards"]}
display(shards(halves, title="The first rows of fc1 on each of two ranks, after 60 steps"))
curves = {"same seed on every rank": suspected[0], "repaired": repaired[0]["curve"]}
wrong, right = (curve[-1] for curve in curves.values())
print("the two losses end within a tenth of each other:", abs(wrong / right - 1) < 0.1)
losses(curves, title="Two ranks, 60 steps")

# %% [markdown]
# A field is a weight, yellow the largest and blue the smallest. On the left the two ranks hold the same numbers, on the
# right they do not. On this small task the wrong model ends close to the repaired one; which of the two ends lower
# depends on the seed. So a loss curve alone cannot show the mistake; the comparison with the serial twin can.
#
# Would it help to add the rank to the seed? The shards would differ, but the model would still depend on tp, and the
# twin would still disagree. Megatron-LM does add the rank, so its initial weights depend on tp; with
# `--use-cpu-initialization` it cuts the serial matrix, as you did.

# %% [markdown]
# ## 7 · Explain
#
# Say your answer aloud before you open the one here.
#
# 1. *Why is there no communication between fc1 and fc2?*
#    <details><summary>answer</summary>The activation is elementwise, and fc2 needs exactly the features that fc1 left
#    on this rank.</details>
# 2. *Could you cut row first, then column?*
#    <details><summary>answer</summary>Yes, with two messages in place of one. The partial sums must be added before the
#    activation, because GELU(u + v) is not GELU(u) + GELU(v); and what leaves the column layer must be
#    gathered.</details>
# 3. *GQA has 2 key/value heads, tp is 8. What does a rank hold?*
#    <details><summary>answer</summary>An eighth of the packed rows. Here the ranks gather the packed <i>output</i>, and
#    each picks its queries and its one key/value head. Other systems keep copies of the key/value rows on several
#    ranks; then the gradients of the copies must be summed.</details>
# 4. *Why is tp kept inside one machine?*
#    <details><summary>answer</summary>It communicates four times a layer, and the next product waits for each message.
#    The links inside a machine are the fastest. How much this is in seconds, you compute below.</details>
# 5. *What does sequence parallelism cost?*
#    <details><summary>answer</summary>Two more all-gathers a layer: a rank sends 10·s·b·h·(t-1)/t elements instead of
#    8·s·b·h·(t-1)/t. And, once a step, the sum of the partial gradients of norms and row biases.</details>
# 6. *When does ZeRO-3 send less than tp?*
#    <details><summary>answer</summary>When there are many tokens in a step: ZeRO-3 moves weights, tp moves
#    activations.</details>
# 7. *A model has dropout, and all ranks seed torch alike. Which masks are right over tp, and which are not?*
#    <details><summary>answer</summary>With tensor parallelism alone those after a row layer and after the embedding are
#    right: every rank has the same tensor there and must drop the same elements. Those of the attention weights are not:
#    the ranks have other heads, and all drop the same pattern. With sequence parallelism the others are wrong, too: the
#    ranks have other tokens there. And if each rank had a seed of its own? Then the tensors that should be the same drift
#    apart between ranks, and no error is raised. So Megatron keeps two random streams, one that is the same on all ranks
#    of tp and one that is not (<code>CudaRNGStatesTracker</code>; here <code>layers/dropout.py</code>).</details>
#
# **Exercise.** The questions with a number, for any model. Return a dict:
#
# * `query_heads`: the query heads of this rank, in order, with their numbers in the whole model;
# * `kv_heads`: the key/value heads that they use, each once, in order, with their numbers in the whole model;
# * `gate_up_rows`: the ranges `[start, stop]` of rows of the stacked `[gate; up]` matrix, `[2·ffn, h]`, that this rank
#   holds; `stop` is not held, as in Python;
# * `all_reduces_forward`: how many all-reduces of `s·b·h` a forward pass makes, embedding included, loss not;
# * `logits_over_three`: the bytes of an all-gather of the logits `[s, b, V]`, divided by those of all-reducing three
#   numbers a token (both as rings, with the same bytes an element);
# * `zero3_sends_less_from`: the smallest number of tokens `b·s` with which ZeRO-3 sends *less* than tp. (With one token
#   less, both may send the same.) `b·s` counts the tokens of all t ranks together. A layer has `12·h²` weights; ZeRO-3
#   gathers them twice and reduce-scatters their gradients once; tp sends `8·b·s·h`. Count elements, and leave
#   `(t-1)/t` out on both sides;
# * `travel_over_compute`: seconds in which a rank sends its messages of one layer, over seconds in which it makes its
#   products, forward and backward, nothing hidden. Tensor parallelism alone, in bf16, a layer of `12·h²` weights;
#   `flops` operations and `bandwidth` bytes a second. A multiply-add is two operations, and the backward pass makes two
#   products for each of the forward pass. Scores of attention are left out.

# %%
# %%exercise answers
def answers(
    heads: int, groups: int, ffn: int, tp: int, rank: int, layers: int, hidden: int, vocab: int, flops: float,
    bandwidth: float,
) -> dict[str, object]:
    """{"query_heads": [...], "kv_heads": [...], "gate_up_rows": [[...], ...], "all_reduces_forward": ..., ...}"""
    ### BEGIN SOLUTION
    queries = list(range(rank * heads // tp, (rank + 1) * heads // tp))
    return {
        "query_heads": queries,
        "kv_heads": sorted({q // (heads // groups) for q in queries}),
        "gate_up_rows": [[half + rank * ffn // tp, half + (rank + 1) * ffn // tp] for half in (0, ffn)],
        "all_reduces_forward": 2 * layers + 1,
        "logits_over_three": vocab / (2 * 3),
        "zero3_sends_less_from": 3 * 12 * hidden**2 // (8 * hidden) + 1,
        "travel_over_compute": (8 * hidden * (tp - 1) / tp * 2 / bandwidth) / (6 * 12 * hidden**2 / tp / flops),
    }
    ### END SOLUTION


# %%
check("answers")

# %% [markdown]
# For a GPT layer with h = 8192, both send the same with 36,864 tokens, and ZeRO-3 sends less from 36,865 on.
#
# ### When tp stops paying
#
# GPUs of 400 TFLOP/s, 8 in a machine. Inside a machine each sends 450 GB/s over NVLink, between machines 50 GB/s. Take
# h = 8192 and 16 GPUs: two machines.

# %%
guess("network", None, "h = 8192, tp 16 over two machines: how many seconds of messages for a second of products?")

# %%
# %%needs answers
from minimegatron.viz.curves import over_degrees


def travel(h, t):
    """Seconds of messages for a second of products; a ring over two machines is as slow as the network."""
    bandwidth = 450e9 if t <= 8 else 50e9
    return answers(h // 128, h // 128, 4 * h, t, 0, 1, h, 51200, 400e12, bandwidth)["travel_over_compute"]


guessed("network", round(travel(8192, 16), 1), "seconds of messages for a second of products")
for h in (2048, 8192, 16384):
    said = "   ".join(f"tp {t}: {travel(h, t):.2f}" for t in (2, 4, 8, 16))
    print(f"h {h:5}, messages over products   {said}")
degrees = [1, 2, 4, 8, 16]
faster = {f"h = {h}": [t / (1 + travel(h, t)) for t in degrees] for h in (2048, 8192, 16384)}
over_degrees(degrees, {**faster, "ideal": degrees}, title="A layer over tp, nothing hidden", what="times as fast")

# %% [markdown]
# Tokens cancel: a longer batch does not help. The ratio grows with t - 1 and falls with h. At h = 2048 eight ranks
# spend 0.68 seconds on messages for each second of products: so small models use little tp. And sixteen ranks
# are slower than eight with each of these h. (`column_backward` hides a part of this. The smaller products of a rank
# reach fewer TFLOP/s, which is not counted here.)
#
# ### Your first guess
#
# On four ranks with tensor parallelism alone, by the measurement of section 5:

# %%
# %%needs activation_bytes
alone, cut = (sum(kept[0][name][1]) for name in ("one rank", "tp 4"))
guessed("kept", round(100 * cut / alone, 1), "percent of the activations")

# %% [markdown]
# Four tensors of `s·b·h` and the statistics of the norms stay whole on every rank: 25.2 percent. All else takes 74.8
# percent on one rank and a quarter of this, 18.7 percent, on each of four. With dropout or stored scores the shares are
# others.

# %%
progress()

# %% [markdown]
# ## Where this lives
#
# | in minimegatron | in Megatron-LM |
# |---|---|
# | column and row: `layers/linear.py` | `core/tensor_parallel/layers.py` |
# | f, g and the sequence pair: `comm/collectives.py` | `core/tensor_parallel/mappings.py` |
# | overlap: `layers/linear.py`, `LinearFunction` | `LinearWithGradAccumulationAndAsyncCommunication`, in the same file |
# | heads and packed QKV: `layers/attention/self_attention.py` | `core/transformer/attention.py` |
# | gate and up: `layers/mlp.py` | `core/transformer/mlp.py` |
# | vocabulary, embedding: `layers/embedding.py` | `VocabParallelEmbedding` in `core/tensor_parallel/layers.py` |
# | vocabulary, loss: `layers/loss.py` | `core/tensor_parallel/cross_entropy.py` |
# | partial gradients: `layers/param.py`, `parallel/data/finalize.py` | `core/distributed/finalize_model_grads.py` |
# | initial values: `layers/logical.py` | `core/tensor_parallel/random.py` |
# | masks of dropout: `layers/dropout.py` | `CudaRNGStatesTracker` in `core/tensor_parallel/random.py` |
#
# What you built, as one sets it at work:
#
# | Megatron-LM | PyTorch, `torch.distributed.tensor.parallel` |
# |---|---|
# | `--tensor-model-parallel-size` | `parallelize_module(model, mesh, plan)` |
# | column and row layers, f and g inside | `ColwiseParallel`, `RowwiseParallel` in the plan |
# | `--sequence-parallel` | `SequenceParallel` for norms; `PrepareModuleInput` for the gather |
# | the cut loss, always on with tp | `loss_parallel()`, around the loss and its backward pass |
# | `--tp-comm-overlap` | `torch._inductor.config._micro_pipeline_tp` with `torch.compile` |
#
# Shoeybi et al. 2019 (arXiv 1909.08053); Korthikanti et al. 2022 (arXiv 2205.05198); PaLM: Chowdhery et al. 2022 (arXiv
# 2204.02311).
#
# Next: lab 03, pipelines, which give each rank whole layers.

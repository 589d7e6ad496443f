# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Lab 05 · Mixture of experts, expert parallelism
#
# So far every token met every weight, and ranks differed in which part of them they held. Now a token meets a few
# weights of many, and which ones is learned. The weights stay where they are. The tokens travel. You build the router,
# what keeps it even, and the journey there and back, and put them into a GPT.

# %%
# %load_ext course
# %lab 05_moe_ep

# %% [markdown]
# ## 1 · The problem
#
# What a model knows is in its parameters. What a token costs is the arithmetic with them. An ordinary model uses all
# of its parameters for every token, so the two grow together. A **mixture of experts** replaces each MLP by E of them,
# the *experts*, and sends a token through k.

# %%
import matplotlib.pyplot as plt

from minimegatron.config import TransformerConfig
from minimegatron.models.zoo import count_parameters, preset

names = ["llama3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3"]
configs = {name: TransformerConfig.from_dict(preset(name)) for name in names}
total = {name: count_parameters(config) / 1e9 for name, config in configs.items()}
active = {name: count_parameters(config, active=True) / 1e9 for name, config in configs.items()}

fig, ax = plt.subplots(figsize=(7, 2.6))
ax.barh(names, total.values(), color="0.85", edgecolor="black", label="parameters")
ax.barh(names, active.values(), color="0.3", edgecolor="black", label="that a token uses")
for i, name in enumerate(names):
    ax.text(total[name] + 8, i, f"{active[name]:.0f} of {total[name]:.0f}", va="center")
ax.set(xlabel="billions", xlim=(0, 780), title="What a model holds, and what a token uses")
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
ax.legend(loc="upper right")
plt.show()
print(f"deepseek-v3: a token uses {active['deepseek-v3'] / total['deepseek-v3']:.1%} of the parameters;")
print(f"the weights alone, in bf16, fill {total['deepseek-v3'] * 2 / 80:.0f} GPUs of 80 GB")

# %% [markdown]
# (Both tables of embeddings are counted, all rows of both.) So the arithmetic of a small model needs the memory of a large cluster.
# Cutting every matrix over that many ranks would leave slivers: an expert of DeepSeek-V3 is only 2048 wide. But experts
# have nothing to do with each other. **Expert parallelism** gives each of P ranks E/P whole experts. The price: a token
# must go where its experts are.
#
# Below, twelve tokens choose two of eight experts each; the experts live on four ranks. A square is a *row*: one token
# on its way to one expert.

# %%
import torch

from minimegatron.viz.experts import routing_grid


def some_routing(tokens, experts, k, favour=0.0, seed=0):
    """Made-up logits, with one expert that everybody likes, if you want."""
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))
    logits[:, 2] += favour
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, logits.topk(k).indices, True)


even, skewed = some_routing(12, 8, 2), some_routing(12, 8, 2, favour=2.5)
routing_grid({"a fair router": even.tolist(), "one with a favourite": skewed.tolist()}, ranks=4)

# %% [markdown]
# Three things make this hard, and they are this lab:
#
# * **Who goes where is known only at run time.** Message sizes change at every layer of every step.
# * **Nothing in the loss wants the load to be even.** On the right, rank 1 works and the others wait.
# * **An expert sees tokens of all ranks.** So its gradient is summed over other ranks than all other gradients are.
#
# ## 2 · Predict
#
# ### Bytes
#
# Each of P ranks has T tokens, h wide. Two ways to bring rows to experts:
#
# | way | there | back |
# |---|---|---|
# | **all-to-all** | each of the k·T rows to the rank of its expert, with its weight (4 bytes) | each row |
# | **all-gather** | each token to all ranks, with E weights (4 bytes) and flags (1 byte) | reduce-scatter of [P·T, h] |
#
# **Exercise.** Bytes that *one rank* sends in the forward pass of one layer. The load is even: as many rows go to each
# rank. What is for yourself does not travel. An all-gather to which each rank gives n bytes
# sends (P-1)·n, and so does a reduce-scatter of which each rank keeps n. Two numbers are asked for, each of them there
# and back together.

# %%
# %%exercise bytes_per_layer
def bytes_per_layer(tokens: int, h: int, experts: int, k: int, ep: int, element_size: int) -> dict[str, float]:
    """{"alltoall": ..., "allgather": ...} for T tokens on each of ep ranks."""
    ### BEGIN SOLUTION
    row = h * element_size
    return {
        "alltoall": (ep - 1) / ep * k * tokens * (row + 4 + row),
        "allgather": (ep - 1) * tokens * (row + 5 * experts + row),
    }
    ### END SOLUTION


# %%
check("bytes_per_layer")

# %%
# %%needs bytes_per_layer
for name, ep in (("mixtral-8x7b", 2), ("mixtral-8x7b", 8), ("deepseek-v3", 8), ("deepseek-v3", 64)):
    c = configs[name]
    sent = bytes_per_layer(4096, c.hidden_size, c.num_experts, c.moe_router_topk, ep, 2)
    print(f"{name:13} k {c.moe_router_topk} ep {ep:2}:  all-to-all {sent['alltoall'] / 2**20:5.0f} MiB   "
          f"all-gather {sent['allgather'] / 2**20:6.0f} MiB")  # fmt: skip

# %% [markdown]
# The all-to-all sends k·T rows however many ranks there are. The all-gather grows with P. So the first wins as soon as
# k is smaller than P.
#
# ### Dropped tokens
#
# Messages of a size that nobody knows beforehand are a nuisance. The older way out is a **capacity**: an expert takes
# at most
#
# $$C = \lceil\, T k / E \cdot \text{factor} \,\rceil$$
#
# tokens of a rank. What is too much is *dropped*: the expert adds nothing for those tokens, the residual connection
# carries them past.
#
# How many is that with a *perfectly fair* router, to which all experts are alike? A token chooses k of E, so the number
# n of tokens that want an expert is binomial: T trials with probability k/E.
#
# **Exercise.** The capacity, and the expected share of the k·T rows that is dropped.

# %%
# %%exercise expected_drops
import math


def expected_drops(tokens: int, experts: int, k: int, factor: float) -> dict[str, float]:
    """{"capacity": C, "dropped": share of the rows} when each token takes k experts at random."""
    ### BEGIN SOLUTION
    p, mean = k / experts, tokens * k / experts
    capacity = math.ceil(mean * factor)
    over = 0.0
    for n in range(capacity + 1, tokens + 1):
        ways = math.lgamma(tokens + 1) - math.lgamma(n + 1) - math.lgamma(tokens - n + 1)
        over += (n - capacity) * math.exp(ways + n * math.log(p) + (tokens - n) * math.log(1 - p))
    return {"capacity": capacity, "dropped": over / mean}  # E experts drop `over` each, of k T = E mean rows
    ### END SOLUTION


# %%
check("expected_drops")

# %%
# %%needs expected_drops
for tokens in (64, 512):
    said = (f"{f}: {expected_drops(tokens, 8, 2, f)['dropped']:6.2%}" for f in (1.0, 1.25, 1.5, 2.0))
    print(f"{tokens:3} tokens, 2 of 8 experts, factor", "  ".join(said))

# %% [markdown]
# Even a fair router drops rows at factor 1: chance is not even. With more tokens it is more even, and little room is
# enough. Real routers are not fair. You will measure one below.
#
# ## 3 · Implement
#
# A token is a row of x, [T, h]. A routing is two tensors [T, E]: `probs`, the weight of each expert for each token, 0
# where it does not go; and `map`, bool, where it goes.
#
# ### The router
#
# One matrix, [E, h]. Its products with a token are logits; the k largest win; a softmax *over those k* gives their
# weights:
#
# $$y = \sum_{e\,\in\,\text{top-}k} p_e\, \text{expert}_e(x) \qquad
# p = \text{softmax}(\text{the } k \text{ largest logits})$$
#
# The choice itself has no gradient. What teaches the router are the weights: an expert that helped is turned up.
#
# The choice is a comparison, and a comparison has no tolerance. Models compute in bf16, whose numbers have eight
# binary digits, two to three decimal ones. So
# routers compute in fp32, the product included.
#
# **Exercise.** Weights in fp32, whatever x and weight are. A token goes to exactly k experts. Where several are equally
# good, as in a router whose weight is still zero, any k of the best will do.

# %%
# %%exercise route
import torch


def route(x: torch.Tensor, weight: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, h], weight [E, h] -> probs [T, E] in fp32, map [T, E] bool."""
    ### BEGIN SOLUTION
    logits = x.float() @ weight.float().T
    best = logits.topk(k, dim=-1)
    probs = torch.zeros_like(logits).scatter(1, best.indices, best.values.softmax(-1))
    return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, best.indices, True)
    ### END SOLUTION


# %%
check("route")

# %%
# %%needs route
g = torch.Generator().manual_seed(0)
x, weight = torch.randn(4096, 512, generator=g).bfloat16(), torch.randn(64, 512, generator=g).bfloat16()
_, right = route(x, weight, 8)
rounded = torch.zeros_like(right).scatter(1, (x @ weight.T).float().topk(8).indices, True)
moved = (right != rounded).any(-1).float().mean().item()
print(f"8 of 64 experts, logits rounded to bf16: more than one token in a hundred goes elsewhere: {moved > 0.01}")

# %% [markdown]
# Nothing crashes, and no loss tells. But a run that computes the forward pass again (recompute, or a rollout on another
# machine) may route a token otherwise the second time.
#
# ### The balancing loss
#
# An expert that is a little better gets more tokens, learns more, gets better. Nothing stops that. So one adds a
# penalty. With p the softmax over *all* experts and n_e the number of tokens that chose e:
#
# $$L = \text{coeff}\cdot\frac{E}{k\,T^2}\sum_e n_e \sum_x p_{xe}$$
#
# A count has no gradient; p has. Each expert gets a price, proportional to its load, and every token pays it in
# proportion to its liking. At an even load all prices are the same, and L = coeff.
#
# The gradient, by hand. With the price $c_e = \text{coeff}\, E\, n_e/(kT^2)$ we have $L = \sum_{xe} p_{xe} c_e$, and
# behind the softmax
#
# $$\frac{\partial L}{\partial\, \text{logit}_{xe}} = p_{xe}\,\Big(c_e - \sum_{j} p_{xj}\, c_j\Big)$$
#
# Read it: a logit goes down if its expert costs more than what this token pays on average.
#
# **Exercise.** The loss and its gradient, in the dtype of the logits. The check runs this where autograd records nothing,
# and compares with autograd on the definition.

# %%
# %%exercise balance
import torch


def balance(logits: torch.Tensor, k: int, coeff: float) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] -> the loss, a scalar, and its gradient [T, E]."""
    ### BEGIN SOLUTION
    tokens, experts = logits.shape
    p = logits.softmax(-1)
    counts = logits.topk(k, dim=-1).indices.flatten().bincount(minlength=experts)
    price = coeff * experts / (k * tokens**2) * counts
    paid = (p * price).sum(-1, keepdim=True)
    return paid.sum(), p * (price - paid)
    ### END SOLUTION


# %%
check("balance")

# %% [markdown]
# ### Balance without a loss
#
# The penalty pulls the router away from what the model wants. DeepSeek-V3 keeps only a very small one, within each
# sequence, and balances in another way: each expert has a **bias**. It
# is added to the score when experts are *chosen*, and not when they are *weighed*. After every step it moves by a fixed
# rate: up for an expert with fewer tokens than the mean, down for one with more. No gradient is involved.
#
# **Exercise.** Scores are positive here (sigmoid or softmax, made by the caller). The weights of a token are the scores
# of its k experts divided by their sum. Again there are exactly k, also where several are equally good.

# %%
# %%exercise expert_bias
import torch


def choose(scores: torch.Tensor, bias: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """scores [T, E], bias [E] -> probs [T, E], map [T, E] bool."""
    ### BEGIN SOLUTION
    map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, (scores + bias).topk(k, dim=-1).indices, True)
    kept = scores * map
    return kept / kept.sum(-1, keepdim=True), map
    ### END SOLUTION


def move_bias(bias: torch.Tensor, counts: torch.Tensor, rate: float) -> torch.Tensor:
    """bias [E] after a step in which counts [E] tokens chose each expert."""
    ### BEGIN SOLUTION
    counts = counts.float()
    return bias + rate * (counts.mean() - counts).sign()
    ### END SOLUTION


# %%
check("expert_bias")

# %% [markdown]
# ### Rows
#
# Experts want matrices. So every pair (expert, token) becomes a **row**, and the rows are sorted by expert, then by
# token: what goes to one expert lies in one piece. That is the *permutation*. Its way back adds each row to its token.
# Each is the other's gradient: copying k times forward is adding k times backward.
#
# **Exercise.** `weights[i]` is the weight of row i, `source[i]` (int64) its token. Use operations that autograd
# understands: tokens, probs and rows all get gradients. `map` says where a token goes; a weight there may come to 0.

# %%
# %%exercise permute
import torch


def permute(
    tokens: torch.Tensor, probs: torch.Tensor, map: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens [T, h], probs and map [T, E] -> rows [n, h], weights [n], source [n]."""
    ### BEGIN SOLUTION
    expert, source = map.T.nonzero(as_tuple=True)
    return tokens[source], probs[source, expert], source
    ### END SOLUTION


def unpermute(rows: torch.Tensor, source: torch.Tensor, tokens: int) -> torch.Tensor:
    """rows [n, h] -> [tokens, h], each row added to its token."""
    ### BEGIN SOLUTION
    return rows.new_zeros(tokens, rows.shape[1]).index_add(0, source, rows)
    ### END SOLUTION


# %%
check("permute")

# %% [markdown]
# ### The journey
#
# Rank r holds experts r·E/P up to (r+1)·E/P. Your rows are sorted by expert, so what goes to a rank lies in one piece,
# too. `counts[e]` is how many rows you have for expert e. Then:
#
# 1. **Counts first.** Nobody knows how much will come. Exchange counts: `blocks[i, e]` is how many rows rank i sends to
#    *your* e-th expert, [P, E/P].
# 2. **Rows.** `dist.all_to_all_single(out, rows, output_splits, input_splits, group=ep.group)`. The splits are lists of
#    numbers of rows, and may hold zeros.
# 3. **Regroup.** Rows arrive by sender: rank 0's rows for all of your experts, then rank 1's. An expert wants its own
#    in one piece. Sort the blocks by expert, then by sender.
#
# The way back is the mirror image: ungroup, all-to-all with the splits exchanged. A rank that gets nothing takes part
# in everything, with 0 rows. If it stayed away, the others would wait for ever.
#
# **Exercise.** Both ways. In `combine`, y has the shape and the order of what `dispatch` returned, and what you return
# has the order of your rows. `ep` is an axis of the mesh: `ep.size` ranks, of which this one is number `ep.rank`, talk in
# `ep.group`, which need not be the whole world. A rank may hold any number of experts. Layers overlap: the rows of one
# may be under way while another's are dispatched, so keep nothing between calls. `rows` may be a view of something
# larger; a collective wants a tensor that is contiguous.

# %%
# %%exercise dispatch
import torch
import torch.distributed as dist


def dispatch(rows: torch.Tensor, counts: torch.Tensor, ep) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [n, h] sorted by expert, counts [E] int64 -> rows for this rank's experts, sorted by expert; blocks."""
    ### BEGIN SOLUTION
    everybody = [torch.empty_like(counts) for _ in range(ep.size)]
    dist.all_gather(everybody, counts, group=ep.group)
    blocks = torch.stack(everybody).view(ep.size, ep.size, -1)[:, ep.rank]  # [sender, receiver, its experts]
    out = rows.new_empty(int(blocks.sum()), *rows.shape[1:])
    splits = blocks.sum(1).tolist(), counts.view(ep.size, -1).sum(1).tolist()
    dist.all_to_all_single(out, rows.contiguous(), *splits, group=ep.group)
    by_sender = out.split(blocks.flatten().tolist())
    local = blocks.shape[1]
    return torch.cat([by_sender[i * local + e] for e in range(local) for i in range(ep.size)]), blocks.contiguous()
    ### END SOLUTION


def combine(y: torch.Tensor, blocks: torch.Tensor, counts: torch.Tensor, ep) -> torch.Tensor:
    """y, what the experts made of the rows -> [n, h], in the order in which this rank's rows left it."""
    ### BEGIN SOLUTION
    by_expert = y.split(blocks.T.flatten().tolist())
    local = blocks.shape[1]
    by_sender = torch.cat([by_expert[e * ep.size + i] for i in range(ep.size) for e in range(local)])
    out = y.new_empty(int(counts.sum()), *y.shape[1:])
    splits = counts.view(ep.size, -1).sum(1).tolist(), blocks.sum(1).tolist()
    dist.all_to_all_single(out, by_sender, *splits, group=ep.group)
    return out
    ### END SOLUTION


# %%
check("dispatch")

# %% [markdown]
# ### Capacity
#
# What you have built so far is *dropless*: every row travels. With a capacity an expert keeps the C rows of a rank that
# weigh most.
#
# **Exercise.** Keep at most `capacity` tokens of each expert, the heaviest. Of tokens that weigh the same keep any; with
# k = 1 all weigh 1. The capacity may be larger than T. The weights of those that stay do not change.

# %%
# %%exercise limit
import torch


def limit(probs: torch.Tensor, map: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """probs and map [T, E] -> the same, less what is dropped."""
    ### BEGIN SOLUTION
    order = probs.masked_fill(~map, -1.0).argsort(dim=0, descending=True)
    kept = torch.zeros_like(map).scatter(0, order[:capacity], True) & map
    return probs * kept, kept
    ### END SOLUTION


# %%
check("limit")

# %%
# %%needs limit
probs = skewed * torch.rand(12, 8, generator=torch.Generator().manual_seed(3))
left = limit(probs, skewed, 4)[1].tolist()
both = {"dropless": skewed.tolist(), "capacity 4": skewed.tolist()}
display(routing_grid(both, ranks=4, kept={"capacity 4": left}))

# %% [markdown]
# ### Whose gradient is it?
#
# Four ranks, data parallel: dp = 4. With ep = 2, ranks 0 and 1 share the experts, and so do ranks 2 and 3. Rank 2 holds
# the same experts as rank 0. The ranks that hold the same experts are **edp**: [0, 2] and [1, 3].
#
# | parameters | this rank's gradient comes from | sum over |
# |---|---|---|
# | attention, norms, router, embedding | its own tokens | dp |
# | its experts | tokens of its whole ep group: the all-to-all's backward brought them | edp |
#
# The loss of a step is the sum over all tokens, divided by their number N, over *all* of dp. So both sums are divided
# by the same N. There is no factor ep, edp or dp left to get wrong, if you count tokens instead of ranks.
#
# **Exercise.** `dense` and `expert` are gradients of the *sum* of this rank's losses; `tokens` is how many tokens
# counted on this rank, and the ranks differ. `all_reduce(x, axis)` sums x over an axis, in place, and returns it; on an
# axis of one rank it does nothing. Nothing has to travel but what these sums need.

# %%
# %%exercise finish
import torch

from minimegatron.comm.collectives import all_reduce


def finish(
    dense: torch.Tensor, expert: torch.Tensor, tokens: int, dp, edp
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the mean loss of a token of the whole batch."""
    ### BEGIN SOLUTION
    every = all_reduce(torch.tensor(float(tokens)), dp)
    return all_reduce(dense.clone(), dp) / every, all_reduce(expert.clone(), edp) / every
    ### END SOLUTION


# %%
check("finish")

# %% [markdown]
# ## 4 · Run
#
# The package builds its layer with experts from a class that you can name. Here is one with your router and your
# dispatcher inside. The weights of the rows travel with them, and the experts apply them: then what comes back is
# finished, and no rank has to keep it for the backward pass.

# %%
# %%ranks 1 --needs route,permute,dispatch --name moe_parts
import torch
from exercises.dispatch import combine, dispatch
from exercises.permute import permute, unpermute
from exercises.route import route

from minimegatron.comm.collectives import all_reduce
from minimegatron.layers.dispatch import Dispatched
from minimegatron.layers.moe import MoELayer
from minimegatron.layers.param import layout_of
from minimegatron.layers.router import Routing, TopKRouter
from minimegatron.models.gpt_layer_specs import decoder_layer_spec
from minimegatron.models.spec import ModuleSpec


class There(torch.autograd.Function):
    """Rows to their experts; their gradient takes the way back."""

    @staticmethod
    def forward(ctx, rows, counts, ep):
        mine, blocks = dispatch(rows, counts, ep)
        ctx.way = blocks, counts, ep
        ctx.mark_non_differentiable(blocks)
        return mine, blocks

    @staticmethod
    def backward(ctx, dmine, _):
        return combine(dmine.contiguous(), *ctx.way), None, None


class Back(torch.autograd.Function):
    """Results to their tokens; their gradient takes the way there."""

    @staticmethod
    def forward(ctx, y, blocks, counts, ep):
        ctx.way = counts, ep
        return combine(y, blocks, counts, ep)

    @staticmethod
    def backward(ctx, dy):
        return dispatch(dy.contiguous(), *ctx.way)[0], None, None, None


class YourRouter(TopKRouter):
    def forward(self, x):
        return Routing(*route(x.flatten(0, 1), self.weight, self.k))


class YourDispatcher:
    def __init__(self, ep):
        self.ep = ep

    def dispatch(self, tokens, routing):
        rows, weights, source = permute(tokens, *routing)
        counts = routing.map.sum(0)
        rows, blocks = There.apply(rows, counts, self.ep)
        weights, _ = There.apply(weights[:, None], counts, self.ep)

        def back(y):
            return unpermute(Back.apply(y, blocks, counts, self.ep), source, len(tokens))

        sent = Dispatched(rows, weights[:, 0], blocks.sum(0).tolist(), back)
        return lambda: sent


class YourMoE(MoELayer):
    router_class = YourRouter

    def __init__(self, config, mesh, layer_number=0, rng=None):
        super().__init__(config, mesh, layer_number, rng)
        self.router = self.router_class(config, mesh, layer_number, rng)
        self.dispatcher = YourDispatcher(mesh.ep)


def layer_with(moe, config):
    """The package's layer with other experts."""
    return decoder_layer_spec(config).with_submodule("moe", ModuleSpec(moe))


def dense_and_experts(model):
    """The parameters in two lists."""
    return [[p for p in model.parameters() if (layout_of(p).experts is None) == dense] for dense in (True, False)]


def finish_model(finish, model, tokens, mesh):
    """Every gradient of the model as `finish` makes it."""
    groups = dense_and_experts(model)
    flat = [torch.cat([p.grad.flatten() for p in group]) for group in groups]
    for group, done in zip(groups, finish(*flat, tokens, mesh.dp, mesh.edp)):
        for p, grad in zip(group, done.split([p.numel() for p in group])):
            p.grad = grad.view_as(p)


def gradient_norm(model, mesh):
    """Over all parameters; experts are spread over ep."""
    dense, expert = (sum(p.grad.square().sum() for p in group) for group in dense_and_experts(model))
    return (dense + all_reduce(expert, mesh.ep)).sqrt().item()


def beside_twin(model, twin):
    """{name: (gradient, the twin's)}; of the experts that are here."""
    right = {name: p.grad for name, p in twin.named_parameters()}
    held = {name: layout_of(p).experts for name, p in model.named_parameters()}
    return {n: (p.grad.clone(), right[n][slice(*held[n])] if held[n] else right[n].clone())
            for n, p in model.named_parameters()}  # fmt: skip


if __name__ == "__main__":
    print("one layer:", YourMoE.__name__)

# %% [markdown]
# Now a small Mixtral on four ranks, each with samples of its own and another number of tokens that count. The serial
# twin is one process with the whole batch and all experts.

# %%
# %%ranks 4 --needs route,permute,dispatch,finish --name gpt
import torch
from exercises.finish import finish
from moe_parts import YourMoE, beside_twin, finish_model, gradient_norm, layer_with

from minimegatron.comm.collectives import all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.models.decoder import build_model
from minimegatron.models.zoo import family_config

s, b = 32, 2
config = family_config(
    "mixtral", num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=4, vocab_size=256,
    num_experts=8, moe_ffn_hidden_size=64, init_method_std=0.2,
)  # fmt: skip
ids = torch.randint(0, 256, (4 * b, s + 1), generator=torch.Generator().manual_seed(0))
counts = torch.zeros(4 * b, s)
for row in range(4 * b):
    counts[row, : s - 3 * row] = 1  # later samples are shorter


def summed_loss(model, rows):
    return (model(ids[rows, :-1], labels=ids[rows, 1:]) * counts[rows]).sum()


serial = Mesh.serial()
twin = build_model(config, serial, 1)
twin_loss = summed_loss(twin, slice(None)) / counts.sum()
twin_loss.backward()
print(f"serial twin  loss {twin_loss.item():.3f}   gradient norm {gradient_norm(twin, serial):.3f}")
for ep in (2, 4):
    mesh = Mesh.build(ParallelConfig(expert_model_parallel_size=ep))
    model = build_model(config, mesh, 1, layer_with(YourMoE, config))
    mine = slice(b * mesh.dp.rank, b * (mesh.dp.rank + 1))
    loss = summed_loss(model, mine)
    loss.backward()
    finish_model(finish, model, int(counts[mine].sum()), mesh)
    mean = all_reduce(loss.detach(), mesh.dp).item() / counts.sum()
    apart = max((got - want).norm() / want.norm() for got, want in beside_twin(model, twin).values())
    print(f"yours, ep {ep}  loss {mean:.3f}   gradient norm {gradient_norm(model, mesh):.3f}   "
          f"every gradient right: {apart.item() < 1e-4}")  # fmt: skip

# %% [markdown]
# ## 5 · See
#
# ### Bytes: predicted and counted
#
# One layer, forward, on four ranks, with a load that is exactly even: your dispatcher and the package's two.

# %%
# %%ranks 4 --needs bytes_per_layer,route,permute,dispatch --name volume --out moved
import torch
from exercises.bytes_per_layer import bytes_per_layer
from moe_parts import YourDispatcher

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from labkit.evidence import Witness
from minimegatron.layers.dispatch import AllGatherDispatcher, AllToAllDispatcher
from minimegatron.layers.router import Routing
from minimegatron.models.zoo import family_config

T, h, E, k = 256, 64, 8, 2
mesh = Mesh.build(ParallelConfig(expert_model_parallel_size=world))
config = family_config("mixtral", num_layers=1, hidden_size=h, num_attention_heads=4, vocab_size=256, num_experts=E)
map = torch.zeros(T, E, dtype=torch.bool)
map[torch.arange(T).repeat_interleave(k), torch.arange(T * k) % E] = True  # experts take turns
tokens, routing = torch.randn(T, h), Routing(map / k, map)


def counted(dispatcher):
    """Bytes that this rank sends, there and back; those of the counts apart."""
    with Witness(rank) as witness:
        sent = dispatcher.dispatch(tokens, routing)()
        sent.back(sent.rows)
    # a collective is counted with its larger side, of which the own part stays; no message of counts exceeds the table
    calls = [(call.nbytes, 1 if call.name == "send" else (world - 1) / world) for call in witness.evidence().calls
             if call.name != "recv"]  # fmt: skip
    table = 8 * E * world
    return [sum(nbytes * share for nbytes, share in calls if (nbytes > table) == rows) for rows in (True, False)]


predicted = bytes_per_layer(T, h, E, k, world, 4)
ways = {
    "all-to-all, yours": ("alltoall", YourDispatcher(mesh.ep)),
    "all-to-all, the package's": ("alltoall", AllToAllDispatcher(config, mesh)),
    "all-gather, the package's": ("allgather", AllGatherDispatcher(config, mesh)),
}
rows = {name: (predicted[way], *counted(dispatcher)) for name, (way, dispatcher) in ways.items()}
for name, (want, got, _) in rows.items():
    print(f"{name:26} predicted {want / 1024:.2f} KiB   counted {got / 1024:.2f} KiB")
print(f"the counts of your all-to-all: {rows['all-to-all, yours'][2]:.0f} bytes more")
report(rows)

# %%
# %%needs bytes_per_layer route permute dispatch
from minimegatron.viz.volume import bars

predicted, measured = ({name: row[i] for name, row in moved[0].items()} for i in (0, 1))
display(bars(predicted, measured, title="One layer, forward, 2 of 8 experts on four ranks"))

# %% [markdown]
# The backward pass sends as much again: the gradient of an all-to-all is an all-to-all.
#
# ### A router left alone
#
# Now train: two ranks, ep 2, on the sources of Python's standard library, byte by byte. Two layers, 8 experts, k = 2,
# AdamW with a learning rate of 3e-3, the default initial weights. The router starts at random; nothing in it is skewed.
#
# The same model with no balancing, with your loss (coeff 0.03), and with your bias (rate 0.01). And twice more with no
# balancing, from other initial weights and on other pieces of the text: is what you see an accident? Scores are the
# softmax over all experts; with a bias of zero `choose` on them is `route`. (Why?) Each rank's loss is about its own
# tokens; the bias moves by the counts of both.
#
# What do you expect, after 100 steps?

# %%
# %%ranks 2 --needs route,balance,expert_bias,permute,dispatch,finish --name balancing --timeout 240 --out trained
import itertools

import torch
import torch.nn.functional as F
from exercises.balance import balance
from exercises.expert_bias import choose, move_bias
from exercises.finish import finish
from moe_parts import YourMoE, finish_model, layer_with

from minimegatron.comm.collectives import all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.data.corpus import documents
from minimegatron.layers.router import Routing, TopKRouter
from minimegatron.models.decoder import build_model
from minimegatron.models.zoo import family_config

STEPS, S, B = 100, 64, 4
SEEDS = (1, 2, 3)
mesh = Mesh.build(ParallelConfig(expert_model_parallel_size=2))
config = family_config(
    "mixtral", num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=4, vocab_size=256,
    num_experts=8, moe_ffn_hidden_size=64,
)  # fmt: skip
text = "\n".join(itertools.islice((t for _, t in documents("code")), 60)).encode()
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


class Push(torch.autograd.Function):
    """Identity; its backward pass adds a gradient."""

    @staticmethod
    def forward(ctx, logits, more):
        ctx.save_for_backward(more)
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx, grad):
        return grad + ctx.saved_tensors[0], None


class BalancedRouter(TopKRouter):
    coeff, rate = 0.0, 0.0

    def __init__(self, *args):
        super().__init__(*args)
        self.bias = torch.zeros(self.num_experts, device="cpu")  # models are built on the meta device

    def forward(self, x):
        logits = F.linear(x.flatten(0, 1).float(), self.weight.float())
        if self.coeff:  # the step's gradient is a sum over tokens, divided at its end: so times the tokens
            logits = Push.apply(logits, len(logits) * balance(logits.detach(), self.k, self.coeff)[1])
        self.last = Routing(*choose(logits.softmax(-1), self.bias, self.k))
        return self.last


class BalancedMoE(YourMoE):
    router_class = BalancedRouter


def some_batch(generator):
    """Samples of this rank; both ranks draw all."""
    at = torch.randint(len(data) - S, (2 * B,), generator=generator)[rank * B : (rank + 1) * B]
    return torch.stack([data[a : a + S + 1] for a in at.tolist()])


def train(seed, coeff=0.0, rate=0.0):
    BalancedRouter.coeff, BalancedRouter.rate = coeff, rate
    model = build_model(config, mesh, seed, layer_with(BalancedMoE, config))
    routers = [m for m in model.modules() if isinstance(m, BalancedRouter)]
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.Generator().manual_seed(seed)
    losses, loads, last = [], [], []
    for _ in range(STEPS):
        ids = some_batch(generator)
        loss = model(ids[:, :-1], labels=ids[:, 1:]).sum()
        optimizer.zero_grad()
        loss.backward()
        finish_model(finish, model, B * S, mesh)
        optimizer.step()
        counts = all_reduce(torch.stack([router.last.map.sum(0) for router in routers]), mesh.dp)
        for router, count in zip(routers, counts):
            router.bias = move_bias(router.bias, count, rate)
        losses.append(all_reduce(loss.detach(), mesh.dp).item() / (2 * B * S))
        loads.append(counts.tolist())
        last = [*last, (routers[-1].last.probs.detach(), routers[-1].last.map)][-10:]
    return {"losses": losses, "loads": loads, "last": last}


runs = dict(zip(("left alone", "another seed", "a third seed"), map(train, SEEDS)))
runs["with a loss"] = train(SEEDS[0], coeff=0.03)
runs["with a bias"] = train(SEEDS[0], rate=0.01)
report(runs)
if rank == 0:
    print(f"trained {len(runs)} times, {STEPS} steps each")

# %%
# %%needs route balance expert_bias permute dispatch finish
from minimegatron.viz.experts import load_bands

runs = trained[0]
layer1 = {way: [step[1] for step in run["loads"]] for way, run in runs.items()}
ways = ("left alone", "with a loss", "with a bias")
display(load_bands({way: layer1[way] for way in ways}, "share of the rows of layer 1", every=5))

for way, steps in layer1.items():
    late = [sum(counts) for counts in zip(*steps[-20:])]
    over = 8 * max(late) / sum(late)
    idle = sum(count < 0.02 * sum(late) for count in late)
    print(f"{way:12} the busiest expert has more than twice the mean: {over > 2};  two or more idle: {idle >= 2}")

fig, ax = plt.subplots(figsize=(7, 2.4))
for way, style in zip(ways, ("-", "--", ":")):
    ax.plot(runs[way]["losses"], style, color="black", linewidth=1.2, label=way)
ax.set(xlabel="step", ylabel="loss of a byte", title="The loss does not tell")
ax.legend()
plt.show()

# %% [markdown]
# Each band is an expert, with its number at the right where the run ends. Left alone, layer 1 gives most of its rows to
# a few of its eight experts. The busiest has up to four times the mean, and with k = 2 more is not possible. Several
# experts are memory that hardly anybody uses. It is no accident of the seed: your three runs agree, and so did sixty
# others, twenty seeds on three kinds of CPU. *Which* experts win is an accident, of the last digits, too: another CPU
# adds up in another order and ends with other favourites. Experts 0 to 3 live on rank 0: how is the work of the layer
# shared? At this size the losses hardly differ, so the loss will not warn you. The load will: log it.
#
# A smaller coeff balances less, a larger one pulls harder at the router. The bias pulls at no gradient, but needs its
# steps: at rate 0.001 it is not done by step 100. Change them and see.
#
# ### What a capacity would drop
#
# The routings of the last ten batches, of one rank, under your `limit`. The grey line is your formula for a fair
# router.

# %%
# %%needs expected_drops route balance expert_bias permute dispatch limit finish
factors = [0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0]
fair = [expected_drops(256, 8, 2, factor) for factor in factors]
fig, ax = plt.subplots(figsize=(7, 2.8))
ax.plot(factors, [f["dropped"] for f in fair], color="0.6", linewidth=4, label="a fair router")
share = {}
for way, style in zip(ways, ("o-", "s--", "^:")):
    last = runs[way]["last"]
    rows = sum(map.sum().item() for _, map in last)
    kept = [sum(limit(*routing, f["capacity"])[1].sum().item() for routing in last) for f in fair]
    share[way] = [1 - k / rows for k in kept]
    ax.plot(factors, share[way], style, color="black", linewidth=1.2, label=way)
ax.set(xlabel="capacity factor", ylabel="share of the rows dropped", title="256 tokens, 2 of 8 experts")
ax.legend()
plt.show()
at = factors.index(1.25)
print(f"factor 1.25: a fair router drops {fair[at]['dropped']:.2%};",
      f"left alone more than 30 %: {share['left alone'][at] > 0.3};",
      f"balanced less: {max(share['with a loss'][at], share['with a bias'][at]) < 0.3}")  # fmt: skip

# %% [markdown]
# Even on average is not even in every batch: with the loss more is dropped than chance alone would drop. And nobody
# knows beforehand which rows it hits. So most large models of today train dropless, and live with messages whose size
# varies.
#
# On a machine with a GPU the next cell runs the experts of a rank one after the other, and all in one grouped product.

# %%
# %%torchrun -n 1 --gpus --name grouped --out grouped
import torch
from minimegatron.launch.rank import finish, init, report
from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.layers.dispatch import Dispatched
from minimegatron.layers.moe import Experts
from minimegatron.models.zoo import preset

ROWS, HIDDEN = 65536, 2048

init()
times = {}
for experts in (8, 64):
    for together in (False, True):
        sizes = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 16, "vocab_size": 256,
                 "params_dtype": "bf16", "num_experts": experts, "moe_ffn_hidden_size": 768,
                 "moe_grouped_gemm": together}  # fmt: skip
        with torch.device("cuda"):
            layer = Experts(TransformerConfig.from_dict({**preset("mixtral-8x7b"), **sizes}), Mesh.serial())
            sent = Dispatched(torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16), torch.ones(ROWS),
                              [ROWS // experts] * experts, None)  # fmt: skip
        for p in layer.parameters():
            torch.nn.init.normal_(p, std=0.02)
        for again in range(4):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
            start.record()
            out = layer(sent)
            out.backward(torch.ones_like(out))
            end.record()
            torch.cuda.synchronize()
        times[f"{experts} experts, {'grouped' if together else 'a loop'}"] = start.elapsed_time(end)
report({"rows": ROWS, "times": times})
finish()

# %%
if grouped:
    rows, times = grouped.reports[0].values()
    fig, ax = plt.subplots(figsize=(7, 2.2))
    ax.barh(list(times), times.values(), color="0.6", edgecolor="black")
    ax.set(xlabel="ms, forward and backward", title=f"{rows} rows, experts of Qwen3-30B-A3B")
    plt.show()

# %% [markdown]
# ## 6 · Break it
#
# Somebody reviewed `finish`: "Gradients are means over a data-parallel group. Experts have a data-parallel group of
# their own, edp. So *their* mean is over edp." It even reads better. Four ranks, ep 2, the serial twin beside it.

# %%
# %%ranks 4 --needs route,permute,dispatch --name reviewed --timeout 120 --out evidence
import torch
from moe_parts import YourMoE, beside_twin, finish_model, gradient_norm, layer_with

from minimegatron.comm.collectives import all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.models.decoder import build_model
from minimegatron.models.zoo import family_config

S, B = 16, 2
config = family_config(
    "mixtral", num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=4, vocab_size=64,
    num_experts=8, moe_ffn_hidden_size=32, init_method_std=0.1,
)  # fmt: skip


def finish(dense, expert, tokens, dp, edp):
    of_dp, of_edp = all_reduce(torch.tensor(float(tokens)), dp), all_reduce(torch.tensor(float(tokens)), edp)
    return all_reduce(dense, dp) / of_dp, all_reduce(expert, edp) / of_edp


def some_batch(step):
    """Every id depends on the one before."""
    g = torch.Generator().manual_seed(step)
    ids = [torch.randint(0, 64, (4 * B,), generator=g)]
    for _ in range(S):
        ids.append((ids[-1] * 5 + 7 + torch.randint(0, 4, (4 * B,), generator=g)) % 64)
    return torch.stack(ids, 1)


def run(ep, steps):
    losses = []
    mesh, serial = Mesh.build(ParallelConfig(expert_model_parallel_size=ep)), Mesh.serial()
    model, twin = build_model(config, mesh, 1, layer_with(YourMoE, config)), build_model(config, serial, 1)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (model, twin)]
    for step in range(steps):
        ids = some_batch(step)
        mine = ids[B * mesh.dp.rank : B * (mesh.dp.rank + 1)]
        loss = model(mine[:, :-1], labels=mine[:, 1:]).sum()
        twin_loss = twin(ids[:, :-1], labels=ids[:, 1:]).mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        twin_loss.backward()
        finish_model(finish, model, B * S, mesh)
        total = all_reduce(loss.detach(), mesh.dp).item() / (4 * B * S)
        if step == 0:
            pairs, norm, twin_norm = beside_twin(model, twin), gradient_norm(model, mesh), gradient_norm(twin, serial)
        losses.append((total, twin_loss.item()))
        for optimizer in optimizers:
            optimizer.step()
    if steps > 1:
        apart = max(abs(ours - of_twin) for ours, of_twin in losses)
        print(f"ep {ep}, loss {losses[0][0]:.2f} at first; falls by more than 1: {losses[0][0] - losses[-1][0] > 1};",
              f"never more than 0.02 from the twin's: {apart < 0.02}")  # fmt: skip
    print(f"gradient norm of the first step:   ep {ep} {norm:.3f}   serial {twin_norm:.3f}")
    return {name: got for name, (got, _) in pairs.items()}, {name: want for name, (_, want) in pairs.items()}


report({2: run(2, 41), 4: run(4, 1)})

# %% [markdown]
# The loss is that of the twin for forty steps. Adam divides every gradient by its own size, so a gradient that is too
# large by a constant changes nothing, as long as nobody clips. The norm of the first gradient is off, and by more with
# ep 4.
#
# *Which* gradients, and how? Write the tool that answers it for any such bug: compare each gradient with the twin's.
#
# **Exercise.** `{name: factor}` of the gradients that are wrong. Right means: |got - want| ≤ 10⁻³ |want|. The factor is
# a number with got = factor · want, to the same precision; `nan` if there is none. Leave out what is right.

# %%
# %%exercise suspects
import math

import torch


def suspects(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, float]:
    """Wrong gradients, each with its factor."""
    ### BEGIN SOLUTION
    found = {}
    for name, right in want.items():
        mine = got[name]
        if (mine - right).norm() <= 1e-3 * right.norm():
            continue
        factor = (mine * right).sum() / (right * right).sum()
        proportional = (mine - factor * right).norm() <= 1e-3 * mine.norm()
        found[name] = factor.item() if proportional else math.nan
    return found
    ### END SOLUTION


# %%
check("suspects")

# %%
# %%needs route permute dispatch suspects
for ep, (got, want) in evidence[0].items():
    print(f"ep {ep}: {len(want)} gradients, of which wrong:")
    for name, factor in suspects(got, want).items():
        print(f"  {name:34} {factor:.2f} times the twin's")

# %% [markdown]
# Only the experts, and by the factor ep. The router is right, so what came back from the experts was right. A missing
# sum would give another direction; this is a scale.
#
# The mistake is in the divisor. An expert's gradient holds tokens of *all* ranks: those of its ep group came by the
# all-to-all, those of other groups by the sum over edp. So it is divided by the tokens of all ranks; here it was
# divided by the tokens of edp, 1/ep of them. In terms of means: the factor is 1/dp and not 1/edp.
#
# With SGD the experts would learn ep times as fast. With clipping, which every large run has, they would make the norm
# larger, and *all other* weights would learn too slowly. Neither crashes.

# %% [markdown]
# ## 7 · Explain
#
# Say your answer aloud before you read on.
#
# 1. *With k = 1, what does the softmax over the chosen logit teach the router?* Nothing: a softmax over one number is
#    1, and has no gradient. With k = 1 take the softmax over all experts first, as Switch does.
# 2. *Why does a collapsed router not show in the loss?* Its few experts are as good as any MLP. What is lost is what
#    the others could have learned, and the time of the ranks that wait.
# 3. *Expert parallelism needs ranks. Where do they come from?* From those that are there: dp (and cp, tp). ep groups
#    are pieces of dp, so an expert has dp/ep copies where everything else has dp.
# 4. *Why must a rank that gets no rows still take part?* Collectives are calls that all ranks make. And its experts'
#    gradients must exist, as zeros: the sum over edp adds them to those of other ranks.
# 5. *What does tensor parallelism do to all this?* tp ranks see the same tokens. Without sequence parallelism each
#    would dispatch them, and every expert would see them tp times. So experts with tp need sequence parallelism.
# 6. *Rows arrive at an expert in another order than on one rank. Is the result the same?* Each row is. The gradient of
#    the expert is a sum over rows: the same numbers in another order, so its last bits may differ. No more than those.
#
# **Exercise.** Numbers for one layer. Experts are gated: three matrices h × f. Tokens are those of one rank; tp = cp =
# 1; the load is even. Return a dict:
#
# * `parameters` of the whole layer, router included; `active_parameters`, those that a token uses;
# * `copies_of_an_expert` in the whole job;
# * `rows_of_an_expert`: the height of the matrix that one expert multiplies;
# * `allgather_over_alltoall`: bytes of one way over the other, forward, rows only (no weights, flags, counts);
# * `compute_over_travel`: seconds that a rank computes its rows (forward, a multiply-add is two operations, `flops` a
#   second) over seconds that its rows travel, there and back by all-to-all (`bandwidth` in bytes a second).

# %%
# %%exercise answers
def answers(
    tokens: int, h: int, f: int, experts: int, k: int, ep: int, dp: int, element_size: int, flops: float,
    bandwidth: float,
) -> dict[str, float]:
    """{"parameters": ..., "active_parameters": ..., "copies_of_an_expert": ..., ...}"""
    ### BEGIN SOLUTION
    one, rows = 3 * h * f, k * tokens  # a rank sends k T rows, and gets as many
    travel = 2 * rows * h * element_size * (ep - 1) / ep / bandwidth
    return {
        "parameters": experts * one + experts * h,
        "active_parameters": k * one + experts * h,
        "copies_of_an_expert": dp // ep,
        "rows_of_an_expert": rows * ep / experts,
        "allgather_over_alltoall": ep / k,
        "compute_over_travel": 2 * one * rows / flops / travel,
    }
    ### END SOLUTION


# %%
check("answers")

# %%
# %%needs answers
for name in ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"):
    c = configs[name]
    said = answers(4096, c.hidden_size, c.moe_ffn_hidden_size, c.num_experts, c.moe_router_topk, 8, 64, 2, 4e14, 5e10)
    print(f"{name:14} an expert multiplies {said['rows_of_an_expert']:6.0f} rows; "
          f"computes {said['compute_over_travel']:4.2f} times as long as its rows travel")  # fmt: skip

# %% [markdown]
# T, h and k have gone from that ratio. What is left is f, the width of an expert. Many small experts give a token more
# to choose from, and travel worse: with 400 TFLOP/s and 50 GB/s, the rows of a DeepSeek-V3 travel longer than they are
# computed. So its training hides the all-to-all behind other work, and lets a token choose from few machines only.

# %%
progress()

# %% [markdown]
# ## Where this lives
#
# | here | minimegatron | Megatron-LM, `megatron/core/transformer/moe/` |
# |---|---|---|
# | router, balancing loss, capacity | `layers/router.py` | `router.py`, `moe_utils.py` |
# | the bias | `parallel/balance.py` | `get_updated_expert_bias` in `moe_utils.py` |
# | rows, the journey | `layers/permutation.py`, `layers/dispatch.py` | `token_dispatcher.py` |
# | experts, grouped products | `layers/moe.py` | `experts.py`, `moe_layer.py` |
# | the groups ep, edp | `comm/mesh.py` | `core/parallel_state.py` |
# | which gradient over which group | `parallel/ddp.py`, `parallel/finalize.py` | `core/distributed/`, DDP |
#
# Shazeer et al. 2017 (arXiv 1701.06538); Lepikhin et al. 2020 (arXiv 2006.16668); Fedus et al. 2021 (arXiv 2101.03961);
# Wang et al. 2024 (arXiv 2408.15664); DeepSeek-V3 2024 (arXiv 2412.19437).
#
# Next: lab 06, where the optimizer's state, the gradients and at last the weights are shared out over dp.

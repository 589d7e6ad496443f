# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Lab 05 · Mixture of experts, expert parallelism
#
# Until now every token met every weight of the model. In this lab a token meets a few weights of many, and which ones
# is learned. The weights are spread over the ranks and stay there; the tokens travel.
#
# **You build** a router; a loss and a bias that keep its load even; the way of a token to experts on other ranks and
# back; a capacity; the right sums of gradients. At the end they run inside a GPT, on four ranks, and match one process
# that holds everything.
#
# **You need** lab 01 (groups, all-reduce, all-to-all); for section 7 also labs 02 (tp, sequence parallelism) and 04
# (cp); the gradient of a softmax; the binomial distribution.
#
# | part | sections | time |
# |---|---|---|
# | A | 1 The problem · 2 Predict | 1 h |
# | B | 3 Implement | 2 h |
# | C | 4 Run · 5 See | 75 min |
# | D | 6 Break it · 7 Explain | 45 min |
#
# Together 5 hours. Each part ends at a place to stop.
# After a kernel restart: run the first cell, then go on where you were.

# %%
# %load_ext course
# %lab 05_moe_ep

# %% [markdown]
# One number from the gut, before anything is explained. The last section shows it again, beside the right one.
# In 58 of its 61 layers DeepSeek-V3 has 256 experts, and sends each token to 8 of them. Spread the experts over eight
# ranks, each a GPU in another machine. A *row* is one token on its way to one expert: it travels to the expert's rank, is
# computed there, and travels back. The GPUs compute at 400 TFLOP/s, and the network gives each of them 50 GB/s.

# %%
guess("travel", None, "A rank computes its rows for one second. How many seconds do these rows travel, there and back?")

# %% [markdown]
# ## 1 · The problem
#
# A model stores what it has learned in its parameters. A token costs arithmetic with every parameter that it meets. In
# a *dense* model a token meets all of them: ten times the parameters are ten times the arithmetic. A **mixture of
# experts** (MoE) replaces each MLP by E of them, the *experts*, and a *router* sends each token through only k.

# %%
import matplotlib.pyplot as plt

from minimegatron.config import TransformerConfig
from minimegatron.models.families import preset
from minimegatron.models.chunks import count_parameters
from minimegatron.viz.picture import INK, MEASURED, REFERENCE

total, used = {}, {}
for name in ("llama3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3"):
    config = TransformerConfig.from_dict(preset(name))
    table = config.vocab_size * config.hidden_size  # of a table of embeddings a token reads one row
    total[name] = count_parameters(config) / 1e9
    used[name] = (count_parameters(config, active=True) - table) / 1e9

fig, ax = plt.subplots(figsize=(7, 2.6))
of_a_token = "used by a token (the input table is not counted)"
for label, numbers, (colour, _) in (("held", total, REFERENCE), (of_a_token, used, MEASURED)):
    ax.barh(list(numbers), numbers.values(), color=colour, edgecolor=INK, label=label)
for i, name in enumerate(total):
    ax.text(total[name] + 8, i, f"{used[name]:.1f} of {total[name]:.1f}", va="center")
ax.set(xlabel="billions of parameters", xlim=(0, 850), title="Parameters that a model holds, and that a token uses")
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
ax.legend(loc="upper right")
plt.show()
print(f"deepseek-v3: a token uses {used['deepseek-v3'] / total['deepseek-v3']:.1%} of the parameters;")
print(f"the weights alone, in bf16, fill {total['deepseek-v3'] * 2 / 80:.0f} GPUs of 80 GB")

# %% [markdown]
# What is counted as used: everything but the table of input embeddings, of which a token reads one row. DeepSeek's own
# number is 37 billion; with the whole table it would be 37.6.
#
# So a model with the arithmetic of a small one needs the memory of a cluster. Tensor parallelism would cut every
# matrix over all ranks. An expert of DeepSeek-V3 is 2048 wide; over 64 ranks that leaves 32 columns, too few to keep a
# GPU busy. But no expert needs what another one computes. **Expert parallelism** gives each of P ranks E/P whole
# experts. The price: a token must go where its experts are.
#
# Below, twelve tokens choose two of eight experts each, and the experts live on four ranks. A filled square is a
# *row*: one token on its way to one expert.

# %%
import torch

from course.figures.experts import routing_grid


def some_routing(tokens, experts, k, favour=0.0, seed=0):
    """Made-up logits; `favour` is added to those of expert 2."""
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))
    logits[:, 2] += favour
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, logits.topk(k).indices, True)


even, skewed = some_routing(12, 8, 2), some_routing(12, 8, 2, favour=2.5)
routing_grid({"a fair router": even.tolist(), "one with a favourite": skewed.tolist()}, ranks=4)

# %% [markdown]
# Each side has 24 rows, 6 for each rank on average. A layer takes as long as its busiest rank. On the left that is
# rank 2, with 9 rows, and this router has no favourite at all: chance is not even. On the right it is rank 1, with 12:
# the layer takes twice as long as it should.
#
# Three things make mixtures of experts hard, and this lab is about them:
#
# * **Who goes where is known only at run time.** The sizes of messages change at every layer of every step.
# * **Nothing in the loss wants the load to be even.** And the ranks with few rows wait for the busiest.
# * **An expert gets tokens of several ranks.** So its gradient is summed over other ranks than the gradients of
#   attention, norms and embedding are.
#
# ## 2 · Predict
#
# ### Bytes
#
# Each of P ranks has T tokens; a token is h numbers. Two ways to bring rows to experts:
#
# | way | there | back |
# |---|---|---|
# | **all-to-all** | each of the k·T rows to the rank of its expert, with its weight (4 bytes) | each row |
# | **all-gather** | each token to all ranks, with E weights (4 bytes), E flags (1 byte) | reduce-scatter of [P·T, h] |
#
# An example, P = 2 ranks, T = 4 tokens, k = 2, E = 4, h = 3 numbers of 4 bytes: a row has 12 bytes.
#
# * *All-to-all.* A rank has k·T = 8 rows. The load is even, so 4 of them stay on this rank and 4 leave. There: 4 rows
#   of 12 + 4 bytes. Back: 4 rows of 12. Together 112 bytes.
# * *All-gather.* The 4 tokens go to the other rank, each with 4 weights and 4 flags: 4 · (12 + 16 + 4) bytes. Back
#   come 4 · 12. Together 176 bytes.
#
# **Exercise.** Bytes that *one rank* sends in the forward pass of one layer, there and back together, for each of the
# two ways. The load is even: the same number of rows goes to each rank. What a rank keeps does not travel. In an
# all-gather to which each rank gives n bytes, a rank sends (P-1)·n; in a reduce-scatter of which each rank keeps n
# bytes, too.

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
from minimegatron.config import TransformerConfig
from minimegatron.models.families import preset

for name, ep in (("mixtral-8x7b", 2), ("mixtral-8x7b", 8), ("deepseek-v3", 8), ("deepseek-v3", 64)):
    c = TransformerConfig.from_dict(preset(name))
    sent = bytes_per_layer(4096, c.hidden_size, c.num_experts, c.moe_router_topk, ep, 2)
    print(f"{name:13} k {c.moe_router_topk} ep {ep:2}:  all-to-all {sent['alltoall'] / 2**20:5.0f} MiB   "
          f"all-gather {sent['allgather'] / 2**20:6.0f} MiB")  # fmt: skip

# %% [markdown]
# The all-to-all sends at most k·T rows, however many ranks there are. The all-gather sends (P-1)·T, and so grows with
# P. Counting rows only, the all-gather sends P/k times what the all-to-all sends. As soon as P is larger than k, the
# all-to-all sends less.
#
# ### Dropped tokens
#
# The size of a message is not known until the router has run. The older way out is a **capacity**. With T tokens on a
# rank, an expert takes at most
#
# $$C = \lceil\, T k / E \cdot \text{factor} \,\rceil$$
#
# of that rank's tokens. The rest is *dropped*: the expert adds nothing for those tokens, and the residual connection
# carries them past.
#
# How many are dropped with a *perfectly fair* router, which chooses by chance? An example: 2 tokens, 2 experts,
# k = 1, factor 1, so C = 1. The two tokens choose (0, 0), (0, 1), (1, 0) or (1, 1), all equally likely. In two of
# the four cases one of the two rows is dropped. So the expected share is 1/4.
#
# First your gut: 64 tokens, 2 of 8 experts each, factor 1.

# %%
guess("drops", None, "What percentage of the rows does a perfectly fair router drop?")

# %% [markdown]
# Now exactly. Look at one expert alone, and let n be the number of tokens that choose it. The T tokens choose
# independently, and the k experts of a token are different. With which probability does a token choose this expert, and
# so how is n distributed? (The choices of one token for *different* experts do depend on each other. But the expectation
# of a sum is the sum of the expectations, whether the terms depend on each other or not.)
#
# **Exercise.** The capacity, and the expected share of the k·T rows that is dropped, between 0 and 1, for batches as
# small as the example's and as large as those of a run: 2048 tokens a rank, 8 of 256 experts.

# %%
# %%exercise expected_drops
import math


def expected_drops(tokens: int, experts: int, k: int, factor: float) -> dict[str, float]:
    """{"capacity": C, "dropped": share of the rows} when each token takes k different experts at random."""
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
guessed("drops", round(100 * expected_drops(64, 8, 2, 1.0)["dropped"], 1), "% of the rows")
for tokens in (64, 512):
    said = (f"{f}: {expected_drops(tokens, 8, 2, f)['dropped']:6.2%}" for f in (1.0, 1.25, 1.5, 2.0))
    print(f"{tokens:3} tokens, 2 of 8 experts, factor", "  ".join(said))

# %% [markdown]
# Even a fair router drops rows at factor 1. With more tokens the load comes out more even, and a little room is
# enough. Real routers are not fair. You will measure one in part C.
#
# *This is a good place to stop: the end of part A.*
#
# ## 3 · Implement
#
# A token is a row of x, [T, h]. A routing is two tensors [T, E]: `probs`, the weight of each expert for each token, 0
# where the token does not go; and `map`, bool, where it goes.
#
# ### The router
#
# The router is one matrix, [E, h]. Its product with a token gives a logit for each expert. The k largest are chosen,
# and a softmax *over those k* gives their weights. An example, k = 2: logits [2, 0, 1] choose experts 0 and 2,
# with weights softmax(2, 1) = 0.73 and 0.27. In a formula:
#
# $$y = \sum_{e\,\in\,\text{top-}k} p_e\, \text{expert}_e(x) \qquad
# p = \text{softmax}(\text{the } k \text{ largest logits})$$
#
# The choice itself has no gradient. The weights have one, and they teach the router: the weight of an expert that
# helped goes up.
#
# The choice is a comparison. A weight that is slightly off matters little; a comparison that comes out the other way
# sends the token to another expert. Models compute in bf16, which keeps 8 significant bits (7 mantissa bits and a
# leading 1), two to three decimal digits: 3.14 and 3.145 are the same number in bf16. So routers should compute in
# fp32. (Megatron-LM leaves it to `moe_router_dtype`, whose default, None, is the dtype of the model.)
#
# **Exercise.** Weights in fp32, whatever x and weight are. A token goes to exactly k experts. Where experts
# tie, as in a router whose weight is still zero, any of the tied may be taken. A chosen expert may weigh 0 after
# rounding: its place in `map` is True even so.

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
import torch

g = torch.Generator().manual_seed(0)
x, weight = torch.randn(4096, 512, generator=g).bfloat16(), torch.randn(64, 512, generator=g).bfloat16()
_, right = route(x, weight, 8)
rounded = torch.zeros_like(right).scatter(1, (x @ weight.T).float().topk(8).indices, True)
moved = (right != rounded).any(-1).float().mean().item()
print(f"8 of 64 experts, logits rounded to bf16: more than one token in a hundred goes elsewhere: {moved > 0.01}")

# %% [markdown]
# Nothing crashes, and the loss does not show it. But where two programs compute the same forward pass and round
# differently (training and inference, say), such a token may go to one expert in the first and to another in the
# second.
#
# ### The balancing loss
#
# An expert that is a little better gets more tokens, learns more, and becomes better still. Nothing in the loss stops
# that. So one adds a penalty. Let $p_{te}$ be the softmax over *all* experts of token t's logits, and $n_e$ the number
# of tokens that chose expert e:
#
# $$L = \text{coeff}\cdot\frac{E}{k\,T^2}\sum_e n_e \sum_t p_{te}$$
#
# An example: two tokens, two experts, k = 1, and each token gives its favourite p = 0.8.
#
# | | n | Σ p | L |
# |---|---|---|---|
# | both prefer expert 0 | 2, 0 | 1.6, 0.4 | coeff · 2/4 · (2 · 1.6 + 0 · 0.4) = 1.6 coeff |
# | one prefers each | 1, 1 | 1, 1 | coeff · 2/4 · (1 · 1 + 1 · 1) = coeff |
#
# A count has no gradient; p has one. Each expert gets a price, proportional to its load, and a token pays the price
# of each expert times its p for that expert. At an even load all prices are the same, and L = coeff.
#
# With the price $c_e = \text{coeff}\, E\, n_e/(kT^2)$ the loss is $L = \sum_{te} p_{te} c_e$. A logit of a token moves
# *all* of its p, because they sum to 1: this gradient you work out on paper. To try your formula: in the first line of
# the table the prices are [1, 0] coeff, a token pays 0.8 coeff, and the gradient of its logits is [0.16, -0.16] coeff.
#
# **Exercise.** The loss and its gradient, in the dtype of the logits. Where experts tie, a token still counts for
# exactly k of them. Write the formula: the check runs this where autograd records nothing, so `.backward()` fails.
# (`torch.func.grad` works even there, and passes. You learn more from the formula.)

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
# *Over which tokens* is the load counted? Over those of a microbatch, of a sequence, or of the whole batch: Megatron's
# `aux_loss`, `seq_aux_loss`, `global_aux_loss`. The fewer tokens, the harder the demand: a sequence of program text is
# then pushed to use every expert as much as a sequence of prose does. Over the whole batch experts may specialize
# (Qiu et al. 2025, arXiv 2501.11873); the counts are then all-reduced.
#
# ### Balance by a bias
#
# The penalty pulls the router away from what the model wants. DeepSeek-V3 balances mainly in another way: each expert
# has a **bias**, which is added to the score when experts are *chosen*, and not when they are *weighed*. After every
# step it moves by a fixed rate γ: up for an expert with fewer tokens than the mean, down for one with more. No
# gradient is involved. (DeepSeek-V3 took γ = 0.001 for most of its training and γ = 0 at the end, and kept a small
# balancing loss within each sequence, α = 0.0001.) The bias is state: a checkpoint must hold it. And it is fp32 even in
# a bf16 model: in bf16, 0.5 + 0.001 is 0.5.
#
# An example, k = 1: scores [0.5, 0.4] and biases [-0.2, 0]. The sums are [0.3, 0.4], so expert 1 is chosen. Its
# weight is its own score over the sum of the chosen scores, 0.4 / 0.4 = 1. Without biases expert 0 would be chosen.
#
# **Exercise.** Scores are positive here (sigmoid or softmax, made by the caller). The weights of a token are the
# scores of its k experts divided by their sum, and the scores get a gradient through them. Again a token goes to
# exactly k experts, also where several sums are equal. Change none of the inputs: `move_bias` returns a new tensor.

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
# token: what goes to one expert lies in one piece. That is the *permutation*. An example with three tokens a, b, c
# and two experts:
#
# | token | goes to | | row | is | source |
# |---|---|---|---|---|---|
# | a | 0 and 1 | | 0 | a for expert 0 | 0 |
# | b | 1 | | 1 | c for expert 0 | 2 |
# | c | 0 | | 2 | a for expert 1 | 0 |
# | | | | 3 | b for expert 1 | 1 |
#
# The way back adds each row to its token: a gets the sum of rows 0 and 2. Each way is the other's gradient: copying a
# token k times forward is adding k rows backward.
#
# **Exercise.** A row is its token as it is; the experts apply the weights later. `weights[i]` is the weight of row i,
# `source[i]` (int64) its token. Use operations that autograd understands: tokens, probs and rows all get gradients.
# `map` says where a token goes; a weight there may happen to be 0.

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
# This is the hardest idea of the lab, so first a picture: two ranks with three tokens each, four experts, k = 2. Rank
# 0 holds experts 0 and 1, rank 1 holds 2 and 3. Read it from the top to the bottom. Follow b3, token b on its way to
# expert 3.

# %%
from course.figures.experts import dispatch_steps


def going(*experts):
    """A map [tokens, 4] from the experts that each token has chosen."""
    return [[e in chosen for e in range(4)] for chosen in experts]


of_rank_0 = going((1, 2), (1, 3), (1, 3))  # tokens a, b, c
of_rank_1 = going((0, 1), (0, 2), (0, 1))  # tokens d, e, f
dispatch_steps([of_rank_0, of_rank_1])

# %% [markdown]
# The same in numbers, as rank 0 sees it:
#
# | on rank 0 | |
# |---|---|
# | its rows, by expert | a1 b1 c1 a2 b3 c3, so `counts` is [0, 3, 1, 2] |
# | it sends | 3 rows to rank 0, which is itself, and 3 to rank 1: its *input splits* |
# | it gets | 3 rows from rank 0 and 5 from rank 1: its *output splits*; a1 b1 c1, then d0 e0 f0 d1 f1 |
# | its experts want | d0 e0 f0 for expert 0, a1 b1 c1 d1 f1 for expert 1: by expert, then by sender |
# | `blocks` | [[0, 3], [3, 2]]: `blocks[i, e]` is how many rows rank i sends to *this rank's* e-th expert |
#
# Three questions; the exercise asks for the answers. Before the rows travel: how does rank 0 learn that 5 rows will come
# from rank 1? When eight rows have come they are four blocks, one of them empty: in which order do the blocks lie, and
# in which order are they wanted? On the way back, at whose end `unpermute` adds a1 and a2 to a: which numbers of this
# table change places?
#
# Try it: change what one token has chosen. Before you run the cell again, say which numbers will change.
#
# The collective is `dist.all_to_all_single(out, rows, output_splits, input_splits, group=ep.group)`. Splits are lists
# of numbers of rows, and may hold zeros. A rank that gets no rows takes part in everything, with 0 rows: if it stayed
# away, the others would wait for ever. (On GPUs these lists cost time: `.tolist()` makes the CPU wait until the GPU
# has run the router, in every layer. It is the gap that you see in a profile before each all-to-all.)
#
# **Exercise.** Both ways. Rank r of P holds experts r·E/P to (r+1)·E/P - 1; E/P may be any whole number. In `combine`,
# the rows of y stand as those that `dispatch` returned. Return them as this rank's rows stood before they left. `ep`
# is an axis of the mesh: `ep.size` ranks, of which this one is number `ep.rank`, talk in `ep.group`, which need not be
# the whole world. Layers overlap: rows of one layer may be under way while another's are dispatched, so keep nothing
# between calls. `rows` may be a view of something larger; a collective wants a tensor that is contiguous.

# %%
# %%exercise dispatch
import torch
import torch.distributed as dist


def dispatch(rows: torch.Tensor, counts: torch.Tensor, ep) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [n, h] by expert, counts [E] int64 -> rows for this rank's experts, by expert, then by sender; blocks."""
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
# What you have built so far is *dropless*: every row travels. With a capacity an expert keeps, of each rank's tokens,
# the C that weigh most. An example with C = 2: three tokens give one expert the weights 0.6, 0.9 and 0.7. The 0.6
# is dropped, although it came first.
#
# **Exercise.** Keep at most `capacity` tokens of each expert, the heaviest of those that chose it. Where tokens weigh
# the same, keep any of them. (With k = 1 all weigh 1.) A chosen token may weigh 0: it is dropped only where there is
# no room. The capacity may be larger than T. The weights of those that stay do not change, and keep their gradient.

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
import torch

from course.figures.experts import routing_grid

logits = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
logits[:, 2] += 2.5  # the favourite of section 1
chosen = torch.zeros(12, 8, dtype=torch.bool).scatter(1, logits.topk(2).indices, True)
probs = logits.masked_fill(~chosen, -torch.inf).softmax(-1)
title = "capacity 4 (crosses: dropped)"
grids = {"dropless": chosen.tolist(), title: chosen.tolist()}
display(routing_grid(grids, ranks=4, kept={title: limit(probs, chosen, 4)[1].tolist()}))

# %% [markdown]
# ### The gradient of an expert
#
# Four ranks, data parallel: dp = 4. With ep = 2, ranks 0 and 1 share the experts, and so do ranks 2 and 3. Rank 2
# holds the same experts as rank 0. The ranks that hold the same experts are **edp** (expert data parallel): [0, 2] and
# [1, 3].

# %%
from minimegatron.viz.mesh import rank_grid

rank_grid({"ep": 2, "edp": 2}, {"dp": [[0, 1, 2, 3]], "ep": [[0, 1], [2, 3]], "edp": [[0, 2], [1, 3]]})

# %% [markdown]
# | parameters | this rank's gradient comes from |
# |---|---|
# | attention, norms, router, embedding | its own tokens |
# | its experts | tokens of its whole ep group: the all-to-all's backward brought them |
#
# The loss of a step is the sum over all tokens of the batch, divided by their number N. Which ranks miss a part of a
# gradient, and by what each sum is divided, is the exercise.
#
# An example: the four ranks have 1, 2, 3 and 4 tokens that count, so N = 10. Their gradients of one weight of
# expert 0 are 1 on rank 0 and 3 on rank 2; ranks 1 and 3 do not hold it. The right gradient is (1 + 3) / 10 = 0.4.
#
# **Exercise.** `dense` and `expert` are gradients of the *sum* of this rank's losses; `tokens` is how many tokens
# counted on this rank, and the ranks differ. `all_reduce(x, axis)` sums x over an axis, in place, and returns it; on
# an axis of one rank it does nothing. `dense` and `expert` may be changed. Send each sum once, and over no more ranks
# than it needs.

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
# *This is a good place to stop: the end of part B.*
#
# ## 4 · Run
#
# The package builds its layer with experts from a class that you can name. The next two cells put your functions into
# one. The first is worth reading: to autograd each way is the other's gradient, so `dispatch` and `combine` are both
# used twice.

# %%
# %%ranks 1 --needs dispatch --name ways
import torch
from exercises.dispatch import combine, dispatch


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

# %% [markdown]
# The second cell is folded. `YourRouter` calls your `route`. `YourDispatcher` calls `permute`, sends rows and weights
# `There`, and gives the experts a function that brings their results `Back` and calls `unpermute`. (The weights travel
# with the rows, and the experts apply them. So what comes back is only added up, and an addition keeps nothing for the
# backward pass.) `YourMoE` is the package's layer with these two inside. The other functions are for later cells:
# gradients finished by your `finish`, their norm, and each beside that of the serial twin.

# %% jupyter={"source_hidden": true}
# %%ranks 1 --needs route,permute,dispatch --name moe_parts
import torch
from exercises.permute import permute, unpermute
from exercises.route import route
from ways import Back, There

from minimegatron.comm.collectives import all_reduce
from minimegatron.layers.moe.dispatch import Dispatched
from minimegatron.layers.moe.layer import MoELayer
from minimegatron.layers.param import layout_of
from minimegatron.layers.moe.router import Routing, TopKRouter
from minimegatron.models.gpt_layer_specs import decoder_layer_spec
from minimegatron.models.spec import ModuleSpec


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
# Now a small Mixtral on four ranks: two layers, 8 experts, k = 2. Each rank has samples of its own and another number
# of tokens that count. The *serial twin* is one process with the whole batch and all experts. The folded cell below
# builds both, with ep 2 and ep 4, and prints the loss, the gradient norm, and whether every gradient is that of the
# twin to one part in ten thousand.

# %% jupyter={"source_hidden": true}
# %%ranks 4 --needs route,permute,dispatch,finish --name gpt
import torch
from exercises.finish import finish
from moe_parts import YourMoE, beside_twin, finish_model, gradient_norm, layer_with

from minimegatron.comm.collectives import all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config

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
# One layer, forward, on four ranks, 256 tokens a rank, with a load that is exactly even: your dispatcher and the
# package's two, with ep 2 and ep 4. The folded cell counts every byte that a rank sends. It counts again with no
# tokens at all: what is sent even then are the row counts, which the prediction leaves out. They travel twice, once
# with the rows and once with their weights. With ep 4 a rank has 8 counts of 8 bytes. If your `dispatch` exchanges
# counts by an all-to-all, three quarters of them leave, 2 × 48 = 96 bytes; if by an all-gather, all of them go to three
# ranks, 2 × 192 = 384 bytes.

# %% jupyter={"source_hidden": true}
# %%ranks 4 --needs bytes_per_layer,route,permute,dispatch --name volume --out moved
import torch
from exercises.bytes_per_layer import bytes_per_layer
from moe_parts import YourDispatcher

from labkit.evidence import Witness
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.moe.dispatch import AllGatherDispatcher, AllToAllDispatcher
from minimegatron.layers.moe.router import Routing
from minimegatron.models.families import family_config

T, h, E, k = 256, 64, 8, 2
config = family_config("mixtral", num_layers=1, hidden_size=h, num_attention_heads=4, vocab_size=256, num_experts=E)
map = torch.zeros(T, E, dtype=torch.bool)
map[torch.arange(T).repeat_interleave(k), torch.arange(T * k) % E] = True  # experts take turns


def counted(dispatcher, ep, tokens):
    """Bytes that this rank sends, there and back, for so many of its tokens."""
    with Witness(rank) as witness:
        sent = dispatcher.dispatch(torch.ones(tokens, h), Routing(map[:tokens] / k, map[:tokens]))()
        sent.back(sent.rows)
    # a collective is counted with its larger side, of which the own part stays
    calls = [call for call in witness.evidence().calls if call.name != "recv"]
    return sum(call.nbytes * (1 if call.name == "send" else (ep - 1) / ep) for call in calls)


rows, counts = {}, {}
for ep in (2, 4):
    mesh = Mesh.build(ParallelConfig(expert_model_parallel_size=ep))
    predicted = bytes_per_layer(T, h, E, k, ep, 4)
    ways = {
        "all-to-all, yours": ("alltoall", YourDispatcher(mesh.ep)),
        "all-to-all, the package's": ("alltoall", AllToAllDispatcher(config, mesh)),
        "all-gather, the package's": ("allgather", AllGatherDispatcher(config, mesh)),
    }
    for name, (way, dispatcher) in ways.items():
        counts[name, ep] = counted(dispatcher, ep, 0)
        rows[name, ep] = counted(dispatcher, ep, T) - counts[name, ep]
        print(f"ep {ep}  {name:26} predicted {predicted[way] / 1024:.2f} KiB   counted {rows[name, ep] / 1024:.2f} KiB")
print(f"row counts, sent in addition: yours {counts['all-to-all, yours', 4]:.0f} bytes with ep 4")
report(rows)

# %% [markdown]
# As a picture, with the curves drawn on to eight ranks, one expert on each.

# %%
# %%needs bytes_per_layer route permute dispatch
import matplotlib.pyplot as plt

from minimegatron.viz.picture import INK, PREDICTED_LINE

sizes = (1, 2, 4, 8)
fig, ax = plt.subplots(figsize=(7, 3))
for way, name, marker in (("alltoall", "all-to-all", "o"), ("allgather", "all-gather", "s")):
    curve = [bytes_per_layer(256, 64, 8, 2, ep, 4)[way] / 1024 for ep in sizes]
    here = [(ep, nbytes / 1024) for (of, ep), nbytes in moved[0].items() if name in of]
    ax.plot(sizes, curve, **PREDICTED_LINE)
    ax.text(8.1, curve[-1], f"{name},\npredicted", va="center")
    ax.plot(*zip(*here), marker, color=INK, label=f"{name}, counted")
ax.set(xlabel="P, ranks of an ep group", ylabel="KiB sent by one rank", title="One layer, forward, k = 2")
ax.set(xlim=(0.7, 9.6), xticks=range(1, 9))
ax.legend()
plt.show()

# %% [markdown]
# At P = k = 2 the two ways cost nearly the same. From there on the all-to-all levels off, because a rank has only k·T
# rows to send; the all-gather rises with every rank. The backward pass sends as much again: the gradient of an
# all-to-all is an all-to-all.
#
# ### A router left alone
#
# Now train: two ranks, ep 2, on the sources of Python's standard library, byte by byte. Two layers, 8 experts, k = 2,
# 100 steps. The router starts at random; nothing in it favours an expert.
#
# | run | balancing | initial weights and pieces of text |
# |---|---|---|
# | left alone | none | first |
# | another seed, a third seed | none | others |
# | with a loss | your loss, coeff 0.03 | first |
# | with a bias | your bias, rate 0.01 | first |
#
# An even share is an eighth of the rows. Look at layer 1, the second, over the last 20 steps. In how many of the three
# runs without any balancing does an expert get *more than twice* its share there: 0, 1, 2 or 3?

# %%
guess("favourites", None, "In how many of the three runs does some expert of layer 1 end above twice its share?")

# %% [markdown]
# The folded cell trains the five runs, which takes 15 to 30 seconds. Three things in it are about this lab:
#
# * `Push` is the identity forward. Backward it adds the gradient of your `balance`, times the number of tokens, to
#   that of the logits: gradients here are sums over tokens until `finish` divides them. (Megatron's
#   `MoEAuxLossAutoScaler` does this. Forget its scale, and coeff changes with the batch and with its microbatches.)
# * Scores are the softmax over all experts, and your `choose` takes the experts. With a bias of zero this is `route`:
#   `choose` divides by the sum of the chosen scores, so the denominator of the softmax cancels, and the softmax over
#   the chosen ones is left.
# * Each rank's loss is about its own tokens; `move_bias` gets the counts of both ranks.

# %% jupyter={"source_hidden": true}
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
from minimegatron.layers.moe.router import Routing, TopKRouter
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config

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
from course.figures.experts import imbalance, load_bands

runs = trained[0]
layer1 = {way: [step[1] for step in run["loads"]] for way, run in runs.items()}
ways = ("left alone", "with a loss", "with a bias")
display(load_bands({way: layer1[way] for way in ways}, "share of the rows of layer 1", every=5, ranks=2))

over = {}
print("layer 1, mean of the last 20 steps:")
for way, steps in layer1.items():
    late = [sum(counts) for counts in zip(*steps[-20:])]  # the rows of each expert in the last twenty steps
    over[way] = 8 * max(late) / sum(late)
    idle = sum(count < 0.02 * sum(late) for count in late)
    print(f"{way:12}  some expert above twice its share: {over[way] > 2!s:5}  two or more nearly idle: {idle >= 2}")
guessed("favourites", sum(over[way] > 2 for way in ("left alone", "another seed", "a third seed")), "of the three runs")
losses = {way: run["losses"] for way, run in runs.items()}
display(imbalance({way: layer1[way] for way in ways}, losses, "another seed"))

# %% [markdown]
# <details><summary>What you see (open it when the cell above has run)</summary>
#
# **The bands.** Each band is an expert, with its number at the right where the run ends. Experts 0 to 3 live on rank
# 0, in its colour; the thick line is where the work of rank 0 ends and that of rank 1 begins. Left alone, layer 1
# gives most of its rows to a few of its eight experts. The busiest may have four times its share and no more: with k =
# 2 a token's two experts differ, so no expert gets more than half of the rows. Several experts fill memory and get
# hardly any tokens. If the favourites share a rank, the other rank waits; even where the thick line is in the middle,
# it is so by luck.
#
# **Is this an accident of one seed?** No: in all three of your runs some expert has more than twice its share. *Which*
# experts these are depends on the seed, and on the CPU as well: another CPU adds up in another order, and from a
# difference in the last digit other favourites may grow.
#
# **The curves.** On the left: with one expert on each of eight ranks, the layer would take this many times as long as
# it should. On the right: the difference that balancing makes to the loss, beside the difference that another seed
# makes (pale). At this size a collapsed router costs no loss, and balancing may even cost a little. So the loss will
# not warn you. The load will: log it.
#
# A smaller coeff balances less; a larger one pulls harder at the router. The bias changes no gradient, but it moves by
# one rate a step: at rate 0.001 it has moved by at most 0.1 after 100 steps. To try others, change `coeff` and `rate`
# at the end of the folded cell, then run both cells again.
#
# </details>
#
# ### A capacity, or dropless?
#
# The routings of the last ten batches, of one rank, under your `limit`. The pale line is your formula for a fair
# router. Put one expert on each of eight ranks: then the layer takes as long as its busiest expert. With a capacity
# this is at most `factor` times the mean. Dropless, it is what the large open marks at the bottom say.

# %%
# %%needs expected_drops route balance expert_bias permute dispatch limit finish
import matplotlib.pyplot as plt

from minimegatron.viz.picture import INK, MEASURED_LINE, REFERENCE_LINE

factors = [0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0]
fair = [expected_drops(256, 8, 2, factor) for factor in factors]
fig, ax = plt.subplots(figsize=(7, 2.8))
ax.plot(factors, [f["dropped"] for f in fair], **REFERENCE_LINE, label="a fair router")
share = {}
for way, style, marker in (("left alone", "-", "o"), ("with a loss", "--", "s"), ("with a bias", ":", "^")):
    last = trained[0][way]["last"]
    rows = sum(chosen.sum().item() for _, chosen in last)
    kept = [sum(limit(*routing, f["capacity"])[1].sum().item() for routing in last) for f in fair]
    share[way] = [1 - k / rows for k in kept]
    ax.plot(factors, share[way], marker=marker, **{**MEASURED_LINE, "linestyle": style}, label=way)
    busiest = sum(chosen.sum(0).max().item() for _, chosen in last) / (rows / 8)
    ax.plot(busiest, 0, marker, color=INK, markersize=13, fillstyle="none", clip_on=False)
ax.set(xlabel="capacity factor, or times the mean", ylabel="share of the rows dropped", ylim=(0, None))
ax.set_title("256 tokens, 2 of 8 experts; open marks: dropless")
ax.legend()
plt.show()
at = factors.index(1.25)
print(f"factor 1.25: a fair router drops {fair[at]['dropped']:.2%};",
      f"left alone more than 30 %: {share['left alone'][at] > 0.3};",
      f"balanced less: {max(share['with a loss'][at], share['with a bias'][at]) < 0.3}")  # fmt: skip

# %% [markdown]
# A load that is even on average is not even in every batch: balanced runs drop more than chance alone would. And the
# picture says what a capacity costs: go from an open mark to the left, to the factor that you can afford, and read on
# the curve above it which share of the rows you lose. The router left alone loses a large part of them: it needs
# balance, not a capacity.
#
# | | a capacity | dropless |
# |---|---|---|
# | the layer takes | at most `factor` times the mean; if padded to it, always | as long as its busiest rank |
# | a token loses an expert | depending on the other tokens of its batch | never |
# | memory, sizes of messages | bounded, known before (`moe_pad_expert_input_to_capacity`) | vary; the CPU waits for them |
#
# DeepSeek-V3 drops no token, in training or in serving (section 2.1.2 of its report). Then one batch, late in a run, may
# need more memory than all before it: the rows of a *hot expert* are activations that its rank keeps for the backward
# pass. If all tokens choose experts of one rank, that rank has P times the mean (if it holds at least k experts).
# Recompute of the experts keeps less for each row.
#
# ### Once to each machine
#
# DeepSeek-V3 spreads its 256 experts over 64 GPUs: 8 machines of 8 GPUs, 32 experts in each machine. Two of a token's
# 8 experts may be in the same machine. Then the slow network carries the same token there twice. So send one *copy* to
# each machine where a token has experts; inside, NVLink hands it on. On the way back a machine adds up what its experts
# made of the token, and sends one sum.

# %%
from course.figures.experts import copies

copies({1: (1, 2, 3), 2: (2,)})

# %% [markdown]
# What this saves depends on how many machines a token's experts lie in.

# %%
guess("machines", None, "8 different experts of 256, by chance, 32 in each of 8 machines: in how many machines are they?")

# %% [markdown]
# An example: 4 experts in 2 machines, k = 2. Experts 0 and 1 are in machine 0. Of the 6 pairs, all equally likely,
# 2 lie in one machine and 4 in both. The mean is (2 · 1 + 4 · 2) / 6 = 5/3.
#
# DeepSeek-V3 also sets a limit, **node-limited routing**: a token's experts lie in at most `most` = 4 machines. So a
# token chooses machines before it chooses experts. What is a machine worth to it? An example: three machines of four
# experts, k = 6, `most` = 2.
#
# | | machine 0 | machine 1 | machine 2 |
# |---|---|---|---|
# | scores | 0.9 0.4 0.2 0.1 | 0.7 0.6 0.5 0.3 | 0.8 0.3 0.1 0.0 |
# | worth | 1.5 | 1.8 | 1.2 |
# | chosen | 0.9 0.4 | 0.7 0.6 0.5 0.3 | |
#
# By what rule do the first two win, and how many experts does each of them give in the end?
#
# **Exercise.** `machines_of_a_token`: the mean, where all sets of k different experts are equally likely. `near`: the
# choice with a limit. Machine m of M holds experts m·E/M to (m+1)·E/M - 1; `most` divides k; a machine has at least
# k/most experts. Scores are what is compared, a bias included, so they may be negative. A token goes to exactly k
# experts of at most `most` machines, also where scores tie.

# %%
# %%exercise machines
import math

import torch


def machines_of_a_token(experts: int, k: int, machines: int) -> float:
    """In how many machines a token has experts, on average."""
    ### BEGIN SOLUTION
    return machines * (1 - math.comb(experts - experts // machines, k) / math.comb(experts, k))
    ### END SOLUTION


def near(scores: torch.Tensor, k: int, machines: int, most: int) -> torch.Tensor:
    """scores [T, E] -> map [T, E] bool: k experts in at most `most` of the machines."""
    ### BEGIN SOLUTION
    grouped = scores.unflatten(1, (machines, -1))
    worth = grouped.topk(k // most, -1).values.sum(-1)
    allowed = torch.zeros_like(worth, dtype=torch.bool).scatter(1, worth.topk(most, -1).indices, True)
    scores = grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(k, -1).indices, True)
    ### END SOLUTION


# %%
check("machines")

# %% [markdown]
# 16,384 tokens with random scores, without and with the limit.

# %%
# %%needs machines
import torch

scores = torch.rand(16384, 256, generator=torch.Generator().manual_seed(0))
free, limited = near(scores, 8, 8, 8), near(scores, 8, 8, 4)
met, met_limited = (map.unflatten(1, (8, -1)).any(-1).sum(-1).float() for map in (free, limited))
guessed("machines", round(machines_of_a_token(256, 8, 8), 1), "machines, by your formula")
print(f"without a limit: counted {met.mean():.1f}, never more than {met.max():.0f}")
print(f"at most 4 machines: never more than {met_limited.max():.0f};",
      f"{(free & ~limited).sum() / free.sum():.0%} of the rows go to another expert than without the limit")  # fmt: skip

# %% [markdown]
# That is the price of the limit: with random scores about a fifth of the rows do not go to the expert that scores
# best for them. DeepSeek-V3 trains with it from the first step, and the router learns to live with it. What it saves in
# seconds you see in section 7.
#
# ### What large models add
#
# | | what it does | who |
# |---|---|---|
# | **shared expert** | all tokens pass it: no other expert must learn what all tokens need | DeepSeek-V3, Qwen2-MoE |
# | **z-loss** | a penalty on (log Σ exp logit)² keeps the logits small, where rounding does less harm | ST-MoE |
#
# On a machine with a GPU the next cell (folded) runs the experts of a rank one after the other, and then all in one
# grouped product, with 8 and with 64 experts.

# %% jupyter={"source_hidden": true}
# %%torchrun -n 1 --gpus --name grouped --out grouped
import torch
from minimegatron.launch.rank import finish, init, report
from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.layers.moe.dispatch import Dispatched
from minimegatron.layers.moe.layer import Experts
from minimegatron.models.families import preset

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
    import matplotlib.pyplot as plt

    from minimegatron.viz.picture import INK, MEASURED

    rows, times = grouped.reports[0].values()
    fig, ax = plt.subplots(figsize=(7, 2.2))
    ax.barh(list(times), times.values(), color=MEASURED[0], edgecolor=INK)
    ax.set(xlabel="ms, forward and backward", title=f"{rows} rows, experts of Qwen3-30B-A3B")
    plt.show()

# %% [markdown]
# *This is a good place to stop: the end of part C.*
#
# ## 6 · Break it
#
# A reviewer of `finish` writes: "Gradients are means over a data-parallel group. Experts have a data-parallel group of
# their own, edp. So their mean is over edp." And changes it:
#
# ```python
# def finish(dense, expert, tokens, dp, edp):
#     of_dp, of_edp = all_reduce(torch.tensor(float(tokens)), dp), all_reduce(torch.tensor(float(tokens)), edp)
#     return all_reduce(dense, dp) / of_dp, all_reduce(expert, edp) / of_edp
# ```
#
# The folded cell trains with it on four ranks, forty steps with ep 2, beside the serial twin. Then it makes one step
# with ep 4. It prints the loss and the norm of the first gradient, and reports all gradients of the first step, yours
# and the twin's, as `evidence`.

# %% jupyter={"source_hidden": true}
# %%ranks 4 --needs route,permute,dispatch --name reviewed --timeout 120 --out evidence
import torch
from moe_parts import YourMoE, beside_twin, finish_model, gradient_norm, layer_with

from minimegatron.comm.collectives import all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config

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
# For forty steps the loss stays beside the twin's. Adam divides every gradient by its own running size, so a gradient
# that is too large by a constant factor changes almost nothing, unless the run clips. The norm of the first gradient is
# off, and with ep 4 by more.
#
# *Which* gradients are wrong, and how? Write the tool that answers this for any such bug: compare each gradient with
# the twin's.
#
# **Exercise.** `{name: factor}` of the gradients that are wrong. Right means: |got - want| ≤ 10⁻³ |want|. The factor is
# a number with |got - factor · want| ≤ 10⁻³ |factor · want|; `nan` if there is none. Leave out what is right. (|x| is
# the square root of the sum of squares of all elements. A gradient that holds NaN is wrong and has no factor.) For
# example, want = [1, -1] and got = [0.5, -0.5] has the factor 0.5; want = [3, 0] and got = [0, 3] has none.

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
        proportional = (mine - factor * right).norm() <= 1e-3 * (factor * right).norm()
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
# Only the experts are wrong, and by the factor ep. The router is right, so what came back from the experts was right.
# A missing sum would give another direction; this is a scale.
#
# The mistake is in the divisor. An expert's gradient holds tokens of *all* ranks: those of its ep group came by the
# all-to-all, those of other groups by the sum over edp. So it is divided by the tokens of all ranks. The reviewer
# divides by the tokens of edp, which are 1/ep of them. In terms of means: the factor is 1/dp and not 1/edp.
#
# In Megatron this divisor is a factor, `expert_gradient_scaling_factor` (`core/distributed`): 1/dp where the collective
# sums, edp/dp where it already takes the mean over edp.
#
# With SGD the experts would learn ep times as fast. And every large run clips. Too large gradients of the experts make
# the norm larger, so steps are clipped that need not be. Then *all other* weights learn too slowly with SGD; with Adam
# those steps count for less. Nothing crashes.

# %% [markdown]
# ## 7 · Explain
#
# Say your answer aloud before you read on.
#
# 1. *With k = 1, what does the softmax over the chosen logit teach the router?* Nothing: a softmax over one number is
#    1, and has no gradient. With k = 1 take the softmax over all experts first, as Switch does
#    (`moe_router_pre_softmax`).
# 2. *Why does a collapsed router not show in the loss?* Its few experts are as good as any MLP. What is lost is what
#    the others could have learned, and the time of the ranks that wait.
# 3. *Expert parallelism needs ranks. Which ones?* Those of dp (and cp, tp), which are there already. ep groups are
#    pieces of dp, so an expert has dp/ep copies where everything else has dp.
# 4. *Why must a rank that gets no rows still take part?* A collective is a call that all ranks of the group make. And
#    the gradients of its experts must exist, as zeros: the sum over edp adds them to those of other ranks.
# 5. *What does tensor parallelism do to all this?* tp ranks see the same tokens. Without sequence parallelism each
#    would dispatch them, and every expert would see them tp times. So experts with tp need sequence parallelism.
# 6. *Rows arrive at an expert in another order than on one rank. Is the result the same?* Each row is. The gradient of
#    the expert is a sum over rows: the same numbers in another order, so its last digits may differ, and nothing more.
# 7. *How few rows are too few for an expert?* It reads its 3hf weights from memory once, 2 bytes each in bf16, and
#    makes 6hf operations for each row. So with R rows it makes R operations for each byte that it reads. An H100 makes
#    989 · 10¹² operations and reads 3.35 · 10¹² bytes in a second. Below 989 / 3.35 ≈ 295 rows the expert waits for
#    its weights. In training an expert gets hundreds or thousands of rows (below). In serving, a step that makes one
#    token for each of 256 requests sends 8 rows to an expert of DeepSeek-V3, on average. So its makers decode on 320
#    GPUs together (section 3.4.2 of the report): the requests of all of them meet at each expert.
#
# **Exercise.** Numbers for one layer. Experts are gated: three matrices h × f. Tokens are those of one rank; tp = cp =
# 1; the load is even. Return a dict:
#
# * `parameters` of the whole layer, router included; `active_parameters`, those that a token uses;
# * `copies_of_an_expert` in the whole job;
# * `rows_of_an_expert`: how many rows one copy of an expert gets from all ranks that share it;
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

# %% [markdown]
# Three real layers on 400 TFLOP/s and 50 GB/s, 4096 tokens a rank, bf16, ep 8 with each rank in another machine.
# (Inside a machine, over NVLink at 450 GB/s, rows would travel a ninth as long. But in bf16 the experts of DeepSeek-V3
# alone need 17 GPUs of 80 GB, more than a machine has.) The last line answers the guess at the top of the lab.

# %%
# %%needs answers
from minimegatron.config import TransformerConfig
from minimegatron.models.families import preset

for name in ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"):
    c = TransformerConfig.from_dict(preset(name))
    said = answers(4096, c.hidden_size, c.moe_ffn_hidden_size, c.num_experts, c.moe_router_topk, 8, 64, 2, 4e14, 5e10)
    print(f"{name:14} f {c.moe_ffn_hidden_size:5}   an expert gets {said['rows_of_an_expert']:4.0f} rows; "
          f"a second of computing, {1 / said['compute_over_travel']:4.2f} s of travel")  # fmt: skip
guessed("travel", round(1 / said["compute_over_travel"], 1), "seconds of travel for a second of computing")

# %% [markdown]
# T, h and k cancel in that ratio. What is left of the model is f, the width of an expert; what is left of the machine
# is (P-1)/P, the bytes of a number, flops and bandwidth. With many small experts a token has more to choose from, and
# its rows travel longer than they are computed. What does DeepSeek-V3 do about it? Three things, one after the other:
# a copy for each machine (by your formula), at most four machines, and FP8 on the way there (a byte a number, and a
# scale of 4 bytes for 128 numbers; the way back stays bf16).

# %%
# %%needs answers machines
row, copy = 1 / said["compute_over_travel"], 1 / said["compute_over_travel"] / 8  # seconds: of 8 rows; of a copy
fp8 = (1 + 4 / 128 + 2) / (2 + 2)
for way, seconds in {
    "a row for each expert": row,
    "a copy for each machine": copy * machines_of_a_token(256, 8, 8),
    "at most four machines": copy * 4,
    "and FP8 on the way there": copy * 4 * fp8,
}.items():
    print(f"{way:25} {seconds:.1f} s of travel for a second of computing")

# %% [markdown]
# DeepSeek's report gives "approximately 1:1" for the whole model on its own machines (section 3.2.1). And what travels
# is hidden: meanwhile another microbatch is computed (DualPipe; in Megatron-LM `overlap_moe_expert_parallel_comm`).

# %%
progress()

# %% [markdown]
# ## Where this lives
#
# | here | minimegatron | Megatron-LM, `megatron/core/transformer/moe/` |
# |---|---|---|
# | router, balancing loss, capacity | `layers/moe/router.py` | `router.py`, `moe_utils.py` |
# | the bias | `layers/moe/balance.py` | `get_updated_expert_bias` in `moe_utils.py` |
# | rows, the journey | `layers/moe/permutation.py`, `layers/moe/dispatch.py` | `moe_utils.py`, `token_dispatcher.py` |
# | machines and their limit | `layers/moe/router.py`, `best` | `group_limited_topk` in `moe_utils.py` |
# | experts, grouped products, a shared expert | `layers/moe/layer.py` | `experts.py`, `moe_layer.py`, `shared_experts.py` |
# | the groups ep, edp | `comm/mesh.py` | `core/parallel_state.py` |
# | which gradient over which group | `parallel/data/ddp.py`, `parallel/data/finalize.py` | `core/distributed/`, DDP |
#
# What you built, as one sets it at work (arguments of Megatron-LM, there `--moe-...`):
#
# | argument | what it sets |
# |---|---|
# | `moe_router_load_balancing_type`, `moe_aux_loss_coeff` | over which tokens the balancing loss counts; its coeff |
# | `moe_router_enable_expert_bias`, `moe_router_bias_update_rate` | the bias and γ |
# | `moe_token_dispatcher_type` | `alltoall`, `allgather`; `flex` for DeepEP: one copy for each machine |
# | `moe_router_num_groups`, `moe_router_group_topk` | the machines M, and `most` |
# | `moe_expert_capacity_factor` | the capacity; without it dropless |
# | `moe_token_drop_policy` | `probs`: the lightest are dropped, as by your `limit`; `position`: the last |
# | `moe_grouped_gemm` | the experts of a rank in one grouped product |
#
# In PyTorch itself: `torch.nn.functional.grouped_mm` is the grouped product (private until 2.9, `torch._grouped_mm`);
# `all_to_all_single` is what you called. torchtitan has the journey, counts first, as `ExpertParallel` in
# `distributed/expert_parallel.py`.
#
# Shazeer et al. 2017 (arXiv 1701.06538); Lepikhin et al. 2020 (arXiv 2006.16668); Fedus et al. 2021 (arXiv
# 2101.03961); ST-MoE, Zoph et al. 2022 (arXiv 2202.08906); Wang et al. 2024 (arXiv 2408.15664); DeepSeek-V3 2024
# (arXiv 2412.19437); Qiu et al. 2025 (arXiv 2501.11873).
#
# Next: lab 06, data parallel, ZeRO and FSDP, where the optimizer's state, the gradients and at last the weights are
# shared out over dp.

# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Lab 06 · Data parallel, ZeRO and FSDP
#
# In lab 01 every rank held the whole model, saw its own samples, and summed its gradients with all other ranks. This
# works until the model no longer fits. Now the ranks go on seeing their own samples, and stop holding the same things:
# first the optimizer's state is shared out, then gradients, then the weights themselves.
#
# **You build** the flat buffer in which gradients travel; a reduce-scatter that runs while the backward pass does; an
# AdamW that updates a part of the weights; and weights that are gathered for the moment in which they are used. At the
# end four ranks train a small Llama with your code and follow one process step by step.
#
# **You need** lab 01 (all-reduce, reduce-scatter, all-gather, buckets with hooks) and AdamW. No GPU.
#
# | part | sections | time |
# |---|---|---|
# | A | 1 The problem · 2 Predict | 45 min |
# | B | 3 Implement | 2 h |
# | C | 4 Run · 5 See | 45 min |
# | D | 6 Break it · 7 Explain | 1 h |
#
# Together 4–5 hours. Each part ends at a place to stop.
# After a kernel restart: run the first cell, then go on where you were.

# %%
# %load_ext course
# %lab 06_data_parallel_zero

# %% [markdown]
# One number from the gut. Sixty-four GPUs train one model. Instead of a whole copy each GPU keeps one sixty-fourth of
# the weights, of the gradients and of Adam's state, and fetches the weights of a layer whenever it needs them. How
# many times the bytes of plain data parallelism does each GPU send in a step?

# %%
guess("times", None, "Each of 64 GPUs keeps 1/64 of everything. How many times the bytes of plain data parallelism?")

# %% [markdown]
# ## 1 · The problem
#
# A model of 7.5 billion parameters is trained with Adam in mixed precision. Each parameter takes 2 bytes for its fp16
# weight, 2 for its gradient, and 12 for the optimizer: a 4-byte copy of the weight and two 4-byte averages.

# %%
from minimegatron.viz.filled import boxes_filled

billions = 7.5
need = {"weights": 2 * billions, "gradients": 2 * billions, "Adam": 12 * billions, "together": 16 * billions}
boxes_filled(need, 80, title="7.5 B parameters on every GPU of a data-parallel run")

# %% [markdown]
# It needs 120 GB, and a GPU has 80, before there is a single activation. A run on 64 GPUs holds 64 equal copies of
# these 120 GB. Why should it?
#
# Look at what a rank does with each of the three:
#
# * **Adam's state** is read and written in the optimizer's step only, element by element. No element needs another.
#   If rank 0 updates the first part of the weights and rank 1 the second, each needs its part of the state only.
# * **Gradients** are read in the same step. A rank that updates a part of the weights needs the sums of that part.
# * **Weights** of a layer are needed while this layer computes, forward and backward, and at no other moment.
#
# The *Zero Redundancy Optimizer* (ZeRO) shares them out in this order. Stage 1 shares out the optimizer's state, stage
# 2 gradients as well, stage 3 weights as well. Stage 0 is plain data parallelism. Areas in the picture are bytes.

# %%
from minimegatron.viz.zero_stages import stage_grid

stage_grid(4)

# %% [markdown]
# ## 2 · Predict
#
# ### Bytes that are held
#
# An example to check by hand: 10 parameters of 2 + 2 + 12 bytes on 2 ranks, stage 2. Weights are whole: 20 bytes.
# Gradients and the optimizer's state are halved: 10 and 60 bytes.
#
# **Exercise.** The bytes that each rank holds. `weight`, `gradient` and `optimizer` are bytes of one parameter;
# padding is not counted.

# %%
# %%exercise bytes_held
def bytes_held(
    parameters: int, ranks: int, stage: int, weight: int, gradient: int, optimizer: int
) -> dict[str, float]:
    """{"weights": ..., "gradients": ..., "optimizer": ...} in bytes of one rank; stage 0, 1, 2 or 3."""
    ### BEGIN SOLUTION
    return {
        "weights": parameters * weight / (ranks if stage >= 3 else 1),
        "gradients": parameters * gradient / (ranks if stage >= 2 else 1),
        "optimizer": parameters * optimizer / (ranks if stage >= 1 else 1),
    }
    ### END SOLUTION


# %%
check("bytes_held")

# %% [markdown]
# The table of the ZeRO paper, with your function: 7.5 billion parameters on 64 ranks. The second row of each stage is
# Megatron's convention: bf16 weights, and *fp32* gradients, because sums over many microbatches lose digits in bf16.

# %%
# %%needs bytes_held
conventions = {"fp16, 2 + 2 + 12": (2, 2, 12), "Megatron's bf16, 2 + 4 + 12": (2, 4, 12)}
for stage in range(4):
    for name, each in conventions.items():
        held = bytes_held(7_500_000_000, 64, stage, *each)
        print(f"stage {stage}   {name:28} {sum(held.values()) / 1e9:6.1f} GB")

# %%
# %%needs bytes_held
from minimegatron.viz.zero_stages import stage_bars

owner = {"weights": "parameters", "gradients": "gradients", "optimizer": "main parameters and moments"}
bars = {}
for stage in range(4):
    held = bytes_held(7_500_000_000, 64, stage, 2, 2, 12)
    bars[f"stage {stage}"] = {owner[name]: nbytes for name, nbytes in held.items()}
stage_bars(bars, capacity=80e9, binary=False, title="7.5 B parameters on 64 ranks")

# %% [markdown]
# Stage 1 alone saves three quarters, and with it the model fits. What does it cost? The next exercise says.
#
# ### Bytes that are sent
#
# In lab 01 you built an all-reduce from a reduce-scatter and an all-gather. Each of the two sends (D-1)/D of the whole
# tensor from each of D ranks. ZeRO moves the two halves apart:
#
# | stage | gradients | weights |
# |---|---|---|
# | 0 | all-reduce, once a step | |
# | 1 | reduce-scatter, once a step | all-gather, after the step |
# | 2 | reduce-scatter, *every microbatch* | all-gather, after the step |
# | 3 | reduce-scatter, *every microbatch* | all-gather before the forward and again before the backward pass, *every microbatch* |
#
# A step may consist of several microbatches, whose gradients are added up. In stages 0 and 1 a rank adds them up in
# its own whole gradient, and sends once. In stage 2 there is no whole gradient that could wait. In stage 3 weights are
# gathered whenever a microbatch needs them. They may also be *kept* from the forward to the backward pass of a
# microbatch: that saves the second gather, and costs the memory of whole weights.
#
# An example: 2 ranks, weights of 8 bytes, gradients of 16 bytes, one microbatch. A rank keeps half of a tensor and
# sends half.
#
# | stage | a rank sends |
# |---|---|
# | 0 | 2 · 16/2 = 16 bytes |
# | 1 and 2 | 16/2 + 8/2 = 12 bytes |
# | 3 | 16/2 + 2 · 8/2 = 16 bytes |
#
# **Exercise.** The bytes that each rank sends in one step. `kept` matters in stage 3 only.

# %%
# %%exercise bytes_sent
def bytes_sent(
    stage: int, weights: int, gradients: int, ranks: int, microbatches: int = 1, kept: bool = False
) -> float:
    """`weights`, `gradients`: bytes of the whole model's."""
    ### BEGIN SOLUTION
    share = (ranks - 1) / ranks
    if stage == 0:
        return 2 * share * gradients
    if stage == 1:
        return share * (gradients + weights)
    if stage == 2:
        return share * (microbatches * gradients + weights)
    return share * microbatches * (gradients + (1 if kept else 2) * weights)
    ### END SOLUTION


# %%
check("bytes_sent")

# %%
# %%needs bytes_sent
plain = bytes_sent(0, 15, 15, 64)
for microbatches in (1, 8):
    times = (f"stage {s}: {bytes_sent(s, 15, 15, 64, microbatches) / plain:5.2f}" for s in range(4))
    print(f"{microbatches} microbatch{'es' * (microbatches > 1)} of a step, bytes against stage 0   " + "   ".join(times))

# %% [markdown]
# With one microbatch stages 1 and 2 send exactly as much as plain data parallelism: an all-reduce *is* a reduce-scatter
# and an all-gather. Stage 3 sends one more all-gather, 1.5 times as much in all. With several microbatches stages 2 and
# 3 send several times as much, and stage 1 does not. Keep this in mind for the questions at the end.
#
# *This is a good place to stop: the end of part A.*
#
# ## 3 · Implement
#
# ### The flat buffer
#
# A model has hundreds of gradients, from a few bytes to many megabytes. They lie in one flat buffer, which is cut into
# *buckets* that travel one by one. The last parameter comes first, because the backward pass computes its gradient
# first: the first bucket is full while most gradients are still to come.
#
# Each bucket is cut into D equal parts, and rank r owns the r-th part of *every* bucket. So the size of a bucket must
# divide by D, and some elements at its end may belong to no parameter. This *padding* is 0 and stays 0.
#
# An example to check by hand: parameters 0, 1, 2 have 4, 2, 5 elements. A bucket is full when it holds 6 elements or
# more, and there are 2 ranks.
#
# 1. Parameter 2 comes first, at 0 to 5. The bucket holds 5 elements and is not full.
# 2. Parameter 1 follows, at 5 to 7. Now the bucket holds 7 and is full. It is padded to 8.
# 3. Parameter 0 lies at 8 to 12. No parameter is left, so the bucket ends with 4 elements, and needs no padding.
#
# Rank 0 owns elements 0 to 4 of the first bucket and 8 to 10 of the second.

# %%
from minimegatron.parallel.buckets import BucketSpan, BufferLayout, Span
from minimegatron.viz.buckets import buffer_strip

of_params = (Span(8, 12), Span(5, 7), Span(0, 5))
of_buckets = (BucketSpan(Span(0, 8), 7, (2, 1)), BucketSpan(Span(8, 12), 4, (0,)))
buffer_strip(BufferLayout(of_params, of_buckets, 2), ["parameter 0", "parameter 1", "parameter 2"],
             title="4, 2 and 5 elements for 2 ranks")  # fmt: skip

# %% [markdown]
# **Exercise.** `places[i]` is where parameter i starts. `buckets` are [start, stop] of each bucket, padding included,
# from the left. A bucket is closed after the parameter with which it holds `bucket_size` elements or more, and the next
# one starts where it stops.

# %%
# %%exercise lay_out
def lay_out(numels: list[int], bucket_size: int, ranks: int) -> dict[str, list]:
    """{"places": [8, 5, 0], "buckets": [[0, 8], [8, 12]]} in the example; numels has the order of the model."""
    ### BEGIN SOLUTION
    places, buckets = [0] * len(numels), []
    start = stop = 0
    for i in reversed(range(len(numels))):
        places[i] = stop
        stop += numels[i]
        if stop - start >= bucket_size or i == 0:
            stop = -(-stop // ranks) * ranks
            buckets.append([start, stop])
            start = stop
    return {"places": places, "buckets": buckets}
    ### END SOLUTION


# %%
check("lay_out")

# %% [markdown]
# ### Pieces
#
# Which part of parameter 2 does each rank have? It lies at 0 to 5, and rank 0's part of the bucket ends at 4. So rank 0
# has its elements 0 to 4, and rank 1 has element 4 alone, as the first of its part. A parameter may lie in the parts of
# several ranks, and a part may hold pieces of several parameters. Without this rule rank 0 would own whole matrices,
# and ranks would own different amounts.
#
# **Exercise.** What a rank owns of each parameter, bucket by bucket from the left. A piece is `(i, first, last, n, at)`:
# elements first to last (last not included) of the flattened parameter i lie in this rank's part of bucket n, and begin
# there at `at`. Parameters of which it owns nothing are left out.

# %%
# %%exercise my_pieces
def my_pieces(
    numels: list[int], places: list[int], buckets: list[list[int]], ranks: int, rank: int
) -> list[tuple[int, int, int, int, int]]:
    """[(2, 0, 4, 0, 0), (0, 0, 2, 1, 0)] for rank 0 of the example."""
    ### BEGIN SOLUTION
    found = []
    for n, (start, stop) in enumerate(buckets):
        share = (stop - start) // ranks
        low = start + rank * share
        for i in reversed(range(len(numels))):
            first, last = max(places[i], low), min(places[i] + numels[i], low + share)
            if first < last:
                found.append((i, first - places[i], last - places[i], n, first - low))
    return found
    ### END SOLUTION


# %%
check("my_pieces")

# %% [markdown]
# Your layout of a small model, three layers with a matrix and a bias each, on four ranks. Find the parameter of which
# three ranks own a piece.

# %%
# %%needs lay_out my_pieces
from minimegatron.parallel.buckets import BucketSpan, BufferLayout, Span
from minimegatron.viz.buckets import buffer_strip

names = ["w0", "b0", "w1", "b1", "w2", "b2"]
numels, ranks = [30, 5, 25, 5, 15, 3], 4
mine = lay_out(numels, 30, ranks)
places = tuple(Span(place, place + numel) for place, numel in zip(mine["places"], numels))
ends = [(Span(start, stop), [i for i, place in enumerate(places) if start <= place.start < stop])
        for start, stop in mine["buckets"]]  # fmt: skip
buckets = tuple(BucketSpan(span, max(places[i].stop for i in inside) - span.start, tuple(inside)) for span, inside in ends)
for r in range(ranks):
    print(f"rank {r}:", "  ".join(f"{names[i]}[{a}:{b}]" for i, a, b, *_ in my_pieces(numels, **mine, ranks=ranks, rank=r)))
buffer_strip(BufferLayout(places, buckets, ranks), names, title="Three layers on four ranks")

# %% [markdown]
# ### Gradients that leave early
#
# In lab 01 a bucket was all-reduced as soon as it was full. Here it is *reduce-scattered*: each rank gets its part of
# the sum, and the whole bucket is of no use to it any more. To save memory it must go. A rank holds, at any moment:
#
# * its shards of the buckets that have been summed;
# * one bucket on its way;
# * one bucket that fills.
#
# So when a bucket is full, send it; if another one is still on its way, wait for *that one* and let it go. It has had
# the time of a whole bucket's backward to travel. Never wait in a hook for the bucket that has just left: then nothing
# is computed while it travels.
#
#     backward   | layer 3 | layer 2 | layer 1 | layer 0 |
#     network              | bucket 0       | bucket 1        |
#     alive      |-- bucket 0 fills, travels --|
#                          |--------- bucket 1 fills, travels -|
#
# Take the gradient out of `p.grad` as soon as it is there, and set `p.grad = None`, or the whole gradient is alive a
# second time. `p.register_post_accumulate_grad_hook(f)` calls `f(p)` when `p.grad` is complete.
#
# **Exercise.** `places` and `buckets` are those of `lay_out`. `finish` is called after the backward pass. It returns
# this rank's shard of each bucket, summed over the ranks of `group`, in the order of the buckets. A parameter may have
# no gradient in a step: its bucket is then not full, and leaves in `finish`, with zeros in that place. There are
# several steps.

# %%
# %%exercise reduce_early
from functools import partial

import torch
import torch.distributed as dist


class GradientShards:
    def __init__(
        self, params: list[torch.Tensor], places: list[int], buckets: list[list[int]],
        group: dist.ProcessGroup | None = None,
    ):
        """Parameters get a hook each; places[i] is where the gradient of params[i] starts in the buffer."""
        ### BEGIN SOLUTION
        self.buckets, self.group, self.example = buckets, group, params[0]
        self.members = [0] * len(buckets)
        for p, place in zip(params, places, strict=True):
            n = next(n for n, (start, stop) in enumerate(buckets) if start <= place < stop)
            self.members[n] += 1
            p.register_post_accumulate_grad_hook(partial(self.arrived, n, place - buckets[n][0]))
        self.begin()
        ### END SOLUTION

    ### BEGIN SOLUTION
    def begin(self):
        self.missing = list(self.members)
        self.whole, self.shards, self.travelling = {}, {}, []

    def open(self, n):
        if n not in self.whole:
            start, stop = self.buckets[n]
            self.whole[n] = self.example.new_zeros(stop - start)
        return self.whole[n]

    def arrived(self, n, at, p):
        self.open(n)[at : at + p.numel()] = p.grad.flatten()
        p.grad = None
        self.missing[n] -= 1
        if self.missing[n] == 0:
            self.send(n)

    def send(self, n):
        whole = self.open(n)
        self.shards[n] = whole.new_empty(len(whole) // dist.get_world_size(self.group))
        work = dist.reduce_scatter_tensor(self.shards[n], whole, group=self.group, async_op=True)
        self.travelling.append((n, work))
        if len(self.travelling) > 1:
            self.let_go()

    def let_go(self):
        n, work = self.travelling.pop(0)
        work.wait()
        del self.whole[n]

    ### END SOLUTION
    def finish(self) -> list[torch.Tensor]:
        """The shards of this step, complete; then all is ready for the next step."""
        ### BEGIN SOLUTION
        for n in range(len(self.buckets)):
            if n not in self.shards:
                self.send(n)
        while self.travelling:
            self.let_go()
        shards = [self.shards[n] for n in range(len(self.buckets))]
        self.begin()
        return shards
        ### END SOLUTION


# %%
check("reduce_early")

# %% [markdown]
# ### AdamW for a part of the weights
#
# The weights of a bucket lie in a flat buffer too, the parameters are views of it. Rank r has the sum of the gradients
# of the r-th part, and updates this part. With the gradient g of an element, in step t = 1, 2, ...:
#
# $$w \leftarrow (1 - \text{lr} \cdot \text{decay})\,w \qquad m \leftarrow \beta_1 m + (1-\beta_1)\,g \qquad
# v \leftarrow \beta_2 v + (1-\beta_2)\,g^2$$
#
# $$w \leftarrow w - \text{lr} \cdot \frac{m / (1-\beta_1^t)}{\sqrt{v / (1-\beta_2^t)} + \epsilon}$$
#
# Then each rank has new weights in its own part and old ones elsewhere, and an all-gather brings the parts together.
#
# Biases and norms usually do not decay, and in a flat buffer nothing shows where one ends. Therefore `my_pieces`: it
# tells which stretches of this rank's part belong to matrices. They come as `decay`, a list of (start, stop) *within
# the part*. It differs from rank to rank and may be empty.
#
# An example: weights [1, 2, 3, 4] on 2 ranks, lr 0.1, weight decay 0.5, β = 0.9, 0.95. Rank 0 owns [1, 2], its gradient
# is [1, -1], and only the first weight decays. After one step m / (1 - β₁) = g and v / (1 - β₂) = g², so each weight moves
# by 0.1 against the sign of its gradient: [0.95 - 0.1, 2 + 0.1] = [0.85, 2.1].
#
# **Exercise.** `weights` is the flat buffer; change it in place. `step` gets this rank's part of the summed gradient.
# State of other ranks' parts must not exist here: the check counts the bytes that stay.

# %%
# %%exercise sharded_adamw
import torch
import torch.distributed as dist


class ShardedAdamW:
    def __init__(
        self, weights: torch.Tensor, decay: list[tuple[int, int]], lr: float, weight_decay: float,
        betas: tuple[float, float], eps: float, group: dist.ProcessGroup | None = None,
    ):
        """weights [n], n divides by the number of ranks of `group`."""
        ### BEGIN SOLUTION
        self.weights, self.decay, self.group = weights, decay, group
        self.lr, self.weight_decay, self.betas, self.eps = lr, weight_decay, betas, eps
        self.own = weights.chunk(dist.get_world_size(group))[dist.get_rank(group)]
        self.m, self.v, self.t = torch.zeros_like(self.own), torch.zeros_like(self.own), 0
        ### END SOLUTION

    @torch.no_grad()
    def step(self, grad: torch.Tensor) -> None:
        """grad: of this rank's part. Afterwards `weights` is new everywhere, on every rank."""
        ### BEGIN SOLUTION
        b1, b2 = self.betas
        self.t += 1
        for start, stop in self.decay:
            self.own[start:stop] *= 1 - self.lr * self.weight_decay
        self.m.lerp_(grad, 1 - b1)
        self.v.lerp_(grad * grad, 1 - b2)
        size = (self.v / (1 - b2**self.t)).sqrt() + self.eps
        self.own -= self.lr * self.m / (1 - b1**self.t) / size
        dist.all_gather_into_tensor(self.weights, self.own.clone(), group=self.group)
        ### END SOLUTION


# %%
check("sharded_adamw")

# %% [markdown]
# With `lay_out`, `my_pieces`, `reduce_early` and this you have ZeRO-2. (For ZeRO-1 a whole gradient stays alive, and is
# reduce-scattered after the last microbatch.)
#
# ### Weights on use
#
# In stage 3 a rank has its part of the weights only. A *unit* is what is gathered at once, usually one layer: its
# weights lie in one flat buffer, padded, of which this rank has the shard. Before a unit runs, its weights must be
# whole; after it, they are let go. The next unit's weights travel meanwhile:
#
#     forward    gather 0 | unit 0   | unit 1   | unit 2   |
#                         | gather 1 | gather 2 |
#     backward            | unit 2           | unit 1           | unit 0           |
#                gather 2 | gather 1         | gather 0         |
#                                            | reduce-scatter 2 | reduce-scatter 1 | reduce-scatter 0
#
# At any moment the weights of two units are whole: the one that runs and the next one. (For a moment there may be a
# third, the one that ran before.) The last unit of the forward pass is the first of the backward pass. Its weights may
# stay, or be gathered a second time.
#
# Autograd would keep each weight for the backward pass, so a real implementation must take the memory away under
# autograd's hands: FSDP resizes the storage to 0 bytes and back. Here the two passes are functions that you call, and
# nothing keeps what you let go:
#
# * `forward(i, whole, x)` runs unit i and returns its output. `whole` is the flat tensor of all its weights.
# * `backward(i, whole, dy)` returns `(dx, gradient)`, the gradient flat and padded as `whole` is.
#
# An example: 2 ranks, two units, all linear. Unit 0 has the weights [2, 3], so rank 0 has [2] and rank 1 has [3]. Unit 1
# has [5, 7]. For x = 1 the output is 1 · (2 · 5 + 3 · 7) = 31, on a rank that has [2] and [5] only.
#
# **Exercise.** Run all units forward from the first to the last, call `gradient_of(y)` with the output of the last one,
# and run all units backward. Return y and, for each unit, this rank's shard of the gradient, summed over `group`.
# Gradients leave as they come: unit i's travels while unit i-1 runs backward.

# %%
# %%exercise gather_on_use
from collections.abc import Callable

import torch
import torch.distributed as dist


def forward_backward(
    shards: list[torch.Tensor], forward: Callable, backward: Callable, x: torch.Tensor, gradient_of: Callable,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """y and the shards of the gradients, in the order of the units."""
    ### BEGIN SOLUTION
    ranks, units = dist.get_world_size(group), len(shards)

    def ask(i):
        if not 0 <= i < units:
            return None, None
        whole = shards[i].new_empty(ranks * shards[i].numel())
        return whole, dist.all_gather_into_tensor(whole, shards[i], group=group, async_op=True)

    following = ask(0)
    for i in range(units):
        whole, work = following
        work.wait()
        following = ask(i + 1)
        x = forward(i, whole, x)
    y, dy = x, gradient_of(x)

    gradients, leaving = [torch.empty_like(shard) for shard in shards], None
    for i in reversed(range(units)):
        if i < units - 1:  # the last unit's weights are still here
            whole, work = following
            work.wait()
        following = ask(i - 1)
        dy, gradient = backward(i, whole, dy)
        if leaving:
            leaving[0].wait()
        leaving = dist.reduce_scatter_tensor(gradients[i], gradient, group=group, async_op=True), gradient
    leaving[0].wait()
    return y, gradients
    ### END SOLUTION


# %%
check("gather_on_use")

# %% [markdown]
# ## end

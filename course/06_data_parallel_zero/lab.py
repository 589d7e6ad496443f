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
# AdamW that updates a part of the weights; weights that are gathered for the moment in which they are used; and the same
# with FSDP2. You sum as hundreds of ranks would, and say from how many on sharding costs more than it saves. At the end
# four ranks train a small Llama with your ZeRO-2 and follow one process step by step.
#
# **You need** lab 01 (all-reduce, reduce-scatter, all-gather, buckets with hooks) and AdamW. No GPU.
#
# | part | sections | time |
# |---|---|---|
# | A | 1 The problem · 2 Predict | 45 min |
# | B | 3 Implement | 2 h 30 min |
# | C | 4 Run · 5 See | 1 h 15 min |
# | D | 6 When sharding stops paying | 45 min |
# | E | 7 Break it · 8 Explain | 1 h |
#
# Together about 6 hours. Each part ends at a place to stop.
# After a kernel restart: run the first cell, then go on where you were. A picture needs the run above it.

# %%
# %load_ext course
# %lab 06_data_parallel_zero

# %% [markdown]
# One number from the gut. Sixty-four GPUs train one model. Instead of a whole copy each GPU keeps one sixty-fourth of
# the weights, of the gradients and of Adam's state, and fetches the weights of a layer whenever it needs them. A step
# is one microbatch, and a gradient has as many bytes as its weight. How many times as many bytes as in plain data
# parallelism does each GPU send in a step?

# %%
guess("times", None, "Each of 64 GPUs keeps 1/64 of everything. How many times the bytes of plain data parallelism?")

# %% [markdown]
# ## 1 · The problem
#
# A model of 7.5 billion parameters is trained with Adam in mixed precision. Each parameter takes 2 bytes for its fp16
# weight, 2 for its gradient, and 12 for the optimizer: a 4-byte copy of the weight and two 4-byte averages.

# %%
from course.figures.counts import boxes_filled

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
# 2 gradients as well, stage 3 weights as well. Stage 0 is plain data parallelism. Areas in the picture are bytes: all
# parameters lie from left to right, the bytes of one parameter from top to bottom.

# %%
from course.figures.data_parallel import stage_grid

stage_grid(4)

# %% [markdown]
# ## 2 · Predict
#
# ### Bytes that are held
#
# D is the number of ranks from here on. An example to check by hand: 10 parameters of 2 + 2 + 12 bytes on 2 ranks,
# stage 2. Weights are whole: 20 bytes. Gradients and the optimizer's state are halved: 10 and 60 bytes.
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

# %% [markdown]
# The same as formulas, with Ψ parameters:
#
# | stage | bytes of a rank |
# |---|---|
# | 0 | 16Ψ |
# | 1 | 4Ψ + 12Ψ/D |
# | 2 | 2Ψ + 14Ψ/D |
# | 3 | 16Ψ/D |

# %%
# %%needs bytes_held
from course.figures.data_parallel import stage_bars


def by_owner(held):
    """The optimizer's 12 bytes are a copy of the weight, 4, and two averages (moments), 8."""
    return {"parameters": held["weights"], "gradients": held["gradients"],
            "main parameters": held["optimizer"] / 3, "moments": held["optimizer"] * 2 / 3}  # fmt: skip


bars = {f"stage {stage}": by_owner(bytes_held(7_500_000_000, 64, stage, 2, 2, 12)) for stage in range(4)}
stage_bars(bars, capacity=80e9, binary=False, title="7.5 B parameters on 64 ranks")

# %% [markdown]
# Stage 1 alone saves three quarters (two thirds with Megatron's fp32 gradients), and with it the model fits. What does
# it cost? The next exercise says.
#
# ### Bytes that are sent
#
# In lab 01 you built an all-reduce from a reduce-scatter and an all-gather. Each of the two sends (D-1)/D of the whole
# tensor from each of D ranks. ZeRO moves the two halves apart. The reduce-scatter stays with the gradients, because a
# rank that updates a part needs the sums of this part. The all-gather moves to the *weights*: after its step a rank has
# new weights of its own part only.
#
# How often? Memory decides. A step may consist of several microbatches, whose gradients are added up. A rank that holds
# a whole gradient may add up first and send once a step. A rank that holds a shard of it has no place for the whole
# until the next microbatch. With weights it is the same: where they are whole all the time, new ones travel once a
# step. In stage 3 they are whole only while a pass uses them, and each microbatch has two passes. (A rank may also
# *keep* them from the forward to the backward pass of a microbatch. This takes the memory of whole weights.)
#
# An example: 4 ranks, weights of 8 bytes, gradients of 16 bytes, one microbatch. A rank keeps a quarter of a tensor and
# sends three quarters: 12 bytes of the gradients, 6 of the weights.
#
# | stage | a rank sends |
# |---|---|
# | 0 | 2 · 12 = 24 bytes |
# | 1 and 2 | 12 + 6 = 18 bytes |
# | 3 | 12 + 2 · 6 = 24 bytes |
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
whole = 15_000_000_000  # bytes of 7.5 B fp16 weights, and of their gradients
plain = bytes_sent(0, whole, whole, 64)
guessed("times", bytes_sent(3, whole, whole, 64) / plain, "times the bytes of plain data parallelism")
for microbatches in (1, 8):
    times = (f"stage {s}: {bytes_sent(s, whole, whole, 64, microbatches) / plain:5.2f}" for s in range(4))
    print(f"microbatches {microbatches}   bytes against stage 0   " + "   ".join(times))

# %% [markdown]
# Here a weight has as many bytes as its gradient. Then, with one microbatch, stages 1 and 2 send exactly as much as
# plain data parallelism: an all-reduce *is* a reduce-scatter and an all-gather. Stage 3 sends one more all-gather, 1.5
# times as much in all. With several microbatches stages 2 and 3 send several times as much, and stage 1 does not. Keep
# this in mind for the questions at the end.
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
# be a multiple of D. Where its parameters are no multiple, elements that belong to no parameter are added at its end.
# This *padding* is 0 and stays 0.
#
# An example to check by hand: parameters 0, 1, 2 have 4, 2, 5 elements. A bucket is full when it holds 6 elements or
# more, and there are 2 ranks. "At 0 to 5" means elements 0, 1, 2, 3 and 4, as in Python: the last number is not
# included.
#
# 1. Parameter 2 comes first, at 0 to 5. The bucket holds 5 elements and is not full.
# 2. Parameter 1 follows, at 5 to 7. Now the bucket holds 7 and is full. It is padded to 8.
# 3. Parameter 0 lies at 8 to 12. No parameter is left, so the bucket ends with 4 elements, and needs no padding.
#
# Rank 0 owns 0 to 4, the first half of the first bucket, and 8 to 10, the first half of the second.

# %%
from minimegatron.parallel.data.buckets import BucketSpan, BufferLayout, Span
from course.figures.data_parallel import buffer_strip

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
# several ranks, and a part may hold pieces of several parameters. If whole parameters were dealt out instead, ranks
# would own different amounts.
#
# **Exercise.** What a rank owns of each parameter, in the order of the buffer from the left: bucket by bucket, and
# within a bucket the last parameter first. A piece is `(i, first, last, n, at)`: elements first to last of the
# flattened parameter i lie in this rank's part of bucket n, and begin there at `at`. Parameters of which it owns
# nothing are left out.

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
# all four ranks own a piece.

# %%
# %%needs lay_out my_pieces
from minimegatron.parallel.data.buckets import BucketSpan, BufferLayout, Span
from course.figures.data_parallel import buffer_strip

names = ["w0", "b0", "w1", "b1", "w2", "b2"]
numels, ranks = [30, 5, 25, 5, 15, 3], 4
mine = lay_out(numels, 30, ranks)
places = tuple(Span(place, place + numel) for place, numel in zip(mine["places"], numels))
ends = [(Span(start, stop), [i for i, place in enumerate(places) if start <= place.start < stop])
        for start, stop in mine["buckets"]]  # fmt: skip
buckets = tuple(BucketSpan(span, span.size, tuple(inside)) for span, inside in ends)
for r in range(ranks):
    pieces = my_pieces(numels, **mine, ranks=ranks, rank=r)
    print(f"rank {r}:", "  ".join(f"{names[i]}[{first}:{last}]" for i, first, last, *_ in pieces))
buffer_strip(BufferLayout(places, buckets, ranks), names, title="Three layers on four ranks")

# %% [markdown]
# ### Gradients that leave early
#
# In lab 01 a bucket was all-reduced as soon as it was full. Here it is *reduce-scattered*: each rank gets its part of
# the sum, and the whole bucket is of no use to it any more. So it goes. At any moment a rank has room for its shards,
# two buckets and two gradients; a bucket has up to eight gradients. With a bucket for each layer:
#
#     backward   | layer 3  | layer 2  | layer 1  | layer 0  |
#     network               | bucket 0 | bucket 1 | bucket 2 | bucket 3 |
#     alive      |  bucket 0 fills,    | bucket 2 fills,     |
#                |  then travels       | then travels        |
#                           | bucket 1 fills,     | bucket 3 fills,     |
#                           | then travels        | then travels        |
#
# A rank that waits at once for what it has sent hides nothing. A rank that waits at the end has a whole gradient in
# memory. When does yours wait, and for which bucket? The timeline says it. And a gradient that stays in `p.grad` counts
# as well. `p.register_post_accumulate_grad_hook(f)` calls `f(p)` when `p.grad` is complete.
#
# **Exercise.** `places` and `buckets` are those of `lay_out`. `finish` is called after the backward pass. It returns
# this rank's shard of each bucket, summed over the ranks of `group` by one reduce-scatter for each bucket, in the order
# of the buckets. A parameter may have no gradient in a step, on all ranks alike: its bucket does not become full, and
# leaves in `finish`, with zeros in that place. (Until then it is alive beside the two.) One object serves many steps: a
# backward pass, then `finish`, and again.

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
# of the r-th part, and updates this part as `torch.optim.AdamW` would: by two averages, of the gradient and of its
# square, each corrected for having begun at 0, and with a decay that goes into neither. Write the step of one element
# down before you go on: what is kept from step to step, and where does ε stand? (`help(torch.optim.AdamW)` has the
# formula.)
#
# Then each rank has new weights in its own part and old ones elsewhere, and an all-gather brings the parts together.
#
# Biases and norms usually do not decay, and in a flat buffer nothing shows where one ends. `my_pieces` tells which
# stretches of this rank's part belong to matrices. They come as `decay`, a list of (start, stop) *within the part*. It
# differs from rank to rank and may be empty.
#
# An example: weights [1, 2, 3, 4] on 2 ranks, lr 0.1, weight decay 0.5, β = 0.9, 0.95. Rank 0 owns [1, 2], its gradient
# is [1, -1], and only the first weight decays. After one step the corrected averages are g and g², so each weight moves
# by 0.1 against the sign of its gradient: [0.95 - 0.1, 2 + 0.1] = [0.85, 2.1]. If the next gradient is [1, -1] as well,
# they move by 0.1 once more.
#
# **Exercise.** `weights` is the flat buffer; change it in place: the parameters are views of this memory. `step` gets
# this rank's part of the summed gradient, and leaves it as it is. State of other ranks' parts must not exist here: the
# check counts the bytes of the tensors that stay. `weights` may be bf16 where the gradient is fp32. Many small steps
# must add up then, too: what is 1.5 - 0.003 in bf16? (Here and in all exercises with tensors the dtype stays what it is;
# float64 is tried too.)

# %%
# %%exercise sharded_adamw
import torch
import torch.distributed as dist


class ShardedAdamW:
    def __init__(
        self, weights: torch.Tensor, decay: list[tuple[int, int]], lr: float, weight_decay: float,
        betas: tuple[float, float], eps: float, group: dist.ProcessGroup | None = None,
    ):
        """weights [n], where n is a multiple of the number of ranks of `group`."""
        ### BEGIN SOLUTION
        self.weights, self.decay, self.group = weights, decay, group
        self.lr, self.weight_decay, self.betas, self.eps = lr, weight_decay, betas, eps
        own = weights.chunk(dist.get_world_size(group))[dist.get_rank(group)]
        self.own = own.float() if own.dtype == torch.bfloat16 else own  # a view, where nothing is lost by it
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
        dist.all_gather_into_tensor(self.weights, self.own.to(self.weights.dtype, copy=True), group=self.group)
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
# whole; after it, they are dropped. The next unit's weights travel meanwhile:
#
#     forward    gather 0 | unit 0   | unit 1   | unit 2   |
#                         | gather 1 | gather 2 |
#
# Draw the backward pass before you program it. It runs unit 2, unit 1, unit 0, and two kinds of messages travel: weights
# and gradients. Which of them are on their way while unit 1 runs? How many gathers has your drawing, of three units?
#
# While a unit runs, the weights of at most two units are whole or on their way: its own, and those of the next one. The
# weights of the unit before are gone. (Two fixed buffers that take turns are as good: the next weights are written over
# the old ones.) The last unit of the forward pass is the first of the backward pass. Its weights may stay, or be
# gathered a second time.
#
# Autograd would keep each weight for the backward pass, so a real implementation must take the memory away under
# autograd's hands: FSDP resizes the storage to 0 bytes and back. Here the two passes are functions that you call, and
# nothing keeps what you drop:
#
# * `forward(i, whole, x)` runs unit i and returns its output. `whole` is the flat tensor of all its weights.
# * `backward(i, whole, dy)` returns `(dx, gradient)`, the gradient flat and padded as `whole` is.
#
# An example: 2 ranks, two units, all linear. Unit 0 has the weights [2, 3], so rank 0 has [2] and rank 1 has [3]. Unit
# 1 has [5, 7]. For x = 1 the output is 1 · (2 · 5 + 3 · 7) = 31, on a rank that has [2] and [5] only. Let
# `gradient_of` return 1, and x be 1 on rank 0 and 10 on rank 1. Then the gradient of unit 1 is [2, 3] on rank 0 and [20,
# 30] on rank 1, and rank 0 returns [22] for it. For unit 0 it returns [55].
#
# **Exercise.** Run all units forward from the first to the last, call `gradient_of(y)` with the output of the last
# one, and run all units backward. Return y and, for each unit, this rank's shard of the gradient, summed over `group`.
# A gradient leaves as soon as it is there, and nobody waits for it before another unit has run. When a unit runs
# backward, at most one gradient is on its way.

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

    gradients, leaving = [None] * units, None
    for i in reversed(range(units)):
        if i < units - 1:  # the last unit's weights are still here
            whole, work = following
            work.wait()
        following = ask(i - 1)
        dy, gradient = backward(i, whole, dy)
        gradients[i] = torch.empty_like(shards[i])
        if leaving:
            leaving[0].wait()
        leaving = dist.reduce_scatter_tensor(gradients[i], gradient, group=group, async_op=True), gradient
    leaving[0].wait()
    return y, gradients
    ### END SOLUTION


# %%
check("gather_on_use")

# %% [markdown]
# ### The same at work
#
# At work you type fifteen lines of FSDP2 in place of all this. Torch gathers, prefetches, frees and reduces. What you
# decide is which parameters make a unit, in which dtypes they travel, and when. A line that you forget changes no loss.
# It costs memory or messages, and nobody tells you.
#
# | you type | what it does |
# |---|---|
# | `with torch.device("meta"):` | what is made in the block has shapes and no memory |
# | `fully_shard(m, mesh=mesh, mp_policy=policy)` | takes all parameters in `m` that no earlier call has taken, as one unit. Each becomes a `DTensor`: a rank holds some of its rows |
# | `MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...)` | dtype in which a unit is gathered and computes; dtype in which its gradients are summed |
# | `m.to_empty(device="cpu")` | gives `m` memory, with any numbers in it |
# | `model.init_weights()` | the model's own: writes the first weights. Torch has no such method; most models have one |
# | `model.set_requires_gradient_sync(b)` | whether the backward passes from here on send gradients. Where they do not, the rank adds them up, *whole* |
# | `torch.nn.utils.clip_grad_norm_(parameters, limit)` | clips by the norm of what all ranks hold, and returns it, as a DTensor: `.full_tensor()` is its value |
#
# Two things it does unasked. The root, which is the unit of the model itself, keeps its weights from the forward to the
# backward pass; other units are gathered again. And gradients are *averaged* over the ranks; yours are summed.
#
# **Exercise.** Two functions.
#
# * `sharded`: `build()` makes the model, `model.blocks` are its blocks, and it has parameters outside of them. Return
#   the model with its first weights, each block a unit, and all other parameters one more. At no moment does a rank
#   have the whole model.
# * `one_step`: a microbatch is a pair (x, y), and `model(x, y)` is the mean loss of its samples; all microbatches of
#   all ranks have as many. They run one after the other, for the activations of all would not fit. The step follows
#   the gradient of the mean over all these samples, clipped to `limit`. Gradients travel once a step. Return the norm
#   before clipping, which is the same number on every rank.

# %%
# %%exercise fsdp2
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def sharded(
    build: Callable[[], nn.Module], mesh: DeviceMesh, param_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> nn.Module:
    """The model on the CPU, cut over the ranks of `mesh`, with its first weights."""
    ### BEGIN SOLUTION
    with torch.device("meta"):
        model = build()
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    model.init_weights()
    return model
    ### END SOLUTION


def one_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, microbatches: list[tuple[torch.Tensor, torch.Tensor]],
    limit: float,
) -> torch.Tensor:
    """The norm of the gradient before clipping; the optimizer has made its step."""
    ### BEGIN SOLUTION
    optimizer.zero_grad()
    for i, (x, y) in enumerate(microbatches):
        model.set_requires_gradient_sync(i == len(microbatches) - 1)
        (model(x, y) / len(microbatches)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit).full_tensor()
    optimizer.step()
    return norm
    ### END SOLUTION


# %%
check("fsdp2")

# %% [markdown]
# *This is a good place to stop: the end of part B.*
#
# ## 4 · Run
#
# Now a small Llama on four ranks, with the package's stages 0 to 3, and with PyTorch's own FSDP2 beside them. (Your own
# parts train at the end of section 7, when clipping is right too.) The runs differ in one switch; stage 2 is also told
# the size of a bucket, so that its gradient is several buckets:
#
# | run | switch |
# |---|---|
# | stage 0 | none |
# | stage 1 | `--use-distributed-optimizer` |
# | stage 2 | `--data-parallel-sharding-strategy optim_grads --ddp-bucket-size 60000` |
# | stage 3 | `--data-parallel-sharding-strategy optim_grads_params` |
# | FSDP2 | `--use-torch-fsdp2` |
#
# The same things have other names elsewhere. Each line says what is *shared out* there:
#
# * torch's `DistributedDataParallel`, and FSDP1's `NO_SHARD`: nothing.
# * `ZeroRedundancyOptimizer`, Megatron's `--use-distributed-optimizer`, which is its strategy `optim`: Adam's state.
# * Megatron's `optim_grads`: Adam's state and gradients.
# * FSDP1's `SHARD_GRAD_OP`: Adam's state and gradients, too. Between two steps the weights are shared out as well. They
#   are gathered once, before the forward pass, and stay whole until the backward pass has ended.
# * Megatron's `optim_grads_params`, FSDP1's `FULL_SHARD`, FSDP2's `fully_shard`: weights, too.
# * DeepSpeed counts as the paper does: `"zero_optimization": {"stage": 1}`.
#
# The first folded cell keeps what the next ones share: it builds a model and its optimizer for a run, and makes one
# step of several microbatches. The second trains each run for six steps, and compares the losses with those of stage 0.

# %% jupyter={"source_hidden": true}
# %%ranks 1 --name zero_parts
import contextlib

import torch

from minimegatron.comm.collectives import all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig, ParallelConfig
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config
from minimegatron.optim.build import build_optimizer
from minimegatron.parallel.data.finalize import finalize_model_grads
from minimegatron.parallel.data.ddp import data_parallel

RUNS = {
    "stage 0": {},
    "stage 1": {"use_distributed_optimizer": True},
    "stage 2": {"data_parallel_sharding_strategy": "optim_grads", "ddp_bucket_size": 60_000},
    "stage 3": {"data_parallel_sharding_strategy": "optim_grads_params"},
    "FSDP2": {"use_torch_fsdp2": True},
}
S, B, VOCABULARY = 32, 1, 256
SIZES = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 4, "ffn_hidden_size": 128,
         "vocab_size": VOCABULARY, "kernels": "torch"}  # fmt: skip


def build(switch, **fields):
    """Model and optimizer on all ranks."""
    mesh = Mesh.build(ParallelConfig(overlap_grad_reduce=True, **switch))
    ddp = data_parallel(build_model(family_config("llama", **{**SIZES, **fields}), mesh, 1), mesh)
    optimizer = build_optimizer(OptimizerConfig(lr=3e-3), ddp, mesh, ddp.shards(), publish=ddp.start_param_gather)
    return mesh, ddp, optimizer


def some_ids(rank, number, rows=B):
    """Every id depends on the one before."""
    g = torch.Generator().manual_seed(1000 * rank + number)
    ids = [torch.randint(0, VOCABULARY, (rows,), generator=g)]
    for _ in range(S):
        ids.append((ids[-1] * 5 + 7 + torch.randint(0, 4, (rows,), generator=g)) % VOCABULARY)
    return torch.stack(ids, 1)


def one_step(mesh, ddp, optimizer, number, microbatches=1, rows=B):
    """The mean loss of all ranks."""
    ddp.zero_grad_buffer()
    total = torch.zeros(())
    for i in range(microbatches):
        ids = some_ids(mesh.dp.rank, number * microbatches + i, rows)
        with ddp.no_sync() if i < microbatches - 1 else contextlib.nullcontext():
            loss = ddp(ids[:, :-1], labels=ids[:, 1:]).sum()
            with ddp.backward_pass():
                loss.backward()
        total += loss.detach()
    tokens = finalize_model_grads(ddp, mesh, torch.tensor(float(microbatches * rows * S)))
    optimizer.step()
    return (all_reduce(total, mesh.dp) / tokens).item()


if __name__ == "__main__":
    print("runs:", ", ".join(RUNS))

# %%
# %%ranks 4 --name stages --timeout 120 --out losses
from zero_parts import RUNS, build, one_step

curves = {}
for name, switch in RUNS.items():
    mesh, ddp, optimizer = build(switch, num_layers=2)
    curves[name] = [one_step(mesh, ddp, optimizer, number, rows=8) for number in range(6)]
    apart = max(abs(a - b) for a, b in zip(curves[name], curves["stage 0"]))
    print(f"{name:8}  loss {curves[name][0]:.3f} at first, {curves[name][-1]:.3f} after six steps;",
          f"never more than 0.001 from stage 0: {apart < 1e-3}")  # fmt: skip
report(curves)

# %% [markdown]
# Sharing out changes no number: the same sums are made, in other places. What changes are memory and messages.
#
# ## 5 · See
#
# ### Memory
#
# The folded cell makes one step of four microbatches with bf16 weights, fp32 gradients and an fp32 copy of the weights,
# 2 + 4 + 12 bytes a parameter, eight small layers and short texts, so that activations do not hide the rest. First it
# counts the tensors that last from step to step; then it follows every byte through the step.

# %% jupyter={"source_hidden": true}
# %%ranks 4 --name memories --timeout 120 --out memories
from zero_parts import RUNS, build, one_step

from minimegatron.memory import Tracker


def lasting(held):
    """{owner: bytes}, each piece of memory once."""
    return {owner: sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
            for owner, tensors in held.items()}  # fmt: skip


found = {}
for name, switch in RUNS.items():
    mesh, ddp, optimizer = build(switch, params_dtype="bf16")
    held = {**ddp.held(), **optimizer.held()}
    if rank == 0:
        with Tracker(held) as tracker:
            one_step(mesh, ddp, optimizer, 0, 4)
    else:
        one_step(mesh, ddp, optimizer, 0, 4)
    samples = [(s.seconds, dict(s.owners), s.where) for s in tracker.samples] if rank == 0 else []
    found[name] = lasting(held), samples
    if name == "stage 0":
        parameters = sum(p.numel() for p in ddp.module.parameters())
print(f"{parameters} parameters, bytes followed through {len(found)} runs")
report((parameters, found))

# %% [markdown]
# Predicted with your `bytes_held`, measured on live tensors of rank 0. FSDP2 shares out what stage 3 does. It keeps no
# bf16 weights, but makes them from its fp32 shards whenever it gathers: 4 + 4 + 8 bytes a parameter.

# %%
# %%needs bytes_held
from course.figures.data_parallel import stage_bars


def by_owner(held):
    """As above: the optimizer's 12 bytes are a copy of the weight, 4, and two averages (moments), 8."""
    return {"parameters": held["weights"], "gradients": held["gradients"],
            "main parameters": held["optimizer"] / 3, "moments": held["optimizer"] * 2 / 3}  # fmt: skip


parameters, counts = memories[0]
predicted, measured = {}, {}
for stage in range(4):
    predicted[f"stage {stage}"] = by_owner(bytes_held(parameters, 4, stage, 2, 4, 12))
held = bytes_held(parameters, 4, 3, 4, 4, 8)
predicted["FSDP2"] = {"parameters": held["weights"], "gradients": held["gradients"], "moments": held["optimizer"]}
for name in predicted:
    measured[name] = {owner: counts[name][0][owner] for owner in predicted[name]}
    both = (f"{said} {sum(held[name].values()) / 2**20:6.3f} MiB"
            for said, held in (("predicted", predicted), ("measured", measured)))  # fmt: skip
    print(f"{name:7}", *both, sep="   ")
stage_bars(predicted, measured, title="What lasts from step to step, one of four ranks")

# %% [markdown]
# And the whole step, every stage on one scale. A black triangle marks the fullest moment. Follow the gradients: in
# stage 0 and 1 they are there from the beginning to the end. In stages 2 and 3 only shards last, and the buckets that
# come and go stand above them as *communication*. In stage 3 the gathered weights of units are part of it, forward and
# backward, in each of the four microbatches. The x axis counts changes of memory and not time: where more messages come
# and go a microbatch is wider. What FSDP2 gathers belongs to torch; the tracker does not know its owner and calls it
# *workspace*.

# %%
from minimegatron.memory import Sample
from minimegatron.viz.memory import curves

runs = {name: [Sample(*sample) for sample in samples] for name, (_, samples) in memories[0][1].items()}
display(curves(runs, title="One step of four microbatches, rank 0"))
for name, samples in runs.items():
    last, top = sum(memories[0][1][name][0].values()), max(samples, key=lambda sample: sample.total)
    print(f"{name:7}   peak {(top.total - last) / 2**20:3.1f} MiB above what lasts")

# %% [markdown]
# The peak is in a microbatch, in every stage. The sum of gradients at the end takes nothing from a rank's own memory:
# ranks of one machine read each other's gradients where they lie, in memory that belongs to the network. (So do NCCL's
# rings on GPUs; their buffers are some MiB, whatever the size of the gradient.)
#
# Part of the peak is shared out in no stage: activations, in stages 2 and 3 a bucket or two, for buckets are summed one
# by one, and in stage 3 the weights that are whole for a while, of two layers, the embedding and the output layer. So
# from stage 2 to stage 3 the peak falls by a smaller part than what lasts.
#
# ### Bytes on the wire
#
# The same four ranks, and your `bytes_sent` beside what is counted: every message that the package asks for, with what
# a ring sends for it. (Between CPUs the package itself makes no rings. In a reduce-scatter and an all-gather it sends
# each part straight to the rank that needs it: as many bytes. The all-reduce of stage 0 goes through memory that the
# ranks share.) Embedding and output layer belong to no unit; they stay from the forward to
# the backward pass of a microbatch, in the package as in FSDP2, so for them `kept` holds.

# %% jupyter={"source_hidden": true}
# %%ranks 4 --needs bytes_sent --name wire_bytes --timeout 120 --out wire_bytes
from exercises.bytes_sent import bytes_sent
from zero_parts import RUNS, build, one_step

from labkit.evidence import Witness

found = {}
for dtype, weight, several in (("fp32", 4, (1,)), ("bf16", 2, (1, 2))):
    if rank == 0:
        print(f"{weight} bytes a weight, 4 a gradient")
    for name, switch in RUNS.items():
        mesh, ddp, optimizer = build(switch, params_dtype=dtype, num_layers=4)
        stage = int(name[-1]) if name != "FSDP2" else 3
        if stage == 0:
            every = sum(p.numel() for p in ddp.module.parameters())
            layers = sum(p.numel() for part, p in ddp.module.named_parameters() if ".layers." in f".{part}")
        for microbatches in several:
            if rank > 0:
                one_step(mesh, ddp, optimizer, 0, microbatches)
                continue
            with Witness(rank) as witness:
                one_step(mesh, ddp, optimizer, 0, microbatches)
            asked = [event for event in witness.evidence().events if event.kind == "comm"]
            counted = sum(one.nbytes * (2 if one.name == "all_reduce" else 1) * 3 / 4
                          for one in asked if one.nbytes > 100)  # fmt: skip  not norms, counts, losses
            predicted = sum(bytes_sent(stage, weight * n, 4 * n, 4, microbatches, kept)
                            for n, kept in ((layers, False), (every - layers, True)))  # fmt: skip
            found[weight, name, microbatches] = predicted, counted
            print(f"  {name:7} microbatches {microbatches}   predicted {predicted / 1e6:5.2f} MB   "
                  f"counted {counted / 1e6:5.2f} MB   "
                  f"against stage 0: {counted / found[weight, 'stage 0', microbatches][1]:.2f}")  # fmt: skip
report(found)

# %% [markdown]
# Where weights and gradients have 4 bytes each, stages 0, 1 and 2 send the same, and stage 3 nearly 1.5 times as much:
# embedding and output layer are not gathered a second time. Where weights have 2 bytes, stages 1 and 2 send less than
# plain data parallelism, and stage 3 about the same: an all-gather of weights is half of a reduce-scatter of gradients.
# With two microbatches stage 2 sends one more reduce-scatter, and stage 3 sends everything twice. FSDP2 sends what
# stage 3 sends: it is the same algorithm.
#
# ### Reduce-scatters beside the backward pass
#
# Your `GradientShards` on two ranks, eight layers of a matrix 512 × 512 and a bucket for each, above a program that
# waits for each bucket as soon as it has left. Each is the best of three backward passes. Layer 7 goes back first, and
# b0 is its bucket.
#
# A bucket's bar begins when the bucket leaves. It ends when the rank has waited for it. The bucket may have arrived
# long before; the bar shows how much time it was *given*. What the rank really loses are its waits, hatched in a row of
# their own. Your last bucket has no layer to hide behind. The number beside a name is the time of the whole pass. Here
# it may be the same either way, and yours may even be slower: between two CPUs the cores that compute also move the
# bytes. On GPUs the network card moves them.

# %% jupyter={"source_hidden": true}
# %%ranks 2 --needs reduce_early --name early --timeout 120 --out early
import time

import torch
import torch.distributed as dist
from exercises.reduce_early import GradientShards

from labkit.watched import travels
from minimegatron import trace

LAYERS, WIDTH, ROWS = 8, 512, 1024
torch.set_num_threads(1)
x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(99))
places = [WIDTH * WIDTH * (LAYERS - 1 - i) for i in range(LAYERS)]  # the last layer comes first
buckets = [[WIDTH * WIDTH * n, WIDTH * WIDTH * (n + 1)] for n in range(LAYERS)]


class Layer(torch.autograd.Function):
    """h @ w, whose backward is on the timeline."""

    @staticmethod
    def forward(ctx, h, w, name):
        ctx.save_for_backward(h, w)
        ctx.name = name
        return h @ w

    @staticmethod
    def backward(ctx, grad):
        h, w = ctx.saved_tensors
        with trace.span(ctx.name, "compute"):
            return grad @ w.mT, h.mT @ grad, None


class AtOnce:
    """No bucket travels while a layer is computed."""

    def __init__(self, params, places, buckets):
        self.shards = {}
        for p, place in zip(params, places):
            p.register_post_accumulate_grad_hook(lambda p, n=place // (WIDTH * WIDTH): self.arrived(n, p))

    def arrived(self, n, p):
        self.shards[n] = torch.empty(p.numel() // world)
        dist.reduce_scatter_tensor(self.shards[n], p.grad.flatten())
        p.grad = None

    def finish(self):
        return [self.shards[n] for n in range(LAYERS)]


def timed_backward(kind):
    """([(name, kind, start, end)] of a backward pass, its shards)."""
    draw = torch.Generator().manual_seed(0)
    weights = [(torch.randn(WIDTH, WIDTH, generator=draw) / WIDTH**0.5).requires_grad_() for _ in range(LAYERS)]
    reducer, h = kind(weights, places, buckets), x
    for i, w in enumerate(weights):
        h = Layer.apply(h, w, f"layer {i}")
    dist.barrier()
    with trace.record(rank) as log, travels(rank, "dp", waits=True) as messages:
        h.sum().backward()
        shards = reducer.finish()
    sent = sorted((e for e in messages if e.kind == "comm"), key=lambda e: e.start)
    others = [(e.name, e.kind, e.start, e.end) for e in [*log.events, *messages] if e.kind in ("compute", "wait")]
    return others + [(f"b{n}", "comm", e.start, e.end) for n, e in enumerate(sent)], shards


ways = {"your GradientShards": GradientShards, "waits at once": AtOnce}
runs = [{name: timed_backward(kind) for name, kind in ways.items()} for _ in range(4)][1:]
best = {}
for name in ways:
    passes = [run[name][0] for run in runs]
    lasted = torch.tensor([max(end for *_, end in one) - min(start for *_, start, _ in one) for one in passes])
    dist.all_reduce(lasted, op=dist.ReduceOp.MAX)
    best[name] = passes[int(lasted.argmin())]
same = all(torch.allclose(*shards) for shards in zip(*(run[1] for run in runs[0].values())))
print("both ways give the same shards:", same)
report(best)

# %%
# %%needs reduce_early
import dataclasses

from minimegatron.trace import Event
from minimegatron.viz.timeline import beside, hidden_share

passes = {way: [Event(name, kind, 0, *when) for name, kind, *when in events] for way, events in early[0].items()}
print("yours computes while buckets are on their way:", hidden_share(passes["your GradientShards"]) > 0)
print("waiting at once computes nothing meanwhile:", hidden_share(passes["waits at once"]) == 0)
named = {}
for way, events in passes.items():
    whole = max(e.end for e in events) - min(e.start for e in events)
    waits = sum(e.seconds for e in events if e.kind == "wait")
    label = f"{way}: {1e3 * whole:.0f} ms, of which it waits {1e3 * waits:.0f} ms"
    named[label] = [dataclasses.replace(e, kind="on its way" if e.kind == "comm" else e.kind) for e in events]
display(beside(named, title="One backward pass of eight layers, rank 0"))

# %% [markdown]
# ### Gathers beside computation
#
# Your `forward_backward` on two ranks, eight units of a matrix 512 × 512, and below it the same model with FSDP2, as
# your `sharded` cuts it. FSDP2 runs twice. First each gather is asynchronous, and `set_modules_to_forward_prefetch` names
# the unit that is gathered ahead. Then it is told nothing. On a GPU gathers and sums have streams of their own even
# then. Between CPUs there are no streams, and FSDP2 waits for each message at once; for sums it does so both times.
#
# The folded cell compares gradients, counts what is sent, and follows memory: how much is alive at the fullest moment,
# beside the shards of weights. Then it times three passes of each and keeps the best.

# %% jupyter={"source_hidden": true}
# %%ranks 2 --needs gather_on_use,fsdp2 --name timed --timeout 120 --out timed
import time

import torch
import torch.distributed as dist
from exercises.fsdp2 import sharded
from exercises.gather_on_use import forward_backward
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from labkit.evidence import Witness
from labkit.watched import travels
from minimegatron.memory import Tracker
from minimegatron.trace import Event

UNITS, WIDTH, ROWS = 8, 512, 512
torch.set_num_threads(1)
x, spans, inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(99)), [], {}
weights = [torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(i)) / WIDTH**0.5 for i in range(UNITS)]


def span(name, unit, work):
    start = time.monotonic()
    result = work()
    spans.append(Event(name, "unit", rank, start, time.monotonic(), note=f"unit {unit}"))
    return result


class Product(torch.autograd.Function):
    """h @ w, on the timeline."""

    @staticmethod
    def forward(ctx, h, w, unit):
        ctx.save_for_backward(h, w)
        ctx.unit = unit
        return span("forward", unit, lambda: h @ w)

    @staticmethod
    def backward(ctx, dy):
        h, w = ctx.saved_tensors
        return *span("backward", ctx.unit, lambda: (dy @ w.mT, h.mT @ dy)), None


class Block(nn.Module):
    def __init__(self, unit):
        super().__init__()
        self.unit, self.weight = unit, nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, h):
        return Product.apply(h, self.weight, self.unit)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(unit) for unit in range(UNITS))

    def init_weights(self):
        for block, whole in zip(self.blocks, weights):
            block.weight.to_local().data.copy_(whole.chunk(world)[rank])

    def forward(self, h):
        for block in self.blocks:
            h = block(h)
        return h


class Yours:
    shards = [whole.flatten().chunk(world)[rank].clone() for whole in weights]

    def run(self):
        def forward(unit, whole, h):
            inputs[unit] = h
            return span("forward", unit, lambda: h @ whole.view(WIDTH, WIDTH))

        def backward(unit, whole, dy):
            h = inputs.pop(unit)
            return span("backward", unit, lambda: (dy @ whole.view(WIDTH, WIDTH).mT, (h.mT @ dy).flatten()))

        return forward_backward(self.shards, forward, backward, x, lambda y: y)[1]


class FSDP2:
    def __init__(self, prefetch):
        self.model = sharded(Model, init_device_mesh("cpu", (world,)), torch.float32, torch.float32)
        self.blocks = self.model.blocks
        for i, block in enumerate(self.blocks):
            block._set_unshard_async_op(prefetch)
            block.set_modules_to_forward_prefetch(list(self.blocks[i + 1 : i + 2]) if prefetch else [])
        self.shards = [block.weight.to_local().detach() for block in self.blocks]

    def run(self):
        y = self.model(x)
        y.backward(y.detach())
        gradients = [world * block.weight.grad.to_local().flatten() for block in self.blocks]  # averages, made sums
        self.model.zero_grad()
        return gradients


def timed(way):
    spans.clear()
    dist.barrier()
    with travels(rank, "dp") as messages:
        way.run()
    dist.barrier()
    return [*spans, *messages]


ways = {"your forward_backward": Yours(), "FSDP2, prefetch": FSDP2(True), "FSDP2, told nothing": FSDP2(False)}
first = None
for name, way in ways.items():
    way.run()
    with Witness(rank) as witness, Tracker({"parameters": way.shards}) as tracker:
        gradients = way.run()
    first = first or gradients
    same = all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(gradients, first, strict=True))
    sent = {kind: sum(c.nbytes for c in witness.evidence().calls if c.name == kind) / 2**20 / world
            for kind in ("all_gather", "reduce_scatter")}  # fmt: skip
    print(f"{name:21}  the same gradients: {same}; sent: weights {sent['all_gather']:.1f} MiB, gradients",
          f"{sent['reduce_scatter']:.0f} MiB; above the shards {tracker.peak.total / 2**20 - UNITS / world:.1f} MiB")  # fmt: skip
runs = [{name: timed(way) for name, way in ways.items()} for _ in range(3)]
best = {}
for name in ways:
    lasted = torch.tensor([max(e.end for e in run[name]) - min(e.start for e in run[name]) for run in runs])
    dist.all_reduce(lasted, op=dist.ReduceOp.MAX)
    best[name] = runs[int(lasted.argmin())][name]
gathers = [e for e in best["your forward_backward"] if e.name == "all_gather"]
print("your units are gathered at least once each, forward and backward:", len(gathers) >= 2 * UNITS - 1)
report(best)

# %% [markdown]
# As many bytes, but for one gather: FSDP2 gathers the last unit again, and you may keep it.
# (`reshard_after_forward=False` for the last block keeps it there, too.) And as much memory, to a unit or so. Most of
# it is what any backward pass needs, the inputs of the units, 1 MiB each.
#
# In the picture a pale message is hidden behind computation; a dark one kept the rank waiting. The first gather has
# nothing to hide behind. On a busy machine others are late as well. Prefetch need not make FSDP2 faster here. Between
# CPUs the cores that multiply also move the bytes, so a message beside a product takes longer, and its end is waited
# for. On a GPU other units move them.

# %%
# %%needs gather_on_use fsdp2
from course.figures.data_parallel import gather_timelines

gather_timelines(timed[0], axes=("dp",), title="Eight units forward and backward, rank 0")

# %% [markdown]
# ### Sums of many ranks
#
# Your FSDP2 has two dtypes: weights travel in bf16, gradients are summed in fp32, which takes twice the bytes. What
# does that buy? A bf16 number has 8 significant bits: from 256 to 512 there are only even numbers. Two guesses.

# %%
guess("ones", None, "512 ranks have the gradient 1. A bf16 sum goes from rank to rank. What comes out?")

# %%
guess("percent", None, "256 ranks have random gradients, half of them negative. By how many percent is a bf16 sum off?")

# %%
import torch

total = torch.zeros((), dtype=torch.bfloat16)
for _ in range(512):
    total += 1
guessed("ones", total.item(), "in bf16; 512 is right")

# %% [markdown]
# 256 + 1 = 257 is no bf16 number, and is rounded to 256. So every further rank adds nothing. The same happens on one
# rank that adds up microbatches in a bf16 `p.grad`. Therefore Megatron keeps an fp32 `main_grad` where weights are
# bf16, and FSDP2 adds up microbatches in `reduce_dtype`.
#
# How bad is it with real gradients? No machine here has hundreds of ranks, but a sum is a sum: you can make it as they
# would. Two ways to send it:
#
# * In a *ring* a chunk goes from rank to rank, and each adds its own part: the reduce-scatter of lab 01. Rank c keeps
#   chunk c.
# * In a *tree* ranks 0 and 1 add theirs, 2 and 3 theirs, and so on; then pairs of pairs; until there is one sum.
#
# Both send numbers of `dtype`: what a rank has is rounded first, and each partial sum is rounded.
#
# For example, four ranks with four chunks of one number: 256 on rank 0, and 1 on the three others. The ring leaves
# [260, 260, 256, 256] (259 is no bf16 number, either), and the tree 258, four times.
#
# **Exercise.** What a ring and a tree leave. `parts[r, c]` is what rank r has of chunk c, in float32; there are as many
# chunks as ranks, and their number is a power of two.

# %%
# %%exercise sums
import torch


def ring_sum(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """parts [ranks, ranks, numbers] -> the sums [ranks, numbers] in `dtype`, chunk by chunk."""
    ### BEGIN SOLUTION
    held, ranks = parts.to(dtype), len(parts)
    sums = []
    for c in range(ranks):
        total = held[(c + 1) % ranks, c]
        for step in range(2, ranks + 1):
            total = total + held[(c + step) % ranks, c]
        sums.append(total)
    return torch.stack(sums)
    ### END SOLUTION


def tree_sum(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As `ring_sum`."""
    ### BEGIN SOLUTION
    held = parts.to(dtype)
    while len(held) > 1:
        held = held[::2] + held[1::2]
    return held[0]
    ### END SOLUTION


# %%
check("sums")

# %%
# %%needs sums
import matplotlib.pyplot as plt


def off(sum_of, dtype, ranks, mean=0.0):
    """The error of a sum of `ranks` gradients, against the sum itself."""
    parts = torch.randn(ranks, ranks, 2048 // ranks, generator=torch.Generator().manual_seed(ranks)) + mean
    right = parts.double().sum(0)
    return ((sum_of(parts, dtype).double() - right).norm() / right.norm()).item()


sizes = [2, 4, 8, 16, 32, 64, 128, 256]
guessed("percent", round(100 * off(ring_sum, torch.bfloat16, 256)), "percent, in a ring")
lines = {"ring, bf16": (ring_sum, torch.bfloat16), "tree, bf16": (tree_sum, torch.bfloat16),
         "ring, fp32": (ring_sum, torch.float32)}  # fmt: skip
fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
for (name, way), mark in zip(lines.items(), "osv"):
    ax.plot(sizes, [off(*way, ranks) for ranks in sizes], marker=mark, label=name)
ax.axhline(2**-9, color="black", linestyle=":", label="half a unit in the last place of bf16")
ax.set(xscale="log", yscale="log", xlabel="ranks", ylabel="error of the sum", title="Sums of random gradients")
ax.set_xticks(sizes, sizes)
ax.legend()
plt.show()

# %% [markdown]
# Every addition rounds, by half a unit of the last place at most. In a ring a number is rounded once for each rank, and
# the partial sums that are rounded grow: the error grows with the square root of the ranks. In a tree it is rounded
# once for each level. NCCL decides which of the two an all-reduce takes, from the size of a message and the number of
# ranks. So bf16 sums change with the cluster; fp32 sums are too exact for anyone to see it. That is why gradients of
# large runs are summed in fp32 (`reduce_dtype`, Megatron's `main_grad`). Weights, which nobody adds up, travel in bf16.
#
# *This is a good place to stop: the end of part C.*
#
# ## 6 · When sharding stops paying
#
# Two numbers decide whether stage 3 is for free: how long a layer computes, and how long its messages take. More ranks
# make each message smaller, and there are more of them.
#
# A guess. A GPU computes 400 · 10¹² operations a second. 1,024 of them share the layers of an 8 B model, 218 million
# parameters each, 2 bytes a weight, 4 a gradient. Each sends 50 GB/s to other machines, and every step of a ring has a
# latency of 10 µs. How many tokens must each GPU have in a microbatch, so that it never waits for a layer's messages?

# %%
guess("tokens", None, "So many tokens a GPU hide the messages of a layer that 1,024 GPUs share")

# %% [markdown]
# Take small numbers first. Four ranks share a layer of 400 parameters. A link carries 100 bytes a second, with a
# latency of 1 s. A ring gathers in three steps. Each carries a part, 100 weights of 2 bytes, and takes 1 + 200/100 = 3
# s: 9 s in all. A rank computes 800 operations a second. Forward a token takes 2 for each parameter: 2 · 400 / 800 = 1
# s. So 9 tokens hide the gather of the next layer, in the forward pass.
#
# The backward pass computes 4 operations for each parameter and token. What travels meanwhile you have programmed
# yourself. With gradients of 4 bytes it needs 12 tokens, so the answer is 12.
#
# **Exercise.** The tokens of a rank, in one microbatch, with which no layer waits, forward or backward: a number that
# need not be whole. All layers are alike, one message travels at a time, and a reduce-scatter is a ring as well.

# %%
# %%exercise tokens_to_hide
def tokens_to_hide(
    parameters: float, ranks: int, flops: float, bandwidth: float, latency: float, weight: int = 2, gradient: int = 4
) -> float:
    """Of one layer; `flops` and `bandwidth` (bytes) a second of one rank, `latency` seconds of a step of the ring."""
    ### BEGIN SOLUTION
    part = parameters / ranks
    gather = (ranks - 1) * (latency + weight * part / bandwidth)
    sums = (ranks - 1) * (latency + gradient * part / bandwidth)
    return max(gather * flops / (2 * parameters), (gather + sums) * flops / (4 * parameters))
    ### END SOLUTION


# %%
check("tokens_to_hide")

# %%
# %%needs tokens_to_hide
LAYER, FLOPS, LINK, STEP = 218e6, 400e12, 50e9, 10e-6
guessed("tokens", round(tokens_to_hide(LAYER, 1024, FLOPS, LINK, STEP), -2), "tokens a GPU")
for ranks in (64, 1024, 16384):
    tokens = tokens_to_hide(LAYER, ranks, FLOPS, LINK, STEP)
    no_latency = tokens_to_hide(LAYER, ranks, FLOPS, LINK, 0)
    print(f"{ranks:6} ranks: {tokens:9,.0f} tokens a GPU, {tokens * ranks / 1e6:7,.1f} million a step;",
          f"{no_latency:6,.0f} with no latency")  # fmt: skip

# %% [markdown]
# With no latency neither the size of the layer nor the number of ranks matters much: bytes and operations both grow with
# the parameters. What is left is the machine, its operations a second over its bytes a second. With sums in bf16 both
# passes need equally many tokens. With sums in fp32 the backward pass needs half as many more.
#
# Latency is what grows with the ranks. On 1,024 GPUs the batch would have 22 million tokens. Llama 3 405B was trained
# with 16 million a step on 16,384 GPUs, and has tp 8, pp 16 and 128 replicas there (Llama Team 2024, table 4). Beyond
# some size a larger batch hardly saves steps (McCandlish et al. 2018). So you cannot pay for more ranks with more
# tokens. (Where NCCL gathers by PAT in place of a ring, the number of steps grows with the logarithm of the ranks:
# arXiv 2506.20252.)
#
# ### Fewer tokens
#
# You have 1,024 GPUs, and the batch gives each only half of the tokens that hide the messages. What share of its time
# does a GPU compute?

# %%
guess("share", None, "Half of the tokens that hide the messages, on 1,024 GPUs: percent of the time that a GPU computes")

# %%
# %%needs tokens_to_hide
import matplotlib.pyplot as plt


def busy(tokens, ranks):
    """Percent of the time of a layer, forward and backward, in which a GPU computes."""
    forward = tokens_to_hide(LAYER, ranks, FLOPS, LINK, STEP, gradient=0)  # without sums the forward pass needs more
    backward = tokens_to_hide(LAYER, ranks, FLOPS, LINK, STEP)
    return 300 * tokens / (max(tokens, forward) + 2 * max(tokens, backward))


fig, ax = plt.subplots(figsize=(7, 2.8), layout="constrained")
tokens = [1000 * 2 ** (n / 8) for n in range(65)]
for ranks, look in ((64, "-"), (1024, "--"), (16384, ":")):
    ax.plot(tokens, [busy(t, ranks) for t in tokens], look, color="black", label=f"{ranks:,} GPUs")
ax.set(xscale="log", xlabel="tokens a GPU", ylabel="percent of the time", ylim=(0, 105), title="A GPU computes")
ax.legend()
plt.show()
guessed("share", round(busy(tokens_to_hide(LAYER, 1024, FLOPS, LINK, STEP) / 2, 1024)), "percent")

# %% [markdown]
# To the left of the bend a step lasts as long as its messages, however few tokens it has. Then twice as many GPUs do not
# make the step of the same batch shorter: strong scaling has ended.
#
# ### HSDP
#
# *Hybrid sharding* cuts the model over the ranks of one machine, and each machine holds a copy. Gathers stay inside,
# on fast links with a few steps. Only sums of gradients cross between machines.
#
#             rank 0        rank 1                   rank 2        rank 3
#     keeps   first half    second half              first half    second half
#             |--- machine: gather, sum ---|         |--- machine: gather, sum ---|
#             |-------------- across: sum ---------------|
#                           |-------------- across: sum ---------------|
#
# The order in which you sum decides what crosses. For example, machine 0 has ranks 0 and 1, machine 1 ranks 2 and 3.
# Rank r's gradient is [1, 2] · 10^r. Ranks 0 and 2 end with 1111, ranks 1 and 3 with 2222. Each can send a single
# number to the other machine.
#
# **Exercise.** Each of `backwards` runs the backward pass of one microbatch and returns its gradient, whole and flat.
# Run them in order. Return this rank's shard of the sum over all microbatches and all ranks; where the gradient's
# length is no multiple of the ranks of a machine, it is padded with zeros. Whole gradients must not pile up, so what a
# rank need not keep leaves with its microbatch. Between machines as few bytes travel as can be: links are slow there.

# %%
# %%exercise hybrid
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn import functional


def hybrid(
    backwards: list[Callable[[], torch.Tensor]], machine: dist.ProcessGroup, across: dist.ProcessGroup
) -> torch.Tensor:
    """`machine`: the ranks of this machine; `across`: those that keep the same shard, one on each machine."""
    ### BEGIN SOLUTION
    ranks, total = dist.get_world_size(machine), None
    for backward in backwards:
        gradient = backward()
        padded = functional.pad(gradient, (0, -len(gradient) % ranks))
        shard = padded.new_empty(len(padded) // ranks)
        dist.reduce_scatter_tensor(shard, padded, group=machine)
        total = shard if total is None else total + shard
    dist.all_reduce(total, group=across)
    return total
    ### END SOLUTION


# %%
check("hybrid")

# %% [markdown]
# Your `sharded` does this, too. It needs a mesh with two axes, and `set_requires_all_reduce` delays what crosses:
#
# ```python
# mesh = init_device_mesh("cuda", (machines, 8), mesh_dim_names=("replicate", "shard"))
# model = sharded(build, mesh, torch.bfloat16, torch.float32)
# ```
#
# Where does each pay? The picture has your formula for FSDP over all ranks. For HSDP on machines of 8 GPUs it has your
# formula inside, with 450 GB/s and 2 µs, and an all-reduce of the shard across, behind the backward pass.

# %%
# %%needs tokens_to_hide
import matplotlib.pyplot as plt

ranks, inside = [2**n for n in range(4, 15)], 8
everywhere = [tokens_to_hide(LAYER, d, FLOPS, LINK, STEP) for d in ranks]
hsdp = []
for d in ranks:
    machines = d // inside
    across = 2 * (machines - 1) * (STEP + 4 * LAYER / inside / machines / LINK)  # an all-reduce as a ring
    hsdp.append(max(tokens_to_hide(LAYER, inside, FLOPS, 450e9, 2e-6), across * FLOPS / (4 * LAYER)))
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for tokens, name, look in ((everywhere, "FSDP over all ranks", "-o"), (hsdp, "HSDP, machines of 8", "--s")):
    left.plot(ranks, tokens, look, label=name)
    right.plot(ranks, [d * t / 1e6 for d, t in zip(ranks, tokens)], look, label=name)
left.set(ylabel="tokens a GPU", title="tokens with which no layer waits")
right.set(ylabel="million tokens a step", title="the batch that this makes")
for ax in (left, right):
    ax.set(xscale="log", yscale="log", xlabel="GPUs")
    ax.set_xticks([16, 128, 1024, 16384], ["16", "128", "1,024", "16,384"])
left.legend()
right.axhline(16, color="black", linestyle=":", label="Llama 3 405B")
right.legend()
plt.show()

# %% [markdown]
# HSDP reaches the dotted line, too, on three to four times as many GPUs. The memory decides whether it is possible: 16
# bytes a parameter over 8 GPUs are 16 GB for 8 billion parameters, and 140 GB for 70 billion. The larger model needs
# tensor parallelism, or more than one machine for a copy.
#
# *This is a good place to stop: the end of part D.*
#
# ## 7 · Break it
#
# Large runs *clip*: where the norm of the gradient is larger than a limit, the gradient is scaled down to the limit. A
# colleague has added clipping to the sharded optimizer, after the reduce-scatter: "There each number exists once, so
# nothing is counted twice." It has a bug. Leave the folded cell folded, and find the bug from what it leaves behind.
#
# The cell trains with it on four ranks, forty steps, beside the serial twin. The limit is 0.04, so small that every
# step is clipped. It reports each rank's clipped part of the first step's gradient, and the twin's clipped gradient, as
# `evidence`.

# %% jupyter={"source_hidden": true}
# %%ranks 4 --name clipped --timeout 120 --out evidence
import torch
import torch.distributed as dist
from zero_parts import some_ids

from minimegatron.comm.mesh import Mesh
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config

LIMIT, STEPS = 0.04, 40
config = family_config("llama", num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=4, vocab_size=256)


def clip(shards, max_norm, group=None):
    norm = torch.stack([shard.norm() for shard in shards]).norm()
    for shard in shards:
        shard *= (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm


def flat_gradient(model, ids):
    """The mean over these samples, flat, padded for four ranks; and the loss."""
    loss = model(ids[:, :-1], labels=ids[:, 1:]).mean()
    model.zero_grad()
    loss.backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    return torch.cat([flat, flat.new_zeros(-len(flat) % 4)]), loss.detach()


def flat_weights(model):
    """One buffer, of which the parameters are views from now on."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    flat, at = torch.cat([flat, flat.new_zeros(-len(flat) % 4)]), 0
    for p in model.parameters():
        p.data = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    return flat


model, twin = (build_model(config, Mesh.serial(), 1) for _ in range(2))
weights, of_twin = flat_weights(model), flat_weights(twin)
own = weights.chunk(4)[rank].requires_grad_()
optimizer, twins = torch.optim.AdamW([own], 3e-3), torch.optim.AdamW(twin.parameters(), 3e-3)
losses, clipped = [], 0
for step in range(STEPS):
    whole, loss = flat_gradient(model, some_ids(rank, step))
    shard = torch.empty(len(whole) // 4)
    dist.reduce_scatter_tensor(shard, whole / 4)
    before = shard.norm().item()
    norm = clip([shard], LIMIT)
    dist.all_reduce(loss)
    if rank == 0:
        right, twin_loss = flat_gradient(twin, torch.cat([some_ids(r, step) for r in range(4)]))
        right_norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), LIMIT)
        losses.append((loss.item() / 4, twin_loss.item()))
        clipped += right_norm.item() > LIMIT
        twins.step()
    if step == 0:
        want = torch.cat([p.grad.flatten() for p in twin.parameters()]) if rank == 0 else None
        found = {"shard": shard.clone(), "norm": before, "twin": want}
        found["twin_norm"] = right_norm.item() if rank == 0 else 0
    own.grad = shard
    optimizer.step()
    with torch.no_grad():
        dist.all_gather_into_tensor(weights, own.detach().clone())
norms = [torch.zeros(()) for _ in range(4)]
dist.all_gather(norms, torch.tensor(found["norm"]))
if rank == 0:
    apart = max(abs(a - b) for a, b in losses)
    print(f"loss {losses[0][0]:.2f} at first; falls by more than 1: {losses[0][0] - losses[-1][0] > 1};",
          f"never more than 0.05 from the twin's: {apart < 0.05}")  # fmt: skip
    print(f"steps in which the twin's gradient is clipped: {clipped} of {STEPS}")
    print(f"norm of the first gradient:   rank 0 says {norms[0]:.3f}   serial {found['twin_norm']:.3f}")
report(found)

# %% [markdown]
# The loss is the twin's, near enough. The norm of the first step is not, though the weights and the batch are the same.
# In a log of a real run there is only the first of these two numbers, and it looks like any other.
#
# *What* was done to the gradient? Write the tool that says it: compare each rank's part with that part of the twin's.
#
# **Exercise.** For each rank the factor by which its part is off. ‖·‖ is the norm of a *whole* part, as in `.norm()`.
#
# 1. A part is right if ‖got - want‖ ≤ 10⁻³ ‖want‖. Its factor is 1.0.
# 2. Another part may be nearly a multiple of what it should be. Its factor is the number for which
#    ‖got - factor · want‖ ≤ 10⁻³ ‖factor · want‖.
# 3. If there is no such number, the factor is `nan`.
#
# `got` are the parts of all ranks, of equal length. Together they may be longer than `want`. What is longer is padding,
# for which 0 is right; any other number there is an error as in each other element.
#
# For example, want = [1, 2, 3] and got = [[1, 2], [1.5, 0]] has the factors 1 and 0.5. And [4, 0.001] for [4, 0] is
# right: the error's norm is 0.001, and the norm of the part is 4.

# %%
# %%exercise suspects
import math

import torch


def suspects(got: list[torch.Tensor], want: torch.Tensor) -> list[float]:
    """Of each rank: 1.0, its factor, or nan."""
    ### BEGIN SOLUTION
    sizes = [len(part) for part in got]
    padded = torch.cat([want, want.new_zeros(sum(sizes) - len(want))])
    found = []
    for mine, right in zip(got, padded.split(sizes), strict=True):
        if (mine - right).norm() <= 1e-3 * right.norm():
            found.append(1.0)
            continue
        factor = (mine * right).sum() / (right * right).sum()
        proportional = (mine - factor * right).norm() <= 1e-3 * (factor * right).norm()
        found.append(factor.item() if proportional else math.nan)
    return found
    ### END SOLUTION


# %%
check("suspects")

# %%
# %%needs suspects
factors = suspects([one["shard"] for one in evidence], evidence[0]["twin"])
for r, (factor, one) in enumerate(zip(factors, evidence)):
    product = factor * one["norm"]
    print(f"rank {r}: {factor:.2f} times the twin's   norm of its shard {one['norm']:.3f}   product {product:.3f}")
print(f"norm of the twin's gradient: {evidence[0]['twin_norm']:.3f}")

# %% [markdown]
# Every rank is off by a factor of its own. The factor times the norm of the rank's shard is the same number on all
# ranks, the twin's norm. So each rank has divided by the norm of *its own shard*, in place of the norm of the whole
# gradient. The colleague's function, `group` unused:
#
# ```python
# def clip(shards, max_norm, group=None):
#     norm = torch.stack([shard.norm() for shard in shards]).norm()
#     for shard in shards:
#         shard *= (max_norm / (norm + 1e-6)).clamp(max=1)
#     return norm
# ```
#
# The shards are too long, and, worse, each by another factor: the gradient points into another direction. Adam divides
# each element by its own average size, so a factor that is nearly the same in every step cancels, and the loss looks
# fine. What clipping is for, a step with an unusual gradient, it no longer does: the rank that has the unusual part
# scales it down, and the others do not.
#
# **Exercise.** Repair it. The shards of all ranks of `group` together are one gradient. Return its norm. Where the norm
# is larger than `max_norm`, scale the shards of this rank in place, so that the whole gradient has the norm `max_norm`.
# For example: rank 0 has the shards [3] and [0], rank 1 has [0] and [4]. The norm is 5 on both ranks. All ranks have
# equally many shards, one for each bucket; a shard may have no element, and on some rank none may have any. A real
# model has hundreds of buckets, so communicate once, not once for each shard.

# %%
# %%exercise clip
import torch
import torch.distributed as dist


def clip(shards: list[torch.Tensor], max_norm: float, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The norm of the whole gradient, before it was clipped."""
    ### BEGIN SOLUTION
    square = torch.stack([shard.square().sum() for shard in shards]).sum()
    dist.all_reduce(square, group=group)
    norm = square.sqrt()
    for shard in shards:
        shard *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm
    ### END SOLUTION


# %%
check("clip")

# %% [markdown]
# (With tensor parallelism one more thing: some parameters are whole on every tp rank. Their squares must count once,
# and not on each rank.)
#
# ### Train
#
# All your parts together: four ranks train a small Llama with your layout, buckets, clipping and AdamW, beside the
# serial twin with torch's AdamW. Matrices decay and norms do not. The folded cell compares losses, norms and at the
# end the weights, and counts the bytes of the tensors that your optimizers hold beside the weights.

# %% jupyter={"source_hidden": true}
# %%ranks 4 --needs lay_out,my_pieces,reduce_early,sharded_adamw,clip --name train --timeout 170 --out run
import torch
import torch.distributed as dist
from exercises.clip import clip
from exercises.lay_out import lay_out
from exercises.my_pieces import my_pieces
from exercises.reduce_early import GradientShards
from exercises.sharded_adamw import ShardedAdamW
from zero_parts import some_ids

from minimegatron.comm.mesh import Mesh
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config

LIMIT, STEPS, HYPER = 0.04, 30, {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
config = family_config("llama", num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=4, vocab_size=256)
model = build_model(config, Mesh.serial(), 1)
params = list(model.parameters())
numels = [p.numel() for p in params]
layout = lay_out(numels, 10_000, world)
places, buckets = layout["places"], layout["buckets"]
flat = torch.zeros(buckets[-1][1])
for p, place in zip(params, places):
    flat[place : place + p.numel()] = p.detach().flatten()
    p.data = flat[place : place + p.numel()].view_as(p)


def tensors_in(value, seen):
    """Of an object, its lists, dicts and torch's optimizers."""
    if isinstance(value, torch.Tensor) or id(value) in seen:
        return [] if id(value) in seen else [value]
    seen.add(id(value))
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if type(value).__module__.startswith(("exercises", "torch.optim")):
        inside = vars(value).values()
    return [tensor for one in inside for tensor in tensors_in(one, seen)]


pieces = my_pieces(numels, places, buckets, world, rank)
decay = [[(at, at + last - first) for i, first, last, b, at in pieces if b == n and params[i].ndim == 2]
         for n in range(len(buckets))]  # fmt: skip
reducer = GradientShards(params, places, buckets)
optimizers = [ShardedAdamW(flat[start:stop], decay[n], **HYPER) for n, (start, stop) in enumerate(buckets)]

twin = build_model(config, Mesh.serial(), 1)
groups = [{"params": [p for p in twin.parameters() if p.ndim == 2]},
          {"params": [p for p in twin.parameters() if p.ndim != 2], "weight_decay": 0.0}]  # fmt: skip
twins = torch.optim.AdamW(groups, **HYPER)
curve, norms = [], []
for step in range(STEPS):
    ids = some_ids(rank, step)
    loss = model(ids[:, :-1], labels=ids[:, 1:]).mean() / world  # shares of a mean: their sum is the mean
    loss.backward()
    shards = reducer.finish()
    norm = clip(shards, LIMIT)
    for one, shard in zip(optimizers, shards):
        one.step(shard)
    dist.all_reduce(loss := loss.detach())
    if rank == 0:
        every = torch.cat([some_ids(r, step) for r in range(world)])
        right = twin(every[:, :-1], labels=every[:, 1:]).mean()
        twins.zero_grad()
        right.backward()
        right_norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), LIMIT)
        twins.step()
        curve.append((loss.item(), right.item()))
        norms.append((float(norm), right_norm.item()))
if rank == 0:
    print(f"norm of the first gradient: yours {norms[0][0]:.3f}, serial {norms[0][1]:.3f}")
    print("losses within 0.001 of the twin's in every step:", max(abs(a - b) for a, b in curve) < 1e-3)
    apart = max((a - b).abs().max().item() for a, b in zip(model.parameters(), twin.parameters()))
    print(f"weights within 0.001 of the twin's after {STEPS} steps:", apart < 1e-3)
storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in(optimizers, set())}
state = sum(storages.values()) - storages.get(flat.untyped_storage()._cdata, 0)
report((curve, sum(last - first for _, first, last, *_ in pieces), state, sum(numels)))

# %%
# %%needs lay_out my_pieces reduce_early sharded_adamw clip
import matplotlib.pyplot as plt

from minimegatron.viz.picture import MEASURED_LINE, REFERENCE_LINE

yours, serial = zip(*run[0][0])
fig, ax = plt.subplots(figsize=(7, 2.6))
ax.plot(serial, label="serial twin, torch's AdamW", **REFERENCE_LINE)
ax.plot(yours, label="four ranks, your ZeRO-2", **MEASURED_LINE)
ax.set(xlabel="step", ylabel="loss", title="Your layout, buckets, clipping and AdamW")
ax.legend()
plt.show()
for r, (_, owned, state, parameters) in enumerate(run):
    print(f"rank {r} updates {owned} of {parameters} weights, {owned / parameters:.1%}, and holds {state} bytes of state;",
          f"all moments have {8 * parameters}")  # fmt: skip

# %% [markdown]
# ## 8 · Explain
#
# Questions that an interviewer asks. Say your answer aloud before you open the one here.
#
# 1. *What does ZeRO-3 share with tensor parallelism, and what not?*
#    <details><summary>answer</summary>Both keep a part of each matrix on each rank. With ZeRO-3 the weights travel, and
#    each rank computes the whole layer for its own samples. With tp activations travel, and each rank computes a part of
#    the layer for the same samples. So ZeRO-3 does not reduce the activations of a rank, and its messages do not grow
#    with the batch.</details>
# 2. *Why do large runs combine tp and pp with ZeRO-1, and not with ZeRO-3?*
#    <details><summary>answer</summary>A pipeline runs many microbatches a step. In stages 2 and 3 each of them reduces
#    gradients, in stage 3 each gathers weights twice: 8 microbatches send 12 times the bytes of stage 1. And tp and pp
#    have divided weights and gradients already; what is left to share out is the optimizer's state.</details>
# 3. *When is stage 3 the right choice, then?*
#    <details><summary>answer</summary>One microbatch a step and many tokens in it: computing a layer takes long enough
#    to hide its gather: your formula says how many. No code of the model has to change for it, as tp asks for.</details>
# 4. *FSDP2 adds up eight microbatches with `set_requires_gradient_sync(False)` in the first seven. What does that save,
#    and what does it cost?*
#    <details><summary>answer</summary>Seven of eight reduce-scatters; weights are gathered in each microbatch all the
#    same. But each rank keeps the whole gradient in `reduce_dtype`: 4 bytes a parameter, 280 GB for 70 billion. Of
#    stage 3 only the weights and Adam's state are left.</details>
# 5. *The loss of a ZeRO run equals that of plain data parallelism for a thousand steps. Is it right?*
#    <details><summary>answer</summary>Not yet shown: Adam hides scales, as above. Compare the norm of the first step,
#    then weights after some steps.</details>
# 6. *Why can stage 2 wait for one bucket while it fills another, and why must it not fill a third?*
#    <details><summary>answer</summary>The third is memory: with no limit, a network slower than the backward pass piles
#    up all buckets, which is the whole gradient.</details>
# 7. *The bytes fit, and FSDP1 runs out of memory all the same. Why, and what does FSDP2 do about it?*
#    <details><summary>answer</summary>Gathers run on a stream of their own. FSDP1 marked their memory with
#    `record_stream`: it was free only when the GPU had come so far, and the CPU ran ahead and took more. Whether it fits
#    depended on timing. FSDP2 holds the tensors itself until an event of the other stream has passed. (torchtitan,
#    `docs/fsdp.md`.)</details>
#
# What you built has switches in other libraries:
#
# | here | Megatron | DeepSpeed | FSDP |
# |---|---|---|---|
# | size of a bucket | `--ddp-bucket-size` | `reduce_bucket_size`, `allgather_bucket_size` | the unit itself |
# | reduce-scatter while backward runs | `--overlap-grad-reduce` | `overlap_comm` | always |
# | weights of the next unit travel meanwhile | `--overlap-param-gather` | `stage3_prefetch_bucket_size` | FSDP1's `forward_prefetch`, `backward_prefetch`; FSDP2's `set_modules_to_forward_prefetch` |
# | weights are kept from forward to backward | | | `reshard_after_forward=False` |
# | dtype of sums over ranks | fp32, or `--grad-reduce-in-bf16` | `communication_data_type` | `reduce_dtype` |
# | shards inside of a machine, copies across | `--num-distributed-optimizer-instances` | `mics_shard_size` | a mesh with two axes |
# | small parameters are not shared out at all | | `stage3_param_persistence_threshold` | FSDP2's `ignored_params` |
#
# **Exercise.** Numbers for a cluster, 2 + 2 + 12 bytes a parameter. The `ranks` are spread evenly over `machines`.
# Return a dict:
#
# * `stage`: the lowest stage whose weights, gradients and state fit into `gigabytes` · 10⁹ bytes on each of `ranks`
#   ranks (what just fits, fits); -1 if none does;
# * `ranks_for_stage_1`: the fewest ranks on which stage 1 fits; 0 if it never does;
# * `stage_2_over_stage_1` and `stage_3_over_stage_1`: bytes sent in a step of `microbatches`, weights and gradients of
#   2 bytes each, every weight gathered twice in stage 3;
# * `between_machines`: HSDP with shards over the ranks of one machine: the bytes of gradients that a rank sends to
#   other machines in a step, in one all-reduce as a ring;
# * `stages`: a list: for each of `names`, in their order, the stage of ZeRO that it is. Possible names: `torch
#   DistributedDataParallel`, `FSDP1 NO_SHARD`, `Megatron --use-distributed-optimizer`, `Megatron optim`, `torch
#   ZeroRedundancyOptimizer`, `Megatron optim_grads`, `FSDP1 SHARD_GRAD_OP`, `Megatron optim_grads_params`, `FSDP1
#   FULL_SHARD`, `FSDP2 fully_shard`.

# %%
# %%exercise answers
import math


def answers(
    parameters: float, ranks: int, microbatches: int, gigabytes: float, machines: int, names: list[str]
) -> dict[str, object]:
    """{"stage": 1, "ranks_for_stage_1": 2, ..., "stages": [3, 1]}; `ranks` in all `machines` together."""
    ### BEGIN SOLUTION
    room = gigabytes * 1e9
    held = [16 * parameters, (4 + 12 / ranks) * parameters, (2 + 14 / ranks) * parameters, 16 / ranks * parameters]
    left = room - 4 * parameters
    shard = 2 * parameters / (ranks // machines)
    shares = [
        ("DistributedDataParallel", "NO_SHARD"),
        ("use-distributed-optimizer", "optim", "ZeroRedundancyOptimizer"),
        ("optim_grads", "SHARD_GRAD_OP"),
        ("optim_grads_params", "FULL_SHARD", "fully_shard"),
    ]
    last = [name.split()[-1].removeprefix("--") for name in names]
    return {
        "stage": next((stage for stage in range(4) if held[stage] <= room), -1),
        "ranks_for_stage_1": math.ceil(12 * parameters / left) if left > 0 else 0,
        "stage_2_over_stage_1": (microbatches + 1) / 2,
        "stage_3_over_stage_1": 3 * microbatches / 2,
        "between_machines": 2 * (machines - 1) / machines * shard,
        "stages": [next(s for s, group in enumerate(shares) if name in group) for name in last],
    }
    ### END SOLUTION


# %%
check("answers")

# %%
progress()

# %% [markdown]
# ## Where this lives
#
# | here | minimegatron | Megatron-LM, `megatron/core/` |
# |---|---|---|
# | layout, pieces | `parallel/data/buckets.py` | `distributed/param_and_grad_buffer.py`, `optimizer/distrib_optimizer.py` |
# | gradients that leave early | `parallel/data/grad_buffer.py`, `parallel/data/ddp.py` | `distributed/param_and_grad_buffer.py` |
# | AdamW of shards, clipping | `optim/optimizer.py`, `optim/clip.py` | `optimizer/distrib_optimizer.py`, `optimizer/clip_grads.py` |
# | weights on use | `parallel/data/param_buffer.py` | `distributed/fsdp/src/megatron_fsdp/` |
# | FSDP2 | `parallel/data/torch_fsdp.py` | `distributed/torch_fully_sharded_data_parallel.py` |
# | memory by owner | `memory.py` | `megatron/training/theoretical_memory_usage.py` (predicted) |
#
# Megatron pads more than you did: a parameter starts at a multiple of 64 elements, a bucket ends at a multiple of 128,
# and of D, so that every bucket begins at a multiple of 256 bytes, where a GPU reads well.
#
# Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054); Zhao et al. 2023, FSDP (arXiv 2304.11277); Loshchilov and Hutter
# 2017, AdamW (arXiv 1711.05101); Llama Team 2024 (arXiv 2407.21783); McCandlish et al. 2018, large batches (arXiv
# 1812.06162).
#
# Next: lab 07, kernels, flash attention and FP8.

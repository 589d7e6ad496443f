# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Lab 01 · Process groups
#
# A model that is too large for one GPU is trained by many identical processes. Each process starts with two numbers:
# its own, called its *rank*, and how many ranks there are. This lab answers two questions: which ranks send to each
# other, and what do they send?
#
# **You build** the groups in which ranks talk; an all-reduce from single messages; two operators that communicate and
# have a gradient; a sampler that deals out data; gradients that are summed while the backward pass still runs, in one
# order on all ranks; and the loss of a batch that is spread over ranks. At the end four ranks train a small Llama with
# your code.
#
# **You need** Python, PyTorch tensors and autograd, and the chain rule. No GPU, and no earlier lab.
#
# **Time**: 3½ to 4½ hours.
#
# | part | sections | minutes |
# |---|---|---|
# | I | 1 the problem · 2 predict · 3 the grid | 45–60 |
# | II | 3 the ring · f and g. *A good place to stop for the day comes after it.* | 50–65 |
# | III | 3 the sampler · buckets · one order · 4 run · 5 see · 6 break it · 7 explain | 105–140 |
#
# Run the cells from top to bottom. Where a cell says `your code here`, write yours; cells that need it wait until its
# check has passed. After a kernel restart: run the first cell, then go on where you were; where a cell says that a name
# is missing, run the cell that makes it.

# %%
# %load_ext course
# %lab 01_process_groups

# %% [markdown]
# ### A guess first
#
# Eight GPUs train one model on different data. After the backward pass each of them holds 1 GB of gradients, and each
# needs the *sum* of all eight. How many GB does each GPU have to send? Do not compute; put down the number that feels
# right. You will count the bytes later in this lab.

# %%
guess("gb_sent", None, "Eight GPUs hold 1 GB each, and each needs the sum: how many GB does each GPU send?")

# %% [markdown]
# ## 1 · The problem
#
# Training with Adam in mixed precision needs 16 bytes for each parameter: 2 for the weight, 2 for its gradient, and 12
# for the optimizer (a 4-byte copy of the weight and two 4-byte averages). Activations come on top.

# %%
from course.figures.counts import boxes_filled

billions = {"GPT-2 1.5 B": 1.5, "Llama-3 8 B": 8, "Llama-3 70 B": 70, "GPT-3 175 B": 175}
boxes_filled({name: 16 * b for name, b in billions.items()}, 80, title="Memory for weights, gradients and Adam")

# %% [markdown]
# Llama-3 70 B fills 14 GPUs before it has computed anything, so the model has to be divided. There are five ways to
# divide the work, and large runs use several at once:
#
# | axis | divides | its ranks exchange |
# |---|---|---|
# | **tp** tensor | every matrix | activations, inside every layer |
# | **cp** context | every sequence | keys and values |
# | **dp** data | the batch | gradients, once a step |
# | **pp** pipeline | the layers | activations, between two stages |
# | **ep** expert | the experts of a layer | tokens |
#
# Each axis has its own *process groups*. A process group is a list of ranks that communicate with each other.
#
# ### Ranks that run
#
# `%%torchrun -n 4` saves the cell as a file and starts it as four processes, as you would in a terminal. The command
# stands above the output, and the file stays, so you can run it again by hand. Lines that several ranks print alike are
# shown once.
#
# In the labs the ranks run on the CPU, also on a machine with GPUs (`CUDA_VISIBLE_DEVICES=` in front of the command
# hides them), so that all readers see the same output. Cells that measure GPUs say `--gpus`.

# %%
# %%torchrun -n 4 --name hello
import torch
import torch.distributed as dist
from minimegatron.launch.rank import finish, init

rank, world = init()
print(f"one of {world}, backend {dist.get_backend()}")

x = torch.tensor([float(rank)])
dist.all_reduce(x)
print(f"after the all-reduce every rank holds {x.item():.0f} = 0 + 1 + 2 + 3")
finish()

# %% [markdown]
# Most of the time of that cell went into starting Python four times. `%%ranks 4` runs a cell on four ranks that have
# already started. In such a cell `rank` and `world` are set and the process group exists. Use it to try things out.
#
# **Guess before you run this cell:** which four numbers does rank 2 hold *after* the all-reduce?

# %% tags=["hide-output"]
# %%ranks 4
import torch
import torch.distributed as dist

x = torch.arange(4) * (rank + 1)
print("before", x.tolist())
dist.all_reduce(x)
print("after ", x.tolist())

# %% [markdown]
# ### The collectives, in one picture
#
# A *collective* is an operation that all ranks of a group call together. The picture shows what each rank holds before
# and after it. Rows are ranks, and blocks are pieces of a tensor.

# %%
from course.figures.process_groups import sheet

sheet()

# %% [markdown]
# Find these three facts in the picture:
#
# * An **all-reduce** gives the same result as a **reduce-scatter** followed by an **all-gather**. You will build it so.
# * **Reduce-scatter** goes from a whole tensor on each rank to one block on each rank, and **all-gather** goes from one
#   block on each rank to a whole tensor on each rank.
# * **All-to-all** transposes the grid: block *j* of rank *i* becomes block *i* of rank *j*.

# %% [markdown]
# ## 2 · Predict
#
# How can ranks compute a sum if each rank may only send messages to one other rank? Put N ranks in a ring, where each
# rank sends to its right neighbour only. Cut the tensor of `n` bytes into N parts. In one step every rank sends one
# part, `n/N` bytes. In a reduce-scatter each part travels on and collects every rank's share; in an all-gather each
# finished part travels on until every rank has it. How many steps is that?
#
# An example to check by hand: an all-gather of 12 bytes over 3 ranks has 2 steps of 4 bytes, so each rank sends 8.
#
# **Exercise.** How many bytes does *each rank* send? `nbytes` is the whole tensor: the input of a reduce-scatter, the
# output of an all-gather. A part need not have a whole number of bytes: 10 bytes over 4 ranks make parts of 2.5. The
# fourth operation is an all-to-all on the same ring: `nbytes` are the N parts that each rank holds, one for every rank,
# and every message still goes to the right neighbour. Count the fewest bytes that do it.

# Each exercise becomes a file of its own, and a later cell imports it: `from exercises.bytes_sent import bytes_sent`. A
# check runs your code in fresh processes, and shows nothing of what it prints. To debug, call your function from a cell
# of its own. Functions that need ranks run in a `%%ranks 3` cell, after `from exercises.NAME import NAME`, also before
# their check has passed.

# %%
# %%exercise bytes_sent
def bytes_sent(op: str, nbytes: int, ranks: int) -> float:
    """Bytes one rank sends for op in all_reduce, all_gather, reduce_scatter, all_to_all, on a ring."""
    ### BEGIN SOLUTION
    once = nbytes * (ranks - 1) / ranks
    if op == "all_to_all":  # N-k parts in step k: one has arrived in each step before, the others travel on
        return nbytes * (ranks - 1) / 2
    return 2 * once if op == "all_reduce" else once
    ### END SOLUTION


# %%
check("bytes_sent")

# %% [markdown]
# What does your formula say for 1,000 ranks? Each rank sends almost `2n` bytes for an all-reduce, and never more,
# however many ranks there are. So data parallelism can use many GPUs. The number of *steps* does grow with N: 8 ranks
# take 14 steps, 1,000 ranks take 1,998, and each step costs the latency of one message.
#
# What it says for an all-to-all grows with N. So NCCL does not run an all-to-all as a ring: each rank sends every part
# straight to the rank that it is for, n(N-1)/N bytes, and the network carries messages between all pairs of ranks.
#
# ### Seconds
#
# The usual model: a message of k bytes takes α + k/β, with the latency α and the bandwidth β. Take α = 10 µs and
# β = 50 GB/s, a fast network between machines. A ring sends 2(N-1) messages of n/N bytes, one after the other. A binary
# *tree* sums on the way up and hands the sum down again: 2 log₂N messages of all n bytes. The ring has fewer bytes, the
# tree has fewer messages.
#
# With 1,024 GPUs, how large must a tensor be until the ring is the faster one?

# %%
guess("ring_pays", None, "1,024 GPUs, 10 µs, 50 GB/s: from how many MB on is a ring faster than a tree?")

# %% tags=["hide-output"]
import math

import matplotlib.pyplot as plt

from minimegatron.viz.picture import INK

ALPHA, BETA = 10e-6, 50e9


def ring(n, ranks):
    return 2 * (ranks - 1) * (ALPHA + n / ranks / BETA)


def tree(n, ranks):
    return 2 * math.log2(ranks) * (ALPHA + n / BETA)


fig, ax = plt.subplots(figsize=(7, 2.8))
sizes_in_mb = [10 ** (power / 10) for power in range(-30, 41)]
for way, line in ((ring, "-"), (tree, "--")):
    for ranks, width in ((8, 1.0), (1024, 2.2)):
        times = [1000 * way(1e6 * mb, ranks) for mb in sizes_in_mb]
        ax.plot(sizes_in_mb, times, line, color=INK, linewidth=width, label=f"{way.__name__}, {ranks:,} GPUs")
ax.set(xscale="log", yscale="log", xlabel="MB of the tensor", ylabel="ms", title="One all-reduce by the model")
ax.legend()
plt.show()
guessed("ring_pays", next(mb for mb in range(1, 1000) if ring(1e6 * mb, 1024) < tree(1e6 * mb, 1024)), "MB")

# %% [markdown]
# So many small tensors are summed as one large one: 100 tensors of 1 MB on a ring of 1,024 GPUs cost 100 · 20.5 ms,
# one of 100 MB costs 24.5 ms. This is why gradients travel in *buckets*, below. NCCL cuts a message into pieces, so that
# all levels of a tree send at the same time; such a tree sends hardly more than a ring. NCCL chooses by the size and the
# number of ranks (`NCCL_ALGO`). The model: Thakur, Rabenseifner and Gropp 2005; the trees: Sanders, Speck and Träff 2009.

# %% [markdown]
# ## 3 · Implement
#
# ### The grid
#
# Lay the ranks out on a grid with one axis for each kind of parallelism. The first axis varies fastest. Here are 16
# ranks with tp = cp = dp = pp = 2; rank 13 is framed.

# %%
from minimegatron.viz.mesh import rank_grid

sizes = {"tp": 2, "cp": 2, "dp": 2, "pp": 2}
rank_grid(sizes, mark=13)

# %% [markdown]
# Rank 13 has the coordinates tp 1, cp 0, dp 1, pp 1, because 13 = 1 + 2·0 + 4·1 + 8·1. In general, on this grid:
#
# $$\text{rank} = \text{tp} + 2\,\text{cp} + 4\,\text{dp} + 8\,\text{pp}$$
#
# A **group** along an axis holds the ranks that differ in this coordinate only. Rank 13's tp group is [12, 13], its cp
# group is [13, 15], its dp group is [9, 13]. What is its pp group? Find it in the picture.
#
# The order of the axes is a choice. Ranks of one machine have neighbouring numbers, so the axis that communicates most
# comes first, and that is tp.
#
# **Exercise.** Return all groups along `axes`. `sizes` names the axes, fastest first. Five lines of tensor operations are
# enough. A group may run along several axes: `["dp", "cp"]` gives the ranks that hold the same weights, and
# `["cp", "dp"]` gives the same groups. The ranks of a group stand in ascending order, and groups are ordered by their
# first rank.

# %%
# %%exercise axis_groups
import math

import torch


def axis_groups(sizes: dict[str, int], axes: list[str]) -> list[list[int]]:
    """Groups of ranks that differ only along `axes`; sizes = {"tp": 2, "cp": 2, ...}, fastest first."""
    ### BEGIN SOLUTION
    slowest_first = list(reversed(sizes))
    grid = torch.arange(math.prod(sizes.values())).view([sizes[a] for a in slowest_first])
    fixed = [i for i, a in enumerate(slowest_first) if a not in axes]
    free = [i for i, a in enumerate(slowest_first) if a in axes]
    members = math.prod(sizes[a] for a in axes)
    return grid.permute(*fixed, *free).reshape(-1, members).tolist()
    ### END SOLUTION


# %%
check("axis_groups")

# %% [markdown]
# ### Your groups, drawn
#
# Ranks with the same letter and colour are one group of yours.

# %%
# %%needs axis_groups
from minimegatron.comm.mesh import rank_groups
from minimegatron.config import ParallelConfig
from minimegatron.viz.mesh import rank_grid

sizes, names = {"tp": 2, "cp": 2, "dp": 2, "pp": 2}, ["tp", "cp", "dp", "pp", "dp-cp", "tp-pp"]
yours = {name: [[int(r) for r in group] for group in axis_groups(sizes, name.split("-"))] for name in names}
layout = ParallelConfig(tensor_model_parallel_size=2, context_parallel_size=2, pipeline_model_parallel_size=2)
print("the same groups as the package's:", yours == {name: rank_groups(layout, 16, name) for name in names})
display(rank_grid(sizes, yours))

# %% [markdown]
# A `tp-pp` group holds one whole copy of the model, here on four ranks. The ranks of a `dp-cp` group hold the same
# weights and see different tokens, so they sum their gradients.
#
# **Experts use the same ranks a second time.** A mixture-of-experts layer lays the tp·cp·dp ranks out on a second grid,
# etp·ep·edp: etp divides the matrices of an expert, ep divides the experts, and edp counts the copies of the same
# experts; pp stays. Expert parallelism therefore needs no further ranks: dp = world / (tp·cp·pp), whatever ep is. The same
# function gives its groups:

# %%
# %%ranks 1 --needs axis_groups
from exercises.axis_groups import axis_groups

expert = {"etp": 1, "ep": 4, "edp": 2, "pp": 2}
for name in ("ep", "edp"):
    print(name, axis_groups(expert, [name]))

# %% [markdown]
# ### The ring
#
# Now the collective itself. Three ranks want the sum of their three tensors. Each cuts its own into the parts A, B and C.
# Rank 0 holds 1, 2, 3, rank 1 holds 10, 20, 30, and rank 2 holds 100, 200, 300, so the digits of a sum show which ranks
# are in it.

# %%
from course.figures.process_groups import ring_steps

ring_steps(title="An all-reduce on a ring of three ranks")

# %% [markdown]
# Follow part A. In step 1 rank 0 sends its 1, and rank 1 adds it to its 10. In step 2 rank 1 sends the 11, and rank 2
# adds it to its 100: 111 is finished. Steps 3 and 4 carry the 111 on to rank 0 and then to rank 1, which put it in the
# place of what they had. Parts B and C do the same at the same time, so no rank is ever idle, and every message is one
# part long.
#
# * **Reduce-scatter**, steps 1 to N-1: send one part, receive another, *add* it to yours.
# * **All-gather**, steps N to 2N-2: send one part, receive another, *replace* yours.
#
# Which part does rank r send in step k, and which does it receive? Write the letters of the arrows into a table, with one
# row per rank and one column per step. Then number the parts from 0 and the steps from 0, and look for the rule.
#
# One trap: if every rank first calls a blocking `send`, each waits until its right neighbour calls `recv`, and no rank
# ever does. Start the message with `isend`, call `recv`, and then wait for the message that you sent.
#
# **Exercise.** An all-reduce from `isend` and `recv` only (or their relatives `send`, `irecv`, `batch_isend_irecv`),
# for any number of ranks. The size need not be a multiple of N: `tensor_split` makes N parts of any tensor, `chunk`
# sometimes fewer. Return a new tensor of the same shape and dtype, and leave `x` as it is.
#
# *Hidden cases* are rows of a check whose inputs are not shown. From here on they also use float64, and tensors that are
# not contiguous, such as a transpose. A message needs contiguous memory. To try your function before its check has
# passed, run it on a tensor of your own:
#
# ```
# %%ranks 3
# import torch
# from exercises.ring_all_reduce import ring_all_reduce
#
# print(ring_all_reduce(torch.tensor([1.0, 2.0, 3.0]) * 10**rank))
# ```

# %%
# %%exercise ring_all_reduce
import torch
import torch.distributed as dist


def ring_all_reduce(x: torch.Tensor) -> torch.Tensor:
    """The sum of x over all ranks, with messages to the right neighbour only."""
    ### BEGIN SOLUTION
    rank, n = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
    total = x.clone().flatten()
    parts = total.tensor_split(n)

    def pass_on(send: int, receive: int) -> torch.Tensor:
        arriving = torch.empty_like(parts[receive])
        sending = dist.isend(parts[send].clone(), right)
        dist.recv(arriving, left)
        sending.wait()
        return arriving

    for k in range(n - 1):
        receive = (rank - k - 1) % n
        parts[receive].add_(pass_on((rank - k) % n, receive))
    for k in range(n - 1):
        receive = (rank - k) % n
        parts[receive].copy_(pass_on((rank + 1 - k) % n, receive))
    return total.view_as(x)
    ### END SOLUTION


# %%
check("ring_all_reduce")

# %% [markdown]
# The check counted the bytes of your messages: a function that sends every tensor to every rank computes the right sum
# and loses points. Here is your ring on three ranks, drawn from the messages that it really sent.

# %%
# %%ranks 3 --needs ring_all_reduce --out ringing
import torch
from exercises.ring_all_reduce import ring_all_reduce

from labkit.watched import group_calls

x = torch.tensor([1.0, 2.0, 3.0]) * 10**rank
with group_calls() as calls:
    total = ring_all_reduce(x)
messages = [call for call in calls if call.name == "send"]
print("sent", [int(m.first) for m in messages], "and holds", total.int().tolist())
report(([m.first for m in messages], sum(m.nbytes for m in messages) / x.nbytes))

# %%
# %%needs ring_all_reduce
from course.figures.process_groups import ring_steps, sends_in

if all(len(sent) == 4 for sent, _ in ringing):
    display(ring_steps(sends=sends_in([sent for sent, _ in ringing]), title="Your ring"))
else:
    print("not drawn: a ring of three ranks sends 4 messages a rank, yours sends", [len(sent) for sent, _ in ringing])

# %% [markdown]
# ### f and g: collectives with a gradient
#
# In tensor parallelism a collective stands *inside* the model, so autograd must know its gradient. An example with two
# ranks: both hold x = 3, rank 0 has the weight 2 and rank 1 has the weight 5, and y is the sum of both products.
#
# | | rank 0 | rank 1 | together |
# |---|---|---|---|
# | own product | 3 · 2 = 6 | 3 · 5 = 15 | y = 21 |
# | what autograd finds for ∂y/∂x | 2 | 5 | the true gradient is 7 |
#
# Each rank's autograd sees only its own use of x, so neither 2 nor 5 is the gradient. Two operators give the true one:
#
# * **f**, `copy_to`, stands where x goes into different work on each rank.
# * **g**, `reduce_from`, stands where the products 6 and 15 become y = 21 on every rank.
#
# Each has a single all-reduce, in one of its two passes, and sends nothing in the other. Which one? Draw the example,
# follow the 3 forward and the gradient of y back, and ask at each operator: does every rank know the whole number
# already, or only its share? All ranks compute the same loss from y.
#
# **Exercise.** Write both as `torch.autograd.Function`. Neither may change the tensor that it is given. Gradients are
# such tensors too: autograd may hand the same one to other functions.

# %%
# %%exercise conjugates
import torch
import torch.distributed as dist


class Copy(torch.autograd.Function):
    """f: x goes into different work on each rank."""

    @staticmethod
    def forward(ctx, x):
        ### BEGIN SOLUTION
        return x.view_as(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad
        ### END SOLUTION


class Reduce(torch.autograd.Function):
    """g: the sum of what all ranks have computed."""

    @staticmethod
    def forward(ctx, x):
        ### BEGIN SOLUTION
        y = x.contiguous().clone()
        dist.all_reduce(y)
        return y
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION
        return grad
        ### END SOLUTION


def copy_to(x):
    return Copy.apply(x)


def reduce_from(x):
    return Reduce.apply(x)


# %%
check("conjugates")

# %% [markdown]
# Each is the other's backward pass (Shoeybi et al. 2019, arXiv 1909.08053, figure 3). At work you may meet
# `torch.distributed.nn.functional.all_reduce`, which sums in *both* passes: it takes the whole loss to be the sum of all
# ranks' losses. In the place of g, where all ranks compute one loss, it makes gradients N times too large.
#
# *This is a good place to stop. When you come back: run the first cell, then go on here.*
#
# ### Who reads what
#
# Data-parallel ranks must read different samples; tensor-parallel ranks must read the same. And when a run crashes after
# 123,456 samples, it must go on with the next one, on however many ranks there are now.
#
# A sampler *without memory* does all of it: what a rank reads next is a function of how many samples the whole run has
# consumed. That one number is all that a checkpoint needs to keep.
#
# The run reads one epoch after another. Epoch e visits the samples in the order
# `numpy.random.RandomState(seed + e).permutation(num_samples)`. Here are 6 samples, seed 0, read by 2 ranks with a
# micro-batch of 2:

# %%
from course.figures.process_groups import who_reads

who_reads(
    [("2 ranks", [[[5, 2], [1, 3]], [[0, 4], [2, 1]], [[4, 0], [3, 5]]])], num_samples=6, title="Two epochs of 6 samples"
)

# %% [markdown]
# **Exercise.** After `consumed` samples, the next `dp_size * micro_batch` samples of that stream are dealt out in
# contiguous blocks: rank 0 takes the first `micro_batch`, rank 1 the next, and so on. Return those of `dp_rank`. In the
# picture, `consumed = 4` and rank 1 gives [2, 1], which are the first two of epoch 1. A data set may be smaller than a
# batch.

# %%
# %%exercise my_samples
import numpy


def my_samples(consumed: int, micro_batch: int, dp_rank: int, dp_size: int, num_samples: int, seed: int) -> list[int]:
    """Ids of the next micro_batch samples of this rank, after `consumed` samples of the whole run."""
    ### BEGIN SOLUTION
    first = consumed + dp_rank * micro_batch
    ids = []
    for position in range(first, first + micro_batch):
        epoch, place = divmod(position, num_samples)
        ids.append(int(numpy.random.RandomState(seed + epoch).permutation(num_samples)[place]))
    return ids
    ### END SOLUTION


# %%
check("my_samples")

# %% [markdown]
# Now two ranks read 8 of 12 samples in steps 0 and 1, and crash. Four ranks go on with step 2. All that they know is
# `consumed = 8`.

# %%
# %%needs my_samples
from course.figures.process_groups import who_reads

before = [[list(my_samples(4 * step, 2, rank, 2, 12, seed=3)) for rank in range(2)] for step in range(2)]
after = [[list(my_samples(8, 2, rank, 4, 12, seed=3)) for rank in range(4)]]
read = [i for steps in (before, after) for step in steps for ids in step for i in ids]
print("the first epoch holds every sample once:", sorted(read[:12]) == list(range(12)))
runs = [("2 ranks, until the crash", before), ("4 ranks, after 8 consumed", after)]
display(who_reads(runs, num_samples=12, title="A crash between two steps"))

# %% [markdown]
# ### Gradients that leave early
#
# The backward pass produces gradients from the last layer to the first. If you wait for all of them before you send any,
# the network idles while the GPU computes, and the GPU idles while the network works. If you send each by itself, you
# pay hundreds of latencies. So gradients travel in **buckets**, flat tensors of several gradients. A full bucket leaves,
# and the backward pass goes on.
#
# How large is the best bucket? Take the ring of section 2, with α = 10 µs and β = 50 GB/s, and the fp32 gradients of the
# 32 layers of Llama-3 8 B, 28 GB. The backward pass of 16,384 tokens takes 1.1 s.

# %%
guess("bucket_mb", None, "1,024 GPUs sum 28 GB of gradients: with buckets of how many MB is the last sum there first?")

# %% [markdown]
# Small numbers first. Five layers go back in the order e, d, c, b, a. An all-reduce takes 4 s, and 1 s for each element.
# The network carries one at a time (NCCL does all of a group in their order).
#
# | gradient | ready after | elements |
# |---|---|---|
# | e | 5 s | 3 |
# | d | 10 s | 4 |
# | c | 15 s | 2 |
# | b | 20 s | 5 |
# | a | 25 s | 1 |
#
# A bucket takes whole gradients as they become ready. It is full when it holds `bucket_size` elements or more. With
# `bucket_size = 6` the first one has e and d. It leaves after 10 s, and its sum is there after 10 + 4 + 7 = 21 s. The
# last sum of the step is there after 37 s. With `bucket_size = 1` it would be 40 s, and with 100, 44 s. Find out why
# before you write any code.
#
# **Exercise.** After how many seconds is the last sum there? `ready` and `elements` stand in the order of the backward
# pass; an all-reduce of n elements takes `latency + n / per_second`. Copies take no time here.

# %%
# %%exercise last_arrival
def last_arrival(
    ready: list[float], elements: list[int], bucket_size: int, latency: float, per_second: float
) -> float:
    """Seconds from the beginning of the backward pass."""
    ### BEGIN SOLUTION
    held, free = 0, 0.0  # elements in the open bucket; when the network is free
    for number, (moment, n) in enumerate(zip(ready, elements), 1):
        held += n
        if held >= bucket_size or number == len(ready):
            free = max(free, moment) + latency + held / per_second
            held = 0
    return free
    ### END SOLUTION


# %%
check("last_arrival")

# %% tags=["hide-output"]
# %%needs last_arrival
import itertools

import matplotlib.pyplot as plt

from minimegatron.viz.picture import INK

H, FFN, KV, LAYERS = 4096, 14336, 1024, 32
elements = [FFN * H, FFN * H, FFN * H, H, H * H, KV * H, KV * H, H * H, H] * LAYERS  # of a layer, the last matrix first
ready = list(itertools.accumulate(4 * n * 16384 / 400e12 for n in elements))  # 16,384 tokens, 400 · 10¹² operations/s
megabytes = [2**k for k in range(16)]


def pass_ends(mb, ranks):
    steps = 2 * (ranks - 1)
    return last_arrival(ready, elements, int(1e6 * mb / 4), steps * 10e-6, 50e9 * ranks / steps / 4)


fig, ax = plt.subplots(figsize=(7, 2.8))
for ranks, width in ((8, 0.8), (64, 1.5), (1024, 2.5)):
    waits = [pass_ends(mb, ranks) - ready[-1] for mb in megabytes]
    ax.plot(megabytes, waits, color=INK, linewidth=width, label=f"{ranks:,} GPUs")
    ax.plot(megabytes[waits.index(min(waits))], min(waits), "o", color=INK)
ax.set(xscale="log", yscale="log", xlabel="MB of a bucket", ylabel="s", title="From the end of the pass to the last sum")
ax.legend()
plt.show()
guessed("bucket_mb", min(megabytes, key=lambda mb: pass_ends(mb, 1024)), "MB")

# %% [markdown]
# To the left latencies add up, to the right less and less is hidden behind the backward pass. A dot is the best bucket. A
# ring of more ranks has more steps, so it needs larger buckets. Megatron's default is 40 million elements, or
# 1 million for each data-parallel rank where that is more: 4 GB of fp32 on 1,024. PyTorch's is 25 MiB.
#
# ### Buckets
#
# Now send them. `p.register_post_accumulate_grad_hook(f)` calls `f(p)` when `p.grad` is ready.
# `dist.all_reduce(..., async_op=True)` returns a handle at once, and `handle.wait()` waits for the sum.
#
# **Exercise.** Write this class. Buckets are those of the example: one all-reduce for each, and a full one leaves before
# the next gradient is computed. After `finish()` the *sum over the ranks of `group`* stands in every `.grad`
# (`group=None` means all ranks). Only `finish()` may wait. The class is used for many steps. Do not divide the sum: the
# right divisor is the subject of section 6.

# %%
# %%exercise overlap
import torch
import torch.distributed as dist


class OverlappedReducer:
    """Sums gradients over ranks in buckets of at least bucket_size elements, while backward runs."""

    def __init__(self, params: list[torch.Tensor], bucket_size: int, group: dist.ProcessGroup | None = None):
        ### BEGIN SOLUTION
        self.bucket_size, self.group, self.open, self.travelling = bucket_size, group, [], []
        for p in params:
            p.register_post_accumulate_grad_hook(self.ready)
        ### END SOLUTION

    def ready(self, p: torch.Tensor) -> None:
        """Called by backward() when p.grad is complete."""
        ### BEGIN SOLUTION
        self.open.append(p)
        if sum(q.numel() for q in self.open) >= self.bucket_size:
            self.send()

    def send(self) -> None:
        flat = torch.cat([p.grad.flatten() for p in self.open])
        self.travelling.append((self.open, flat, dist.all_reduce(flat, group=self.group, async_op=True)))
        self.open = []
        ### END SOLUTION

    def finish(self) -> None:
        """After this, every .grad is the sum over ranks."""
        ### BEGIN SOLUTION
        if self.open:
            self.send()
        for params, flat, handle in self.travelling:
            handle.wait()
            for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
                p.grad.copy_(part.view_as(p))
        self.travelling = []
        ### END SOLUTION


# %%
check("overlap")

# %% [markdown]
# ### One order on all ranks
#
# Collectives have no names. The first one that a rank starts in a group meets the first one of the others, the second
# meets the second. So all ranks must make the same calls in the same order.
#
# Do they? A hook runs when a gradient is ready, and that depends on the graph of this rank. Ranks differ when a layer is
# skipped at random, an expert gets no token, or a batch has no image. In the cell below each hook sums its own gradient
# at once. Both ranks use a and b, in another order: b becomes ready first on rank 0, and a on rank 1. The gradients are
# a: 1, b: 2 on rank 0 and a: 10, b: 20 on rank 1, so the sums are 11 and 22. What stands in `a.grad` of rank 0?

# %%
guess("mixed", None, "the sum of 1 and 10, summed out of order: what stands in a.grad of rank 0?")

# %% tags=["hide-output"]
# %%ranks 2 --out mixed
import torch
import torch.distributed as dist

a, b = (torch.zeros(1, requires_grad=True) for _ in range(2))
for p in (a, b):
    p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
factor = 10.0**rank
used = ((a, 1.0), (b, 2.0)) if rank == 0 else ((b, 2.0), (a, 1.0))
loss = torch.zeros(())
for p, gradient in used:  # what is used last has its gradient first
    loss = loss + factor * gradient * p.sum()
loss.backward()
print(f"a.grad {a.grad.item():.0f}   b.grad {b.grad.item():.0f}")
report(a.grad.item())

# %% tags=["hide-output"]
guessed("mixed", mixed[0], "in a.grad of rank 0")

# %% [markdown]
# No error, and a sum of two different parameters. This is the kind case: a and b have one size. With different sizes, or
# when one rank makes a call fewer, NCCL waits for ever or mixes memory. GPUs show 100 %, no rank prints anything, and after
# ten minutes, the default timeout of a group of NCCL, a watchdog ends the job. You then look for the call in which ranks
# differ. PyTorch's *flight recorder* keeps the last calls of each rank (`TORCH_FR_BUFFER_SIZE`, `torchfrtrace`);
# `TORCH_DISTRIBUTED_DEBUG=DETAIL` compares operation and shapes before every call, slowly.
#
# **Exercise.** Write the reducer again, so that this cannot happen. Gradients may become ready in any order, another one
# on each rank. A parameter may have no gradient at all on a rank, or on all of them: its hook is not called, and its
# share of the sum is 0. After `finish()` every `.grad` is the sum, on every rank. `params` are the same on all ranks.
# One all-reduce a bucket; no other messages; only `finish()` may wait. And nothing is lost: in the usual order, from the
# last parameter to the first on every rank, full buckets leave while backward runs, as in `OverlappedReducer`.

# %%
# %%exercise ordered
import torch
import torch.distributed as dist


class OrderedReducer:
    """As OverlappedReducer; gradients may arrive in any order, another one on each rank, or not at all."""

    def __init__(self, params: list[torch.Tensor], bucket_size: int, group: dist.ProcessGroup | None = None):
        ### BEGIN SOLUTION
        self.group, self.buckets = group, [[]]
        for p in reversed(params):
            if sum(q.numel() for q in self.buckets[-1]) >= bucket_size:
                self.buckets.append([])
            self.buckets[-1].append(p)
            p.register_post_accumulate_grad_hook(self.ready)
        self.arrived, self.travelling = set(), []
        ### END SOLUTION

    def ready(self, p: torch.Tensor) -> None:
        """Called by backward() when p.grad is complete."""
        ### BEGIN SOLUTION
        self.arrived.add(p)
        for bucket in self.buckets[len(self.travelling) :]:
            if not self.arrived.issuperset(bucket):
                break
            self.send(bucket)

    def send(self, bucket: list[torch.Tensor]) -> None:
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
        self.travelling.append((flat, dist.all_reduce(flat, group=self.group, async_op=True)))
        ### END SOLUTION

    def finish(self) -> None:
        """After this, every .grad is the sum over ranks; a missing one counts as zeros."""
        ### BEGIN SOLUTION
        for bucket in self.buckets[len(self.travelling) :]:
            self.send(bucket)
        for bucket, (flat, handle) in zip(self.buckets, self.travelling, strict=True):
            handle.wait()
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = part.view_as(p)
        self.arrived, self.travelling = set(), []
        ### END SOLUTION

# %%
check("ordered")

# %% [markdown]
# PyTorch's `DistributedDataParallel` works like this. Buckets of 25 MiB are filled from the last parameter (the first
# bucket is smaller, so that it leaves early), and a bucket waits for its turn. After the first step rank 0 tells all
# ranks in which order its gradients came, and the buckets are filled anew in this order. A parameter without a gradient
# is an error at the next step. With `find_unused_parameters=True` it counts as zeros, and buckets stay as they are (Li et
# al. 2020, arXiv 2006.15704).

# %% [markdown]
# ## 4 · Run and 5 · See
#
# ### Bytes: predicted and counted
#
# Run your ring on four ranks, count the bytes of its messages, and compare your formula with the counts. The first half
# of the messages is the reduce-scatter, the second half is the all-gather.

# %%
# %%ranks 4 --needs bytes_sent,ring_all_reduce --out four
import torch
from exercises.bytes_sent import bytes_sent
from exercises.ring_all_reduce import ring_all_reduce

from labkit.watched import group_calls

x = torch.ones(1 << 18)  # 1 MiB
with group_calls() as calls:
    ring_all_reduce(x)
sent = [call.nbytes for call in calls if call.name == "send"]
half = len(sent) // 2
for op, messages in (("reduce_scatter", sent[:half]), ("all_gather", sent[half:]), ("all_reduce", sent)):
    predicted, counted = float(bytes_sent(op, x.nbytes, world)) / 2**20, sum(messages) / 2**20
    print(f"{op:15} predicted {predicted:.2f} MiB   counted {counted:.2f} MiB in {len(messages)} messages")
report(sum(sent) / x.nbytes)

# %% [markdown]
# The formula holds, so you can compare algorithms before you run them. The simplest all-reduce that works sends the whole
# tensor of every rank to every other rank. This cell counts the bytes of your ring and of the simple way, on eight ranks.

# %%
# %%ranks 8 --needs ring_all_reduce --out eight
import torch
import torch.distributed as dist
from exercises.ring_all_reduce import ring_all_reduce

from labkit.watched import group_calls


def to_every_other(x):
    total, others = x.clone(), [r for r in range(world) if r != rank]
    sending = [dist.isend(x, r) for r in others]
    for r in others:
        arriving = torch.empty_like(x)
        dist.recv(arriving, r)
        total += arriving
    for work in sending:
        work.wait()
    return total


x, sent = torch.full((250_000,), float(rank)), []  # 1 MB
for way in (ring_all_reduce, to_every_other):
    with group_calls() as calls:
        assert bool((way(x) == 28).all())
    sent.append(sum(call.nbytes for call in calls if call.name == "send") / x.nbytes)
report(sent)

# %%
# %%needs bytes_sent ring_all_reduce
from course.figures.counts import against_ranks

ring, simple = "your ring", "to every other rank"
formulas = {ring: lambda n: bytes_sent("all_reduce", 1, n), simple: lambda n: n - 1}
counts = {ring: {3: ringing[0][1], 4: four[0], 8: eight[0][0]}, simple: {8: eight[0][1]}}
display(
    against_ranks(formulas, counts, ylabel="bytes sent by one rank,\nin sizes of the tensor", title="An all-reduce")
)

# %% [markdown]
# ### Overlap on a timeline
#
# Sleep stands in for computation, so that a CPU shows what a GPU would do: the backward of each of four layers takes
# 30 ms, and the all-reduce of its 8 MiB of gradients really travels. Your `OverlappedReducer` runs in two ways.
# *Blocking*: the bucket is larger than the model, so all gradients leave at the end. *Overlapped*: each layer fills a
# bucket. Both run five times in turn, and you see the fastest of each.
#
# **The prediction:** computing gradients, copying them into buckets and copying the sums back takes C; each way is run
# on a group of one rank, where nothing travels, to measure its C. An all-reduce of all four layers alone takes T, of one
# layer t. Then blocking ends at C + T. Overlapped ends at C + t, because only the last bucket travels when no layer is
# left to compute (this holds while t is shorter than a layer). The folded cell measures C, T and t, runs both ways, and
# reports their events. In the picture b0 is the first bucket that leaves, and in the gaps between two layers autograd
# computes and stores the gradient of a layer.

# %% jupyter={"source_hidden": true}
# %%ranks 2 --needs overlap --out timelines
import time

import torch
import torch.distributed as dist
from exercises.overlap import OverlappedReducer

from labkit.watched import group_calls
from minimegatron import trace

LAYERS, SIZE, SECONDS = 4, 1 << 21, 0.03


class Slow(torch.autograd.Function):
    """x * mean(w), whose backward takes 30 ms."""

    @staticmethod
    def forward(ctx, x, w, name):
        ctx.save_for_backward(x, w)
        ctx.name = name
        return x * w.mean()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        with trace.span(ctx.name, "compute"):
            time.sleep(SECONDS)
        return grad * w.mean(), (grad * x).sum().expand_as(w) / w.numel(), None


def one_step(bucket_size, group=None):
    """[(name, kind, start, end)] of a backward pass with its buckets, summed over the ranks of group."""
    weights = [torch.ones(SIZE, requires_grad=True) for _ in range(LAYERS)]
    reducer = OverlappedReducer(weights, bucket_size, group)
    x = torch.ones(1)
    for i, w in enumerate(weights):
        x = Slow.apply(x, w, f"layer {i}")
    dist.barrier()
    with trace.record(rank) as log, group_calls() as calls:
        x.backward()
        reducer.finish()
        end = time.monotonic()
    layers = [(e.name, e.kind, e.start, e.end) for e in log.events]
    buckets = [(f"b{k}", "comm", call.start, call.end) for k, call in enumerate(calls)]
    copies = [("", "copies", max(to for *_, to in layers if to <= call.start), call.start) for call in calls]
    copies.append(("", "copies", max(to for *_, to in layers + buckets if to <= end), end))  # sums back
    return layers + buckets + copies


def all_reduce_alone(elements):
    x = torch.ones(elements)
    dist.barrier()
    begin = time.monotonic()
    dist.all_reduce(x)
    return [("", "comm", begin, time.monotonic())]


def best(tried):
    """(the events, their seconds) of the try whose slower rank was fastest: a machine does other things, too."""
    slower = torch.tensor([max(end for *_, end in events) - min(start for _, _, start, _ in events) for events in tried])
    dist.all_reduce(slower, op=dist.ReduceOp.MAX)
    return tried[int(slower.argmin())], slower.min().item()


alone_with_me = [dist.new_group([r]) for r in range(world)][rank]  # nothing travels there
WAYS = {
    "blocking": lambda: one_step(LAYERS * SIZE + 1),
    "overlapped": lambda: one_step(SIZE),
    "blocking, alone": lambda: one_step(LAYERS * SIZE + 1, alone_with_me),
    "overlapped, alone": lambda: one_step(SIZE, alone_with_me),
    "T": lambda: all_reduce_alone(LAYERS * SIZE),
    "t": lambda: all_reduce_alone(SIZE),
}
one_step(SIZE)  # warm up
tried = {name: [] for name in WAYS}
for _ in range(5):
    for name, way in WAYS.items():
        tried[name].append(way())
fastest = {name: best(tried[name])[0] for name in ("blocking", "overlapped")}
seconds = {name: best(tried[name])[1] for name in WAYS}
expected = {
    "blocking": seconds["blocking, alone"] + seconds["T"],
    "overlapped": seconds["overlapped, alone"] + seconds["t"],
}
report((fastest, expected))

# %%
# %%needs overlap
from minimegatron.trace import Event
from minimegatron.viz.timeline import beside, hidden_share

fastest, expected = timelines[0]
runs = {way: [Event(name, kind, 0, *when) for name, kind, *when in events] for way, events in fastest.items()}
print("blocking hides nothing:", hidden_share(runs["blocking"]) == 0)
print("overlapped hides some of its communication:", hidden_share(runs["overlapped"]) > 0)
display(beside(runs, expected=expected, title="One backward pass, two ways, each the best of five"))

# %% [markdown]
# A run ends with the last bar, where the sums have been copied back. A run that ends a little after its dashed line lost
# time in what the prediction leaves out: on a CPU an all-reduce takes time from the cores that run the layers and copy.
#
# ### On real networks
#
# On GPUs the same code runs over NCCL. The time of a small message is nearly all latency; only large messages reach the
# bandwidth of the link. On a machine with two or more GPUs these cells measure it and plot the *bus bandwidth*: the
# bytes that a ring sends (your formula) over the time. Elsewhere the first cell says so, and the second does nothing.

# %%
# %%torchrun --gpus 2 --name bandwidth --out bandwidth
import time

import torch
import torch.distributed as dist
from minimegatron.launch.rank import finish, init, report

LARGEST = 28  # 2**28 numbers are 1 GiB

rank, world = init()
points = []
for power in range(10, LARGEST + 1, 2):
    x, best = torch.ones(1 << power, device="cuda"), float("inf")
    for _ in range(6):  # the first warms up; the best of five counts
        torch.cuda.synchronize()
        start = time.perf_counter()
        dist.all_reduce(x)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    points.append([x.nbytes, 2 * x.nbytes * (world - 1) / world / best / 1e9])
report(points)
finish()

# %%
import matplotlib.pyplot as plt

from minimegatron.viz.picture import MEASURED_LINE

if bandwidth:
    sizes_in_bytes, gigabytes_per_second = zip(*bandwidth.reports[0])
    fig, ax = plt.subplots(figsize=(7, 2.8))
    ax.plot(sizes_in_bytes, gigabytes_per_second, marker="o", **MEASURED_LINE)
    ax.set(xscale="log", xlabel="message in bytes", ylabel="bus bandwidth in GB/s")
    ax.set_title(f"All-reduce over {bandwidth.nproc} GPUs")
    plt.show()

# %% [markdown]
# ## 6 · Break it
#
# Below is a data-parallel training step. Each rank computes the mean loss over *its own* tokens, and the gradients are
# averaged over ranks. It runs without an error, and the loss falls from step to step. It has a bug.
#
# Tokens of padding do not count, so the two ranks count different numbers of tokens, as they do in every real batch. The
# cell compares the step with its **serial twin**: one process, the same weights, the same batch.

# %%
# %%ranks 2
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy


def batch(of_rank):  # 4 sequences of 16 tokens; mask is 1 where a token counts
    g = torch.Generator().manual_seed(of_rank)
    ids = torch.randint(0, 64, (4, 17), generator=g)
    return ids, (torch.rand(4, 16, generator=g) < (0.95, 0.15)[of_rank]).float()


def token_losses(weights, ids):
    return cross_entropy((weights[0][ids[:, :-1]] @ weights[1]).mT, ids[:, 1:], reduction="none")


def fresh_weights():
    g = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=g).mul(0.3).requires_grad_() for shape in ((64, 16), (16, 64))]


weights, (ids, mask) = fresh_weights(), batch(rank)  # the step with the bug
loss = (token_losses(weights, ids) * mask).sum() / mask.sum()
loss.backward()
shown = loss.detach().clone()
for x in (*(w.grad for w in weights), shown):
    dist.all_reduce(x)
    x /= world

twin, batches = fresh_weights(), [batch(r) for r in range(world)]  # the serial twin: all tokens in one process
total = sum((token_losses(twin, i) * m).sum() for i, m in batches) / sum(m.sum() for _, m in batches)
total.backward()
for name, value, of in (("parallel", shown, weights), ("serial", total, twin)):
    print(f"{name:8}  loss {value.item():.3f}   gradient norm {torch.cat([w.grad.flatten() for w in of]).norm():.3f}")
print("tokens that count on each rank:", [int(m.sum()) for _, m in batches])

# %% [markdown]
# The losses differ by less than half a percent, which looks like noise. The gradient norm is too large by 42 percent.
# **At the first step, from the same weights and the same batch, a correct parallel step has the gradient of its serial
# twin to about six digits in fp32.** This comparison finds mistakes that no loss curve shows, and you will meet it in
# every lab on parallelism.
#
# Which line is wrong, and why? Decide before you open the answer.
#
# <details><summary>The answer</summary>
#
# `/ mask.sum()` divides by this rank's own count. Rank 0 counts 61 tokens and rank 1 counts 11, and both means weigh the
# same, so a token of rank 1 weighs as much as five and a half of rank 0. The mean of means is not the mean. With smaller
# numbers: rank 0 has the losses 1, 2, 3, rank 1 has the loss 4. The mean of the means is (2 + 4) / 2 = 3. The mean of
# all four is 10 / 4 = 2.5.
#
# </details>
#
# **Exercise.** Repair it. Return this rank's share of the mean over all counted tokens of all ranks in `group`, so that
# the *sum* of the ranks' results is that mean, and the sum of their gradients is its gradient. With the losses 1, 2, 3
# and 4 the shares are 6/4 = 1.5 and 4/4 = 1. A rank may have no counted token; where no rank has one, the loss is 0.

# %%
# %%exercise rank_loss
import torch
import torch.distributed as dist


def rank_loss(losses: torch.Tensor, mask: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """A scalar: losses and mask are [b, s], mask is 1 where a token counts. Gradients will be summed over ranks."""
    ### BEGIN SOLUTION
    count = mask.sum()
    dist.all_reduce(count, group=group)
    return (losses * mask).sum() / count.clamp(min=1.0)
    ### END SOLUTION


# %%
check("rank_loss")

# %% [markdown]
# ### Train
#
# Four ranks, tp2 × dp2, train a small Llama on the documentation of Python's standard library. The groups come from your
# `axis_groups`, the samples from your `my_samples`; your `OverlappedReducer` sums the gradients, and your `rank_loss`
# divides. Model and optimizer are the package's. Spaces do not count, so the two data-parallel ranks count different
# numbers of bytes. The folded cell then trains the serial twin in one process, on the same samples, and reports both
# curves of the loss.

# %% jupyter={"source_hidden": true}
# %%torchrun -n 4 --needs axis_groups,my_samples,overlap,rank_loss --name train --timeout 170 --out run
import itertools

import torch
import torch.distributed as dist
from exercises.axis_groups import axis_groups
from exercises.my_samples import my_samples
from exercises.overlap import OverlappedReducer
from exercises.rank_loss import rank_loss

from minimegatron.launch.rank import finish, init, report
from minimegatron.comm.mesh import Axis, Mesh
from minimegatron.config import ParallelConfig
from minimegatron.data.corpus import documents
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config

STEPS, SEQ, BATCH = 40, 96, 8
rank, world = init()
text = "\n".join(itertools.islice((t for _, t in documents("docs")), 60)).encode()
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
config = family_config("llama", num_layers=2, hidden_size=96, num_attention_heads=4, num_query_groups=2, vocab_size=256)


def my_axis(name, axes):
    """An axis of the package's mesh from your groups. Every rank creates every group, in the same order."""
    groups = [[int(r) for r in ranks] for ranks in axis_groups({"tp": 2, "dp": 2}, axes)]
    made = [(ranks, dist.new_group(ranks)) for ranks in groups]
    ranks, group = next((r, g) for r, g in made if rank in r)
    return Axis(name, tuple(ranks), ranks.index(rank), group)


def train(mesh, dp, loss_of, reducer_of):
    """The loss of each step, summed over the ranks of dp."""
    model = build_model(config, mesh, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    finish_gradients = reducer_of(list(model.parameters()))
    curve = []
    for step in range(STEPS):
        ids = my_samples(step * BATCH, BATCH // dp.size, dp.rank, dp.size, len(data) // SEQ - 1, seed=0)
        rows = torch.stack([data[i * SEQ : (i + 1) * SEQ + 1] for i in ids])
        counts = (rows[:, 1:] != ord(" ")).float()
        loss = loss_of(model(rows[:, :-1], labels=rows[:, 1:]), counts)
        optimizer.zero_grad()
        loss.backward()
        finish_gradients()
        optimizer.step()
        whole = loss.detach().clone()
        if dp.size > 1:
            dist.all_reduce(whole, group=dp.group)
        curve.append(whole.item())
    return curve


tp, dp = my_axis("tp", ["tp"]), my_axis("dp", ["dp"])
mesh = Mesh.serial()
mesh.parallel, mesh.rank, mesh.tp = ParallelConfig(tensor_model_parallel_size=2), rank, tp
mesh.dp = mesh.dp_cp = dp
curve = train(
    mesh, dp, lambda losses, mask: rank_loss(losses, mask, dp.group),
    lambda parameters: OverlappedReducer(parameters, 50_000, dp.group).finish,
)  # fmt: skip
twin = []
if rank == 0:
    serial = Mesh.serial()
    twin = train(serial, serial.dp, lambda losses, mask: (losses * mask).sum() / mask.sum(), lambda _: lambda: None)
    print(f"ranks: tp {tp.ranks}, dp {dp.ranks}")
    print(f"the loss fell by more than a third: {curve[-1] < curve[0] * 2 / 3}")
    print(f"the first ten steps are those of the serial twin: {all(abs(a - b) < 1e-4 for a, b in zip(curve, twin[:10]))}")
report((curve, twin))
finish()

# %%
# %%needs axis_groups my_samples overlap rank_loss
import matplotlib.pyplot as plt

from minimegatron.viz.picture import MEASURED_LINE, REFERENCE_LINE

curve, twin = run.reports[0]
fig, ax = plt.subplots(figsize=(7, 2.8))
ax.plot(twin, label="serial twin", **REFERENCE_LINE)
ax.plot(curve, label="four ranks, tp2 x dp2", **MEASURED_LINE)
ax.set(xlabel="step", ylabel="loss of a counted byte", title="Your groups, samples, buckets and loss")
ax.legend()
plt.show()
print("all four ranks report the same losses:", all(reported[0] == curve for reported in run.reports))

# %% [markdown]
# ## 7 · Explain
#
# Questions that an interviewer asks about process groups. Say your answer aloud before you open the one here.
#
# 1. *A run uses 64 GPUs with tp 4, cp 2, pp 2, ep 4. How large is dp?*
#    <details><summary>answer</summary>64 / (4 · 2 · 2) = 4. Expert parallelism needs no ranks of its own.</details>
# 2. *Why does tp come first in the order of the axes?*
#    <details><summary>answer</summary>Its ranks communicate in every layer, twice forward and twice backward. Neighbouring
#    ranks share a machine, and so its fast links.</details>
# 3. *Two groups share a rank. May each rank create its own groups in any order?*
#    <details><summary>answer</summary>No. Every rank creates every group in the same order, also those that it is not in.
#    Otherwise some ranks wait for ever.</details>
# 4. *A gradient is twice too large everywhere. Why does training with Adam look the same?*
#    <details><summary>answer</summary>Adam divides the average gradient by the average size of the gradient, so a factor
#    cancels. Clipping to a norm hides it as well. So compare gradients, not losses.</details>
# 5. *Why is a ring a good choice for large messages, and a bad one for small messages on many ranks?*
#    <details><summary>answer</summary>It sends the fewest bytes that messages between ranks allow, 2n(N-1)/N (Patarasuk
#    and Yuan, 2009). But it takes 2(N-1) steps, and for a small message the latency of the steps is all that
#    counts.</details>
# 6. *A job hangs, and all GPUs show 100 %. What do you look for?*
#    <details><summary>answer</summary>A kernel of NCCL that waits counts as busy. Find the first call of a group in which
#    ranks differ, by operation, size or number; then the branch of the code that only some ranks take.</details>
#
# **Exercise.** Answer four questions about any cluster. Its ranks lie on two grids: tp, cp, dp, pp, and for the experts
# etp, ep, edp, pp; the fastest axis comes first. Return a dict with
#
# * `dp`: the size of the dp axis;
# * `edp`: the size of the edp axis, which is the number of ranks that hold the same experts;
# * `same_weights_as_rank_0`: rank 0's dp-cp group, or its first four ranks where it has more;
# * `all_reduce_seconds`: the time in which a ring of the *whole* dp-cp group sums its gradients. Each rank holds
#   `gigabytes` of gradients and sends `gb_per_second`. Latency does not count.

# %%
# %%exercise answers
def answers(
    world: int, tp: int, cp: int, pp: int, ep: int, etp: int, gigabytes: float, gb_per_second: float
) -> dict[str, object]:
    """{"dp": ..., "edp": ..., "same_weights_as_rank_0": [...], "all_reduce_seconds": ...}"""
    ### BEGIN SOLUTION
    dp = world // (tp * cp * pp)
    group = [tp * i for i in range(cp * dp)]
    return {
        "dp": dp,
        "edp": world // (etp * ep * pp),
        "same_weights_as_rank_0": group[:4],
        "all_reduce_seconds": 2 * gigabytes * (len(group) - 1) / len(group) / gb_per_second,
    }
    ### END SOLUTION


# %%
check("answers")

# %% [markdown]
# ### What you guessed
#
# Eight ranks with 1 GB of gradients each, and the GB that each of them sends: counted with your ring, on a tensor a
# thousand times smaller.

# %%
# %%needs ring_all_reduce
guessed("gb_sent", eight[0][0], "GB")

# %%
progress()

# %% [markdown]
# ## Where this lives
#
# | here | minimegatron | Megatron-LM | PyTorch |
# |---|---|---|---|
# | the grid | `comm/mesh.py` | `core/parallel_state.py`, `RankGenerator` | `init_device_mesh`, slowest axis first |
# | f and g | `comm/collectives.py` | `core/tensor_parallel/mappings.py` | `DTensor`: `Replicate`, `Partial` |
# | buckets and overlap | `parallel/data/buckets.py`, `ddp.py` | `core/distributed/param_and_grad_buffer.py` | `DistributedDataParallel` |
# | the one division | `parallel/data/finalize.py` | `core/distributed/finalize_model_grads.py` | yours to do |
# | the sampler | `data/loader.py` | `training/datasets/data_samplers.py` | `DistributedSampler`, without `consumed` |
#
# The ring itself is in none of them. On GPUs NCCL has it, together with trees, and with sums inside the network's switches.
#
# Next: lab 02, tensor parallelism, where f and g stand around every block of a transformer.

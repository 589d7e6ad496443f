# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Lab 01 · Process groups
#
# Sixteen identical processes start. Each one knows two things: its own number and how many there are. An hour later they
# have trained one model together. Everything in between is *who talks to whom*, and that is what you build here.
#
# You need no GPU. Each lab walks the same seven steps: **the problem, predict, implement, run, see, break it,
# explain**. Run the cells from top to bottom. Where a cell says `your code here`, write yours; cells that need it wait.

# %%
# %load_ext course
# %lab 01_process_groups

# %% [markdown]
# ## 1 · The problem
#
# Training with Adam in mixed precision needs 16 bytes for each parameter: 2 for the weight, 2 for its gradient, 12 for
# the optimizer. Activations come on top.

# %%
import matplotlib.pyplot as plt

models = {"GPT-2 1.5 B": 1.5, "Llama-3 8 B": 8, "Llama-3 70 B": 70, "GPT-3 175 B": 175}
need = {name: 16 * billions for name, billions in models.items()}

fig, ax = plt.subplots(figsize=(7, 2.4))
ax.barh(list(need), list(need.values()), color="0.55")
ax.axvline(80, color="black", linestyle="--")
ax.text(88, 0, "one GPU: 80 GB", va="center")
ax.set(xscale="log", xlabel="GB of weights, gradients and optimizer state", title="What has to be somewhere")
plt.show()
print("GPUs that Llama-3 70 B fills before it has computed anything:", need["Llama-3 70 B"] // 80)

# %% [markdown]
# So the model has to be divided. There are five ways to divide the work, and real runs use several at once:
#
# | axis | divides | its ranks exchange |
# |---|---|---|
# | **tp** tensor | every matrix | activations, inside every layer |
# | **cp** context | every sequence | keys and values |
# | **dp** data | the batch | gradients, once a step |
# | **pp** pipeline | the layers | activations, at a few borders |
# | **ep** expert | the experts of a layer | tokens |
#
# Each axis needs its own *process groups*: lists of ranks that talk to each other and to nobody else.
#
# ### Ranks that run
#
# `%%torchrun -n 4` saves the cell as a file and runs it as you would in a terminal. The command it ran stands above the
# output, and the file stays, so you can run it again by hand. Equal output of several ranks is shown once.
#
# Below the command stands where the ranks ran. In the labs that is the CPU, also on a machine with GPUs: the setting in
# front of the command hides them. So everybody sees the same. Cells that measure GPUs say `--gpus`.

# %%
# %%torchrun -n 4 --name hello
import torch
import torch.distributed as dist
from minimegatron.launch.rank import finish, init

rank, world = init()
print(f"one of {world}, backend {dist.get_backend()}")

x = torch.tensor([float(rank)])
dist.all_reduce(x)
print(f"after the all-reduce everybody holds {x.item():.0f} = 0 + 1 + 2 + 3")
finish()

# %% [markdown]
# Starting Python and importing torch took seconds; the all-reduce took a millisecond. `%%ranks 4` runs a cell on ranks
# that are already warm. Inside, `rank` and `world` are set and the process group exists. Use it to explore.

# %%
# %%ranks 4
import torch
import torch.distributed as dist

x = torch.arange(4) + 10 * (rank + 1)
print("before", x.tolist())
dist.all_reduce(x)
print("after ", x.tolist())

# %% [markdown]
# ### Every collective, in one picture
#
# Rows are ranks, blocks are pieces of a tensor, colours say where a piece came from. A block of several colours is a sum.

# %%
from minimegatron.viz.collective import sheet

sheet()

# %% [markdown]
# Three things to take from the picture:
#
# * an **all-reduce** is a **reduce-scatter** followed by an **all-gather**; you will build it that way;
# * **all-gather** and **scatter**, **reduce-scatter** and **all-gather** undo each other's shapes;
# * **all-to-all** is a transpose of the grid: rank *i*'s block *j* goes to rank *j*'s place *i*.

# %% [markdown]
# ## 2 · Predict
#
# Put N ranks in a ring; each sends to its right neighbour only. Cut a tensor of `n` bytes into N parts. In one step
# every rank sends one part, `n/N` bytes. A reduce-scatter takes N-1 steps, an all-gather takes N-1 steps.
#
# **Exercise.** How many bytes does *each rank* send? `nbytes` is the whole tensor: the input of a reduce-scatter, the
# output of an all-gather. A part need not have a whole number of bytes: 10 bytes over 4 ranks make parts of 2.5.

# %%
# %%exercise bytes_sent
def bytes_sent(op: str, nbytes: int, ranks: int) -> float:
    """Bytes one rank sends for op in all_reduce, all_gather, reduce_scatter, run as a ring."""
    ### BEGIN SOLUTION
    once = nbytes * (ranks - 1) / ranks
    return 2 * once if op == "all_reduce" else once
    ### END SOLUTION


# %%
check("bytes_sent")

# %% [markdown]
# Look at the limit: for many ranks an all-reduce costs `2n`, no matter how many ranks there are. That is why data
# parallelism scales. What grows with N is the number of steps, and each step pays a latency.

# %% [markdown]
# ## 3 · Implement
#
# ### The grid
#
# Lay the ranks out on a grid, one axis for each kind of parallelism. The first axis varies fastest: its ranks are
# neighbours. With tp = cp = dp = pp = 2:
#
# $$\text{rank} = \text{tp} + 2\,\text{cp} + 4\,\text{dp} + 8\,\text{pp}$$
#
# A **group** along an axis is what remains when you fix all other coordinates. The order is a choice: ranks of one
# machine have neighbouring numbers, so the axis that talks most comes first. That is tp.
#
# **Exercise.** All groups along `axes`, by one reshape. `sizes` names the axes, fastest first. A group may run along
# several axes: `["dp", "cp"]` are all ranks that hold the same weights, and so are `["cp", "dp"]`. Members of a group
# keep the order of the ranks; groups are ordered by their first member.

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
# ### Your grid, drawn
#
# The picture uses the package's own groups. Compare them with yours.

# %%
from minimegatron.comm.mesh import rank_groups
from minimegatron.config import ParallelConfig
from minimegatron.viz.mesh import rank_grid

sizes = {"tp": 2, "cp": 2, "dp": 2, "pp": 2}
layout = ParallelConfig(tensor_model_parallel_size=2, context_parallel_size=2, pipeline_model_parallel_size=2)
names = ["tp", "cp", "dp", "pp", "dp-cp", "tp-pp"]
rank_grid(sizes, {name: rank_groups(layout, 16, name) for name in names})

# %% [markdown]
# `tp-pp` is one whole copy of the model: four ranks here. `dp-cp` are the ranks that hold the same weights and see
# different tokens, so they sum gradients.
#
# **Experts use the same ranks a second time.** A mixture-of-experts layer re-divides the tp·cp·dp ranks into etp·ep·edp.
# Expert parallelism therefore costs no ranks: dp = world / (tp·cp·pp), whatever ep is. The same function answers:

# %%
# %%ranks 1 --needs axis_groups
from exercises.axis_groups import axis_groups

expert = {"etp": 1, "ep": 4, "edp": 2, "pp": 2}
for name in ("ep", "edp"):
    print(name, axis_groups(expert, [name]))

# %% [markdown]
# ### The ring
#
# Now the collective itself. Cut your tensor into N parts.
#
# * **Phase 1** (reduce-scatter), step k = 0 … N-2: send part `(rank - k) % N` to the right, receive part
#   `(rank - k - 1) % N` from the left and *add* it to yours. Afterwards you own one finished part: `(rank + 1) % N`.
# * **Phase 2** (all-gather), step k = 0 … N-2: send part `(rank + 1 - k) % N`, receive part `(rank - k) % N` and
#   *overwrite* yours.
#
# One trap. If every rank calls a blocking `send` first, everybody waits for a `recv` that nobody has reached. Start the
# send with `isend`, do the `recv`, then wait for the send.
#
# **Exercise.** An all-reduce from `isend` and `recv` only (or their relatives `send`, `irecv`, `batch_isend_irecv`). The
# size need not be a multiple of N: `tensor_split` makes N parts of any tensor, `chunk` sometimes fewer. Return a new
# tensor of the same shape and dtype, and leave `x` as it is.
#
# From here on the hidden cases hand over tensors of float64, too, and tensors that are not contiguous, such as a
# transpose. A message wants contiguous memory.

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
# The check counted your messages: a solution that sends everything to everybody gives the right numbers and loses points.
#
# ### f and g: collectives with a gradient
#
# In tensor parallelism a collective stands *inside* the model, so its gradient matters. Two operators are each other's
# mirror image:
#
# | | forward | backward |
# |---|---|---|
# | **f**, `copy_to` | nothing: everybody has x already | all-reduce |
# | **g**, `reduce_from` | all-reduce of partial results | nothing |
#
# Why does *copy* sum in its backward? Each rank uses x for different work, so each knows only its own share of
# ∂loss/∂x. The full gradient is the sum of the shares. And after an all-reduce every rank holds the same y and computes
# the same loss, so ∂loss/∂y is already complete everywhere.
#
# **Exercise.** Write both as `torch.autograd.Function`. Neither may change the tensor that it is given: a gradient, too,
# belongs to autograd, which may hand the same one to others.

# %%
# %%exercise conjugates
import torch
import torch.distributed as dist


class Copy(torch.autograd.Function):
    """f: nothing forward, all-reduce backward."""

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
    """g: all-reduce forward, nothing backward."""

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
# ### Who reads what
#
# Data-parallel ranks must see different samples; tensor-parallel ranks must see the same. And after a crash at sample
# 123,456 the run must go on with sample 123,457, on however many ranks there are now.
#
# The cure is a sampler *without memory*: what a rank reads next is a function of how many samples the whole run has
# consumed. Nothing else needs to be saved.
#
# **Exercise.** The global order is one epoch after another; epoch e visits the samples in the order
# `numpy.random.RandomState(seed + e).permutation(num_samples)`. The next `dp_size * micro_batch` samples of that stream
# are dealt out in contiguous blocks: rank 0 takes the first `micro_batch`, rank 1 the next, and so on. Which are yours?
# (A data set may be smaller than a batch.)

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
# ### Gradients that leave early
#
# The backward pass produces gradients from the last layer to the first. Waiting for all of them before you talk wastes
# the network; sending each by itself pays hundreds of latencies. So collect them in **buckets**, and start a bucket's
# all-reduce as soon as it is full, while backward goes on.
#
# **Exercise.** A class that does that. `register_post_accumulate_grad_hook` calls you when a parameter's `.grad` is
# ready; `dist.all_reduce(..., async_op=True)` returns a handle. A bucket is full when it holds `bucket_size` elements or
# more. `finish()` sends what is left, waits for everything (nothing else waits), and leaves the *sum over the ranks of
# `group`* in every `.grad` (`None` is everybody). Then the next step comes. Do not divide: a rank cannot know by what
# (step 6).

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
# ## 4 · Run, and 5 · See
#
# ### Bytes: predicted and counted
#
# Every collective of the package counts its bytes. Run the three that you predicted, on four ranks, and hold your
# formula against the count.

# %%
# %%ranks 4 --needs bytes_sent,ring_all_reduce --out counted
import torch
import torch.distributed as dist
from exercises.bytes_sent import bytes_sent
from exercises.ring_all_reduce import ring_all_reduce

from minimegatron import trace
from minimegatron.comm import collectives
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig

world_axis = Mesh.build(ParallelConfig()).dp
x = torch.ones(1 << 18)
with trace.record(rank) as log:
    collectives.all_reduce(x.clone(), world_axis)
    collectives.reduce_scatter(x, world_axis)
    collectives.all_gather(x.chunk(4)[0], world_axis)

sent, real_isend = [], dist.isend
dist.isend = lambda t, *a, **k: (sent.append(t.nbytes), real_isend(t, *a, **k))[1]
ring_all_reduce(x)
dist.isend = real_isend

rows = {e.name: (bytes_sent(e.name, e.nbytes, 4), e.wire_bytes) for e in log.events}
rows["your ring"] = (bytes_sent("all_reduce", x.nbytes, 4), sum(sent))
for name, (predicted, measured) in rows.items():
    print(f"{name:15} predicted {predicted / 2**20:.2f} MiB   counted {measured / 2**20:.2f} MiB")
report(rows)

# %%
# %%needs bytes_sent ring_all_reduce
from minimegatron.viz.volume import bars

rows = counted[0]
display(bars({name: row[0] for name, row in rows.items()}, {name: row[1] for name, row in rows.items()}))

# %% [markdown]
# ### Overlap on a timeline
#
# Sleep stands in for computation, so that you see what a GPU would do: each of six layers "computes" its gradient for
# 20 ms and its all-reduce "travels" for real. Both runs are your `OverlappedReducer`. In the first the bucket is larger
# than the model, so everything leaves at the end; in the second each layer fills a bucket. Each runs five times; you see
# the fastest.

# %%
# %%ranks 2 --needs overlap --out timelines
import time

import torch
import torch.distributed as dist
from exercises.overlap import OverlappedReducer

from minimegatron import trace


class Slow(torch.autograd.Function):
    """x * w, whose backward takes 20 ms."""

    @staticmethod
    def forward(ctx, x, w, name):
        ctx.save_for_backward(x, w)
        ctx.name = name
        return x * w.mean()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        with trace.span(ctx.name, "compute"):
            time.sleep(0.02)
        return grad * w.mean(), (grad * x).sum().expand_as(w) / w.numel(), None


def one_step(bucket_size):
    weights = [torch.ones(1 << 20, requires_grad=True) for _ in range(6)]
    reducer = OverlappedReducer(weights, bucket_size)
    real, starts = dist.all_reduce, []

    def timed(t, *a, **k):
        start, handle = time.monotonic(), real(t, *a, **k)
        handle.get_future().then(lambda _: starts.append((start, time.monotonic())))
        return handle

    dist.all_reduce = timed
    x = torch.ones(1)
    for i, w in enumerate(weights):
        x = Slow.apply(x, w, f"layer {i}")
    dist.barrier()
    with trace.record(rank) as log:
        begin = time.monotonic()
        x.backward()
        reducer.finish()
        seconds = time.monotonic() - begin
        for k, (start, end) in enumerate(sorted(starts)):
            trace.emit(f"bucket {k}", "comm", start, end)
    dist.all_reduce = real
    return log.events, seconds


def fastest(bucket_size):
    """Of five steps the one whose slower rank was fastest: a machine does other things, too."""
    steps = [one_step(bucket_size) for _ in range(5)]
    slower = torch.tensor([seconds for _, seconds in steps])
    dist.all_reduce(slower, op=dist.ReduceOp.MAX)
    return steps[int(slower.argmin())]


one_step(1 << 20)  # warm up
runs = {"at the end": fastest(1 << 30), "overlapped": fastest(1 << 20)}
report({name: ([(e.name, e.kind, e.rank, e.start, e.end) for e in events], s) for name, (events, s) in runs.items()})

# %%
# %%needs overlap
from minimegatron.trace import Event
from minimegatron.viz.timeline import gantt, hidden_share

for name in ("at the end", "overlapped"):
    events = [Event(*e) for says in timelines for e in says[name][0]]
    display(gantt(events, title=f"{name}: {1000 * timelines[0][name][1]:.0f} ms"))
hidden = {n: hidden_share([Event(*e) for e in timelines[0][n][0]]) for n in ("at the end", "overlapped")}
print("more of the communication is hidden behind computation:", hidden["overlapped"] > hidden["at the end"])

# %% [markdown]
# ### Where groups meet real networks
#
# On GPUs the same code runs over NCCL. A small message pays latency only; the bandwidth you bought shows with large ones.
# On a machine with two or more GPUs these cells measure it and plot *bus bandwidth*: the bytes that a ring sends (your
# formula) over the time. Elsewhere the first says so, and the second does nothing.

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
    x = torch.ones(1 << power, device="cuda")
    for timed in (False, True):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            dist.all_reduce(x)
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / 10
    points.append([x.nbytes, 2 * x.nbytes * (world - 1) / world / seconds / 1e9])
report(points)
finish()

# %%
if bandwidth:
    sizes_in_bytes, gigabytes_per_second = zip(*bandwidth.reports[0])
    fig, ax = plt.subplots(figsize=(7, 2.8))
    ax.plot(sizes_in_bytes, gigabytes_per_second, "o-", color="black")
    ax.set(xscale="log", xlabel="message in bytes", ylabel="GB/s", title=f"All-reduce over {bandwidth.nproc} GPUs")
    plt.show()

# %% [markdown]
# ## 6 · Break it
#
# Here is a data-parallel step somebody wrote. Each rank computes the mean loss over *its* tokens, and the gradients are
# averaged over ranks. It runs. The loss falls. Nobody notices.
#
# The batch below is a real one in one respect: the ranks count different numbers of tokens, because padding and prompts
# do not count. Compare the parallel step with its **serial twin**: one process, the same batch.

# %%
# %%ranks 2
import torch
import torch.distributed as dist

VOCAB = 64


def batch(of_rank):
    g = torch.Generator().manual_seed(of_rank)
    ids = torch.randint(0, VOCAB, (4, 17), generator=g)
    mask = (torch.rand(4, 16, generator=g) < (0.95 if of_rank == 0 else 0.15)).float()
    return ids, mask


def token_losses(weights, ids):
    logits = weights[0][ids[:, :-1]] @ weights[1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(4, 16)


def fresh():
    g = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=g).mul(0.3).requires_grad_() for shape in ((VOCAB, 16), (16, VOCAB))]


def norm(grads):
    return torch.stack([g.norm() for g in grads]).norm().item()


# The step under suspicion.
weights = fresh()
ids, mask = batch(rank)
loss = (token_losses(weights, ids) * mask).sum() / mask.sum()
loss.backward()
for w in weights:
    dist.all_reduce(w.grad)
    w.grad /= world
mean_loss = loss.detach().clone()
dist.all_reduce(mean_loss)
mean_loss /= world

# Its serial twin: all tokens in one process, one division.
twin = fresh()
batches = [batch(r) for r in range(world)]
total = sum((token_losses(twin, i) * m).sum() for i, m in batches) / sum(m.sum() for _, m in batches)
total.backward()

print("tokens that count on each rank:  ", [int(m.sum()) for _, m in batches])
print(f"loss           parallel {mean_loss.item():.3f}   serial {total.item():.3f}")
print(f"gradient norm  parallel {norm([w.grad for w in weights]):.3f}   serial {norm([w.grad for w in twin]):.3f}")

# %% [markdown]
# The losses differ by less than half a percent: you would call it noise. The gradient norm is too large by 42 percent.
# **At the first step, from the same weights and the same batch, a correct parallel step has the serial gradient to about
# six digits in fp32.** That comparison finds mistakes that no loss curve shows. You will meet it again in every lab on
# parallelism.
#
# What is wrong: rank 1 counts 11 tokens, rank 0 counts 61, and both means weigh the same. So each token of rank 1
# weighs as much as five and a half of rank 0's. The mean of means is not the mean.
#
# **Exercise.** Repair it. Return this rank's share of the mean over all counted tokens of all ranks in `group`: the *sum*
# of the ranks' losses is that mean, and the sum of their gradients is its gradient. A rank may have no such token; where
# none has any, the loss is 0.

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
# The loss is right now. So train: four ranks, tp2 × dp2, a small Llama on the documentation of Python's standard
# library. The groups come from your `axis_groups`, the samples from your `my_samples`, the gradients travel with your
# `OverlappedReducer`, the loss is divided by your `rank_loss`. Model and optimizer are the package's.

# %%
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
from minimegatron.models.zoo import family_config

STEPS, SEQ, MICRO = 40, 96, 4
rank, world = init()
sizes = {"tp": 2, "dp": 2}


def my_axis(name, axes):
    """An axis of the package's mesh from your groups. Every rank creates every group, in the same order."""
    made = [(ranks, dist.new_group(ranks)) for ranks in axis_groups(sizes, axes)]
    ranks, group = next((r, g) for r, g in made if rank in r)
    return Axis(name, tuple(ranks), ranks.index(rank), group)


tp, dp = my_axis("tp", ["tp"]), my_axis("dp", ["dp"])
layout = ParallelConfig(tensor_model_parallel_size=2)
mesh = Mesh.serial()
mesh.parallel, mesh.rank, mesh.tp, mesh.dp, mesh.dp_cp = layout, rank, tp, dp, dp

text = "\n".join(itertools.islice((t for _, t in documents("docs")), 60)).encode()
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
config = family_config("llama", num_layers=2, hidden_size=96, num_attention_heads=4, num_query_groups=2, vocab_size=256)
model = build_model(config, mesh, seed=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

reducer = OverlappedReducer(list(model.parameters()), 50_000, dp.group)
losses = []
for step in range(STEPS):
    ids = my_samples(step * MICRO * dp.size, MICRO, dp.rank, dp.size, len(data) // SEQ - 1, seed=0)
    rows = torch.stack([data[i * SEQ : (i + 1) * SEQ + 1] for i in ids])
    loss = rank_loss(model(rows[:, :-1], labels=rows[:, 1:]), torch.ones(MICRO, SEQ), dp.group)
    optimizer.zero_grad()
    loss.backward()
    reducer.finish()
    optimizer.step()
    whole = loss.detach().clone()
    dist.all_reduce(whole, group=dp.group)
    losses.append(round(whole.item(), 4))
report(losses)
if rank == 0:
    print(f"ranks: tp {tp.ranks}, dp {dp.ranks}")
    print(f"loss per byte fell by more than a third: {losses[-1] < losses[0] * 2 / 3}")
finish()

# %%
# %%needs axis_groups my_samples overlap rank_loss
fig, ax = plt.subplots(figsize=(7, 2.8))
ax.plot(run.reports[0], color="black")
ax.set(xlabel="step", ylabel="loss per byte", title="Your groups, training (tp2 x dp2)")
plt.show()
print("all four ranks report the same losses:", all(r == run.reports[0] for r in run.reports))

# %% [markdown]
# ## 7 · Explain
#
# Questions an interviewer asks about process groups. Say your answer aloud before you read on.
#
# 1. *A run uses 64 GPUs with tp 4, cp 2, pp 2, ep 4. How large is dp?* Many multiply ep in. You know better.
# 2. *Why does tp come first in the order?* Its ranks talk twice in every layer, forward and again backward, so they
#    must share a machine's links.
# 3. *Can two groups that share a rank be created in any order?* No. Every rank creates every group in the same order,
#    even those it is not in; otherwise some wait for ever.
# 4. *Why is Adam blind to a gradient that is twice too large?* It divides by the gradient's own size. Clipping hides it
#    too. That is why you compare gradients, not losses.
#
# **Exercise.** The first one for any cluster. Return a dict: `dp`; `edp`, the ranks that hold the same experts;
# `same_weights_as_rank_0`, the first four ranks of rank 0's dp-cp group (order tp-cp-ep-dp-pp); `all_reduce_seconds`,
# the time in which a ring sums `gigabytes` of gradients over that group when every rank sends `gb_per_second`.

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

# %%
progress()

# %% [markdown]
# ## Where this lives
#
# | here | minimegatron | Megatron-LM |
# |---|---|---|
# | the grid | `comm/mesh.py` | `core/parallel_state.py`, `RankGenerator` |
# | f and g | `comm/collectives.py` | `core/tensor_parallel/mappings.py` |
# | buckets and overlap | `parallel/buckets.py`, `parallel/ddp.py` | `core/distributed/param_and_grad_buffer.py` |
# | the one division | `parallel/finalize.py` | `core/distributed/finalize_model_grads.py` |
# | the sampler | `data/loader.py` | `training/datasets/data_samplers.py` |
#
# Next: lab 02, tensor parallelism, where f and g split every matrix of a transformer.

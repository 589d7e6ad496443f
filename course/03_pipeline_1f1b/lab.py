# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Lab 03 · Pipeline parallelism
#
# Cut a model across its layers, give each rank a few of them, and most ranks have nothing to do most of the time. What
# helps is the *order* in which a rank does its work. An order is a list. You write four of them, run them on real
# processes, and see each one beside its prediction.
#
# The seven steps: **the problem, predict, implement, run, see, break it, explain**. No GPU is needed.

# %%
# %load_ext course
# %lab 03_pipeline_1f1b

# %% [markdown]
# ## 1 · The problem
#
# GPT-3 has 96 layers and 175 billion parameters: 2.8 TB with gradients and Adam's state. Tensor parallelism over the 8
# GPUs of one machine leaves 350 GB for each. The next cut crosses machines, where links are ten times slower or worse.
# So cut where little has to travel.

# %%
tokens, h, t = 2048, 12288, 8
layer = 8 * tokens * h * (t - 1) / t  # numbers a rank sends for one layer under tensor parallelism (lab 02)
border = 2 * tokens * h  # an activation forward and its gradient back, at one border of a pipeline

print(f"one activation: {tokens * h * 2 / 2**20:.0f} MiB in bf16")
print(f"tensor parallelism, 12 layers, sends {12 * layer / border:.0f} times what a pipeline sends at a border")

# %% [markdown]
# Eight stages of twelve layers, one border between neighbours. The words of this lab:
#
# | word | the rank |
# |---|---|
# | `F3` | runs microbatch 3 forward through its layers |
# | `B3` | runs its backward: gradients of its input and of its weights |
# | `F3.1` | does so with its *second* chunk of layers (chunks count from 0) |
#
# Sends and receives are not words. They follow from the list: after `F3` the output goes to the next stage, before `F3`
# the input comes from the stage before. `B` is the mirror image.
#
# A forward takes 1, a backward takes 2: it has two gradients to compute. Here is one batch on four ranks.

# %%
import matplotlib.pyplot as plt

from minimegatron.parallel import schedule_check
from minimegatron.parallel.actions import round_robin, schedule_from_text
from minimegatron.parallel.schedule_check import live_activations
from minimegatron.parallel.schedule_sim import Costs, simulate
from minimegatron.viz.schedule import draw_schedule


def draw(title, rows, v=1, live=True):
    """A picture of lists such as ["F0 B0", "F0 B0"], one a rank."""
    schedule = schedule_from_text(title, rows, round_robin(len(rows), v))
    plan = simulate(schedule, Costs().divided(v))
    return draw_schedule(plan.events(), live_activations(schedule) if live else (), title)


draw("one microbatch on four ranks", ["F0 B0"] * 4, live=False)

# %% [markdown]
# At every moment three of four GPUs wait. A pipeline works only when several microbatches are on their way at once: cut
# the batch into m *microbatches*. Their gradients add up to that of the batch, so nothing else changes.

# %%
draw("four microbatches on four ranks", ["F0 F1 F2 F3 B0 B1 B2 B3"] * 4, live=False)

# %% [markdown]
# ## 2 · Predict
#
# The white part of a row is the **bubble**. In the picture a rank works 4 · 3 = 12 steps and waits 9. The bubble is
# idle time over *work*: 9/12.
#
# Now cut each rank's layers into v *chunks* and let a microbatch travel around the ranks v times. Filling and draining
# still takes p-1 hops, but a hop is only 1/v as long.
#
# **Exercise.** The bubble of p ranks, m microbatches, v chunks a rank.

# %%
# %%exercise bubble
def bubble(p: int, m: int, v: int) -> float:
    """Idle time over work."""
    ### BEGIN SOLUTION
    return (p - 1) / (v * m)
    ### END SOLUTION


# %%
check("bubble")

# %%
# %%needs bubble
for m in (8, 16, 64):
    print(f"p=8 m={m:<3}", "  ".join(f"v={v}: {bubble(8, m, v):6.1%}" for v in (1, 2, 4)))

# %% [markdown]
# Two cures, then: more microbatches, or more chunks. More microbatches make the batch larger or each one smaller. And
# they cost memory, as you will see next.

# %% [markdown]
# ## 3 · Implement
#
# ### GPipe
#
# The first pipeline schedule (Huang et al., 2018): all forwards, then all backwards.
#
# **Exercise.** The list of one rank, as strings: `["F0", "F1", ..., "B0", ...]`. The backwards may come in any order
# that all ranks share; the paper's figure goes from the last to the first. Here, and in the other three exercises that ask
# for a list, the package's own generators (`minimegatron.parallel.schedules`) are closed to your code.

# %%
# %%exercise gpipe
def gpipe(rank: int, p: int, m: int) -> list[str]:
    """What rank does, in order: all forwards, then all backwards."""
    ### BEGIN SOLUTION
    return [f"F{i}" for i in range(m)] + [f"B{i}" for i in range(m)]
    ### END SOLUTION


# %%
check("gpipe")

# %%
# %%needs gpipe
display(draw("your GPipe: p=4, m=8", [gpipe(rank, 4, 8) for rank in range(4)]))

# %% [markdown]
# The grey curve under each row counts the activations that a rank keeps: from a microbatch's F until its B is done.
# GPipe keeps all m of them. With m = 64, as the bubble would like, no GPU has room for that.
#
# ### 1F1B
#
# The last rank could go back at once: after `F0` it has everything that `B0` needs. If every rank goes back **as soon as
# it can**, microbatches leave as new ones enter, and nobody keeps more than the pipeline is deep.
#
# Rank r is p-1-r hops from the last one. It does so many forwards to *warm up*; then one forward and one backward in
# turn (hence the name); then the backwards that are left.
#
# **Exercise.** The list of one rank. With few microbatches there may be nothing but warm-up.

# %%
# %%exercise one_f_one_b
def one_f_one_b(rank: int, p: int, m: int) -> list[str]:
    """Warm-up forwards, then F and B in turn, then the remaining backwards."""
    ### BEGIN SOLUTION
    warmup = min(m, p - rank - 1)
    todo = [f"F{i}" for i in range(warmup)]
    for i in range(m - warmup):
        todo += [f"F{warmup + i}", f"B{i}"]
    return todo + [f"B{i}" for i in range(m - warmup, m)]
    ### END SOLUTION


# %%
check("one_f_one_b")

# %%
# %%needs one_f_one_b
display(draw("your 1F1B: p=4, m=8", [one_f_one_b(rank, 4, 8) for rank in range(4)]))

# %% [markdown]
# Compare the two pictures. The bubble is the same: 1F1B does not make the pipeline faster. It bounds the memory: rank r
# keeps p-r activations, however large m is. So now you *can* raise m.
#
# ### What a wrong list does
#
# A list that waits for itself hangs all ranks. On a real machine you would see GPUs at 100 % (they spin while they wait)
# and, many minutes later, a timeout. On paper it takes a millisecond, so this executor checks every list before it runs.
# Here rank 0 goes back before it has sent the second microbatch, and rank 1 wants the second one first.

# %%
wrong = schedule_from_text("wrong", ["F0 B0 F1 B1", "F0 F1 B0 B1"])
print("\n".join(schedule_check.check(wrong)).replace("; ", ";\n  "))

# %% [markdown]
# A deadlock is always a circle. Read it as "who waits for whom" until you are back at the first.
#
# ### Interleaved 1F1B
#
# To shrink the bubble without more microbatches, cut finer. Rank r gets v chunks: stages r, r+p, r+2p, ... A microbatch
# runs around the ring of ranks v times.
#
# Every rank walks through the same table of m·v *slots*. Microbatches go in groups of p. A group passes chunk 0, then
# chunk 1, and so on; then comes the next group. With p = 2, m = 4, v = 2:
#
# | slot | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
# |---|---|---|---|---|---|---|---|---|
# | forward: microbatch.chunk | 0.0 | 1.0 | 0.1 | 1.1 | 2.0 | 3.0 | 2.1 | 3.1 |
# | backward | 0.1 | 1.1 | 0.0 | 1.0 | 2.1 | 3.1 | 2.0 | 3.0 |
#
# The backward table has the same microbatches with the chunks counted from behind. Rank r warms up with
# 2(p-r-1) + (v-1)p forwards (never more than there are), then alternates as before.
#
# **Exercise.** The list of one rank, with chunks: `"F2.1"`. m is a multiple of p and v > 1.

# %%
# %%exercise interleaved
def interleaved(rank: int, p: int, m: int, v: int) -> list[str]:
    """1F1B over v chunks a rank; slots go in groups of p microbatches."""
    ### BEGIN SOLUTION
    table = [(i, c) for first in range(0, m, p) for c in range(v) for i in range(first, first + p)]
    forward = [f"F{i}.{c}" for i, c in table]
    backward = [f"B{i}.{v - 1 - c}" for i, c in table]
    warmup = min(len(table), 2 * (p - rank - 1) + (v - 1) * p)
    todo = forward[:warmup]
    for f, b in zip(forward[warmup:], backward):
        todo += [f, b]
    return todo + backward[len(table) - warmup :]
    ### END SOLUTION


# %%
check("interleaved")

# %%
# %%needs interleaved
display(draw("your interleaved 1F1B: p=4, m=8, v=2", [interleaved(rank, 4, 8, 2) for rank in range(4)], v=2))

# %% [markdown]
# The darker bars are chunk 1. Half the bubble, more than twice the messages (a microbatch crosses 7 borders in place of
# 3), and more memory: rank 0 keeps 11 chunks, each half as large as before, where 1F1B kept 4 whole ones.
#
# ### Why twice the warm-up?
#
# `2(p-r-1)` looks wasteful: `p-r-1` would do, and it would keep fewer activations. Try both, first with free messages,
# then with messages that take a tenth, then half of a chunk's forward. Guess before you run the cell.

# %%
from fractions import Fraction

from minimegatron.parallel.actions import Schedule
from minimegatron.parallel.schedules import alternate, interleaved_table


def with_factor(factor, p=8, m=32, v=4):
    table = interleaved_table(m, v, p)
    back = [(i, v - 1 - c) for i, c in table]
    rows = [alternate(table, back, factor * (p - r - 1) + (v - 1) * p) for r in range(p)]
    return Schedule(f"factor {factor}", tuple(rows), round_robin(p, v))


for latency in (Fraction(0), Fraction(1, 10), Fraction(1, 2)):
    costs = Costs(latency=latency / 4).divided(4)
    found = [simulate(with_factor(factor), costs).bubble for factor in (1, 2)]
    print(f"a message takes {float(latency):3.1f} chunks:  bubble {float(found[0]):5.1%} or {float(found[1]):5.1%}")

# %% [markdown]
# With free messages the factor changes nothing. With real ones, the second forward that a rank has ahead covers the time
# in which a message travels, there and back. Schedules in papers assume free messages; Megatron does not.
#
# ### A backward has two halves
#
# One more idea removes most of the bubble. Take one layer, y = tanh(x·W), and let dz be the gradient of its
# pre-activation. A backward computes
#
# $$\text{B:}\quad dx = dz\,W^{\mathsf T} \qquad\qquad \text{W:}\quad dW = x^{\mathsf T}\,dz$$
#
# The stage before waits for dx. Nobody waits for dW until the optimizer steps. So do B at once, send dx, and keep W for
# a time when you would be idle anyway. In a list that has `W3`, `B3` is the first half only.
#
# **Exercise.** A stage that can do both halves apart. Microbatches may come in any order, and their numbers come again
# with the next batch. `weights` *adds* to `self.grad`; afterwards nothing of the microbatch is kept.

# %%
# %%exercise split_stage
import torch


class SplitStage:
    """y = tanh(x @ weight), with a backward in two halves."""

    def __init__(self, weight: torch.Tensor):
        self.weight = weight
        self.grad = torch.zeros_like(weight)
        self.kept = {}  # by microbatch

    def forward(self, microbatch: int, x: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION
        y = torch.tanh(x @ self.weight)
        self.kept[microbatch] = x, y
        return y
        ### END SOLUTION

    def backward(self, microbatch: int, dy: torch.Tensor) -> torch.Tensor:
        """B: the gradient of x."""
        ### BEGIN SOLUTION
        x, y = self.kept[microbatch]
        dz = dy * (1 - y * y)
        self.kept[microbatch] = x, dz
        return dz @ self.weight.T
        ### END SOLUTION

    def weights(self, microbatch: int) -> None:
        """W: the gradient of the weight."""
        ### BEGIN SOLUTION
        x, dz = self.kept.pop(microbatch)
        self.grad += x.T @ dz
        ### END SOLUTION


# %%
check("split_stage")

# %% [markdown]
# ### ZB-H1
#
# Where do the W go? The last rank is the first that may go back, and the first that runs out of work. In 1F1B it
# finishes early and waits for the others. Let it put its W aside and do them at the end: rank r does the W of a
# microbatch **r microbatches after** its B. Rank 0 does each W at once; the last rank saves p-1 of them.
#
# An activation is kept until its W is done. So the last ranks keep more than before, and every rank keeps p: no more
# than rank 0 always did. (Qi et al., *Zero Bubble Pipeline Parallelism*, 2023.)
#
# **Exercise.** Your 1F1B with W: after `B{i}` comes `W{i - rank}`, if there is such a microbatch; the rest at the end.

# %%
# %%exercise zb_h1
def zb_h1(rank: int, p: int, m: int) -> list[str]:
    """1F1B whose rank r does each W r microbatches later."""
    ### BEGIN SOLUTION
    warmup = min(m, p - rank - 1)
    todo = [f"F{i}" for i in range(warmup)]
    for i in range(m):
        if warmup + i < m:
            todo.append(f"F{warmup + i}")
        todo.append(f"B{i}")
        if i >= rank:
            todo.append(f"W{i - rank}")
    return todo + [f"W{i}" for i in range(max(0, m - rank), m)]
    ### END SOLUTION


# %%
check("zb_h1")

# %%
# %%needs zb_h1
display(draw("your ZB-H1: p=4, m=8", [zb_h1(rank, 4, 8) for rank in range(4)]))

# %% [markdown]
# A third of the bubble of 1F1B, with the same peak of memory. Two more lists take the idea further. They put the stages
# on a **V**: rank r holds stage r on the way down and stage 2p-1-r on the way up. The loss of a microbatch is then
# computed on the rank where it entered. In ZB-V, if F, B and W take equally long, no rank is idle between its first and
# its last action. DualPipeV, from DeepSeek-V3, pairs each forward with a backward, so that the messages of one can hide
# behind the computation of the other.

# %%
from minimegatron.parallel.schedules import build_schedule

for name in ("zb_v", "dualpipe_v"):
    schedule = build_schedule(name, 4, 8)
    plan = simulate(schedule, Costs().divided(2))
    display(draw_schedule(plan.events(), live_activations(schedule), f"{name}: p=4, m=8"))
    inner = ", ".join(f"{float(b):.1%}" for b in plan.inner_bubbles)
    print(f"{name}: {float(plan.makespan):g} steps in all; idle between first and last action, by rank: {inner}")

# %% [markdown]
# ### All of them, side by side
#
# Change p, m and v and run the cell again, or set `SLIDERS = True` for sliders.

# %%
# %%needs one_f_one_b interleaved zb_h1
SLIDERS = False


def compare(p=4, m=8, v=2):
    m = max(p, m // p * p)  # interleaving wants a multiple
    lists = {"1f1b": [one_f_one_b(r, p, m) for r in range(p)], "zb_h1": [zb_h1(r, p, m) for r in range(p)]}
    plans = {name: schedule_from_text(name, rows) for name, rows in lists.items()}
    if v > 1:
        rows = [interleaved(r, p, m, v) for r in range(p)]
        plans["interleaved"] = schedule_from_text("interleaved", rows, round_robin(p, v))
    plans.update({name: build_schedule(name, p, m) for name in ("zb_v", "dualpipe_v")})
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 2.4), sharey=True)
    for name, schedule in plans.items():
        plan = simulate(schedule, Costs().divided(schedule.v))
        left.barh(name, float(plan.bubble), color="0.55")
        right.barh(name, max(plan.peak_live) / schedule.v, color="0.55")
    left.set(xlabel="bubble (idle time / work)", title=f"p={p}, m={m}, v={v}")
    right.set(xlabel="most activations kept, in whole ranks' worth")
    plt.show()


compare()
if SLIDERS:
    from ipywidgets import interact

    interact(compare, p=(2, 8), m=(2, 64), v=(1, 4))

# %% [markdown]
# ## 4 · Run, and 5 · See
#
# ### Predicted beside measured
#
# Your lists on four real processes. One executor runs them all: it takes the next word, waits for its input, computes,
# sends. Sleep stands in for computation, 20 ms for a step, so that four ranks on a small machine behave like four GPUs.

# %%
# %%ranks 4 --needs gpipe,one_f_one_b,interleaved,zb_h1 --out measured
import time

import torch
import torch.distributed as dist
from exercises.gpipe import gpipe
from exercises.interleaved import interleaved
from exercises.one_f_one_b import one_f_one_b
from exercises.zb_h1 import zb_h1

from minimegatron import trace
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.p2p import PointToPoint
from minimegatron.config import ParallelConfig
from minimegatron.parallel.actions import round_robin, schedule_from_text
from minimegatron.parallel.pipeline import FunctionStage, Hidden, run

M, STEP = 8, 0.02
mail = PointToPoint(Mesh.build(ParallelConfig(pipeline_model_parallel_size=world)))
lists = {
    "gpipe": [gpipe(r, world, M) for r in range(world)],
    "1f1b": [one_f_one_b(r, world, M) for r in range(world)],
    "interleaved": [interleaved(r, world, M, 2) for r in range(world)],
    "zb_h1": [zb_h1(r, world, M) for r in range(world)],
}


def sleeping(schedule):
    """A stage whose F, B and W each take a step, cut into v parts."""

    def work(steps):
        time.sleep(steps * STEP / schedule.v)
        return torch.zeros(1)

    back = 1 if schedule.splits else 2
    return FunctionStage(lambda i, x: work(1), lambda i, dy: work(back), lambda i: work(1))


said = {name: [] for name in lists}
for name, rows in 3 * list(lists.items()):
    schedule = schedule_from_text(name, rows, round_robin(world, 2 if name == "interleaved" else 1))
    stages = [sleeping(schedule)] * schedule.v
    dist.barrier()
    with trace.record(rank) as log:
        run(schedule, stages, mail, Hidden(torch.Size([1]), torch.float32))
    did = log.select(kind="compute")
    assert [f"{e.name}{e.note}" for e in did] == [str(a) for a in schedule.actions[rank]], "as the list says"
    live = max(int(e.note) for e in log.select("live"))
    said[name].append(([(e.name, e.kind, e.rank, e.start, e.end, e.note) for e in did], live))
report(said)
if rank == 0:
    print("every rank did what its list says, in that order")

# %%
# %%needs gpipe one_f_one_b interleaved zb_h1
import dataclasses
from pathlib import Path

from minimegatron.trace import Event
from minimegatron.viz.timeline import chrome_trace, gantt

STEP, v_of = 0.02, {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb_h1": 1}
functions = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": lambda r, p, m: interleaved(r, p, m, 2), "zb_h1": zb_h1}


def events_of(name, again):
    """What all ranks did in one of the three runs."""
    found = [Event(*e[:5], note=e[5]) for one in measured for e in one[name][again][0]]
    return found if v_of[name] > 1 else [dataclasses.replace(e, note=e.note.partition(".")[0]) for e in found]


def seconds(events):
    return max(e.end for e in events) - min(e.start for e in events)


bubbles = {}
for name, function in functions.items():
    schedule = schedule_from_text(name, [function(r, 4, 8) for r in range(4)], round_robin(4, v_of[name]))
    plan = simulate(schedule, Costs().divided(v_of[name]))
    events = min((events_of(name, again) for again in range(3)), key=seconds)  # the run that was disturbed least
    bubbles[name] = float(plan.bubble), seconds(events) / (3 * 8 * STEP) - 1
    if name in ("1f1b", "zb_h1"):
        display(gantt(events, plan.events(STEP), by="name", title=f"{name}: predicted above, measured below"))
    kept = [one[name][0][1] for one in measured]
    print(f"{name:12} most activations kept, by rank: predicted {plan.peak_live}, measured {kept}")
    chrome_trace(events, Path(".work/03_pipeline_1f1b") / f"{name}.json", plan.events(STEP))

fig, ax = plt.subplots(figsize=(7, 2.4))
for i, (name, (predicted, seen)) in enumerate(bubbles.items()):
    ax.bar([i - 0.2, i + 0.2], [predicted, seen], width=0.38, color=["0.75", "0.35"])
ax.set_xticks(range(4), bubbles)
ax.set(ylabel="bubble", title="predicted (light) and measured (dark)")
plt.show()

# %% [markdown]
# Each ran three times; you see the fastest. What you measure lies above the prediction: processes wake up late from a
# sleep, messages take time, and four ranks share your machine with everything else that runs on it. Each run was also
# written to `.work/03_pipeline_1f1b/` as a trace file. Open one at ui.perfetto.dev to zoom.
#
# ### The same gradient, in every order
#
# Now with numbers. Four ranks, one `SplitStage` each, the loss is the sum of all outputs. The serial twin is one process
# that runs all four layers on the whole batch.

# %%
# %%ranks 4 --needs gpipe,one_f_one_b,split_stage,zb_h1
import torch
from exercises.gpipe import gpipe
from exercises.one_f_one_b import one_f_one_b
from exercises.split_stage import SplitStage
from exercises.zb_h1 import zb_h1

from minimegatron.comm.mesh import Mesh
from minimegatron.comm.p2p import PointToPoint
from minimegatron.config import ParallelConfig
from minimegatron.parallel.actions import schedule_from_text
from minimegatron.parallel.pipeline import FunctionStage, Hidden, run

M, H = 8, 32
g = torch.Generator().manual_seed(0)
weights = [torch.randn(H, H, generator=g) / H**0.5 for _ in range(world)]
batch = torch.randn(M, 4, H, generator=g)


def gradient(name, function):
    """This rank's weight gradient after one batch."""
    schedule = schedule_from_text(name, [function(r, world, M) for r in range(world)])
    mine = SplitStage(weights[rank])

    def backward(i, dy):
        dx = mine.backward(i, torch.ones(4, H) if dy is None else dy)
        if not schedule.splits:
            mine.weights(i)
        return dx

    stage = FunctionStage(lambda i, x: mine.forward(i, batch[i] if x is None else x), backward, mine.weights)
    run(schedule, [stage], mail, Hidden(torch.Size([4, H]), torch.float32))
    order[name] = [a.microbatch for a in schedule.actions[rank] if a.kind == ("W" if schedule.splits else "B")]
    return mine.grad


order = {}  # in which each list adds up the microbatches
mail = PointToPoint(Mesh.build(ParallelConfig(pipeline_model_parallel_size=world)))
grads = {f.__name__: gradient(f.__name__, f) for f in (gpipe, one_f_one_b, zb_h1)}

twin = [w.clone().requires_grad_() for w in weights]
x = batch.flatten(0, 1)
for w in twin:
    x = torch.tanh(x @ w)
x.sum().backward()

for name, grad in grads.items():
    apart = (grad - twin[rank].grad).norm() / twin[rank].grad.norm()
    print(f"{name:12} equals the serial twin to five digits: {apart.item() < 1e-5}")
same = [torch.equal(grads[a], grads[b]) for a in grads for b in grads if order[a] == order[b]]
print("lists that add up in the same order agree to the last bit:", all(same))

# %% [markdown]
# To the last bit, because they add their microbatches up in the same order: 1F1B and ZB-H1 from 0 to 7, and GPipe, too,
# if yours goes back from the first microbatch. Floating-point sums depend on their order, and on nothing else here.
#
# ### A matrix that lives twice
#
# Many models use one matrix for the embedding and for the output layer. In a pipeline the first stage embeds and the
# last computes the logits, so both hold a copy, and each copy sees only the gradient of its own use. Step with those,
# and after one step you have two different matrices.
#
# The cure: the two ranks sum their gradients. Equal copies that take equal steps stay equal for ever.
#
# **Exercise.** Sum `grad` over the first and the last rank. Other ranks have `None` and return it; they send nothing.
# Remember lab 01: *every* rank creates every group.

# %%
# %%exercise sync_tied
import torch
import torch.distributed as dist


def sync_tied(grad: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient of the tied matrix, summed over its two copies: on the first and on the last rank."""
    ### BEGIN SOLUTION
    group = dist.new_group([0, dist.get_world_size() - 1])
    if grad is None:
        return None
    total = grad.clone()
    dist.all_reduce(total, group=group)
    return total
    ### END SOLUTION


# %%
check("sync_tied")

# %% [markdown]
# Two things follow for the rest of the system. The gradient's *norm* counts the matrix once, not twice; and a checkpoint
# saves it once.
#
# ### On a machine with GPUs
#
# Nothing changes but the stages: real matrix products in place of sleep, and NCCL in place of gloo.
#
# A GPU works on *streams*: queues, each in its own order. The stage's products are on the current one; a receive that is
# posted ahead waits on another, for a message that our own products help to make. To time its products a stage waits for
# the current stream. `torch.cuda.synchronize()` would wait for all of them, so also for that message: the stages would
# wait for each other for ever.

# %%
# %%torchrun --gpus 2 --name gpus --out on_gpus
import torch
from minimegatron import trace
from minimegatron.launch.rank import finish, init, report
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.p2p import PointToPoint
from minimegatron.config import ParallelConfig
from minimegatron.parallel.overlapped import FunctionStage, Hidden, run
from minimegatron.parallel.schedules import build_schedule

SIZE = 4096

rank, world = init()
mesh = Mesh.build(ParallelConfig(pipeline_model_parallel_size=world))
mail, w = PointToPoint(mesh), torch.randn(SIZE, SIZE, device=mesh.device, dtype=torch.bfloat16) / SIZE**0.5

def work(x, times):
    for _ in range(times):
        x = x @ w
    torch.cuda.current_stream().synchronize()
    return x

zeros = torch.zeros(SIZE, SIZE, device=mesh.device, dtype=torch.bfloat16)
some = lambda x: zeros if x is None else x
said = {}
for name in ("1f1b", "zb_h1"):
    schedule = build_schedule(name, world, 4 * world)
    back = 40 if schedule.splits else 80
    stage = FunctionStage(
        lambda i, x: work(some(x), 40), lambda i, dy: work(some(dy), back), lambda i: work(zeros, 40)
    )
    for _ in range(2):
        with trace.record(rank) as log:
            run(schedule, [stage], mail, Hidden(zeros.shape, zeros.dtype))
    did = log.select(kind="compute")
    said[name] = [(e.name, e.kind, e.rank, e.start, e.end, e.note.partition(".")[0]) for e in did]
report(said)
finish()

# %%
if on_gpus:
    from minimegatron.trace import Event
    from minimegatron.viz.timeline import gantt

    gpus = on_gpus.nproc
    for name in ("1f1b", "zb_h1"):
        events = [Event(*e[:5], note=e[5]) for one in on_gpus.reports for e in one[name]]
        unit = min(e.seconds for e in events if e.name == "F")
        plan = simulate(build_schedule(name, gpus, 4 * gpus))
        display(gantt(events, plan.events(unit), by="name", title=f"{name} on {gpus} GPUs"))

# %% [markdown]
# ### Train
#
# Your `one_f_one_b` runs a Llama of four layers on two ranks, with a tied embedding that your `sync_tied` keeps equal.
# The stages and their autograd are the package's.

# %%
# %%torchrun -n 2 --needs one_f_one_b,sync_tied --name train --timeout 170 --out trained
import itertools

import torch
import torch.distributed as dist
from exercises.one_f_one_b import one_f_one_b
from exercises.sync_tied import sync_tied

from minimegatron.launch.rank import finish, init, report
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.data.corpus import documents
from minimegatron.models.chunks import build_model_chunks
from minimegatron.models.zoo import family_config
from minimegatron.parallel.actions import schedule_from_text
from minimegatron.parallel.pipeline import Hidden, run
from minimegatron.parallel.stage import ModuleStage

STEPS, SEQ, MICRO, M = 40, 96, 4, 4
rank, world = init()
mesh = Mesh.build(ParallelConfig(pipeline_model_parallel_size=world))
config = family_config(
    "llama", num_layers=4, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=256,
    untie_embeddings_and_output_weights=False,
)
model = build_model_chunks(config, mesh, seed=1)
chunk = model.chunks[0]
tied = chunk.embedding.word_embeddings.weight if rank == 0 else chunk.output_layer.weight

text = "\n".join(itertools.islice((t for _, t in documents("docs")), 60)).encode()
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
places = torch.Generator().manual_seed(5)

schedule = schedule_from_text("1f1b", [one_f_one_b(r, world, M) for r in range(world)])
losses = []


def forward(i, x):
    """A microbatch through this rank's layers; on the last rank its share of the mean loss."""
    out = chunk(rows[i][:, :-1], labels=rows[i][:, 1:], hidden=x)
    if rank == world - 1:
        out = out.sum() / (M * MICRO * SEQ)
        losses[-1] += out.item()
    return out


stage = ModuleStage(forward, chunk, schedule, rank)
hidden = Hidden(torch.Size([SEQ, MICRO, config.hidden_size]), torch.float32)
optimizer = torch.optim.AdamW(chunk.parameters(), lr=3e-3)
for step in range(STEPS):
    at = torch.randint(len(data) - SEQ, (M, MICRO), generator=places).tolist()
    rows = [torch.stack([data[a : a + SEQ + 1] for a in one]) for one in at]
    losses.append(0.0)
    optimizer.zero_grad()
    run(schedule, [stage], model.mail, hidden, checked=True)
    tied.grad = sync_tied(tied.grad)
    optimizer.step()

copies = [torch.empty_like(tied) for _ in range(world)]
dist.all_gather(copies, tied.detach())
if rank == world - 1:
    print(f"loss per byte fell by more than a quarter: {losses[-1] < losses[0] * 3 / 4}")
    print(f"after {STEPS} steps the two copies are equal to the last bit: {torch.equal(*copies)}")
report(losses)
finish()

# %%
# %%needs one_f_one_b sync_tied
fig, ax = plt.subplots(figsize=(7, 2.6))
ax.plot(trained.reports[1], color="black")
ax.set(xlabel="step", ylabel="loss per byte", title="Your 1F1B, training on two stages")
plt.show()

# %% [markdown]
# ## 6 · Break it
#
# Somebody optimised the weight gradient: "`+=` reads and writes the buffer, `=` only writes it". The pipeline runs, and
# it is a little faster. Two ranks, eight microbatches; the serial twin beside it.

# %%
# %%ranks 2 --needs one_f_one_b --out evidence
import torch
from exercises.one_f_one_b import one_f_one_b

from minimegatron.comm.mesh import Mesh
from minimegatron.comm.p2p import PointToPoint
from minimegatron.config import ParallelConfig
from minimegatron.parallel.actions import schedule_from_text
from minimegatron.parallel.pipeline import FunctionStage, Hidden, run

M, B, H = 8, 16, 24
g = torch.Generator().manual_seed(3)
teacher, start = ([torch.randn(H, H, generator=g) / H**0.5 for _ in range(world)] for _ in "ts")


class Stage:
    """One layer of the model; the last stage has the loss."""

    def __init__(self, weight):
        self.weight, self.kept, self.loss = weight, {}, 0.0

    def forward(self, i, x):
        x = batch[i] if x is None else x
        y = torch.tanh(x @ self.weight)
        self.kept[i] = x, y
        return y

    def backward(self, i, dy):
        x, y = self.kept.pop(i)
        if rank == world - 1:
            self.loss += ((y - target[i]) ** 2).sum().item() / batch.numel()
            dy = 2 * (y - target[i]) / batch.numel()
        dz = dy * (1 - y * y)
        self.grad = x.T @ dz
        return dz @ self.weight.T


def layers(weights, x):
    for w in weights:
        x = torch.tanh(x @ w)
    return x


mail = PointToPoint(Mesh.build(ParallelConfig(pipeline_model_parallel_size=world)))
schedule = schedule_from_text("1f1b", [one_f_one_b(r, world, M) for r in range(world)])
mine, twin = start[rank].clone(), [w.clone().requires_grad_() for w in start]
optimizer, twins_optimizer = torch.optim.Adam([mine], lr=0.01), torch.optim.Adam(twin, lr=0.01)
for step in range(41):
    batch = torch.randn(M, B, H, generator=g)
    target = layers(teacher, batch)
    # the pipeline
    stage = Stage(mine)
    run(schedule, [FunctionStage(stage.forward, stage.backward)], mail, Hidden(torch.Size([B, H]), torch.float32))
    mine.grad = stage.grad
    # its serial twin: one process, the loss of each microbatch, their sum
    losses = ((layers(twin, batch) - target) ** 2).sum((1, 2)) / batch.numel()
    if step == 0:
        of_each = [torch.autograd.grad(one, twin, retain_graph=True)[rank] for one in losses]
    twins_optimizer.zero_grad()
    losses.sum().backward()
    if step == 0:
        report((stage.grad, of_each))
        norms = stage.grad.norm().item(), twin[rank].grad.norm().item()
    if step % 10 == 0 and rank == world - 1:
        print(f"step {step:2}  loss   pipeline {stage.loss:.3f}   serial {losses.sum().item():.3f}")
    optimizer.step()
    twins_optimizer.step()
print(f"gradient norm at the first step:   pipeline {norms[0]:.3f}   serial {norms[1]:.3f}")

# %% [markdown]
# The first loss is right to the last digit, and it falls as a loss should. The serial twin is ten steps ahead, but you
# have no twin when you train for real: you would try another learning rate. The norm of the first gradient says at once
# that something is lost.
#
# *What* is lost? You know the gradient that the pipeline ended with, and you can compute each microbatch's own gradient
# in one process. If some were dropped, the first is a sum of *some* of the others.
#
# **Exercise.** Which ones? Return their indices in order. The tensors are different enough that there is one answer.

# %%
# %%exercise survivors
import torch


def survivors(got: torch.Tensor, grads: list[torch.Tensor]) -> list[int]:
    """Indices i such that got is the sum of those grads[i]."""
    ### BEGIN SOLUTION
    columns = torch.stack([grad.flatten() for grad in grads], dim=1)
    weights = torch.linalg.lstsq(columns, got.flatten()[:, None]).solution.flatten()
    return [i for i, weight in enumerate(weights.tolist()) if weight > 0.5]
    ### END SOLUTION


# %%
check("survivors")

# %%
# %%needs one_f_one_b survivors
for rank, (got, grads) in enumerate(evidence):
    print(f"rank {rank}: of {len(grads)} microbatches, the gradient holds {survivors(got, grads)}")

# %% [markdown]
# Only the last one. `self.grad = ...` overwrites; it must add. The loss looked fine because one microbatch of eight
# points roughly the right way. Its gradient is too small, but Adam divides every gradient by its own size, so not even
# the steps were smaller. What was left is training with an eighth of the batch, at the price of all of it.

# %% [markdown]
# ## 7 · Explain
#
# Questions an interviewer asks about pipelines. Say your answer aloud before you read on.
#
# 1. *GPipe and 1F1B have the same bubble. Why does everybody use 1F1B?* It keeps p activations instead of m, so m can
#    grow until the bubble no longer matters.
# 2. *Why not v = 16 chunks?* v times the messages, more activations, and a chunk needs at least one layer. Below some
#    size a chunk is shorter than the message it waits for.
# 3. *Blocking `send` and `recv` in 1F1B hang. Where?* In the steady state: rank r sends forward to r+1 while r+1 sends
#    back to r. Each waits until the other takes its message. Start sends without waiting, or fuse the pair.
# 4. *What does ZB-V cost?* Nothing in memory; but it needs F, B and W of about equal length, and an optimizer step that
#    does not wait for the global gradient norm, or the ranks that finish first wait after all.
# 5. *Which ranks hold the most memory in 1F1B?* The first: p activations, and the embedding. The last has one, and the
#    logits. Real runs give both fewer layers.
#
# **Exercise.** Numbers for any run. `tokens` is the size of a microbatch, activations are sent in bf16,
# `kept_bytes_per_token_and_layer` is what a layer keeps for its backward. Return a dict: `idle_share`, the part of *all*
# the time that a rank is idle; `microbatches_for_5_percent`, the fewest with which the bubble is at most 0.05 (with
# chunks, v > 1, a multiple of p: your `interleaved` takes no other); `kept_bytes_on_rank_0`, at the peak of 1F1B, or of
# interleaved 1F1B where v > 1; `bytes_between_ranks`, sent over all borders together in one batch, both ways.

# %%
# %%exercise answers
def answers(
    p: int, m: int, v: int, layers: int, tokens: int, hidden: int, kept_bytes_per_token_and_layer: int
) -> dict[str, object]:
    """{"idle_share": ..., "microbatches_for_5_percent": ..., "kept_bytes_on_rank_0": ..., "bytes_between_ranks": ...}"""
    ### BEGIN SOLUTION
    bubble = (p - 1) / (v * m)
    warmup = p - 1 if v == 1 else 2 * (p - 1) + (v - 1) * p
    chunks = min(m * v, warmup + 1)
    fewest = -(-20 * (p - 1) // v)  # rounded up
    if v > 1:
        fewest = -(-fewest // p) * p
    return {
        "idle_share": bubble / (1 + bubble),
        "microbatches_for_5_percent": fewest,
        "kept_bytes_on_rank_0": chunks * (layers // (p * v)) * tokens * kept_bytes_per_token_and_layer,
        "bytes_between_ranks": 2 * (p * v - 1) * m * tokens * hidden * 2,
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
# | lists of actions | `parallel/actions.py`, `parallel/schedules.py` | one function a schedule: `core/pipeline_parallel/schedules.py` |
# | slots and warm-up | `parallel/schedules.py` | `get_schedule_table`, `get_pp_rank_microbatches` |
# | W later | `parallel/zero_bubble.py`, `layers/deferred.py` | not there |
# | checker, simulator | `parallel/schedule_check.py`, `parallel/schedule_sim.py` | not there |
# | the executor | `parallel/pipeline.py`, `comm/p2p.py` | `core/pipeline_parallel/p2p_communication.py` |
# | tied embeddings | `models/chunks.py`, `parallel/finalize.py` | `core/distributed/finalize_model_grads.py` |
#
# Next: lab 04, context parallelism, where one sequence is cut over many ranks.

# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Lab 03 · Pipeline parallelism
#
# A pipeline cuts a model across its layers and gives each rank a few of them. How long the ranks then wait for each
# other depends on the *order* in which each does its work. We write an order down as a list, one for each rank. You
# write four functions that make such lists, run the lists on real processes, and compare each run with its prediction.
#
# | part | you build | time |
# |---|---|---|
# | A · sections 1 to 3 | the bubble formula, GPipe, 1F1B | 1 h |
# | B · section 3 goes on | interleaved 1F1B, a backward in two halves, ZB-H1 | 1.5 h |
# | C · sections 4 to 7 | runs on four processes, tied weights, a bug to find, numbers for any model | 1 h |
#
# **Time:** 3 to 4 hours; each part ends at a good place to stop. **Before it:** lab 01 (groups, sends); of lab 02 only
# how many bytes a layer sends. Maths: the gradient of y = tanh(x·W). No GPU is needed.
#
# After a kernel restart: run the first cell, then go on where you were; where a cell says that a name is missing, run
# the cell it names.

# %%
# %load_ext course
# %lab 03_pipeline_1f1b

# %% [markdown]
# Before anything else, guess. Eight GPUs form a pipeline, and each holds an eighth of the layers. A batch is cut into
# eight parts that pass through one after the other, and a backward takes twice as long as a forward. For how many
# percent of the time is a GPU idle?

# %%
guess("idle", None, "8 stages, 8 microbatches: idle for how many percent of the time?")  # None: a number from 0 to 100

# %% [markdown]
# ## 1 · The problem
#
# GPT-3 has 96 layers and 175 billion parameters: 2.8 TB with gradients and Adam's state. Tensor parallelism over the 8
# GPUs of one machine leaves 350 GB for each; a GPU has 80. So the model must be cut once more, now across machines. (Or
# its state is shared out over data parallel ranks: lab 06.) Between machines the links are slower: on an H100 machine
# NVLink moves 450 GB/s each way, the network card of a GPU 50 GB/s. The cut should go where little has to travel.
#
# The 8 GPUs of a stage share an activation at its border, too: each holds and sends an eighth of it (sequence
# parallelism, lab 02).

# %%
tokens, h, t = 2048, 12288, 8
layer = 8 * tokens * h * (t - 1) / t  # numbers a rank sends for one layer under tensor parallelism (lab 02)
border = 2 * tokens * h / t  # of one GPU: its part of an activation forward, and of the gradient back

print(f"one activation: {tokens * h * 2 / 2**20:.0f} MiB in bf16, {tokens * h * 2 / t / 2**20:.0f} MiB on each GPU")
print(f"tensor parallelism, 12 layers, sends {12 * layer / border:.0f} times what a pipeline sends at a border")

# %% [markdown]
# So cut GPT-3 into eight *stages* of twelve layers, one on each rank. A rank of the pipeline stands for the 8 GPUs of
# one machine, which share its stage by tensor parallelism. What a rank does is a list of words:
#
# | word | the rank |
# |---|---|
# | `F3` | runs microbatch 3 forward through its layers |
# | `B3` | runs its backward: the gradients of its input and of its weights |
# | `F3.1` | runs microbatch 3 forward through its *second* chunk of layers (chunks count from 0) |
#
# The list needs no words for sends and receives, because they follow from it: before `F3` a rank receives from the
# stage before, after `F3` it sends to the next stage. `B` does the same in the other direction.
#
# We count time in steps: a forward takes 1, a backward 2, because it computes two gradients. Here is a batch that four
# ranks run in one piece.

# %%
from minimegatron.parallel.pipeline.actions import round_robin, schedule_from_text, v_shaped
from minimegatron.parallel.pipeline.schedule_check import stuck
from minimegatron.parallel.pipeline.schedule_sim import Costs, live_activations, simulate
from minimegatron.viz.schedule import draw_schedule


def draw(title, rows, v=1, live=True, most=0):
    """A picture of lists such as ["F0 B0", "F0 B0"], one a rank."""
    schedule = schedule_from_text(title, rows, round_robin(len(rows), v))
    plan = simulate(schedule, Costs().divided(v))
    return draw_schedule(plan.events(), live_activations(schedule) if live else (), title, most=most)


draw("One microbatch on four ranks", ["F0 B0"] * 4, live=False)

# %% [markdown]
# At every moment three of four ranks wait. The cure is to cut the batch into m *microbatches*, so that several are
# under way at once. Their gradients add up to the gradient of the batch, so the result stays the same.
#
# ### By hand: two ranks, two microbatches
#
# | steps | rank 0 | rank 1 | why |
# |---|---|---|---|
# | 0 to 1 | F0 | waits | rank 1 has no input yet |
# | 1 to 2 | F1 | F0 | the output of F0 has arrived |
# | 2 to 3 | waits | F1 | its B0 needs the gradient that rank 1 makes in B0 |
# | 3 to 5 | waits | B0 | the last rank has the loss; it can go back without a message |
# | 5 to 7 | B0 | B1 | the gradient of microbatch 0 has arrived at rank 0 |
# | 7 to 9 | B1 | waits | the gradient of microbatch 1 has arrived; rank 1 has nothing left to do |
#
# Each rank works 2 · (1 + 2) = 6 steps of 9 and waits 3. Find each line of the table in the picture.

# %%
draw("Two microbatches on two ranks", ["F0 F1 B0 B1"] * 2, live=False)

# %% [markdown]
# ## 2 · Predict
#
# The idle part of a row is the **bubble**. We measure it as idle time over *work*: here 3/6.
#
# Rank 1 shows where the 3 comes from. Between its first and its last action it never waits. Before its first action it
# waits for one forward (1 step), after its last action rank 0 does one more backward (2 steps). With p ranks, the last
# one waits for p-1 forwards, and p-1 backwards come after it.
#
# Now cut each rank's layers into v *chunks* and let a microbatch travel around the ranks v times. The pipeline still
# fills and drains over p-1 hops, but a hop takes only 1/v as long.
#
# **Exercise.** The bubble of p ranks, m microbatches, v chunks a rank: idle time over work. For p = m = 2 and v = 1 it
# is 0.5.

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
    print(f"p=8 m={m:<3}", "  ".join(f"v={v}: {float(bubble(8, m, v)):6.1%}" for v in (1, 2, 4)))

# %% [markdown]
# More microbatches or more chunks: both make the bubble smaller. More microbatches make the batch larger, or each
# microbatch smaller, and they can cost memory, as you will see next.

# %% [markdown]
# ## 3 · Implement
#
# ### GPipe
#
# The simplest pipeline schedule (Huang et al., 2018): all forwards, then all backwards.
#
# **Exercise.** The list of one rank, as strings: `["F0", "F1", ..., "B0", ...]`; microbatches count from 0. Waiting is
# no word: a rank waits by itself until the input of its next word is there. The backwards may come in any order that
# all ranks share; in the paper's figure they go from the last microbatch to the first. In this exercise and in the
# other three that ask for a list, your code cannot import the package's own generators.

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
display(draw("Your GPipe: p=4, m=8", [gpipe(rank, 4, 8) for rank in range(4)]))

# %% [markdown]
# The grey staircase under each row counts the activations that a rank keeps: each from its F until its B is done. A
# rank of GPipe keeps all m. How much is that for GPT-3 on 8 stages of 8 GPUs each? A layer keeps 34 bytes for each
# token and hidden unit, shared by the t = 8 GPUs of its stage (lab 02, with sequence parallelism and without stored
# attention scores).

# %%
kept = 34 * h // t * tokens * 96 // 8  # bytes for one microbatch in the 12 layers of a rank
for m in (8, 64):
    print(f"GPipe, m={m:<3} keeps {m * kept / 1e9:4.1f} GB on every GPU")
inputs = 2 * tokens * h // t  # bytes of a stage's input for one microbatch
print(f"GPipe, m=64, as it was published: {(64 * inputs + kept) / 1e9:.1f} GB, with every forward run twice")

# %% [markdown]
# With m = 64, which makes the bubble small, the activations alone need more than the 80 GB of the GPU. The paper has a
# way out: a stage keeps only the *input* of each microbatch, and runs its forward once more before the backward
# (*recompute*). That takes little memory and a third more computation. Here and below "GPipe" means its order alone,
# without recompute.
#
# ### 1F1B
#
# The last rank could go back at once: after `F0` it has everything that `B0` needs. If every rank goes back **as soon
# as it can**, microbatches leave as new ones enter, and no rank keeps more than p of them.
#
# Rank r is p-1-r hops from the last one. It does that many forwards to *warm up*; then one forward and one backward in
# turn (hence the name); then the backwards that are left. By hand: rank 2 of p = 4, with m = 3, warms up with one
# forward, so its list is F0, then F1 B0, F2 B1, then B2.
#
# **Exercise.** The list of one rank. Where m is not larger than the warm-up, a rank does all m forwards, then all
# backwards.

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
rows = [one_f_one_b(rank, 4, 8) for rank in range(4)]
display(draw("Your 1F1B: p=4, m=8 (grey on the scale of GPipe's)", rows, most=8))

# %% [markdown]
# Compare the two pictures. The bubble is the same: 1F1B does not make the pipeline faster. But it bounds the memory:
# rank r keeps at most p-r activations, however large m is. For GPT-3 rank 0 keeps 8 in place of 64, 10.3 GB in place of
# 82.1. So you *can* raise m now.
#
# The pictures are drawn with messages that take no time. What if a message takes a tenth of a forward?

# %%
# %%needs gpipe one_f_one_b
from fractions import Fraction

for latency in (Fraction(0), Fraction(1, 10)):
    for m in (32, 128):
        lists = [schedule_from_text(f.__name__, [f(r, 8, m) for r in range(8)]) for f in (gpipe, one_f_one_b)]
        bubbles = [f"{float(simulate(one, Costs(latency=latency)).bubble):5.1%}" for one in lists]
        print(f"p=8 m={m:<3} messages take {float(latency):3.1f} F:  bubble of GPipe {bubbles[0]}, of 1F1B {bubbles[1]}")

# %% [markdown]
# So the bubble is the same only if messages are free. In the steady state of 1F1B a rank waits in *every* microbatch
# for two messages, one there and one back. So a larger m does not help: the distance to GPipe, 6 % of the work, stays. In
# part B you will see the cure, a longer warm-up, which costs memory.
#
# ### What a wrong list does
#
# Two ranks that wait for each other stop the whole pipeline. On a real machine you would see GPUs at 100 %, because a
# kernel of NCCL that waits counts as busy, and after ten minutes PyTorch's timeout. The executor of this lab checks all
# lists before it runs them, which takes milliseconds. In these two lists rank 0 goes back before it has sent microbatch
# 1, and rank 1 wants microbatch 1 before it goes back.

# %%
from course.figures.pipelines import draw_deadlock

wrong = ["F0 B0 F1 B1", "F0 F1 B0 B1"]
reached, waits = stuck(schedule_from_text("wrong", wrong))
draw_deadlock([row.split() for row in wrong], reached, waits, "Deadlock: two ranks wait for each other")

# %% [markdown]
# A deadlock always has such a circle. Start at a framed box and go along its arrow. Then go left, along the row, to the
# framed box there, and along its arrow, until you are where you began. The checker writes the same circle as a
# sentence, which you may have met in a check above.
#
# **End of part A**, a good place to stop.

# %% [markdown]
# ## 3 · Implement (part B)
#
# ### Interleaved 1F1B
#
# To shrink the bubble without more microbatches, cut finer. Rank r gets v chunks: stages r, r+p, r+2p, ... A microbatch
# goes around the ring of ranks v times. The picture has v = 2 in the middle; the V on the right comes later.

# %%
from course.figures.pipelines import placements

placements(
    {"1 chunk a rank": round_robin(4, 1), "2 chunks, round robin": round_robin(4, 2), "2 chunks, V": v_shaped(4)}
)

# %% [markdown]
# Every rank walks through the same table of m·v *slots*. Microbatches go in groups of p. A group passes chunk 0, then
# chunk 1, and so on; then comes the next group. With p = 2, m = 4, v = 2:
#
# | slot | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
# |---|---|---|---|---|---|---|---|---|
# | forward: microbatch.chunk | 0.0 | 1.0 | 0.1 | 1.1 | 2.0 | 3.0 | 2.1 | 3.1 |
# | backward | 0.1 | 1.1 | 0.0 | 1.0 | 2.1 | 3.1 | 2.0 | 3.0 |
#
# The backward table has the same microbatches with the chunks counted from behind. Rank r warms up with
# 2(p-r-1) + (v-1)p forwards (never more than there are), then alternates as before. By hand: rank 1 of these two warms
# up with 2·0 + 1·2 = 2 forwards. Its list begins F0.0 F1.0, then F0.1 B0.1, F1.1 B1.1, F2.0 B0.0, ...
#
# **Exercise.** The list of one rank, with chunks: `"F2.1"`. m is a multiple of p, and v > 1.

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
rows = [interleaved(rank, 4, 8, 2) for rank in range(4)]
display(draw("Your interleaved 1F1B: p=4, m=8, v=2 (grey on the scale of 1F1B's: 16 halves)", rows, v=2, most=16))

# %% [markdown]
# The bubble is half that of 1F1B. The price: more than twice the messages, because a microbatch crosses 7 borders in
# place of 3; and more memory, because rank 0 keeps 11 chunks, each half as large as before, where 1F1B kept 4 whole
# ones.
#
# ### Why twice the warm-up?
#
# The factor 2 in `2(p-r-1) + (v-1)p` looks wasteful: with factor 1 the lists run, too, and keep fewer activations. The
# next cell tries both for p = 8, m = 32, v = 4, and prints the two bubbles. In the first line messages are free; in the
# second each takes a tenth of a chunk's forward, in the third half of one. Guess before you run the cell: how much
# does the bubble grow from the first line to the last, with each factor?

# %% tags=["hide-output"]
from fractions import Fraction

from minimegatron.parallel.pipeline.actions import Schedule
from minimegatron.parallel.pipeline.schedules import alternate, interleaved_table


def with_factor(factor, p=8, m=32, v=4):
    table = interleaved_table(m, v, p)
    back = [(i, v - 1 - c) for i, c in table]
    rows = [alternate(table, back, factor * (p - r - 1) + (v - 1) * p) for r in range(p)]
    return Schedule(f"factor {factor}", tuple(rows), round_robin(p, v))


for latency in (Fraction(0), Fraction(1, 10), Fraction(1, 2)):
    costs = Costs(latency=latency / 4).divided(4)
    one, two = (float(simulate(with_factor(factor), costs).bubble) for factor in (1, 2))
    print(f"a message takes {float(latency):3.1f} chunks:  bubble with factor 1 {one:5.1%}, with factor 2 {two:5.1%}")

# %% [markdown]
# Where messages are free, the two are equally fast. Where they take time, the p-r-1 additional forwards that rank r has
# in hand fill the time in which messages travel there and back. Papers often draw schedules with free messages;
# Megatron-LM warms up with factor 2.
#
# ### A backward has two halves
#
# One more idea removes most of the bubble. Take one layer, y = tanh(z) with z = x·W, and let dy be the gradient of y.
# Its backward first computes dz = dy · (1 - y²), element by element, and then two matrix products:
#
# $$\text{B:}\quad dx = dz\,W^{\mathsf T} \qquad\qquad \text{W:}\quad dW = x^{\mathsf T}\,dz$$
#
# The stage before waits for dx. Nothing waits for dW until the optimizer steps. So do B at once, send dx, and keep W
# for a time when the rank would be idle. F, B and W are one matrix product each: about a step each. In a list that has
# `W3`, `B3` is the first half only.
#
# By hand: let W be the 2 × 2 identity and x = dy = (1, 1). Then z = (1, 1), y = (0.762, 0.762), dz = (0.42, 0.42). So B
# returns dx = (0.42, 0.42), and W adds 0.42 to each of the four entries of the gradient. This is the first case of the
# check.
#
# **Exercise.** A stage with a method for each of F, B and W.
#
# - `forward` keeps y, so that `backward` needs one matrix product only: dx. The check counts.
# - `weights` computes dW and *adds* it to `self.grad`. After it the stage keeps no tensor of this microbatch.
# - Several microbatches are under way at once, and their B and W may come in another order than their F. In the next
#   batch the microbatches have the same numbers again, from 0.
# - With several chunks a rank has several stages at once. A stage must not find what another one has kept.

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
# Where do the W go? In 1F1B the last rank is the first that can go back, and it finishes early. If it puts its W aside,
# it can go back faster, the gradients reach the other ranks sooner, and its W fill the time at the end. So rank r does
# the W of a microbatch **r microbatches after** its B: rank 0 does each W at once, the last rank puts p-1 of them
# aside.
#
# Why r? An activation is kept until its W is done. Rank r of 1F1B keeps p-r activations. If every rank may keep p, as
# rank 0 does, rank r has room for p - (p-r) = r more: so many W may wait. Now every rank keeps p. (Qi et al., *Zero
# Bubble Pipeline Parallelism*, arXiv 2401.10241.)
#
# By hand: rank 1 of p = 2, with m = 3, has no warm-up. Its list is F0 B0, F1 B1 W0, F2 B2 W1, and W2 at the end.
#
# **Exercise.** Your 1F1B with W: after `B{i}` comes `W{i - rank}`, if there is such a microbatch; the rest at the end.
# You may build on your own list: `from exercises.one_f_one_b import one_f_one_b` makes it available.

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
display(draw("Your ZB-H1: p=4, m=8", [zb_h1(rank, 4, 8) for rank in range(4)]))

# %% [markdown]
# Where F, B and W take equally long, the bubble is a third of that of 1F1B, and no rank keeps more whole activations
# than rank 0 did. (After B a real layer may let go of what its W does not need, so a waiting W costs less than that.)
#
# In a linear layer the three *are* equally long. Attention's scores have no weights, so no W, and in a real layer W is
# shorter. Let it take half as long:

# %%
# %%needs one_f_one_b interleaved zb_h1
W = Fraction(1, 2)
bubbles = {}
for name, v, function in (("1f1b", 1, one_f_one_b), ("zb_h1", 1, zb_h1), ("interleaved, v=2", 2, interleaved)):
    rows = [function(r, 8, 32, *([v] if v > 1 else [])) for r in range(8)]
    plan = simulate(schedule_from_text(name, rows, round_robin(8, v)), Costs(backward_weight=W).divided(v))
    bubbles[name] = float(plan.bubble)
    print(f"p=8 m=32, W half as long as F: {name:17} {bubbles[name] / bubbles['1f1b']:.2f} of the bubble of 1F1B")

# %% [markdown]
# So with a short W interleaving with two chunks is ahead of ZB-H1, and pays with memory and messages.
#
# ### Stages on a V
#
# Two more lists take the idea further. They place the stages on a **V** (on the right of the picture of placements):
# rank r holds stage r on the way down and stage 2p-1-r on the way up. So the rank where a microbatch enters also
# computes its loss, and begins its backward without waiting for a message. In 1F1B rank 0 waits longest for its first
# backward; on a V it is the first that goes back.
#
# - **ZB-V**, from the same paper, divides every backward. If F, B and W take equally long and m is at least 2p-1, no
#   rank is idle between its first and its last action. The bubble is then a sixth of that of 1F1B, and no rank keeps
#   more than rank 0 of 1F1B does.
# - **DualPipeV**, a shorter form of DeepSeek-V3's DualPipe, pairs each forward with the backward of another microbatch.
#   While one of a pair computes, the tokens of the other travel between the experts of its layers (the all-to-all of
#   lab 05): these messages take as long as the computation, and are what DeepSeek hides. The picture draws the forward
#   of a pair first and the backward right behind it. Only some of the backwards are divided.
#
# Follow microbatch 0 through both pictures: light down the ranks, dark up again, then back.

# %%
from minimegatron.parallel.pipeline.schedules import build_schedule

for name, title in (("zb_v", "ZB-V: p=3, m=6"), ("dualpipe_v", "DualPipeV: p=3, m=6")):
    schedule = build_schedule(name, 3, 6)
    plan = simulate(schedule, Costs().divided(2))
    note = "a pair: an F and, right behind it, a B of the other chunk" if name == "dualpipe_v" else ""
    display(draw_schedule(plan.events(), live_activations(schedule), title, note=note))
    inner = ", ".join(f"{float(b):.1%}" for b in plan.inner_bubbles)
    print(f"{name}: {float(plan.makespan):g} steps in all; idle between first and last action, by rank: {inner}")

# %% [markdown]
# ### Time against memory
#
# All schedules in one picture: to the right the activations that the fullest rank keeps, upwards the bubble. A chunk
# counts as 1/v of an activation; F, B and W take equally long, messages no time. To try other p, m and v set
# `SLIDERS = True`: pale points show where the last ones stood.
#
# DualPipeV stands here where DeepSeek counts it. Its picture above sends the result of a forward as soon as that is
# done. But a pair runs as one unit: its two halves share the GPU and end together. Then the bubble is 2(p-1) chunks'
# forwards, twice what is drawn above: as large as ZB-H1's, at the same length of a pair. DualPipeV pays where a pair
# takes less time than its two halves one after the other, because messages are hidden. That is its purpose.

# %%
# %%needs gpipe one_f_one_b interleaved zb_h1
from minimegatron.parallel.pipeline.schedule_sim import Costs, simulate
from minimegatron.parallel.pipeline.schedules import build_schedule, round_robin, schedule_from_text
from course.figures.pipelines import trade_off

SLIDERS = False


def points_of(p, m, v):  # {name: (activations kept, bubble)}
    lists = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb_h1": zb_h1}
    plans = {name: schedule_from_text(name, [f(r, p, m) for r in range(p)]) for name, f in lists.items()}
    if v > 1:
        rows = [interleaved(r, p, m, v) for r in range(p)]
        plans["interleaved"] = schedule_from_text("interleaved", rows, round_robin(p, v))
    plans.update({name: build_schedule(name, p, m) for name in ("zb_v", "dualpipe_v")})
    runs = {name: simulate(schedule, Costs().divided(schedule.v)) for name, schedule in plans.items()}
    points = {name: (max(run.peak_live) / run.schedule.v, float(run.bubble)) for name, run in runs.items()}
    kept, bubble = points["dualpipe_v"]  # a pair is one unit: 2(p-1) of 6m halves of a step are idle
    return {**points, "dualpipe_v": (kept, max(bubble, (p - 1) / (3 * m)))}


def compare(p=4, m=8, v=2):
    asked, m = m, max(p, m // p * p)  # interleaving wants a multiple of p
    here, note = points_of(p, m, v), "" if m == asked else f" (in place of {asked}: a multiple of p)"
    display(trade_off(here, title=f"p={p}, m={m}{note}, v={v}", before=dict(shown)))
    shown.clear()
    shown.update(here)


shown = {}
compare()
if SLIDERS:
    from ipywidgets import interact

    interact(compare, p=(2, 8), m=(2, 64), v=(1, 4))

# %% [markdown]
# Now double m. Which points will move, and in which direction? Guess, then run the next cell.

# %% tags=["hide-output"]
# %%needs gpipe one_f_one_b interleaved zb_h1
display(trade_off(points_of(4, 16, 2), title="p=4, v=2: m=16, and m=8 pale", before=points_of(4, 8, 2)))

# %% [markdown]
# The scale is logarithmic here: equal arrows downwards are equal factors. From m = 2p on, doubling m halves every
# bubble, and only GPipe's point moves to the right as well: GPipe keeps all m activations, the others a number that no
# longer grows with m. From m = p to 2p ZB-V gains more: its bubble falls to a quarter, because its list needs about 2p
# microbatches to fill the V.
#
# **End of part B**, a good place to stop.

# %% [markdown]
# ## 4 · Run and 5 · See (part C)
#
# ### Predicted beside measured
#
# Now your lists run on four real processes. `rehearse` takes the next word, waits for its input, does it, and sends its
# output. Sleep stands in for computation, 20 ms for a step, so that four ranks on a small machine behave like four
# GPUs. Each list runs five times, the lists in turn, in about 20 s.

# %%
# %%ranks 4 --needs gpipe,one_f_one_b,interleaved,zb_h1 --out measured
from exercises.gpipe import gpipe
from exercises.interleaved import interleaved
from exercises.one_f_one_b import one_f_one_b
from exercises.zb_h1 import zb_h1

from minimegatron.comm.mesh import Mesh
from minimegatron.comm.p2p import PointToPoint
from minimegatron.config import ParallelConfig
from minimegatron.parallel.pipeline.actions import round_robin, schedule_from_text
from course.rehearsal import rehearse

M = 8
mail = PointToPoint(Mesh.build(ParallelConfig(pipeline_model_parallel_size=world)))
lists = {
    "gpipe": schedule_from_text("gpipe", [gpipe(r, world, M) for r in range(world)]),
    "1f1b": schedule_from_text("1f1b", [one_f_one_b(r, world, M) for r in range(world)]),
    "interleaved": schedule_from_text(
        "interleaved", [interleaved(r, world, M, 2) for r in range(world)], round_robin(world, 2)
    ),
    "zb_h1": schedule_from_text("zb_h1", [zb_h1(r, world, M) for r in range(world)]),
}
runs = {name: [] for name in lists}
for name, schedule in 5 * list(lists.items()):
    runs[name].append(rehearse(schedule, mail, step=0.02))
    did = [word + note for word, _, _, _, note in runs[name][-1][0]]
    assert did == [str(action) for action in schedule.actions[rank]], "as the list says"
report(runs)
if rank == 0:
    print("every rank did what its list says, in that order")

# %% [markdown]
# The next cell takes the fastest of the five runs of each list, draws two of them beside their plans, and counts the
# activations. It also writes each run to `.work/03_pipeline_1f1b/` as a trace file: open one at ui.perfetto.dev to
# zoom.

# %%
# %%needs gpipe one_f_one_b interleaved zb_h1
from pathlib import Path

from course.rehearsal import fastest, most_live
from minimegatron.parallel.pipeline.schedule_sim import Costs, simulate
from minimegatron.parallel.pipeline.schedules import round_robin, schedule_from_text
from course.figures.pipelines import planned_and_done
from minimegatron.viz.timeline import chrome_trace
from course.figures.pipelines import trade_off

STEP, chunks = 0.02, {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb_h1": 1}
functions = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb_h1": zb_h1}
functions["interleaved"] = lambda r, p, m: interleaved(r, p, m, 2)
predicted, seen = {}, {}
for name, function in functions.items():
    schedule = schedule_from_text(name, [function(r, 4, 8) for r in range(4)], round_robin(4, chunks[name]))
    plan = simulate(schedule, Costs().divided(chunks[name]))
    reports = [one[name] for one in measured]
    events, kept = fastest(reports), most_live(reports)
    seconds = max(e.end for e in events) - min(e.start for e in events)
    predicted[name] = max(plan.peak_live) / chunks[name], float(plan.bubble)
    seen[name] = max(kept) / chunks[name], seconds / (3 * 8 * STEP) - 1
    if name in ("1f1b", "zb_h1"):
        display(planned_and_done(plan.events(STEP), events, f"{name}: the plan (thin) and the fastest of five runs"))
    print(f"{name:12} most activations kept, by rank: predicted {plan.peak_live}, measured {kept}")
    chrome_trace(events, Path(".work/03_pipeline_1f1b") / f"{name}.json", plan.events(STEP))
display(trade_off(predicted, seen, "Four lists on four processes: p=4, m=8"))

# %% [markdown]
# Memory is as predicted. Time lies above the prediction: a process wakes up late from its sleep, messages take time,
# and four ranks share your machine with everything else that runs on it. The interleaved list waits for more than twice
# as many messages as 1F1B, and usually loses most. Look in the pairs of rows for the place where a rank first falls
# behind its plan: all that depends on it is late from there on.
#
# ### The same gradient, in every order
#
# The next cell runs your lists with numbers: four ranks, one `SplitStage` each, and the loss is the sum of all outputs.
# It compares each rank's weight gradient with that of the *serial twin*, one process that runs all four layers on the
# whole batch.

# %% jupyter={"source_hidden": true}
# %%ranks 4 --needs gpipe,one_f_one_b,split_stage,zb_h1
import torch
from exercises.gpipe import gpipe
from exercises.one_f_one_b import one_f_one_b
from exercises.split_stage import SplitStage
from exercises.zb_h1 import zb_h1

from minimegatron.comm.mesh import Mesh
from minimegatron.comm.p2p import PointToPoint
from minimegatron.config import ParallelConfig
from minimegatron.parallel.pipeline.actions import schedule_from_text
from minimegatron.parallel.pipeline.plain import FunctionStage, TensorSpec, run

M, H = 8, 32
g = torch.Generator().manual_seed(0)
weights = [torch.randn(H, H, generator=g) / H**0.5 for _ in range(world)]
batch = torch.randn(M, 4, H, generator=g)


def gradient(name, function):
    """This rank's weight gradient after one batch, and in which order the list adds up the microbatches."""
    schedule = schedule_from_text(name, [function(r, world, M) for r in range(world)])
    mine = SplitStage(weights[rank].clone())

    def backward(i, dy):
        dx = mine.backward(i, torch.ones(4, H) if dy is None else dy)
        if not schedule.splits:
            mine.weights(i)
        return dx

    forward = lambda i, x: mine.forward(i, batch[i].clone() if x is None else x)
    hidden = TensorSpec(torch.Size([4, H]), torch.float32)
    run(schedule, [FunctionStage(forward, backward, mine.weights, hidden)], mail)
    adds = "W" if schedule.splits else "B"
    return mine.grad, [a.microbatch for a in schedule.actions[rank] if a.kind == adds]


mail = PointToPoint(Mesh.build(ParallelConfig(pipeline_model_parallel_size=world)))
found = {f.__name__: gradient(f.__name__, f) for f in (gpipe, one_f_one_b, zb_h1)}

twin = [w.clone().requires_grad_() for w in weights]
x = batch.flatten(0, 1)
for w in twin:
    x = torch.tanh(x @ w)
x.sum().backward()

for name, (grad, order) in found.items():
    apart = (grad - twin[rank].grad).norm() / twin[rank].grad.norm()
    print(f"{name:12} adds up {' '.join(map(str, order))}   within 1e-5 of the serial twin: {apart.item() < 1e-5}")
same = [torch.equal(a, b) for a, i in found.values() for b, j in found.values() if i == j]
print("lists that add up in the same order agree in every bit:", all(same))

# %% [markdown]
# A floating-point sum depends on the order in which it is added up. Two lists that add up the microbatches in the same
# order do the same additions, so their gradients agree in every bit. A list that adds up in another order (GPipe's
# backwards may go from the last microbatch to the first) agrees only up to rounding, and so does the twin, which adds
# up the whole batch inside one matrix product.
#
# ### A matrix that lives twice
#
# Many models use one matrix for the embedding and for the output layer. In a pipeline the first stage embeds and the
# last computes the logits, so both hold a copy, and each copy sees only the gradient of its own use. If each steps with
# its own gradient, the two copies differ after one step.
#
# The cure: the two ranks sum their gradients. Equal copies that take equal steps stay equal. By hand: rank 0 has the
# gradient (1, 2), the last rank (10, 20); then both return (11, 22).
#
# **Exercise.** Sum `grad` over the first and the last of at least two ranks; both return the sum, and you may change
# `grad` itself. Every other rank gets `None`, returns `None`, and sends nothing; it waits for no other rank either.
# Remember lab 01: `dist.new_group` must be called by *every* rank, also by those that will not be in the group.
#
# A real program creates its groups once, when it starts (`comm/mesh.py`). This function gets nothing but a gradient, so
# it may create the group in each call, or at the first call and keep it. (Not outside of the function: when the cell is
# imported, there is no process group yet.)

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
# Two other parts of a training program must know about the copies: the gradient's *norm* has to count the matrix once,
# not twice, and a checkpoint has to save it once.
#
# ### On a machine with GPUs
#
# The folded cell runs two schedules on GPUs: matrix products in place of sleep, NCCL in place of gloo. Without two GPUs
# it prints one line, and the lab goes on.
#
# One thing is new. A GPU works on *streams*: queues, each in its own order. The products of a stage are on the current
# stream; a receive that was posted ahead waits on another stream. How long does `F0` take on rank 0? A program that
# asks `torch.cuda.synchronize()` for its end waits for *all* streams, and hangs:
#
# | | rank 0 | rank 1 |
# |---|---|---|
# | 1 | has posted the receive for its `B0`, on its own stream | has posted the receive for its `F0` |
# | 2 | computes `F0` on the current stream | waits for the output of rank 0's `F0` |
# | 3 | `synchronize()`: waits for `F0`, *and* for the message for `B0` | waits |
# | 4 | would send the output of `F0` now, but still waits | sends the message for `B0` only after its own `F0` and `B0` |
#
# Rank 0 waits for rank 1 before it sends what rank 1 waits for. So rank 0 waits for the current stream only.

# %% jupyter={"source_hidden": true}
# %%torchrun --gpus 2 --name gpus --out on_gpus
import torch
from minimegatron import trace
from minimegatron.launch.rank import finish, init, report
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.p2p import PointToPoint
from minimegatron.config import ParallelConfig
from minimegatron.parallel.pipeline.overlapped import FunctionStage, TensorSpec, run
from minimegatron.parallel.pipeline.schedules import build_schedule

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
        lambda i, x: work(some(x), 40), lambda i, dy: work(some(dy), back), lambda i: work(zeros, 40),
        TensorSpec(zeros.shape, zeros.dtype),
    )
    for _ in range(2):
        with trace.record(rank) as log:
            run(schedule, [stage], mail)
    did = log.select(kind="compute")
    said[name] = [(e.name, e.kind, e.rank, e.start, e.end, e.note.partition(".")[0]) for e in did]
report(said)
finish()

# %%
if on_gpus:
    from minimegatron.parallel.pipeline.schedule_sim import simulate
    from minimegatron.parallel.pipeline.schedules import build_schedule
    from minimegatron.trace import Event
    from course.figures.pipelines import planned_and_done

    gpus = on_gpus.nproc
    for name in ("1f1b", "zb_h1"):
        events = [Event(*e[:5], note=e[5]) for one in on_gpus.reports for e in one[name]]
        unit = min(e.seconds for e in events if e.name == "F")
        plan = simulate(build_schedule(name, gpus, 4 * gpus))
        display(planned_and_done(plan.events(unit), events, f"{name} on {gpus} GPUs: the plan (thin) and the run"))

# %% [markdown]
# ### Train
#
# Your `one_f_one_b` runs a Llama of four layers on two ranks, with a tied embedding that your `sync_tied` keeps equal.
# The stages and their autograd are the package's. The folded cell trains for 40 steps, about 20 s, and compares the two
# copies. The last rank then trains the serial twin: the same model in one process, without a pipeline.

# %% jupyter={"source_hidden": true}
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
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config
from minimegatron.parallel.pipeline.actions import schedule_from_text
from minimegatron.parallel.pipeline.plain import run
from minimegatron.parallel.pipeline.stage import ModuleStage

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
    out = chunk(rows[i][:, :-1], labels=rows[i][:, 1:], inputs=x)
    if rank == world - 1:
        out = out.sum() / (M * MICRO * SEQ)
        losses[-1] += out.item()
    return out


inputs, outputs = chunk.stage_specs(MICRO, SEQ)
stage = ModuleStage(forward, chunk, schedule, rank, inputs=inputs, outputs=outputs)
optimizer = torch.optim.AdamW(chunk.parameters(), lr=3e-3)
for step in range(STEPS):
    at = torch.randint(len(data) - SEQ, (M, MICRO), generator=places).tolist()
    rows = [torch.stack([data[a : a + SEQ + 1] for a in one]) for one in at]
    losses.append(0.0)
    optimizer.zero_grad()
    run(schedule, [stage], model.mail, checked=True)
    tied.grad = sync_tied(tied.grad)
    optimizer.step()

copies = [torch.empty_like(tied) for _ in range(world)]
dist.all_gather(copies, tied.detach())
twins, entropy = [], 0.0
if rank == world - 1:
    twin = build_model(config, Mesh.serial(), 1)
    optimizer, places = torch.optim.AdamW(twin.parameters(), lr=3e-3), torch.Generator().manual_seed(5)
    for step in range(STEPS):
        at = torch.randint(len(data) - SEQ, (M, MICRO), generator=places).flatten().tolist()
        rows = torch.stack([data[a : a + SEQ + 1] for a in at])
        loss = twin(rows[:, :-1], labels=rows[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        twins.append(loss.item())
    share = torch.bincount(data) / len(data)
    entropy = -(share * share.clamp(min=1e-9).log()).sum().item()
    print(f"loss per byte fell by more than a quarter: {losses[-1] < losses[0] * 3 / 4}")
    print(f"after {STEPS} steps the two copies agree in every bit: {torch.equal(*copies)}")
    apart = max(abs(a - b) for a, b in zip(losses, twins))
    print(f"never more than 0.01 from the loss of the serial twin: {apart < 0.01}")
report((losses, twins, entropy))
finish()

# %%
# %%needs one_f_one_b sync_tied
import matplotlib.pyplot as plt

from minimegatron.viz.picture import MEASURED_LINE, REFERENCE_LINE

losses, twins, entropy = trained.reports[1]
fig, ax = plt.subplots(figsize=(7, 2.8))
ax.plot(twins, label="serial twin, one process", **REFERENCE_LINE)
ax.plot(losses, label="two stages, your 1F1B", **MEASURED_LINE)
ax.axhline(entropy, linestyle=":", color="black", linewidth=1, label="entropy of single bytes")
ax.set(xlabel="step", ylabel="loss per byte", title="Your 1F1B, training on two stages")
ax.legend()
plt.show()

# %% [markdown]
# The two curves are one: the pipeline computes what the serial twin computes. The dotted line is the entropy of single
# bytes in this text, the loss of a model that knows only how frequent each byte is. Forty steps teach little more.

# %% [markdown]
# ## 6 · Break it
#
# A colleague has made the stages of a pipeline a little faster. It still runs, and its loss falls. The folded cell
# trains it on two ranks with eight microbatches and your 1F1B, and its serial twin beside it. Leave the cell folded
# for now. What it prints shows that something is wrong; what it leaves in `evidence` is enough to find out what.

# %% jupyter={"source_hidden": true}
# %%ranks 2 --needs one_f_one_b --out evidence
import torch
from exercises.one_f_one_b import one_f_one_b

from minimegatron.comm.mesh import Mesh
from minimegatron.comm.p2p import PointToPoint
from minimegatron.config import ParallelConfig
from minimegatron.parallel.pipeline.actions import schedule_from_text
from minimegatron.parallel.pipeline.plain import FunctionStage, TensorSpec, run

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
    hidden = TensorSpec(torch.Size([B, H]), torch.float32)
    run(schedule, [FunctionStage(stage.forward, stage.backward, hidden=hidden)], mail)
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
# At step 0 pipeline and twin have the same loss, in all digits shown. Then the pipeline's loss falls as a loss should,
# but more slowly than the twin's. A real training run has no twin, and its loss alone would look healthy. The norm of
# the first gradient shows the fault at once: the pipeline's is much smaller than the twin's, so a part of the gradient
# is lost.
#
# *What* is lost? `evidence` holds, for each rank, the gradient with which the pipeline ended its first step and the
# gradients of the eight microbatches, computed one by one in one process. If some microbatches were lost, the
# pipeline's gradient is the sum of the gradients of those that are left. By hand: of the gradients (1, 0, 0, 0),
# (-2, 1, 0, 0), (1, 1, 1, 0) and (2, 1, 0, 1), the sum (2, 1, 1, 0) holds the first and the third, so the answer is
# [0, 2].
#
# **Exercise.** Which microbatches are in the sum? Return their indices in order: at least one, of at most eight. The
# gradients are like each other, but only one selection has this sum, up to rounding. A rounding error is about 10⁻⁷ of
# the *largest* numbers that are added up; and gradients may be tiny, as in `evidence`, or large.

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
    left = [int(i) for i in survivors(got, grads)]
    print(f"rank {rank}: of {len(grads)} microbatches, the gradient holds {left}")

# %% [markdown]
# Only the last one is left. Now unfold the cell of the colleague's stage and find the line in `Stage.backward` that
# loses the others, before you read on.
#
# It is `self.grad = x.T @ dz`. It overwrites the gradient of the microbatches before, where `+=` would add to it (and
# writing alone is faster than reading, adding and writing). The loss looked fine because the gradient of one microbatch
# of eight points roughly in the right direction. It is too small, but Adam divides every gradient by its own size, so
# the steps were as large as they should be. So the pipeline computed eight microbatches and trained with one of them.

# %% [markdown]
# ## 7 · Explain
#
# Questions an interviewer asks about pipelines. Say your answer aloud before you open the one here.
#
# 1. *While messages are free, GPipe and 1F1B have the same bubble. Why is 1F1B used?*
#    <details><summary>answer</summary>It keeps at most p activations in place of m, so m can grow until the bubble no
#    longer matters, without recompute. Where messages take time it is even slower than GPipe, unless it warms up
#    longer.</details>
# 2. *Why not v = 16 chunks?*
#    <details><summary>answer</summary>More than v times the messages, more activations, and a chunk needs at least one
#    layer. Below some size a chunk takes less time than the message it waits for.</details>
# 3. *Blocking `send` and `recv` in 1F1B hang. Where?*
#    <details><summary>answer</summary>In the steady state: rank r sends forward to r+1 while r+1 sends back to r, and
#    each waits until the other receives. Start sends without waiting, or fuse the send with the receive.</details>
# 4. *What does ZB-V cost?*
#    <details><summary>answer</summary>No more activations than 1F1B, but twice the messages between ranks. It needs F,
#    B and W of about equal length, at least 2p-1 microbatches, and an optimizer step that does not wait for the global
#    gradient norm; else the ranks that finish first wait after all.</details>
# 5. *Which ranks hold the most memory in 1F1B?*
#    <details><summary>answer</summary>The first keeps p activations, and the embedding. The last keeps one, and the
#    logits. Real runs give both fewer layers.</details>
#
# **Exercise.** Numbers for any run. `layers` are those of the whole model, `tokens` those of one microbatch. The
# activation of a token at a border is `hidden` numbers in bf16. For its backward a layer keeps
# `kept_bytes_per_token_and_layer` bytes a token, in which the hidden size is already counted. Return a dict:
#
# | key | value |
# |---|---|
# | `idle_share` | the part of *all* the time that a rank is idle, as a fraction |
# | `microbatches_for_5_percent` | the fewest with which the *bubble* is at most 0.05; with chunks (v > 1) a multiple of p, because your `interleaved` takes no other |
# | `kept_bytes_on_rank_0` | at the peak of 1F1B, or of interleaved 1F1B where v > 1 |
# | `bytes_between_ranks` | sent over all borders together in one batch, both ways |
#
# By hand, for p = 3, m = 5 and v = 1, with 6 layers, 7 tokens, hidden size 11 and 13 kept bytes: the idle share is
# 6/21; 40 microbatches; rank 0 keeps 3 microbatches in 2 layers, 3 · 2 · 7 · 13 = 546 bytes; and 5 microbatches cross 2
# borders both ways with 7 · 11 numbers of 2 bytes, 5 · 2 · 2 · 7 · 11 · 2 = 3080 bytes. One more number: with p = 8 and
# v = 4, 35 microbatches would be enough, and the next multiple of 8 is 40.

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

# %% [markdown]
# ### Your first guess
#
# Eight stages, eight microbatches: the idle share of all the time, for each of your lists. Nothing runs here: the
# numbers are counted in the plans.

# %%
# %%needs one_f_one_b interleaved zb_h1
from minimegatron.parallel.pipeline.schedule_sim import Costs, simulate
from minimegatron.parallel.pipeline.schedules import round_robin, schedule_from_text

p = m = 8
plans = {
    "1f1b": schedule_from_text("1f1b", [one_f_one_b(r, p, m) for r in range(p)]),
    "interleaved, v=2": schedule_from_text("v=2", [interleaved(r, p, m, 2) for r in range(p)], round_robin(p, 2)),
    "interleaved, v=4": schedule_from_text("v=4", [interleaved(r, p, m, 4) for r in range(p)], round_robin(p, 4)),
    "zb_h1": schedule_from_text("zb_h1", [zb_h1(r, p, m) for r in range(p)]),
}
idle = {}
for name, schedule in plans.items():
    steps = simulate(schedule, Costs().divided(schedule.v)).makespan
    idle[name] = 100 * float(1 - 3 * m / steps)
    print(f"{name:17} {float(steps):5g} steps, of which a rank works {3 * m}: idle {idle[name]:.1f} %")
guessed("idle", round(idle["1f1b"], 1), "% idle, in the plan of 1F1B")

# %%
progress()

# %% [markdown]
# ## Where this lives
#
# | here | minimegatron | Megatron-LM |
# |---|---|---|
# | lists of actions | `parallel/pipeline/actions.py`, `parallel/pipeline/schedules.py` | one function a schedule: `core/pipeline_parallel/schedules.py` |
# | slots and warm-up | `parallel/pipeline/schedules.py` | `get_schedule_table`, `get_pp_rank_microbatches` |
# | W later | `parallel/pipeline/schedules.py`, `layers/wgrad.py` | `delay_wgrad_compute` puts W off; no ZB schedule |
# | checker, simulator | `parallel/pipeline/schedule_check.py`, `parallel/pipeline/schedule_sim.py` | not there |
# | the executor | `parallel/pipeline/plain.py`, `comm/p2p.py` | `core/pipeline_parallel/p2p_communication.py` |
# | sleep in place of computation | `course/rehearsal.py` | not there |
# | tied embeddings | `models/chunks.py`, `parallel/data/finalize.py` | `core/distributed/finalize_model_grads.py` |
#
# Next: lab 04, context parallelism, where one sequence is cut over many ranks.

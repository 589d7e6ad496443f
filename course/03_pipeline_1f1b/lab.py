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
# write functions that make such lists, compare each run with its prediction, and write the executor that runs them all:
# the messages, and autograd across the border of two ranks.
#
# | part | you build | time |
# |---|---|---|
# | A · sections 1 to 3 | the bubble formula, GPipe, 1F1B | 1 h |
# | B · section 3 goes on | interleaved 1F1B, a warm-up for slow messages, a backward in two halves, ZB-H1, lists of your own that beat it | 2 h |
# | C · sections 4 to 7 | the executor, a training run on it, tied weights, a bug to find, numbers for any model | 2 h |
#
# **Time:** 4 to 5 hours; each part ends at a good place to stop. **Before it:** lab 01 (groups, sends); of lab 02 only
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
# | 2 to 3 | waits | F1 | B0 of rank 0 needs the gradient that rank 1 makes in its B0 |
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
# others that ask for lists, your code cannot import the package's own generators.

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
# as it can**, microbatches leave as new ones enter, and no rank keeps more than p of them. (Narayanan et al.,
# *PipeDream*, arXiv 1806.03377, and 2104.04473 for the order used here.)
#
# A rank *warms up* with forwards for as long as no gradient can be back at it. Then it does one forward and one
# backward in turn (hence the name), then the backwards that are left. By hand: rank 2 of p = 4, with m = 3, warms up
# with one forward, so its list is F0, then F1 B0, F2 B1, then B2.
#
# **Exercise.** The list of one rank. It takes no longer than GPipe, and rank r never keeps more than p-r activations.
# It must run with few microbatches, too, down to m = 1.

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
# for two messages, one there and one back. So a larger m does not help: the distance to GPipe, 6 % of the work, stays.
# In part B you will see the cure, a longer warm-up, which costs memory.
#
# ### What a wrong list does
#
# Two ranks that wait for each other stop the whole pipeline. On a real machine you would see GPUs at 100 %, because a
# kernel of NCCL that waits counts as busy, and after ten minutes PyTorch's timeout. The package checks all lists before
# it runs them, which takes milliseconds. In these two lists rank 0 goes back before it has sent microbatch 1, and rank
# 1 wants microbatch 1 before it goes back.

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
# The warm-up of a rank has two parts: the forwards of one group in all chunks but the last, and twice the rank's
# distance to the last rank (why twice: the next two sections). It is never longer than m·v. Then F and B alternate as
# before. By hand: rank 1 of these two warms up with 2·0 + 1·2 = 2 forwards. Its list begins F0.0 F1.0, then F0.1 B0.1,
# F1.1 B1.1, F2.0 B0.0, ... (Narayanan et al., arXiv 2104.04473.)
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
# The factor 2 in the warm-up `2(p-r-1) + (v-1)p` looks wasteful: with factor 1 the lists run, too, and keep fewer
# activations. The next cells try both for p = 8, m = 32, v = 4. With free messages both have a bubble of 5.5 %. Now let
# each message take half of a chunk's forward. Your guess for the bubble with factor 1?

# %%
guess("factor_1", None, "messages of half a chunk's forward, warm-up with factor 1: a bubble of how many percent?")

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
guessed("factor_1", round(100 * one, 1), "% with factor 1")

# %% [markdown]
# Where messages are free, the two are equally fast, and papers often draw schedules with free messages. Megatron-LM
# warms up with factor 2.
#
# ### How long a warm-up?
#
# Is twice always right? Take plain 1F1B, one chunk a rank, on borders that are not equal: some inside a machine, some
# between two buildings. Times are whole milliseconds. On every rank an F takes `forward` and a B `backward`, twice as
# much, or three times with recompute. A message over the border between ranks r and r+1 takes `latency[r]`, in either
# direction: from the end of an action to the moment when the other rank can use its result. Sends cost the ranks no
# time, and messages do not wait for each other. p is `len(latency) + 1`.
#
# A list is known by its warm-up w: w forwards (all m where m is smaller), then F and B strictly in turn, then the
# backwards that are left. With w = m on every rank these are GPipe's lists, which lose no time to messages in the
# steady state, but keep everything.
#
# **Exercise.** The warm-up of one rank: the fewest forwards with which the lists of all ranks together take no longer
# than GPipe's, however many microbatches there are. For messages that take no time it is that of `one_f_one_b`. The
# check plays your lists, as `simulate` does but with a latency for each border, and says which ranks wait.

# %%
# %%exercise warm_up
def warm_up(rank: int, forward: int, backward: int, latency: list[int]) -> int:
    """How many forwards this rank begins with, before F and B in turn."""
    ### BEGIN SOLUTION
    period = forward + backward
    return sum(1 - (-2 * one // period) for one in latency[rank:])  # each rounded up
    ### END SOLUTION


# %%
check("warm_up")

# %%
# %%needs warm_up
for late in (0, 1, 15, 16, 46):
    kept = 1 + warm_up(0, 10, 20, [late] * 7)
    print(f"p=8, F 10 ms, B 20 ms, messages {late:2} ms: rank 0 keeps {kept:2} activations")

# %% [markdown]
# <details><summary>What does the round trip say, and why is it not enough?</summary>With messages of 1 ms a microbatch
# comes back to rank 0 after 8 · 30 + 14 · 1 = 254 ms, so 9 in flight would fill that time. But F and B take turns, so on
# every rank a B begins a whole number of turns after its F, and one F later. From one rank to the next this number
# falls by whole turns only. Each border rounds up by itself: 1 ms there costs as much memory as 15.</details>
#
# So factor 2 is what the slightest latency asks for, and it is enough while a message takes at most half of F + B. Each
# further half of F + B costs rank 0 one more activation for each border.
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
# it can go back faster, the gradients reach the other ranks sooner, and its W fill the time at the end. But an
# activation is kept until its W is done, so memory says how many W a rank may put aside: no rank is to keep more than p
# activations, as many as rank 0 of 1F1B does. (Qi et al., *Zero Bubble Pipeline Parallelism*, arXiv 2401.10241.)
#
# By hand: rank 0 of p = 2 keeps 2 activations when it first goes back, so it can put no W aside. With m = 3 its list is
# F0, F1 B0 W0, F2 B1 W1, B2 W2. Rank 1 can.
#
# **Exercise.** The list of one rank, with every backward divided. For m of at least p the bubble is a third of that of
# 1F1B. You may build on your own list: `from exercises.one_f_one_b import one_f_one_b` makes it available.

# %%
# %%exercise zb_h1
def zb_h1(rank: int, p: int, m: int) -> list[str]:
    """1F1B with every backward divided; no rank keeps more than p activations."""
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
# <details><summary>How many W can rank r put aside, and why?</summary>r: 1F1B keeps p-r activations there, and p are
# allowed.</details>
#
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
# ### A list of your own
#
# Can you have both, more speed and no more memory? Take p = 4 and m = 8. F and B of a whole rank take 1, W takes 1/2,
# and messages are free.
#
# | lists | steps | activations kept |
# |---|---|---|
# | ZB-H1 | 24.5 | 4 |
# | interleaved, two chunks | 23.75 | 5.5 |
# | the same, warm-up with factor 1 | 23.75 | 4 |
#
# **Exercise.** Four lists that take fewer than 23 steps, and keep at most 4 activations on every rank. A rank has two
# layers, so one chunk or two; whole backwards or halves, as you like. With two chunks, each takes half the time and
# counts half an activation. They lie round robin or on a V, as in the picture of placements: your lists run on the one
# where they are faster. Return a list of four lists of words. Write them out, compute them, or let your function search,
# within 20 seconds: it may import `simulate` and `Costs`, `placed` and `half_w` (from `course.lab03.placing`: the
# placement, and these costs), and your own exercises. Closed is `minimegatron.parallel.pipeline.schedules`, where the
# package's own lists are made. The check says which W stands in the way, where one does.

# %%
# %%exercise beat_zb_h1
def beat_zb_h1() -> list[list[str]]:
    """The lists of 4 ranks, for 8 microbatches: fewer than 23 steps, within 4 activations."""
    ### BEGIN SOLUTION
    p, m, v = 4, 8, 2
    took = {"F": 1 / v, "B": 1 / v, "W": 1 / 2 / v}
    ends, clock, lists, done = {}, [0.0] * p, [[] for _ in range(p)], {}

    def ready(rank, c, kind):
        """When the next action of this kind could begin; None if something that it needs is not planned yet."""
        i, stage = done.get((rank, c, kind), 0), c * p + rank
        kept = sum(done.get((rank, one, "F"), 0) - done.get((rank, one, "W"), 0) for one in range(v))
        if i == m or (kind == "F" and kept >= p * v):
            return None
        needs = {"F": [("F", stage - 1)] * (stage > 0), "W": [("B", stage)]}
        needs["B"] = [("F", stage), *[("B", stage + 1)] * (stage < p * v - 1)]
        if any((what, where, i) not in ends for what, where in needs[kind]):
            return None
        return max([clock[rank], *(ends[what, where, i] for what, where in needs[kind])])

    while any(len(one) < 3 * m * v for one in lists):
        every = [(rank, c, kind) for rank in range(p) for c in range(v) for kind in "FBW"]
        begins = {one: at for one in every if (at := ready(*one)) is not None}
        rank, c, kind = min(begins, key=lambda one: (begins[one], "BFW".index(one[2]), -one[1]))
        i = done.get((rank, c, kind), 0)
        done[rank, c, kind] = i + 1
        clock[rank] = ends[kind, c * p + rank, i] = begins[rank, c, kind] + took[kind]
        lists[rank].append(f"{kind}{i}.{c}")
    return lists
    ### END SOLUTION


# %%
check("beat_zb_h1")

# %%
# %%needs beat_zb_h1
from course.lab03.placing import half_w, placed

schedule = placed("Yours: p=4, m=8, W half as long as F", beat_zb_h1())
plan = simulate(schedule, half_w(schedule))
display(draw_schedule(plan.events(), live_activations(schedule), schedule.name))

# %% [markdown]
# With one chunk a rank nobody can do it. Rank 3 begins at 3. Before its last F it must have done four W, or it would
# keep more than 4. So its last B ends at 3 + 8 + 8 + 2 = 21 at the earliest; three more B and rank 0's last W end at
# 24.5. Two chunks win twice: work begins sooner on the last rank, and what waits is half as large. Then rank 3 begins
# at 1.5 and works 20 steps, so no lists take less than 21.5. ZB-V, which comes next, takes 21.5 here and keeps 4.
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
# ### Stages that are not equal
#
# So far every stage took equally long. Take Llama 3 8B: 32 layers, hidden size 4096, and a head of 128,256 words
# (Grattafiori et al., arXiv 2407.21783). Four stages of eight layers; the last has the head as well.

# %%
h, ffn, kv, vocab = 4096, 14336, 1024, 128256
in_layer = 2 * h * h + 2 * h * kv + 3 * h * ffn  # weights; two operations a token for each, forward
for s in (0, 4096, 8192):
    scores = s * h  # per token, causal: as many multiply-adds as weights count
    print(f"with attention over {s:4} tokens the head is worth {vocab * h / (in_layer + scores):.1f} layers")

# %% [markdown]
# So with 4,096 tokens the last stage takes 10.2 where the others take 8. With p = 4 and m = 64 equal stages are idle
# for 3/67 of the time, 4.5 %. And now?

# %%
guess("uneven", None, "the last of 4 stages takes 1.27 times as long, m = 64: rank 0 is idle for how many percent?")

# %% tags=["hide-output"]
from minimegatron.parallel.pipeline.schedules import build_schedule


def idle_with(layers, head=2.2, m=64):
    """Percent of the time that each rank of 1F1B is idle, and the time in layers' forwards."""
    cost = [Fraction(n) for n in layers]
    cost[-1] += Fraction(head).limit_denominator(100)
    plan = simulate(build_schedule("1f1b", len(layers), m), Costs(cost, cost, cost))
    return [round(100 * float(1 - busy / plan.makespan)) for busy in plan.busy], float(plan.makespan)


for layers in ([8, 8, 8, 8], [9, 9, 8, 6]):
    idle, steps = idle_with(layers)
    print(f"layers {layers}: idle by rank {idle} %, {steps:.0f} layers' forwards in all")
guessed("uneven", idle_with([8, 8, 8, 8])[0][0], "% on rank 0, with 8 layers in each stage")

# %% [markdown]
# Every microbatch passes the slowest stage, so all ranks take its pace. The bubble formula then says little. Cut by
# *time*, not by layers: with 9, 9, 8 and 6 layers the step is more than a tenth shorter. What is left is what whole
# layers cannot even out. Real runs do this: Llama 3 405B has one layer fewer on its first and on its last stage
# (section 3.3.2 of the paper). In Megatron-LM `num_layers_in_last_pipeline_stage` gives the last stage fewer layers,
# and `account_for_loss_in_pipeline_split` counts the head as one layer.
#
# ### A batch that does not grow
#
# "Take a larger m" has a ceiling. The optimizer wants a global batch of a fixed number of sequences, and data parallel
# copies share it: m = batch / (dp · microbatch). Take 1,024 sequences, microbatches of one, and tensor parallelism over
# 8. In the first rows the number of GPUs stays and p grows; in the last ones p stays and GPUs are added.

# %%
BATCH, TP = 1024, 8
print("  GPUs    p   dp    m   bubble of 1F1B")
for gpus, p in ((1024, 2), (1024, 4), (1024, 8), (1024, 16), (2048, 8), (4096, 8), (8192, 8)):
    dp = gpus // (TP * p)
    m = BATCH // dp
    print(f"{gpus:6} {p:4} {dp:4} {m:4}   {(p - 1) / m:.1%}")

# %% [markdown]
# With a fixed number of GPUs a longer pipeline has fewer copies and so more microbatches each: m grows with p, and the
# bubble, here (p-1)/(8p), stays below an eighth. With more GPUs at the same batch each copy gets less, and the bubble
# doubles with them. This is where v, ZB-H1 and ZB-V pay: where m is small.
#
# **Pipelines and data parallelism.** The copies sum their gradients once a step, not once a microbatch. A chunk's
# gradient is complete after its *last* B (or W), so its sum can travel while the rank still goes back through other
# chunks. Sharded optimizer states (ZeRO-1, lab 06) fit: one reduce-scatter and one gather a step. FSDP (ZeRO-3) does
# not: it frees a layer's weights after each use and gathers them before the next. A rank of a pipeline uses each layer
# in m forwards and m backwards, so it would gather up to 2m times a step, where a run without microbatches gathers
# twice. TorchTitan therefore keeps the weights after the forward when a pipeline is on (`reshard_after_forward`), and
# so does Llama 3 (section 3.3.2).
#
# **End of part B**, a good place to stop.

# %% [markdown]
# ## 4 · Run and 5 · See (part C)
#
# ### Predicted beside measured
#
# Now your lists run on four real processes, by the package's executor. `rehearse` takes the next word, waits for its
# input, does it, and sends its output. Sleep stands in for computation, 20 ms for a step, so that four ranks on a small
# machine behave like four GPUs. Each list runs five times, the lists in turn, in about 20 s.

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
# ### A stage of ordinary layers
#
# What takes the next word of a list and runs it is an *executor*. You write yours in two steps: a stage that does F and
# B by autograd, then the loop with its messages.
#
# `SplitStage` computes its own backward. Ordinary layers have autograd, and two things are special at a border:
#
# - **The input** comes out of a message: numbers without a graph. Yet the stage before wants their gradient.
# - **The output** goes into a message. After that nobody on this rank reads its numbers; the backward needs its *place
#   in the graph* only. `edge = torch.autograd.graph.get_gradient_edge(y)` is that place, and
#   `torch.autograd.backward(edge, dy)` goes back from there: to the input, and *adding* to the gradients of all
#   parameters on the way. (Megatron-LM empties y instead: `deallocate_pipeline_outputs`.)
#
# By hand: y = x · w with w = 2, x = 1 in microbatch 0 and 10 in microbatch 1, dy = 3 and 5. Then dx is 6 and 10, and
# the gradient of w ends as 1 · 3 + 10 · 5 = 53.
#
# **Exercise.** `function(i, x)` computes the output of microbatch i. On the first stage x is None, and the function has
# its own data; then `backward` returns None. On the last stage the function returns the loss, one number, and
# `backward` gets None as its dy. What `forward` returns has no graph. When the caller has let go of an output, its
# memory is free; after a microbatch's backward nothing of it is kept.

# %%
# %%exercise graph_stage
import torch


class GraphStage:
    """y = function(i, x), with autograd from the output back to the input."""

    def __init__(self, function):
        self.function = function
        self.kept = {}  # by microbatch

    def forward(self, i: int, x: torch.Tensor | None) -> torch.Tensor:
        ### BEGIN SOLUTION
        if x is not None:
            x = x.detach().requires_grad_()
        y = self.function(i, x)
        self.kept[i] = x, torch.autograd.graph.get_gradient_edge(y)
        return y.detach()
        ### END SOLUTION

    def backward(self, i: int, dy: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of x, or None where there is no x; adds to those of all parameters."""
        ### BEGIN SOLUTION
        x, edge = self.kept.pop(i)
        torch.autograd.backward(edge, dy)
        return None if x is None else x.grad
        ### END SOLUTION

    def weights(self, i: int) -> None:
        """Nothing: `backward` has done both halves."""


# %%
check("graph_stage")

# %% [markdown]
# ### The executor
#
# For each word: receive its input, if another rank makes it; call the stage; send the output, if another rank needs it.
#
# | call | what it does |
# |---|---|
# | `dist.irecv(x, source)` | posts a receive and returns a handle; after `handle.wait()` the message is in x |
# | `dist.isend(out, to)` | begins to send and returns a handle; until `handle.wait()` returns, out must not change |
#
# - **Post ahead.** A message travels while its receiver computes only if its receive is posted by then. But each
#   posted receive holds a buffer.
# - **Do not wait for a send at once.** Where two ranks send to each other at the same time, as two ranks with two chunks
#   do, each would wait for the other to receive. But do not put off all waits to the end either, or m outputs are held.
# - **Keep the order.** NCCL gives the k-th message between two ranks to the k-th receive, whatever it is for. (gloo has
#   tags; a program that needs them works on CPUs only.) So receive in the order in which the sender sends. In the lists
#   of this lab that is the order of the receiver's own list; on a V it is not, and the package asks the sender's list.
#
# By hand, with p = 2 and v = 2: rank 1 has stages 1 and 3 as its chunks 0 and 1. For F3.0 it receives from rank 0,
# where stage 0 is, and sends to rank 0, where stage 2 is. For B3.0 it is the same two ranks, the other way round. For
# F3.1 it receives and does not send: stage 3 is the last.
#
# **Exercise.** `execute` runs the list of this rank, with any number of chunks placed round robin on p > 1 ranks. Each
# stage has `forward(i, x)`, `backward(i, dy)` and `weights(i)`; where the pipeline begins, x is None, and where it
# ends, dy is None. Where the list has no W for a microbatch, call `weights` right after its B. (In `GraphStage` it does
# nothing.) Use `dist`'s sends and receives only, and wait for each. The receive of a word is posted before the stage is
# called for the word ahead of it. At most 2p sends and 2p receives are under way at a time.

# %%
# %%exercise execute
import torch
import torch.distributed as dist


def execute(words: list[str], stages: list, like: torch.Tensor) -> None:
    """Run this rank's list; stages[c] is its chunk c, every message has the shape and dtype of `like`."""
    rank, p = dist.get_rank(), dist.get_world_size()
    todo = [(word[0], *map(int, f"{word[1:]}.0".split(".")[:2])) for word in words]  # ("F", microbatch, chunk)
    ### BEGIN SOLUTION
    last = p * len(stages) - 1
    posted, sent = {}, {}

    def post(at):
        kind, _, c = todo[at]
        if kind != "W" and (kind, c * p + rank) not in (("F", 0), ("B", last)):
            x = torch.empty_like(like)
            posted[at] = x, dist.irecv(x, (rank + (-1 if kind == "F" else 1)) % p)

    post(0)
    for at, (kind, i, c) in enumerate(todo):
        if at + 1 < len(todo):
            post(at + 1)
        x, arrival = posted.pop(at, (None, None))
        if arrival is not None:
            arrival.wait()
        if kind == "W":
            stages[c].weights(i)
            continue
        out = stages[c].forward(i, x) if kind == "F" else stages[c].backward(i, x)
        if (kind, c * p + rank) not in (("F", last), ("B", 0)):
            if kind in sent:
                sent[kind][1].wait()
            sent[kind] = out, dist.isend(out, (rank + (1 if kind == "F" else -1)) % p)
        if kind == "B" and ("W", i, c) not in todo:
            stages[c].weights(i)
    for _, departure in sent.values():
        departure.wait()
    ### END SOLUTION


# %%
check("execute")

# %% [markdown]
# ### The same gradient, in every order
#
# Your executor runs all your lists with numbers: four ranks, `SplitStage`s, and the loss is the sum of all outputs. The
# folded cell compares the gradient of each stage with that of the *serial twin*, one process that runs all stages on
# the whole batch, and counts the messages.

# %% jupyter={"source_hidden": true}
# %%ranks 4 --needs gpipe,one_f_one_b,interleaved,split_stage,zb_h1,execute
import torch
from exercises.execute import execute
from exercises.gpipe import gpipe
from exercises.interleaved import interleaved
from exercises.one_f_one_b import one_f_one_b
from exercises.split_stage import SplitStage
from exercises.zb_h1 import zb_h1

from labkit.watched import group_calls

M, H = 8, 32
g = torch.Generator().manual_seed(0)
weights = [torch.randn(H, H, generator=g) / H**0.5 for _ in range(2 * world)]
batch = torch.randn(M, 4, H, generator=g)


class EndStage(SplitStage):
    """A stage of which the first takes its input from the batch, and the last has the loss: the sum of its output."""

    def forward(self, i, x):
        return super().forward(i, batch[i].clone() if x is None else x)

    def backward(self, i, dy):
        return super().backward(i, torch.ones(4, H) if dy is None else dy)


def twin_of(v):
    """Each stage's gradient in one process."""
    twin = [w.clone().requires_grad_() for w in weights[: v * world]]
    x = batch.flatten(0, 1)
    for w in twin:
        x = torch.tanh(x @ w)
    x.sum().backward()
    return [w.grad for w in twin]


found = {}
lists = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb_h1": zb_h1, "interleaved": interleaved}
for name, make in lists.items():
    v = 2 if name == "interleaved" else 1
    words = make(rank, world, M, *([v] if v > 1 else []))
    mine = [EndStage(weights[c * world + rank].clone()) for c in range(v)]
    with group_calls() as calls:
        execute(words, mine, batch[0])
    twins = twin_of(v)[rank::world]
    apart = max(((one.grad - twin).norm() / twin.norm()).item() for one, twin in zip(mine, twins))
    adds = [word for word in words if word[0] == ("W" if name == "zb_h1" else "B")]
    found[name] = mine[0].grad, [word[1:] for word in adds]
    sends = sum(call.name == "send" for call in calls)
    print(f"{name:12} sends {sends:2} messages   within 1e-5 of the serial twin: {apart < 1e-5}")
same = [torch.equal(a, b) for a, i in found.values() for b, j in found.values() if i == j]
print("lists that add up in the same order agree in every bit:", all(same))

# %% [markdown]
# Every border inside of the pipeline carries m messages each way; interleaving has 7 borders in place of 3.
#
# A floating-point sum depends on the order in which it is added up. Two lists that add up the microbatches in the same
# order do the same additions, so their gradients agree in every bit. A list in another order (GPipe's backwards may go
# from the last microbatch to the first) agrees only up to rounding, and so does the twin, which adds up the whole batch
# inside one matrix product.
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
# Now everything of yours at once: `interleaved` on *two* ranks, `execute`, `GraphStage`, and `sync_tied` for the tied
# embedding. A Llama of four layers is cut into four stages, so activations and gradients go both ways between the same
# two ranks. The layers and their loss are the package's. The folded cell trains for 40 steps, about 20 s, and compares
# the two copies. The last rank then trains the serial twin: the same model in one process, without a pipeline.

# %% jupyter={"source_hidden": true}
# %%torchrun -n 2 --needs interleaved,graph_stage,execute,sync_tied --name train --timeout 170 --out trained
import itertools

import torch
import torch.distributed as dist
from exercises.execute import execute
from exercises.graph_stage import GraphStage
from exercises.interleaved import interleaved
from exercises.sync_tied import sync_tied

from minimegatron.launch.rank import finish, init, report
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.data.corpus import documents
from minimegatron.models.chunks import build_model_chunks
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config

STEPS, SEQ, MICRO, M, V = 40, 96, 4, 4, 2
rank, world = init()
mesh = Mesh.build(ParallelConfig(pipeline_model_parallel_size=world, num_virtual_stages_per_pipeline_rank=V))
config = family_config(
    "llama", num_layers=4, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=256,
    untie_embeddings_and_output_weights=False,
)
chunks = build_model_chunks(config, mesh, seed=1).chunks
tied = chunks[0].embedding.word_embeddings.weight if rank == 0 else chunks[-1].output_layer.weight

text = "\n".join(itertools.islice((t for _, t in documents("docs")), 60)).encode()
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
places = torch.Generator().manual_seed(5)
losses = []


def part(c):
    """What chunk c of this rank computes: hidden states, and at the end of the model its share of the mean loss."""

    def function(i, x):
        out = chunks[c](rows[i][:, :-1], labels=rows[i][:, 1:], inputs=None if x is None else {"hidden": x})
        if (rank, c) != (world - 1, V - 1):
            return out["hidden"]
        out = out.sum() / (M * MICRO * SEQ)
        losses[-1] += out.item()
        return out

    return function


words, stages = interleaved(rank, world, M, V), [GraphStage(part(c)) for c in range(V)]
parameters = [p for chunk in chunks for p in chunk.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=3e-3)
for step in range(STEPS):
    at = torch.randint(len(data) - SEQ, (M, MICRO), generator=places).tolist()
    rows = [torch.stack([data[a : a + SEQ + 1] for a in one]) for one in at]
    losses.append(0.0)
    optimizer.zero_grad()
    execute(words, stages, torch.empty(SEQ, MICRO, config.hidden_size))
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
# %%needs interleaved graph_stage execute sync_tied
import matplotlib.pyplot as plt

from minimegatron.viz.picture import MEASURED_LINE, REFERENCE_LINE

losses, twins, entropy = trained.reports[1]
fig, ax = plt.subplots(figsize=(7, 2.8))
ax.plot(twins, label="serial twin, one process", **REFERENCE_LINE)
ax.plot(losses, label="your interleaved 1F1B on two ranks", **MEASURED_LINE)
ax.axhline(entropy, linestyle=":", color="black", linewidth=1, label="entropy of single bytes")
ax.set(xlabel="step", ylabel="loss per byte", title="Your lists and your executor, training")
ax.legend()
plt.show()

# %% [markdown]
# The two curves are one: the pipeline computes what the serial twin computes. The dotted line is the entropy of single
# bytes in this text, the loss of a model that knows only how frequent each byte is. Forty steps teach little more.

# %% [markdown]
# ## 6 · Break it
#
# A colleague has written an executor, too. In the steady state a rank does an F and a B in turn. "The gradient is the
# more urgent of the two," says the colleague: "the stage before waits for it. I send both after the B, the gradient
# first." With 1F1B, and with interleaved lists on four ranks, its gradients are those of the serial twin.
#
# The folded cell trains with it on *two* ranks, with your interleaved lists and `SplitStage`, and the serial twin
# beside it. Leave the cell folded for now. Each rank also logs the words whose results it sends, and those whose input
# it posts a receive for, much as PyTorch's flight recorder keeps the last calls of NCCL.

# %% jupyter={"source_hidden": true}
# %%ranks 2 --needs interleaved,split_stage --out evidence
import torch
import torch.distributed as dist
from exercises.interleaved import interleaved
from exercises.split_stage import SplitStage

M, V, B, H, STEPS = 8, 2, 16, 24, 61
g = torch.Generator().manual_seed(3)
teacher, start = ([torch.randn(H, H, generator=g) / H**0.5 for _ in range(V * world)] for _ in "ts")
log = {"sent": [], "posted": []}


def colleague(words, stages, like):
    """Runs the list; sends the two results of a pair together, the gradient first."""
    todo = [(word[0], *map(int, word[1:].split("."))) for word in words]
    posted, sent, pair = {}, [], []

    def post(at):
        kind, i, c = todo[at]
        if (kind, c * world + rank) not in (("F", 0), ("B", V * world - 1)):
            x = torch.empty_like(like)
            posted[at] = x, dist.irecv(x, (rank + (-1 if kind == "F" else 1)) % world)
            log["posted"].append(f"{kind}{i}.{c}")

    def send(kind, i, c, out):
        if (kind, c * world + rank) not in (("F", V * world - 1), ("B", 0)):
            sent.append((out, dist.isend(out, (rank + (1 if kind == "F" else -1)) % world)))
            log["sent"].append(f"{kind}{i}.{c}")

    post(0)
    for at, (kind, i, c) in enumerate(todo):
        if at + 1 < len(todo):
            post(at + 1)
        x, arrival = posted.pop(at, (None, None))
        if arrival is not None:
            arrival.wait()
        out = stages[c].forward(i, x) if kind == "F" else stages[c].backward(i, x)
        pair.insert(0, (kind, i, c, out))
        followed = at + 1 < len(todo) and todo[at + 1][0] == "B"
        if kind == "B" or not followed:
            for one in pair:
                send(*one)
            pair.clear()
        if kind == "B":
            stages[c].weights(i)
    for _, departure in sent:
        departure.wait()


class EndStage(SplitStage):
    """The first stage takes its input from the batch; the last has the loss."""

    loss = 0.0

    def forward(self, i, x):
        self.y = super().forward(i, batch[i].clone() if x is None else x)
        return self.y

    def backward(self, i, dy):
        if dy is None:  # the last stage goes back right after its forward
            self.loss += ((self.y - target[i]) ** 2).sum().item() / batch.numel()
            dy = 2 * (self.y - target[i]) / batch.numel()
        return super().backward(i, dy)


def layers(weights, x):
    for w in weights:
        x = torch.tanh(x @ w)
    return x


mine, twin = [start[c * world + rank].clone() for c in range(V)], [w.clone().requires_grad_() for w in start]
optimizer, twins_optimizer = torch.optim.Adam(mine, lr=0.01), torch.optim.Adam(twin, lr=0.01)
curves = [], []
for step in range(STEPS):
    batch = torch.randn(M, B, H, generator=g)
    target = layers(teacher, batch)
    stages = [EndStage(w) for w in mine]  # the pipeline
    colleague(interleaved(rank, world, M, V), stages, batch[0])
    for w, stage in zip(mine, stages):
        w.grad = stage.grad
    loss = ((layers(twin, batch) - target) ** 2).sum() / batch.numel()  # its serial twin
    twins_optimizer.zero_grad()
    loss.backward()
    if step == 0:
        first = {name: list(words) for name, words in log.items()}
        pairs = [(stage.grad.clone(), twin[c * world + rank].grad.clone()) for c, stage in enumerate(stages)]
    curves[0].append(stages[-1].loss)
    curves[1].append(loss.item())
    optimizer.step()
    twins_optimizer.step()
report((first, curves))
for c, (got, want) in enumerate(pairs):
    off = (got - want).norm() / want.norm()
    print(f"stage {c * world + rank}, first gradient: norm {got.norm():.2f}, serial {want.norm():.2f}, off by {off:.1f} of it")

# %%
# %%needs interleaved split_stage
import matplotlib.pyplot as plt

from minimegatron.viz.picture import MEASURED_LINE, REFERENCE_LINE

fig, ax = plt.subplots(figsize=(7, 2.4))
ax.plot(evidence[1][1][1], label="serial twin", **REFERENCE_LINE)
ax.plot(evidence[1][1][0], label="the colleague's executor", **MEASURED_LINE)
ax.set(xlabel="step", ylabel="loss", ylim=(0, None), title="Two ranks, two chunks each")
ax.legend()
plt.show()

# %% [markdown]
# No error, and the loss falls. A real run has no twin, and this curve alone would look healthy. The gradients of the
# first step show the fault. That of stage 1 is hundreds of times too large. (Adam divides every gradient by its own
# size, so even that makes steps of the usual length.) The others have about the right norm, and are wrong, too. What
# did the stages take for a gradient?
#
# `evidence[rank][0]` is the log of a rank's first step. Between two ranks the k-th message goes to the k-th receive. By
# hand, rank 1 sends the results of F0.0, B0.1, F1.0 and B0.0 to rank 0, which posts for F0.1, F1.1, B0.1 and B0.0. The
# result of F0.0, stage 1, is the input of stage 2, which is F0.1 on rank 0: right. The gradient of B0.1 on rank 1 is
# for B0.1 on rank 0, but the second receive was posted for F1.1: crossed. The third is crossed as well. The answer is
# [("F1.1", "B0.1"), ("B0.1", "F1.1")].
#
# **Exercise.** Which receives of this rank got what was for another? There are two ranks, chunks round robin; `sent`
# are the words of the *other* rank whose results were sent to this one, in order, `posted` this rank's words in the
# order of their receives.

# %%
# %%exercise crossed
def crossed(rank: int, sent: list[str], posted: list[str]) -> list[tuple[str, str]]:
    """(word that a receive was posted for, word whose input came), for each receive where they differ."""
    ### BEGIN SOLUTION
    found = []
    for word, wanted in zip(sent, posted):
        kind, i, c = word[0], *map(int, word[1:].split("."))
        stage = 2 * c + (1 - rank) + (1 if kind == "F" else -1)
        came = f"{kind}{i}.{stage // 2}"
        if came != wanted:
            found.append((wanted, came))
    return found
    ### END SOLUTION


# %%
check("crossed")

# %%
# %%needs interleaved split_stage crossed
from course.figures.pipelines import draw_messages

for rank in range(2):
    sent, posted = evidence[1 - rank][0]["sent"], evidence[rank][0]["posted"]
    wrong = [tuple(pair) for pair in crossed(rank, sent, posted)]
    kinds = sum(wanted[0] != came[0] for wanted, came in wrong)
    print(f"rank {rank}: {len(wrong)} of {len(posted)} receives got another word's message, {kinds} the other kind")
    title = f"The first messages from rank {1 - rank} to rank {rank}"
    display(draw_messages(sent, posted, [wanted for wanted, _ in wrong], 1 - rank, title))

# %% [markdown]
# Activations were taken for gradients and gradients for activations. All messages have one shape, so no call could
# object. Now unfold the cell and find the two lines of `colleague` that are to blame, before you read on.
#
# They are those that insert at the front of `pair` and send only after the B. The sender's order is no longer that of
# its list, and the receivers still post in the order of theirs. With 1F1B the two results of a pair go to *different*
# ranks, so their order does not matter; nor does it with four ranks. Only with p = 2 and chunks are both neighbours the
# same rank.
#
# There are two cures: one order for both sides, as in your executor; or a process group for each kind of message, so
# that activations and gradients cannot meet. The package takes the first. It reads the order off the *sender's* list,
# so it runs a V as well; the first page of `minimegatron/comm/p2p.py` says how.

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
# 6. *You double the GPUs and keep the batch. What happens to the pipeline?*
#    <details><summary>answer</summary>If dp doubles, m halves and the bubble doubles. If p doubles, m stays, and the bubble
#    is about twice as large as well.</details>
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
# | a stage with a graph | `parallel/pipeline/stage.py` | `forward_step`, `backward_step`, `deallocate_output_tensor` |
# | stages that are not equal | `config/stages.py` | `num_layers_in_last_pipeline_stage`, `pipeline_model_parallel_layout` |
# | sleep in place of computation | `course/rehearsal.py` | not there |
# | tied embeddings | `models/chunks.py`, `parallel/data/finalize.py` | `core/distributed/finalize_model_grads.py` |
#
# PyTorch has pipelines of its own, `torch.distributed.pipelining`: `PipelineStage`, and the schedules `ScheduleGPipe`,
# `Schedule1F1B`, `ScheduleInterleaved1F1B`, `ScheduleInterleavedZeroBubble`, `ScheduleZBVZeroBubble` and
# `ScheduleDualPipeV`. It also runs lists of actions, with words for each send and receive (`_PipelineScheduleRuntime`),
# and reads them from a CSV file.
#
# | from | what |
# |---|---|
# | Huang et al., arXiv 1811.06965 | GPipe |
# | Narayanan et al., arXiv 2104.04473 | 1F1B with a flush, interleaving |
# | Korthikanti et al., arXiv 2205.05198 | 34 bytes a token, hidden unit and layer |
# | Qi et al., arXiv 2401.10241 | B and W, ZB-H1, ZB-V |
# | DeepSeek-AI, arXiv 2412.19437 | DualPipe; DualPipeV is in its repository |
#
# Next: lab 04, context parallelism, where one sequence is cut over many ranks.

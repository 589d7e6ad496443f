# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Lab 08 · Checkpoints and Hugging Face
#
# Long runs fail and are started again, often on another number of GPUs. Other runs begin from weights that another
# team has published. In both cases a run begins from files on a disk: a *checkpoint*.
#
# **You build** a function that says which numbers of a tensor a rank holds; a reader that puts any part of a tensor
# together from the parts that were stored, and reads no other numbers; a save that leaves a whole checkpoint or none,
# wherever it is interrupted, by one process and by many; a save in the background; a state from which another process
# continues bit for bit; readers of DCP and safetensors; and a converter for models of the Qwen2 family. At the end you
# find a bug that neither a loss curve nor a gradient norm shows.
#
# **You need** lab 02 (a matrix cut by rows and columns), lab 06 (flat parts of ZeRO) and AdamW. No GPU.
#
# | part | sections | time |
# |---|---|---|
# | A | 1 The problem · 2 Predict | 45 min |
# | B | 3 Implement: regions, a save that survives | 2 h |
# | C | 3 Implement: a save by many ranks, a save in the background | 2 h |
# | D | 3 Implement: resuming a run, formats of others, a published model | 2 h |
# | E | 4 Run · 5 See | 30 min |
# | F | 6 Break it · 7 Explain | 1 h |
#
# Together 8–9 hours. Each part ends at a place to stop.
# After a kernel restart: run the first cell, then go on where you were. A picture needs the run above it.

# %%
# %load_ext course
# %lab 08_checkpoints

# %% [markdown]
# First a guess. A run uses 16,384 GPUs. A single GPU, with its share of cables and memory, fails once in 50,000
# hours: nearly six years. When one fails, the run ends. How many hours does such a run go on average before it ends?

# %%
guess("hours", None, "16,384 GPUs, each fails once in 50,000 hours. Hours between two failures of the run?")

# %% [markdown]
# ## 1 · The problem
#
# Four ranks train a matrix of 9 rows and 6 columns. Tensor parallelism cuts it by columns into two halves. ZeRO
# shares each half out to two ranks, which keep 13 and 14 of its 27 numbers. Then a GPU fails. The run continues on
# three GPUs, with the matrix cut by rows into three parts. What must rank 1 of 3 read? In the picture a small square
# is one number, and the digits are ranks.

# %%
from course.figures.checkpoints import region_map

four = [
    [[[0, 4], [0, 3]], [[4, 5], [0, 1]]],  # rank 0: rows 0 to 4, and one number of row 4
    [[[4, 5], [1, 3]], [[5, 9], [0, 3]]],
    [[[0, 4], [3, 6]], [[4, 5], [3, 4]]],
    [[[4, 5], [4, 6]], [[5, 9], [3, 6]]],
]
three = [[[[3 * r, 3 * r + 3], [0, 6]]] for r in range(3)]
region_map((9, 6), {"written by 4 ranks": four, "read by 3 ranks": three}, ("what rank 1 of 3 reads", three[1]))

# %% [markdown]
# Rank 1 of 3 needs numbers that all four ranks have written. A checkpoint that says "this is the memory of rank 0 of
# 4" does not help it. A checkpoint that says "these are rows 0 to 4 of columns 0 to 3" does. ("0 to 4" are rows 0, 1,
# 2 and 3, as in Python: the last number is not included.) A range of rows and a range of columns are a *box*; a box
# with its numbers is a *region*.
#
# This matrix has 54 numbers. The checkpoint of Llama 3 405B, with weights in bf16, a copy in fp32, and AdamW's two
# averages, has 5.7 TB. The run may fail while they are written, too.
#
# ## 2 · Predict
#
# A checkpoint holds for each parameter: the bf16 weight, 2 bytes; its fp32 copy, 4 bytes; AdamW's two averages, 8
# bytes together. It holds no gradients: each step computes its own. Each number is written once, by one of the ranks
# that have it. All ranks write at the same time, each the same share.
#
# How often should a run save? The run stands still during a save. A failure undoes what was computed since the last
# save: on average half an interval. An interval goes from the beginning of a save to the beginning of the next one. (A
# failure costs a restart, too: to notice it, find other machines, load, warm up. No interval changes that, so it is not
# in `lost`.)
#
# An example: 2·10⁹ parameters are 28 GB. 7 ranks that write 1 GB a second each need 4 seconds. A GPU fails once in 14
# hours, 7 of them once in 2 hours, 7200 seconds. A run that saves every 240 seconds loses 4/240 + 240/14400 = 1/60 +
# 1/60 of the time, for saves and for failures. This is the best interval. Before you look for a formula of it: how do
# the two sixtieths change, if the interval is twice as long?
#
# **Exercise.** Return a dict, all its times in seconds: `bytes`, the size of the whole checkpoint; `seconds`, the
# time of one save; `between_failures`, the time between two failures of the run; `lost`, the share of time that is
# lost with a save every `every` seconds, for saves and for failures together; and `best`, the interval at which this
# share is smallest. In the example: 28·10⁹, 4, 7200, 1/30 and 240.

# %%
# %%exercise costs
import math


def costs(parameters: int, ranks: int, gigabytes: float, gpu_hours: float, every: float) -> dict[str, float]:
    """`gigabytes`: 10^9 bytes that a rank writes in a second; `gpu_hours`: between two failures of one GPU."""
    ### BEGIN SOLUTION
    nbytes = 14 * parameters
    seconds = nbytes / (ranks * gigabytes * 1e9)
    failures = gpu_hours * 3600 / ranks
    return {
        "bytes": nbytes,
        "seconds": seconds,
        "between_failures": failures,
        "lost": seconds / every + every / (2 * failures),
        "best": math.sqrt(2 * seconds * failures),
    }
    ### END SOLUTION


# %%
check("costs")

# %% [markdown]
# Llama 3 405B on 16,384 GPUs has a file system that takes 2 TB a second from all of them together. First a guess:
# somebody saves half as often as would be best. How many times as much time is lost?

# %%
guess("times", None, "Twice the best interval: how many times as much is lost as with the best one?")

# %%
# %%needs costs
run = costs(405_000_000_000, 16_384, 2000 / 16_384, 50_000, 600)
guessed("hours", run["between_failures"] / 3600, "hours between two failures")
print(f"{run['bytes'] / 1e12:.2f} TB, a save takes {run['seconds']:.1f} s;",
      f"the best interval is {run['best'] / 60:.1f} min")  # fmt: skip
print(f"restarts of 10 min each, whatever the interval: {600 / run['between_failures']:.1%} more")
for every in (60, 240, 600, 3600):
    lost = costs(405_000_000_000, 16_384, 2000 / 16_384, 50_000, every)["lost"]
    print(f"a save every {every / 60:4.0f} min: {lost:5.1%} of the time is lost")

# %%
# %%needs costs
from course.figures.checkpoints import interval_curve

twice = costs(405_000_000_000, 16_384, 2000 / 16_384, 50_000, 2 * run["best"])["lost"]
least = costs(405_000_000_000, 16_384, 2000 / 16_384, 50_000, run["best"])["lost"]
guessed("times", twice / least, "times the least loss, with twice the best interval")
interval_curve(run["seconds"], run["between_failures"], [10 * 1.2**n for n in range(36)], run["best"])

# %% [markdown]
# With S seconds a save, F seconds between failures and an interval of T seconds the curve is S/T + T/2F. It is smallest
# where the two lines cross: there saves and failures cost the same. With twice the interval one of the two doubles and
# the other halves. So the minimum is flat: it is enough to know the interval roughly.

# %% [markdown]
# (The report on Llama 3 counts 419 unexpected interruptions in 54 days on 16,384 GPUs: one in 3.1 hours.) A run that
# fails eight times a day will some day fail in the middle of a save. Section 3 has an exercise for this case.
#
# *This is a good place to stop: the end of part A.*
#
# ## 3 · Implement
#
# ### Which boxes a rank holds
#
# Tensor parallelism cuts a matrix into `parts` equal parts: by rows if `dim` is 0, by columns if it is 1. Count the
# numbers of one part row by row: 0, 1, 2, ... ZeRO gives a rank those from `start` to `stop`. They may begin in the
# middle of a row and end in the middle of another. So they are up to three boxes: the end of a row, whole rows, the
# start of a row. An example: a matrix of 4 rows and 6 columns is cut by columns into two parts of 4 rows and 3
# columns. Of part 1, which has columns 3 to 6, a rank holds the numbers 2 to 10:
#
#      column  3 4 5
#     row 0    . . x       [[0, 1], [5, 6]]     the end of row 0
#     row 1    x x x       [[1, 3], [3, 6]]     rows 1 to 3
#     row 2    x x x
#     row 3    x . .       [[3, 4], [3, 4]]     the start of row 3
#
# **Exercise.** Return the rank's boxes, each `[[first row, last row], [first column, last column]]`, as rows and
# columns *of the whole matrix*, in the order of the numbers. Rows of the part that the rank holds whole, and that
# follow each other, are one box; a row that it does not hold whole is a box of its own. If `start` is `stop` there is
# no box.

# %%
# %%exercise boxes_of
def boxes_of(
    rows: int, columns: int, dim: int, parts: int, part: int, start: int, stop: int
) -> list[list[list[int]]]:
    """[[[0, 1], [5, 6]], [[1, 3], [3, 6]], [[3, 4], [3, 4]]] in the example; the last number is not included."""
    ### BEGIN SOLUTION
    size = [rows, columns]
    size[dim] //= parts
    offset = [0, 0]
    offset[dim] = part * size[dim]
    width, found = size[1], []
    while start < stop:
        row, column = divmod(start, width)
        many = (stop - start) // width if column == 0 else 0
        if many:
            box, start = [[row, row + many], [0, width]], start + many * width
        else:
            end = min(width, column + stop - start)
            box, start = [[row, row + 1], [column, end]], start + end - column
        found.append([[a + o, b + o] for (a, b), o in zip(box, offset)])
    return found
    ### END SOLUTION


# %%
check("boxes_of")

# %% [markdown]
# ### A box from regions
#
# Each rank has written its regions into a file of its own, one region after the other, the numbers of a region row by
# row. A table in the checkpoint, its *manifest*, has an entry `(file, at, box)` for each region: the region's first
# number is number `at` of the file. Before it in the file lie other regions, or other tensors.
#
# A rank that reads wants one box. It could read all files whole, but a checkpoint of 5.7 TB read by 16,384 ranks is
# 93,000 TB. An example: the entry `("shard-0", 4, [[2, 5], [1, 4]])`. These are the numbers of the file in which the
# region's three rows and three columns stand:
#
#     column     1  2  3
#     row 2      4  5  6
#     row 3      7  8  9
#     row 4     10 11 12
#
# A rank wants the box `[[3, 9], [2, 6]]`. From this region it needs numbers 8 and 9, and then 11 and 12: two reads.
# Number 10 stands between them, in a column that it does not want.
#
# Files are read through a `memory` that counts. `memory.load(file, first, last)` reads numbers first to last - 1:

# %%
import torch

from labkit.hbm import Memory

left, right = torch.tensor([0.0, 1.0, 4.0, 5.0]), torch.tensor([2.0, 3.0, 6.0, 7.0])
files = Memory(shard_0=left, shard_1=right)  # of the matrix [[0, 1, 2, 3], [4, 5, 6, 7]], columns 0 to 2 and 2 to 4
print(files.load("shard_0", 1, 2).tolist(), files.load("shard_1", 0, 1).tolist(), " first row of columns 1 to 3")
print("numbers read:", files.loaded)

# %% [markdown]
# **Exercise.** Return the numbers of `box`, a float32 tensor of its rows and columns. Regions do not overlap, and
# stand in any order. Read only the numbers of the box, each once, and read side by side numbers together: at most one
# read for each row of a region. If a number of the box is in no region, the file that had it was never written: raise
# a `ValueError`. (A run that has zeros in their place trains on, without an error.) A stored number may be NaN.

# %%
# %%exercise load_box
import torch


def load_box(memory, regions: list, box: list[list[int]]) -> torch.Tensor:
    """regions: [("shard_0", 0, [[0, 2], [0, 2]]), ("shard_1", 0, [[0, 2], [2, 4]])] in the example; float32."""
    ### BEGIN SOLUTION
    (top, bottom), (left, right) = box
    found, filled = torch.empty(bottom - top, right - left), 0
    for file, at, ((r0, r1), (c0, c1)) in regions:
        first, last = max(left, c0), min(right, c1)
        if first >= last:
            continue
        for row in range(max(top, r0), min(bottom, r1)):
            start = at + (row - r0) * (c1 - c0) + first - c0
            found[row - top, first - left : last - left] = memory.load(file, start, start + last - first)
            filled += last - first
    if filled < found.numel():
        raise ValueError(f"{found.numel() - filled} numbers of {box} are in no region")
    return found
    ### END SOLUTION


# %%
check("load_box")

# %% [markdown]
# ### A save that leaves a whole checkpoint, or none
#
# A save that writes `step-20/shard-0`, then `step-20/shard-1`, then `step-20/manifest` can die between any two of
# them. Then there is a folder that looks like the newest checkpoint and holds half of one. A second danger: what a
# program has "written" is at first only in the memory of the operating system. If the *program* is killed, the system
# still brings these bytes to the disk. If the *machine* loses power, they are lost:
#
# | operation | what running programs see | what surely survives a power cut |
# |---|---|---|
# | `disk.write(path, data)` | a file with these bytes | nothing yet: the file may be empty, or half |
# | `disk.mkdir(path)`, `disk.rename(old, new)`, `disk.remove(path)` | the new names, at once | nothing yet: the old names may be back |
# | `disk.fsync(file)` | | the bytes of this file. *Not its name* |
# | `disk.fsync(folder)` | | the names in this folder. *Not the bytes of its files* |
#
# `disk` is simulated, and knows what a real disk may lose. The root folder is `""`; there are no folders in folders.
# `remove` removes a file or an empty folder, `disk.names(folder)` lists, `disk.read(path)` reads. A name that `mkdir` or
# `rename` finds taken is a `FileExistsError`, a name that is not there a `FileNotFoundError`, a folder that `remove`
# finds not empty an `OSError`. A real rename within one folder happens at once: no reader ever sees half of it.
#
# The folded cell takes a save, lets the machine stop after each of its changes, and notes what a reader can find: the
# `old` checkpoint as the newest, the `new` one, or something `broken`. Look at the simplest save.

# %% jupyter={"source_hidden": true}
from course.lab08.disk import Disk, fates, replay
from course.figures.checkpoints import crash_map

BEFORE = {"step-10/shard-0": b"old numbers", "step-10/manifest": b"step 10"}
FILES = {"shard-0": b"new numbers", "shard-1": b"more of them", "manifest": b"step 20"}
SAVES = {"step-10": {"shard-0": b"old numbers", "manifest": b"step 10"}, "step-20": FILES}


def crashes(save):
    """(change, what the death of the program leaves, what a power cut can leave) after each change of a save."""
    disk = Disk(BEFORE)
    save(disk, 20, FILES)
    steps = []
    for (what, path, *more), now in replay(BEFORE, disk.log):
        label = f"{what} {path or 'the root'}" + (f" to {more[0]}" if what == "rename" else "")
        found = (fates(now, SAVES, "step-20", power) for power in (False, True))
        steps.append((label, *found))
    return steps


def told(name, steps):
    """How often something broken can be found, of how many changes."""
    for who, at in (("the program dies", 1), ("the power fails", 2)):
        broken = sum("broken" in step[at] for step in steps)
        print(f"{name}: {who}: something broken after {broken} of {len(steps)} changes")
    print(f"{name}: it has returned, and the power fails: a reader can find {' or '.join(sorted(steps[-1][2]))}")


# %%
def in_place(disk, step, files):
    """The simplest save."""
    disk.mkdir(f"step-{step}")
    for name, data in files.items():
        disk.write(f"step-{step}/{name}", data)


told("in place", crashes(in_place))
crash_map({"in place": crashes(in_place)})

# %% [markdown]
# Even when this save has returned, a power cut can leave the old checkpoint, the new one or half of the new one.
#
# A reader follows two rules. First: it takes the folder `step-N` with the largest N, and stops with an error if the
# folder does not hold exactly the files that were saved. (It does not take an older checkpoint instead: hours of
# training would be lost without a message.) Second: it ignores names that begin with a dot.
#
# **Exercise.** Write a new checkpoint.
#
# 1. The program may die, or the power fail, at any moment. Look at the names in the root that do not begin with a dot:
#    each is a folder `step-N`, and it has exactly the files of one save.
# 2. As soon as the function has returned, the new checkpoint survives a power cut.
# 3. Older checkpoints stay.
# 4. When the function has returned, no name begins with a dot: it removes what an earlier save left when it died, of
#    whatever step.
#
# One process saves at a time, and `step` is larger than every `step-N` in the root. The check kills your function at
# each of its changes (fsync is one). Then another program saves: the next step; or the *same* step once more. That is
# the usual case: a run that has died while it saved step 20 goes on from step 10, perhaps on fewer ranks, and reaches
# step 20 again. After each change the check looks at everything that a power cut could leave.

# %%
# %%exercise save_checkpoint
def save_checkpoint(disk, step: int, files: dict[str, bytes]) -> None:
    """{"shard-0": b"...", "manifest": b"..."} becomes the folder f"step-{step}"."""
    ### BEGIN SOLUTION
    for left in disk.names():
        if left.startswith("."):
            for name in disk.names(left):
                disk.remove(f"{left}/{name}")
            disk.remove(left)
    staged = f".step-{step}"
    disk.mkdir(staged)
    for name, data in files.items():
        disk.write(f"{staged}/{name}", data)
        disk.fsync(f"{staged}/{name}")
    disk.fsync(staged)
    disk.rename(staged, f"step-{step}")
    disk.fsync("")
    ### END SOLUTION


# %%
check("save_checkpoint")

# %%
# %%needs save_checkpoint
told("yours", crashes(save_checkpoint))
crash_map({"yours": crashes(save_checkpoint)})

# %% [markdown]
# *This is a good place to stop: the end of part B.*
#
# ### One checkpoint by many ranks
#
# That save has all files in one process. No rank of a large run can hold 5.7 TB. So each rank writes its own shard into
# *one* staging folder, and one rename publishes them together. Now a rank may die, or come late, while others wait for
# it, and a collective would hang with it. So the ranks leave words for each other in a *store*, as torch's `TCPStore`:
#
# | call | |
# |---|---|
# | `store.set(key, text)` | at most 200 characters; all ranks see it at once |
# | `store.wait(keys, seconds)` | until all of these keys are there; a `TimeoutError` after so many seconds |
# | `store.get(key)`, `store.check(keys)` | the text of a key that is there; whether all of these keys are there now |
#
# An example: ranks 0, 1 and 2 save step 20, and rank 1 is killed while it writes.
#
#     rank 0   shard-0 | ?
#     rank 1   half of sha
#     rank 2   shard-2 | ?
#
# Who renames, and what must it have heard before? What must the others have heard before they return? How long do they
# wait, and for whom, if the one that renames is dead?
#
# **Exercise.** Every rank calls the function.
#
# 1. `step-N` has a file `shard-r` of each rank `r`, written by rank r itself, and a `manifest`: JSON, for each shard its
#    name and the SHA-256 of its bytes (the `hexdigest`), `{"shard-0": "9f86d0...", ...}`.
# 2. As before: names without a dot are whole checkpoints at every moment, older ones stay, and when all ranks have
#    returned no name begins with a dot.
# 3. As soon as the function has returned *on any rank*, the new checkpoint survives a power cut.
# 4. A rank that begins half of `seconds` after the others is waited for; once all are there, nobody waits for a
#    deadline. If a rank has died, or begins five times `seconds` late, its absence ends the save: every other rank
#    raises a `TimeoutError`, and all of them say the same, `missing: [1]`, in its text. A machine that fails takes all
#    of its ranks along, perhaps the one that you wait for, too: then two are missing, `missing: [0, 2]`. A late rank
#    ends in some error, too. Nobody stays longer than ten times `seconds`.
# 5. The store is empty when a run begins, and keeps all keys until the run ends: its next save finds them. `run` is a
#    text of its own for each run. A rank of a run that has failed may still live, on a machine that was cut off, and go on
#    with its save while a new run saves the same step. None of its bytes may come into the new checkpoint.
#
# The check lets simulated ranks run in several orders, on the disk that forgets, and kills each of them at each of its
# changes. Then a new run saves.

# %%
# %%exercise save_shard
import hashlib
import json


def save_shard(disk, store, rank: int, ranks: int, run: str, step: int, data: bytes, seconds: float) -> None:
    """This rank's part of the save of a step by `ranks` ranks of a run; `data` becomes the file f"shard-{rank}"."""
    ### BEGIN SOLUTION
    staged, ready, end = f".step-{step}.{run}", f"{step}/ready", f"{step}/end"
    here = [f"{step}/here/{r}" for r in range(ranks)]
    done = [f"{step}/{r}" for r in range(ranks)]

    def hear(key, words):
        """A word of rank 0. Without it, rank 0 is missing, and who has not said its own of these words."""
        try:
            store.wait([key], 3 * seconds)
        except TimeoutError:
            absent = [r for r in range(ranks) if r == 0 or not store.check([words[r]])]
            raise TimeoutError(f"step {step} is not saved; missing: {absent}") from None
        return store.get(key)

    store.set(here[rank], "")
    if rank == 0:
        for left in disk.names():
            if left.startswith("."):
                for name in disk.names(left):
                    disk.remove(f"{left}/{name}")
                disk.remove(left)
        disk.mkdir(staged)
        store.set(ready, "")
    else:
        hear(ready, here)
    disk.write(f"{staged}/shard-{rank}", data)
    disk.fsync(f"{staged}/shard-{rank}")
    store.set(done[rank], hashlib.sha256(data).hexdigest())
    if rank == 0:
        try:
            store.wait(done, seconds)
        except TimeoutError:
            pass
        missing = [r for r in range(ranks) if not store.check([done[r]])]
        if not missing:
            manifest = json.dumps({f"shard-{r}": store.get(done[r]) for r in range(ranks)})
            disk.write(f"{staged}/manifest", manifest.encode())
            disk.fsync(f"{staged}/manifest")
            disk.fsync(staged)
            disk.rename(staged, f"step-{step}")
            disk.fsync("")
        store.set(end, json.dumps(missing))
    else:
        missing = json.loads(hear(end, done))
    if missing:
        raise TimeoutError(f"step {step} is not saved; missing: {missing}")
    ### END SOLUTION


# %%
check("save_shard")

# %% [markdown]
# Your save by three ranks: every box is a change of the disk, in the order in which all of them happened. Below rank 1
# dies in the middle of its write. Read from the picture what each rank waits for.

# %%
# %%needs save_shard
from course.figures.checkpoints import turns
from course.lab08.disk import Disk
from course.lab08.together import Ranks


def by_three(**of_rank_1):
    """The events of a save by three ranks."""
    ranks = Ranks(Disk({"step-10/shard-0": b"older"}), order=3)
    for r in range(3):
        one = of_rank_1 if r == 1 else {}
        ranks.start(lambda disk, store, r: save_shard(disk, store, r, 3, "run-7", 20, b"numbers", 60.0), r, **one)
    ranks.run()
    return ranks.events


turns({"all three come": by_three(), "rank 1 dies while it writes": by_three(kill_at=1)})

# %% [markdown]
# ### A save in the background
#
# While a rank writes, its GPU has nothing to do. But the run need not wait for the disk: it waits until its state is
# *copied* into memory that no step changes (on a GPU: pinned memory of the host), and a thread writes from there.
#
#     run          step 9 | copy | step 10 | step 11 | step 12 | step 13 | wait, copy | step 14
#     background                 [ writes step 9's state ...............]            [ writes ...
#     copies held         ---------------------------------------------------------------------- one
#
# A rank of section 2 writes 4 GB in 4 seconds; its GPU copies them to the host in 4/25 of a second. So S is 25 times
# smaller. First a guess: at the best interval of each, how many times smaller is the share of time that is lost?

# %%
guess("async", None, "S is 25 times smaller. How many times less is lost, each at its best interval?")

# %% [markdown]
# **Exercise.** `AsyncSaver(write)` gets a function `write(step, state)`, which returns when the state is safe on the
# disk, or raises. `state` is what `state_dict()` of a model gives: names, and tensors that are the model's own memory.
# Each step changes the weights *in place*; names, shapes and places in memory are the same at every save.
#
# 1. `save(step, state)` returns while `write` still runs in a thread. What `write` gets is the state at the moment of
#    the call.
# 2. There is one copy of the state, whatever happens, and it has as many bytes as the model's memory has: each of the 8
#    GPUs of a node has one in the host's. So one save is under way at a time, and the next one waits until it has
#    ended. (A disk that is too slow must slow the run down. It must not fill the memory, and no save is left out.)
# 3. If a `write` raises an error, the run learns it: the next call of `check()`, `save` or `close` raises it, once. (A
#    thread that dies says nothing.) The run calls `check()` at every step: it does not wait. A `save` that raises does
#    not save, and the save after it works again.
# 4. `close()` waits until the last save has ended: a program ends after it.

# %%
# %%exercise async_saver
import threading

import torch


class AsyncSaver:
    """Saves in the background; `write(step, state)` returns when the state is safe on the disk, and may raise."""

    def __init__(self, write) -> None:
        ### BEGIN SOLUTION
        self.write, self.staged, self.places = write, {}, {}
        self.thread, self.error = None, None
        ### END SOLUTION

    def save(self, step: int, state: dict[str, torch.Tensor]) -> None:
        """Take a snapshot, and return while it is written."""
        ### BEGIN SOLUTION
        self.close()
        for name, tensor in state.items():
            if name not in self.staged:
                place = tensor.data_ptr()  # a tied output layer is the embedding's memory, under a second name
                if place not in self.places:
                    self.places[place] = torch.empty_like(tensor)
                self.staged[name] = self.places[place]
            self.staged[name].copy_(tensor)
        self.thread = threading.Thread(target=self._run, args=(step,))
        self.thread.start()
        ### END SOLUTION

    def check(self) -> None:
        """Raise the error of a save that has failed; does not wait."""
        ### BEGIN SOLUTION
        error, self.error = self.error, None
        if error is not None:
            raise error
        ### END SOLUTION

    def close(self) -> None:
        """Wait until the last save is on the disk."""
        ### BEGIN SOLUTION
        if self.thread is not None:
            self.thread.join()  # no deadline: `write` has its own
        self.check()

    def _run(self, step):
        try:
            self.write(step, self.staged)
        except Exception as error:
            self.error = error
        ### END SOLUTION


# %%
check("async_saver")

# %% [markdown]
# The folded cell runs twelve steps of 20 ms with 32 MB of weights, and saves after every third one. A `write` takes
# 50 ms, and 120 ms in the last run (it sleeps, in place of a disk). The picture has three ways to save: the run writes;
# your saver; your saver with a disk that is too slow. (The first copy may take longer: it allocates its memory.)

# %% jupyter={"source_hidden": true}
# %%needs async_saver
import threading
import time

import torch

from labkit.evidence import Witness


def saved(seconds, saver_of):
    """Spans of the run, spans of the background, and (time, copies of the state)."""
    state, run, behind, copies = {"weights": torch.ones(1 << 23)}, [], [], []
    size, here, begin = state["weights"].nbytes, threading.current_thread(), time.perf_counter()

    def now():
        return time.perf_counter() - begin

    def write(step, _):
        start = now()
        time.sleep(seconds)
        (run if threading.current_thread() is here else behind).append(("write", start, now()))

    def until_free(call, *args):
        """A call that may wait for a write; what it does afterwards is a copy."""
        start = now()
        call(*args)
        free = max([start, *(end for _, _, end in behind)])
        return [] if isinstance(saver, TheRunWrites) else [("wait", start, free), ("copy", free, now())]

    with Witness() as seen:
        state["weights"].mul_(1)  # the first operation takes longer
        saver, begin = saver_of(write), time.perf_counter()
        for step in range(1, 13):
            start = now()
            time.sleep(0.02)
            state["weights"].mul_(0.5)  # in place, as an optimizer does
            saver.check()
            run.append(("step", start, now()))
            if step % 3 == 0:
                run += until_free(saver.save, step, state)
                copies.append((now(), seen.peak / size))
        run += until_free(saver.close)[:1]
    return run, behind, copies


class TheRunWrites:
    """No thread, no copy."""

    def __init__(self, write):
        self.save = write

    def check(self):
        """Nothing can be left."""

    close = check


in_the_run, yours, slow = saved(0.05, TheRunWrites), saved(0.05, AsyncSaver), saved(0.12, AsyncSaver)
print("copies of the state:", [max(round(much) for _, much in one[2]) for one in (in_the_run, yours, slow)])

# %%
# %%needs async_saver
from course.figures.checkpoints import over_time

over_time({"the run writes": in_the_run, "yours": yours, "yours, and the disk is too slow": slow})

# %%
def least_lost(save_seconds, between_failures=7200):
    """The share of time that is lost at the best interval."""
    return (2 * save_seconds / between_failures) ** 0.5


guessed("async", least_lost(4) / least_lost(4 / 25), "times less, with a save every 48 seconds in place of 240")

# %% [markdown]
# The loss at the best interval grows with the *root* of S. And the write goes on for 4 seconds, so the interval cannot be
# shorter than that: then saves wait for each other, as in the last picture.
#
# *This is a good place to stop: the end of part C.*
#
# ### Resuming a run
#
# A run is more than its weights. The next cell shows a small one. While you read: what does a training step read, and
# what does it change?

# %%
import inspect

from course.lab08 import small_run

print(inspect.getsource(small_run).partition("from torch import nn\n")[2].strip())

# %%
from course.lab08.small_run import Run

straight = Run(seed=1)
straight.train(4)
print("after 4 steps: rows taken of the second epoch:", straight.data.position, "of", len(straight.data.order))

again = Run(seed=2)
again.model.load_state_dict(straight.model.state_dict())
losses, of_weights_alone = straight.train(6), again.train(6)
print("with the weights alone the next losses are the same:", losses == of_weights_alone)

# %% [markdown]
# The resumed run must give the same losses *bit for bit*. If small differences were accepted, a bug that makes a
# small difference would be accepted, too.
#
# **Exercise.** `save_state(run)` returns all that another process needs, as plain data: numbers, texts, lists, dicts,
# tensors. `load_state(run, state)` puts it into a run in another process, which was built with the same sizes and
# another seed and has trained one step already. Then both runs must give the same losses and weights, to the last
# bit. The first run trains on before the state is loaded, and neither this nor the save may change anything: not the
# state, not the run. (Models, optimizers and schedulers of torch have `state_dict` and `load_state_dict`.)

# %%
# %%exercise resume
import copy

import torch


def save_state(run) -> dict:
    """Everything that the next steps depend on, as it is now."""
    ### BEGIN SOLUTION
    return copy.deepcopy({
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scheduler": run.scheduler.state_dict(),
        "order": run.data.order,
        "position": run.data.position,
        "generator": run.data.generator.get_state(),
        "dropout": torch.get_rng_state(),
    })
    ### END SOLUTION


def load_state(run, state: dict) -> None:
    """The run goes on from there."""
    ### BEGIN SOLUTION
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.scheduler.load_state_dict(state["scheduler"])
    run.data.order = state["order"]
    run.data.position = state["position"]
    run.data.generator.set_state(state["generator"])
    torch.set_rng_state(state["dropout"])
    ### END SOLUTION


# %%
check("resume")

# %% [markdown]
# ### Two formats that you will meet
#
# **DCP** is `torch.distributed.checkpoint`. It saves `DTensor`s: tensors that know which part of them a rank has. So a
# load needs no word about the ranks that wrote. The cell saves the matrix of section 1 from two ranks, which have its
# rows, and loads it into two ranks, which have its columns.

# %%
# %%ranks 2 --name dcp
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

ROOT = Path(__file__).parent / "dcp"
if rank == 0:
    shutil.rmtree(ROOT, ignore_errors=True)
dist.barrier()
mesh = init_device_mesh("cpu", (2,))
rows = distribute_tensor(torch.arange(54.0).view(9, 6), mesh, [Shard(0)])
dcp.save({"w": rows, "norm": torch.ones(3), "step": 20}, checkpoint_id=ROOT)
columns = distribute_tensor(torch.zeros(9, 6), mesh, [Shard(1)])
dcp.load({"w": columns}, checkpoint_id=ROOT)
print("my columns are right:", torch.equal(columns.to_local(), torch.arange(54.0).view(9, 6).chunk(2, 1)[rank]))
if rank == 0:
    print(sorted(path.name for path in ROOT.iterdir()))

# %% [markdown]
# `.metadata` is the manifest. Its two tables:

# %%
from torch.distributed.checkpoint import FileSystemReader

metadata = FileSystemReader(".work/08_checkpoints/dcp").read_metadata()
for name, tensor in metadata.state_dict_metadata.items():
    print(name, type(tensor).__name__)
    for chunk in getattr(tensor, "chunks", []):
        print("    chunk: offsets", [*chunk.offsets], " sizes", [*chunk.sizes])
for index, place in metadata.storage_data.items():
    print(f"{index.fqn} at {index.offset and [*index.offset]}: {place.relative_path}, from byte {place.offset}")

# %% [markdown]
# (`step` is no tensor: it is pickled. `norm`, which both ranks have, is written once.)
#
# **Exercise.** Return the regions of one tensor as your own readers know them: for each chunk `(file, first byte, last
# byte, box)`, in any order; the last byte is not included, and a box has a range `[first, last]` for each dim. A place has
# a `length`, too. If `name` is not there or is no tensor, raise a `ValueError` with the name. Do not rely on both tables
# having one order.

# %%
# %%exercise regions_of
def regions_of(metadata, name: str) -> list:
    """[("__0_0.distcp", 0, 1641, [[0, 5], [0, 6]]), ...]: file, first byte, last byte, box; the last not included."""
    ### BEGIN SOLUTION
    tensor = metadata.state_dict_metadata.get(name)
    if not hasattr(tensor, "chunks"):
        raise ValueError(f"{name} is no tensor of this checkpoint")
    places = {index.offset: place for index, place in metadata.storage_data.items() if index.fqn == name}
    found = []
    for chunk in tensor.chunks:
        place = places[chunk.offsets]
        box = [[start, start + size] for start, size in zip(chunk.offsets, chunk.sizes)]
        found.append((place.relative_path, place.offset, place.offset + place.length, box))
    return found
    ### END SOLUTION


# %%
check("regions_of")

# %% [markdown]
# Rank 1 of the cell above needs 27 of the 54 numbers: three columns. Your `load_box` reads 27. First a guess:

# %%
guess("dcp", None, "How many numbers does `dcp.load` read from the files for rank 1?")

# %%
# %%needs regions_of
import io

import torch

read = 0
for file, first, last, box in regions_of(metadata, "w"):
    with open(f".work/08_checkpoints/dcp/{file}", "rb") as stream:
        stream.seek(first)
        chunk = torch.load(io.BytesIO(stream.read(last - first)), weights_only=True)
    (top, bottom), (left, right) = box
    print(box, "is its part of the matrix:", torch.equal(chunk, torch.arange(54.0).view(9, 6)[top:bottom, left:right]))
    read += chunk.numel() if right > 3 else 0
guessed("dcp", read, "numbers: every chunk that has one of them, whole")

# %% [markdown]
# Each chunk is a file of `torch.save` inside the file. DCP loads the whole chunk and cuts it. Chunks are as large as the
# parts of the ranks that wrote: where twice as many ranks load, each needs half of a chunk, and reads all of it.
#
# **safetensors** is the format of published models. A file begins with 8 bytes, the number N of bytes of its header,
# little-endian. N bytes of JSON follow, with an entry `{"dtype": "BF16", "shape": [4, 6], "data_offsets": [96, 144]}` for
# each tensor, then all numbers, row by row; offsets count from the end of the header. A large model has several such
# files, and a `model.safetensors.index.json`:

# %%
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

folder = Path(".work/08_checkpoints/published")
folder.mkdir(exist_ok=True)
save_file({"up": torch.arange(6.0).view(3, 2), "norm": torch.ones(2, dtype=torch.bfloat16)}, folder / "model-1.safetensors")
save_file({"down": torch.arange(6.0).view(2, 3)}, folder / "model-2.safetensors")
index = {"weight_map": {"up": "model-1.safetensors", "norm": "model-1.safetensors", "down": "model-2.safetensors"}}
(folder / "model.safetensors.index.json").write_text(json.dumps(index))
print((folder / "model-1.safetensors").read_bytes()[:160])

# %% [markdown]
# **Exercise.** Return rows `first` to `last` of a tensor: `last` is not included and larger than `first`. `read(file)`
# gives a file's bytes, `read(file, start, stop)` bytes start to stop - 1. Read the index, and of the tensor's own file
# the length, the header and the rows asked for: no other byte, and none twice. A header may have an entry `__metadata__`,
# which is no tensor; a tensor has one dim or more, and is float32, bfloat16 or float16 (`F32`, `BF16`, `F16`). If the
# index does not have the name, raise a `ValueError` with the name.

# %%
# %%exercise load_rows
import json
import math

import torch

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def load_rows(read, name: str, first: int, last: int) -> torch.Tensor:
    """Rows `first` to `last` (not included); `read(file, start, stop)` gives bytes, `read(file)` all of them."""
    ### BEGIN SOLUTION
    where = json.loads(read("model.safetensors.index.json"))["weight_map"]
    if name not in where:
        raise ValueError(f"no file has {name}")
    file = where[name]
    length = int.from_bytes(read(file, 0, 8), "little")
    entry = json.loads(read(file, 8, 8 + length))[name]
    dtype = DTYPES[entry["dtype"]]
    row = dtype.itemsize * math.prod(entry["shape"][1:])
    at = 8 + length + entry["data_offsets"][0] + first * row
    data = read(file, at, at + (last - first) * row)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(last - first, *entry["shape"][1:])
    ### END SOLUTION


# %%
check("load_rows")

# %%
# %%needs load_rows
def from_folder(file, start=0, stop=None):
    """Bytes of a file of the folder above."""
    return (folder / file).read_bytes()[start:stop]


print(load_rows(from_folder, "up", 1, 3).tolist(), load_rows(from_folder, "norm", 0, 1))

# %% [markdown]
# | | your checkpoint | DCP | safetensors on the Hub |
# |---|---|---|---|
# | table of contents | manifest, and a table in each shard | `.metadata`, a *pickle*: read none that you do not trust | JSON in each file, and an index |
# | a part of a tensor | boxes, three a rank or fewer | chunks, one box a rank | none: a tensor is whole, in one file |
# | least that is read | numbers in a row | a chunk | any bytes |
# | whole or not there | a rename of the folder, after fsyncs | `.metadata` is renamed last; names are not fsynced | not its subject |
# | a changed byte | SHA-256 | not noticed | not noticed |
# | background | your saver | `dcp.async_save` returns a future; call its `result()` before the next save: it limits nothing | |
#
# ### A published model
#
# On the Hugging Face Hub a model is a folder of safetensors files and a `config.json`. Its tensors have other names
# than ours, and the projections of queries, keys and values are three matrices. Ours are one matrix, packed by
# *groups*: a group is a key head, a value head and the query heads that use them. With tensor parallelism a rank takes
# whole groups. The picture has Qwen2's rows for four query heads in two groups: a block is the rows of one head, its
# colour and number the rank that needs it.

# %%
from course.figures.checkpoints import strips

fc1 = [("the gate above up", "g0 g1 g2 g3 u0 u1 u2 u3", [0, 0, 1, 1, 0, 0, 1, 1]),
       ("the ranks' parts", "g0 g1 u0 u1 g2 g3 u2 u3", [0, 0, 0, 0, 1, 1, 1, 1]),
       ("cut in one piece:\na bug", "g0 g1 g2 g3 u0 u1 u2 u3", [0, 0, 0, 0, 1, 1, 1, 1])]  # fmt: skip
published = ("theirs", "q0 q1 q2 q3 k0 k1 v0 v1", [0, 0, 1, 1, 0, 1, 0, 1])
strips({"q, k, v": [published], "linear_fc1": fc1})

# %% [markdown]
# `linear_qkv` holds one group after the other, and in a group its query heads, its key head, its value head: so the rows
# of a rank are consecutive. Biases are packed as the rows of their weights. Write down the order of the eight blocks
# before you go on.
#
# The MLP's gate and up become one matrix, `linear_fc1`, the gate above up. A rank's part is *not* consecutive rows of it:
# tensor parallelism cuts gate and up each, and a rank has its part of the gate above its part of up. A converter that
# cuts `linear_fc1` in one piece gives all of the gate to rank 0, and no shape shows it. In this exercise there is one
# rank.
#
# | Qwen2's, with `model.layers.0.` before it | ours, with `decoder.layers.0.` before it |
# |---|---|
# | `input_layernorm.weight` | `input_layernorm.weight` |
# | `self_attn.q_proj`, `k_proj`, `v_proj`, each `.weight` | `self_attention.linear_qkv.weight` |
# | the same, `.bias` (Qwen2 has them, Llama does not) | `self_attention.linear_qkv.bias` |
# | `self_attn.o_proj.weight` | `self_attention.linear_proj.weight` |
# | `post_attention_layernorm.weight` | `pre_mlp_layernorm.weight` |
# | `mlp.gate_proj.weight`, `mlp.up_proj.weight` | `mlp.linear_fc1.weight` |
# | `mlp.down_proj.weight` | `mlp.linear_fc2.weight` |
#
# | beside the layers | ours |
# |---|---|
# | `model.embed_tokens.weight` | `embedding.word_embeddings.weight` |
# | `model.norm.weight` | `decoder.final_layernorm.weight` |
# | `lm_head.weight`, where it is not tied to the embedding | `output_layer.weight` |
#
# **Exercise.** Return their tensors under our names, packed as above, in the dtype that they have.
#
# Check that it is such a model. The layers are numbered 0, 1, 2, ... without a gap. All layers have biases of q, k and
# v, or none has. No tensor is missing, and there is none that the tables do not have. Otherwise what you convert
# computes something else: raise a `ValueError`. Its text has the name of the tensor that is missing, or does not belong
# there, as Hugging Face spells it. (Do not read from *one* name how many layers there are, or whether there are biases:
# it may be the one that is missing.)

# %%
# %%exercise from_hf
import torch


def from_hf(theirs: dict[str, torch.Tensor], heads: int, groups: int) -> dict[str, torch.Tensor]:
    """`heads` query heads in `groups` groups."""
    ### BEGIN SOLUTION
    left, ours = dict(theirs), {}

    def take(name):
        if name not in left:
            raise ValueError(f"{name} is missing")
        return left.pop(name)

    def packed(at, kind):
        pieces = [take(f"{at}self_attn.{x}_proj.{kind}").chunk(groups) for x in "qkv"]
        return torch.cat([piece for group in zip(*pieces) for piece in group])

    ours["embedding.word_embeddings.weight"] = take("model.embed_tokens.weight")
    ours["decoder.final_layernorm.weight"] = take("model.norm.weight")
    if "lm_head.weight" in left:
        ours["output_layer.weight"] = take("lm_head.weight")
    biases = any(".self_attn.q_proj.bias" in name for name in left)
    layer = 0
    while any(name.startswith(f"model.layers.{layer}.") for name in left):
        at, to = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        ours[f"{to}self_attention.linear_qkv.weight"] = packed(at, "weight")
        if biases:
            ours[f"{to}self_attention.linear_qkv.bias"] = packed(at, "bias")
        ours[f"{to}self_attention.linear_proj.weight"] = take(f"{at}self_attn.o_proj.weight")
        gate, up = take(f"{at}mlp.gate_proj.weight"), take(f"{at}mlp.up_proj.weight")
        ours[f"{to}mlp.linear_fc1.weight"] = torch.cat([gate, up])
        ours[f"{to}mlp.linear_fc2.weight"] = take(f"{at}mlp.down_proj.weight")
        ours[f"{to}input_layernorm.weight"] = take(f"{at}input_layernorm.weight")
        ours[f"{to}pre_mlp_layernorm.weight"] = take(f"{at}post_attention_layernorm.weight")
        layer += 1
    if left:
        raise ValueError(f"unknown: {', '.join(left)}")
    return ours
    ### END SOLUTION


# %%
check("from_hf")

# %%
# %%needs from_hf
strips({"q, k, v": [published, ("linear_qkv", "q0 q1 k0 v0 q2 q3 k1 v1", [0, 0, 0, 0, 1, 1, 1, 1])]})

# %% [markdown]
# *This is a good place to stop: the end of part D.*
#
# ## 4 · Run
#
# ### Written by four, read by three
#
# The next two cells use real processes and real files. Four ranks hold the matrix of the first picture, cut by
# columns and then by ZeRO. Each finds its boxes with your `boxes_of`, and all save together with your `save_shard`: its
# disk is a folder now, its store one of torch's. A shard begins with a line of JSON, the table of its regions: no rank
# needs to know the boxes of another one.

# %%
# %%ranks 4 --needs boxes_of,save_shard --name written
import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from exercises.boxes_of import boxes_of
from exercises.save_shard import save_shard

from course.lab08.killer import RealDisk, RealStore

ROOT = Path(__file__).parent / "checkpoints"
if rank == 0:
    shutil.rmtree(ROOT, ignore_errors=True)
    ROOT.mkdir()
dist.barrier()
part, piece = divmod(rank, 2)
start, stop = [(0, 13), (13, 27)][piece]
mine = torch.arange(54.0).view(9, 6).chunk(2, 1)[part].flatten()[start:stop]  # what this rank has trained
table = json.dumps(boxes_of(9, 6, 1, 2, part, start, stop)).encode()
store = RealStore(dist.FileStore(str(ROOT.with_name("store")), world))
save_shard(RealDisk(ROOT), store, rank, world, "first run", 20, table + b"\n" + mine.numpy().tobytes(), 30.0)
if rank == 0:
    print("in the folder:", sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file()))

# %% [markdown]
# Three new ranks read all tables, and each reads its three rows with your `load_box`.

# %%
# %%ranks 3 --needs boxes_of,save_shard,load_box --name read --out read
import json
from pathlib import Path

import torch
from exercises.load_box import load_box

from labkit.hbm import Memory

newest = max((Path(__file__).parent / "checkpoints").glob("step-*"), key=lambda path: int(path.name.partition("-")[2]))
regions, files = [], {}
for file in json.loads((newest / "manifest").read_text()):
    table, _, numbers = (newest / file).read_bytes().partition(b"\n")
    files[file], at = torch.frombuffer(bytearray(numbers), dtype=torch.float32), 0
    for box in json.loads(table):
        regions.append((file, at, box))
        at += (box[0][1] - box[0][0]) * (box[1][1] - box[1][0])
memory = Memory(**files)
mine = load_box(memory, regions, [[3 * rank, 3 * rank + 3], [0, 6]])
right = torch.equal(mine, torch.arange(54.0).view(9, 6).chunk(3)[rank])
report((right, memory.loaded))

# %%
# %%needs boxes_of save_shard load_box
for r, (right, loaded) in enumerate(read):
    print(f"rank {r} of 3: right {right}, numbers read of each file:", dict(sorted(loaded.items())))

# %% [markdown]
# ### Killed for real
#
# Your save runs again, on real files, in a process of its own. The first process dies at its first change of the
# disk; the next one, in a fresh folder, at its second change; and so on. At a write it can die twice: before the
# write, and when half of the bytes are written. After each death the folder is read. Then another process saves step 20
# again, where it is not there, and one saves step 30.

# %% jupyter={"source_hidden": true}
# %%ranks 1 --needs save_checkpoint --name killed --timeout 120
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, pathlib, shutil, tempfile
from exercises.save_checkpoint import save_checkpoint
from course.lab08.killer import RealDisk, operations


def program(root, step, at=0):
    # A process of its own; whether it came to its end.
    if child := os.fork():
        return os.waitpid(child, 0)[1] == 0
    files = {name: f"{name} of {step}".encode() for name in ("shard-0", "shard-1", "manifest")}
    try:
        with operations(at):
            save_checkpoint(RealDisk(root), step, files)
        os._exit(0)
    finally:
        os._exit(1)


def whole(root):
    # The steps that a reader sees; none of them may be anything but whole.
    steps = sorted(int(path.name[5:]) for path in root.iterdir() if path.name.startswith("step-"))
    for step in steps:
        found = {path.name: path.read_text() for path in (root / f"step-{step}").iterdir()}
        assert found == {name: f"{name} of {step}" for name in ("shard-0", "shard-1", "manifest")}, found
    return steps


deaths, found, again, then = 0, set(), set(), set()
with tempfile.TemporaryDirectory() as folder:
    before = pathlib.Path(folder) / "before"
    before.mkdir()
    program(before, 10)
    for at in range(1, 200):
        root = pathlib.Path(folder) / str(at)
        shutil.copytree(before, root)
        if program(root, 20, at):
            break
        deaths += 1
        found.add(tuple(whole(root)))
        if 20 not in whole(root):
            again.add(program(root, 20) and whole(root) == [10, 20])
        program(root, 30)
        then.add((30 in whole(root), any(path.name.startswith(".") for path in root.iterdir())))
print("it died at every place where it changes the disk:", deaths >= 8)
print("steps found after a death:", sorted(found))
print("then step 20 can be saved again:", again == {True})
print("after the next save: step 30 is there, nothing hidden is left:", then == {(True, False)})
"""
where = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
done = subprocess.run([sys.executable, "-c", SCRIPT], env=where, timeout=100, capture_output=True, text=True)
print(done.stdout or done.stderr, end="")

# %% [markdown]
# ### A model of the Qwen2 family
#
# The cell builds a small Qwen2 model, and minimegatron's own converter gives its tensors Hugging Face's names. Your
# converter must give the first tensors back. Then gate and up change places in `linear_fc1`: no shape shows this
# mistake.

# %%
# %%needs from_hf
import torch

from minimegatron.checkpoint.huggingface import state_to_huggingface
from minimegatron.comm.mesh import Mesh
from minimegatron.layers.logical import load_logical
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config

config = family_config("qwen2", num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=128)
qwen = build_model(config, Mesh.serial(), 1)
theirs = state_to_huggingface({name: p.detach() for name, p in qwen.named_parameters()}, config, "qwen2")
ours = from_hf(theirs, 4, 2)
same = [torch.equal(ours[name], p) for name, p in qwen.named_parameters()]
print(f"{len(theirs)} tensors of theirs are {len(ours)} of ours; equal to the package's: {all(same)}")

ids = torch.arange(24).view(1, 24) * 5 % 128
logits = qwen(ids)
swapped = {name: torch.cat(w.chunk(2)[::-1]) if "linear_fc1" in name else w for name, w in ours.items()}
load_logical(qwen, swapped)
print("up above the gate: shapes are the same:", all(swapped[name].shape == ours[name].shape for name in ours),
      "  logits are the same:", torch.allclose(qwen(ids), logits))  # fmt: skip

# %% [markdown]
# So test a converter by logits: both programs must compute the same ones for the same text.
#
# ## 5 · See
#
# The first picture shows your boxes, and how many numbers rank 1 of 3 has read. The second one compares the two saves.

# %%
# %%needs boxes_of save_shard load_box
from course.figures.checkpoints import region_map

stored = [boxes_of(9, 6, 1, 2, r // 2, *[(0, 13), (13, 27)][r % 2]) for r in range(4)]
counted = read[1][1]
wanted = [[3, 6], [0, 6]]
region_map((9, 6), {"your boxes of 4 ranks": stored},
           (f"rank 1 of 3 reads {sum(counted.values())} of 54 numbers", [wanted]))  # fmt: skip

# %%
# %%needs save_checkpoint
crash_map({"in place": crashes(in_place), "yours": crashes(save_checkpoint)})

# %% [markdown]
# *This is a good place to stop: the end of part E.*
#
# ## 6 · Break it
#
# A run with a pipeline is resumed with another schedule. Now a rank holds its layers in the order 0, 2, 1, 3. A
# colleague has written the code that resumes: "Weights are loaded by name, and all names are checked. For the
# optimizer I call torch's `load_state_dict`." There is no error.
#
# The folded cell trains a small Llama of four layers, saves, and goes on three times: without a stop; resumed in the
# old order; resumed in the new order by the colleague's code. It keeps one table of the optimizer's averages, by name,
# as it was saved (`saved`) and as it was restored in the new order (`restored`).

# %% jupyter={"source_hidden": true}
import copy

import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config

SIZES = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 4, "vocab_size": 64}
BEFORE_SAVE, AFTER = 60, 40


def some_ids(number):
    """Every id depends on the one before."""
    g = torch.Generator().manual_seed(number)
    ids = [torch.randint(0, 64, (8,), generator=g)]
    for _ in range(24):
        ids.append((ids[-1] * 5 + 7 + torch.randint(0, 3, (8,), generator=g)) % 64)
    return torch.stack(ids, 1)


def in_order(model, layers):
    """{name: parameter}, the layers in this order."""

    def place(item):
        return layers.index(int(item[0].split(".")[2])) if ".layers." in item[0] else -1

    return dict(sorted(model.named_parameters(), key=place))


def trained(model, optimizer, numbers):
    """(loss, norm of the gradient, change of the weights) of each step."""
    found = []
    for number in numbers:
        ids = some_ids(number)
        loss = model(ids[:, :-1], labels=ids[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        optimizer.step()
        found.append((loss.item(), norm, torch.cat([p.detach().flatten() for p in model.parameters()]) - before))
    return found


def adamw(named):
    return torch.optim.AdamW(named.values(), lr=2e-3, weight_decay=0.0)


def averages(named, optimizer):
    """{name: average of the squared gradient}."""
    return {name: optimizer.state[p]["exp_avg_sq"].clone() for name, p in named.items()}


llama = build_model(family_config("llama", **SIZES), Mesh.serial(), 1)
names = in_order(llama, [0, 1, 2, 3])
optimizer = adamw(names)
trained(llama, optimizer, range(BEFORE_SAVE))
weights = copy.deepcopy(llama.state_dict())
state, saved, saved_names = copy.deepcopy(optimizer.state_dict()), averages(names, optimizer), list(names)
steps = {"no stop": trained(llama, optimizer, range(BEFORE_SAVE, BEFORE_SAVE + AFTER))}


def resumed(layers, change=lambda state, saved_names, names: state):
    """A new process: weights by name, the optimizer's state as `change` gives it; its averages, and its steps."""
    model = build_model(family_config("llama", **SIZES), Mesh.serial(), 1)
    model.load_state_dict(weights)
    named = in_order(model, layers)
    fresh = adamw(named)
    loaded = copy.deepcopy(state)
    fresh.load_state_dict({**loaded, "state": change(loaded["state"], saved_names, list(named))})
    return averages(named, fresh), trained(model, fresh, range(BEFORE_SAVE, BEFORE_SAVE + AFTER))


_, steps["old order"] = resumed([0, 1, 2, 3])
restored, steps["new order"] = resumed([0, 2, 1, 3])


def compared(name):
    """What a log shows of the first step after the save, and what it does not show."""
    (loss, norm, change), (right, right_norm, right_change) = steps[name][0], steps["no stop"][0]
    cosine = torch.nn.functional.cosine_similarity(change, right_change, dim=0).item()
    print(f"{name}: first loss the same {abs(loss - right) < 1e-5},",
          f"first gradient norm the same {abs(norm - right_norm) < 1e-4 * right_norm};",
          f"cosine of the first changes of the weights {cosine:.1f}")  # fmt: skip


compared("old order")
compared("new order")

# %%
from minimegatron.viz.curves import losses

losses({name: [step[0] for step in steps[name]] for name in ("no stop", "new order")}, title="Loss after the save")

# %% [markdown]
# Loss and gradient norm of the first step are the same: they depend on the weights, and the weights are right. The
# later losses differ by so little that the curve raises no suspicion. But the first step *changes the weights* in
# another direction, because Adam computes the change from its averages. The cosine compares this change with the one
# that the run without a stop makes; it is 1 if they have the same direction.
#
# Whose averages has each parameter been given?
#
# **Exercise.** Return for each name of `restored` the name in `saved` that has exactly these numbers in this shape.
# If the parameter's own name has them, return its own name, else the first in the order of `saved`, and None if there
# is none. Several names may get the same answer. A checkpoint keeps every bit, so numbers that differ a little are
# other numbers.

# %%
# %%exercise whose
import torch


def whose(saved: dict[str, torch.Tensor], restored: dict[str, torch.Tensor]) -> dict[str, str | None]:
    """{"a": "b", "b": "b", "c": None}: a has been given b's, b its own, and c what was never saved."""
    ### BEGIN SOLUTION
    found = {}
    for name, numbers in restored.items():
        sources = [source for source in saved if torch.equal(saved[source], numbers)]
        found[name] = name if name in sources else sources[0] if sources else None
    return found
    ### END SOLUTION


# %%
check("whose")

# %%
# %%needs whose
found = whose(saved, restored)
mixed_up = {name: source for name, source in found.items() if source != name}
print(f"{len(mixed_up)} of {len(found)} parameters have the averages of another one:")
for layer in range(4):
    of_layer = [(name, source) for name, source in mixed_up.items() if f"layers.{layer}." in name]
    if of_layer:
        print(f"  layer {layer}: {len(of_layer)} of them, from layer {of_layer[0][1].split('.')[2]}")

# %% [markdown]
# Layers 1 and 2 have changed places. torch's optimizer numbers its parameters in the order in which it was given them,
# and its state dict, as the colleague builds it, knows nothing but these numbers. (Given `named_parameters()`, an
# optimizer of torch 2.6 or later also stores `param_names`; `load_state_dict` goes by position all the same.) Every
# layer has the same shapes, so nothing failed. The colleague restored the state *by position*.
#
# **Exercise.** Repair it. `state` is the part `state` of an optimizer's state dict: {number: averages}, where the
# number is a place in `saved_names`. Return the same averages for an optimizer whose parameters come in the order of
# `names`: {place in `names`: averages}. A parameter that has no averages (it is new, or was never stepped) has no
# entry. Averages whose parameter is not in `names` would be lost without a message: raise a `ValueError` whose text
# has the parameter's name. A name without averages may be missing in `names`.

# %%
# %%exercise by_name
def by_name(state: dict[int, dict], saved_names: list[str], names: list[str]) -> dict[int, dict]:
    """{0: k's, 1: q's} for saved_names = ["q", "k"] and names = ["k", "q"]."""
    ### BEGIN SOLUTION
    table = {saved_names[number]: one for number, one in state.items()}
    if lost := [name for name in table if name not in names]:
        raise ValueError(f"no parameter for the state of {', '.join(lost)}")
    return {number: table[name] for number, name in enumerate(names) if name in table}
    ### END SOLUTION


# %%
check("by_name")

# %%
# %%needs whose by_name
repaired, steps["new order, by name"] = resumed([0, 2, 1, 3], by_name)
wrong = [name for name, source in whose(saved, repaired).items() if source != name]
print("parameters with averages of another one:", len(wrong))
compared("new order, by name")
same = [a[0] == b[0] for a, b in zip(steps["new order, by name"], steps["no stop"])]
print(f"steps whose loss is that of the run without a stop, to the bit: {sum(same)} of {len(same)}")

# %% [markdown]
# minimegatron's checkpoints hold no such numbers: each average is a tensor of its own, with regions, and its name is
# `optimizer.exp_avg.` with the name of the parameter after it. torch's own repair has the names, too:
# `get_optimizer_state_dict` and `set_optimizer_state_dict` of `torch.distributed.checkpoint.state_dict`.
#
# ## 7 · Explain
#
# Questions that an interviewer asks. Say your answer aloud before you open the one here.
#
# 1. *A folder has a manifest. Why does this not prove that the shards beside it are whole?*
#    <details><summary>answer</summary>Without an fsync the disk may keep the manifest and lose shards that were
#    written before it. With a staging folder, which is renamed when all is confirmed, the order of the files in it
#    does not matter. The hashes in a manifest tell later whether a byte has changed.</details>
# 2. *A save fsyncs every file and renames, and forgets to fsync the staging folder. What can be found?*
#    <details><summary>answer</summary>The folder under its new name, and in it fewer files than were written: the bytes
#    are safe, the names are not.</details>
# 3. *Why do readers not simply take the newest folder that is whole?*
#    <details><summary>answer</summary>A broken newest checkpoint means that something went wrong. A reader that
#    takes an older one without a message loses hours of training, and hides a failing disk.</details>
# 4. *In a save by many ranks rank 0 dies after its rename, before it has told the others. What do they do, and what does
#    a restart find?*
#    <details><summary>answer</summary>They hear nothing, and raise: rank 0 is missing. The restart finds the new
#    checkpoint, whole, or after a power cut perhaps the older one. So an error of a save does not say that the checkpoint
#    is not there: only the disk says that.</details>
# 5. *Which state is missing when a loss curve after a resume has a small bump, every time?*
#    <details><summary>answer</summary>Often the optimizer's: if averages and count of steps begin at 0, AdamW's
#    first step moves every number by the whole learning rate, however small its gradient. If samples are repeated
#    instead, the loss is too low for a while.</details>
# 6. *A checkpoint of dp 64 is loaded with dp 32, the global batch unchanged. Can the result be equal bit for bit?*
#    <details><summary>answer</summary>Weights as loaded, and samples: yes. Losses: no, for sums are made in
#    another order, so they differ in the last bits. The order of the samples over the whole run must be the
#    same.</details>
# 7. *Why safetensors, and not `torch.save`?*
#    <details><summary>answer</summary>A pickle may run any code while it is read. Since version 2.6 `torch.load` has
#    `weights_only=True` by default, which allows a few types only; older versions, and `weights_only=False`, run
#    everything. A safetensors file is a table of names, shapes and places, and then numbers: nothing is executed, and
#    one box can be read without the rest.</details>
# 8. *Which numbers show a wrong converter?*
#    <details><summary>answer</summary>Logits, compared with the other program on the same text. Shapes do not:
#    gate and up have the same shape, and so have k and v. A loss shows only a large mistake: one bias in the wrong
#    order hardly changes it.</details>

# %%
progress()

# %% [markdown]
# ## Where this lives
#
# | here | minimegatron, `checkpoint/` | Megatron-LM, `megatron/core/dist_checkpointing/` |
# |---|---|---|
# | boxes of a rank | `regions.py` | `mapping.py`, `ShardedTensor` |
# | a box from regions | `load.py`, `sources.py` | `strategies/torch.py`, over torch's planner |
# | a save that is whole or not there, by many ranks | `commit.py`, `save.py` | `serialization.py`; `latest_checkpointed_iteration.txt` says which one is the newest |
# | a save in the background | `AsyncSave` and `Staging` in `save.py`; `--async-save` | `strategies/async_utils.py`; `--async-save` |
# | manifest, hashes | `manifest.py`, `shard_file.py` | `metadata.json`, and torch's `.metadata`, a pickle |
# | going on | `training/run_state.py` | `megatron/training/checkpointing.py` |
# | formats of others | `torch_dist.py`, `hf_folder.py` | `--ckpt-format torch_dist` (DCP), `torch_dcp` |
# | published models | `huggingface.py`, `models/families/` | Megatron-Bridge |
#
# Pillai et al. 2014, All file systems are not created equal (OSDI); Young 1974, A first order approximation to the
# optimum checkpoint interval; Llama team 2024, The Llama 3 herd of models (arXiv 2407.21783), section 3.3.4.
#
# Next: lab 09, training end to end.

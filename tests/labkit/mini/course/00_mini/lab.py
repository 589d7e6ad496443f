# %% [markdown]
# # 00 A miniature lab
# Two ranks, three exercises.

# %%
# %load_ext course
# %lab 00_mini tests.labkit.mini_course

# %%
guess("idle", None, "Four stages, eight microbatches: how many of eleven steps is a stage idle?")

# %% jupyter={"source_hidden": true}
STAGES, MICROBATCHES = 4, 8

# %% [markdown]
# ## Predict

# %%
# %%exercise bubble
def bubble(p: int, m: int) -> float:
    """The share of the time that a stage of a p-stage pipeline is idle, with m microbatches."""
    ### BEGIN SOLUTION
    return (p - 1) / (m + p - 1)
    ### END SOLUTION


# %%
check("bubble")

# %% [markdown]
# ## Implement

# %%
# %%exercise ring_all_reduce
import torch
import torch.distributed as dist


def ring_all_reduce(x: torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' `x`, by sends to the next rank alone."""
    ### BEGIN SOLUTION
    rank, world = dist.get_rank(), dist.get_world_size()
    total = x.contiguous().clone()
    travelling = total.clone()
    for _ in range(world - 1):
        arriving = torch.empty_like(total)
        sent = dist.isend(travelling, (rank + 1) % world)
        dist.recv(arriving, (rank - 1) % world)
        sent.wait()
        total += arriving
        travelling = arriving
    return total
    ### END SOLUTION


# %%
check("ring_all_reduce")

# %%
# %%exercise double
def double(x):
    ### BEGIN SOLUTION
    return 2 * x
    ### END SOLUTION


# %%
check("double")

# %% [markdown]
# ## Run

# %%
# %%torchrun -n 1 --needs ring_all_reduce --name sums --out run
import torch
from exercises.ring_all_reduce import ring_all_reduce

from minimegatron.launch.rank import finish, init, report

rank, world = init()
total = ring_all_reduce(torch.tensor([float(rank + 1)]))
print(f"the sum is {total.item():g}")
report({"rank": rank, "sum": total.item()})
finish()

# %%
# %%ranks 2 --needs ring_all_reduce --name quick
import torch
from exercises.ring_all_reduce import ring_all_reduce

print(f"rank {rank} of {world}: {ring_all_reduce(torch.ones(2) * rank).tolist()}")

# %% tags=["hide-output"]
# %%needs bubble
print("steps:", STAGES + MICROBATCHES - 1)

# %%
# %%needs bubble
guessed("idle", round(bubble(STAGES, MICROBATCHES) * 11), "steps")

# %% tags=["solution-only"]
[one["sum"] for one in run.reports]

# %%
# %%ranks 2 --needs bubble --name broken --expect-failure
import torch
import torch.distributed as dist

if rank == 1:
    raise ValueError("a planted mistake")
dist.all_reduce(torch.ones(1))

# %%
progress()

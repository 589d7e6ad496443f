# %% [markdown]
# # 01 Means
#
# Ranks have different numbers of tokens. The loss of a batch is the mean over all of them, so nobody may
# take the mean of means.

# %%
# %load_ext course
# %lab 01_means tests.course.example.01_means

# %%
# %%exercise token_mean
import torch


def token_mean(losses: torch.Tensor, mask: torch.Tensor) -> float:
    """The mean of the losses whose mask is 1; 0 where there are none."""
    ### BEGIN SOLUTION
    return float((losses * mask).sum() / mask.sum().clamp(min=1))
    ### END SOLUTION


# %%
check("token_mean")

# %%
# %%exercise rank_mean
import torch
import torch.distributed as dist


def rank_mean(losses: torch.Tensor, mask: torch.Tensor, group: dist.ProcessGroup) -> float:
    """The mean loss of all counted tokens of all ranks of the group, on every rank."""
    ### BEGIN SOLUTION
    both = torch.stack([(losses * mask).sum(), mask.sum()])
    dist.all_reduce(both, group=group)
    return float(both[0] / both[1])
    ### END SOLUTION


# %%
check("rank_mean")

# %%
# %%exercise hidden_sum
import torch
import torch.distributed as dist


def hidden_sum(grad: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """`grad` summed over the ranks, and `y` = x x^T, computed meanwhile."""
    ### BEGIN SOLUTION
    grad = grad.clone()
    handle = dist.all_reduce(grad, group=group, async_op=True)
    y = x @ x.mT
    handle.wait()
    return {"grad": grad, "y": y}
    ### END SOLUTION


# %%
check("hidden_sum")

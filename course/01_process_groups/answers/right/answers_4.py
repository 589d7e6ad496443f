# torch: a DeviceMesh-like view, and tuples
import torch
def answers(world, tp, cp, pp, ep, etp, gigabytes, gb_per_second):
    grid = torch.arange(world).view(pp, world // (tp * cp * pp), cp, tp)
    peers = tuple(grid[0, ..., 0].flatten().tolist())
    n = len(peers)
    return {"dp": grid.size(1), "edp": float(world / (etp * ep * pp)), "same_weights_as_rank_0": peers[:4],
            "all_reduce_seconds": torch.tensor(2 * gigabytes * (n - 1) / n / gb_per_second, dtype=torch.float64)}

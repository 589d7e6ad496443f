# batch_isend_irecv by name, K and V side by side in one tensor
import torch
from exercises.attend import attend
from exercises.merge import merge
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend


def ring_forward(q, k, v, at, cp):
    half, r, d = q.shape[1] // 2, cp.rank, k.shape[-1]
    kv = torch.cat((k, v), -1).contiguous()
    rows = [slice(0, half), slice(half, 2 * half)]
    parts = [None, None]
    for step in range(cp.size):
        works = []
        if step + 1 < cp.size:
            new = torch.empty_like(kv)
            works = batch_isend_irecv([
                P2POp(irecv, new, cp.ranks[(r - 1) % cp.size], cp.group),
                P2POp(isend, kv, cp.ranks[(r + 1) % cp.size], cp.group),
            ])
        places = at[(r - step) % cp.size]
        for i, cut in enumerate(rows):
            piece = attend(q[:, cut], kv[..., :d], kv[..., d:], at[r][cut], places, half)
            parts[i] = piece if parts[i] is None else merge(*parts[i], *piece)
        [work.wait() for work in works]
        if works:
            kv = new
    return torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts], 1)

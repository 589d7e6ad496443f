"""The gated delta rule chunk by chunk: a state that is corrected, where Mamba-2's is only added to.

The problem in a sentence: a state to which every token adds its `v k^T` is soon a sum of all values that ever had a
similar key, and no token can replace one of them.

Each head has a state S [k, v], a linear map from keys to values. All of S fades by exp(g); then a token looks up what S
says of its key, and moves that towards its value by a step beta:

    S' = exp(g_t) S_{t-1}            S_t = S' + k_t (beta_t (v_t - S'^T k_t))^T          o_t = S_t^T q_t / sqrt(k)

with keys and queries of length 1, 0 < beta < 1, g < 0. With beta = 1 the state says v_t of k_t afterwards.

The corrections u_t = beta_t (v_t - S'^T k_t) depend on each other, since each reads a state that earlier ones have
changed. In a chunk of l tokens that is a triangular system, where a_i = g_1 + ... + g_i and S is the state before the
chunk:

    (I + L) u = beta v - beta exp(a) k S            L_ij = beta_i exp(a_i - a_j) (k_i . k_j) for j < i

It is solved for both right-hand sides at once, without knowing S: u = U - W S. The rest is as in `scan`:

| of a chunk | formula                                                    | shape                  |
|------------|------------------------------------------------------------|------------------------|
| U, W       | (I + L)^-1 [beta v, beta exp(a) k]                         | [l, v], [l, k] a head  |
| output     | exp(a) q S + (exp(a_i - a_j) q_i . k_j)_{j <= i} (U - W S) | [l, v] a head          |
| next state | exp(a_l) S + (exp(a_l - a) k)^T (U - W S)                  | [k, v] a head          |

**A piece of a sequence** makes `M S + own` of the state S before it; M is a matrix [k, k], where Mamba-2 has a number.
States are linear in the one that they begin with, so one pass gives both: it begins with zeros beside the identity
(`summary`).

Work: s (4 l k / r + 2 l v + 6 k v) FLOPs a head, with r heads for a key head, and s l (k + v) for the triangular
system. A chunk that is not full is padded with g = beta = 0, which changes no state. With documents each formula loses
the terms that would pass a border. Everything is computed in fp32 (fp64 for fp64).

Yang, Kautz and Hatamizadeh 2024 (arXiv 2412.06464); the triangular form: Yang et al. 2024 (arXiv 2406.06484).
flash-linear-attention: `chunk_gated_delta_rule`; Megatron-LM calls that.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minimegatron.layers.ssm.scan import in_one_document, masked_exp

EPSILON = 1e-6  # added to the squared length of a query or key, as in flash-linear-attention


def unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of the last dim with length 1, in fp32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


class DeltaRule:
    """The chunks of a piece of a sequence; what came before the piece is added by `outputs`.

    Args:
        q, k: [s, b, key heads, k], of any length; made ones of length 1 here.
        v: [s, b, heads, v]; the heads that share a key head are consecutive.
        g: [s, b, heads], fp32, logarithms of decays, not positive.
        beta: [s, b, heads], steps.
        chunk_size: l.
        segments: [b, 1 + s], numbers of the documents of the tokens and of the token before them; None for one
            document.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        chunk_size: int,
        segments: torch.Tensor | None = None,
    ) -> None:
        s, groups, width = len(q), q.shape[2], q.shape[3]
        length = min(chunk_size, s)
        self.length = s

        def chunks(t: torch.Tensor) -> torch.Tensor:
            """[s, b, heads, ...] -> [chunks, b, key heads, heads of each, l, ...]."""
            t = t.unflatten(2, (groups, -1))
            if s % length:
                t = F.pad(t, (0, 0) * (t.dim() - 1) + (0, -s % length))
            return t.unflatten(0, (-1, length)).movedim(1, 4)

        q, k = chunks(unit(q) * width**-0.5), chunks(unit(k))  # [c, b, g, 1, l, k]
        beta = chunks(beta.to(q.dtype))  # [c, b, g, r, l]
        v = chunks(v.to(q.dtype)) * beta[..., None]  # [c, b, g, r, l, v]
        a = chunks(g).cumsum(-1)
        pairs, to_end, from_start, ends, _ = in_one_document(segments, s, length, q.device)
        throughout = None if ends is None else (ends[1:] == ends[:-1])[:, :, None, None]
        decays = masked_exp(a[..., None] - a[..., None, :], pairs)
        system = (k @ k.mT) * decays * beta[..., None]  # I + L, of which the part below the diagonal is read
        since_start = masked_exp(a, from_start)[..., None]
        right = torch.cat([v, k * (beta[..., None] * since_start)], -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).flatten(2, 3)
        self._U, self._W = solved.split([v.shape[-1], width], -1)  # [c, b, heads, l, v or k]
        self._within = ((q @ k.mT) * decays).flatten(2, 3)
        self._reads = (q * since_start).flatten(2, 3)
        self._writes = (k * masked_exp(a[..., -1:] - a, to_end)[..., None]).flatten(2, 3)
        self._decays = masked_exp(a[..., -1], throughout).flatten(2, 3)[..., None, None]

    def outputs(self, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """o [s, b, heads, v] and the state after the piece, given that before it; both [b, heads, k, v].

        Args:
            state: default zeros.
        """
        before, corrections, after = self._carry(self._zeros() if state is None else state, self._U)
        o = self._reads @ torch.stack(before) + self._within @ torch.stack(corrections)
        return o.movedim(3, 1).flatten(0, 1)[: self.length], after

    def summary(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the piece makes of a state: adds [b, heads, k, v], after a matrix [b, heads, k, k] times it."""
        zeros, width = self._zeros(), self._W.shape[-1]
        identity = torch.eye(width, dtype=zeros.dtype, device=zeros.device).expand(*zeros.shape[:3], -1)
        _, _, both = self._carry(torch.cat([zeros, identity], -1), F.pad(self._U, (0, width)))
        own, transition = both.split([zeros.shape[-1], width], -1)
        return own, transition

    def _carry(
        self, state: torch.Tensor, U: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        """The state before each chunk, the corrections in it, and the state after the last."""
        before, corrections = [], []
        for u, w, writes, decay in zip(U, self._W, self._writes, self._decays, strict=True):
            before.append(state)
            corrections.append(u - w @ state)
            state = decay * state + writes.mT @ corrections[-1]
        return before, corrections, state

    def _zeros(self) -> torch.Tensor:
        return self._U.new_zeros(*self._U.shape[1:3], self._W.shape[-1], self._U.shape[-1])


def step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence for one token, as `DeltaRule` of a piece of one: dims as there without the first; o, the state."""
    q, k = (unit(t).repeat_interleave(v.shape[1] // t.shape[1], 1)[..., None] for t in (q, k))  # [b, heads, k, 1]
    state = g.exp()[..., None, None] * state
    correction = beta[..., None] * (v - (k * state).sum(2))
    state = torch.addcmul(state, k, correction[:, :, None])
    return (q * state).sum(2) * q.shape[2] ** -0.5, state

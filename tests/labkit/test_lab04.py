"""Lab 04's checks: the stub scores nothing, the solution everything, other right answers too, each mistake its hint."""

from __future__ import annotations

from tests.labkit.marked import Marked

MARKED = Marked("04_context_parallel", imports=True)
changed = MARKED.changed
HEAD = "import torch\nimport torch.distributed as dist\nimport torch.nn.functional as F\n"


test_the_stub_scores_nothing_and_the_solution_everything = MARKED.stubs_and_solutions()


PIECE = """
def piece(q, k, v, q_at, k_at):
    see = (q_at[:, None] >= k_at[None]) & (k_at[None] >= 0)
    s = torch.where(see, torch.einsum('and,amd->anm', q, k) * q.shape[-1] ** -0.5, -torch.inf)
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None]) @ v, lse
"""

# Isends of one's own, K and V in two messages, the three cases of zigzag by hand.
BY_CASES = (
    HEAD
    + PIECE
    + """
from exercises.merge import merge
def ring_forward(q, k, v, at, cp):
    h, r = q.shape[1] // 2, cp.rank
    to, source = cp.ranks[(r + 1) % cp.size], cp.ranks[r - 1]
    for step in range(cp.size):
        j, works = (r - step) % cp.size, []
        if step < cp.size - 1:
            new = torch.empty_like(k), torch.empty_like(v)
            works = [dist.irecv(t, source, group=cp.group) for t in new]
            works += [dist.isend(t, to, group=cp.group) for t in (k, v)]
        if j == r:
            out, lse = piece(q, k, v, at[r], at[r])
        elif j < r:
            out, lse = merge(out, lse, *piece(q, k[:, :h], v[:, :h], at[r], at[j][:h]))
        else:
            late = merge(out[:, h:], lse[:, h:], *piece(q[:, h:], k, v, at[r][h:], at[j]))
            out, lse = torch.cat((out[:, :h], late[0]), 1), torch.cat((lse[:, :h], late[1]), 1)
        for work in works:
            work.wait()
        if works:
            k, v = new
    return out, lse
"""
)

RIGHT = {
    "bytes_per_layer": [
        "def bytes_per_layer(s, b, heads, groups, d, cp, element_size):\n    kv = 2 * s * b * groups * d * element_size / cp\n"
            "    qo = 2 * s * b * heads * d * element_size / cp\n    return dict(ring=kv * (cp - 1), ulysses=(kv + qo) * (cp - 1) / cp)",
        "def bytes_per_layer(s, b, heads, groups, d, cp, element_size):\n    n = s // cp\n    ring = sum(2 * n * b * groups * d * element_size for _ in range(cp - 1))\n"
            "    q = n * b * heads * d * element_size\n    kv = n * b * groups * d * element_size\n    return {'ring': ring, 'ulysses': sum(x - x / cp for x in (q, kv, kv, q))}",
        changed("bytes_per_layer", ("(cp - 1) / cp * (2 * heads + 2 * groups)", "2 * (1 - 1 / cp) * (heads + groups)")),
    ],
    "work": [
        "import torch\ndef work(s, cp, zigzag):\n    chunks = torch.arange(1, s + 1).view(2 * cp, -1).sum(1).tolist()\n"
            "    return [chunks[r] + chunks[-1 - r] if zigzag else chunks[2 * r] + chunks[2 * r + 1] for r in range(cp)]",
        "def work(s, cp, zigzag):\n    if zigzag:\n        return [s * (s + 1) // 2 // cp] * cp\n    n = s // cp\n"
            "    return [r * n * n + n * (n + 1) // 2 for r in range(cp)]",
        "def work(s, cp, zigzag):\n    out, n = [0.0] * cp, s // cp\n    for i in range(s):\n        c = 2 * i // n\n"
            "        out[min(c, 2 * cp - 1 - c) if zigzag else i // n] += i + 1\n    return out",
    ],
    "attend": [
        # merged pieces: a block is a small attention
        HEAD + PIECE + "def attend(q, k, v, q_at, k_at, block):\n    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)\n"
            "    for i in range(0, k.shape[1], block):\n        c = slice(i, i + block)\n        if (k_at[c] > q_at.max()).all():\n            continue\n"
            "        more, l = piece(q, k[:, c], v[:, c], q_at, k_at[c])\n        t = torch.logaddexp(lse, l)\n        f = t.nan_to_num(neginf=0.0)\n"
            "        out, lse = out * (lse - f).exp()[..., None] + more * (l - f).exp()[..., None], t\n    return out, lse",
        # two passes: first the maximum, then the sums
        HEAD + "def attend(q, k, v, q_at, k_at, block):\n    parts = [slice(i, i + block) for i in range(0, k.shape[1], block)]\n    parts = [c for c in parts if k_at[c].min() <= q_at.max()]\n"
            "    S = lambda c: torch.where(k_at[c] <= q_at[:, None], q @ k[:, c].mT, torch.tensor(-torch.inf)) / q.shape[-1] ** 0.5\n"
            "    kept = [S(c) for c in parts]\n    if not kept:\n        return q * 0, q.new_full(q.shape[:2], -torch.inf)\n"
            "    m = torch.stack([s.amax(-1) for s in kept]).amax(0)\n    f = m.nan_to_num(neginf=0.0)[..., None]\n    l = sum((s - f).exp().sum(-1) for s in kept)\n"
            "    o = sum((s - f).exp() @ v[:, c] for s, c in zip(kept, parts))\n    return o / l.clamp_min(1e-30)[..., None], m + l.log()",
        # head by head, query by query
        HEAD + "def attend(q, k, v, q_at, k_at, block):\n    outs, lses = [], []\n    for a in range(q.shape[0]):\n        top = torch.full((q.shape[1],), -1e30); l = torch.zeros(q.shape[1]); o = torch.zeros(q.shape[1:])\n"
            "        for i in range(0, k.shape[1], block):\n            c = slice(i, i + block)\n            if k_at[c].min() > q_at.max():\n                continue\n"
            "            s = (q[a] @ k[a, c].T / q.shape[-1] ** 0.5).masked_fill(q_at[:, None] < k_at[c], -torch.inf)\n            m = torch.maximum(top, s.max(1).values)\n"
            "            p = (s - m[:, None]).exp(); r = (top - m).exp()\n            l = l * r + p.sum(1); o = o * r[:, None] + p @ v[a, c]; top = m\n"
            "        outs.append(o / torch.where(l > 0, l, 1.0)[:, None]); lses.append(top + l.log())\n    return torch.stack(outs), torch.stack(lses)",
    ],
    "merge": [
        HEAD + "def merge(out, lse, more, more_lse):\n    top = torch.maximum(lse, more_lse).nan_to_num(neginf=0.0)\n    a, b = (lse - top).exp(), (more_lse - top).exp()\n"
            "    total = a + b\n    safe = torch.where(total > 0, total, 1.0)\n    return (out * (a / safe)[..., None] + more * (b / safe)[..., None]), top + total.log()",
        HEAD + "def merge(out, lse, more, more_lse):\n    w = torch.stack((lse, more_lse)).softmax(0).nan_to_num(0.0)\n"
            "    return w[0, ..., None] * out + w[1, ..., None] * more, torch.logsumexp(torch.stack((lse, more_lse)), 0)",
        HEAD + "def merge(out, lse, more, more_lse):\n    w = torch.sigmoid((more_lse - lse).nan_to_num(0.0, posinf=1e9, neginf=-1e9))[..., None]\n"
            "    return out + w * (more - out), torch.logaddexp(lse, more_lse)",
    ],
    "positions": [
        "import torch\ndef positions(s, cp, rank):\n    n = s // (2 * cp)\n    return torch.tensor([*range(rank * n, rank * n + n), *range(s - rank * n - n, s - rank * n)])",
        "import torch\ndef positions(s, cp, rank):\n    c = torch.arange(s) // (s // (2 * cp))\n    return torch.nonzero(torch.minimum(c, 2 * cp - 1 - c) == rank).flatten()",
        "import torch\ndef positions(s, cp, rank):\n    return torch.arange(s).view(2 * cp, -1)[[rank, -1 - rank]].reshape(-1)",
    ],
    "ring_forward": [
        BY_CASES,
        # even ranks and odd ranks alike through batch_isend_irecv
        changed("ring_forward", ("shift = Shift(block, cp) if step < cp.size - 1 else None",
            "new = torch.empty_like(block)\n        ops = [dist.P2POp(dist.isend, block, cp.ranks[(cp.rank + 1) % cp.size], cp.group), "
            "dist.P2POp(dist.irecv, new, cp.ranks[cp.rank - 1], cp.group)]\n        shift = dist.batch_isend_irecv(ops) if step < cp.size - 1 else None"),
            ("block = shift.wait()", "[work.wait() for work in shift]\n            block = new"), ("import torch\n", "import torch\nimport torch.distributed as dist\n")),
        # chunk by chunk of the keys too
        changed("ring_forward", ("            piece = attend(q[:, rows], block[0], block[1], mine[rows], at[owner], half)\n"
            "            out[:, rows], lse[:, rows] = merge(out[:, rows], lse[:, rows], *piece)",
            "            for cols in (slice(0, half), slice(half, None)):\n                if at[owner][cols][0] <= mine[rows][-1]:\n"
            "                    piece = attend(q[:, rows], block[0][:, cols], block[1][:, cols], mine[rows], at[owner][cols], 3)\n"
            "                    out[:, rows], lse[:, rows] = merge(*piece, out[:, rows], lse[:, rows])")),
    ],
    "piece_backward": [
        # the gradient of exp(S - lse) V by autograd, with D put in by hand
        HEAD + "def piece_backward(dout, q, k, v, out, lse, q_at, k_at):\n    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))\n    with torch.enable_grad():\n"
            "        p = torch.exp(q @ k.mT / q.shape[-1] ** 0.5 - lse[..., None]) * (q_at[:, None] >= k_at)\n        p = p.where(q_at[:, None] >= k_at, torch.zeros(()))\n"
            "        y = (p @ v * dout).sum() - (p * (dout * out).sum(-1, keepdim=True)).sum()\n    return torch.autograd.grad(y, (q, k, v))",
        HEAD + "def piece_backward(dout, q, k, v, out, lse, q_at, k_at):\n    d = q.shape[-1] ** 0.5\n    s = torch.einsum('aid,ajd->aij', q, k) / d\n"
            "    p = (s - lse.unsqueeze(2)).exp().masked_fill(q_at.unsqueeze(1) < k_at, 0)\n    dp = torch.einsum('aid,ajd->aij', dout, v)\n"
            "    ds = p * (dp - torch.einsum('aid,aid->ai', dout, out).unsqueeze(2)) / d\n"
            "    return torch.einsum('aij,ajd->aid', ds, k), torch.einsum('aij,aid->ajd', ds, q), torch.einsum('aij,aid->ajd', p, dout)",
        changed("piece_backward", ("ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * sigma", "ds = p * ((dout @ v.mT) - (dout.double() * out.double()).sum(-1, keepdim=True).float())"),
            ("return ds @ k, ds.mT @ q,", "return sigma * (ds @ k), sigma * (ds.mT @ q),")),
    ],
    "ring_backward": [
        # the package's way: the own part stays at home, C-1 hops
        changed("ring_backward", ("        if step > 0:\n            part += behind.wait()\n        behind = Shift(part, cp, tag=1)",
            "        if step == 0:\n            home = part\n        else:\n            if step > 1:\n                part += behind.wait()\n            behind = Shift(part, cp, tag=1)"),
            ("dk, dv = behind.wait()", "dk, dv = home + behind.wait()")),
        # one message a hop: block and gradient together
        HEAD + "from exercises.piece_backward import piece_backward\nfrom minimegatron.comm.ring import Shift\ndef ring_backward(dout, q, k, v, out, lse, at, cp):\n"
            "    all4 = torch.stack((k, v, torch.zeros_like(k), torch.zeros_like(v)))\n    dq = 0\n    for step in range(cp.size):\n        j = (cp.rank - step) % cp.size\n"
            "        more, dk, dv = piece_backward(dout, q, all4[0], all4[1], out, lse, at[cp.rank], at[j])\n        dq = dq + more\n        all4[2] += dk\n        all4[3] += dv\n"
            "        all4 = Shift(all4, cp).wait()\n    return dq, all4[2], all4[3]",
        # own messages, gradients of k and v apart, hidden halves left out
        HEAD + "from exercises.piece_backward import piece_backward\ndef ring_backward(dout, q, k, v, out, lse, at, cp):\n    r, h = cp.rank, q.shape[1] // 2\n    dq = torch.zeros_like(q)\n"
            "    dk, dv = torch.zeros_like(k), torch.zeros_like(v)\n    def on(*ts):\n        new = [torch.empty_like(t) for t in ts]\n        works = [dist.isend(t, cp.ranks[(r + 1) % cp.size], group=cp.group) for t in ts]\n"
            "        works += [dist.irecv(t, cp.ranks[r - 1], group=cp.group) for t in new]\n        [w.wait() for w in works]\n        return new\n"
            "    for step in range(cp.size):\n        j = (r - step) % cp.size\n        rows = slice(h, None) if j > r else slice(None)\n        cols = slice(0, h) if j < r else slice(None)\n"
            "        g = piece_backward(dout[:, rows], q[:, rows], k[:, cols], v[:, cols], out[:, rows], lse[:, rows], at[r][rows], at[j][cols])\n"
            "        dq[:, rows] += g[0]\n        dk[:, cols] += g[1]\n        dv[:, cols] += g[2]\n        if step < cp.size - 1:\n            k, v, dk, dv = on(k, v, dk, dv)\n        else:\n            dk, dv = on(dk, dv)\n    return dq, dk, dv",
    ],
    "ulysses": [
        # by places: sort what arrived
        HEAD + "def order(n, C):\n    h = n // 2\n    return torch.cat([torch.cat((torch.arange(r * h, r * h + h), torch.arange((2 * C - 1 - r) * h, (2 * C - r) * h))) for r in range(C)])\n"
            "def heads_for_tokens(x, cp):\n    out = torch.empty_like(x)\n    dist.all_to_all_single(out, x, group=cp.group)\n"
            "    flat = torch.cat(out.chunk(cp.size), 1)\n    return flat[:, order(x.shape[1], cp.size).argsort()]\n"
            "def tokens_for_heads(y, cp):\n    n = y.shape[1] // cp.size\n    parts = y[:, order(n, cp.size)].chunk(cp.size, 1)\n    send = torch.cat(parts)\n"
            "    out = torch.empty_like(send)\n    dist.all_to_all_single(out, send, group=cp.group)\n    return out",
        # the functional collective
        changed("ulysses", ("dist.all_to_all_single(arrived, x.contiguous(), group=cp.group)",
            "import torch.distributed._functional_collectives as fc\n    arrived = fc.all_to_all_single(x.contiguous(), None, None, cp.group).clone()")),
        HEAD + "def places(s, C, r):\n    n = s // (2 * C)\n    return [*range(r * n, r * n + n), *range(s - r * n - n, s - r * n)]\n"
            "def heads_for_tokens(x, cp):\n    got = torch.empty_like(x)\n    dist.all_to_all_single(got, x, group=cp.group)\n    s = x.shape[1] * cp.size\n"
            "    out = x.new_empty(x.shape[0] // cp.size, s, x.shape[2])\n    for r, part in enumerate(got.chunk(cp.size)):\n        out[:, places(s, cp.size, r)] = part\n    return out\n"
            "def tokens_for_heads(y, cp):\n    send = torch.cat([y[:, places(y.shape[1], cp.size, r)] for r in range(cp.size)])\n"
            "    got = torch.empty_like(send)\n    dist.all_to_all_single(got, send, group=cp.group)\n    return got",
    ],
    "blocks_used": [
        changed("blocks_used", ("used.append(int(torch.stack(apart).argmin()))", "used.append(min(range(len(ks)), key=lambda j: apart[j].item()))")),
        HEAD + "from exercises.piece_backward import piece_backward\ndef blocks_used(dqs, dout, q, out, lse, ks, vs, at, rank):\n    C = len(ks)\n"
            "    return [next(j for j in range(C) if torch.allclose(piece_backward(dout, q, ks[j], vs[j], out, lse, at[rank], at[(rank - i) % C])[0], dqs[i], rtol=1e-3, atol=1e-4)) for i in range(C)]",
        HEAD + "def blocks_used(dqs, dout, q, out, lse, ks, vs, at, rank):\n    C, used = len(ks), []\n    for i, got in enumerate(dqs):\n        see = at[rank][:, None] >= at[(rank - i) % C]\n"
            "        def dq(j):\n            p = torch.exp(q @ ks[j].mT / q.shape[-1] ** 0.5 - lse[..., None]).masked_fill(~see, 0)\n"
            "            return p * (dout @ vs[j].mT - (dout * out).sum(-1, keepdim=True)) @ ks[j] / q.shape[-1] ** 0.5\n"
            "        used += [min(range(C), key=lambda j: float((dq(j) - got).abs().max()))]\n    return used",
    ],
    "answers": [
        changed("answers", ("(2 * cp - 1) / cp", "2 - 1 / cp")),
        changed("answers", ("(2 * cp - 1) / cp", "cp * (s * (s // cp) - (s // cp) ** 2 / 2) / (s * s / 2)")),  # to within a token
        "def answers(s, cp, tp, heads, groups, element_size, flops, bandwidth):\n    n = s / cp\n    last = sum(range(s - s // cp + 1, s + 1))\n"
            "    return dict(slowest_over_mean=last / (s * (s + 1) / 2 / cp), ring_over_ulysses=2 * (cp - 1) * n * groups / ((cp - 1) / cp * n * 2 * (heads + groups)),\n"
            "                largest_ulysses=groups / tp, sequence_multiple=2.0 * cp * tp, tokens_to_hide=flops / bandwidth * element_size * groups / heads)",
    ],
}  # fmt: skip

test_other_right_answers_get_full_marks = MARKED.right_answers(RIGHT)


def test_every_exercise_has_three_other_right_answers():
    MARKED.assert_three_each(RIGHT)


# Everybody's keys and values at once, then the right attention.
GATHERED = (
    HEAD
    + PIECE
    + """
def ring_forward(q, k, v, at, cp):
    both = []
    for x in (k, v):
        parts = [torch.empty_like(x) for _ in range(cp.size)]
        dist.all_gather(parts, x, group=cp.group)
        both.append(torch.cat(parts, 1))
    return piece(q, *both, at[cp.rank], torch.cat(at))
"""
)

# The gradient of the gathered keys, reduced over the ranks.
REDUCED = (
    HEAD
    + """
from exercises.piece_backward import piece_backward
def ring_backward(dout, q, k, v, out, lse, at, cp):
    both = []
    for x in (k, v):
        parts = [torch.empty_like(x) for _ in range(cp.size)]
        dist.all_gather(parts, x, group=cp.group)
        both.append(torch.cat(parts, 1))
    dq, dk, dv = piece_backward(dout, q, *both, out, lse, at[cp.rank], torch.cat(at))
    for x in (dk, dv):
        dist.all_reduce(x, group=cp.group)
    n = q.shape[1]
    mine = slice(cp.rank * n, cp.rank * n + n)
    return dq, dk[:, mine].contiguous(), dv[:, mine].contiguous()
"""
)

# exercise -> [(wrong answer, words of the hint or of a row)]
WRONG = {
    "bytes_per_layer": [
        (changed("bytes_per_layer", ("* 2 * groups * a_head", "* groups * a_head")), "Keys *and* values"),
        (changed("bytes_per_layer", ("* 2 * groups * a_head", "* 2 * heads * a_head")), "`groups` heads, not"),
        (changed("bytes_per_layer", ("(cp - 1) * 2 * groups", "cp * 2 * groups")), "C-1 steps"),
        (changed("bytes_per_layer", ("(cp - 1) / cp * (2", "(2")), "keeps its own share"),
        (changed("bytes_per_layer", ("(2 * heads + 2 * groups)", "(heads + 2 * groups)")), "*output* comes back"),
    ],
    "work": [
        (changed("work", ("range(c * n + 1, (c + 1) * n + 1)", "range(c * n, (c + 1) * n)")), "also sees itself"),
        (changed("work", ("if zigzag", "if False")), "chunks r and 2C-1-r"),
        ("def work(s, cp, zigzag):\n    return [s // cp * s] * cp", "nothing that comes after"),
    ],
    "attend": [
        (changed("attend", (" / q.shape[-1] ** 0.5", "")), "divided by sqrt(d)"),
        (changed("attend", (".masked_fill(at > q_at[:, None], -torch.inf)", ""), ("if at.min() > q_at.max():", "if False:")), "j <= i only"),
        (HEAD + "def attend(q, k, v, q_at, k_at, block):\n    p = torch.exp((q @ k.mT / q.shape[-1] ** 0.5).masked_fill(q_at[:, None] < k_at, -torch.inf))\n"
            "    l = p.sum(-1)\n    return p @ v / l[..., None], l.log()", "subtract the running maximum"),
        (changed("attend", ("total * shrink", "total"), ("out * shrink", "out")), "shrinks by exp"),
        (changed("attend", ("        if at.min() > q_at.max():\n            continue\n", "")), "are hidden"),
        (HEAD + PIECE + "def attend(q, k, v, q_at, k_at, block):\n    return piece(q, k, v, q_at, k_at)", "half of one head's scores"),
        (changed("attend", ("total.masked_fill(total == 0, 1.0)", "total")), "A query that sees nothing"),
    ],
    "merge": [
        (HEAD + "def merge(out, lse, more, more_lse):\n    return (out + more) / 2, torch.logaddexp(lse, more_lse)", "This is the average"),
        (HEAD + "def merge(out, lse, more, more_lse):\n    return out + more, torch.logaddexp(lse, more_lse)", "divided by its own sum"),
        (HEAD + "def merge(out, lse, more, more_lse):\n    a, b = lse.exp()[..., None], more_lse.exp()[..., None]\n"
            "    return (a * out + b * more) / (a + b), (a + b).log().squeeze(-1)", "exp(lse) overflows"),
        (changed("merge", ("more, total", "more, lse + more_lse")), "not their logarithms"),
        (changed("merge", ("total.masked_fill(total == -torch.inf, 0.0)", "total")), "take 0 in its place"),
    ],
    "positions": [
        ("import torch\ndef positions(s, cp, rank):\n    return torch.arange(s).chunk(cp)[rank]", "contiguous cut"),
        ("import torch\ndef positions(s, cp, rank):\n    return torch.arange(s // cp)", "places on the rank"),
        ("import torch\ndef positions(s, cp, rank):\n    return torch.arange(rank, s, cp)", "Striped"),
        (changed("positions", ("(chunks[rank], chunks[2 * cp - 1 - rank])", "(chunks[2 * cp - 1 - rank], chunks[rank])")), "comes first"),
    ],
    "ring_forward": [
        (GATHERED, "it calls all_gather"),
        (changed("ring_forward", ("            block = shift.wait()", "            shift.wait()")), "The same keys and values at every step"),
        (changed("ring_forward", ("range(cp.size):", "range(1):")), "own block alone"),
        (BY_CASES.replace("        else:\n            late =", "        elif False:\n            late ="), "Blocks of later ranks are not hidden"),
        (BY_CASES.replace("* q.shape[-1] ** -0.5", ""), "divided by sqrt(d)"),
        (BY_CASES.replace("see = (", "see = (q_at[:, None] > -1) | ("), "At step i"),
        (changed("ring_forward", ("mine = q.shape[1] // 2, at[cp.rank]", "mine = q.shape[1] // 2, torch.arange(q.shape[1])"), ("at[owner]", "mine")), "at[cp.rank] and at[owner]"),
        (HEAD + PIECE + "from minimegatron.comm.ring import Shift\ndef ring_forward(q, k, v, at, cp):\n    block, outs, lses = torch.stack((k, v)), [], []\n    for i in range(cp.size):\n"
            "        o, l = piece(q, *block, at[cp.rank], at[(cp.rank - i) % cp.size])\n        outs.append(o); lses.append(l)\n        block = Shift(block, cp).wait() if i < cp.size - 1 else block\n"
            "    return torch.stack(outs).mean(0), torch.logsumexp(torch.stack(lses), 0)", "not averaged"),
        # waits before it computes
        (changed("ring_forward", ("        owner = (cp.rank", "        new = shift.wait() if shift else None\n        owner = (cp.rank"), ("block = shift.wait()", "block = new")), "while send travels"),
        # all of q against all of the block
        (changed("ring_forward", ("(slice(0, half), slice(half, None))", "(slice(None),)"), (", half)\n", ", 2 * half)\n")), "without the hidden halves"),
        # a block further than needed
        (changed("ring_forward", ("if step < cp.size - 1 else None", "if True else None")), "(C-1) blocks"),
        # straight to everybody
        (HEAD + PIECE + "def ring_forward(q, k, v, at, cp):\n    mine = torch.stack((k, v))\n    got, works = [mine if r == cp.rank else torch.empty_like(mine) for r in range(cp.size)], []\n"
            "    for r in range(cp.size):\n        if r != cp.rank:\n            works += [dist.isend(mine, r), dist.irecv(got[r], r)]\n    [w.wait() for w in works]\n    kv = torch.cat(got, 2)\n"
            "    return piece(q, kv[0], kv[1], at[cp.rank], torch.cat(at))", "to the next rank only"),
    ],
    "piece_backward": [
        (changed("piece_backward", (" - (dout * out).sum(-1, keepdim=True)", "")), "P (dP - D)"),
        (changed("piece_backward", ("keepdim=True)) * sigma", "keepdim=True))")), "so are dS"),
        (changed("piece_backward", ("scores - lse[..., None]", "scores - scores.logsumexp(-1, keepdim=True).nan_to_num(neginf=0.0)")), "*final* lse"),
    ],
    "ring_backward": [
        (REDUCED, "it calls all_gather"),
        (changed("ring_backward", ("        more, dk, dv", "        more, *both"), ("dq += more", "dq += more\n        dk, dv = both"),
            ("    dk, dv = behind.wait()\n", "        if step == 0:\n            own = both\n    behind.wait()\n    dk, dv = own\n")), "must travel with the block"),
        # the last hop is missing
        (changed("ring_backward", ("    dk, dv = behind.wait()", "    behind.wait()\n    dk, dv = part")), "one more hop"),
        (changed("ring_backward", ("part += behind.wait()", "behind.wait()")), "must be *added*"),
        # stale: each rank begins with the block it received last in the forward
        (changed("ring_backward", ("torch.stack((k, v))\n", "torch.stack((k, v))\n    for _ in range(cp.size - 1):\n        block = Shift(block, cp, tag=2).wait()\n")), "another rank's keys and values"),
        (changed("ring_backward", ("torch.stack((k, v))\n", "torch.stack((k, v))\n    block = Shift(block, cp, tag=2).wait()\n")), "another rank's keys and values"),
        (changed("ring_backward", ("at[owner])", "at[cp.rank])")), "At each step"),
    ],
    "ulysses": [
        (changed("ulysses", (".flip(0)", "")), "rank order, then the late ones in reverse"),
        (changed("ulysses", ("chunks = torch.cat((halves[:, :, 0], halves[:, :, 1].flip(0)))", "chunks = halves.transpose(1, 2).flatten(0, 1)")), "Put them in the order"),
        (changed("ulysses", ("torch.stack((chunks[: cp.size], chunks[cp.size :].flip(0)), dim=2).flatten(2, 3)", "chunks.unflatten(0, (cp.size, 2)).transpose(1, 2).flatten(2, 3)")), "not a contiguous piece"),
        (HEAD + "def order(n, C):\n    h = n // 2\n    return torch.cat([torch.cat((torch.arange(r * h, r * h + h), torch.arange((2 * C - 1 - r) * h, (2 * C - r) * h))) for r in range(C)])\n"
            "def heads_for_tokens(x, cp):\n    parts = [torch.empty_like(x) for _ in range(cp.size)]\n    dist.all_gather(parts, x)\n"
            "    return torch.cat(parts, 1)[:, order(x.shape[1], cp.size).argsort()].chunk(cp.size)[cp.rank].contiguous()\n"
            "def tokens_for_heads(y, cp):\n    parts = [torch.empty_like(y) for _ in range(cp.size)]\n    dist.all_gather(parts, y)\n    n = y.shape[1] // cp.size\n"
            "    return torch.cat(parts)[:, order(n, cp.size)].chunk(cp.size, 1)[cp.rank].contiguous()", "it calls all_gather"),
    ],
    "blocks_used": [
        ("def blocks_used(dqs, dout, q, out, lse, ks, vs, at, rank):\n    return [(rank - i) % len(ks) for i in range(len(ks))]", "*should* be used"),
        ("def blocks_used(dqs, dout, q, out, lse, ks, vs, at, rank):\n    return [(rank + 1 - i) % len(ks) for i in range(len(ks))]", "Test every block"),
        (changed("blocks_used", ("k_at = at[(rank - step) % len(ks)]", "k_at = at[rank]"), ("argmin", "argmax")), "At step i the mask"),
    ],
    "answers": [
        (changed("answers", ("groups * element_size * flops / (heads", "groups * element_size * flops / (2 * heads")), "Half of the pairs"),
        (changed("answers", ("groups * element_size * flops / (heads * bandwidth)", "element_size * flops / bandwidth")), "the work has `heads`"),
        (changed("answers", ("2 * cp * tp", "2 * cp")), "again, over tp"),
        (changed("answers", ("groups // tp", "heads // tp")), "fewer heads than queries"),
        (changed("answers", ("cp * groups / (heads + groups)", "cp")), "the ring 2 groups"),
        (changed("answers", ("(2 * cp - 1) / cp", "cp")), "the mean is 1/C"),
    ],
}  # fmt: skip

test_each_mistake_loses_points_and_is_told_why = MARKED.wrong_answers(WRONG)
test_an_answer_that_returns_nothing_scores_nothing = MARKED.empty_answers()

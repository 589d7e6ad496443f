"""Lab 05's checks: the stub scores nothing, the solution everything, other right answers too, each mistake its hint."""

from __future__ import annotations

import itertools

import pytest
import torch

from labkit.exercises import Draw
from minimegatron.layers.dispatch import dispatch_bytes
from minimegatron.layers.router import Routing, balance_scores, balancing_loss, choose
from minimegatron.layers.router import limit as package_limit
from minimegatron.models.zoo import family_config
from tests.labkit.marked import Marked

MARKED = Marked("05_moe_ep", imports=True)
LAB, changed = MARKED.lab, MARKED.changed
HEAD = "import math\nimport torch\nimport torch.distributed as dist\nimport torch.nn.functional as F\nfrom minimegatron.comm.collectives import all_reduce\n"


test_the_stub_scores_nothing_and_the_solution_everything = MARKED.stubs_and_solutions()


# Counts by an all-to-all of their own, rows in one index.
BY_INDEX = (
    HEAD
    + """
def order(blocks):
    n, starts = blocks.flatten(), blocks.flatten().cumsum(0) - blocks.flatten()
    P, local = blocks.shape
    places = [torch.arange(n[i * local + e]) + starts[i * local + e] for e in range(local) for i in range(P)]
    return torch.cat(places)
def exchange(x, outs, ins, ep):
    out = x.new_empty(sum(outs), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), outs, ins, group=ep.group)
    return out
def dispatch(rows, counts, ep):
    blocks = torch.empty_like(counts)
    dist.all_to_all_single(blocks, counts, group=ep.group)
    blocks = blocks.view(ep.size, -1)
    got = exchange(rows, blocks.sum(1).tolist(), counts.view(ep.size, -1).sum(1).tolist(), ep)
    return got[order(blocks)], blocks
def combine(y, blocks, counts, ep):
    back = torch.empty_like(y)
    back[order(blocks)] = y
    return exchange(back, counts.view(ep.size, -1).sum(1).tolist(), blocks.sum(1).tolist(), ep)
"""
)

# Messages from rank to rank, one for each pair of ranks that has something to say.
BY_MESSAGES = (
    HEAD
    + """
def swap(parts, shapes, ep):
    got, works = [], []
    for r in range(ep.size):
        got.append(parts[r] if r == ep.rank else parts[r].new_empty(shapes[r], *parts[r].shape[1:]))
    for r in range(ep.size):
        if r != ep.rank and shapes[r]:
            works.append(dist.irecv(got[r], ep.ranks[r], group=ep.group))
        if r != ep.rank and len(parts[r]):
            works.append(dist.isend(parts[r].contiguous(), ep.ranks[r], group=ep.group))
    [work.wait() for work in works]
    return got
def dispatch(rows, counts, ep):
    blocks = torch.stack(swap(list(counts.view(ep.size, -1)), [len(counts) // ep.size] * ep.size, ep))
    got = swap(list(rows.split(counts.view(ep.size, -1).sum(1).tolist())), blocks.sum(1).tolist(), ep)
    pieces = [part.split(block.tolist()) for part, block in zip(got, blocks)]
    return torch.cat([p[e] for e in range(blocks.shape[1]) for p in pieces]), blocks
def combine(y, blocks, counts, ep):
    mine, pieces = list(y.split(blocks.T.flatten().tolist())), []
    for i in range(ep.size):
        pieces.append(torch.cat(mine[i :: ep.size]))
    return torch.cat(swap(pieces, counts.view(ep.size, -1).sum(1).tolist(), ep))
"""
)

RIGHT = {
    "bytes_per_layer": [
        "def bytes_per_layer(tokens, h, experts, k, ep, element_size):\n    rows, others = k * tokens / ep, ep - 1\n    there, back = rows * (h * element_size + 4), rows * h * element_size\n"
            "    return dict(alltoall=others * (there + back), allgather=others * (tokens * (h * element_size + experts * 5) + tokens * h * element_size))",
        changed("bytes_per_layer", ("(ep - 1) / ep * k * tokens", "k * (tokens - tokens / ep)")),
        "def bytes_per_layer(tokens, h, experts, k, ep, element_size):\n    a = sum(k * tokens / ep * (2 * h * element_size + 4) for r in range(1, ep))\n"
            "    g = sum(tokens * (2 * h * element_size + 4 * experts + experts) for r in range(1, ep))\n    return {'alltoall': a, 'allgather': g}",
    ],
    "expected_drops": [
        "import math\ndef expected_drops(tokens, experts, k, factor):\n    p, C = k / experts, -int(-tokens * k * factor // experts)\n"
            "    kept = sum(min(n, C) * math.comb(tokens, n) * p**n * (1 - p) ** (tokens - n) for n in range(tokens + 1))\n    return {'capacity': C, 'dropped': 1 - kept / (tokens * p)}",
        # the distribution by repeated convolution
        "import math\nimport torch\ndef expected_drops(tokens, experts, k, factor):\n    p, d = k / experts, torch.zeros(tokens + 1, dtype=torch.float64)\n    d[0] = 1\n    for _ in range(tokens):\n"
            "        d = d * (1 - p) + torch.cat((torch.zeros(1), d[:-1])) * p\n    C = math.ceil(tokens * k * factor / experts)\n    n = torch.arange(tokens + 1)\n"
            "    return {'capacity': C, 'dropped': ((n - C).clamp(min=0) * d).sum() * experts / (k * tokens)}",
        changed("expected_drops", ("math.log(1 - p)", "math.log1p(-p)"), ("over / mean", "experts * over / (k * tokens)")),
    ],
    "route": [
        HEAD + "def route(x, weight, k):\n    logits = F.linear(x.float(), weight.float())\n    map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.topk(k).indices, True)\n"
            "    return logits.masked_fill(~map, -torch.inf).softmax(-1), map",
        # softmax over all, then made whole
        HEAD + "def route(x, weight, k):\n    p = (x.float() @ weight.float().T).softmax(-1)\n    v, i = p.topk(k)\n    z = torch.zeros_like(p)\n"
            "    return z.scatter(1, i, v / v.sum(-1, keepdim=True)), z.scatter(1, i, 1).bool()",
        # in double, token by token
        HEAD + "def route(x, weight, k):\n    probs, map = [], []\n    for row in x:\n        logits = weight.double() @ row.double()\n        kth = logits.sort().values[-k]\n        m = logits >= kth\n"
            "        e = (logits - logits.max()).exp() * m\n        probs.append((e / e.sum()).float())\n        map.append(m)\n    return torch.stack(probs), torch.stack(map)",
    ],
    "balance": [
        HEAD + "def balance(logits, k, coeff):\n    T, E = logits.shape\n    p = torch.softmax(logits.double(), 1)\n    n = torch.zeros(T, E, dtype=torch.float64).scatter(1, logits.topk(k).indices, 1).sum(0)\n"
            "    loss = coeff * E / (k * T * T) * (n * p.sum(0)).sum()\n    c = coeff * E / (k * T * T) * n\n    return loss.float(), (p * c - p * (p @ c)[:, None]).float()",
        # the softmax's Jacobian, written out
        HEAD + "def balance(logits, k, coeff):\n    T, E = logits.shape\n    p = logits.softmax(-1)\n    f = torch.bincount(logits.argsort(-1)[:, -k:].flatten(), minlength=E) / (k * T)\n    g = coeff * E * f / T\n"
            "    J = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]\n    return (p @ g).sum().item(), torch.einsum('tij,j->ti', J, g)",
        changed("balance", ("logits.softmax(-1)", "torch.exp(logits - logits.logsumexp(-1, keepdim=True))")),
    ],
    "expert_bias": [
        HEAD + "def choose(scores, bias, k):\n    i = (scores + bias).argsort(-1, descending=True)[:, :k]\n    w = scores.gather(1, i)\n    z = torch.zeros_like(scores)\n"
            "    return z.scatter(1, i, F.normalize(w, p=1, dim=-1)), z.scatter(1, i, 1.0) > 0\n"
            "def move_bias(bias, counts, rate):\n    even = counts.sum() / len(counts)\n    return bias + rate * ((counts < even).float() - (counts > even).float())",
        changed("expert_bias", ("counts = counts.float()\n    return bias + rate * (counts.mean() - counts).sign()", "return bias - rate * torch.sign(counts * len(counts) - counts.sum())")),
        HEAD + "def choose(scores, bias, k):\n    map = torch.stack([torch.isin(torch.arange(len(s)), (s + bias).topk(k).indices) for s in scores])\n    w = torch.where(map, scores, 0.0)\n"
            "    return w / w.sum(1)[:, None], map\ndef move_bias(bias, counts, rate):\n    mean = sum(counts.tolist()) / len(counts)\n"
            "    return torch.stack([b + rate if n < mean else b - rate if n > mean else b for b, n in zip(bias, counts.tolist())])",
    ],
    "permute": [
        # pair by pair
        HEAD + "def permute(tokens, probs, map):\n    pairs = [(t, e) for e in range(map.shape[1]) for t in range(len(map)) if map[t, e]]\n    source = torch.tensor([t for t, _ in pairs], dtype=torch.int64)\n"
            "    return tokens[source], torch.stack([probs[t, e] for t, e in pairs]), source\n"
            "def unpermute(rows, source, tokens):\n    return torch.stack([rows[source == t].sum(0) for t in range(tokens)])",
        # one matrix: its product permutes, its transpose brings back
        HEAD + "def permute(tokens, probs, map):\n    source = torch.arange(len(map)).expand(map.shape[1], -1)[map.T]\n    one = F.one_hot(source, len(map)).to(tokens.dtype)\n    return one @ tokens, probs.T[map.T], source\n"
            "def unpermute(rows, source, tokens):\n    return F.one_hot(source, tokens).to(rows.dtype).T @ rows",
        changed("permute", ("tokens[source], probs[source, expert]", "tokens.index_select(0, source), probs.T.masked_select(map.T)"),
            (".index_add(0, source, rows)", ".scatter_add(0, source[:, None].expand_as(rows), rows)")),
    ],
    "dispatch": [
        BY_INDEX,
        BY_MESSAGES,
        # lists of tensors, as `dist.all_to_all` would have them, and a sort by expert
        changed("dispatch", ("    by_sender = out.split(blocks.flatten().tolist())\n    local = blocks.shape[1]\n    return torch.cat([by_sender[i * local + e] for e in range(local) for i in range(ep.size)]), blocks.contiguous()",
            "    expert = torch.arange(blocks.shape[1]).repeat(ep.size).repeat_interleave(blocks.flatten())\n    return out[expert.argsort(stable=True)], blocks.contiguous()")),
    ],
    "limit": [
        HEAD + "def limit(probs, map, capacity):\n    top = torch.where(map, probs, -1.0).topk(min(capacity, len(map)), dim=0).indices\n    kept = torch.zeros_like(map).scatter(0, top, True) & map\n    return torch.where(kept, probs, 0.0), kept",
        # expert by expert
        HEAD + "def limit(probs, map, capacity):\n    kept = torch.zeros_like(map)\n    for e in range(map.shape[1]):\n        mine = [t for t in range(len(map)) if map[t, e]]\n"
            "        for t in sorted(mine, key=lambda t: -float(probs[t, e]))[:capacity]:\n            kept[t, e] = True\n    return probs * kept, kept",
        # by rank: how many weigh more
        HEAD + "def limit(probs, map, capacity):\n    p = probs.masked_fill(~map, -1)\n    above = (p[None] > p[:, None]).sum(1)\n    kept = map & (above < capacity)\n    return probs.masked_fill(~kept, 0), kept",
    ],
    "finish": [
        # in place, the count in int64
        HEAD + "def finish(dense, expert, tokens, dp, edp):\n    n = torch.tensor([tokens])\n    dist.all_reduce(n, group=dp.group)\n    all_reduce(dense, dp)\n    all_reduce(expert, edp)\n    return dense / n, expert / n",
        # the count travels with the gradients
        HEAD + "def finish(dense, expert, tokens, dp, edp):\n    flat = all_reduce(torch.cat((dense, torch.tensor([float(tokens)]))), dp)\n    n = flat[-1].item()\n    return flat[:-1] / n, all_reduce(expert, edp) / n",
        # in terms of means: over edp, times edp/dp, by the mean count
        HEAD + "def finish(dense, expert, tokens, dp, edp):\n    mean = all_reduce(torch.tensor(tokens / dp.size), dp)\n    d = all_reduce(dense / dp.size, dp) / mean\n"
            "    e = all_reduce(expert / edp.size, edp) * (edp.size / dp.size) / mean\n    return d, e",
    ],
    "suspects": [
        HEAD + "def suspects(got, want):\n    out = {}\n    for n in got:\n        g, w = got[n].double().flatten(), want[n].double().flatten()\n        if torch.dist(g, w) <= 1e-3 * w.norm():\n            continue\n"
            "        f = torch.linalg.lstsq(w[:, None], g[:, None]).solution.item()\n        out[n] = f if torch.dist(g, f * w) <= 1e-3 * g.norm() else float('nan')\n    return out",
        # by the angle
        HEAD + "def suspects(got, want):\n    out = {}\n    for n, w in want.items():\n        g, w = got[n].double(), w.double()\n        if (g - w).norm() <= 1e-3 * w.norm():\n            continue\n"
            "        if g.norm() == 0:\n            out[n] = 0.0\n            continue\n        cos = (g * w).sum() / g.norm() / w.norm()\n        out[n] = float(cos.sign() * g.norm() / w.norm()) if cos.abs() > 1 - 1e-6 else math.nan\n    return out",
        changed("suspects", ("(mine * right).sum() / (right * right).sum()", "torch.dot(mine.flatten(), right.flatten()) / right.norm() ** 2")),
    ],
    "answers": [
        changed("answers", ('"allgather_over_alltoall": ep / k', '"allgather_over_alltoall": 2 * (ep - 1) * tokens * h / (2 * k * tokens * h * (ep - 1) / ep)')),
        "def answers(tokens, h, f, experts, k, ep, dp, element_size, flops, bandwidth):\n    mlp, router = 3 * h * f, h * experts\n    compute = 6 * h * f / flops\n    travel = 2 * h * element_size * (1 - 1 / ep) / bandwidth\n"
            "    return dict(parameters=experts * mlp + router, active_parameters=k * mlp + router, copies_of_an_expert=dp / ep, rows_of_an_expert=tokens * k / (experts / ep),\n"
            "                allgather_over_alltoall=ep / k, compute_over_travel=compute / travel)",
        changed("answers", ("dp // ep", "float(dp) / ep"), ("rows * ep / experts", "ep * tokens * k // experts")),
    ],
}  # fmt: skip

test_other_right_answers_get_full_marks = MARKED.right_answers(RIGHT)


def test_every_exercise_has_three_other_right_answers():
    MARKED.assert_three_each(RIGHT)


# Everybody gets everybody's rows and picks its own.
GATHERED = (
    HEAD
    + """
def dispatch(rows, counts, ep):
    table = [torch.empty_like(counts) for _ in range(ep.size)]
    dist.all_gather(table, counts)
    most = max(int(t.sum()) for t in table)
    padded = torch.cat((rows, rows.new_zeros(most - len(rows), rows.shape[1])))
    all_rows = [torch.empty_like(padded) for _ in range(ep.size)]
    dist.all_gather(all_rows, padded)
    local = len(counts) // ep.size
    mine = slice(ep.rank * local, ep.rank * local + local)
    pieces = [r[: int(t.sum())].split(t.tolist())[mine] for r, t in zip(all_rows, table)]
    return torch.cat([p[e] for e in range(local) for p in pieces]), torch.stack([t[mine] for t in table])
"""
)

# exercise -> [(wrong answer, words of the hint or of a row)]
WRONG = {
    "bytes_per_layer": [
        (changed("bytes_per_layer", ("(row + 4 + row)", "(row + 4)")), "travels back, too"),
        (changed("bytes_per_layer", ("(row + 4 + row)", "(row + row)")), "takes its weight along"),
        (changed("bytes_per_layer", ("(ep - 1) / ep * k", "k")), "and stays"),
        (changed("bytes_per_layer", ("ep * k * tokens", "ep * tokens")), "for each of its k experts"),
        (changed("bytes_per_layer", ("5 * experts + row", "5 * experts")), "come back by a reduce-scatter"),
        (changed("bytes_per_layer", ("(ep - 1) * tokens", "ep * tokens")), "the P-1 *others*"),
        (changed("bytes_per_layer", ("row + 5 * experts + row", "row + row")), "With each token"[5:]),
    ],
    "expected_drops": [
        ("import math\ndef expected_drops(tokens, experts, k, factor):\n    return {'capacity': math.ceil(tokens * k / experts * factor), 'dropped': max(0.0, 1 - factor)}", "Chance is never even"),
        (changed("expected_drops", ("over / mean", "over / (k * tokens)")), "All E of them"),
        (changed("expected_drops", ("over / mean", "over * experts / tokens")), "not of the T tokens"),
        (changed("expected_drops", ("p, mean = k / experts", "p, mean = 1 / experts")), "one of them is k/E"),
        (changed("expected_drops", ("math.ceil", "math.floor")), "rounded up"),
    ],
    "route": [
        (HEAD + "def route(x, weight, k):\n    p = (x.float() @ weight.float().T).softmax(-1)\n    v, i = p.topk(k)\n    z = torch.zeros_like(p)\n    return z.scatter(1, i, v), z.scatter(1, i, 1).bool()", "over the k chosen ones"),
        (changed("route", ("best.values.softmax(-1)", "best.values.softmax(-1).detach()"), ("return probs,", "return probs + 0 * weight.float().sum(),")), "No gradient reaches"),
        (changed("route", ("best.values.softmax(-1)", "torch.full_like(best.values, 1 / k) + 0 * best.values")), "equal ones teach"),
        (changed("route", ("best.values.softmax(-1)", "best.values.exp() / best.values.exp().sum(-1, keepdim=True)")), "overflows"),
        (changed("route", ("x.float() @ weight.float().T", "(x @ weight.T).float()")), "*before* the product"),
        (changed("route", ("return probs,", "return probs.to(x.dtype),")), "must be fp32"),
        (HEAD + "def route(x, weight, k):\n    p = (x.float() @ weight.float().T).softmax(-1)\n    return p, p >= 0", "Keep the k largest"),
    ],
    "balance": [
        (changed("balance", ("p * (price - paid)", "price.expand_as(p).clone()")), "behind a softmax"),
        (changed("balance", ("p * (price - paid)", "p * price")), "two terms"),
        (changed("balance", ("tokens**2", "tokens")), "divide by T^2"),
        (changed("balance", ("coeff * experts / (", "coeff / (")), "whatever E is"),
        (changed("balance", ("(k * tokens**2)", "tokens**2")), "counts for k experts"),
        (HEAD + "def balance(logits, k, coeff):\n    T, E = logits.shape\n    p = logits.softmax(-1)\n    m = p.mean(0)\n    c = 2 * coeff * E * m / T\n"
            "    return coeff * E * (m * m).sum(), p * (c - (p * c).sum(-1, keepdim=True))", "without a gradient"),
        # autograd, where it does not record
        (HEAD + "def balance(logits, k, coeff):\n    x = logits.clone().requires_grad_()\n    T, E = x.shape\n    n = x.topk(k).indices.flatten().bincount(minlength=E)\n    loss = coeff * E / (k * T * T) * (x.softmax(-1).sum(0) * n).sum()\n"
            "    loss.backward()\n    return loss, x.grad", "does not require grad"),
    ],
    "expert_bias": [
        (changed("expert_bias", ("kept = scores * map", "kept = (scores + bias) * map")), "not in what it counts"),
        (changed("expert_bias", ("(scores + bias).topk", "scores.topk")), "score plus bias"),
        (changed("expert_bias", ("(counts.mean() - counts)", "(counts - counts.mean())")), "*larger* bias"),
        (changed("expert_bias", ("(counts.mean() - counts).sign()", "(counts.mean() - counts)")), "not the gap"),
        (changed("expert_bias", ("(counts.mean() - counts).sign()", "(counts.mean() - counts) / counts.sum()")), "not the gap"),
    ],
    "permute": [
        (changed("permute", ("expert, source = map.T.nonzero(as_tuple=True)", "source, expert = map.nonzero(as_tuple=True)")), "sorted by token"),
        (changed("permute", ("probs[source, expert]", "probs[map]")), "another row's weight"),
        (HEAD + "def permute(tokens, probs, map):\n    expert, source = map.T.nonzero(as_tuple=True)\n    return tokens[source], probs[source, expert], source\n"
            "def unpermute(rows, source, tokens):\n    out = rows.new_zeros(tokens, rows.shape[1])\n    out[source] = rows\n    return out", "keeps the last"),
        (changed("permute", ("    return rows.new_zeros(tokens, rows.shape[1]).index_add(0, source, rows)",
            "    n = source.bincount(minlength=tokens).clamp(min=1)\n    return rows.new_zeros(tokens, rows.shape[1]).index_add(0, source, rows) / n[:, None]")), "not averaged"),
        (changed("permute", ("tokens[source]", "tokens.detach()[source]")), "does not require grad"),
    ],
    "dispatch": [
        (GATHERED + "def combine(y, blocks, counts, ep):\n    return 3 * KEPT[0]\n" + "KEPT = []\nplain = dispatch\ndef dispatch(rows, counts, ep):\n    KEPT.append(rows)\n    return plain(rows, counts, ep)\n", "busiest rank's rows"),
        (changed("dispatch", ("torch.cat([by_sender[i * local + e] for e in range(local) for i in range(ep.size)])", "out"),
            ("torch.cat([by_expert[e * ep.size + i] for i in range(ep.size) for e in range(local)])", "y")), "arrive by sender"),
        (changed("dispatch", ("torch.cat([by_expert[e * ep.size + i] for i in range(ep.size) for e in range(local)])", "y")), "back in the order in which they came"),
        (changed("dispatch", ("blocks.contiguous()", "blocks.T.contiguous()"), ("    by_expert", "    blocks = blocks.T\n    by_expert")), "blocks[i, e]"),
        # stays away when it has nothing to send
        (changed("dispatch", ("    splits = blocks.sum(1).tolist(), counts", "    if not len(rows) and not len(out):\n        return out, blocks\n    splits = blocks.sum(1).tolist(), counts.flip(0)")), "rank"),
    ],
    "limit": [
        (HEAD + "def limit(probs, map, capacity):\n    kept = map & (map.cumsum(0) <= capacity)\n    return probs * kept, kept", "first to come"),
        (changed("limit", ("return probs * kept, kept", "left = probs * kept\n    return left / left.sum(-1, keepdim=True).clamp(min=1e-9), kept")), "do not change"),
        (changed("limit", ("return probs * kept, kept", "return probs * kept, map")), "`map` must say"),
        (changed("limit", (" & map", "")), "did not choose it"),
        (HEAD + "def limit(probs, map, capacity):\n    top = probs.topk(min(capacity, probs.shape[1]), dim=1).indices\n    kept = torch.zeros_like(map).scatter(1, top, True) & map\n    return probs * kept, kept", "down the columns"),
    ],
    "finish": [
        (changed("finish", ("all_reduce(expert.clone(), edp) / every", "all_reduce(expert.clone(), edp) / all_reduce(torch.tensor(float(tokens)), edp)")), "the tokens of edp alone"),
        (changed("finish", ("edp) / every", "edp) / every / edp.size")), "by a number of ranks"),
        (changed("finish", ("edp) / every", "edp) / every * edp.size / dp.size")), "by a number of ranks"),
        (changed("finish", ("edp) / every", "edp) / every / dp.size")), "by a number of ranks"),
        (changed("finish", ("all_reduce(expert.clone(), edp)", "all_reduce(expert.clone(), dp)")), "*different* experts"),
        (changed("finish", ("all_reduce(expert.clone(), edp)", "expert")), "saw other tokens"),
        (changed("finish", ("all_reduce(dense.clone(), dp) / every", "all_reduce(dense / tokens, dp) / dp.size")), "mean of means"),
        (changed("finish", (" / every", "")), "not divided yet"),
        # torch's all-reduce without a group is one over all ranks
        (HEAD + "def finish(dense, expert, tokens, dp, edp):\n    n = torch.tensor(float(tokens))\n    dist.all_reduce(n, group=dp.group)\n    dist.all_reduce(dense, group=dp.group)\n    dist.all_reduce(expert, group=edp.group)\n    return dense / n, expert / n", "*different* experts"),
    ],
    "suspects": [
        ("def suspects(got, want):\n    return {n: (got[n].norm() / w.norm()).item() for n, w in want.items() if abs(got[n].norm() / w.norm() - 1) > 1e-3}", "does not see a direction"),
        (changed("suspects", ("(right * right).sum()", "(mine * mine).sum()"), ("mine - factor * right", "right - factor * mine")), "got over want"),
        (changed("suspects", ("            continue", "            found[name] = 1.0\n            continue")), "Leave out"),
        (changed("suspects", ("1e-3 * right.norm()", "1e-3")), "1e-3 |want|"),
    ],
    "answers": [
        (changed("answers", ("3 * h * f", "2 * h * f")), "three matrices"),
        (changed("answers", (" + experts * h", "")), "The router is a matrix, too"),
        (changed("answers", ("k * one + experts * h", "k * (one + h)")), "the whole router"),
        (changed("answers", ("dp // ep", "dp")), "dp/ep copies"),
        (changed("answers", ("rows * ep / experts", "rows / experts")), "rows from all ep ranks"),
        (changed("answers", ("ep / k", "(ep - 1) / k")), "keeps its own share"),
        (changed("answers", ("2 * one * rows", "one * rows")), "is two operations"),
        (changed("answers", ("2 * rows * h", "rows * h")), "there and back"),
        (changed("answers", ("* (ep - 1) / ep /", "/")), "(P-1)/P travel"),
    ],
}  # fmt: skip

test_each_mistake_loses_points_and_is_told_why = MARKED.wrong_answers(WRONG)


def config_of(**fields):
    return family_config("mixtral", num_layers=1, num_attention_heads=1, vocab_size=8, **{"hidden_size": 8, **fields})


def drawn(exercise, seed):
    """The inputs of the first hidden case."""
    return next(case.inputs(Draw(seed)) for case in LAB[exercise].cases if case.hidden)


@pytest.mark.parametrize("seed", range(3))
def test_what_the_judge_takes_for_right_is_what_the_package_does(seed):
    i = drawn("bytes_per_layer", seed)
    for way in ("alltoall", "allgather"):
        config = config_of(
            hidden_size=i["h"], num_experts=i["experts"], moe_router_topk=i["k"], moe_token_dispatcher_type=way
        )
        counted = dispatch_bytes(config, i["tokens"], i["ep"], 1, i["element_size"])
        rows = sum(n for what, n in counted.items() if way == "allgather" or what == "all_to_all/ep")
        assert LAB["bytes_per_layer"].reference(**i)[way] == rows * (i["ep"] - 1) / i["ep"]

    i = drawn("balance", seed)
    logits = i["logits"].double().requires_grad_()
    config = config_of(num_experts=logits.shape[1], moe_router_topk=i["k"])
    scores, chosen = balance_scores(logits, config)
    loss = i["coeff"] * balancing_loss(scores, chosen.sum(0, keepdim=True) / len(chosen), i["k"]) / len(chosen)
    loss.backward()
    right = LAB["balance"].reference(**i)
    assert right["loss"] == pytest.approx(loss.item())
    torch.testing.assert_close(right["gradient"], logits.grad.float())

    i = drawn("expert_bias", seed)
    config = config_of(
        num_experts=i["scores"].shape[1],
        moe_router_topk=i["k"],
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )
    weights, chosen = choose(torch.logit(i["scores"].double()), config, i["bias"].double())
    torch.testing.assert_close(
        LAB["expert_bias"].reference(**i)["probs"], torch.zeros_like(i["scores"]).scatter(1, chosen, weights.float())
    )

    i = drawn("limit", seed)
    kept = package_limit(Routing(i["probs"], i["map"]), i["capacity"], config_of(num_experts=i["map"].shape[1]))
    assert all(map(torch.equal, LAB["limit"].reference(**i), kept))


def test_the_expected_drops_are_the_mean_over_all_choices():
    tokens, experts, k, capacity = 4, 4, 2, 3
    every = list(itertools.product(itertools.combinations(range(experts), k), repeat=tokens))
    over = sum(max(0, sum(e in one for one in chosen) - capacity) for chosen in every for e in range(experts))
    right = LAB["expected_drops"].reference(tokens, experts, k, 1.5)
    assert right == {"capacity": capacity, "dropped": pytest.approx(over / len(every) / (tokens * k))}


test_an_answer_that_returns_nothing_scores_nothing = MARKED.empty_answers()

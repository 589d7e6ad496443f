"""Lab 01's checks: the stub scores nothing, the solution everything, other right answers too, each mistake its hint."""

from __future__ import annotations

from tests.labkit.marked import Marked

MARKED = Marked("01_process_groups")
changed = MARKED.changed
DIST = "import torch\nimport torch.distributed as dist\n"


test_the_stub_scores_nothing_and_the_solution_everything = MARKED.stubs_and_solutions()


RIGHT = {
    "bytes_sent": [
        "def bytes_sent(op, nbytes, ranks):\n"
        "    steps = (ranks - 1) * (2 if op == 'all_reduce' else 1)\n    return steps * nbytes / ranks",
        "from fractions import Fraction\ndef bytes_sent(op, nbytes, ranks):\n    part = Fraction(nbytes, ranks)\n"
        "    return float({'all_reduce': 2}.get(op, 1) * (ranks * part - part))",
        "def bytes_sent(op, nbytes, ranks):\n    if op == 'all_reduce':\n"
        "        return bytes_sent('reduce_scatter', nbytes, ranks) + bytes_sent('all_gather', nbytes, ranks)\n"
        "    return nbytes - nbytes / ranks",
    ],
    "axis_groups": [
        # by hand: coordinates of every rank, collected by those that stay fixed
        "import math\ndef axis_groups(sizes, axes):\n    groups = {}\n    for rank in range(math.prod(sizes.values())):\n"
        "        rest, fixed = rank, []\n        for name, size in sizes.items():\n"
        "            if name not in axes:\n                fixed.append(rest % size)\n            rest //= size\n"
        "        groups.setdefault(tuple(fixed), []).append(rank)\n    return list(groups.values())",
        "import itertools, math\ndef axis_groups(sizes, axes):\n    stride, at = {}, 1\n    for n, s in sizes.items():\n"
        "        stride[n], at = at, at * s\n"
        "    def ranks(names):\n        names = [n for n in reversed(sizes) if names(n)]\n"
        "        return [sum(stride[n] * i for n, i in zip(names, ix)) for ix in "
        "itertools.product(*(range(sizes[n]) for n in names))]\n"
        "    return [[base + m for m in ranks(lambda n: n in axes)] for base in ranks(lambda n: n not in axes)]",
        "import math, numpy\ndef axis_groups(sizes, axes):\n    names = list(sizes)[::-1]\n"
        "    grid = numpy.arange(math.prod(sizes.values())).reshape([sizes[n] for n in names])\n"
        "    order = sorted(range(len(names)), key=lambda i: names[i] in axes)\n"
        "    return grid.transpose(order).reshape(-1, math.prod(sizes[n] for n in axes)).tolist()",
    ],
    "ring_all_reduce": [
        changed("ring_all_reduce", ("sending = dist.isend(parts[send].clone(), right)\n        dist.recv(arriving, left)\n"
            "        sending.wait()", "ops = [dist.P2POp(dist.isend, parts[send].clone(), right), "
            "dist.P2POp(dist.irecv, arriving, left)]\n        for work in dist.batch_isend_irecv(ops):\n            work.wait()")),
        # even ranks send first, odd ranks receive first; the last of an odd ring would wait, so it posts its receive early
        changed("ring_all_reduce", ("sending = dist.isend(parts[send].clone(), right)\n        dist.recv(arriving, left)\n"
            "        sending.wait()", "coming = dist.irecv(arriving, left)\n        dist.send(parts[send].clone(), right)\n"
            "        coming.wait()")),
        DIST + "def ring_all_reduce(x):\n    r, n = dist.get_rank(), dist.get_world_size()\n    size = -(-x.numel() // n)\n"
        "    flat = torch.zeros(size * n, dtype=x.dtype)\n    flat[: x.numel()] = x.flatten()\n    parts = list(flat.chunk(n))\n"
        "    for k in range(2 * n - 2):\n        got = torch.empty(size, dtype=x.dtype)\n"
        "        w = dist.isend(parts[(r - k) % n].contiguous(), (r + 1) % n)\n        dist.recv(got, (r - 1) % n)\n        w.wait()\n"
        "        j = (r - k - 1) % n\n        parts[j] = parts[j] + got if k < n - 1 else got\n"
        "    return torch.cat(parts)[: x.numel()].view_as(x)",
    ],
    "conjugates": [
        changed("conjugates", ("grad = grad.contiguous().clone()", "grad = grad + 0"), ("return x.view_as(x)", "return x.clone()")),
        DIST + "class F(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x, both):\n        ctx.both = both\n"
        "        return F.add(x) if both else x * 1\n    @staticmethod\n    def backward(ctx, g):\n"
        "        return (g if ctx.both else F.add(g)), None\n    @staticmethod\n    def add(x):\n"
        "        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]\n"
        "        dist.all_gather(parts, x.contiguous())\n        return sum(parts)\n"
        "def copy_to(x): return F.apply(x, False)\ndef reduce_from(x): return F.apply(x, True)",
        DIST + "def copy_to(x):\n    y = x.view_as(x) if x.requires_grad else x\n"
        "    def add(g):\n        g = g.clone()\n        dist.all_reduce(g)\n        return g\n    y.register_hook(add)\n    return y\n"
        "def reduce_from(x):\n    total = x.detach().clone()\n    dist.all_reduce(total)\n    return x + (total - x.detach())",
    ],
    "my_samples": [
        "import numpy\ndef my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):\n"
        "    last = consumed + dp_size * micro_batch\n    stream = numpy.concatenate([numpy.random.RandomState(seed + e)"
        ".permutation(num_samples) for e in range(last // num_samples + 1)])\n"
        "    return stream[consumed:last].reshape(dp_size, micro_batch)[dp_rank].tolist()",
        "import numpy, functools\n@functools.lru_cache\ndef order(seed, n):\n    return numpy.random.RandomState(seed).permutation(n)\n"
        "def my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):\n"
        "    at = [consumed + dp_rank * micro_batch + i for i in range(micro_batch)]\n"
        "    return tuple(order(seed + p // num_samples, num_samples)[p % num_samples] for p in at)",
        "import numpy, torch\ndef my_samples(consumed, micro_batch, dp_rank, dp_size, num_samples, seed):\n    out = []\n"
        "    epoch, place = divmod(consumed + dp_rank * micro_batch, num_samples)\n    while len(out) < micro_batch:\n"
        "        p = torch.from_numpy(numpy.random.RandomState(seed + epoch).permutation(num_samples))\n"
        "        out += p[place : place + micro_batch - len(out)].tolist()\n        epoch, place = epoch + 1, 0\n    return out",
    ],
    "overlap": [
        changed("overlap", ("self.open.append(p)", "self.open = self.open + [p]")),
        changed("overlap", ("flat = torch.cat([p.grad.flatten() for p in self.open])",
            "flat = torch.nn.utils.parameters_to_vector([p.grad for p in self.open])")),
        # layout known beforehand: reverse order, a flat buffer, counters
        DIST + "class OverlappedReducer:\n    def __init__(self, params, bucket_size, group=None):\n"
        "        self.group, self.buckets, self.of = group, [[]], {}\n        for p in reversed(params):\n"
        "            if sum(q.numel() for q in self.buckets[-1]) >= bucket_size:\n                self.buckets.append([])\n"
        "            self.buckets[-1].append(p)\n            self.of[p] = len(self.buckets) - 1\n"
        "        self.left = [len(b) for b in self.buckets]\n        self.sent = {}\n        for p in params:\n"
        "            p.register_post_accumulate_grad_hook(self.ready)\n    def ready(self, p):\n        b = self.of[p]\n"
        "        self.left[b] -= 1\n        if self.left[b] == 0:\n"
        "            flat = torch.cat([q.grad.reshape(-1) for q in self.buckets[b]])\n"
        "            self.sent[b] = flat, dist.all_reduce(flat, group=self.group, async_op=True)\n    def finish(self):\n"
        "        for b, (flat, work) in self.sent.items():\n            work.wait()\n            at = 0\n"
        "            for q in self.buckets[b]:\n                q.grad = flat[at : at + q.numel()].view_as(q).clone()\n"
        "                at += q.numel()\n",
    ],
    "rank_loss": [
        changed("rank_loss", ("count.clamp(min=1.0)", "torch.maximum(count, torch.ones(()))")),
        DIST + "def rank_loss(losses, mask, group=None):\n    n = torch.zeros(dist.get_world_size(group))\n"
        "    n[dist.get_rank(group)] = mask.sum()\n    dist.all_reduce(n, group=group)\n"
        "    return torch.dot(losses.flatten(), mask.flatten()) / max(n.sum().item(), 1)",
        DIST + "def rank_loss(losses, mask, group=None):\n    counts = [None] * dist.get_world_size(group)\n"
        "    dist.all_gather_object(counts, int(mask.sum()), group=group)\n    weights = mask / max(1, sum(counts))\n"
        "    return (losses * weights).sum()",
    ],
    "answers": [
        changed("answers", ("group = [tp * i for i in range(cp * dp)]", "group = list(range(0, tp * cp * dp, tp))")),
        changed("answers", ("world // (etp * ep * pp)", "dp * tp * cp // (ep * etp)")),
        changed("answers", ("2 * gigabytes * (len(group) - 1) / len(group) / gb_per_second",
            "2 * (gigabytes - gigabytes / (dp * cp)) / gb_per_second")),
    ],
}  # fmt: skip

test_other_right_answers_get_full_marks = MARKED.right_answers(RIGHT)


def test_every_exercise_has_three_other_right_answers():
    MARKED.assert_three_each(RIGHT)


# exercise -> [(wrong answer, words of the hint)]
WRONG = {
    "bytes_sent": [
        (changed("bytes_sent", ("2 * once", "once")), "reduce-scatter and then an all-gather"),
        (changed("bytes_sent", ("nbytes * (ranks - 1) / ranks", "nbytes")), "N-1 of N parts"),
        (changed("bytes_sent", ("(ranks - 1) / ranks", "(ranks - 1)")), "one part, n/N bytes"),
    ],
    "axis_groups": [
        (changed("axis_groups", ("list(reversed(sizes))", "list(sizes)")), "slowest first"),
        (changed("axis_groups", ("grid.permute(*fixed, *free)", "grid")), "dims last"),
        (changed("axis_groups", (".tolist()", ".tolist()[::-1]")), "grid ="),
    ],
    "ring_all_reduce": [
        (changed("ring_all_reduce", ("return total.view_as(x)", "return total.view_as(x) / n")), "does not divide"),
        (changed("ring_all_reduce", (".add_(", ".copy_(")), "Phase 1"),
        (DIST + "def ring_all_reduce(x):\n    x = x.clone()\n    dist.all_reduce(x)\n    return x", "Phase 1"),
        (DIST + "def ring_all_reduce(x):\n    r, n, total, moving = dist.get_rank(), dist.get_world_size(), x.clone(), x\n"
            "    for _ in range(n - 1):\n        got = torch.empty_like(x)\n        w = dist.isend(moving, (r + 1) % n)\n"
            "        dist.recv(got, (r - 1) % n)\n        w.wait()\n        total, moving = total + got, got\n    return total", "Phase"),
    ],
    "conjugates": [
        (changed("conjugates", ("        dist.all_reduce(grad)\n", "")), "copy_to must sum"),
        (changed("conjugates", ("    def backward(ctx, grad):\n        return grad", "    def backward(ctx, grad):\n"
            "        grad = grad.contiguous().clone()\n        dist.all_reduce(grad)\n        return grad")), "once too often"),
        (changed("conjugates", ("y = x.contiguous().clone()\n        dist.all_reduce(y)\n        return y", "return x * 1")), "all-reduce"),
    ],
    "my_samples": [
        (changed("my_samples", ("seed + epoch", "seed")), "order of its own"),
        (changed("my_samples", ("divmod(position, num_samples)", "(first // num_samples, position % num_samples)")), "each sample"),
        (changed("my_samples", ("first = consumed + dp_rank * micro_batch", "first = consumed + dp_rank"),
            ("range(first, first + micro_batch)", "range(first, first + micro_batch * dp_size, dp_size)")), "contiguous block"),
    ],
    "overlap": [
        (changed("overlap", ("p.grad.copy_(part.view_as(p))", "p.grad.copy_(part.view_as(p) / dist.get_world_size())")), "do not average"),
        (changed("overlap", (">= self.bucket_size", ">= 10**9")), "hook"),
        (changed("overlap", (">= self.bucket_size", ">= 1")), "hook"),
        (changed("overlap", ("        if self.open:\n            self.send()\n        for", "        for")), "hook"),
    ],
    "rank_loss": [
        (DIST + "def rank_loss(losses, mask, group=None):\n    return (losses * mask).sum() / mask.sum() / dist.get_world_size()",
            "mean of the ranks' means"),
        ("def rank_loss(losses, mask, group=None):\n    return (losses * mask).sum() / mask.sum()", "this rank's own count"),
        ("def rank_loss(losses, mask, group=None):\n    return (losses * mask).sum()", "Somebody must divide"),
        (changed("rank_loss", ("count.clamp(min=1.0)", "(count + 1.0)")), "all-reduced number"),
    ],
    "answers": [
        (changed("answers", ("world // (tp * cp * pp)", "world // (tp * cp * pp * ep)"),
            ("range(cp * dp)", "range(cp * dp * ep)")), "no ranks of its own"),
        (changed("answers", ("2 * gigabytes", "gigabytes")), "ring's bytes"),
        (changed("answers", ("tp * i for", "i for")), "dp-cp group"),
    ],
}  # fmt: skip

test_each_mistake_loses_points_and_gets_its_hint = MARKED.wrong_answers(
    WRONG, told=lambda verdict, words: words in verdict.hint
)
test_an_answer_that_returns_nothing_scores_nothing = MARKED.empty_answers()

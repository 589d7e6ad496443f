"""Lab 01: the solution with small mistakes, and with small changes that leave it right (`labkit/answers`)."""

from __future__ import annotations

from labkit.answers import Edit, Same

WRONG: dict[str, list[Edit]] = {
    "bytes_sent": [
        Edit("2 * once", "once", told="reduce-scatter and then an all-gather"),
        Edit("nbytes * (ranks - 1) / ranks", "nbytes", told="N-1 of N parts"),
        Edit("(ranks - 1) / ranks", "(ranks - 1)", told="one part, n/N bytes"),
        # on one rank nothing travels
        Edit("    return 2", "    once = max(once, nbytes / 2)\n    return 2", told="expected 0.0"),
        Edit("else once", "else max(once, nbytes / 2)", told="hidden"),
    ],
    "axis_groups": [
        Edit("list(reversed(sizes))", "list(sizes)", told="slowest first"),
        Edit("grid.permute(*fixed, *free)", "grid", told="blocks of neighbours"),
        Edit(".tolist()", ".tolist()[::-1]", told="grid ="),
        # sizes may name the axes in another order
        Edit(
            "list(reversed(sizes))",
            '["pp", "dp", "cp", "tp"] if "cp" in sizes else ["pp", "edp", "ep", "etp"] if "ep" in sizes else '
            '[a for a in ("pp", "dp", "tp") if a in sizes]',
        ),
    ],
    "ring_all_reduce": [
        Edit("return total.view_as(x)", "return total.view_as(x) / n", told="does not divide"),
        Edit(".add_(", ".copy_(", told="Phase 1"),
    ],
    "conjugates": [
        Edit("        dist.all_reduce(grad)\n", "", told="copy_to must sum"),
        Edit(
            """    def backward(ctx, grad):
        return grad""",
            """    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad""",
            told="once too often",
        ),
        Edit(
            """y = x.contiguous().clone()
        dist.all_reduce(y)
        return y""",
            "return x * 1",
            told="all-reduce",
        ),
    ],
    "my_samples": [
        Edit("seed + epoch", "seed", told="order of its own"),
        Edit("divmod(position, num_samples)", "(first // num_samples, position % num_samples)", told="the same epoch"),
        Edit(
            "first = consumed + dp_rank * micro_batch",
            "first = consumed + dp_rank",
            ("range(first, first + micro_batch)", "range(first, first + micro_batch * dp_size, dp_size)"),
            told="contiguous block",
        ),
    ],
    "overlap": [
        Edit(
            "p.grad.copy_(part.view_as(p))",
            "p.grad.copy_(part.view_as(p) / dist.get_world_size())",
            told="do not average",
        ),
        Edit(">= self.bucket_size", ">= 10**9", told="has not left when"),
        Edit(">= self.bucket_size", ">= 1", told="buckets need"),
        Edit(
            """        if self.open:
            self.send()
        for""",
            "        for",
            told="never sent",
        ),
    ],
    "rank_loss": [
        Edit("count.clamp(min=1.0)", "(count + 1.0)", told="all-reduced number"),
        # a mean of shares: right where all ranks have as many places
        Edit(
            "mask.sum()",
            "mask.mean()",
            ("(losses * mask).sum()", "(losses * mask).mean()"),
            ("min=1.0", "min=1e-6"),
            told="Ranks may have other numbers of tokens",
        ),
    ],
    "answers": [
        Edit(
            "world // (tp * cp * pp)",
            "world // (tp * cp * pp * ep)",
            ("range(cp * dp)", "range(cp * dp * ep)"),
            told="no ranks of its own",
        ),
        Edit("2 * gigabytes", "gigabytes", told="ring's bytes"),
        Edit("tp * i for", "i for", told="dp-cp group"),
    ],
}

RIGHT: dict[str, list[Edit]] = {
    "ring_all_reduce": [
        Edit(
            """sending = dist.isend(parts[send].clone(), right)
        dist.recv(arriving, left)
        sending.wait()""",
            """ops = [dist.P2POp(dist.isend, parts[send].clone(), right), dist.P2POp(dist.irecv, arriving, left)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()""",
        ),
        # even ranks send first, odd ranks receive first; the last of an odd ring would wait, so it posts its receive
        # early
        Edit(
            """sending = dist.isend(parts[send].clone(), right)
        dist.recv(arriving, left)
        sending.wait()""",
            """coming = dist.irecv(arriving, left)
        dist.send(parts[send].clone(), right)
        coming.wait()""",
        ),
    ],
    "conjugates": [
        Edit("grad = grad.contiguous().clone()", "grad = grad + 0", ("return x.view_as(x)", "return x.clone()")),
    ],
    "overlap": [
        Edit("self.open.append(p)", "self.open = self.open + [p]"),
        Edit(
            "flat = torch.cat([p.grad.flatten() for p in self.open])",
            "flat = torch.nn.utils.parameters_to_vector([p.grad for p in self.open])",
        ),
    ],
    "rank_loss": [
        Edit("count.clamp(min=1.0)", "torch.maximum(count, torch.ones(()))"),
    ],
    "answers": [
        Edit("group = [tp * i for i in range(cp * dp)]", "group = list(range(0, tp * cp * dp, tp))"),
        Edit("world // (etp * ep * pp)", "dp * tp * cp // (ep * etp)"),
        Edit(
            "2 * gigabytes * (len(group) - 1) / len(group) / gb_per_second",
            "2 * (gigabytes - gigabytes / (dp * cp)) / gb_per_second",
        ),
    ],
}

_FROM_THE_END = "a negative index counts from the end: parts[-1] is parts[n - 1]"
_DENSE = "a clone of a transpose is dense, and an all-reduce takes dense memory"
_WHOLE = "the sizes divide the world"

EQUIVALENT: dict[str, list[Same]] = {
    "ring_all_reduce": [
        Same("line 14: `.clone()` dropped", "a part is changed again only after the send has been waited for"),
        Same("line 20: `% n` dropped", _FROM_THE_END),
        Same("line 21: `% n` dropped", _FROM_THE_END),
        Same("line 23: `% n` dropped", _FROM_THE_END),
    ],
    "conjugates": [
        Same("line 14: `.contiguous()` dropped", _DENSE),
        Same("line 24: `.contiguous()` dropped", _DENSE),
    ],
    "overlap": [
        Same("line 32: `self.travelling = []` dropped", "old sums are copied first, the new ones over them"),
    ],
    "answers": [
        Same("line 5: rounded up for down", _WHOLE),
        Same("line 9: `/` for `//`", _WHOLE),
        Same("line 9: rounded up for down", _WHOLE),
    ],
}

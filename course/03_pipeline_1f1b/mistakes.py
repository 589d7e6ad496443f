"""Lab 03: the solution with small mistakes, and with small changes that leave it right (`labkit/answers`)."""

from __future__ import annotations

from labkit.answers import Edit, Same

WRONG: dict[str, list[Edit]] = {
    "bubble": [
        Edit("(v * m)", "m", told="steps of a v-th"),
        Edit("(p - 1)", "p", told="p-1 steps from the last"),
        Edit("(p - 1) / (v * m)", "round((p - 1) / (v * m), 3)", told="Close: this is rounded"),
        Edit("(p - 1) / (v * m)", "100 * (p - 1) / (v * m)", told="in percent"),
        Edit("(p - 1) / (v * m)", "(p - 1) / (v * v * m)", told="v is counted twice"),
        Edit("(p - 1) / (v * m)", "0.5", told="the same number for every pipeline"),
        Edit("p: int, m: int, v: int", "ranks: int, m: int, v: int", ("(p - 1)", "(ranks - 1)"), told="calls by name"),
        Edit("def bubble(", "def bubbles(", told="defines `bubbles`"),
    ],
    "gpipe": [
        Edit("range(m)]\n", "range(m - 1)]\n", told="never does B"),
        Edit(
            '[f"B{i}" for i in range(m)]',
            '[f"B{i}" for i in (range(m) if rank else range(m)[::-1])]',
            told="another order than rank 1",
        ),
    ],
    "one_f_one_b": [
        Edit("p - rank - 1", "p - 1", told="Every rank warms up with p-1 forwards here"),
        Edit("p - rank - 1", "rank", told="Rank r warms up with r forwards here"),
        Edit("p - rank - 1", "p - rank", told="one forward more than it has hops"),
        Edit("p - rank - 1", "2 * (p - rank - 1)", told="twice as many forwards"),
        Edit("p - rank - 1", "max(1, p - rank - 1)", told="the last rank warms up, too"),
        Edit("min(m, p - rank - 1)", "p - rank - 1", told="is no action"),
        Edit('[f"F{warmup + i}", f"B{i}"]', '[f"B{i}", f"F{warmup + i}"]', told="before its own F"),
    ],
    "interleaved": [
        Edit("v - 1 - c", "c", told="A gradient comes out of the last chunk first"),
        Edit("2 * (p - rank - 1) + (v - 1) * p", "p - rank - 1", told="before microbatch 0 has passed the last chunk"),
        Edit("2 * (p - rank - 1) + (v - 1) * p", "2 * (p - rank - 1)", told="before microbatch 0 has passed"),
        Edit("2 * (p - rank - 1) + (v - 1) * p", "len(table)", told="This is GPipe with chunks"),
        Edit("2 * (p - rank - 1)", "2 * rank", told="rank 0 is the farthest"),
        Edit("2 * (p - rank - 1)", "2 * (p - rank)", told="with two forwards more than asked"),
        Edit("(v - 1) * p", "v * p", told="a whole group of p forwards more"),
        Edit("(v - 1) * p", "(v - 1) * m", told="The warm-up grows with m"),
        Edit("min(len(table), ", "min(m, ", told="cut off at m forwards"),
        Edit(
            "return todo + backward[len(table) - warmup :]",
            "return ' '.join(todo + backward[len(table) - warmup :])",
            told="returns one string",
        ),
    ],
    "split_stage": [
        Edit("self.grad += x.T @ dz", "self.grad = x.T @ dz", told="that of the last W alone; each W *adds*"),
        Edit("(1 - y * y)", "(1 - y)", told="1 - y², not 1 - y"),
        Edit("(1 - y * y)", "(1 - x * x)", told="of the output; this takes x"),
        Edit("dz @ self.weight.T", "dy @ self.weight.T", told="the slope of tanh is missing"),
        Edit("dz @ self.weight.T", "dz @ self.weight", told="the weight is to be transposed"),
        Edit("self.kept[microbatch] = x, dz", "self.kept[microbatch] = x, dy", told="it adds up x.T @ dy"),
        Edit("x.T @ dz", "dz.T @ x", told="the gradient transposed"),
        # two stages on a rank share what they keep
        Edit(
            "    def __init__(self, weight: torch.Tensor):\n",
            "    kept = {}\n\n    def __init__(self, weight: torch.Tensor):\n",
            ("        self.kept = {}  # by microbatch\n", ""),
            told="belongs to each stage",
        ),
        # y computed again in B
        Edit(
            "x, y = self.kept[microbatch]",
            "x, y = self.kept[microbatch]\n        y = torch.tanh(x @ self.weight)",
            told="one product each is enough: B needs only dz @ W.T",
        ),
        # both halves in B
        Edit(
            """        x, dz = self.kept.pop(microbatch)
        self.grad += x.T @ dz""",
            "        pass",
            (
                "return dz @ self.weight.T",
                """self.grad += x.T @ dz
        return dz @ self.weight.T""",
            ),
            told="has changed before its W",
        ),
        # computed in B, only handed over in W
        Edit(
            "self.kept[microbatch] = x, dz\n",
            "self.kept[microbatch] = x.T @ dz\n",
            (
                """x, dz = self.kept.pop(microbatch)
        self.grad += x.T @ dz""",
                "self.grad += self.kept.pop(microbatch)",
            ),
            told="x.T @ dz belongs to W",
        ),
    ],
    "zb_h1": [
        # W at once: the bubble is larger
        Edit(
            "if i >= rank:",
            "if True:",
            ("W{i - rank}", "W{i}"),
            ("range(max(0, m - rank), m)", "[]"),
            told="W right after B here",
        ),
        # all W at the end: even slower, and the memory of GPipe
        Edit("if i >= rank:", "if False:", ("range(max(0, m - rank), m)", "range(m)"), told="All W come at the end"),
        # mirrored, and the same on all ranks
        Edit(
            "if i >= rank:",
            "if i >= p - 1 - rank:",
            ("W{i - rank}", "W{i - (p - 1 - rank)}"),
            ("range(max(0, m - rank), m)", "range(max(0, m - (p - 1 - rank)), m)"),
            told="Rank 0 puts its W off longest",
        ),
        Edit(
            "if i >= rank:",
            "if i >= p - 1:",
            ("W{i - rank}", "W{i - (p - 1)}"),
            ("range(max(0, m - rank), m)", "range(max(0, m - (p - 1)), m)"),
            told="Every rank puts its W off by p-1",
        ),
        Edit(
            """        todo.append(f"B{i}")
        if i >= rank:
            todo.append(f"W{i - rank}")""",
            '        todo += [f"W{i}", f"B{i}"]',
            ("range(max(0, m - rank), m)", "[]"),
            told="before its own B",
        ),
    ],
    "sync_tied": [
        Edit("return total", "return total / 2", told="nothing is divided"),
        Edit("total, group=group)", "total, group=group, async_op=True)", told="never waits for its all_reduce"),
        Edit("[0, dist.get_world_size() - 1]", "[0, 1]", told="first and the last rank"),
        Edit(
            "    if grad is None:\n        return None\n    total = grad.clone()\n",
            "    total = grad\n",
            told="in no group",
        ),
        Edit("    group = dist", "    dist.barrier()\n    group = dist", told="calls barrier"),
    ],
    "answers": [
        Edit("bubble / (1 + bubble)", "bubble", told="work and idle time together"),
        Edit("chunks * (layers // (p * v))", "m * (layers // p)", told="GPipe's memory"),
        Edit("chunks * (layers // (p * v))", "chunks * layers", told="what all layers together keep"),
        Edit("2 * (p * v - 1)", "(p * v - 1)", told="This is half of the bytes"),
        Edit("2 * (p * v - 1)", "2 * (p - 1)", told="p*v - 1 borders"),
        Edit("2 * (p * v - 1)", "2 * p * v", told="one border fewer"),
        Edit("2 * (p * v - 1)", "2 * v * (p - 1)", told="back to the first: that is a border, too"),
        Edit("2 * (p * v - 1) * m", "2 * (p * v - 1)", told="bytes of one microbatch"),
        Edit("warmup + 1", "warmup", told="the warm-up alone"),
        Edit("bubble / (1 + bubble)", "100 * bubble / (1 + bubble)", told="in percent here"),
        Edit("bubble / (1 + bubble)", "round(bubble / (1 + bubble), 2)", told="rounded"),
    ],
}

RIGHT: dict[str, list[Edit]] = {
    "interleaved": [
        Edit("return todo + backward[len(table) - warmup :]", "return iter(todo + backward[len(table) - warmup :])"),
    ],
    "split_stage": [
        Edit("dy * (1 - y * y)", "dy - dy * y.square()", ("x.T @ dz", "(dz.T @ x).T")),
    ],
    "zb_h1": [
        Edit(
            "warmup = min(m, p - rank - 1)\n",
            "warmup = min(p - rank - 1, m)\n",
            (
                'return todo + [f"W{i}" for i in range(max(0, m - rank), m)]',
                """done = sum(word[0] == 'W' for word in todo)
    return tuple(todo) + tuple(f'W{i}' for i in range(done, m))""",
            ),
        ),
    ],
    "answers": [
        Edit("bubble / (1 + bubble)", "1 - 1 / (1 + bubble)"),
        Edit(
            "-(-20 * (p - 1) // v)",
            "next(n for n in range(10**4) if n * v >= 20 * (p - 1))",
            ("-(-fewest // p) * p", "fewest + (p - fewest) % p"),
        ),
    ],
}

EQUIVALENT: dict[str, list[Same]] = {
    "interleaved": [Same("line 3: range's `m` - 1", "m is a multiple of p > 1: the groups begin at the same places")],
    "sync_tied": [Same("line 10: `.clone()` dropped", "the caller replaces its gradient by what comes back")],
    "answers": [
        Same("line 8: `/` for `//`", "20(p-1) is whole for one chunk; with chunks the next line rounds up"),
        Same("line 14: `/` for `//`", "p*v divides the layers"),
        Same("line 14: rounded up for down", "p*v divides the layers"),
    ],
    "survivors": [Same("line 8: `>=` for `>`", "a weight is near 0 or near 1")],
}

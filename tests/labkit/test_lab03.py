"""Lab 03's checks: the stub scores nothing, the solution everything, other right answers too, each mistake its hint."""

from __future__ import annotations

from tests.labkit.marked import Marked

MARKED = Marked("03_pipeline_1f1b")
changed = MARKED.changed
DIST = "import torch\nimport torch.distributed as dist\n"


test_the_stub_scores_nothing_and_the_solution_everything = MARKED.stubs_and_solutions()


RIGHT = {
    "bubble": [
        "def bubble(p, m, v):\n    hop = 1 / v\n    return (p - 1) * hop / m",
        "from fractions import Fraction\ndef bubble(p, m, v):\n    return float(Fraction(3 * (p - 1), v) / (3 * m))",
        "def bubble(p, m, v):\n    return (m * v + p - 1) / (m * v) - 1",
    ],
    "gpipe": [
        # the paper's own order: backwards from the last microbatch to the first
        "def gpipe(rank, p, m):\n    return [f'F{i}' for i in range(m)] + [f'B{i}' for i in reversed(range(m))]",
        "def gpipe(rank, p, m):\n    return ' '.join(k + str(i) for k in 'FB' for i in range(m))",
        "def gpipe(rank, p, m):\n    todo = ()\n    for i in range(2 * m):\n"
        "        todo += ('FB'[i // m] + str(i % m) + '.0',)\n    return todo",
    ],
    "one_f_one_b": [
        # counting what is under way
        "def one_f_one_b(rank, p, m):\n    todo, f, b = [], 0, 0\n    while b < m:\n"
        "        if f < m and f - b < p - rank:\n            todo.append(f'F{f}')\n            f += 1\n"
        "        else:\n            todo.append(f'B{b}')\n            b += 1\n    return todo",
        "def one_f_one_b(rank, p, m):\n    w = min(m, p - rank)\n    todo = [f'F{i}' for i in range(w)]\n"
        "    for i in range(m):\n        todo += [f'B{i}'] + [f'F{w + i}'] * (w + i < m)\n    return todo",
        "def one_f_one_b(rank, p, m):\n    slots = {('F', i): 2 * i + rank for i in range(m)}\n"
        "    slots |= {('B', i): 2 * i + 2 * p - 1 - rank for i in range(m)}\n"
        "    return [k + str(i) for k, i in sorted(slots, key=slots.get)]",
    ],
    "interleaved": [
        changed("interleaved", ("2 * (p - rank - 1)", "(p - rank - 1)")),  # enough while messages are free
        "def interleaved(rank, p, m, v):\n    def slot(k, back):\n        group, at = divmod(k, p * v)\n"
        "        chunk, i = divmod(at, p)\n        chunk = v - 1 - chunk if back else chunk\n"
        "        return f\"{'B' if back else 'F'}{group * p + i}.{chunk}\"\n"
        "    w = min(m * v, 2 * (p - rank - 1) + (v - 1) * p)\n    todo = [slot(k, False) for k in range(w)]\n"
        "    for k in range(m * v):\n        if w + k < m * v:\n            todo.append(slot(w + k, False))\n"
        "        todo.append(slot(k, True))\n    return todo",
        changed("interleaved", ("return todo + backward[len(table) - warmup :]",
                                "return ' '.join(todo + backward[len(table) - warmup :])")),
    ],
    "split_stage": [
        "import torch\nclass SplitStage:\n    def __init__(self, weight):\n        self.weight, self.grad = weight, "
        "torch.zeros_like(weight)\n        self.kept = {}\n    def forward(self, i, x):\n"
        "        x = x.requires_grad_()\n        w = self.weight.detach().requires_grad_()\n        y = torch.tanh(x @ w)\n"
        "        self.kept[i] = x, w, y\n        return y.detach()\n    def backward(self, i, dy):\n"
        "        x, w, y = self.kept[i]\n        self.kept[i] = x, w, y, dy\n"
        "        return torch.autograd.grad(y, x, dy, retain_graph=True)[0]\n    def weights(self, i):\n"
        "        x, w, y, dy = self.kept.pop(i)\n        self.grad += torch.autograd.grad(y, w, dy)[0]",
        changed("split_stage", ("dy * (1 - y * y)", "dy - dy * y.square()"), ("x.T @ dz", "(dz.T @ x).T")),
        "import torch\nclass SplitStage:\n    def __init__(self, weight):\n        self.weight = weight\n"
        "        self.grad = weight * 0\n        self.xs, self.ys, self.dzs = {}, {}, {}\n"
        "    def forward(self, microbatch, x):\n        self.xs[microbatch] = x\n"
        "        self.ys[microbatch] = x.matmul(self.weight).tanh()\n        return self.ys[microbatch]\n"
        "    def backward(self, microbatch, dy):\n        self.dzs[microbatch] = (1 - self.ys.pop(microbatch) ** 2) * dy\n"
        "        return torch.einsum('bj,ij->bi', self.dzs[microbatch], self.weight)\n"
        "    def weights(self, microbatch):\n        x, dz = self.xs.pop(microbatch), self.dzs.pop(microbatch)\n"
        "        self.grad = self.grad + torch.einsum('bi,bj->ij', x, dz)",
    ],
    "zb_h1": [
        # keep p activations at most, and do a W whenever one more would not fit
        "def zb_h1(rank, p, m):\n    todo, f, b, w = [], 0, 0, 0\n    while w < m:\n"
        "        if f < m and f - b < p - rank and f - w < p:\n            todo.append(f'F{f}'); f += 1\n"
        "        elif b < f and b - w <= rank and (f == m or f - b >= p - rank):\n            todo.append(f'B{b}'); b += 1\n"
        "        else:\n            todo.append(f'W{w}'); w += 1\n    return todo",
        changed("zb_h1", ("warmup = min(m, p - rank - 1)\n", "warmup = min(p - rank - 1, m)\n"), ("return todo + [f\"W{i}\" for i in range(max(0, m - rank), m)]",
                "done = sum(word[0] == 'W' for word in todo)\n    return tuple(todo) + tuple(f'W{i}' for i in range(done, m))")),
        "def zb_h1(rank, p, m):\n    todo = []\n    for step in range(m + p):\n        f, b = step, step - (p - rank - 1)\n"
        "        w = b - rank\n        todo += [f'{k}{i}' for k, i in (('F', f), ('B', b), ('W', w)) if 0 <= i < m]\n"
        "    return todo",
    ],
    "sync_tied": [
        # an exchange with the other copy
        DIST + "def sync_tied(grad):\n    last = dist.get_world_size() - 1\n    if grad is None:\n        return None\n"
        "    other = last - dist.get_rank()\n    got = torch.empty_like(grad)\n    work = dist.isend(grad.contiguous(), other)\n"
        "    dist.recv(got, other)\n    work.wait()\n    return grad + got",
        DIST + "def sync_tied(grad):\n    ends = [0, dist.get_world_size() - 1]\n    group = dist.new_group(ends)\n"
        "    if dist.get_rank() not in ends:\n        return grad\n    both = [torch.empty_like(grad) for _ in ends]\n"
        "    dist.all_gather(both, grad, group=group)\n    return both[0] + both[1]",
        DIST + "def sync_tied(grad):\n    n = dist.get_world_size()\n    groups = [dist.new_group([0, n - 1])]\n"
        "    if dist.get_rank() in (0, n - 1):\n        dist.all_reduce(grad, group=groups[0])\n    return grad",
    ],
    "survivors": [
        "import itertools, torch\ndef survivors(got, grads):\n    n = len(grads)\n"
        "    def apart(which):\n        return (sum((grads[i] for i in which), torch.zeros_like(got)) - got).norm().item()\n"
        "    return list(min((w for k in range(n + 1) for w in itertools.combinations(range(n), k)), key=apart))",
        "import torch\ndef survivors(got, grads):\n    g = torch.stack([x.flatten() for x in grads]).double()\n"
        "    w = torch.linalg.solve(g @ g.T, g @ got.flatten().double())\n    return torch.nonzero(w > 0.5).flatten().tolist()",
        "import numpy\ndef survivors(got, grads):\n    a = numpy.stack([g.numpy().ravel() for g in grads], 1)\n"
        "    w = numpy.linalg.pinv(a) @ got.numpy().ravel()\n    return [i for i in range(len(grads)) if round(float(w[i]))]",
    ],
    "answers": [
        changed("answers", ("bubble / (1 + bubble)", "1 - 1 / (1 + bubble)")),
        "import math\ndef answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):\n"
        "    keep = p if v == 1 else 2 * p - 1 + (v - 1) * p\n    chunk = kept_bytes_per_token_and_layer * tokens * layers / (p * v)\n"
        "    return dict(idle_share=(p - 1) / (p - 1 + v * m), microbatches_for_5_percent=math.ceil(20 * (p - 1) / v),\n"
        "                kept_bytes_on_rank_0=min(keep, m * v) * chunk, bytes_between_ranks=4 * hidden * tokens * m * (p * v - 1))",
        changed("answers", ("-(-20 * (p - 1) // v)", "next(n for n in range(10**4) if n * v >= 20 * (p - 1))")),
    ],
}  # fmt: skip

test_other_right_answers_get_full_marks = MARKED.right_answers(RIGHT)


def test_every_exercise_has_three_other_right_answers():
    MARKED.assert_three_each(RIGHT)


GPIPE_AS = "def {}(rank, p, m):\n    return [f'F{{i}}' for i in range(m)] + [f'B{{i}}' for i in range(m)]"
ONE_BY_ONE = "def {}(rank, p, m):\n    return [w for i in range(m) for w in (f'F{{i}}', f'B{{i}}')]"

# exercise -> [(wrong answer, words of the hint or of a row)]
WRONG = {
    "bubble": [
        (changed("bubble", ("(v * m)", "m")), "steps of a v-th"),
        ("def bubble(p, m, v):\n    return (p - 1) / (m + p - 1)", "idle time over *work*"),
        ("def bubble(p, m, v):\n    b = (p - 1) / (v * m)\n    return b / (1 + b)", "share of the whole time"),
        (changed("bubble", ("(p - 1)", "p")), "p-1 steps from the last"),
    ],
    "gpipe": [
        (ONE_BY_ONE.format("gpipe"), "before its last forward"),
        (changed("gpipe", ("range(m)]\n", "range(m - 1)]\n")), "never does B"),
        (changed("gpipe", ('[f"B{i}" for i in range(m)]', '[f"B{i}" for i in (range(m) if rank else range(m)[::-1])]')),
            "are enough"),
        ("def gpipe(rank, p, m):\n    return [('F', 0)]", "a list of words is wanted"),
        ("def gpipe(rank, p, m):\n    return ['F0', 'backward']", "`backward` is no action"),
    ],
    "one_f_one_b": [
        (GPIPE_AS.format("one_f_one_b"), "activations at a time"),
        (ONE_BY_ONE.format("one_f_one_b"), "are enough"),
        (changed("one_f_one_b", ("p - rank - 1", "p - 1")), "are enough"),
        (changed("one_f_one_b", ("p - rank - 1", "rank")), "waits for the"),
        (changed("one_f_one_b", ("min(m, p - rank - 1)", "p - rank - 1")), "is no action"),
        (changed("one_f_one_b", ('[f"F{warmup + i}", f"B{i}"]', '[f"B{i}", f"F{warmup + i}"]')), "before its own F"),
    ],
    "interleaved": [
        (changed("interleaved", ("v - 1 - c", "c")), "deadlock"),
        (changed("interleaved", ("2 * (p - rank - 1) + (v - 1) * p", "p - rank - 1")), "before its own F"),
        (changed("interleaved", ("2 * (p - rank - 1) + (v - 1) * p", "len(table)")), "activations at a time"),
        ("def interleaved(rank, p, m, v):\n    back = [f'B{i}.{v - 1 - c}' for c in range(v) for i in range(m)]\n"
            "    return [f'F{i}.{c}' for c in range(v) for i in range(m)] + back", "activations at a time"),
    ],
    "split_stage": [
        (changed("split_stage", ("self.grad += x.T @ dz", "self.grad = x.T @ dz")), "*adds* x.T @ dz"),
        (changed("split_stage", ("(1 - y * y)", "(1 - y)")), "gradient of the input is wrong"),
        (changed("split_stage", ("dz @ self.weight.T", "dy @ self.weight.T")), "gradient of the input is wrong"),
        # both halves in B
        (changed("split_stage", ("        x, dz = self.kept.pop(microbatch)\n        self.grad += x.T @ dz", "        pass"),
            ("return dz @ self.weight.T", "self.grad += x.T @ dz\n        return dz @ self.weight.T")), "has changed before its W"),
        # computed in B, only handed over in W
        (changed("split_stage", ("self.kept[microbatch] = x, dz\n", "self.kept[microbatch] = x.T @ dz\n"),
            ("x, dz = self.kept.pop(microbatch)\n        self.grad += x.T @ dz", "self.grad += self.kept.pop(microbatch)")),
            "the other is W"),
    ],
    "zb_h1": [
        (MARKED.solutions["one_f_one_b"].replace("one_f_one_b", "zb_h1"), "every backward is to be split"),
        # W at once: the bubble is larger
        (changed("zb_h1", ("if i >= rank:", "if True:"), ("W{i - rank}", "W{i}"), ("range(max(0, m - rank), m)", "[]")), "are enough"),
        # all W at the end: even slower, and the memory of GPipe
        (changed("zb_h1", ("if i >= rank:", "if False:"), ("range(max(0, m - rank), m)", "range(m)")), "are enough"),
        (changed("zb_h1", ('        todo.append(f"B{i}")\n        if i >= rank:\n            todo.append(f"W{i - rank}")',
            '        todo += [f"W{i}", f"B{i}"]'), ("range(max(0, m - rank), m)", "[]")), "before its own B"),
    ],
    "sync_tied": [
        (changed("sync_tied", ("return total", "return total / 2")), "nothing is divided"),
        ("def sync_tied(grad):\n    return grad", "own use only"),
        # everybody takes part, with zeros where there is no copy
        (DIST + "def sync_tied(grad):\n    n = dist.get_world_size()\n    shape = [None] * n\n"
            "    dist.all_gather_object(shape, None if grad is None else grad.shape)\n"
            "    total = torch.zeros(shape[0]) if grad is None else grad.clone()\n    dist.all_reduce(total)\n"
            "    return None if grad is None else total", "holds no copy"),
    ],
    "survivors": [
        ("def survivors(got, grads):\n    return list(range(len(grads)))", "did not survive"),
        ("def survivors(got, grads):\n    return [len(grads) - 1]", "Not always the last"),
        ("import torch\ndef survivors(got, grads):\n    return [i for i, g in enumerate(grads) if torch.allclose(g, got)]", "single survivor"),
        ("def survivors(got, grads):\n    return [i for i, g in enumerate(grads) if (g * got).sum() > 0]", "not orthogonal"),
    ],
    "answers": [
        (changed("answers", ("bubble / (1 + bubble)", "bubble")), "bubble / (1 + bubble)"),
        (changed("answers", ("chunks * (layers // (p * v))", "m * (layers // p)")), "GPipe's memory"),
        (changed("answers", ("2 * (p * v - 1)", "(p * v - 1)")), "come back: twice"),
        (changed("answers", ("2 * (p * v - 1)", "2 * (p - 1)")), "p*v - 1 borders"),
    ],
}  # fmt: skip

test_each_mistake_loses_points_and_is_told_why = MARKED.wrong_answers(WRONG)

EMPTY_STAGE = (
    "import torch\nclass SplitStage:\n    def __init__(self, weight): self.grad = torch.zeros_like(weight)\n"
    + "".join(f"    def {method}(self, *args): return None\n" for method in ("forward", "backward", "weights"))
)

test_an_answer_that_returns_nothing_scores_nothing = MARKED.empty_answers(split_stage=EMPTY_STAGE)

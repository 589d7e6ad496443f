"""Lab 02's checks: the stub scores nothing, the solution everything, other right answers too, each mistake its hint."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from minimegatron.comm.mesh import Axis, Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.param import layout_of
from minimegatron.models.decoder import GPTModel
from minimegatron.models.zoo import family_config
from tests.labkit.marked import Marked

HEADS, PREDICTED = (import_module(f"course.02_tensor_parallel.checks.{part}") for part in ("heads", "predicted"))
MARKED = Marked("02_tensor_parallel", imports=True)
check, changed = MARKED.check, MARKED.changed
HEAD = (
    "import torch\nimport torch.distributed as dist\nimport torch.nn.functional as F\n"
    "from minimegatron.comm.collectives import *\nfrom minimegatron.comm import collectives as c\n"
)


test_the_stub_scores_nothing_and_the_solution_everything = MARKED.stubs_and_solutions()


RIGHT = {
    "bytes_per_layer": [
        "def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):\n    n = s * b * h * element_size\n"
        "    return (10 if sequence_parallel else 8) * (n - n / t)",
        "from fractions import Fraction\ndef bytes_per_layer(s, b, h, t, element_size, sequence_parallel):\n"
        "    ring = Fraction(t - 1, t) * s * b * h * element_size\n    sums = 2 * (2 + 2) * ring\n"
        "    return float(sums + 2 * ring * int(sequence_parallel))",
        "def bytes_per_layer(s, b, h, t, element_size, sequence_parallel):\n    part = s * b * h * element_size / t\n"
        "    steps = t - 1\n    total = 0\n    for pair in ('attention', 'mlp'):\n        for way in ('forward', 'backward'):\n"
        "            total += 2 * steps * part\n        total += steps * part if sequence_parallel else 0\n    return total",
    ],
    "activation_bytes": [
        "def activation_bytes(s, b, h, a, t, sequence_parallel):\n    if sequence_parallel:\n"
        "        return s * b * h * (34 + 5 * a * s / h) / t\n    return s * b * h * (10 + 24 / t + 5 * a * s / h / t)",
        "def activation_bytes(s, b, h, a, t, sequence_parallel):\n    n = s * b * h\n    whole = 4 * 2 * n + 2 * n\n"
        "    cut = (4 + 2 + 2 + 8 + 8) * n + (2 + 1 + 2) * a * s * s * b\n"
        "    return cut / t + whole / (t if sequence_parallel else 1)",
        "def activation_bytes(s, b, h, a, t, sequence_parallel):\n    table = [(2, 0), (2, 0), (4, 1), (2, 1), (5 * a * s / h, 1), "
        "(2, 1), (1, 0), (2, 0), (2, 0), (8, 1), (8, 1), (1, 0)]\n"
        "    return sum(n / (t if cut or sequence_parallel else 1) for n, cut in table) * s * b * h",
    ],
    "column_linear": [
        HEAD + "def column_linear(x, weight, bias, tp):\n    y = copy_to_region(x, tp) @ weight.t()\n"
        "    return y if bias is None else y + bias",
        HEAD + "class Sum(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x, group):\n        ctx.group = group\n"
        "        return x.view_as(x)\n    @staticmethod\n    def backward(ctx, g):\n        g = g.contiguous().clone()\n"
        "        dist.all_reduce(g, group=ctx.group)\n        return g, None\n"
        "def column_linear(x, weight, bias, tp):\n    return F.linear(Sum.apply(x, tp.group), weight, bias)",
        HEAD + "def column_linear(x, weight, bias, tp):\n    x = x.view_as(x)\n    def add(g):\n        g = g.clone()\n"
        "        dist.all_reduce(g, group=tp.group)\n        return g\n    x.register_hook(add)\n    return F.linear(x, weight, bias)",
    ],
    "row_linear": [
        HEAD + "def row_linear(x, weight, bias, tp):\n    y = reduce_from_region(x @ weight.t(), tp)\n"
        "    return y + bias if bias is not None else y",
        HEAD + "def row_linear(x, weight, bias, tp):\n    mine = bias if tp.rank == 0 else None\n"
        "    y = reduce_from_region(F.linear(x, weight), tp)\n    return y if bias is None else torch.add(y, bias)",
        HEAD + "def row_linear(x, weight, bias, tp):\n    y = F.linear(x, weight)\n    total = y.detach().clone()\n"
        "    dist.all_reduce(total, group=tp.group)\n    y = y + (total - y.detach())\n    return y if bias is None else y + bias",
    ],
    "qkv_part": [
        "import torch\ndef qkv_part(wq, wk, wv, d, tp_rank, tp_size):\n    g = len(wk) // d\n    n = len(wq) // d // g\n    rows = []\n"
        "    for i in range(g):\n        rows += [wq[i * n * d : (i + 1) * n * d], wk[i * d : (i + 1) * d], wv[i * d : (i + 1) * d]]\n"
        "    packed = torch.cat(rows)\n    size = len(packed) // tp_size\n    return packed[tp_rank * size : (tp_rank + 1) * size]",
        "import torch\ndef qkv_part(wq, wk, wv, d, tp_rank, tp_size):\n    g = len(wk) // d\n"
        "    packed = torch.cat([torch.cat(p) for p in zip(wq.chunk(g), wk.chunk(g), wv.chunk(g))])\n"
        "    return packed.view(tp_size, -1, packed.shape[1])[tp_rank]",
        "import torch\ndef qkv_part(wq, wk, wv, d, tp_rank, tp_size):\n    g, h = len(wk) // d, wk.shape[1]\n    a = len(wq) // d\n"
        "    heads = torch.cat([wq, wk, wv]).view(-1, d, h)\n    order = [i for j in range(g) for i in "
        "[*range(j * a // g, (j + 1) * a // g), a + j, a + g + j]]\n"
        "    return heads[order].reshape(-1, h).tensor_split(tp_size)[tp_rank].clone()",
    ],
    "attention": [
        changed("attention", ("q, k, v = packed.split([queries_per_group, 1, 1], dim=3)", "n = queries_per_group\n    "
            "q, k, v = packed[:, :, :, :n], packed[:, :, :, n : n + 1], packed[:, :, :, n + 1 :]"), ("queries_per_group > 1", "True")),
        # keys repeated by hand
        changed("attention", ("    out = F", "    k, v = (t.repeat_interleave(queries_per_group, 1) for t in (k, v))\n    out = F"),
            (", enable_gqa=queries_per_group > 1", "")),
        # the formula, with f and g by hand
        HEAD + "def attention(x, qkv, proj, d, queries_per_group, tp):\n    n = queries_per_group\n    s, b, h = x.shape\n"
        "    packed = F.linear(copy_to_region(x, tp), *qkv).view(s, b, -1, n + 2, d)\n"
        "    q, k, v = packed[..., :n, :], packed[..., n, :], packed[..., n + 1, :]\n"
        "    scores = torch.einsum('sbgnd,tbgd->bgnst', q, k) * d**-0.5\n"
        "    scores = scores + torch.full((s, s), float('-inf')).triu(1)\n"
        "    out = torch.einsum('bgnst,tbgd->sbgnd', scores.softmax(-1), v).reshape(s, b, -1)\n"
        "    return reduce_from_region(F.linear(out, proj[0]), tp) + proj[1]",
    ],
    "embedding": [
        HEAD + "def embedding(ids, weight, tp):\n    n = len(weight)\n    own = (ids // n) == tp.rank\n"
        "    rows = weight[ids % n] * own.unsqueeze(-1)\n    return reduce_from_region(rows, tp)",
        HEAD + "def embedding(ids, weight, tp):\n    n = len(weight)\n    hot = F.one_hot(ids, n * tp.size)[..., tp.rank * n : (tp.rank + 1) * n]\n"
        "    return reduce_from_region(hot.to(weight.dtype) @ weight, tp)",
        HEAD + "def embedding(ids, weight, tp):\n    n = len(weight)\n    local = ids - tp.rank * n\n"
        "    out = weight.new_zeros(*ids.shape, weight.shape[1])\n    own = (local >= 0) & (local < n)\n"
        "    out = out.masked_scatter(own.unsqueeze(-1), weight[local[own]])\n    return reduce_from_region(out, tp)",
    ],
    "cross_entropy": [
        # autograd through g; the max needs no gradient
        HEAD + "def cross_entropy(logits, target, tp):\n    n = logits.shape[-1]\n    m = logits.detach().amax(-1)\n"
        "    dist.all_reduce(m, op=dist.ReduceOp.MAX, group=tp.group)\n    z = logits - m.unsqueeze(-1)\n"
        "    i = target - tp.rank * n\n    own = (i >= 0) & (i < n)\n"
        "    picked = z.gather(-1, i.clamp(0, n - 1).unsqueeze(-1)).squeeze(-1) * own\n"
        "    return reduce_from_region(z.exp().sum(-1), tp).log() - reduce_from_region(picked, tp)",
        # a log-sum-exp of the ranks' log-sum-exps
        HEAD + "class Loss(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, z, target, tp):\n        n = z.shape[-1]\n"
        "        mine = z.logsumexp(-1)\n        all_of = c.all_gather(mine[None], tp)\n        lse = all_of.logsumexp(0)\n"
        "        hot = F.one_hot(target, n * tp.size)[..., tp.rank * n : (tp.rank + 1) * n].to(z.dtype)\n"
        "        at = c.all_reduce((z * hot).sum(-1), tp)\n        ctx.save_for_backward((z - lse.unsqueeze(-1)).exp() - hot)\n"
        "        return lse - at\n    @staticmethod\n    def backward(ctx, g):\n"
        "        return ctx.saved_tensors[0] * g.unsqueeze(-1), None, None\n"
        "def cross_entropy(logits, target, tp): return Loss.apply(logits, target, tp)",
        # three messages, each by itself
        changed("cross_entropy", ("sums = torch.stack([picked, z.exp().sum(-1)])\n        dist.all_reduce(sums, group=tp.group)\n"
            "        picked, partition = sums", "partition = z.exp().sum(-1)\n        for part in (picked, partition):\n"
            "            dist.all_reduce(part, group=tp.group)")),
    ],
    "sequence_pair": [
        HEAD + "def gather_sequence(x, tp): return gather_from_sequence_region(x, tp)\n"
        "def reduce_scatter_sequence(x, tp): return reduce_scatter_to_sequence_region(x, tp)",
        # lists of tensors in place of one
        changed("sequence_pair", ("out = x.new_empty(x.shape[0] * tp.size, *x.shape[1:])\n    dist.all_gather_into_tensor(out, "
            "x.contiguous(), group=tp.group)\n    return out", "parts = [torch.empty_like(x) for _ in range(tp.size)]\n"
            "    dist.all_gather(parts, x.contiguous(), group=tp.group)\n    return torch.cat(parts)")),
        # one function, with a switch
        HEAD + "class Both(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x, tp, gather):\n"
        "        ctx.tp, ctx.gather = tp, gather\n        return Both.go(x, tp, gather)\n    @staticmethod\n"
        "    def backward(ctx, g):\n        return Both.go(g, ctx.tp, not ctx.gather), None, None\n    @staticmethod\n"
        "    def go(x, tp, gather):\n        return c.all_gather(x, tp) if gather else c.reduce_scatter(x, tp)\n"
        "def gather_sequence(x, tp): return Both.apply(x, tp, True)\n"
        "def reduce_scatter_sequence(x, tp): return Both.apply(x, tp, False)",
    ],
    "partial_gradients": [
        "import re\ndef partial_gradients(names, sequence_parallel):\n    always = re.compile(r'\\.[qk]_layernorm')\n"
        "    tokens = re.compile(r'(linear_proj|linear_fc2)\\.bias|_layernorm|position')\n"
        "    return [n for n in names if always.search(n) or sequence_parallel and tokens.search(n)]",
        # by what is complete
        "def partial_gradients(names, sequence_parallel):\n    cut = ('word_embeddings.weight', 'output_layer.weight', 'linear_qkv.weight', "
        "'linear_qkv.bias', 'linear_fc1.weight', 'linear_fc1.bias', 'linear_proj.weight', 'linear_fc2.weight')\n"
        "    replicated = [n for n in names if not n.endswith(cut)]\n"
        "    return replicated if sequence_parallel else [n for n in replicated if n.split('.')[-2] in ('q_layernorm', 'k_layernorm')]",
        "def partial_gradients(names, sequence_parallel):\n    out = ()\n    for n in names:\n        module, kind = n.split('.')[-2:]\n"
        "        if module in ('q_layernorm', 'k_layernorm'):\n            out += (n,)\n        elif sequence_parallel and "
        "(module.endswith('layernorm') or module.startswith('position') or (module, kind) in "
        "{('linear_proj', 'bias'), ('linear_fc2', 'bias')}):\n            out += (n,)\n    return out",
    ],
    "column_backward": [
        HEAD + "def column_backward(dy, x, weight, tp):\n    sum_of = c.all_reduce_start((dy @ weight).contiguous(), tp)\n"
        "    dw = torch.einsum('sbo,sbi->oi', dy, x)\n    return sum_of.wait(), dw",
        changed("column_backward", ("dy.flatten(0, 1).t() @ x.flatten(0, 1)", "(x.flatten(0, 1).t() @ dy.flatten(0, 1)).t().contiguous()")),
        HEAD + "def column_backward(dy, x, weight, tp):\n    rows, n = dy.reshape(-1, dy.shape[-1]), x.shape[-1]\n"
        "    dx = rows.mm(weight).view(x.shape)\n    work = dist.all_reduce(dx, group=tp.group, async_op=True)\n"
        "    try:\n        dw = rows.t().mm(x.reshape(-1, n))\n    finally:\n        work.wait()\n    return dx, dw",
    ],
    "initial_part": [
        "import torch\ndef initial_part(shape, dim, tp_rank, tp_size, seed, std):\n    g = torch.Generator().manual_seed(seed)\n"
        "    w = torch.randn(*shape, generator=g).mul(std)\n    if dim is None:\n        return w\n    n = shape[dim] // tp_size\n"
        "    return w.narrow(dim, tp_rank * n, n)",
        "import torch\ndef initial_part(shape, dim, tp_rank, tp_size, seed, std):\n    torch.manual_seed(seed)\n"
        "    w = std * torch.randn(shape)\n    return w if dim is None else w.tensor_split(tp_size, dim)[tp_rank].clone()",
        "import torch\ndef initial_part(shape, dim, tp_rank, tp_size, seed, std):\n"
        "    w = torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed)) * std\n"
        "    return torch.split(w, shape[dim] // tp_size, dim)[tp_rank] if dim is not None else w",
    ],
    "answers": [
        changed("answers", ("range(rank * heads // tp, (rank + 1) * heads // tp)", "range(heads)[rank * (heads // tp) :][: heads // tp]")),
        changed("answers", ("sorted({q // (heads // groups) for q in queries})",
            "list(dict.fromkeys(q * groups // heads for q in queries))")),
        changed("answers", ("3 * 12 * hidden**2 / (8 * hidden)", "4.5 * hidden"), ("vocab / (2 * 3)", "vocab / 3 / 2")),
    ],
}  # fmt: skip

test_other_right_answers_get_full_marks = MARKED.right_answers(RIGHT)


def test_every_exercise_has_three_other_right_answers():
    MARKED.assert_three_each(RIGHT)


ALL_REDUCED_LOGITS = (  # right numbers, bought with all the logits
    HEAD + "def cross_entropy(logits, target, tp):\n"
    "    whole = gather_from_region(logits, tp)\n"
    "    loss = F.cross_entropy(whole.flatten(0, 1), target.flatten(), reduction='none')\n    return loss.view_as(target)"
)

# exercise -> [(wrong answer, words of the hint)]
WRONG = {
    "bytes_per_layer": [
        (changed("bytes_per_layer", ("(2 * all_gather if sequence_parallel else 0)", "0")), "One gather is missing"),
        (changed("bytes_per_layer", ("= s * b * h * element_size", "= 0.5 * s * b * h * element_size")), "almost twice"),
        (changed("bytes_per_layer", ("return forward + backward + (2 * all_gather if sequence_parallel else 0)", "return forward")),
            "Forward and backward"),
        (changed("bytes_per_layer", (" * (t - 1) / t", "")), "t-1 of t parts"),
    ],
    "activation_bytes": [
        (changed("activation_bytes", ("whole + divided / t", "(whole + divided) / t")), "10 of the 34"),
        (changed("activation_bytes", ("(whole + divided) / t if sequence_parallel else ", "")), "cut over the sequence"),
        ("def activation_bytes(s, b, h, a, t, sequence_parallel):\n    n = s * b * h\n"
            "    return n * 34 / t + 5 * a * s * s * b if sequence_parallel else n * (10 + 24 / t) + 5 * a * s * s * b", "heads are divided"),
        (changed("activation_bytes", ("(24 * h + 5 * a * s)", "(24 * h)")), "scores are missing"),
        (changed("activation_bytes", ("10 * s * b * h", "8 * s * b * h")), "masks are bytes"),
        (changed("activation_bytes", ("10 * s * b * h", "6 * s * b * h"), ("(24 * h", "(28 * h")), "what f copies"),
    ],
    "column_linear": [
        (changed("column_linear", ("copy_to_region(x, tp)", "x")), "shares must be summed"),
        (changed("column_linear", ("F.linear(copy_to_region(x, tp), weight, bias)",
            "copy_to_region(F.linear(copy_to_region(x, tp), weight, bias), tp)")), "Do not gather"),
        (HEAD + "def column_linear(x, weight, bias, tp):\n"
            "    return gather_from_region(F.linear(copy_to_region(x, tp), weight, bias), tp)", ""),
    ],
    "row_linear": [
        (changed("row_linear", ("F.linear(x, weight)", "F.linear(x, weight, bias)"),
            ("return y if bias is None else y + bias", "return y")), "t biases"),
        (changed("row_linear", ("reduce_from_region(F.linear(x, weight), tp)", "F.linear(x, weight)")), "partial sum"),
        (changed("row_linear", ("reduce_from_region(F.linear(x, weight), tp)",
            "reduce_from_region(copy_to_region(F.linear(x, weight), tp), tp)")), "once too often"),
        # right numbers, twice the bytes
        (HEAD + "def row_linear(x, weight, bias, tp):\n    parts = gather_from_region(F.linear(x, weight), tp)\n"
            "    y = sum(parts.chunk(tp.size, -1))\n    return y if bias is None else y + bias", "an all-reduce"),
    ],
    "qkv_part": [
        (changed("qkv_part", ("torch.cat(by_group, dim=1).flatten(0, 1)", "torch.cat([wq, wk, wv])")), "nothing but queries"),
        ("import torch\ndef qkv_part(wq, wk, wv, d, tp_rank, tp_size):\n"
            "    return torch.cat([w.chunk(tp_size)[tp_rank] for w in (wq, wk, wv)])", "another order"),
        (changed("qkv_part", ("for w in (wq, wk, wv)", "for w in (wk, wq, wv)")), "View wq as"),
    ],
    "attention": [
        (changed("attention", ("is_causal=True", "is_causal=False")), "sees only itself"),
        (changed("attention", ("    out = F", "    k, v = (t.repeat(1, queries_per_group, 1, 1) for t in (k, v))\n    out = F"),
            (", enable_gqa=queries_per_group > 1", "")), "repeat_interleave"),
        (changed("attention", ("is_causal=True", "is_causal=True, scale=1.0")), "sqrt(d)"),
        (changed("attention", ("column_linear(x, *qkv, tp)", "F.linear(x, *qkv)")), "begin with f"),
        (changed("attention", ("row_linear(out.permute(2, 0, 1, 3).flatten(2), *proj, tp)",
            "row_linear(out.permute(2, 0, 1, 3).flatten(2), proj[0], proj[1] * tp.size, tp)")), ""),
        (changed("attention", ("out.permute(2, 0, 1, 3).flatten(2)", "out.permute(2, 0, 3, 1).flatten(2)")), "back to"),
    ],
    "embedding": [
        (changed("embedding", (".masked_fill(foreign.unsqueeze(-1), 0.0)", ""), ("local.masked_fill(foreign, 0)",
            "local.clamp(0, weight.shape[0] - 1)")), "must give zeros"),
        (changed("embedding", ("return reduce_from_region(rows, tp)", "return rows")), "sum over ranks"),
        (changed("embedding", ("(local >= weight.shape[0])", "(local > weight.shape[0] - 2)")), "owned"),
        # right numbers, but the table travels
        (HEAD + "def embedding(ids, weight, tp):\n    whole = c.gather_from_sequence_region(weight, tp, reduce_gradient=False)\n"
            "    return F.embedding(ids, whole)", "never travels"),
    ],
    "cross_entropy": [
        (ALL_REDUCED_LOGITS, "Three numbers a token"),
        (changed("cross_entropy", ("sums = torch.stack([picked, z.exp().sum(-1)])\n        dist.all_reduce(sums, group=tp.group)\n"
            "        picked, partition = sums", "dist.all_reduce(picked, group=tp.group)\n        partition = z.exp().sum(-1)")), "over this rank's words"),
        (changed("cross_entropy", ("        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=tp.group)\n", "")), "max over ranks"),
        (changed("cross_entropy", ("z = logits - highest.unsqueeze(-1)", "z = logits")), "overflow"),
        (changed("cross_entropy", (" * dloss.unsqueeze(-1)", "")), "one number a token, multiplies"),
        (changed("cross_entropy", ("softmax.scatter_add(-1, local, -own.unsqueeze(-1).to(softmax.dtype))", "softmax.clone()")), "minus one"),
        (changed("cross_entropy", ("op=dist.ReduceOp.MAX", "op=dist.ReduceOp.SUM")), ""),
    ],
    "sequence_pair": [
        (changed("sequence_pair", ("return reduce_scatter(grad, ctx.tp), None",
            "return grad.chunk(ctx.tp.size)[ctx.tp.rank].contiguous(), None")), "must be summed, then cut"),
        (changed("sequence_pair", ("        return all_gather(grad, ctx.tp), None", "        out = grad.new_zeros(grad.shape[0] * ctx.tp.size, *grad.shape[1:])\n"
            "        out.chunk(ctx.tp.size)[ctx.tp.rank].copy_(grad)\n        return out, None")), "back to every rank"),
        (changed("sequence_pair", ("    out = x.new_empty(x.shape[0] // tp.size, *x.shape[1:])\n    dist.reduce_scatter_tensor(out, x.contiguous(), "
            "group=tp.group)\n    return out", "    x = x.clone()\n    dist.all_reduce(x, group=tp.group)\n    return x.chunk(tp.size)[tp.rank].contiguous()")),
            "twice as much"),
    ],
    "partial_gradients": [
        (changed("partial_gradients", (" or row_bias or \"position_embeddings\" in name", "")), "Norms are not all"),
        (changed("partial_gradients", ("            return True\n", "            return sequence_parallel\n")), "only this rank's heads"),
        (changed("partial_gradients", (" or \"position_embeddings\" in name", "")), "positions are added"),
        (changed("partial_gradients", ('name.endswith(("linear_proj.bias", "linear_fc2.bias"))', 'name.endswith("bias")')), "column layer's bias"),
        (changed("partial_gradients", ("return sequence_parallel and (", "return (")), "sees all tokens"),
    ],
    "column_backward": [
        (changed("column_backward", ("    dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)\n    handle.wait()\n",
            "    handle.wait()\n    dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)\n")), "Four steps in this order"),
        (changed("column_backward", ("handle = dist.all_reduce(dx, group=tp.group, async_op=True)", "dist.all_reduce(dx, group=tp.group)"),
            ("    handle.wait()\n", "")), "Four steps in this order"),
        (changed("column_backward", ("    dx = dy @ weight\n    handle", "    dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)\n    dx = dy @ weight\n    handle"),
            ("async_op=True)\n    dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)\n", "async_op=True)\n")), "Four steps in this order"),
        (changed("column_backward", ("    handle = dist.all_reduce(dx, group=tp.group, async_op=True)\n", ""),
            ("    handle.wait()\n", "")), "sum it over ranks"),
        (changed("column_backward", ("    handle.wait()\n", "    handle.wait()\n    dist.all_reduce(dw, group=tp.group)\n")), "do not sum it"),
        # it never waits; the sum may or may not have arrived
        (changed("column_backward", ("    handle.wait()\n", "    import time\n    time.sleep(0.3)\n")), "Four steps in this order"),
    ],
    "initial_part": [
        ("import torch\ndef initial_part(shape, dim, tp_rank, tp_size, seed, std):\n"
            "    local = [n // tp_size if i == dim else n for i, n in enumerate(shape)]\n"
            "    return torch.randn(*local, generator=torch.Generator().manual_seed(seed)) * std", "equal shards"),
        ("import torch\ndef initial_part(shape, dim, tp_rank, tp_size, seed, std):\n"
            "    local = [n // tp_size if i == dim else n for i, n in enumerate(shape)]\n"
            "    own = seed if dim is None else seed + tp_rank\n"
            "    return torch.randn(*local, generator=torch.Generator().manual_seed(own)) * std", "changes with tp"),
        (changed("initial_part", (" * std", "")), "times std"),
        (changed("initial_part", ("chunk(tp_size, dim)", "chunk(tp_size, 0)")), "along dim"),
    ],
    "answers": [
        (changed("answers", ("sorted({q // (heads // groups) for q in queries})",
            "list(range(rank * groups // tp, rank * groups // tp + groups // tp))")), "use the same key/value head"),
        (changed("answers", ("[[half + rank * ffn // tp, half + (rank + 1) * ffn // tp] for half in (0, ffn)]",
            "[[rank * 2 * ffn // tp, (rank + 1) * 2 * ffn // tp]]")), "only gates"),
        (changed("answers", ("2 * layers + 1", "2 * layers")), "embedding is summed"),
        (changed("answers", ("2 * layers + 1", "4 * layers + 1")), "Forward only"),
        (changed("answers", ("vocab / (2 * 3)", "vocab / 3")), "twice what an all-gather"),
        (changed("answers", ("3 * 12 * hidden**2", "2 * 12 * hidden**2")), "three times"),
    ],
}  # fmt: skip

test_each_mistake_loses_points_and_gets_its_hint = MARKED.wrong_answers(
    WRONG, told=lambda verdict, words: words in verdict.hint
)
test_an_answer_that_returns_nothing_scores_nothing = MARKED.empty_answers()


def test_a_loss_that_gathers_the_logits_is_right_in_numbers_and_loses_points_by_bytes(nursery):
    verdict = check(nursery, "cross_entropy", ALL_REDUCED_LOGITS)
    assert [row.points == row.of for row in verdict.rows] == [True, True, False], verdict
    assert "bytes; the bound" in verdict.rows[-1].note


# ------------------------------------------------------------------------- the references, against somebody else


def test_activations_as_published():
    """Korthikanti et al. 2022 for 22B, 175B, 530B and 1T with t = 8: GB a layer undivided, tp, tp and sp."""
    published = {
        (6144, 64): (1.770, 0.331, 0.221), (12288, 96): (2.869, 0.579, 0.359),
        (20480, 128): (4.110, 0.881, 0.514), (25600, 160): (5.138, 1.101, 0.642),
    }  # fmt: skip
    for (h, a), want in published.items():
        got = [PREDICTED.activation_bytes(2048, 1, h, a, t, sp) / 1e9 for t, sp in ((1, False), (8, False), (8, True))]
        assert got == pytest.approx(want, abs=6e-4)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_partial_gradients_are_those_that_the_package_declares(sequence_parallel):
    """Beside `ParamLayout.partial`, which the layouts against the serial twin prove."""
    for changes in ({"qk_layernorm": True}, {"untie_embeddings_and_output_weights": True}):
        sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
        with torch.device("meta"):
            model = GPTModel(family_config("gpt2", **sizes, **changes), Mesh.serial())
        kinds = {"heads", "sequence"} if sequence_parallel else {"heads"}
        want = [name for name, p in model.named_parameters() if layout_of(p).partial in kinds]
        assert PREDICTED.partial_gradients([name for name, _ in model.named_parameters()], sequence_parallel) == want


def test_the_names_in_the_check_are_names_of_the_package():
    config = family_config(
        "gpt2", num_layers=1, qk_layernorm=True, untie_embeddings_and_output_weights=True, num_attention_heads=4
    )
    with torch.device("meta"):
        names = {name.replace("decoder.", "") for name, _ in GPTModel(config, Mesh.serial()).named_parameters()}
    assert set(PREDICTED.NAMES) <= names


def test_the_packed_rows_are_those_of_the_package():
    """Rows of the logical QKV matrix which the package's layout gives each rank, group by group."""
    config = family_config("llama", num_layers=1, hidden_size=32, num_attention_heads=8, num_query_groups=4)
    mesh, d = Mesh.serial(), 4
    mesh.parallel = ParallelConfig(tensor_model_parallel_size=2)
    q, k, v = (torch.randn(heads * d, 32) for heads in (8, 4, 4))
    logical = torch.cat([w.unflatten(0, (4, -1)) for w in (q, k, v)], 1).flatten(0, 1)
    for rank in range(2):
        mesh.tp = Axis("tp", (0, 1), rank)
        with torch.device("meta"):
            layout = layout_of(GPTModel(config, mesh).decoder.layers["0"].self_attention.linear_qkv.weight)
        assert torch.equal(HEADS.qkv_part(q, k, v, d, rank, 2), layout.take(logical))

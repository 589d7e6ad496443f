"""Lab 02: the solution with small mistakes, and with small changes that leave it right (`labkit/answers`)."""

from __future__ import annotations

from labkit.answers import Edit, Same

WRONG: dict[str, list[Edit]] = {
    "bytes_per_layer": [
        Edit("(2 * all_gather if sequence_parallel else 0)", "0", told="Two all-gathers are missing"),
        Edit("= s * b * h * element_size", "= 0.5 * s * b * h * element_size", told="two column-row pairs"),
        Edit(
            "return forward + backward + (2 * all_gather if sequence_parallel else 0)",
            "return forward",
            told="backward pass has as many arrows",
        ),
        Edit(" * (t - 1) / t", "", told="t-1 of t parts"),
    ],
    "activation_bytes": [
        Edit("whole + divided / t", "(whole + divided) / t", told="10 of the 34"),
        Edit("(whole + divided) / t if sequence_parallel else ", "", told="cut over the sequence"),
        Edit("(24 * h + 5 * a * s)", "(24 * h)", told="scores are missing"),
        Edit("10 * s * b * h", "8 * s * b * h", told="masks are bytes"),
        Edit("10 * s * b * h", "6 * s * b * h", ("(24 * h", "(28 * h"), told="what f copies"),
    ],
    "column_linear": [
        Edit("copy_to_region(x, tp)", "x", told="shares must be summed"),
        Edit(
            "F.linear(copy_to_region(x, tp), weight, bias)",
            "copy_to_region(F.linear(copy_to_region(x, tp), weight, bias), tp)",
            told="Do not gather",
        ),
    ],
    "row_linear": [
        Edit(
            "F.linear(x, weight)",
            "F.linear(x, weight, bias)",
            ("return y if bias is None else y + bias", "return y"),
            told="t biases",
        ),
        Edit("reduce_from_region(F.linear(x, weight), tp)", "F.linear(x, weight)", told="partial sum"),
        Edit(
            "reduce_from_region(F.linear(x, weight), tp)",
            "reduce_from_region(copy_to_region(F.linear(x, weight), tp), tp)",
            told="once too often",
        ),
    ],
    "qkv_part": [
        Edit("torch.cat(by_group, dim=1).flatten(0, 1)", "torch.cat([wq, wk, wv])", told="nothing but queries"),
        Edit("for w in (wq, wk, wv)", "for w in (wk, wq, wv)", told="View wq as"),
    ],
    "attention": [
        Edit("is_causal=True", "is_causal=False", told="see only itself"),
        Edit("enable_gqa=queries_per_group > 1", "enable_gqa=queries_per_group > 2", told="RuntimeError"),
        Edit(
            "    out = F",
            """    k, v = (t.repeat(1, queries_per_group, 1, 1) for t in (k, v))
    out = F""",
            (", enable_gqa=queries_per_group > 1", ""),
            told="repeat_interleave",
        ),
        Edit("is_causal=True", "is_causal=True, scale=1.0", told="sqrt(d)"),
        Edit("column_linear(x, *qkv, tp)", "F.linear(x, *qkv)", told="share of this rank's heads"),
        Edit(
            "row_linear(out.permute(2, 0, 1, 3).flatten(2), *proj, tp)",
            "row_linear(out.permute(2, 0, 1, 3).flatten(2), proj[0], proj[1] * tp.size, tp)",
        ),
        Edit("out.permute(2, 0, 1, 3).flatten(2)", "out.permute(2, 0, 3, 1).flatten(2)", told="back to"),
    ],
    "embedding": [
        Edit(
            ".masked_fill(foreign.unsqueeze(-1), 0.0)",
            "",
            ("local.masked_fill(foreign, 0)", "local.clamp(0, weight.shape[0] - 1)"),
            told="must give zeros",
        ),
        Edit("return reduce_from_region(rows, tp)", "return rows", told="tokens of other ranks are still zeros"),
        Edit("(local >= weight.shape[0])", "(local > weight.shape[0] - 2)", told="owned"),
    ],
    "cross_entropy": [
        Edit(
            """sums = torch.stack([picked, z.exp().sum(-1)])
        dist.all_reduce(sums, group=tp.group)
        picked, partition = sums""",
            """dist.all_reduce(picked, group=tp.group)
        partition = z.exp().sum(-1)""",
            told="over this rank's words",
        ),
        Edit("        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=tp.group)\n", "", told="max over ranks"),
        Edit("z = logits - highest.unsqueeze(-1)", "z = logits", told="overflow"),
        Edit(" * dloss.unsqueeze(-1)", "", told="gradient that arrives is lost"),
        Edit(
            "softmax.scatter_add(-1, local, -own.unsqueeze(-1).to(softmax.dtype))", "softmax.clone()", told="minus one"
        ),
        Edit("op=dist.ReduceOp.MAX", "op=dist.ReduceOp.SUM", told="the ranks' maxima"),
    ],
    "sequence_pair": [
        Edit(
            "return reduce_scatter(grad, ctx.tp), None",
            "return grad.chunk(ctx.tp.size)[ctx.tp.rank].contiguous(), None",
            told="must be summed, then cut",
        ),
        Edit(
            "        return all_gather(grad, ctx.tp), None",
            """        out = grad.new_zeros(grad.shape[0] * ctx.tp.size, *grad.shape[1:])
        out.chunk(ctx.tp.size)[ctx.tp.rank].copy_(grad)
        return out, None""",
            told="gradient of every token",
        ),
        Edit(
            """    out = x.new_empty(x.shape[0] // tp.size, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=tp.group)
    return out""",
            """    x = x.clone()
    dist.all_reduce(x, group=tp.group)
    return x.chunk(tp.size)[tp.rank].contiguous()""",
            told="twice as much",
        ),
    ],
    "partial_gradients": [
        Edit(' or row_bias or "position_embeddings" in name', "", told="Norms are not all"),
        Edit("            return True\n", "            return sequence_parallel\n", told="only this rank's heads"),
        Edit(' or "position_embeddings" in name', "", told="positions are missing"),
        Edit(
            'name.endswith(("linear_proj.bias", "linear_fc2.bias"))',
            'name.endswith("bias")',
            told="column layer's bias",
        ),
        Edit("return sequence_parallel and (", "return (", told="sees all tokens"),
    ],
    "column_backward": [
        Edit(
            """    dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)
    handle.wait()
""",
            """    handle.wait()
    dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)
""",
            told="Four steps in this order",
        ),
        Edit(
            "handle = dist.all_reduce(dx, group=tp.group, async_op=True)",
            "dist.all_reduce(dx, group=tp.group)",
            ("    handle.wait()\n", ""),
            told="Four steps in this order",
        ),
        Edit(
            """    dx = dy @ weight
    handle""",
            """    dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)
    dx = dy @ weight
    handle""",
            (
                """async_op=True)
    dw = dy.flatten(0, 1).t() @ x.flatten(0, 1)
""",
                "async_op=True)\n",
            ),
            told="Four steps in this order",
        ),
        Edit(
            "    handle = dist.all_reduce(dx, group=tp.group, async_op=True)\n",
            "",
            ("    handle.wait()\n", ""),
            told="still this rank's share",
        ),
        Edit(
            "    handle.wait()\n",
            """    handle.wait()
    dist.all_reduce(dw, group=tp.group)
""",
            told="dW is summed",
        ),
        # it never waits; the sum may or may not have arrived
        Edit(
            "    handle.wait()\n",
            """    import time
    time.sleep(0.3)
""",
            told="has not arrived | never waits for its all_reduce",
        ),
    ],
    "initial_part": [
        Edit("if dim is None", "if dim is None or tp_rank == 0"),
        Edit(" * std", "", told="times std"),
        Edit("chunk(tp_size, dim)", "chunk(tp_size, 0)", told="along dim"),
    ],
    "answers": [
        Edit(
            "sorted({q // (heads // groups) for q in queries})",
            "list(range(rank * groups // tp, rank * groups // tp + groups // tp))",
            told="use the same key/value head",
        ),
        Edit(
            "[[half + rank * ffn // tp, half + (rank + 1) * ffn // tp] for half in (0, ffn)]",
            "[[rank * 2 * ffn // tp, (rank + 1) * 2 * ffn // tp]]",
            told="only gates",
        ),
        Edit("2 * layers + 1", "2 * layers", told="embedding is summed"),
        Edit("2 * layers + 1", "4 * layers + 1", told="Forward only"),
        Edit("vocab / (2 * 3)", "vocab / 3", told="twice what an all-gather"),
        Edit("3 * 12 * hidden**2", "2 * 12 * hidden**2", told="three times"),
    ],
}

RIGHT: dict[str, list[Edit]] = {
    "attention": [
        Edit(
            "q, k, v = packed.split([queries_per_group, 1, 1], dim=3)",
            """n = queries_per_group
    q, k, v = packed[:, :, :, :n], packed[:, :, :, n : n + 1], packed[:, :, :, n + 1 :]""",
            ("queries_per_group > 1", "True"),
        ),
        # keys repeated by hand
        Edit(
            "    out = F",
            """    k, v = (t.repeat_interleave(queries_per_group, 1) for t in (k, v))
    out = F""",
            (", enable_gqa=queries_per_group > 1", ""),
        ),
    ],
    "cross_entropy": [
        # three messages, each by itself
        Edit(
            """sums = torch.stack([picked, z.exp().sum(-1)])
        dist.all_reduce(sums, group=tp.group)
        picked, partition = sums""",
            """partition = z.exp().sum(-1)
        for part in (picked, partition):
            dist.all_reduce(part, group=tp.group)""",
        ),
    ],
    "sequence_pair": [
        # lists of tensors in place of one
        Edit(
            """out = x.new_empty(x.shape[0] * tp.size, *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=tp.group)
    return out""",
            """parts = [torch.empty_like(x) for _ in range(tp.size)]
    dist.all_gather(parts, x.contiguous(), group=tp.group)
    return torch.cat(parts)""",
        ),
    ],
    "column_backward": [
        Edit("dy.flatten(0, 1).t() @ x.flatten(0, 1)", "(x.flatten(0, 1).t() @ dy.flatten(0, 1)).t().contiguous()"),
    ],
    "answers": [
        Edit(
            "range(rank * heads // tp, (rank + 1) * heads // tp)", "range(heads)[rank * (heads // tp) :][: heads // tp]"
        ),
        Edit(
            "sorted({q // (heads // groups) for q in queries})",
            "list(dict.fromkeys(q * groups // heads for q in queries))",
        ),
        Edit("3 * 12 * hidden**2 // (8 * hidden)", "9 * hidden // 2", ("vocab / (2 * 3)", "vocab / 3 / 2")),
    ],
}

_ANY = "with one query a group, enable_gqa changes nothing"
_MASKED = "the row that is looked up there is masked afterwards"
_GLOO = "gloo takes views, too; NCCL would not"
_DIVIDES = "it divides without rest, and 8.0 is as good as 8"
_EVEN = "a model's hidden size is even: 4.5 times it is a whole number"
EQUIVALENT = {
    "qkv_part": [Same("line 6: rounded up for down", "a matrix has whole heads: d divides its rows")],
    "attention": [Same("line 12: 0 for 1", _ANY), Same("line 12: `>=` for `>`", _ANY)],
    "embedding": [Same("line 11: 1 for 0", _MASKED)],
    "cross_entropy": [Same("line 15: 1 for 0", _MASKED)],
    "sequence_pair": [
        Same("line 29: `.contiguous()` dropped", _GLOO),
        Same("line 34: rounded up for down", _DIVIDES),
        Same("line 35: `.contiguous()` dropped", _GLOO),
    ],
    "initial_part": [Same("line 8: `.contiguous()` dropped", "a view has the same numbers")],
    "answers": [
        Same("line 5: rounded up for down", _DIVIDES),
        Same("line 5: rounded up for down (2)", _DIVIDES),
        Same("line 8: `/` for `//` (2)", _DIVIDES),
        Same("line 8: rounded up for down (2)", _DIVIDES),
        Same("line 9: `/` for `//`", _DIVIDES),
        Same("line 9: `/` for `//` (2)", _DIVIDES),
        Same("line 9: rounded up for down", _DIVIDES),
        Same("line 9: rounded up for down (2)", _DIVIDES),
        Same("line 12: `/` for `//`", _EVEN),
        Same("line 12: rounded up for down", _EVEN),
    ],
}

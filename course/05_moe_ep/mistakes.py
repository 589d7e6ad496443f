"""Lab 05: the solution with small mistakes, and with small changes that leave it right (`labkit/answers`)."""

from __future__ import annotations

from labkit.answers import Edit

WRONG: dict[str, list[Edit]] = {
    "bytes_per_layer": [
        Edit("(row + 4 + row)", "(row + 4)", told="travels back, too"),
        Edit("(row + 4 + row)", "(row + row)", told="takes its weight along"),
        Edit("(ep - 1) / ep * k", "k", told="and stays"),
        Edit("ep * k * tokens", "ep * tokens", told="for each of its k experts"),
        Edit("5 * experts + row", "5 * experts", told="come back by a reduce-scatter"),
        Edit("(ep - 1) * tokens", "ep * tokens", told="the P-1 *others*"),
        Edit("row + 5 * experts + row", "row + row", told="each token"),
    ],
    "expected_drops": [
        Edit("over / mean", "over / (k * tokens)", told="All E of them"),
        Edit("over / mean", "over * experts / tokens", told="not of the T tokens"),
        Edit("p, mean = k / experts", "p, mean = 1 / experts", told="one of them is k/E"),
        Edit("math.ceil", "math.floor", told="rounded up"),
    ],
    "route": [
        Edit(
            "best.values.softmax(-1)",
            "best.values.softmax(-1).detach()",
            ("return probs,", "return probs + 0 * weight.float().sum(),"),
            told="No gradient reaches",
        ),
        Edit(
            "best.values.softmax(-1)", "torch.full_like(best.values, 1 / k) + 0 * best.values", told="equal ones teach"
        ),
        Edit(
            "best.values.softmax(-1)", "best.values.exp() / best.values.exp().sum(-1, keepdim=True)", told="overflows"
        ),
        Edit("x.float() @ weight.float().T", "(x @ weight.T).float()", told="*before* the product"),
        Edit("return probs,", "return probs.to(x.dtype),", told="must be fp32"),
    ],
    "balance": [
        Edit("p * (price - paid)", "price.expand_as(p).clone()", told="behind a softmax"),
        Edit("p * (price - paid)", "p * price", told="two terms"),
        Edit("tokens**2", "tokens", told="divide by T^2"),
        Edit("coeff * experts / (", "coeff / (", told="whatever E is"),
        Edit("(k * tokens**2)", "tokens**2", told="counts for k experts"),
    ],
    "expert_bias": [
        Edit("kept = scores * map", "kept = (scores + bias) * map", told="not in what it counts"),
        Edit("(scores + bias).topk", "scores.topk", told="score plus bias"),
        Edit("(counts.mean() - counts)", "(counts - counts.mean())", told="*larger* bias"),
        Edit("(counts.mean() - counts).sign()", "(counts.mean() - counts)", told="not the gap"),
        Edit("(counts.mean() - counts).sign()", "(counts.mean() - counts) / counts.sum()", told="not the gap"),
    ],
    "permute": [
        Edit(
            "expert, source = map.T.nonzero(as_tuple=True)",
            "source, expert = map.nonzero(as_tuple=True)",
            told="sorted by token",
        ),
        Edit("probs[source, expert]", "probs[map]", told="another row's weight"),
        Edit(
            "    return rows.new_zeros(tokens, rows.shape[1]).index_add(0, source, rows)",
            """    n = source.bincount(minlength=tokens).clamp(min=1)
    return rows.new_zeros(tokens, rows.shape[1]).index_add(0, source, rows) / n[:, None]""",
            told="not averaged",
        ),
        Edit("tokens[source]", "tokens.detach()[source]", told="does not require grad"),
    ],
    "dispatch": [
        Edit(
            "torch.cat([by_sender[i * local + e] for e in range(local) for i in range(ep.size)])",
            "out",
            ("torch.cat([by_expert[e * ep.size + i] for i in range(ep.size) for e in range(local)])", "y"),
            told="arrive by sender",
        ),
        Edit(
            "torch.cat([by_expert[e * ep.size + i] for i in range(ep.size) for e in range(local)])",
            "y",
            told="back in the order in which they came",
        ),
        Edit(
            "blocks.contiguous()",
            "blocks.T.contiguous()",
            (
                "    by_expert",
                """    blocks = blocks.T
    by_expert""",
            ),
            told="blocks[i, e]",
        ),
        # stays away when it has nothing to send
        Edit(
            "    splits = blocks.sum(1).tolist(), counts",
            """    if not len(rows) and not len(out):
        return out, blocks
    splits = blocks.sum(1).tolist(), counts.flip(0)""",
            told="rank",
        ),
    ],
    "limit": [
        Edit(
            "return probs * kept, kept",
            """left = probs * kept
    return left / left.sum(-1, keepdim=True).clamp(min=1e-9), kept""",
            told="do not change",
        ),
        Edit("return probs * kept, kept", "return probs * kept, map", told="`map` must say"),
        Edit(" & map", "", told="did not choose it"),
    ],
    "finish": [
        Edit(
            "all_reduce(expert.clone(), edp) / every",
            "all_reduce(expert.clone(), edp) / all_reduce(torch.tensor(float(tokens)), edp)",
            told="the tokens of edp alone",
        ),
        Edit("edp) / every", "edp) / every / edp.size", told="by a number of ranks"),
        Edit("edp) / every", "edp) / every * edp.size / dp.size", told="by a number of ranks"),
        Edit("edp) / every", "edp) / every / dp.size", told="by a number of ranks"),
        Edit("all_reduce(expert.clone(), edp)", "all_reduce(expert.clone(), dp)", told="*different* experts"),
        Edit("all_reduce(expert.clone(), edp)", "expert", told="saw other tokens"),
        Edit("all_reduce(dense.clone(), dp) / every", "all_reduce(dense / tokens, dp) / dp.size", told="mean of means"),
        Edit(" / every", "", told="not divided yet"),
    ],
    "suspects": [
        Edit(
            "(right * right).sum()",
            "(mine * mine).sum()",
            ("mine - factor * right", "right - factor * mine"),
            told="got over want",
        ),
        Edit(
            "            continue",
            """            found[name] = 1.0
            continue""",
            told="Leave out",
        ),
        Edit("1e-3 * right.norm()", "1e-3", told="1e-3 |want|"),
    ],
    "answers": [
        Edit("3 * h * f", "2 * h * f", told="three matrices"),
        Edit(" + experts * h", "", told="The router is a matrix, too"),
        Edit("k * one + experts * h", "k * (one + h)", told="the whole router"),
        Edit("dp // ep", "dp", told="dp/ep copies"),
        Edit("rows * ep / experts", "rows / experts", told="rows from all ep ranks"),
        Edit("ep / k", "(ep - 1) / k", told="keeps its own share"),
        Edit("2 * one * rows", "one * rows", told="is two operations"),
        Edit("2 * rows * h", "rows * h", told="there and back"),
        Edit("* (ep - 1) / ep /", "/", told="(P-1)/P travel"),
    ],
}

RIGHT: dict[str, list[Edit]] = {
    "bytes_per_layer": [
        Edit("(ep - 1) / ep * k * tokens", "k * (tokens - tokens / ep)"),
    ],
    "expected_drops": [
        Edit("math.log(1 - p)", "math.log1p(-p)", ("over / mean", "experts * over / (k * tokens)")),
    ],
    "balance": [
        Edit("logits.softmax(-1)", "torch.exp(logits - logits.logsumexp(-1, keepdim=True))"),
    ],
    "expert_bias": [
        Edit(
            """counts = counts.float()
    return bias + rate * (counts.mean() - counts).sign()""",
            "return bias - rate * torch.sign(counts * len(counts) - counts.sum())",
        ),
    ],
    "permute": [
        Edit(
            "tokens[source], probs[source, expert]",
            "tokens.index_select(0, source), probs.T.masked_select(map.T)",
            (".index_add(0, source, rows)", ".scatter_add(0, source[:, None].expand_as(rows), rows)"),
        ),
    ],
    "dispatch": [
        # lists of tensors, as `dist.all_to_all` would have them, and a sort by expert
        Edit(
            (
                "    by_sender = out.split(blocks.flatten().tolist())\n"
                "    local = blocks.shape[1]\n"
                "    return torch.cat([by_sender[i * local + e] for e in range(local) for i in "
                "range(ep.size)]), blocks.contiguous()"
            ),
            """    expert = torch.arange(blocks.shape[1]).repeat(ep.size).repeat_interleave(blocks.flatten())
    return out[expert.argsort(stable=True)], blocks.contiguous()""",
        ),
    ],
    "suspects": [
        Edit(
            "(mine * right).sum() / (right * right).sum()",
            "torch.dot(mine.flatten(), right.flatten()) / right.norm() ** 2",
        ),
    ],
    "answers": [
        Edit(
            '"allgather_over_alltoall": ep / k',
            '"allgather_over_alltoall": 2 * (ep - 1) * tokens * h / (2 * k * tokens * h * (ep - 1) / ep)',
        ),
        Edit("dp // ep", "float(dp) / ep", ("rows * ep / experts", "ep * tokens * k // experts")),
    ],
}

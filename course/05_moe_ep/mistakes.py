"""Lab 05: the solution with small mistakes, and with small changes that leave it right (`labkit/answers`)."""

from __future__ import annotations

from labkit.answers import Edit, Same

WRONG: dict[str, list[Edit]] = {
    "bytes_per_layer": [
        Edit("(row + 4 + row)", "(row + 4)", told="travels back, too"),
        Edit("(row + 4 + row)", "(row + row)", told="takes its weight along"),
        Edit("(ep - 1) / ep * k", "k", told="and stays"),
        Edit("ep * k * tokens", "ep * tokens", told="for each of its k experts"),
        Edit("5 * experts + row", "5 * experts", told="come back by a reduce-scatter"),
        Edit("(ep - 1) * tokens", "ep * tokens", told="the P-1 *others*"),
        Edit("row + 5 * experts + row", "row + row", told="each token"),
        Edit("5 * experts + row", "4 * experts + row", told="E flags of one"),
        Edit("5 * experts + row", "5 * k + row", told="E weights of 4 bytes"),
        Edit("(row + 4 + row)", "(row + 8 + row)", told="nobody needs them back"),
        Edit("h * element_size", "h * 2"),
        Edit("k * tokens *", "2 * tokens *"),
        Edit("5 * experts", "5 * 8"),
        Edit("(ep - 1) * tokens", "3 * tokens"),
        Edit("(ep - 1) * tokens * (row + 5 * experts + row)", "(ep - 1) * tokens * (row + 5 * experts + ep * row)"),
        Edit("(ep - 1) / ep * k", "(ep - 1) / experts * k"),
    ],
    "expected_drops": [
        Edit("over / mean", "over / (k * tokens)", told="All E of them"),
        Edit("over / mean", "over * experts / tokens", told="not of the T tokens"),
        Edit("p, mean = k / experts", "p, mean = 1 / experts", told="one of them is k/E"),
        Edit("math.ceil", "math.floor", told="rounded up"),
        Edit("math.ceil(mean * factor)", "min(tokens, math.ceil(mean * factor))", told="capacity is wrong"),
        Edit("math.ceil(mean * factor)", "int(mean * factor) + 1"),
        Edit("math.ceil(mean * factor)", "round(mean * factor)"),
        Edit("math.ceil(mean * factor)", "round(mean * factor + 0.25)"),
        Edit("math.ceil(mean * factor)", "max(math.ceil(mean * factor), math.ceil(mean))"),
        Edit("(n - capacity) * math.exp", "math.exp"),
        Edit("range(capacity + 1, tokens + 1)", "range(capacity + 1, min(tokens, 3 * capacity) + 1)"),
        Edit("k / experts, tokens * k / experts", "k / experts, tokens * k // experts"),
        # Poisson in place of the binomial
        Edit(
            "ways = math.lgamma(tokens + 1) - math.lgamma(n + 1) - math.lgamma(tokens - n + 1)",
            "",
            (
                "math.exp(ways + n * math.log(p) + (tokens - n) * math.log(1 - p))",
                "math.exp(n * math.log(mean) - mean - math.lgamma(n + 1))",
            ),
        ),
    ],
    "route": [
        Edit(
            "best.values.softmax(-1)",
            "best.values.softmax(-1).detach()",
            ("return probs,", "return probs + 0 * weight.float().sum(),"),
            told="weights have no gradient",
        ),
        Edit(
            "best.values.softmax(-1)", "torch.full_like(best.values, 1 / k) + 0 * best.values", told="equal ones teach"
        ),
        Edit(
            "best.values.softmax(-1)", "best.values.exp() / best.values.exp().sum(-1, keepdim=True)", told="overflows"
        ),
        Edit("x.float() @ weight.float().T", "(x @ weight.T).float()", told="*before* the product"),
        Edit("return probs,", "return best.values.softmax(-1),", told="a column for each expert"),
        Edit(
            "return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, best.indices, True)",
            "return probs, probs > 0",
            told="says who is chosen",
        ),
        Edit("return probs,", "return probs.to(x.dtype),", told="must be fp32"),
        Edit("best = logits.topk(k, dim=-1)", "best = logits.topk(2, dim=-1)"),
        Edit("best = logits.topk(k, dim=-1)", "best = logits.topk(max(k, 2), dim=-1)"),
        Edit("best = logits.topk(k, dim=-1)", "best = logits.topk(min(k, 3), dim=-1)"),
        # all that are as good as the k-th: more than k where experts tie
        Edit(
            """    best = logits.topk(k, dim=-1)
""",
            """    map = logits >= logits.topk(k, dim=-1).values[:, -1:]
    return logits.masked_fill(~map, -torch.inf).softmax(-1), map
    best = logits.topk(k, dim=-1)
""",
            told="exactly k",
        ),
        Edit("x.float() @ weight", "x.detach().float() @ weight", told="x"),
        Edit("x.float() @ weight.float().T", "(x.half() @ weight.half().T).float()"),
        Edit("x.float() @ weight.float().T", "(x.to(weight.dtype) @ weight.T).float()"),
        Edit("x.float() @ weight.float().T", "(x @ weight.to(x.dtype).T).float()"),
        Edit("best.values.softmax(-1)", "best.values.to(x.dtype).softmax(-1).float()"),
        Edit(
            "best.values.softmax(-1)",
            "(best.values - logits.max()).exp() / (best.values - logits.max()).exp().sum(-1, keepdim=True)",
        ),
        Edit("best.values.softmax(-1)", "best.values.softmax(0)"),
        Edit("best.values.softmax(-1)", "(best.values / k).softmax(-1)"),
        Edit("logits = x.float()", "logits = x.float().abs()"),
        Edit("dtype=torch.bool).scatter(1, best.indices, True)", "dtype=torch.int64).scatter(1, best.indices, 1)"),
    ],
    "balance": [
        # counts all that are as good as the k-th
        Edit(
            "logits.topk(k, dim=-1).indices.flatten().bincount(minlength=experts)",
            "(logits >= logits.topk(k, dim=-1).values[:, -1:]).sum(0)",
            told="exactly k",
        ),
        Edit("p * (price - paid)\n", "(p * (price - paid)).float()\n", told="dtype of the logits"),
        Edit("p * (price - paid)", "price.expand_as(p).clone()", told="behind a softmax"),
        Edit("p * (price - paid)", "p * price", told="two terms"),
        Edit("tokens**2", "tokens", told="divide by T^2"),
        Edit("coeff * experts / (", "coeff / (", told="whatever E is"),
        Edit("(k * tokens**2)", "tokens**2", told="counts for k experts"),
        Edit("topk(k, dim=-1)", "topk(1, dim=-1)"),
        Edit("topk(k, dim=-1)", "topk(min(k, 2), dim=-1)"),
        Edit("logits.topk(k, dim=-1)", "logits.abs().topk(k, dim=-1)"),
        Edit("bincount(minlength=experts)", "bincount()"),
        Edit("logits.softmax(-1)", "logits.exp() / logits.exp().sum(-1, keepdim=True)"),
        Edit("logits.softmax(-1)", "logits.softmax(0)"),
        Edit("p * (price - paid)", "p * (price - paid.mean())"),
        Edit("p * (price - paid)", "p * (price - price.mean())"),
        Edit("p * (price - paid)", "p * (paid - price)"),
        Edit("p * (price - paid)", "p * (1 - p) * price"),
        Edit("paid.sum()", "paid.mean()"),
        Edit("coeff * experts", "experts"),
        # changes the caller's logits
        Edit("p = logits.softmax(-1)", "logits -= logits.amax(-1, keepdim=True); p = logits.softmax(-1)"),
        # the probabilities of the chosen experts only
        Edit(
            "    price =",
            """    p = p * torch.zeros_like(p).scatter(1, logits.topk(k, dim=-1).indices, 1.0)
    price =""",
        ),
    ],
    "expert_bias": [
        Edit("kept = scores * map", "kept = (scores + bias) * map", told="not in what it counts"),
        Edit("(scores + bias).topk", "scores.topk", told="score plus bias"),
        Edit("(counts.mean() - counts)", "(counts - counts.mean())", told="*larger* bias"),
        Edit("(counts.mean() - counts).sign()", "(counts.mean() - counts)", told="not the gap"),
        Edit("(counts.mean() - counts).sign()", "(counts.mean() - counts) / counts.sum()", told="not the gap"),
        Edit("(scores + bias).topk(k", "(scores + bias).topk(2"),
        Edit("(scores + bias).topk(k", "(scores + bias).topk(max(2, k)"),
        Edit("(scores + bias).topk(k", "(scores * bias.exp()).topk(k"),
        Edit("(scores + bias).topk", "(scores - bias).topk"),
        Edit("kept / kept.sum(-1, keepdim=True)", "kept.masked_fill(~map, -torch.inf).softmax(-1)"),
        Edit("kept / kept.sum(-1, keepdim=True)", "kept / scores.sum(-1, keepdim=True)"),
        Edit("kept / kept.sum(-1, keepdim=True)", "kept"),
        Edit("kept / kept.sum(-1, keepdim=True)", "kept / kept.sum(-1, keepdim=True).clamp(min=1e-2)"),
        Edit("counts.mean()", "counts.median()"),
        Edit("counts.mean()", "(counts.max() + counts.min()) / 2"),
        Edit("(counts.mean() - counts).sign()", "torch.where(counts > counts.mean(), -1.0, 1.0)"),
        Edit("(counts.mean() - counts).sign()", "torch.where(counts < counts.mean(), 1.0, -1.0)"),
        Edit("(counts.mean() - counts).sign()", "(counts.mean() - counts).clamp(-1, 1)"),
        Edit("(counts.mean() - counts).sign()", "(counts.mean() - counts) / counts.mean()"),
        Edit("(counts.mean() - counts).sign()", "(counts.mean().round() - counts).sign()"),
        Edit("bias + rate * (counts.mean() - counts).sign()", "rate * (counts.mean() - counts).sign()"),
        # all that are as good as the k-th
        Edit(
            "    kept = scores * map",
            """    map = scores + bias >= (scores + bias).topk(k, dim=-1).values[:, -1:]
    kept = scores * map""",
            told="exactly k",
        ),
        Edit(
            "return kept / kept.sum(-1, keepdim=True)",
            "return (kept / kept.sum(-1, keepdim=True)).detach()",
            told="weights have no gradient",
        ),
        Edit("kept = scores * map", "kept = scores.detach() * map", told="weights have no gradient"),
        Edit(
            "    return bias + rate *",
            "    bias += rate *",
            ("(counts.mean() - counts).sign()", "(counts.mean() - counts).sign()\n    return bias"),
            told="changes its input `bias`",
        ),
        # changes the caller's scores
        Edit(
            "(scores + bias).topk",
            "scores.add_(bias).topk",
            ("kept = scores * map", "kept = (scores - bias) * map"),
            told="changes its input",
        ),
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
        Edit("tokens[source]", "tokens.detach()[source]", told="gradient of tokens"),
        Edit("probs[source, expert]", "probs.detach()[source, expert]", told="probs"),
        Edit("index_add(0, source, rows)", "index_add(0, source, rows.detach())"),
        Edit("map.T.nonzero", "probs.T.nonzero", told="`map` says where a token goes"),
        Edit("rows.new_zeros(tokens,", "rows.new_zeros(int(source.max()) + 1,"),
        Edit(
            "rows.new_zeros(tokens, rows.shape[1]).index_add(0, source, rows)",
            "torch.stack([rows[source == t].sum(0) for t in source.unique()])",
        ),
        Edit(
            "rows.new_zeros(tokens, rows.shape[1]).index_add(0, source, rows)",
            "rows.new_zeros(tokens, rows.shape[1]).index_copy(0, source, rows)",
            told="keeps the last",
        ),
        Edit("source\n", "source.int()\n", told="int32"),
        # two rows a token
        Edit(
            "rows.new_zeros(tokens, rows.shape[1]).index_add(0, source, rows)",
            "rows[source.argsort(stable=True)].view(tokens, 2, -1).sum(1)",
        ),
        # within an expert by weight, not by token
        Edit(
            "    return tokens[source], probs",
            """    order = (expert - 0.001 * probs[source, expert].detach() / probs.max()).argsort()
    expert, source = expert[order], source[order]
    return tokens[source], probs""",
        ),
        # rows that are weighed already
        Edit("return tokens[source],", "return tokens[source] * probs[source, expert][:, None],"),
        # changes its input
        Edit("    expert, source", "    tokens.data.clamp_(-2.0, 2.0)\n    expert, source"),
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
        # arrives by sender, goes home as if grouped
        Edit(
            "torch.cat([by_sender[i * local + e] for e in range(local) for i in range(ep.size)])",
            "out",
            told="takes them for grouped",
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
        Edit("descending=True", "descending=False"),
        Edit("[:capacity]", "[: capacity + 1]"),
        Edit("[:capacity]", "[:2]"),
        Edit("[:capacity]", "[: max(capacity, 2)]"),
        Edit("return probs * kept, kept", "return probs, kept"),
        Edit("return probs * kept, kept", "return probs * kept, kept.float()"),
        Edit("probs.masked_fill(~map, -1.0).argsort", "probs.argsort", told="with the weight 0"),
        Edit("return probs * kept, kept", "return (probs * kept).detach(), kept", told="weights have no gradient"),
        # all that weigh as much as the last that fits
        Edit(
            "    kept = torch",
            """    least = probs.masked_fill(~map, -1.0).sort(dim=0, descending=True).values[: capacity][-1]
    return probs * (map & (probs >= least)), map & (probs >= least)
    kept = torch""",
            told="at most",
        ),
        # the capacity of all experts together
        Edit(
            "    order =",
            """    every = probs.masked_fill(~map, -1.0).flatten().argsort(descending=True)[: capacity * map.shape[1]]
    kept = torch.zeros_like(map).flatten().scatter(0, every, True).view_as(map) & map
    return probs * kept, kept
    order =""",
        ),
        Edit("dim=0, descending=True)\n", "dim=0, descending=True)\n    assert capacity <= len(map)\n"),
        # changes its inputs
        Edit("return probs * kept, kept", "map &= kept\n    return probs * kept, kept"),
        Edit("return probs * kept, kept", "return probs.mul_(kept), kept"),
    ],
    "finish": [
        Edit(
            "all_reduce(expert.clone(), edp) / every",
            "all_reduce(expert.clone(), edp) / all_reduce(torch.tensor(float(tokens)), edp)",
            told="the tokens of edp alone",
        ),
        # the tokens are counted twice
        Edit(
            "    return all",
            """    again = all_reduce(torch.tensor(float(tokens)), dp)
    return all""",
            ("edp) / every", "edp) / again"),
            told="summed 2 times",
        ),
        Edit("edp) / every", "edp) / every / edp.size", told="by a number of ranks"),
        Edit("edp) / every", "edp) / every * edp.size / dp.size", told="by a number of ranks"),
        Edit("edp) / every", "edp) / every / dp.size", told="by a number of ranks"),
        Edit("all_reduce(expert.clone(), edp)", "all_reduce(expert.clone(), dp)", told="*different* experts"),
        Edit("all_reduce(expert.clone(), edp)", "expert", told="saw other tokens"),
        Edit("all_reduce(dense.clone(), dp) / every", "all_reduce(dense / tokens, dp) / dp.size", told="mean of means"),
        Edit(" / every", "", told="not divided yet"),
        Edit(
            "every = all_reduce(torch.tensor(float(tokens)), dp)",
            "every = tokens * dp.size",
            told="the ranks differ | hidden",
        ),
        Edit("all_reduce(dense.clone(), dp)", "all_reduce(dense.clone(), edp)", told="only those of edp"),
        Edit("all_reduce(dense.clone(), dp)", "dense"),
        Edit("edp) / every", "edp) / every * (dp.size / edp.size)"),
        Edit(
            "all_reduce(torch.tensor(float(tokens)), dp)",
            "all_reduce(torch.tensor(float(tokens)), edp) * (dp.size / edp.size)",
        ),
        Edit("all_reduce(torch.tensor(float(tokens)), dp)", "all_reduce(torch.tensor(float(tokens)), dp, 'max')"),
        # every rank gathers all gradients
        Edit(
            "    every =",
            """    import torch.distributed as dist
    whole = [torch.empty_like(dense) for _ in range(dp.size)]
    dist.all_gather(whole, dense.contiguous(), group=dp.group)
    dense = sum(whole) / dp.size
    every =""",
        ),
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
        Edit("(mine * right).sum() / (right * right).sum()", "(mine / right).mean()"),
        Edit("(mine * right).sum() / (right * right).sum()", "mine.flatten()[0] / right.flatten()[0]"),
        Edit("(mine * right).sum() / (right * right).sum()", "mine.sum() / right.sum()"),
        Edit("(mine * right).sum() / (right * right).sum()", "mine.abs().max() / right.abs().max()"),
        Edit("proportional = (mine - factor * right).norm() <= 1e-3 * (factor * right).norm()", "proportional = True"),
        Edit("(mine - right).norm() <= 1e-3 * right.norm()", "torch.equal(mine, right)"),
        Edit("(mine - right).norm() <= 1e-3 * right.norm()", "torch.allclose(mine, right, rtol=1e-3)"),
        Edit("(mine - right).norm() <= 1e-3 * right.norm()", "(mine - right).norm() <= 1e-2 * right.norm()"),
        Edit("(mine - right).norm() <= 1e-3 * right.norm()", "(mine - right).norm() <= 1e-4 * right.norm()"),
        Edit(
            "(mine - right).norm() <= 1e-3 * right.norm()",
            "right.norm() == 0 or (mine - right).norm() <= 1e-3 * right.norm()",
        ),
        Edit("1e-3 * (factor * right).norm()", "1e-3 * right.norm()", told="`"),
        Edit("else math.nan", "else 0.0"),
        Edit("else math.nan", "else None"),
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
        Edit("dp // ep", "2"),
        Edit("dp // ep", "ep // 2"),
        Edit("rows * ep / experts", "rows * dp / experts"),
        Edit("rows * ep / experts", "rows"),
        Edit("ep / k", "ep / 2"),
        Edit("ep / k", "k / ep"),
        Edit("h * element_size *", "h * 2 *"),
        Edit("2 * one * rows", "2 * one * tokens"),
        Edit("2 * one * rows / flops / travel", "travel / (2 * one * rows / flops)"),
        Edit("k * one + experts * h", "k * one + k * h", told="the whole router"),
        Edit("h * f, k * tokens", "h * f, 2 * tokens"),
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

EVEN = "the load is even: as many whole rows, and as many copies, everywhere"

EQUIVALENT: dict[str, list[Same]] = {
    "expected_drops": [Same("line 9: 0 for 1", "an expert whose tokens just fit drops none of them")],
    "dispatch": [Same("line 15: `.contiguous()` dropped", "a view holds the same numbers")],
    "limit": [
        Same("line 6: 2.0 for 1.0", "either is below any weight"),
    ],
    "finish": [
        Same("line 11: `.clone()` dropped", "gradients may be summed in place"),
        Same("line 11: `.clone()` dropped (2)", "gradients may be summed in place"),
    ],
    "answers": [
        Same("line 7: `//` for `/` (2)", EVEN),
        Same("line 11: `/` for `//`", EVEN),
        Same("line 11: rounded up for down", EVEN),
        Same("line 12: `//` for `/`", EVEN),
    ],
}

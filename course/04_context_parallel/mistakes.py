"""Lab 04: the solution with small mistakes, and with small changes that leave it right (`labkit/answers`)."""

from __future__ import annotations

from labkit.answers import Edit, Same

WRONG: dict[str, list[Edit]] = {
    "bytes_per_layer": [
        Edit("* 2 * groups * a_head", "* groups * a_head", told="Keys *and* values"),
        Edit("* 2 * groups * a_head", "* 2 * heads * a_head", told="`groups` heads, not"),
        Edit("(cp - 1) * 2 * groups", "cp * 2 * groups", told="C-1 steps"),
        Edit("(cp - 1) / cp * (2", "(2", told="keeps its own share"),
        Edit("(2 * heads + 2 * groups)", "(heads + 2 * groups)", told="*output* comes back"),
    ],
    "work": [
        Edit("range(c * n + 1, (c + 1) * n + 1)", "range(c * n, (c + 1) * n)", told="also sees itself"),
        Edit(
            "if zigzag else pairs", "if False else pairs[:cp]", ("2 * cp if zigzag else cp", "cp"), told="chunks r and"
        ),
        # chunks of zigzag, also where nothing needs two of them
        Edit(
            "2 * cp if zigzag else cp",
            "2 * cp",
            ("if zigzag else pairs", "if zigzag else [pairs[2 * r] + pairs[2 * r + 1] for r in range(cp)]"),
            told="hidden",
        ),
    ],
    "attend": [
        Edit("(*q.shape[:2], 1), -torch.inf)", "(*q.shape[:2], 1), -1e4)", told="hidden"),
        Edit(" / q.shape[-1] ** 0.5", "", told="divided by sqrt(d)"),
        Edit(
            ".masked_fill(at > q_at[:, None], -torch.inf)",
            "",
            ("if at.min() > q_at.max():", "if False:"),
            told="j <= i only",
        ),
        Edit("total * shrink", "total", ("out * shrink", "out"), told="shrinks by exp"),
        Edit("out * shrink", "out", told="O shrinks by exp"),
        Edit(
            """        if at.min() > q_at.max():
            continue
""",
            "",
            told="not computed and masked",
        ),
        Edit("total.masked_fill(total == 0, 1.0)", "total", told="A query that sees nothing"),
        Edit(
            "    top = q.new_full",
            """    block = 3
    top = q.new_full""",
            told="which is `block` here",
        ),
        # row by row, all keys of a row at once
        Edit(
            "    top = q.new_full",
            """    if len(q_at) > 1:
        rows = [attend(q[:, i : i + 1], k, v, q_at[i : i + 1], k_at, block * len(q_at)) for i in range(len(q_at))]
        return torch.cat([out for out, _ in rows], 1), torch.cat([lse for _, lse in rows], 1)
    top = q.new_full""",
            told="which is `block` here",
        ),
        # float32 inside, whatever came
        Edit(
            "    top = q.new_full",
            """    dtype, q, k, v = q.dtype, q.float(), k.float(), v.float()
    top = q.new_full""",
            (
                "return out / total.masked_fill(total == 0, 1.0), (top + total.log()).squeeze(-1)",
                """out = out / total.masked_fill(total == 0, 1.0)
    return out.to(dtype), (top + total.log()).squeeze(-1).to(dtype)""",
            ),
            told="out is wrong",
        ),
        Edit("q_at[:, None], -torch.inf)", "q_at[:, None], -1e9)", told="-1e9 is a score"),
    ],
    "merge": [
        Edit("more, total", "more, lse + more_lse", told="not their logarithms"),
        Edit("total.masked_fill(total == -torch.inf, 0.0)", "total", told="take 0 in its place"),
        Edit("torch.logaddexp(lse, more_lse)", "(lse.exp() + more_lse.exp()).log()", told="exp(lse) overflows"),
        Edit(
            "torch.logaddexp(lse, more_lse)",
            "(lse.exp() + more_lse.exp()).log()",
            ("total.masked_fill(total == -torch.inf, 0.0)", "total"),
            told="exp(lse) overflows",
        ),
    ],
    "positions": [
        Edit(
            "(chunks[rank], chunks[2 * cp - 1 - rank])", "(chunks[2 * cp - 1 - rank], chunks[rank])", told="comes first"
        ),
    ],
    "ring_forward": [
        Edit(
            "            block = shift.wait()",
            "            shift.wait()",
            told="The same keys and values at every step",
        ),
        Edit("range(cp.size):", "range(1):", told="own block alone"),
        Edit(
            "mine = q.shape[1] // 2, at[cp.rank]",
            "mine = q.shape[1] // 2, torch.arange(q.shape[1])",
            ("at[owner]", "mine"),
            told="at[cp.rank] and at[owner]",
        ),
        # waits before it computes
        Edit(
            "        owner = (cp.rank",
            """        new = shift.wait() if shift else None
        owner = (cp.rank""",
            ("block = shift.wait()", "block = new"),
            told="Nothing is computed between sending and waiting",
        ),
        # all of q against all of the block
        Edit(
            "(slice(0, half), slice(half, None))",
            "(slice(None),)",
            (", half)\n", ", 2 * half)\n"),
            told="cut q in halves and the keys in blocks",
        ),
        Edit("(slice(0, half), slice(half, None))", "(slice(None),)", told="each half of q by itself"),
        Edit(", half)\n", ", 2 * half)\n", told="blocks of n/2 keys"),
        # a block further than needed
        Edit("if step < cp.size - 1 else None", "if True else None", told="C hops"),
    ],
    "piece_backward": [
        Edit(" - (dout * out).sum(-1, keepdim=True)", "", told="P (dP - D)"),
        Edit("keepdim=True)) * sigma", "keepdim=True))", told="so are dS"),
        Edit(
            "scores - lse[..., None]",
            "scores - scores.logsumexp(-1, keepdim=True).nan_to_num(neginf=0.0)",
            told="*final* lse",
        ),
    ],
    "ring_backward": [
        Edit(
            "        more, dk, dv",
            "        more, *both",
            (
                "dq += more",
                """dq += more
        dk, dv = both""",
            ),
            (
                "    dk, dv = behind.wait()\n",
                """        if step == 0:
            own = both
    behind.wait()
    dk, dv = own
""",
            ),
            told="must travel with the block",
        ),
        # the last hop is missing
        Edit(
            "    dk, dv = behind.wait()",
            """    behind.wait()
    dk, dv = part""",
            told="one more hop",
        ),
        Edit("part += behind.wait()", "behind.wait()", told="must be *added*"),
        # stale: each rank begins with the block it received last in the forward
        Edit(
            "torch.stack((k, v))\n",
            """torch.stack((k, v))
    for _ in range(cp.size - 1):
        block = Shift(block, cp, tag=2).wait()
""",
            told="another rank's keys and values",
        ),
        Edit(
            "torch.stack((k, v))\n",
            """torch.stack((k, v))
    block = Shift(block, cp, tag=2).wait()
""",
            told="another rank's keys and values",
        ),
        Edit("at[owner])", "at[cp.rank])", told="At each step"),
    ],
    "ulysses": [
        Edit(".flip(0)", "", told="rank order, then the late ones in reverse"),
        Edit(
            "chunks = torch.cat((halves[:, :, 0], halves[:, :, 1].flip(0)))",
            "chunks = halves.transpose(1, 2).flatten(0, 1)",
            told="Put them in the order",
        ),
        Edit(
            "torch.stack((chunks[: cp.size], chunks[cp.size :].flip(0)), dim=2).flatten(2, 3)",
            "chunks.unflatten(0, (cp.size, 2)).transpose(1, 2).flatten(2, 3)",
            told="not a contiguous piece",
        ),
    ],
    "blocks_used": [
        Edit("k_at = at[(rank - step) % len(ks)]", "k_at = at[rank]", ("argmin", "argmax"), told="At step i the mask"),
        # the first block within a tolerance of its own
        Edit(
            "int(torch.stack(apart).argmin())",
            "next(j for j, one in enumerate(apart) if one < 1e-2)",
            told="Your tolerance is a number of its own",
        ),
        Edit(
            "int(torch.stack(apart).argmin())", "[bool(one < 1e-3) for one in apart].index(True)", told="Your tolerance"
        ),
    ],
    "answers": [
        Edit(
            "groups * element_size * flops / (heads",
            "groups * element_size * flops / (2 * heads",
            told="half of a block's pairs",
        ),
        Edit(
            "groups * element_size * flops / (heads * bandwidth)",
            "element_size * flops / bandwidth",
            told="the work has `heads`",
        ),
        Edit("2 * cp * tp", "2 * cp", told="again, over tp"),
        Edit("groups // tp", "heads // tp", told="fewer heads than queries"),
        Edit("groups // tp", "groups", told="tp has already divided the groups"),
        Edit(
            "groups * element_size * flops / (heads * bandwidth)",
            "-(-groups * element_size * flops // (heads * bandwidth))",
            told="not rounded",
        ),
        Edit(
            "groups * element_size * flops / (heads * bandwidth)",
            "int(groups * element_size * flops / (heads * bandwidth))",
            told="not rounded",
        ),
        Edit(
            "groups * element_size * flops / (heads",
            "tp * groups * element_size * flops / (heads",
            told="tp cuts the work and the messages alike",
        ),
        Edit(
            "groups * element_size * flops / (heads",
            "groups / tp * element_size * flops / (heads",
            told="tp cuts the work and the messages alike",
        ),
        Edit("cp * groups / (heads + groups)", "cp", told="the ring 2 groups"),
        Edit("(2 * cp - 1) / cp", "cp", told="the mean is 1/C"),
    ],
}

RIGHT: dict[str, list[Edit]] = {
    "bytes_per_layer": [
        Edit("(cp - 1) / cp * (2 * heads + 2 * groups)", "2 * (1 - 1 / cp) * (heads + groups)"),
    ],
    "ring_forward": [
        # even ranks and odd ranks alike through batch_isend_irecv
        Edit(
            "shift = Shift(block, cp) if step < cp.size - 1 else None",
            (
                "new = torch.empty_like(block)\n"
                "        ops = [dist.P2POp(dist.isend, block, cp.ranks[(cp.rank + 1) % cp.size], cp.group), "
                "dist.P2POp(dist.irecv, new, cp.ranks[cp.rank - 1], cp.group)]\n"
                "        shift = dist.batch_isend_irecv(ops) if step < cp.size - 1 else None"
            ),
            (
                "block = shift.wait()",
                """[work.wait() for work in shift]
            block = new""",
            ),
            (
                "import torch\n",
                """import torch
import torch.distributed as dist
""",
            ),
        ),
        # chunk by chunk of the keys too
        Edit(
            """            piece = attend(q[:, rows], block[0], block[1], mine[rows], at[owner], half)
            out[:, rows], lse[:, rows] = merge(out[:, rows], lse[:, rows], *piece)""",
            (
                "            for cols in (slice(0, half), slice(half, None)):\n"
                "                if at[owner][cols][0] <= mine[rows][-1]:\n"
                "                    piece = attend(q[:, rows], block[0][:, cols], block[1][:, cols], "
                "mine[rows], at[owner][cols], 3)\n"
                "                    out[:, rows], lse[:, rows] = merge(*piece, out[:, rows], lse[:, rows])"
            ),
        ),
    ],
    "piece_backward": [
        Edit(
            "ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * sigma",
            "ds = p * ((dout @ v.mT) - (dout.double() * out.double()).sum(-1, keepdim=True).float())",
            ("return ds @ k, ds.mT @ q,", "return sigma * (ds @ k), sigma * (ds.mT @ q),"),
        ),
    ],
    "ring_backward": [
        # the package's way: the own part stays at home, C-1 hops
        Edit(
            """        if step > 0:
            part += behind.wait()
        behind = Shift(part, cp, tag=1)""",
            """        if step == 0:
            home = part
        else:
            if step > 1:
                part += behind.wait()
            behind = Shift(part, cp, tag=1)""",
            ("dk, dv = behind.wait()", "dk, dv = home + behind.wait()"),
        ),
    ],
    "ulysses": [
        # the functional collective
        Edit(
            "dist.all_to_all_single(arrived, x.contiguous(), group=cp.group)",
            """import torch.distributed._functional_collectives as fc
    arrived = fc.all_to_all_single(x.contiguous(), None, None, cp.group).clone()""",
        ),
    ],
    "blocks_used": [
        Edit(
            "used.append(int(torch.stack(apart).argmin()))",
            "used.append(min(range(len(ks)), key=lambda j: apart[j].item()))",
        ),
    ],
    "answers": [
        Edit("(2 * cp - 1) / cp", "2 - 1 / cp"),
        # to within a token
        Edit("(2 * cp - 1) / cp", "cp * (s * (s // cp) - (s // cp) ** 2 / 2) / (s * s / 2)"),
    ],
}

_WHOLE = "2C divides s"
_NEGATIVE = "Python counts a negative index from the end"
_IN_ORDER = "messages of two ranks arrive in the order in which they were sent"
_A_HOP = "K and V may go round C times, as their gradients do"
EQUIVALENT = {
    "work": [
        Same("line 4: rounded up for down", _WHOLE),
    ],
    "bytes_per_layer": [
        Same("line 3: `/` for `//`", _WHOLE),
        Same("line 3: rounded up for down", _WHOLE),
    ],
    "attend": [
        Same("line 9: `ones_like` for `zeros_like`", "what stood there shrinks to nothing at the first visible block"),
        Same("line 18: 2.0 for 1.0", "0 is divided by it"),
    ],
    "ring_forward": [
        Same("line 12: rounded up for down", "2 divides a rank's tokens"),
        Same("line 13: `ones_like` for `zeros_like`", "with an lse of -inf it has no weight"),
        Same("line 17: `% cp.size` dropped", _NEGATIVE),
    ],
    "ring_backward": [
        Same("line 14: 0 for 1", _A_HOP),
        Same("line 14: `+` for `-`", _A_HOP),
        Same("line 14: `<=` for `<`", _A_HOP),
        Same("line 14: always `Shift(block, cp)`", _A_HOP),
        Same("line 15: `% cp.size` dropped", _NEGATIVE),
        Same("line 21: 0 for 1", _IN_ORDER),
        Same("line 21: 2 for 1", "another number for the same"),
        Same("line 21: `tag` dropped", _IN_ORDER),
    ],
    "blocks_used": [Same("line 12: `% len(ks)` dropped", _NEGATIVE)],
    "answers": [
        Same("line 8: `/` for `//`", "tp divides groups"),
        Same("line 8: rounded up for down", "tp divides groups"),
    ],
}

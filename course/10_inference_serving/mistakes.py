"""Lab 10's answers as small edits of the solution: right in another way, or wrong."""

from __future__ import annotations

from labkit.answers import Edit, Same

RIGHT: dict[str, list[Edit]] = {}

_MANY = '2 * model["parameters"] * sequences'
_PAGES = '(gpu["memory"] - weights) // (page * token)'
WRONG: dict[str, list[Edit]] = {
    "decode_step": [
        Edit("token = 2 *", "token =", told="a key and a value"),
        Edit('model["layers"] * ', "", told="Every layer"),
        Edit("read = weights +", "read = weights * sequences +", told="once a step"),
        Edit(" + sequences * length * token", "", told="keys and values of all earlier tokens"),
        Edit("sequences * length * token", "length * token", told="a cache of its own"),
        Edit("sequences * length * token", "sequences * token", told="looks at all tokens"),
        Edit(_MANY, 'model["parameters"] * sequences', told="two operations"),
        Edit(_MANY, '2 * model["parameters"]', told="Each sequence's token is computed"),
        Edit('max(read / gpu["bandwidth"], flops / gpu["flops"])', 'read / gpu["bandwidth"] + flops / gpu["flops"]',
             told="at the same time"),
        Edit('max(read / gpu["bandwidth"], flops / gpu["flops"])', 'read / gpu["bandwidth"]', told="With many"),
        Edit('max(read / gpu["bandwidth"], flops / gpu["flops"])', 'flops / gpu["flops"]', told="With few"),
        Edit("max(", "min(", told="the longer of the two"),
        Edit('"rate": sequences / seconds', '"rate": 1 / seconds', told="one token for each"),
        Edit(_PAGES, 'gpu["memory"] // (page * token)', told="in the same memory"),
        Edit("pages // -(-length // page)", "(gpu[\"memory\"] - weights) // (length * token)", told="whole pages"),
        Edit("pages // -(-length // page)", "pages // max(1, length // page)", told="is taken as well"),
        Edit("pages // -(-length // page)", "pages // (length // page + 1)", told="takes no further one"),
    ],
    "attend": [
        Edit("table[(kept + i) // size]", "(kept + i) // size", ("keys[table]", "keys[: len(table)]"),
             ("values[table]", "values[: len(table)]"), told="Page i of the sequence"),
        Edit("[: kept + n]", "", ("torch.arange(kept + n)", "torch.arange(len(seen_k))"),
             told="Rows behind the last token"),
        Edit("        keys[page, row], values[page, row] = k[i], v[i]\n", "", told="not written"),
        Edit("(kept + i) // size], (kept + i) % size", "i // size], i % size", told="written over the first"),
        Edit("    return scores", "    scores = q @ k.T / math.sqrt(d)\n    seen_v = v\n    return scores"),
        Edit("torch.arange(kept + n) > torch.arange(kept, kept + n)[:, None]", "torch.zeros(n, kept + n).bool()",
             told="come after it"),
        Edit("> torch.arange", ">= torch.arange", told="sees itself"),
        Edit(" / math.sqrt(d)", "", told="not divided"),
        Edit("math.sqrt(d)", "d", told="by d, not"),
        Edit("keys[page, row], values[page, row] = k[i], v[i]", "keys[page, row], values[page, row] = v[i], k[i]"),
        Edit("keys[table]", "keys[torch.tensor(table).sort().values]"),
    ],
    "schedule": [
        Edit('count = min(one["tokens"], budget)\n        free',
             'count = one["tokens"]\n        if count > budget:\n            break\n        free',
             told="computed in part"),
        Edit("newest = left.pop()", "newest = left.pop(0)", told="The oldest loses"),
        Edit('            free += newest["pages"]\n', "", told="can be taken at once"),
        Edit("preempted or budget == 0", "budget == 0", told="nobody is admitted"),
        Edit('-(-(one["tokens"] + 1) // size)', '-(-min(one["tokens"], budget) // size)', told="not for a chunk"),
        Edit('(one["tokens"] + 1)', '(one["tokens"])', told="next token needs a place"),
        Edit("free - -(-count // size)", "free - pages", told="asked for, not taken"),
        Edit("            break\n", "            continue\n", told="makes those behind it wait"),
        Edit("len(left) == seats or ", "", told="so many seats"),
        Edit("        left.append(one)\n", "", told="have seats, too"),
        Edit('min(one["tokens"] - one["computed"], budget)', "min(1, budget)", told="the rest of its prompt"),
        Edit('min(one["tokens"] - one["computed"], budget)', 'one["tokens"] - one["computed"]',
             told="share the budget"),
        Edit(' - one["pages"]', "", ('(one["computed"] + count) // size)', "count // size)"), told="has pages already"),
        Edit("budget - count\n            chunks", "budget\n            chunks"),
        Edit("preempted.append(", "preempted.insert(0, "),
    ],
    "verify": [
        Edit("(p[i] - q[i]).clamp(min=0)", "p[i]", told="p itself is drawn"),
        Edit("(p[i] - q[i]).clamp(min=0)", "q[i]", told="the proposer's distribution"),
        Edit("(p[i] - q[i]).clamp(min=0)", "(p[i] - q[i]).abs()", told="nothing is left to draw"),
        Edit("(p[i] - q[i])", "(q[i] - p[i])", told="not the other way"),
        Edit("u[i] * q[i, token] >=", "u[i] >=", told="not p alone"),
        Edit("u[i] * q[i, token] >= p[i, token]", "u[i] * p[i, token] >= q[i, token]", told="are exchanged"),
        Edit("u[i] * q[i, token] >= p[i, token]", "p[i, token] < q[i, token]", told="now and then"),
        Edit("u[i] * q[i, token] >= p", "u[i] * q[i, token] < p", told="turned round"),
        Edit("            return [*tokens, draw((p[i] - q[i]).clamp(min=0), v[i])]\n        tokens.append(token)",
             "            token = draw((p[i] - q[i]).clamp(min=0), v[i])\n        tokens.append(token)",
             told="continues another text"),
        Edit("return [*tokens, draw((p[i] - q[i]).clamp(min=0), v[i])]", "return tokens",
             told="another one is drawn"),
        Edit("return [*tokens, draw(p[len(proposed)], v[len(proposed)])]", "return tokens", told="one more token"),
        Edit("draw(p[len(proposed)]", "draw(p[len(proposed) - 1]", told="the last row"),
        Edit("clamp(min=0), v[i])", "clamp(min=0), u[i])", told="a number of its own"),
        Edit("v[len(proposed)]", "v[0]", ("clamp(min=0), v[i])", "clamp(min=0), v[0])"), told="its own number"),
    ],
    "diagnose": [
        Edit("abs(value - scored[i])", 'abs(value - alone["log_probs"][i])', told="another text"),
        Edit("        if abs(value - scored[i]) > 1e-3:\n            return (\"memory\", i)\n", "",
             ('    return ("right"', '    for i, value in enumerate(served["log_probs"]):\n        if abs(value - '
              'scored[i]) > 1e-3:\n            return ("memory", i)\n    return ("right"'),
             told="The first difference counts"),
        Edit("> 1e-3", "> 0", told="last digits differ"),
        Edit('("memory", i)', '("draw", i )', ('("draw", i)', '("memory", i)'), told="exchanged"),
        Edit('("memory", i)', '("memory", i + 1)', ('("draw", i)', '("draw", i + 1)'), told="counted from 0"),
        Edit("abs(value - scored[i])", "value - scored[i]", told="lower than it should be | higher than it should be"),
        Edit("abs(value - scored[i])", "scored[i] - value", told="lower than it should be | higher than it should be"),
        Edit("> 1e-3", "> 1e-2"),
    ],
}  # fmt: skip

EQUIVALENT: dict[str, list[Same]] = {
    "decode_step": [Same("pages = ((gpu['memory'] - weights) / (page * token))", "the next line rounds it down")],
    "schedule": [Same("pages = -(((-(one['tokens'] + 1)) / size))", "free pages, whole ones, are compared with it")],
    "diagnose": [Same("if (abs(value - scored[i]) >= 0.001):", "no two values are apart by just that")],
}

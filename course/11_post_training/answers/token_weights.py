from labkit.answers import Edit

_ROWS = '"rows": len(rows) * n'
_ALL = "divisor = {"

WRONG = [
    Edit("1 / (len(counts) * divisor)", "1 / divisor", mistake="The means of the microbatches are averaged once more."),
    Edit("len(rows) * width", "width", mistake="The mean over all places of a microbatch divides by those of all of its rows."),
    Edit("len(rows) * width", "sum(rows)", mistake="The mean over all places divides by those of prompt and padding, too."),
    Edit(_ROWS, '"rows": n', mistake="The means of the rows are averaged over the rows of the microbatch."),
    Edit(_ROWS, '"rows": sum(1 for one in rows if one) * n', mistake="A row without a counted token is a row all the same: it counts in the mean of the rows."),
    Edit("1 / (len(counts) * divisor)", "1 / (sum(1 for one in counts if sum(one)) * divisor)",
         mistake="A microbatch without a counted token has the mean 0, and counts among the microbatches."),
    Edit("return 1 / total", "return 1 / (len(counts) * sum(rows))", mistake="All counted tokens of the step share one divisor, however they are cut."),
    Edit("        if n == 0:\n            return 0.0\n", "", told="division by zero"),
    Edit("            return 0.0\n", "            return 1 / total\n", mistake="A row that has no counted token has nothing that could weigh."),
    Edit("total = sum(n for rows in counts for n in rows)", "total = len(counts) * width"),
    Edit('"microbatches": sum(rows)', '"microbatches": len(rows) * sum(rows)', mistake="By microbatches the mean is over counted tokens: it is not divided by the rows as well."),
    Edit("[weight(rows, n) for n", "[n * weight(rows, n) for n", mistake="Asked is the weight of one token, not that of its whole row."),
    Edit(
        "return 1 / (len(counts) * divisor)", 'return 1 / (n * sum(map(len, counts)) if way == "rows" else len(counts) * divisor)',
        mistake="The rows of each microbatch are averaged first, then the microbatches: these may have different numbers of rows.",
    ),
]


# %% right: by the derivative of the loss, with torch
import torch


def token_weights(counts, width, way):
    rows = [[torch.zeros(n, dtype=torch.float64, requires_grad=True) for n in one] for one in counts]
    if way == "tokens":
        every = torch.cat([row for one in rows for row in one])
        loss = every.sum() / len(every)
    else:
        means = []
        for one in rows:
            total = sum(row.sum() for row in one)
            if way == "padding":
                means.append(total / (len(one) * width))
            elif way == "rows":
                means.append(sum(row.sum() / max(1, len(row)) for row in one) / len(one))
            else:
                means.append(total / max(1, sum(len(row) for row in one)))
        loss = sum(means) / len(means)
    loss.backward()
    return [[float(row.grad[0]) if len(row) else 0.0 for row in one] for one in rows]


# %% right: fractions
from fractions import Fraction


def token_weights(counts, width, way):
    found = []
    for rows in counts:
        share = Fraction(1, len(counts))
        found.append([])
        for n in rows:
            if not n:
                weight = Fraction(0)
            elif way == "tokens":
                weight = Fraction(1, sum(map(sum, counts)))
            elif way == "padding":
                weight = share / len(rows) / width
            elif way == "rows":
                weight = share / len(rows) / n
            else:
                weight = share / sum(rows)
            found[-1].append(float(weight))
    return found


# %% right: a function for each way
def token_weights(counts, width, way):
    m, total = len(counts), sum(sum(rows) for rows in counts)
    of = {
        "tokens": lambda rows, n: total,
        "padding": lambda rows, n: m * len(rows) * width,
        "rows": lambda rows, n: m * len(rows) * n,
        "microbatches": lambda rows, n: m * sum(rows),
    }[way]
    return [[1 / of(rows, n) if n > 0 else 0 for n in rows] for rows in counts]

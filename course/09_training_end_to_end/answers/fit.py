from labkit.answers import Edit, Same

_FLOORS = "floors = torch.cat([low - below[below < low], torch.zeros(1, dtype=torch.float64)])[:, None]"
_BEST = "best = (shown - loss).square().sum(1).argmin()"

_GRID = "the floors that are tried lie a little otherwise, and close enough"
_DIGITS = "seven digits tell a law from another"

WRONG = [
    Edit(_FLOORS, "floors = torch.zeros(1, 1, dtype=torch.float64)", mistake="Without a floor E the law is a straight line in logarithms: it promises too much for large models."),
    Edit(_FLOORS, "floors = (0.9 * low).reshape(1, 1)", mistake="E is not a fixed share of the smallest loss: it is what makes the other losses fit best."),
    Edit(_BEST, "best = torch.tensor(0)", mistake="An E just below the smallest loss fits no better than others: take the E with the smallest errors."),
    Edit("-slope[best].item()", "slope[best].item()", mistake="alpha is positive: the law divides by N to the alpha."),
    Edit("n.log() - n.log().mean(), (loss", "n - n.mean(), (loss", mistake="log(L - E) is a line over log N, not over N."),
    Edit("a = (y[best].mean() - slope[best] * n.log().mean()).exp()", "a = y[best].mean().exp()", mistake="A is the intercept at log N = 0, not the mean of the logarithms."),
    Edit("a = (y[best].mean() - slope[best] * n.log().mean()).exp()", "a = y[best].mean() - slope[best] * n.log().mean()", mistake="The intercept is log A, not A."),
    Edit("slope = (x * y).sum(1) / (x * x).sum()", "slope = torch.full((len(floors),), -0.5, dtype=torch.float64)", mistake="alpha is not the same for all data: it is what the line's slope says."),
    Edit(_FLOORS, "floors = ((loss[0] * loss[2] - loss[1] ** 2) / (loss[0] + loss[2] - 2 * loss[1])).reshape(1, 1)",
         mistake="Three losses give E by this formula only if their sizes have equal ratios, and stand in order."),
    Edit('{"E": floors[best].item()', '{"E": low.item()', mistake="The floor is the one that the line was fitted above, and lies below the smallest loss."),
]

EQUIVALENT = [
    Same("line 6: `dtype` dropped", _DIGITS),
    Same("line 6: `dtype` dropped (2)", _DIGITS),
    Same("line 7: `+` for `-`", _GRID),
    Same("line 7: `loss.min()` dropped", _GRID),
    Same("line 8: 3 for 4", _GRID),
    Same("line 8: 3.0 for 1.5", _GRID),
    Same("line 8: 5 for 4", _GRID),
    Same("line 8: 5999 for 6000", _GRID),
    Same("line 8: 6001 for 6000", _GRID),
    Same("line 8: `dtype` dropped", _DIGITS),
    Same("line 8: factor `spread` dropped", "losses in nats are a few units apart at most: the same grid"),
    Same("line 9: 0 for 1", "the grid has floors next to 0"),
    Same("line 9: 2 for 1", "the same floor twice"),
    Same("line 9: `<=` for `<`", "a floor of 0 is there already"),
    Same("line 9: `dtype` dropped", "0 is 0 in every dtype"),
    Same("line 13: `mean` for `sum`", "of as many squares the smallest sum is the smallest mean"),
]


# %% right: for each alpha the best floor, by least squares
import numpy as np


def fit(sizes, losses):
    n, loss = np.array(sizes, float), np.array(losses)
    best = None
    for alpha in np.linspace(0.05, 2.5, 1226):
        x = (n / n.min()) ** -alpha
        basis = np.stack([np.ones_like(x), x], 1)
        found = np.linalg.lstsq(basis, loss, rcond=None)[0]
        error = ((basis @ found - loss) ** 2).sum()
        if best is None or error < best[0]:
            best = (error, found[0], found[1] * n.min() ** alpha, alpha)
    return {"E": best[1], "A": best[2], "alpha": best[3]}


# %% right: errors of logarithms, a search that narrows
import math


def fit(sizes, losses):
    xs = [math.log(n) for n in sizes]
    mx = sum(xs) / len(xs)

    def line(floor):
        ys = [math.log(loss - floor) for loss in losses]
        my = sum(ys) / len(ys)
        slope = sum((x - mx) * (y - my) for x, y in zip(xs, ys)) / sum((x - mx) ** 2 for x in xs)
        return sum((my + slope * (x - mx) - y) ** 2 for x, y in zip(xs, ys)), slope, my - slope * mx

    low, spread = min(losses), max(losses) - min(losses)
    a, b = math.log(1e-5), math.log(max(20.0, low / spread))  # of the distance below the smallest loss, in spreads
    for _ in range(6):
        points = [a + (b - a) * i / 200 for i in range(201)]
        best = min(range(201), key=lambda i: line(low - spread * math.exp(points[i]))[0])
        a, b = points[max(0, best - 2)], points[min(200, best + 2)]
    floor = low - spread * math.exp((a + b) / 2)
    _, slope, intercept = line(floor)
    return {"E": floor, "A": math.exp(intercept), "alpha": -slope}


# %% right: Gauss-Newton from several starts
import numpy as np


def fit(sizes, losses):
    n, loss = np.array(sizes, float), np.array(losses, float)
    x = np.log(n / n.min())
    found = []
    for start in (0.3, 0.6, 1.0, 1.5):
        p = np.array([loss.min() - 0.3 * (loss.max() - loss.min()), np.log(1.3 * (loss.max() - loss.min())), start])
        damp, error = 1e-3, np.inf
        for _ in range(200):
            shape = np.exp(p[1] - p[2] * x)
            off = loss - p[0] - shape
            slopes = np.stack([np.ones_like(x), shape, -x * shape], 1)
            step = np.linalg.lstsq(slopes.T @ slopes + damp * np.diag((slopes**2).sum(0)), slopes.T @ off, rcond=None)[0]
            new = p + step
            new_error = ((loss - new[0] - np.exp(np.clip(new[1] - new[2] * x, -60, 60))) ** 2).sum()
            if new_error < error:
                p, error, damp = new, new_error, damp / 3
            else:
                damp = min(damp * 3, 1e12)
        found.append((error, *p))
    _, floor, a, alpha = min(found)
    return {"E": float(floor), "A": float(np.exp(a) * n.min() ** alpha), "alpha": float(alpha)}

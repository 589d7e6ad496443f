from labkit.answers import Edit, Same

_LEFT = "(1 + math.cos(math.pi * part)) / 2"

WRONG = [
    Edit("return peak * n / warmup", "return floor + (peak - floor) * n / warmup", mistake="The warm-up begins at 0, not at the floor."),
    Edit("return peak * n / warmup", "return peak * (n + 1) / warmup", mistake="Step `warmup` has the peak, and step 0 has 0."),
    Edit("return floor + (peak - floor) * left", "return max(floor, peak * left)", mistake="The fall ends at the floor: what falls is the part above it."),
    Edit("1 - math.sqrt(part)", "1 - part", mistake="WSD falls as 1 - √x here: fast first. You fall along a line."),
    Edit("1 - math.sqrt(part)", "math.sqrt(1 - part)", mistake="1 - √x falls fast first; √(1 - x) falls slowly first."),
    Edit("(n - begin) / (end - begin)", "(n - begin) / end", mistake="The part of the fall that is over is counted from where it begins to `end`."),
    Edit('warmup if plan["style"] == "cosine" else end - plan["fall"]', "warmup", mistake="WSD stays at the peak until `fall` steps before `end`."),
    Edit('warmup if plan["style"] == "cosine" else end - plan["fall"]', 'end - plan["fall"]', mistake="A cosine falls from the end of the warm-up on, not in the last `fall` steps alone."),
    Edit('end - plan["fall"]', 'warmup + plan["fall"]', mistake="`fall` is the length of WSD's fall, which ends at `end`."),
    Edit(_LEFT, "math.cos(math.pi * part / 2)", mistake="Half a cosine goes from 1 to -1: slowly, fast, slowly. You have a quarter of one."),
    Edit(_LEFT, "(1 + math.cos(math.pi * n / end)) / 2", mistake="The cosine begins where the warm-up ends."),
    Edit("    if n >= end:\n        return floor\n", "", mistake="Beyond `end` the rate stays at the floor."),
    Edit("    if n < warmup:\n        return peak * n / warmup\n", "", mistake="The first `warmup` steps rise from 0."),
    Edit("return floor\n", "return 0.0\n", mistake="Beyond `end` the rate is the floor, not 0."),
]

EQUIVALENT = [
    Same("if (n < begin):", "where the fall begins nothing has fallen yet"),
    Same("if (n > end):", "at the end all of it has fallen"),
]


# %% right: interpolation
import math


def rate(n, plan):
    top, bottom = plan["peak"], plan["floor"]
    start = plan["warmup"] if plan["style"] == "cosine" else plan["end"] - plan["fall"]
    if plan["warmup"] and n <= plan["warmup"]:
        return top * (n / plan["warmup"])
    x = min(1.0, max(0.0, (n - start) / (plan["end"] - start)))
    y = 0.5 * (1 - math.cos(math.pi * x)) if plan["style"] == "cosine" else x**0.5
    return top - (top - bottom) * y


# %% right: sine squared
import math


def rate(n, plan):
    if n < plan["warmup"]:
        return plan["peak"] / plan["warmup"] * n
    if plan["style"] == "wsd":
        gone = 1 - (plan["end"] - n) / plan["fall"]
        gone = 0.0 if gone < 0 else min(gone, 1.0)
        return plan["floor"] * math.sqrt(gone) + plan["peak"] * (1 - math.sqrt(gone))
    gone = min((n - plan["warmup"]) / (plan["end"] - plan["warmup"]), 1)
    return plan["floor"] + (plan["peak"] - plan["floor"]) * math.cos(math.pi * gone / 2) ** 2


# %% right: cases by a chain
from math import cos, pi, sqrt


def rate(n, plan):
    p, f, w, e, fall = plan["peak"], plan["floor"], plan["warmup"], plan["end"], plan["fall"]
    shapes = {"cosine": (e - w, lambda x: cos(pi * x) / 2 + 0.5), "wsd": (fall, lambda x: 1 - sqrt(x))}
    length, shape = shapes[plan["style"]]
    if n >= e:
        return f
    if n < w:
        return p * n / w
    if n < e - length:
        return p
    return f + (p - f) * shape((n - e + length) / length)

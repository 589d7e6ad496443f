from labkit.answers import Edit

_ORDER = '(("check", "weights"), ("first", "position"), ("rate", "schedule"), ("scale", "scale"))'
_STREAMS = '    if straight["loss"][0] != resumed["loss"][0]:\n        return "streams"\n'

WRONG = [
    Edit(_ORDER, '(("first", "position"), ("rate", "schedule"), ("scale", "scale"))', mistake="`check` differs before the first step: then the weights are others, whatever else differs."),
    Edit('("check", "weights"), ("first", "position"), ', '("check", "weights"), ', mistake="Other samples give other losses: look at `first` before you look at `loss`."),
    Edit('("rate", "schedule"), ', "", mistake="A plan of rates that begins anew shows in `rate`."),
    Edit(', ("scale", "scale"))', ")", mistake="A loss scale that begins anew shows in `scale`, and changes no loss here."),
    Edit(_STREAMS, "", mistake="Adam's moments act on the weights, so on losses from the second step on. If the first one differs already, with the same weights and samples, other random numbers were drawn."),
    Edit('return "moments" if straight["loss"] != resumed["loss"] else "nothing"', 'return "moments"', mistake="Where all numbers agree nothing was forgotten."),
    Edit('return "moments" if straight["loss"] != resumed["loss"] else "nothing"', 'return "nothing"', mistake="The first loss agrees and later ones do not: the step itself was another one."),
    Edit(_STREAMS, '    if straight["norm"][0] != resumed["norm"][0]:\n        return "moments"\n    if straight["loss"][0] != resumed["loss"][0]:\n        return "streams"\n', mistake="Moments act behind the gradient: they change neither the first loss nor its norm."),
    Edit('straight["loss"] != resumed["loss"] else', 'any(abs(a - b) > 0.01 * a for a, b in zip(straight["loss"], resumed["loss"])) else', mistake="The logs of a sound resume agree to the last bit: a small difference is one."),
    Edit('straight["loss"][0] != resumed["loss"][0]', 'straight["loss"] != resumed["loss"]', mistake="Later losses differ for other reasons, too: random streams show in the first loss."),
    Edit("    for column", _STREAMS + "    for column", mistake="The first loss also differs with other weights or other samples: look at these first."),
    Edit('straight["loss"][0] != resumed["loss"][0]', 'straight["norm"][0] == resumed["norm"][0]', mistake="The first norm is the same where the first loss is: weights, samples and draws are."),
]



# %% right: a table of what differs
def forgotten(straight, resumed):
    differs = {name for name in straight if straight[name] != resumed[name]}
    if not differs:
        return "nothing"
    causes = {"check": "weights", "first": "position", "rate": "schedule", "scale": "scale"}
    for name, part in causes.items():
        if name in differs:
            return part
    return "streams" if straight["norm"][0] != resumed["norm"][0] else "moments"


# %% right: where the first difference is
def forgotten(straight, resumed):
    if straight["check"] != resumed["check"]:
        return "weights"
    steps = range(len(straight["loss"]))
    when = {name: next((i for i in steps if straight[name][i] != resumed[name][i]), None)
            for name in ("first", "rate", "scale", "loss", "norm")}  # fmt: skip
    if when["first"] is not None:
        return "position"
    if when["rate"] is not None:
        return "schedule"
    if when["scale"] is not None:
        return "scale"
    return {None: "nothing", 0: "streams"}.get(when["loss"], "moments")


# %% right: with tolerances, for logs with fewer digits
import math


def forgotten(straight, resumed):
    def same(a, b):
        return all(math.isclose(x, y, rel_tol=1e-7) for x, y in zip(a, b))

    if not same([straight["check"]], [resumed["check"]]):
        return "weights"
    if straight["first"] != resumed["first"]:
        return "position"
    if not same(straight["rate"], resumed["rate"]):
        return "schedule"
    if not same(straight["scale"], resumed["scale"]):
        return "scale"
    if not same(straight["loss"][:1], resumed["loss"][:1]):
        return "streams"
    return "nothing" if same(straight["loss"], resumed["loss"]) else "moments"

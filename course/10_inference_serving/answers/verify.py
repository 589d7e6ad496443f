from labkit.answers import Edit

_LEFT = "(p[i] - q[i]).clamp(min=0)"
_VERDICT = "u[i] * q[i, token] >= p[i, token]"
_REJECTED = f"return [*tokens, draw({_LEFT}, v[i])]"
_LAST = "return [*tokens, draw(p[len(proposed)], v[len(proposed)])]"
_LIKED = "Tokens that the proposer likes more than the model are accepted too often: the chance is p of the token over q of it."
_ROUND = "The verdict is the wrong way round: what has to be rejected is accepted here."
_DRAWN = "The token is drawn, by v; here it is always the likeliest."
_OWN_V = "Each place has its own number in v."
_BEFORE = "What was accepted before the first rejection stays in the answer."

WRONG = [
    Edit(_VERDICT, "u[i] >= p[i, token]", mistake="The chance is p of the token divided by q of it, not p alone."),
    Edit(_VERDICT, "u[i] * p[i, token] >= q[i, token]", mistake=_LIKED),
    Edit(_VERDICT, "False", mistake=_LIKED),
    Edit(_VERDICT, "p[i, token] < q[i, token]", mistake="Where q is above p, the proposal is accepted now and then."),
    Edit(_LEFT, "p[i]", mistake="After a rejection this draws from p itself: then what q likes comes too often."),
    Edit(_LEFT, "(p[i] - q[i]).abs()", mistake="Where q is above p nothing is left to draw."),
    Edit(
        _LEFT, "p[i].index_fill(0, torch.tensor([token]), 0.0)",
        mistake="After a rejection it is not enough to leave out the rejected token: whatever q likes more than p came often enough.",
    ),
    Edit(_REJECTED, "return tokens", mistake="In place of the rejected token another one is drawn."),
    Edit(_REJECTED, f"token = draw({_LEFT}, v[i])", mistake="What was proposed behind a rejected token continues another text: stop there."),
    Edit(_LAST, "return tokens", mistake="If all are accepted, one more token is drawn: the pass has its distribution, too."),
    Edit("draw(p[len(proposed)]", "draw(p[len(proposed) - 1]", mistake="The token after all proposals has the last row of p."),
    Edit("clamp(min=0), v[i])", "clamp(min=0), u[i])", mistake="u has decided the verdict; the draw has a number of its own."),
    Edit("v[len(proposed)]", "v[0]", ("clamp(min=0), v[i])", "clamp(min=0), v[0])"), mistake=_OWN_V),
    Edit(_LEFT, "p[i] - q[i]", mistake="Where q is above p nothing is left to draw."),
    Edit(_LEFT, "q[i]", mistake="After a rejection this draws from q: what q likes comes too often, and what it never says never comes."),
    Edit("(p[i] - q[i])", "(q[i] - p[i])", mistake="The difference is the wrong way round: lacking is what p has more of than q."),
    Edit(">= p", "< p", mistake=_ROUND),
    Edit(
        f"if {_VERDICT}:\n            {_REJECTED}\n        tokens.append(token)",
        "tokens.append(draw(p[i], v[i]))\n        if tokens[-1] != token:\n            return tokens",
        mistake="This draws from p and compares with the proposal: then a proposal is accepted with the chance p, less often than can be.",
    ),
    Edit("    tokens = []", "    tokens = []\n    p, q = p.softmax(-1), q.softmax(-1)", mistake="p and q are probabilities already, not logits."),
    Edit(_VERDICT, "u[i] >= (p[i, token] - q[i, token]).exp()", mistake="p and q are probabilities, not their logarithms: the chance is p of the token divided by q of it."),
    Edit(f"draw({_LEFT}", "draw((p[i + 1] - q[i]).clamp(min=0)", mistake="The token in place of a rejected one stands at the same place: row i of p."),
    Edit(_REJECTED, f"return [*tokens, token, draw({_LEFT}, v[i])]", mistake="The rejected token is no part of the answer."),
    Edit(f"draw({_LEFT}, v[i])", "int((p[i] - q[i]).argmax())", mistake=_DRAWN),
    Edit(
        "    tokens = []", "    tokens, chance = [], 1.0",
        (f"        if {_VERDICT}", "        chance *= float(p[i, token] / q[i, token])\n        if u[i] >= chance"),
        mistake="Each place has a chance of its own, p over q there: it is not multiplied by those of the places before.",
    ),
    Edit(_VERDICT, "(1 - u[i]) * q[i, token] >= p[i, token]", mistake="A proposal is accepted if its chance is above u; here it is compared with 1 - u."),
    Edit(">= p", "<= p", mistake=_ROUND),
    Edit(">= p", "> p", mistake="A chance that equals u is not above it: what the model never says must not pass where u is 0."),
    Edit("u[i]", "u[0]", mistake="Each place has its own number in u."),
    Edit("clamp(min=0), v[i])", "clamp(min=0), v[0])", mistake=_OWN_V),
    Edit("v[len(proposed)]", "v[len(proposed) - 1]", mistake=_OWN_V),
    Edit("v[len(proposed)]", "v[0]", mistake=_OWN_V),
    Edit(_LAST, "return [*tokens, int(p[len(proposed)].argmax())]", mistake=_DRAWN),
    Edit(f"draw({_LEFT}, v[i])", "int((p[i] - q[i]).argmax())", (_LAST, "return [*tokens, int(p[len(proposed)].argmax())]"), mistake=_DRAWN),
    Edit(_VERDICT, "int(p[i].argmax()) != token", mistake="Here only the model's likeliest token is accepted: any other may be accepted, too, with its chance."),
    Edit(_VERDICT, "u[i] * q[0, token] >= p[0, token]", mistake="Each place has its own row in p and in q; here the verdict is always that of the first."),
    Edit(_REJECTED, f"return [draw({_LEFT}, v[i])]", mistake=_BEFORE),
    Edit(
        "    tokens = []", "    tokens = []\n    if any(u[i] * q[i, token] >= p[i, token] for i, token in enumerate(proposed)):\n        return [draw((p[0] - q[0]).clamp(min=0), v[0])]",
        mistake=_BEFORE,
    ),
    Edit(_REJECTED, f"return [*tokens, draw({_LEFT}, v[i]), draw(p[i + 1], v[i + 1])]", mistake="Behind the token that replaces a rejected one nothing is known: the model has not seen it yet."),
    Edit(f"draw({_LEFT}", "draw(p[i] / q[i]", mistake="Weights of the draw are what each token still lacks, a difference of p and q, not their quotient."),
    Edit(_VERDICT, "q[i, token] - p[i, token] >= u[i]", mistake="The chance is p over q; here a difference of the two decides."),
    Edit("draw(p[len(proposed)]", "draw((p[-1] - q[-1]).clamp(min=0)", mistake="Behind all proposals nothing was proposed: the token there is drawn from p itself."),
]


# %% right: chances as the text has them, and a draw of its own
import random


def verify(p, q, proposed, u, v):
    answer = []

    def drawn(weights, number):
        weights = [float(w) for w in weights]
        target, so_far = number * sum(weights), 0.0
        for token, weight in enumerate(weights):
            so_far += weight
            if so_far > target:
                return token
        return len(weights) - 1

    for i in range(len(proposed)):
        x = proposed[i]
        if u[i] < min(1.0, float(p[i][x] / q[i][x])):
            answer.append(x)
        else:
            rest = [max(0.0, float(a - b)) for a, b in zip(p[i], q[i])]
            answer.append(drawn(rest, v[i]))
            return answer
    answer.append(drawn(p[-1], v[-1]))
    return answer


# %% right: all verdicts at once, the first rejection found in the list
import torch


def draw(weights, number):
    mass = weights.cumsum(0)
    return int((mass <= number * mass[-1]).sum())


def verify(p, q, proposed, u, v):
    k = len(proposed)
    at = torch.arange(k), torch.tensor(proposed, dtype=torch.long)
    rejected = (torch.tensor(u, dtype=p.dtype)[:k] * q[at] >= p[:k][at]).tolist()
    n = rejected.index(True) if True in rejected else k
    weights = p[k] if n == k else torch.relu(p[n] - q[n])
    return proposed[:n] + [draw(weights / weights.sum(), v[n])]


# %% right: one place, then itself for the rest
import torch


def draw(weights, number):
    return int(torch.searchsorted(weights.cumsum(0), number * weights.sum(), right=True))


def verify(p, q, proposed, u, v):
    if not proposed:
        return [draw(p[0], v[0])]
    x = proposed[0]
    if u[0] * q[0, x] < p[0, x]:
        return [x, *verify(p[1:], q[1:], proposed[1:], u[1:], v[1:])]
    return [draw(torch.maximum(p[0], q[0]) - q[0], v[0])]

from labkit.answers import Edit, Same

_VALUE = 'if abs(value - scored[i]) > 1e-3:\n            return ("memory", i)\n'
_TOKEN = 'if served["tokens"][i] != alone["tokens"][i]:\n            return ("draw", i)\n'
_ALL = 'enumerate(served["log_probs"])'
_BOTH = "A value can be wrong in two ways: too high, or too low."
_VALUES = "A value may be wrong where the token is the right one: compare the values at every place, too."
_PAIR = "Where nothing differs the answer is the pair ('right', None)."
_LATER = "The first difference says which part is wrong; later ones may follow from it."
_NEAR = "Two passes add up in another order: values less than 1e-3 apart are the same, and no damage."
_FAR = "Values that differ by more than 1e-3 are different; here some of them pass."
_OTHER = "A wrong draw is another token, whatever the values say of it."

WRONG = [
    Edit("- scored[i]", '- alone["log_probs"][i]', mistake="Behind another token the values of the request alone are those of another text: compare with `scored`."),
    Edit("> 1e-3", "> 0", mistake=_NEAR),
    Edit(
        f"{_VALUE}        {_TOKEN}", f"{_TOKEN}        {_VALUE}",
        mistake="Where value and token differ in the same place, the wrong value explains the token.",
    ),
    Edit("abs(value - scored[i])", "value - scored[i]", mistake=_BOTH),
    Edit("abs(value - scored[i])", "scored[i] - value", mistake=_BOTH),
    Edit(_ALL, f"reversed(list({_ALL}))", mistake=_LATER),
    Edit(
        f"        {_VALUE}", "", ('    return ("right"', f'    for i, value in {_ALL}:\n        {_VALUE}    return ("right"'),
        mistake="The first difference counts, be it a value's or a token's.",
    ),
    Edit(
        f"        {_TOKEN}", "", ('    return ("right"', f'    for i, _ in {_ALL}:\n        {_TOKEN}    return ("right"'),
        mistake="The first difference counts, be it a value's or a token's.",
    ),
    Edit('("memory", i)', '("draw", i )', ('("draw", i)', '("memory", i)'), mistake="The names are exchanged: a wrong draw leaves the values right."),
    Edit('", i)', '", i + 1)', mistake="Places are counted from 0."),
    Edit("> 1e-3", "> 1e-2", mistake=_FAR),
    Edit("> 1e-3", "> 1e-3 * abs(value)", mistake="The difference itself is compared with 1e-3, not its share of the value."),
    Edit(f"        {_VALUE}", "", mistake=_VALUES),
    Edit(
        f"        {_VALUE}        {_TOKEN}",
        f"        {_TOKEN}".replace('return ("draw", i)', 'return ("memory" if abs(value - scored[i]) > 1e-3 else "draw", i)'),
        mistake=_VALUES,
    ),
    Edit("value - scored[i]", 'alone["log_probs"][i] - scored[i]', mistake="`scored` belongs to the answer as it was served: compare it with the values of `served`."),
    Edit('("right", None)', '"right"', mistake=_PAIR),
    Edit('("right", None)', '("right", -1)', mistake=_PAIR),
    Edit('("right", None)', '("right", 0)', mistake=_PAIR),
    Edit('("right", None)', '("right", len(scored))', mistake=_PAIR),
    Edit('return ("right", None)', "return None", mistake=_PAIR),
    Edit('return ("right", None)', 'return "right", i', mistake=_PAIR),
    Edit("> 1e-3", "> 1e-4", mistake=_NEAR),
    Edit("> 1e-3", "> 0.1", mistake=_FAR),
    Edit("abs(value - scored[i])", "abs(2.718281828459045 ** value - 2.718281828459045 ** scored[i])", mistake="The log-probabilities themselves are compared, not the probabilities."),
    Edit(f"        {_TOKEN}", "", mistake="Where all values are right a token may still be another one: compare the tokens, too."),
    Edit('("memory", i)', '"memory"', ('("draw", i)', '"draw"'), mistake="The answer is a pair: what is wrong, and at which place."),
    Edit('served["tokens"][i] != alone["tokens"][i]', 'served["log_probs"][i] != alone["log_probs"][i]', mistake=_OTHER),
    Edit('served["tokens"][i] != alone["tokens"][i]', 'served["tokens"][i] != alone["tokens"][i] and value != alone["log_probs"][i]', mistake=_OTHER),
    Edit(
        '            return ("memory", i)', '            last = ("memory", i)', ('            return ("draw", i)', '            last = ("draw", i)'),
        ("    for i,", '    last = ("right", None)\n    for i,'), ('    return ("right", None)', "    return last"), mistake=_LATER,
    ),
]

EQUIVALENT = [
    Same("if (abs(value - scored[i]) >= 0.001):", "no two values are apart by just that"),
]


# %% right: both first places, then the earlier one
def diagnose(served, alone, scored):
    n = len(scored)
    memory = next((i for i in range(n) if abs(served["log_probs"][i] - scored[i]) > 1e-3), n)
    draw = next((i for i in range(n) if served["tokens"][i] != alone["tokens"][i]), n)
    if memory == draw == n:
        return ["right", None]
    return ["memory", memory] if memory <= draw else ["draw", draw]


# %% right: a list of all findings, sorted
def diagnose(served, alone, scored):
    found = [(i, 0, "memory") for i, (a, b) in enumerate(zip(served["log_probs"], scored)) if not -1e-3 <= a - b <= 1e-3]
    found += [(i, 1, "draw") for i, (a, b) in enumerate(zip(served["tokens"], alone["tokens"])) if a != b]
    if not found:
        return ("right", None)
    place, _, name = min(found)
    return (name, place)


# %% right: tensors
import torch


def diagnose(served, alone, scored):
    wrong = (torch.tensor(served["log_probs"], dtype=torch.float64) - torch.tensor(scored, dtype=torch.float64)).abs() > 1e-3
    other = torch.tensor(served["tokens"]) != torch.tensor(alone["tokens"])
    either = wrong | other
    if not either.any():
        return "right", None
    at = int(either.int().argmax())
    return "memory" if wrong[at] else "draw", at

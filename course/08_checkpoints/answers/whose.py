from labkit.answers import Edit

WRONG = [
    Edit("torch.equal(saved[source], numbers)", "saved[source].shape == numbers.shape", mistake="Equal shapes are no proof: half of the parameters of a layer have the same one."),
    Edit(
        "torch.equal(saved[source], numbers)",
        "saved[source].shape == numbers.shape and torch.isclose(saved[source].sum(), numbers.sum())",
        mistake="Sums and norms are the same for other numbers, or the same in another order.",
    ),
    Edit(
        "torch.equal(saved[source], numbers)",
        "saved[source].shape == numbers.shape and torch.allclose(saved[source], numbers)",
        mistake="Near is not the same: what was saved and read again is equal in every bit.",
    ),
    Edit("torch.equal(saved[source], numbers)", "torch.isclose(saved[source].norm(), numbers.norm())"),
    Edit("name if name in sources else sources[0]", "sources[0]", mistake="Where several are equal, its own comes first: that is no mix-up."),
    Edit("else None", "else name", mistake="What was never saved belongs to no parameter: None."),
    Edit("name if name in sources else sources[0]", "sources[-1]"),
    Edit("return found", "return {source: name for name, source in found.items()}", mistake="The other way round: asked is, of each name of `restored`, where its numbers come from."),
    Edit(
        "return found",
        "return {name: None if name == source else source for name, source in found.items()}",
        mistake="A parameter that has its own is named too, with its own name.",
    ),
    Edit(
        "torch.equal(saved[source], numbers)",
        "sorted(saved[source].flatten().tolist()) == sorted(numbers.flatten().tolist())",
    ),
    Edit("torch.equal(saved[source], numbers)", "torch.equal(saved[source].flatten(), numbers.flatten())"),
    Edit("torch.equal(saved[source], numbers)", "saved[source].flatten()[0] == numbers.flatten()[0]"),
    Edit(
        "sources = [source for source in saved if torch.equal(saved[source], numbers)]",
        "sources = [source for source in saved if (saved[source] == numbers).all()]",
    ),
    Edit("return found", "return list(found.values())"),
]

RIGHT = [
    Edit(
        "torch.equal(saved[source], numbers)",
        "saved[source].shape == numbers.shape and bool((saved[source] == numbers).all())",
    ),
    Edit(
        "sources = [source for source in saved if torch.equal(saved[source], numbers)]",
        "sources = [source for source, table in saved.items() if torch.equal(numbers, table)]",
    ),
    Edit(
        "name if name in sources else sources[0] if sources else None",
        "next((source for source in (name, *sources) if source in sources), None)",
    ),
    Edit("torch.equal(saved[source], numbers)", "saved[source].tolist() == numbers.tolist()"),
]


# %% right: by the bytes of the numbers
def key(tensor):
    return tuple(tensor.shape), tensor.contiguous().numpy().tobytes()


def whose(saved, restored):
    first = {}
    for name, tensor in saved.items():
        first.setdefault(key(tensor), name)
    return {
        name: name if name in saved and key(saved[name]) == key(tensor) else first.get(key(tensor))
        for name, tensor in restored.items()
    }


# %% right: a dict keyed by the numbers
import torch


def whose(saved: dict[str, torch.Tensor], restored: dict[str, torch.Tensor]) -> dict[str, str | None]:
    def key(t):
        return tuple(t.shape), tuple(t.flatten().tolist())
    first = {}
    for name, t in saved.items():
        first.setdefault(key(t), name)
    return {name: name if name in saved and key(saved[name]) == key(t) else first.get(key(t)) for name, t in restored.items()}


# %% wrong: each name once
# mistake: Several parameters may have been given the averages of the same one.
# a name that was found is not looked for again
import torch


def whose(saved: dict[str, torch.Tensor], restored: dict[str, torch.Tensor]) -> dict[str, str | None]:
    free = dict(saved)
    out = {}
    for name, value in restored.items():
        out[name] = next((n for n in [name, *free] if n in free and torch.equal(free[n], value)), None)
        free.pop(out[name], None)
    return out


# %% wrong: last of equals
# mistake: Of several that are equal, the first in the order of `saved` is named; here it is the last.
# the last of several that are equal
import torch


def whose(saved: dict[str, torch.Tensor], restored: dict[str, torch.Tensor]) -> dict[str, str | None]:
    out = {}
    for name, value in restored.items():
        out[name] = None
        for n, s in saved.items():
            if torch.equal(s, value):
                out[name] = n
        if name in saved and torch.equal(saved[name], value):
            out[name] = name
    return out


# %% wrong: needs its own name
# told: need not be in
# every name is expected in both
import torch


def whose(saved: dict[str, torch.Tensor], restored: dict[str, torch.Tensor]) -> dict[str, str | None]:
    return {name: name if torch.equal(saved[name], value) else next((n for n in saved if torch.equal(saved[n], value)), None) for name, value in restored.items()}

from labkit.answers import Edit

_SAME = "torch.equal(saved[source], numbers)"
_SHAPES = "saved[source].shape == numbers.shape"
_OWN = "name if name in sources else sources[0]"

WRONG = [
    Edit("return found", "return {source: name for name, source in found.items()}", mistake="The other way round: asked is, of each name of `restored`, where its numbers come from."),
    Edit(
        "    found = {}\n", "    found, saved = {}, dict(saved)\n", ("else None\n", "else None\n        saved.pop(found[name], None)\n"),
        mistake="Several parameters may have been given the averages of the same one.",
    ),
    Edit(
        "return found", "return {name: None if name == source else source for name, source in found.items()}",
        mistake="A parameter that has its own is named too, with its own name.",
    ),
    Edit("else None", "else name", mistake="What was never saved belongs to no parameter: None."),
    Edit(_SAME, _SHAPES, mistake="Equal shapes are no proof: half of the parameters of a layer have the same one."),
    Edit(
        _SAME, f"{_SHAPES} and torch.isclose(saved[source].sum(), numbers.sum())",
        mistake="Sums and norms are the same for other numbers, or the same in another order.",
    ),
    Edit(_SAME, f"{_SHAPES} and torch.allclose(saved[source], numbers)", mistake="Near is not the same: what was saved and read again is equal in every bit."),
    Edit(_SAME, "torch.equal(saved[source].flatten(), numbers.flatten())", mistake="The same numbers in another shape are another tensor."),
    Edit(_OWN, "sources[0]", mistake="Where several are equal, its own comes first: that is no mix-up."),
    Edit(_OWN, _OWN.replace("0", "-1"), mistake="Of several that are equal, the first in the order of `saved` is named; here it is the last."),
    Edit("        sources = [", "        saved[name]\n        sources = [", told="need not be in"),
    Edit(_SAME, "(saved[source] == numbers).all()"),
    Edit(_SAME, "torch.isclose(saved[source].norm(), numbers.norm())"),
    Edit(_SAME, "sorted(saved[source].flatten().tolist()) == sorted(numbers.flatten().tolist())"),
    Edit(_SAME, "saved[source].flatten()[0] == numbers.flatten()[0]"),
    Edit("return found", "return list(found.values())"),
]

RIGHT = [
    Edit(_SAME, f"{_SHAPES} and bool((saved[source] == numbers).all())"),
    Edit(f"{_OWN} if sources else None", "next((source for source in (name, *sources) if source in sources), None)"),
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

from labkit.answers import Edit

_MOVED = "{number: table[name] for number, name in enumerate(names) if name in table}"
_TABLE = "{saved_names[number]: one for number, one in state.items()}"
_LOST = "[name for name in table if name not in names]"

WRONG = [
    Edit(
        _MOVED, "{number: state[number] for number in range(len(names)) if number in state}",
        mistake="That is by position: the first state goes to the first parameter, whatever its name.",
    ),
    Edit(_MOVED, "table", mistake="The optimizer knows its parameters by number: the keys are places, not names."),
    Edit(
        "saved_names[number]: one", "names[number]: one", ("enumerate(names)", "enumerate(saved_names)"),
        mistake="The other way round: the numbers of the answer are places in the new order.",
    ),
    Edit(
        "saved_names[number]: one", "sorted(saved_names)[number]: one", ("enumerate(names)", "enumerate(sorted(names))"),
        mistake="Sorting the names gives a position again, and only where both have the same names.",
    ),
    Edit("enumerate(names) if name in table}", "enumerate(n for n in names if n in table)}", mistake="A parameter that has no averages keeps its number; those after it do not move up."),
    Edit(_MOVED, "{number: table.get(name, {}) for number, name in enumerate(names)}", mistake="A parameter that has no averages has no entry, not an empty one."),
    Edit(_LOST, "[]", mistake="Averages whose parameter is gone are dropped here. Refuse them, by the parameter's name."),
    Edit("', '.join(lost)", "len(lost)", mistake="It is refused, but the text of the ValueError does not have the name of the parameter."),
    Edit(_LOST, _LOST.replace("table", "saved_names"), told="no averages are lost"),
    Edit("raise ValueError(", "print("),
    Edit(_LOST, "[name for name in names if name not in table]"),
    Edit(_LOST, "['one'] * (len(names) < len(table))"),
    Edit(_MOVED, _MOVED.replace(" if name in table", "")),
    Edit(_TABLE, "dict(zip(saved_names, state.values()))"),
    Edit("number: table[name] for number", "number + 1: table[name] for number"),
]

RIGHT = [
    Edit(_LOST, "sorted(set(table) - set(names))", (_TABLE, "{name: state[i] for i, name in enumerate(saved_names) if i in state}")),
    Edit(_MOVED, "{names.index(name): one for name, one in table.items()}"),
]


# %% right: the new place of each name first
def by_name(state, saved_names, names):
    place = {name: i for i, name in enumerate(names)}
    moved = {}
    for number in state:
        name = saved_names[number]
        if name not in place:
            raise ValueError(name)
        moved[place[name]] = state[number]
    return moved

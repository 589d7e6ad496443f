from labkit.answers import Edit

WRONG = [
    Edit(
        "{number: table[name] for number, name in enumerate(names) if name in table}",
        "{number: state[number] for number in range(len(names)) if number in state}",
        mistake="That is by position: the first state goes to the first parameter, whatever its name.",
    ),
    Edit("enumerate(names) if name in table}", "enumerate(n for n in names if n in table)}", mistake="A parameter that has no averages keeps its number; those after it do not move up."),
    Edit(
        "if lost := [name for name in table if name not in names]",
        "if lost := []",
        mistake="Averages whose parameter is gone are dropped without a message. Refuse them, by the parameter's " "name.",
    ),
    Edit(
        "{saved_names[number]: one",
        "{sorted(saved_names)[number]: one",
        ("enumerate(names)", "enumerate(sorted(names))"),
        mistake="Sorting the names gives a position again, and only where both have the same names.",
    ),
    Edit("saved_names[number]: one", "names[number]: one", ("enumerate(names)", "enumerate(saved_names)")),
    Edit(
        "{number: table[name] for number, name in enumerate(names) if name in table}",
        "table",
        mistake="The optimizer knows its parameters by number: the keys are places, not names.",
    ),
    Edit("raise ValueError(", "print("),
    Edit(
        "if lost := [name for name in table if name not in names]",
        "if lost := [name for name in saved_names if name not in names]",
    ),
    Edit(
        "if lost := [name for name in table if name not in names]",
        "if lost := [name for name in names if name not in table]",
    ),
    Edit(
        "if lost := [name for name in table if name not in names]",
        "if lost := [1] * (len(names) < len(table))",
        ("', '.join(lost)", "lost"),
    ),
    Edit("enumerate(names) if name in table}", "enumerate(names)}"),
    Edit("{saved_names[number]: one for number, one in state.items()}", "dict(zip(saved_names, state.values()))"),
    Edit("number: table[name] for number", "number + 1: table[name] for number"),
    # the first that has no average yet begins with one of zeros
    Edit(
        "{number: table[name] for number, name in enumerate(names) if name in table}",
        "{number: table.get(name, {}) for number, name in enumerate(names)}",
    ),
]

RIGHT = [
    Edit("[name for name in table if name not in names]", "sorted(set(table) - set(names))"),
    Edit(
        "{number: table[name] for number, name in enumerate(names) if name in table}",
        "{names.index(name): one for name, one in table.items()}",
    ),
    Edit("raise ValueError(", 'raise ValueError("lost: " + '),
    Edit(
        "{saved_names[number]: one for number, one in state.items()}",
        "{name: state[i] for i, name in enumerate(saved_names) if i in state}",
    ),
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


# %% wrong: empty entries
# mistake: A parameter that has no averages has no entry, not an empty one.
# a new parameter gets an empty state
def by_name(state: dict[int, dict], saved_names: list[str], names: list[str]) -> dict[int, dict]:
    of = {saved_names[i]: s for i, s in state.items()}
    lost = set(of) - set(names)
    if lost:
        raise ValueError(f"no parameter {sorted(lost)}")
    return {i: of.get(n, {}) for i, n in enumerate(names)}


# %% wrong: refuses by number
# mistake: It is refused, but the text of the ValueError does not have the name of the parameter.
# refused, with the number of the state
def by_name(state: dict[int, dict], saved_names: list[str], names: list[str]) -> dict[int, dict]:
    for i in state:
        if saved_names[i] not in names:
            raise ValueError(f"state {i} has no parameter")
    return {names.index(saved_names[i]): s for i, s in state.items()}


# %% wrong: refuses what never had averages
# told: no averages are lost
# a parameter that was never stepped may be gone
def by_name(state: dict[int, dict], saved_names: list[str], names: list[str]) -> dict[int, dict]:
    for n in saved_names:
        if n not in names:
            raise ValueError(n)
    return {names.index(saved_names[i]): s for i, s in state.items()}



# the new place of each name first
def by_name(state, saved_names, names):
    place = {name: i for i, name in enumerate(names)}
    moved = {}
    for number in state:
        name = saved_names[number]
        if name not in place:
            raise ValueError(name)
        moved[place[name]] = state[number]
    return moved

# told: dropped without a message
def by_name(state, saved_names, names):
    moved = {}
    for number, one in state.items():
        try:
            moved[names.index(saved_names[number])] = one
        except ValueError:
            continue
    return moved

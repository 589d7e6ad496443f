# told: not an empty one
# a new parameter gets an empty state
def by_name(state: dict[int, dict], saved_names: list[str], names: list[str]) -> dict[int, dict]:
    of = {saved_names[i]: s for i, s in state.items()}
    lost = set(of) - set(names)
    if lost:
        raise ValueError(f"no parameter {sorted(lost)}")
    return {i: of.get(n, {}) for i, n in enumerate(names)}

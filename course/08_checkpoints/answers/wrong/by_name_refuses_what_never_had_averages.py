# told: no averages are lost
# a parameter that was never stepped may be gone
def by_name(state: dict[int, dict], saved_names: list[str], names: list[str]) -> dict[int, dict]:
    for n in saved_names:
        if n not in names:
            raise ValueError(n)
    return {names.index(saved_names[i]): s for i, s in state.items()}

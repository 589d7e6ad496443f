# told: does not have the name
# refused, with the number of the state
def by_name(state: dict[int, dict], saved_names: list[str], names: list[str]) -> dict[int, dict]:
    for i in state:
        if saved_names[i] not in names:
            raise ValueError(f"state {i} has no parameter")
    return {names.index(saved_names[i]): s for i, s in state.items()}

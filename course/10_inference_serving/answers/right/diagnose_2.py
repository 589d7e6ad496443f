# a list of all findings, sorted
def diagnose(served, alone, scored):
    found = [(i, 0, "memory") for i, (a, b) in enumerate(zip(served["log_probs"], scored)) if not -1e-3 <= a - b <= 1e-3]
    found += [(i, 1, "draw") for i, (a, b) in enumerate(zip(served["tokens"], alone["tokens"])) if a != b]
    if not found:
        return ("right", None)
    place, _, name = min(found)
    return (name, place)

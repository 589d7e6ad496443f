# told:
def diagnose(served, alone, scored):
    found = ("right", None)
    for i, value in enumerate(served["log_probs"]):
        if abs(value - scored[i]) > 1e-3:
            found = ("memory", i)
        elif served["tokens"][i] != alone["tokens"][i]:
            found = ("draw", i)
    return found

# told: another text
def diagnose(served, alone, scored):
    for i, value in enumerate(served["log_probs"]):
        if abs(value - alone["log_probs"][i]) > 1e-3:
            return ("memory", i)
        if served["tokens"][i] != alone["tokens"][i]:
            return ("draw", i)
    return ("right", None)

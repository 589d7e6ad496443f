# both first places, then the earlier one
def diagnose(served, alone, scored):
    n = len(scored)
    memory = next((i for i in range(n) if abs(served["log_probs"][i] - scored[i]) > 1e-3), n)
    draw = next((i for i in range(n) if served["tokens"][i] != alone["tokens"][i]), n)
    if memory == draw == n:
        return ["right", None]
    return ["memory", memory] if memory <= draw else ["draw", draw]

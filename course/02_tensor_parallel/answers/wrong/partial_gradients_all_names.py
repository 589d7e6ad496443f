# told: These are all names
def partial_gradients(names, sequence_parallel):
    return list(names) if sequence_parallel else []

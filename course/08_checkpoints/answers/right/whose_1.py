# by the bytes of the numbers
def key(tensor):
    return tuple(tensor.shape), tensor.contiguous().numpy().tobytes()


def whose(saved, restored):
    first = {}
    for name, tensor in saved.items():
        first.setdefault(key(tensor), name)
    return {
        name: name if name in saved and key(saved[name]) == key(tensor) else first.get(key(tensor))
        for name, tensor in restored.items()
    }

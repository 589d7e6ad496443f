# told: wrong; the inputs and answers of this case stay hidden
def bubble(p, m, v):
    return (p - 1) / (m * v) if m > 1 else 0.0

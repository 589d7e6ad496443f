# told:
def verify(p, q, proposed, u, v):
    tokens = []
    for i, token in enumerate(proposed):
        best = int(p[i].argmax())
        tokens.append(best)
        if best != token:
            return tokens
    return [*tokens, int(p[len(proposed)].argmax())]

# chances as the text has them, and a draw of its own
import random  # noqa: F401


def verify(p, q, proposed, u, v):
    answer = []

    def drawn(weights, number):
        weights = [float(w) for w in weights]
        target, so_far = number * sum(weights), 0.0
        for token, weight in enumerate(weights):
            so_far += weight
            if so_far > target:
                return token
        return len(weights) - 1

    for i in range(len(proposed)):
        x = proposed[i]
        if u[i] < min(1.0, float(p[i][x] / q[i][x])):
            answer.append(x)
        else:
            rest = [max(0.0, float(a - b)) for a, b in zip(p[i], q[i])]
            answer.append(drawn(rest, v[i]))
            return answer
    answer.append(drawn(p[-1], v[-1]))
    return answer

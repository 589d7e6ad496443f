# told: Chance is never even
import math
def expected_drops(tokens, experts, k, factor):
    return {'capacity': math.ceil(tokens * k / experts * factor), 'dropped': max(0.0, 1 - factor)}

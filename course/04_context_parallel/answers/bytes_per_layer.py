from labkit.answers import Edit, Same

_WHOLE = "2C divides s"

WRONG = [
    Edit("* 2 * groups * a_head", "* groups * a_head", told="Keys *and* values"),
    Edit("* 2 * groups * a_head", "* 2 * heads * a_head", told="`groups` heads, not"),
    Edit("(cp - 1) * 2 * groups", "cp * 2 * groups", told="C-1 steps"),
    Edit("(cp - 1) / cp * (2", "(2", told="keeps its own share"),
    Edit("(2 * heads + 2 * groups)", "(heads + 2 * groups)", told="*output* comes back"),
]

RIGHT = [
    Edit("(cp - 1) / cp * (2 * heads + 2 * groups)", "2 * (1 - 1 / cp) * (heads + groups)"),
]

EQUIVALENT = [
    Same("line 3: `/` for `//`", _WHOLE),
    Same("line 3: rounded up for down", _WHOLE),
]


# %% right: key/value bytes and query/output bytes, each once
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    kv = 2 * s * b * groups * d * element_size / cp
    qo = 2 * s * b * heads * d * element_size / cp
    return dict(ring=kv * (cp - 1), ulysses=(kv + qo) * (cp - 1) / cp)


# %% right: summed over steps and over tensors
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp
    ring = sum(2 * n * b * groups * d * element_size for _ in range(cp - 1))
    q = n * b * heads * d * element_size
    kv = n * b * groups * d * element_size
    return {'ring': ring, 'ulysses': sum(x - x / cp for x in (q, kv, kv, q))}


# %% right: whole numbers; the keys in the other order
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp * b * d * element_size
    leave = [(h - h // cp) * n for h in (heads, groups, groups, heads)]
    return {"ulysses": sum(leave), "ring": sum(2 * groups * n for _ in range(1, cp))}


# %% wrong: all to each
# told: C-th of what
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp
    return {
        "ring": (cp - 1) * 2 * groups * d * n * b * element_size,
        "ulysses": (2 * heads + 2 * groups) * d * n * b * element_size * (cp - 1),
    }


# %% wrong: as many groups as heads
# told: `groups` heads
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp * b * d * element_size
    return {"ring": 2 * (cp - 1) * groups * n, "ulysses": (cp - 1) / cp * 4 * heads * n}


# %% wrong: block is the sequence
# told: s/C tokens
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp
    return {
        "ring": (cp - 1) * 2 * groups * d * s * b * element_size,
        "ulysses": (2 * heads + 2 * groups) * d * n * b * element_size * (cp - 1) / cp,
    }


# %% wrong: half is hidden
# told: the mask saves no bytes
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp
    return {
        "ring": (cp - 1) * 2 * groups * d * n * b * element_size / 2,
        "ulysses": (2 * heads + 2 * groups) * d * n * b * element_size * (cp - 1) / cp,
    }


# %% wrong: of all ranks
# told: what all ranks send together
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    number = s * b * d * element_size
    return {"ring": (cp - 1) * 2 * groups * number, "ulysses": (cp - 1) / cp * 2 * (heads + groups) * number}


# %% wrong: one sequence
# told: for one sequence
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp * d * element_size
    return {"ring": 2 * (cp - 1) * groups * n, "ulysses": (cp - 1) / cp * 2 * (heads + groups) * n}


# %% wrong: only queries exchange
# told: exchanged, too
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp * b * d * element_size
    return {"ring": 2 * (cp - 1) * groups * n, "ulysses": (cp - 1) / cp * 2 * heads * n}


# %% wrong: output of groups
# told: as the queries have
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp
    return {
        "ring": (cp - 1) * 2 * groups * d * n * b * element_size,
        "ulysses": (heads + 3 * groups) * d * n * b * element_size * (cp - 1) / cp,
    }


# %% wrong: queries go round
# told: only K and V
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp
    return {
        "ring": (cp - 1) * (heads + 2 * groups) * d * n * b * element_size,
        "ulysses": (2 * heads + 2 * groups) * d * n * b * element_size * (cp - 1) / cp,
    }


# %% wrong: two bytes an element
# told: not always 2
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp * b * d * 2
    return {"ring": 2 * (cp - 1) * groups * n, "ulysses": (cp - 1) / cp * 2 * (heads + groups) * n}


# %% wrong: whole sequence at each step
# told: s/C tokens
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp * b * d * element_size
    return {"ring": 2 * (cp - 1) * groups * n * cp, "ulysses": (cp - 1) / cp * 2 * (heads + groups) * n}

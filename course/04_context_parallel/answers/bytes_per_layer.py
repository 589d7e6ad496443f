from labkit.answers import Edit, Same

_WHOLE = "2C divides s"

WRONG = [
    Edit("* 2 * groups * a_head", "* groups * a_head", mistake="Keys *and* values travel: two tensors a step, both whole, as the mask saves no bytes."),
    Edit("* 2 * groups * a_head", "* 2 * heads * a_head", mistake="Keys and values have `groups` heads, not `heads`, in both numbers."),
    Edit("(cp - 1) * 2 * groups", "cp * 2 * groups", mistake="A block visits C ranks and is already on one of them: C-1 steps."),
    Edit("(cp - 1) / cp * (2", "(2", mistake="In an all-to-all a rank keeps its own share: (C-1)/C of what it holds leaves."),
    Edit("(2 * heads + 2 * groups)", "(heads + 2 * groups)", mistake="Queries, keys, values go out, and the *output* comes back: another all-to-all of `heads` heads."),
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
# mistake: Each of the C-1 others gets a C-th of what this rank holds.
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp
    return {
        "ring": (cp - 1) * 2 * groups * d * n * b * element_size,
        "ulysses": (2 * heads + 2 * groups) * d * n * b * element_size * (cp - 1),
    }


# %% wrong: block is the sequence
# mistake: A block is what one rank holds: s/C tokens.
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp
    return {
        "ring": (cp - 1) * 2 * groups * d * s * b * element_size,
        "ulysses": (2 * heads + 2 * groups) * d * n * b * element_size * (cp - 1) / cp,
    }


# %% wrong: of all ranks
# mistake: That is what all ranks send together; asked is one rank.
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    number = s * b * d * element_size
    return {"ring": (cp - 1) * 2 * groups * number, "ulysses": (cp - 1) / cp * 2 * (heads + groups) * number}


# %% wrong: one sequence
# mistake: That is for one sequence; here are b.
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp * d * element_size
    return {"ring": 2 * (cp - 1) * groups * n, "ulysses": (cp - 1) / cp * 2 * (heads + groups) * n}


# %% wrong: only queries exchange
# mistake: Keys and values are exchanged, too, not only queries and output.
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp * b * d * element_size
    return {"ring": 2 * (cp - 1) * groups * n, "ulysses": (cp - 1) / cp * 2 * heads * n}


# %% wrong: output of groups
# mistake: The output has `heads` heads, as the queries have.
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp
    return {
        "ring": (cp - 1) * 2 * groups * d * n * b * element_size,
        "ulysses": (heads + 3 * groups) * d * n * b * element_size * (cp - 1) / cp,
    }


# %% wrong: queries go round
# mistake: Queries stay where they are: only K and V go round.
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp
    return {
        "ring": (cp - 1) * (heads + 2 * groups) * d * n * b * element_size,
        "ulysses": (2 * heads + 2 * groups) * d * n * b * element_size * (cp - 1) / cp,
    }


# %% wrong: two bytes an element
# mistake: An element has `element_size` bytes, not always 2.
def bytes_per_layer(s, b, heads, groups, d, cp, element_size):
    n = s // cp * b * d * 2
    return {"ring": 2 * (cp - 1) * groups * n, "ulysses": (cp - 1) / cp * 2 * (heads + groups) * n}



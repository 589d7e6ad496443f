from labkit.answers import Edit, Same

_WHOLE = "2C divides s"
_GROUPS = "Keys and values have `groups` heads, not `heads`."

WRONG = [
    Edit("s // cp * b", "s * b", mistake="That is what all ranks send together; asked is one rank."),
    Edit("* d * element_size", "* d", mistake="That is how many elements are sent; each has `element_size` bytes."),
    Edit("2 * groups", "2 * heads", mistake=_GROUPS),
    Edit("* 2 * groups * a_head", "* 2 * heads * a_head", mistake=_GROUPS),
    Edit("* 2 * groups * a_head", "* 2 * groups * a_head * cp",
         mistake="The ring sends blocks, and a block is what one rank holds: s/C tokens."),
    Edit("* 2 * groups * a_head", "* groups * a_head",
         mistake="Keys *and* values travel: two tensors a step, both whole, as the mask saves no bytes."),
    Edit("* 2 * groups * a_head", "* (heads + 2 * groups) * a_head",
         mistake="Queries stay where they are: only K and V go round."),
    Edit("(cp - 1) * 2 * groups", "cp * 2 * groups",
         mistake="A block visits C ranks and is already on one of them: C-1 steps."),
    Edit("(cp - 1) / cp * (2", "(2",
         mistake="In an all-to-all a rank keeps its own share: (C-1)/C of what it holds leaves."),
    Edit("(2 * heads + 2 * groups)", "(heads + 2 * groups)",
         mistake="Queries, keys, values go out, and the *output* comes back: another all-to-all of `heads` heads."),
    Edit("(cp - 1) / cp * (2", "(cp - 1) * (2"),
    Edit("(2 * heads + 2 * groups)", "2 * heads"),
    Edit("* d * element_size", "* d * 2"),
    Edit("* b * d", "* d"),
]

RIGHT = [Edit("(cp - 1) / cp * (2 * heads + 2 * groups)", "2 * (1 - 1 / cp) * (heads + groups)")]

EQUIVALENT = [Same("line 3: `/` for `//`", _WHOLE), Same("line 3: rounded up for down", _WHOLE)]


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

from labkit.answers import Edit, Same

_RANK = 'a + b // tp if matrix["kind"] == "column" else a // tp + b'
_BOTH = "Of the two thin matrices of a layer tp cuts one only: the other reads, or writes, what every rank has whole."

WRONG = [
    Edit(_RANK, "(a + b) // tp", mistake=_BOTH),
    Edit(_RANK, "a + b", mistake="One of the two is cut over tp with the matrix beside which it stands."),
    Edit(_RANK, 'a // tp + b if matrix["kind"] == "column" else a + b // tp',
         mistake="The kinds are exchanged: a column layer's input is whole on every rank, a row layer's output is."),
    Edit('matrix["parts"] * r', "r", mistake="Each part of a packed matrix has an A of its own."),
    Edit('matrix["o"] * r', 'matrix["parts"] * matrix["o"] * r',
         mistake="A row of B belongs to one part, and has numbers for that part's u alone."),
    Edit("18 * rank + 2 * frozen", "18 * whole + 2 * frozen", mistake="The bytes are those of one rank, and it holds a part of the adapters."),
    Edit("18 * rank + 2 * frozen", "18 * rank", mistake="The frozen matrices are there, too, 2 bytes a number."),
    Edit("18 * rank + 2 * frozen", "18 * (rank + frozen)", mistake="A frozen number has neither gradient nor moments."),
    Edit("18 * rank + 2 * frozen", "20 * rank + 2 * frozen", mistake="The 18 bytes of a trained parameter have its bf16 weight in them already."),
    Edit('matrix["o"] * matrix["i"] // tp', 'matrix["o"] * matrix["i"]', mistake="tp cuts the frozen matrix: a rank holds its part."),
    Edit("18 * rank", "16 * rank", mistake="A trained parameter needs 18 bytes: its bf16 weight, and gradient, weight and two moments in fp32."),
    Edit('matrix["parts"] * r * matrix["i"], matrix["o"] * r', 'matrix["parts"] * r * matrix["o"], matrix["i"] * r', mistake="A reads the input: its rows have i numbers. B has a row for each of the o outputs."),
    Edit('matrix["o"] * r', 'matrix["o"] // matrix["parts"] * r', mistake="B has o rows: o counts the outputs of all parts."),
    Edit('frozen += matrix["o"]', 'frozen += matrix["parts"] * matrix["o"]', mistake="The packed matrix has o rows already: o counts the outputs of all parts."),
    Edit("18 * rank + 2 * frozen", "(18 * rank + 2 * frozen) // tp", mistake="What tp cuts has been divided by tp already; what every rank holds whole is not divided."),
]

_DIVIDES = "tp divides everything that is cut"
EQUIVALENT = [
    Same('rank += a + (b / tp) if matrix["kind"] == "column" else a // tp + b', _DIVIDES),
    Same('rank += a + b // tp if matrix["kind"] == "column" else (a / tp) + b', _DIVIDES),
    Same('rank += a + (-(-b // tp)) if matrix["kind"] == "column" else a // tp + b', _DIVIDES),
    Same('rank += a + b // tp if matrix["kind"] == "column" else (-(-a // tp)) + b', _DIVIDES),
    Same("frozen += ((matrix['o'] * matrix['i']) / tp)", _DIVIDES),
    Same("frozen += (-(-(matrix['o'] * matrix['i']) // tp))", _DIVIDES),
]


# %% right: shapes first, then sums of them
def adapter_state(matrices, r, tp):
    shapes, here, frozen = [], [], 0
    for m in matrices:
        a, b = (m["parts"] * r, m["i"]), (m["o"], r)
        shapes += [a, b]
        if m["kind"] == "column":
            here += [a, (m["o"] // tp, r)]
        else:
            here += [(a[0], m["i"] // tp), b]
        frozen += (m["o"] // tp if m["kind"] == "column" else m["o"]) * (m["i"] if m["kind"] == "column" else m["i"] // tp)
    rank = sum(x * y for x, y in here)
    return {"whole": sum(x * y for x, y in shapes), "rank": rank, "bytes": 2 * frozen + rank * (2 + 4 + 4 + 4 + 4)}


# %% right: one matrix as a function, the others as sums
def adapter_state(matrices, r, tp):
    def one(kind, o, i, parts):
        cut = {"column": (1, tp), "row": (tp, 1)}[kind]
        held = parts * r * i // cut[0] + o * r // cut[1]
        return parts * r * i + o * r, held, 18 * held + 2 * o * i // tp

    found = [one(**m) for m in matrices]
    return dict(zip(("whole", "rank", "bytes"), (sum(column) for column in zip(*found))))


# %% right: from what is whole on every rank
def adapter_state(matrices, r, tp):
    whole = copied = frozen = 0
    for m in matrices:
        a, b = r * m["parts"] * m["i"], r * m["o"]
        whole += a + b
        copied += a if m["kind"] == "column" else b
        frozen += m["o"] * m["i"]
    rank = copied + (whole - copied) // tp
    return {"whole": whole, "rank": rank, "bytes": rank * 18 + frozen * 2 // tp}

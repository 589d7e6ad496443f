from labkit.answers import Edit

_COUNT = "-(-(samples * s + 1) // tokens)"

WRONG = [
    Edit(_COUNT, "-(-(samples * s) // tokens)", mistake="The last label stands behind the last input: samples · s tokens are one too few."),
    Edit(_COUNT, "-(-(samples * (s + 1)) // tokens)", mistake="Neighbours share a token: each further sample takes s tokens, not s + 1."),
    Edit(_COUNT, "(samples * s + 1) // tokens + 1", mistake="Where the tokens just suffice no further epoch is read."),
    Edit(_COUNT, "-(-samples // ((tokens - 1) // s))", mistake="Epochs are one stream: a sample may begin in one and end in the next, so an epoch adds more than those that fit into it alone."),
    Edit("(count * tokens - 1) // s", "count * tokens // s", mistake="The first input of the stream is no label: of e · tokens tokens one is left over."),
    Edit("(count * tokens - 1) // s", "count * ((tokens - 1) // s)", mistake="A sample may begin in one epoch and end in the next: count the samples of the whole stream."),
    Edit("needed = samples - before", "needed = there - samples", mistake="`needed` is what the run takes of the last epoch, not what is left of it."),
    Edit("needed < int(0.8", "needed <= int(0.8", mistake="Less than 80 % are needed: just as many is not less."),
    Edit("int(0.8 * ((tokens - 1) // s))", "0.8 * ((tokens - 1) // s)", mistake="80 % of an epoch's samples is rounded down."),
    Edit("((tokens - 1) // s)),", "(there - before)),", mistake="80 % is of the samples of an epoch alone, not of those that end in the last one."),
    Edit("count > 1 and ", "", mistake="One epoch alone is not kept apart from anything."),
    Edit("needed < int", "needed > int", mistake="An epoch that is needed as a whole is shuffled with the others."),
]


# %% right: count up
def epochs(tokens, s, samples):
    e = 1
    while (e * tokens - 1) // s < samples:
        e += 1
    before = max(0, ((e - 1) * tokens - 1) // s)
    needed = samples - before
    apart = e != 1 and needed < (tokens - 1) // s * 8 // 10
    return {"epochs": e, "samples": (e * tokens - 1) // s, "needed": needed, "apart": apart}


# %% right: a function of epochs
import math


def epochs(tokens, s, samples):
    def held(e):
        return (e * tokens - 1) // s if e else 0

    e = math.ceil((samples * s + 1) / tokens)
    return dict(epochs=e, samples=held(e), needed=samples - held(e - 1),
                apart=bool(e > 1 and samples - held(e - 1) < math.floor(0.8 * held(1))))


# %% right: by the ends of samples
def epochs(tokens, s, samples):
    last = samples * s  # the place of the last label
    e = last // tokens + 1
    ends = [0 if n == 0 else (n * tokens - 1) // s for n in range(e + 1)]
    return {
        "epochs": e,
        "samples": ends[e],
        "needed": samples - ends[e - 1],
        "apart": False if e == 1 else samples - ends[e - 1] < int(ends[1] * 0.8),
    }

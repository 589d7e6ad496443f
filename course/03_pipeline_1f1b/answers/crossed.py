from labkit.answers import Edit

_CAME = 'came = f"{kind}{i}.{stage // 2}"'

WRONG = [
    Edit(_CAME, "came = word", mistake="The words of the sender are compared with those of the receiver as they are. But F3.0 on rank 1 makes the input of another chunk on rank 0."),
    Edit("found.append((wanted, came))", "found.append((came, wanted))", mistake="Asked are pairs of the word that was posted for, and the word whose message came; here they stand the other way round."),
    Edit("found.append((wanted, came))", "found.append((wanted, word))", mistake="The second word of a pair is the sender's here; asked is the word of *this* rank that the message is for."),
    Edit("found.append((wanted, came))", "found.append(wanted)", told="expected"),
    Edit("if came != wanted:", "if True:", mistake="This pairs all receives; asked are those that got another's message."),
    Edit("return found", "return sorted(found)", mistake="The pairs are right, but not in the order of the receives."),
    Edit("if came != wanted:", "if came[0] != wanted[0]:", mistake="Only receives that got the other *kind* are listed here. A gradient of another microbatch is as wrong."),
    Edit("(1 if kind == \"F\" else -1)", "1", mistake="A gradient goes to the stage *before*; here all messages go on to the next stage."),
    Edit("(1 - rank)", "rank", mistake="The words in `sent` are the other rank's, and so are its chunks; here they count as this rank's."),
    Edit("(1 - rank)", "1", mistake="This is right for what rank 0 receives. For rank 1 the words in `sent` are those of rank 0, which has the even stages."),
    Edit("found = []", "found, sent = [], sorted(sent)", told="got"),
    Edit('*map(int, word[1:].split("."))', "int(word[1]), int(word[3])", told="invalid literal"),
]

EQUIVALENT = []


# %% right: a dictionary of what each word feeds
def crossed(rank, sent, posted):
    def feeds(word):
        kind, rest = word[0], word[1:]
        i, c = map(int, rest.split("."))
        if kind == "F":
            return f"F{i}.{c + 1 if rank == 0 else c}"
        return f"B{i}.{c if rank == 0 else c - 1}"
    return [(p, feeds(s)) for s, p in zip(sent, posted) if feeds(s) != p]


# %% right: backwards, from the receiver to the sender; a tuple of lists
import re
def crossed(rank, sent, posted):
    maker = lambda k, i, c: (k, i, c + {("F", 0): -1, ("F", 1): 0, ("B", 0): 0, ("B", 1): 1}[k, rank])
    parse = lambda w: (w[0], *map(int, re.findall(r"\d+", w[1:])))
    word = lambda k, i, c: f"{k}{i}.{c}"
    of = {maker(*parse(w)): w for w in posted}
    pairs = []
    for s, w in zip(map(parse, sent), posted):
        if s != maker(*parse(w)):
            pairs.append([w, of[s]])
    return tuple(pairs)


# %% right: a generator
def crossed(rank, sent, posted):
    shift = {(0, "F"): 1, (0, "B"): 0, (1, "F"): 0, (1, "B"): -1}
    for k in range(len(posted)):
        head, chunk = sent[k].split(".")
        came = f"{head}.{int(chunk) + shift[rank, head[0]]}"
        if came != posted[k]:
            yield posted[k], came

from labkit.answers import Edit, Same

_KEY = "tuple(tokens[:end])"
_ALONE = "tuple(tokens[end - self.size : end])"
_KEEP = "range(self.size, len(tokens) + 1, self.size)"
_KNOWN = "range(self.size, len(tokens), self.size)"
_LESS = "Only the last token must be left to compute; here a page is left out that could be used."

WRONG = [
    Edit(_KEY, _ALONE, mistake="Equal tokens in a page are not enough: from the second layer on its keys depend on all tokens before them."),
    Edit(_KEY, f"(end, {_ALONE})", mistake="The same tokens at the same place are not enough: what stands before them must be the same, too."),
    Edit(
        f"in {_KNOWN}", "in range(self.size, len(tokens) + 1, self.size)",
        mistake="If all tokens are found nothing is left to compute, and the answer's first token comes out of the last one.",
    ),
    Edit("self.pages.setdefault(" + _KEY + ", page)", f"self.pages[{_KEY}] = page", mistake="Of two pages with the same contents the one that was there first stays."),
    Edit("if known != page", "if False", mistake="One page is forgotten, not all."),
    Edit("self.pages = {key: known for key, known in self.pages.items() if known != page}", "pass", mistake="A page that is forgotten gets other contents: it must not be found any more."),
    Edit(
        "self.pages = {key: known for key, known in self.pages.items() if known != page}",
        "self.keys = getattr(self, 'keys', {})\n        self.pages.pop(self.keys.pop(page, None), None)",
        (f"self.pages.setdefault({_KEY}, page)", f"self.pages.setdefault({_KEY}, page)\n            self.keys = getattr(self, 'keys', {{}})\n            self.keys[page] = {_KEY}"),
        mistake="A copy is forgotten here, and with it the older page, which has the same contents and is still there.",
    ),
    Edit("zip(" + _KEEP + ", pages)", "zip(" + _KEEP + ", pages[:1])"),
    Edit("return pages", "return pages[-1:]"),
    Edit("return pages", "return len(pages)"),
    Edit(
        _KEEP, "range(self.size, len(tokens) + self.size, self.size)", (_KNOWN, "range(self.size, len(tokens) + self.size, self.size)"),
        mistake="A page that is not full is not shared: its owner still writes into it.",
    ),
    Edit("                break\n", "                continue\n", mistake="A page is of use only if all pages before it are there: stop at the first that is not known."),
    Edit(f"in {_KNOWN}", "in range(self.size, len(tokens) - self.size, self.size)", mistake=_LESS),
    Edit(f"in {_KNOWN}", "in range(self.size, (len(tokens) // self.size - 1) * self.size + 1, self.size)", mistake=_LESS),
    Edit("pages.append(page)", "pages.insert(0, page)", mistake="The pages stand in the order of the tokens, the first one first."),
    Edit(f"setdefault({_KEY}, page)", "setdefault(tokens[:end], page)", told="a tuple can"),
]

EQUIVALENT = [Same("line 9: 2 for 1", "a beginning that ends inside of a page is never asked for")]


# %% right: a tree, a node for each page
class Prefixes:
    def __init__(self, size):
        self.size, self.root, self.of = size, {}, {}

    def _pieces(self, tokens):
        return [tuple(tokens[i : i + self.size]) for i in range(0, len(tokens) - self.size + 1, self.size)]

    def keep(self, tokens, pages):
        here = self.root
        for piece, page in zip(self._pieces(tokens), pages):
            if piece not in here:
                here[piece] = [page, {}]
                self.of[page] = here, piece
            here = here[piece][1]

    def known(self, tokens):
        found, here = [], self.root
        for piece in self._pieces(tokens[:-1]):
            if piece not in here:
                break
            page, here = here[piece]
            found.append(page)
        return found

    def forget(self, page):
        if page in self.of:
            here, piece = self.of.pop(page)
            del here[piece]


# %% right: each page's hash with that of the page before
import hashlib


class Prefixes:
    def __init__(self, size):
        self.size, self.pages = size, {}

    def hashes(self, tokens):
        before = b""
        for i in range(len(tokens) // self.size):
            text = repr(tokens[i * self.size : (i + 1) * self.size]).encode()
            before = hashlib.sha256(before + text).digest()
            yield before

    def keep(self, tokens, pages):
        for number, key in enumerate(self.hashes(tokens)):
            if key not in self.pages:
                self.pages[key] = pages[number]

    def known(self, tokens):
        out = []
        for key in self.hashes(tokens[: len(tokens) - 1]):
            if key not in self.pages:
                return out
            out.append(self.pages[key])
        return out

    def forget(self, page):
        for key in [key for key in self.pages if self.pages[key] == page]:
            del self.pages[key]


# %% right: a list of sequences, searched one by one
class Prefixes:
    def __init__(self, size):
        self.size, self.rows = size, []

    def keep(self, tokens, pages):
        for i in range(len(tokens) // self.size):
            beginning = list(tokens[: (i + 1) * self.size])
            if all(row[0] != beginning for row in self.rows):
                self.rows.append((beginning, pages[i]))

    def known(self, tokens):
        found = []
        for i in range((len(tokens) - 1) // self.size):
            hits = [page for beginning, page in self.rows if beginning == tokens[: (i + 1) * self.size]]
            if not hits:
                break
            found.append(hits[0])
        return found

    def forget(self, page):
        self.rows = [row for row in self.rows if row[1] != page]


# %% empty
class Prefixes:
    def __init__(self, size): ...
    def keep(self, tokens, pages): ...
    def known(self, tokens): return []
    def forget(self, page): ...

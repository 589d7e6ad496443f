from labkit.answers import Edit, Same

_KEY = "tuple(tokens[:end])"
_ALONE = "tuple(tokens[end - self.size : end])"
_KEEP = "range(self.size, len(tokens) + 1, self.size)"
_KNOWN = "range(self.size, len(tokens), self.size)"
_LESS = "Only the last token must be left to compute; here a page is left out that could be used."

_FIRST = "Of two pages with the same contents the one that was there first stays."
_EVERY = "Every full page is kept: a later request may share only the first of them."
_FORGET = "self.pages = {key: known for key, known in self.pages.items() if known != page}"

WRONG = [
    Edit(_KEY, _ALONE, mistake="Equal tokens in a page are not enough: from the second layer on its keys depend on all tokens before them."),
    Edit(_KEY, f"(end, {_ALONE})", mistake="The same tokens at the same place are not enough: what stands before them must be the same, too."),
    Edit(
        f"in {_KNOWN}", "in range(self.size, len(tokens) + 1, self.size)",
        mistake="If all tokens are found nothing is left to compute, and the answer's first token comes out of the last one.",
    ),
    Edit("self.pages.setdefault(" + _KEY + ", page)", f"self.pages[{_KEY}] = page", mistake=_FIRST),
    Edit("if known != page", "if False", mistake="One page is forgotten, not all."),
    Edit("self.pages = {key: known for key, known in self.pages.items() if known != page}", "pass", mistake="A page that is forgotten gets other contents: it must not be found any more."),
    Edit(
        "self.pages = {key: known for key, known in self.pages.items() if known != page}",
        "self.keys = getattr(self, 'keys', {})\n        self.pages.pop(self.keys.pop(page, None), None)",
        (f"self.pages.setdefault({_KEY}, page)", f"self.pages.setdefault({_KEY}, page)\n            self.keys = getattr(self, 'keys', {{}})\n            self.keys[page] = {_KEY}"),
        mistake="A copy is forgotten here, and with it the older page, which has the same contents and is still there.",
    ),
    Edit("zip(" + _KEEP + ", pages)", "zip(" + _KEEP + ", pages[:1])", mistake=_EVERY),
    Edit("zip(" + _KEEP + ", pages)", "list(zip(" + _KEEP + ", pages))[-1:]", mistake=_EVERY),
    Edit("return pages", "return pages[-1:]", mistake="All pages from the front are returned, not the last one alone."),
    Edit("return pages", "return len(pages)", told="the pages themselves"),
    Edit(
        _KEEP, "range(self.size, len(tokens) + self.size, self.size)", (_KNOWN, "range(self.size, len(tokens) + self.size, self.size)"),
        mistake="A page that is not full is not shared: its owner still writes into it.",
    ),
    Edit("                break\n", "                continue\n", mistake="A page is of use only if all pages before it are there: stop at the first that is not known."),
    Edit(f"in {_KNOWN}", "in range(self.size, len(tokens) - self.size, self.size)", mistake=_LESS),
    Edit(f"in {_KNOWN}", "in range(self.size, (len(tokens) // self.size - 1) * self.size + 1, self.size)", mistake=_LESS),
    Edit("pages.append(page)", "pages.insert(0, page)", mistake="The pages stand in the order of the tokens, the first one first."),
    Edit(f"setdefault({_KEY}, page)", "setdefault(tokens[:end], page)", told="a tuple can"),
    Edit(
        _FORGET, "self.keys = getattr(self, 'keys', {})\n        self.pages.pop(self.keys.pop(page, None), None)",
        (f"self.pages.setdefault({_KEY}, page)", f"self.pages[{_KEY}] = page\n            self.keys = getattr(self, 'keys', {{}})\n            self.keys[page] = {_KEY}"),
        mistake=_FIRST,
    ),
    Edit(_KEEP, "range(self.size, len(tokens), self.size)", mistake="A page that the last token fills is full, too: it is kept."),
    Edit("return pages", "return pages[:-1]", mistake=_LESS),
    Edit("                break\n", "                return []\n", mistake="Pages that were found before the first unknown one are of use."),
    Edit(_FORGET, "if page in self.pages.values():\n            self.pages = {}", mistake="One page is forgotten, not all."),
    Edit(_KEY, "tuple(tokens[max(0, end - 2 * self.size) : end])", mistake="Equal tokens in this page and in the one before are not enough: keys depend on all tokens from the front."),
    Edit(_KEY, "tuple(sorted(tokens[:end]))", mistake="The order of the tokens counts: the same tokens in another order have other keys."),
    Edit(_KEY, "''.join(map(str, tokens[:end]))", mistake="Tokens written one behind the other are ambiguous: 1, 12 and 11, 2 give the same text."),
    Edit("if page is None", "if not page", mistake="Page 0 is a page like any other: ask whether there is one, not whether its number is 0."),
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


# %% wrong: by the page before, which may have got other contents
# mistake: A page is found here by the number of the page before it, and stays when that one gets other contents.
class Prefixes:
    def __init__(self, size):
        self.size, self.pages = size, {}

    def keep(self, tokens, pages):
        before = None
        for end, page in zip(range(self.size, len(tokens) + 1, self.size), pages):
            before = self.pages.setdefault((before, *tokens[end - self.size : end]), page)

    def known(self, tokens):
        found, before = [], None
        for end in range(self.size, len(tokens), self.size):
            before = self.pages.get((before, *tokens[end - self.size : end]))
            if before is None:
                break
            found.append(before)
        return found

    def forget(self, page):
        self.pages = {key: known for key, known in self.pages.items() if known != page}


# %% wrong: by the page before, the sequence's own
# mistake: Behind a copy nothing is found: the page before has to be the one that stays in the index.
class Prefixes:
    def __init__(self, size):
        self.size, self.pages = size, {}

    def keep(self, tokens, pages):
        before = None
        for end, page in zip(range(self.size, len(tokens) + 1, self.size), pages):
            self.pages.setdefault((before, *tokens[end - self.size : end]), page)
            before = page

    def known(self, tokens):
        found, before = [], None
        for end in range(self.size, len(tokens), self.size):
            before = self.pages.get((before, *tokens[end - self.size : end]))
            if before is None:
                break
            found.append(before)
        return found

    def forget(self, page):
        self.pages = {key: known for key, known in self.pages.items() if page not in (known, key[0])}


# %% right: by the page before; what follows a forgotten page is forgotten with it
class Prefixes:
    def __init__(self, size):
        self.size, self.pages = size, {}

    def keep(self, tokens, pages):
        before = None
        for end, page in zip(range(self.size, len(tokens) + 1, self.size), pages):
            before = self.pages.setdefault((before, *tokens[end - self.size : end]), page)

    def known(self, tokens):
        found, before = [], None
        for end in range(self.size, len(tokens), self.size):
            before = self.pages.get((before, *tokens[end - self.size : end]))
            if before is None:
                break
            found.append(before)
        return found

    def forget(self, page):
        self.pages = {key: known for key, known in self.pages.items() if page not in (known, key[0])}


# %% empty
class Prefixes:
    def __init__(self, size): ...
    def keep(self, tokens, pages): ...
    def known(self, tokens): return []
    def forget(self, page): ...

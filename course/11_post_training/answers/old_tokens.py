from labkit.answers import Edit, Same

_KEEP = "            kept |= {tuple(prompt[:end]) for end in range(size, len(prompt) + 1, size)}\n"

WRONG = [
    Edit("n + size < len(prompt)", "n + size <= len(prompt)", mistake="The last token of a prompt is computed anew: a page that ends with it is not used."),
    Edit("            found[-1].append(n)\n        for prompt in prompts:\n", "            found[-1].append(n)\n",
         mistake="Pages of the same rollout are computed by the new weights: they are not old yet."),
    Edit("        found.append([])\n", "        found.append([])\n        if len(found) > 2:\n            kept = {tuple(p[:e]) for p in rollouts[len(found) - 2] for e in range(size, len(p) + 1, size)}\n",
         mistake="A page stays for as long as it is in the memory, not for one rollout only."),
    Edit("tuple(prompt[: n + size]) in kept", "tuple(prompt[n : n + size]) in kept",
         (_KEEP, "            kept |= {tuple(prompt[end - size : end]) for end in range(size, len(prompt) + 1, size)}\n"),
         mistake="Two pages with the same tokens are not alike if what stands before them differs."),
    Edit("n += size", "n += 1", ("tuple(prompt[: n + size])", "tuple(prompt[: n + 1])"), (_KEEP, "            kept |= {tuple(prompt[:end]) for end in range(1, len(prompt) + 1)}\n"),
         ("n + size < len", "n + 1 < len"), mistake="The engine finds whole pages, not single tokens."),
    Edit(_KEEP, "            kept |= {tuple(prompt)}\n", ("            while n + size < len(prompt) and tuple(prompt[: n + size]) in kept:\n                n += size\n",
         "            if tuple(prompt) in kept:\n                n = (len(prompt) - 1) // size * size\n"),
         mistake="A prompt need not be the same as an earlier one: it is enough that it begins like it."),
    Edit("found[-1].append(n)", "found[-1].append(n // size)", mistake="Asked is how many tokens, not how many pages."),
    Edit("            while n + size", "            if n + size", mistake="A prompt may begin with more than one page of older weights."),
    Edit("found[-1].append(n)", "found[-1].append(int(n > 0))", mistake="Asked is how many tokens, not whether there are any."),
    Edit("found[-1].append(n)", "found[-1].append(len(prompt) - n)", mistake="Asked are the tokens whose keys are old, not those that are computed anew."),
    Edit("n + size < len(prompt)", "n + size < len(prompt) - size", mistake="Only the last token is computed anew: a page that ends before it is used."),
]

_NEVER = "beginnings that are no whole pages are never asked for"
EQUIVALENT = [
    Same("kept |= {tuple(prompt[:end]) for end in range(size, len(prompt) + 2, size)}", _NEVER),
    Same("kept |= {tuple(prompt[:end]) for end in range(size, len(prompt) + 1)}", _NEVER),
]


# %% right: a tree of pages
def old_tokens(rollouts, size):
    root, found = {}, []
    for prompts in rollouts:
        told = []
        for prompt in prompts:
            node, n = root, 0
            while n + size <= len(prompt) - 1:
                node = node.get(tuple(prompt[n : n + size]))
                if node is None:
                    break
                n += size
            told.append(n)
        for prompt in prompts:
            node = root
            for n in range(0, len(prompt) - size + 1, size):
                node = node.setdefault(tuple(prompt[n : n + size]), {})
        found.append(told)
    return found


# %% right: each prompt beside every earlier one
def old_tokens(rollouts, size):
    def alike(a, b):
        n = 0
        while n < min(len(a) - 1, len(b)) and a[n] == b[n]:
            n += 1
        return n // size * size

    return [
        [max([alike(prompt, other) for before in rollouts[:now] for other in before] + [0]) for prompt in prompts]
        for now, prompts in enumerate(rollouts)
    ]


# %% right: the rollout in which each beginning was first computed
def old_tokens(rollouts, size):
    born = {}
    for number, prompts in enumerate(rollouts):
        for prompt in prompts:
            for pages in range(1, len(prompt) // size + 1):
                born.setdefault(str(prompt[: pages * size]), number)
    found = []
    for number, prompts in enumerate(rollouts):
        found.append([])
        for prompt in prompts:
            usable = (len(prompt) - 1) // size
            old = [pages for pages in range(1, usable + 1) if born[str(prompt[: pages * size])] < number]
            found[-1].append(size * len(old))
    return found

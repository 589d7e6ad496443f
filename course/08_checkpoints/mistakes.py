"""Lab 08: the solution with small mistakes, and with small changes that leave it right (`labkit/answers`)."""

from __future__ import annotations

from labkit.answers import Edit, Same

_STAGE = 'staged = f".step-{step}"\n    disk.mkdir(staged)\n'
_WRITE = '        disk.write(f"{staged}/{name}", data)\n        disk.fsync(f"{staged}/{name}")\n'
_END = '    disk.fsync(staged)\n    disk.rename(staged, f"step-{step}")\n    disk.fsync("")'
_CLEAR = """    for left in disk.names():
        if left.startswith("."):
            for name in disk.names(left):
                disk.remove(f"{left}/{name}")
            disk.remove(left)
"""
_GROUPS = "for group in zip(*pieces) for piece in group"
_LOAD = "memory.load(file, start, start + last - first)"

WRONG: dict[str, list[Edit]] = {
    "costs": [
        Edit("14 * parameters", "16 * parameters", told="no gradients"),
        Edit("14 * parameters", "18 * parameters", told="no gradients"),
        Edit("14 * parameters", "12 * parameters", told="weights are missing"),
        Edit("14 * parameters", "2 * parameters", told="optimizer's averages"),
        Edit("(ranks * gigabytes * 1e9)", "(gigabytes * 1e9)", told="All ranks write at once"),
        Edit("gpu_hours * 3600 / ranks", "gpu_hours * 3600", told="the first that fails"),
        Edit("gpu_hours * 3600 / ranks", "gpu_hours / ranks", told="in seconds"),
        Edit("every / (2 * failures)", "every / failures", told="half an interval"),
        Edit("seconds / every + every / (2 * failures)", "seconds / every", told="What failures undo"),
        Edit("seconds / every + every / (2 * failures)", "every / (2 * failures)", told="in which the run saves"),
        Edit("math.sqrt(2 * seconds * failures)", "math.sqrt(seconds * failures)", told="are equal"),
        Edit("math.sqrt(2 * seconds * failures)", "2 * seconds * failures", told="square of an interval"),
        Edit("1e9", "2**30"),
        Edit("seconds / every + every / (2 * failures)", "seconds / (every + seconds) + every / (2 * failures)"),
    ],
    "boxes_of": [
        Edit("offset[dim] = part * size[dim]", "pass", told="places in the part"),
        Edit("many = (stop - start) // width if column == 0 else 0", "many = 0", told="are one box"),
        Edit("[row, row + many], [0, width]", "[row, many], [0, width]"),
        Edit("size[dim] //= parts", "pass", ("part * size[dim]", "0"), told="counted in the part"),
        Edit(
            "found.append([[a + o, b + o]",
            "found.append([[a + o, b - a]",
            told="not how long",
        ),
        Edit("part * size[dim]", "(parts - 1 - part) * size[dim]", told="another part"),
        Edit("found.append(", "found.insert(0, ", told="order of the numbers"),
        Edit("min(width, column + stop - start)", "width"),
        Edit("if column == 0 else 0", "if True else 0"),
        Edit("while start < stop:", "while start <= stop:"),
        Edit("while start < stop:", "while stop - start >= size[1]:", told="ends are missing"),
        Edit("size = [rows, columns]", "dim = 1 - dim\n    size = [rows, columns]"),
        Edit("many = (stop - start) // width if", "many = min(1, (stop - start) // width) if", told="are one box"),
    ],
    "load_box": [
        # whole files, whole regions, whole rows
        Edit(
            _LOAD,
            "memory.load(file, 0, at + (r1 - r0) * (c1 - c0))[start : start + last - first]",
            told="more than once | Read no more",
        ),
        Edit(
            _LOAD,
            "memory.load(file, at, at + (r1 - r0) * (c1 - c0))[start - at : start - at + last - first]",
            told="more than once | Read no more",
        ),
        Edit(
            _LOAD,
            "memory.load(file, start - first + c0, start - first + c1)[first - c0 : last - c0]",
            told="Read no more",
        ),
        # one number at a time
        Edit(
            _LOAD,
            "torch.cat([memory.load(file, n, n + 1) for n in range(start, start + last - first)])",
            told="side by side",
        ),
        Edit(_LOAD, f"({_LOAD}, {_LOAD})[1]", told="more than once"),
        Edit("start = at + (row", "start = (row", told="where `at` says"),
        Edit(
            "torch.empty(",
            "torch.zeros(",
            (
                '    if filled < found.numel():\n        raise ValueError(f"{found.numel() '
                '- filled} numbers of {box} are in no region")\n',
                "",
            ),
            told="nothing was stored",
        ),
        Edit("(row - r0) * (c1 - c0)", "(row - r0) * (right - left)"),
        Edit("+ first - c0\n", "\n"),
        Edit("raise ValueError(", "print(", told="never stored | what was in memory"),
        Edit("filled < found.numel()", "filled == 0"),
        Edit("if first >= last:", "if False:", told="an empty read"),
        Edit("range(max(top, r0), min(bottom, r1))", "range(top, bottom)"),
        Edit("found[row - top,", "found[row - r0,"),
        Edit("for file, at, ((r0, r1), (c0, c1)) in regions:", "for file, at, ((r0, r1), (c0, c1)) in regions[:1]:"),
        # regions that contain the box alone
        Edit("if first >= last:", "if c0 > left or c1 < right:"),
    ],
    "save_checkpoint": [
        # in place, the manifest last, everything confirmed
        Edit(
            _STAGE,
            'staged = f"step-{step}"\n    disk.mkdir(staged)\n',
            ('disk.rename(staged, f"step-{step}")', "pass"),
            told="step-",
        ),
        Edit('        disk.fsync(f"{staged}/{name}")\n', "", told="nothing in"),
        Edit("    disk.fsync(staged)\n", "", told="without"),
        Edit('\n    disk.fsync("")', "", told="has returned"),
        # in another order
        Edit(
            _END,
            '    disk.rename(staged, f"step-{step}")\n    disk.fsync(f"step-{step}")\n    disk.fsync("")',
            told="without",
        ),
        Edit(
            _END,
            '    disk.fsync(staged)\n    disk.fsync("")\n    disk.rename(staged, f"step-{step}")',
            told="has returned",
        ),
        Edit(
            _WRITE,
            '        disk.write(f"{staged}/{name}", data)\n',
            (_END, _END + '\n    for name in files:\n        disk.fsync(f"step-{step}/{name}")'),
            told="nothing in",
        ),
        Edit(
            _WRITE,
            '        if name != "manifest":\n            disk.write(f"{staged}/{name}", data)\n            '
            'disk.fsync(f"{staged}/{name}")\n',
            (
                _END,
                _END + '\n    if "manifest" in files:\n        disk.write(f"step-{step}/manifest", files["manifest"])'
                '\n        disk.fsync(f"step-{step}/manifest")\n        disk.fsync(f"step-{step}")',
            ),
        ),
        # only the last file, or only the manifest
        Edit(
            _WRITE,
            '        disk.write(f"{staged}/{name}", data)\n    disk.fsync(f"{staged}/{name}")\n',
            told="nothing in",
        ),
        Edit(
            '        disk.fsync(f"{staged}/{name}")',
            '        if name == "manifest":\n            disk.fsync(f"{staged}/{name}")',
            told="nothing in",
        ),
        # leftovers
        Edit(_CLEAR, "", told="is still there"),
        Edit(
            _CLEAR,
            "",
            ("    disk.mkdir(staged)\n", "    if staged not in disk.names():\n        disk.mkdir(staged)\n"),
            told="is still there",
        ),
        Edit(_CLEAR, "", ('f".step-{step}"', '".new"')),
        Edit(
            _CLEAR,
            "",
            ('f".step-{step}"', '".new"'),
            ("    disk.mkdir(staged)\n", "    if staged not in disk.names():\n        disk.mkdir(staged)\n"),
            told="not part of this save",
        ),
        Edit('if left.startswith("."):', "if True:", told="older checkpoint"),
        Edit("        disk.fsync(f", '        disk.fsync("")\n        (lambda path: None)(f', told="nothing in"),
        # a leftover of the same step is in the way of the next try
        Edit(
            _CLEAR,
            "",
            (_END, _END + "\n" + _CLEAR.rstrip()),
            told="the same step, saved again, ends in FileExistsError",
        ),
        Edit(
            "    disk.fsync(staged)\n",
            '    disk.fsync(staged)\n    if f"step-{step - 10}" in disk.names():\n        '
            'disk.rename(f"step-{step - 10}", ".old")\n',
            told="older checkpoint",
        ),
    ],
    "resume": [
        Edit("copy.deepcopy({", "({", told="not copies"),
        Edit('    run.optimizer.load_state_dict(state["optimizer"])\n', "", told="begins anew"),
        Edit('    run.scheduler.load_state_dict(state["scheduler"])\n', "", told="schedule begins anew"),
        Edit('    torch.set_rng_state(state["dropout"])', "    pass", told="Dropout draws other"),
        Edit('    run.data.order = state["order"]\n', "", told="not those drawn"),
        Edit('    run.data.position = state["position"]\n', "", told="how far"),
        Edit('    run.data.generator.set_state(state["generator"])\n', "", told="another stream"),
        Edit('    run.model.load_state_dict(state["model"])\n', "", told="weights are not"),
        Edit('"position": run.data.position,', '"position": 0,'),
        Edit("    return copy.deepcopy({", "    torch.manual_seed(0)\n    return copy.deepcopy({"),
        Edit(
            "    return copy.deepcopy({",
            "    state = torch.get_rng_state()\n    torch.manual_seed(0)\n    return copy.deepcopy({",
            ('"dropout": torch.get_rng_state()', '"dropout": state'),
            told="Saving has changed the run itself",
        ),
        # the order is drawn again from the generator
        Edit(
            'run.data.order = state["order"]',
            "pass",
            (
                'run.data.generator.set_state(state["generator"])',
                'run.data.generator.set_state(state["generator"])\n    '
                "run.data.order = torch.randperm(len(run.data.order), generator=run.data.generator)",
            ),
        ),
        # numbers in half as many bits
        Edit(
            'run.model.load_state_dict(state["model"])',
            'run.model.load_state_dict({n: w.bfloat16().float() for n, w in state["model"].items()})',
        ),
        Edit(
            '"dropout": torch.get_rng_state(),',
            '"dropout": torch.initial_seed(),',
            ('torch.set_rng_state(state["dropout"])', 'torch.manual_seed(state["dropout"])'),
        ),
        # the learning rate is loaded, the count of steps is not
        Edit(
            'run.scheduler.load_state_dict(state["scheduler"])',
            'run.scheduler.base_lrs = state["scheduler"]["base_lrs"]',
        ),
        # the averages are loaded, the count of steps of the optimizer is not
        Edit(
            'run.optimizer.load_state_dict(state["optimizer"])',
            'run.optimizer.load_state_dict(state["optimizer"])\n    for one in run.optimizer.state.values():\n        '
            'one["step"].fill_(0)',
        ),
    ],
    "from_hf": [
        Edit(_GROUPS, "for piece in [p for of in pieces for p in of]", told="Each group's heads"),
        Edit("torch.cat([gate, up])", "torch.cat([up, gate])", told="changed places"),
        Edit('for x in "qkv"]', 'for x in "qvk"]', told="keys stand before values"),
        Edit(
            '= packed(at, "bias")',
            '= torch.cat([take(f"{at}self_attn.{x}_proj.bias") for x in "qkv"])',
            told="biases are not",
        ),
        Edit("torch.cat([gate, up])", "torch.stack([gate, up], 1).flatten(0, 1)", told="row by row"),
        Edit("    if left:\n", "    if False:\n"),
        Edit('raise ValueError(f"{name} is missing")', "return torch.zeros(1)"),
        Edit('if "lm_head.weight" in left:', "if True:", told="is tied to the embedding there is no lm_head"),
        # one tensor says what all others have to be
        Edit(
            'any(".self_attn.q_proj.bias" in name for name in left)',
            '"model.layers.0.self_attn.q_proj.bias" in theirs',
            told="does not have the name of the tensor that is missing",
        ),
        Edit(
            "    layer = 0\n",
            '    layer, layers = 0, sum(name.endswith("input_layernorm.weight") for name in theirs)\n',
            ('while any(name.startswith(f"model.layers.{layer}.") for name in left):', "while layer < layers:"),
            told="does not have the name of the tensor that is missing",
        ),
        Edit(
            'if "lm_head.weight" in left:',
            "if True:",
            ('take("lm_head.weight")', 'left.pop("lm_head.weight", theirs["model.embed_tokens.weight"])'),
            told="there is one tensor",
        ),
        Edit("        if biases:\n", "        if False:\n"),
        Edit("        if biases:\n", "        if True:\n"),
        Edit(".chunk(groups) for x", ".chunk(heads) for x"),
        Edit(
            'ours[f"{to}input_layernorm.weight"] = take(f"{at}input_layernorm.weight")',
            'ours[f"{to}input_layernorm.weight"] = take(f"{at}post_attention_layernorm.weight")',
            (
                'ours[f"{to}pre_mlp_layernorm.weight"] = take(f"{at}post_attention_layernorm.weight")',
                'ours[f"{to}pre_mlp_layernorm.weight"] = take(f"{at}input_layernorm.weight")',
            ),
        ),
        Edit('take(f"{at}mlp.down_proj.weight")', 'take(f"{at}mlp.down_proj.weight").T'),
        # tensors with a known ending are let through
        Edit("    if left:\n", '    if any(not name.endswith((".weight", ".bias")) for name in left):\n'),
    ],
    "whose": [
        Edit("torch.equal(saved[source], numbers)", "saved[source].shape == numbers.shape", told="Equal shapes"),
        Edit(
            "torch.equal(saved[source], numbers)",
            "saved[source].shape == numbers.shape and torch.isclose(saved[source].sum(), numbers.sum())",
            told="Sums and norms",
        ),
        Edit(
            "torch.equal(saved[source], numbers)",
            "saved[source].shape == numbers.shape and torch.allclose(saved[source], numbers)",
            told="Near is not",
        ),
        Edit("torch.equal(saved[source], numbers)", "torch.isclose(saved[source].norm(), numbers.norm())"),
        Edit("name if name in sources else sources[0]", "sources[0]", told="its own comes first"),
        Edit("else None", "else name", told="belongs to no parameter"),
        Edit("name if name in sources else sources[0]", "sources[-1]"),
        Edit("return found", "return {source: name for name, source in found.items()}", told="other way round"),
        Edit(
            "return found",
            "return {name: None if name == source else source for name, source in found.items()}",
            told="its own name",
        ),
        Edit(
            "torch.equal(saved[source], numbers)",
            "sorted(saved[source].flatten().tolist()) == sorted(numbers.flatten().tolist())",
        ),
        Edit("torch.equal(saved[source], numbers)", "torch.equal(saved[source].flatten(), numbers.flatten())"),
        Edit("torch.equal(saved[source], numbers)", "saved[source].flatten()[0] == numbers.flatten()[0]"),
        Edit(
            "sources = [source for source in saved if torch.equal(saved[source], numbers)]",
            "sources = [source for source in saved if (saved[source] == numbers).all()]",
        ),
        Edit("return found", "return list(found.values())"),
    ],
    "by_name": [
        Edit(
            "{number: table[name] for number, name in enumerate(names) if name in table}",
            "{number: state[number] for number in range(len(names)) if number in state}",
            told="by position",
        ),
        Edit("enumerate(names) if name in table}", "enumerate(n for n in names if n in table)}", told="do not move up"),
        Edit(
            "if lost := [name for name in table if name not in names]",
            "if lost := []",
            told="dropped without a message",
        ),
        Edit(
            "{saved_names[number]: one",
            "{sorted(saved_names)[number]: one",
            ("enumerate(names)", "enumerate(sorted(names))"),
            told="Sorting the names",
        ),
        Edit("saved_names[number]: one", "names[number]: one", ("enumerate(names)", "enumerate(saved_names)")),
        Edit(
            "{number: table[name] for number, name in enumerate(names) if name in table}",
            "table",
            told="keys are places",
        ),
        Edit("raise ValueError(", "print("),
        Edit(
            "if lost := [name for name in table if name not in names]",
            "if lost := [name for name in saved_names if name not in names]",
        ),
        Edit(
            "if lost := [name for name in table if name not in names]",
            "if lost := [name for name in names if name not in table]",
        ),
        Edit(
            "if lost := [name for name in table if name not in names]",
            "if lost := [1] * (len(names) < len(table))",
            ("', '.join(lost)", "lost"),
        ),
        Edit("enumerate(names) if name in table}", "enumerate(names)}"),
        Edit("{saved_names[number]: one for number, one in state.items()}", "dict(zip(saved_names, state.values()))"),
        Edit("number: table[name] for number", "number + 1: table[name] for number"),
        # the first that has no average yet begins with one of zeros
        Edit(
            "{number: table[name] for number, name in enumerate(names) if name in table}",
            "{number: table.get(name, {}) for number, name in enumerate(names)}",
        ),
    ],
}

RIGHT: dict[str, list[Edit]] = {
    "costs": [
        Edit("14 * parameters", "parameters * (2 + 4 + 4 + 4)"),
        Edit("math.sqrt(2 * seconds * failures)", "(2 * seconds * failures) ** 0.5"),
        Edit("every / (2 * failures)", "every / 2 / failures"),
        Edit("nbytes / (ranks * gigabytes * 1e9)", "nbytes / ranks / gigabytes / 10**9"),
    ],
    "boxes_of": [
        Edit("divmod(start, width)", "start // width, start % width"),
        Edit("[a + o, b + o]", "(a + o, b + o)"),
        Edit("    if many:", "    if many != 0:"),
        Edit("min(width, column + stop - start)", "column + min(width - column, stop - start)"),
    ],
    "load_box": [
        Edit("raise ValueError(f", 'raise ValueError("not stored" and f'),
        Edit(
            "found[row - top, first - left : last - left] = memory.load(file, start, start + last - first)",
            "found[row - top].narrow(0, first - left, last - first).copy_(" + _LOAD + ")",
        ),
        Edit("filled < found.numel()", "filled != (bottom - top) * (right - left)"),
        # rows of one region, full width, in one read
        Edit(
            "        for row in range(max(top, r0), min(bottom, r1)):\n",
            "        high, low = max(top, r0), min(bottom, r1)\n        if high < low and (first, last) == (c0, c1):\n"
            "            begin, many = at + (high - r0) * (c1 - c0), (low - high) * (c1 - c0)\n            "
            "found[high - top : low - top, first - left : last - left] = memory.load(file, begin, begin + many).view("
            "low - high, -1)\n            filled += many\n            continue\n        for row in range(high, low):\n",
        ),
    ],
    "save_checkpoint": [
        # all files first, then all fsyncs
        Edit(
            '        disk.fsync(f"{staged}/{name}")\n',
            "",
            (
                "    disk.fsync(staged)\n",
                '    for name in files:\n        disk.fsync(f"{staged}/{name}")\n    disk.fsync(staged)\n',
            ),
        ),
        Edit('f".step-{step}"', '".new"'),
        # the root is confirmed before the rename as well
        Edit("    disk.fsync(staged)\n", '    disk.fsync(staged)\n    disk.fsync("")\n'),
        # the folder is confirmed after each file
        Edit(_WRITE, _WRITE + "        disk.fsync(staged)\n"),
        Edit(_WRITE, _WRITE.replace("disk.fsync", "disk.fsync(staged)\n        disk.fsync")),
    ],
    "resume": [
        Edit("copy.deepcopy({", 'copy.deepcopy({"unused": 1, '),
        Edit(
            '"order": run.data.order',
            '"order": run.data.order.tolist()',
            ('run.data.order = state["order"]', 'run.data.order = torch.tensor(state["order"])'),
        ),
        Edit('run.data.order = state["order"]', 'run.data.order.copy_(state["order"])'),
        Edit('"dropout": torch.get_rng_state()', '"dropout": torch.default_generator.get_state()'),
    ],
    "from_hf": [
        Edit(_GROUPS, "for i in range(groups) for piece in (pieces[0][i], pieces[1][i], pieces[2][i])"),
        Edit("torch.cat([gate, up])", "torch.vstack((gate, up))"),
        Edit(".chunk(groups) for x", ".tensor_split(groups) for x"),
        Edit("left, ours = dict(theirs), {}", "left, ours = {**theirs}, {}"),
    ],
    "whose": [
        Edit(
            "torch.equal(saved[source], numbers)",
            "saved[source].shape == numbers.shape and bool((saved[source] == numbers).all())",
        ),
        Edit(
            "sources = [source for source in saved if torch.equal(saved[source], numbers)]",
            "sources = [source for source, table in saved.items() if torch.equal(numbers, table)]",
        ),
        Edit(
            "name if name in sources else sources[0] if sources else None",
            "next((source for source in (name, *sources) if source in sources), None)",
        ),
        Edit("torch.equal(saved[source], numbers)", "saved[source].tolist() == numbers.tolist()"),
    ],
    "by_name": [
        Edit("[name for name in table if name not in names]", "sorted(set(table) - set(names))"),
        Edit(
            "{number: table[name] for number, name in enumerate(names) if name in table}",
            "{names.index(name): one for name, one in table.items()}",
        ),
        Edit("raise ValueError(", 'raise ValueError("lost: " + '),
        Edit(
            "{saved_names[number]: one for number, one in state.items()}",
            "{name: state[i] for i, name in enumerate(saved_names) if i in state}",
        ),
    ],
}

EQUIVALENT: dict[str, list[Same]] = {}

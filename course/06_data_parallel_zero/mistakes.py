"""Lab 06: the solution with small mistakes, and with small changes that leave it right (`labkit/answers`)."""

from __future__ import annotations

from labkit.answers import Edit, Same

_GATHER = "dist.all_gather_into_tensor(self.weights, self.own.clone(), group=self.group)"
_SCATTER = "dist.reduce_scatter_tensor(self.shards[n], whole, group=self.group, async_op=True)"
_ALL_REDUCED = """dist.all_reduce(whole, group=self.group, async_op=True)
        self.shards[n] = whole.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]"""

WRONG: dict[str, list[Edit]] = {
    "bytes_held": [
        Edit("stage >= 2", "stage >= 1", ("stage >= 3", "stage >= 1"), told="shares out one more"),
        Edit("stage >= 1", "stage == 1", told="A higher stage keeps"),
        Edit("stage >= 3", "stage >= 4", told="In stage 3 the weights"),
        Edit(
            "stage >= 2",
            "stage >= 1",
            ("optimizer / (ranks if stage >= 1", "optimizer / (ranks if stage >= 2"),
            told="the largest of the three",
        ),
        Edit(
            "stage >= 1",
            "stage >= 2",
            ("gradient / (ranks if stage >= 2", "gradient / (ranks if stage >= 3"),
            ("weight / (ranks if stage >= 3", "weight / (ranks if stage >= 4"),
            told="Off by one stage",
        ),
        Edit("parameters * optimizer", "parameters * 12"),
        Edit(
            "optimizer / (ranks if stage >= 1 else 1)",
            "optimizer if stage < 1 else parameters // ranks * optimizer",
            ("gradient / (ranks if stage >= 2 else 1)", "gradient if stage < 2 else parameters // ranks * gradient"),
            ("weight / (ranks if stage >= 3 else 1)", "weight if stage < 3 else parameters // ranks * weight"),
            told="Do not round",
        ),
        Edit("parameters * gradient", "parameters * weight"),
    ],
    "bytes_sent": [
        Edit("return 2 * share * gradients", "return share * gradients", told="count both"),
        Edit("(ranks - 1) / ranks", "1", told="keeps its own part"),
        Edit(
            "microbatches * gradients + weights",
            "gradients + weights",
            ("share * microbatches *", "share *"),
            told="sends its own",
        ),
        Edit("(1 if kept else 2)", "2", told="no second gather"),
        Edit("(1 if kept else 2)", "1", told="you count one"),
        Edit("(1 if kept else 2)", "(2 if kept else 1)", told="the other way round | you count one"),
        Edit("microbatches * gradients + weights", "gradients + weights", told="sends its own"),
        Edit("microbatches * gradients + weights", "microbatches * (gradients + weights)", told="gathered once a step"),
        Edit(
            "share * (gradients + weights)",
            "share * gradients",
            ("gradients + weights)", "gradients)"),
            told="of its own shard only",
        ),
        Edit(
            "return 2 * share * gradients",
            "return 2 * share * gradients * microbatches",
            ("share * (gradients + weights)", "share * microbatches * (gradients + weights)"),
            told="send once a step",
        ),
    ],
    "lay_out": [
        Edit(
            "reversed(range(len(numels)))",
            "range(len(numels))",
            ("or i == 0", "or i == len(numels) - 1"),
            told="begins with the *last*",
        ),
        Edit("stop = -(-stop // ranks) * ranks", "stop = stop", told="no padding"),
        Edit(
            "stop = -(-stop // ranks) * ranks",
            "stop = stop if i == 0 else -(-stop // ranks) * ranks",
            told="last bucket is not padded",
        ),
        Edit("stop - start >= bucket_size", "stop - start > bucket_size", told="is full"),
        Edit('"places": places', '"places": places[::-1]', told="order of `numels`"),
        Edit("stop = -(-stop // ranks) * ranks", "stop = (stop // ranks + 1) * ranks"),
        Edit("stop = -(-stop // ranks) * ranks", "stop = stop // ranks * ranks"),
        Edit(
            "        stop += numels[i]\n",
            "        stop += -(-numels[i] // ranks) * ranks\n",
            told="not each parameter | *after*",
        ),
        Edit(" or i == 0", ""),
    ],
    "my_pieces": [
        Edit(
            "max(places[i], low), min(places[i] + numels[i], low + share)",
            "places[i], places[i] + numels[i] * (low <= places[i] < low + share)",
            told="several ranks",
        ),
        Edit("first - places[i], last - places[i]", "first, last", told="own elements"),
        Edit("n, first - low", "n, first", told="this rank's shard"),
        Edit("n, first - low", "n, first - start", told="of the bucket"),
        Edit("last - places[i], n", "last - first, n", told="not how long"),
        Edit("reversed(range(len(numels)))", "range(len(numels))"),
        Edit("return found", "return sorted(found)", told="order of the buffer"),
        Edit("start + rank * share", "start + (ranks - 1 - rank) * share", told="another rank's"),
        Edit("if first < last:", "if first < last and first == places[i]:", told="the rest is yours | several ranks"),
        Edit("first < last", "first <= last"),
    ],
    "reduce_early": [
        Edit(_SCATTER, _ALL_REDUCED.replace("dist.all_reduce", "dist.all_reduce"), told="calls all_reduce"),
        Edit("async_op=True)\n", "async_op=True)\n        work.wait()\n", told="as soon as that has left"),
        Edit("if len(self.travelling) > 1:", "if False:", told="holds"),
        Edit("        p.grad = None\n", "", told="whole gradients"),
        Edit("        if self.missing[n] == 0:\n            self.send(n)\n", "", told="has not left when"),
        Edit("if self.missing[n] == 0", "if self.missing[n] == 0 and n + 1 < len(self.buckets)"),
        Edit("return shards", "return [s / dist.get_world_size(self.group) for s in shards]", told="do not average"),
        Edit("group=self.group, async_op", "async_op"),
        Edit("        work.wait()\n", "", told="never waits for its reduce_scatter"),
        # gradients stay on their parameters until a bucket is full
        Edit(
            "        self.open(n)[at : at + p.numel()] = p.grad.flatten()\n        p.grad = None\n",
            "        self.kept.setdefault(n, []).append((at, p))\n",
            (
                "        whole = self.open(n)\n",
                "        whole = self.open(n)\n        for at, p in self.kept.pop(n, []):\n"
                "            whole[at : at + p.numel()] = p.grad.flatten()\n            p.grad = None\n",
            ),
            ("        self.begin()\n\n", "        self.kept = {}\n        self.begin()\n\n"),
            told="holds",
        ),
        Edit("        self.begin()\n        return shards", "        return shards"),
        Edit(
            "            if n not in self.shards:\n                self.send(n)\n",
            "            if n not in self.shards and n in self.whole:\n                self.send(n)\n",
        ),
        Edit("        del self.whole[n]\n", "", told="holds"),
        Edit("[at : at + p.numel()] = p.grad", "[: p.numel()] = p.grad"),
        Edit("self.example.new_zeros", "torch.zeros"),
        Edit("p.grad.flatten()", "p.grad.view(-1)"),
        Edit("dist.get_world_size(self.group)", "dist.get_world_size()"),
        Edit("if self.missing[n] == 0:", "if all(m == 0 for m in self.missing):", told="has not left when"),
    ],
    "sharded_adamw": [
        Edit(
            "torch.zeros_like(self.own), torch.zeros_like(self.own)",
            "torch.zeros_like(weights), torch.zeros_like(weights)",
            (
                "self.m.lerp_",
                "m, v = (x.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)] "
                "for x in (self.m, self.v))\n        m.lerp_",
            ),
            ("self.v.lerp_", "v.lerp_"),
            ("(self.v /", "(v /"),
            ("self.lr * self.m /", "self.lr * m /"),
            told="keeps",
        ),
        Edit(_GATHER, "pass", told="still old"),
        Edit(
            _GATHER,
            "whole = torch.empty_like(self.weights)\n        "
            "dist.all_gather_into_tensor(whole, self.own.clone(), group=self.group)\n        self.weights = whole",
            told="is not in `weights`",
        ),
        Edit(" / (1 - b2**self.t)", "", (" / (1 - b1**self.t)", ""), told="begin at 0"),
        Edit("        self.t += 1\n", "        self.t = 1\n", told="stays 1"),
        Edit("for start, stop in self.decay:", "for start, stop in [(0, len(self.own))]:", told="must not"),
        Edit("self.own[start:stop] *= 1 - self.lr * self.weight_decay", "pass", told="Nothing decays"),
        Edit(
            "self.own[start:stop] *= 1 - self.lr * self.weight_decay",
            "grad = grad.clone(); grad[start:stop] += self.weight_decay * self.own[start:stop]",
            told="its W | Nothing decays",
        ),
        Edit(".sqrt() + self.eps", ".add(self.eps).sqrt()", told="not under it"),
        # zeros elsewhere, then a sum: twice the bytes
        Edit(
            _GATHER,
            "mine = self.own.clone()\n        self.weights.zero_()\n        self.own += mine\n"
            "        dist.all_reduce(self.weights, group=self.group)",
            told="gathered, not summed",
        ),
        # plain AdamW: the gradient is gathered, and every rank updates everything
        Edit(
            "self.own = weights.chunk(dist.get_world_size(group))[dist.get_rank(group)]",
            "self.own = weights",
            (
                "        self.t += 1\n",
                "        self.t += 1\n        whole = grad.new_empty(len(self.weights))\n"
                "        dist.all_gather_into_tensor(whole, grad.contiguous(), group=self.group)\n"
                "        grad = whole\n",
            ),
            (_GATHER, "pass"),
        ),
        Edit(_GATHER, _GATHER.replace(", group=self.group", "")),
        Edit("dist.get_rank(group)]", "dist.get_rank()]"),
        Edit("grad * grad", "grad"),
    ],
    "gather_on_use": [
        Edit(
            "following = ask(i + 1)\n        x = forward(i, whole, x)",
            "x = forward(i, whole, x)\n        following = ask(i + 1)",
            told="have not been asked for",
        ),
        Edit(
            "group=group, async_op=True)\n\n    following",
            "group=group, async_op=True)\n\n    following",
            (
                "return whole, dist.all_gather_into_tensor(whole, shards[i], group=group, async_op=True)",
                "work = dist.all_gather_into_tensor(whole, shards[i], group=group, async_op=True)\n"
                "        work.wait()\n        return whole, work",
            ),
            told="nothing is hidden",
        ),
        # an FSDP that is DDP: weights stay
        Edit(
            "following = ask(0)",
            "here = {}\n    following = ask(0)",
            ("x = forward(i, whole, x)", "here[i] = whole\n        x = forward(i, whole, x)"),
            (
                "        if i < units - 1:  # the last unit's weights "
                "are still here\n            whole, work = following\n            work.wait()\n"
                "        following = ask(i - 1)\n",
                "        whole = here[i]\n",
            ),
            told="gathers",
        ),
        # gathered again, but never let go of
        Edit(
            "following = ask(0)",
            "here = []\n    following = ask(0)",
            ("x = forward(i, whole, x)", "here.append(whole)\n        x = forward(i, whole, x)"),
            told="still alive",
        ),
        # everything at once
        Edit(
            "following = ask(0)",
            "every = [ask(i) for i in range(units)]\n    following = every[0]",
            ("following = ask(i + 1)", "following = every[i + 1] if i + 1 < units else None"),
            told="one is enough",
        ),
        Edit(
            "leaving = dist.reduce_scatter_tensor(gradients[i], gradient, group=group, async_op=True), gradient",
            "leaving = dist.all_reduce(gradient, group=group, async_op=True), gradient\n        gradients[i] = "
            "gradient.chunk(ranks)[dist.get_rank(group)]",
            told="calls all_reduce",
        ),
        Edit(
            "        if leaving:\n            leaving[0].wait()\n",
            "",
            ("async_op=True), gradient", "async_op=True), gradient\n        leaving[0].wait()"),
            told="nothing is hidden",
        ),
        Edit(
            "following = ask(i - 1)\n        dy, gradient = backward(i, whole, dy)",
            "dy, gradient = backward(i, whole, dy)\n        following = ask(i - 1)",
            told="have not been asked for",
        ),
        Edit("return y, gradients", "return y, gradients[::-1]", told="the order in which they came"),
        Edit("return y, gradients", "return y, [g / ranks for g in gradients]", told="do not average"),
        Edit(
            "dist.reduce_scatter_tensor(gradients[i], gradient, group=group, async_op=True), gradient",
            "dist.reduce_scatter_tensor(gradients[i], gradient, async_op=True), gradient",
        ),
        Edit("shards[i], group=group, async_op", "shards[i], async_op"),
        # gradients leave when all are there
        Edit(
            "        if leaving:\n            leaving[0].wait()\n"
            "        leaving = dist.reduce_scatter_tensor(gradients[i], "
            "gradient, group=group, async_op=True), gradient\n",
            "        leaving = [*(leaving or []), gradient]\n",
            (
                "    leaving[0].wait()\n",
                "    for shard, whole in zip(gradients, leaving[::-1]):\n        "
                "dist.reduce_scatter_tensor(shard, whole, group=group)\n",
            ),
            told="has not left",
        ),
    ],
    "suspects": [
        Edit(
            "(right * right).sum()",
            "(mine * mine).sum()",
            ("mine - factor * right", "right - factor * mine"),
            told="got over want",
        ),
        Edit("(mine * right).sum() / (right * right).sum()", "mine.norm() / right.norm()"),
        Edit(
            "padded = torch.cat([want, want.new_zeros(sum(sizes) - len(want))])",
            "padded = want",
            ("padded.split(sizes)", "padded.chunk(len(got))"),
        ),
        Edit("else math.nan", "else 0.0"),
        Edit("proportional = (mine - factor * right).norm() <= 1e-3 * (factor * right).norm()", "proportional = True"),
        Edit("factor.item() if proportional", "factor.item() if proportional and factor > 0", told="may be 0"),
        Edit("1e-3 * (factor * right).norm()", "1e-3 * right.norm()"),
    ],
    "clip": [
        Edit("    dist.all_reduce(square, group=group)\n", "", told="its own shards"),
        Edit(
            "    dist.all_reduce(square, group=group)\n    norm = square.sqrt()",
            "    norm = square.sqrt()\n    dist.all_reduce(norm, group=group)",
            told="do not add up",
        ),
        Edit(
            "dist.all_reduce(square, group=group)",
            "dist.all_reduce(square, group=group)\n    square /= dist.get_world_size(group)",
            told="an average",
        ),
        Edit(
            "dist.all_reduce(square, group=group)",
            "dist.all_reduce(square, dist.ReduceOp.MAX, group=group)",
            told="largest norm",
        ),
        Edit("square.sqrt()", "square", told="square of the norm"),
        Edit(".clamp(max=1.0)", "", told="never makes it longer"),
        Edit("(max_norm / (norm + 1e-6)).clamp(max=1.0)", "max_norm / norm", told="never makes it longer"),
        Edit("    return norm", "    return norm.clamp(max=max_norm)", told="the norm after clipping"),
        Edit(
            "    dist.all_reduce(square, group=group)\n",
            "",
            (
                "square = torch.stack([shard.square().sum() for shard in shards]).sum()",
                "squares = [shard.square().sum() for shard in shards]\n    for one in squares:\n"
                "        dist.all_reduce(one, group=group)\n    square = torch.stack(squares).sum()",
            ),
            told="sum them over the ranks once",
        ),
        Edit("shard *= (max_norm / (norm + 1e-6)).clamp(max=1.0)", "pass", told="not scaled"),
        Edit("group=group", "group=None"),
        Edit("shard *= ", "shard = shard * ", told="not scaled"),
        Edit("for shard in shards])", "for shard in shards[:1]])"),
        # all gradients of all ranks on each
        Edit(
            "dist.all_reduce(square, group=group)",
            "every = [None] * dist.get_world_size(group)\n    "
            "dist.all_gather_object(every, list(shards), group=group)\n    "
            "square = sum(s.square().sum() for of in every for s in of)",
        ),
    ],
    "answers": [
        Edit(
            "for stage in range(4) if held[stage] <= room), -1)",
            "for stage in range(4) if held[stage] <= room), -2) + 1",
            told="from 0",
        ),
        Edit("held[stage] <= room", "held[stage] < room", told="What just fits, fits"),
        Edit("gigabytes * 1e9", "gigabytes * 2**30", told="not 2³⁰"),
        Edit("3 * microbatches / 2", "float(microbatches)", told="you count one gather"),
        Edit("3 * microbatches / 2", "(microbatches + 2) / 2", told="that is not twice a step"),
        Edit(
            "2 * parameters / (ranks // machines)",
            "2 * parameters / machines",
            ("2 * (machines - 1) / machines", "2 * (ranks // machines - 1) / (ranks // machines)"),
            told="have changed places",
        ),
        Edit("math.ceil(12", "math.floor(12", told="round up"),
        Edit("12 * parameters / left", "16 * parameters / room", told="12 of the 16"),
        Edit("(microbatches + 1) / 2", "float(microbatches)", told="only one grows"),
        Edit("(microbatches + 1) / 2", "1.0", ("3 * microbatches / 2", "1.5"), told="one microbatch"),
        Edit("shard = 2 * parameters / (ranks // machines)", "shard = 2 * parameters", told="not the whole gradient"),
        Edit("shard = 2 *", "shard =", told="2 of 2 bytes | of 2 bytes a gradient"),
        Edit("(ranks // machines)", "ranks", told="not over all ranks | of 2 bytes"),
        Edit("if left > 0 else 0", "if left > 0 else -1"),
        Edit("3 * microbatches / 2", "1.5 * (microbatches + 1)"),
        Edit(
            '("optim_grads", "SHARD_GRAD_OP")', '("optim_grads",)', ('"FULL_SHARD",', '"FULL_SHARD", "SHARD_GRAD_OP",')
        ),
    ],
}

RIGHT: dict[str, list[Edit]] = {
    "bytes_held": [
        Edit("parameters * weight / (ranks if stage >= 3 else 1)", "parameters * weight / ranks ** (stage > 2)"),
        Edit("(ranks if stage >= 2 else 1)", "[1, 1, ranks, ranks][stage]"),
        Edit("(ranks if stage >= 1 else 1)", "(ranks if stage else 1)"),
    ],
    "bytes_sent": [
        Edit("(ranks - 1) / ranks", "1 - 1 / ranks"),
        Edit("(1 if kept else 2) * weights", "weights + (not kept) * weights"),
        Edit(
            "    if stage == 1:\n        return share * (gradients + weights)\n    if stage == 2:",
            "    if stage == 1:\n        microbatches = 1\n    if stage in (1, 2):",
        ),
    ],
    "lay_out": [
        Edit("stop = -(-stop // ranks) * ranks", "stop += -stop % ranks"),
        Edit("buckets.append([start, stop])", "buckets.append((start, stop))"),
        Edit("reversed(range(len(numels)))", "range(len(numels) - 1, -1, -1)"),
    ],
    "my_pieces": [
        Edit(
            "found.append((i, first - places[i], last - places[i], n, first - low))",
            "found.append([i, first - places[i], last - places[i], n, first - low])",
        ),
        Edit("reversed(range(len(numels)))", "sorted(range(len(numels)), key=places.__getitem__)"),
        Edit("if first < last:", "if last - first > 0:"),
    ],
    "reduce_early": [
        # waits for the one before, then sends
        Edit(
            "        whole = self.open(n)\n",
            "        if self.travelling:\n            self.let_go()\n        whole = self.open(n)\n",
            ("        if len(self.travelling) > 1:\n            self.let_go()\n", ""),
        ),
        # lists of tensors
        Edit(
            _SCATTER,
            "dist.reduce_scatter(self.shards[n], list(whole.chunk(dist.get_world_size(self.group))), "
            "group=self.group, async_op=True)",
        ),
        Edit("[at : at + p.numel()] = p.grad.flatten()", "[at : at + p.numel()].view(p.shape).copy_(p.grad)"),
    ],
    "sharded_adamw": [
        Edit(
            _GATHER,
            "dist.all_gather(list(self.weights.chunk(dist.get_world_size(self.group))), self.own.clone(), "
            "group=self.group)",
        ),
        Edit(
            "self.m.lerp_(grad, 1 - b1)",
            "self.m.mul_(b1).add_(grad, alpha=1 - b1)",
            ("self.v.lerp_(grad * grad, 1 - b2)", "self.v.mul_(b2).addcmul_(grad, grad, value=1 - b2)"),
        ),
        Edit(_GATHER, "dist.all_gather_into_tensor(self.weights, self.own, group=self.group)"),
    ],
    "gather_on_use": [
        # the last unit's weights are gathered again
        Edit(
            "        if i < units - 1:  # the last unit's weights are still here\n            whole, work = following\n"
            "            work.wait()\n",
            "        whole, work = following\n        work.wait()\n",
            (
                "    y, dy = x, gradient_of(x)\n",
                "    y, dy = x, gradient_of(x)\n    del whole\n    following = ask(units - 1)\n",
            ),
        ),
        Edit("        following = ask(i - 1)\n", "        following = ask(i - 1) if i else None\n"),
        Edit(
            "return whole, dist.all_gather_into_tensor(whole, shards[i], group=group, async_op=True)",
            "return whole, dist.all_gather(list(whole.chunk(ranks)), shards[i], group=group, async_op=True)",
        ),
    ],
    "suspects": [
        Edit("(mine * right).sum() / (right * right).sum()", "torch.dot(mine, right) / right.norm() ** 2"),
        Edit("padded.split(sizes)", "padded.tensor_split([sum(sizes[:i]) for i in range(1, len(sizes))])"),
        Edit(
            "torch.cat([want, want.new_zeros(sum(sizes) - len(want))])",
            "torch.nn.functional.pad(want, (0, sum(sizes) - len(want)))",
        ),
    ],
    "clip": [
        Edit(
            "torch.stack([shard.square().sum() for shard in shards]).sum()",
            "sum((shard * shard).sum() for shard in shards)",
        ),
        Edit(
            "shard *= (max_norm / (norm + 1e-6)).clamp(max=1.0)",
            "shard.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1))",
        ),
        Edit("    return norm", "    return norm.item()"),
    ],
    "answers": [
        Edit("(microbatches + 1) / 2", "0.5 + microbatches / 2"),
        Edit("math.ceil(12 * parameters / left)", "-int(-12 * parameters // left)"),
        Edit("2 * (machines - 1) / machines * shard", "2 * (shard - shard / machines)"),
    ],
}

_WHOLE = "a bucket divides by the number of ranks, and ranks by machines"
_SMALL = "a fraction of a byte, of billions"

EQUIVALENT: dict[str, list[Same]] = {
    "lay_out": [
        Same("line 3: -1 for 0", "every place is written"),
        Same("line 3: 1 for 0", "every place is written"),
    ],
    "my_pieces": [
        Same("line 7: `/` for `//`", _WHOLE),
        Same("line 7: rounded up for down", _WHOLE),
    ],
    "reduce_early": [
        Same("line 13: -1 for 0", "every parameter has the dtype of the others"),
        Same("line 13: 1 for 0", "every parameter has the dtype of the others"),
        Same("line 40: rounded up for down", _WHOLE),
    ],
    "sharded_adamw": [
        Same("line 27: `.clone()` dropped", "a gather may read the part of its output that it fills"),
    ],
    "clip": [
        Same("line 11: 2e-06 for 1e-06", "it keeps a norm of 0 from dividing, and either does"),
        Same("line 11: `1e-06` dropped", "a norm of 0 gives infinity, which the clamp makes 1"),
    ],
    "answers": [
        Same("line 11: `//` for `/`", _SMALL),
        Same("line 11: `/` for `//`", _WHOLE),
        Same("line 11: rounded up for down", _WHOLE),
        Same("line 21: 1 for 0 (2)", _SMALL),
    ],
}

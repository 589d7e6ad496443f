from labkit.answers import Edit

_SENT = "            if kind in sent:\n                sent[kind][1].wait()\n"
_AHEAD = "        if at + 1 < len(todo):\n            post(at + 1)\n"
_OUT = "        out = stages[c].forward(i, x) if kind == \"F\" else stages[c].backward(i, x)\n"
_W = "        if kind == \"B\" and (\"W\", i, c) not in todo:\n            stages[c].weights(i)\n"
_END = "    for _, departure in sent.values():\n        departure.wait()\n"
_ARRIVAL = "        if arrival is not None:\n            arrival.wait()\n"

WRONG = [
    Edit(_ARRIVAL, "", ("        if kind == \"W\":", "        work = arrival\n        if kind == \"W\":"), (_END, _END + "    if work:\n        work.wait()\n"), told="deadlock | never waits"),
    Edit(_ARRIVAL, "", told="A send is over when its receiver has posted"),
    Edit("    post(0)\n", "", (_AHEAD, "        post(at)\n"), told="post for the next word before you compute this one"),
    Edit(_AHEAD, "", (_OUT, _OUT + _AHEAD), told="only after it has begun | no input"),
    Edit(_SENT, "", ("sent[kind] = out", "sent[at] = out"), told="it can wait for an earlier send"),
    Edit("    post(0)\n", "    for at in range(len(todo)):\n        post(at)\n", (_AHEAD, ""), told="One word ahead is enough"),
    Edit(_W, "", told="`weights` was never called for"),
    Edit("            if kind in sent:\n                sent[kind][1].wait()\n            sent[kind] = out, ", "            sent[kind] = out, ", told="never waits for its send"),
    Edit(_END, "", told="never waits for its send"),
    Edit("dist.isend(out, (rank + (1 if kind == \"F\" else -1)) % p)", "dist.isend(out, (rank + (1 if kind == \"F\" else -1)) % p)\n            sent[kind][1].wait()", told="A send is over when its receiver has posted"),
    Edit("(\"F\", 0), (\"B\", last)", "(\"F\", 0), (\"B\", p - 1)", ("(\"F\", last), (\"B\", 0)", "(\"F\", p - 1), (\"B\", 0)"), told="no input | deadlock"),
    Edit("(\"F\", last), (\"B\", 0)", "(\"F\", p - 1), (\"B\", 0)", told="where no rank sends the message"),
    Edit("x = torch.empty_like(like)", "x = like", told="rank"),
    Edit("x = torch.empty_like(like)", "x = torch.empty(like.shape)", told="with inputs of float64: rank"),
    Edit(" % p)\n\n", ")\n\n", told="no rank | ring"),
    Edit("(1 if kind == \"F\" else -1)) % p)", "(1 if kind == \"F\" else -1)))", told="ring"),
    Edit("kind == \"B\" and (\"W\", i, c) not in todo", "kind == \"B\"", told="KeyError | is done where | W"),
    Edit("-1 if kind == \"F\" else 1", "1 if kind == \"F\" else -1", told="rank"),
    Edit("stages[c].backward(i, x)", "stages[0].backward(i, x)", told="is done where"),
    Edit("kind == \"W\":", "kind == \"X\":", told="rank"),
]

RIGHT = [
    Edit("if kind in sent:", "if sent.get(kind):"),
]

EQUIVALENT = []


# %% right: the sends of activations are waited for when their gradient is there, those of gradients at the next B
import torch
import torch.distributed as dist
def execute(words, stages, like):
    r, p, v = dist.get_rank(), dist.get_world_size(), len(stages)
    words = [w if "." in w else w + ".0" for w in words]
    def other(w, comes):
        k, s = w[0], int(w.split(".")[1]) * p + r
        if k == "W": return None
        step = (-1 if comes else 1) * (1 if k == "F" else -1)
        return (s + step) % p if 0 <= s + step < p * v else None
    def post(w):
        source = other(w, True)
        if source is None: return None
        buffer = torch.empty(like.shape, dtype=like.dtype)
        return buffer, dist.irecv(buffer, src=source)
    queue = [post(words[0])]
    out_f, out_b = {}, []
    for n, w in enumerate(words):
        if n + 1 < len(words):
            queue.append(post(words[n + 1]))
        got = queue.pop(0)
        x = None
        if got:
            got[1].wait()
            x = got[0]
        got = None
        stage, i, key = stages[int(w.split(".")[1])], int(w[1:].split(".")[0]), w[1:]
        if w[0] == "F":
            y = stage.forward(i, x)
            if (to := other(w, False)) is not None:
                out_f[key] = y, dist.isend(y, dst=to)
        elif w[0] == "B":
            if key in out_f:
                out_f.pop(key)[1].wait()
            dx = stage.backward(i, x)
            while out_b:
                out_b.pop()[1].wait()
            if (to := other(w, False)) is not None:
                out_b.append((dx, dist.isend(dx, dst=to)))
            if "W" + key not in words:
                stage.weights(i)
        else:
            stage.weights(i)
        y = dx = x = None
    while out_b:
        out_b.pop()[1].wait()
    for one in out_f.values():
        one[1].wait()


# %% right: a generator of steps, batch_isend_irecv for each message, at most two sends under way
import re
import torch
import torch.distributed as dist
from collections import deque
def execute(words, stages, like):
    p, rank = dist.get_world_size(), dist.get_rank()
    parsed = [re.fullmatch(r"([FBW])(\d+)(?:\.(\d+))?", w).groups() for w in words]
    parsed = [(k, int(i), int(c or 0)) for k, i, c in parsed]
    splits = {(i, c) for k, i, c in parsed if k == "W"}
    ends = {"F": (0, p * len(stages) - 1), "B": (p * len(stages) - 1, 0)}
    way = {"F": 1, "B": -1}
    def receive(k, i, c):
        if k == "W" or c * p + rank == ends[k][0]:
            return None
        x = torch.zeros_like(like)
        return x, dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, (rank - way[k]) % p)])
    sends, coming = deque(), deque([receive(*parsed[0])])
    for k, i, c in parsed:
        at = parsed.index((k, i, c))
        coming.append(receive(*parsed[at + 1]) if at + 1 < len(parsed) else None)
        now = coming.popleft()
        x = None
        if now is not None:
            for work in now[1]:
                work.wait()
            x = now[0]
        if k == "W":
            stages[c].weights(i)
            continue
        y = (stages[c].forward if k == "F" else stages[c].backward)(i, x)
        if c * p + rank != ends[k][1]:
            if len(sends) == 2:
                for work in sends.popleft()[1]:
                    work.wait()
            sends.append((y, dist.batch_isend_irecv([dist.P2POp(dist.isend, y, (rank + way[k]) % p)])))
        if k == "B" and (i, c) not in splits:
            stages[c].weights(i)
    while sends:
        for work in sends.popleft()[1]:
            work.wait()


# %% right: messages have tags, as gloo allows
import torch
import torch.distributed as dist
def execute(words, stages, like):
    rank, p = dist.get_rank(), dist.get_world_size()
    n = p * len(stages)
    steps = [(w[0], int(w[1:].split(".")[0]), int((w + ".0").split(".")[1])) for w in words]
    tag = lambda kind, i, stage: 2 * (i * n + stage) + (kind == "B")
    def post(kind, i, c):
        s = c * p + rank
        here = s - 1 if kind == "F" else s + 1
        if kind == "W" or not 0 <= here < n:
            return None
        x = torch.empty_like(like)
        return x, dist.irecv(x, here % p, tag=tag(kind, i, s))
    ahead, pending = post(*steps[0]), []
    for k, (kind, i, c) in enumerate(steps):
        mine, ahead = ahead, post(*steps[k + 1]) if k + 1 < len(steps) else None
        if mine:
            mine[1].wait()
        x = mine[0] if mine else None
        if kind == "W":
            stages[c].weights(i)
            continue
        y = getattr(stages[c], {"F": "forward", "B": "backward"}[kind])(i, x)
        there = c * p + rank + (1 if kind == "F" else -1)
        if 0 <= there < n:
            if len(pending) > 1:
                pending.pop(0)[1].wait()
            pending.append((y, dist.isend(y, there % p, tag=tag(kind, i, there))))
        if kind == "B" and ("W", i, c) not in steps:
            stages[c].weights(i)
    for _, work in pending:
        work.wait()


# %% wrong: one buffer for all
# mistake: All messages are received into one buffer, while a stage still needs what came before.
import torch
import torch.distributed as dist


def execute(words, stages, like):
    rank, p = dist.get_rank(), dist.get_world_size()
    todo = [(word[0], *map(int, f"{word[1:]}.0".split(".")[:2])) for word in words]
    last = p * len(stages) - 1
    posted, sent, x = {}, {}, torch.empty_like(like)

    def post(at):
        kind, _, c = todo[at]
        if kind != "W" and (kind, c * p + rank) not in (("F", 0), ("B", last)):
            posted[at] = dist.irecv(x, (rank + (-1 if kind == "F" else 1)) % p)

    post(0)
    for at, (kind, i, c) in enumerate(todo):
        if at + 1 < len(todo):
            post(at + 1)
        come = posted.pop(at, None)
        if come:
            come.wait()
        if kind == "W":
            stages[c].weights(i)
            continue
        given = x if come else None
        out = stages[c].forward(i, given) if kind == "F" else stages[c].backward(i, given)
        if (kind, c * p + rank) not in (("F", last), ("B", 0)):
            if kind in sent:
                sent[kind][1].wait()
            sent[kind] = out, dist.isend(out, (rank + (1 if kind == "F" else -1)) % p)
        if kind == "B" and ("W", i, c) not in todo:
            stages[c].weights(i)
    for _, departure in sent.values():
        departure.wait()


# %% wrong: blocking
# told: or a blocking call?
import torch
import torch.distributed as dist


def execute(words, stages, like):
    rank, p = dist.get_rank(), dist.get_world_size()
    last = p * len(stages) - 1
    for word in words:
        kind, i, c = word[0], *map(int, f"{word[1:]}.0".split(".")[:2])
        x = None
        if kind != "W" and (kind, c * p + rank) not in (("F", 0), ("B", last)):
            x = torch.empty_like(like)
            dist.recv(x, (rank + (-1 if kind == "F" else 1)) % p)
        if kind == "W":
            stages[c].weights(i)
            continue
        out = stages[c].forward(i, x) if kind == "F" else stages[c].backward(i, x)
        if (kind, c * p + rank) not in (("F", last), ("B", 0)):
            dist.send(out, (rank + (1 if kind == "F" else -1)) % p)
        if kind == "B" and word.replace("B", "W") not in words:
            stages[c].weights(i)


# %% wrong: imports the package
# told: closed
from minimegatron.parallel.pipeline.plain import run
def execute(words, stages, like):
    run(words, stages)


# %% wrong: keeps every output
# told: such as an output whose send has been waited for
import torch
import torch.distributed as dist


def execute(words, stages, like):
    rank, p = dist.get_rank(), dist.get_world_size()
    todo = [(word[0], *map(int, f"{word[1:]}.0".split(".")[:2])) for word in words]
    last, ahead, sent, outs = p * len(stages) - 1, {}, {}, []

    def post(at):
        kind, _, c = todo[at]
        if kind != "W" and (kind, c * p + rank) not in (("F", 0), ("B", last)):
            x = torch.empty_like(like)
            ahead[at] = x, dist.irecv(x, (rank + (-1 if kind == "F" else 1)) % p)

    post(0)
    for at, (kind, i, c) in enumerate(todo):
        if at + 1 < len(todo):
            post(at + 1)
        x, work = ahead.pop(at, (None, None))
        if work:
            work.wait()
        if kind == "W":
            stages[c].weights(i)
            continue
        out = stages[c].forward(i, x) if kind == "F" else stages[c].backward(i, x)
        outs.append(out)
        if (kind, c * p + rank) not in (("F", last), ("B", 0)):
            if kind in sent:
                sent[kind].wait()
            sent[kind] = dist.isend(out, (rank + (1 if kind == "F" else -1)) % p)
        if kind == "B" and ("W", i, c) not in todo:
            stages[c].weights(i)
    for work in sent.values():
        work.wait()

from labkit.answers import Edit, Same

_RUN = '.step-{step}.{run}"'
_READY, _HEAR = '        store.set(ready, "")\n', "        hear(ready, here)\n"
_DONE = "    store.set(done[rank], hashlib.sha256(data).hexdigest())\n"
_SAFE = '    disk.fsync(f"{staged}/shard-{rank}")\n'
_WRITE = '    disk.write(f"{staged}/shard-{rank}", data)\n'
_END = "        store.set(end, json.dumps(missing))\n"
_WAIT = "            store.wait(done, seconds)\n"
_NAMES, _ROOT = "            disk.fsync(staged)\n", '            disk.fsync("")\n'
_RENAME = '            disk.rename(staged, f"step-{step}")\n'
_MANIFEST = '            disk.fsync(f"{staged}/manifest")\n'
_MAKE = "        disk.mkdir(staged)\n"
_HEARD = "        missing = json.loads(hear(end, done))\n"
_MISSING = "missing = [r for r in range(ranks) if not store.check([done[r]])]"
_CLEAR = """        for left in disk.names():
            if left.startswith("."):
                for name in disk.names(left):
                    disk.remove(f"{left}/{name}")
                disk.remove(left)
"""
_SAID = 'raise TimeoutError(f"step {step} is not saved; missing: {missing}")'

WRONG = [
    # who may go when
    Edit(_HEARD, "        missing = []\n", told="has returned, and a power cut may leave"),
    Edit(_WAIT, "            store.wait(done[:1], seconds)\n", (_MISSING, "missing = []")),
    Edit(_WAIT, "            store.wait(done, 0.01)\n", told="ends in TimeoutError"),
    # a key that nobody sets: the save is right, and every time as late as the deadline
    Edit("for r in range(ranks)]\n\n", "for r in range(ranks + 1)]\n\n", told="s of waiting"),
    Edit(_WAIT, f'{_WAIT}            store.wait(["never"], seconds)\n', told="s of waiting"),
    Edit(_DONE, "", (_SAFE, f"{_DONE}{_SAFE}"), told="a power cut may leave step-"),
    Edit(_END, "", (_NAMES, f"    {_END}{_NAMES}"), told="has returned, and a power cut may leave"),
    Edit(_ROOT, f"    {_END}{_ROOT}", told="has returned, and a power cut may leave"),
    # what the disk forgets
    Edit(_SAFE, "", told="a power cut may leave step-"),
    Edit(_MANIFEST, "", told="in its file manifest"),
    Edit(_NAMES, "", told="without"),
    Edit(_ROOT, "", told="has returned, and a power cut may leave no step-"),
    # in place
    Edit(f'f"{_RUN}', 'f"step-{step}"', (_RENAME, ""), told="a power cut may leave step-"),
    # who is missing
    Edit("3 * seconds", "seconds", told="says missing: [0, 1]; it is rank 1"),
    Edit("3 * seconds", "1e9", told="is still there after"),
    Edit(_WAIT, "            store.wait(done, 1e9)\n", told="says missing: [0, 1]"),
    Edit(_SAID, 'raise TimeoutError(f"step {step} is not saved")', told="expected: TimeoutError, missing"),
    Edit(_SAID, 'raise RuntimeError(f"missing: {missing}")', told="expected: TimeoutError, missing"),
    Edit(_END, f"        if missing:\n            {_SAID}\n{_END}", told="says missing: [0, 1]; it is rank 1"),
    Edit("    if missing:\n", "    if missing and rank == 0:\n", told="has returned, and a power cut may leave no step-"),
    Edit(_MISSING, f"{_MISSING}[:1]", told="they are ranks"),
    Edit("r == 0 or not store.check([words[r]])", "r == 0", told="they are ranks 0, "),
    Edit("for r in range(ranks) if r == 0", "for r in range(ranks - 1) if r == 0", told="they are ranks 0, 3"),
    Edit("hear(ready, here)", "hear(ready, done)", told="says missing: [0, 1, 2, 3]"),
    # leftovers: of a dead run, of an earlier save, of a run that is not dead
    Edit(_CLEAR, "", told="is still there"),
    Edit(f'f"{_RUN}', 'f".step-{step}"', told="of a run that has failed goes on"),
    Edit(_CLEAR, "", (f'f"{_RUN}', 'f".step-{step}"'), (_MAKE, f"        if staged not in disk.names():\n    {_MAKE}"),
         told="with other bytes in its file shard-"),
    Edit('f"{step}/{r}"', 'f"{r}"', told="hashes of two saves: that of shard-0 is of step"),
    Edit('f"{step}/{r}"', 'f"{r}"', ('f"{step}/ready", f"{step}/end"', '"ready", "end"')),
    Edit('f"{step}/ready", f"{step}/end"', 'f"{step}/ready", "end"', told="two saves, one after the other"),
    # a race, a poll, another manifest
    Edit(
        f"{_MAKE}{_READY}    else:\n{_HEAR}",
        "    if staged not in disk.names():\n        disk.mkdir(staged)\n",
    ),
    Edit(f"{_MAKE}{_READY}", f"{_READY}{_MAKE}", told="ends in FileNotFoundError"),
    Edit(_WAIT, "            while not store.check(done):\n                pass\n", told="wait for a key with a deadline"),
    Edit("hashlib.sha256(data).hexdigest()", "str(len(data))", told="its SHA-256"),
]

_PATIENCE = "rank 0 waits one `seconds` for the others; whoever waits clearly longer for rank 0 hears it"
EQUIVALENT = [
    Same("line 8: range's `ranks` + 1", "the key of a rank that is not there is never asked for"),
    Same("line 14: 2 for 3", _PATIENCE),
    Same("line 14: 4 for 3", _PATIENCE),
]

RIGHT = [
    # the last rank decides
    Edit(
        "if rank == 0:", "if rank == ranks - 1:", ("r == 0 or", "r == ranks - 1 or"),
    ),
    # each shard under a name of its own first, names confirmed by each rank
    Edit(_WRITE + _SAFE, _WRITE.replace("shard-", "new-") + _SAFE.replace("shard-", "new-")
         + '    disk.rename(f"{staged}/new-{rank}", f"{staged}/shard-{rank}")\n    disk.fsync(staged)\n'),
    # one rank after the other is waited for
    Edit(_WAIT, "            for key in done:\n                store.wait([key], seconds / 2 + seconds / ranks)\n"),
]


# %% right: the decider tells the folder's name; everybody finds out alone who has not confirmed
import hashlib
import json


def remove_hidden(disk):
    for folder in [name for name in disk.names("") if name[0] == "."]:
        for name in disk.names(folder):
            disk.remove(folder + "/" + name)
        disk.remove(folder)


def save_shard(disk, store, rank, ranks, run, step, data, seconds):
    def key(word, of=0):
        return f"{run}-{step}-{word}-{of}"

    def there(word, of=0, patience=4.0):
        try:
            store.wait([key(word, of)], patience * seconds)
            return True
        except TimeoutError:
            return False

    def gone(word):
        return [0, *(r for r in range(1, ranks) if not store.check([key(word, r)]))]

    store.set(key("hello", rank), "")
    if rank == 0:
        remove_hidden(disk)
        folder = "." + run + "-of-step-" + str(step)
        disk.mkdir(folder)
        store.set(key("folder"), folder)
    elif not there("folder"):
        raise TimeoutError(f"no folder; missing: {gone('hello')}")
    folder = store.get(key("folder"))
    if not store.check([key("verdict")]):
        disk.write(f"{folder}/shard-{rank}", data)
        disk.fsync(f"{folder}/shard-{rank}")
        store.set(key("safe", rank), hashlib.sha256(data).hexdigest())
    if rank:
        if not there("verdict"):
            raise TimeoutError(f"no verdict; missing: {gone('safe')}")
        if store.get(key("verdict")) != "saved":
            raise TimeoutError(store.get(key("verdict")))
        return
    left = seconds
    try:
        store.wait([key("safe", r) for r in range(ranks)], left)
    except TimeoutError:
        lost = [r for r in range(ranks) if not store.check([key("safe", r)])]
        if lost:
            remove_hidden(disk)
            store.set(key("verdict"), f"missing: {lost}")
            raise TimeoutError(f"missing: {lost}")
    disk.write(folder + "/manifest", json.dumps(
        {f"shard-{r}": store.get(key("safe", r)) for r in reversed(range(ranks))}, indent=1).encode())
    disk.fsync(folder + "/manifest")
    disk.fsync(folder)
    disk.rename(folder, "step-" + str(step))
    disk.fsync("")
    store.set(key("verdict"), "saved")


# %% wrong: every rank decides alone
# told: rank
import hashlib
import json


def save_shard(disk, store, rank, ranks, run, step, data, seconds):
    folder = f".{run}-{step}"
    if rank == 0:
        for left in disk.names():
            if left[0] == ".":
                for name in disk.names(left):
                    disk.remove(f"{left}/{name}")
                disk.remove(left)
        disk.mkdir(folder)
        store.set(f"{step} made", "")
    store.wait([f"{step} made"], seconds)
    disk.write(f"{folder}/shard-{rank}", data)
    disk.fsync(f"{folder}/shard-{rank}")
    store.set(f"{step} {rank}", hashlib.sha256(data).hexdigest())
    for r in range(ranks):
        try:
            store.wait([f"{step} {r}"], seconds)
        except TimeoutError:
            raise TimeoutError(f"missing: {[r]}")
    if rank == 0:
        table = {f"shard-{r}": store.get(f"{step} {r}") for r in range(ranks)}
        disk.write(f"{folder}/manifest", json.dumps(table).encode())
        disk.fsync(f"{folder}/manifest")
        disk.fsync(folder)
        disk.rename(folder, f"step-{step}")
        disk.fsync("")


# %% right: a roll call before the first change
import hashlib
import json


def save_shard(disk, store, rank, ranks, run, step, data, seconds):
    k = lambda *a: "/".join(map(str, (run, step, *a)))
    tmp = "." + run.replace("/", "_") + f"-{step}"
    def wait(keys, t):
        try:
            store.wait(keys, t)
        except TimeoutError:
            return False
        return True
    # everybody says hello
    store.set(k("here", rank), "1")
    here = [k("here", r) for r in range(ranks)]
    if rank == 0:
        wait(here, 1.2 * seconds)
        absent = [r for r in range(ranks) if not store.check([here[r]])]
        if not absent:
            for n in disk.names(""):
                if n.startswith("."):
                    for f in disk.names(n):
                        disk.remove(f"{n}/{f}")
                    disk.remove(n)
            disk.mkdir(tmp)
        store.set(k("start"), json.dumps(absent))
    elif not wait([k("start")], 2.5 * seconds):
        raise TimeoutError(f"missing: {sorted({0, *(r for r in range(ranks) if not store.check([here[r]]))})}")
    absent = json.loads(store.get(k("start")))
    if absent:
        raise TimeoutError(f"missing: {absent}")
    disk.write(f"{tmp}/shard-{rank}", data)
    disk.fsync(f"{tmp}/shard-{rank}")
    store.set(k("sha", rank), hashlib.sha256(data).hexdigest())
    sha = [k("sha", r) for r in range(ranks)]
    if rank == 0:
        if not wait(sha, seconds):
            absent = [r for r in range(ranks) if not store.check([sha[r]])]
            store.set(k("end"), json.dumps(absent))
            raise TimeoutError(f"missing: {absent}")
        disk.write(f"{tmp}/manifest", json.dumps({f"shard-{r}": store.get(sha[r]) for r in range(ranks)}).encode())
        disk.fsync(f"{tmp}/manifest")
        disk.fsync(tmp)
        disk.rename(tmp, f"step-{step}")
        disk.fsync("")
        store.set(k("end"), "[]")
    else:
        if not wait([k("end")], 2 * seconds):
            raise TimeoutError("missing: [0]")
        absent = json.loads(store.get(k("end")))
        if absent:
            raise TimeoutError(f"missing: {absent}")

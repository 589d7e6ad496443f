from labkit.answers import Edit

_COPY = """        for name, tensor in state.items():
            if name not in self.staged:
                place = tensor.data_ptr()  # a tied output layer is the embedding's memory, under a second name
                if place not in self.places:
                    self.places[place] = torch.empty_like(tensor)
                self.staged[name] = self.places[place]
            self.staged[name].copy_(tensor)
"""
_WAIT, _START = "        self.close()\n", "        self.thread.start()\n"
_RUN = "            self.write(step, self.staged)\n"
_RAISE = "        error, self.error = self.error, None\n        if error is not None:\n            raise error\n"
_JOIN = "        if self.thread is not None:\n            self.thread.join()  # no deadline: `write` has its own\n"
_CLOSED = f"{_JOIN}        self.check()\n"

WRONG = [
    # no snapshot, or one that is none
    Edit(_COPY, "        self.staged = state\n", told="the weights of"),
    Edit(_COPY, "        self.staged = dict(state)\n", told="the weights of"),
    Edit(_COPY, "        self.staged = {name: tensor.detach() for name, tensor in state.items()}\n", told="the weights of"),
    Edit(
        _COPY, "        self.state = state\n",
        (_RUN, "            self.write(step, {name: tensor.clone() for name, tensor in self.state.items()})\n"), told="the weights of",
    ),
    # the run itself writes, or waits for the thread
    Edit(_START, "        self.thread.run()\n", told="the run itself writes | cannot join"),
    Edit(_START, f"{_START}        self.thread.join()\n", told="save returns only when"),
    # saves pile up, or are left out
    Edit(_WAIT, "", told="the weights of step 20"),
    Edit(_WAIT, "        if self.thread is not None and self.thread.is_alive():\n            return\n", told="when close has returned, step 20 is written 0 times"),
    Edit(
        _WAIT + _COPY, "        before = self.thread\n        staged = {name: tensor.clone() for name, tensor in state.items()}\n",
        ("args=(step,)", "args=(step, staged, before)"), ("def _run(self, step)", "def _run(self, step, staged, before)"),
        (_RUN, "            if before is not None:\n                before.join()\n            self.write(step, staged)\n"),
        told="copies pile up",
    ),
    # the last one
    Edit(_CLOSED, "        self.check()\n", (_WAIT, _JOIN), told="when close has returned, step 10 is written 0 times"),
    Edit("        if self.thread is not None:\n            self.thread.join()", "        self.thread.join()", (_WAIT, "        if self.thread:\n            self.close()\n"), told="close raises AttributeError"),
    # errors
    Edit("        except Exception as error:\n            self.error = error\n", "        finally:\n            pass\n", told="does not raise its error"),
    Edit("            self.error = error\n", "            pass\n", told="does not raise its error"),
    Edit("error, self.error = self.error, None", "error = self.error", told="raised twice"),
    Edit(_CLOSED, _JOIN, told="close does not raise its error | save does not raise its error"),
    Edit(_RAISE, f"{_JOIN}{_RAISE}", told="check waits"),
    Edit(_RAISE, "        pass\n", told="does not raise its error"),
    Edit("raise error", 'raise RuntimeError("a save has failed")', told="expected its OSError"),
    Edit(_WAIT, _WAIT.replace("close()", "wait()"), (_START, f"{_START}        self.check()\n"),
         (_CLOSED, "        self.wait()\n        self.check()\n\n    def wait(self):\n" + _JOIN), told="writes step 20 all the same"),
    # two copies
    Edit(_COPY, "        self.staged = {name: tensor.clone() for name, tensor in state.items()}\n", told="one copy of the state, with a quarter to spare, is"),
    # a copy for each name
    Edit("place not in self.places", "True", told="one copy of the state, with a quarter to spare, is"),
    Edit("place = tensor.data_ptr()", "place = id(tensor)", told="are one memory under two names"),
    Edit(_COPY, "        self.staged = {}\n        self.staged = {name: tensor.clone() for name, tensor in state.items()}\n",
         told="are one memory under two names"),
]

RIGHT = [
    # the old copy goes before the new one is made
    Edit(_COPY, "        self.staged = {}\n        once = {tensor.data_ptr(): tensor.clone() for tensor in {t.data_ptr(): t for t in state.values()}.values()}\n"
         "        self.staged = {name: once[tensor.data_ptr()] for name, tensor in state.items()}\n        del once\n"),
    Edit("self.thread is not None", "self.thread"),
    # deepcopy, which begins with storages
    Edit(_COPY, "        self.staged = None\n        self.staged = __import__(\"copy\").deepcopy(state)\n"),
]


# %% right: an executor of one thread
from concurrent.futures import ThreadPoolExecutor

import torch


class AsyncSaver:
    def __init__(self, write):
        self.write, self.pool, self.future, self.copy = write, ThreadPoolExecutor(1), None, None

    def save(self, step, state):
        self.close()
        if self.copy is None:
            first = {}
            for name, tensor in state.items():
                first.setdefault((tensor.data_ptr(), tensor.shape), name)
            self.of = {name: first[tensor.data_ptr(), tensor.shape] for name, tensor in state.items()}
            own = {name: state[name].clone() for name in first.values()}
            self.copy = {name: own[of] for name, of in self.of.items()}
        else:
            for name in set(self.of.values()):
                self.copy[name][...] = state[name]
        self.future = self.pool.submit(self.write, step, self.copy)

    def check(self):
        if self.future is not None and self.future.done():
            self.close()

    def close(self):
        future, self.future = self.future, None
        if future is not None:
            future.result()


# %% right: one worker for all saves, a queue of one
import queue
import threading

import torch


class AsyncSaver:
    def __init__(self, write):
        self.write, self.jobs, self.errors = write, queue.Queue(1), []
        self.flat = None
        threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        while True:
            step, parts = self.jobs.get()
            try:
                self.write(step, {name: self.flat[at : at + shape.numel()].view(shape) for name, (at, shape) in parts.items()})
            except Exception as error:
                self.errors.append(error)
            self.jobs.task_done()

    def save(self, step, state):
        self.jobs.join()
        self.check()
        places, total = {}, 0
        for tensor in state.values():
            if tensor.data_ptr() not in places:
                places[tensor.data_ptr()] = total
                total += tensor.numel()
        if self.flat is None:
            self.flat = torch.empty(total)
        parts = {name: (places[tensor.data_ptr()], tensor.shape) for name, tensor in state.items()}
        for name, (at, shape) in parts.items():
            self.flat[at : at + shape.numel()] = state[name].flatten()
        self.jobs.put((step, parts))

    def check(self):
        if self.errors:
            raise self.errors.pop()

    def close(self):
        self.jobs.join()
        self.check()

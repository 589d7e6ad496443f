from labkit.answers import Edit

_COPY = """        for name, tensor in state.items():
            if name not in self.staged:
                self.staged[name] = torch.empty_like(tensor)
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
    Edit(_COPY, "        self.staged = {name: tensor.clone() for name, tensor in state.items()}\n", told="one copy of the state is"),
]

RIGHT = [
    # the old copy goes before the new one is made
    Edit(_COPY, "        self.staged = {}\n        self.staged = {name: tensor.clone() for name, tensor in state.items()}\n"),
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
            self.copy = {name: tensor.clone() for name, tensor in state.items()}
        else:
            for name in state:
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
            step, shapes = self.jobs.get()
            try:
                pieces = self.flat.split([shape.numel() for shape in shapes.values()])
                self.write(step, {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces)})
            except Exception as error:
                self.errors.append(error)
            self.jobs.task_done()

    def save(self, step, state):
        self.jobs.join()
        self.check()
        if self.flat is None:
            self.flat = torch.empty(sum(tensor.numel() for tensor in state.values()))
        at = 0
        for tensor in state.values():
            self.flat[at : at + tensor.numel()] = tensor.flatten()
            at += tensor.numel()
        self.jobs.put((step, {name: tensor.shape for name, tensor in state.items()}))

    def check(self):
        if self.errors:
            raise self.errors.pop()

    def close(self):
        self.jobs.join()
        self.check()

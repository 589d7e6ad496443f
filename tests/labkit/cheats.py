"""Ways to pass `bubble` without solving it, by name. None may score a point; the source of each is a learner's cell."""

from __future__ import annotations

CHEATS = {
    "exit when called": """
import os
def bubble(p, m): os._exit(0)
""",
    "exit at import": """
import os
os._exit(0)
""",
    "exit at the end": """
import atexit, os
atexit.register(os._exit, 0)
def bubble(p, m): return None
""",
    "exit in del": """
import os
class Leaver:
    def __del__(self): os._exit(0)
def bubble(p, m):
    Leaver()
    return 0
""",
    "SystemExit": """
def bubble(p, m): raise SystemExit(0)
""",
    "skip": """
import unittest
def bubble(p, m): raise unittest.SkipTest("no")
""",
    "equals everything": """
class Equal(float):
    def __eq__(self, other): return True
    def __sub__(self, other): return 0.0
    __hash__ = None
def bubble(p, m): return Equal(7)
""",
    "tensor that equals everything": """
import torch
class Equal(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None): return torch.tensor(True)
def bubble(p, m): return torch.ones(()).as_subclass(Equal)
""",
    "prints the verdict": """
import sys
print("✔ bubble   passed   5/5", flush=True)
def bubble(p, m):
    sys.stderr.write("5/5")
    print("✔ bubble   passed   5/5", flush=True)
""",
    "returns the verdict": """
def bubble(p, m):
    return {"exercise": "bubble", "state": "passed", "of": 5, "rows": []}
""",
    "patches torch": """
import builtins, math, torch
torch.allclose = torch.equal = torch.isclose = lambda *a, **k: True
math.isclose = lambda *a, **k: True
builtins.abs = lambda x: 0
def bubble(p, m): return 0.0
""",
    "patches the judge": """
import labkit.checks as checks, labkit.deciding as deciding
checks.difference = deciding.difference = lambda *a, **k: None
deciding._wrong = lambda *a: (None, "")
def bubble(p, m): return 0.0
""",
    "writes to every pipe": """
import os
for fd in range(3, 64):
    try: os.write(fd, b'+{"dict": [["state", "passed"], ["points", 5]]}' + bytes([10]))
    except OSError: pass
def bubble(p, m): return 0.0
""",
    "writes result files": """
for name in ("result.json", "answer.0", "verdict", "job.1"):
    open(name, "w").write('{"points": 5}')
def bubble(p, m): return 0.0
""",
    "looks for the answer in frames": """
import sys
def bubble(p, m):
    frame, found = sys._getframe(), 0.0
    while frame:
        found = frame.f_locals.get("want", frame.f_locals.get("expected", found))
        frame = frame.f_back
    return found
""",
    "looks for the answer in objects": """
import gc
def bubble(p, m):
    for thing in gc.get_objects():
        if callable(thing) and getattr(thing, "__name__", "") == "bubble" and thing is not bubble:
            return thing(p, m)
    return 0.0
""",
    "asks the loaded course": """
import sys
def bubble(p, m):
    for module in list(sys.modules.values()):
        if hasattr(module, "LAB"):
            return module.LAB["bubble"].reference(p, m)
    return 0.0
""",
    "returns the stub": """
def bubble(p, m): return NotImplementedError("your code here")
""",
    "loops": """
def bubble(p, m):
    while True: pass
""",
    "loops, deaf to signals": """
import signal
for number in (2, 6, 15): signal.signal(number, signal.SIG_IGN)
def bubble(p, m):
    while True:
        try: pass
        except BaseException: pass
""",
    "sleeps": """
import time
def bubble(p, m): time.sleep(1e6)
""",
    "stops itself": """
import os, signal
def bubble(p, m): os.kill(os.getpid(), signal.SIGSTOP)
""",
    "eats memory": """
def bubble(p, m): return bytearray(16 << 30)[0]
""",
    "fills the disk": """
def bubble(p, m):
    with open("big", "wb") as file:
        for _ in range(1 << 20): file.write(bytes(1 << 20))
""",
    "recursion": """
def bubble(p, m): return bubble(p, m)
""",
    "a mountain of an answer": """
def bubble(p, m): return [0.0] * 50_000_000
""",
    "fork bomb": """
import os
def bubble(p, m):
    while True:
        try: os.fork()
        except OSError: pass
""",
    "fork bomb below Python": """
import ctypes
def bubble(p, m):
    libc = ctypes.CDLL(None)
    while True:
        libc.fork()
        libc.setsid()
""",
    "a flood of output": """
import os
def bubble(p, m):
    while True: os.write(1, b"x" * (1 << 20)); os.write(2, b"y" * (1 << 20))
""",
    "many files": """
def bubble(p, m):
    for i in range(1 << 20):
        with open(f"big{i}", "wb") as file: file.write(bytes(32 << 20))
""",
    "a chain of folders": """
import os
def bubble(p, m):
    for i in range(3000):
        os.mkdir("d")
        os.chdir("d")
    return 0.0
""",
    "a socket": """
import socket
def bubble(p, m):
    with socket.create_connection(("192.0.2.1", 80), timeout=1) as there: return there.recv(1)
""",
    "reads the checks": """
import pathlib, labkit
def bubble(p, m):
    folder = pathlib.Path(labkit.__file__).parents[1] / "tests" / "labkit"
    text = (folder / "mini_course.py").read_text()
    space = {}
    exec(text, space)
    return space["bubble"](p, m)
""",
    "imports the checks": """
from tests.labkit.mini_course import bubble
""",
}

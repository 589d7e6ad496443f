"""Progress bars that start no process.

tqdm's own lock is one between processes. Where `multiprocessing` does not fork by default, which is so from Python 3.14
on, such a lock starts a process that keeps account of it, and lives as long as this one and all that it has forked.
Bars here are drawn by one process, so a lock between threads is enough.
"""

from __future__ import annotations

import threading

import tqdm as library


class tqdm(library.tqdm):
    """tqdm's bar with a lock between the threads of this process."""

    _lock = threading.RLock()

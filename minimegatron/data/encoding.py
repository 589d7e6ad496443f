"""Lines to token ids, by workers, in order.

Each worker tokenises a batch of lines; results come in the order in which the batches were handed out. At most two
batches a worker are under way, so memory is bounded whatever the file's size, and the result does not depend on the
number of workers. Every wait ends: a worker that dies is an error, one that takes ten minutes for a batch too, and
workers whose parent is killed end by themselves.
"""

from __future__ import annotations

import collections
import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np

from minimegatron.data.jsonl import Line, parse_document
from minimegatron.data.tokenizer import Tokenizer, build_tokenizer
from minimegatron.errors import DataError, DeadlineError, RankError
from minimegatron.launch import procs

WORKER_DEADLINE_S = 600.0
PATIENCE_S = 10.0  # with workers whose results are not wanted any more


class Encoding(NamedTuple):
    """How a line becomes ids; sent to the workers.

    Attributes:
        tokenizer: arguments of `build_tokenizer`, as pairs.
        keys: JSON keys whose text is tokenised.
        append_eod: end each document with the end-of-document id.
    """

    tokenizer: tuple[tuple[str, Any], ...]
    keys: tuple[str, ...]
    append_eod: bool


class Encoded(NamedTuple):
    """One line's result: ids and sentence lengths of each key, or the error.

    `spelled` counts the special tokens that its texts contain as letters, `twice` the texts that begin with two bos:
    the tokenizer's, and one of the text's own.
    """

    line: int
    documents: list[tuple[np.ndarray, list[int]]]
    error: str
    spelled: Mapping[str, int] = {}
    twice: int = 0


def encode_line(line: Line, tokenizer: Tokenizer, encoding: Encoding) -> Encoded:
    """Ids of one line; a line that cannot be used gives its error instead."""
    if line.data is None:
        return Encoded(line.number, [], "the line is longer than --max-line-mb allows")
    try:
        texts = parse_document(line.data, encoding.keys)
        documents = [_encode_document(texts[key], tokenizer, encoding.append_eod) for key in encoding.keys]
    except DataError as error:
        return Encoded(line.number, [], error.what)
    spelled: dict[str, int] = {}
    for text in (text for key in encoding.keys for text in texts[key]):
        for token, count in tokenizer.spelled(text).items():
            spelled[token] = spelled.get(token, 0) + count
    twice = sum(tokenizer.bos is not None and list(ids[:2]) == 2 * [tokenizer.bos] for ids, _ in documents)
    return Encoded(line.number, documents, "", spelled, twice)


def _encode_document(texts: list[str], tokenizer: Tokenizer, append_eod: bool) -> tuple[np.ndarray, list[int]]:
    sentences = [ids for ids in map(tokenizer.tokenize, texts) if ids]
    if sentences and append_eod:
        sentences[-1].append(tokenizer.eod)
    ids = sentences[0] if len(sentences) == 1 else [i for ids in sentences for i in ids]
    return np.array(ids, dtype=np.int64), [len(ids) for ids in sentences]


class Encoder:
    """Workers that turn batches of lines into ids; a context manager.

    Args:
        encoding: how lines become ids.
        workers: processes; 1 works in this one, and so does a machine without shared memory, with a warning.

    Raises:
        ConfigError: arguments of the tokenizer that are not possible.
    """

    def __init__(self, encoding: Encoding, workers: int = 1) -> None:
        self.encoding, self.workers = encoding, workers
        self.tokenizer = _without_places(encoding.tokenizer)
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Encoder:
        if self.workers > 1:
            # "spawn": this process may have threads (torch, a notebook), and a fork would copy their locks.
            context = multiprocessing.get_context("spawn")
            try:
                self._pool = ProcessPoolExecutor(self.workers, context, initializer=_start_worker)
            except OSError as error:  # semaphores live in shared memory
                what = f"{self.workers} workers cannot be started ({error}), so one process does all of the work"
                warnings.warn(f"{what}; for more, give this machine a writable /dev/shm with space", stacklevel=2)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if self._pool is None:
            return
        # A worker that is killed while it writes a result leaves half of it in the pipe, and the pool waits for the
        # other half for ever. So those whose results are not wanted finish their batch, unless one is known to hang.
        workers = list((self._pool._processes or {}).values())
        patience = 0.0 if kind is not None and issubclass(kind, DeadlineError) else PATIENCE_S
        killer = threading.Timer(patience, _kill, [workers])
        if kind is not None:
            killer.start()
        self._pool.shutdown(wait=True, cancel_futures=True)
        killer.cancel()

    def encode(self, batches: Iterable[list[Line]]) -> Iterator[Encoded]:
        """One result a line, in the order of the lines.

        Raises:
            RankError: a worker died. DeadlineError: one took longer than ten minutes for a batch.
        """
        if self._pool is None:
            for batch in batches:
                for line in batch:
                    yield encode_line(line, self.tokenizer, self.encoding)
            return
        waiting: collections.deque[tuple[int, Future[list[Encoded]]]] = collections.deque()
        try:
            for batch in batches:
                waiting.append((batch[0].number, self._pool.submit(_encode_batch, batch, self.encoding)))
                if len(waiting) >= 2 * self.workers:
                    yield from _result(*waiting.popleft())
            while waiting:
                yield from _result(*waiting.popleft())
        except BrokenProcessPool as error:
            raise RankError(
                "a worker that tokenises lines died",
                fix="if memory ran out: fewer --workers, a smaller --max-line-mb; a script that calls this needs "
                'the guard `if __name__ == "__main__":`',
            ) from error


def _result(line: int, future: Future[list[Encoded]]) -> list[Encoded]:
    try:
        return future.result(timeout=WORKER_DEADLINE_S)
    except TimeoutError as error:
        raise DeadlineError(
            f"the lines from {line} on were not tokenised in {WORKER_DEADLINE_S:g} s",
            fix="fewer --workers than cores, or look for a huge document there",
        ) from error


def _kill(workers: Iterable[multiprocessing.Process]) -> None:
    for worker in workers:
        worker.kill()


def _start_worker() -> None:
    """Ignore Ctrl-C, which the parent handles, and end when the parent ends, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _encode_batch(batch: list[Line], encoding: Encoding) -> list[Encoded]:
    tokenizer = _worker_tokenizer(encoding.tokenizer)
    return [encode_line(line, tokenizer, encoding) for line in batch]


@functools.cache
def _worker_tokenizer(arguments: tuple[tuple[str, Any], ...]) -> Tokenizer:
    """The tokenizer of a worker process, which lives as long as one call of `preprocess`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the parent has warned already
        return _without_places(arguments)


def _without_places(arguments: tuple[tuple[str, Any], ...]) -> Tokenizer:
    """A tokenizer that notes no places of ids in the text, which nobody reads here: a quarter less work.

    What does so asks for threads, for one text in vain, and a process that has had them warns when it forks; so these
    are forbidden in this process.
    """
    tokenizer = build_tokenizer(**dict(arguments))
    if hasattr(tokenizer, "places"):
        procs.no_tokenizer_threads()
        tokenizer.places = False
    return tokenizer

"""One engine for many connections: requests come from an event loop, the engine runs in a thread.

The problem in a sentence: a step of the engine blocks for milliseconds to seconds, and meanwhile a hundred connections
must be read and written, and noticed when they close.

    event loop:  submit -> inbox ............ Stream.queue -> response
    thread:                  inbox -> step -> detokenize, stop strings -> Stream.queue, one message a step

The thread alone begins, finishes, times out and aborts requests, between two steps and in the order of the inbox. So a
request whose client disconnects costs at most the current step, and its pages are free in the next one.

| failure                           | effect                                                                      |
|-----------------------------------|-----------------------------------------------------------------------------|
| too many open answers             | `Full` from `submit`, which counts them; nothing is queued                  |
| a request takes too long          | `DeadlineError` in its stream; its pages are freed                          |
| NaN or infinite logits            | `NumericsError` in that stream alone                                        |
| a grammar exceeds parser limits   | `DataError` in that stream alone                                            |
| a step raises, on one rank        | the error in every open stream; later requests are served                   |
| a step raises, on several ranks   | the same, and the thread ends (`failure`): the other ranks are mid-step     |

**Idle ranks.** Ranks in `Engine.follow` wait for rank 0 with a deadline, so an idle rank 0 sends an empty batch every
`HEARTBEAT_SECONDS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence

from minimegatron.errors import DataError, DeadlineError, MinimegatronError, NumericsError, RankError
from minimegatron.inference.detokenizer import Detokenizer, StopStrings
from minimegatron.inference.engine import Engine
from minimegatron.inference.sequence import FinishReason, Output, Ranked, Request, check_request
from minimegatron.inference.sequence import Sequence as Answer

HEARTBEAT_SECONDS = 5.0


class Full(MinimegatronError):
    """Too many answers are open; `retry_after` in seconds."""

    retry_after = 1


class ShuttingDown(MinimegatronError):
    """The server shuts down before the request is answered."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a step added to one answer.

    Attributes:
        index: which of the request's n answers.
        text: new final text; the last piece includes what the detokenizer held back.
        tokens: new ids; log_probs, top: of each, where asked for.
        reason: "stop" or "length" at the end; None before.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    top: tuple[Ranked, ...]
    reason: str | None


class Stream:
    """A request's pieces on their way from the thread to the event loop.

    Attributes:
        queue: pieces; an error ends it early.
        request: the engine's request.
        answer: sequence of answer 0, which has the prompt's log-probabilities once there is a piece.
        cached_tokens: prompt tokens found in the prefix cache.
        made: tokens of all answers so far.
        submitted: time of `submit`, by `time.monotonic`.
        open: False after `EngineThread.leave`.
    """

    def __init__(self, request: Request, request_id: str, stops: Sequence[str], keep_stop: bool) -> None:
        self.request, self.request_id, self.stops, self.keep_stop = request, request_id, tuple(stops), keep_stop
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self.answer: Answer | None = None
        self.cached_tokens = self.made = 0
        self.submitted = time.monotonic()
        self.open = True

    async def next(self, seconds: float) -> Piece:
        """Wait for the next piece, at most so many seconds.

        Raises:
            MinimegatronError: the error that ended the request.
            DeadlineError: nothing came in time: the engine is stuck in a step.
        """
        try:
            item = await asyncio.wait_for(self.queue.get(), seconds)  # no deadline: wait_for has it
        except TimeoutError:
            raise DeadlineError(f"no token for {seconds:.0f} s: a step of the engine does not end") from None
        if isinstance(item, Exception):
            raise item
        return item


@dataclasses.dataclass
class _Active:
    stream: Stream
    texts: list[tuple[Detokenizer, StopStrings]]
    last: list[float | None]
    left: int
    first: float | None = None


class EngineThread:
    """An engine in its own thread. `submit` and `leave` are called in the event loop.

    Args:
        engine: of rank 0; only this thread steps it.
        decode: ids -> text.
        max_queue: most open answers beyond `max_num_seqs`.
        request_seconds: longest duration of a request.
        observe: called in the thread with each event, see `serving/metrics`.

    Attributes:
        capacity: most open answers.
        failures: number of steps in a row that raised.
        failure: the error that ended the thread; None while it runs, and after `close`.
    """

    def __init__(
        self,
        engine: Engine,
        decode: Callable[[Sequence[int]], str],
        *,
        max_queue: int = 256,
        request_seconds: float = 600.0,
        observe: Callable[..., None] = lambda *_: None,
    ) -> None:
        self.engine, self.decode, self.observe = engine, decode, observe
        self.request_seconds = request_seconds
        self.capacity = engine.scheduler.max_num_seqs + max_queue
        self.failures = 0
        self.failure: BaseException | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._active: dict[str, _Active] = {}  # in order of arrival: the first has the first deadline
        self._open = 0  # open answers, counted in the event loop
        self._requests = 0
        self._seconds = 1.0  # moving average of a request's duration
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether a request would be served."""
        return self._thread.is_alive() and self.failure is None and self.failures < 3

    @property
    def idle(self) -> bool:
        """Whether no request is open."""
        return self._open == 0

    def submit(self, request: Request, stops: Sequence[str] = (), keep_stop: bool = False) -> Stream:
        """Queue a request. The caller has to call `leave` for its stream in any case.

        Args:
            request: the engine's request.
            stops: stop strings.
            keep_stop: include the stop string in the text.

        Raises:
            DataError, ConfigError: it could never be computed.
            Full: too many answers are open.
            RankError: the thread has ended.
        """
        if self.failure is not None:
            raise RankError(
                f"the engine has ended: {self.failure}", fix="start the server again; its log has the cause"
            )
        request_id = f"request {self._requests}"
        check_request(request, "the request", self.engine.model.config.vocab_size)
        self.engine.scheduler.check(request, "the request")
        if self._open + request.n > self.capacity:
            error = Full(f"{self._open} answers are open, of at most {self.capacity}", fix="ask again later")
            error.retry_after = min(60, max(1, math.ceil(self._seconds)))
            raise error
        self._requests += 1
        self._open += request.n
        stream = Stream(request, request_id, stops, keep_stop)
        self._inbox.put(lambda: self._begin(stream))
        return stream

    def leave(self, stream: Stream) -> None:
        """Close a stream, and abort its request if it is not finished. A second call has no effect."""
        if stream.open:
            stream.open = False
            self._open -= stream.request.n
            self._seconds += 0.1 * (time.monotonic() - stream.submitted - self._seconds)
            self._inbox.put(lambda: self._abort(stream.request_id))

    def end(self) -> None:
        """Let the thread end after its current step; open streams get `ShuttingDown`."""
        self._inbox.put(None)

    def close(self, seconds: float = 10.0) -> None:
        """`end`, and wait for the thread at most so many seconds.

        Raises:
            DeadlineError: it is stuck in a step.
        """
        self.end()
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise DeadlineError(f"the engine has not ended a step in {seconds:.0f} s")

    # ------------------------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        engine = self.engine
        try:
            if (device := engine.runner.cache.device).type == "cuda":
                import torch

                torch.cuda.set_device(device)  # the current device is a thread's own
            while self._read_inbox():
                self._end_overdue()
                if not engine.has_work:
                    continue
                try:
                    self._hand_out(engine.step())
                    self.failures = 0
                except Exception as error:  # ends the open requests; on one rank later ones are served
                    self.failures += 1
                    self._fail_all(error)
                    if not engine.runner.alone:
                        raise
        except BaseException as error:
            self.failure = error
            self._fail_all(error)
        else:
            self._fail_all(ShuttingDown("the server is shutting down", fix="ask another server, or this one later"))
            engine.stop()

    def _read_inbox(self) -> bool:
        """Handle the inbox; an idle engine waits for it. False after `end`."""
        while True:
            try:
                item = self._inbox.get(timeout=0 if self.engine.has_work else HEARTBEAT_SECONDS)
            except queue.Empty:
                if self.engine.has_work:
                    return True
                self.engine.heartbeat()
                continue
            if item is None:
                return False
            item()

    def _begin(self, stream: Stream) -> None:
        request, decode = stream.request, self.decode
        try:
            self.engine.add_request(request, stream.request_id)
        except MinimegatronError as error:
            _send([(stream, error)])
            return
        stream.answer = self.engine.sequences[stream.request_id][0]
        before = stream.answer.continued
        texts = [(Detokenizer(decode, before), StopStrings(stream.stops)) for _ in range(request.n)]
        self._active[stream.request_id] = _Active(stream, texts, [None] * request.n, request.n)

    def _abort(self, request_id: str, reason: str = "abort") -> None:
        if (active := self._active.pop(request_id, None)) is not None:
            self.engine.abort(request_id)
            self.observe("finished", active.stream, reason, active.first)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        while self._active:
            stream = next(iter(self._active.values())).stream
            if now - stream.submitted < self.request_seconds:
                return
            self._abort(stream.request_id)
            what = f"the request took longer than {self.request_seconds:g} s"
            _send([(stream, DeadlineError(what, fix="fewer tokens, or a server with a longer --request-timeout"))])

    def _fail_all(self, error: BaseException) -> None:
        streams = [active.stream for active in self._active.values()]
        for stream in streams:
            self._abort(stream.request_id, "error")
        told = error if isinstance(error, ShuttingDown) else RankError(f"{type(error).__name__}: {error}")
        _send([(stream, told) for stream in streams])

    def _hand_out(self, outputs: Sequence[Output]) -> None:
        now, sent = time.monotonic(), list[tuple[Stream, Piece | Exception]]()
        for output in outputs:
            active = self._active.get(output.request_id)
            if active is None:
                continue
            stream = active.stream
            if active.first is None:
                active.first = now
                assert stream.answer is not None, "it has begun"
                stream.cached_tokens = stream.answer.cached
                self.observe("first_token", stream, now - stream.submitted)
            elif (last := active.last[output.index]) is not None:
                self.observe("next_token", stream, now - last)
            active.last[output.index] = now
            stream.made += len(output.tokens)
            if output.reason is FinishReason.ERROR:
                self._abort(output.request_id, "error")
                error: MinimegatronError
                if output.failure:
                    error = DataError(f"the grammar's parser gave up: {output.failure}", fix="a simpler grammar")
                else:
                    what = "the model's logits are not finite"
                    error = NumericsError(what, fix="check the checkpoint, or a wider params_dtype")
                sent.append((stream, error))
                continue
            piece = self._piece(active, output)
            sent.append((stream, piece))
            if piece.reason is not None:
                active.left -= 1
                if not active.left:
                    del self._active[output.request_id]
                    self.observe("finished", stream, piece.reason, active.first)
        _send(sent)

    def _piece(self, active: _Active, output: Output) -> Piece:
        detokenizer, stops = active.texts[output.index]
        request, text, count, reason = active.stream.request, "", 0, output.reason
        for token in output.tokens:
            count += 1
            ends = token in request.stop_ids and reason is FinishReason.STOP and count == len(output.tokens)
            text += stops.push("" if ends else detokenizer.push(token))
            if stops.found is not None:
                break
        if reason is not None and stops.found is None:
            text += stops.push(detokenizer.flush())
            text += "" if stops.found is not None else stops.flush()
        if stops.found is not None:
            text += stops.found if active.stream.keep_stop else ""
            if reason is None:
                sequence = self.engine.sequences[output.request_id][output.index]
                self.engine.finish(sequence, FinishReason.STOP)
            reason = FinishReason.STOP
        return Piece(
            output.index,
            text,
            output.tokens[:count],
            output.log_probs[:count],
            output.top[:count],
            None if reason is None else reason.value,
        )


def _send(items: Sequence[tuple[Stream, Piece | Exception]]) -> None:
    """Put all items into their queues by one call into the event loop."""
    if items:

        def put() -> None:
            for stream, item in items:
                stream.queue.put_nowait(item)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            items[0][0].loop.call_soon_threadsafe(put)

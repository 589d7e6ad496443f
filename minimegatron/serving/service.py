"""`Service`: an HTTP request becomes requests of the engine, and their tokens become an answer.

    body -> CompletionRequest | ChatRequest -> Requests of the engine -> Streams      (checked; tokenizer; submit)
    Streams -> Choices -> one JSON body, or server-sent events                        (pieces of text; Format)

The tokenizer and the compiler of grammars work in a thread of their own, the engine in another (`engine_thread`), so
the event loop never waits for either. All requests of a body are submitted, or none; those of a client that has
disconnected are aborted.

`serving/app` has the routes, `serving/http_messages` reads bodies and writes responses.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response

from minimegatron.data.picture_messages import decoded, resized, with_room, without_pictures
from minimegatron.data.pictures import Picture
from minimegatron.data.tokenizer import HuggingFaceTokenizer
from minimegatron.errors import ConfigError, MinimegatronError, require
from minimegatron.inference.engine import Engine
from minimegatron.inference.sequence import Request as EngineRequest
from minimegatron.serving.answers import DONE, ChatFormat, Choice, CompletionFormat, Format, Tokens, event, usage_of
from minimegatron.serving.engine_thread import EngineThread, Stream
from minimegatron.serving.http_messages import Events, api_error, json_response, read_body, unless_gone
from minimegatron.serving.metrics import Metrics
from minimegatron.serving.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Defaults,
    grammar_of,
    read,
    refuse,
    sampling_of,
    seed_of,
)

T = TypeVar("T")
R = TypeVar("R")
GRACE_SECONDS = 60.0  # waited beyond a request's deadline, which the engine thread enforces


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Access and limits of a server.

    Args:
        served_model_name: the name that requests give as `model`.
        api_key: the key of `Authorization: Bearer`; None: no key is needed.
        max_queue: most open answers beyond `max_num_seqs`; above it 429.
        request_seconds: longest duration of a request.
        max_body_bytes: largest body of a request.
        drain_seconds: time for open requests after the first signal.
    """

    served_model_name: str
    api_key: str | None = None
    max_queue: int = 256
    request_seconds: float = 600.0
    max_body_bytes: int = 4 << 20
    drain_seconds: float = 10.0


class Service:
    """The handlers of all routes, over one engine.

    Args:
        engine: of rank 0.
        tokenizer: with `split_special_tokens=False`: special tokens in prompts are tokens.
        stop_ids: ids that end an answer.
        defaults: sampling parameters that a request leaves open.
        config: access and limits.

    Attributes:
        names: what requests may give as `model`: the model's name, and those of the engine's adapters.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: HuggingFaceTokenizer,
        stop_ids: Sequence[int],
        defaults: Defaults,
        config: ServerConfig,
    ) -> None:
        self.engine, self.tokenizer, self.config, self.defaults = engine, tokenizer, config, defaults
        self.stop_ids, self.tokens = frozenset(stop_ids), Tokens(tokenizer)
        self.names = (config.served_model_name, *(() if engine.adapters is None else engine.adapters.names))
        self.metrics = Metrics(engine, config.served_model_name)
        self.thread = EngineThread(
            engine,
            self.tokens.decode,
            max_queue=config.max_queue,
            request_seconds=config.request_seconds,
            observe=self.metrics.observe,
        )
        self._reader = ThreadPoolExecutor(1, "tokenizer")  # a long prompt takes a second, which must not block the loop
        self.draining = False
        self.started = int(time.time())
        blocks = engine.scheduler.blocks
        self.room = min(engine.max_model_len, blocks.capacity * blocks.page_size)

    # ------------------------------------------------------------------------------------------------ requests

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for another model than those served."""
        if name is not None and name not in self.names:
            served = f"{', '.join(map(repr, self.names))} {'is' if len(self.names) == 1 else 'are'}"
            what = f"the model {str(name)[:128]!r} is not served here; {served}"
            raise ApiError(404, what, "not_found_error", "model", "model_not_found")

    def ids_of(self, prompt: str | list[int]) -> list[int]:
        """Ids of a prompt, with the tokenizer's bos unless the text begins with it.

        Of an encoder-decoder the prompt is the source: a text with its end, ids as they are.

        Raises:
            DataError: a source has the id with which a target begins.
        """
        config = self.engine.model.config
        if isinstance(prompt, list):
            return config.prompt_of(prompt) if prompt else []
        begins = self.tokenizer.named.get("bos_token")
        add = False if begins and prompt.startswith(begins) else None
        return config.prompt_of(self.tokenizer.tokenize(prompt, add_special_tokens=add), self.tokenizer.eod)

    def chat_ids(self, body: ChatRequest) -> tuple[list[int], tuple[Picture, ...]]:
        """Ids of a conversation in the model's chat template, with room for its pictures, and these.

        Raises:
            DataError, ConfigError: a picture that cannot be read, a model that sees none, or a template without a place
                for them.
        """
        messages, urls = without_pictures([message.plain() for message in body.messages])
        ids = self.tokenizer.tokenize(self.tokenizer.apply_chat_template(messages), add_special_tokens=False)
        config = self.engine.model.config
        if not config.sees:
            require(not urls, f"{len(urls)} pictures, and the model sees none", "a vision-language model")
            return config.prompt_of(ids, self.tokenizer.eod), ()
        pictures = tuple(Picture(resized(decoded(url), config), config) for url in urls)
        room = with_room(ids, [picture.grid for picture in pictures], config)
        return [token for token, times in room for _ in range(times)], pictures

    async def _read(self, reads: Callable[[T], R], what: T, param: str) -> R:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader, reads, what)
        except MinimegatronError as error:
            raise refuse(f"`{param}`: {error.what}", param, "invalid_value") from None

    async def grammar(self, body: CompletionRequest | ChatRequest) -> str:
        """The grammar of a request, compiled and cached; "" for none.

        Raises:
            ApiError: 400, it cannot be compiled.
        """
        field = "response_format" if body.structured_outputs is None else "structured_outputs"
        try:
            found = grammar_of(body)
            if found and self.engine.grammars is not None:
                await asyncio.get_running_loop().run_in_executor(self._reader, self.engine.grammars.check, found)
            return found
        except ConfigError as error:
            raise refuse(f"`{field}`: {error.what}; {error.fix}", field, "invalid_value") from None

    def close(self) -> None:
        """End both threads.

        Raises:
            DeadlineError: the engine is stuck in a step.
        """
        self._reader.shutdown()
        self.thread.close()

    def request(
        self, body: CompletionRequest | ChatRequest, prompt: Sequence[int], max_tokens: int | None, **more: Any
    ) -> EngineRequest:
        """The engine's request for one prompt.

        Args:
            body: the HTTP request.
            prompt: ids.
            max_tokens: None: all that fit.
            more: further fields of the engine's `Request`.

        Raises:
            ApiError: 400; the message names the field.
        """
        source = "messages" if isinstance(body, ChatRequest) else "prompt"
        vocab_size, n = self.engine.model.config.vocab_size, more.get("n", 1)
        if not prompt:
            raise refuse(f"`{source}`: no token", source, "invalid_value")
        for name, ids in ((source, prompt), ("stop_token_ids", body.stop_token_ids or ())):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise refuse(f"`{name}`: {token} is not in a vocabulary of {vocab_size}", name, "invalid_value")
        if n > (seats := self.engine.scheduler.max_num_seqs):
            name = "n" if n == body.n else "best_of"
            raise refuse(f"`{name}`: {n} answers, of which this server has {seats} at once", name, "invalid_value")
        left = self.room - len(prompt)
        if max_tokens is None:
            max_tokens = left
        if left < 1 or max_tokens > left:
            what = f"this model's context is {self.room} tokens; the prompt has {len(prompt)}"
            if left > 0:
                source, what = "max_tokens", f"{what} and at most {max_tokens} new ones were asked for"
            raise refuse(what, source, "context_length_exceeded")
        if (least := body.min_tokens or 0) > max_tokens:
            raise refuse(f"`min_tokens` is {least}, and at most {max_tokens} are made", "min_tokens", "invalid_value")
        stops = frozenset(body.stop_token_ids or ()) | (frozenset() if body.ignore_eos else self.stop_ids)
        return EngineRequest(
            tuple(prompt),
            max(max_tokens, 1),
            sampling_of(body, self.defaults, vocab_size),
            stops,
            min_new_tokens=least,
            raw_log_probs=True,
            salt=body.cache_salt or "",
            adapter="" if body.model in (None, self.names[0]) else body.model,
            **more,
        )

    def submit(self, requests: Sequence[EngineRequest], body: CompletionRequest | ChatRequest) -> list[Stream]:
        """Submit all requests, or none if one is refused."""
        streams: list[Stream] = []
        try:
            for request in requests:
                streams.append(self.thread.submit(request, body.stops, bool(body.include_stop_str_in_output)))
        except Exception:
            self.leave(streams)
            raise
        return streams

    def leave(self, streams: Sequence[Stream]) -> None:
        """Abort the streams that are not finished."""
        for stream in streams:
            self.thread.leave(stream)

    # ------------------------------------------------------------------------------------------------- answers

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        body = read(CompletionRequest, await read_body(request, self.config.max_body_bytes))
        self.check_model(body.model)
        n, echo = body.n or 1, bool(body.echo)
        best_of = n if body.best_of is None else body.best_of
        if best_of < n or (body.stream and best_of > n):
            what = "it is smaller than `n`" if best_of < n else "the best is known when all are over: not with `stream`"
            raise refuse(f"`best_of`: {what}", "best_of", "invalid_value")
        max_tokens = 16 if body.max_tokens is None else body.max_tokens
        if max_tokens == 0 and not echo:
            raise refuse("`max_tokens`: 0 without `echo` asks for nothing", "max_tokens", "invalid_value")
        if (asked := len(body.prompts) * best_of) > self.thread.capacity:
            what = f"`prompt`: {asked} answers, and this server keeps {self.thread.capacity}"
            raise refuse(what, "prompt", "invalid_value")
        if echo and self.engine.model.config.prompt_of([]):
            what = "the prompt of an encoder-decoder is its encoder's: an answer does not continue it"
            raise refuse(f"`echo`: {what}", "echo", "invalid_value")
        prompts = [await self._read(self.ids_of, prompt, "prompt") for prompt in body.prompts]
        log_probs = body.logprobs if best_of == n else body.logprobs or 0
        more: dict[str, Any] = {"n": best_of, "seed": seed_of(body), "log_probs": log_probs}
        more["prompt_log_probs"] = body.logprobs if echo else None
        more["grammar"] = await self.grammar(body)
        requests = [self.request(body, prompt, max_tokens, **more) for prompt in prompts]
        form = CompletionFormat(body, body.model or self.names[0], self.tokens)
        echoes = [p if isinstance(p, str) else self.tokens.decode(p) for p in body.prompts] if echo else None
        return await self._answer(request, form, requests, n, echoes, drop=max_tokens == 0)

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        body = read(ChatRequest, await read_body(request, self.config.max_body_bytes))
        self.check_model(body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise refuse("`top_logprobs` without `logprobs`", "top_logprobs", "invalid_value")
        if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
            raise refuse("`max_tokens` and `max_completion_tokens` differ", "max_tokens", "invalid_value")
        prompt, pictures = await self._read(self.chat_ids, body, "messages")
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        log_probs = (body.top_logprobs or 0) if body.logprobs else None
        more = {"n": body.n or 1, "seed": seed_of(body), "log_probs": log_probs, "pictures": pictures}
        made = self.request(body, prompt, asked, grammar=await self.grammar(body), **more)
        form = ChatFormat(body, body.model or self.names[0], self.tokens)
        return await self._answer(request, form, [made], made.n, None)

    async def _answer(
        self,
        request: Request,
        form: Format,
        requests: Sequence[EngineRequest],
        n: int,
        echoes: Sequence[str] | None,
        drop: bool = False,
    ) -> Response:
        """Answer as events or whole; aborts the requests if the client disconnects.

        Args:
            request: the client's connection.
            form: format of the response.
            requests: one for each prompt.
            n: choices of each prompt to return, of those computed (`best_of`).
            echoes: the prompts to put before the answers.
            drop: drop the one generated token: `max_tokens` is 0, and the prompt alone is returned.
        """
        streams = self.submit(requests, form.body)
        if form.body.stream:
            return Events(self._events(form, streams, echoes, drop), leave=lambda: self.leave(streams))
        try:
            choices = await unless_gone(request, self._collect(form, streams, echoes, drop))
        finally:
            self.leave(streams)
        if choices is None:
            return Response(status_code=499)  # nobody reads it
        shown = []
        for each in choices:
            shown += each if len(each) == n else sorted(each, key=lambda choice: -choice.mean)[:n]
        for index, choice in enumerate(shown):
            choice.index = index
        every = [choice for each in choices for choice in each]
        return json_response(form.whole(shown, usage_of(streams, every)))

    async def _pieces(
        self, form: Format, stream: Stream, choices: Sequence[Choice], echo: str | None, drop: bool
    ) -> AsyncIterator[tuple[Choice, str, list[Any]]]:
        """What each piece adds: (its choice, text, entries of log-probabilities)."""
        left, begun = len(choices), set[int]()
        while left:
            piece = await stream.next(self.config.request_seconds + GRACE_SECONDS)
            choice = choices[piece.index]
            before, entries = "", list[Any]()
            if piece.index not in begun and echo is not None:
                assert isinstance(form, CompletionFormat), "only a completion repeats its prompt"
                before, entries = echo, form.echo(choice, echo, stream)
            begun.add(piece.index)
            if drop:
                piece = dataclasses.replace(piece, text="", tokens=(), log_probs=(), top=(), reason="length")
            left -= piece.reason is not None
            entries = entries + form.take(choice, piece)
            yield choice, before + piece.text, entries

    async def _collect(
        self, form: Format, streams: Sequence[Stream], echoes: Sequence[str] | None, drop: bool
    ) -> list[list[Choice]]:
        """The whole answers to each prompt."""
        found = []
        for i, stream in enumerate(streams):
            choices = [Choice(index) for index in range(stream.request.n)]
            async for _ in self._pieces(form, stream, choices, echoes[i] if echoes else None, drop):
                pass
            found.append(choices)
        return found

    async def _events(
        self, form: Format, streams: Sequence[Stream], echoes: Sequence[str] | None, drop: bool
    ) -> AsyncIterator[bytes]:
        """The events of a stream; several prompts are answered one after the other."""
        every: list[Choice] = []
        try:
            for i, stream in enumerate(streams):
                choices = [Choice(len(every) + index) for index in range(stream.request.n)]
                every += choices
                if isinstance(form, ChatFormat):
                    for choice in choices:
                        yield form.first(choice.index)
                pieces = self._pieces(form, stream, choices, echoes[i] if echoes else None, drop)
                async for choice, text, entries in pieces:
                    if text or entries or choice.reason is not None:
                        yield form.chunk(choice.index, form.delta(text), entries, choice.reason)
            if form.body.include_usage:
                yield form.usage_chunk(usage_of(streams, every))
            yield DONE
        except MinimegatronError as error:
            yield event(api_error(error).body)

    # --------------------------------------------------------------------------------------------- other routes

    def model(self, name: str) -> dict[str, Any]:
        """The model, or an adapter, as `/v1/models` shows it; `parent` is the model of an adapter, as vLLM says."""
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "minimegatron",
            "parent": None if name == self.names[0] else self.names[0],
            "max_model_len": self.room,
        }

    def health(self) -> Response:
        """200 if a request would be served, else 503."""
        well = self.thread.healthy and not self.draining
        status = "ok" if well else "draining" if self.draining else f"failing: {self.thread.failure or 'steps raise'}"
        return json_response({"status": status}, 200 if well else 503)

"""OpenAI's requests: every field is honoured, or refused by its name.

The problem in a sentence: a server that silently ignores `stop` or `seed` gives wrong answers.

| field                                                                  | here                                        |
|------------------------------------------------------------------------|---------------------------------------------|
| `temperature`, `top_p`, `seed`, `n`, `stop`, `logit_bias`, penalties   | honoured; temperature 0 is greedy           |
| `max_tokens`, `max_completion_tokens`                                  | default 16; in a chat all that fit          |
| `logprobs`, `top_logprobs`, `echo`, `best_of`                          | honoured; of the model's own logits         |
| `stream`, `stream_options`                                             | honoured                                    |
| `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `stop_token_ids` | vLLM's, honoured                            |
| `ignore_eos`, `include_stop_str_in_output`, `cache_salt`               | vLLM's, honoured                            |
| `image_url` in a message                                               | PNG or JPEG as a `data:` URL                |
| `response_format`                                                      | honoured: `json_schema`, strict or not      |
| `structured_outputs`                                                   | vLLM's, honoured: one of five kinds         |
| `user`, `safety_identifier`, `prompt_cache_key`                        | accepted; they change no answer             |
| those in `REFUSED`                                                     | 400, unless the value changes nothing       |
| any other field, a wrong type, a number out of range                   | 400                                         |

A body is JSON in UTF-8, without duplicate keys and NaN. Sampling parameters that a request leaves open come from
`generation_config.json`, else they are OpenAI's defaults.

OpenAI's API reference, "Completions" and "Chat"; vLLM: `vllm/entrypoints/openai/`.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from minimegatron.errors import did_you_mean
from minimegatron.inference import grammar
from minimegatron.inference.sampling import SamplingParams

MOST_LOGPROBS = 20
MOST_STOPS = 16
GREEDY_BELOW = 1e-5  # logits divided by a smaller temperature would overflow; vLLM has the same limit


class ApiError(Exception):
    """An error response in OpenAI's form.

    Args:
        status: of HTTP.
        message: for people.
        kind: OpenAI's `type`.
        param: the field at fault.
        code: for programs.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refuse(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Status 400."""
    return ApiError(400, message, param=param, code=code)


# field -> (values that are accepted since they change nothing, why other values are refused)
NOTHING: tuple[Any, ...] = (None,)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": ((None, []), "no tools are called here"),
    "tool_choice": ((None, "none", "auto"), "no tools are called here"),
    "parallel_tool_calls": ((None, True, False), "no tools are called here"),
    "functions": ((None, []), "no functions are called here"),
    "function_call": ((None, "none", "auto"), "no functions are called here"),
    "modalities": ((None, ["text"]), "answers are text"),
    "audio": (NOTHING, "answers are text"),
    "prediction": (NOTHING, "there is no predicted output here"),
    "reasoning_effort": (NOTHING, "how long a model reasons is in its chat template"),
    "verbosity": (NOTHING, "say it in the prompt"),
    "web_search_options": (NOTHING, "nothing is looked up"),
    "service_tier": ((None, "auto", "default"), "there is one tier"),
    "store": ((None, False), "nothing is stored"),
    "metadata": ((None, {}), "nothing is stored"),
    "prompt_cache_retention": (NOTHING, "pages are kept until room is needed"),
    "suffix": ((None, ""), "models here continue a text, and fill in none"),
    "use_beam_search": ((None, False), "answers are drawn"),
    **{
        f"guided_{kind}": (NOTHING, f'say `structured_outputs`: {{"{kind}": ...}}')
        for kind in ("json", "regex", "choice", "grammar")
    },
    "length_penalty": ((None, 1, 1.0), "it belongs to beam search"),
}

Count = Annotated[int, Field(ge=1, le=1 << 31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class JsonSchema(_Strict):
    """A named schema; every answer matches it, `strict` or not."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> ResponseFormat:
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise ValueError("the type json_schema and the field `json_schema` belong together")
        return self


class StructuredOutputs(_Strict):
    """vLLM's `structured_outputs`: a grammar of one of five kinds."""

    json_: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024)] | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> StructuredOutputs:
        if len(self.model_fields_set) != 1 or None in (getattr(self, name) for name in self.model_fields_set):
            raise ValueError("one of json, json_object, regex, choice and grammar")
        return self


class _Common(_Strict):
    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=256)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


Ids = Annotated[list[int], Field(min_length=1)]


class CompletionRequest(_Common):
    """The body of `POST /v1/completions`."""

    prompt: str | Ids | Annotated[list[str], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, texts or lists of ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt  # type: ignore[list-item, return-value]


class TextPart(_Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ImageUrl(_Strict):
    """A picture; of `detail` a model that resizes every picture alike knows nothing."""

    url: str
    detail: Literal["auto"] = "auto"


class PicturePart(_Strict):
    """A picture in a message, as a `data:` URL (`data/picture_messages`)."""

    type: Literal["image_url"]
    image_url: ImageUrl


class Message(_Strict):
    """One message of a conversation; role "developer" means "system"."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart | PicturePart]
    name: str | None = None

    def plain(self) -> dict[str, Any]:
        """The message as a chat template reads it; with pictures its content is a list of parts."""
        content: Any = self.content
        if not isinstance(content, str):
            texts = [part.text for part in content if isinstance(part, TextPart)]
            seen = len(texts) < len(content)
            content = [part.model_dump() for part in content] if seen else "".join(texts)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content, **({} if self.name is None else {"name": self.name})}


class ChatRequest(_Common):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None


Body = TypeVar("Body", bound=_Common)


def read(kind: type[Body], raw: bytes) -> Body:
    """Parse and validate the body of a request.

    Raises:
        ApiError: 400; it names the field.
    """
    try:
        found = json.loads(raw.decode("utf-8"), parse_constant=_no_number, object_pairs_hook=_once)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        reason = "too deep" if isinstance(error, RecursionError) else error
        raise refuse(f"the body is not JSON in UTF-8: {reason}") from None
    if not isinstance(found, dict):
        raise refuse(f"the body is a JSON {type(found).__name__}, and not an object")
    for name in [name for name in found if name in REFUSED]:
        nothing, why = REFUSED[name]
        value = found.pop(name)
        if not any(type(value) is type(each) and value == each for each in nothing):
            raise refuse(f"`{name}` is not supported: {why}", name, "unsupported_parameter")
    for name in found:
        if name not in kind.model_fields:
            near = did_you_mean(name, kind.model_fields)
            raise refuse(
                f"unknown parameter `{name[:64]}`{f'; {near}' if near else ''}", name[:64], "unknown_parameter"
            )
    try:
        body = kind.model_validate(found)
    except ValidationError as error:
        raise _told(error, found) from None
    if body.stream_options is not None and not body.stream:
        raise refuse("`stream_options` without `stream`", "stream_options")
    return body


def _told(error: ValidationError, found: Mapping[str, Any]) -> ApiError:
    first, *_ = error.errors(include_url=False, include_input=False, include_context=False)
    name = str(first["loc"][0]) if first["loc"] else ""
    inside = [
        str(part) for part in first["loc"][1:] if isinstance(part, int) or part in ("role", "content", "type", "text")
    ]
    param = ".".join([name, *inside])
    code = "missing_required_parameter" if first["type"] == "missing" and name not in found else "invalid_value"
    return refuse(f"`{param}`: {first['msg']}", name, code)


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"{name[:64]!r} stands twice in an object")
    return found


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Sampling parameters of requests that leave them open."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, generation_config: Mapping[str, Any]) -> Defaults:
        """From the contents of `generation_config.json`; what it lacks stays OpenAI's default."""
        values: dict[str, Any] = {
            field.name: int(value) if field.name == "top_k" else float(value)
            for field in dataclasses.fields(cls)
            if isinstance(value := generation_config.get(field.name), int | float) and not isinstance(value, bool)
        }
        return cls(**values)


def sampling_of(body: _Common, defaults: Defaults, vocab_size: int) -> SamplingParams:
    """The sampling parameters of a request.

    Raises:
        ApiError: 400, an invalid `logit_bias`.
    """

    def get(name: str) -> Any:
        value = getattr(body, name)
        return getattr(defaults, name) if value is None else value

    bias = []
    for word, value in (body.logit_bias or {}).items():
        if not (word.isascii() and word.isdigit() and len(word) < 10 and int(word) < vocab_size):
            what = f"`logit_bias`: {word[:32]!r} is no id of a vocabulary of {vocab_size}"
            raise refuse(what, "logit_bias", "invalid_value")
        bias.append((int(word), float(value)))
    changed: dict[str, Any] = {
        "repetition_penalty": float(get("repetition_penalty")),
        "presence_penalty": float(body.presence_penalty or 0.0),
        "frequency_penalty": float(body.frequency_penalty or 0.0),
        "logit_bias": tuple(bias),
    }
    temperature, top_k, top_p = float(get("temperature")), max(0, get("top_k")), float(get("top_p"))
    if temperature < GREEDY_BELOW or top_k == 1 or top_p == 0.0:
        return SamplingParams(top_k=1, **changed)
    return SamplingParams(temperature, top_k, top_p, float(get("min_p")), **changed)


ANY_OBJECT = {"type": "object"}


def grammar_of(body: _Common) -> str:
    """The grammar that every answer must match; "" for none.

    Raises:
        ApiError: 400, both `response_format` and `structured_outputs`.
        ConfigError: an invalid regular expression, or llguidance is not installed.
    """
    form, more = body.response_format, body.structured_outputs
    if form is not None and form.type != "text":
        if more is not None:
            raise refuse("`structured_outputs` with `response_format`: one of the two", "structured_outputs")
        return grammar.of_json_schema(ANY_OBJECT if form.json_schema is None else form.json_schema.schema_)
    if more is None:
        return ""
    if more.regex is not None:
        return grammar.of_regex(more.regex)
    if more.choice is not None:
        return grammar.of_choice(more.choice)
    if more.grammar is not None:
        return grammar.of_lark(more.grammar)
    return grammar.of_json_schema(ANY_OBJECT if more.json_ is None else more.json_)


def seed_of(body: _Common) -> int:
    """The request's seed, or a random one."""
    return body.seed if body.seed is not None else secrets.randbits(62)

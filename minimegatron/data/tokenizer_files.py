"""The files of a published tokenizer, and their precedence.

The problem in a sentence: `tokenizer.json` alone is a complete tokenizer, and yet transformers changes it by the files
beside it, so a program that reads that file alone gets other ids from the same folder.

| fact                                      | where                                                  | is used         |
|-------------------------------------------|--------------------------------------------------------|-----------------|
| the rule, the vocabulary, added tokens    | `tokenizer.json`                                       | unless below    |
| tokens by id, the blanks that they take   | `tokenizer_config.json`, `added_tokens_decoder`        | always          |
| the same, in older folders                | `special_tokens_map.json`, `added_tokens.json`         | without that one|
| which tokens are special                  | `eos_token` and its like there, `extra_special_tokens` | if they have ids|
| a blank before a text                     | `add_prefix_space` and `legacy` there                  | for some classes|
| the form of a conversation                | `chat_template.jinja`, else `chat_template` there      | always          |
| the class; eos                            | `model_type` and `eos_token_id` of `config.json`       | if not given    |

A class of transformers (`GPT2Tokenizer`) takes the vocabulary from `tokenizer.json` and builds the rule itself, so it
reads `add_prefix_space`, which is False by default; the general class takes the rule from the file. The ids
are those of `AutoTokenizer` in transformers 5 on the same folder.

`render` turns a conversation into one text with the folder's chat template. That is a foreign Jinja program, so it runs
in Jinja's sandbox: it sees the messages and the names of special tokens, changes nothing, calls nothing of Python, and
loops over at most 100,000 items. It has the functions that transformers gives a template: `raise_exception`,
`strftime_now`, `tojson` without HTML's escapes, `break` and `continue`, and `{% generation %}`, which marks the parts
that are trained on and prints them. A message that spells a special token becomes that token, as in transformers;
`Tokenizer.spelled` finds such messages.

Nothing is downloaded, and no code of a folder (`auto_map`) runs.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from minimegatron.data.publish import read_json
from minimegatron.errors import ConfigError

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# A conversation in plain words, for tokenizers that know one special token: the end of a text.
PLAIN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% else %}{{ m.role | capitalize }}: {{ m.content }}\n{% endif %}{% endfor %}"
)
# Which class AutoTokenizer of transformers takes for a model_type (a fact of transformers, and a tokenizer is read
# without a model and without torch); "" is the general class, whatever tokenizer_config.json names.
CLASSES = {
    "gpt2": "GPT2Tokenizer",
    "mistral": "",
    "mixtral": "",
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"), "Qwen2Tokenizer"),
}
BUILDS_BYTE_LEVEL = ("GPT2Tokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizer", "RobertaTokenizer")


@dataclasses.dataclass(frozen=True)
class TokenizerFiles:
    """The contents of a published tokenizer's files.

    Attributes:
        fast: the rule, with every token that the files name.
        vocabulary: `tokenizer.json` as text, with the tokens that only other files have: the word of each id.
        named: the text of each special token that has a name, e.g. {"eos_token": "</s>"}.
        split_special_tokens: whether special tokens in a text are letters; Hugging Face's field, and its default.
        chat_template: Jinja source, or None.
    """

    fast: FastTokenizer
    vocabulary: str
    named: dict[str, str]
    split_special_tokens: bool
    chat_template: str | None


def read_tokenizer(folder: str) -> TokenizerFiles:
    """Read a folder, or its `tokenizer.json` with the files beside it.

    Raises:
        ConfigError: no such file, a broken one, or files that contradict each other about an id.
    """
    path = folder if os.path.isfile(folder) else os.path.join(folder, "tokenizer.json")
    if not os.path.isfile(path):
        raise ConfigError(
            f"no tokenizer.json at {folder!r}",
            fix="give the folder of a downloaded model; names on the hub are not downloaded here",
        )
    folder = os.path.dirname(path)
    try:
        fast = FastTokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception for every broken file
        raise ConfigError(
            f"not a tokenizer: {error}", where=path, fix="a tokenizer.json that the tokenizers library has written"
        ) from error
    fast.no_truncation()  # a tokenizer.json may carry the lengths of a fine-tuning run; documents stay whole
    fast.no_padding()
    config, model = _table(folder, "tokenizer_config.json"), _table(folder, "config.json")
    vocabulary, size = fast.to_str(), fast.get_vocab_size()
    numbered = _tokens_with_ids(folder, config, fast)
    _blank_before_a_text(fast, config, model, path)
    fast.add_tokens([token for _, token in sorted(numbered.items())])
    for number, token in numbered.items():
        if (found := fast.token_to_id(token.content)) != number:
            raise ConfigError(
                f"the token {token.content!r} has the id {number} there, and {found} by tokenizer.json",
                where=os.path.join(folder, "tokenizer_config.json"),
                fix="take both files from one download: the ids before it have no token",
            )
    named, more = _special_tokens(config)
    vocabulary = vocabulary if fast.get_vocab_size() == size else fast.to_str()
    _make_special(fast, [*named.values(), *more], folder)
    texts = {name: token.content for name, token in named.items()}
    if "eos_token" not in texts and (text := _text_of(model.get("eos_token_id"), fast)):
        texts["eos_token"] = text
    split = bool(config.get("split_special_tokens"))
    return TokenizerFiles(fast, vocabulary, texts, split, _chat_template(folder, config))


def _make_special(fast: FastTokenizer, tokens: list[AddedToken], folder: str) -> None:
    """Make tokens with an id special, so that each is one token anywhere in a text; ignore those without."""
    vocabulary = fast.get_vocab(with_added_tokens=True)
    known = {token.content for token in fast.get_added_tokens_decoder().values()}
    fast.add_tokens([token for token in tokens if token.content in vocabulary and token.content not in known])
    absent = sorted({token.content for token in tokens} - vocabulary.keys())
    if absent:
        warnings.warn(
            f"{folder}: {', '.join(map(repr, absent))}: named as special, and no file says an id; transformers would "
            "give a new one, for which a model has no row. Here it is ordinary text",
            stacklevel=5,
        )


def _table(folder: str, name: str) -> dict[str, Any]:
    """A JSON file that holds a table; {} if there is no such file."""
    path = os.path.join(folder, name)
    found = read_json(path) if os.path.isfile(path) else {}
    if not isinstance(found, dict):
        raise ConfigError(f"{name} holds a {type(found).__name__}", where=path, fix="download the file again")
    return found


def _tokens_with_ids(folder: str, config: dict[str, Any], fast: FastTokenizer) -> dict[int, AddedToken]:
    """The tokens whose ids are in files beside `tokenizer.json`; adds to `config` what an older folder keeps in other
    files."""
    decoder = config.get("added_tokens_decoder")
    if decoder is not None:
        try:
            return {int(number): _token(value) for number, value in decoder.items()}
        except (AttributeError, TypeError, ValueError) as error:
            where = os.path.join(folder, "tokenizer_config.json")
            raise ConfigError(f"added_tokens_decoder: {error}", where=where, fix="download it again") from error
    older = {name: value for name, value in _table(folder, "special_tokens_map.json").items() if value}
    for name in NAMED:
        new, old = (_token(values[name]).content if values.get(name) else None for values in (config, older))
        if new and old and new != old:
            warnings.warn(
                f"{folder}: {name} is {new!r} in tokenizer_config.json and {old!r} in special_tokens_map.json; the "
                "second counts, as in transformers",
                stacklevel=5,
            )
    config |= older
    special = {_token(config[name]).content for name in NAMED if config.get(name)}
    known = {token.content for token in fast.get_added_tokens_decoder().values()}
    return {
        number: AddedToken(text, normalized=text not in special, special=text in special)
        for text, number in _table(folder, "added_tokens.json").items()
        if text not in known
    }


def _special_tokens(config: dict[str, Any]) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """(Special tokens by name, the usual ones first, those without a name)."""
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    others = {name: value for name, value in config.items() if name.endswith("_token") and isinstance(value, str)}
    others |= more if isinstance(more, dict) else {}
    values = {name: config[name] for name in NAMED if config.get(name)} | others
    named = {name: _token(values[name], special=True) for name in values}
    return named, [_token(value, special=True) for value in more] if isinstance(more, list) else []


def _token(value: Any, special: bool = False) -> AddedToken:
    """A token as these files write it: its text, or a table of its properties."""
    if isinstance(value, str):
        return AddedToken(value, special=special)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise ConfigError(
            f"{value!r} is no token", fix='its text, or {"content": "</s>"}; download the tokenizer again'
        )
    names = ("lstrip", "rstrip", "single_word", "normalized")
    properties = {name: bool(value[name]) for name in names if name in value}
    return AddedToken(value["content"], special=special or bool(value.get("special")), **properties)


def _text_of(number: Any, fast: FastTokenizer) -> str | None:
    """The token of an id, or of the first of several."""
    number = number[0] if isinstance(number, list) and number else number
    return fast.id_to_token(number) if isinstance(number, int) and number >= 0 else None


def _blank_before_a_text(fast: FastTokenizer, config: dict[str, Any], model: dict[str, Any], path: str) -> None:
    """Give `fast` the blank that the class of `config` puts before a text; the general class uses the file's."""
    state = json.loads(fast.pre_tokenizer.__getstate__()) if fast.pre_tokenizer is not None else {}
    byte_level = [part for part in state.get("pretokenizers", [state]) if part.get("type") == "ByteLevel"]
    kind = CLASSES.get(model.get("model_type", ""))
    kind = kind if kind == "" else config.get("tokenizer_class") or model.get("tokenizer_class") or kind or ""
    kind = kind.removesuffix("Fast")
    asked = config.get("add_prefix_space")
    if kind in BUILDS_BYTE_LEVEL and byte_level:
        for part in byte_level:
            part["add_prefix_space"] = bool(asked)
        changed = type(fast.pre_tokenizer)() if "pretokenizers" not in state else pre_tokenizers.Sequence([])
        changed.__setstate__(json.dumps(state).encode())
        fast.pre_tokenizer = changed
    elif kind == "LlamaTokenizer" and not byte_level:
        scheme = "never" if asked is False else "always" if config.get("legacy", False) is True else "first"
        fast.normalizer = None  # type: ignore[assignment]
        fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
        back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        fast.decoder = decoders.Sequence(back + [decoders.Strip(" ", left=1)] * (scheme != "never"))
    elif asked is not None and any(part["add_prefix_space"] != asked for part in byte_level):
        warnings.warn(
            f"{path}: add_prefix_space is {not asked} there and {asked} in tokenizer_config.json, which counts for "
            f"{', '.join(BUILDS_BYTE_LEVEL)}, and not for a tokenizer_class of {config.get('tokenizer_class')}",
            stacklevel=4,
        )


def _chat_template(folder: str, config: dict[str, Any]) -> str | None:
    """The template's source: a file of its own, or a field that is one text or several with names."""
    path = os.path.join(folder, "chat_template.jinja")
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            return file.read()
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}.get("default")
    return found if isinstance(found, str) else None


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool = True,
    where: str = "",
    tools: Any = None,
) -> str:
    """A conversation in the form of a template.

    Args:
        template: Jinja source.
        messages: each with "role" and "content", and whatever else the template reads.
        special_tokens: {"bos_token": text, ...}, as the template may name them.
        add_generation_prompt: end with the words that open the answer.
        where: for messages of errors.
        tools: descriptions of the functions that the model may call, if the template shows them.

    Raises:
        ConfigError: the template is broken, is stopped by the sandbox, or refuses the conversation.
    """
    plain, tools = json.loads(json.dumps([list(messages), tools]))  # data alone: a template meets no methods
    values = {"tools": tools, "documents": None, **special_tokens}
    try:
        return _compiled(template).render(messages=plain, add_generation_prompt=add_generation_prompt, **values)
    except Exception as error:  # a program of somebody else's may fail in any way
        raise ConfigError(
            f"the chat template stops: {error}", where=where, fix="messages in the form that the model's page shows"
        ) from error


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    """The program that a template's source is, in the sandbox; compiled once, which takes more than most renderings."""
    import jinja2  # 50 ms, for conversations alone
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation(), loopcontrols]
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _generation() -> type:
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        """`{% generation %}...{% endgeneration %}` prints its contents."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    return Generation

"""A conversation as one text, in the form that a model was trained on.

The problem in a sentence: a model for conversations has seen every message between tokens that no message holds, each
family with its own, and without them it answers as if it had never been trained.

    [{"role": "user", "content": "Hi"}]   ->   <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n

The form is a Jinja template that comes with the tokenizer. It is a program of somebody else's, so it runs in Jinja's
sandbox: it sees the messages and the names of special tokens, changes nothing, calls nothing of Python, and loops over
at most 100,000 things. What transformers gives a template beside these is given here: `raise_exception`,
`strftime_now`, `tojson` without HTML's escapes, `break` and `continue`, and `{% generation %}`, which marks the parts
that are trained on and prints them.

A message that spells a special token becomes that token, as in transformers: who writes messages of strangers looks
for it first (`Tokenizer.spelled`).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from minimegatron.errors import ConfigError


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool = True,
    where: str = "",
) -> str:
    """A conversation as a template spells it.

    Args:
        template: Jinja source.
        messages: each with "role" and "content", and what else the template reads.
        special_tokens: {"bos_token": text, ...}, as the template may name them.
        add_generation_prompt: end with the words that open the answer.
        where: of the messages of errors.

    Raises:
        ConfigError: the template is broken, is stopped by the sandbox, or refuses the conversation.
    """
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
    plain = json.loads(json.dumps(list(messages)))  # data alone: the template meets no object that has methods
    values = {"tools": None, "documents": None, **special_tokens}
    try:
        rendered = environment.from_string(template)
        return rendered.render(messages=plain, add_generation_prompt=add_generation_prompt, **values)
    except Exception as error:  # a program of somebody else's may fail in any way
        raise ConfigError(
            f"the chat template stops: {error}", where=where, fix="messages in the form that the model's page shows"
        ) from error


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _generation() -> type:
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        """`{% generation %}...{% endgeneration %}` prints what stands in it."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    return Generation

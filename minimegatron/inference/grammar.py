"""Answers that a grammar bounds: of all tokens only those are drawn that can still become a text it allows.

The problem in a sentence: a program reads the answer, and one missing brace in a thousand answers breaks it.

    grammar, answer so far --> bits of the ids that may come next --> other logits are minus infinity --> draw

`llguidance` reads the grammar (JSON schema, regular expression, Lark) and keeps a parser's state for each sequence; a
token may span several of the grammar's words. Rank 0 alone has the states. What travels to the ranks that draw is a bit
for each id, deflated: of 128 k ids 0.1 kB where a few may come, 11 kB inside of a string, where most may.

| what                  | here                                                                                         |
|-----------------------|----------------------------------------------------------------------------------------------|
| the end               | nothing can follow: the sequence is over, "stop". Where more could follow, a stop id may too |
| `min_new_tokens`      | bans stop ids as ever, unless nothing else may come                                          |
| a proposed token      | has the mask behind the proposals before it, from a state that is put back                   |
| log-probabilities     | of the model's own logits: no mask is in them                                                |
| blanks between words  | at most `BLANKS` in a row; a model that likes blanks would write nothing else                |
| an answer of a prompt | has a state of its own; pages that are lost do not touch it                                  |

Only the end of an answer, its `max_new_tokens` or a stop string, can leave a text that is no whole one.

Willard and Louf 2023 (arXiv 2307.09702); https://github.com/guidance-ai/llguidance. vLLM: `vllm/v1/structured_output/`.
"""

from __future__ import annotations

import collections
import json
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from minimegatron.errors import ConfigError
from minimegatron.inference.detokenizer import token_bytes


class Words(Protocol):
    """What is asked of a tokenizer; `data.tokenizer.HuggingFaceTokenizer` has it."""

    vocab_size: int
    special_ids: frozenset[int]

    def word(self, token: int) -> tuple[str, str]:
        """How the vocabulary spells one id, and its text alone."""
        ...


INSTALL = "pip install 'minimegatron[structured]'"
BLANKS = 32
KEPT = 256  # compiled grammars


def llguidance() -> Any:
    """The package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import llguidance as found
    except ModuleNotFoundError:
        raise ConfigError("answers that a grammar bounds need the package llguidance", fix=INSTALL) from None
    return found


def of_json_schema(schema: Mapping[str, Any]) -> str:
    """The grammar of a schema, as `Request.grammar` has it; keywords that would be ignored are refused when it is read.

    Args:
        schema: llguidance's "x-guidance" in it may say other blanks.
    """
    said = schema.get("x-guidance", {})
    if isinstance(said, Mapping):
        blanks = {} if "whitespace_flexible" in said else {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{BLANKS}}}"}
        said = {**blanks, **said, "lenient": False}
    return of_lark("start: %json " + json.dumps({**schema, "x-guidance": said}))


def of_regex(regex: str) -> str:
    """The grammar of a regular expression of Rust's `regex` that the whole answer matches."""
    return of_lark(json.loads(llguidance().LLMatcher.grammar_from_regex(regex))["grammars"][0]["lark_grammar"])


def of_choice(choices: Iterable[str]) -> str:
    """The grammar of some texts, of which the answer is one."""
    return of_lark("start: " + " | ".join(map(json.dumps, choices)))


def of_lark(lark: str) -> str:
    """A grammar in llguidance's form of Lark. Texts that it forces are drawn like others, in any of their tokens."""
    return f'%llguidance {{"no_forcing": true}}\n{lark}'


class Grammars:
    """Reads grammars for one vocabulary.

    Args:
        tokenizer: whose words; special ones are in no text, and in no answer but at its end.
        vocab_size: of the model: ids behind the tokenizer's last are in no answer, either.
    """

    def __init__(self, tokenizer: Words, vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()  # a server reads grammars beside the engine
        self._reader: Any = None
        self._known: collections.OrderedDict[str, Any] = collections.OrderedDict()

    def check(self, grammar: str) -> None:
        """Read a grammar, and keep it.

        Raises:
            ConfigError: it is none, no text of this vocabulary is in it, or the package is missing.
        """
        self._matcher(grammar)

    def begin(self, grammar: str) -> GrammarState:
        """The state before the first token of an answer; raises as `check`."""
        return GrammarState(self._matcher(grammar).deep_copy(), self.vocab_size)

    def _matcher(self, grammar: str) -> Any:
        with self._lock:
            matcher = self._known.pop(grammar, None)
        if matcher is None:  # outside of the lock: a large grammar takes a second, and the engine has others to begin
            package = llguidance()
            limits = package.LLParserLimits(verbose_errors=False)
            text = package.LLMatcher.grammar_from_lark(grammar)
            matcher = package.LLMatcher(self._whole_reader(), text, log_level=0, limits=limits)
            state = GrammarState(matcher.deep_copy(), self.vocab_size)
            if failure := matcher.get_error() or state.failure:
                raise ConfigError(f"the grammar cannot be read: {failure}", fix="another grammar")
            if state.over:
                raise ConfigError(
                    "no token can begin an answer of this grammar", fix="a grammar with a text of this vocabulary"
                )
        with self._lock:
            self._known[grammar] = matcher
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        return matcher

    def _whole_reader(self) -> Any:
        """llguidance's form of the vocabulary."""
        with self._lock:
            if self._reader is None:
                package, end = llguidance(), self.vocab_size
                words = package.TokenizerWrapper(_AsBytes(self.tokenizer, end))
                self._reader = package.LLTokenizer(words, n_vocab=end + 1, eos_token=end)
            return self._reader


class _AsBytes:
    """What llguidance asks of a tokenizer. Id `end`, which nobody draws, is the end of a text."""

    bos_token_id = None

    def __init__(self, tokenizer: Words, end: int) -> None:
        texts = [i for i in range(min(end, tokenizer.vocab_size)) if i not in tokenizer.special_ids]
        found = {i: word for i in texts if (word := token_bytes(*tokenizer.word(i)))}
        self.tokens = [found.get(i, b"<%d>" % i) for i in range(end + 1)]
        self.special_token_ids, self.eos_token_id = [i for i in range(end + 1) if i not in found], end

    def __call__(self, text: bytes) -> list[int]:
        """Ids of a text, for what a grammar forces, which is not asked for (`of_lark`)."""
        return []


class GrammarState:
    """Where one answer stands in its grammar.

    Args:
        matcher: llguidance's, its own.
        vocab_size: of the model.

    Attributes:
        over: nothing may follow.
        failure: why the parser has given up; "" while it has not.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._size = matcher, vocab_size
        self._bits = self._ask()

    def _ask(self) -> int:
        """A bit for each id that may come next, and bit `vocab_size` where the text may end."""
        return int.from_bytes(self._matcher.compute_bitmask(), "little")

    @property
    def over(self) -> bool:
        return not self._bits & ((1 << self._size) - 1)

    @property
    def failure(self) -> str:
        return str(self._matcher.get_error())

    def take(self, token: int) -> None:
        """A token was drawn that is not the end."""
        self._matcher.consume_token(token)
        self._bits = self._ask()

    def valid(self, tokens: Sequence[int]) -> int:
        """How many of these could come next, one behind the other."""
        return int(self._matcher.validate_tokens(list(tokens)))

    def allowed(self, ahead: Sequence[int], stop_ids: Iterable[int], may_stop: bool) -> bytes | None:
        """The ids that may come behind the answer and some more tokens; see `unpacked`.

        Args:
            ahead: proposed tokens.
            stop_ids: which end the answer.
            may_stop: whether it may end here.

        Returns:
            None where the tokens ahead cannot come: what is drawn behind them counts for nothing.
        """
        bits = self._bits
        if ahead:
            taken = self._matcher.try_consume_tokens(list(ahead))
            bits = self._ask() if taken == len(ahead) else 0
            self._matcher.rollback(taken)
        ends, accepts = sum(1 << token for token in stop_ids), bits >> self._size & 1
        bits &= (1 << self._size) - 1
        if not may_stop:
            bits = bits & ~ends or bits
        elif accepts:
            bits |= ends
        return zlib.compress(bits.to_bytes(-(-self._size // 8), "little"), 1) if bits else None


def unpacked(allowed: Sequence[bytes], vocab_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Which ids may be drawn in each row, [r, V] bool."""
    packed = torch.frombuffer(bytearray(b"".join(map(zlib.decompress, allowed))), dtype=torch.uint8).to(device)
    bits = packed.view(len(allowed), -1, 1) >> torch.arange(8, dtype=torch.uint8, device=device)
    return (bits & 1).view(len(allowed), -1)[:, :vocab_size].bool()

"""Structured output: only tokens are drawn that can still become a text that a grammar allows.

The problem in a sentence: a program parses the answer, and one missing brace in a thousand answers breaks it.

    grammar, answer so far --> a bit for each id that may come next --> all other logits become -inf --> draw

`llguidance` compiles the grammar (JSON schema, regular expression, Lark) and keeps a parser state for each sequence; a
token may span several words of the grammar. Rank 0 alone has the states. It sends the mask to the ranks that draw, one
bit for each id, deflated: of 128 k ids 0.1 kB where few are allowed, 11 kB inside a string, where most are.

| question              | answer                                                                                       |
|-----------------------|----------------------------------------------------------------------------------------------|
| when does it end      | if nothing can follow, with reason "stop"; where the text may end, stop ids are allowed too  |
| `min_new_tokens`      | bans stop ids, unless the grammar allows nothing else                                        |
| a proposed token      | is masked by the state after the proposals before it; that state is rolled back              |
| log-probabilities     | are of the model's own logits, without the mask                                              |
| blanks between words  | at most `BLANKS` in a row; a model that likes blanks would write nothing else                |
| several answers       | have a state each; preemption does not touch it                                              |

An answer that `max_new_tokens` or a stop string ends may be incomplete.

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
    """The part of a tokenizer used here; `data.tokenizer.HuggingFaceTokenizer` has it."""

    vocab_size: int
    special_ids: frozenset[int]

    def word(self, token: int) -> tuple[str, str]:
        """(spelling in the vocabulary, text decoded alone) of an id."""
        ...


INSTALL = "pip install 'minimegatron[structured]'"
BLANKS = 32
KEPT = 256  # compiled grammars that are cached


def llguidance() -> Any:
    """The package llguidance.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import llguidance as found
    except ModuleNotFoundError:
        raise ConfigError("answers that a grammar bounds need the package llguidance", fix=INSTALL) from None
    return found


def of_json_schema(schema: Mapping[str, Any]) -> str:
    """The grammar of a JSON schema, for `Request.grammar`. Keywords that llguidance ignores are refused by `Grammars`.

    Args:
        schema: may have llguidance's own "x-guidance", e.g. to set the blanks.
    """
    said = schema.get("x-guidance", {})
    if isinstance(said, Mapping):
        blanks = {} if "whitespace_flexible" in said else {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{BLANKS}}}"}
        said = {**blanks, **said, "lenient": False}
    return of_lark("start: %json " + json.dumps({**schema, "x-guidance": said}))


def of_regex(regex: str) -> str:
    """The grammar of a regular expression (syntax of Rust's `regex`) that the whole answer matches."""
    return of_lark(json.loads(llguidance().LLMatcher.grammar_from_regex(regex))["grammars"][0]["lark_grammar"])


def of_choice(choices: Iterable[str]) -> str:
    """The grammar of an answer that is one of these texts."""
    return of_lark("start: " + " | ".join(map(json.dumps, choices)))


def of_lark(lark: str) -> str:
    """A grammar in llguidance's dialect of Lark. Text that it forces is drawn too, in tokens that the model likes."""
    return f'%llguidance {{"no_forcing": true}}\n{lark}'


class Grammars:
    """Compiles grammars for one vocabulary, and caches them.

    Args:
        tokenizer: of the model. Special tokens match no text: an answer has one only as the stop id at its end.
        vocab_size: of the model; ids that the tokenizer lacks match no text either.
    """

    def __init__(self, tokenizer: Words, vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()  # a server compiles in another thread than the engine's
        self._reader: Any = None
        self._known: collections.OrderedDict[str, Any] = collections.OrderedDict()

    def check(self, grammar: str) -> None:
        """Compile a grammar, and cache it.

        Raises:
            ConfigError: it cannot be compiled, no text of this vocabulary matches it, or llguidance is missing.
        """
        self._matcher(grammar)

    def begin(self, grammar: str) -> GrammarState:
        """A new parser state, before the first token of an answer; raises as `check`."""
        return GrammarState(self._matcher(grammar).deep_copy(), self.vocab_size)

    def _matcher(self, grammar: str) -> Any:
        with self._lock:
            matcher = self._known.pop(grammar, None)
        if matcher is None:  # outside the lock: a large grammar takes a second, and the engine must not wait for it
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
        """The vocabulary as llguidance has it, built at the first use."""
        with self._lock:
            if self._reader is None:
                package, end = llguidance(), self.vocab_size
                words = package.TokenizerWrapper(_AsBytes(self.tokenizer, end))
                self._reader = package.LLTokenizer(words, n_vocab=end + 1, eos_token=end)
            return self._reader


class _AsBytes:
    """llguidance's interface of a tokenizer. Id `end`, which no model has, stands for the end of the text."""

    bos_token_id = None

    def __init__(self, tokenizer: Words, end: int) -> None:
        texts = [i for i in range(min(end, tokenizer.vocab_size)) if i not in tokenizer.special_ids]
        found = {i: word for i in texts if (word := token_bytes(*tokenizer.word(i)))}
        self.tokens = [found.get(i, b"<%d>" % i) for i in range(end + 1)]
        self.special_token_ids, self.eos_token_id = [i for i in range(end + 1) if i not in found], end

    def __call__(self, text: bytes) -> list[int]:
        """Ids of a text: needed for forced text only, which `of_lark` switches off."""
        return []


class GrammarState:
    """The parser state of one answer.

    Args:
        matcher: llguidance's, of this answer alone.
        vocab_size: of the model.

    Attributes:
        over: no token may follow.
        failure: why the parser gave up; "" if it has not.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._size = matcher, vocab_size
        self._bits = self._ask()

    def _ask(self) -> int:
        """A bit for each id that may come next, and bit `vocab_size` if the text may end here."""
        return int.from_bytes(self._matcher.compute_bitmask(), "little")

    @property
    def over(self) -> bool:
        return not self._bits & ((1 << self._size) - 1)

    @property
    def failure(self) -> str:
        return str(self._matcher.get_error())

    def take(self, token: int) -> None:
        """Advance by a token that was drawn and is no stop id."""
        self._matcher.consume_token(token)
        self._bits = self._ask()

    def valid(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first on, may come next in this order."""
        return int(self._matcher.validate_tokens(list(tokens)))

    def allowed(self, ahead: Sequence[int], stop_ids: Iterable[int], may_stop: bool) -> bytes | None:
        """The ids that may come after the answer and proposed tokens, packed; see `unpacked`.

        Args:
            ahead: the proposed tokens.
            stop_ids: ids that end the answer.
            may_stop: whether a stop id may come (`min_new_tokens` is reached).

        Returns:
            None if the grammar excludes the proposed tokens: one of them will be rejected, so the draw does not count.
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
    """The masks of r rows: [r, V] bool, True for ids that may be drawn."""
    packed = torch.frombuffer(bytearray(b"".join(map(zlib.decompress, allowed))), dtype=torch.uint8).to(device)
    bits = packed.view(len(allowed), -1, 1) >> torch.arange(8, dtype=torch.uint8, device=device)
    return (bits & 1).view(len(allowed), -1)[:, :vocab_size].bool()

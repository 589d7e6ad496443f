"""Text in pieces is the text: whole characters, stop strings wherever tokens cut them, nothing held back for longer."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.data.tokenizer import byte_level
from minimegatron.inference.detokenizer import BYTES, Detokenizer, StopStrings, token_bytes

LETTER = {byte: letter for letter, byte in BYTES.items()}
TEXTS = st.text(st.sampled_from("ab \n€é😀日"), max_size=12)


def of_bytes():
    """A token for each byte, and some of several that begin and end inside of characters, and of special ones."""
    parts = [bytes([byte]) for byte in range(256)]
    parts += ["€".encode()[1:] + "€".encode()[:1], b" a", "日".encode()[:2], b"b" + "😀".encode()[:3], "é😀".encode()]
    vocab = {"".join(LETTER[byte] for byte in part): i for i, part in enumerate(parts)}
    fast = byte_level(tokenizers.models.WordLevel(vocab, "?"))
    fast.add_special_tokens(["<end>"])
    return fast, parts


def of_words():
    """As SentencePiece has it: a blank is a part of the word, unknown characters are bytes."""
    words = ["▁", "▁a", "b", "a", "▁b", "€", "\n", *(f"<0x{byte:02X}>" for byte in range(256))]
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "?"))
    back = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    fast.decoder = tokenizers.decoders.Sequence([*back, tokenizers.decoders.Strip(" ", 1, 0)])
    fast.add_special_tokens(["<end>"])
    return fast, words


BYTE_LEVEL, PARTS = of_bytes()
WORDS, SPELLED = of_words()


def pieces(fast, prompt, answer):
    detokenizer = Detokenizer(lambda ids: fast.decode(list(ids), skip_special_tokens=True), prompt)
    return [*(detokenizer.push(token) for token in answer), detokenizer.flush()]


def ids_of(raw, data):
    """Any way to write bytes in tokens of `BYTE_LEVEL`, with special ones between them."""
    ids = []
    while raw:
        fit = [i for i, part in enumerate(PARTS) if raw.startswith(part)]
        ids += [data.draw(st.sampled_from(fit)), *[len(PARTS)] * data.draw(st.sampled_from([0, 0, 0, 1]))]
        raw = raw[len(PARTS[ids[-1]] if ids[-1] < len(PARTS) else PARTS[ids[-2]]) :]
    return ids


@given(st.data(), TEXTS, TEXTS)
def test_bytes_come_as_characters_as_soon_as_they_are_whole(data, before, text):
    prompt, answer = ids_of(before.encode(), data), ids_of(text.encode(), data)
    found = pieces(BYTE_LEVEL, prompt, answer)
    assert "".join(found) == text
    raw = b""
    for i, token in enumerate(answer):
        raw += PARTS[token] if token < len(PARTS) else b""
        assert "".join(found[: i + 1]) == raw.decode(errors="ignore"), "a whole character was held back"


@given(st.lists(st.integers(0, len(PARTS)), max_size=12), st.lists(st.integers(0, len(PARTS)), max_size=4))
def test_bytes_that_are_no_text_come_as_the_tokenizer_shows_them(answer, prompt):
    prompt = [*prompt, PARTS.index(b"a")]
    whole = BYTE_LEVEL.decode([*prompt, *answer], skip_special_tokens=True)
    assert "".join(pieces(BYTE_LEVEL, prompt, answer)) == whole[len(BYTE_LEVEL.decode(prompt)) :]


@given(st.data(), TEXTS)
def test_words_keep_their_blanks_and_bytes_in_them_become_characters(data, text):
    answer = []
    for word in data.draw(st.lists(st.sampled_from(SPELLED[:7]), max_size=8)):
        answer.append(SPELLED.index(word))
        answer += [SPELLED.index(f"<0x{byte:02X}>") for byte in data.draw(TEXTS).encode()]
        answer += [len(SPELLED)] * data.draw(st.integers(0, 1))
    for prompt in ([SPELLED.index("a")], [SPELLED.index("a"), *[len(SPELLED)] * 20]):
        whole = WORDS.decode([*prompt, *answer], skip_special_tokens=True)
        assert "".join(pieces(WORDS, prompt, answer)) == whole[1:]


def test_bytes_that_will_never_be_text_end_with_the_next_word():
    """SentencePiece shows a whole run of bytes as no text once one is wrong; what was shown stays."""
    byte = [SPELLED.index(f"<0x{b:02X}>") for b in (*"é".encode(), 0xFF, *"é".encode())]
    a = SPELLED.index("a")
    found = pieces(WORDS, [a], [*byte, a, a])
    assert found[1] == "é" and found[-1] == "" and "".join(found) == "é" + 4 * "\ufffd" + "aa"


def cut(text, stops):
    """Character by character: the text before the stop string that ends first."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@given(st.data(), st.text("ab", max_size=14), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_a_stop_string_ends_the_text_wherever_it_is_cut(data, text, stops):
    strings, found, at = StopStrings(stops), "", 0
    while at < len(text) and strings.found is None:
        size = data.draw(st.integers(1, 5))
        found += strings.push(text[at : at + size])
        at += size
        assert cut(text, stops).startswith(found), "what was shown is taken back"
        if strings.found is None:
            held = text[len(found) : at]
            assert not held or any(stop.startswith(held) for stop in stops), "more is held back than a stop's beginning"
    found += strings.flush()
    assert found == cut(text, stops)
    assert (strings.found is None) == (cut(text, stops) == text)


@pytest.mark.parametrize(
    "spelling, text, raw",
    [("âĤ", "\ufffd", b"\xe2\x82"), ("Ġa", " a", b" a"), ("▁a", "a", b" a"), ("<0xE2>", "\ufffd", b"\xe2")],
)
def test_the_bytes_of_a_token(spelling, text, raw):
    assert token_bytes(spelling, text) == raw

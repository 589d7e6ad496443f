"""A server of a tiny model in this process, and OpenAI's client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading

import openai
import pytest
import tokenizers

from minimegatron.data.tokenizer import HuggingFaceTokenizer, byte_level
from minimegatron.inference.detokenizer import BYTES
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.grammar import Grammars
from minimegatron.serving.app import Server
from minimegatron.serving.protocol import Defaults
from minimegatron.serving.service import ServerConfig, Service
from tests.inference.models import ours
from tests.serving.waiting import wait_until

KEY = "a-secret-key"
LETTER = {byte: letter for letter, byte in BYTES.items()}
WORDS = [*map(chr, range(32, 91)), *"abcdefghijklmn", "the", " of", "ing ", "\n"]  # ... and parts of characters:
PARTS = [*(bytes([byte]) for byte in sorted({*"€é😀".encode()})), "€".encode()[1:], b"a\xe2\x82", b"\xac\xe2\x82"]
PARTS += [b"\xf0\x9f\x98", b"{", b"}", b"[", b"]"]
SPECIAL = ["<eos>", "<bos>", "<ask>", "<say>"]
EOS = 95


def write_tokenizer(folder):
    """99 words: of letters, of bytes, and four special ones; a text is encoded byte by byte."""
    raw = [*(word.encode() for word in WORDS), *PARTS]
    vocab = {"".join(LETTER[byte] for byte in part): i for i, part in enumerate(raw)}
    assert len(vocab) <= EOS
    vocab |= {f"<{i}>": i for i in range(len(vocab), EOS)}
    fast = byte_level(tokenizers.models.WordLevel(vocab, "A"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            tokenizers.pre_tokenizers.Split("", "isolated"),
        ]
    )
    fast.add_special_tokens(SPECIAL)
    first = tokenizers.processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", EOS + 1)])
    fast.post_processor = first
    fast.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<eos>", "bos_token": "<bos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    template = "{{ bos_token }}{% for m in messages %}<ask>{{ m.content }}{% endfor %}<say>"
    (folder / "chat_template.jinja").write_text(template)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return HuggingFaceTokenizer(folder, split_special_tokens=False)


class Running:
    """A server in a thread.

    Attributes:
        service, server, url: of it.
    """

    def __init__(self, tokenizer, engine=None, **config):
        self.engine = engine or Engine(
            ours("llama2"),
            EngineConfig(max_model_len=64, page_size=4, max_num_seqs=4, num_pages=64),
            grammars=Grammars(tokenizer, 99),
        )
        config = ServerConfig("tiny", KEY, **config)
        self.service = Service(self.engine, tokenizer, [EOS], Defaults(), config)
        self.server = Server(self.service, port=0)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve()), daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def client(self):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=30)

    def stop(self):
        self.server.handle_exit(15)
        self.thread.join(20)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def running(tokenizer, **options):
    server = Running(tokenizer, **options)
    try:
        with server.client() as server.openai:
            server.openai.completions.create(model="tiny", prompt="A", max_tokens=1)  # threads that stay
            yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def tiny(tokenizer):
    with running(tokenizer, max_queue=4) as server:
        yield server
        assert server.engine.scheduler.blocks.available == 64, "pages are lost"
        server.engine.scheduler.blocks.check([])

"""Pictures in a chat: an answer is the engine's, and what cannot be read is told."""

from __future__ import annotations

import base64
import io

import numpy as np
import openai
import pytest
from PIL import Image

from minimegatron.data.drawn import drawn
from minimegatron.data.picture_messages import decoded, url_of
from minimegatron.data.pictures import Picture
from minimegatron.data.tokenizer import HuggingFaceTokenizer
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.generate import complete
from minimegatron.inference.sequence import Request
from minimegatron.models.families import family_config
from minimegatron.posttraining.vlm import made_tokenizer
from tests.inference.ranked import build
from tests.parallel.test_vision_twin import SEES
from tests.serving.conftest import running
from tests.twin import weights

CONFIG = EngineConfig(max_model_len=64, page_size=4, max_num_seqs=4)


@pytest.fixture(scope="module")
def sees(tmp_path_factory):
    tokenizer = HuggingFaceTokenizer(made_tokenizer(str(tmp_path_factory.mktemp("words"))), split_special_tokens=False)
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 512}
    more = {**SEES, "image_token_id": 3, "vision_patch_size": 4, "ffn_hidden_size": 48}
    fields = {**sizes, **more}
    config = family_config(fields.pop("family"), **fields)
    engine = Engine(build(config, weights(config, 0)), CONFIG)
    with running(tokenizer, engine=engine) as server:
        server.tokenizer = tokenizer
        yield server


def ask(server, *urls, text="Which colour is the circle?", **more):
    parts = [{"type": "image_url", "image_url": {"url": url, **more}} for url in urls]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    return server.openai.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=4, logprobs=True, seed=1
    )


def test_an_answer_is_that_of_the_engine(sees):
    found = {}
    for number in (0, 1):
        picture, asked = drawn(3, number)
        question = asked[0].question
        answer = ask(sees, url_of(picture), text=question)
        seen = Picture(picture, sees.engine.model.config)
        room = "<|image_pad|>" * (seen.grid.rows * seen.grid.columns // 4)
        ids = sees.tokenizer.tokenize(
            f"User: <|vision_start|>{room}<|vision_end|>{question}\n", add_special_tokens=False
        )
        assert answer.usage.prompt_tokens == len(ids)
        entries = answer.choices[0].logprobs.content
        found[number] = [entry.logprob for entry in entries]
        alone = Engine(sees.engine.model, CONFIG)
        (made,) = complete(alone, [Request(tuple(ids), 4, log_probs=0, pictures=(seen,))])[0]
        assert found[number] == pytest.approx(made.log_probs[: len(entries)], abs=1e-5)
    assert found[0] != found[1]


def test_jpeg_and_several_pictures(sees):
    picture, file = drawn(3, 0).picture, io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG")
    jpeg = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    assert np.abs(decoded(jpeg).astype(int) - picture).mean() < 20
    one, two = ask(sees, jpeg), ask(sees, jpeg, url_of(picture))
    assert two.usage.prompt_tokens > one.usage.prompt_tokens + 4


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.org/cat.png", "is not read as a picture"),
        ("file:///etc/passwd", "is not read as a picture"),
        ("data:image/png;base64,AAAA", "broken picture"),
        (url_of(np.zeros((4, 1000, 3), dtype=np.uint8)), "200 times"),
        (url_of(np.zeros((96, 96, 3), dtype=np.uint8)), "context is 64 tokens"),
    ],
)
def test_what_cannot_be_read_is_told(sees, url, message):
    with pytest.raises(openai.BadRequestError, match=message):
        ask(sees, url)


def test_a_picture_that_claims_much_memory_is_refused_by_its_header(sees, monkeypatch):
    monkeypatch.setattr("minimegatron.data.picture_messages.MOST_PIXELS", 1000)
    with pytest.raises(openai.BadRequestError, match="at most 1000 are decoded"):
        ask(sees, url_of(np.zeros((40, 40, 3), dtype=np.uint8)))


def test_a_picture_token_in_a_text_and_an_unknown_detail_are_refused(sees):
    with pytest.raises(openai.BadRequestError, match="picture tokens, of id 3"):
        ask(sees, text="<|image_pad|>")
    with pytest.raises(openai.BadRequestError, match="content"):
        ask(sees, url_of(drawn(3, 0).picture), detail="high")


def test_a_model_that_sees_none_says_so(tiny):
    with pytest.raises(openai.BadRequestError, match="the model sees none"):
        ask(tiny, url_of(drawn(3, 0).picture))

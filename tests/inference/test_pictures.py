"""An answer about pictures is that of the whole sequence at once: in chunks that cut one, beside others, cached."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch

from minimegatron.config import TransformerConfig
from minimegatron.data.pictures import Picture, Seen, picture_inputs
from minimegatron.errors import ConfigError, DataError
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.generate import complete
from minimegatron.inference.sequence import Request
from minimegatron.models.families import family_config
from tests.axes import PP, SP, TP
from tests.inference.ranked import answers_on_ranks, build
from tests.parallel.test_vision_twin import CLIP, SEES
from tests.thorough import mostly_thorough
from tests.twin import weights

SMALL = EngineConfig(max_model_len=40, page_size=4)


@functools.cache
def config(of: str = "qwen2_5_vl") -> TransformerConfig:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 57}
    more = {"ffn_hidden_size": 48, "make_vocab_size_divisible_by": 4, "max_position_embeddings": 64}
    fields: dict[str, Any] = {**sizes, **more, **(SEES if of == "qwen2_5_vl" else CLIP)}
    return family_config(fields.pop("family"), **fields)


@functools.cache
def model(of: str = "qwen2_5_vl") -> Any:
    return build(config(of), weights(config(of), 0))


def picture(rows: int, columns: int, seed: int, of: str = "qwen2_5_vl") -> Picture:
    shape = (4 * rows, 4 * columns, 3)  # a token is 4 x 4 pixels; of LLaVA four tokens are
    return Picture(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8), config(of))


def prompt(*counts: int) -> tuple[int, ...]:
    """Words, and between them so many picture tokens each."""
    ids = [5, 9]
    for count in counts:
        ids += [56] * count + [7, 3]
    return tuple(ids)


REQUESTS = [
    Request(prompt(6, 4), 9, log_probs=0, prompt_log_probs=0, pictures=(picture(3, 2, 0), picture(2, 2, 1))),
    Request((1, 2, 3), 6, log_probs=0),
    Request(prompt(6, 4), 9, log_probs=0, pictures=(picture(3, 2, 2), picture(2, 2, 1))),
    Request(prompt(6, 4), 9, log_probs=0, pictures=(picture(2, 3, 3), picture(2, 2, 1)), n=2),
    Request(prompt(2), 4, log_probs=0, pictures=(picture(1, 2, 4),)),
]


def of_the_whole(request: Request, answer: list[int], of: str) -> torch.Tensor:
    """Log-probabilities of every token but the first, by one forward pass."""
    ids = torch.tensor([*request.prompt, *answer])
    pictures = [(each.patches, each.grid) for each in request.pictures]
    with torch.no_grad():
        logits = model(of).full_logits(ids[None], **picture_inputs([[Seen(ids, pictures)]], config(of)))[0]
    assert not answer or (logits[len(request.prompt) - 1 : -1].argmax(-1) == ids[len(request.prompt) :]).all()
    return logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def check(request: Request, answers: Any, of: str = "qwen2_5_vl") -> None:
    for answer in answers:
        want, n = of_the_whole(request, answer.answer, of), len(request.prompt)
        torch.testing.assert_close(torch.tensor(answer.log_probs), want[n - 1 :], rtol=0, atol=1e-5)
        if answer.prompt_log_probs:
            torch.testing.assert_close(torch.tensor(answer.prompt_log_probs), want[: n - 1], rtol=0, atol=1e-5)


CONFIGS = {
    "as it comes": SMALL,
    "chunks of 5 tokens, so that pictures are cut": dataclasses.replace(
        SMALL, max_num_seqs=4, max_num_batched_tokens=5
    ),
    "pages for two": dataclasses.replace(SMALL, num_pages=11),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_answers_are_those_of_the_whole_sequence(name):
    engine = Engine(model(), CONFIGS[name])
    for _ in range(2):  # the second time prefixes are found
        for request, answers in zip(REQUESTS, complete(engine, REQUESTS), strict=True):
            check(request, answers)
    assert engine.scheduler.preemptions if name == "pages for two" else engine.scheduler.blocks.hits


def test_a_class_token_is_no_token_of_the_text():
    seen = [picture(1, 1, seed, "llava") for seed in range(3)]
    requests = [
        Request(prompt(4, 4), 9, log_probs=0, prompt_log_probs=0, pictures=(seen[0], seen[1])),
        Request((1, 2, 3), 6, log_probs=0),
        Request(prompt(4, 4), 9, log_probs=0, pictures=(seen[0], seen[2])),
    ]
    engine = Engine(model("llava"), CONFIGS["chunks of 5 tokens, so that pictures are cut"])
    for _ in range(2):
        for request, answers in zip(requests, complete(engine, requests), strict=True):
            check(request, answers, "llava")
    assert engine.scheduler.blocks.hits


@pytest.mark.parametrize("layout", mostly_thorough([{TP: 2, SP: True}, {TP: 2}, {PP: 2}], [0]))
def test_ranks_give_the_same_answers(ranks, layout):
    chunked, named = CONFIGS["chunks of 5 tokens, so that pictures are cut"], dict(zip("abcde", REQUESTS, strict=True))
    found = ranks(2).run(answers_on_ranks, (config(), weights(config(), 0)), layout, chunked, named)[0]
    assert found.hits > 0
    for name, answers in found.answers.items():
        check(named[name], answers)


def test_a_prompt_without_room_for_its_pictures_is_refused():
    engine = Engine(model(), SMALL)
    with pytest.raises(DataError, match="needs 4 picture tokens in a row"):
        complete(engine, [Request(prompt(3), 2, pictures=(picture(2, 2, 0),))])
    with pytest.raises(DataError, match="4 picture tokens, and pictures for 0"):
        complete(engine, [Request(prompt(4), 2)])
    plain = family_config("llama", num_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=57)
    with pytest.raises(ConfigError, match="a model that has no vision encoder"):
        complete(Engine(build(plain, weights(plain, 0)), SMALL), [Request(prompt(4), 2, pictures=(picture(2, 2, 0),))])

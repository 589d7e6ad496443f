"""Samples of an encoder-decoder: the text is in them, lengths are fixed, noise depends on seed and index alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from minimegatron.config import DataConfig
from minimegatron.config.encoder_decoder import corrupted_lengths, noise_of, raw_length
from minimegatron.config.run import RunConfig
from minimegatron.data.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from minimegatron.data.span_corruption import CorruptedDataset, SpanCorruption
from minimegatron.data.tokenizer import NullTokenizer
from minimegatron.errors import ConfigError
from minimegatron.models.families import family_config

S, WORDS = 60, 50
START = WORDS + 1 + 100  # behind the numbers, the end of document and the sentinels


def run_of(s: int = S, **model: int) -> RunConfig:
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": START + 1}
    config = family_config("t5", **{**sizes, "decoder_start_token_id": START, **model})
    return RunConfig(config, data=DataConfig(mock_data=True, seq_length=s))


def corruption(**model: int) -> SpanCorruption:
    return SpanCorruption.of(run_of(**model), NullTokenizer(WORDS))


def put_together(source: list[int], target: list[int], sentinels: tuple[int, ...]) -> list[int]:
    """The text: each sentinel of the source gives way to what follows it in the target."""
    spans: dict[int, list[int]] = {}
    for token in target:
        if token in sentinels:
            spans[token] = []
        else:
            spans[next(reversed(spans))].append(token)
    return [word for token in source for word in spans.get(token, [token])]


def test_source_and_target_are_the_text():
    made, rng = corruption(), np.random.default_rng(0)
    noise, spans = noise_of(made.raw)
    firsts = set()
    for k in range(50):
        text = rng.integers(0, WORDS, made.raw)
        source, target = (part.tolist() for part in made.row(text, k))
        assert source.pop() == target.pop() == made.eod == WORDS
        assert put_together(source, target, made.sentinels) == text.tolist()
        used = [token for token in source if token in made.sentinels]
        assert used == [token for token in target if token in made.sentinels] == list(made.sentinels[:spans])
        assert len(target) == noise + spans and source[0] not in made.sentinels and source[-1] == used[-1]
        firsts.add(source.index(used[0]))
    assert len(firsts) > 10, "spans begin elsewhere in each sample"


def test_lengths_are_those_of_the_paper():
    assert (raw_length(512), corrupted_lengths(568)) == (568, (512, 114))  # T5's own pre-training
    for source in range(4, 300):
        assert corrupted_lengths(raw_length(source))[0] == source, "no source is padded"


def test_a_batch_is_rows_of_source_and_shifted_target():
    made = corruption(decoder_seq_length=14)
    texts = np.arange(2 * made.raw).reshape(2, -1) % WORDS
    batch = made.batch(texts, [3, 8])
    assert {name: tuple(x.shape) for name, x in batch.items()} == dict.fromkeys(batch, (2, S))
    for i, k in enumerate((3, 8)):
        source, target = (part.tolist() for part in made.row(texts[i], k))
        end = made.source + len(target)
        assert len(target) < made.target, "some of the row is left"
        assert batch["tokens"][i].tolist() == [*source, START, *target[:-1], *[0] * (S - end)]
        assert batch["labels"][i, made.source : end].tolist() == target
        assert batch["loss_mask"][i].nonzero().flatten().tolist() == list(range(made.source, end))


def test_a_sample_depends_on_seed_and_index_alone():
    made = corruption()
    texts = MockGPTDataset(np.arange(40), 200, GPTDatasetConfig(made.raw, NullTokenizer(WORDS)))
    data = CorruptedDataset(texts, made)
    whole = data.batch([4, 9, 150])
    for i, k in enumerate((4, 9, 150)):
        for name, tensor in data[k].items():
            assert (tensor == whole[name][i]).all(), name
    text = texts.batch([4])["tokens"][0].numpy()
    rows = [made.row(text, 4), made.row(text, 5), dataclasses.replace(made, seed=1).row(text, 4)]
    assert len({tuple(source.tolist()) for source, _ in rows}) == 3, "another index, another seed: other noise"
    assert data.read_epochs(40) == texts.read_epochs(40) and len(data) == len(texts)


def test_rows_and_ids_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="a target of 13, and 8 are left"):
        corruption(decoder_seq_length=8)
    with pytest.raises(ConfigError, match=f"--decoder-start-token-id {START}"):
        corruption(decoder_start_token_id=0)
    with pytest.raises(ConfigError, match="there are 100 sentinels"):
        corruption(s=2600)
    with pytest.raises(ConfigError, match="decoder_seq_length is 60"):
        corruption(decoder_seq_length=60)
    with pytest.raises(ConfigError, match="too few"):
        corruption(s=4)


def test_a_tokenizers_own_sentinels_are_used():
    class WithExtraIds(NullTokenizer):
        pad = 0

        def spellings(self):
            return {f"<extra_id_{i}>": WORDS - 1 - i for i in range(20)}

    made = SpanCorruption.of(run_of(decoder_start_token_id=0), WithExtraIds(WORDS))
    assert made.sentinels == tuple(range(WORDS - 1, WORDS - 21, -1)) and made.vocab_size == WORDS + 1

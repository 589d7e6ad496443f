"""The loader: every sample exactly once and in one order, whatever the layout, wherever it resumes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.data.gpt_dataset import GPTDataset, GPTDatasetConfig
from minimegatron.data.loader import DataLoader
from minimegatron.data.tokenizer import NullTokenizer
from minimegatron.errors import ConfigError, DataError
from tests.data.test_gpt_dataset import counting


class Numbers:
    """Sample k holds k."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def batch(self, samples):
        assert max(samples) < self.size
        return {"tokens": torch.tensor(list(samples))}


def megatron_sampler(total, consumed, b, rank, dp):
    """MegatronPretrainingSampler with drop_last, in one expression a batch."""
    together = b * dp
    for begin in range(consumed, total - together + 1, together):
        yield list(range(begin + rank * b, begin + rank * b + b))


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4), st.integers(0, 59))
def test_the_order_is_megatrons(total, b, dp, consumed):
    if consumed >= total:
        with pytest.raises(DataError, match="none is left"):
            DataLoader(Numbers(total), b, consumed_samples=consumed)
        return
    for rank in range(dp):
        loader = DataLoader(Numbers(total), b, rank, dp, consumed)
        length = len(loader)
        found = [batch["tokens"].tolist() for batch in loader]
        assert found == list(megatron_sampler(total, consumed, b, rank, dp)) and len(found) == length
        assert len(loader) == 0 and loader.consumed_samples == consumed + length * b * dp


LAYOUTS = [(1, 1, 8), (2, 1, 4), (4, 2, 1), (1, 4, 2), (2, 4, 1), (8, 1, 1)]


@pytest.mark.parametrize("seed", range(3))
def test_layouts_and_resumes_see_the_same_samples_in_each_step(seed):
    """24 steps of 8 samples; stop at random steps and go on in another layout."""
    rng = np.random.RandomState(seed)
    stops = sorted(rng.choice(np.arange(1, 24), 7, replace=False).tolist())
    found, consumed = [], 0
    for begin, end in zip([0, *stops], [*stops, 24], strict=True):
        b, dp, microbatches = LAYOUTS[rng.randint(len(LAYOUTS))]
        loaders = [DataLoader(Numbers(192), b, r, dp, consumed) for r in range(dp)]
        ranks = [iter(loader) for loader in loaders]
        for _ in range(end - begin):
            step = [next(rank)["tokens"].tolist() for _ in range(microbatches) for rank in ranks]
            found.append([i for part in step for i in part])
        assert len({loader.consumed_samples for loader in loaders}) == 1
        consumed = loaders[0].consumed_samples
    assert found == [list(range(8 * step, 8 * step + 8)) for step in range(24)] and consumed == 192


def test_batches_of_a_gpt_dataset(tmp_path):
    dataset = GPTDataset(counting(tmp_path), np.arange(6), 8, GPTDatasetConfig(4, NullTokenizer(999)))
    batch = next(iter(DataLoader(dataset, 3, 1, 2)))
    one_by_one = [dataset[k] for k in (3, 4, 5)]
    for name, dtype in (("tokens", torch.int64), ("labels", torch.int64), ("position_ids", torch.int64)):
        assert batch[name].shape == (3, 4) and batch[name].dtype == dtype and batch[name].is_contiguous()
        assert torch.equal(batch[name], torch.stack([sample[name] for sample in one_by_one]))
    assert batch["loss_mask"].dtype == torch.float32


@pytest.mark.parametrize("arguments", [{"micro_batch_size": 0}, {"dp_size": 0}, {"dp_rank": 2, "dp_size": 2}])
def test_arguments_that_make_no_sense(arguments):
    with pytest.raises(ConfigError):
        DataLoader(Numbers(4), **{"micro_batch_size": 1, **arguments})

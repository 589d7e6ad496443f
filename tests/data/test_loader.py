"""The loader: every sample exactly once and in one order, whatever the layout, wherever it resumes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
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

    def __getitem__(self, k):
        if not 0 <= k < self.size:
            raise IndexError(k)
        return {"tokens": torch.tensor([k]), "loss_mask": torch.ones(1)}


def run(dataset, steps, micro_batch_size, dp, microbatches, **options):
    """Ids of every optimizer step: all ranks' micro-batches together, in Megatron's order."""
    ranks = [iter(DataLoader(dataset, micro_batch_size, r, dp, **options)) for r in range(dp)]
    found = []
    for _ in range(steps):
        ids = []
        for _ in range(microbatches):
            ids += [next(rank)["tokens"].flatten().tolist() for rank in ranks]
        found.append([i for part in ids for i in part])
    return found


def megatron_sampler(total, consumed, b, rank, dp):
    """MegatronPretrainingSampler with drop_last, in one expression a batch."""
    together = b * dp
    for begin in range(consumed, total - together + 1, together):
        yield list(range(begin + rank * b, begin + rank * b + b))


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4), st.integers(0, 59))
def test_single_is_megatrons_order(total, b, dp, consumed):
    if consumed >= total:
        with pytest.raises(DataError, match="none is left"):
            DataLoader(Numbers(total), b, consumed_samples=consumed)
        return
    for rank in range(dp):
        loader = DataLoader(Numbers(total), b, rank, dp, consumed_samples=consumed)
        length = len(loader)
        found = [batch["tokens"].flatten().tolist() for batch in loader]
        assert found == list(megatron_sampler(total, consumed, b, rank, dp)) and len(found) == length
        assert len(loader) == 0 and loader.consumed_samples == consumed + length * b * dp


LAYOUTS = [(1, 1, 8), (2, 1, 4), (4, 2, 1), (1, 4, 2), (2, 4, 1), (8, 1, 1)]


@pytest.mark.parametrize("dataloader_type", ["single", "cyclic"])
@pytest.mark.parametrize("seed", range(3))
def test_layouts_and_resumes_see_the_same_samples_in_each_step(dataloader_type, seed):
    """24 steps of 8 samples; stop at random steps and go on in another layout."""
    rng = np.random.RandomState(seed)
    size = 192 if dataloader_type == "single" else 61  # the cyclic one passes three epochs
    options = {"dataloader_type": dataloader_type, "seed": seed}
    plain = run(Numbers(size), 24, 1, 1, 8, **options)
    stops = sorted(rng.choice(np.arange(1, 24), 7, replace=False).tolist())
    found, state = [], {"seed": seed, "consumed_samples": 0}
    for begin, end in zip([0, *stops], [*stops, 24], strict=True):
        b, dp, microbatches = LAYOUTS[rng.randint(len(LAYOUTS))]
        loaders = [DataLoader(Numbers(size), b, r, dp, dataloader_type=dataloader_type) for r in range(dp)]
        for loader in loaders:
            loader.load_state_dict(state)
        ranks = [iter(loader) for loader in loaders]
        for _ in range(end - begin):
            step = [next(rank)["tokens"].flatten().tolist() for _ in range(microbatches) for rank in ranks]
            found.append([i for part in step for i in part])
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert found == plain and state["consumed_samples"] == 192
    stream = [i for step in plain for i in step]
    for epoch in range(192 // size):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_a_prefetched_batch_is_not_counted_and_not_lost():
    loader = DataLoader(Numbers(20), 2)
    stream = iter(loader)
    next(stream)
    assert loader.state_dict()["consumed_samples"] == 2
    again = DataLoader(Numbers(20), 2)
    again.load_state_dict(loader.state_dict())
    assert next(iter(again))["tokens"].flatten().tolist() == next(stream)["tokens"].flatten().tolist() == [2, 3]


def test_cyclic_epochs_differ_and_depend_on_the_seed():
    first = run(Numbers(40), 2, 40, 1, 1, dataloader_type="cyclic", seed=1)
    other = run(Numbers(40), 2, 40, 1, 1, dataloader_type="cyclic", seed=2)
    assert first[0] != first[1] and first != other and sorted(first[1]) == list(range(40))
    assert first[0][:8] == [16, 26, 7, 11, 20, 34, 0, 21], "frozen: numpy's RandomState([1, 0]).permutation(40)"
    loader = DataLoader(Numbers(40), 8, dataloader_type="cyclic", seed=2)
    next(iter(loader))
    loader.load_state_dict({"seed": 1, "consumed_samples": 0})
    assert next(iter(loader))["tokens"].flatten().tolist() == first[0][:8]
    with pytest.raises(TypeError):
        len(DataLoader(Numbers(4), 1, dataloader_type="cyclic"))


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=60)
def test_without_drop_last_every_sample_counts_once(total, b, dp):
    counted, shapes = [], set()
    for rank in range(dp):
        loader = DataLoader(Numbers(total), b, rank, dp, drop_last=False)
        shapes.add((len(loader), b))
        for batch in loader:
            assert batch["tokens"].shape == (b, 1)
            counted += batch["tokens"][batch["loss_mask"] > 0].tolist()
    assert sorted(counted) == list(range(total)) and len(shapes) == 1


def test_batches_of_a_gpt_dataset(tmp_path):
    dataset = GPTDataset(counting(tmp_path), np.arange(6), 8, GPTDatasetConfig(4, NullTokenizer(999)))
    batch = next(iter(DataLoader(dataset, 3, 1, 2)))
    one_by_one = [dataset[k] for k in (3, 4, 5)]
    for name, dtype in (("tokens", torch.int64), ("labels", torch.int64), ("position_ids", torch.int64)):
        assert batch[name].shape == (3, 4) and batch[name].dtype == dtype and batch[name].is_contiguous()
        assert torch.equal(batch[name], torch.stack([sample[name] for sample in one_by_one]))
    assert batch["loss_mask"].dtype == torch.float32


@pytest.mark.parametrize(
    "arguments", [{"micro_batch_size": 0}, {"dp_size": 0}, {"dp_rank": 2, "dp_size": 2}, {"dataloader_type": "random"}]
)
def test_arguments_that_make_no_sense(arguments):
    with pytest.raises(ConfigError):
        DataLoader(Numbers(4), **{"micro_batch_size": 1, **arguments})
    with pytest.raises(DataError, match="no sample"):
        DataLoader(Numbers(0), 1)

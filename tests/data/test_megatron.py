"""Against megatron-core itself: the same bytes, the same arrays, the same samples, the same draws."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from minimegatron.data.blend import build_blending_indices, normalize
from minimegatron.data.builder import build_datasets, parse_data_path, parse_split, split_documents
from minimegatron.data.gpt_dataset import GPTDataset, GPTDatasetConfig, make_batch
from minimegatron.data.indexed import IndexedDataset, optimal_dtype
from minimegatron.data.preprocess import preprocess
from minimegatron.data.tokenizer import NullTokenizer
from tests.data.test_indexed import write

core = indexed = helpers = blended = blended_config = utils = null = cast(Any, None)  # until `megatron` has run
MEGATRON = {
    "core": "datasets.gpt_dataset",
    "indexed": "datasets.indexed_dataset",
    "helpers": "datasets.helpers",
    "blended": "datasets.blended_megatron_dataset_builder",
    "blended_config": "datasets.blended_megatron_dataset_config",
    "utils": "datasets.utils",
    "null": "tokenizers.text.libraries.null_tokenizer",
}


@pytest.fixture(scope="module", autouse=True)
def megatron():
    """Imported by the process that runs these tests, not by all that collect them: it takes 3 s."""
    globals().update({name: pytest.importorskip(f"megatron.core.{path}") for name, path in MEGATRON.items()})


EOD = 999


class OracleTokenizer:
    """What megatron-core's datasets ask of a tokenizer."""

    eod, pad, vocab_size, unique_identifiers, eos_id = EOD, -1, EOD + 1, {"class": "test"}, EOD


def random_documents(seed, count=40, empty=True):
    rng = np.random.RandomState(seed)
    return [
        [rng.randint(0, EOD + 1, rng.randint(1, 40)).tolist() for _ in range(rng.randint(0 if empty else 1, 4))]
        for _ in range(count)
    ]


def megatron_write(prefix, documents, dtype):
    builder = indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in documents:
        builder.add_document([i for ids in sequences for i in ids], [len(ids) for ids in sequences])
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.uint8])
@pytest.mark.parametrize("seed", range(3))
def test_the_same_bytes_and_readable_both_ways(tmp_path, seed, dtype):
    documents = random_documents(seed)
    if dtype == np.uint8:
        documents = [[[i % 256 for i in ids] for ids in sequences] for sequences in documents]
    megatron_write(tmp_path / "m", documents, dtype)
    write(tmp_path / "o", documents, dtype)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"m{suffix}").read_bytes() == (tmp_path / f"o{suffix}").read_bytes()
    theirs, ours = indexed.IndexedDataset(str(tmp_path / "o")), IndexedDataset(tmp_path / "m")
    assert len(theirs) == len(ours) and ours.sidecar is None
    for i in range(len(ours)):
        assert theirs[i].tolist() == ours[i].tolist() and theirs[i].dtype == ours[i].dtype
        assert theirs.get(i, 1, 0).tolist() == ours.get(i, 1, 0).tolist()
    for name in ("sequence_lengths", "document_indices"):
        theirs_array, ours_array = getattr(theirs, name), getattr(ours, name)
        assert theirs_array.tolist() == ours_array.tolist() and theirs_array.dtype == ours_array.dtype


def test_preprocess_gives_the_bytes_of_megatrons_tool(tmp_path):
    """Its inner loop (sentences that are empty are dropped, the eod joins the last one), with its own writer."""
    rng = np.random.RandomState(0)
    values = [[" ".join(map(str, rng.randint(0, 500, rng.randint(0, 9)))) for _ in range(3)] for _ in range(50)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    preprocess([path], tmp_path / "o", {"tokenizer_type": "NullTokenizer", "vocab_size": 500}, append_eod=True)
    oracle = null.NullTokenizer(500)
    dtype = indexed.DType.optimal_dtype(oracle.vocab_size)
    documents = []
    for value in values:
        sentences = [oracle.text_to_ids(text) for text in value if text]
        if sentences:
            sentences[-1].append(oracle.eod)
        documents.append(sentences)
    megatron_write(tmp_path / "m", documents, dtype)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"m{suffix}").read_bytes() == (tmp_path / f"o_text_document{suffix}").read_bytes()


@pytest.mark.parametrize("vocab_size", [10, 65499, 65500, 65536, 128256])
def test_dtype_and_null_tokenizer(vocab_size):
    assert optimal_dtype(vocab_size) == indexed.DType.optimal_dtype(vocab_size)
    theirs, ours = null.NullTokenizer(vocab_size), NullTokenizer(vocab_size)
    assert (theirs.vocab_size, theirs.eod) == (ours.vocab_size, ours.eod)
    assert theirs.text_to_ids("3 1 2") == ours.tokenize("3 1 2")
    assert theirs.ids_to_text([3, 1]) == ours.detokenize([3, 1])


def oracle_config(tmp_path, s, seed, blend, split, **options):
    flags = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False, **options}
    return core.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=s,
        blend=blend,
        split=split,
        tokenizer=OracleTokenizer(),
        path_to_cache=str(tmp_path / "theirs"),
        **flags,
    )


@pytest.mark.parametrize("seed, num_samples, s", [(1, 3, 7), (2, 200, 7), (3, 333, 16), (4, 50, 1), (1234, 1000, 33)])
def test_index_arrays_and_samples(tmp_path, seed, num_samples, s):
    prefix = write(tmp_path / "x", random_documents(seed, empty=False))
    config = oracle_config(tmp_path, s, seed, ([prefix], None), "70,20,10", reset_position_ids=True, eod_mask_loss=True)
    sizes = [num_samples, num_samples // 3, 5]
    theirs = blended.BlendedMegatronDatasetBuilder(core.GPTDataset, sizes, lambda: True, config).build()
    tokenizer = NullTokenizer(EOD)
    ours_config = GPTDatasetConfig(s, tokenizer, seed, True, True, True, str(tmp_path / "ours"))
    ours = build_datasets(ours_config, sizes, [prefix], "70,20,10", joint=sizes)
    for their, our in zip(theirs, ours, strict=True):
        assert isinstance(our, GPTDataset) and len(their) == len(our)
        for name in ("document_index", "sample_index", "shuffle_index"):
            a, b = getattr(their, name), getattr(our.epochs.block(0), name)
            assert (a == b).all() and a.dtype == b.dtype, name
        for k in range(0, len(our), 7):
            sample = their[k]
            for name in ("tokens", "labels", "loss_mask", "position_ids"):
                assert torch.equal(sample[name], our[k][name]), name
                assert sample[name].dtype == our[k][name].dtype


@pytest.mark.parametrize("seed", range(3))
def test_attention_mask(seed):
    """Our document ids say the same as Megatron's [1, s, s] mask (True where nothing is seen)."""
    text = torch.from_numpy(np.random.RandomState(seed).randint(0, 5, 33))
    mask, loss_mask, position_ids = core._get_ltor_masks_and_position_ids(text[:-1], 4, True, True, True, True)
    flags = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    batch = make_batch(text[None], 4, **flags)
    documents = batch["document_ids"][0]
    seen = (documents[:, None] == documents[None, :]).tril()
    assert torch.equal(mask[0], ~seen)
    assert torch.equal(loss_mask, batch["loss_mask"][0]) and torch.equal(position_ids, batch["position_ids"][0])


@pytest.mark.parametrize("split", ["949,50,1", "969,30,1", "1,1,1", "99,1,0", "100", "0.3,0.3,0.4", "7,0,3", "0,1"])
@pytest.mark.parametrize("documents", [1, 6, 7, 999, 1000, 12345])
def test_splits(split, documents):
    theirs = blended_config.convert_split_vector_to_split_matrix(blended_config.parse_and_normalize_split(split))
    ours = parse_split(split)
    assert theirs == ours
    for part in filter(None, ours):
        bounds = [int(round(bound * float(documents))) for bound in part]
        assert split_documents(part, documents).tolist() == list(range(*bounds))


@pytest.mark.parametrize("seed", range(6))
def test_blending_draws(seed):
    rng = np.random.RandomState(seed)
    count, size = int(rng.randint(1, 9)), int(rng.randint(1, 3000))
    weights = normalize(rng.randint(1, 100, count).tolist() if seed % 2 else rng.rand(count).tolist())
    datasets, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(datasets, samples, np.array(weights), count, size, False)
    ours = build_blending_indices(weights, size)
    assert (datasets == ours[0]).all() and (samples == ours[1]).all()
    sizes = rng.randint(1, 400, count)
    datasets, samples = np.zeros(sizes.sum(), np.int16), np.zeros(sizes.sum(), np.int64)
    helpers.build_exhaustive_blending_indices(datasets, samples, sizes.astype(np.int64), count)
    ours = build_blending_indices(normalize(sizes), int(sizes.sum()))
    assert (datasets == ours[0]).all() and (samples == ours[1]).all()


BLENDS = [["0.7", "a", "0.3", "b"], ["1", "a"], ["3", "a", "1", "b", "1", "c"], ["a", "b", "c"], ["a", "b"]]


@pytest.mark.parametrize("words", BLENDS, ids=" ".join)
def test_blended_sets(tmp_path, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("abc"):
        write(tmp_path / name, random_documents(seed, 30 + 20 * seed, empty=False))
    assert utils.get_blend_from_list(words) == parse_data_path(words)
    sizes, s = [157, 20, 0], 8
    config = oracle_config(tmp_path, s, 5, utils.get_blend_from_list(words), "80,20,0")
    config.path_to_cache = None  # with a cache and a blend, megatron-core asks torch.distributed for its rank
    theirs = blended.BlendedMegatronDatasetBuilder(core.GPTDataset, sizes, lambda: True, config).build()
    ours = build_datasets(GPTDatasetConfig(s, NullTokenizer(EOD), 5), sizes, words, "80,20,0", joint=sizes)
    for their, our in zip(theirs[:2], ours[:2], strict=True):
        assert len(their) == len(our) > 0
        datasets, samples = our.draws(0, len(our))
        assert (their.dataset_index == datasets).all() and (their.dataset_sample_index == samples).all()
        for k in range(0, len(our), 11):
            assert torch.equal(their[k]["tokens"], our[k]["tokens"])


def test_mock_data(tmp_path):
    config = oracle_config(tmp_path, 48, 7, None, None)
    theirs = blended.BlendedMegatronDatasetBuilder(core.MockGPTDataset, [90, 10, 10], lambda: True, config).build()
    ours = build_datasets(GPTDatasetConfig(48, NullTokenizer(EOD), 7), [90, 10, 10])
    for their, our in zip(theirs, ours, strict=True):
        assert len(their) == len(our)
        for k in range(0, 10):
            assert torch.equal(their[k]["tokens"], our[k]["tokens"]) and torch.equal(
                their[k]["labels"], our[k]["labels"]
            )


def test_the_stored_vectors_are_still_megatrons(tmp_path):
    golden = json.loads((Path(__file__).parents[1] / "golden" / "data_indices.json").read_text())
    starts = np.cumsum([0, *golden["lengths"]])
    documents = [[list(range(a, b))] for a, b in zip(starts[:-1], starts[1:], strict=True)]
    megatron_write(tmp_path / "x", documents, np.uint16)
    assert (tmp_path / "x.idx").read_bytes()[:34].hex() == golden["idx_header_hex"]
    assert (tmp_path / "x.idx").stat().st_size == golden["idx_bytes"]
    assert (tmp_path / "x.bin").stat().st_size == golden["bin_bytes"]
    for case in golden["cases"]:
        s, seed = golden["sequence_length"], golden["seed"]
        config = oracle_config(tmp_path, s, seed, ([str(tmp_path / "x")], None), "1,0,0")
        sizes = [case["num_samples"], 0, 0]
        theirs, *_ = blended.BlendedMegatronDatasetBuilder(core.GPTDataset, sizes, lambda: True, config).build()
        for name in ("document_index", "sample_index", "shuffle_index"):
            assert getattr(theirs, name).tolist() == case[name]

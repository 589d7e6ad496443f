"""`.bin/.idx`: what is written is read back; what is damaged is refused, with its position."""

import json
import os
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.data.indexed import IndexedDataset, IndexedDatasetBuilder
from minimegatron.data.tokenizer import NullTokenizer
from minimegatron.errors import DataError


def write(prefix, documents, dtype=np.uint16, tokenizer=None):
    """`documents`: a list of documents, each a list of sequences."""
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype, tokenizer) as builder:
        for sequences in documents:
            builder.add_document([i for ids in sequences for i in ids], [len(ids) for ids in sequences])
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


DOCUMENTS = st.lists(
    st.lists(st.lists(st.integers(0, 60000), min_size=1, max_size=6), max_size=3), min_size=1, max_size=8
).filter(lambda documents: any(documents))


@settings(max_examples=60)
@given(DOCUMENTS, st.sampled_from([np.uint16, np.int32, np.int64]))
def test_read_what_was_written(tmp_path_factory, documents, dtype):
    dataset = IndexedDataset(write(tmp_path_factory.mktemp("i") / "x", documents, dtype), vocab_size=60001)
    sequences = [ids for document in documents for ids in document]
    assert [dataset[i].tolist() for i in range(len(dataset))] == sequences
    assert [ids.tolist() for ids in dataset] == sequences
    assert [ids.tolist() for ids in dataset[1:]] == sequences[1:]
    assert np.diff(dataset.document_indices).tolist() == [len(document) for document in documents]
    assert dataset.dtype == dtype and dataset.tokens.tolist() == [i for ids in sequences for i in ids]


def test_get_stays_inside_the_sequence(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "x", [[[1, 2, 3]], [[4, 5]]]))
    assert dataset.get(0, 1).tolist() == [2, 3] and dataset.get(0, 1, 1).tolist() == [2]
    assert dataset.get(1, 2).tolist() == [] and dataset[-1].tolist() == [4, 5]
    for offset, length in ((0, 4), (2, 2), (4, None), (-1, None)):
        with pytest.raises(DataError, match="of a sequence of 3"):
            dataset.get(0, offset, length)
    with pytest.raises(IndexError):
        dataset[2]
    with pytest.raises(ValueError, match="read-only"):
        dataset[0][0] = 9


@pytest.mark.parametrize(
    "ids, says",
    [
        ([70000], "70000 is outside"),
        ([-1], "-1 is outside"),
        ([3, 1000], "1000 is outside .* the vocabulary"),
        ([1.5], "float64"),
        ([[1, 2]], "shape"),
    ],
)
def test_ids_that_do_not_fit_are_refused_before_the_cast(tmp_path, ids, says):
    with IndexedDatasetBuilder(tmp_path / "x.bin", np.uint16, NullTokenizer(999)) as builder:
        with pytest.raises(DataError, match=says):
            builder.add_document(np.array(ids), [np.size(ids)])
    assert os.listdir(tmp_path) == []


def test_nothing_is_visible_before_finalize_and_nothing_stays_without(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "x.bin") as builder:
        builder.add_document([1], [1])
        assert not (tmp_path / "x.bin").exists()
    assert os.listdir(tmp_path) == []
    with IndexedDatasetBuilder(tmp_path / "x.bin") as builder, pytest.raises(DataError, match="no token"):
        builder.finalize(tmp_path / "x.idx")
    with IndexedDatasetBuilder(tmp_path / "x.bin") as builder, pytest.raises(DataError, match="3 ids for sequences of"):
        builder.add_document([1, 2, 3], [2])
    with IndexedDatasetBuilder(tmp_path / "x.bin") as builder, pytest.raises(DataError, match="not the index of"):
        builder.add_document([1], [1])
        builder.finalize(tmp_path / "y.idx")
    assert os.listdir(tmp_path) == []
    with pytest.raises(DataError, match="mkdir"):
        IndexedDatasetBuilder(tmp_path / "missing" / "x.bin")


def test_a_crash_while_publishing_never_mixes_two_datasets(tmp_path, monkeypatch):
    """Die at each rename or removal in turn: the prefix is the old dataset, the new one, or refused."""
    old, new = [[[1, 2, 3]]], [[[4, 5, 6]]]
    outcomes = set()
    for survived in range(6):
        write(tmp_path / "x", old)
        calls = iter(range(100))

        def step(real, calls=calls, survived=survived):
            def call(*args):
                if next(calls) >= survived:
                    raise SystemExit("killed")
                return real(*args)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", step(os.replace))
            patch.setattr(os, "unlink", step(os.unlink))
            try:
                write(tmp_path / "x", new)
            except SystemExit:
                pass
        try:
            outcomes.add(tuple(IndexedDataset(tmp_path / "x", verify=False)[0].tolist()))
        except DataError:
            outcomes.add("refused")
    assert outcomes == {(1, 2, 3), (4, 5, 6), "refused"}


# ---------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    rng = np.random.RandomState(0)
    documents = [[rng.randint(0, 1000, rng.randint(1, 9)).tolist() for _ in range(2)] for _ in range(20)]
    return write(tmp_path_factory.mktemp("corpus") / "x", documents, tokenizer=NullTokenizer(999))


def copy(corpus, folder, sidecar=True):
    for suffix in (".bin", ".idx", *((".json",) if sidecar else ())):
        shutil.copy(corpus + suffix, folder / f"x{suffix}")
    return folder / "x"


@pytest.mark.parametrize("seed", range(30))
def test_any_damage_is_refused_with_its_place(corpus, tmp_path, seed):
    """Flip, cut or extend either file at a random place."""
    rng = np.random.RandomState(seed)
    prefix = copy(corpus, tmp_path)
    path = tmp_path / f"x{rng.choice(['.bin', '.idx'])}"
    data = bytearray(path.read_bytes())
    place = rng.randint(len(data))
    match rng.choice(["flip", "cut", "extend"]):
        case "flip":
            data[place] ^= 1 << rng.randint(8)
        case "cut":
            del data[place:]
        case "extend":
            data += rng.bytes(1 + rng.randint(64))
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        IndexedDataset(prefix, vocab_size=1000)
    assert "byte" in caught.value.where and "/x." in caught.value.where


def patched(corpus, folder, offset, data):
    prefix = copy(corpus, folder, sidecar=False)
    with open(f"{prefix}.idx", "r+b") as file:
        file.seek(offset)
        file.write(data)
    return prefix


@pytest.mark.parametrize(
    "offset, data, says",
    [
        (0, b"X", "magic"),
        (9, (1).to_bytes(8, "big"), "big-endian"),
        (9, (2).to_bytes(8, "little"), "version is 2"),
        (17, b"\x07", "dtype code is 7"),
        (17, b"\x04", "byte"),
        (18, bytes(8), "bytes, the file has"),
        (26, (2**62).to_bytes(8, "little"), "bytes, the file has"),
        (34, bytes(4), "sequence 0 has 0 tokens"),
        (34, b"\xff\xff\xff\xff", "sequence 0 has -1 tokens"),
        (34 + 4 * 40, b"\x02", "sequence 0 starts at byte 2"),
        (34 + 12 * 40, b"\x01", "first document starts at sequence 1"),
        (34 + 12 * 40 + 8, b"\x27", "document 2 starts before document 1"),
        (34 + 12 * 40 + 8 * 20, b"\x27", "last boundary is 39"),
    ],
)
def test_each_kind_of_damage_says_what_it_is(corpus, tmp_path, offset, data, says):
    with pytest.raises(DataError, match=says):
        IndexedDataset(patched(corpus, tmp_path, offset, data))


@pytest.mark.parametrize("change", [-2, 2])
def test_bin_of_another_size_is_refused_without_a_sidecar(corpus, tmp_path, change):
    prefix = copy(corpus, tmp_path, sidecar=False)
    data = (tmp_path / "x.bin").read_bytes()
    (tmp_path / "x.bin").write_bytes(data[:change] if change < 0 else data + bytes(change))
    with pytest.raises(DataError, match=f"the file has {len(data) + change}"):
        IndexedDataset(prefix)


def test_a_boundary_that_moved_is_seen_by_the_hash(corpus, tmp_path):
    prefix = patched(corpus, tmp_path, 34 + 12 * 40 + 8, b"\x03")
    assert IndexedDataset(prefix).document_indices[1] == 3, "plausible, so only a hash can tell"
    shutil.copy(f"{corpus}.json", f"{prefix}.json")
    with pytest.raises(DataError, match="SHA-256"):
        IndexedDataset(prefix, verify=False)


def test_empty_and_missing_files(corpus, tmp_path):
    prefix = copy(corpus, tmp_path)
    for suffix in (".idx", ".bin"):
        (tmp_path / f"x{suffix}").write_bytes(b"")
        with pytest.raises(DataError, match="byte 0"):
            IndexedDataset(prefix)
        (tmp_path / f"x{suffix}").unlink()
        with pytest.raises(DataError, match="no such file"):
            IndexedDataset(prefix)
        copy(corpus, tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"format": "other"}', "[" * 100_000, "null"])
def test_a_sidecar_that_is_none_is_refused(corpus, tmp_path, content):
    prefix = copy(corpus, tmp_path)
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(DataError, match="x.json"):
        IndexedDataset(prefix)


def test_verify_decides_whether_bin_is_hashed(corpus, tmp_path):
    prefix = copy(corpus, tmp_path)
    data = bytearray((tmp_path / "x.bin").read_bytes())
    data[10] ^= 1
    (tmp_path / "x.bin").write_bytes(data)
    IndexedDataset(prefix, verify=False)
    with pytest.raises(DataError, match="SHA-256"):
        IndexedDataset(prefix, verify=True)


@pytest.mark.parametrize("seed", range(2))
def test_ids_outside_the_vocabulary(tmp_path, seed):
    """Refused on opening, with file, offset and value; with and without a sidecar; negative ones too."""
    rng = np.random.RandomState(seed)
    ids = rng.randint(0, 500, 100)
    place, value = int(rng.randint(100)), int(rng.choice([-1, 500, 2**31 - 1, -(2**31)]))
    prefix = write(tmp_path / "x", [[ids.tolist()]], np.int32)
    IndexedDataset(prefix, vocab_size=500)
    raw = np.fromfile(f"{prefix}.bin", np.int32)
    raw[place] = value
    raw.tofile(f"{prefix}.bin")
    os.unlink(f"{prefix}.json")
    with pytest.raises(DataError, match=f"token id {value} is outside") as caught:
        IndexedDataset(prefix, vocab_size=500)
    assert caught.value.where == f"{prefix}.bin, byte {4 * place}"
    largest = write(tmp_path / "y", [[[3, 499]]], np.int32)
    assert json.loads((tmp_path / "y.json").read_text())["max_id"] == 499
    with pytest.raises(DataError, match="token id 499"):
        IndexedDataset(largest, vocab_size=499, verify=False)

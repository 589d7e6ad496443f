"""Any box of a tensor that is made of others is that box of the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.checkpoint import sources
from minimegatron.checkpoint.conversion import logical_tensors
from minimegatron.checkpoint.huggingface import as_ours, as_theirs
from minimegatron.checkpoint.shard_file import Entry
from minimegatron.checkpoint.sources import InMemory, View, read_box
from minimegatron.models.families import family_config

FAMILIES = ("gpt2", "llama", "qwen2", "mixtral", "qwen2_moe")


@st.composite
def models(draw):
    family, groups, shared = draw(st.sampled_from(FAMILIES)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes = {
        "num_layers": draw(st.integers(1, 2)),
        "hidden_size": draw(st.integers(1, 9)),
        "num_attention_heads": groups * shared,
        "kv_channels": 2 * draw(st.integers(1, 3)),
        "ffn_hidden_size": draw(st.integers(1, 9)),
        "vocab_size": draw(st.integers(1, 9)),
        "max_position_embeddings": draw(st.integers(1, 5)),
    }
    if family != "gpt2":
        sizes["num_query_groups"] = groups
    if "mix" in family or "moe" in family:
        sizes |= {"num_experts": draw(st.integers(2, 4)), "moe_router_topk": 2}
    if family == "qwen2_moe":
        sizes["moe_shared_expert_intermediate_size"] = draw(st.integers(1, 5))
    return family, family_config(family, **sizes)


def boxes(shape):
    ends = [
        st.tuples(st.integers(0, n - 1), st.integers(1, n)).map(lambda ab: (min(ab), max(min(ab) + 1, ab[1])))
        for n in shape
    ]
    return st.tuples(*ends)


@pytest.mark.slow
@settings(max_examples=60)
@given(models(), st.data(), st.integers(1, 200))
def test_a_box_of_a_view_is_that_box_of_the_whole(model, data, block):
    family, config = model
    before, sources.BLOCK = sources.BLOCK, block
    try:
        counter = iter(range(10**6))
        state = {
            name: torch.tensor([next(counter) for _ in range(torch.Size(d.shape).numel())]).view(d.shape).float()
            for name, d in logical_tensors(config).items()
        }
        theirs = as_theirs(InMemory(state), config, family)
        out = {name: theirs.read(name) for name in theirs.tensors}
        everything = torch.cat([tensor.flatten() for tensor in out.values()])
        assert everything.sort().values.equal(torch.cat([t.flatten() for t in state.values()]).sort().values)
        ours = as_ours(InMemory(out), config, family)
        for view, wholes in ((ours, state), (theirs, out)):
            assert view.tensors.keys() == wholes.keys()
            name = data.draw(st.sampled_from(sorted(view.tensors)))
            box = data.draw(boxes(view.tensors[name].shape))
            assert view.read(name, box).equal(wholes[name][tuple(slice(a, b) for a, b in box)])
            assert view.read(name).equal(wholes[name])
    finally:
        sources.BLOCK = before


@settings(max_examples=60)
@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_a_box_of_a_file_is_that_box_of_the_tensor(tmp_path_factory, shape, data):
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    path = tmp_path_factory.mktemp("file") / "numbers"
    path.write_bytes(b"head" + tensor.numpy().tobytes())
    entry = Entry(torch.int64, tuple(shape), 4, 4 + tensor.numel() * 8)
    box = data.draw(boxes(shape))
    assert read_box(path, entry, box).equal(tensor[tuple(slice(a, b) for a, b in box)])


def test_what_no_copy_covers_is_zero():
    view = View(InMemory({"a": torch.ones(2, 3)}), {"b": sources.Described(torch.float32, (4, 3))},
                [sources.Copy(sources.Rows("b", 0, 2), sources.Rows("a", 0, 2))])  # fmt: skip
    assert view.read("b").equal(torch.tensor([[1.0] * 3] * 2 + [[0.0] * 3] * 2))
    assert view.read("b", ((3, 4), (0, 3))).equal(torch.zeros(1, 3))

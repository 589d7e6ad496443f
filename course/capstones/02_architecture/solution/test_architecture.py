"""What the mixer has to do, tried on small models."""

from __future__ import annotations

import pytest
import torch
from course.capstone02.trying import first_step, from_states, model_of, ranks
from reference import reference

TOKENS = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(1))


def test_it_is_its_formula():
    model, seen = model_of("--seed 3"), []
    mixer = model.layers[1].self_attention
    mixer.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    with torch.no_grad():
        model.full_logits(TOKENS)
        ((x, y),) = seen
        weights = dict(mixer.named_parameters())
        for row in range(2):
            assert (reference(model.config, 1, weights, x[:, row]) - y[:, row]).abs().max() < 1e-10


def test_documents_are_alone():
    model, ids = model_of(), (torch.arange(16) >= 7).long().expand(2, 16)
    with torch.no_grad():
        together, alone = model.full_logits(TOKENS, document_ids=ids), model.full_logits(TOKENS[:, 7:])
    assert (together[:, 7:] - alone).abs().max() < 1e-10


def test_generation_goes_on_from_what_it_keeps():
    model = model_of().eval()
    with torch.no_grad():
        whole = model.full_logits(TOKENS)
    assert (from_states(model, TOKENS, left=torch.nan) - whole).abs().max() < 1e-10
    assert (from_states(model, TOKENS[:, :12], pieces=(12,)) - whole[:, :12]).abs().max() < 1e-10


@pytest.mark.parametrize("flags", ["", " --sequence-parallel"])
def test_every_gradient_over_two_ranks(flags):
    ranks(2).run(first_step, f"--tensor-model-parallel-size 2{flags}")

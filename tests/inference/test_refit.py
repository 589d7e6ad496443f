"""A trainer's weights become an engine's to the bit, whatever the two layouts are, and no page of before is read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.checkpoint.commit import Keep, folder_of
from minimegatron.checkpoint.load import read_tensors
from minimegatron.checkpoint.manifest import Manifest
from minimegatron.checkpoint.regions import Logical, Region
from minimegatron.checkpoint.save import save
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.errors import ConfigError
from minimegatron.inference import refit as module
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.generate import generate
from minimegatron.inference.refit import Held, Refit, weights_of
from minimegatron.inference.sequence import Request
from minimegatron.layers.logical import load_logical
from minimegatron.layers.param import logical_parameters
from minimegatron.models.chunks import build_chunks
from minimegatron.training.run_state import model_weights
from tests.inference.ranked import error_of
from tests.thorough import SLOW, mostly_thorough
from tests.twin import Case, parallel_model, weights

PROMPTS = [[5, 9, 3, 7, 7, 1, 2, 2, 8], [5, 9, 3, 7, 11]]  # with whole pages of 4, the first of them the same
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
EP2, SP = {"expert_model_parallel_size": 2}, {"sequence_parallel": True}
TIED: dict[str, Any] = {"untie_embeddings_and_output_weights": False}
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
BF16 = {"params_dtype": "bf16"}


@dataclasses.dataclass(frozen=True)
class Way:
    """From a trainer to an engine."""

    trainer: Case
    engine: dict[str, Any]
    params_dtype: str = "fp32"

    def built(self, mesh: Mesh, params_dtype: str) -> Any:
        """A model in the engine's layout, with other weights than the trainer's."""
        config = self.trainer.config.replace(params_dtype=params_dtype)
        model = build_chunks(config, mesh).eval()
        load_logical(model, weights(config, seed=7), stage=mesh.pp.size > 1)
        return model


WAYS = {
    2: [
        Way(Case(TP2), {}),
        Way(Case(PP2, TIED), TP2),
        Way(Case({}, TIED, sharding="optim_grads_params"), PP2),
        Way(Case({}, BF16, sharding="fsdp2"), {}),
        Way(Case(EP2, EXPERTS, sharding="optim"), TP2 | SP),
        Way(Case(TP2 | SP, EXPERTS, sharding="optim_grads"), EP2, "bf16"),
    ],
    4: [
        Way(Case(TP2 | PP2, TIED, sharding="optim"), {}),
        Way(Case(PP2 | EP2, EXPERTS, sharding="optim_grads_params"), TP2 | PP2 | SP),
        Way(Case(TP2, sharding="fsdp2"), {"tensor_model_parallel_size": 4}),
        Way(Case({}, TIED, sharding="optim_grads_params"), TP2 | PP2),
    ],
}


def handed_over(rank: int, world: int, ways: list[Way], root: Path) -> list[dict[str, Any]]:
    """What is wrong with an engine that has been given weights twice; in small rounds."""
    module.ROUND = 1 << 12
    found = []
    for i, way in enumerate(ways):
        mesh, case = Mesh.build(ParallelConfig(**way.engine)), way.trainer
        trainer = parallel_model(dataclasses.replace(case, seed=1), Mesh.build(case.parallel))
        engine, fresh = (Engine(way.built(mesh, way.params_dtype), EngineConfig(64, page_size=4)) for _ in range(2))
        old = generate(engine, PROMPTS, 6)
        cast = case.config.params_dtype != way.params_dtype
        refit = Refit(model_weights(trainer), engine, cast=cast)
        refused = error_of(lambda t=trainer, e=engine: Refit(model_weights(t), e))  # type: ignore[misc]
        save(root, i + 1, "run", model_weights(trainer), {}, mesh.world, Keep())
        folder, stored = folder_of(root, i + 1), way.built(mesh, case.config.params_dtype)
        read_tensors(weights_of(stored), folder, Manifest.read(folder), mesh.world)
        load = zip(logical_parameters(fresh.model), logical_parameters(stored), strict=True)
        for (_, param), (_, value) in load:
            param.detach().copy_(value)
        want = generate(fresh, PROMPTS, 6)
        versions = [refit(model_weights(trainer)) for _ in range(2)]
        made = generate(engine, PROMPTS, 6)
        pairs = zip(logical_parameters(engine.model), logical_parameters(fresh.model), strict=True)
        found.append(
            {
                "other": [name for (name, mine), (_, its) in pairs if not torch.equal(mine, its)],
                "versions": (*versions, *(each.weight_version for each in (*old, *made))),
                "answers": [each.tokens for each in made] == [each.tokens for each in want],
                "as before": [each.tokens for each in made] == [each.tokens for each in old],
                "refused": refused,
                "rounds": len(refit.rounds),
            }
        )
    return found


@SLOW
@pytest.mark.parametrize("world", mostly_thorough([2, 4], [0]))
def test_the_engine_has_what_a_checkpoint_would_have_brought(ranks, tmp_path, world):
    for found in ranks(world).run(handed_over, WAYS[world], tmp_path):
        for way, result in zip(WAYS[world], found, strict=True):
            assert result["other"] == [] and result["answers"] and not result["as before"], (way, result)
            assert result["versions"] == (1, 2, 0, 0, 2, 2)
            assert result["rounds"] > 1
            if way.trainer.config.params_dtype != way.params_dtype:
                assert "in the trainer and torch." in result["refused"] and "cast=True" in result["refused"]
            else:
                assert result["refused"] == "nothing happened"


def serial(seed: int) -> Any:
    """A model in one process."""
    config = Case().config
    model = build_chunks(config, Mesh.serial()).eval()
    load_logical(model, weights(config, seed))
    return model


def test_a_page_of_other_weights_is_not_read(monkeypatch):
    """And if the version stayed, it would be."""
    trainer, want = weights_of(serial(1)), generate(Engine(serial(1), EngineConfig(64, page_size=4)), PROMPTS, 6)
    for told in (True, False):
        engine = Engine(serial(7), EngineConfig(64, page_size=4))
        generate(engine, PROMPTS, 6)
        if not told:
            monkeypatch.setattr(engine, "new_weights", lambda: 0)
        Refit(trainer, engine)(trainer)
        hits = engine.scheduler.blocks.hits
        made = generate(engine, PROMPTS, 6)
        close = [a.log_probs == pytest.approx(b.log_probs, abs=1e-6) for a, b in zip(made, want, strict=True)]
        assert all(close) == told and (engine.scheduler.blocks.hits == hits) == told


def test_who_is_under_way_goes_on_with_the_new_weights():
    """Tokens that were drawn stay, everything is computed anew, and each output says whose it is."""
    engine, trainer = Engine(serial(7), EngineConfig(64, page_size=4)), weights_of(serial(1))
    engine.add_request(Request(tuple(PROMPTS[0]), 8), "a")
    outputs = [output for _ in range(3) for output in engine.step()]
    Refit(trainer, engine)(trainer)
    while engine.has_work:
        outputs += engine.step()
    tokens = [token for output in outputs for token in output.tokens]
    assert [output.weight_version for output in outputs] == [0] * 3 + [1] * 5
    (want,) = generate(Engine(serial(1)), [PROMPTS[0] + tokens[:3]], 5)
    assert tokens[3:] == want.tokens


def changed(name: str, trainer: dict[str, Logical]) -> dict[str, Logical]:
    """The trainer's weights with a fault."""
    first = next(iter(trainer))
    weight = trainer[first]
    (part,) = weight.parts
    if name == "missing":
        return {n: w for n, w in trainer.items() if n != first}
    if name == "more":
        return trainer | {"value_head.weight": weight}
    if name == "shape":
        return trainer | {first: dataclasses.replace(weight, shape=(3, 3))}
    half = Region(((0, 20), *part.box[1:]), part.data[:20])
    return trainer | {first: dataclasses.replace(weight, parts=[half])}


@pytest.mark.parametrize(
    "fault, words",
    [
        ("missing", "the engine wants it, and the trainer lacks it"),
        ("more", "value_head.weight: the trainer has it, and the engine lacks it"),
        ("shape", "[3, 3] in the trainer, [57, 32] in the engine"),
        ("half", "at [(20, 57), (0, 32)], which rank 0 wants"),
    ],
)
def test_other_weights_are_refused(fault, words):
    trainer, engine = weights_of(serial(1)), Engine(serial(7))
    with pytest.raises(ConfigError) as error:
        Refit(changed(fault, trainer), engine)
    assert words in str(error.value) and error.value.fix
    with pytest.raises(ConfigError, match="lies elsewhere than when the plan was made"):
        Refit(trainer, engine)(changed("half", trainer))
    assert engine.scheduler.version == 0


SIZES = (5, 4)
box = st.tuples(*(st.tuples(st.integers(0, n - 1), st.integers(1, n)).filter(lambda r: r[0] < r[1]) for n in SIZES))


@settings(max_examples=60)
@given(st.lists(st.lists(box, max_size=3), min_size=1, max_size=4), st.lists(st.lists(box, max_size=2), max_size=4))
def test_every_number_comes_once_from_who_has_it(held, wanted):
    """Boxes of any kind, overlapping ones too."""
    whole = ((0, SIZES[0]), (0, SIZES[1]))
    of = [{"w": Held(torch.float32, SIZES, tuple(boxes))} for boxes in ([*held[0], whole], *held[1:])]
    want = [{"w": Held(torch.float32, SIZES, tuple(boxes))} for boxes in wanted]
    filled = [[torch.zeros(SIZES) for _ in boxes] for boxes in wanted]
    for piece in module._pieces("w", of, want, 4, [0] * len(of)):
        place = tuple(slice(a, b) for a, b in piece.box)
        filled[piece.target][piece.wanted][place] += 1
        for boxes, i in ((of[piece.source]["w"].boxes, piece.held), (want[piece.target]["w"].boxes, piece.wanted)):
            assert all(a <= c and d <= b for (a, b), (c, d) in zip(boxes[i], piece.box, strict=True))
    for target, boxes in enumerate(wanted):
        for i, each in enumerate(boxes):
            expected = torch.zeros(SIZES)
            expected[tuple(slice(a, b) for a, b in each)] = 1
            assert torch.equal(filled[target][i], expected)

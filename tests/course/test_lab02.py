"""Lab 02's checks: an answer that is right in numbers and costs bytes; the references beside the package."""

from __future__ import annotations

import ast
import builtins
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

from minimegatron.comm.mesh import Axis, Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.param import layout_of
from minimegatron.models.decoder import GPTModel
from minimegatron.models.families import family_config
from tests.course.marked import LABS

HEADS, PREDICTED, REPLICATED = (
    import_module(f"course.02_tensor_parallel.checks.{part}") for part in ("heads", "predicted", "replicated")
)


def test_a_loss_that_gathers_the_logits_is_right_in_numbers_and_loses_points_by_bytes(nursery):
    lab = LABS["02_tensor_parallel"]
    source = lab.source("cross_entropy: gathers the logits")
    verdict = lab.check(nursery, "cross_entropy", source)
    assert [row.points == row.of for row in verdict.rows] == [True, True, False], verdict
    assert "bytes; the bound" in verdict.rows[-1].note


def test_activations_as_published():
    """Korthikanti et al. 2022 for 22B, 175B, 530B and 1T with t = 8: GB a layer undivided, tp, tp and sp."""
    published = {
        (6144, 64): (1.770, 0.331, 0.221), (12288, 96): (2.869, 0.579, 0.359),
        (20480, 128): (4.110, 0.881, 0.514), (25600, 160): (5.138, 1.101, 0.642),
    }  # fmt: skip
    for (h, a), want in published.items():
        got = [PREDICTED.activation_bytes(2048, 1, h, a, t, sp) / 1e9 for t, sp in ((1, False), (8, False), (8, True))]
        assert got == pytest.approx(want, abs=6e-4)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_partial_gradients_are_those_that_the_package_declares(sequence_parallel):
    """Beside `ParamLayout.partial`, which the layouts against the serial twin prove."""
    for changes in ({"qk_layernorm": True}, {"untie_embeddings_and_output_weights": True}):
        sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
        with torch.device("meta"):
            model = GPTModel(family_config("gpt2", **sizes, **changes), Mesh.serial())
        kinds = {"heads", "sequence"} if sequence_parallel else {"heads"}
        want = [name for name, p in model.named_parameters() if layout_of(p).partial in kinds]
        assert REPLICATED.partial_gradients([name for name, _ in model.named_parameters()], sequence_parallel) == want


def test_the_names_in_the_check_are_names_of_the_package():
    config = family_config(
        "gpt2", num_layers=1, qk_layernorm=True, untie_embeddings_and_output_weights=True, num_attention_heads=4
    )
    with torch.device("meta"):
        names = {name.replace("decoder.", "") for name, _ in GPTModel(config, Mesh.serial()).named_parameters()}
    assert set(REPLICATED.NAMES) <= names


def test_the_packed_rows_are_those_of_the_package():
    """Rows of the logical QKV matrix which the package's layout gives each rank, group by group."""
    config = family_config("llama", num_layers=1, hidden_size=32, num_attention_heads=8, num_query_groups=4)
    mesh, d = Mesh.serial(), 4
    mesh.parallel = ParallelConfig(tensor_model_parallel_size=2)
    q, k, v = (torch.randn(heads * d, 32) for heads in (8, 4, 4))
    logical = torch.cat([w.unflatten(0, (4, -1)) for w in (q, k, v)], 1).flatten(0, 1)
    for rank in range(2):
        mesh.tp = Axis("tp", (0, 1), rank)
        with torch.device("meta"):
            layout = layout_of(GPTModel(config, mesh).decoder.layers["0"].self_attention.linear_qkv.weight)
        assert torch.equal(HEADS.qkv_part(q, k, v, d, rank, 2), layout.take(logical))


def test_after_each_stop_a_cell_imports_what_it_uses():
    """A kernel that is started again at the beginning of a part has no import of the parts before it."""
    source = Path(PREDICTED.__file__).parents[1].joinpath("lab.py").read_text()
    given = ("check", "display", "guess", "guessed", "progress")
    for number, part in enumerate(source.split("**End of part ")):
        bound, loaded = {*dir(builtins), *given, *LABS["02_tensor_parallel"].lab.exercises}, set()
        for cell in re.split(r"^# %%(?: .*)?\n", part, flags=re.M)[1:]:
            bound |= set(re.findall(r"^# %%.* --out (\w+)", cell, flags=re.M))
            if re.search(r"^# %%(exercise|ranks|torchrun) ", cell, flags=re.M):
                continue  # it runs in a process of its own
            nodes = list(ast.walk(ast.parse(cell)))
            imports = [one for node in nodes if isinstance(node, ast.ImportFrom | ast.Import) for one in node.names]
            names = [node for node in nodes if isinstance(node, ast.Name)]
            bound |= {one.asname or one.name for one in imports}
            bound |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
            bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
            bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
            loaded |= {name.id for name in names if isinstance(name.ctx, ast.Load)}
        assert loaded and loaded - bound == set(), number

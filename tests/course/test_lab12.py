"""Lab 12's checks: what the judge takes for right is what the package builds, plans and sends."""

from __future__ import annotations

import itertools
from fractions import Fraction
from importlib import import_module

import pytest

from labkit.exercises import Draw
from minimegatron.comm.mesh import Mesh
from minimegatron.config import DataConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from minimegatron.config.run import RunConfig
from minimegatron.footprint.kinds import StageRun
from minimegatron.footprint.prediction import Work, sizes_of
from minimegatron.footprint.states import meta_model, meta_wrapper, states
from minimegatron.models.families import family_config
from minimegatron.parallel.pipeline.schedules import build_schedule
from minimegatron.planner.closed_forms import bubble, crossover_tokens, in_flight, sent
from minimegatron.planner.cluster import CLUSTERS, Cluster
from minimegatron.planner.layouts import layouts
from minimegatron.planner.planning import RECOMPUTE
from minimegatron.planner.search import search
from minimegatron.planner.traffic import run_messages
from minimegatron.trace import Event
from minimegatron.training.arguments import parse_args
from minimegatron.training.flops import forward_flops, step_flops
from tests.course.marked import LABS

MARKED = LABS["12_planning"]
LAB = MARKED.lab
ZERO = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def part(name):
    return import_module(f"course.12_planning.checks.{name}")


def model_of(model, layers, **more):
    """The lab's description of a model as a configuration."""
    if model.get("experts"):
        more |= {"num_experts": model["experts"], "moe_router_topk": 2, "moe_ffn_hidden_size": model["f"]}
    return family_config(
        "llama", num_layers=layers, hidden_size=model["h"], ffn_hidden_size=model["f"], kv_channels=model["d"],
        num_attention_heads=model["heads"], num_query_groups=model["groups"], vocab_size=model["vocab"],
        untie_embeddings_and_output_weights=not model["tied"], params_dtype="bf16", **more,
    )  # fmt: skip


def layout_of(tp=1, cp=1, pp=1, ep=1, etp=None, **more):
    return ParallelConfig(
        tensor_model_parallel_size=tp, context_parallel_size=cp, pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep, expert_tensor_parallel_size=etp or tp, sequence_parallel=tp > 1, **more,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_parameters_are_those_of_a_model_that_is_built(seed):
    place = part("states")._stage(Draw(seed), 4 * (seed % 2))
    model, both = place["model"], place["first"] and place["last"]
    pp = 1 if both else 3
    rank = 0 if place["first"] else 2 if place["last"] else 1
    world = 4 * place["tp"] * place["ep"] * pp
    parallel = layout_of(place["tp"], pp=pp, ep=place["ep"], etp=place["etp"])
    mesh = Mesh.planned(parallel, rank * world // pp, world)
    built = meta_model(model_of(model, place["layers"] * pp), mesh, OptimizerConfig(), None)
    counted = {"dense": 0, "experts": 0}
    for name, p in built.named_parameters():
        counted["experts" if ".experts." in name else "dense"] += p.numel()
    assert counted == LAB["stage_parameters"].reference(**place)


STATES = [
    (layout, zero, precision)
    for layout in ({"tp": 2, "cp": 2}, {"tp": 2, "ep": 4, "etp": 1}, {"tp": 2, "cp": 2, "ep": 2, "etp": 2}, {"ep": 8})
    for zero, precision in ((0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "bf16"))
]


@pytest.mark.parametrize(("layout", "zero", "precision"), STATES)
def test_bytes_of_the_state_are_those_of_tensors(layout, zero, precision):
    model = {"h": 256, "heads": 8, "groups": 4, "d": 32, "f": 512, "vocab": 1024, "tied": False}
    config = model_of({**model, "experts": 8}, 2).replace(params_dtype=precision)
    mesh = Mesh.planned(layout_of(**layout, data_parallel_sharding_strategy=ZERO[zero]), 0, 16)
    held = states(meta_wrapper(meta_model(config, mesh, OptimizerConfig(), None), mesh, OptimizerConfig()),
                  OptimizerConfig())  # fmt: skip
    at = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "etp": layout.get("tp", 1)} | layout
    mine = {name: at[name] for name in ("tp", "ep", "etp")}
    counts = part("states").stage_parameters({**model, "experts": 8}, 2, True, True, **mine)
    told = LAB["state_bytes"].reference(
        **counts, layout={**at, "dp": 16 // (at["tp"] * at["cp"])}, zero=zero, precision=precision
    )
    assert {name: held.get(name, 0) for name in told} == told


@pytest.mark.parametrize("seed", range(8))
def test_a_layer_keeps_what_its_tape_says(seed):
    run = part("activations")._run(Draw(seed), ("none", "mlp", "full")[seed % 3])
    model, recompute = {**run["model"], "vocab": 256, "tied": False}, run["recompute"]
    more = {"recompute_granularity": "selective", "recompute_modules": ("mlp",)} if recompute == "mlp" else {}
    config = model_of(model, 1, **(more or RECOMPUTE[recompute]))
    parallel = layout_of(run["tp"]).replace(sequence_parallel=run["sp"])
    mesh = Mesh.planned(parallel, 0, run["tp"])
    z = sizes_of(config, mesh, OptimizerConfig(), Work(run["tokens"], 1, 1, False, "cuda"))
    built = meta_model(config, mesh, OptimizerConfig(), None)
    _, (_, layer), _ = StageRun(built, z).parts
    assert LAB["activation_bytes"].reference(**run)["layer"] == layer.kept


@pytest.mark.parametrize(("p", "v"), itertools.product((2, 3, 4, 8), (1, 2, 3)))
def test_as_many_passes_are_under_way_as_the_schedule_has(p, v):
    live = part("activations").live
    for m in (p, 2 * p, 4 * p) if v > 1 else (1, 2, p, 3 * p):
        built = build_schedule("interleaved" if v > 1 else "1f1b", p, m, v)
        for rank in range(p):
            now = itertools.accumulate((action.kind == "F") - (action.kind == "B") for action in built.actions[rank])
            assert Fraction(max(now), v) == live(p, v, m, rank)
            assert v > 1 or live(p, v, m, rank) == in_flight("1f1b", p, m, rank)


SENT = [
    ({"tp": 4}, 0, 1, 1), ({"tp": 2, "cp": 2, "pp": 2}, 5, 1, 1), ({"cp": 4}, 0, 0, 1), ({"pp": 4}, 9, 3, 1),
    ({"pp": 4}, 0, 1, 2), ({"tp": 2, "pp": 2}, 8, 1, 3), ({"tp": 2, "ep": 4, "etp": 1}, 0, 1, 1),
    ({"ep": 8, "pp": 2}, 8, 3, 1),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "rank", "zero", "v"), SENT)
def test_bytes_of_an_axis_are_those_of_the_planners_messages(layout, rank, zero, v):
    """Of layers and stages: the ends of the model, and small messages, are in the package's list alone."""
    world, m, s = 16, 4 * layout.get("pp", 1), 512
    model = {"h": 256, "heads": 8, "groups": 4, "d": 32, "f": 512, "vocab": 1024, "tied": False}
    model["experts"] = 8 * ("ep" in layout)
    more = {"data_parallel_sharding_strategy": ZERO[zero]}
    more |= {"num_virtual_stages_per_pipeline_rank": v} if v > 1 else {}
    parallel = layout_of(**layout, **more)
    pp, layers = layout.get("pp", 1), 24
    dispatcher = {"moe_token_dispatcher_type": "alltoall"} if model["experts"] else {}
    run = RunConfig(
        model_of(model, layers, **dispatcher), parallel, OptimizerConfig(), DataConfig(mock_data=True, seq_length=s),
        TrainingConfig(micro_batch_size=1, global_batch_size=m * parallel.data_parallel_size(world)),
    )  # fmt: skip
    stage, tokens = rank // (world // pp), s // layout.get("cp", 1)
    at = {"tp": 1, "cp": 1, "pp": 1, "ep": 1} | layout
    at |= {"dp": world // (at["tp"] * at["cp"] * pp), "zero": zero, "v": v}
    ends = {"first": stage == 0, "last": stage == pp - 1}
    mine = part("states").stage_parameters(
        model, layers // pp, **ends, tp=at["tp"], ep=at["ep"], etp=at.get("etp", at["tp"])
    )
    told = LAB["bytes_sent"].reference(
        {**model, "topk": 2 * bool(model["experts"])}, at, tokens, layers // pp, m, stage, **mine
    )
    mesh, counted = Mesh.planned(parallel, rank, world), dict.fromkeys(told, 0.0)
    names = {"tp": "tp", "cp": "cp", "cp_outer": "cp", "pp": "pp", "ep": "ep", "dp_cp": "dp", "edp": "dp"}
    small = 8 * tokens  # losses, counts, the weights of experts' rows
    for (message, where), count in run_messages(run, rank, world).items():
        one = Event(message.name, "comm", 0, 0, 0, message.axis, message.nbytes, mesh.axis(message.axis).size)
        if message.axis in names and message.nbytes > small and where != "end of step":
            counted[names[message.axis]] += count * one.wire_bytes
    of_ends = m * (2 * ends["first"] + 3 * ends["last"]) * sent("all_gather", 2 * tokens * 256, at["tp"])
    assert told | {"tp": told["tp"] + of_ends} == counted


def test_flops_and_bubble_of_a_step_are_the_packages():
    config = model_of({"h": 256, "heads": 8, "groups": 4, "d": 32, "f": 512, "vocab": 1024, "tied": False}, 4)
    causal, whole = forward_flops(config, 512), forward_flops(config, 512, causal=False)
    square = 2 * (whole["attention"] - causal["attention"])
    peak, run = 1e12, {"reached": 1.0, "full": False, "waits": 0.0, "gradients": 0.0}
    told = LAB["step_time"].reference(sum(causal.values()) - square / 2, square, 16, 8, peak, p=4, v=2, m=8, **run)
    ideal = step_flops(config, 16, 512) / (8 * peak)
    assert told["seconds"] == pytest.approx(ideal * (1 + float(bubble(4, 8, 2))))
    assert told["mfu"] == pytest.approx(ideal / told["seconds"])


@pytest.mark.parametrize(
    ("preset", "gpus", "batch", "model"),
    [
        ("llama3-8b", 16, 64, {"layers": 32, "heads": 32, "groups": 8, "s": 8192, "experts": 0}),
        ("mixtral-8x7b", 16, 32, {"layers": 32, "heads": 32, "groups": 8, "s": 8192, "experts": 8}),
    ],
)
def test_all_layouts_are_those_of_the_planners_search(preset, gpus, batch, model):
    flags = f"--preset {preset} --seq-length 8192 --global-batch-size {batch} --use-distributed-optimizer --bf16"
    found = [
        (one.tp, one.cp, one.pp, one.v, one.ep, one.etp if model["experts"] else 1, one.micro_batch)
        for one in layouts(parse_args(flags.split(), reads=False), gpus, CLUSTERS["h100"])
        if (one.recompute, one.zero, one.ends) == ("none", 1, False) and one.schedule in ("1f1b", "interleaved")
    ]
    mine = part("legal").legal(model, gpus, 8, batch)
    assert sorted(mine) == sorted(found) and len(mine) > 200


@pytest.mark.parametrize("axis", ["tp", "cp", "dp", "pp"])
def test_seconds_of_an_axis_are_those_of_the_planners_ring(axis):
    h100 = CLUSTERS["h100"]
    mesh = Mesh.planned(layout_of(4, 4, 2), 0, 128)
    links = {"inside": h100.inside * h100.link_share, "between": h100.between * h100.link_share, "node": 8,
             "near": h100.latency_inside, "far": h100.latency_between}  # fmt: skip
    sizes = {"tp": 4, "cp": 4, "dp": 4, "pp": 2}
    told = LAB["axis_seconds"].reference(sizes, axis, 1e9, **links)
    assert tuple(told["ranks"]) == tuple(mesh.axis(axis).ranks)
    assert told["seconds"] == pytest.approx(h100.collective("all_gather", 1e9, told["ranks"]))


@pytest.mark.parametrize("seed", range(8))
def test_seconds_of_a_group_that_lies_unevenly_on_its_nodes_are_the_planners(seed):
    inputs = part("links")._some(Draw(seed))
    sizes, links = {"tp": 1 + seed % 3, "dp": 5 + seed}, {name: inputs[name] for name in ("inside", "between")}
    cluster = Cluster(
        gpus_per_node=8, link_share=1.0, **links, latency_inside=inputs["near"], latency_between=inputs["far"]
    )
    told = LAB["axis_seconds"].reference(**{**inputs, "sizes": sizes, "axis": "dp", "node": 8})
    assert told["seconds"] == pytest.approx(cluster.collective("all_gather", inputs["payload"], told["ranks"]))


@pytest.mark.parametrize("seed", range(6))
def test_replicas_are_counted_on_a_mesh(seed):
    at = part("replicas")._some(Draw(seed))
    parallel = layout_of(at["tp"], at["cp"], at["pp"], at["ep"], at["etp"])
    mesh = Mesh.planned(parallel, at["world"] - 1, at["world"])
    told = LAB["replicas"].reference(**at)
    assert told == {"dp": mesh.dp.size, "dense": mesh.dp_cp.size, "expert": mesh.edp.size}
    assert told["dp"] == parallel.data_parallel_size(at["world"])


def test_the_crossover_of_tensor_parallelism_and_zero_3():
    told = part("asked").asked(1, 1, 1, 1.0, 1, 1, 1, 8192, 1, 1, 1)
    assert told["tokens"] == crossover_tokens(8192) and told["microbatches"] == 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("run", "fastest"),
    [({}, part("capstone").FASTEST), (part("changed").LONGER, part("changed").FASTEST_LONGER)],
)
def test_no_layout_of_a_search_with_the_margin_is_faster_than_the_judges(run, fastest):
    capstone = part("capstone")
    base = parse_args(capstone.flags(**run), reads=False)
    found = search(base, capstone.WORLD, CLUSTERS["h100"], 32)
    kept = [one for one in found if capstone.left_of(one.plan) >= capstone.MARGIN]
    best = capstone.planned(**run, **fastest)
    assert kept and capstone.left_of(best) >= capstone.MARGIN
    assert best.time.seconds <= 1.01 * min(one.plan.time.seconds for one in kept)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [(4, 1, 2, 40, 1, 2), (4, 2, 2, 10, 2, 2), (8, 1, 1, 1, 2, 3), (4, 1, 4, 20, 1, 3)])
def test_half_of_the_gpus_by_hand_is_near_enough_to_the_plan(layout):
    """An answer that is thought through passes: what comes once in a step stays, what ZeRO shares out doubles."""
    capstone, at = part("capstone"), dict(zip(part("capstone").SIZES, layout, strict=True)) | {"recompute": "none"}
    told, half = capstone.planned(**at), capstone.planned(512, **at)
    once = sum(told.time.parts.get(part, 0.0) for part in ("bubble", "gradients", "weights", "optimizer"))
    owners = ["main parameters", "moments"] + ["gradients"] * (at["zero"] > 1) + ["parameters"] * (at["zero"] > 2)
    more = sum(told.memory[told.fullest].peak[owner] for owner in owners) / capstone.GIB
    assert 2 * (told.time.seconds - once) + once == pytest.approx(half.time.seconds, rel=0.01)
    assert capstone.left_of(told) - more == pytest.approx(capstone.left_of(half), abs=part("changed").NEAR)
    ranks, gpus = at["tp"] * at["cp"] * at["pp"], capstone.WORLD
    while gpus > ranks and capstone.left_of(told) - more * (2 * capstone.WORLD // gpus - 1) >= capstone.MARGIN:
        gpus //= 2
    assert part("changed")._fewest({"fewest": gpus}, at) is None

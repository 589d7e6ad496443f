"""Every number that lab 12's text states, computed anew: a sentence that drifts from its number fails here.

Seconds of plans are in no sentence: they change with the rates of a cluster. What is said of them is an order, tested
at the end.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minimegatron.planner.closed_forms import layer_activations
from minimegatron.planner.cluster import CLUSTERS
from minimegatron.planner.layouts import layouts
from minimegatron.planner.planning import Plan, plan
from minimegatron.planner.search import Estimator
from minimegatron.training.arguments import parse_args
from tests.course.marked import LABS
from tests.planner.published import LLAMA_405B, SELECTIVE_RUNS, WEAK_A100, WEAK_H100
from tests.thorough import SLOW, mostly_thorough

LAB = LABS["12_planning"].lab
SOURCE = Path(str(import_module("course.12_planning").__file__)).with_name("lab.py")
TEXT = " ".join(line.removeprefix("#").strip() for line in SOURCE.read_text().splitlines())
GIB = 2**30
MINUTES = {"A": 90, "B": 115, "C": 55, "D": 135}
BEST = "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
LLAMA = "--preset llama3-70b --seq-length 8192 --tensor-model-parallel-size 8 --sequence-parallel"


def planned(world: int, flags: str) -> Plan:
    return plan(parse_args(flags.split(), world, reads=False), world, CLUSTERS["h100"])


def example(exercise: str, case: int = 0):
    """The inputs of a visible case and their right answer."""
    inputs = LAB[exercise].cases[case].inputs
    return inputs, LAB[exercise].reference(**inputs)


H100 = CLUSTERS["h100"]


def words(n: float) -> str:
    return {2: "two", 4: "four", 9: "ninth", 11: "Eleven", 7: "seven", 5: "five"}[round(n)]


def stated() -> list[tuple[str, Any]]:
    """Sentences of the text, and the numbers in their braces."""
    node = planned(8, f"{LLAMA} --global-batch-size 8 {BEST}")
    state = sum(node.memory[0].lasting.values()) / GIB
    parameters = example("stage_parameters")[1]
    held = example("state_bytes")[1]
    kept = example("activation_bytes")[1]
    step = example("step_time")[1]
    longer = {**example("step_time")[0], "p": 2, "v": 2, "full": True, "waits": 1.0, "gradients": 9.0}
    second = LAB["step_time"].reference(**longer)
    seconds = f"{second['seconds']:g}"
    padded = import_module("course.12_planning.checks.states").padded(200, 1)
    ten = LAB["activation_bytes"].cases[0].inputs["tokens"]
    capstone = import_module("course.12_planning.checks.capstone")
    shape = {"h": 8192, "heads": 64, "groups": 8, "d": 128, "f": 28672}
    llama = {"model": shape, "tokens": 8192, "tp": 8, "sp": True}
    dp = import_module("course.12_planning.checks.replicas").replicas(16, 2, 1, 1, 4, 1)["dp"]
    return [
        ("Together {} hours", "6–7" if 360 <= sum(MINUTES.values()) <= 420 else "other"),
        ("| A | 1 The problem · 2 Predict: memory | {} |", f"1 h {MINUTES['A'] - 60} min"),
        ("| B | 3 Implement: messages, time, layouts | {} |", f"1 h {MINUTES['B'] - 60} min"),
        ("| C | 4 Run · 5 See | {} min |", f"{MINUTES['C']}"),
        ("| D | 6 Break it · 7 Explain: 1,024 GPUs | {} |", f"2 h {MINUTES['D'] - 120:02} min"),
        ("{:.0f} GiB of the {:.0f} are there between two steps", [state, node.bytes / GIB]),
        ("It needs more than {} the memory", "twice" if 2 < node.bytes / node.cluster.usable < 3 else "other"),
        ("The largest term is that of AdamW's two {}.", node.blame),
        ("nvidia-smi shows {:,.0f} MiB = {:.1f} GiB. The planner leaves {:.0f} GiB of them",
         [H100.memory / 2**20, H100.memory / GIB, H100.reserve / GIB]),
        ("So {:.1f} GiB are for tensors.", H100.usable / GIB),
        ("Of the {:.1f} GiB for tensors {} must stay free", [H100.usable / GIB, capstone.MARGIN]),
        ("keeps {:.0f} MiB by your table, and the same 34 s b h would be {:.0f}",
         [LAB["activation_bytes"].reference(**{**example("activation_bytes")[0], **llama})["layer"] / 2**20,
          layer_activations("tp sp selective", 8192, 1, 8192, 64, 8) / 2**20]),
        ("about {:.0f} µs each", 1e6 * H100.call),
        ("every product at the peak, of which attention reaches {},", "half" if H100.flash_share == 0.5 else "other"),
        ("README has {:.0f} % of the peak for a model of 70B on {} H100",
         [100 * WEAK_H100["70B"][-1] * 1e12 / H100.matmul, WEAK_H100["70B"][5]]),
        ("Four tables have {} runs whose layouts",
         len(SELECTIVE_RUNS) * 2 + len(WEAK_A100) + len(WEAK_H100) + len(LLAMA_405B)),
        ("Norms {}, queries and projection {}, keys and values {}, the MLP {}: together {}.",
         [16, 2 * 64, 2 * 32, 3 * 96, 16 + 128 + 64 + 288]),
        ("V' = {}, so both ends have {} + 8 + {}. All together are {}.",
         [padded, padded * 8, padded * 8, parameters["dense"]]),
        ('{{"dense": {}, "experts": 0}} in the example', parameters["dense"]),
        ("Parameters have {} bytes, gradients {}.", [held["parameters"], held["gradients"]]),
        ("200 parameters each: main parameters {} bytes, moments {}.", [held["main parameters"], held["moments"]]),
        ("The first two rows have {} bytes a token, heads {} and {}, the MLP {}: {} bytes a token, {} in the layer.",
         [8 * 8 + 8, 6 * 5 * 4, 4 * 4, 6 * 10, kept["layer"] // ten, kept["layer"]]),
        ("with 2 layers {}.", kept["stage"]),
        ("A batch of 512 samples gives each rank {} microbatches.", 512 // (1024 // 32)),
        ("so dp is {}. A batch", 1024 // 32),
        ("tp 2 and dp 4, with ep 4 and etp 1. A quarter of the experts is on each rank, and so {} ranks hold the same",
         words(import_module("course.12_planning.checks.replicas").replicas(8, 2, 1, 1, 4, 1)["expert"])),
        ("The stream has {} bytes, a rank sends {} of them, {} times: {}.",
         [2 * 16 * 4, 96, 10 * 3 * 2, example("bytes_sent")[1]["tp"]]),
        ("takes 8000 / (4 · 2 · 500) = {:.0f} s, a backward pass {:.0f} s, the step {:.0f} s.",
         [8000 / 4000, 16000 / 4000, step["seconds"]]),
        ("= {:.0f} %. A second one:", 100 * step["mfu"]),
        ("A batch of 8 on {} GPUs", example("step_time")[0]["gpus"]),
        ("9 s. The step takes {} s, the MFU is {} %, the HFU {} %. Find the {} s by hand",
         [seconds, f"{100 * second['mfu']:.1f}", f"{100 * second['hfu']:.1f}", seconds]),
        ("{} layouts. **Exercise.** Return all layouts",
         words(len(import_module("course.12_planning.checks.legal").legal(**LAB["legal"].cases[0].inputs)))),
        ("cards of a node at once, {:.0f} GB/s beside NVLink's {:.0f}.", [8 * H100.between / 1e9, H100.inside / 1e9]),
        ("8 groups beside {} heads of queries", node.run.model.num_attention_heads),
        ("each all-to-all has {} partners in place of {}.", [64 - 1, 8 - 1]),
        ("ep {} leaves each GPU {} of them", [64, words(128 / 64)]),
        ("ep 8 leaves {} on each GPU", 128 // 8),
        ("But with ep 64 {} of eight rows leave the node", words(8 * (1 - 8 / 64))),
        ("and a step has {} times as many. So a step takes {} times as long", [words(dp / 2)] * 2),
        ("{:.0f} % · 4/3 = {:.0f} %", [39, 39 * 4 / 3]),
        ("The all-gather takes {:.0f} s.", example("axis_seconds")[1]["seconds"]),
        ("A failure comes every {:,.0f} s. The best interval is {:.0f} s: {:.1f} % of the time go into saves",
         [example("goodput")[1]["between"], example("goodput")[1]["interval"],
          100 * example("goodput")[0]["save"] / example("goodput")[1]["interval"]]),
        ("So a microbatch takes {} s, and the bubble {} s. What is left comes once: {} s.",
         list(example("two_runs")[1].values())[:3]),
        ("8,192 tokens: {:.1f} GB", 6 * 8192 * 128256 / 1e9),
    ]  # fmt: skip


def test_the_text_states_what_comes_out() -> None:
    sentences = [text.format(*value) if isinstance(value, list) else text.format(value) for text, value in stated()]
    text = " ".join(TEXT.split())
    assert not [sentence for sentence in sentences if " ".join(sentence.split()) not in text]


def test_the_timed_product_is_computed_as_those_of_the_models_layers():
    """torch multiplies by another library than a layer does, on some CPUs at half of the rate."""
    cell = next(part for part in SOURCE.read_text().split("\n# %%") if "def step_of" in part).partition("\n")[2]
    names: dict[str, Any] = {}
    threads = torch.get_num_threads()
    exec(re.sub(r"for _ in range\(\d+\):  # in turn", "for _ in []:  # in turn", cell), names)  # noqa: S102  a cell
    assert torch.get_num_threads() == threads

    def products(run: Callable[[], object]) -> set[str]:
        seen = set[str]()

        class Names(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.add(str(func))
                return func(*args, **(kwargs or {}))

        with torch.no_grad(), Names():
            run()
        return {name for name in seen if re.search(r"mm|linear", name)}

    model = names["build_model"](names["small_llama"](1), names["Mesh"].serial(), 1)
    ids = torch.arange(9)[None]
    alone = products(names["work"]["a product"])
    assert alone and alone <= products(lambda: model(ids[:, :-1], labels=ids[:, 1:]))


@pytest.mark.thorough
def test_published_runs_are_off_by_what_the_text_says():
    """All of them; the notebook plans some, the furthest among them."""
    cell = next(part for part in SOURCE.read_text().split("\n# %%") if "def published_run" in part)
    code = cell.partition("\n")[2]
    names: dict[str, Any] = {"CLUSTERS": CLUSTERS, "h100": H100, "parse_args": parse_args, "BEST": BEST}
    exec(code.replace("ALL = False", "ALL = True"), names)  # noqa: S102  a cell of the course
    off = {
        (table, name): told / published - 1
        for table, runs in names["beside"].items() for name, (published, told) in runs.items() if "fitted" not in name
    }  # fmt: skip
    assert len(off) == 24 and round(100 * statistics.mean(map(abs, off.values()))) == 4
    first, second = "2104.04473, A100", "Megatron's README, H100"
    furthest = sorted(off, key=lambda run: abs(off[run]))[-4:]
    assert {*furthest} == {(first, "18B"), (first, "76B"), (second, "32B"), ("2407.21783, H100", "405B, 128k, 16,384")}
    assert off[first, "1.7B"] < off[first, "3.6B"] < off[first, "7.5B"] < off[first, "18B"]
    assert (round(100 * off[first, "18B"]), round(100 * off[second, "32B"])) == (9, -12)


def test_long_sequences_are_for_cp():
    flags = f"--preset llama3-70b --seq-length 131072 --global-batch-size 16 --recompute-granularity full {BEST}"
    flags += " --sequence-parallel --pipeline-model-parallel-size 4 --tensor-model-parallel-size"
    tp, cp = planned(128, f"{flags} 16"), planned(128, f"{flags} 8 --context-parallel-size 2")
    assert cp.time.seconds < tp.time.seconds and abs(cp.bytes / tp.bytes - 1) < 0.1 and cp.fits and tp.fits
    assert tp.time.parts["tp"] > 2 * cp.time.parts["tp"] and 0 < cp.time.parts["cp"] < 0.01 * cp.time.seconds


@pytest.mark.parametrize("layers", mostly_thorough([48, 2], [1]))
def test_experts_stay_in_their_node(layers):
    flags = f"--preset qwen3-30b-a3b --num-layers {layers} --seq-length 4096 --global-batch-size 512 {BEST}"
    flags += " --moe-token-dispatcher-type alltoall"
    near, far = (planned(64, f"{flags} --expert-model-parallel-size {ep}") for ep in (8, 64))
    assert near.fits and near.time.seconds < far.time.seconds and near.bytes > far.bytes
    more = far.time.parts["experts"] - near.time.parts["experts"]
    assert more > sum(near.time.parts.get(part, 0.0) for part in ("gradients", "weights"))


@SLOW
def test_one_layout_of_each_way_shows_the_opposite_of_what_tuned_ones_show():
    """tp 8 for both, and one chunk a rank."""
    told = {}
    for batch in (32, 512):
        one = f"{LLAMA} --bf16 --overlap-grad-reduce --global-batch-size {batch} --data-parallel-sharding-strategy"
        told[batch] = (
            planned(256, f"{one} optim_grads_params").time,
            planned(256, f"{one} optim --overlap-param-gather --pipeline-model-parallel-size 4").time,
        )
    assert told[32][0].seconds < told[32][1].seconds and told[512][0].seconds > told[512][1].seconds
    assert told[32][1].parts["bubble"] == pytest.approx(told[512][1].parts["bubble"], rel=1e-6)
    assert told[512][0].parts["sharding"] == pytest.approx(16 * told[32][0].parts["sharding"], rel=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("batch", [32, 512])
def test_tuned_a_pipeline_is_for_small_batches_and_for_large_ones_both_are_as_fast(batch):
    """As the lab tunes them: cp 1, no recompute, the fastest by the estimate that fits."""
    flags = f"--preset llama3-70b --seq-length 8192 --context-parallel-size 1 --global-batch-size {batch} {BEST}"
    base, best = parse_args(flags.split(), reads=False), {}
    estimator = Estimator(base, 256, H100)
    for one in layouts(base, 256, H100):
        way = one.zero, one.pp > 1
        if way in ((3, False), (1, True)) and one.recompute == "none" and not one.ends and one.schedule[:2] != "zb":
            nbytes, seconds = estimator.estimate(one)
            if nbytes <= 0.95 * H100.usable:
                best[way] = min(best.get(way, (seconds, one)), (seconds, one), key=lambda pair: pair[0])
    (zero, pipe) = (plan(best[way][1].run(base), 256, H100) for way in ((3, False), (1, True)))
    assert zero.fits and pipe.fits
    if batch == 32:
        assert pipe.time.seconds < 0.8 * zero.time.seconds and best[3, False][1].tp == 8 and best[1, True][1].v > 1
    else:
        assert pipe.time.seconds == pytest.approx(zero.time.seconds, rel=0.1) and best[3, False][1].tp < 8


@pytest.mark.thorough
def test_what_each_axis_divides():
    def held(tp: int, cp: int, pp: int) -> dict[str, float]:
        flags = f"--tensor-model-parallel-size {tp} --context-parallel-size {cp} --pipeline-model-parallel-size {pp}"
        peak = planned(
            128, f"--preset llama3-70b --seq-length 8192 --global-batch-size 512 --sequence-parallel {flags} {BEST}"
        ).memory[0].peak  # fmt: skip
        return {**peak, "state": peak["main parameters"] + peak["moments"]}

    before = held(2, 1, 2)
    for axis, after in (("tp", held(4, 1, 2)), ("cp", held(2, 2, 2)), ("pp", held(2, 1, 4))):
        factor = {name: before[name] / after[name] for name in ("parameters", "state", "activations")}
        assert factor["state"] == pytest.approx(1.0, rel=0.05)
        assert factor["parameters"] == pytest.approx(1.0 if axis == "cp" else 2.0, rel=0.07)
        told = {"tp": 2.0, "cp": 2.15, "pp": 1.0}[axis]  # a ring gives back the tensor of queries, keys and values
        assert factor["activations"] == pytest.approx(told, rel=0.05)
    assert before["parameters"] / held(2, 1, 4)["parameters"] < 1.98

"""Which layers each stage of a pipeline holds.

The problem in a sentence: 32 layers on 4 stages are 8 each, but the embedding and the loss cost about as much as a
layer or two, so with equal numbers all other stages wait for the first and the last.

The model is a row of layers between an embedding and a loss; p ranks hold v chunks each, so it is cut into p*v stages:

| option                                                    | layers of a stage                                        |
|-----------------------------------------------------------|----------------------------------------------------------|
| none                                                      | L / (p v)                                                |
| `num_layers_in_first_pipeline_stage`, `..._last_...`      | so many on the first (last) rank, the rest evenly        |
| `account_for_embedding_in_pipeline_split`, `..._loss_...` | the embedding (the loss) counts as a layer               |
| `pipeline_model_parallel_layout`                          | as written: `Et*3|(tt|)*2,L` = `E t t t | t t | t t | L` |

In a layout E is the embedding, t a layer, m a prediction of one more token (`models/mtp`; always on the last stage,
also when no m is written), L the loss; x*n repeats a letter or a bracket, commas are for the eye.

`num_virtual_stages_per_pipeline_rank` gives v; `num_layers_per_virtual_pipeline_stage` gives the length of a chunk; a
written layout has its own v; the V-shaped schedules always have v = 2. What cannot be cut so is refused, with the
numbers that could.

Megatron-LM: `get_num_layers_to_build` in `megatron/core/transformer/transformer_block.py`,
`pipeline_parallel_layer_layout.py`.
"""

from __future__ import annotations

import dataclasses
import re

from minimegatron.config.fields import divides
from minimegatron.config.parallel import STRAIGHT, V_SHAPED, ParallelConfig
from minimegatron.errors import ConfigError, require


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """How the model is cut into stages.

    Attributes:
        schedule: name of the schedule.
        ranks, chunks: p and v.
        layers: `[stage]` -> global numbers of its layers, from 0.
    """

    schedule: str
    ranks: int
    chunks: int
    layers: tuple[tuple[int, ...], ...]


def plan_stages(parallel: ParallelConfig, num_layers: int) -> StagePlan:
    """The stages that a `ParallelConfig` asks for.

    Raises:
        ConfigError: this number of layers cannot be cut so.
    """
    p, layout = parallel.pipeline_model_parallel_size, parallel.pipeline_model_parallel_layout
    if p == 1:
        return StagePlan("1f1b", 1, 1, (tuple(range(num_layers)),))
    written = parse_layout(layout, num_layers) if layout else None
    v = _chunks(parallel, num_layers, written)
    name = parallel.pipeline_schedule or ("interleaved" if v > 1 else "1f1b")
    _check_chunks(name, v)
    counts = written or _counts(parallel, num_layers, v, name)
    firsts = [sum(counts[:stage]) for stage in range(len(counts))]
    layers = tuple(tuple(range(first, first + n)) for first, n in zip(firsts, counts, strict=True))
    return StagePlan(name, p, v, layers)


def _chunks(parallel: ParallelConfig, num_layers: int, written: list[int] | None) -> int:
    p, per_chunk = parallel.pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage
    v = parallel.num_virtual_stages_per_pipeline_rank
    if written is not None:
        if len(written) % p:
            raise ConfigError(
                f"pipeline_model_parallel_layout has {len(written)} stages for {p} ranks",
                fix=f"a multiple of {p}, e.g. {-(-len(written) // p) * p} (an empty stage is ||)",
            )
        require(
            v in (None, len(written) // p) and per_chunk is None,
            f"pipeline_model_parallel_layout has {len(written) // p} stages a rank, and the number is given elsewhere",
            "drop num_virtual_stages_per_pipeline_rank and num_layers_per_virtual_pipeline_stage",
        )
        return len(written) // p
    if per_chunk is not None:
        divides(p, num_layers, "pipeline_model_parallel_size", "num_layers")
        whole = "num_layers / pipeline_model_parallel_size"
        divides(per_chunk, num_layers // p, "num_layers_per_virtual_pipeline_stage", whole)
        return num_layers // p // per_chunk
    return v or (2 if parallel.pipeline_schedule in (*V_SHAPED, "interleaved") else 1)


def _check_chunks(name: str, v: int) -> None:
    if name in STRAIGHT and v > 1:
        raise ConfigError(
            f"pipeline_schedule {name} has one stage on a rank, and {v} are asked for",
            fix="pipeline_schedule=interleaved, or one virtual stage",
        )
    if name in V_SHAPED and v != 2:
        raise ConfigError(
            f"pipeline_schedule {name} has 2 stages on every rank, and {v} are asked for",
            fix="num_virtual_stages_per_pipeline_rank=2, or leave it out",
        )


def _counts(parallel: ParallelConfig, num_layers: int, v: int, name: str) -> list[int]:
    """Layers of each stage, without a written layout."""
    p = parallel.pipeline_model_parallel_size
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    embedding = int(parallel.account_for_embedding_in_pipeline_split)
    loss = int(parallel.account_for_loss_in_pipeline_split)
    if first is None and last is None:
        total, what = num_layers + embedding + loss, "num_layers" + " + 1" * (embedding + loss)
        divides(p * v, total, "pipeline_model_parallel_size" + " * stages of a rank" * (v > 1), what)
        counts = [total // (p * v)] * (p * v)
        counts[0] -= embedding
        counts[-1] -= loss
        return counts
    if name in V_SHAPED:
        raise ConfigError(
            f"num_layers_in_first_pipeline_stage with {name}, whose first rank also has the last stage",
            fix="write the stages: pipeline_model_parallel_layout",
        )
    return _uneven(num_layers, p, v, first, last)


def _uneven(num_layers: int, p: int, v: int, first: int | None, last: int | None) -> list[int]:
    """Layers of each stage, given the numbers of the first or the last rank; each rank's layers are cut evenly into
    chunks."""
    others = p - (first is not None) - (last is not None)
    rest = num_layers - (first or 0) - (last or 0)
    if rest < 0 or (rest % others if others else rest):
        raise ConfigError(
            f"{num_layers} layers, {first} on the first rank and {last} on the last, leave {rest} for {others} others",
            fix="numbers that leave a multiple of the ranks in between",
        )
    per_rank = [rest // others if others else 0] * p
    per_rank[0] = per_rank[0] if first is None else first
    per_rank[-1] = per_rank[-1] if last is None else last
    for rank in (0, p // 2, p - 1):
        divides(v, per_rank[rank], "stages of a rank", f"the layers of rank {rank}")
    return [per_rank[rank] // v for _ in range(v) for rank in range(p)]


def parse_layout(text: str, num_layers: int) -> list[int]:
    """`Et*3|(tt|)*2,L` -> layers of each stage, [3, 2, 2, 0].

    Raises:
        ConfigError: an unknown letter, no E at the very start or L at the very end, another number of layers.
    """
    flat = expand_layout(text)
    fix = "letters E (embedding), t (layer), m (one more token), L (loss), | between stages, x*n and (...)*n to repeat"
    if unknown := re.sub(r"[EtmL|]", "", flat):
        raise ConfigError(f"pipeline_model_parallel_layout {text!r}: {unknown[0]!r} means nothing", fix=fix)
    if not re.fullmatch(r"E[t|]*m*L", flat):
        raise ConfigError(
            f"pipeline_model_parallel_layout {text!r} is {flat}: not one E at the start and one L at the end, with "
            "every m right before it",
            fix=fix,
        )
    counts = [stage.count("t") for stage in flat.split("|")]
    if sum(counts) != num_layers:
        raise ConfigError(
            f"pipeline_model_parallel_layout {text!r} has {sum(counts)} layers, the model {num_layers}",
            fix="as many t as num_layers",
        )
    return counts


def expand_layout(text: str) -> str:
    """A layout without repetitions and commas: `Et*3|(tt|)*2,L` is `Ettt|tt|tt|L`."""
    flat = re.sub(r"[,\s]", "", text)
    for pattern in (r"\(([^()]+)\)\*(\d+)", r"([EtmL|])\*(\d+)"):
        while re.search(pattern, flat):
            flat = re.sub(pattern, lambda found: found[1] * int(found[2]), flat)
    return flat

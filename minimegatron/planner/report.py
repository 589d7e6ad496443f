"""A plan as text: memory by stage, messages by axis, the time of a step, and the formula of each number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from minimegatron.comm.mesh import Mesh
from minimegatron.planner.pass_time import BELOW, LAUNCHES, MEMORY, PEAK, RECOMPUTE
from minimegatron.planner.planning import TERMS, Change, Plan
from minimegatron.planner.search import Found
from minimegatron.trace import Event
from minimegatron.training.memory_report import explain as explain_memory
from minimegatron.training.memory_report import predicted_rows, table

GIB = 2**30
FORMULAS = {
    PEAK: "2 m n k of each matrix forward, twice that backward, over the peak",
    BELOW: "the same over matmul_share of the peak, and factors and result read and written",
    MEMORY: "bytes of norms, activations, the loss over copy_share of the memory's rate",
    RECOMPUTE: "what is recomputed, forward once more",
    LAUNCHES: "operations and messages of a pass times the host's call, less what the GPU computes meanwhile",
    "tp": "activations summed or gathered, what a ring sends over the link; less what travels beside a product",
    "cp": "keys and values, less what travels beside attention",
    "experts": "rows to experts and back",
    "sharding": "gradients and weights that ZeRO-2 or -3 send in every microbatch and no computation hides",
    "bubble": "the schedule played, less the work of its busiest rank",
    "gradients": "buckets once a step, less the last backward pass with --overlap-grad-reduce",
    "weights": "updated weights gathered, less the first forward pass with --overlap-param-gather",
    "optimizer": "states, gradients and weights over the memory's rate (AdamW: 34 bytes an element): planner/update",
    "end of step": "norm, counts, losses, gradients of copies",
}


def grid(rows: Sequence[Sequence[str]]) -> str:
    """A table as text; the first column is aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    )


def in_words(told: Plan, tokens: float | None = None, explains: bool = False) -> str:
    """The whole plan as text."""
    parts, none = [memory_text(told), verdict(told)], f"no time is predicted: {', '.join(told.unknown)} cannot be known"
    parts += [none] if told.time is None else [time_text(told, tokens, explains), messages_text(told, explains)]
    return "\n\n".join(parts)


def memory_text(told: Plan) -> str:
    fullest = explain_memory(f"rank {told.fullest}", told.memory[told.fullest])
    return f"{table(predicted_rows(told.memory))}\n\n{fullest}"


def verdict(told: Plan) -> str:
    """Whether the plan fits, and if not, what takes most of the memory."""
    room, need = told.cluster.usable / GIB, told.bytes / GIB
    if told.fits:
        return f"fits: {need:.1f} of {room:.1f} GiB on rank {told.fullest}"
    if any(one.unknown for one in told.memory.values()):
        return f"not known whether it fits: {', '.join(told.unknown)} is not predicted"
    owner = told.blame
    share = told.memory[told.fullest].peak[owner] / told.bytes
    return (
        f"does not fit: {need:.1f} GiB on rank {told.fullest}, and {told.cluster.gpu} has {room:.1f} for tensors; "
        f"{share:.0%} are {owner}, which {TERMS.get(owner, 'nothing')} divide"
    )


def changes_text(changes: Sequence[Change]) -> str:
    """The changes that would make the plan fit, as text."""
    if not changes:
        return "no change of one or two flags makes it fit; --search looks at all layouts"
    rows = [["what makes it fit", "GiB", "s/step"]]
    for change in changes:
        seconds = f"{change.plan.time.seconds:.3f}" if change.plan.time else "?"
        rows.append([change.flags, f"{change.plan.bytes / GIB:.1f}", seconds])
    return grid(rows)


def time_text(told: Plan, tokens: float | None, explains: bool) -> str:
    """The waterfall of a step's time, MFU, days and cost."""
    time = told.time
    assert time is not None, "there is a time"
    rows = [["seconds of a step", "s", "share", *(["from"] * explains)]]
    for name, seconds in time.parts.items():
        rows.append([name, f"{seconds:.4f}", f"{seconds / time.seconds:.1%}", *([FORMULAS[name]] * explains)])
    rows.append(["all", f"{time.seconds:.4f}", "100.0%", *([""] * explains)])
    mfu = f"MFU {time.mfu:.1%} of the dense peak (model FLOPs, half of attention's square, no recompute)"
    tokens_a_second = f"{told.tokens_a_step() / time.seconds:,.0f} tokens/s"
    lines = [grid(rows), "", f"{time.tflops:.1f} TFLOP/s a GPU, {mfu}; {tokens_a_second}"]
    if time.parts.get(LAUNCHES, 0.0) > 0.01 * time.seconds:
        call = f"{1e6 * told.cluster.call:.0f} us an operation, fitted to hosts of A100 and measured on no other"
        lines.append(f"launches: the GPU waits for its host, {call}; in a CUDA graph there are none")
    if explains:
        lines.append(f"{time.model_flops:.4e} model FLOPs of a step = 3 x forward, see training/flops")
    if tokens is not None:
        price = f", {told.cost(tokens):,.0f} at {told.cluster.price} a GPU and hour" if told.cluster.price else ""
        lines.append(f"{tokens:.3g} tokens: {lasting(told.days(tokens))}{price}")
    return "\n".join(lines)


def lasting(days: float) -> str:
    """Days, or hours or minutes where two of them are more."""
    if days >= 2:
        return f"{days:.1f} days"
    return f"{24 * days:.1f} hours" if 24 * days >= 2 else f"{24 * 60 * days:.1f} minutes"


def sent(told: Plan) -> Iterator[tuple[Event, int]]:
    """Each message of the fullest rank, its part of the step as a note, and how often it is sent in a step."""
    mesh = Mesh.planned(told.run.parallel, told.fullest, told.world)
    for (m, part), count in told.messages().items():
        yield Event(m.name, "comm", 0, 0.0, 0.0, m.axis, m.nbytes, mesh.axis(m.axis).size, part), count


def messages_text(told: Plan, explains: bool) -> str:
    """Messages by collective and axis; with `explains` one line for each message."""
    rows = [[f"rank {told.fullest} sends in a step", "count", "MiB of tensors", "MiB sent"]]
    found: dict[tuple[str, ...], list[float]] = {}
    for event, count in sent(told):
        key = (f"{event.name}/{event.axis}", *((f"{event.nbytes:,} bytes, {event.note}",) * explains))
        cell = found.setdefault(key, [0.0] * 3)
        for i, n in enumerate((1.0, float(event.nbytes), event.wire_bytes)):
            cell[i] += count * n
    for key, (times, *nbytes) in sorted(found.items()):
        rows.append([" of ".join(key), f"{times:,.0f}", *(f"{n / 2**20:,.2f}" for n in nbytes)])
    return grid(rows)


def search_text(found: Sequence[Found]) -> str:
    """The table of the layouts that a search has found."""
    names = ("tp", "cp", "pp", "v", "ep", "etp", "schedule", "micro_batch", "recompute", "zero", "ends")
    rows = [[*(name.replace("_", "-") for name in names), "dp", "GiB", "s/step", "TFLOP/s", "MFU"]]
    for one in found:
        time = one.plan.time
        assert time is not None, "what was found has a time"
        dp = one.plan.run.parallel.data_parallel_size(one.plan.world)
        numbers = [f"{one.plan.bytes / GIB:.1f}", f"{time.seconds:.3f}", f"{time.tflops:.0f}", f"{time.mfu:.1%}"]
        rows.append([*(str(getattr(one.layout, name)) for name in names), str(dp), *numbers])
    return grid(rows)


def commands(flags: Iterable[str], world: int, gpus_per_node: int) -> str:
    """The command lines that train: torchrun on each node, and sbatch."""
    words, nodes = " ".join(flags), max(1, world // gpus_per_node)
    each = min(world, gpus_per_node)
    torchrun = f"torchrun --nnodes {nodes} --nproc-per-node {each} --rdzv-backend c10d --rdzv-endpoint"
    head, train = "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)", f":29500 -m minimegatron train {words}"
    sbatch = f"sbatch --nodes {nodes} --ntasks-per-node 1 --gpus-per-node {each} --wrap 'srun {torchrun} {head}{train}'"
    return f"{torchrun} $HEAD{train}\n\n{sbatch}"

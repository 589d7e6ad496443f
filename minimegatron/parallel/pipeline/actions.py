"""A pipeline schedule as data: one list of actions per rank, and where the stages of the model live.

The layers of a model are cut into `stages`, numbered from the embedding to the loss. A rank holds `v` of them, its
*chunks*; `placement` says which. A batch is cut into `m` microbatches, and a rank does one thing at a time:

| action | computes                                           | needs                          | sends to           |
|--------|----------------------------------------------------|--------------------------------|--------------------|
| `F3.1` | forward of microbatch 3 through the rank's chunk 1 | F of the previous stage        | the next stage     |
| `B3.1` | its backward: dgrad, and wgrad unless a W follows  | its F, and B of the next stage | the previous stage |
| `W3.1` | the wgrad of that backward                         | its B                          | nowhere            |

`B` leaves wgrad to `W` if the list has a `W` for the same microbatch and chunk. Sends and receives are no actions: they
follow from the lists (`Schedule.messages`), so they cannot be in a wrong order. A rank sends an output right after
computing it, and receives the messages of one neighbour in the order in which that neighbour makes them.

Three placements, with `p` ranks:

    straight      stage = rank                    v = 1     0 | 1 | 2 | 3
    round robin   stage = chunk * p + rank        any v     0 4 | 1 5 | 2 6 | 3 7        interleaved 1F1B
    V             stages r and 2p - 1 - r         v = 2     0 7 | 1 6 | 2 5 | 3 4        ZB-V, DualPipeV

In Megatron-LM (`core/pipeline_parallel/schedules.py`) each schedule is a function that computes and communicates; here
GPipe, 1F1B and the others differ by data alone (`schedules`). One checker (`schedule_check`), one simulator
(`schedule_sim`), two executors (`plain` to read, `overlapped` to train with) and one picture (`viz.schedule`) serve
them all, and your own list too.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence

from minimegatron.errors import ConfigError

Placement = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, order=True)
class Action:
    """One action of a rank: `kind` is F, B or W (see the table), `chunk` a virtual stage of this rank."""

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.chunk}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """`F3.1`, or `F3` for chunk 0.

        Raises:
            ConfigError: the text is no action.
        """
        match = re.fullmatch(r"([FBW])(\d+)(?:\.(\d+))?", text)
        if not match:
            raise ConfigError(f"`{text}` is no action", fix="write F, B or W, the microbatch, and .chunk: F0, B3.1")
        return cls(match[1], int(match[2]), int(match[3] or 0))


@dataclasses.dataclass(frozen=True, order=True)
class Message:
    """An activation (`kind` F) or a gradient (B) of one microbatch that stage `to_stage` needs."""

    kind: str
    microbatch: int
    to_stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} for stage {self.to_stage}"

    @property
    def from_stage(self) -> int:
        """The stage that sends it."""
        return self.to_stage + (-1 if self.kind == "F" else 1)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The list of actions of every rank.

    Attributes:
        name: its name in messages and pictures.
        actions: `[rank]` -> its actions in order.
        placement: `[rank][chunk]` -> stage; every rank has the same number of chunks, every stage one place.

    Only the shape is checked here; `schedule_check.check` finds lists that cannot run.

    Raises:
        ConfigError: lists and placement have different ranks, or the placement does not have every stage once.
    """

    name: str
    actions: tuple[tuple[Action, ...], ...]
    placement: Placement

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", tuple(tuple(row) for row in self.actions))
        object.__setattr__(self, "placement", tuple(tuple(row) for row in self.placement))
        if not self.actions or len(self.actions) != len(self.placement):
            raise ConfigError(
                f"schedule `{self.name}` has lists for {len(self.actions)} ranks and a placement of "
                f"{len(self.placement)}",
                fix="give one list and one row of the placement per rank",
            )
        stages = sorted(stage for row in self.placement for stage in row)
        if {len(row) for row in self.placement} != {self.v} or stages != list(range(self.p * self.v)):
            raise ConfigError(
                f"the placement of `{self.name}` does not put stages 0 to {self.p * self.v - 1} on {self.p} ranks",
                where=f"placement {self.placement}",
                fix="give every rank the same number of chunks and every stage one place",
            )

    @property
    def p(self) -> int:
        """Ranks of the pipeline."""
        return len(self.actions)

    @property
    def v(self) -> int:
        """Chunks per rank."""
        return len(self.placement[0])

    @property
    def stages(self) -> int:
        """Stages of the model, p * v."""
        return self.p * self.v

    @functools.cached_property
    def m(self) -> int:
        """Microbatches: one more than the highest that occurs."""
        return 1 + max((a.microbatch for row in self.actions for a in row), default=-1)

    @functools.cached_property
    def forward_only(self) -> bool:
        """Whether no list holds a backward (evaluation)."""
        return all(a.kind == "F" for row in self.actions for a in row)

    @property
    def splits(self) -> bool:
        """Whether any backward is split into B and W."""
        return bool(self._split)

    def is_split(self, microbatch: int, stage: int) -> bool:
        """Whether B of this microbatch and stage leaves wgrad to a W."""
        return (microbatch, stage) in self._split

    def stage_of(self, rank: int, chunk: int) -> int:
        """The stage that is this chunk of this rank."""
        return self.placement[rank][chunk]

    def rank_of(self, stage: int) -> tuple[int, int]:
        """(rank, chunk) that holds a stage."""
        return self._places[stage]

    def needs(self, rank: int, action: Action) -> list[tuple[int, Action]]:
        """The (rank, action) pairs that must be done before this action of this rank, its own rank's first."""
        stage, i = self.stage_of(rank, action.chunk), action.microbatch
        if action.kind == "W":
            return [(rank, Action("B", i, action.chunk))]
        own = [(rank, Action("F", i, action.chunk))] if action.kind == "B" else []
        neighbour = stage + (1 if action.kind == "B" else -1)
        if not 0 <= neighbour < self.stages:
            return own
        owner, chunk = self.rank_of(neighbour)
        return [*own, (owner, Action(action.kind, i, chunk))]

    def input_of(self, rank: int, action: Action) -> Message | None:
        """The message from another stage that this action of this rank needs; None at the ends of the pipeline, and for
        W."""
        stage = self.stage_of(rank, action.chunk)
        from_stage = stage + {"F": -1, "B": 1}.get(action.kind, self.stages)
        return Message(action.kind, action.microbatch, stage) if 0 <= from_stage < self.stages else None

    def output_of(self, rank: int, action: Action) -> Message | None:
        """The message to another stage that this action of this rank makes; None at the ends of the pipeline, and for
        W."""
        to_stage = self.stage_of(rank, action.chunk) + {"F": 1, "B": -1}.get(action.kind, self.stages)
        return Message(action.kind, action.microbatch, to_stage) if 0 <= to_stage < self.stages else None

    def source_of(self, message: Message) -> int:
        """The rank that makes a message."""
        return self.rank_of(message.from_stage)[0]

    def destination_of(self, message: Message) -> int:
        """The rank that needs a message."""
        return self.rank_of(message.to_stage)[0]

    def messages(self, source: int, destination: int) -> list[Message]:
        """Messages from rank `source` to rank `destination`, in the order in which they are made and received."""
        return list(self._edges.get((source, destination), ()))

    def message_of(self, rank: int, action: Action) -> Message | None:
        """The message to another rank that this action of this rank makes, or None."""
        message = self.output_of(rank, action)
        return None if message is None or self.destination_of(message) == rank else message

    def label(self, action: Action) -> str:
        """The action without its chunk where ranks have only one: `F3`."""
        return str(action) if self.v > 1 else f"{action.kind}{action.microbatch}"

    def __str__(self) -> str:
        rows = [f"rank {r}: {' '.join(map(self.label, row))}" for r, row in enumerate(self.actions)]
        return "\n".join([f"{self.name}: p={self.p} v={self.v} m={self.m}", *rows])

    @functools.cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {stage: (rank, chunk) for rank, row in enumerate(self.placement) for chunk, stage in enumerate(row)}

    @functools.cached_property
    def _split(self) -> frozenset[tuple[int, int]]:
        return frozenset(
            (a.microbatch, self.placement[rank][a.chunk])
            for rank, row in enumerate(self.actions)
            for a in row
            if a.kind == "W" and a.chunk < self.v
        )

    @functools.cached_property
    def _edges(self) -> dict[tuple[int, int], list[Message]]:
        edges: dict[tuple[int, int], list[Message]] = {}
        for rank, row in enumerate(self.actions):
            for action in row:
                message = self.message_of(rank, action)
                if message:
                    edges.setdefault((rank, self.destination_of(message)), []).append(message)
        return edges


def straight(p: int) -> Placement:
    """Stage r on rank r."""
    return round_robin(p, 1)


def round_robin(p: int, v: int) -> Placement:
    """Stage c * p + r is chunk c of rank r: a microbatch passes all ranks v times, always in the same direction."""
    return tuple(tuple(c * p + r for c in range(v)) for r in range(p))


def v_shaped(p: int) -> Placement:
    """Stages r and 2p - 1 - r on rank r: down the ranks and back up, so rank 0 has both the first and the last."""
    return tuple((r, 2 * p - 1 - r) for r in range(p))


def schedule_from_text(name: str, rows: Sequence[str | Iterable[str]], placement: Placement | None = None) -> Schedule:
    """A schedule from lists such as `["F0 F1 B0 B1", "F0 B0 F1 B1"]`; without a placement, stage r is on rank r.

    Raises:
        ConfigError: a word is no action, or the shape is wrong.
    """
    words = [row.split() if isinstance(row, str) else list(row) for row in rows]
    actions = tuple(tuple(map(Action.parse, row)) for row in words)
    return Schedule(name, actions, placement or straight(len(actions)))

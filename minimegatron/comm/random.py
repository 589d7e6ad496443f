"""Random streams: which ranks must draw the same numbers, and which must draw different ones.

Tensor-parallel ranks hold the same hidden states, so their dropout must use one mask on all of them; but they hold
different attention heads, and one mask for all heads would be a correlation that a serial run does not have.

So each rank has several named streams, of which one is in use at a time. `fork(name)` swaps a stream in and afterwards
back out, advanced; what the block draws leaves the default stream untouched.

With `base = seed + 100 * pp`, and `data` the rank's position on dp and cp together:

| stream                | seed                                | equal over | for                                      |
|-----------------------|-------------------------------------|------------|------------------------------------------|
| default               | base + 1,000,003 * data             | tp         | dropout on replicated activations        |
| `data-parallel-rng`   | base                                | tp, cp, dp | draws that must not move the default     |
|                       |                                     |            | stream                                   |
| `model-parallel-rng`  | base + 1,000,003 * data + 2718 + tp |            | attention dropout, shards; under         |
|                       |                                     |            | sequence parallelism all of a block      |
| `expert-parallel-rng` | base + 1024 + 100 * ep + etp        |            | experts' weights                         |

Nothing is communicated: ranks agree because their seeds are equal. Ranks with other tokens draw other masks; in
Megatron-LM they draw the same ones.

*Recompute* must draw in the backward pass what the forward drew: `snapshot()` before the forward, `replay(snapshot)`
around the recomputation. The snapshot holds every stream and which of them are swapped in; without these the masks
differ, and the gradients are wrong without an error.

Megatron-LM: `megatron/core/tensor_parallel/random.py`, `CudaRNGStatesTracker`; there the streams exist for the GPU's
generator only, here for the CPU's and, where there is one, the GPU's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from minimegatron.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh

DATA_PARALLEL, MODEL_PARALLEL, EXPERT_PARALLEL = "data-parallel-rng", "model-parallel-rng", "expert-parallel-rng"
DEFAULT = "default"
_DATA_STRIDE = 1_000_003  # beyond what the other terms of a seed can reach

# One stream at rest: uint8 states of the CPU's generator and of the GPU's, by device type.
State = dict[str, torch.Tensor]


class Snapshot(NamedTuple):
    """The state of all streams at one moment.

    Attributes:
        live: state of the generators themselves.
        streams: the named streams that are not in use.
        suspended: the streams swapped in, outermost first, each with the state to restore at its end.
    """

    live: State
    streams: dict[str, State]
    suspended: tuple[tuple[str, State], ...]


def stream_seeds(
    seed: int,
    *,
    tp_rank: int = 0,
    pp_rank: int = 0,
    data_rank: int = 0,
    ep_rank: int = 0,
    etp_rank: int = 0,
) -> dict[str, int]:
    """{stream: seed} of one rank: the table of the module docstring.

    Args:
        seed: seed of the run.
        tp_rank, pp_rank, ep_rank, etp_rank: positions on these axes.
        data_rank: position on dp and cp together (`mesh.dp_cp`).
    """
    base = seed + 100 * pp_rank
    of_data = base + _DATA_STRIDE * data_rank
    return {
        DEFAULT: of_data,
        DATA_PARALLEL: base,
        MODEL_PARALLEL: of_data + 2718 + tp_rank,
        EXPERT_PARALLEL: base + 1024 + 100 * ep_rank + etp_rank,
    }


class RngStreams:
    """The named random streams of one rank.

    They act on torch's default generators: those are what `dropout` and `init.normal_` draw from.

    Args:
        device: also keep streams for this GPU's generator; default the current one, if CUDA is in use.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        if device is None and torch.cuda.is_initialized():
            device = torch.device("cuda", torch.cuda.current_device())
        self._cuda = device if device is not None and device.type == "cuda" else None
        self._streams: dict[str, State] = {}
        self._seeds: dict[str, int] = {}
        self._suspended: list[tuple[str, State]] = []

    @classmethod
    def for_rank(cls, seeds: dict[str, int], device: torch.device | None = None) -> RngStreams:
        """Seed the default generators and add every other stream of `stream_seeds(...)`."""
        rng = cls(device)
        rng._seed(seeds[DEFAULT])
        for name, seed in seeds.items():
            if name != DEFAULT:
                rng.add(name, seed)
        return rng

    @classmethod
    def on_mesh(cls, seed: int, mesh: Mesh) -> RngStreams:
        """The streams of this rank in a run with this seed."""
        seeds = stream_seeds(
            seed,
            tp_rank=mesh.tp.rank,
            pp_rank=mesh.pp.rank,
            data_rank=mesh.dp_cp.rank,
            ep_rank=mesh.ep.rank,
            etp_rank=mesh.etp.rank,
        )
        return cls.for_rank(seeds, mesh.device)

    def add(self, name: str, seed: int) -> None:
        """Begin a stream.

        Raises:
            ConfigError: there is a stream with this name or seed already.
        """
        if name in self._seeds or name == DEFAULT:
            raise ConfigError(f"there is a random stream {name!r} already", fix="add each stream once")
        if twin := next((n for n, s in self._seeds.items() if s == seed), None):
            raise ConfigError(
                f"random streams {twin!r} and {name!r} would have the same seed {seed} and draw the same numbers",
                fix="choose another seed for one of them",
            )
        live = self._live()
        self._seed(seed)
        self._streams[name], self._seeds[name] = self._live(), seed
        self._set(live)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from stream `name` inside the block. Inside a block of the same stream it changes nothing.

        Raises:
            ConfigError: there is no such stream, or it is in use further out with another stream in between.
        """
        if name not in self._streams:
            raise ConfigError(f"there is no random stream {name!r}", fix=f"choose among {', '.join(self._streams)}")
        active = [n for n, _ in self._suspended]
        if active[-1:] == [name]:
            yield
            return
        if name in active:
            raise ConfigError(f"random stream {name!r} is in use outside of {active[-1]!r}", fix="end that fork first")
        self._suspended.append((name, self._live()))
        self._set(self._streams[name])
        try:
            yield
        finally:
            self._streams[name] = self._live()
            self._set(self._suspended.pop()[1])

    def snapshot(self) -> Snapshot:
        """The present state, for `replay`. Cheap: about 5 kB a stream; streams that are not in use are not copied."""
        return Snapshot(self._live(), dict(self._streams), tuple(self._suspended))

    @contextlib.contextmanager
    def replay(self, snapshot: Snapshot) -> Iterator[None]:
        """Inside the block everything draws as it did after `snapshot`; after it, as if nothing had been drawn."""
        before = self.snapshot()
        self._restore(snapshot)
        try:
            yield
        finally:
            self._restore(before)

    def state_dict(self) -> dict[str, State]:
        """{stream: {"cpu": uint8 tensor, "cuda": uint8 tensor}}, the default stream included, for a checkpoint."""
        assert not self._suspended, "random streams are saved between steps, outside of every fork"
        return {DEFAULT: self._live(), **self._streams}

    def load_state_dict(self, state: dict[str, State]) -> None:
        """Continue exactly where `state_dict` was taken.

        Raises:
            CheckpointError: other streams, or other devices, than this object has.
        """
        assert not self._suspended, "random streams are loaded between steps, outside of every fork"
        own = self.state_dict()
        for what, theirs, ours in [
            ("random streams", set(state), set(own)),
            *((f"generators of {n!r}", set(s), set(own.get(n, s))) for n, s in state.items()),
        ]:
            if theirs != ours:
                raise CheckpointError(
                    f"the saved {what} are {sorted(theirs)}, this run has {sorted(ours)}",
                    fix="resume with the same layout and on the same kind of device, or start new streams from a seed",
                )
        for name, saved in state.items():
            if name == DEFAULT:
                self._set(saved)
            else:
                self._streams[name] = {device: s.clone() for device, s in saved.items()}

    def _seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self._cuda is not None:
            with torch.cuda.device(self._cuda):
                torch.cuda.manual_seed(seed)

    def _live(self) -> State:
        state = {"cpu": torch.get_rng_state()}
        if self._cuda is not None:
            state["cuda"] = torch.cuda.get_rng_state(self._cuda)
        return state

    def _set(self, state: State) -> None:
        torch.set_rng_state(state["cpu"])
        if self._cuda is not None:
            torch.cuda.set_rng_state(state["cuda"], self._cuda)

    def _restore(self, snapshot: Snapshot) -> None:
        self._set(snapshot.live)
        self._streams, self._suspended = dict(snapshot.streams), list(snapshot.suspended)

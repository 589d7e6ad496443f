"""Bytes that come and go with communication in a step: weights gathered for use, gradients on their way to a shard.

A gradient that is sharded exists whole from the first backward pass of its bucket until the bucket has been reduced;
with overlap one part longer. Weights that are sharded are whole while their part runs, with those of the next part,
which are prefetched. Torch's FSDP2 gathers weights likewise. Its gradients of a layer are whole in the dtype of the
weights, a third of them at the layer's fullest moment, which is in its MLP; gradients outside of layers are whole until
the end. The input of its reduce-scatter is in fp32 and stays until the next layer's; the sharded sums of all
microbatches so far are in fp32, too.

Rajbhandari et al. 2020 (arXiv 1910.02054).
"""

from __future__ import annotations

import re

from minimegatron.parallel.data.ddp import DistributedDataParallel


class Travel:
    """Bytes of gathered weights and of gradients under way, at each part of a stage.

    Args:
        ddp: the wrapper with its buckets.
        parts: numbers of the layers of each part; the first and the last part have none and are the model's ends.
    """

    def __init__(self, ddp: DistributedDataParallel, parts: list[tuple[int, ...]]) -> None:
        self._parts, self._overlap = parts, ddp.overlap
        tied = not ddp.module.get_submodule("").config.untie_embeddings_and_output_weights  # type: ignore[union-attr]
        self._fsdp2 = ddp.mesh.parallel.use_torch_fsdp2
        self._grads: list[tuple[int, int, int]] = []  # first part, last part, bytes
        self._by_torch: list[tuple[int, int, bool, int, float]] = []  # and whether in a layer, of weights, of shards
        self._weights: dict[int, int] = {}  # of each layer, and under -1 of the rest
        for buffer in ddp.grad_buffers:
            for bucket in buffer.buckets:
                places = [place for name in bucket.members for place in self._places(name, tied)]
                if buffer.temporary and places:
                    nbytes = bucket.span.size * buffer.data.element_size()
                    self._grads.append((min(places), max(places), nbytes))
                if ddp.sharding == "optim_grads_params" and places:
                    name, param = next((n, buffer.params[n]) for n in bucket.members)
                    layer = _layer_of(name)
                    nbytes = bucket.span.size * param.element_size()
                    self._weights[layer] = self._weights.get(layer, 0) + nbytes
                    shards = bucket.span.size * 4 / buffer.axis.size
                    self._by_torch.append((min(places), max(places), layer >= 0, nbytes, shards))

    def _places(self, name: str, tied: bool) -> list[int]:
        """The parts that use a parameter; none if it belongs to another stage of this rank."""
        layer, last = _layer_of(name), len(self._parts) - 1
        if layer >= 0:
            return [i for i, numbers in enumerate(self._parts) if layer in numbers]
        if name.startswith("embedding.word") and tied:
            return [0, last]
        return [0] if name.startswith("embedding.") else [last]

    def at(self, part: int, backward: bool) -> int:
        """Bytes while this part runs."""
        numbers, weights = self._parts[part], self._weights
        nearby = self._parts[part - 1 if backward else part + 1] if 0 < part < len(self._parts) - 1 else ()
        if part == 0 and not backward:
            nearby = self._parts[1]
        if part == len(self._parts) - 1 and backward:
            nearby = self._parts[part - 1]
        neighbour = nearby[-1:] if backward else nearby[:1]
        whole = numbers if backward else numbers[:2]  # a group that is computed again stays together
        total = sum(weights.get(n, 0) for n in {*whole, *neighbour, -1}) if weights else 0
        if backward and self._fsdp2:
            return total + self._gradients_of_torch(part)
        if backward:
            total += sum(n for first, last, n in self._grads if first - self._overlap <= part <= last)
        return total

    def _gradients_of_torch(self, part: int) -> int:
        """See the module docstring."""
        total = 0.0
        for (first, last, in_layer, nbytes, shards), (*_, wide) in zip(self._by_torch, self._grads, strict=True):
            total += shards + (wide if in_layer and first == part + 1 else 0)
            total += nbytes / 3 if in_layer and first <= part <= last else 0 if in_layer or last < part else nbytes
        return int(total)


def _layer_of(name: str) -> int:
    """The number of the layer in a logical name, or -1; depths of `models/mtp` count as after all layers."""
    found = re.search(r"(?<!mtp\.)layers\.(\d+)\.", name)
    return int(found[1]) if found else -1

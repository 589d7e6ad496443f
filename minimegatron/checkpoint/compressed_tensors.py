"""Quantised weights as files: the format `compressed-tensors`, which transformers and vLLM load; written and read.

The problem in a sentence: a quantised matrix is several tensors, whose meaning stands in `config.json` alone.

| of a linear layer `X` | dtype       | shape               |                                                          |
|-----------------------|-------------|---------------------|----------------------------------------------------------|
| `X.weight_packed`     | int32       | [o, ceil(i b / 32)] | int of b bits (format `pack-quantized`)                  |
| `X.weight_shape`      | int64       | [2]                 | o and i: how many of the last word are padding           |
| `X.weight`            | float8      | [o, i]              | in place of the two, of floats (`float-quantized`)       |
| `X.weight_scale`      | the model's | [o, groups]         | see `kernels/quantized`                                  |

All linear layers of the blocks are quantised. Embedding, head, norms and routers stay as they are; `ignore` of
`quantization_config` names those of them that are linear layers.

Quantising is a `Source` over a source (`checkpoint/sources`), and so is its reverse: a rank of any layout reads its
box, of which only the words and the groups that meet it are read. A cut over tp may go through a group.

https://github.com/vllm-project/compressed-tensors (the format).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from minimegatron.checkpoint import mxfp4
from minimegatron.checkpoint.hf_config import QUANTIZED
from minimegatron.checkpoint.regions import Box
from minimegatron.checkpoint.sources import Described, Source, shown, slices, whole
from minimegatron.config import TransformerConfig
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.kernels.quantized import FP8, Scheme, dequantize, pack, quantize, unpack
from minimegatron.models.families import FAMILIES

KEY, METHOD = QUANTIZED, "compressed-tensors"
PACKED, FLOAT = "pack-quantized", "float-quantized"
_WEIGHT, _WORDS, _SCALE, _SHAPE = ".weight", ".weight_packed", ".weight_scale", ".weight_shape"
_KEPT = ("embedding.", "output_layer.")
_KEPT_OF_LAYERS = ("router.", "gate_weight")
_NOT_LINEAR = ("norm.", "conv1d.")
# Of `quantization_config` and of its groups: what changes the weights' meaning and may have this value only.
_ONLY: dict[str, Any] = {"kv_cache_scheme": None, "sparsity_config": {}, "transform_config": {}}
_ONLY_OF_WEIGHTS: dict[str, Any] = {"symmetric": True, "dynamic": False, "actorder": None, "block_structure": None}


def linear_weights(config: TransformerConfig, family: str) -> tuple[set[str], list[str]]:
    """(their tensors that are quantised, their linear layers that are not).

    Raises:
        ConfigError: the family has no layers of the class Linear.
    """
    quantised: set[str] = set()
    kept = {"lm_head"}
    if FAMILIES[family].stacks:
        raise ConfigError(
            f"the experts of {family} are stacks, and {METHOD} quantises Linear", fix="a model of another family"
        )
    if FAMILIES[family].has("vision"):
        raise ConfigError(f"the vision encoder of {family} is not quantised", fix="a model of another family")
    for match in FAMILIES[family].matches(config):
        if not match.ours.endswith("weight") and match.expert is None:
            continue
        if match.how in ("transpose", "conv_pack"):
            raise ConfigError(
                f"the layers of {family} are Conv1D, and {METHOD} quantises Linear", fix="a model of another family"
            )
        if match.ours.startswith(_KEPT) or any(part in match.ours for part in _NOT_LINEAR):
            continue
        if any(part in match.ours for part in _KEPT_OF_LAYERS):
            kept.update(name.removesuffix(_WEIGHT) for name in match.theirs)
        else:
            quantised.update(match.theirs)
    return quantised, sorted(kept)


def quantization_config(scheme: Scheme, ignore: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` for `config.json`.

    Args:
        scheme: the scheme of all quantised weights.
        ignore: linear layers that are not quantised.
    """
    weights = {
        "num_bits": scheme.bits,
        "type": scheme.type,
        "symmetric": True,
        "dynamic": False,
        "strategy": "channel" if scheme.group_size is None else "group",
        "group_size": scheme.group_size,
    }
    return {
        "quant_method": METHOD,
        "format": PACKED if scheme.packs else FLOAT,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def scheme_of(keys: Any) -> Scheme:
    """The scheme that `quantization_config` of a `config.json` describes.

    Raises:
        ConfigError: another method, or an option that would change the values of the weights.
    """
    keys = keys if isinstance(keys, dict) else {}
    method = keys.get("quant_method")
    if method != METHOD:
        raise ConfigError(
            f"{KEY}: weights quantised by {method!r} are not read", fix=f"a folder in the format {METHOD}"
        )
    groups = list((keys.get("config_groups") or {}).values())
    problems = [f"{key}={keys[key]!r}" for key, wanted in _ONLY.items() if keys.get(key) not in (None, wanted)]
    if len(groups) != 1 or not isinstance(groups[0], dict) or not isinstance(groups[0].get("weights"), dict):
        raise ConfigError(
            f"{KEY} has {len(groups)} groups of layers, not one with weights", fix="a model with one scheme"
        )
    problems += [f"{key} are quantised" for key in ("input_activations", "output_activations") if groups[0].get(key)]
    weights = groups[0]["weights"]
    problems += [
        f"{key}={weights[key]!r} of weights"
        for key, wanted in _ONLY_OF_WEIGHTS.items()
        if weights.get(key) not in (None, wanted)
    ]
    strategy, scheme_format = weights.get("strategy"), groups[0].get("format") or keys.get("format")
    wanted_format = PACKED if weights.get("type") == "int" else FLOAT
    if strategy not in ("channel", "group"):
        problems.append(f"strategy={strategy!r}")
    if scheme_format != wanted_format:
        problems.append(f"format={scheme_format!r}")
    if problems:
        raise ConfigError(
            f"{METHOD} with {', '.join(problems)} is not read",
            fix=f"symmetric weights by channel or group, in {PACKED} or {FLOAT}, without quantised activations",
        )
    return Scheme(
        str(weights.get("type")),
        int(weights.get("num_bits") or 0),
        weights.get("group_size") if strategy == "group" else None,
    )


def check_divides(scheme: Scheme, tensors: Mapping[str, Described], names: Iterable[str]) -> None:
    """Check that rows consist of whole groups: transformers and vLLM read nothing else (here the last may be shorter).

    Raises:
        ConfigError: a row does not.
    """
    size = scheme.group_size
    columns = {name: tensors[name].shape[1] for name in sorted(names)}
    bad = [f"{name} has {n} inputs" for name, n in columns.items() if size is not None and n % size]
    if bad:
        fits = next((n for n in (128, 64, 32, 16, 8) if not any(c % n for c in columns.values())), None)
        raise ConfigError(
            f"groups of {size} do not divide the rows:{shown(bad)}",
            fix=f"--group-size {fits}" if fits else "--scheme int8, which has one scale for a row",
        )


class Quantised:
    """A folder's tensors with some of them quantised, as they are written.

    Args:
        source: their tensors; those that are quantised in the best precision that is known.
        dtypes: dtype of every tensor, and of the scales of those that are quantised.
        names: names of those that are quantised, matrices [o, i].
        scheme: the scheme.
    """

    def __init__(self, source: Source, dtypes: Mapping[str, torch.dtype], names: Iterable[str], scheme: Scheme) -> None:
        self.source, self.scheme = source, scheme
        self.names, self.tensors = set(names), dict[str, Described]()
        self._weight: dict[str, str] = {}
        self._last: tuple[str, dict[str, torch.Tensor]] | None = None
        for name, (_, shape) in source.tensors.items():
            if name not in self.names:
                self.tensors[name] = Described(dtypes[name], shape)
                continue
            stem, (rows, columns) = name.removesuffix(_WEIGHT), shape
            parts = {_SCALE: Described(dtypes[name], (rows, scheme.groups(columns)))}
            if scheme.packs:
                parts |= {_WORDS: Described(torch.int32, (rows, scheme.words(columns)))}
                parts |= {_SHAPE: Described(torch.int64, (2,))}
            else:
                parts |= {_WEIGHT: Described(FP8, shape)}
            self.tensors |= {stem + part: described for part, described in parts.items()}
            self._weight |= {stem + part: name for part in parts}

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """See `Source`."""
        weight = self._weight.get(name)
        if weight is None:
            return self.source.read(name, box).to(self.tensors[name].dtype)
        if self._last is None or self._last[0] != weight:
            self._last = None
            self._last = weight, self._parts(weight)
        part = self._last[1][name]
        return part if box is None else part[slices(box)]

    def _parts(self, name: str) -> dict[str, torch.Tensor]:
        weight, stem = self.source.read(name), name.removesuffix(_WEIGHT)
        q, scale = quantize(weight, self.scheme, self.tensors[stem + _SCALE].dtype)
        if not self.scheme.packs:
            return {name: q, stem + _SCALE: scale}
        shape = torch.tensor(weight.shape, dtype=torch.int64)
        return {stem + _WORDS: pack(q, self.scheme.bits), stem + _SCALE: scale, stem + _SHAPE: shape}


class Dequantised:
    """The tensors of a quantised folder, dequantised: `X.weight` in the dtype of its scales.

    Args:
        source: the tensors of the files.
        scheme: how they are quantised.
        part: "weight" q * scale; "q", or "scale" of each element, of the same shape and dtype, alone.

    Raises:
        CheckpointError: the tensors of a matrix are missing, or do not fit each other.
    """

    def __init__(self, source: Source, scheme: Scheme, part: str = "weight") -> None:
        self.source, self.scheme, self.part, self.tensors = source, scheme, part, dict[str, Described]()
        self.stems: set[str] = set()
        problems: list[str] = []
        for name, described in source.tensors.items():
            if name.endswith(_WORDS):
                problems += self._add(name.removesuffix(_WORDS), described, packed=True)
            elif described.dtype == FP8 and name.endswith(_WEIGHT):
                problems += self._add(name.removesuffix(_WEIGHT), described, packed=False)
            elif not name.endswith((_SCALE, _SHAPE)):
                self.tensors[name] = described
            elif not any(name.removesuffix(end) + kind in source.tensors for end in (_SCALE, _SHAPE)
                         for kind in (_WORDS, _WEIGHT)):  # fmt: skip
                problems.append(f"{name}: there is no weight that it belongs to")
        if problems:
            raise CheckpointError(
                f"these are not the tensors that {KEY} describes:{shown(problems)}", fix="download the folder again"
            )

    def _add(self, stem: str, described: Described, packed: bool) -> list[str]:
        """Register the matrix of a layer; returns what is wrong with it."""
        missing = [stem + end for end in (_SCALE, _SHAPE) if stem + end not in self.source.tensors]
        missing = [name for name in missing if packed or name.endswith(_SCALE)]
        if packed != self.scheme.packs:
            return [f"{stem}: {described}, by {KEY} its weights are {self.scheme.type} of {self.scheme.bits} bits"]
        if missing:
            return [f"missing {name}" for name in missing]
        shape = tuple(int(n) for n in self.source.read(stem + _SHAPE).flatten()) if packed else described.shape
        scale, stored = self.source.tensors[stem + _SCALE], tuple(described.shape)
        if len(shape) != 2 or min(shape) < 1 or (packed and stored != (shape[0], self.scheme.words(shape[1]))):
            return [f"{stem}{_WORDS if packed else _WEIGHT} has shape {list(stored)}, and the matrix {list(shape)}"]
        if scale.shape != (shape[0], self.scheme.groups(shape[1])) or not scale.dtype.is_floating_point:
            return [f"{stem}{_SCALE} is {scale}, for a matrix {list(shape)}"]
        self.stems.add(stem)
        self.tensors[stem + _WEIGHT] = Described(scale.dtype, shape)
        return []

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """See `Source`."""
        stem = name.removesuffix(_WEIGHT)
        if stem not in self.stems or not name.endswith(_WEIGHT):
            return self.source.read(name, box)
        rows, (first, last) = whole(self.tensors[name].shape) if box is None else box
        bits, size = self.scheme.bits, self.scheme.group_size
        if self.scheme.packs:
            each = 32 // bits
            words = self.source.read(stem + _WORDS, (rows, (first // each, -(-last // each))))
            skipped = first % each
            q = unpack(words, bits, skipped + last - first)[:, skipped:]
        else:
            q = self.source.read(name, (rows, (first, last)))
        groups = (0, 1) if size is None else (first // size, -(-last // size))
        scale = self.source.read(stem + _SCALE, (rows, groups))
        if self.part == "q":
            return q.to(scale.dtype)
        return dequantize(q if self.part == "weight" else torch.ones_like(q), scale, self.scheme, first)


@dataclasses.dataclass(frozen=True)
class Words:
    """What `Dequantised` multiplies, apart and under our names.

    Attributes:
        scheme: int of 4 or 8 bits.
        names: of our weights that are quantised as wholes.
        q: them, as whole numbers.
        scales: of each element of them.
    """

    scheme: Scheme
    names: frozenset[str]
    q: Source
    scales: Source


def is_mxfp4(keys: Any) -> bool:
    """Whether a `quantization_config` is that of `checkpoint/mxfp4`."""
    return isinstance(keys, dict) and keys.get("quant_method") == mxfp4.METHOD


def dequantised(source: Source, keys: Any) -> Source:
    """The tensors of a published folder, dequantised if need be.

    Args:
        source: the tensors of its files.
        keys: `quantization_config` of its `config.json`, or None.

    Raises:
        ConfigError: see `scheme_of`.
        CheckpointError: see `Dequantised`; or packed weights without a `quantization_config`.
    """
    if is_mxfp4(keys):
        mxfp4.check(keys)
        return mxfp4.Mxfp4(source)
    if keys is not None:
        return Dequantised(source, scheme_of(keys))
    packed = next((name for name in source.tensors if name.endswith((_WORDS, mxfp4.BLOCKS))), None)
    if packed is not None:
        raise CheckpointError(
            f"{packed} is quantised, and config.json has no {KEY}", fix="take config.json from the same download"
        )
    return source

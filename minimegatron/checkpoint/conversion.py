"""Model folders of every kind: opened as weights under our names, and written as another kind.

| kind           | recognised by                | read by                      | written by                    |
|----------------|------------------------------|------------------------------|-------------------------------|
| `hf`           | `config.json`                | `hf_folder.open_published`   | `hf_folder.write_published`   |
| `ours`         | `iter_0000020/manifest.json` | `ours.Checkpoint`            | `ours.write_checkpoint`       |
| `torch_dist`   | `.metadata`                  | `torch_dist.TorchDist`       | `torch_dist.write_release`    |
| `tensorrt_llm` | -                            | -                            | `tensorrt_llm.write`          |

Each is a `Source` (`checkpoint/sources.py`), so a conversion reads one tensor at a time while the other folder is
written. All tensors of a folder are first compared with its configuration, by name and shape (`checked`): a reader that
takes its part of a larger tensor would take the wrong numbers, and the model would run.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from minimegatron.checkpoint import megatron, tensorrt_llm, torch_dist
from minimegatron.checkpoint.companions import (
    CONFIG,
    FOLDER,
    GENERATION,
    TOKENIZER,
    copy_companions,
    to_json,
    token_ids,
    verified,
)
from minimegatron.checkpoint.compressed_tensors import Words
from minimegatron.checkpoint.hf_config import (
    check_pad_token,
    config_from_huggingface,
    config_to_huggingface,
    is_published,
    read_config,
    read_json,
)
from minimegatron.checkpoint.hf_folder import open_published, open_words, write_published
from minimegatron.checkpoint.huggingface import as_theirs
from minimegatron.checkpoint.megatron_optimizer import WEIGHTS_ONLY, continued, optimizer_state
from minimegatron.checkpoint.ours import Checkpoint, Continued, write_checkpoint
from minimegatron.checkpoint.packed import contents_of_base
from minimegatron.checkpoint.regions import Box, Logical
from minimegatron.checkpoint.sources import Cast, Described, Source, Together, View, shown
from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.layers.param import layout_of, logical_parameters
from minimegatron.models.chunks import build_stage, stage_class
from minimegatron.models.families import FAMILIES

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model in a folder.

    Attributes:
        kind: kind of the folder.
        config: with the `params_dtype` of the weights.
        weights: under our names.
        companions_folder: the folder with the files beside its weights (`checkpoint/companions`), if there is one.
        optimizer_state: a description of the optimizer state in the folder, for a message; empty for none.
        continued: reads that state, for a configuration and its weights; None if it cannot be read.
        family: family of a published model.
        companions_hash: hash of these files, from the manifest of a checkpoint.
        words: its packed weights as they are; None if nothing is packed.
    """

    kind: str
    config: TransformerConfig
    weights: Source
    companions_folder: Path | None
    optimizer_state: str = ""
    continued: Callable[[TransformerConfig, Source], Continued] | None = None
    family: str | None = None
    companions_hash: str | None = None
    words: Words | None = None

    @property
    def companions(self) -> Path | None:
        """The folder with the files beside its weights, verified; None if there is none.

        Raises:
            CheckpointError: it has changed.
        """
        folder = self.companions_folder
        return verified(folder, self.companions_hash) if self.kind == "ours" and folder is not None else folder

    @property
    def tokenizer(self) -> Path | None:
        """The folder of its tokenizer; None if it has none.

        Raises:
            CheckpointError: it has changed.
        """
        folder = self.companions
        return folder if folder is not None and any((folder / name).is_file() for name in TOKENIZER) else None


def kind_of(folder: Path) -> str:
    """The kind of a folder.

    Raises:
        CheckpointError: the kind is not known; or the folder holds two models.
    """
    our_manifest, torch_dist_folder = next(folder.glob("iter_*/manifest.json"), None), torch_dist.find(folder)
    if is_published(folder):
        return "hf"
    if our_manifest is not None and torch_dist_folder is not None:
        raise CheckpointError(
            f"two models: the checkpoint {our_manifest.parent.name}, and Megatron's "
            f"{torch_dist_folder.name or '.metadata'}",
            where=str(folder),
            fix="move one of them to a folder of its own",
        )
    if our_manifest is not None or torch_dist_folder is not None:
        return "ours" if our_manifest is not None else "torch_dist"
    raise CheckpointError(
        "neither a published model (config.json) nor a checkpoint (iter_0000000/manifest.json, Megatron's .metadata)",
        where=str(folder),
        fix="give the folder that holds config.json, or the one that --save named",
    )


def open_model(
    folder: Path, kind: str | None = None, step: int | None = None, vocab_size: int | None = None,
    companions: Path | None = None,
) -> Model:  # fmt: skip
    """Open the model in a folder; its weights are read on demand.

    Args:
        folder: a folder that was downloaded or saved.
        kind: default that of the folder's files.
        step: step of a checkpoint; default the newest.
        vocab_size: vocabulary of a checkpoint of Megatron's that does not have it.
        companions: folder of a published model, whose `config.json` describes a checkpoint without `args`.

    Raises:
        CheckpointError, ConfigError: it does not exist, is not whole, or not supported.
    """
    kind = kind_of(folder) if kind is None else kind
    if kind == "ours":
        checkpoint = Checkpoint(folder, step)
        weights, words = _over_base(checkpoint)
        return Model(
            kind,
            checkpoint.config.replace(lora_base=None),
            weights,
            folder / FOLDER,
            checkpoint.optimizer_state,
            companions_hash=checkpoint.companions_hash,
            words=words,
        )
    if kind == "torch_dist":
        return _open_megatrons(folder, step, vocab_size, companions)
    if step is not None:
        raise ConfigError(f"--ckpt-step {step}: a published model has no steps", fix="drop it")
    family, config, weights = open_published(folder)
    words_dtype = weights.tensors["embedding.word_embeddings.weight"].dtype
    config = config.replace(params_dtype=_DTYPES[words_dtype])
    return Model(kind, config, weights, folder, family=family, words=open_words(folder))


def _over_base(checkpoint: Checkpoint) -> tuple[Source, Words | None]:
    """The weights of a checkpoint, with those that it leaves to its `lora_base`, and these as they are packed.

    Raises:
        CheckpointError: the base is not there, or is another one than the adapters were trained beside.
    """
    if (base := checkpoint.config.lora_base) is None:
        return checkpoint, None
    fix = "put the folder back: the checkpoint has the adapters, and its base the packed weights"
    try:
        contents = contents_of_base(base)
    except CheckpointError as error:
        raise CheckpointError(f"{base}, beside which the adapters were trained: {error.what}", fix=fix) from None
    if contents != checkpoint.base_contents:
        raise CheckpointError(f"{base} has other weights than when the adapters were trained", fix=fix)
    published = open_published(Path(base))[2]
    rest = published.tensors.keys() - checkpoint.tensors.keys()
    return _Over(checkpoint, Cast(published, dict.fromkeys(rest, checkpoint.config.dtype))), open_words(Path(base))


class _Over:
    """A source, and another for the tensors that it lacks."""

    def __init__(self, first: Source, other: Source) -> None:
        self.first, self.other = first, other
        self.tensors = {**other.tensors, **first.tensors}

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        return (self.first if name in self.first.tensors else self.other).read(name, box)


def _open_megatrons(folder: Path, step: int | None, vocab_size: int | None, companions: Path | None) -> Model:
    checkpoint = torch_dist.find(folder, step)
    if checkpoint is None:
        raise CheckpointError("no checkpoint of Megatron's", where=str(folder), fix="give a folder with .metadata")
    common, theirs = torch_dist.read_common(checkpoint), torch_dist.TorchDist(checkpoint)
    if "args" in common:
        config = megatron.config_from_args(common["args"], vocab_size)
    elif companions is not None:
        config = read_config(companions)[1]
    else:
        raise CheckpointError(
            "common.pt has no args: it does not say what the model is",
            where=str(checkpoint),
            fix="--hf-model FOLDER: a config.json that does",
        )
    weights = megatron.as_ours(theirs, config)
    embedding = weights.tensors.get("embedding.word_embeddings.weight")
    dtype = _DTYPES.get(embedding.dtype) if embedding is not None else None
    config = config.replace(params_dtype=dtype or config.params_dtype)
    described = optimizer_state(theirs, common)
    reads = functools.partial(continued, theirs, common)
    return Model("torch_dist", config, weights, companions, described, reads)


def checked(model: Model, dtype: str | None) -> tuple[TransformerConfig, Source]:
    """The model's configuration and weights, in the shapes and dtypes that a run of it has.

    Args:
        model: the model to be converted.
        dtype: the dtype asked for; default that of the weights.

    Raises:
        CheckpointError: a tensor is missing or misshapen, or would be rounded although no dtype was asked for.
    """
    config = model.config.replace(params_dtype=dtype or model.config.params_dtype)
    wanted, stored = logical_tensors(config), model.weights.tensors
    problems = [f"missing {name}" for name in wanted.keys() - stored.keys()]
    problems += [f"{name}: the configuration has none" for name in stored.keys() - wanted.keys()]
    for name in wanted.keys() & stored.keys():
        if wanted[name].shape != stored[name].shape:
            problems.append(f"{name} has shape {stored[name].shape}, by the configuration it is {wanted[name].shape}")
        elif dtype is None and torch.promote_types(wanted[name].dtype, stored[name].dtype) != wanted[name].dtype:
            problems.append(
                f"{name} is {stored[name].dtype} and a {config.params_dtype} model has {wanted[name].dtype}: "
                f"say --{config.params_dtype} to round it"
            )
    if problems:
        raise CheckpointError(
            f"the weights are not those of the configuration:{shown(sorted(problems))}",
            fix="a vocabulary that was padded after training: cut the embedding to vocab_size, or set vocab_size to "
            "its rows"
            if any("embeddings" in p and "shape" in p for p in problems)
            else "take the configuration and the weights from one download or save",
        )
    changed = {name: d.dtype for name, d in wanted.items() if d.dtype != stored[name].dtype}
    return config, Cast(model.weights, changed) if changed else model.weights


def goes_on(model: Model, config: TransformerConfig, weights: Source) -> Continued:
    """The optimizer's state and the counters that belong to weights from `checked`, for a run that goes on.

    Raises:
        CheckpointError: this format's state cannot be read; or the weights are rounded, and the main parameter of one
            is unknown.
    """
    if model.continued is None or config.params_dtype != model.config.params_dtype:
        cannot = "does not read" if model.continued is None else f"to {config.params_dtype} does not take over"
        raise CheckpointError(
            f"the folder holds {model.optimizer_state}, which a conversion {cannot}",
            fix=WEIGHTS_ONLY,
        )
    return model.continued(config, weights)


def target(
    kind: str,
    config: TransformerConfig,
    weights: Source,
    companions: Path | None,
    family: str | None,
    own: bool = False,
    tp: int = 1,
) -> tuple[Source, dict[str, object]]:
    """The tensors under the target's names, and the rest of its description: `config.json`, or `args`.

    Args:
        kind: kind of the target.
        config, weights: see `checked`.
        companions: folder with the files beside its weights.
        family: family for `config.json`; default the first that can describe the model.
        own: do not take over the `config.json` of `companions`.
        tp: ranks of TensorRT-LLM's files.

    Raises:
        ConfigError: the target cannot describe the model.
    """
    if kind == "ours":
        return weights, {}
    if kind == "torch_dist":
        return megatron.as_theirs(weights, config), megatron.args_of(config)
    if kind == "tensorrt_llm":
        keys_of_engine = tensorrt_llm.keys_of(config, family, tp)
        return tensorrt_llm.as_theirs(weights, config, tp), keys_of_engine
    has_config = companions is not None and (companions / CONFIG).is_file() and not own
    like = (
        read_json(companions / CONFIG, "a folder with config.json") if has_config and companions is not None else None
    )
    family_name, keys = config_to_huggingface(
        config, family, like, token_ids(companions) if companions is not None else None
    )
    if companions is not None:
        check_pad_token(keys, config.vocab_size, companions)
    return as_theirs(weights, config, family_name), keys


def family_of(config: TransformerConfig, weights: Source, companions: Path | None) -> str:
    """The family as which a model would be published; arguments and errors as of `target`."""
    return str(target("hf", config, weights, companions, None)[1]["model_type"])


def write_model(
    kind: str, tensors: Source, config: TransformerConfig, keys: dict[str, object], folder: Path, most: int,
    companions: Path | None, run: Continued | None = None,
) -> list[str]:  # fmt: skip
    """Write a folder of this kind; returns the names of its files.

    Raises:
        CheckpointError: the folder exists, or there is not enough room for it.
    """
    total = sum(described.nbytes for described in all_of(tensors, run).tensors.values())
    existing = next(parent for parent in folder.absolute().parents if parent.exists())
    if (free := shutil.disk_usage(existing).free) < total:
        raise CheckpointError(f"{total:,} bytes would be written, {free:,} are free", where=str(existing))
    if kind == "ours":
        return write_checkpoint(tensors, config, folder, most, companions, run)
    if kind == "torch_dist":
        assert isinstance(tensors, View)
        return torch_dist.write_release(tensors, keys, megatron.extra_states(tensors), folder)
    if kind == "tensorrt_llm":
        return tensorrt_llm.write(tensors, keys, folder)
    return write_published(tensors, keys, folder, most, companions)


def companions_without_config(model: Model, folder: Path) -> Path | None:
    """The files beside a model's weights for another model with its tokenizer: no `config.json`, but the ids that it
    has; copied into an empty folder. None if there are none.

    Raises:
        CheckpointError: they have changed, or cannot be read.
    """
    if model.companions is None:
        return None
    copy_companions(model.companions, folder)
    if not (folder / GENERATION).is_file() and (ids := token_ids(model.companions)):
        (folder / GENERATION).write_bytes(to_json(ids))
    return folder


def remarks(folder: Path, keys: Mapping[str, object]) -> list[str]:
    """Remarks for the user of a published folder: what it lacks, and what transformers would do with it."""
    lines = []
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        lines.append(
            "There is no tokenizer in it: put the files of the one that the model was trained with beside config.json."
        )
    writes = stage_class(config_from_huggingface(dict(keys))[1]).predicts_next
    if writes and keys.get("eos_token_id") is None and not (folder / GENERATION).is_file():
        lines.append("No token ends its texts: set eos_token_id in config.json to the tokenizer's, or it never stops.")
    config, family = folder / "tokenizer_config.json", FAMILIES[str(keys["model_type"])]
    kind = str(read_json(config, "a tokenizer").get("tokenizer_class")) if config.is_file() else family.tokenizer
    if not kind.startswith(family.tokenizer):
        owner = f"{family.tokenizer.removesuffix('Tokenizer')}'s"
        lines.append(
            f"Its tokenizer ({kind}) is not {owner}, and transformers' AutoTokenizer reads every {family.name} "
            f"folder's as {owner}: load it by PreTrainedTokenizerFast.from_pretrained."
        )
    return lines


def all_of(tensors: Source, run: Continued | None) -> Source:
    """All tensors that will be written: weights, and the state with which a run goes on."""
    return Together({"": tensors, **run.tensors}) if run else tensors


def explain(tensors: Source) -> list[str]:
    """A line for each tensor that would be written: dtype, shape, and the rows of which it consists."""
    lines = []
    for name, (dtype, shape) in tensors.tensors.items():
        size = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
        lines.append(f"{name}  {size}  <-  {_origin(tensors, name)}")
    return lines


def _origin(tensors: Source, name: str) -> str:
    if isinstance(tensors, Cast):
        return f"{_origin(tensors.source, name)}, as {tensors.source.tensors[name].dtype}".replace("torch.", "")
    if isinstance(tensors, Together):
        return _origin(*tensors.where[name])
    if not isinstance(tensors, View):
        return name
    parts: dict[str, list[str]] = {}
    for ours, theirs in tensors.copies[name]:
        whole = theirs.stop - theirs.start == tensors.source.tensors[theirs.name].shape[theirs.dim]
        stack = "".join(f"[{i}]" for i in theirs.matrix)
        turned = " transposed" if ours.columns != theirs.columns else ""
        rows = [] if whole else [f"{theirs.start}:{theirs.stop}"]
        parts.setdefault(f"{theirs.name}{stack}{turned}", []).extend(rows)
    described = [f"{part} {_short(rows)}".rstrip() for part, rows in parts.items()]
    return " + ".join(described[:4]) + (f" + {len(described) - 4} more" if len(described) > 4 else "")


def _short(rows: list[str]) -> str:
    return ("rows " if rows else "") + ", ".join(rows[:4]) + (", ..." if len(rows) > 4 else "")


def logical_tensors(config: TransformerConfig) -> dict[str, Described]:
    """Names, shapes and dtypes of a model's weights, without padding."""
    with torch.device("meta"):
        model = build_stage(config, Mesh.serial())
    return {name: Described(param.dtype, layout_of(param).unpadded_shape) for name, param in logical_parameters(model)}


def fill(tensors: Mapping[str, Logical], model: Model, params_dtype: str) -> None:
    """Fill a rank's part of a model with the weights of a folder.

    Args:
        tensors: tensors of the folder's model, by logical name, or some of them.
        model: the folder.
        params_dtype: dtype to which the weights are rounded if the folder has a wider one.

    Raises:
        CheckpointError: the folder's tensors do not match its configuration, or are not finite.
    """
    _, weights = checked(model, params_dtype)
    with torch.no_grad():
        for name, tensor in tensors.items():
            stored = weights.tensors.get(name)
            if stored is None or stored.shape != tuple(
                tensor.shape
            ):  # a layer of `--spec` that is none of the family's
                what = f"{name} {tuple(tensor.shape)}: the folder has {stored.shape if stored else 'nothing for it'}"
                raise CheckpointError(what, fix="train the model that the folder describes, without --spec")
            for part in tensor.parts:
                part.data.copy_(weights.read(name, part.box))

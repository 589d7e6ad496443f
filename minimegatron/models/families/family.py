"""A family of models as a value: its presets, its `config.json` both ways, its tensors both ways.

The problem in a sentence: the same architecture has other names in every family; one place that knows them all has to
be changed for every family, and grows with each.

So each family is described in one file, and presets, readers, writers and converters ask that description:

| attribute of `Family` | contents                                                     | used by                     |
|-----------------------|--------------------------------------------------------------|-----------------------------|
| `fields`, `presets`   | fields of `TransformerConfig`: of all members, of each size  | `--preset`, `family_config` |
| `defaults`, `parts`   | keys of `config.json`; one object reads and writes each part | `checkpoint/hf_config`      |
| `tensors`             | which of their tensors hold which of ours                    | `checkpoint/huggingface`    |

Both directions come from the same rows: `config_from_hf` and `config_to_hf` from the parts, import and export of
weights from the tensors. A family has names and sizes, and uses neither torch nor files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from minimegatron.config import TransformerConfig
from minimegatron.errors import ConfigError
from minimegatron.models.families.keys import Keys

Fields = dict[str, Any]


class Part(NamedTuple):
    """A part of `config.json`: keys -> fields of `TransformerConfig`, and back.

    Attributes:
        read: raises ConfigError for a value that has no counterpart here.
        write: the closest description that the family has; an exporter reads it back and compares.
    """

    read: Callable[[Keys], Fields]
    write: Callable[[TransformerConfig], Fields]


class Row(NamedTuple):
    """One of our logical tensors, and the tensors of theirs that it consists of.

    Attributes:
        ours: its name; `{}` stands for the layer's number.
        theirs: their names; `{e}` stands for an expert's number: published files store every expert by itself, we
            stack them.
        how: how their tensors are arranged in ours, see `checkpoint/huggingface.py`.
        when: whether the model has such a tensor.
        on: `all` layers have it, or those with this part (`TransformerConfig.parts_of`); `vision`: it is the vision
            encoder's, whose layers are counted by themselves.
    """

    ours: str
    theirs: tuple[str, ...]
    how: str = "stack"
    when: Callable[[TransformerConfig], bool] = lambda config: True
    on: str = "all"


class Match(NamedTuple):
    """A row for one layer, and for one expert of a stack.

    Attributes:
        ours, theirs, how: see `Row`.
        expert: its number in the stack; None if ours is no stack.
        stacked: how many matrices our tensor stacks; 0 for none.
        of: the model whose sizes it has: the whole one, or its vision encoder.
    """

    ours: str
    theirs: tuple[str, ...]
    how: str
    expert: int | None
    stacked: int
    of: TransformerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """The common properties of a family of models, and its members.

    Attributes:
        name: Hugging Face's `model_type`.
        architecture: Hugging Face's class of the language model.
        fields: fields of `TransformerConfig` that are the same in all members.
        presets: name of a member -> its further fields.
        defaults: the keys of `config.json` that are read, with the defaults of the family's class.
        parts: the meaning of the keys, each part both ways; if two parts write a key, the later one counts.
        tensors: rows, the embedding first.
        aliases: other names of a key, which transformers accepts.
        flat: `config.json` with the keys of a language model inside of it at the top, as older files have them.
        prefix: prefix of their names, which files may leave out.
        left_out: what the names of tensors begin with that the family's class does not read either; of a model.
        kept: a `config.json` that is written again for a model -> with what differs in a dictionary inside of it.
        tied: names under which files may store a tensor of the rows once more -> its name in the rows; {} is
            `lm_head.weight` for the embedding.
        renamed: part of a name in their model in memory -> as published.
        older: part of a name in old files -> as it is in the rows.
        stacks: end of the name of a published tensor of all experts -> the tensors of one expert in the rows, as their
            names end (`checkpoint/stacks`); {} where files have a tensor for each expert.
        tokenizer: the class with which transformers reads every folder's tokenizer, whatever the folder says.
        tensorrt_llm: what a TensorRT-LLM checkpoint states about the family beside the sizes; None if its classes do
            not compute it.
    """

    name: str
    architecture: str
    fields: Mapping[str, Any]
    presets: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any]
    parts: tuple[Part, ...]
    tensors: tuple[Row, ...]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    flat: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    prefix: str = ""
    left_out: Callable[[TransformerConfig], tuple[str, ...]] = lambda config: ()
    kept: Callable[[Mapping[str, Any], TransformerConfig], Mapping[str, Any]] = lambda keys, config: keys
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    older: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stacks: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    tokenizer: str = ""
    tensorrt_llm: Mapping[str, Any] | None = None

    def has(self, part: str) -> bool:
        """Whether members have layers with this part."""
        return any(row.on == part for row in self.tensors)

    def is_like(self, config: TransformerConfig) -> bool:
        """Whether both the model and the family are hybrids of one kind, or neither, and then mixtures of experts, or
        neither; and whether both see, both are encoders, or neither.
        """
        if ("bert_head" in self.fields) != (config.bert_head is not None):
            return False
        if self.fields.get("model_class") != config.model_class:
            return False
        hybrid = config.hybrid_override_pattern is not None
        if self.has("cross_attention") != config.has("cross_attention") or self.has("vision") != config.sees:
            return False
        if config.sees and self.fields.get("vision_model_type", "qwen_vit") != config.vision_model_type:
            return False
        if self.has("mamba") != hybrid or self.has("gated_delta_net") != config.has("gated_delta_net"):
            return False
        return hybrid or self.has("moe") == any(config.expert_layers)

    def config_from_hf(self, hf: Mapping[str, Any]) -> TransformerConfig:
        """The model that a `config.json` describes.

        Raises:
            ConfigError: a key or a value that is not supported; nothing is ignored silently.
        """
        keys = Keys(self.flat(hf), self.name, self.defaults, self.aliases)
        fields = dict(self.fields)
        for part in (_TIED, *self.parts):
            fields |= part.read(keys)
        keys.finish()
        return TransformerConfig.from_dict(fields)

    def config_to_hf(self, config: TransformerConfig) -> dict[str, Any]:
        """The `config.json` of this family that is closest to the model; the caller reads it back and compares.

        Keys for which a class of transformers has another default are written, too.

        Raises:
            ConfigError: the model is no hybrid or no mixture of experts, and the members of the family are; or the
                other way round.
        """
        if not self.is_like(config):
            names = "num_experts hybrid_override_pattern linear_attention_freq encoder_num_layers".split()
            names += ["vision_num_layers", "vision_model_type"]
            raise ConfigError(", ".join(f"{name}: {getattr(config, name)!r} here" for name in names))
        keys: dict[str, Any] = {"model_type": self.name, "architectures": [self.architecture]}
        for part in (_TIED, *self.parts):
            keys |= part.write(config)
        return keys

    def matches(self, config: TransformerConfig) -> Iterator[Match]:
        """The rows for this model: the embedding, every layer that has a row, every expert, the rest.

        Beside an encoder theirs count a decoder's layers from 0.
        """
        layers, encoder, seeing = config.num_layers, config.encoder_num_layers or 0, config.vision_num_layers or 0
        table = [row for row in self.tensors if row.when(config)]
        of_layers = [row for row in table if "{}" in row.ours and row.on != "vision"]
        of_vision = [row for row in table if "{}" in row.ours and row.on == "vision"]
        words = [row for row in table if row.ours.startswith("embedding.")]
        rest = [row for row in table if row not in (*of_layers, *of_vision, *words)]
        by_layer = (*((n, of_vision) for n in range(seeing)), *((n, of_layers) for n in range(layers)))
        for n, rows in ((-1, words), *by_layer, (layers, rest)):
            for row in rows:
                if row.on not in ("all", "vision") and row.on not in config.parts_of(n):
                    continue
                in_encoder = row.ours.startswith("encoder.")
                if "{}" in row.ours and in_encoder != (n < encoder):
                    continue
                theirs = tuple(name.replace("{}", str(n if in_encoder else n - encoder)) for name in row.theirs)
                stacked = (config.num_experts or 0) if "{e}" in theirs[0] else 0
                for e in range(stacked) if stacked else (None,):
                    names = tuple(name.replace("{e}", str(e)) for name in theirs)
                    of = config.vision if row.on == "vision" else config
                    yield Match(row.ours.format(n), names, row.how, e, stacked, of)


FAMILIES: dict[str, Family] = {}
PRESETS: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Register a family under its name and its presets.

    Raises:
        ConfigError: the name or a preset is taken.
    """
    taken = [name for name in (family.name,) if name in FAMILIES] + [name for name in family.presets if name in PRESETS]
    if taken:
        raise ConfigError(f"there is a family or preset {taken[0]!r} already", fix="choose another name")
    FAMILIES[family.name] = family
    PRESETS.update(dict.fromkeys(family.presets, family))
    return family


# --------------------------------------------------------------------------------------- parts that are made of names


def named(names: Mapping[str, str]) -> Part:
    """The part for keys that are fields of ours under other names; null is the field's default."""
    return Part(
        lambda keys: {ours: keys[theirs] for theirs, ours in names.items() if keys[theirs] is not None},
        lambda config: {theirs: getattr(config, ours) for theirs, ours in names.items()},
    )


def one_of(key: str, names: Mapping[str, str], field: str, where: str) -> Part:
    """The part for a key whose values have other names here: theirs -> ours; if two are one of ours, the first is
    written.

    Args:
        key: key of `config.json`.
        names: their value -> ours.
        field: field of `TransformerConfig`.
        where: for the error, e.g. "a gated MLP".
    """

    def read(keys: Keys) -> Fields:
        if (name := keys[key]) not in names:
            raise ConfigError(f"{field} {name!r} is not supported in {where}", fix=f"supported: {', '.join(names)}")
        return {field: names[name]}

    def write(config: TransformerConfig) -> Fields:
        ours = getattr(config, field)
        return {key: next((theirs for theirs, value in names.items() if value == ours), f"minimegatron's {ours}")}

    return Part(read, write)


def only(**wanted: Any) -> Part:
    """The part for keys with one supported value, which is also their default."""

    def read(keys: Keys) -> Fields:
        for key, value in wanted.items():
            keys.only(key, value)
        return {}

    return Part(read, lambda config: {})


def noted(**fields: str) -> Part:
    """The part for keys without effect on the model, such as dropout: written, not read; key=field of ours."""
    return Part(lambda keys: {}, lambda config: {key: getattr(config, ours) for key, ours in fields.items()})


_TIED = Part(
    lambda keys: {"untie_embeddings_and_output_weights": not keys["tie_word_embeddings"]},
    lambda config: {
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "initializer_range": config.init_method_std,
    },
)

"""Megatron's command line, made from the fields of `config/`.

The problem in a sentence: Megatron-LM has about nine hundred flags, and a user who knows fifty of them should find
those fifty here, with the same meaning.

A flag is a field's name with dashes, and its help is that of the field, so there is no second list of flags:

| field                            | flag                                     |
|----------------------------------|------------------------------------------|
| `hidden_size: int`               | `--hidden-size N`                        |
| `sequence_parallel: bool = False`| `--sequence-parallel`                    |
| `scale_output_init: bool = True` | `--no-scale-output-init`                 |
| `data_path: tuple[str, ...]`     | `--data-path A B ...`                    |

Megatron's other spellings, flags that ask for what always happens here, and flags that are not supported yet are data,
in `megatron_flags.py`. No flag is ignored: it has its effect, or a line says that it changes nothing, or the command
ends with status 2 before any rank talks to another.

Values come from five places; the later one wins: defaults, the folder of `--load` if it is a published model or
`--use-checkpoint-args` is given, `--preset NAME` (models/families), `--config FILE.json` (in the form of the log file's
first line), flags. Defaults are those of `config/`, except the few of `DEFAULTS`, where Megatron's command line has
another value and the result of a training would differ.

Megatron-LM: `megatron/training/arguments.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from minimegatron.config.fields import MODEL
from minimegatron.config.run import RunConfig, sections_of
from minimegatron.errors import ConfigError, did_you_mean
from minimegatron.flags import Parser
from minimegatron.models.families import PRESETS, preset
from minimegatron.training.megatron_flags import ALREADY, RENAMED, SWITCHED_OFF_BY, SWITCHES, VALUES, is_unsupported

# Megatron's command-line defaults where those of `config/` differ. Those of the model do not apply to a preset or a
# configuration file, which say what the model is.
DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {"hidden_dropout": 0.1, "attention_dropout": 0.1, "activation": "gelu_tanh"},
    "optimizer": {"muon_tp_mode": "blockwise"},
}


# Switches of Megatron's that decide what a field is when it is not given; shown behind it.
BESIDE = {
    "num_query_groups": [
        ("--group-query-attention", "group_query_attention", True, "with --num-query-groups; alone: 1 group")
    ],
    "activation": [
        ("--no-bias-gelu-fusion", "bias_gelu_fusion", False, "GeLU by its formula instead of the tanh form")
    ],
}


def parse_args(argv: Sequence[str], world_size: int = 1, *, reads: bool = True, task: str | None = None) -> RunConfig:
    """A command line as configuration, checked against every rule; no process group is needed.

    Args:
        argv: the words after the program's name.
        world_size: ranks that the launcher started.
        reads: whether the run reads data, and so needs some.
        task: a task of `config/posttraining`, whose fields are flags as well.

    Raises:
        ConfigError: an unknown flag (with the nearest one), a flag of Megatron's that is not supported yet, a bad
            value, two flags that contradict each other, or a combination that cannot work.
        SystemExit: after `--help`.
    """
    parser, sections = (
        build_parser(task),
        sections_of(task),
    )  # --help ends here, before anything that needs torch is imported
    args, rest = parser.parse_known_args(list(argv), argparse.Namespace(origins={}, notes=[]))
    _refuse_unknown(rest, parser)
    flags = {k: v for k, v in vars(args).items() if k not in ("origins", "notes", "preset", "config", "spec")}
    _group_query_attention(flags, args.notes)
    defaults = {**DEFAULTS, "model": {**DEFAULTS["model"], **_dependent_defaults(flags, args.notes)}}
    if task is not None:  # a ratio of two log-probabilities would compare two draws of dropout
        defaults["model"] |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}

    from_file = _read_config(args.config, sections) if args.config else {}
    saved = _of_checkpoint({**from_file.get("checkpoint", {}), **flags})
    values: dict[str, dict[str, Any]] = {}
    given: set[str] = set()
    for name, cls in sections.items():
        fields = {f.name for f in dataclasses.fields(cls)}
        chosen = {**saved, **(preset(args.preset) if args.preset else {})} if name == "model" else {}
        chosen = {**chosen, **from_file.get(name, {}), **{k: v for k, v in flags.items() if k in fields}}
        use_defaults = name != "model" or not (saved or args.preset or name in from_file)
        values[name] = {**(defaults.get(name, {}) if use_defaults else {}), **chosen}
        given |= chosen.keys()
    if (base := values["model"].get("lora_base")) and "lora_base_bits" not in flags:
        from minimegatron.checkpoint.packed import fields_of_base

        values["model"] |= fields_of_base(base)
    spec = args.spec or from_file.get("spec")
    if spec is not None and len(spec) != 2:
        raise ConfigError(f"--spec {' '.join(spec)}: {len(spec)} words", fix="give a module and a function of it")
    if task in ("reward", "ppo"):
        values["model"]["value_head"] = True
    run = RunConfig(
        **{name: cls.from_dict(values[name]) for name, cls in sections.items()},
        spec=(spec[0], spec[1]) if spec else None,
        given=frozenset(given),
        notes=tuple(args.notes),
    )
    named = set(flags)  # a preset's fields are a model as published, and the first line of a log has every field
    for name, cls in sections.items():
        named |= {key for key, value in from_file.get(name, {}).items() if value != getattr(cls, key, None)}
    run = dataclasses.replace(run, notes=run.notes + run.not_read(named))
    from minimegatron.training.rules import check_run

    check_run(run, world_size, reads=reads)
    return run


def _of_checkpoint(flags: dict[str, Any]) -> dict[str, Any]:
    """The fields of the model that `--load` determines.

    A published folder determines all fields of kind `MODEL`, and is read without torch; with `--use-checkpoint-args` a
    checkpoint determines all fields of its `TransformerConfig`.

    Raises:
        CheckpointError: `--load` has no description of a model.
    """
    if flags.get("load") is None:
        return {}
    from minimegatron.checkpoint.hf_config import is_published, read_config

    load = Path(flags["load"])
    if is_published(load):
        _, config = read_config(load)
        published = config.names_of(MODEL)
        return {name: value for name, value in config.to_dict().items() if name in published}
    if not flags.get("use_checkpoint_args", False):
        return {}
    from minimegatron.checkpoint.ours import config_of

    return config_of(load, flags.get("ckpt_step")).to_dict()


def _group_query_attention(flags: dict[str, Any], notes: list[str]) -> None:
    """Megatron's pair: `--group-query-attention` turns it on, `--num-query-groups` (default 1) is the number."""
    if flags.pop("group_query_attention", False):
        flags.setdefault("num_query_groups", 1)
    elif "num_query_groups" in flags and not flags.get("multi_latent_attention"):
        notes.append(
            f"--num-query-groups {flags['num_query_groups']} counts here; Megatron-LM would ignore it without "
            "--group-query-attention"
        )


def _dependent_defaults(flags: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Megatron's defaults of the model that depend on other flags.

    GeLU is the tanh form if Megatron fuses bias and activation, which it does unless there is no bias or
    `--no-bias-gelu-fusion`. Latent attention with a RoPE scaling uses YaRN, with DeepSeek's numbers.
    """
    defaults: dict[str, Any] = {}
    unfused = flags.pop("bias_gelu_fusion", True) is False
    if unfused or not flags.get("add_bias_linear", True):
        defaults["activation"] = "gelu"
    if unfused and "activation" in flags:
        notes.append(f"--no-bias-gelu-fusion changes nothing: the activation is {flags['activation']}")
    if flags.get("multi_latent_attention") and {"rope_scaling_factor", "rope_scaling_type"} & flags.keys():
        defaults |= {
            "rope_scaling_type": "yarn",
            "rope_scaling_original_max_position_embeddings": 4096,
            "yarn_mscale": 1.0,
        }
    return defaults


def _read_config(path: str, known: Iterable[str]) -> dict[str, Any]:
    """Sections of a JSON file, unknown ones refused."""
    try:
        with open(path, encoding="utf-8") as file:
            sections = json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--config {path}: {error}", fix="give a JSON file with sections " + ", ".join(known)
        ) from error
    if not isinstance(sections, dict):
        raise ConfigError(
            f"--config {path} holds a {type(sections).__name__}", fix='for example {"model": {"num_layers": 4}}'
        )
    for key in ("event", "machine"):  # the first line of a log file is a configuration
        sections.pop(key, None)
    for section, values in sections.items():
        if section not in (*known, "spec"):
            fix = did_you_mean(section, known) or f"choose among {', '.join(known)}, spec"
            raise ConfigError(f"--config {path} has a section {section!r}", fix=fix)
        kind = list if section == "spec" else dict
        if not isinstance(values, kind):
            raise ConfigError(f"--config {path}: section {section!r} is {values!r}", fix=f"a JSON {kind.__name__}")
        if isinstance(values, dict):
            sections[section] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return sections


def _refuse_unknown(rest: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Raise for the words that no flag has consumed: all that are flags of Megatron's, and all unknown ones."""
    if not rest:
        return
    flags = list(dict.fromkeys(word.split("=")[0] for word in rest if word.startswith("-")))
    if not flags:
        raise ConfigError(f"the word {rest[0]!r} belongs to no flag", fix="flags begin with --; see --help")
    known = [name for action in parser._actions for name in action.option_strings]
    unsupported = [flag for flag in flags if is_unsupported(flag)]
    unknown = [flag for flag in flags if flag not in unsupported]
    fixes = [f"{flag}: {hint}" for flag in unknown if (hint := did_you_mean(flag, known))]
    problems = []
    if unsupported:
        problems.append(f"flags of Megatron-LM that minimegatron does not support yet: {' '.join(unsupported)}")
        fixes.append("drop those of Megatron-LM; they would have changed the run")
    if unknown:
        problems.append(f"there is no flag {', no flag '.join(unknown)}")
    raise ConfigError("; ".join(problems), fix="; ".join(fixes) or "see --help")


# ------------------------------------------------------------------------------------------------ the parser


class _Set(argparse.Action):
    """Sets a field; refuses if another flag has set it to another value."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        value = self.const if self.nargs == 0 else tuple(values) if isinstance(values, list) else values
        before = namespace.origins.get(self.dest, option_string)
        if before != option_string and getattr(namespace, self.dest) != value:
            raise ConfigError(
                f"{before} and {option_string} set {self.dest} to different values", fix="give one of them"
            )
        namespace.origins[self.dest] = option_string
        setattr(namespace, self.dest, value)


class _SetOneOrMore(_Set):
    """Sets a field that is one value or several."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        super().__call__(parser, namespace, values[0] if len(values) == 1 else values, option_string)


class _Add(_Set):
    """Adds words to those of the same flag given before."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest, ())
        super().__call__(parser, namespace, [*before, *values], option_string)


class _AlreadySo(argparse.Action):
    """Accepts a flag that changes nothing, and adds a note about it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        allowed, why = ALREADY[option_string or ""]
        if allowed and values not in allowed:
            raise ConfigError(
                f"{option_string} {values} is not supported yet",
                fix=f"{option_string} {' or '.join(allowed)}, or drop it",
            )
        namespace.notes.append(f"{option_string} changes nothing: {why}")


@functools.cache
def build_parser(task: str | None = None) -> argparse.ArgumentParser:
    """The parser with a group for each configuration; `--help` prints all of it, the flags of a task first."""
    command = "minimegatron.commands.pretrain_gpt" if task is None else f"minimegatron {task}"
    described = "Train a decoder-only language model." if task is None else sections_of(task)["task"].__doc__
    parser = Parser(
        prog="pretrain_gpt" if task is None else f"minimegatron {task}",
        usage=f"[torchrun --nproc-per-node N] -m {command} [flags]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description=f"{described} Flags, meanings and defaults are Megatron-LM's.",
        epilog=f"presets: {', '.join(PRESETS)}",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=44, width=120),
    )
    group = parser.add_argument_group("where values come from (the later wins)")
    group.add_argument(
        "--preset", default=None, metavar="NAME", help="start from a known model; the names are at the end"
    )
    group.add_argument(
        "--config", default=None, metavar="FILE.json", help="sections model, parallel, optimizer, data, training"
    )
    group.add_argument(
        "--spec", default=None, nargs="+", metavar="WORD", help="module and function that return the layer's spec"
    )
    sections = sections_of(task)
    for name in sorted(sections, key=lambda name: name != "task"):
        cls = sections[name]
        summary = (cls.__doc__ or "").splitlines()[0].rstrip(".")
        group = parser.add_argument_group(f"{name}: {summary[:1].lower()}{summary[1:]}")
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            _add_field(group, name, field, hints[field.name])
            for flag, destination, value, text in BESIDE.get(field.name, ()):
                group.add_argument(flag, action="store_const", dest=destination, const=value, help=text)
    group = parser.add_argument_group("accepted from Megatron's command lines; changes nothing, because")
    for flag, (allowed, why) in ALREADY.items():
        group.add_argument(
            flag, action=_AlreadySo, dest="_", nargs=0 if allowed == () else None, help=why, metavar=_braces(allowed)
        )
    return parser


def _add_field(group: Any, section: str, field: dataclasses.Field, hint: Any) -> None:
    """The flag of a field, and Megatron's other spellings of it."""
    flag = "--" + field.name.replace("_", "-")
    kinds = typing.get_args(hint) if typing.get_origin(hint) is not tuple and typing.get_args(hint) else (hint,)
    kind = next(k for k in kinds if k is not type(None))
    several = any(typing.get_origin(k) is tuple for k in kinds[1:])
    default = DEFAULTS.get(section, {}).get(field.name, field.default)
    text = field.metadata["help"].replace("%", "%%")
    if default is not None and default != () and kind is not bool:
        text += f" (default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"
    if kind is bool:
        off = field.default is True
        flag = SWITCHED_OFF_BY.get(field.name, "--no-" + flag[2:]) if off else flag
        text = f"switch off: {text}" if off else text
        group.add_argument(flag, action=_Set, dest=field.name, nargs=0, const=not off, help=text)
    elif typing.get_origin(kind) is tuple:
        action = _Add if field.metadata["repeats"] else _Set
        group.add_argument(
            flag, action=action, dest=field.name, nargs="*", type=typing.get_args(kind)[0], metavar="V", help=text
        )
    else:
        choices = tuple(str(c) for c in field.metadata.get("choices") or () if c is not None)
        metavar = _braces(choices) if choices else {int: "N", float: "X"}.get(kind, "TEXT")
        convert = _renaming(field.name) if field.name in VALUES else kind
        options = {"action": _SetOneOrMore, "nargs": "+"} if several else {"action": _Set}
        group.add_argument(flag, dest=field.name, type=convert, metavar=metavar, help=text, **options)
    for other, (target, value) in SWITCHES.items():
        if target == field.name:
            shown = "" if value is True else f" {value}"
            group.add_argument(other, action=_Set, dest=target, nargs=0, const=value, help=f"{flag}{shown}")
    for other, (target, convert, metavar) in RENAMED.items():
        if target == field.name:
            group.add_argument(other, action=_Set, dest=target, type=convert, metavar=metavar, help=f"sets {flag}")


def _renaming(field: str) -> Any:
    names = VALUES[field]
    return lambda text: names.get(text, text)


def _braces(values: Iterable[str] | None) -> str:
    """{a,b} if there are few values, else VALUE."""
    values = list(values or ())
    return "{" + ",".join(values) + "}" if values else "VALUE"

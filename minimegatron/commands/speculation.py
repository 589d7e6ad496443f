"""`--speculative-config` of `generate` and `serve`: speculative decoding, in vLLM's JSON.

{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
{"model": "FOLDER", "num_speculative_tokens": 4}                     a draft model with the same tokenizer
{"method": "mtp"}                                                    all MTP depths of the model itself
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimegatron.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh
    from minimegatron.config import TransformerConfig
    from minimegatron.inference.speculative import SpeculativeConfig

HELP = (
    "speculative decoding, vLLM's JSON: "
    '{"method": "ngram"}, {"model": "FOLDER"} with a draft model, or {"method": "mtp"} with the model\'s MTP depths; '
    '"num_speculative_tokens": most proposals a step (default: 3; for mtp the number of depths); '
    '"prompt_lookup_max" and "prompt_lookup_min" for ngram'
)


def add_speculative_config(parser: argparse.ArgumentParser) -> None:
    """Add the flag, which `speculative_of` reads."""
    parser.add_argument("--speculative-config", metavar="JSON", help=HELP.replace("%", "%%"))


def speculative_of(text: str | None, model: TransformerConfig) -> tuple[SpeculativeConfig | None, Path | None]:
    """(configuration, folder of the draft model); None for what the flag does not ask for.

    Args:
        text: value of the flag.
        model: configuration of the model that verifies.

    Raises:
        ConfigError: invalid JSON, an unknown name, a value of another type or out of range.
    """
    from minimegatron.inference.speculative import SpeculativeConfig

    if text is None:
        return None, None
    kinds = {field.name: int for field in dataclasses.fields(SpeculativeConfig)} | {"method": str, "model": str}
    try:
        said = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--speculative-config is no JSON: {error}", fix='such as {"method": "ngram"}') from None
    if not isinstance(said, dict):
        raise ConfigError(f"--speculative-config is {text}", fix='an object, such as {"method": "ngram"}')
    for name, value in said.items():
        if name not in kinds:
            known = ", ".join(kinds)
            raise ConfigError(f"--speculative-config has {name!r}", fix=did_you_mean(name, kinds) or f"one of {known}")
        if type(value) is not kinds[name]:
            kind = "a whole number" if kinds[name] is int else "a text"
            raise ConfigError(f"{name} of --speculative-config is {value!r}", fix=f"{kind}")
    folder = said.pop("model", None)
    method = said.setdefault("method", "ngram" if folder is None else "draft_model")
    if (method == "draft_model") != (folder is not None):
        raise ConfigError(
            f'--speculative-config {text}: the method draft_model and "model" belong together',
            fix='{"model": "FOLDER"}, or another method',
        )
    if method == "mtp":
        said.setdefault("num_speculative_tokens", model.mtp_num_layers or 1)
    return SpeculativeConfig(**said), None if folder is None else Path(folder)


def load_draft(folder: Path | None, mesh: Mesh, params_dtype: str) -> Any:
    """The draft model, in the layout of the model; None without a folder.

    Raises:
        CheckpointError: the folder has no model.
        ConfigError: it does not fit the layout.
    """
    from minimegatron.checkpoint.conversion import open_model
    from minimegatron.inference.loading import load

    return None if folder is None else load(open_model(folder), mesh, params_dtype)

"""A checkpoint folder of TensorRT-LLM, from which `trtllm-build` makes engines: written, a file for each tp rank.

The problem in a sentence: the ranks of an engine load files that were cut for them, so whoever writes has to know how
the engine cuts.

    config.json     architecture, sizes, mapping {world_size, tp_size, pp_size}
    rank0.safetensors ... rank{t-1}.safetensors

| ours, of a layer                        | theirs                          | rank r of t has                       |
|-----------------------------------------|---------------------------------|---------------------------------------|
| `self_attention.linear_qkv`             | `attention.qkv`                 | its heads: all q, then all k, all v   |
| `self_attention.{q,k}_layernorm`        | `attention.{q,k}_layernorm`     | all                                   |
| `self_attention.linear_proj`            | `attention.dense`               | columns; the bias whole               |
| `mlp.linear_fc1`, first half            | `mlp.fc`, under the activation  | rows                                  |
| `mlp.linear_fc1`, second half           | `mlp.gate`, which multiplies it | rows                                  |
| `mlp.linear_fc2`                        | `mlp.proj`                      | columns; the bias whole               |
| `input_layernorm`, `pre_mlp_layernorm`  | `input_layernorm`, `post_layernorm` | all                               |

| of no layer                             | `transformer.` and              |                                       |
|-----------------------------------------|---------------------------------|---------------------------------------|
| `embedding.{word,position}_embeddings`  | `{vocab,position}_embedding`    | all                                   |
| `decoder.final_layernorm`               | `ln_f`                          | all                                   |
| `output_layer`, or the tied embedding   | `lm_head`, without a prefix     | rows, with 0 to a multiple of t       |

Matrices are [out, in] on both sides, also GPT-2's, whose published ones are not. Fewer key heads than ranks are
written once for each rank that reads them.

TensorRT-LLM: docs "TensorRT LLM Checkpoint"; `tensorrt_llm/models/{llama,qwen,gpt}/convert.py`, `modeling_utils.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from minimegatron.checkpoint.companions import to_json
from minimegatron.checkpoint.disk import files_in, staged, write_bytes
from minimegatron.checkpoint.hf_config import DTYPES, config_to_huggingface
from minimegatron.checkpoint.sources import Copy, Described, Rows, Source, Together, View, write_file
from minimegatron.config import TransformerConfig
from minimegatron.errors import ConfigError
from minimegatron.models.families import FAMILIES

_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}
_LAYER_NORMS = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_layernorm",
    "self_attention.q_layernorm": "attention.q_layernorm",
    "self_attention.k_layernorm": "attention.k_layernorm",
}
_WHOLE = {
    "embedding.word_embeddings": "transformer.vocab_embedding",
    "embedding.position_embeddings": "transformer.position_embedding",
    "decoder.final_layernorm": "transformer.ln_f",
}


def keys_of(config: TransformerConfig, family: str | None, tp: int) -> dict[str, Any]:
    """The contents of `config.json`.

    Args:
        config: the model.
        family: its family; default the first that can describe the model.
        tp: ranks.

    Raises:
        ConfigError: TensorRT-LLM's classes do not compute this model, or it cannot be cut so.
    """
    family, hf = config_to_huggingface(config, family)
    beside = FAMILIES[family].tensorrt_llm
    if beside is None:
        known = [name for name, other in FAMILIES.items() if other.tensorrt_llm is not None]
        raise ConfigError(
            f"a {family} model is not written for TensorRT-LLM",
            fix=f"supported: {', '.join(known)}; TensorRT-LLM also loads a folder of --to hf",
        )
    windows = {config.window_of(number) for number in range(config.num_layers)} - {None}
    if windows:
        raise ConfigError(
            f"attention with a window of {', '.join(map(str, windows))}: an engine is told of it when it runs, not by "
            "its checkpoint",
            fix="--to hf, which TensorRT-LLM loads too",
        )
    _check_cut(config, tp)
    keys: dict[str, Any] = {
        "architecture": hf["architectures"][0],
        "dtype": DTYPES[config.params_dtype],
        "logits_dtype": "float32",
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "head_size": config.kv_channels,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "seq_length": config.max_position_embeddings,  # of Qwen, where it scales logits that are not scaled here
        "hidden_act": _ACTIVATIONS[config.activation],
        "norm_epsilon": config.layernorm_epsilon,
        "qk_layernorm": config.qk_layernorm,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "share_embedding_table": False,
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "mapping": {"world_size": tp, "tp_size": tp, "pp_size": 1},
        **beside,
    }
    if not config.rotates:
        return {**keys, "position_embedding_type": "learned_absolute", "bias": config.add_bias_linear}
    return {
        **keys,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": config.rotary_base,
        "rotary_scaling": hf.get("rope_scaling"),
        "attn_bias": config.add_bias_linear or config.add_qkv_bias,
        "mlp_bias": config.add_bias_linear,
    }


def _check_cut(config: TransformerConfig, tp: int) -> None:
    heads, groups = config.num_attention_heads, config.num_query_groups
    wrong = [
        f"{what} {size}"
        for what, size in (("num_attention_heads", heads), ("ffn_hidden_size", config.ffn_hidden_size))
        if tp < 1 or size % tp
    ]
    if groups % tp and tp % groups:
        wrong.append(f"num_query_groups {groups}")
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)}: not to be cut into {tp} equal parts",
            fix=f"a --target-tensor-parallel-size that divides {heads} and {config.ffn_hidden_size}",
        )


class _Rank:
    """The tensors of one rank's file.

    Args:
        ours: our logical tensors.
        config: the model.
        rank, tp: the rank, and the number of ranks.
    """

    def __init__(self, ours: Source, config: TransformerConfig, rank: int, tp: int) -> None:
        self.ours, self.config, self.rank, self.tp = ours, config, rank, tp
        self.tensors, self.copies = dict[str, Described](), list[Copy]()

    def view(self) -> View:
        """The rank's tensors.

        Raises:
            ConfigError: a checkpoint of theirs has no place for one of our tensors.
        """
        for name, (_, shape) in self.ours.tensors.items():
            *where, kind = name.split(".")
            module = ".".join(where)
            if module in _WHOLE:
                self._add(f"{_WHOLE[module]}.{kind}", name, [(0, shape[0])])
            elif name.startswith("decoder.layers."):
                self._add_of_layer(f"transformer.layers.{where[2]}.", ".".join(where[3:]), kind, name)
            elif module != "output_layer":
                raise ConfigError(f"{name}: TensorRT-LLM has no place for it", fix="--to hf, which it loads too")
        tied = not self.config.untie_embeddings_and_output_weights
        head = "embedding.word_embeddings.weight" if tied else "output_layer.weight"
        each = -(-self.config.vocab_size // self.tp)
        first = min(self.rank * each, self.config.vocab_size)
        last = min(first + each, self.config.vocab_size)
        self._add("lm_head.weight", head, [(first, last)] if first < last else [], rows=each)
        return View(self.ours, self.tensors, self.copies)

    def _add_of_layer(self, layer: str, module: str, kind: str, name: str) -> None:
        shape = self.ours.tensors[name].shape
        if module in _LAYER_NORMS:
            self._add(f"{layer}{_LAYER_NORMS[module]}.{kind}", name, [(0, shape[0])])
        elif module == "self_attention.linear_qkv":
            self._add(f"{layer}attention.qkv.{kind}", name, list(self._heads()))
        elif module == "mlp.linear_fc1":
            halves = ("mlp.fc", "mlp.gate") if self.config.gated_linear_unit else ("mlp.fc",)
            size = shape[0] // len(halves)
            each = size // self.tp
            for i, half in enumerate(halves):
                first = i * size + self.rank * each
                self._add(f"{layer}{half}.{kind}", name, [(first, first + each)])
        elif module in ("self_attention.linear_proj", "mlp.linear_fc2"):
            theirs = layer + ("attention.dense." if module == "self_attention.linear_proj" else "mlp.proj.") + kind
            if kind == "bias":
                self._add(theirs, name, [(0, shape[0])])
            else:
                self._add_columns(theirs, name)
        else:
            raise ConfigError(f"{name}: TensorRT-LLM has no place for it", fix="--to hf, which it loads too")

    def _heads(self) -> Iterator[tuple[int, int]]:
        """Rows of our packed tensor: this rank's query heads, its key heads, its value heads."""
        d, each, groups = self.config.kv_channels, self.config.queries_per_group, self.config.num_query_groups
        per_rank = self.config.num_attention_heads // self.tp
        queries = range(self.rank * per_rank, (self.rank + 1) * per_rank)
        keys = range(self.rank * groups // self.tp, max(1, groups // self.tp) + self.rank * groups // self.tp)
        for head in queries:
            first = (head // each * (each + 2) + head % each) * d
            yield first, first + d
        for place in (each, each + 1):
            for group in keys:
                first = (group * (each + 2) + place) * d
                yield first, first + d

    def _add(self, theirs: str, ours: str, taken: list[tuple[int, int]], rows: int | None = None) -> None:
        dtype, shape = self.ours.tensors[ours]
        at = 0
        for first, last in taken:
            self.copies.append(Copy(Rows(theirs, at, at + last - first), Rows(ours, first, last)))
            at += last - first
        self.tensors[theirs] = Described(dtype, (at if rows is None else rows, *shape[1:]))

    def _add_columns(self, theirs: str, ours: str) -> None:
        dtype, (rows, columns) = self.ours.tensors[ours]
        each = columns // self.tp
        here = Rows(ours, self.rank * each, (self.rank + 1) * each, columns=True)
        self.copies.append(Copy(Rows(theirs, 0, each, columns=True), here))
        self.tensors[theirs] = Described(dtype, (rows, each))


def as_theirs(ours: Source, config: TransformerConfig, tp: int) -> Together:
    """The tensors of all ranks' files, with `rankR.` before their names.

    Raises:
        ConfigError: a checkpoint of theirs has no place for one of our tensors.
    """
    return Together({f"rank{rank}.": _Rank(ours, config, rank, tp).view() for rank in range(tp)})


def write(tensors: Source, keys: Mapping[str, Any], folder: Path) -> list[str]:
    """Write the folder; returns the names of its files.

    Args:
        tensors: see `as_theirs`.
        keys: see `keys_of`.
        folder: must not exist.

    Raises:
        CheckpointError: the folder exists.
    """
    with staged(folder) as hidden:
        for rank in range(keys["mapping"]["tp_size"]):
            prefix = f"rank{rank}."
            of_rank = {n.removeprefix(prefix): d for n, d in tensors.tensors.items() if n.startswith(prefix)}
            write_file(
                hidden / f"rank{rank}.safetensors",
                of_rank,
                {"format": "pt"},
                lambda name, prefix=prefix: tensors.read(prefix + name),  # type: ignore[misc]
            )
        write_bytes(hidden / "config.json", to_json(keys))
    return files_in(folder)

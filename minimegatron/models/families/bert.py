"""BERT, and BERT as Megatron-LM builds it: encoders with learned positions, segments, biases and a GELU.

| `model_type`    | norms                                        | `architectures`                                     |
|-----------------|----------------------------------------------|-----------------------------------------------------|
| `bert`          | of the residual sums, and of the embedding   | heads of words and pairs, of words; the pooler only |
| `megatron-bert` | before attention and MLP, and after the last | the same, in classes of their own                   |

`architectures` says which heads a file has, so it is read. A class for another task (`BertForSequenceClassification`)
is refused. Output layer and embedding are tied, and so are the two names of the output layer's bias.

Devlin et al. 2019 (arXiv 1810.04805); Shoeybi et al. 2019 (arXiv 1909.08053).
"""

from __future__ import annotations

from typing import Any

from minimegatron.config import TransformerConfig
from minimegatron.errors import ConfigError
from minimegatron.models.families.family import Family, Fields, Part, Row, named, noted, one_of, only, register
from minimegatron.models.families.keys import Keys
from minimegatron.models.families.llama_like import L, sizes

HEADS = {"Model": "pooler", "ForMaskedLM": "lm", "ForPreTraining": "lm_and_binary"}  # end of a class's name -> field
FIELDS: dict[str, Any] = {
    "normalization": "LayerNorm",
    "activation": "gelu",
    "position_embedding_type": "learned_absolute",
    "bert_head": "lm_and_binary",
    "num_tokentypes": 2,
    "layernorm_epsilon": 1e-12,
    "max_position_embeddings": 512,
}
DEFAULTS: dict[str, Any] = {
    "architectures": None,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "tie_word_embeddings": True,
    "is_decoder": False,
    "add_cross_attention": False,
}


def heads(prefix: str) -> Part:
    """The part for `architectures`, whose classes begin with a prefix; without any, heads of words and pairs."""

    def read(keys: Keys) -> Fields:
        classes = keys["architectures"] or [f"{prefix}ForPreTraining"]
        field = HEADS.get(str(classes[0]).removeprefix(prefix))
        if field is None:
            raise ConfigError(
                f"architectures {', '.join(map(str, classes))} is not supported: a head for another task",
                fix=f"supported: {', '.join(prefix + end for end in HEADS)}",
            )
        return {"bert_head": field}

    def write(config: TransformerConfig) -> Fields:
        if config.bert_head is None:
            raise ConfigError("bert_head: None here")
        return {"architectures": [prefix + end for end, field in HEADS.items() if field == config.bert_head]}

    return Part(read, write)


SIZES = named(
    {
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_attention_heads",
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_hidden_size",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_position_embeddings",
        "type_vocab_size": "num_tokentypes",
        "layer_norm_eps": "layernorm_epsilon",
    }
)
ACTIVATION = one_of(
    "hidden_act",
    {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "silu": "silu"},
    "activation",
    "the MLP of BERT",
)
_DROPOUT = {"hidden_dropout_prob": "hidden_dropout", "attention_probs_dropout_prob": "attention_dropout"}
WITHOUT_EFFECT = Part(
    lambda keys: {name: keys[name] for name in _DROPOUT} and {},
    noted(**_DROPOUT).write,
)
ONE = only(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False, tie_word_embeddings=True)

T = "bert.encoder.layer.{}."


def with_lm(config: TransformerConfig) -> bool:
    return config.bert_head != "pooler"


def with_pooler(config: TransformerConfig) -> bool:
    return config.bert_head != "lm"


def with_binary(config: TransformerConfig) -> bool:
    return config.bert_head == "lm_and_binary"


def rows(norms: dict[str, str]) -> tuple[Row, ...]:
    """The rows of a family whose norms have these names, ours -> theirs."""
    both = ("weight", "bias")
    words = (
        Row("embedding.word_embeddings.weight", ("bert.embeddings.word_embeddings.weight",)),
        Row("embedding.position_embeddings.weight", ("bert.embeddings.position_embeddings.weight",)),
        Row("embedding.tokentype_embeddings.weight", ("bert.embeddings.token_type_embeddings.weight",)),
    )
    qkv = tuple(T + f"attention.self.{name}." for name in ("query", "key", "value"))
    layers = {
        "self_attention.linear_proj": "attention.output.dense",
        "mlp.linear_fc1": "intermediate.dense",
        "mlp.linear_fc2": "output.dense",
    }
    ends = {"lm_head.dense": ("cls.predictions.transform.dense", with_lm),
            "lm_head.layernorm": ("cls.predictions.transform.LayerNorm", with_lm),
            "pooler.dense": ("bert.pooler.dense", with_pooler),
            "binary_head": ("cls.seq_relationship", with_binary)}  # fmt: skip
    return (
        *words,
        *(Row(f"{ours}.{kind}", (f"{theirs}.{kind}",)) for ours, theirs in norms.items() for kind in both),
        *(Row(L + f"self_attention.linear_qkv.{kind}", tuple(n + kind for n in qkv), "pack") for kind in both),
        *(Row(L + f"{ours}.{kind}", (T + f"{theirs}.{kind}",)) for ours, theirs in layers.items() for kind in both),
        *(
            Row(f"{ours}.{kind}", (f"{theirs}.{kind}",), when=when)
            for ours, (theirs, when) in ends.items()
            for kind in both
        ),
        Row("lm_head.bias", ("cls.predictions.bias",), when=with_lm),
    )


def family(
    name: str, prefix: str, placement: str, norms: dict[str, str], presets: dict[str, Any], **defaults: Any
) -> None:
    """Register one of the two."""
    register(
        Family(
            name=name,
            architecture=prefix + "ForPreTraining",
            fields={**FIELDS, "layernorm_placement": placement, "scale_output_init": placement == "input"},
            presets=presets,
            defaults={**DEFAULTS, **defaults},
            parts=(SIZES, ACTIVATION, WITHOUT_EFFECT, ONE, heads(prefix)),
            tensors=rows(norms),
            prefix="bert.",
            left_out=lambda config: ("bert.embeddings.position_ids", "bert.pooler.", "cls."),  # heads of other classes
            older={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
            tied={
                "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
                "cls.predictions.decoder.bias": "cls.predictions.bias",
            },
        )
    )


family(
    "bert",
    "Bert",
    "residual",
    {
        "embedding.layernorm": "bert.embeddings.LayerNorm",
        L + "post_self_attn_layernorm": T + "attention.output.LayerNorm",
        L + "post_mlp_layernorm": T + "output.LayerNorm",
    },
    {"bert-base": sizes(12, 768, 12, 30522), "bert-large": sizes(24, 1024, 16, 30522)},
)
family(
    "megatron-bert",
    "MegatronBert",
    "input",
    {
        L + "input_layernorm": T + "attention.ln",
        L + "pre_mlp_layernorm": T + "ln",
        "decoder.final_layernorm": "bert.encoder.ln",
    },
    {"megatron-bert-345m": sizes(24, 1024, 16, 29056)},
    num_hidden_layers=24,
    num_attention_heads=16,
    hidden_size=1024,
    intermediate_size=4096,
    vocab_size=29056,
)

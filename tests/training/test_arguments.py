"""The command line means what Megatron's means, says what it does not know, and never ignores a word."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.config import TransformerConfig
from minimegatron.config.posttraining import TASKS
from minimegatron.config.run import SECTIONS, RunConfig
from minimegatron.config.same_model import CONDITIONS
from minimegatron.errors import ConfigError
from minimegatron.training.arguments import build_parser, parse_args
from minimegatron.training.megatron_flags import ALREADY, RENAMED, SWITCHES, UNSUPPORTED


def parse(line: str, world_size: int = 1) -> RunConfig:
    """A command line on mock data."""
    return parse_args(shlex.split(f"--mock-data {line}"), world_size)


def refused(line: str, world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(line, world_size)
    assert caught.value.exit_code == 2
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ every field


def test_every_field_is_a_flag_with_help_and_no_name_is_used_twice():
    names = [f.name for cls in SECTIONS.values() for f in dataclasses.fields(cls)]
    assert len(names) == len(set(names))
    actions = [action for action in build_parser()._actions if action.option_strings != ["-h", "--help"]]
    assert {a.dest for a in actions} >= set(names)
    assert all(action.help for action in actions)


def test_help_shows_every_flag_and_every_default():
    text = " ".join(build_parser().format_help().split())
    for action in build_parser()._actions:
        assert all(flag in text for flag in action.option_strings)
    for shown in (
        "--weight-decay X",
        "(default: 0.01)",
        "(default: 969,30,1)",
        "(default: core_attn)",
        "--micro-batch-size N",
    ):
        assert shown in text


def test_without_flags_the_values_are_the_dataclasses_but_for_megatrons_dropout_gelu_and_muon():
    run = parse("")
    assert run.optimizer == SECTIONS["optimizer"](muon_tp_mode="blockwise") and run.training == SECTIONS["training"]()
    assert run.model == TransformerConfig(hidden_dropout=0.1, attention_dropout=0.1, activation="gelu_tanh")


@pytest.mark.parametrize(
    "line, activation",
    [
        ("", "gelu_tanh"),  # Megatron fuses bias and activation, and the fused form is the tanh one
        ("--disable-bias-linear", "gelu"),  # ... which it does not without a bias
        ("--no-bias-gelu-fusion", "gelu"),
        ("--activation gelu", "gelu"),
    ],
)
def test_the_gelu_of_a_command_line_is_megatrons(line, activation):
    assert parse(line).model.activation == activation


def test_latent_attention_that_is_scaled_has_megatrons_yarn():
    """`MLATransformerConfig`: rope_type yarn, 4096 original positions, mscale 1, mscale_all_dim 0."""
    latent = "--multi-latent-attention --position-embedding-type rope --disable-bias-linear"
    plain = parse(latent).model
    assert plain.rope_scaling_type == "none"
    model = parse(f"{latent} --rotary-scaling-factor 40 --mscale-all-dim 1.0").model
    assert (model.rope_scaling_type, model.rope_scaling_factor) == ("yarn", 40.0)
    assert model.rope_scaling_original_max_position_embeddings == 4096
    assert (model.yarn_mscale, model.yarn_mscale_all_dim) == (1.0, 1.0)
    assert parse(f"{latent} --rope-type rope").model.rope_scaling_type == "none"


def test_values_of_each_type():
    run = parse(
        "--hidden-size 96 --rotary-base 5e5 --position-embedding-type rope --sequence-parallel "
        "--tensor-model-parallel-size 2 --rampup-batch-size 2 2 8 --global-batch-size 4 --no-scale-output-init "
        "--recompute-modules mlp layernorm --lr 1e-2",
        world_size=2,
    )
    assert (run.model.hidden_size, run.model.rotary_base, run.optimizer.lr) == (96, 5e5, 1e-2)
    assert run.parallel.sequence_parallel is True and run.model.scale_output_init is False
    assert run.training.rampup_batch_size == (2, 2, 8) and run.model.recompute_modules == ("mlp", "layernorm")


# ------------------------------------------------------------------------------------------------ Megatron's words


@pytest.mark.parametrize(
    "line, section, field, value",
    [
        ("--swiglu", "model", "activation", "swiglu"),
        ("--disable-bias-linear", "model", "add_bias_linear", False),
        ("--untie-embeddings-and-output-weights", "model", "untie_embeddings_and_output_weights", True),
        ("--bf16", "model", "params_dtype", "bf16"),
        ("--group-query-attention --num-query-groups 2", "model", "num_query_groups", 2),
        ("--group-query-attention", "model", "num_query_groups", 1),
        ("--use-rotary-position-embeddings", "model", "position_embedding_type", "rope"),
        ("--use-rotary-position-embeddings --position-embedding-type rope", "model", "position_embedding_type", "rope"),
        ("--use-rope-scaling --position-embedding-type rope", "model", "rope_scaling_type", "llama3"),
        ("--recompute-activations", "model", "recompute_granularity", "selective"),
        ("--window-size 127,0", "model", "sliding_window", 128),
        ("--attention-backend unfused", "model", "attention_backend", "reference"),
        ("--cp-comm-type all_gather", "parallel", "cp_comm_type", "allgather"),
        ("--distributed-timeout-minutes 2", "parallel", "distributed_timeout_seconds", 120.0),
        ("--no-check-for-nan-in-loss-and-grad", "optimizer", "check_for_nan_in_loss_and_grad", False),
        ("--check-weight-hash-across-dp-replicas-interval 20", "training", "check_replicas_interval", 20),
        ("--lr=0.25", "optimizer", "lr", 0.25),
        ("--lr 1e-3 --lr 1e-4", "optimizer", "lr", 1e-4),
    ],
)
def test_spellings(line, section, field, value):
    assert getattr(getattr(parse(line), section), field) == value


def test_the_tables_name_fields_and_do_not_overlap():
    fields = {f.name for cls in SECTIONS.values() for f in dataclasses.fields(cls)}
    assert {field for field, *_ in [*SWITCHES.values(), *RENAMED.values()]} <= fields
    flags = [flag for action in build_parser()._actions for flag in action.option_strings]
    assert len(flags) == len(set(flags))


def test_a_published_command_line_of_megatron():
    """GPT-3 175B as in Megatron's examples, without its checkpoints."""
    line = """
        --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
        --attention-backend auto --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375
        --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006
        --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001
        --lr-decay-iters 430000 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
        --data-path corpus_text_document --vocab-file vocab.json
        --merge-file merges.txt --tokenizer-type GPT2BPETokenizer --split 949,50,1 --log-interval 100
        --eval-interval 1000 --eval-iters 10 --tensorboard-dir logs --use-mcore-models --no-masked-softmax-fusion
    """
    run = parse_args(shlex.split(line), world_size=128)
    assert (run.model.num_layers, run.model.ffn_hidden_size, run.model.params_dtype) == (96, 49152, "fp16")
    assert run.model.hidden_dropout == 0.1
    assert (run.parallel.tensor_model_parallel_size, run.parallel.pipeline_model_parallel_size) == (8, 16)
    assert (run.optimizer.min_lr, run.optimizer.lr_warmup_fraction) == (6e-6, 0.001)
    assert (run.data.data_path, run.data.split) == (("corpus_text_document",), "949,50,1")
    assert [note.split()[0] for note in run.notes] == ["--use-mcore-models", "--no-masked-softmax-fusion"]
    assert run.model.activation == "gelu_tanh", "what Megatron computes with its fusion"


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("flag", [*ALREADY])
def test_flags_that_change_nothing_say_so(flag):
    allowed, why = ALREADY[flag]
    line = flag if allowed == () else f"{flag} {(allowed or ['3'])[0]}"
    assert parse(line).notes == (f"{flag} changes nothing: {why}",)
    assert dataclasses.replace(parse(line), notes=()) == parse("")


@pytest.mark.parametrize(
    "line, fields",
    [
        ("--loss-scale 8", "loss_scale"),
        ("--fp16 --loss-scale 8 --hysteresis 3", "hysteresis"),
        ("--position-embedding-type rope --yarn-beta-fast 16", "yarn_beta_fast"),
        ("--recompute-activations --recompute-num-layers 2", "recompute_num_layers"),
        ("--cp-comm-type a2a", "cp_comm_type"),
        ("--rotary-base 5e5 --rotary-percent 0.5", "rotary_base rotary_percent"),
        ("--position-embedding-type rope --use-rope-scaling --yarn-mscale 1", "yarn_mscale"),
        ("--eval-iters 3", "eval_iters"),
        ("--split 90,10", "split"),
        ("--optimizer-cpu-offload --use-precision-aware-optimizer", "use_precision_aware_optimizer"),
        ("--use-precision-aware-optimizer --no-store-param-remainders", "store_param_remainders"),
        ("--multi-latent-attention --position-embedding-type rope --disable-bias-linear --kv-channels 192 "
         "--num-query-groups 2 --qk-head-dim 16 --qk-pos-emb-head-dim 176", "num_query_groups kv_channels"),
        ("--save y --save-keep-last 2 --save-keep-best", "save_keep_best"),
    ],
)  # fmt: skip
def test_options_without_effect_say_so(line, fields):
    said = parse(line).notes
    assert [note.split()[0] for note in said] == ["--" + field.replace("_", "-") for field in fields.split()]
    assert all("counts only with" in note for note in said)


def test_options_of_a_file_without_effect_say_so(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"model": {"yarn_beta_fast": 16.0}, "optimizer": {"lr_wsd_decay_iters": 3}}))
    assert [note.split()[0] for note in parse(f"--config {path}").notes] == ["--yarn-beta-fast", "--lr-wsd-decay-iters"]
    whole = {name: getattr(parse(""), name).to_dict() for name in SECTIONS}
    path.write_text(json.dumps(whole))
    derived = ["--moe-ffn-hidden-size", "--expert-tensor-parallel-size", "--muon-tp-mode"]
    assert [note.split()[0] for note in parse(f"--config {path}").notes] == derived, "a log names every field"


@pytest.mark.parametrize(
    "line",
    [
        "--lr-decay-style WSD --lr-wsd-decay-iters 3",
        "--position-embedding-type rope --rope-scaling-type yarn --yarn-beta-fast 16 --rotary-base 5e5",
        "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8",
        "--bf16 --use-precision-aware-optimizer --no-store-param-remainders --accumulate-allreduce-grads-in-fp32",
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.3 --use-torch-optimizer-for-cpu-offload",
        "--preset llama3-8b",  # what a preset says is a model as published
    ],
)
def test_options_with_an_effect_are_not_reported(line):
    assert parse(line).notes == ()


def test_conditions_are_on_fields():
    fields = {f.name for cls in (*SECTIONS.values(), *TASKS.values()) for f in dataclasses.fields(cls)}
    others = {re.match(r"\w+", condition)[0] for conditions in CONDITIONS.values() for condition in conditions}
    assert {*CONDITIONS} | others <= fields


def test_query_groups_without_their_switch_are_said_aloud():
    assert "Megatron-LM would ignore it" in parse("--num-query-groups 2").notes[0]
    assert parse("--group-query-attention --num-query-groups 2").notes == ()


@pytest.mark.parametrize(
    "line, words",
    [
        ("--tran-iters 3", "did you mean `--train-iters`?"),
        ("--micro_batch_size 3", "did you mean `--micro-batch-size`?"),
        ("--qqqq", "see --help"),
        ("--moe-router-fusion", "does not support yet: --moe-router-fusion"),
        ("stray", "belongs to no flag"),
        ("--lr abc", "invalid float"),
        ("--num-layers", "expected one argument"),
        ("--bf16 --fp16", "--bf16 and --fp16 set params_dtype"),
        ("--transformer-impl transformer_engine", "pip install 'transformer-engine[pytorch]'"),
        ("--dataloader-type cyclic", "not supported yet"),
        ("--window-size 4,4", "left,0"),
        ("--preset lama3-8b", "did you mean `llama3-8b`?"),
        ("--spec only_one", "1 words"),
        ("--train-iters 3 --train-samples 8", "both"),
        ("--attention-backend flash", "needs the package flash-attn"),
        ("--attention-backend te --attention-dropout 0", "pip install 'transformer-engine[pytorch]'"),
        ("--tensor-model-parallel-size 2", "cannot be divided"),
        ("--wandb-project x", "pip install wandb"),
        ("--trackio-project x", "pip install trackio"),
        ("--lr-warmup-iters 200", "does not end before the decay"),
        ("--train-samples 3 --global-batch-size 4", "do not fill a global batch of 4"),
        ("--split 1,x", "is not one to three shares"),
    ],
)
def test_refusals_say_what_to_do(line, words, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = refused(line)
    assert words in message and "fix:" in message


def test_an_order_that_does_not_fit_the_ranks_is_refused_before_there_are_any():
    layout = "--order tp-cp-pp-ep-dp --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 2"
    with pytest.raises(ConfigError, match="different ranks into one pipeline"):
        parse(f"--num-attention-heads 2 --hidden-size 16 {layout} --expert-tensor-parallel-size 1", 8)


def test_all_refusals_come_at_once():
    message = refused("--tran-iters 3 --no-align-param-gather --ckpt-format zarr --log-energy --qqqq")
    for words in (
        "does not support yet: --no-align-param-gather --ckpt-format --log-energy; ",
        "there is no flag --tran-iters, no flag --qqqq",
        "--tran-iters: did you mean `--train-iters`?",
    ):
        assert words in message


def test_no_flag_that_exists_is_said_to_be_missing():
    """Patterns with a star cover the rest of a family of which some flags exist."""
    flags = [name.removeprefix("--") for action in build_parser()._actions for name in action.option_strings]
    assert not {pattern for pattern in UNSUPPORTED.split() if "*" not in pattern} & {*flags}


@given(st.text(st.characters(codec="ascii", categories=("L", "N", "P")), max_size=12), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_any_word_is_understood_or_refused_by_our_own_error(word, place):
    words = ["--lr", "1e-3", "--mock-data"]
    words.insert(place, word)
    try:
        run = parse_args(words)
    except ConfigError as error:
        assert error.fix
    except SystemExit:
        assert word in ("-h", "--help")
    else:
        assert run.data.mock_data


# ------------------------------------------------------------------------------------------------ sources of values


def test_the_later_source_wins(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"model": {"num_layers": 3, "hidden_size": 128}, "optimizer": {"lr": 0.5}}))
    run = parse(f"--preset laptop-10m --config {path} --num-layers 1")
    assert (run.model.num_layers, run.model.hidden_size, run.model.num_attention_heads) == (1, 128, 8)
    assert run.optimizer.lr == 0.5 and run.model.hidden_dropout == 0.0
    assert {"num_layers", "vocab_size", "lr"} <= run.given and "seed" not in run.given


def test_a_configuration_survives_json(tmp_path):
    run = parse("--preset laptop-10m --rampup-batch-size 2 2 8 --global-batch-size 4 --spec a b --bf16")
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"event": "config", "machine": {"world_size": 2}, **run.to_dict()}))
    again = parse_args(["--config", str(path)])
    assert again.to_dict() == run.to_dict() and again.spec == ("a", "b")


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "Expecting"),
        ("[]", "holds a list"),
        ('{"modle": {}}', "did you mean `model`?"),
        ('{"model": {"num_layer": 2}}', "did you mean `num_layers`?"),
        ('{"model": {"num_layers": "2"}}', "give a int"),
        ('{"model": 3}', "a JSON dict"),
        ('{"spec": "ab"}', "a JSON list"),
    ],
)
def test_configuration_files_with_mistakes(tmp_path, text, words):
    path = tmp_path / "run.json"
    path.write_text(text)
    assert words in refused(f"--config {path}")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--use-precision-aware-optimizer --main-params-dtype fp16", "params_dtype fp32: a weight is its own main"),
        (
            "--bf16 --use-precision-aware-optimizer --main-params-dtype fp16 --use-torch-fsdp2",
            "whose shards are in fp32",
        ),
        ("--fp16 --use-precision-aware-optimizer --main-grads-dtype bf16", "params_dtype fp16: gradients would be"),
        ("--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 --use-torch-fsdp2", "which sums in fp32"),
        (
            "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 --accumulate-allreduce-grads-in-fp32",
            "set main_grads_dtype",
        ),
        ("--cuda-graph-impl local --use-distributed-optimizer --overlap-param-gather", "overlap_param_gather"),
    ],
)
def test_what_would_be_ignored_is_refused(line, said):
    drops = "--hidden-dropout 0 --attention-dropout 0"
    with pytest.raises(ConfigError, match=said) as caught:
        parse_args(shlex.split(f"--mock-data --vocab-size 64 {drops} {line}"), 2)
    assert caught.value.fix

"""An encoder-decoder is trained by a command, goes on in another layout, is published, read again, and planned."""

from __future__ import annotations

import pytest
import torch

from minimegatron.checkpoint.conversion import open_model
from minimegatron.commands.convert import main as convert
from minimegatron.errors import ConfigError
from minimegatron.models.families import family_config
from minimegatron.planner.cluster import CLUSTERS
from minimegatron.planner.planning import plan
from minimegatron.training.arguments import parse_args
from minimegatron.training.flops import forward_flops
from tests.thorough import SLOW
from tests.training.test_trainer import TINY, history_on_rank, numbers, train

LINE = (
    "--preset t5-small --vocab-size 165 --num-layers 4 --encoder-num-layers 2 --num-attention-heads 4 --kv-channels 8 "
    "--seq-length 40 --ffn-hidden-size 64 --decoder-start-token-id 164 --decoder-seq-length 14 --hidden-dropout 0 "
    "--micro-batch-size 2 --global-batch-size 4 --lr-decay-iters 30"
)


def test_its_loss_falls():
    history = numbers(train(f"{LINE} --train-iters 30").history)
    assert history[-1][0] < 0.95 * history[0][0]


@SLOW
def test_a_run_goes_on_in_another_layout_and_is_published(ranks, tmp_path):
    tp2 = f"{LINE} --tensor-model-parallel-size 2 --sequence-parallel --train-iters 4"
    pp2 = f"{LINE} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tttL --train-iters 4"
    whole = numbers(ranks(2).run(history_on_rank, f"{tp2} --save {tmp_path / 'run'} --save-interval 2")[0])
    resumed = numbers(ranks(2).run(history_on_rank, f"{pp2} --load {tmp_path / 'run'} --ckpt-step 2")[0])
    assert len(resumed) == 2
    for (loss, norm), (want, want_norm) in zip(resumed, whole[2:], strict=True):
        assert loss == pytest.approx(want, rel=1e-5) and norm == pytest.approx(want_norm, rel=1e-4)
    hf, back = tmp_path / "hf", tmp_path / "back"
    convert(["--load", str(tmp_path / "run"), "--save", str(hf), "--to", "hf"])
    convert(["--load", str(hf), "--save", str(back), "--to", "ours"])
    one, other = open_model(tmp_path / "run").weights, open_model(back).weights
    assert one.tensors.keys() == other.tensors.keys() and "encoder_bias.weight" in one.tensors
    assert all(torch.equal(one.read(name), other.read(name)) for name in one.tensors)
    with pytest.raises(ConfigError, match="whose T5 is another model"):
        convert(["--load", str(hf), "--save", str(tmp_path / "megatron"), "--to", "torch_dist"])


def test_it_is_planned_and_its_work_is_counted():
    line = f"{TINY} --mock-data {LINE} --pipeline-model-parallel-size 2".split()
    told = plan(parse_args(line, 2), 2, CLUSTERS["h100"])
    assert not any(memory.unknown for memory in told.memory.values()) and told.bytes > 0
    h, f, d, v = 32, 64, 32, 128  # d: channels of all heads; v: the vocabulary, padded
    config = family_config(
        "t5", num_layers=5, encoder_num_layers=2, hidden_size=h, num_attention_heads=4, kv_channels=8,
        ffn_hidden_size=f, vocab_size=100, decoder_seq_length=14,
    )  # fmt: skip
    m, n = 26, 14  # tokens of the source and of the target
    encoder = 2 * m * (4 * h * d) + 4 * m * m * d
    decoder = 2 * n * (4 * h * d) + 2 * n * n * d + 2 * (2 * n + 2 * m) * h * d + 4 * n * m * d
    want = {"attention": 2 * encoder + 3 * decoder, "mlp": (2 * m + 3 * n) * 4 * h * f, "logits": 2 * n * h * v}
    assert forward_flops(config, m + n) == want


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--reset-attention-mask --global-batch-size 8", "reset_attention_mask with encoder_num_layers"),
        ("--tensor-model-parallel-size 4 --sequence-parallel", "positions of the source"),
        ("--context-parallel-size 2", "context_parallel_size is 2 with encoder_num_layers"),
        ("--decoder-seq-length 40", "decoder_seq_length is 40"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_runs(flags, said):
    from minimegatron.training.rules import check_run

    with pytest.raises(ConfigError, match=said):
        check_run(parse_args(f"{TINY} --mock-data {LINE} {flags}".split(), 4), 4, reads=False)

"""T5 equal to transformers': logits, losses, every gradient, padding, files both ways, generation from kept keys."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from minimegatron.checkpoint.hf_config import config_from_huggingface, config_to_huggingface
from minimegatron.checkpoint.huggingface import state_from_huggingface, state_to_huggingface
from minimegatron.checkpoint.megatron import args_of
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.errors import CheckpointError, ConfigError, DataError
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.generate import generate, score
from minimegatron.inference.sampling import SamplingParams
from minimegatron.layers.logical import load_logical
from minimegatron.layers.param import logical_parameters
from minimegatron.models.chunks import build_chunks, build_stage
from minimegatron.models.families import family_config
from tests.axes import CP, PP, TP
from tests.models.in_fp64 import in_fp64
from tests.models.test_huggingface import assert_there_and_back
from tests.thorough import SLOW, mostly_thorough

# More layers in one half than in the other; the source reaches the last bucket, the target does not.
SIZES: dict[str, Any] = {
    "vocab_size": 99, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "decoder_start_token_id": 0,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "1.0": SIZES,
    "1.1": {**SIZES, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
SOURCE, TARGET, LENGTHS = 40, 17, (40, 23, 31)


class Theirs(NamedTuple):
    """A model of transformers in fp64, sources with padding, and what it says."""

    config: dict[str, Any]
    model: Any
    row: torch.Tensor
    labels: torch.Tensor
    document_ids: torch.Tensor
    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.float() for name, tensor in self.model.state_dict().items()}


def their_model(fields: dict[str, Any], seed: int = 0) -> tuple[dict[str, Any], Any]:
    """Its configuration as a file has it, and the model: norms are not 1, an untied head is another matrix."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.T5Config(**fields, attn_implementation="eager")
    model = in_fp64("t5").T5ForConditionalGeneration(config).eval()
    if not config.scale_decoder_outputs:
        model.lm_head.weight = torch.nn.Parameter(0.3 * torch.randn_like(model.lm_head.weight))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    return config.to_dict(), model.double()


def said(fields: dict[str, Any], seed: int = 0) -> Theirs:
    config, model = their_model(fields, seed)
    draws, words = torch.Generator().manual_seed(seed), int(fields["vocab_size"])
    source, target, labels = (
        torch.randint(1, words, (len(LENGTHS), n), generator=draws) for n in (SOURCE, TARGET, TARGET)
    )
    seen = torch.arange(SOURCE) < torch.tensor(LENGTHS)[:, None]
    logits = model(input_ids=source, attention_mask=seen.long(), decoder_input_ids=target).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    gradients = {name: param.grad for name, param in model.named_parameters()}
    ids = torch.cat([(~seen).long(), torch.zeros_like(target)], 1)
    row, labels = (
        torch.cat([part, other], 1) for part, other in ((source, target), (torch.zeros_like(source), labels))
    )
    return Theirs(config, model, row, labels, ids, logits.detach(), gradients)


@functools.cache
def theirs_of(kind: str) -> Theirs:
    return said(KINDS[kind])


def ours_of(theirs: Theirs, **fields: Any) -> Any:
    family, config = config_from_huggingface(theirs.config)
    ours = build_stage(config.replace(decoder_seq_length=TARGET, **fields), Mesh.serial())
    load_logical(ours, state_from_huggingface(theirs.state, config, family))
    return ours.double()


def assert_same(theirs: Theirs, **fields: Any) -> None:
    """Logits, and gradients of all weights."""
    ours = ours_of(theirs, **fields)
    logits = ours(theirs.row, document_ids=theirs.document_ids)[..., : ours.config.vocab_size].transpose(0, 1)
    assert (logits - theirs.logits).abs().max() <= 1e-10
    losses = ours(theirs.row, labels=theirs.labels, document_ids=theirs.document_ids)
    assert losses.shape == theirs.row.shape and not losses[:, :SOURCE].any()
    losses.sum().backward()
    want = state_from_huggingface({n: g.float() for n, g in theirs.gradients.items()}, ours.config, "t5")
    for name, param in logical_parameters(ours):
        grad = param.grad[: len(want[name])]
        assert (grad - want[name]).abs().max() <= 1e-6 * want[name].abs().max(), name


@pytest.mark.parametrize(("kind", "backend"), [("1.0", "auto"), ("1.1", "reference")])
def test_logits_and_every_gradient(kind, backend):
    assert_same(theirs_of(kind), attention_backend=backend)


@pytest.mark.parametrize("seed", mostly_thorough(range(20), [0]))
def test_random_models(seed):
    draw = random.Random(seed)
    buckets = draw.choice([4, 8, 32])
    theirs = said(
        {
                **SIZES, "num_heads": draw.choice([1, 2, 5]), "d_kv": draw.choice([4, 7, 16]),
                "d_model": draw.choice([8, 20, 64]), "num_layers": draw.choice([1, 3]),
                "num_decoder_layers": draw.choice([None, 1, 2]), "relative_attention_num_buckets": buckets,
                "relative_attention_max_distance": draw.choice([buckets, 2 * buckets + 1, 128]),
                "layer_norm_epsilon": draw.choice([1e-6, 1e-2]),
                "feed_forward_proj": draw.choice(["relu", "gated-gelu", "gated-silu", "gelu", "silu", "gelu_new"]),
                "tie_word_embeddings": draw.random() < 0.5,
        },
        seed,
    )  # fmt: skip
    assert_there_and_back(theirs.config, theirs.state)
    assert_same(theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_configuration_and_weights_both_ways(kind):
    theirs = theirs_of(kind)
    family, config = config_from_huggingface(theirs.config)
    name, keys = config_to_huggingface(config, tokens={"eos_token_id": 1, "pad_token_id": 0})
    assert (family, name) == ("t5", "t5") and config.untie_embeddings_and_output_weights == (kind == "1.1")
    state = state_to_huggingface(state_from_huggingface(theirs.state, config, family), config, family)
    assert all(torch.equal(tensor, theirs.state[name]) for name, tensor in state.items())
    assert_there_and_back(theirs.config, theirs.state)
    import transformers

    again = transformers.T5ForConditionalGeneration(transformers.T5Config(**keys)).eval()
    if kind == "1.1":  # their class ties every head, until a file has one
        again.lm_head.weight = torch.nn.Parameter(torch.empty_like(again.lm_head.weight))
    left = again.load_state_dict(state, strict=False)
    tied = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
    assert not left.unexpected_keys and set(left.missing_keys) <= tied
    mask = (theirs.document_ids[:, :SOURCE] == 0).long()
    with torch.no_grad():
        logits = again.double()(
            input_ids=theirs.row[:, :SOURCE], attention_mask=mask, decoder_input_ids=theirs.row[:, SOURCE:]
        ).logits
    assert (logits - theirs.logits).abs().max() <= 1e-4  # theirs norms in fp32


@pytest.mark.parametrize(
    "change",
    [
        {"feed_forward_proj": "gated-relu"}, {"dense_act_fn": "relu"}, {"is_encoder_decoder": False},
        {"tie_word_embeddings": False, "scale_decoder_outputs": True}, {"tie_encoder_decoder": True}, {"windows": 3},
    ],
)  # fmt: skip
def test_a_key_that_is_another_model_is_refused(change):
    with pytest.raises(ConfigError):
        config_from_huggingface({**theirs_of("1.1").config, **change})


def test_a_copy_of_the_embedding_that_differs_and_a_missing_one_are_refused():
    theirs = theirs_of("1.1")
    _, config = config_from_huggingface(theirs.config)
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        state = {**theirs.state, name: theirs.state[name] + 1}
        with pytest.raises(CheckpointError, match=f"{name} differs"):
            state_from_huggingface(state, config, "t5")
    state = {name: tensor for name, tensor in theirs.state.items() if name != "shared.weight"}
    with pytest.raises(CheckpointError, match="missing shared.weight"):
        state_from_huggingface(state, config, "t5")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_experts": 4}, "num_experts=4"),
        ({"sliding_window": 4}, "sliding_window=4"),
        ({"num_query_groups": 2}, "num_query_groups=2 for 4 heads"),
        ({"attention_backend": "local"}, "attention_backend local"),
        ({"recompute_granularity": "full", "recompute_method": "block"}, "recompute_method block"),
        ({"encoder_num_layers": 5}, "encoder_num_layers is 5"),
        ({"position_embedding_type": "rope"}, "position_embedding_type='rope'"),
        ({"encoder_num_layers": None}, "relative without encoder_num_layers"),
        ({"relative_attention_max_distance": 16}, "max_distance is 16"),
    ],
)
def test_what_an_encoder_decoder_cannot_have_is_refused(fields, said):
    sizes = {"num_layers": 5, "encoder_num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 40}
    with pytest.raises(ConfigError, match=said):
        family_config("t5", **{**sizes, **fields})


def test_layouts_and_files_that_do_not_fit_are_refused():
    config = family_config("t5", num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=40)
    with pytest.raises(ConfigError, match="context_parallel_size is 2 with encoder_num_layers"):
        build_stage(config, Mesh.planned(ParallelConfig(**{CP: 2}), 0, 2))
    with pytest.raises(ConfigError, match="whose T5 is another model"):
        args_of(config)


# ------------------------------------------------------------------------------------------------ generation

PROMPTS = [[5, 7, 9], [*range(2, 35)], [17], [40, 3, 40, 3, 41, 60, 98]]
START = 0


@functools.cache
def greedy() -> list[list[int]]:
    """What transformers generates, without a cache."""
    model = their_model(KINDS["1.1"])[1]
    options = {"max_new_tokens": 12, "do_sample": False, "use_cache": False}
    return [model.generate(torch.tensor([prompt]), **options)[0, 1:].tolist() for prompt in PROMPTS]


def prompts() -> list[list[int]]:
    return [[*prompt, START] for prompt in PROMPTS]


def tokens_of(model: Any, **options: Any) -> list[list[int]]:
    return [answer.tokens for answer in generate(model, prompts(), 12, stop_ids=[1], **options)]


def test_generates_what_transformers_generates_and_encodes_once():
    ours, calls = ours_of(theirs_of("1.1")).eval(), list[int]()
    ours.encoder.register_forward_hook(lambda module, given, out: calls.append(out.shape[1]))
    assert tokens_of(ours) == greedy() and len({*itertools.chain(*greedy())}) > 8, "not one word over and over"
    assert calls == [len(PROMPTS)], "all sources side by side, in the first step"


def test_preempted_sequences_and_prompts_that_come_later():
    narrow = EngineConfig(num_pages=16, page_size=4, max_num_seqs=4, max_num_batched_tokens=47)  # all prompts have 48
    engine = Engine(ours_of(theirs_of("1.1")).eval(), narrow)
    assert [answer.tokens for answer in generate(engine, prompts(), 12, stop_ids=[1])] == greedy()
    assert engine.scheduler.preemptions


def test_scores_are_those_of_a_whole_pass():
    theirs, engine = theirs_of("1.1"), Engine(ours_of(theirs_of("1.1")).eval())
    drawn = generate(engine, prompts(), 9, SamplingParams(1.5), seed=3)
    answers = [*(answer.tokens for answer in drawn), *greedy()]
    scores = [answer.log_probs for answer in drawn] + score(engine, list(zip(prompts(), greedy(), strict=True)))
    assert answers[: len(PROMPTS)] != [answer[:9] for answer in greedy()]
    for prompt, answer, found, heat in zip(PROMPTS * 2, answers, scores, [1.5] * 4 + [1.0] * 4, strict=True):
        with torch.no_grad():
            logits = theirs.model(
                input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([[START, *answer[:-1]]])
            ).logits
        want = (logits[0] / heat).log_softmax(-1)[torch.arange(len(answer)), answer]
        assert (want - torch.tensor(found)).abs().max() <= 1e-5


def generated(rank: int, world: int, config: Any, state: dict[str, torch.Tensor], layout: dict[str, Any]) -> Any:
    mesh = Mesh.build(ParallelConfig(**layout))
    model = build_chunks(config, mesh)
    load_logical(model, state, stage=mesh.pp.size > 1)
    return tokens_of(model.eval())


@SLOW
@pytest.mark.parametrize(
    ("world", "layout"),
    mostly_thorough(
        [(2, {TP: 2}), (2, {PP: 2, "pipeline_model_parallel_layout": "Et|ttttL"}), (4, {TP: 2, PP: 2})], [1]
    ),
)
def test_generates_the_same_on_many_ranks(ranks, world, layout):
    theirs = theirs_of("1.1")
    _, config = config_from_huggingface(theirs.config)
    if layout.get(PP) and len(layout) == 2 and TP in layout:
        layout = {**layout, "pipeline_model_parallel_layout": "Ettt|ttL"}
    state = state_from_huggingface(theirs.state, config, "t5")
    assert ranks(world).run(generated, config, state, layout) == [greedy()] * world


def test_prompts_that_are_no_source_or_too_long_for_a_step_are_refused():
    engine = Engine(ours_of(theirs_of("1.1")).eval(), EngineConfig(max_num_seqs=4, max_num_batched_tokens=32))
    for prompt in ([5, 7, 9], [START], [START, 5]):
        with pytest.raises(DataError, match="without a source"):
            generate(engine, [prompt], 4)
    with pytest.raises(DataError, match="max_model_len is 32") as error:
        generate(engine, [[*range(2, 40), START]], 4)
    assert "max_num_batched_tokens: prompts are computed whole" in error.value.fix
    with pytest.raises(ConfigError, match="max_model_len is 64, and a step has 32 tokens"):
        Engine(engine.model, EngineConfig(64, max_num_seqs=4, max_num_batched_tokens=32))


def test_a_prompt_longer_than_a_steps_default_gets_a_step_of_its_length():
    model = ours_of(theirs_of("1.1")).eval()
    prompt = [*range(2, 90)] * 6 + [START]
    wide = Engine(model, EngineConfig(max_num_batched_tokens=1024))
    assert len(prompt) > EngineConfig.max_num_batched_tokens
    assert generate(model, [prompt], 4)[0].tokens == generate(wide, [prompt], 4)[0].tokens

"""`minimegatron serve`: over tp and pp the answers of one rank, defaults of the model's files, and who is kept out."""

from __future__ import annotations

import json

import pytest

from minimegatron.checkpoint.huggingface import state_from_huggingface
from minimegatron.commands.serve import parse
from minimegatron.errors import ConfigError
from minimegatron.inference.generate import generate
from minimegatron.inference.sampling import SamplingParams
from minimegatron.serving.protocol import CompletionRequest, Defaults, sampling_of
from tests.inference.models import ours, theirs
from tests.inference.ranked import build
from tests.models.test_huggingface import hf_model
from tests.serving.conftest import EOS, write_tokenizer
from tests.serving.ranked import served


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama2")
    theirs("llama2").save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize("layout", [[], ["--pipeline-model-parallel-size", "2"]], ids=["tp", "pp"])
def test_ranks_answer_as_one_and_idle_ones_stay(ranks, folder, tokenizer, layout):
    early = generate(ours("llama2"), [[5, 9, 3]], 8)[0].tokens
    said = {"eos_token_id": [EOS, early[2]], "temperature": 0.0, "top_p": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(said))
    prompt = {"prompt": [5, 9, 3], "max_tokens": 8}
    bodies = [prompt, {**prompt, "ignore_eos": True}, {**prompt, "temperature": 1, "top_p": 1, "seed": 5}]
    line = [str(folder), "--port", "0", "--max-num-seqs", "2", "--max-model-len", "32", *layout]
    (greedy, whole, sampled), clients = ranks(2).run(served, line, bodies)[0]
    end = early.index(early[2])
    assert greedy["choices"][0]["text"] == tokenizer.detokenize(early[:end]) and clients == 1
    assert greedy["choices"][0]["finish_reason"] == "stop" and greedy["model"] == folder.name
    assert whole["choices"][0]["text"] == tokenizer.detokenize(early)
    made = generate(ours("llama2"), [[5, 9, 3]], 8, SamplingParams(), seed=5, stop_ids=[EOS, early[2]])[0]
    assert sampled["usage"]["completion_tokens"] == len(made.tokens)


def test_a_request_counts_more_than_the_file_and_that_more_than_the_default():
    file = Defaults.of({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "min_p": None})
    body = CompletionRequest(prompt="a", top_p=0.5)
    assert sampling_of(body, file, 99) == SamplingParams(0.6, 20, 0.5)
    assert sampling_of(body, Defaults(), 99) == SamplingParams(1.0, 0, 0.5)
    for greedy in ({"temperature": 0.0, "top_p": 0.9}, {"top_k": 1}, {"top_p": 0.0}):
        assert sampling_of(CompletionRequest(prompt="a", **greedy), file, 99) == SamplingParams(top_k=1)


@pytest.mark.parametrize(
    "words, says",
    [
        (["--host", "0.0.0.0"], "without a key"),
        (["--host", "some.machine"], "without a key"),
        (["--api-key", ""], "is empty"),
        (["--api-key", "clé"], "no header can hold"),
        (["--api-key", "a", "--api-key-file", "b"], "--api-key and --api-key-file"),
        (["--api-key-file", "nothing here"], "cannot be read"),
        (["--max-num-seqs", "0"], "at least 1"),
        (["--max-queue", "-1"], "at least 0"),
        (["--lora-modules", "a=b", "c"], "--lora-modules c"),
        (["--lora-modules", "a=b", "a=c"], "names a twice"),
        (["--lora-modules", "folder=b"], "or as the model"),
        (["--enable-lora"], "without an adapter"),
    ],
    ids=str,
)
def test_a_server_that_should_not_begin(words, says):
    with pytest.raises(ConfigError, match=says) as error:
        parse(["folder", *words])
    assert error.value.fix


def test_a_request_names_an_adapter_as_its_model(ranks, folder, tokenizer, tmp_path):
    import peft

    model = peft.get_peft_model(hf_model("llama2"), peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"]))
    for name, param in model.named_parameters():
        if "lora_B" in name:
            param.data.normal_(0, 0.5)
    model.save_pretrained(str(tmp_path / "adapter"))
    merged = model.merge_and_unload()
    state = state_from_huggingface(merged.state_dict(), ours("llama2").config, "llama")
    want = [generate(each, [[5, 9, 3]], 8)[0].tokens for each in (ours("llama2"), build(ours("llama2").config, state))]
    prompt = {"prompt": [5, 9, 3], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    bodies = [{**prompt, "model": name} for name in ("tiny", "mine", "yours")]
    line = [str(folder), "--port", "0", "--served-model-name", "tiny", "--generation-config", "none"]
    line += ["--lora-modules", f"mine={tmp_path / 'adapter'}"]
    (plain, adapted, refused, models), _ = ranks(1).run(served, line, [*bodies, None])[0]
    found = [each["choices"][0]["text"] for each in (plain, adapted)]
    assert found == [tokenizer.detokenize(tokens) for tokens in want] and want[0] != want[1]
    assert (plain["model"], adapted["model"]) == ("tiny", "mine")
    assert refused["error"]["message"] == "the model 'yours' is not served here; 'tiny', 'mine' are"
    assert [(each["id"], each["parent"]) for each in models["data"]] == [("tiny", None), ("mine", "tiny")]


def test_a_key_in_a_file_opens_the_server_to_others(tmp_path):
    (tmp_path / "key").write_text("secret\n")
    args = parse(["folder", "--host", "::", "--api-key-file", str(tmp_path / "key")])
    assert args.api_key == "secret" and parse(["folder", "--host", "::1"]).api_key is None

"""The files beside `tokenizer.json`: ids, special tokens and templates are those of `AutoTokenizer` on a folder."""

from __future__ import annotations

import json
import warnings

import pytest
from jinja2.sandbox import SandboxedEnvironment

from minimegatron.data.tokenizer import NO_PAD, HuggingFaceTokenizer
from minimegatron.data.tokenizer_files import render
from minimegatron.data.tokenizer_training import train_bpe
from minimegatron.errors import ConfigError, DataError

N = 280  # tokens of the byte-level vocabulary
TEXTS = [
    "",
    "hello world",
    " hello  world ",
    "a <|im_start|> b<|im_start|>user\nhi <tool> x",
    "hello</s>world </s> hello [INST] world",
    "<s>hello<|endoftext|>",
    "xim <|im_end|>a <|im_end|> b",
]


def token(text, number=None, **properties):
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    found = {"content": text, **plain, "special": True, **properties}
    return found if number is None else {"id": number, **found}


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """A byte-level BPE as in GPT-2's and Qwen's folders."""
    folder = tmp_path_factory.mktemp("bpe")
    train_bpe(["hello world <|im_start|> user <tool> im_end"] * 3, N, folder)
    return json.loads((folder / "tokenizer.json").read_text())


@pytest.fixture(scope="module")
def metaspace():
    """A BPE over words that begin with a bar, as in Llama 2's folder."""
    merges = "▁ h|h e|l l|he ll|hell o|▁ hello|▁ w|w o|wo r|l d|wor ld|▁ world|▁ ▁".split("|")
    pairs = [merge.split(" ") for merge in merges]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁helowrd[INST]", *map("".join, pairs)]
    prepend = {"type": "Prepend", "prepend": "▁"}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text, other = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [token(word, i) for i, word in enumerate(words[:3])],
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, text],
            "pair": [begin, text, begin, other],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {word: i for i, word in enumerate(dict.fromkeys(words))},
            "merges": pairs,
        },
    }


def write(folder, files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        if name.endswith(".jinja"):
            (folder / name).write_text(content)
        else:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


def require_the_oracles(folder):
    """Ids of all texts, with and without what the family adds, as letters and as tokens; and the named tokens."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    for split in (True, False):
        ours = HuggingFaceTokenizer(folder, split_special_tokens=split)
        assert (ours.eod, ours.bos, ours.vocab_size) == (oracle.eos_token_id, oracle.bos_token_id, len(oracle))
        assert ours.pad in (oracle.pad_token_id, NO_PAD)
        for text in TEXTS:
            for add in (True, False):
                ids = oracle(text, split_special_tokens=split, add_special_tokens=add).input_ids
                assert ours.tokenize(text, add_special_tokens=add) == ids, (text, split, add)
            assert ours.detokenize(ids) == oracle.decode(ids, skip_special_tokens=True)
    return ours, oracle


EOS = {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}
IM = {str(N): token("<|im_start|>"), str(N + 1): token("<|im_end|>"), str(N + 2): token("<tool>", special=False)}
FIRST = {"0": token("<|endoftext|>"), "1": token("<|pad|>")}
PROPERTIES = ("lstrip", "rstrip", "single_word", "normalized")
CONFIGS = {
    "tokens only in added_tokens_decoder": {**EOS, "added_tokens_decoder": FIRST | IM},
    **{
        name: {**EOS, "added_tokens_decoder": FIRST | IM | {str(N + 1): token("<|im_end|>", **{name: True})}}
        for name in PROPERTIES
    },
    "the class puts a blank before a text": {
        **EOS,
        "bos_token": "<|pad|>",
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": True,
    },
    "the class puts none": {**EOS, "tokenizer_class": "Qwen2TokenizerFast", "added_tokens_decoder": FIRST | IM},
    "the general class": {**EOS, "tokenizer_class": "PreTrainedTokenizerFast"},
    "eos as a table": {**EOS, "eos_token": token("<|endoftext|>", __type="AddedToken")},
}


@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("blank", [False, True], ids=["no blank", "a blank"])
def test_a_byte_level_folder(byte_level, tmp_path, case, blank):
    """`blank`: what tokenizer.json itself says of a blank before a text."""
    rule = {**byte_level, "pre_tokenizer": byte_level["pre_tokenizer"] | {"add_prefix_space": blank}}
    require_the_oracles(write(tmp_path, {"tokenizer": rule, "tokenizer_config": CONFIGS[case]}))


@pytest.mark.parametrize("fields", [{}, {"legacy": True}, {"legacy": False}, {"add_prefix_space": False}], ids=str)
@pytest.mark.parametrize("kind", ["LlamaTokenizerFast", "PreTrainedTokenizerFast"])
def test_a_folder_of_llama_2(metaspace, tmp_path, kind, fields):
    config = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **fields}
    require_the_oracles(write(tmp_path, {"tokenizer": metaspace, "tokenizer_config": config}))


def test_the_model_decides_over_the_class(metaspace, tmp_path):
    """Of a Mistral, whose class is registered as the general one, whatever tokenizer_config.json names."""
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "legacy": False}
    files = {"tokenizer": metaspace, "tokenizer_config": config, "config": {"model_type": "mistral"}}
    require_the_oracles(write(tmp_path, files))


def test_an_older_folder(byte_level, tmp_path):
    """Names in special_tokens_map.json, ids in added_tokens.json; the names win where two files differ."""
    more = {"<|im_start|>": N, "<|im_end|>": N + 1, "<tool>": N + 2}
    special = {"eos_token": "<|im_end|>", "bos_token": token("<|im_start|>", rstrip=True), "pad_token": "<|pad|>"}
    files = {"tokenizer": byte_level, "special_tokens_map": special, "added_tokens": more, "tokenizer_config": EOS}
    folder = write(tmp_path, files)
    with pytest.warns(UserWarning, match="eos_token is '<.endoftext.>' in tokenizer_config.json and '<.im_end.>'"):
        ours, _ = require_the_oracles(folder)
    assert ours.eod == N + 1 and ours.tokenize("<tool>") == [N + 2]
    write(tmp_path, {"tokenizer_config": {**EOS, "added_tokens_decoder": FIRST | IM}})
    assert HuggingFaceTokenizer(folder).eod == 0, "with added_tokens_decoder older files are not read"
    require_the_oracles(folder)


def test_gpt_2s_own_folder_names_its_end_in_config_json(byte_level, tmp_path):
    files = {"tokenizer": byte_level, "tokenizer_config": {"model_max_length": 1024}}
    folder = write(tmp_path, {**files, "config": {"model_type": "gpt2", "eos_token_id": 0, "bos_token_id": 0}})
    assert HuggingFaceTokenizer(folder).eod == 0
    write(tmp_path, {"config": {"model_type": "gpt2"}})
    with pytest.raises(ConfigError, match="no end-of-document token"):
        HuggingFaceTokenizer(folder)


def test_the_identity_is_that_of_the_vocabulary(byte_level, tmp_path):
    """Data that was made before a file beside tokenizer.json was read is still this tokenizer's."""
    config = {**EOS, "tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}
    plain = HuggingFaceTokenizer(write(tmp_path / "a", {"tokenizer": byte_level, "tokenizer_config": EOS}))
    blank = HuggingFaceTokenizer(write(tmp_path / "b", {"tokenizer": byte_level, "tokenizer_config": config}))
    more = {**EOS, "added_tokens_decoder": FIRST | IM}
    larger = HuggingFaceTokenizer(write(tmp_path / "c", {"tokenizer": byte_level, "tokenizer_config": more}))
    assert plain.identity == blank.identity != larger.identity and larger.vocab_size == plain.vocab_size + 3


def test_the_folder_may_split_special_tokens_itself(byte_level, tmp_path):
    files = {"tokenizer": byte_level, "tokenizer_config": {**EOS, "split_special_tokens": True}}
    assert HuggingFaceTokenizer(write(tmp_path, files), split_special_tokens=None).split_special_tokens
    write(tmp_path, {"tokenizer_config": EOS})
    assert not HuggingFaceTokenizer(tmp_path, split_special_tokens=None).split_special_tokens


@pytest.mark.parametrize(
    "config, says",
    [
        ({"added_tokens_decoder": FIRST | {"305": token("<far>")}}, f"'<far>' has the id 305 there, and {N}"),
        ({"added_tokens_decoder": {"one": token("<far>")}}, "added_tokens_decoder: invalid literal"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder: "),
        ({"added_tokens_decoder": {str(N): 5}}, "5 is no token"),
        ({"bos_token": {"text": "<s>"}}, "is no token"),
    ],
    ids=str,
)
def test_files_that_contradict_each_other(byte_level, tmp_path, config, says):
    folder = write(tmp_path, {"tokenizer": byte_level, "tokenizer_config": {**EOS, **config}})
    with pytest.raises(ConfigError, match=says) as error:
        HuggingFaceTokenizer(folder)
    assert error.value.fix


def test_files_that_are_something_else(byte_level, tmp_path):
    folder = write(tmp_path, {"tokenizer": byte_level, "tokenizer_config": []})
    with pytest.raises(ConfigError, match="tokenizer_config.json holds a list"):
        HuggingFaceTokenizer(folder)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match="not a JSON file"):
        HuggingFaceTokenizer(folder)


def test_a_name_without_an_id_is_said(byte_level, tmp_path):
    config = {**EOS, "mask_token": "[MASK]"}
    with pytest.warns(UserWarning, match="'.MASK.': named as special, and no file says an id"):
        tokenizer = HuggingFaceTokenizer(write(tmp_path, {"tokenizer": byte_level, "tokenizer_config": config}))
    assert tokenizer.vocab_size == N


def test_a_blank_that_the_general_class_does_not_put_is_said(byte_level, tmp_path):
    config = {**EOS, "add_prefix_space": True}
    with pytest.warns(UserWarning, match="add_prefix_space is False there and True in tokenizer_config.json"):
        HuggingFaceTokenizer(write(tmp_path, {"tokenizer": byte_level, "tokenizer_config": config}))


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role }}\n"
    "{%- if message.role == 'assistant' %}{% generation %}\n{{ message.content | trim }}{% endgeneration %}\n"
    "{%- else %}\n{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('only users and assistants, not ' + m.role) }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} {{ eos_token }}{% endif %}"
    "{% if loop.index > 9 %}{% break %}{% endif %}{% endfor %}{{ tools | tojson if tools else '' }}"
)
TALK = [
    {"role": "user", "content": "hello <tool> ü"},
    {"role": "assistant", "content": " world\n"},
    {"role": "user", "content": "hello"},
]


@pytest.mark.parametrize("place", ["a file", "a field", "several"])
def test_a_conversation_has_the_oracles_ids(byte_level, metaspace, tmp_path, place):
    """chat_template.jinja over tokenizer_config.json, which has one template or several."""
    llama = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "legacy": False}
    qwen = {**EOS, "tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": FIRST | IM}
    for name, rule, config, template in (("q", byte_level, qwen, CHATML), ("l", metaspace, llama, LLAMA)):
        files = {"tokenizer": rule}
        if place == "a file":
            files |= {"chat_template.jinja": template, "tokenizer_config": {**config, "chat_template": "wrong"}}
        else:
            several = [{"name": "rag", "template": "wrong"}, {"name": "default", "template": template}]
            files["tokenizer_config"] = {**config, "chat_template": several if place == "several" else template}
        ours, oracle = require_the_oracles(write(tmp_path / name, files))
        for messages in (TALK, TALK[:1]):
            for prompt in (True, False):
                text = ours.apply_chat_template(messages, add_generation_prompt=prompt)
                options = {"add_generation_prompt": prompt, "return_dict": False}
                assert text == oracle.apply_chat_template(messages, tokenize=False, **options)
                ids = ours.tokenize(text, add_special_tokens=False)
                assert ids == oracle.apply_chat_template(messages, tokenize=True, **options)
        assert len(ids) < len(HuggingFaceTokenizer(tmp_path / name).tokenize(text)), "letters"


@pytest.mark.parametrize(
    "template, says",
    [
        (None, "no chat template"),
        ("{% if %}", "the chat template stops"),
        (LLAMA, "only users and assistants, not system"),
        ("{{ messages[0].nothing.at_all }}", "the chat template stops"),
        ("{{ messages.append(1) }}", "the chat template stops"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "the chat template stops"),
        ("{% for i in range(100000000) %}x{% endfor %}", "Range too big"),
    ],
    ids=str,
)
def test_templates_that_stop(byte_level, tmp_path, template, says):
    config = {**EOS, "chat_template": template} if template else EOS
    tokenizer = HuggingFaceTokenizer(write(tmp_path, {"tokenizer": byte_level, "tokenizer_config": config}))
    with pytest.raises(ConfigError, match=says) as error:
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}])
    assert error.value.where == str(tmp_path) and error.value.fix


def test_a_template_is_compiled_once_and_keeps_nothing_of_a_conversation(monkeypatch):
    compiled = []
    compile_one = SandboxedEnvironment.from_string
    monkeypatch.setattr(SandboxedEnvironment, "from_string", lambda *a: compiled.append(a[1]) or compile_one(*a))
    one, other = (
        "{% set n = namespace(all=bos_token) %}{% for m in messages %}{% set n.all = n.all + m.content %}"
        f"{{% set tools = m.content %}}{{% endfor %}}{end}{{{{ n.all }}}}{{{{ tools }}}}"
        for end in "ab"
    )
    for template, end in ((one, "a"), (other, "b"), (one, "a")):
        for word in ("x", "y"):
            told = render(template, [{"role": "user", "content": word}], {"bos_token": f"<{word}>"})
            assert told == f"{end}<{word}>{word}None"
    assert compiled == [one, other]


def test_what_a_text_spells_is_counted(byte_level, tmp_path):
    config = {**EOS, "added_tokens_decoder": FIRST | IM}
    tokenizer = HuggingFaceTokenizer(write(tmp_path, {"tokenizer": byte_level, "tokenizer_config": config}))
    found = tokenizer.spelled("<|im_start|>a<|im_start|><tool><|endoftext|><|im_")
    assert found == {"<|im_start|>": 2, "<|endoftext|>": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokenizer.spelled("nothing") == {}

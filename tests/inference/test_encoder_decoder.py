"""`minimegatron generate` with a T5: texts are transformers', also where the model has ids that its tokenizer lacks."""

from __future__ import annotations

import contextlib
import io
import json

import pytest
import torch

from minimegatron.commands.generate import continue_prompt, parse
from minimegatron.errors import RankError
from tests.inference.encoder_decoder import END, theirs, written

TEXTS = ["Who is it that knows?", "7 + 5 = "]


def printed(rank, world, argv):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        continue_prompt(parse(argv))
    return out.getvalue()


@pytest.mark.parametrize("kind", ["1.1", "added"])
def test_texts_are_those_of_transformers(ranks, tmp_path, kind):
    import transformers

    folder = written(tmp_path, kind)
    (tmp_path / "prompts.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    argv = [
        str(folder),
        "--prompts-file",
        f"{tmp_path}/prompts.txt",
        "--max-new-tokens",
        "12",
        "--params-dtype",
        "fp32",
    ]
    words = transformers.AutoTokenizer.from_pretrained(folder)
    lines = ranks(1).run(printed, [*argv, "--stop-token-ids", str(END)])[0].splitlines()
    for text, line in zip(TEXTS, map(json.loads, lines), strict=True):
        source = torch.tensor([words(text)["input_ids"]])
        made = theirs(kind).generate(
            source, attention_mask=torch.ones_like(source), max_new_tokens=12, do_sample=False
        )[0]
        assert line["tokens"] == made[1:].tolist()
        known = [token for token in made.tolist() if token < len(words)]
        assert line["text"] == words.decode(known, skip_special_tokens=True)
    (alone,) = {ranks(1).run(printed, [argv[0], TEXTS[0], *argv[3:], "--stop-token-ids", str(END)])[0].rstrip("\n")}
    assert alone == json.loads(lines[0])["text"], "an answer does not continue its source"


def test_a_source_with_the_start_of_a_target_is_refused(ranks, tmp_path):
    with pytest.raises(RankError, match="token id 0 is decoder_start_token_id"):
        ranks(1).run(printed, [str(written(tmp_path)), "a<pad>b"])

"""The quiz: right answers by other ways than its own, what may be typed, what comes next, what is kept."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections import Counter
from random import Random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from course import quiz
from labkit.cards import Card, cards
from labkit.quiz import DAYS, Known, chosen, is_right, lists, main, number_in
from labkit.said import columns, padded, wrapped
from minimegatron.comm.mesh import grid_sizes, rank_groups
from minimegatron.comm.sequence import spans_of
from minimegatron.commands.my_labs import SAID_IN
from minimegatron.config.parallel import ParallelConfig
from minimegatron.errors import ConfigError
from minimegatron.layers.moe.router import capacity
from minimegatron.optim.schedule import Schedule
from minimegatron.planner import closed_forms

TODAY = datetime.date(2026, 1, 10)
N = r"(\d[\d,.]*\d|\d)"  # a number in a question


def layout(tp=1, cp=1, pp=1, ep=1):
    return ParallelConfig(
        tensor_model_parallel_size=tp, context_parallel_size=cp, pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep, expert_tensor_parallel_size=1,
    )  # fmt: skip


def coordinates(tp, cp, dp, pp):
    return layout(tp, cp, pp), tp * cp * dp * pp


def stage(tp, cp, dp, pp, rank):
    parallel, world = coordinates(tp, cp, dp, pp)
    return next(group.index(rank) for group in rank_groups(parallel, world, "pp") if rank in group)


def second(tp, cp, dp, pp, rank):
    parallel, world = coordinates(tp, cp, dp, pp)
    return next(group[1] for group in rank_groups(parallel, world, "dp") if rank in group)


def llama(layers, h, heads, groups, ffn, words):
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        config = LlamaConfig(
            num_hidden_layers=layers, hidden_size=h, num_attention_heads=heads, num_key_value_heads=groups,
            intermediate_size=ffn, vocab_size=words, tie_word_embeddings=False,
        )  # fmt: skip
        return sum(p.numel() for p in LlamaForCausalLM(config).parameters()) / 1e9


def adam(gradient, lr):
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    weight.grad = torch.tensor([gradient], dtype=torch.float64)
    torch.optim.AdamW([weight], lr=lr, eps=0.0, weight_decay=0.0).step()
    return abs(weight.item())


def clip(norm, limit):
    weight = torch.zeros(4, requires_grad=True)
    weight.grad = torch.full((4,), norm / 2)
    torch.nn.utils.clip_grad_norm_([weight], limit)
    return weight.grad[0].item() / (norm / 2)


def accepted(k, rate):
    """Tokens of a step, by all that can happen."""
    return sum((n + 1) * rate**n * (1 - rate) for n in range(k)) + (k + 1) * rate**k


def young(seconds, hours):
    """The interval with the least loss: saves, and half an interval for each failure."""
    mean = hours * 3600
    return min(range(60, 3 * mean), key=lambda t: seconds / t + t / 2 / mean) / 60


def experts(tokens, number, k, factor):
    return capacity(tokens, SimpleNamespace(num_experts=number, moe_router_topk=k, moe_expert_capacity_factor=factor))


def normalised(right, group):
    rewards = torch.tensor([1.0] * right + [0.0] * (group - right), dtype=torch.float64)
    return ((rewards - rewards.mean()) / rewards.std(unbiased=False))[0].item()


def dpo(beta):
    return F.softplus(-beta * (torch.zeros(1) - torch.zeros(1))).item()


def seconds_of_a_ring(ranks, kilobytes, latency, rate):
    """Step after step: each sends an N-th."""
    return sum(latency + kilobytes / ranks / rate for _ in range(2 * (ranks - 1)))


def fitting(total, size):
    return len(range(0, total, size))


# name -> (where its numbers stand in the question, the answer by another way than the quiz's)
OTHERWISE = {
    "replicas": (
        rf"on {N} GPUs has tp {N}, cp {N}, pp {N}, ep {N}\.",
        lambda w, tp, cp, pp, ep: grid_sizes(layout(tp, cp, pp, ep), w)["dp"],
    ),
    "stage_of_a_rank": (rf"tp {N}, cp {N}, dp {N}, pp {N},.* rank {N} run", stage),
    "next_in_the_group": (rf"tp {N}, cp {N}, dp {N}, pp {N},.* of rank {N}\?", second),
    "same_experts": (
        rf"{N} GPUs, pp {N}, ep {N}",
        lambda w, pp, ep: grid_sizes(layout(pp=pp, ep=ep), w, "expert")["dp"],
    ),
    "ring_bytes": (rf"{N} ranks .* {N} MB by", lambda n, size: closed_forms.sent("all_reduce", size, n)),
    "ring_seconds": (
        rf"ring of {N} ranks sums {N} kB.* costs {N} µs.*carries {N} GB",
        lambda n, kb, us, gb: seconds_of_a_ring(n, kb, us, gb),
    ),
    "gathered": (rf"of {N} ranks .* {N} MB\. ", lambda n, size: closed_forms.sent("all_gather", n * size, n)),
    "tensor_parallel_messages": (
        rf"of {N} layers",
        lambda layers: layers * closed_forms.tensor_parallel_volume(1, 1, 1, 2) / closed_forms.sent("all_reduce", 1, 2),
    ),
    "parameters": (rf"has {N} layers, hidden size {N}, {N} heads of 128, {N} groups .* of {N}, {N} words", llama),
    "state": (rf"of {N} billion", lambda billions: closed_forms.state_bytes(billions, 1, 0)),
    "shard_of_a_column": (
        rf"takes {N} numbers to {N}, on tp {N}",
        lambda h, ffn, tp: torch.empty(ffn, h, device="meta").chunk(tp)[0].numel(),
    ),
    "tokens_of_a_step": (rf"of {N} tokens, micro batch {N}, dp {N}, {N} micro", lambda *n: math.prod(n)),
    "microbatches": (rf"batch {N}, micro batch {N}, dp {N}", lambda whole, b, dp: fitting(whole, b * dp)),
    "epochs": (
        rf"{N} steps of {N} samples of {N} tokens.* {N} million",
        lambda steps, batch, s, m: steps / (m * 1e6 / (batch * s)),
    ),
    "first_loss": (rf"{N} words", lambda words: F.cross_entropy(torch.zeros(1, words), torch.tensor([3])).item()),
    "bits_per_byte": (rf"is {N} a token .* has {N} bytes", lambda loss, size: math.log2(math.exp(loss)) / size),
    "model_flops_utilization": (
        rf"of {N} billion .* at {N} tokens a second on {N} H100",
        lambda p, rate, gpus: 100 * rate / gpus / (989e12 / (p * 6e9)),
    ),
    "bubble": (rf"{N} ranks, {N} chunks each, {N} micro", lambda p, v, m: 100 * float(closed_forms.bubble(p, m, v))),
    "microbatches_for_a_bubble": (
        rf"{N} ranks, {N} chunks each.* {N} %",
        lambda p, v, percent: next(m for m in range(1, 999) if 100 * closed_forms.bubble(p, m, v) <= percent),
    ),
    "microbatches_in_flight": (
        rf"{N} stages, {N} micro.* stage {N} ",
        lambda p, m, rank: closed_forms.in_flight("1f1b", p, m, rank),
    ),
    "zero_bytes": (
        rf"ZeRO-{N} on dp {N};.* for {N} billion",
        lambda z, dp, billions: closed_forms.state_bytes(billions, dp, z),
    ),
    "zero3_gathers": (
        rf"on dp {N}, {N} billion parameters, {N} micro",
        lambda dp, billions, m: 2 * m * closed_forms.sent("all_gather", 2 * billions, dp),
    ),
    "kept_by_a_layer": (
        rf"tp {N} .* of {N} tokens, h {N}\?",
        lambda t, s, h: closed_forms.layer_activations("tp sp selective", s, 1, h, 32, t) / 2**20,
    ),
    "price_of_full_recompute": (
        rf"of {N} %",
        lambda mfu: (
            mfu * closed_forms.hardware_flops(1, 1, 1, 10**9, 1, "full") / closed_forms.model_flops(1, 1, 1, 10**9, 1)
        ),
    ),
    "second_chunk": (rf"cp {N}, .* Rank {N} holds", lambda cp, rank: spans_of(2 * cp, (rank, cp))[-1][1] - 1),
    "ring_of_keys": (
        rf"cp {N}, a sequence of {N} tokens, {N} groups",
        lambda cp, s, g: sum(2 * (s // cp) * g * 128 * 2 for _ in range(cp - 1)) / 2**20,
    ),
    "bytes_to_go_on": (rf"{N} billion", lambda billions: closed_forms.state_bytes(billions, 1, 0) - 4 * billions),
    "youngs_interval": (rf"for {N} s, .* every {N} h", young),
    "samples_of_a_text": (
        rf"of {N} tokens is cut into samples of {N} tokens",
        lambda tokens, s: sum(start + s + 1 <= tokens for start in range(0, tokens, s)),
    ),
    "clipped": (rf"norm is {N}, `--clip-grad {N}`\.", clip),
    "cosine": (
        rf"1e-4, {N} steps .* to step {N}\..* at step {N}\?",
        lambda warm, total, step: Schedule(1e-3, total, 1e-4, lr_warmup_steps=warm, lr_decay_style="cosine").lr_at(
            step
        ),
    ),
    "first_step_of_adam": (r"lr ([\d.e-]+)\. A gradient is ([\d.]+)\.", lambda lr, g: adam(g, lr)),
    "capacity": (rf"{N} tokens, {N} experts, top-{N}, .* factor {N}\.", experts),
    "active": (
        rf"h {N}, ffn {N}\), top-{N}, and {N} shared",
        lambda h, ffn, k, shared: sum(torch.empty(3, ffn, h, device="meta").numel() for _ in range(k + shared)) / 1e6,
    ),
    "dispatched": (
        rf"has {N} tokens of {N} numbers .* top-{N}, ep {N},",
        lambda tokens, h, k, ep: sum(tokens * k / ep * h * 2 for peer in range(1, ep)) / 2**20,
    ),
    "product_seconds": (
        rf"\[{N}, {N}\] by \[{N}, {N}\]",
        lambda m, k, _, n: max(2 * m * k * n / 989e6, (m * k + k * n + m * n) * 2 / 3.35e6),
    ),
    "norm_seconds": (
        rf"of {N} x {N} numbers",
        lambda tokens, h: 2 * torch.empty(tokens, h, dtype=torch.bfloat16, device="meta").nbytes / 3.35e6,
    ),
    "scale_of_fp8": (rf"tensor is {N}\. ", lambda amax: torch.finfo(torch.float8_e4m3fn).max / amax),
    "cache_of_a_token": (
        rf"{N} layers, {N} groups",
        lambda layers, g: torch.empty(2, layers, g, 128, dtype=torch.bfloat16, device="meta").nbytes / 1024,
    ),
    "blocks": (rf"of {N} tokens, {N} further ones, .* of {N}\.", lambda prompt, new, size: fitting(prompt + new, size)),
    "decode_rate": (rf"of {N} billion .* with {N} TB", lambda billions, rate: 1 / (billions * 1e9 * 2 / (rate * 1e12))),
    "speculated": (rf"proposes {N} tokens; .* probability {N},", accepted),
    "adapter": (
        rf"rank {N} .* \({N} x {N}\) of {N} layers",
        lambda r, h, _, layers: sum(torch.empty(r, 2 * h, device="meta").numel() for _ in range(2 * layers)) / 1e6,
    ),
    "first_loss_of_dpo": (rf"β {N};", dpo),
    "advantage": (rf"{N} of a group of {N} answers", normalised),
    "days": (
        rf"{N} billion parameters, {N} trillion tokens, {N} H100 .* of {N} %",
        lambda p, t, gpus, mfu: t * 1e12 / (gpus * mfu / 100 * 989e12 / (6e9 * p)) / 3600 / 24,
    ),
    "smallest": (
        rf"for {N} billion",
        lambda billions: next(n for n in range(1, 999) if closed_forms.state_bytes(billions, n, 3) <= 80),
    ),
    "failures": (rf"in {N} years .* on {N} GPUs", lambda years, gpus: 1 / (gpus / (years * 365 * 24))),
}


@pytest.mark.parametrize("name", sorted(quiz.QUESTIONS))
def test_an_answer_is_what_another_computation_gives(name):
    where, otherwise = OTHERWISE[name]
    for seed in range(12):
        asked = quiz.QUESTIONS[name].ask(Random(seed))
        found = re.search(where, asked.text, re.S)
        assert found, asked.text
        numbers = [float(word.replace(",", "")) for word in found.groups()]
        want = otherwise(*(int(x) if x.is_integer() else x for x in numbers))
        # 0.5 %: norms are left out of the parameters, Young's minimum is sought in whole seconds
        assert asked.answer == pytest.approx(want, rel=0.005), f"{asked.text}\n{asked.how}"
        assert isinstance(asked.answer, int) <= (want == round(want)), "an answer that is counted is whole"
        assert not re.search(r"[{}]|\d\.0\b", asked.text + asked.how)


def test_every_lab_and_level_has_questions_and_no_two_have_one_name():
    found = cards("course")
    assert max(Counter(card.name for card in found).values()) == 1
    assert {card.name[4:6] for card in found if card.name.startswith("lab ")} == set(quiz.LABS)
    per_level = Counter(quiz.QUESTIONS[name].can.level for name in quiz.QUESTIONS)
    assert set(per_level) == set(quiz.LEVELS) and min(per_level.values()) >= 10
    text, answer, how = next(card for card in found if card.name == "lab 01, 1").ask(Random(0))
    assert text.startswith("A run uses 64 GPUs") and answer is None and how.startswith("64 / (4 · 2 · 2) = 4")


def numbers(text):
    return Counter(re.findall(r"\d[\d.,]*\d|\d", text))


def test_a_question_in_chinese_has_the_numbers_and_the_answer_of_the_english_one():
    english, chinese = cards("course"), cards("course", "zh")
    assert [(card.name, card.level, card.lab) for card in english] == [(c.name, c.level, c.lab) for c in chinese]
    for one, other in zip(english, chinese, strict=True):
        for seed in range(3):
            (text, answer, how), (said, same, so) = one.ask(Random(seed)), other.ask(Random(seed))
            assert (
                answer == same and numbers(text) == numbers(said) and not re.search("[{}]", said + so * (not one.lab))
            )
            assert one.lab or numbers(how) == numbers(so)
        assert re.search("[一-鿿]", said) and re.search("[一-鿿]", other.can), other.name
    assert cards("course", "fr")[0].ask(Random(0)) == english[0].ask(Random(0)), "what is not translated is in English"


def test_a_question_that_has_changed_since_it_was_translated_is_asked_in_english(monkeypatch):
    changed = quiz.QUESTIONS["replicas"]._replace(text="{world} GPUs, tp {tp}, cp {cp}, pp {pp}, ep {ep}: dp?")
    monkeypatch.setitem(quiz.QUESTIONS, "replicas", changed)
    first, second = (card.ask(Random(0))[0] for card in cards("course", "zh")[:2])
    assert "GPUs, tp" in first and "第几个阶段" in second


def test_a_line_is_broken_between_chinese_characters_and_never_before_a_mark():
    text = "一次 all-reduce 发送多少字节？" * 12
    lines = wrapped(text, 40).split("\n")
    assert len(lines) > 5 and "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert all(30 < columns(line) <= 40 for line in lines[:-1]) and not any(line[0] in "，。？" for line in lines)
    assert wrapped("a b " * 30, 20) == "\n".join(["a b a b a b a b a b"] * 6), "as in English"
    assert columns(padded("数", 5)) == 5 and wrapped("", 20) == ""


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("16", 16), (" 1,024 ", 1024), ("128,256", 128_256), ("2 * 640 * 7 / 8", 1120), ("-3", -3),
        ("1.5e9", 1.5e9), ("2**10", 1024), ("2^10", 1024), ("34·4096", 139_264), ("25 %", 25),
        ("7 // 2 + 1", 4), ("(1 - 0.25) / 3", 0.25),
    ],
)  # fmt: skip
def test_what_may_be_typed(typed, value):
    assert number_in(typed) == value


@pytest.mark.parametrize(
    "typed",
    ["", "abc", "1,5", "1 GB", "x + 1", "__import__('os')", "1 / 0", "9 ** 9 ** 9", "True", "'7'", "[1]", "(" * 500],
)
def test_what_may_not(typed):
    with pytest.raises(ValueError, match="is no number"):
        number_in(typed)


@given(st.integers(-(10**12), 10**12))
def test_a_number_that_is_printed_can_be_typed(number):
    assert number_in(f"{number:,}") == number_in(str(number)) == number


def test_counts_are_exact_and_sizes_nearly():
    assert is_right(16, 16) and not is_right(16.01, 16) and is_right(0, 0) and not is_right(1, 0)
    assert is_right(101.9, 100.0) and not is_right(102.5, 100.0)


def card(name, can="count", level="basic"):
    return Card(name, level, can, lambda draw: ("?", 1, "so"))


def test_late_questions_come_first_and_new_ones_of_each_line_in_turn(tmp_path):
    known = Known(tmp_path / "quiz.json", {})
    found = [card("a"), card("b"), card("c", "say"), card("d", "say"), card("e", "plan", "advanced")]
    assert [one.name for one in chosen(found, known, 9, TODAY)] == ["a", "c", "b", "d", "e"]
    known.put("a", True, TODAY)
    known.put("d", False, TODAY)
    assert [one.name for one in chosen(found, known, 3, TODAY)] == ["d", "c", "b"], "first what was wrong"
    later = TODAY + datetime.timedelta(days=DAYS[0])
    assert [one.name for one in chosen(found, known, 2, later)] == ["d", "a"]
    for days in DAYS:
        today = known.answers["a"][1] + datetime.timedelta(days=days)
        assert known.due("a", today - datetime.timedelta(days=1)) is None and known.due("a", today) == 0
        known.put("a", True, today)
    known.put("a", False, today)
    assert known.due("a", today) == 0, "one wrong answer, and it begins anew"


def test_a_line_is_ticked_when_all_of_it_was_right(tmp_path):
    known = Known(tmp_path / "quiz.json", {})
    found = [card("a"), card("b"), card("e", "plan", "advanced")]
    known.put("a", True, TODAY)
    known.put("e", True, TODAY)
    assert lists(found, known) == "basic: 0 of 1\n  [ ] count  1/2\n\nadvanced: 1 of 1\n  [x] plan  1/1"


def answering(monkeypatch, *lines):
    """Type these lines, then Ctrl-D; the prompts are returned as they come."""
    left, prompts = list(lines), []

    def typed(prompt):
        prompts.append(prompt)
        if not left:
            raise EOFError
        return left.pop(0)

    monkeypatch.setattr("builtins.input", typed)
    return prompts


def test_the_command_asks_keeps_each_answer_and_goes_on_next_time(monkeypatch, tmp_path, capsys):
    kept = tmp_path / "new" / "quiz.json"
    words = ["--kept", str(kept), "--lab", "1"]
    prompts = answering(monkeypatch, "", "perhaps", "y", "", "n")
    assert main([*words, "--count", "3"]) == 0
    out = capsys.readouterr().out
    assert "Until next time: 1 of 2 answered." in out and "64 / (4 · 2 · 2) = 4" in " ".join(out.split())
    assert sum("y/n" in prompt for prompt in prompts) == 3, "a word that is neither yes nor no is asked for again"
    assert {name: n for name, (n, _) in json.loads(kept.read_text()).items()} == {"lab 01, 1": 1, "lab 01, 2": 0}
    answering(monkeypatch)
    main(words)
    assert "1 of 5 · basic" in capsys.readouterr().out, "the one that was answered is not due"
    main([*words, "--list"])
    assert "[ ] answer the questions of Lab 01 · Process groups  1/6" in capsys.readouterr().out


def test_a_number_is_judged_and_explained(monkeypatch, tmp_path, capsys):
    asked = cards("course")[0].ask(Random(4))
    answering(monkeypatch, "many", f"{asked[1]} * 1")
    main(["--kept", str(tmp_path / "a.json"), "--count", "1", "--seed", "4"])
    out = capsys.readouterr().out
    assert "`many` is no number" in out and f"Yes: {asked[1]}" in out and "1 of 1 answered" in out
    answering(monkeypatch, f"{asked[1] + 1}")
    main(["--kept", str(tmp_path / "b.json"), "--count", "1", "--seed", "4"])
    assert f"No: {asked[1]}. How: " in capsys.readouterr().out


def test_the_command_speaks_the_language_of_the_labs_or_the_one_that_is_asked_for(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--kept", str(tmp_path / "quiz.json"), "--count", "1", "--seed", "3"]
    answer = cards("course")[0].ask(Random(3))[1]
    (tmp_path / "my-labs").mkdir()
    (tmp_path / "my-labs" / ".language").write_text("zh\n")
    answering(monkeypatch, "many", str(answer))
    main(words)
    out = capsys.readouterr().out
    assert (
        "第 1 题，共 1 题 · 基础" in out
        and "`many` 不是一个数" in out
        and f"对：{answer}。" in out
        and "答对 1 题" in out
    )
    main([*words, "--list", "--language", "en"])
    assert "basic: 0 of 7" in capsys.readouterr().out
    main([*words, "--list"])
    assert "1/4" in (said := capsys.readouterr().out) and "基础：7 项里完成了 0 项" in said, "answers are kept for both"
    monkeypatch.setenv(SAID_IN, "en")
    main([*words, "--list"])
    assert "basic: 0 of 7" in capsys.readouterr().out


def test_mistakes_on_the_command_line_and_a_broken_file_are_said(tmp_path):
    broken = tmp_path / "quiz.json"
    broken.write_text('{"a": 1}')
    for words, said in (
        (["--level", "expert"], "there is no level 'expert'"),
        (["--lab", "77"], "no question of lab 77"),
        (["--count", "0"], "--count is 0"),
        (["--language", "fr"], "no questions in 'fr'(.|\n)*fix: --language en or zh"),
        (["--course", "tests"], "no quiz in `tests`"),
        (["--kept", str(broken)], "cannot be read(.|\n)*fix: move it away"),
    ):
        with pytest.raises(ConfigError, match=said):
            main(words)
    assert broken.read_text() == '{"a": 1}'

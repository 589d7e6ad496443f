"""The page about a run: what it says is what the files say; a run that went on is one curve."""

import json
import re
import shutil

import pytest

from minimegatron.commands import report
from minimegatron.commands.report import lines_of, main, planned, points, read_log, settings, tokens
from minimegatron.errors import ConfigError, DataError
from minimegatron.training.arguments import parse_args
from tests.notebooks import browser

pytest.importorskip("matplotlib")
MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 512 --seq-length 128 --mock-data"


def step(iteration, loss, batch=4):
    return {
        "event": "train", "iteration": iteration, "train_iters": 40, "consumed_samples": iteration * batch,
        "global_batch_size": batch, "losses": {"lm loss": loss}, "grad_norm": 1.5,
        "tokens_per_second": 1000.0 * iteration, "peak_memory_bytes": 2**30, "mfu": None,
    }  # fmt: skip


def write(path, lines, end=""):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + end)


def validation(iteration, loss):
    return {"event": "validation", "iteration": iteration, "losses": {"lm loss": loss}}


@pytest.fixture
def folder(tmp_path):
    """A run that was stopped after step 30, had saved step 20, and went on."""
    config = {"event": "config", **parse_args(MODEL.split()).to_dict()}
    first = [config, *(step(i, 9 - i / 10) for i in (10, 20, 30)), validation(30, 99.0)]
    second = [config, step(30, 6.5), step(40, 5.25), validation(40, 5.5)]
    write(tmp_path / "base.jsonl", first + second, '{"event": "train", "iter')
    tasks = [
        {"name": "some/held-out.txt", "tokens": 10, "bits per byte": 1.25, "perplexity": 20.5},
        {"name": "sums.jsonl", "questions": 200, "acc": 0.5, "acc_stderr": 0.035},
    ]
    write(tmp_path / "base-tasks.jsonl", tasks)
    write(tmp_path / "base-samples.jsonl", [{"prompt": "2 < 3 &", "text": "<script>"}])
    stages = [("text", 30, 20.0, 1.0), ("pretrain", 600, 1190, 9)]
    names = ("stage", "seconds", "user", "system")
    write(tmp_path / "stages.jsonl", [dict(zip(names, stage, strict=True)) for stage in stages])
    return tmp_path


def test_what_was_made_twice_counts_once(folder):
    log = read_log(folder / "base.jsonl")
    assert points(log, "lm loss") == {10: 8.0, 20: 7.0, 30: 6.5, 40: 5.25}
    assert points(log, "lm loss validation") == {40: 5.5} and tokens(log)[40] == 40 * 4 * 128


def test_an_evaluation_between_two_lines_of_the_log_lies_between_them(tmp_path, monkeypatch):
    config = {"event": "config", **parse_args(MODEL.split()).to_dict()}
    held_out = [validation(i, 9 - i / 10) for i in (6, 12, 20)]
    write(tmp_path / "base.jsonl", [config, step(10, 8.0), step(20, 7.0), *held_out])
    monkeypatch.setattr(report, "picture", lambda figure: [line.get_xdata() for line in figure.axes[0].lines])
    training, evaluations = report.curves(read_log(tmp_path / "base.jsonl"))
    assert list(training) == pytest.approx([10 * 4 * 128e-6, 20 * 4 * 128e-6])
    assert list(evaluations) == pytest.approx([i * 4 * 128e-6 for i in (6, 12, 20)])


def test_an_empty_answer_is_shown_as_one(folder):
    write(folder / "chat-samples.jsonl", [{"prompt": "Who are you?", "text": ""}, {"prompt": "1 + 1 =", "text": "2"}])
    main([str(folder)])
    text = (folder / "report.html").read_text()
    assert re.search(r"Who are you\?</b> <span[^>]*>\(an empty answer\)", text)
    assert text.count("(an empty answer)") == 1


def test_the_page(folder, capsys):
    main([str(folder), "--price", "3.6", "--cluster", "h100", "--world-size", "2", "--gpu-price", "2"])
    text = (folder / "report.html").read_text()
    assert str(folder / "report.html") in capsys.readouterr().out
    cells = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "|", text))
    for said in ("40 of 40", "20,480", "lm loss 5.2500", "lm loss 5.5000 at step 40", "1 times, and went on"):
        assert said in text, said
    assert "|held-out|bits per byte|1.2500" in cells and "|sums|accuracy|0.5000 ± 0.0350" in cells
    assert "|all|10.5 min|1,220|0.6300" in cells, "630 s at 3.6 an hour"
    assert "2 &lt; 3 &amp;" in text and "<script>" not in text
    assert "On 2 x h100" in text and "MFU" in text and "at 2 a GPU and hour" in text
    assert not re.search(r'(src|href)="(?!data:)', text), "nothing is fetched"


def test_the_prediction_is_that_of_plan(folder):
    """The same configuration, by hand."""
    from minimegatron.planner.cluster import CLUSTERS
    from minimegatron.planner.planning import plan

    log = read_log(folder / "base.jsonl")
    log.config["data"] |= {"mock_data": False, "data_path": ["a"], "tokenizer_type": "HuggingFaceTokenizer"}
    run = parse_args([*MODEL.split(), "--bf16", "--global-batch-size", "4"], 2, reads=False)
    seconds = plan(run, 2, CLUSTERS["h100"]).time.seconds
    told = planned(log, "h100", 2, None)
    assert told["a step"].startswith(f"{1e3 * seconds:.2f} ms") and told["the training"] == f"{40 * seconds:.1f} s"


def test_trainings_stand_in_the_order_of_the_stages(folder):
    """Of as many tokens each; without stages that of the most tokens is first."""
    log = (folder / "base.jsonl").read_text().replace("lm loss", "loss")
    for name in ("chat", "pretrain"):
        (folder / f"{name}.jsonl").write_text(log)
    stages = lines_of(folder / "stages.jsonl")
    write(folder / "stages.jsonl", [*stages, {**stages[0], "stage": "chat"}])
    main([str(folder)])
    titles = re.findall("<h2>(.*)</h2>", (folder / "report.html").read_text())
    assert [title for title in titles if title in ("base", "chat", "pretrain")] == ["pretrain", "chat", "base"]


def test_fields_that_the_run_does_not_read_are_not_shown():
    def shown(flags):
        return settings(parse_args([*MODEL.split(), *flags.split()]).to_dict())

    assert shown("")["hidden_size"] == "64" and "moe_router_topk" not in shown("")
    assert shown("--num-experts 4 --moe-router-topk 2")["moe_router_topk"] == "2"
    assert "adam_beta1" in shown("--optimizer muon") and "adam_beta1" not in shown("--optimizer sgd")
    config = json.loads(json.dumps(parse_args(MODEL.split()).to_dict()))
    config["data"] |= {"mock_data": False, "data_path": ["a", "b"], "split": "99,1,0", "train_data_path": []}
    assert settings(config)["data_path"] == "a b" and settings(config)["split"] == "99,1,0"


def test_a_plan_that_cannot_be_made_is_said(folder):
    main([str(folder), "--cluster", "h100", "--world-size", "8"])
    assert "not planned" in (folder / "report.html").read_text(), "a batch of 4 on 8 ranks"


def test_what_is_refused(tmp_path, folder):
    with pytest.raises(DataError, match="no such folder"):
        main([str(tmp_path / "none")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="nothing to report"):
        main([str(tmp_path / "empty")])
    (folder / "base-tasks.jsonl").write_text("[1]\n{}\n")
    with pytest.raises(DataError, match="list, not an object") as caught:
        main([str(folder)])
    assert caught.value.where.endswith("base-tasks.jsonl:1")
    (folder / "base-tasks.jsonl").unlink()
    with pytest.raises(ConfigError):
        main([str(folder), "--colour", "red"])


@pytest.mark.thorough
@pytest.mark.skipif(bool(browser.missing()), reason=browser.missing() or "not skipped")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_wide_table_scrolls_in_its_own_box(folder, width):
    """Names without a place to break: of a folder, of texts, of models that were evaluated, of a stage."""
    from playwright.sync_api import sync_playwright

    long = "a_name_that_does_not_break_" * 12
    for number in range(6):
        write(folder / f"{long[:40]}{number}-tasks.jsonl", [{"name": f"{long}.txt", "bits per byte": 1.0}])
    lines = lines_of(folder / "stages.jsonl")
    write(folder / "stages.jsonl", [{**lines[0], "stage": long}, lines[1]])
    log = lines_of(folder / "base.jsonl")
    for config in (line for line in log if line["event"] == "config"):
        config["data"]["data_path"] = [long]
    write(folder / "base.jsonl", log)
    whole = folder / long[:200]
    shutil.copytree(folder, whole, ignore=lambda *_: [whole.name])
    main([str(whole), "--cluster", "h100"])
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser.chromium(), args=browser.FLAGS)
        page = chromium.new_page(viewport={"width": width, "height": 900})
        page.goto((whole / "report.html").as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        wider = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        boxes = page.evaluate(
            "[...document.querySelectorAll('table')].map(table => [table.scrollWidth, table.parentElement.clientWidth])"
        )
        chromium.close()
    assert wider <= 0, f"the page is {wider} pixels wider than {width}"
    assert len(boxes) == 5 and sum(table > box for table, box in boxes) >= 3, boxes

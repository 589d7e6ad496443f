"""The texts of `speedrun.sh`: what is trained on, what is held out, and questions about what is held out.

    python examples/speedrun_data.py FOLDER CORPUS MEGABYTES

| file                   | contents                                                                                    |
|------------------------|---------------------------------------------------------------------------------------------|
| `train.jsonl`          | 49 of 50 documents                                                                          |
| `held-out.txt`         | the beginning of the others                                                                 |
| `continuations.jsonl`  | where one of them goes on: the true next words, or those of three other places; chance 0.25 |
| `chats.jsonl`          | conversations: what a function does, sums, who are you                                      |
| `sums.jsonl`           | sums that are not among them, with four answers; chance 0.25                                |

Nothing is drawn at random but by a fixed seed, so the same corpus gives the same files.
"""

import json
import random
import sys
from pathlib import Path

from minimegatron.data import corpus, hub
from minimegatron.posttraining import examples

EVERY = 50  # one document of so many is held out
HELD_OUT = 200_000  # characters
QUESTIONS = 200
NAME = [
    ("Who are you?", "I am a small language model, trained on this computer."),
    ("What can you do?", "I can say what a function of Python's standard library does, and add two numbers."),
    ("Hello!", "Hello! Ask me about Python's standard library."),
    ("Thank you.", "You are welcome."),
]


def write(path, lines):
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def documents(name, megabytes):
    """Texts of a corpus by the name that `train --corpus` takes."""
    kinds = {"stdlib": "both", "stdlib-code": "code", "stdlib-docs": "docs"}
    found = corpus.documents(kinds[name]) if name in kinds else hub.documents(name, megabytes=megabytes)
    return (text for _, text in found if text.strip())


def continuations(texts, draw):
    """Questions with four answers: how a passage goes on."""
    passages = []
    for text in texts:
        words = text.split(" ")
        for start in range(0, len(words) - 40, 40):
            question, answer = " ".join(words[start : start + 30]), " ".join(words[start + 30 : start + 40])
            if question.strip() and answer.strip():
                passages.append((question, answer))
    draw.shuffle(passages)
    for (question, right), *others in zip(passages, *(passages[k:] for k in (1, 2, 3)), strict=False):
        choices = [right, *(answer for _, answer in others)]
        draw.shuffle(choices)
        if len(set(choices)) == len(choices):
            yield {"question": question, "choices": choices, "answer": choices.index(right)}


def conversation(prompt, answer):
    return {"messages": [{"role": "user", "content": prompt.strip()}, {"role": "assistant", "content": answer.strip()}]}


def main(folder, name, megabytes):
    draw = random.Random(1)
    held_out = []
    with open(folder / "train.jsonl", "w", encoding="utf-8") as file:
        for number, text in enumerate(documents(name, megabytes)):
            if number % EVERY:
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            elif sum(map(len, held_out)) < HELD_OUT:
                held_out.append(text)
    (folder / "held-out.txt").write_text("\n\n".join(held_out)[:HELD_OUT], encoding="utf-8")
    write(folder / "continuations.jsonl", list(continuations(held_out, draw))[:QUESTIONS])

    sums = list(examples.arithmetic())
    draw.shuffle(sums)
    kept, asked = sums[: len(sums) // 2], sums[-QUESTIONS:]
    chats = [*examples.docstrings(), *kept, *NAME * 20]
    draw.shuffle(chats)
    write(folder / "chats.jsonl", [conversation(*chat) for chat in chats])
    questions = []
    for question, right in asked:
        near = draw.sample([n for n in range(max(0, int(right) - 12), int(right) + 13) if n != int(right)], 3)
        choices = [str(n) for n in (int(right), *near)]
        draw.shuffle(choices)
        # What the model reads before an answer, as its chat template spells it.
        questions.append(
            {"question": f"User: {question}\n", "choices": choices, "answer": choices.index(right.strip())}
        )
    write(folder / "sums.jsonl", questions)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))

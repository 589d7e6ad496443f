# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Lab 11 · Post-training
#
# A model that has read a lot continues texts. To make it answer, it is trained further: by examples, by pairs of a
# better and a worse answer, by rewards for its own answers. Each of these is a mask, or a loss of a few lines. And
# each has a mistake that no error shows: the loss falls, and the model learns something else. Most of the mistakes
# below stood in published trainers.
#
# **You build** what those trainers are made of: which tokens of a conversation count, and how much each of them weighs;
# LoRA over tp; DPO from logits, with its gradient by hand; GRPO's advantages and its clipped loss; three estimates of a
# divergence; and weights for an engine that computes slightly other numbers than the trainer. Then minimegatron teaches
# a small model to add, with your loss, from rewards. At the end you find two bugs in a colleague's trainer.
#
# **You need** gradients, softmax and cross entropy; column and row layers and f and g (lab 02); pages of keys and values
# (lab 10). No GPU.
#
# | part | sections | time |
# |---|---|---|
# | A | 1 The problem · 2 Predict | 50 min |
# | B | 3 Implement: conversations, adapters | 1 h |
# | C | 3 Implement: pairs, rewards | 1 h 40 min |
# | D | 4 Run · 5 See | 45 min |
# | E | 6 Break it · 7 Explain | 45 min |
#
# Together 5 hours. Each part ends at a place to stop. After a kernel restart: run the first cell, then go on
# where you were. A picture needs the run above it.

# %%
# %load_ext course
# %lab 11_post_training

# %% [markdown]
# First two guesses. LoRA leaves the weights as they are, and trains two thin matrices beside each of them, here of rank
# 16 beside all matrices of Llama 3 8B. How many parameters is that, in percent of the model's?

# %%
guess("share", None, "LoRA of rank 16 beside all matrices of Llama 3 8B: percent of its parameters?")

# %% [markdown]
# A model solves one problem in fifty. It answers each problem eight times, and learns from how the eight differ in their
# rewards, 1 for a solution and 0 for none. From how many problems in a hundred does it learn anything?

# %%
guess("useful", None, "Right once in 50 times, 8 answers a problem: of 100 problems, how many teach anything?")

# %% [markdown]
# ## 1 · The problem
#
# Llama 3 8B has 8.03·10⁹ parameters. Its weights in bf16 are 16 GB, a fifth of an H100. To train it, AdamW keeps for
# each parameter a gradient, the weight and two moments in fp32, beside the weight in bf16: 18 bytes.

# %%
from minimegatron.viz import bars

LLAMA, H100 = 8_030_261_248, 80.0
STATE = {"weights": 2, "gradients": 4, "optimizer": 12}
whole = {part: nbytes * LLAMA / 1e9 for part, nbytes in STATE.items()}
frozen = {"weights": whole["weights"]}
bars.stacked({"to use it": frozen, "to train it": whole}, limit=H100, what="GB", title="Llama 3 8B on one H100 of 80 GB")

# %% [markdown]
# And this is the smaller problem. Pre-training has one loss on all tokens. Now a conversation has tokens that the
# model should not learn to say; a pair of answers has one number for many tokens; an answer that the model draws has a
# reward, which has no gradient at all. A wrong mask or a wrong divisor is a loss that falls all the same.
#
# ## 2 · Predict
#
# ### Adapters
#
# LoRA computes, beside a frozen matrix W with o rows and i columns,
#
# > y = x Wᵀ + (α/r) (x Aᵀ) Bᵀ
#
# A has r rows of i numbers, B has o rows of r. B begins as 0, so the model begins as it was. A frozen parameter costs
# its 2 bytes, a trained one 18.
#
# Megatron packs matrices: queries, keys and values are one, gate and up another. Each of these parts has an A and a B
# of its own. So a packed layer of `parts` parts has that many times r rows of A. Of B each row belongs to one part, and
# needs r numbers as before.
#
# tp cuts the adapters with the matrix. Beside a column layer B is cut like W, by rows; A, which reads the whole input,
# is whole on every rank. Beside a row layer A is cut like W, by columns, and B is whole.
#
# An example: a column layer with o = 6, i = 4, and a row layer with o = 4, i = 6, r = 2. All adapters together have
# (8 + 12) + (12 + 8) = 40 parameters. On two ranks each holds 8 + 6 of the first, 6 + 8 of the second: 28. And 12 numbers
# of each frozen matrix. So a rank needs 28 · 18 + 24 · 2 = 552 bytes.
#
# **Exercise.** Return `whole`, the parameters of all adapters; `rank`, how many of them a rank of `tp` holds; and `bytes`,
# what the rank needs to train them, with its part of the frozen matrices. A matrix has `kind` ("column" or "row"), `o`,
# `i` and `parts`. tp divides everything that is cut.

# %%
# %%exercise adapter_state
def adapter_state(matrices: list[dict], r: int, tp: int) -> dict[str, int]:
    """{"whole": 40, "rank": 28, "bytes": 552} in the example."""
    ### BEGIN SOLUTION
    whole = rank = frozen = 0
    for matrix in matrices:
        a, b = matrix["parts"] * r * matrix["i"], matrix["o"] * r
        whole += a + b
        rank += a + b // tp if matrix["kind"] == "column" else a // tp + b
        frozen += matrix["o"] * matrix["i"] // tp
    return {"whole": whole, "rank": rank, "bytes": 18 * rank + 2 * frozen}
    ### END SOLUTION


# %%
check("adapter_state")

# %% [markdown]
# The matrices of Llama 3 8B: h = 4096, keys and values of 1024 each, an MLP of 14,336. The embedding and the output
# layer stay as they are.

# %%
# %%needs adapter_state
h, kv, f = 4096, 1024, 14336
LAYER = [{"kind": "column", "o": h + 2 * kv, "i": h, "parts": 3}, {"kind": "row", "o": h, "i": h, "parts": 1},
         {"kind": "column", "o": 2 * f, "i": h, "parts": 2}, {"kind": "row", "o": h, "i": f, "parts": 1}]  # fmt: skip
one = adapter_state(LAYER * 32, 16, 1)
guessed("share", 100 * one["whole"] / LLAMA, "percent")
ENDS = 2 * 128256 * h  # parameters outside of the layers' matrices
print(f"{one['whole']:,} parameters; {(one['bytes'] + 2 * ENDS) / 1e9:.1f} GB in place of {sum(whole.values()):.1f}")
eight = adapter_state(LAYER * 32, 16, 8)
print(f"on 8 ranks each holds {eight['rank']:,} of them, {8 * eight['rank'] / one['whole']:.1f} times an eighth")

# %% [markdown]
# Of each pair one matrix is cut, and the other one is on every rank. Such thin matrices need little memory all the same. But
# a matrix that every rank holds must learn the same on every rank: section 3 comes back to it.
#
# ### What a token weighs
#
# A loss is a mean. Over what? A step has some microbatches, on one rank or on several, each with rows of `width` places.
# Some tokens of a row count; the rest is prompt and padding, and its loss is 0. Four ways are in use:
#
# | way | the loss of the step |
# |---|---|
# | `tokens` | the mean over all counted tokens of the step |
# | `padding` | each microbatch: the mean over all of its places, rows · width. Then the mean of the microbatches |
# | `rows` | each row: the mean over its counted tokens. Then the mean of the rows, then that of the microbatches |
# | `microbatches` | each microbatch: the mean over its counted tokens. Then the mean of the microbatches |
#
# All four fall when the model learns. What they learn differs: think of one token, and of the factor with which its loss
# enters the step's.
#
# An example: two microbatches of two rows, width 8, counted tokens `[[3, 2], [4, 0]]`. By `tokens` each of the nine weighs
# 1/9. By `padding` each weighs 1/16 in its microbatch, and 1/32 in the step. A row without a counted token has the mean
# 0, and is a row all the same; so is a microbatch.
#
# **Exercise.** Return, in the form of `counts`, the weight of one counted token of each row in the loss of the step; 0.0
# for a row that has none.

# %%
# %%exercise token_weights
def token_weights(counts: list[list[int]], width: int, way: str) -> list[list[float]]:
    """[[1/9, 1/9], [1/9, 0.0]] in the example by "tokens"."""
    ### BEGIN SOLUTION
    total = sum(n for rows in counts for n in rows)

    def weight(rows: list[int], n: int) -> float:
        if n == 0:
            return 0.0
        if way == "tokens":
            return 1 / total
        divisor = {"padding": len(rows) * width, "rows": len(rows) * n, "microbatches": sum(rows)}[way]
        return 1 / (len(counts) * divisor)

    return [[weight(rows, n) for n in rows] for rows in counts]
    ### END SOLUTION


# %%
check("token_weights")

# %% [markdown]
# Eight conversations whose answers have 40, 3, 8, 5, 30, 2, 6 and 10 tokens, in microbatches of two. A step should not
# depend on how it was cut into microbatches, nor on how wide its rows are. Which of the four ways pass?

# %%
# %%needs token_weights
from course.figures.posttraining import bars_of_rows

LENGTHS, WAYS = [40, 3, 8, 5, 30, 2, 6, 10], ("tokens", "padding", "rows", "microbatches")


def cut(size):
    """The eight answers in microbatches of so many rows."""
    return [LENGTHS[i : i + size] for i in range(0, 8, size)]


def flat(size, width, way):
    return [round(w, 12) for rows in token_weights(cut(size), width, way) for w in rows]


for way in WAYS:
    print(f"{way:13} the same however it is cut: {flat(1, 64, way) == flat(2, 64, way) == flat(8, 64, way)!s:6}",
          f"and in rows of any width: {flat(2, 64, way) == flat(2, 128, way)}")  # fmt: skip
bars_of_rows({way: flat(2, 64, way) for way in WAYS}, [f"{n}" for n in LENGTHS], what="weight of a token",
             rows="tokens of the answer")  # fmt: skip

# %% [markdown]
# By rows, a token of the answer with 2 tokens weighs twenty times as much as one of the answer with 40. That may be what
# you want, each answer the same; then say so. By microbatches a token's weight depends on who happens to sit beside it.
# With padding in the mean, the same data in wider rows is a smaller step. GRPO, further down, has the same four choices
# under other names, and there they decide how long answers become.
#
# *This is a good place to stop: the end of part A.*
#
# ## 3 · Implement
#
# ### What the model said
#
# A conversation is a text that a template makes of messages, and the text becomes ids. Nothing in the ids says who
# spoke. In the form called ChatML each turn begins with `<|im_start|>`, a role and a newline, and ends with `<|im_end|>`
# and a newline:

# %% jupyter={"source_hidden": true}
import json
import tempfile

from tokenizers import models, pre_tokenizers

from minimegatron.data.tokenizer import HuggingFaceTokenizer, byte_level
from minimegatron.posttraining.conversations import Template

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
words, merges = dict(letters), []
for word in ("user", "assistant"):  # whole words, so that a picture has room for them
    for end in range(2, len(word) + 1):
        words.setdefault(word[:end], len(words))
        merges.append((word[: end - 1], word[end - 1]))
fast = byte_level(models.BPE(words, merges))
fast.add_special_tokens(["<|im_start|>", "<|im_end|>"])
with tempfile.TemporaryDirectory() as folder:
    fast.save(f"{folder}/tokenizer.json")
    with open(f"{folder}/tokenizer_config.json", "w") as file:
        json.dump({"eos_token": "<|im_end|>", "chat_template": CHATML}, file)
    tokenizer = HuggingFaceTokenizer(folder, split_special_tokens=False)
template = Template(tokenizer)
CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"},
        {"role": "user", "content": "and 3+3?"}, {"role": "assistant", "content": "6"}]  # fmt: skip
print(template.text(CHAT, opens_answer=False))

# %% [markdown]
# The loss shall count what the model would have to choose itself. Somebody else writes the opening of a turn, and the
# user's words. Who writes the token that ends an answer? And the newline behind it?
#
# A position of the model sees ids up to its own, and predicts the *next* one. So the mask belongs to labels: labels are
# `ids[1:]`, and the first token of an answer is predicted at the last token of what opens it.
#
# An example: `<|im_start|>` is 1, `<|im_end|>` 2, user 3, assistant 4, the newline 5, so `opening` is `[1, 4, 5]`. The
# conversation 1 3 5 6 2 5 1 4 5 7 8 2 5 has twelve labels; three of them count: 7, 8 and the 2 behind them.
#
# **Exercise.** Return for each label whether it counts. An answer begins behind `opening`, and `end` is the id that the
# server waits for. `opening` has one or more ids, of which no user can write all (its first is a special token); the
# others may stand anywhere. A row may be cut in the middle of an answer: what is there counts.

# %%
# %%exercise spoken
def spoken(ids: list[int], opening: list[int], end: int) -> list[bool]:
    """For each of ids[1:] whether the loss counts it."""
    ### BEGIN SOLUTION
    counts, inside = [], False
    for at, token in enumerate(ids):
        counts.append(inside)
        if inside:
            inside = token != end
        else:
            inside = ids[: at + 1][-len(opening) :] == opening
    return counts[1:]
    ### END SOLUTION


# %%
check("spoken")

# %% [markdown]
# minimegatron finds the same tokens in another way: it lets the template write the conversation with and without each
# turn, and takes the difference. So it needs no `opening`, and refuses a template that changes earlier turns.

# %%
# %%needs spoken
from course.figures.posttraining import tokens_that_count

encoded = template.encode(CHAT)
opening, stop = tokenizer.tokenize("<|im_start|>assistant\n"), tokenizer.eod
mine = spoken(list(encoded.ids), opening, stop)
print("as minimegatron's:", mine == list(encoded.counts[1:]), f"  {sum(mine)} of {len(mine)} labels count")
shown = [fast.id_to_token(token).replace("Ċ", "\\n").replace("Ġ", " ") for token in encoded.ids]
tokens_that_count(shown, [False, *mine], begins="<|im_start|>")

# %% [markdown]
# Three things go wrong with this mask in practice, and each has been in a published trainer. The *first* token of an
# answer is lost, because somebody masks ids in place of labels: the model never learns how to begin. The *stop* token is
# lost, because it is also the padding token, and padding is masked: the model never stops. And the whole mask is lost,
# when somebody tidies up: the model learns to ask its users' questions. You see each of them at once, if you look where
# the loss has a gradient.

# %%
# %%needs spoken
import torch
import torch.nn.functional as F

ids = torch.tensor(encoded.ids)
logits = torch.randn(len(ids) - 1, tokenizer.vocab_size, generator=torch.Generator().manual_seed(0)).requires_grad_()
losses = F.cross_entropy(logits, ids[1:], reduction="none")
(losses * torch.tensor(mine)).sum().backward()
moved = (logits.grad.abs().amax(1) > 0).nonzero().flatten().tolist()
print("labels whose logits have a gradient:", [shown[at + 1] for at in moved])

# %% [markdown]
# ### Adapters over tp
#
# u = x Aᵀ has r numbers a token. Remember f and g of lab 02: f passes on what every rank has, and sums its gradient; g
# sums what each rank has a share of, and passes on the gradient.
#
# > **column**: x is the same on every rank, A whole, and B has this rank's rows of the output.
# >
# > **row**: x and A have this rank's features, B is whole, and so is y.
#
# What is added to y is (α/r) u Bᵀ. Ask of u, and of each gradient: has this rank the whole of it, or a share? Four
# tensors have a gradient, and one sum of r numbers a token is enough for each of the two layers. It is easy to place it
# so that y is right, and the copies of a whole matrix learn something else on every rank.
#
# An example: one token x = (1 2), A = (3 4), B has the rows 5 and 6, the scale α/r is 2. u = 11, and what is added is
# (110 132). If its gradient is 1 everywhere, A's gradient is (22 44).
#
# **Exercise.** Both layers' additions. `collectives` has f (`copy_to_region`) and g (`reduce_from_region`). Autograd
# must find all gradients: those of x, of A and of B, complete for what the rank holds. A gradient must not need a sum
# afterwards. The layer's own product x Wᵀ, with its f or g, is computed elsewhere.

# %%
# %%exercise adapter
import torch
import torch.nn.functional as F

from minimegatron.comm.collectives import copy_to_region, reduce_from_region


def column_adapter(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, tp) -> torch.Tensor:
    """x [s, b, i], the same on all ranks; a [r, i] whole; b [o/t, r] -> what is added to this rank's y, [s, b, o/t]."""
    ### BEGIN SOLUTION
    u = copy_to_region(F.linear(x, a), tp)
    return scale * F.linear(u, b)
    ### END SOLUTION


def row_adapter(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, tp) -> torch.Tensor:
    """x [s, b, i/t]; a [r, i/t]; b [o, r] whole -> what is added to y, [s, b, o], the same on all ranks."""
    ### BEGIN SOLUTION
    u = reduce_from_region(F.linear(x, a), tp)
    return scale * F.linear(u, b)
    ### END SOLUTION


# %%
check("adapter")

# %% [markdown]
# Now in a Llama of two layers on two ranks: your additions in the place of the package's, and each gradient beside that
# of the same model in one process. Then the same with f and g around x and y, where they also look right.

# %% jupyter={"source_hidden": true}
# %%ranks 2 --needs adapter --name adapters
import types

import torch
from exercises.adapter import column_adapter, row_adapter

from minimegatron.comm.collectives import copy_to_region, reduce_from_region
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.lora import adapted
from minimegatron.layers.param import layout_of
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config

config = family_config("llama", num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2,
                       vocab_size=64, lora_rank=4, lora_target_modules=("linear_proj", "linear_fc2", "linear_qkv"))  # fmt: skip
ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))


def begun(mesh):
    """A model whose B are no longer 0; the numbers of a matrix are the same on any mesh."""
    model, g = build_model(config, mesh, 1), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, lora in adapted(model):
            b, layout = lora.lora_B, layout_of(lora.lora_B)
            b.copy_(mine_of(0.3 * torch.randn(layout.shape, generator=g), layout))
    return model


def mine_of(whole, layout):
    """This rank's part of a whole matrix."""
    here = layout.parts[layout.rank] if layout.dim is not None and layout.parts else [(0, whole.shape[layout.dim or 0])]
    return torch.cat([whole.narrow(layout.dim or 0, a, z - a) for a, z in here], layout.dim or 0)


def step(model):
    model(ids[:, :-1], labels=ids[:, 1:]).mean().backward()
    return model


def yours(lora, x):
    add = column_adapter if lora.is_column else row_adapter
    return add(x, lora.lora_A, lora.spread(), lora.scale, lora.tp)


def around(lora, x):
    if lora.is_column:
        return lora.scale * copy_to_region(x, lora.tp) @ lora.lora_A.T @ lora.spread().T
    return reduce_from_region(lora.scale * x @ lora.lora_A.T @ lora.spread().T, lora.tp)


serial = dict(step(begun(Mesh.serial())).named_parameters())
mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=2))
for title, addition in (("yours", yours), ("f before A, g behind B", around)):
    model = begun(mesh)
    for _, lora in adapted(model):
        lora.forward = types.MethodType(addition, lora)
    wrong, trained = {}, [(name, p) for name, p in step(model).named_parameters() if "lora_" in name]
    for name, p in trained:
        want = mine_of(serial[name].grad, layout_of(p))
        if not torch.allclose(p.grad, want, rtol=1e-3, atol=1e-3 * float(want.abs().max())):
            what = "qkv" if "qkv" in name else "row layers"
            wrong.setdefault(f"{name[-6:]} of {what}", []).append(name)
    said = ", ".join(f"{len(names)} {what}" for what, names in sorted(wrong.items())) or "none"
    print(f"{title:24} wrong gradients, of {len(trained)}: {said}")

# %% [markdown]
# In the second model every output is right, and so is the loss. The wrong ones are just those matrices that each rank
# holds whole. Their copies drift apart from the first step on: a checkpoint then has one rank's copy, and a model that
# no rank has trained. (With sequence parallelism the same matrices see this rank's tokens only. There
# their gradients are parts, and are summed with those of the norms, as in lab 02.)
#
# After training, W + (α/r) B A can take the place of W, and an answer costs no second product. That is exact in fp32. In
# bf16 a number has 8 significant bits. What is left of a change that is small beside the weight?

# %%
import torch

g = torch.Generator().manual_seed(3)
weight = (0.02 * torch.randn(512, 512, generator=g)).bfloat16()
for size in (1e-3, 1e-4, 1e-5):
    change = size * torch.randn(512, 512, generator=g)
    merged = (weight.float() + change).bfloat16()
    lost = (merged == weight).float().mean()
    kept = ((merged.float() - weight.float()) - change).norm() / change.norm()
    print(f"a change of {size / 0.02:.2%} of the weight: more than half of the weights unchanged: {bool(lost > 0.5)!s:5}"
          f"  the change that arrives is off by more than a fifth: {bool(kept > 0.2)}")  # fmt: skip

# %% [markdown]
# So a merged adapter that did little is mostly rounded away: merge in fp32, and round once, or serve the adapter beside
# the weights.
#
# *This is a good place to stop: the end of part B.*
#
# ### Pairs
#
# People cannot say how good an answer is, but which of two is better. DPO learns from such pairs directly. Its model
# of an answer's worth is how much likelier the policy finds it than a frozen *reference* does, the model as it was:
#
# > d(y) = Σ over the tokens of y: log π(yₜ) - log πref(yₜ)
# >
# > margin = β (d(chosen) - d(rejected))         loss = -log sigmoid(margin)
#
# An answer counts as a whole: the sum over its tokens, not their mean.
#
# The gradient goes back along this chain: from the loss to the margin, from the margin to each answer's sum, from there to
# a token's log-probability, and from that to all the logits that the token was predicted from. Find the factor of each
# link. Which one is small for a pair that is settled? Which one pushes down every word that was not said?
#
# An example: two words, all logits 0, one token each. The chosen answer is word 0, the rejected one word 1, β = 1, and the
# reference is the policy. The margin is 0, the loss log 2 = 0.69. The factor is -½. In the row of the chosen answer the
# gradient is -½ · (1 - ½, -½) = (-¼, ¼); in the other row it is ½ · (-½, 1 - ½), the same numbers: here both answers
# are arguments for word 0.
#
# **Exercise.** The loss and its gradient with respect to all logits, by hand, without autograd. Row 0 is the chosen
# answer, row 1 the rejected one. The label -100 marks tokens that do not count, those of the prompt and padding; what the
# reference has there may be anything, -∞ as well. A margin may be -300 or 300.

# %%
# %%exercise dpo
import torch
import torch.nn.functional as F


def dpo(
    logits: torch.Tensor, labels: torch.Tensor, reference: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [2, s, V], labels [2, s], reference [2, s] log-probabilities of labels -> loss, gradient [2, s, V]."""
    ### BEGIN SOLUTION
    counts, words = labels != -100, labels.clamp(min=0)
    log_p = logits.log_softmax(-1)
    taken = log_p.gather(-1, words[..., None]).squeeze(-1)
    chosen, rejected = torch.where(counts, taken - reference, 0.0).sum(1)
    margin = beta * (chosen - rejected)
    pull = beta * torch.sigmoid(-margin) * (F.one_hot(words, logits.shape[-1]) - log_p.exp())
    sign = torch.tensor([-1.0, 1.0], dtype=logits.dtype)[:, None, None]
    return -F.logsigmoid(margin), sign * pull * counts[..., None]
    ### END SOLUTION


# %%
check("dpo")

# %% [markdown]
# What the factor does, over the margin. And a question: the answers "12" and "13" begin with the same token, behind the
# same prompt. How large is the gradient that the two answers together give to the logits of the first token, in percent
# of the one that they give to those of the second?

# %%
guess("first", None, "The shared first token: its gradient, in percent of the second token's?")

# %%
# %%needs dpo
import torch

from course.figures.posttraining import curves

margins = [x / 4 for x in range(-24, 25)]
found = [dpo(torch.zeros(2, 1, 2), torch.tensor([[0], [1]]), torch.tensor([[-0.6931472 - m], [-0.6931472]]), 1.0)
         for m in margins]  # fmt: skip
g = torch.Generator().manual_seed(4)
shared, behind = torch.randn(1, 5, generator=g), torch.randn(1, 5, generator=g)
logits = torch.stack([torch.cat([shared, behind])] * 2)  # the same model, so the same numbers behind the same tokens
labels = torch.tensor([[1, 2], [1, 3]])
_, grad = dpo(logits, labels, logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0], 0.1)
first, second = grad.sum(0).norm(dim=-1).tolist()  # both rows come from the same parameters
guessed("first", round(100 * first / second, 3), "percent")
curves({"the loss": {"": [float(loss) for loss, _ in found]},
        "a logit's gradient": {"of the chosen answer": [float(grad[0, 0, 0]) for _, grad in found],
                               "of the rejected one": [float(grad[1, 0, 1]) for _, grad in found]}},
       xs=margins, xlabel="margin, with β = 1")  # fmt: skip

# %% [markdown]
# Where two answers say the same, they cancel: DPO teaches nothing about it. Learned is where they part, and what each says
# from there on.
#
# At the first step the policy is the reference: every margin is 0, the loss is log 2, and each token of the chosen answer
# is pulled as strongly as one of the rejected answer is pushed. A first loss that is not log 2 means that the reference is
# another model, or sees another prompt, or has dropout on. That test costs nothing, and section 4 makes it.
#
# ### Rewards
#
# Where a program can say whether an answer is right, no pairs are needed: the model answers, and is told. But a reward has
# no gradient. What has one is the probability of the answer that was drawn. If each answer's log-probability is pushed
# up by its *advantage*, the expected reward rises. GRPO takes as advantage how much better an answer is than the others to
# the same prompt, so it needs no second model that predicts rewards.
#
# | way | the advantage of reward R in a group of n |
# |---|---|
# | `centred` | R - mean |
# | `group` | (R - mean) / (s + 0.0001), s the group's standard deviation with n - 1 |
# | `others` | R - the mean of the *other* n - 1 |
#
# A program that runs for hours loses answers: a sandbox times out, an episode is too long. So groups have different sizes,
# and an answer may be the only one left of its group. It is compared with nobody: its advantage is 0.
#
# An example: rewards 1, 0, 0, 0. The mean is ¼, s = ½. By `group` the advantages are 1.5, -0.5, -0.5, -0.5 (nearly).
# By `others` the first is compared with 0: 1, -⅓, -⅓, -⅓.
#
# **Exercise.** The advantage of each answer. `prompts` says which prompt each answer is for, in any order.

# %%
# %%exercise advantages
import torch


def advantages(rewards: torch.Tensor, prompts: torch.Tensor, way: str) -> torch.Tensor:
    """rewards [N], prompts [N] whole numbers -> [N]."""
    ### BEGIN SOLUTION
    found = torch.zeros_like(rewards)
    for prompt in prompts.unique():
        here = prompts == prompt
        group, n = rewards[here], int(here.sum())
        if n < 2:
            continue
        centred = group - group.mean()
        if way == "group":
            centred = centred / (group.std() + 1e-4)
        if way == "others":
            centred = centred * n / (n - 1)
        found[here] = centred
    return found
    ### END SOLUTION


# %%
check("advantages")

# %% [markdown]
# Groups of eight answers by a model that is right with the chance p.

# %%
# %%needs advantages
import torch

g = torch.Generator().manual_seed(5)
for chance in (0.02, 0.5, 0.9):
    rewards = (torch.rand(4000, 8, generator=g) < chance).float()
    mine = advantages(rewards.flatten(), torch.arange(4000).repeat_interleave(8), "group").view(4000, 8)
    useful = float((mine.abs().amax(1) > 0.01).float().mean())
    expected = 1 - chance**8 - (1 - chance) ** 8
    print(f"right {chance:3.0%} of the time: {expected:4.0%} of the groups are mixed by 1 - pⁿ - (1-p)ⁿ;",
          "counted: the same within 3 %:", abs(useful - expected) < 0.03)  # fmt: skip
guessed("useful", round(100 * (1 - 0.02**8 - 0.98**8), 1), "of 100")

# %% [markdown]
# Groups whose rewards are all equal have advantage 0: their answers cost as much as any others, and teach nothing. That
# is why prompts are chosen that the model sometimes solves (DAPO draws until every group is mixed), and why examples come
# before rewards.
#
# ### Ratio and clip
#
# Drawing is slow, so a batch of answers serves several updates. From the second on, the policy is not the one that drew
# them. PPO's loss accounts for it by the *ratio* r = π(y)/π_old(y) of a token, and stops where r has moved far
# enough:
#
# > loss = - min( r A, clip(r, 1 - low, 1 + high) A )
#
# For A > 0 the loss is flat where r > 1 + high: the token has become likely enough, and has no gradient there. For A < 0 it
# is flat where r < 1 - low. The other side is not clipped: a token with A > 0 that has become less likely, or one with
# A < 0 that has become likelier, keeps its gradient, however far r has moved. At the first update r is 1 and the gradient with respect to log π(y) is -A. If a program takes r from two
# *detached* numbers, r is 1, the loss is the same to the last digit, and there is no gradient at all.
#
# GSPO has one ratio for an answer, the geometric mean of its tokens' ratios: then it is answers that are clipped. What
# is the gradient of one of its n tokens? All tokens share the ratio, so a token moves the loss of each of them.
#
# An example: two tokens with A = ½. The first has become twice as likely, the second is as it was. Token by token the
# ratios are 2 and 1, and with high = 0.2 the losses are -0.6 and -0.5. By answer both have the ratio √2.
#
# Rows are padded. Outside of `mask` there is nothing: `log_probs` may be -∞ or NaN there.
#
# **Exercise.** The loss of each token, 0 where the mask is 0. Autograd must find its gradient. `level` is "token" or
# "sequence"; for the second, all tokens that a row has in `mask` are one answer.

# %%
# %%exercise policy_loss
import torch


def policy_loss(
    log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor,
    low: float, high: float, level: str,
) -> torch.Tensor:  # fmt: skip
    """All tensors [b, s]; mask 1.0 for tokens that were drawn -> the loss of each token, [b, s]."""
    ### BEGIN SOLUTION
    moved = (log_probs - old).masked_fill(mask == 0, 0.0)
    if level == "sequence":
        drawn = mask.sum(1, keepdim=True).clamp(min=1)
        moved = (moved.sum(1, keepdim=True) / drawn).expand_as(moved)
    ratio = moved.exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return -gain.masked_fill(mask == 0, 0.0)
    ### END SOLUTION


# %%
check("policy_loss")

# %% [markdown]
# Loss and gradient of one token over its ratio, low = 0.2 and high = 0.28 (DAPO's *clip-higher*, which leaves a rare
# token more room to become likely).

# %%
# %%needs policy_loss
import torch

from course.figures.posttraining import curves

ratios = [0.4 + 0.02 * i for i in range(76)]
found = {}
for a in (1.0, -1.0):
    moved = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    ones = torch.ones_like(moved)
    losses = policy_loss(moved, torch.zeros_like(moved), a * ones, ones, 0.2, 0.28, "token")
    losses.sum().backward()
    found[f"A = {a:+.0f}"] = {"loss": losses[0].tolist(), "gradient": moved.grad[0].tolist()}
curves(found, xs=ratios, xlabel="ratio")

# %% [markdown]
# Clipping has one side for each sign. A bad token (A = -1) that has become *likelier* keeps its gradient, and the larger
# its ratio, the stronger it is: that side has no limit. Some trainers add one.
#
# Losses of tokens become one number in one of the four ways of section 2, under these names:
#
# | GRPO's papers | section 2 | so |
# |---|---|---|
# | `dapo` | tokens | every token of the step weighs the same |
# | `grpo` | rows | a token of a long answer weighs less |
# | `bnpo` | microbatches | depends on how the step was cut |
# | `dr_grpo` | padding, with the longest length that is allowed in place of the width | weighs the same, whatever is drawn |
#
# By `grpo` a wrong answer of 1,000 tokens is punished as much as one of 10 tokens, so each of its tokens a hundred times
# less. A model that has nothing right to say learns to say it at length. That looks like longer thoughts, and some of the
# celebrated growth of answers was this divisor (Liu et al. 2025).
#
# ### How far from home
#
# The policy should stay near the reference, else it finds answers that the reward likes and nobody else does. The distance
# is the divergence KL = Σ π(x) (log π(x) - log πref(x)). Over whole answers nobody can sum, so it is estimated from the
# tokens x that were drawn from π. With d = log πref(x) - log π(x), three estimates are in use:
#
# > k1 = -d          k2 = d² / 2          k3 = eᵈ - d - 1
#
# As *numbers* k1 and k3 have the right mean, and k3 is never negative. But a trainer puts them into a loss, and
# differentiates. By then the tokens have been drawn: the gradient of the estimate is taken for each x as it is, and these
# gradients are averaged over the draws, x with the chance π(x). Where do the three lead?
#
# An example: two words, π = ½, ½ and πref = ¼, ¾. d is -0.693 for the first word, 0.405 for the second. The mean of
# k1 is ½ · 0.693 - ½ · 0.405 = 0.144; that is KL. The mean gradient of k3 with respect to the two logits is (0.25, -0.25).
#
# **Exercise.** For each estimate the exact mean over all words, and the exact mean of its gradient with respect to the
# policy's logits.

# %%
# %%exercise kl_estimates
import torch


def kl_estimates(policy: torch.Tensor, reference: torch.Tensor) -> dict[str, tuple]:
    """Logits [V] of both -> {"k1": (mean, mean of the gradients [V]), "k2": ..., "k3": ...}."""
    ### BEGIN SOLUTION
    log_p, log_ref = policy.log_softmax(0), reference.log_softmax(0)
    p, d = log_p.exp(), log_ref - log_p
    values = {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - d - 1}
    slopes = {"k1": torch.ones_like(d), "k2": -d, "k3": 1 - d.exp()}  # with respect to log p(x)
    scores = torch.eye(len(p), dtype=p.dtype) - p  # row x: the gradient of log p(x)
    return {name: ((p * values[name]).sum(), (p * slopes[name]) @ scores) for name in values}
    ### END SOLUTION


# %%
check("kl_estimates")

# %%
# %%needs kl_estimates
import torch

g = torch.Generator().manual_seed(6)
policy, reference = (torch.randn(6, generator=g, dtype=torch.float64) for _ in range(2))
z = policy.clone().requires_grad_()
towards = (z.softmax(0) * (z.log_softmax(0) - reference.log_softmax(0))).sum()
towards.backward()
other = policy.softmax(0) - reference.softmax(0)
for name, (mean, slope) in kl_estimates(policy, reference).items():
    says = [what for what, want in (("0", 0 * other), ("the gradient of KL(π, ref)", z.grad), ("π - πref", other))
            if torch.allclose(slope, want, atol=1e-9)]  # fmt: skip
    right = torch.allclose(mean, towards, atol=1e-9)
    print(f"{name}: the mean is KL: {bool(right)!s:5}  the mean gradient is {' and '.join(says)}")

# %% [markdown]
# k1, the best estimate as a number, does nothing at all in a loss: that the model is drawn from has been forgotten. (In the
# *reward* it is right: there the draw is what is learned from.) k2, the biased one, has the gradient of KL. GRPO's k3 pulls
# with π - πref: that is the gradient of the divergence the other way round, KL(πref, π), and a fine pull towards the
# reference as well. A number that is right says nothing about its gradient.
#
# *This is a good place to stop: the end of part C.*
#
# ## 4 · Run
#
# ### First by examples
#
# A small model learns to add two numbers of one digit: `7+5=`, and the answer `12`. minimegatron has this as an
# *environment*: prompts, and a program that compares the answer with the sum. First by examples, and bad ones: for each
# sum there is one line with the right answer and one with a wrong one. The model learns what an answer looks like, and
# cannot know whom to believe. Everything here is what `minimegatron sft`, `dpo` and `grpo` do.

# %% jupyter={"source_hidden": true}
import json
import math
import shlex
import tempfile

from minimegatron.posttraining.environments import environment
from minimegatron.posttraining.tasks import TASKS
from minimegatron.training.arguments import parse_args
from minimegatron.training.build import build_trainer

place = tempfile.TemporaryDirectory()
MODEL = ("--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --tokenizer-type ByteLevelTokenizer "
         "--normalization RMSNorm --attention-dropout 0 --hidden-dropout 0 --lr-decay-style constant")  # fmt: skip
BASE = f"--load {place.name}/base --use-checkpoint-args --finetune --lr-decay-style constant"
SUMS = ("--environment sums --grpo-prompts-per-step 64 --grpo-group-size 8 --rl-max-num-seqs 512 --max-completion-length 3 "
        "--global-batch-size 256 --micro-batch-size 256 --grpo-kl-beta 0.001 --lr 5e-4")  # fmt: skip


def trained(name, line, task=None, seed=1234):
    """A run of a task; `line` has the flags of the command."""
    run = parse_args(shlex.split(f"{line} --seed {seed}"), 1, task=name)
    trainer = build_trainer(run, task=task or TASKS[name], quiet=True)
    try:
        trainer.train()
    finally:
        trainer.close()
    return trainer


def written(name, lines):
    """A file of lines, for --data-path."""
    with open(f"{place.name}/{name}.jsonl", "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return f"--data-path {place.name}/{name}.jsonl --split 100"


problems = environment("sums").problems(held_out=False)
wrong = {p.prompt: str((int(p.answer) + 1 + i % 17) % 19) for i, p in enumerate(problems)}
lines = [{"prompt": p.prompt, "completion": said} for p in problems for said in (p.answer, wrong[p.prompt])]
sft = trained("sft", f"{MODEL} {written('sums', lines)} --global-batch-size 80 --micro-batch-size 80 --lr 3e-3 "
              f"--train-iters 150 --save {place.name}/base")  # fmt: skip
losses = [report.losses["lm loss"] for report in sft.history]
print(f"{len(problems)} sums, {len(lines)} lines; the loss has fallen by more than half:", losses[-1] < 0.5 * losses[0])

# %% [markdown]
# ### By pairs
#
# The same model, and somebody says for each sum which of the two answers is better. The first loss is the test of section
# 3. Then look at the two curves: what becomes of the *chosen* answers' log-probabilities while the loss falls?

# %%
from course.figures.posttraining import curves

pairs = written("pairs", [{"prompt": p.prompt, "chosen": p.answer, "rejected": wrong[p.prompt]} for p in problems])
dpo_run = trained("dpo", f"{BASE} {pairs} --beta 0.1 --global-batch-size 40 --micro-batch-size 40 --lr 1e-3 "
                  "--train-iters 16 --lr-warmup-iters 0")  # fmt: skip
history = [report.losses for report in dpo_run.history]
print("the first loss is log 2:", abs(history[0]["dpo loss"] - math.log(2)) < 1e-4)
curves({"loss": {"": [one["dpo loss"] for one in history]},
        "β d(y)": {"chosen": [one["chosen reward"] for one in history],
                   "rejected": [one["rejected reward"] for one in history]},
        "share of pairs in order": {"": [one["chosen preferred"] for one in history]}})  # fmt: skip

# %% [markdown]
# The loss sees only the margin. It falls as well if both answers become less likely, the rejected one faster; their
# probability goes to answers that stand in no pair. So a DPO run is watched by both curves, and not by its loss.
#
# ### By rewards, with your loss
#
# One step of the loop:

# %%
from course.figures.posttraining import loop

loop()

# %% [markdown]
# `GRPO` is a task of minimegatron; the trainer does the rest. Two of its parts are yours in the next cell: the
# advantages, and the loss of a token. The model begins with the bad examples' weights again. The reward is 1 for exactly
# the sum; no right answer is shown. A rollout of 512 answers serves two updates. The divergence from the reference is only
# measured here. Do you expect the entropy to rise or to fall?

# %%
# %%needs advantages policy_loss
import torch

from minimegatron.posttraining.grpo import GRPO


class Mine(GRPO):
    def __init__(self, run):
        super().__init__(run)
        given = self.policy_loss

        def loss(log_probs, old, its_advantages, mask, **more):
            _, figures = given(log_probs.detach(), old, its_advantages, mask, **more)
            return policy_loss(log_probs, old, its_advantages, mask, 0.2, 0.28, "token"), figures

        self.policy_loss = loss

    def advantages(self, state, episodes):
        rollouts, group = self.rollouts, self.config.grpo_group_size
        prompts = torch.arange(len(episodes)) // group
        its = advantages(rollouts.rewards, prompts, "group")
        rollouts.numbers["advantages"].copy_(its[:, None] * rollouts.numbers["drawn"])


# %%
# %%needs advantages policy_loss
rl = trained("grpo", f"{BASE} {SUMS} --lr-warmup-iters 5 --train-iters 50", Mine)
history = [report.losses for report in rl.history]


def risen(name, few=6):
    """How much higher the mean of the last few steps is than that of the first."""
    values = [one[name] for one in history]
    return (sum(values[-few:]) - sum(values[:few])) / few


print("the first ratio is 1:", abs(history[0]["ratio"] - 1) < 1e-5)
print("the reward has risen by more than a tenth:", risen("reward") > 0.1)
print("the entropy has fallen:", risen("entropy") < 0)

# %% [markdown]
# ## 5 · See
#
# ### A run from rewards

# %%
# %%needs advantages policy_loss
from course.figures.posttraining import curves

curves({"reward": {"": [one["reward"] for one in history]}, "entropy": {"": [one["entropy"] for one in history]},
        "k3 from the reference": {"": [one["kl"] for one in history]},
        "tokens of an answer": {"": [one["length"] for one in history]}})  # fmt: skip

# %% [markdown]
# The reward alone does not tell a model that learns from one that has found a gap in the verifier. The other three do:
# entropy that falls to 0 means that all eight answers are the same, and nothing is learned any more; a divergence that
# grows fast means that the model speaks another language by now; lengths that drift mean that the divisor, or the reward,
# likes them. Fifty steps are a beginning. `examples/grpo_sums.sh` goes on for three minutes of a core, to 95 right sums in
# 100 and more, and says what that takes: a weight of the entropy, one of the divergence, a learning rate that falls.
#
# ### Two programs, one model
#
# The answers were drawn by the engine: with other kernels, perhaps in another layout or in bf16. And with two updates for
# each rollout the second one learns from answers of older weights. So log π of the trainer and log π of the engine
# differ, and minimegatron takes the difference apart, for each token:
#
# | part | is between | because |
# |---|---|---|
# | staleness | the policy now, and when it drew | updates since |
# | dtype | the trainer's weights, and the same rounded to the engine's dtype | rounding |
# | layout | the rounded model in the trainer, and in the engine | kernels, layout, and every bug of the engine |
#
# An engine in bf16, and again two updates for each rollout. Before you run it: at which steps is there no staleness?

# %%
from course.figures.posttraining import curves

apart = trained("grpo", f"{BASE} {SUMS} --train-iters 8 --rl-inference-dtype bf16")
found = [report.losses for report in apart.history]
print("steps without staleness:", [step for step, one in enumerate(found) if one["staleness"] < 1e-6])
parts = {name: [max(one[name], 1e-8) for one in found] for name in ("staleness", "dtype gap", "layout gap")}
curves({"mean difference of a log-probability": parts}, log=True)

# %% [markdown]
# (0 is drawn at 10⁻⁸.) There is no staleness in the first update of a rollout. Rounding to bf16 is there in every step. The
# layout gap of a sound engine is some 10⁻⁷, and in bf16 a little more where once in a while a number is rounded the other
# way. Watch that line: a bug shows there in the first step, and in the reward much later, or never.
#
# What can be done about a gap that is no bug? The answers were drawn from q, the engine's distribution, and the gradient
# wants those of π. What the engine draws too seldom must count more: it gets the weight π/q. Such a weight can be huge, so
# it is limited. With C the limit:
#
# - `level` "token": the ratio of each token. "sequence": that of the whole answer, the product over its tokens.
# - `what` "truncate": a ratio above C counts as C. "mask": it counts as 0.
#
# The weights are numbers: no gradient flows through them. An answer of 2,000 tokens has a ratio that no float holds.
#
# An example: C = 3, two tokens, trainer ¼ and ½, engine ½ and ⅛. By token the ratios are ½ and 4, and weigh ½ and 3,
# or ½ and 0. By sequence it is 2 for both.
#
# **Exercise.** The weights, [b, s], 0 where the mask is 0.

# %%
# %%exercise importance
import torch


def importance(
    trainer: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor, level: str, what: str, limit: float
) -> torch.Tensor:
    """Log-probabilities of what was drawn, [b, s], of both; mask 1.0 for tokens that were drawn -> [b, s]."""
    ### BEGIN SOLUTION
    moved = (trainer - engine).detach().masked_fill(mask == 0, 0.0)
    if level == "sequence":
        moved = moved.sum(1, keepdim=True).expand_as(moved)
    q = moved.exp()
    weights = q.clamp(max=limit) if what == "truncate" else torch.where(q > limit, 0.0, q)
    return weights.masked_fill(mask == 0, 0.0)
    ### END SOLUTION


# %%
check("importance")

# %% [markdown]
# Does it help? An answer of two tokens over five words; the engine's logits are off by some noise, and each of the 25
# answers has a reward. The gradient of the expected reward, by the exact sum over all answers: as the engine draws them
# without a weight, and with each kind. Forty models.

# %%
# %%needs importance
import torch


def distances(kinds, seed):
    """How far the gradient is from the right one, without weights and with each kind."""
    g = torch.Generator().manual_seed(seed)
    policy, noise = (torch.randn(5, generator=g, dtype=torch.float64) for _ in range(2))
    p, q = policy.log_softmax(0), (policy + 0.5 * noise).log_softmax(0)
    answers = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    reward, ones = torch.rand(25, generator=g, dtype=torch.float64), torch.ones(25, 2, dtype=torch.float64)
    score = torch.eye(5, dtype=torch.float64)[answers] - p.exp()  # of each token

    def gradient(drawn, weights):
        chance = drawn[answers].sum(1).exp()
        return ((chance * reward)[:, None, None] * weights[..., None] * score).sum((0, 1))

    right = gradient(p, ones)
    weights = [ones, *(importance(p[answers], q[answers], ones, level, what, limit) for level, what, limit in kinds)]
    return [float((gradient(q, w) - right).norm()) for w in weights]


KINDS = [("token", "truncate", 1e9), ("sequence", "truncate", 1e9), ("sequence", "truncate", 2.0)]
without, *weighed = torch.tensor([distances(KINDS, seed=9 + i) for i in range(40)]).mean(0).tolist()
for (level, _, limit), far in zip(KINDS, weighed):
    print(f"{level:8} {'no limit' if limit > 9 else f'C = {limit:.0f}':8} exact: {far < 1e-9!s:5}",
          f" nearer than without weights: {far < without}")  # fmt: skip

# %% [markdown]
# The ratio of the whole answer makes the gradient exact. That of a token leaves out what was drawn before it: it is biased,
# and varies much less. That is why most trainers take the ratio of a token, often truncated.
#
# *This is a good place to stop: the end of part D.*
#
# ## 6 · Break it
#
# ### A step that depends on nothing that matters
#
# A colleague has written the loss of a fine-tuning. It falls, the model learns, slowly. "A larger learning rate will do."
# The folded cell has that loss, and eight conversations. It prints the norm of the first gradient, beside that of the first
# line, for other widths and other cuts.

# %% jupyter={"source_hidden": true}
import torch
import torch.nn.functional as F


def colleagues_loss(logits, labels, counts):
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    return (losses * counts).mean()


def first_norm(width, size, loss=colleagues_loss):
    """The norm of the first gradient, of eight rows in microbatches of `size`."""
    g = torch.Generator().manual_seed(10)
    tokens, weight = torch.randint(0, 20, (8, 129), generator=g), torch.randn(20, 20, generator=g).requires_grad_()
    lengths = torch.tensor([14, 3, 8, 5, 12, 2, 6, 10])
    counts = (torch.arange(width) < lengths[:, None]).float()
    for rows in range(0, 8, size):
        some = slice(rows, rows + size)
        logits = weight[tokens[some, :width]]
        (loss(logits, tokens[some, 1 : width + 1], counts[some]) / (8 / size)).backward()
    return float(weight.grad.norm())


for width, size in ((16, 8), (32, 8), (64, 8), (16, 4), (16, 1)):
    print(f"rows of {width}, {8 // size} microbatches: {first_norm(width, size) / first_norm(16, 8):.2f}")

# %% [markdown]
# Which of the four ways of section 2 is this? Your function knows what each of them would do.

# %%
# %%needs token_weights
lengths = [14, 3, 8, 5, 12, 2, 6, 10]
for way in ("tokens", "padding", "rows", "microbatches"):
    pushed = []
    for width, size in ((16, 8), (32, 8), (64, 8), (16, 4), (16, 1)):
        cuts = [lengths[i : i + size] for i in range(0, 8, size)]
        weights = [w for rows in token_weights(cuts, width, way) for w in rows]
        pushed.append(sum(w * n for w, n in zip(weights, lengths)))
    print(f"{way:13}", "  ".join(f"{one / pushed[0]:.2f}" for one in pushed))

# %% [markdown]
# The step is divided by all places, so it halves when the rows are twice as wide. AdamW hides most of it, since it divides
# each gradient by its own size, and weight decay and clipping then have another meaning. And where rows are as wide as the
# longest of their batch, batches with one long conversation learn less. It stood so in several trainers (Hugging Face's
# accumulation of gradients, until the end of 2024, was the way `microbatches`).
#
# ### Answers of nobody
#
# Another colleague has made rollouts faster. "Prompts come again in every rollout. Their keys and values need not be computed
# again, just because we hand over new weights." Rewards rise for a while, and then fall. The folded cell has the
# engine, three rollouts, and what the trainer says about each answer: how far log π of the trainer is from log π of the
# engine, the mean over the answer's tokens. Between two rollouts the weights move as in some steps of training. How many
# of the ten answers will be apart from what the trainer says?

# %%
guess("apart", None, "Of ten answers in three rollouts, how many have another log π in the trainer?")

# %% jupyter={"source_hidden": true}
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.inference.engine import Engine, EngineConfig
from minimegatron.inference.generate import complete
from minimegatron.inference.refit import Refit, weights_of
from minimegatron.inference.sampling import SamplingParams
from minimegatron.inference.scheduler import Scheduler
from minimegatron.inference.sequence import Request
from minimegatron.models.decoder import build_model
from minimegatron.models.families import family_config

TEXTS = [["add 7+5=", "add 3+4=", "twice 6?"], ["add 7+5=", "twice 7?", "half 8?"], ["tw", "half 8?", "add 1+1=", "6/2="]]
PROMPTS = [[list(text.encode()) for text in texts] for texts in TEXTS]
tiny = family_config("llama", num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2,
                     vocab_size=258, init_method_std=0.2)  # fmt: skip


class Hasty(Scheduler):
    def new_weights(self, version):
        """The prompts are the same, so their pages are still good."""


def gaps(scheduler_cls, seed=11):
    """For each rollout the gap of each answer."""
    policy, model = (build_model(tiny, Mesh.serial(), 1).eval() for _ in range(2))
    engine = Engine(model, EngineConfig(page_size=4, max_model_len=32), scheduler_cls=scheduler_cls)
    hand_over, g, found = Refit(weights_of(policy), engine), torch.Generator().manual_seed(seed), []
    for number, prompts in enumerate(PROMPTS):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=g))
        hand_over(weights_of(policy))
        asked = [Request(tuple(ids), 6, SamplingParams(1.0), seed=10 * number + i, log_probs=0)
                 for i, ids in enumerate(prompts)]  # fmt: skip
        found.append([])
        for ids, [made] in zip(prompts, complete(engine, asked)):
            text = torch.tensor([[*ids, *made.answer]])
            with torch.no_grad():
                logits = policy(text[:, :-1])[:, 0]
            said = logits[:, :258].log_softmax(-1).gather(1, text[0, 1:, None])[-len(made.answer) :, 0]
            found[-1].append(float((said - torch.tensor(made.log_probs)).abs().mean()))
    return found


told = gaps(Hasty)
for number, (texts, values) in enumerate(zip(TEXTS, told)):
    print(f"rollout {number}:", ",  ".join(f"{text!r} {'apart' if value > 1e-3 else 'the same'}"
                                          for text, value in zip(texts, values)))  # fmt: skip
guessed("apart", sum(value > 1e-3 for values in told for value in values), "of 10")

# %% [markdown]
# Three suspects. Another temperature in the engine would show in every answer. Rounding would, too, and a little. What
# else is there in an engine that some answers use and others do not? Look at which prompts are apart, and which are not:
# `twice 7?` and `half 8?`, in their first rollout and in the next; `tw`. A token is a byte here, and a page has 4 tokens.
#
# **Exercise.** Say it as a function that predicts. For each prompt of each rollout: of how many of its tokens does the
# engine use keys and values that older weights have computed? `rollouts` are lists of prompts (lists of ids), in pages of
# `size`. The prompts of one rollout are computed together. The engine computes at least the last token of a prompt anew,
# and no prompt continues an earlier answer.

# %%
# %%exercise old_tokens
def old_tokens(rollouts: list[list[list[int]]], size: int) -> list[list[int]]:
    """For each rollout a list: for each of its prompts a number of tokens."""
    ### BEGIN SOLUTION
    kept, found = set(), []
    for prompts in rollouts:
        found.append([])
        for prompt in prompts:
            n = 0
            while n + size < len(prompt) and tuple(prompt[: n + size]) in kept:
                n += size
            found[-1].append(n)
        for prompt in prompts:
            kept |= {tuple(prompt[:end]) for end in range(size, len(prompt) + 1, size)}
    return found
    ### END SOLUTION


# %%
check("old_tokens")

# %% [markdown]
# Your prediction beside the evidence, and then beside the package's scheduler, which gives pages of older weights another
# name: nobody finds them.

# %%
# %%needs old_tokens
from course.figures.posttraining import bars_of_rows

predicted = old_tokens(PROMPTS, 4)
sound = gaps(Scheduler)
pairs = [(old > 0, value > 1e-3) for olds, values in zip(predicted, told) for old, value in zip(olds, values)]
print(f"as predicted: {sum(a == b for a, b in pairs)} of {len(pairs)} answers; tokens of older weights: {predicted}")
print("with the package's scheduler no answer is apart:", max(max(values) for values in sound) < 1e-4)
names = [f"{n}{'abcd'[i]}" for n, texts in enumerate(TEXTS) for i in range(len(texts))]
shown = {"pages are kept": told, "the package's": sound}
bars_of_rows({name: [value for values in found for value in values] for name, found in shown.items()}, names,
             what="|log π - log π engine|", rows="rollout and answer")  # fmt: skip

# %% [markdown]
# Such an answer is drawn by a model that does not exist: its first pages from one set of weights, the rest from another. The
# trainer then learns from a ratio that is wrong by what the weights have moved, which grows with every rollout. Frameworks
# have had this bug: issue 9744 of vLLM asks for a way to empty its cache after new weights (2024), pull request 3640 of
# ms-swift empties it (2025), and pull requests 2270 of prime-rl and 4018 of NeMo RL (2026) tell of trainer and engine whose
# log-probabilities moved apart from step to step. The reward shows it late. A line of the log with the mean of
# |log π - log π engine| shows it in the first rollout that finds an old page.
#
# ## 7 · Explain
#
# Questions that an interviewer asks. Say your answer aloud before you open the one here.
#
# 1. *After fine-tuning a model answers well and never stops. Where do you look first?*
#    <details><summary>answer</summary>At the mask of the stop token. It is masked if it is also the padding token and
#    padding is masked by its id; or if the template writes it into the next turn. Or the server waits for another
#    stop token than the template's.</details>
# 2. *LoRA under tp 8: which gradients must be summed over ranks, and which bytes travel?*
#    <details><summary>answer</summary>None of A or B, if the sum is made on the r numbers a token between them: forward
#    for a row layer, backward for a column layer. Summing afterwards the gradients of what is whole, A beside a column
#    layer and B beside a row layer, is right, too. It costs bytes of the matrices once a step, and must not be
#    forgotten.</details>
# 3. *Your first DPO loss is 0.9. What is wrong?*
#    <details><summary>answer</summary>It must be log 2 = 0.693, since policy and reference are the same. So they are not:
#    dropout in one of them, another dtype, another checkpoint, another chat template or truncation, or means in place of
#    sums in one of the two.</details>
# 4. *The DPO loss falls, and so do the log-probabilities of the chosen answers. Is that a bug?*
#    <details><summary>answer</summary>No: the loss knows only the difference. It is a reason to look at both, to take a
#    smaller learning rate or larger β, or to add the cross entropy of the chosen answer.</details>
# 5. *In GRPO all rewards of a group are 1. What does this group do?*
#    <details><summary>answer</summary>Nothing: its advantages are 0. But it counts in some divisors, so the step of the
#    others gets smaller. A divergence or an entropy in the loss acts on it all the same.</details>
# 6. *Answers get longer while the reward stays. Name two causes in the loss.*
#    <details><summary>answer</summary>Each answer's loss is divided by its own length: long wrong answers are punished less
#    a token. And an answer that is cut at the longest length has no reward and, in some trainers, is masked: then nothing
#    punishes it at all.</details>
# 7. *The ratio of the first update is not 1. What does that say?*
#    <details><summary>answer</summary>The log-probabilities that the loss compares are not of the same program, weights,
#    dtype, temperature or mask. Often the engine's are taken as those of the old policy. Then the clip acts on rounding,
#    and the gap belongs into a weight beside it.</details>
# 8. *Why is k3 put into a loss if k1 is the unbiased estimate?*
#    <details><summary>answer</summary>k1's gradient is 0 on average, with nothing but noise. k3's pulls towards the
#    reference, with π - πref. What you want in the loss is a gradient, and an estimate promises only a value.</details>
# 9. *When do you take DPO, when GRPO?*
#    <details><summary>answer</summary>DPO where there are pairs, and no program that judges: it costs what fine-tuning
#    costs, and learns nothing beyond the answers in its pairs. GRPO where a verifier exists: it needs an engine and many
#    draws, and finds answers that nobody wrote. It must solve some problems already, else all groups are equal.</details>
# 10. *PPO has a value head, GRPO has a group. What does each buy?*
#    <details><summary>answer</summary>The head predicts the reward at every token, so a token is judged by what came
#    after it, and one answer a prompt is enough; it is one more network to train, which is wrong at first. The group
#    needs nothing of its own but more answers, and gives all tokens of an answer the same advantage.</details>

# %%
progress()

# %% [markdown]
# ## Where this lives
#
# | here | minimegatron | Megatron-LM | TRL | verl |
# |---|---|---|---|---|
# | which tokens count | `posttraining/conversations.py`, `rows.py` | `training/datasets/sft_dataset.py` | `data_utils.py`, `chat_template_utils.py` | `utils/dataset/multiturn_sft_dataset.py` |
# | LoRA over tp | `layers/lora.py`; `checkpoint/peft.py` | Megatron-Bridge, `peft/lora.py` | PEFT | PEFT |
# | pairs | `posttraining/dpo.py`, `preferences.py` | | `trainer/dpo_trainer.py` | |
# | advantages, clip, divisors, k3 | `posttraining/policy.py`, `grpo.py`, `ppo.py` | `megatron/rl/rl_utils.py` | `trainer/grpo_trainer.py` | `trainer/ppo/core_algos.py` |
# | rollouts, the gap and its causes | `posttraining/rollouts.py` | `megatron/rl/rl_utils.py` | `vllm_importance_sampling_mode` of `GRPOConfig` | `trainer/ppo/rollout_corr_helper.py` |
# | new weights, old pages | `inference/refit.py`, `scheduler.py` | `core/resharding/refit.py` | | `workers/rollout/` |
# | commands | `minimegatron sft`, `lora`, `dpo`, `reward`, `grpo`, `ppo`, `distill` | `train_rl.py` | `trl sft`, `trl grpo` | |
#
# Hu et al. 2021, LoRA (arXiv 2106.09685); Rafailov et al. 2023, Direct preference optimization (2305.18290); Schulman et
# al. 2017, PPO (1707.06347); Schulman 2020, Approximating KL divergence; Shao et al. 2024, DeepSeekMath, for GRPO
# (2402.03300); Yu et al. 2025, DAPO (2503.14476); Liu et al. 2025, Understanding R1-Zero-like training, for the length
# (2503.20783); Zheng et al. 2025, GSPO (2507.18071); Yao et al. 2025, Your efficient RL framework secretly brings you
# off-policy RL training, for the weights.
#
# Lab 12 plans a run of any of these.

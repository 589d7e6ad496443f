"""A run: its data, its length and log, its checkpoints; and `RunConfig`, all configurations of a run together.

Each configuration checks itself. What must hold between them is checked in `training/rules`.

Megatron-LM: `GPTDatasetConfig` in `megatron/core/datasets/gpt_dataset.py`, `megatron/training/config`,
`add_checkpointing_args` in `megatron/training/arguments.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from minimegatron.config.fields import BAD_STEP, HOW, OBSERVED, RUN, Config, Kind, elsewhere, free, opt
from minimegatron.config.model import TransformerConfig
from minimegatron.config.optimizer import OptimizerConfig
from minimegatron.config.parallel import ParallelConfig
from minimegatron.config.posttraining import TASKS
from minimegatron.config.same_model import unmet
from minimegatron.errors import did_you_mean, require

# Compared by what they lead to.
DATA = elsewhere("training data: the files' contents, shares, documents")
TOKENIZER = elsewhere("tokenizer: which text has which ids")
SIZES = elsewhere("global_batch_size: all sizes that the run has")
# May be others.
LENGTH = free(
    "how long a run is changes no step of it; where the schedule follows from the length, the schedule compares it"
)
EVALUATED = free("an evaluation leaves no trace in the training")
CHECKPOINT = free("where, when and which checkpoints are written and read")
PLACE = free("where files lie; what they hold is compared")
CORPORA = ("stdlib", "stdlib-code", "stdlib-docs")


@dataclasses.dataclass(frozen=True)
class DataConfig(Config):
    """The data: files, splits and the order of samples."""

    data_path: tuple[str, ...] = opt(DATA, (), "prefix of .bin/.idx, or weight prefix weight prefix ...")
    split: str = opt(DATA, "969,30,1", "shares of train, validation and test documents")
    train_data_path: tuple[str, ...] = opt(DATA, (), "like data_path, for the training set alone; then no split")
    valid_data_path: tuple[str, ...] = opt(EVALUATED, (), "like data_path, for the validation set alone")
    test_data_path: tuple[str, ...] = opt(EVALUATED, (), "like data_path, for the test set alone")
    data_args_path: str | None = opt(DATA, None, "file that holds what data_path would be given")
    mock_data: bool = opt(RUN, False, "synthetic, learnable tokens; no file is read")
    corpus: str | None = opt(
        DATA,
        None,
        "stdlib, stdlib-code or stdlib-docs: Python's standard library, which every machine has, its sources and "
        "docstrings, or one of the two; hf:OWNER/NAME, hf:OWNER/NAME/CONFIG:SPLIT, hf:FOLDER: the beginning of a data "
        "set of the Hugging Face hub, or of files of this machine",
    )
    corpus_key: str = opt(DATA, "text", "of a data set hf:...: the column that holds the text")
    corpus_megabytes: float = opt(DATA, 100.0, "of a data set hf:...: how much text is read of it", above=0)
    corpus_path: str = opt(
        PLACE,
        ".corpus",
        "folder in which the corpus, its tokenizer and its tokens are made once and kept",
        rank_local="a folder of the node; what was read is compared once it is open",
    )
    data_cache_path: str | None = opt(
        PLACE,
        None,
        "folder for the index arrays of large files; default beside the data",
        rank_local="a folder of the node; what was read is compared once it is open",
    )
    sample_order: str = opt(
        elsewhere("an order goes on as it began (`training/datasets`)"),
        "epochs",
        "each epoch shuffled by itself, so that a run may be made longer; or all epochs of the run together, which is "
        "Megatron-LM's order of several epochs",
        ("epochs", "megatron"),
    )
    seq_length: int = opt(RUN, 256, "tokens of a sample", least=1)
    tokenizer_type: str | None = opt(TOKENIZER, None, "tokenizer of the data")
    tokenizer_model: str | None = opt(TOKENIZER, None, "folder or file of the tokenizer")
    vocab_file: str | None = opt(TOKENIZER, None, "vocab.json of GPT2BPETokenizer")
    merge_file: str | None = opt(TOKENIZER, None, "merges.txt of GPT2BPETokenizer")
    reset_position_ids: bool = opt(RUN, False, "positions start again after an end-of-document token")
    reset_attention_mask: bool = opt(RUN, False, "tokens do not attend across documents")
    eod_mask_loss: bool = opt(RUN, False, "no loss on end-of-document tokens")
    sequence_packing: bool = opt(
        RUN,
        False,
        "samples of whole documents that do not see each other, instead of a stream cut every seq_length tokens",
    )
    mask_prob: float = opt(RUN, 0.15, "BERT: share of the tokens that are hidden", above=0.0, below=1.0)

    def _check(self) -> None:
        named: dict[str, Any] = {"data_path": self.data_path}
        named |= {"train_data_path, valid_data_path or test_data_path": self.per_split}
        named |= {"data_args_path": self.data_args_path, "mock_data": self.mock_data, "corpus": self.corpus}
        given = [name for name, value in named.items() if value]
        known = self.corpus is None or self.corpus in CORPORA or (self.corpus[:3] == "hf:" and self.corpus[3:])
        fix = did_you_mean(str(self.corpus), CORPORA) or f"one of {', '.join(CORPORA)}, hf:OWNER/NAME or hf:FOLDER"
        require(bool(known), f"corpus is {self.corpus!r}", fix)
        require(len(given) <= 1, f"{' and '.join(given)} are given", "one source of tokens: drop the others")

    @property
    def per_split(self) -> bool:
        """Whether each set has files of its own."""
        return bool(self.train_data_path or self.valid_data_path or self.test_data_path)


@dataclasses.dataclass(frozen=True)
class TrainingConfig(Config):
    """How long to train, and what to log."""

    micro_batch_size: int = opt(
        free("a batch may be cut anyhow: sums are divided once, by the tokens of all of it"),
        1,
        "samples of one forward pass on one rank",
        least=1,
    )
    global_batch_size: int | None = opt(
        RUN, None, "samples of one optimizer step over all ranks; default micro_batch_size * dp", least=1
    )
    rampup_batch_size: tuple[int, ...] | None = opt(SIZES, None, "start, increment, samples of a batch size ramp-up")
    decrease_batch_size_if_needed: bool = opt(
        SIZES, False, "round the global batch size down to a multiple of micro_batch_size * dp"
    )
    train_iters: int = opt(LENGTH, 100, "optimizer steps", least=1)
    train_samples: int | None = opt(LENGTH, None, "samples to train on, instead of train_iters", least=1)
    seed: int = opt(RUN, 1234, "of weights, data order and dropout")
    log_interval: int = opt(OBSERVED, 1, "steps between log lines", least=1)
    eval_interval: int | None = opt(EVALUATED, None, "steps between evaluations; default never", least=1)
    eval_iters: int = opt(EVALUATED, 10, "batches of one evaluation", least=0)
    exit_interval: int | None = opt(LENGTH, None, "stop at the first iteration that this divides", least=1)
    exit_duration_in_mins: float | None = opt(LENGTH, None, "stop after so many minutes", least=0.0)
    tensorboard_dir: str | None = opt(OBSERVED, None, "folder for TensorBoard", rank_local="rank 0 alone writes there")
    wandb_project: str | None = opt(
        OBSERVED, None, "also log to this Weights & Biases project", rank_local="rank 0 alone logs"
    )
    wandb_exp_name: str | None = opt(OBSERVED, None, "name of the run there", rank_local="rank 0 alone logs")
    wandb_entity: str | None = opt(OBSERVED, None, "team or user there", rank_local="rank 0 alone logs")
    wandb_save_dir: str | None = opt(OBSERVED, None, "folder for its local files", rank_local="rank 0 alone logs")
    trackio_project: str | None = opt(
        OBSERVED, None, "also log to this project of trackio, on this machine", rank_local="rank 0 alone logs"
    )
    trackio_exp_name: str | None = opt(OBSERVED, None, "name of the run there", rank_local="rank 0 alone logs")
    log_file: str | None = opt(
        OBSERVED,
        None,
        "also write one JSON object a step to this file, which `minimegatron watch` draws; another run that is there "
        "is kept as FILE.1",
        rank_local="rank 0 alone writes it",
    )
    log_norms_interval: int | None = opt(
        OBSERVED,
        None,
        "steps between norms by layer, of the gradient before it is clipped, of the weights and of their update",
        least=1,
    )
    log_params_norm: bool = opt(OBSERVED, False, "each line has the norm of all weights before its step")
    log_timeline_interval: int | None = opt(
        OBSERVED,
        None,
        "steps between timelines: the passes, messages and waits of every rank in one step, for the log file",
        least=1,
    )
    check_replicas_interval: int | None = opt(
        OBSERVED, None, "steps between bitwise comparisons of replicated weights", least=1
    )
    bad_step: str = opt(
        BAD_STEP, "stop", "at a loss or gradient that is not finite, or a spike", choices=("stop", "skip", "rollback")
    )
    spiky_loss_factor: float | None = opt(
        BAD_STEP, None, "a loss above so many times the mean of the last 16 good ones is a spike", above=1.0
    )
    rerun_mode: str = opt(
        BAD_STEP,
        "validate_results",
        "take a bad step again, to name the operation, rank and sample, and tell data from machine",
        choices=("disabled", "validate_results"),
    )
    check_first_step: bool = opt(
        OBSERVED, False, "compare the gradients of the first batch with those of one process, in fp64; for small models"
    )
    cuda_graph_impl: str = opt(
        HOW,
        "none",
        "play a step's forward and backward passes back as a CUDA graph",
        ("none", "local"),
    )
    cuda_graph_scope: str = opt(HOW, "full_iteration", "what a graph holds", ("full_iteration",))
    cuda_graph_warmup_steps: int = opt(HOW, 3, "steps before the recording", least=1)
    profile: bool = opt(
        OBSERVED, False, "profile some steps: NVTX ranges for nsys on a GPU, or with use_pytorch_profiler"
    )
    use_pytorch_profiler: bool = opt(OBSERVED, False, "torch's profiler, which writes a Chrome trace")
    profile_step_start: int = opt(OBSERVED, 10, "steps before the profile begins", least=0)
    profile_step_end: int = opt(OBSERVED, 12, "steps before it ends")
    profile_ranks: tuple[int, ...] = opt(OBSERVED, (0,), "which ranks are profiled")
    profile_dir: str = opt(
        OBSERVED, "profile", "folder for the traces", rank_local="each profiled rank writes its own traces"
    )
    log_memory_interval: int | None = opt(
        OBSERVED,
        None,
        "steps between tables of every rank's memory by name, predicted and counted; such a step is slow",
        least=1,
    )
    log_memory_to_tensorboard: bool = opt(
        OBSERVED, False, "TensorBoard gets the allocator's numbers, and bytes by name"
    )
    record_memory_history: bool = opt(
        OBSERVED, False, "write the last rank's GPU allocations for torch's memory viewer"
    )
    memory_snapshot_path: str = opt(OBSERVED, "snapshot.pickle", "where they are written")
    log_straggler: bool = opt(
        OBSERVED, False, "each log_interval says which rank is slow in what, without the time it waits for others"
    )
    straggler_minmax_count: int = opt(OBSERVED, 1, "how many of the fastest and of the slowest ranks it names", least=1)
    flight_recorder_dump_path: str | None = opt(
        OBSERVED,
        None,
        "folder for each rank's last communications, written at a deadline, an error or SIGUSR2",
        rank_local="a folder of the node; each rank writes its own files",
    )
    flight_recorder_trace_buffer_size: int = opt(
        OBSERVED, 2000, "communications that a rank remembers, for the line about the first mismatch; 0: none", least=0
    )
    distributed_backend: str | None = opt(
        HOW,
        None,
        "nccl or gloo; default nccl with a GPU for each rank, gloo where there is none",
        (None, "nccl", "gloo"),
    )

    def _check(self) -> None:
        require(
            self.profile_step_start < self.profile_step_end,
            f"profile_step_start={self.profile_step_start}, profile_step_end={self.profile_step_end}",
            "choose start < end",
        )
        require(
            self.profile or not self.use_pytorch_profiler,
            "use_pytorch_profiler without profile",
            "--profile, or drop --use-pytorch-profiler",
        )
        if self.rampup_batch_size is not None:
            require(
                len(self.rampup_batch_size) == 3,
                f"rampup_batch_size is {self.rampup_batch_size}",
                "give start, increment, samples",
            )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Config):
    """Where checkpoints are written and read, how often, and what is in them."""

    save: str | None = opt(
        CHECKPOINT, None, "folder for checkpoints of this run; also written at its end and at SIGTERM"
    )
    save_interval: int | None = opt(CHECKPOINT, None, "steps between checkpoints; default only at the end", least=1)
    save_keep_last: int = opt(CHECKPOINT, 0, "checkpoints that are kept, the newest ones; 0 keeps all", least=0)
    save_retain_interval: int | None = opt(
        CHECKPOINT, None, "keep those of multiples of it, and the last; remove others", least=1
    )
    save_keep_best: bool = opt(CHECKPOINT, False, "never remove the one with the lowest validation loss")
    async_save: bool = opt(CHECKPOINT, False, "write in the background; a step waits for a copy in memory only")
    save_optim: bool = opt(CHECKPOINT, True, "the optimizer's state is part of a checkpoint")
    save_rng: bool = opt(CHECKPOINT, True, "so are random streams")
    load: str | None = opt(
        CHECKPOINT, None, "folder of checkpoints to continue from, any layout; the newest complete one"
    )
    use_checkpoint_args: bool = opt(
        CHECKPOINT, False, "the model is that of the checkpoint; a published folder always says it"
    )
    ckpt_step: int | None = opt(CHECKPOINT, None, "continue from this step instead of the newest", least=0)
    load_optim: bool = opt(CHECKPOINT, True, "continue with the optimizer's state")
    load_rng: bool = opt(CHECKPOINT, True, "continue with the random streams")
    finetune: bool = opt(CHECKPOINT, False, "take the weights only and begin at step 0")
    exit_on_missing_checkpoint: bool = opt(
        CHECKPOINT, False, "stop with exit status 3 where --load holds no checkpoint"
    )
    verify_checkpoint: bool = opt(CHECKPOINT, True, "compare each file's hash before it is read")
    override_checkpoint_args: bool = opt(
        CHECKPOINT, False, "go on although this is not the checkpoint's run; the log names every difference"
    )
    use_checkpoint_opt_param_scheduler: bool = opt(CHECKPOINT, False, "where schedules differ the checkpoint's wins")
    override_opt_param_scheduler: bool = opt(CHECKPOINT, False, "where schedules differ this command line's wins")

    def _check(self) -> None:
        for field in ("save_interval", "async_save", "save_keep_last", "save_retain_interval", "save_keep_best"):
            require(
                self.save is not None or not getattr(self, field),
                f"{field}={getattr(self, field)} without a folder to save into",
                "--save FOLDER",
            )
        for field in (
            "ckpt_step",
            "finetune",
            "exit_on_missing_checkpoint",
            "use_checkpoint_args",
            "override_checkpoint_args",
        ):
            require(
                self.load is not None or getattr(self, field) in (None, False),
                f"{field} without a folder to load from",
                "--load FOLDER",
            )
        require(
            not self.save_keep_best or self.save_keep_last > 0 or self.save_retain_interval is not None,
            "save_keep_best without an option that removes checkpoints: all are kept",
            "--save-keep-last N or --save-retain-interval N, or drop --save-keep-best",
        )
        require(
            not (self.use_checkpoint_opt_param_scheduler and self.override_opt_param_scheduler),
            "both override_opt_param_scheduler and use_checkpoint_opt_param_scheduler are given",
            "give one of them",
        )


SECTIONS: dict[str, Any] = {
    "model": TransformerConfig,
    "parallel": ParallelConfig,
    "optimizer": OptimizerConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "checkpoint": CheckpointConfig,
}


def sections_of(task: str | None) -> dict[str, Any]:
    """{name: class} of the sections of a run; a task of `config/posttraining` is one more, named `task`."""
    return SECTIONS | ({} if task is None else {"task": TASKS[task]})


SECTION_OF = {f.name: section for section, cls in SECTIONS.items() for f in dataclasses.fields(cls)}
OF_TASKS = {f.name: "task" for cls in TASKS.values() for f in dataclasses.fields(cls)}
SECTION_OF |= OF_TASKS
ALL_SECTIONS: tuple[Any, ...] = (*SECTIONS.values(), *TASKS.values())
KINDS: dict[str, Kind] = {f.name: f.metadata["kind"] for cls in ALL_SECTIONS for f in dataclasses.fields(cls)}
KINDS["task_name"] = RUN


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything that defines a training run.

    Attributes:
        model, parallel, optimizer, data, training, checkpoint: its sections.
        task: the section of a task after pre-training (`config/posttraining`), or None.
        spec: module and function of `--spec`, or None.
        given: names of the fields that were set, as opposed to defaults.
        notes: lines about flags that ask for what happens anyway; printed once.
    """

    model: TransformerConfig
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    task: Any = None
    spec: tuple[str, str] | None = None
    given: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def trained_model(self, vocab_size: int) -> TransformerConfig:
        """The model as this run trains it.

        Its vocabulary is the tokenizer's. RoPE has no last position: `max_position_embeddings` becomes the length of
        the samples, which an export then states, unless it was set or a preset's is larger.

        Args:
            vocab_size: of the tokenizer, or the larger one that was set.
        """
        model, name = self.model, "max_position_embeddings"
        if model.position_embedding_type == "learned_absolute":
            return model.replace(vocab_size=vocab_size)
        longest = getattr(model, name)
        chosen = name in self.given or longest != getattr(TransformerConfig, name)
        longest = max(longest if chosen else 1, self.data.seq_length)
        return model.replace(vocab_size=vocab_size, max_position_embeddings=longest)

    def unmet(self, name: str) -> str:
        """Why a field is not read in this run; "" where it is read (`same_model.unmet`).

        A condition on a field of another task than the run's is met.
        """
        return unmet(name, lambda other: getattr(getattr(self, SECTION_OF[other]), other, True))

    def not_read(self, names: Collection[str]) -> tuple[str, ...]:
        """A line for each of these fields that is not read in this run."""
        conditions = {name: self.unmet(name) for name in SECTION_OF if name in names}
        return tuple(
            f"--{name.replace('_', '-')} changes nothing in this run: it counts only with "
            + condition.replace("=", " ").replace(">", " above ").replace("|", " or ")
            for name, condition in conditions.items()
            if condition
        )

    def fields(self) -> dict[str, Any]:
        """{name: value} of every field of every section; no two have the same name."""
        fields = {
            name: value for section in self.sections() for name, value in getattr(self, section).to_dict().items()
        }
        return fields | ({} if self.task is None else {"task_name": self.task_name})

    @property
    def task_name(self) -> str | None:
        """The command of the task, or None."""
        return next((name for name, cls in TASKS.items() if type(self.task) is cls), None)

    def sections(self) -> dict[str, Any]:
        """{name: class} of its sections."""
        return sections_of(self.task_name)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; what `--config` reads and the log file begins with."""
        sections: dict[str, Any] = {name: getattr(self, name).to_dict() for name in self.sections()}
        return sections | ({"spec": list(self.spec)} if self.spec else {})

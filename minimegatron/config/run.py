"""A run: how weights move, which tokens come in which order, how long it lasts and what it prints.

Three dataclasses that know nothing of one another. What must hold between them is checked where they meet:
`optim/schedule` (iterations or samples), `training/microbatches` (the global batch and dp), `data/builder` (sources).

Megatron-LM: `OptimizerConfig` in `megatron/core/optimizer/optimizer_config.py`, `GPTDatasetConfig` in
`megatron/core/datasets/gpt_dataset.py`, and `megatron/training/config`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from minimegatron.config.fields import BEGUN, HOW, RUN, Config, elsewhere, free, opt
from minimegatron.config.groups import parse_group
from minimegatron.config.newton_schulz import COEFFICIENTS, coefficients_of
from minimegatron.config.optimizer_states import StateFields
from minimegatron.errors import require

# Compared by what they lead to.
DATA = elsewhere("training data: the files' contents, shares, documents")
TOKENIZER = elsewhere("tokenizer: which text has which ids")
SIZES = elsewhere("global_batch_size: all sizes that the run has")
SCHEDULE = elsewhere("the schedule compares itself (`optim/schedule`), and has flags of its own")
# May be others.
LENGTH = free(
    "how long a run is changes no step of it; where the schedule follows from the length, the schedule compares it"
)
EVALUATED = free("an evaluation leaves no trace in the training")
PLACE = free("where files lie; what they hold is compared")
BAD_STEP = free("what to do at a bad step is decided when it comes, often by going on with another answer")
OBSERVED = free("what is observed and where it is written")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(StateFields):
    """Optimizer, its schedules, clipping and loss scaling; dtypes and offload in `optimizer_states`."""

    optimizer: str = opt(
        RUN,
        "adam",
        "adam is AdamW: decoupled weight decay; muon moves matrices, AdamW the rest; dist_muon: shared out to replicas",
        ("adam", "sgd", "muon", "dist_muon"),
    )
    lr: float = opt(SCHEDULE, 1e-3, "peak learning rate")
    min_lr: float = opt(SCHEDULE, 0.0, "the schedule never goes below", least=0.0)
    weight_decay: float = opt(SCHEDULE, 0.01, "decoupled; not on biases and 1-D parameters", least=0.0)
    start_weight_decay: float | None = opt(SCHEDULE, None, "first value of a weight decay ramp", least=0.0)
    end_weight_decay: float | None = opt(SCHEDULE, None, "last value of a weight decay ramp", least=0.0)
    weight_decay_incr_style: str = opt(SCHEDULE, "constant", "shape of that ramp", ("constant", "linear", "cosine"))
    adam_beta1: float = opt(RUN, 0.9, "decay of the first moment", least=0.0, below=1.0)
    adam_beta2: float = opt(RUN, 0.999, "decay of the second moment", least=0.0, below=1.0)
    adam_eps: float = opt(RUN, 1e-8, "added to the square root of the second moment", least=0.0)
    sgd_momentum: float = opt(RUN, 0.9, "momentum of sgd", least=0.0)
    clip_grad: float = opt(RUN, 1.0, "global gradient norm is cut to this; 0 switches clipping off", least=0.0)
    lr_decay_style: str = opt(
        SCHEDULE, "linear", "schedule after the warm-up", ("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_decay_iters: int | None = opt(SCHEDULE, None, "iterations until min_lr; default the whole run", least=1)
    lr_warmup_iters: int = opt(SCHEDULE, 0, "iterations of linear warm-up", least=0)
    lr_warmup_fraction: float | None = opt(
        SCHEDULE, None, "warm-up as a share of the decay, instead of lr_warmup_iters"
    )
    lr_decay_samples: int | None = opt(SCHEDULE, None, "samples until min_lr, instead of lr_decay_iters", least=1)
    lr_warmup_samples: int = opt(SCHEDULE, 0, "samples of linear warm-up, instead of lr_warmup_iters", least=0)
    lr_warmup_init: float = opt(SCHEDULE, 0.0, "learning rate at the start of the warm-up", least=0.0)
    lr_wsd_decay_style: str = opt(
        SCHEDULE, "exponential", "WSD's final decay", ("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = opt(SCHEDULE, None, "iterations of WSD's final decay", least=1)
    loss_scale: float | None = opt(RUN, None, "constant loss scale for fp16; default dynamic", above=0.0)
    initial_loss_scale: float = opt(BEGUN, 2.0**32, "first dynamic loss scale", above=0.0)
    min_loss_scale: float = opt(RUN, 1.0, "dynamic loss scale never goes below", above=0.0)
    loss_scale_window: int = opt(RUN, 1000, "clean steps before the scale doubles", least=1)
    hysteresis: int = opt(RUN, 2, "overflows before the scale halves", least=1)
    check_for_nan_in_loss_and_grad: bool = opt(BAD_STEP, True, "stop with exit status 6 on a number that is not finite")
    log_num_zeros_in_grad: bool = opt(OBSERVED, False, "count the zeros of the gradient")
    muon_momentum: float = opt(RUN, 0.95, "decay of Muon's momentum", least=0.0, below=1.0)
    muon_use_nesterov: bool = opt(RUN, False, "Muon looks one gradient ahead of its momentum")
    muon_split_qkv: bool = opt(RUN, True, "Muon takes q, k and v of a fused projection as three matrices")
    muon_scale_mode: str = opt(
        RUN, "spectral", "factor of an update by the matrix's shape", ("spectral", "shape_scaling", "unit_rms_norm")
    )
    muon_extra_scale_factor: float = opt(RUN, 1.0, "a further factor; 0.2 gives updates the size of AdamW's", above=0.0)
    muon_num_ns_steps: int = opt(RUN, 5, "rounds of the Newton-Schulz iteration", least=1)
    muon_coefficient_type: str = opt(RUN, "quintic", "polynomials of the iteration", tuple(COEFFICIENTS))
    muon_fp32_matmul_prec: str = opt(RUN, "medium", "its products: medium in bf16, high in fp32", ("medium", "high"))
    muon_tp_mode: str = opt(
        RUN,
        "duplicated",
        "of a matrix that is cut over tp: gathered, iterated together, or each part by itself",
        ("duplicated", "distributed", "blockwise"),
    )
    decoupled_lr: float | None = opt(RUN, None, "peak learning rate of word embedding and output layer", least=0.0)
    decoupled_min_lr: float | None = opt(RUN, None, "their schedule never goes below; default min_lr", least=0.0)
    apply_wd_to_qk_layernorm: bool = opt(RUN, False, "weight decay on the norms of queries and keys as well")
    param_groups: tuple[str, ...] = opt(
        RUN,
        (),
        "factors of learning rate and weight decay by name: 'decoder.*.mlp.*:lr_mult=0.1,wd_mult=0' ...",
        repeats=True,
    )
    freeze: tuple[str, ...] = opt(
        RUN, (), "parameters that do not move, by patterns of their names: 'embedding.*' ...", repeats=True
    )

    def _check(self) -> None:
        require(self.lr >= self.min_lr, f"lr={self.lr}, min_lr={self.min_lr}", "choose lr >= min_lr")
        self._check_groups()
        self._check_states(self.optimizer)
        coefficients_of(self.muon_coefficient_type, self.muon_num_ns_steps)
        warmups = ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction")
        for names in (("lr_decay_iters", "lr_decay_samples"), warmups):
            given = [name for name in names if getattr(self, name) != getattr(OptimizerConfig, name)]
            require(len(given) <= 1, f"{' and '.join(given)} are given", "give one of them")
        if self.lr_warmup_fraction is not None:
            require(
                0.0 <= self.lr_warmup_fraction <= 1.0,
                f"lr_warmup_fraction is {self.lr_warmup_fraction}",
                "choose it in [0, 1]",
            )
        if self.lr_decay_style == "WSD":
            require(
                self.lr_wsd_decay_iters is not None,
                "lr_decay_style WSD without lr_wsd_decay_iters",
                "give --lr-wsd-decay-iters",
            )

    @property
    def has_matrices(self) -> bool:
        """Muon moves what is a matrix."""
        return self.optimizer in ("muon", "dist_muon")

    def _check_groups(self) -> None:
        for text in self.param_groups:
            parse_group(text)
        peak, floor = self.decoupled_lr, self.decoupled_min_lr
        require(
            floor is None or peak is not None,
            "decoupled_min_lr without decoupled_lr",
            "give --decoupled-lr, or drop --decoupled-min-lr",
        )
        lowest = self.min_lr if floor is None else floor
        require(
            peak is None or peak >= lowest,
            f"decoupled_lr={peak} is below its floor {lowest}",
            "choose decoupled_lr above",
        )


@dataclasses.dataclass(frozen=True)
class DataConfig(Config):
    """Where tokens come from."""

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
        "text that every machine has: Python's standard library, its sources and docstrings, or one of the two",
        (None, "stdlib", "stdlib-code", "stdlib-docs"),
    )
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

    def _check(self) -> None:
        per_split = self.train_data_path or self.valid_data_path or self.test_data_path
        named: dict[str, Any] = {"data_path": self.data_path}
        named |= {"train_data_path, valid_data_path or test_data_path": per_split}
        named |= {"data_args_path": self.data_args_path, "mock_data": self.mock_data, "corpus": self.corpus}
        given = [name for name, value in named.items() if value]
        require(len(given) <= 1, f"{' and '.join(given)} are given", "one source of tokens: drop the others")


@dataclasses.dataclass(frozen=True)
class TrainingConfig(Config):
    """How long to train, and what to print on the way."""

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
    log_file: str | None = opt(
        OBSERVED,
        None,
        "also write one JSON object a step to this file; another run that is there is kept as FILE.1",
        rank_local="rank 0 alone writes it",
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
    check_first_step: bool = opt(
        OBSERVED, False, "compare the gradients of the first batch with those of one process, in fp64; for small models"
    )
    cuda_graph_impl: str = opt(
        HOW,
        "none",
        "play a step's forward and backward passes back as a CUDA graph",
        ("none", "local", "transformer_engine"),
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

"""What a run leaves behind, and what it begins with.

Megatron-LM: `add_checkpointing_args` in `megatron/training/arguments.py`.
"""

from __future__ import annotations

import dataclasses

from minimegatron.config.fields import Config, free, opt
from minimegatron.errors import require

CHECKPOINT = free("where, when and which checkpoints are written and read")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Config):
    """Where checkpoints are written and read, how often, and which parts."""

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
    verify_checkpoint: bool = opt(CHECKPOINT, True, "compare each file's SHA-256 before it is read")
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

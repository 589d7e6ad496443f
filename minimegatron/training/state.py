"""Where a run is: what, beside weights and optimizer, must survive a restart.

The order of samples is a pure function of the seed and of how many samples have been consumed (`data/epochs`), and so
are the batch size and the learning rate. So these numbers say it all, in a run that is the same one (`same_run`).
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class TrainState:
    """Counters of a run, equal on all ranks.

    Attributes:
        iteration: steps taken, skipped ones among them.
        consumed_train_samples: over all ranks; decides the next sample, batch size and learning rate.
        consumed_valid_samples: of the validation set.
        skipped_iterations: steps in which the weights did not move.
        recent_losses: of the last good steps (`training/bad_steps.py`).
        validation_loss: of exactly these weights; None where they were not evaluated.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    validation_loss: float | None = None
    recent_losses: list[float] = dataclasses.field(default_factory=list)

"""The layout: how many ranks share what, and in which order they are numbered.

    world = tp * cp * pp * dp          experts see the same ranks as  etp * ep * pp * edp

`config/stages` cuts the model into the stages of a pipeline.

Megatron-LM: `ModelParallelConfig` in `megatron/core/model_parallel_config.py`.
"""

from __future__ import annotations

import dataclasses
import math

from minimegatron.config.fields import Config, free, opt
from minimegatron.errors import ConfigError, require

V_SHAPED = ("zb_v", "dualpipe_v")
STRAIGHT = ("gpipe", "1f1b", "zb_h1")
SPLIT = ("zb_h1", *V_SHAPED)  # the backward pass of weights is an action of its own
SCHEDULES = (*STRAIGHT, "interleaved", *V_SHAPED)
SHARDING = ("no_shard", "optim", "optim_grads", "optim_grads_params")  # what replicas share out (`parallel/data/ddp`)
ORDERED_AXES = ("tp", "cp", "ep", "dp", "pp")
LAYOUT = free("a checkpoint is regions of whole tensors, and every layout adds up the same numbers")


@dataclasses.dataclass(frozen=True)
class ParallelConfig(Config):
    """How ranks divide the work. World = tp * cp * pp * dp; expert parallelism reuses the tp*cp*dp ranks."""

    tensor_model_parallel_size: int = opt(LAYOUT, 1, "tp: ranks that share every matrix", least=1)
    pipeline_model_parallel_size: int = opt(LAYOUT, 1, "pp: stages that share the layers", least=1)
    pipeline_schedule: str | None = opt(
        LAYOUT,
        None,
        "order of a pipeline's work; default 1f1b, interleaved with several stages a rank",
        (None, *SCHEDULES),
    )
    num_layers_per_virtual_pipeline_stage: int | None = opt(
        LAYOUT, None, "layers of a stage, of which a rank has several", least=1
    )
    num_virtual_stages_per_pipeline_rank: int | None = opt(LAYOUT, None, "v: stages of a rank; default 1", least=1)
    microbatch_group_size_per_virtual_pipeline_stage: int | None = opt(
        LAYOUT,
        None,
        "interleaved: microbatches that pass one stage before the rank turns to its next; default pp",
        least=1,
    )
    num_layers_in_first_pipeline_stage: int | None = opt(
        LAYOUT, None, "layers of the first rank; the rest is cut evenly", least=0
    )
    num_layers_in_last_pipeline_stage: int | None = opt(
        LAYOUT, None, "layers of the last rank; the rest is cut evenly", least=0
    )
    account_for_embedding_in_pipeline_split: bool = opt(
        LAYOUT, False, "the embedding counts as a layer of the first stage"
    )
    account_for_loss_in_pipeline_split: bool = opt(LAYOUT, False, "the loss counts as a layer of the last stage")
    pipeline_model_parallel_layout: str | None = opt(LAYOUT, None, "every stage written out, e.g. Et*3|(tt|)*2,L")
    variable_seq_lengths: bool = opt(
        LAYOUT, False, "microbatches of different lengths: stages tell each other the shape"
    )
    context_parallel_size: int = opt(LAYOUT, 1, "cp: ranks that share every sequence", least=1)
    cp_comm_type: str = opt(
        LAYOUT,
        "p2p",
        "how cp ranks share keys and values: a ring, all-to-all over heads, all-gather, or all-to-all inside a ring",
        ("p2p", "a2a", "allgather", "a2a+p2p"),
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = opt(
        LAYOUT, None, "for a2a+p2p: ranks of an all-to-all, then ranks of a ring; their product is cp"
    )
    expert_model_parallel_size: int = opt(LAYOUT, 1, "ep: ranks that share the experts", least=1)
    expert_tensor_parallel_size: int = opt(LAYOUT, None, "etp: ranks that share every expert; default tp", least=1)
    sequence_parallel: bool = opt(LAYOUT, False, "split norms, dropout and residuals over tp along the sequence")
    order: str = opt(LAYOUT, "tp-cp-ep-dp-pp", "axes from the fastest varying to the slowest")
    overlap_grad_reduce: bool = opt(LAYOUT, False, "reduce gradient buckets while the backward pass still runs")
    use_distributed_optimizer: bool = opt(
        LAYOUT, False, "each replica keeps and updates 1/dp of main parameters and moments"
    )
    data_parallel_sharding_strategy: str = opt(
        LAYOUT,
        None,
        "what replicas share out: nothing, the optimizer's state (ZeRO-1), gradients too (2), parameters too (3); "
        "default: the state with --use-distributed-optimizer, else nothing",
        SHARDING,
    )
    use_torch_fsdp2: bool = opt(
        LAYOUT, False, "torch's fully_shard shares out parameters, gradients and state (ZeRO-3)"
    )
    overlap_param_gather: bool = opt(
        LAYOUT, False, "wait for updated parameters when they are used, not after the step"
    )
    num_distributed_optimizer_instances: int = opt(
        LAYOUT,
        1,
        "groups of replicas; each has all shards, and a shard's gradients are summed over the groups (HSDP)",
        least=1,
    )
    ddp_bucket_size: int | None = opt(
        LAYOUT, None, "elements of a gradient bucket; default max(40e6, 1e6 * dp)", least=1
    )
    distributed_timeout_seconds: float = opt(LAYOUT, 300.0, "longest wait for another rank", above=0.0)

    def _check(self) -> None:
        self._derive(expert_tensor_parallel_size=self.tensor_model_parallel_size)
        least = (
            "optim_grads_params" if self.use_torch_fsdp2 else "optim" if self.use_distributed_optimizer else "no_shard"
        )
        self._derive(data_parallel_sharding_strategy=least)
        self._check_sharding()
        self._check_context()
        axes = self.order.split("-")
        missing, extra = set(ORDERED_AXES) - set(axes), [a for a in axes if a not in ORDERED_AXES]
        require(
            not extra and not (missing - {"ep"}) and len(set(axes)) == len(axes),
            f"order={self.order!r} does not name each of {'-'.join(ORDERED_AXES)} once",
            "for example tp-cp-ep-dp-pp",
        )
        self._check_pipeline()
        if self.sequence_parallel:
            require(
                self.tensor_model_parallel_size > 1,
                "sequence_parallel needs tensor_model_parallel_size > 1 (it splits over the same ranks)",
                "drop --sequence-parallel or raise --tensor-model-parallel-size",
            )

    def _check_sharding(self) -> None:
        strategy = self.data_parallel_sharding_strategy
        require(
            strategy != "no_shard" or not self.use_distributed_optimizer,
            "use_distributed_optimizer with data_parallel_sharding_strategy='no_shard'",
            "drop one of the two",
        )
        require(
            not self.use_torch_fsdp2 or strategy == "optim_grads_params",
            f"use_torch_fsdp2 with data_parallel_sharding_strategy={strategy!r}: it shares out parameters as well",
            "drop one of the two",
        )
        require(
            not (self.use_torch_fsdp2 and self.pipeline_schedule in SPLIT),
            f"use_torch_fsdp2 with pipeline_schedule={self.pipeline_schedule!r}: it reduces gradients when autograd "
            "has finished, and those of weights come later there",
            "--data-parallel-sharding-strategy optim_grads_params, or another schedule",
        )
        require(
            not self.overlap_param_gather or strategy in ("optim", "optim_grads"),
            f"overlap_param_gather with data_parallel_sharding_strategy={strategy!r}: "
            + ("no parameters are gathered" if strategy == "no_shard" else "parameters are gathered on use already"),
            "--use-distributed-optimizer, or drop --overlap-param-gather",
        )
        require(
            self.num_distributed_optimizer_instances == 1 or strategy != "no_shard",
            f"num_distributed_optimizer_instances={self.num_distributed_optimizer_instances} and nothing is shared out",
            "--use-distributed-optimizer, or drop --num-distributed-optimizer-instances",
        )
        require(
            self.ddp_bucket_size is None or strategy != "optim_grads_params",
            f"ddp_bucket_size={self.ddp_bucket_size} with optim_grads_params: a bucket is a layer",
            "drop --ddp-bucket-size",
        )
        require(
            self.ddp_bucket_size is None
            or self.overlap_grad_reduce
            or self.overlap_param_gather
            or strategy == "optim_grads",
            f"ddp_bucket_size={self.ddp_bucket_size} without overlap_grad_reduce: all gradients travel in one bucket",
            "--overlap-grad-reduce, or drop --ddp-bucket-size",
        )

    def _check_context(self) -> None:
        cp, sizes, kind = self.context_parallel_size, self.hierarchical_context_parallel_sizes, self.cp_comm_type
        if kind != "a2a+p2p":
            require(
                sizes is None,
                f"hierarchical_context_parallel_sizes={sizes} with cp_comm_type={kind!r}",
                "they belong to cp_comm_type a2a+p2p; drop them, or choose it",
            )
            return
        require(
            sizes is not None and len(sizes) == 2 and min(sizes) >= 1 and math.prod(sizes) == cp,
            f"cp_comm_type a2a+p2p: hierarchical_context_parallel_sizes={sizes} are not two factors of cp ({cp})",
            "first the ranks of an all-to-all, then those of a ring, for example "
            f"--hierarchical-context-parallel-sizes {2 if cp % 2 == 0 else cp} {cp // 2 if cp % 2 == 0 else 1}",
        )

    @property
    def context_parallel_factors(self) -> tuple[int, int]:
        """(ranks that exchange heads by all-to-all, ranks that exchange keys and values); their product is cp."""
        if self.cp_comm_type == "a2a":
            return self.context_parallel_size, 1
        if self.hierarchical_context_parallel_sizes is not None:
            return self.hierarchical_context_parallel_sizes[0], self.hierarchical_context_parallel_sizes[1]
        return 1, self.context_parallel_size

    def _check_pipeline(self) -> None:
        cuts = (
            "pipeline_schedule num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank "
            "microbatch_group_size_per_virtual_pipeline_stage num_layers_in_first_pipeline_stage "
            "num_layers_in_last_pipeline_stage pipeline_model_parallel_layout"
        ).split()
        given = [name for name in cuts if getattr(self, name) is not None]
        given += [f"account_for_{x}_in_pipeline_split" for x in ("embedding", "loss") if self._accounts_for(x)]
        if given and self.pipeline_model_parallel_size == 1:
            raise ConfigError(f"{given[0]} without a pipeline", fix="drop it, or pipeline_model_parallel_size above 1")
        ways = {
            "pipeline_model_parallel_layout": self.pipeline_model_parallel_layout is not None,
            "num_layers_in_first_pipeline_stage or ..._last_...": any(
                n is not None for n in (self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage)
            ),
            "account_for_..._in_pipeline_split": self._accounts_for("embedding") or self._accounts_for("loss"),
            "num_layers_per_virtual_pipeline_stage": self.num_layers_per_virtual_pipeline_stage is not None,
        }
        used = [way for way, wanted in ways.items() if wanted]
        require(
            len(used) <= 1,
            f"{' and '.join(used)} each say where the layers go",
            "give one; num_virtual_stages_per_pipeline_rank goes with all but the first and the last of them",
        )

    def _accounts_for(self, end: str) -> bool:
        return bool(getattr(self, f"account_for_{end}_in_pipeline_split"))

    def data_parallel_size(self, world_size: int) -> int:
        """dp = world / (tp * cp * pp).

        Raises:
            ConfigError: the world is not a multiple of the model's ranks, or cannot hold the expert layout.
        """
        sizes = (self.tensor_model_parallel_size, self.context_parallel_size, self.pipeline_model_parallel_size)
        model, ranks = math.prod(sizes), f"{world_size} rank{'s'[: world_size != 1]}"
        require(
            world_size % model == 0 and world_size > 0,
            f"{ranks} cannot be divided into groups of tp*cp*pp = {'*'.join(map(str, sizes))} = {model}",
            f"start {max(1, world_size // model) * model} ranks, or change the layout",
        )
        expert = self.expert_tensor_parallel_size * self.expert_model_parallel_size * self.pipeline_model_parallel_size
        require(
            world_size % expert == 0,
            f"{ranks} cannot be divided into expert groups of etp*ep*pp = "
            f"{self.expert_tensor_parallel_size}*"
            f"{self.expert_model_parallel_size}*{self.pipeline_model_parallel_size} = {expert}",
            "choose ep so that etp*ep*pp divides the number of ranks",
        )
        dp, instances = world_size // model, self.num_distributed_optimizer_instances
        for what, replicas in (("dp*cp", dp * self.context_parallel_size), ("expert-dp", world_size // expert)):
            require(
                replicas % instances == 0,
                f"{what} is {replicas}, and num_distributed_optimizer_instances={instances} does not divide it",
                "choose a divisor of it, so that every instance has as many ranks",
            )
        return dp

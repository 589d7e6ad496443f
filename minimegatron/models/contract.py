"""What a model gives: all that training, evaluation, generation, planning and checkpoints ask of one.

A model comes as stages, the parts that pipeline ranks hold; without a pipeline it is one stage. `models/chunks` builds
them: `GPTModel` of `models/decoder`, or the class that a spec names. The other packages know no more of it than this.

| asked by               | what                                                                                      |
|------------------------|-------------------------------------------------------------------------------------------|
| `training`, `parallel` | `forward`: losses of tokens, logits, or tensors for the next stage; `stage_specs`         |
| `footprint`, `planner` | `layers`, `layer_groups`: what runs one after the other, and what is recomputed           |
| `inference`            | `full_logits` with an `inference_context`; `inference_state`: what layers keep            |
|                        | where its depths propose: `prediction_state`, and `predicted` (`models/decoder`)          |
| `checkpoint`, `optim`  | the `ParamLayout` of every parameter (`layers/param`): name, place and shape in the whole |

A layer of a stage (`models/block`) gives `forward(x, context)`, and says what it keeps while it generates
(`layers/inference_context`), a mixer also whether it can share a sequence over cp (`supports_context_parallel`). A
module that has something to say against generating, or against being recorded, says it itself: `check_generation()`,
`reads_device`. Work at the ends of a step is a hook of the file that defines the feature (`layers/step_hooks`). Memory
and work of a layer need no description: it is run on fake tensors (`footprint/dry_run`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from minimegatron.layers.inference_context import InferenceContext, StateSpec
from minimegatron.parallel.pipeline.execution import Specs, Tensors

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh
    from minimegatron.config import TransformerConfig


Weights = dict[str, tuple[nn.Module, str]]  # logical name -> the module that has the parameter, and its name there


class ModelStage(Protocol):
    """A part of a model that a pipeline rank runs; without a pipeline all of it.

    Its class is called with `(config, mesh, *, pre_process, post_process, layer_numbers, rng)`, see
    `chunks.build_stage`, and what the `ModuleSpec` adds.

    What travels to the next stage are named tensors, as many as the stage says: a decoder's hidden state, an encoder's
    memory beside it. A tensor that passes through is given on as it came.

    Attributes:
        is_stage: of the class, True: a spec that names it is one of a stage, not of a layer.
        config, mesh: the model, and its layout.
        pre_process: this is the first stage, which takes tokens.
        post_process: this is the last stage, which makes losses.
        layers: global number -> layer of this stage.
        ties_ends: the first stage of the model and the last use the same weights.
    """

    is_stage: bool
    config: TransformerConfig
    mesh: Mesh
    pre_process: bool
    post_process: bool

    @property
    def layers(self) -> Mapping[int, nn.Module]: ...

    @property
    def ties_ends(self) -> bool: ...

    def layer_groups(self) -> list[tuple[list[nn.Module], bool]]:
        """The layers in the order in which they run, in groups, and whether a group is recomputed as a whole."""
        ...

    def stage_specs(self, b: int, s: int, compute_dtype: torch.dtype | None = None) -> tuple[Specs, Specs]:
        """Names, shapes and dtypes of what it takes and gives for a microbatch of tokens [b, s]; {} at the ends."""
        ...

    def set_input_tensor(self, inputs: Tensors | None) -> None:
        """What the stage before has made, for the next call."""
        ...

    def tied_weights(self) -> Weights:
        """The weights of this stage that the first stage and the last both use (`models/chunks`)."""
        ...

    def __call__(self, *args: Any, **options: Any) -> Any:
        """A batch -> losses of every token [b, s] on the last stage, else what the next stage takes."""
        ...

    def modules(self) -> Iterator[nn.Module]:
        """As in `nn.Module`, and so are all its other methods."""
        ...


class LanguageModel(Protocol):
    """A model of which this rank has all stages in one.

    Attributes:
        config, mesh: what it is, and its layout.
        training: as in `nn.Module`.
    """

    config: TransformerConfig
    mesh: Mesh
    training: bool

    def __call__(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        document_ids: torch.Tensor | None = None,
        inference_context: InferenceContext | None = None,
        logits_at: torch.Tensor | None = None,
    ) -> Any:
        """tokens [b, s] -> losses [b, s] of the labels, or logits [s, b, V'/t]; see `GPTModel.forward`."""
        ...

    def full_logits(
        self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """tokens [b, s] -> logits of all V words on every rank, [b, s, V]; options as `__call__` has them."""
        ...

    def inference_state(self) -> dict[int, dict[str, StateSpec]]:
        """Layer number -> name -> what the layer keeps of earlier tokens in generation.

        Raises:
            ConfigError: a layer does not say.
        """
        ...

    def modules(self) -> Iterator[nn.Module]:
        """As in `nn.Module`."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """As in `nn.Module`; each has a `param_layout`."""
        ...

"""The interface of models: all that training, evaluation, generation, planning and checkpoints require of one.

A model consists of stages, the parts that pipeline ranks hold; without a pipeline it is one stage. `models/chunks`
builds them: `GPTModel` of `models/decoder`, or the class that a spec names. Other packages use only this interface.

| used by                | what                                                                                      |
|------------------------|-------------------------------------------------------------------------------------------|
| `training`, `parallel` | `forward`: losses of tokens, logits, or tensors for the next stage; `stage_specs`         |
| `footprint`, `planner` | `layers`, `layer_groups`: the order in which layers run, and which are recomputed         |
| `inference`            | `full_logits` with an `inference_context`; `inference_state`: what layers keep            |
|                        | where its depths propose: `prediction_state`, and `predicted` (`models/decoder`)          |
| `checkpoint`, `optim`  | the `ParamLayout` of every parameter (`layers/param`): name, place and shape in the whole |
| `training`, `commands` | `StageClass`: what the class of its stages says before one is built                       |

A layer of a stage (`models/block`) has `forward(x, context)` and `inference_state`, the state that it keeps during
generation (`layers/inference_context`); a mixer has `supports_context_parallel`, whether its sequence may be cut over
cp. A module that cannot generate says so in `check_generation()`, one that cannot be recorded as a CUDA graph in
`reads_device`; a stage whose prompts are computed in one step has `whole_prompts`, one whose prompts begin with what an
encoder reads `source_of`. A feature with work at the beginning or end of a step registers a hook (`layers/step_hooks`).
The memory and work of a layer are not described anywhere: the layer is run on fake tensors (`footprint/dry_run`).
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
    from minimegatron.config.run import RunConfig
    from minimegatron.data.gpt_dataset import Objective
    from minimegatron.data.tokenizer import Tokenizer


Weights = dict[str, tuple[nn.Module, str]]  # logical name -> the module that has the parameter, and its name there


class StageClass:
    """What a class of stages says of all its models, before one is built; the class of a stage inherits it.

    A family whose models differ from a decoder of next tokens overrides what is other, and names its class in the
    field `model_class`; nobody else asks which family it is.

    Attributes:
        is_stage: a spec that names the class is that of a stage, not of a layer.
        predicts_next: a token is predicted from those before it, by which a text can be scored and continued.
        pads: samples have padding, or other documents that do not see each other.
        megatron_lacks: why no checkpoint for Megatron-LM is written; "" where one is.
        added_ids: so many ids of the model a tokenizer that is made for a run leaves to `objective`.
    """

    is_stage = True
    predicts_next = True
    pads = False
    megatron_lacks = ""
    added_ids = 0

    @classmethod
    def objective(cls, run: RunConfig, tokenizer: Tokenizer) -> Objective | None:
        """What a model learns from text in pre-training; None: the next token.

        Raises:
            ConfigError: the run's samples cannot be made with this tokenizer.
        """
        return None

    @classmethod
    def check_run(cls, run: RunConfig) -> None:
        """Refuse what a run of such a model cannot have.

        Raises:
            ConfigError: with the values and the fix.
        """

    def blank_inputs(self, b: int, s: int) -> dict[str, torch.Tensor]:
        """What a batch of tokens [b, s] has besides, all 0, for a plan; s is a rank's part."""
        return {}


class ModelStage(Protocol):
    """A part of a model that a pipeline rank runs; without a pipeline all of it.

    Its class is called with `(config, mesh, *, pre_process, post_process, layer_numbers, rng)`, see
    `chunks.build_stage`, and the `params` of the `ModuleSpec`.

    A stage sends named tensors to the next stage, as many as it declares: the hidden state of a decoder, and the output
    of an encoder beside it. A stage that does not use a tensor passes it on unchanged.

    Attributes:
        is_stage: True, an attribute of the class: a spec that names the class is that of a stage, not of a layer.
        config, mesh: the model, and its layout.
        pre_process: this is the first stage, which takes tokens.
        post_process: this is the last stage, which computes losses.
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
        """Names, shapes and dtypes of its input and its output for a microbatch of tokens [b, s]; {} at the ends of the
        model."""
        ...

    def set_input_tensor(self, inputs: Tensors | None) -> None:
        """Set the output of the previous stage, for the next call."""
        ...

    def tied_weights(self) -> Weights:
        """The weights of this stage that the first stage and the last both use (`models/chunks`)."""
        ...

    def __call__(self, *args: Any, **options: Any) -> Any:
        """A batch -> losses of every token [b, s] on the last stage, else the input of the next stage."""
        ...

    def modules(self) -> Iterator[nn.Module]:
        """As in `nn.Module`, and so are all its other methods."""
        ...


class LanguageModel(Protocol):
    """A model all of whose stages are on this rank, as one stage.

    Attributes:
        config, mesh: the model, and its layout.
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
        """Layer number -> name -> state that the layer keeps of earlier tokens in generation.

        Raises:
            ConfigError: a layer has no `inference_state`.
        """
        ...

    def modules(self) -> Iterator[nn.Module]:
        """As in `nn.Module`."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """As in `nn.Module`; each has a `param_layout`."""
        ...

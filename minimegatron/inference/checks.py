"""Which models can generate here, and which of them in a step that is recorded or compiled.

| left out in generation         | why                                                                                |
|--------------------------------|------------------------------------------------------------------------------------|
| sequence parallelism           | one token cannot be cut                                                            |
| cp, pp, ep                     | ranks that wait for each other at every token want a scheduler                     |
| shards of weights              | no rank holds the model                                                            |
| what a module speaks against   | e.g. experts with a capacity: a sequence would depend on its neighbours            |
| a layer that does not say what it keeps | it would be asked about tokens that it has forgotten                      |

Megatron-LM: `megatron/core/inference/model_inference_wrappers/gpt`.
"""

from __future__ import annotations

from minimegatron.errors import ConfigError
from minimegatron.models.contract import LanguageModel


def check_can_generate(model: LanguageModel) -> None:
    """Refuse a model that cannot generate here.

    Raises:
        ConfigError: its layout, one of its modules, a layer that does not say what it keeps, or its training mode.
    """
    mesh = model.mesh
    for axis in (mesh.cp, mesh.pp, mesh.ep):
        if axis.size > 1:
            raise ConfigError(
                f"generation with {axis.name} = {axis.size}: it runs over tp and dp",
                fix=f"build the model with {axis.name} = 1; weights are loaded into any layout",
            )
    for module in model.modules():
        if (check := getattr(module, "check_generation", None)) is not None:
            check()
    if mesh.sequence_parallel:
        raise ConfigError(
            "generation with sequence_parallel: one token cannot be cut over the ranks of tp",
            fix="build the model with sequence_parallel=False; weights are loaded into any layout",
        )
    model.inference_state()
    if any(hasattr(p, "placements") or p.numel() > p.untyped_storage().nbytes() for p in model.parameters()):
        raise ConfigError(
            "generation from shards of weights (ZeRO-3, FSDP2): no rank holds the model",
            fix="with ddp.whole_weights(): around the engine and its calls",
        )
    if model.training:
        raise ConfigError("generation in training mode: dropout would be part of the answer", fix="model.eval()")


def check_can_record(model: LanguageModel) -> None:
    """Refuse a model whose step cannot be recorded or compiled as a whole.

    Raises:
        ConfigError: it sends messages, or a module reads the device on the host (`reads_device`, in words).
    """
    if model.mesh.tp.size > 1:
        raise ConfigError(
            f"a recorded or compiled decode step with tp = {model.mesh.tp.size}: it can hold no messages",
            fix="neither recorder nor compiled, or tp = 1",
        )
    for module in model.modules():
        if (reads := getattr(module, "reads_device", None)) is not None:
            raise ConfigError(
                f"a recorded or compiled decode step with a {type(module).__name__}: {reads}",
                fix="neither recorder nor compiled",
            )

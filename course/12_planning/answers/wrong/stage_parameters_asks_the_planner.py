# told: closed in this exercise
def stage_parameters(model, layers, first, last, tp, ep, etp):
    from minimegatron.footprint.states import meta_model
    from minimegatron.models.families import family_config

    config = family_config("llama", num_layers=layers, hidden_size=model["h"])
    return {"dense": sum(p.numel() for p in meta_model(config).parameters()), "experts": 0}

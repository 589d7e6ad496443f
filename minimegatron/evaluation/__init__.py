"""How good is a model? Likelihoods of texts and of answers to choose from; `lm_eval` is the harness's adapter."""

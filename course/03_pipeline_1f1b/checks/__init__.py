"""The exercises of lab 03: inputs, the judge's own answers, mistakes and what to say of them."""

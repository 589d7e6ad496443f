"""The exercises of lab 06: inputs, the judge's own answers, mistakes and what to say of them."""

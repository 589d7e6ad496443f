"""The exercises of lab 01: inputs, the judge's own answers, mistakes and what to say of them."""

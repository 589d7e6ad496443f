"""The exercises of lab 02: inputs, the judge's own answers, mistakes and what to say of them."""

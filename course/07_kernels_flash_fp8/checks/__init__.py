"""The exercises of lab 07: inputs, the judge's own answers, mistakes and what to say of them."""

"""The exercises of lab 06: their inputs, the judge's reference answers, and the mistakes that it recognises."""

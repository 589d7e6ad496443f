"""The exercises of lab 04: their inputs, the judge's reference answers, and the mistakes that it recognises."""

"""The exercises of lab 13: their inputs, the judge's reference answers, and the mistakes that it recognises."""

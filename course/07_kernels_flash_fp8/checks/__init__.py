"""The exercises of lab 07: their inputs, the judge's reference answers, and the mistakes that it recognises."""

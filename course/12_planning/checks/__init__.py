"""The exercises of lab 12, by part of the lab: their inputs, reference answers and recognised mistakes."""

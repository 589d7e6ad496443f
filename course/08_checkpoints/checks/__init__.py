"""The exercises of lab 08, by part of the lab: their inputs, reference answers and recognised mistakes."""

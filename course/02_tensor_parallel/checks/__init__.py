"""The exercises of lab 02: their inputs, the judge's reference answers, and what errors mean."""

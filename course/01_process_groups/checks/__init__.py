"""The exercises of lab 01: their inputs, the judge's reference answers, and what errors mean."""

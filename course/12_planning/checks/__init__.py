"""The exercises of lab 12 in parts."""

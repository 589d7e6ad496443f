"""A course of one small lab, which shows what a lab consists of (CONTRIBUTING.md)."""

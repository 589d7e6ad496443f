"""Checks, by part of the lab."""

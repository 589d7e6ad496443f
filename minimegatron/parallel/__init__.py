"""Wrappers of whole modules: data parallelism (`data`), pipeline schedules and their executors (`pipeline`)."""

"""Capstones: projects that are run and held against published criteria (`labkit/acceptance`, docs/capstones.md).

    NN_name/__init__.py    CAPSTONE: its criteria, and what runs a hand-in
    NN_name/start/         what a learner begins with, and gets no point for (`minimegatron capstone NN FOLDER`)
    NN_name/solution/      a hand-in that meets all of them

A folder has what its author edits; the page for the learner is docs/capstones.md.
"""

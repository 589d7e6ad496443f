"""The checks of each lab; the notebooks themselves hold none.

One module a notebook, `labNN_name`, lists the exercises in their order. Its parts, `partNN_idea`, declare them: an idea
each, and within it inputs, the judge's own answer, what can go wrong, and what to say then.
"""

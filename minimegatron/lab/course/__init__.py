"""The checks of each lab, one module a notebook; the notebooks themselves hold none."""

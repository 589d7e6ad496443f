from labkit.answers import Edit

WRONG = []

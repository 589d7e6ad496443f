"""How weights move: the step over fp32 main parameters, the norm that bounds it, the scale and the schedule."""

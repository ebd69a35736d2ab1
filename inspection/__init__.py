"""Tools that look at a model from outside: the check at every start, and counts of parameters, FLOPs and state."""

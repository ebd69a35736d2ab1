"""A model looked at from outside: the check at every start, and counts of parameters, FLOPs and state."""

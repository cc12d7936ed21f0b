"""The plans of families: one function each, from a config to a plan."""

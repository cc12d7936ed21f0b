"""The layouts of families: one function each, from a config to a layout."""

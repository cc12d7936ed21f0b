"""Facts about a model from its config and tensor names: one description per family, which every package reads."""

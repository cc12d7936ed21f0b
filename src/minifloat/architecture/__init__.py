"""Facts about a model from its config and tensor names: tensor roles, fused groups, supported decoder families."""

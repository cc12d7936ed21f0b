"""What a model is, told from the names of its tensors and its config: roles, fused groups, native families."""

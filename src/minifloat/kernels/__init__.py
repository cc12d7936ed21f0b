"""Compute kernels, one folder per op: the public function, `reference.py` (plain PyTorch) and fast versions beside it."""

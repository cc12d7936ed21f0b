"""Compute kernels, one folder per op: the public function, plain PyTorch beside it, and the fast versions."""

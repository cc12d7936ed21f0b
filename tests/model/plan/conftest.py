"""Fixtures of `small_llama`, for all tests of this folder."""

from small_llama import llama, make_checkpoint  # noqa: F401

"""The fixtures of `small_llama`."""

from small_llama import llama, make_checkpoint  # noqa: F401

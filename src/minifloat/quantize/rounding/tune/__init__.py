"""Tunes the codes and norms of a rounded model against the logits of the original one."""

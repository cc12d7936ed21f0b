"""Speculative decoding: cheap drafts of the next tokens, of which one step of the model computes all at once.

A decode step of one sequence takes as long as reading the weights, and a step of a few tokens hardly longer. A drafter
proposes tokens, the model computes the logits of all of them in one step, and the sequence takes those that the model
would have chosen itself, and one more (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
ICML 2023). Drafts change how many tokens a step gives, never which: `verify` compares each draft with the token that
the model chooses at that place, greedily or by a race (`minifloat.engine.sampling`).
"""

from minifloat.engine.speculation.speculator import Drafter, SpeculationStats, Speculator

__all__ = ["Drafter", "SpeculationStats", "Speculator"]

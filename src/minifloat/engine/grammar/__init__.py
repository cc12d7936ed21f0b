"""Text that must be JSON: llguidance computes which tokens may follow, in processes of its own.

A schema is untrusted input, and compiling it, or finding the tokens that may follow, can take any time and memory.
`worker.py` is the program of the processes, with limits that the system enforces; `grammars.py` starts them;
`state.py` is one text, which an engine asks after each token and never waits for longer than a step bears.
"""

from minifloat.engine.grammar.grammars import Grammars
from minifloat.engine.grammar.limits import GrammarLimits
from minifloat.engine.grammar.rules import Grammar
from minifloat.engine.grammar.state import GrammarPending, GrammarState

__all__ = ["Grammar", "GrammarLimits", "GrammarPending", "GrammarState", "Grammars"]

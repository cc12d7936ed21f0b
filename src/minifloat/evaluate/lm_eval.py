"""minifloat's engine as a model type of lm-evaluation-harness.

``python -m minifloat.evaluate.lm_eval`` is the harness' command ``lm_eval`` with one more ``--model``; programs
call `register` before ``lm_eval.simple_evaluate``. Versions after 0.4.13 find the name by an entry point too.
"""

from __future__ import annotations

import sys

from minifloat.errors import MinifloatError, UsageError

#: The name for ``--model``, and the class that it stands for. The harness imports the class when it is asked for.
NAME, TARGET = "minifloat", "minifloat.evaluate.lm_eval_model:MinifloatLM"


def register() -> None:
    """Make the model type known to lm-evaluation-harness in this process; more than once does no harm."""
    try:
        import lm_eval.models  # noqa: F401  the harness' own names come first
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise UsageError(
            f"lm-evaluation-harness 0.4.13 or newer is needed: pip install 'minifloat[eval]' ({error})"
        ) from error
    if NAME not in model_registry:
        model_registry.register(NAME, target=TARGET)


def main() -> None:
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except MinifloatError as error:
        sys.exit(f"minifloat: error: {error}")


if __name__ == "__main__":
    main()

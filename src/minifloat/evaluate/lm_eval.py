"""minifloat's engine as a model type of lm-evaluation-harness.

    python -m minifloat.evaluate.lm_eval --model minifloat --model_args pretrained=OUT --tasks hellaswag

is ``lm_eval`` with one more name for ``--model``; all its other arguments are the same. Versions of the harness that
find model types of other packages by the entry point ``lm_eval.models`` (its main branch since September 2026; 0.4.13
does not) know the name in the command ``lm_eval`` too. A program that uses the harness as a library calls `register`
before ``lm_eval.simple_evaluate(model="minifloat", ...)``.
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

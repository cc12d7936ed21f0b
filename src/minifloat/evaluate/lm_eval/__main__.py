"""The command ``lm_eval`` of lm-evaluation-harness, with the model type of `minifloat.evaluate.lm_eval`."""

from __future__ import annotations

import sys

from minifloat.errors import MinifloatError
from minifloat.evaluate.lm_eval import register


def main() -> None:
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except MinifloatError as error:
        sys.exit(f"minifloat: error: {error}")


if __name__ == "__main__":
    main()

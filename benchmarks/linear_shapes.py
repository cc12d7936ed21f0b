"""Names and shapes of the linears that `benchmarks/linear.py` measures.

q/k/v and gate/up share their input, so each pair or triple is one weight with the rows of all of them. Source: the
`config.json` of the models.
"""

from __future__ import annotations

from dataclasses import dataclass

from minifloat.errors import UsageError

Shape = tuple[int, int]

BASELINE = "torch BF16"
FORMATS = ("fp8", "fp8-block", "mxfp8", "mxfp4", "nvfp4", "bf16")


@dataclass(frozen=True)
class Model:
    """The dimensions of a decoder that determine its linears; widths in elements."""

    hidden: int
    q: int
    kv: int
    intermediate: int
    vocabulary: int

    @property
    def layers(self) -> dict[str, Shape]:
        """Name of a linear -> ``(N, K)``."""
        return {
            "qkv": (self.q + 2 * self.kv, self.hidden),
            "o": (self.hidden, self.q),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "lm_head": (self.vocabulary, self.hidden),
        }


MODELS = {
    "llama-1b": Model(hidden=2048, q=2048, kv=512, intermediate=8192, vocabulary=128256),
    "llama-8b": Model(hidden=4096, q=4096, kv=1024, intermediate=14336, vocabulary=128256),
    "qwen3-0.6b": Model(hidden=1024, q=2048, kv=1024, intermediate=3072, vocabulary=151936),
    "qwen3-8b": Model(hidden=4096, q=4096, kv=1024, intermediate=12288, vocabulary=151936),
}
DEFAULT = "llama-8b/o,llama-8b/down,llama-1b/o,llama-1b/gate_up,qwen3-0.6b/qkv"


def parse_shapes(text: str) -> dict[str, Shape]:
    """Return the shapes by name, in the order of `text`; of equal shapes only the first.

    Args:
        text: "all", or parts separated by commas: a model (its layers without `lm_head`), ``model/layer`` or ``NxK``.

    Raises:
        UsageError: If a part is none of these.
    """
    shapes: dict[str, Shape] = {}
    for part in ",".join(MODELS).split(",") if text == "all" else text.split(","):
        model, _, layer = part.partition("/")
        if model in MODELS:
            layers = MODELS[model].layers
            if layer and layer not in layers:
                raise UsageError(f"unknown layer {part!r}; {model} has: {', '.join(layers)}")
            names = [layer] if layer else [name for name in layers if name != "lm_head"]
            part_shapes = {f"{model}/{name}": layers[name] for name in names}
        else:
            rows, _, cols = part.partition("x")
            if not (rows.isdecimal() and cols.isdecimal()):
                raise UsageError(f"unknown shape {part!r}; give NxK, model or model/layer of: {', '.join(MODELS)}")
            part_shapes = {part: (int(rows), int(cols))}
        shapes |= {name: shape for name, shape in part_shapes.items() if shape not in shapes.values()}
    return shapes


def parse_names(text: str, known: tuple[str, ...], kind: str) -> tuple[str, ...]:
    """Return names separated by commas, "all" or "none"; `kind` is their noun in the error about an unknown one."""
    if text in ("all", "none"):
        return known if text == "all" else ()
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"unknown {kind} {', '.join(unknown)}; there are: {', '.join(known)}, or all, none")
    return names

"""Runs checkpoints in a real vLLM on a CPU, and says what became of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agreement import Answer, is_same_model
from tools import has_amx, run_script, torchvision_of

from minifloat.deploy.check import LoadVerdict

HARDWARE = "cpu" if has_amx() else "cpu-no-amx"
PROMPTS = [[3, 41, 17, 59, 8, 26, 33, 50], [5, 6, 7, 8, 9, 10]]
#: The verdict of `check` -> what must become of the checkpoint.
EXPECTED = {
    LoadVerdict.REFUSED: "refused",
    LoadVerdict.WRONG: "wrong",
    LoadVerdict.DEGRADED: "right",
    LoadVerdict.LOADS: "right",
}


@dataclass(frozen=True)
class Started:
    """A checkpoint to start."""

    folder: Path
    tp: int = 1
    as_if_amx: bool = False


def run_in_vllm(checkpoints: Mapping[str, Started], folder: Path, *, torchvision: bool = False) -> dict[str, Any]:
    """Return vLLM's answers for each checkpoint, from one process; if a checkpoint kills it, another runs the rest."""
    variables = {"PYTHONPATH": torchvision_of("vllm")} if torchvision else {}
    answers: dict[str, Any] = {}
    while rest := [name for name in checkpoints if name not in answers]:
        described = [
            {"name": name, "path": str(one.folder), "tp": one.tp, "as_if_amx": one.as_if_amx}
            for name, one in ((name, checkpoints[name]) for name in rest)
        ]
        request = {"prompts": PROMPTS, "tokens": 8, "logprobs": 20, "checkpoints": described}
        done = run_script("vllm", "in_vllm.py", request, folder, timeout=3000, **variables)
        answers |= {answer["name"]: answer for answer in done}
        if len(done) < len(rest):
            answers[rest[len(done)]] = {"error": "the process died", "outputs": []}
    return answers


def what_happened(folder: Path, answer: Mapping[str, Any], *, compared: bool = True) -> str:
    """Return "refused", "right" or "wrong"; a checkpoint that is not compared is right if it answers."""
    if answer["error"] is not None:
        return "refused"
    return "right" if not compared or is_same_model(folder, answers_of(answer)) else "wrong"


def answers_of(answer: Mapping[str, Any]) -> list[Answer]:
    """Return the answers to `PROMPTS` of a checkpoint that vLLM served."""
    return [
        Answer(prompt, output["tokens"], [{int(token): value for token, value in top.items()} for top in output["top"]])
        for prompt, output in zip(PROMPTS, answer["outputs"], strict=True)
    ]

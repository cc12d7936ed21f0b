"""Answers to the prompts of `compare --behavior`: by an engine in the way of `serve`, or by a running server.

Both ways end in the body of ``/v1/chat/completions``, so that answers are read alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from minifloat.checkpoint.progress import Progress
from minifloat.engine import Delivery, Engine, SamplingParams
from minifloat.errors import DataError, NonFiniteError, UsageError
from minifloat.evaluate.compare.behavior import Answers, Behavior, behavior_of
from minifloat.evaluate.compare.behavior_prompts import Prompts
from minifloat.evaluate.compare.memory import RecordedModel
from minifloat.evaluate.compare.models import EngineModel, Model, finished
from minifloat.serve.api.answers import CollectedAnswer, Piece, PlainText
from minifloat.serve.api.chat import ChatCompletionRequest, ChatWriter
from minifloat.serve.client import Connection, ServerError
from minifloat.serve.dialog.prompt import Dialog, Dialogs
from minifloat.serve.server.settings import ServerSettings

#: Prompts that are sent to a server at a time, so that it can batch them.
_REQUESTS = 8
_WHAT = "prompts with tools"


def behaviors(
    models: Sequence[Model], prompts: Prompts, progress: Progress | None, notes: list[str]
) -> list[Behavior | None]:
    """Let all models answer; return the behavior of each but the first, which is the baseline."""
    baseline, *candidates = (answers_of(model, prompts, progress) for model in models)
    return [behavior(prompts, baseline, candidate, notes) for candidate in candidates]


def behavior(prompts: Prompts, baseline: Answers, candidate: Answers, notes: list[str]) -> Behavior:
    """Compare the answers of two models; a note says where their prompts differ."""
    pairs = zip(baseline.answers, candidate.answers, strict=True)
    differing = sum(None not in (sizes := (a.prompt_tokens, b.prompt_tokens)) and len(set(sizes)) > 1 for a, b in pairs)
    if differing:
        notes.append(
            f"behavior: {differing} of {len(prompts.prompts)} prompts have another number of tokens for "
            f"{candidate.name} than for {baseline.name}: their chat templates or tokenizers differ"
        )
    return behavior_of(prompts.names, baseline, candidate)


def answers_of(model: Model, prompts: Prompts, progress: Progress | None) -> Answers:
    """Let a model answer, or return what it has answered before."""
    if isinstance(model, RecordedModel) and model.answers is not None:
        return model.answers
    assert isinstance(model, EngineModel), "transformers' code answers no prompts of behavior"
    return engine_answers(model.engine, model.name, prompts, progress)


def engine_answers(engine: Engine, name: str, prompts: Prompts, progress: Progress | None) -> Answers:
    """Answer prompts as `serve` does: template, engine, parser, and the body of the answer."""
    dialogs = Dialogs(engine.tokenizer)
    if not dialogs.has_template:
        raise UsageError(f"{name}: --behavior needs a chat template, and this model has none: leave the option out")
    asked = [
        _asked(engine, dialogs, body, prompt.name) for body, prompt in zip(prompts.bodies, prompts.prompts, strict=True)
    ]
    bodies: dict[int, Any] = {}
    tokens, params = [dialog.prompt for dialog, _ in asked], [each for _, each in asked]
    for index, delivery in finished(engine, tokens, params):
        if delivery.finish_reason == "error":
            raise NonFiniteError(f"logits of {name}", f"after {prompts.prompts[index].name}: {delivery.error}")
        bodies[index] = _written(asked[index][0], delivery)
        if progress is not None:
            progress(len(bodies), len(asked), f"{_WHAT} by {name}")
    return Answers(name, prompts.marked([bodies[index] for index in range(len(asked))]), dialogs.tool_format or "")


def _asked(engine: Engine, dialogs: Dialogs, body: dict[str, Any], name: str) -> tuple[Dialog, SamplingParams]:
    request = ChatCompletionRequest.model_validate({**body, "model": name})
    characters = ServerSettings(model_name=name).prompt_characters(engine.info.max_model_len)
    try:
        dialog = dialogs.read(request.conversation(), characters)
        sampling = replace(request.sampling(), **dialog.sampling())
        (params,) = sampling.params(engine.generation_defaults)
        engine.check(dialog.prompt, params)
    except UsageError as error:
        raise DataError(f"--behavior, {name}: {error}") from error
    return dialog, params


def _written(dialog: Dialog, delivery: Delivery) -> dict[str, Any]:
    parser = dialog.parser() if dialog.is_parsed else PlainText()
    answer = CollectedAnswer()
    answer.add(Piece([*parser.add(delivery.text), *parser.finish()], delivery))
    writer = ChatWriter("", choices=1, logprobs=False, with_usage=False)
    return writer.answer([answer], answer.usage).model_dump(exclude_unset=True)


def served_answers(connection: Connection, model: str, prompts: Prompts, progress: Progress | None) -> Answers:
    """Let a server answer prompts by ``/v1/chat/completions``."""

    def answer(place: int) -> Any:
        body = {**requests[place], "model": model}
        try:
            return connection.json("POST", "/v1/chat/completions", body)
        except ServerError as error:
            raise ServerError(f"{connection.url}: {prompts.prompts[place].name}: {error}", error.status) from error

    requests, bodies = prompts.bodies, []
    with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="minifloat-behavior") as pool:
        for body in pool.map(answer, range(len(requests))):
            bodies.append(body)
            if progress is not None:
                progress(len(bodies), len(requests), f"{_WHAT} by {model}")
    return Answers(
        f"{model} at {connection.url}",
        prompts.marked(bodies),
        str(connection.listed_model(model).get("tool_format") or ""),
    )

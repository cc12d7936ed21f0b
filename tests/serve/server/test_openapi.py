"""The OpenAPI document, and whether the server does what it says: schemathesis tries what it can think of."""

from __future__ import annotations

from typing import Any

import schemathesis
from fake_engine import INFO
from hypothesis import HealthCheck, given, settings
from modes import is_full
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from serving import MODEL, Client

import minifloat.serve.server

#: Not `positive_data_acceptance`: a schema cannot say that a prompt must fit the context, or that min_tokens is at most
#: max_tokens.
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]


def test_the_server_does_what_its_document_says(client: Client) -> None:
    document = schemathesis.openapi.from_url(f"{client.url}/openapi.json")
    operations = [result.ok() for result in document.get_all_operations()]
    assert len(operations) == 17
    for operation in operations:
        modes = [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if operation.body else [])]
        for mode in modes:

            @settings(
                max_examples=20 if is_full() else 5,
                deadline=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: Any) -> None:
                case.call_and_validate(checks=CHECKS)

            check()


def test_the_document_names_the_model_and_bounds_its_tokens(client: Client) -> None:
    schemas = client.get("/openapi.json").json["components"]["schemas"]
    assert {"Completion", "ChatCompletion"} <= set(schemas)  # generated clients name their classes so
    assert schemas["CompletionRequest"]["properties"]["model"]["anyOf"] == [{"enum": [MODEL]}]
    tokens = schemas["DetokenizeRequest"]["properties"]["tokens"]
    assert tokens["items"]["maximum"] == INFO.vocab_size - 1
    for name in ("CompletionRequest", "ChatCompletionRequest", "TokenizeRequest", "Message"):
        assert schemas[name]["additionalProperties"] is False


def test_there_are_no_pages_that_load_scripts_from_elsewhere(client: Client) -> None:
    assert client.get("/docs").status == client.get("/redoc").status == 404


def test_every_exported_name_resolves() -> None:
    assert all(getattr(minifloat.serve.server, name) is not None for name in minifloat.serve.server.__all__)

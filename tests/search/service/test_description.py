"""The service does what its own description says: requests of every kind that it allows, and of kinds it does not."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from roadmap.search.service import application, running

from ...waiting import PATIENCE
from .worlds import ColourEncoder, make_index, patient

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
OPERATIONS = {
    "GET /health",
    "GET /ready",
    "GET /metrics",
    "GET /api/indexes",
    "POST /api/indexes/{index}/search/pictures",
    "POST /api/indexes/{index}/search",
    "POST /api/indexes/{index}/list",
    "GET /api/indexes/{index}/picture",
    "POST /api/indexes/{index}/rows",
    "POST /api/indexes/{index}/pictures",
    "DELETE /api/indexes/{index}/rows",
}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, encoder = tmp_path_factory.mktemp("description"), ColourEncoder()
    index = make_index(folder / "birds", folder / "pictures", encoder)
    with running(application({"birds": index}, encoder, patient(rate=0))) as found:
        yield found


def test_everything_is_described(address: str) -> None:
    described = httpx.get(f"{address}/api/openapi.json", timeout=PATIENCE).json()
    found = {f"{method.upper()} {path}" for path, methods in described["paths"].items() for method in methods}
    assert found == OPERATIONS


# What takes no input has none that is wrong.
CASES = [
    (label, mode)
    for label in sorted(OPERATIONS)
    for mode in schemathesis.GenerationMode
    if mode is schemathesis.GenerationMode.POSITIVE or "{index}" in label
]


@pytest.mark.parametrize(("label", "mode"), CASES, ids=lambda part: str(getattr(part, "value", part)))
def test_every_answer_is_as_described(address: str, label: str, mode: schemathesis.GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{address}/api/openapi.json")
    method, path = label.split(" ")
    operation = schema[path][method]

    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=operation.as_strategy(generation_mode=mode), known=st.booleans())
    def check(case: schemathesis.Case, known: bool) -> None:
        if known and "index" in case.path_parameters:
            case.path_parameters["index"] = "birds"  # a name that is there, or nothing behind it would be asked
        case.call_and_validate(checks=CHECKS, timeout=PATIENCE)

    check()

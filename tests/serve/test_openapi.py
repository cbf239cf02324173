"""schemathesis reads the description and sends what it allows and what it does not."""

from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vacsr.serve import ServiceSettings, create_app

OPERATIONS = [
    ("POST", "/search"),
    ("POST", "/score"),
    ("GET", "/photo/{id}"),
    ("GET", "/healthz"),
    ("GET", "/info"),
    ("GET", "/metrics"),
]


def _check(world: Any, *, direction: str, method: str, path: str, examples: int) -> None:
    searcher = world.searcher if direction == "t2i" else world.texts
    app = create_app(searcher, ServiceSettings(max_k=20, max_text=50, batch_ms=0), photos=lambda: [world.photos])
    operation = schemathesis.openapi.from_asgi("/openapi.json", app)[path][method]
    modes = list(schemathesis.GenerationMode) if method == "POST" else [schemathesis.GenerationMode.POSITIVE]
    answered = Counter[int]()

    @given(data=st.data())
    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def no_fault(data: Any) -> None:
        for mode in modes:
            case = data.draw(operation.as_strategy(generation_mode=mode))
            answer = case.call()
            answered[answer.status_code] += 1
            assert answer.status_code < 500, answer.text
            case.validate_response(answer, excluded_checks=[schemathesis.checks.positive_data_acceptance])

    no_fault()
    if method == "GET" and "{id}" not in path:
        assert set(answered) == {200}
    if path == "/search" and examples > 100:  # few tries may all ask for what was not fitted
        assert answered[200], answered


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_fault_in_a_few_tries(world: Any, method: str, path: str) -> None:
    _check(world, direction="t2i", method=method, path=path, examples=5)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("direction", ["t2i", "i2t"])
@pytest.mark.parametrize(("method", "path"), OPERATIONS[:3])
def test_no_fault_in_many_tries(world: Any, direction: str, method: str, path: str) -> None:
    _check(world, direction=direction, method=method, path=path, examples=200)

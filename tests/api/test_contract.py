"""What the OpenAPI document says, held against what the server answers to whatever fits it, and to what does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi import checks

from raycontrol.access import Role
from raycontrol.status import JobState
from tests.api.fakes import DIGEST, FakeDoor, adas_job, write_log
from tests.api.test_server import running

pytestmark = pytest.mark.long

EXAMPLES = 40
LEFT_OUT = [checks.positive_data_acceptance, checks.ignored_auth]
"""A spec has rules between its fields that no schema can say; tokens have tests of their own (``test_access``)."""
REAL = {"job_id": "digits-ab12cd", "instance": "worker-0", "digest": DIGEST}


class Endless(FakeDoor):
    """Its job is always there and has ended, whatever is done to it."""

    def prune(self, job_ids: Any) -> None:
        self.calls.append(("prune", *job_ids))


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    door, home = Endless(), tmp_path_factory.mktemp("home")
    door.put(adas_job(JobState.SUCCEEDED))
    write_log(home, b"one\ntwo\n")
    token = door.let_in("root", "root", Role.ADMIN)
    with running(Path(home), door, burst=10**9, failures_burst=10**9) as url:
        found = schemathesis.openapi.from_url(f"{url}/openapi.json")
        found.config.update(headers={"Authorization": f"Bearer {token}"})

        @found.hook  # type: ignore[untyped-decorator]
        def map_path_parameters(context: Any, path_parameters: dict[str, Any] | None) -> Any:
            return path_parameters and {
                **path_parameters,
                **{k: v for k, v in REAL.items() if k in path_parameters},
            }

        yield found


def test_every_answer_is_as_described_and_none_is_a_500(schema: Any) -> None:
    """Operation by operation, streams left out: they are tested by themselves."""
    tried = []
    for operation in (found.ok() for found in schema.get_all_operations()):
        if not operation.path.endswith("/stream"):
            hold_to_the_document(operation)
            tried.append(operation.label)
    assert len(tried) >= 29


def hold_to_the_document(operation: Any) -> None:
    @given(case=operation.as_strategy())
    @settings(
        max_examples=EXAMPLES, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    def hold(case: Any) -> None:
        case.call_and_validate(excluded_checks=LEFT_OUT)

    hold()

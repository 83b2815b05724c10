"""What an instance hears of its node's place in the cluster; it is the second half of the fence."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence

import pytest
from ray._raylet import InnerGcsClient

from raycontrol.actors import Membership

NODE_ID = "ab" * 28
ADDRESS = "10.0.0.1:6379"


class Gcs:
    """Gives clients that all take the next of these answers; one that is an error is raised."""

    def __init__(self, *answers: list[bool] | Exception) -> None:
        self._answers = iter(answers)
        self.addresses: list[str] = []

    def connect(self, address: str) -> Gcs:
        self.addresses.append(address)
        return self

    def check_alive(self, node_ids: Sequence[object], timeout: float) -> list[bool]:
        assert [str(one) for one in node_ids] == [f"NodeID({NODE_ID})"]
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_client_is_kept_while_it_works() -> None:
    gcs = Gcs([True], [True], [False])
    member = Membership(ADDRESS, NODE_ID, gcs.connect)
    assert [member.is_given_up() for _ in range(3)] == [False, False, True]
    assert gcs.addresses == [ADDRESS]


def test_after_a_failure_another_client_asks_whoever_is_there_now() -> None:
    gcs = Gcs([True], ConnectionError("WrongClusterID"), [False])
    member = Membership(ADDRESS, NODE_ID, gcs.connect)
    assert [member.is_given_up() for _ in range(3)] == [False, False, True]
    assert gcs.addresses == [ADDRESS, ADDRESS]


def test_a_ray_that_cannot_be_asked_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    gcs = Gcs(ConnectionError("no answer"), TypeError("unexpected argument"), AttributeError("no such thing"))
    member = Membership(ADDRESS, NODE_ID, gcs.connect)
    assert [member.is_given_up() for _ in range(3)] == [False, False, False]
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.ERROR, "this Ray cannot be asked whether it has given this node up")
    ]


def test_the_ray_that_is_installed_can_be_asked() -> None:
    """Neither is a public part of Ray."""
    assert callable(InnerGcsClient.standalone)
    assert "timeout" in inspect.signature(InnerGcsClient.check_alive).parameters

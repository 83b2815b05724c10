"""A cluster that asks for Ray's token, beside one that does not: what clients are told, and what the server says of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray.conftest import LocalRay

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[LocalRay]:
    local = LocalRay(Path(tempfile.mkdtemp(prefix="rc-tok-")), tmp_path / "home", TOKEN)
    try:
        local.wait_ready()
        yield local
    finally:
        local.close()


def test_a_cluster_says_itself_whether_it_asks_for_a_token(guarded: LocalRay, cluster: LocalRay) -> None:
    refused = guarded.raycontrol("list")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == (
        f"raycontrol: the Ray cluster at {guarded.address} asks for Ray's token: set RAY_AUTH_MODE=token, and have "
        "~/.ray/auth_token as it is on the head, or RAY_AUTH_TOKEN\n"
    )
    assert guarded.json("controller", "restart", env=TOKEN)["ray_auth_mode"] == "token"
    assert cluster.json("controller", "restart", env=TOKEN)["ray_auth_mode"] == "disabled"

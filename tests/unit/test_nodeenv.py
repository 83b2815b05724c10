"""What a job gets of its node's environment."""

from __future__ import annotations

import os

import pytest

from raycontrol.nodeenv import search_path, without_ray


def test_rays_own_allocator_is_left_out_and_an_operators_stays() -> None:
    assert without_ray({"LD_PRELOAD": "/v/lib/python3.11/site-packages/ray/core/libjemalloc.so"}) == {}
    assert without_ray({"LD_PRELOAD": "/opt/libtcmalloc.so"}) == {"LD_PRELOAD": "/opt/libtcmalloc.so"}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ({"PATH": "/usr/bin:/bin"}, "/own:/usr/bin:/bin"),
        ({"PATH": "/usr/bin:/own:/bin"}, "/own:/usr/bin:/bin"),
        ({"PATH": ""}, f"/own:{os.defpath}"),
        ({}, f"/own:{os.defpath}"),
    ],
)
def test_our_own_bin_comes_first_and_once(nodes: dict[str, str], expected: str) -> None:
    assert search_path(nodes, "/own") == expected

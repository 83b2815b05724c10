from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.fakes import Api


@pytest.fixture
def make_api(tmp_path: Path) -> Iterator[Callable[..., Api]]:
    """Makes servers with limits of their own."""
    made: list[Api] = []

    def make(**limits: Any) -> Api:
        made.append(Api(tmp_path, **limits))
        return made[-1]

    yield make
    for api in made:
        api.close()


@pytest.fixture
def api(make_api: Callable[..., Api]) -> Api:
    return make_api()

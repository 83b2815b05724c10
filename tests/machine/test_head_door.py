"""What a server on the head reads in the store is what the controller would have said."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycontrol.access import Identity, Role
from raycontrol.errors import JobNotFound
from raycontrol.status import JobState
from raycontrol.store import Store
from raycontrol.storereader import HeadDoor
from raycontrol.tokens import parsed
from tests.machine.fake_cluster import in_loop
from tests.machine.test_controller import STAYS, finish, site

pytestmark = pytest.mark.timeout(60)


@in_loop
async def test_a_server_on_the_head_sees_at_once_what_the_controller_has_stored(tmp_path: Path) -> None:
    here = site(tmp_path, STAYS)
    await here.controller.started()
    with Store(tmp_path, create=False) as store:
        door = HeadDoor(None, None, store)
        assert door.jobs(None, None, 10) == []
        await here.submit("first-1")
        await here.submit("second-1")
        await here.reaches("first-1", JobState.RUNNING)
        await here.shows("second-1", lambda job: job.pending is not None)
        assert door.jobs(None, None, 10) == await here.controller.jobs(None, None, 10)
        assert door.glance("first-1") == await here.controller.glance("first-1")
        await here.controller.stop("second-1", "enough")
        await here.ends("second-1")
        assert door.jobs(None, None, 10) == await here.controller.jobs(None, None, 10)
        await here.controller.stop("first-1", "enough")
        await here.ends("first-1")
        assert [job.id for job in door.jobs([JobState.STOPPED], "ada", 10, text="FIRST")] == ["first-1"]
        assert door.glance("first-1") == await here.controller.glance("first-1")
        with pytest.raises(JobNotFound):
            door.glance("third-1")
        _, text = await here.controller.porter.create_token("laptop", Role.USER, "ada", None, by="root")
        token = parsed(text)
        assert token is not None
        assert door.authenticate(*token) == Identity(token="laptop", user="ada", role=Role.USER)
        await here.controller.porter.revoke_token("laptop")
        assert door.authenticate(*token) is None
    await finish(here)

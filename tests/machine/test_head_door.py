"""What a server on the head reads in the store is what the controller would have said."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycontrol.access import Identity, Role
from raycontrol.errors import JobNotFound
from raycontrol.readers import HeadDoor
from raycontrol.status import JobState
from raycontrol.store import Store
from raycontrol.tokens import parsed
from tests.machine.fake_cluster import in_loop, submission
from tests.machine.test_controller import STAYS, finish, site

pytestmark = pytest.mark.timeout(60)


@in_loop
async def test_a_server_on_the_head_sees_at_once_what_the_controller_has_stored(tmp_path: Path) -> None:
    here = site(tmp_path, STAYS)
    await here.controller.started()
    with Store(tmp_path, create=False) as store:
        door = HeadDoor(None, None, store)
        assert door.jobs(None, None, 10) == []
        for job_id in ("first-1", "second-1"):
            await here.controller.submit(submission(job_id))
        for _ in range(2):
            assert door.jobs(None, None, 10) == await here.controller.jobs(None, None, 10)
            assert door.glance("first-1") == await here.controller.glance("first-1")
            await here.controller.stop("first-1", "enough")
            await here.becomes("first-1", JobState.STOPPED)
        assert [job.id for job in door.jobs([JobState.STOPPED], "me", 10, text="FIRST")] == ["first-1"]
        with pytest.raises(JobNotFound):
            door.glance("third-1")
        _, text = await here.controller.porter.create_token("laptop", Role.USER, "ada", None, by="root")
        token = parsed(text)
        assert token is not None
        assert door.authenticate(*token) == Identity(token="laptop", user="ada", role=Role.USER)
        await here.controller.porter.revoke_token("laptop")
        assert door.authenticate(*token) is None
    await finish(here)

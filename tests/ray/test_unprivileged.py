"""The main cases once more, as a user who may do nothing on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from tests.ray.alone import NOBODY, RUN_S, Nobody, alone

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="every test runs as an unprivileged user already")

THREE_JOBS = """
import os
from raycontrol import Client, JobSpec

def spec(command, **fields):
    return JobSpec(command=command, resources={"cpu": 0.1}, placement="pack", **fields)

with Client(embedded=True) as client:
    pair = client.submit(spec('echo "$INDEX $(id -u)"; echo done > $RAYCONTROL_OUTPUT_DIR/mark', nodes=2))
    print(pair.wait(timeout_s=200).state.value, sorted(pair.logs(prefix=False)))
    print(open(f"{pair.info().outputs}/worker-0/mark").read().strip())

    failing = client.submit(spec('[ "$INDEX" = 1 ] && exit 7; exec sleep 600', nodes=2))
    info = failing.wait(timeout_s=200)
    print(info.state.value, info.exit_status, info.instances[0].note)

    stopped = client.submit(spec("trap 'echo saved; exit' TERM; echo up; while :; do sleep 0.1; done"))
    lines = stopped.logs(follow=True, prefix=False)
    print(next(lines))
    stopped.stop()
    print([*lines][-1], stopped.wait(timeout_s=200).state.value)
"""


@pytest.fixture
def nobody() -> Iterator[Nobody]:
    with alone(Nobody) as shell:
        yield shell


def test_three_jobs(nobody: Nobody) -> None:
    program = nobody.popen([sys.executable, "-c", THREE_JOBS])
    stdout, stderr = program.communicate(timeout=RUN_S)
    assert program.returncode == 0, stderr
    assert stdout.splitlines() == [
        f"SUCCEEDED ['0 {NOBODY}', '1 {NOBODY}']",
        "done",
        "FAILED 7 stopped: worker-0 failed",
        "up",
        "saved STOPPED",
    ]

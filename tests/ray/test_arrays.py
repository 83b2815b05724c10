"""An array and a chain of dependencies on a real Ray: what members find, and what `run`, `get`, `logs` and `wait` tell."""

from __future__ import annotations

from raycontrol import Client
from raycontrol.status import JobState, Reason
from tests.ray.conftest import LocalRay
from tests.ray.jobs import WAIT_S, ended, spec

MEMBER = "echo member $RAYCONTROL_ARRAY_INDEX of $RAYCONTROL_ARRAY_COUNT; [ $RAYCONTROL_ARRAY_INDEX != 5 ] || exit 3"


def test_an_array_of_twelve_four_at_a_time_of_which_one_fails(cluster: LocalRay, client: Client) -> None:
    answer = cluster.raycontrol("run", "--cpu", "0.1", "--name", "sweep", "--array", "0-11%4", "--", MEMBER)
    assert answer.returncode == 3, answer.stderr
    assert sorted(answer.stdout.splitlines()) == sorted(
        f"{index} | member {index} of 12" for index in range(12)
    )
    (job,) = [one for one in client.list(text="sweep-") if one.array is not None]
    assert job.array is not None
    assert (job.state, job.array.succeeded, job.array.failed) == (JobState.FAILED, 11, 1)
    assert "member 5: master-0 on " in answer.stderr
    shown = cluster.raycontrol("get", job.id, check=True).stdout
    table = [line.split()[:4] for line in shown[shown.index("MEMBERS") :].splitlines()[1:3]]
    assert table == [["5", "FAILED", "code", "3"], ["0-4,6-11", "SUCCEEDED", "code", "0"]]
    assert cluster.raycontrol("logs", job.id, "--member", "5", check=True).stdout.endswith("member 5 of 12\n")
    assert cluster.raycontrol("wait", job.id).returncode == 3
    member = client.job(f"{job.id}~5").info()
    assert (member.state, member.index, member.exit_code) == (JobState.FAILED, 5, 3)


def test_a_chain_of_dependencies(cluster: LocalRay, client: Client) -> None:
    first = client.submit(spec("sleep 1; exit 4", valid_exit_codes=[0, "3-5"]))
    second = cluster.raycontrol(
        "submit", "--cpu", "0.1", "--after", first.id[:-1], "--", "exit 7", check=True
    ).stdout.strip()
    third = client.submit(spec("true", after={"ok": [second]}))
    fourth = client.submit(spec("true", after={"failed": [second], "any": [third.id]}))
    assert client.job(fourth.id).wait(timeout_s=WAIT_S).state is JobState.SUCCEEDED
    assert (ended(first).state, ended(first).exit_code) == (JobState.SUCCEEDED, 4)
    assert (ended(third).state, ended(third).reason) == (JobState.FAILED, Reason.DEPENDENCY_FAILED)
    answer = cluster.raycontrol("wait", third.id)
    assert (answer.returncode, f"waited for {second} to succeed, but it is FAILED" in answer.stderr) == (
        125,
        True,
    )

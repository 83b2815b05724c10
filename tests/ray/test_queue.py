"""Further attempts and the queue's verbs, on a real Ray: what the next attempt finds, and that nothing is left between two."""

from __future__ import annotations

import json

from raycontrol import Client
from raycontrol.status import JobState, Outcome, Reason
from tests.ray.conftest import LocalRay
from tests.ray.jobs import WAIT_S, ended, kinds, lines, said, spec
from tests.support import wait_until

COUNTS = (
    "echo attempt $RAYCONTROL_ATTEMPT of $RAYCONTROL_ATTEMPT_ID on port $MASTER_PORT; echo x >> count; "
    'echo x >> "$RAYCONTROL_OUTPUT_DIR/count"; wc -l < count; wc -l < "$RAYCONTROL_OUTPUT_DIR/count"; '
)


def test_a_program_that_fails_is_tried_again_with_its_folders_and_without_queueing(client: Client) -> None:
    job = client.submit(spec(COUNTS + "[ $RAYCONTROL_ATTEMPT = 2 ] || exit 3", retry={"max": 2}))
    followed = list(job.logs(follow=True, prefix=False))
    info = ended(job)
    assert (info.state, info.attempt) == (JobState.SUCCEEDED, 2)
    assert [(one.outcome, one.exit_code) for one in info.attempts] == [
        (Outcome.FAILED, 3),
        (Outcome.FAILED, 3),
        (Outcome.SUCCEEDED, 0),
    ]
    assert [line for line in followed if not line.startswith("attempt")] == ["1", "1", "2", "2", "3", "3"]
    told = [line.split() for line in followed if line.startswith("attempt")]
    assert [words[1] for words in told] == ["0", "1", "2"]
    assert len({words[3] for words in told}) == 3, "every attempt has a name of its own"
    assert kinds(job).count("NodesChosen") == 1
    assert list(job.logs(attempt=1, prefix=False))[1:] == ["2", "2"]


def test_a_suspended_job_is_away_until_it_is_resumed(client: Client, cluster: LocalRay) -> None:
    job = client.submit(
        spec(COUNTS + "echo ready $RAYCONTROL_ATTEMPT; [ $RAYCONTROL_ATTEMPT = 1 ] || exec sleep 600")
    )
    said(job, "ready")
    job.suspend()
    wait_until(lambda: job.info().state is JobState.QUEUED, WAIT_S, "the job is back in the queue")
    info = job.info()
    assert (info.reason, [one.reason for one in info.attempts]) == (Reason.HELD, [Reason.SUSPENDED])
    assert not [actor for actor in cluster.ask()["actors"] if job.id in (actor["name"] or "")]
    (entry,) = [one for one in client.queue() if one.id == job.id]
    assert entry.held and entry.why is not None and entry.why.startswith("suspended by ")
    job.resume()
    assert (ended(job).state, ended(job).attempt) == (JobState.SUCCEEDED, 1)
    assert lines(job)[1:3] == ["2", "2"]


def test_the_queue_s_verbs_on_the_command_line(client: Client, cluster: LocalRay) -> None:
    job = client.submit(spec("true", resources={"cpu": 1000}))
    wait_until(lambda: job.info().pending, WAIT_S, "the job has a reason to wait")
    assert cluster.raycontrol("priority", job.id, "2", check=True).stdout == f"{job.id} QUEUED (WAITING)\n"
    assert cluster.raycontrol("hold", job.id, check=True).stdout == f"{job.id} QUEUED (HELD)\n"
    entries = json.loads(cluster.raycontrol("queue", "--json", check=True).stdout)
    (entry,) = [one for one in entries if one["id"] == job.id]
    assert (entry["priority"], entry["held"]) == (2, True)
    assert f"{job.id} " in cluster.raycontrol("queue", check=True).stdout
    assert cluster.raycontrol("release", job.id, check=True).stdout == f"{job.id} QUEUED (WAITING)\n"
    job.stop()
    assert ended(job).state is JobState.STOPPED
    refused = cluster.raycontrol("suspend", job.id)
    assert (refused.returncode, "has ended (STOPPED)" in refused.stderr) == (2, True)


def test_a_preemptible_job_makes_room_for_one_of_a_higher_priority(client: Client) -> None:
    (node,) = client.nodes()
    whole = {"cpu": node.total["CPU"]}
    cheap = client.submit(
        spec(
            "echo ready yes; [ $RAYCONTROL_ATTEMPT = 1 ] || exec sleep 600",
            priority=8,
            preemptible=True,
            resources=whole,
        )
    )
    said(cheap, "ready")
    urgent = client.submit(spec("true", priority=1, resources=whole))
    assert ended(urgent).state is JobState.SUCCEEDED
    info = ended(cheap)
    assert (info.state, [one.outcome for one in info.attempts]) == (
        JobState.SUCCEEDED,
        [Outcome.PREEMPTED, Outcome.SUCCEEDED],
    )

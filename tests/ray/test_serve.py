"""The HTTP interface over a real cluster: `raycontrol serve`, what asks it, and what happens when it is killed."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from raycontrol import Client
from raycontrol.settings import Settings
from raycontrol.status import JobState
from tests.ray.conftest import BIN, LocalRay, descendants, end, free_ports
from tests.ray.jobs import WAIT_S, ended, python, said, spec
from tests.support import wait_until

COUNT = """
import pathlib, time
for number in range(400):
    print("line", number, flush=True)
    time.sleep(0.005)
print("counted", flush=True)
while not pathlib.Path(%r).exists():
    time.sleep(0.05)
for number in range(400, 800):
    print("line", number, flush=True)
"""


class Server:
    """`raycontrol serve` on this machine; ``start`` it again after ``kill``, at the same address."""

    def __init__(self, cluster: LocalRay) -> None:
        self._cluster = cluster
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> dict[str, Any]:
        """What the server says of itself once it listens."""
        self._process = self._cluster.popen(
            [BIN / "raycontrol", "serve", "--port", str(self.port), "--json"], stderr=subprocess.DEVNULL
        )
        assert self._process.stdout is not None
        told: dict[str, Any] = json.loads(self._process.stdout.readline())
        return told

    def kill(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        end(descendants(self._process.pid))
        self._process.wait()
        self._process.stdout.close()

    @property
    def token(self) -> str:
        return (self._cluster.home / "serve.token").read_text().strip()

    def curl(self, method: str, path: str, token: str | None = None, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token or self.token}", **options.pop("headers", {})}
        return httpx.request(method, f"{self.url}{path}", headers=headers, timeout=30, **options)


@pytest.fixture
def server(cluster: LocalRay) -> Iterator[Server]:
    server = Server(cluster)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def laptop(server: Server, tmp_path: Path) -> dict[str, str]:
    """What is set on a machine that has no Ray."""
    home = {"RAYCONTROL_HOME": str(tmp_path / "laptop"), "RAY_ADDRESS": ""}
    return {"RAYCONTROL_URL": server.url, "RAYCONTROL_TOKEN": server.token, **home}


def test_a_laptop_without_ray_has_the_same_commands(
    cluster: LocalRay, laptop: Mapping[str, str], tmp_path: Path
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print('trained')\nopen('/dev/null')\n")
    ran = cluster.raycontrol(
        "run", "--cpu", "0.1", "--working-dir", tmp_path / "code", "--", "python train.py", env=laptop
    )
    assert (ran.returncode, ran.stdout) == (0, "master-0 | trained\n"), ran.stderr
    (listed,) = [item for item in cluster.json("list", env=laptop) if item["name"] == "python"][:1]
    assert (listed["state"], listed["user"]) == ("SUCCEEDED", cluster.json("list")[0]["user"])
    assert cluster.json("nodes", env=laptop)[0]["head"] is True
    job_id = cluster.raycontrol("submit", "--cpu", "0.1", "--", "sleep 600", env=laptop, check=True).stdout
    wait_until(
        lambda: cluster.json("get", job_id.strip(), env=laptop)["state"] == "RUNNING", WAIT_S, "it runs"
    )
    cluster.raycontrol("stop", "--force", job_id.strip(), env=laptop, check=True)
    assert cluster.raycontrol("wait", job_id.strip(), env=laptop).returncode == 130


def test_what_curl_submits_is_the_tokens_users_and_happens_once(cluster: LocalRay, server: Server) -> None:
    token = cluster.raycontrol(
        "token", "create", "ada-laptop", "--role", "user", "--user", "ada", check=True
    ).stdout.strip()
    wish = {"spec": {"name": "once", "command": "echo once", "resources": {"cpu": 0.1}}}
    key = {"Idempotency-Key": "a key of ada's"}
    first, again = (server.curl("POST", "/api/v1/jobs", token, json=wish, headers=key) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["user"] == "ada" and again.json()["id"] == first.json()["id"]
    other = {"spec": {**wish["spec"], "command": "echo twice"}}
    assert server.curl("POST", "/api/v1/jobs", token, json=other, headers=key).status_code == 409
    client = Client(url=server.url, token=token, settings=Settings(home=str(cluster.home)))
    job = client.job(first.json()["id"])
    assert ended(job).state is JobState.SUCCEEDED
    assert list(job.logs(prefix=False)) == ["once"]
    (submitted,) = [event for event in job.events() if event.kind == "Submitted"]
    assert first.headers["X-Request-ID"] in submitted.message
    entries = server.curl("GET", "/api/v1/audit").json()["entries"]
    assert [entry["token"] for entry in entries if entry["action"] == "submit"][-3:] == ["ada-laptop"] * 3
    cluster.raycontrol("token", "revoke", "ada-laptop", check=True)
    wait_until(
        lambda: server.curl("GET", "/api/v1/jobs", token).status_code == 401,
        10,
        "the revoked token is refused",
    )


def test_a_secret_reaches_the_job_and_nothing_else(cluster: LocalRay, server: Server) -> None:
    secret = "s3cret-of-the-job"
    body = {
        "spec": {
            "command": "echo ${#HF_TOKEN}",
            "secret_env": {"HF_TOKEN": secret},
            "resources": {"cpu": 0.1},
        }
    }
    job_id = server.curl("POST", "/api/v1/jobs", json=body).json()["id"]
    wait_until(
        lambda: server.curl("GET", f"/api/v1/jobs/{job_id}").json()["state"] == "SUCCEEDED", WAIT_S, "ended"
    )
    assert server.curl("GET", f"/api/v1/jobs/{job_id}/logs/master-0").content == b"%d\n" % len(secret)
    answers = [
        server.curl("GET", f"/api/v1/jobs/{job_id}{path}").text
        for path in ("", "/events", "/plan", "/instances", "/logs")
    ]
    assert all(secret not in answer for answer in answers) and "HF_TOKEN" in answers[2]
    files = {path.name: path.read_bytes() for path in cluster.home.glob("store.db*")}
    assert "store.db" in files and not [name for name, held in files.items() if secret.encode() in held]


def test_followers_of_a_killed_server_resume_without_a_gap_or_a_repeat(
    cluster: LocalRay, server: Server, tmp_path: Path
) -> None:
    go_on = tmp_path / "go-on"
    client = Client(url=server.url, token=server.token, settings=Settings(home=str(cluster.home)))
    job = client.submit(python(COUNT % str(go_on)))
    lines = job.logs(follow=True, prefix=False)
    read = [next(lines) for _ in range(100)]
    server.kill()
    server.start()
    go_on.touch()
    read += list(lines)
    assert [line for line in read if line != "counted"] == [f"line {number}" for number in range(800)]
    assert ended(job).state is JobState.SUCCEEDED


def test_a_request_that_is_cut_off_leaves_no_half_job(cluster: LocalRay, server: Server) -> None:
    before = cluster.json("list", "--all")
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = (
            f"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {server.token}\r\n"
            'Content-Type: application/json\r\nContent-Length: 500\r\n\r\n{"spec": {"command": "true"'
        )
        connection.sendall(head.encode())
    assert server.curl("GET", "/healthz").status_code == 200
    assert cluster.json("list", "--all") == before


def test_figures_and_readiness_over_a_real_cluster(cluster: LocalRay, server: Server, client: Client) -> None:
    ended(client.submit(spec("true")))
    assert server.curl("GET", "/readyz").status_code == 200
    figures = server.curl("GET", "/metrics").text
    assert 'state="SUCCEEDED"' in figures and "launch" in figures
    said_by_job = client.submit(spec("echo pid $$; sleep 600"))
    said(said_by_job, "pid")
    assert server.curl("DELETE", f"/api/v1/jobs/{said_by_job.id}").status_code == 409
    assert server.curl("POST", f"/api/v1/jobs/{said_by_job.id}/stop", json={"force": True}).status_code == 200
    assert ended(said_by_job).state is JobState.STOPPED
    assert server.curl("DELETE", f"/api/v1/jobs/{said_by_job.id}").status_code == 204

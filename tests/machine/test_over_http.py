"""The command line on a server of this machine, in a process of its own: what it does, and what it never imports."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from tests.fake_client import SUBMITTED_AT, job_info

TOKEN = "rct_k3x9_s3cret"
JOB = "digits-ab12cd"
ENDED = job_info(JOB, state="SUCCEEDED", reason="COMPLETED", ended_at=SUBMITTED_AT + 2).model_dump(
    mode="json"
)
EVENT = {
    "at": SUBMITTED_AT,
    "kind": "state",
    "state": "SUCCEEDED",
    "reason": "COMPLETED",
    "attempt": 0,
    "message": "ended",
    "seq": 7,
    "job_id": JOB,
}
DOCUMENTS = {
    "GET /ids": [JOB],
    "GET /jobs": {"jobs": [ENDED], "next": None},
    "POST /jobs": ENDED,
    f"GET /jobs/{JOB}": ENDED,
    f"GET /jobs/{JOB}/events": [EVENT],
    f"GET /jobs/{JOB}/logs": {"worker-0": 6},
    f"GET /jobs/{JOB}/usage": {},
    f"POST /jobs/{JOB}/stop": ENDED,
    "GET /sizes": {JOB: 1},
    "GET /offline_nodes": [],
    "GET /nodes": [{"id": "f00", "name": "host-a", "ip": "10.0.0.1"}],
    "POST /doubts": {"doubts": None},
    "GET /tokens": [{"name": "ci", "role": "user", "user": "ada", "created_at": 1.0}],
}


class OneJob(BaseHTTPRequestHandler):
    """A server on this machine that has one job, which has ended and printed one line."""

    tokens: ClassVar[set[str | None]] = set()

    def do_GET(self) -> None:
        self.tokens.add(self.headers["Authorization"])
        path, _, query = self.path.removeprefix("/api/v1").partition("?")
        asked = f"{self.command} {path}"
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if asked.endswith("/logs/read"):
            offset = json.loads(body)["offsets"].get("worker-0", 0)
            document: Any = {"worker-0": base64.b64encode(b"hello\n"[offset:]).decode()} if offset < 6 else {}
        else:
            document = [] if query.startswith("after=7") else DOCUMENTS[asked]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def served() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), OneJob) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


LINES = [
    "run -- true",
    "submit -- true",
    "list",
    f"get {JOB}",
    f"logs -f {JOB}",
    f"events {JOB}",
    f"wait {JOB}",
    f"stop {JOB}",
    "top --once",
    "nodes",
    "prune --dry-run",
    "token list",
    "controller status",
]
LOOK = """
import json, sys
from raycontrol.cli import invoke
lines = json.loads(sys.argv[1])
statuses = {line: invoke(line.split()) for line in lines}
heavy = sorted({"ray", "grpc", "fastapi", "torch"} & set(sys.modules))
print(json.dumps([statuses, heavy]), file=sys.__stdout__)
"""


def test_all_commands_go_over_http_and_import_no_ray(tmp_path: Path) -> None:
    OneJob.tokens.clear()
    with served() as url:
        done = subprocess.run(
            [sys.executable, "-c", LOOK, json.dumps(LINES)],
            env={
                "PYTHONPATH": str(Path(__file__).parents[2]),
                "RAYCONTROL_HOME": str(tmp_path),
                "RAYCONTROL_URL": url,
                "RAYCONTROL_TOKEN": TOKEN,
                "RAY_ADDRESS": "10.0.0.1:6379",
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
    statuses, imported = json.loads(done.stdout.splitlines()[-1])
    assert statuses == {**dict.fromkeys(LINES, 0), "controller status": 2}, done.stderr
    assert imported == []
    assert "hello" in done.stdout
    assert "raycontrol: not over HTTP: run it on a node of the cluster, with --address" in done.stderr
    assert "s3cret" not in done.stdout + done.stderr
    assert OneJob.tokens == {"Bearer rct_k3x9_s3cret"}

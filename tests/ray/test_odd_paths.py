"""Paths with spaces, quotes, newlines and letters beyond ASCII, wherever a path can be given to a job or a command."""

from __future__ import annotations

import json
from pathlib import Path

from tests.ray.conftest import LocalRay

ODD = "a 'b' \"c\"\nd é"
PROGRAM = """\
import os, pathlib, sys
odd = sys.argv[1]
print(repr(pathlib.Path.cwd().name), repr(pathlib.Path(odd).read_text()))
print([repr(pathlib.Path(path, odd).read_text()) for path in sys.argv[2:]])
pathlib.Path(os.environ["RAYCONTROL_OUTPUT_DIR"], odd).write_text("left")
"""


def test_every_path_of_a_job_may_be_odd(cluster: LocalRay, tmp_path: Path) -> None:
    code, data = tmp_path / ODD / f"code {ODD}", tmp_path / ODD / f"data {ODD}"
    for folder, text in ((code / ODD, "code"), (data, "data")):
        folder.mkdir(parents=True)
        (folder / ODD).write_text(text)
    (code / f"{ODD}.py").write_text(PROGRAM)
    targets = {f"/opt/{ODD}": f"./{ODD}", f"/mnt/{ODD}": f"{data}:ro"}
    spec = {
        "name": "odd",
        "command": ["python3", f"../{ODD}.py", ODD, *targets],
        "working_dir": f"code {ODD}",
        "cwd": ODD,
        "mounts": targets,
    }
    file = tmp_path / ODD / f"job {ODD}.yaml"
    file.write_text(json.dumps(spec))
    ran = cluster.raycontrol("run", file, check=True)
    assert ran.stdout.splitlines() == [
        f"master-0 | {ODD!r} 'code'",
        "master-0 | [\"'code'\", \"'data'\"]",
    ]
    job_id = cluster.json("list", "--text", "odd", "--limit", "1")[0]["id"]
    assert cluster.json("get", job_id)["spec"]["mounts"] == targets
    fetched = tmp_path / f"fetched {ODD}"
    cluster.raycontrol("outputs", "get", job_id, fetched, check=True)
    assert [(path.name, path.read_text()) for path in (fetched / "master-0").iterdir()] == [(ODD, "left")]


def test_a_script_with_an_odd_path_and_odd_arguments_is_run_on_nodes(
    cluster: LocalRay, tmp_path: Path
) -> None:
    script = tmp_path / f"{ODD}.sh"
    script.write_text("printf '%s|' \"$@\"\n")
    ran = cluster.raycontrol("exec", "--all", "-N", "--script", script, "--", ODD, "plain", check=True)
    assert ran.stdout == f"{ODD}|plain|"

"""Mounts for one run, with real processes: as root and, through a user namespace, as nobody."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from raycontrol import process, supervisor
from raycontrol.plan import Mount
from raycontrol.process import Exit
from tests.machine.process_trees import ROOT, Trees, output, play, trees

__all__ = ["trees"]

ODD = "a 'b' \"c\"\nd é"
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="takes root")


def end_of(trees: Trees, command: str, *mounts: Mount) -> tuple[Exit, str]:
    """Run it to its end with these mounts; return how it ended and what it said."""
    outcome, run = trees.end_of(command, mounts=mounts)
    return outcome, output(run)


def folder(path: Path, **files: str) -> str:
    path.mkdir(parents=True)
    for name, text in files.items():
        (path / name).write_text(text)
    return str(path)


def test_a_folder_appears_where_nothing_was_and_the_host_sees_nothing_of_it(trees: Trees, tmp_path: Path):
    code = folder(tmp_path / "src", job="print()\n")
    before = Path("/proc/self/mountinfo").read_text()
    outcome, said = end_of(trees, "cd /opt/ml-test/code && ls && pwd", Mount(code, "/opt/ml-test/code"))
    assert (outcome.code, said) == (0, "job\n/opt/ml-test/code\n")
    assert not Path("/opt/ml-test").exists()
    assert Path("/proc/self/mountinfo").read_text() == before


def test_what_is_written_there_is_in_the_source_and_old_entries_are_as_they_were(
    trees: Trees, tmp_path: Path
):
    data = folder(tmp_path / "data")
    parent = tmp_path / "parent"
    folder(parent / "old", file="old\n")
    (parent / "link").symlink_to("old/file")
    (parent / "plain").write_text("plain\n")
    command = (
        "echo new > new/deep/file && cat old/file link plain && echo more >> old/file && echo more >> plain"
    )
    outcome, said = end_of(
        trees, f"cd {shlex.quote(str(parent))} && {command}", Mount(data, f"{parent}/new/deep")
    )
    assert (outcome.code, said) == (0, "old\nold\nplain\n")
    assert (tmp_path / "data" / "file").read_text() == "new\n"
    assert (parent / "old" / "file").read_text() == "old\nmore\n"
    assert (parent / "plain").read_text() == "plain\nmore\n"
    assert sorted(path.name for path in parent.iterdir()) == ["link", "old", "plain"]


def test_a_covered_folder_takes_no_new_entries_which_would_be_lost(trees: Trees, tmp_path: Path):
    data, parent = folder(tmp_path / "data"), tmp_path / "parent"
    parent.mkdir()
    outcome, said = end_of(trees, f"touch {shlex.quote(str(parent))}/lost", Mount(data, f"{parent}/new/deep"))
    assert outcome.code == 1
    assert "Read-only file system" in said


def test_a_target_right_below_the_root_may_be_new(trees: Trees, tmp_path: Path):
    data = folder(tmp_path / "data", digits="0123\n")
    outcome, said = end_of(
        trees,
        "cat /ml-test/digits; ls -d /proc/self/fd /dev/null; unshare --user true && echo nested",
        Mount(data, "/ml-test"),
    )
    assert (outcome.code, said) == (0, "0123\n/dev/null\n/proc/self/fd\nnested\n")
    assert not Path("/ml-test").exists()


def test_odd_names_work_as_source_and_as_target(trees: Trees, tmp_path: Path):
    data = folder(tmp_path / ODD, file="found\n")
    target = f"{tmp_path}/new {ODD}/there {ODD}"
    outcome, said = end_of(trees, f"cat {shlex.quote(target + '/file')}", Mount(data, target, read_only=True))
    assert (outcome.code, said) == (0, "found\n")


def test_a_read_only_mount_cannot_be_written_to_nor_can_what_is_mounted_in_it(trees: Trees, tmp_path: Path):
    data = folder(tmp_path / "data", file="kept\n")
    target = tmp_path / "target"
    target.mkdir()
    command = f"cd {shlex.quote(str(target))}; cat file; echo lost > file; rm file; touch other"
    outcome, said = end_of(trees, command, Mount(data, str(target), read_only=True))
    assert (outcome.code, said.count("Read-only file system")) == (1, 3)
    assert (tmp_path / "data" / "file").read_text() == "kept\n"


def test_a_file_can_be_mounted_over_a_file_and_where_nothing_was(trees: Trees, tmp_path: Path):
    (tmp_path / "hostfile").write_text("10.0.0.1 slots=2\n")
    (tmp_path / "there").write_text("other\n")
    mounts = [
        Mount(str(tmp_path / "hostfile"), str(tmp_path / "there")),
        Mount(str(tmp_path / "hostfile"), "/etc/mpi-test/hostfile"),
    ]
    outcome, said = end_of(
        trees, f"cat {tmp_path}/there /etc/mpi-test/hostfile; grep -c ^root: /etc/passwd", *mounts
    )
    assert (outcome.code, said) == (0, "10.0.0.1 slots=2\n10.0.0.1 slots=2\n1\n")
    assert (tmp_path / "there").read_text() == "other\n"


def test_a_source_is_the_nodes_own_also_below_a_target(trees: Trees, tmp_path: Path):
    data, other = folder(tmp_path / "data" / "part", name="node's\n"), folder(tmp_path / "other")
    mounts = [Mount(other, str(tmp_path / "data")), Mount(data, "/opt/ml-test/part")]
    outcome, said = end_of(trees, f"ls {tmp_path}/data; cat /opt/ml-test/part/name", *mounts)
    assert (outcome.code, said) == (0, "node's\n")


def test_a_source_that_does_not_exist_is_named(trees: Trees, tmp_path: Path):
    outcome, _ = end_of(trees, "true", Mount("/no/such/data", "/opt/ml-test/data"))
    assert (outcome.code, outcome.error) == (
        None,
        "its mounts cannot be made: /no/such/data, to be mounted at /opt/ml-test/data: No such file or directory",
    )


def test_a_missing_target_right_in_tmp_is_refused_because_programs_make_files_there(
    trees: Trees, tmp_path: Path
):
    outcome, _ = end_of(trees, "true", Mount(folder(tmp_path / "data"), "/tmp/ml-test/data"))
    assert (outcome.code, outcome.error) == (
        None,
        "its mounts cannot be made: /tmp/ml-test/data does not exist, nor can it be made in /tmp, in which programs make "
        "files: make it on the node, as an empty folder (or file)",
    )


def test_what_a_run_leaves_behind_dies_with_it_mounts_or_not(trees: Trees, tmp_path: Path):
    mount = Mount(folder(tmp_path / "src"), "/opt/ml-test/code")
    outcome, _ = end_of(trees, "setsid sleep 1000 & (setsid sleep 1000 &); exit 3", mount)
    assert outcome.code == 3


def test_a_run_with_mounts_dies_with_its_owner(trees: Trees, tmp_path: Path):
    """The mark of death by the supervisor's death must outlive the change of namespaces."""
    mount = Mount(folder(tmp_path / "src"), "/opt/ml-test/code")

    async def kill_supervisor() -> Exit:
        running = await process.start(trees.run("sleep 1000", mounts=(mount,)))
        row = supervisor.entry(running.pid)
        assert row is not None
        os.kill(row.parent, 9)
        return await running.gone()

    assert play(kill_supervisor()).signal == 9


@ROOT_ONLY
def test_without_root_the_user_keeps_his_id_in_a_user_namespace(tmp_path: Path):
    """As nobody: through the program that a supervisor loads, because nobody may not read this checkout."""
    code = folder(tmp_path / f"src {ODD}", job="found\n")
    program = tmp_path / "mounts.py"
    program.write_bytes((ROOT / "raycontrol" / "mounts.py").read_bytes())
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.getuid() and path.is_relative_to("/tmp") and path != Path("/tmp"):
            path.chmod(0o755)
    script = tmp_path / "script.py"
    script.write_text(AS_NOBODY_SCRIPT)
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    if subprocess.run(
        [*nobody, "unshare", "--user", "--map-root-user", "--mount", "true"], check=False
    ).returncode:
        pytest.skip("this kernel gives no user namespaces to others than root")
    words = (*nobody, "/usr/bin/env", "python3", "-I")
    ended = subprocess.run([*words, str(script), str(tmp_path), code], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == (
        "found\n65534\n65534 drwxr-xr-x\nfound\n",
        "touch: cannot touch '/opt/ml-test/code/other': Read-only file system\n",
    )


AS_NOBODY_SCRIPT = """
import os, sys
folder, source = sys.argv[1:]
sys.path.append(folder)
import mounts
mounts.make([(os.fsencode(source), b"/opt/ml-test/code", True), (os.fsencode(source), b"/ml-test", False)])
line = "cat /opt/ml-test/code/job; id -u; stat -c '%u %A' /opt/ml-test; touch /opt/ml-test/code/other; cat /ml-test/job"
os.execvp("bash", ["bash", "-c", line])
"""

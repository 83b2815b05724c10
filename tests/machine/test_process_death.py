from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from raycontrol import process, supervisor
from raycontrol.process import marked, read_status, start, sweep
from tests.machine.process_trees import (
    FAMILY,
    FAMILY_NAMES,
    HAS_CGROUPS,
    Owner,
    Trees,
    alive,
    output,
    parent,
    play,
    trees,
    until,
)
from tests.support import wait_until

__all__ = ["trees"]


ANOTHER_USER = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
NO_CAPABILITIES = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")


@pytest.fixture(params=["privileged", "unprivileged"])
def prefix(request: pytest.FixtureRequest, trees: Trees) -> tuple[str, ...]:
    """What runs an owner with our rights, or without any: as another user if that one may run our Python."""
    if request.param == "privileged":
        return ()
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv, to give up rights")
    again = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', ''], check=True)"
    if subprocess.run([*ANOTHER_USER, sys.executable, "-c", again], capture_output=True, cwd="/").returncode:
        return NO_CAPABILITIES
    for folder in (trees.folder, trees.pids, trees.flags, trees.flags / "never"):
        os.chown(folder, 65534, 65534)
    for folder in trees.folder.parents:
        if folder.is_relative_to(tempfile.gettempdir()):
            folder.chmod(folder.stat().st_mode | 0o011)
    return ANOTHER_USER


def test_a_killed_owner_takes_the_whole_tree_with_it_at_once(trees: Trees, prefix: tuple[str, ...]):
    run = trees.run(FAMILY + "trap '' TERM; wait; wait")
    owner = Owner(run, prefix=prefix)
    try:
        owner.main_pid()
        pids = trees.recorded(*FAMILY_NAMES)
        owner.kill()
        wait_until(lambda: not trees.living(pids), 10, "the end of the family")
        wait_until(lambda: not trees.left(), 10, "the end of the supervisor")
        outcome = read_status(run.folder)
        assert (outcome.code, outcome.signal) == (None, signal.SIGKILL)
        assert outcome.sender == "raycontrol: the process that owned this run is gone"
    finally:
        owner.close()


@pytest.mark.parametrize(
    "then",
    ["return", "sys.exit(3)", "os._exit(4)", "os.kill(os.getpid(), signal.SIGSEGV)", "raise KeyError(1)"],
)
def test_an_owner_that_ends_in_any_way_takes_the_tree_with_it(trees: Trees, then: str):
    run = trees.run(FAMILY + "wait")
    owner = Owner(run, then=then)
    try:
        owner.popen.wait(30)
        wait_until(lambda: not trees.left(), 10, "the end of everything")
        assert read_status(run.folder).signal == signal.SIGKILL
    finally:
        owner.close()


def test_an_owner_that_is_killed_at_any_moment_of_the_start_leaves_nothing(trees: Trees):
    """It kills itself, from a thread, so and so long after it began to start the run."""
    before = "import threading; threading.Timer({delay}, os.kill, (os.getpid(), 9)).start()"
    owners = [Owner(trees.run(FAMILY + "wait"), before=before.format(delay=0.005 * i)) for i in range(10)]
    for owner in owners:
        owner.popen.wait(60)
        owner.close()
    wait_until(lambda: not trees.left(), 10, "the end of everything")


def test_a_copy_of_the_owners_handles_in_another_process_does_not_keep_a_tree_alive(trees: Trees):
    """As when the owner has forked without exec: the control socket stays open, its owner's end is seen all the same."""
    if not hasattr(os, "pidfd_open"):
        pytest.skip("this Python has no pidfd_open")
    copy = (
        "copy = os.fork(); (signal.pause() if copy == 0 else print(copy, flush=True)); await process.gone()"
    )
    owner = Owner(trees.run("sleep 1000"), then=copy)
    try:
        owner.main_pid()
        copy_pid = owner.main_pid()
        owner.kill()
        wait_until(lambda: not trees.left(), 10, "the end of the tree")
        assert alive(copy_pid)
        os.kill(copy_pid, signal.SIGKILL)
    finally:
        owner.close()


def test_a_killed_supervisor_is_noticed_and_its_tree_swept(trees: Trees):
    async def story() -> None:
        run = trees.run(FAMILY + "wait")
        handle = await start(run)
        pids = await asyncio.to_thread(trees.recorded, "stubborn", "session", "daemon", "grandchild")
        unmarked = (await asyncio.to_thread(trees.recorded, "unmarked"))["unmarked"]
        os.kill(parent(handle.pid), signal.SIGKILL)
        outcome = await handle.gone()
        assert (outcome.code, outcome.signal, outcome.error) == (None, 9, "its supervisor was killed")
        assert outcome.lost
        assert read_status(run.folder) == outcome == await handle.wait()
        assert trees.living(pids) == []
        if not HAS_CGROUPS:  # the one that nobody can know then: no mark, session, parent or supervisor
            os.kill(unmarked, signal.SIGKILL)
        assert not alive(unmarked)

    play(story())


def test_a_supervisor_killed_after_the_main_process_changes_no_outcome(trees: Trees):
    stubborn = "trap '' TERM; touch $FLAGS/ready; while :; do sleep 1000; done"

    async def story() -> None:
        run = trees.run(f'setsid bash -c "{stubborn}" & until [ -e $FLAGS/ready ]; do nap; done; exit 3')
        handle = await start(run)
        above = parent(handle.pid)
        outcome = await handle.wait()
        os.kill(above, signal.SIGKILL)
        assert await handle.gone() == outcome
        assert (outcome.code, outcome.error) == (3, None)
        assert read_status(run.folder) == outcome
        assert marked(trees.mark) == []

    play(story())


def test_without_a_thread_to_be_had_a_killed_supervisors_tree_is_swept_all_the_same(trees: Trees):
    async def story() -> None:
        exhausted = ThreadPoolExecutor(1)
        exhausted.shutdown()
        handle = await start(trees.run("sleep 1000"))
        asyncio.get_running_loop().set_default_executor(exhausted)
        os.kill(parent(handle.pid), signal.SIGKILL)
        outcome = await handle.gone()
        assert (outcome.signal, outcome.error) == (9, "its supervisor was killed")
        assert not alive(handle.pid)

    play(story())


def test_whoever_waits_hears_of_an_end_also_when_burying_fails(trees: Trees):
    async def story() -> None:
        handle = await start(trees.run("sleep 1000"))
        handle.run = replace(handle.run, folder="no folder can be called \0")
        ended, gone = asyncio.ensure_future(handle.wait()), asyncio.ensure_future(handle.gone())
        os.kill(parent(handle.pid), signal.SIGKILL)
        assert (await ended).error == "its supervisor was killed"
        assert (await gone).error == "its supervisor was killed"
        assert (await handle.wait()).signal == 9

    play(story())


def test_whoever_waits_hears_of_an_end_also_when_nobody_follows_the_run_any_more(trees: Trees):
    async def story() -> None:
        handle = await start(trees.run("sleep 1000"))
        ended, gone = asyncio.ensure_future(handle.wait()), asyncio.ensure_future(handle.gone())
        for following in process._following:
            following.cancel()
        assert (await ended).error == (await gone).error == "its owner stopped following it"

    play(story())


def test_a_mark_is_exact_and_supervisors_are_found_when_asked_for(trees: Trees):
    async def story() -> None:
        handle = await start(trees.run("sleep 1000"))
        above = parent(handle.pid)
        assert [found.pid for found in marked(trees.mark)] == [handle.pid]
        assert sorted(found.pid for found in marked(trees.mark, supervisors=True)) == sorted(
            [handle.pid, above]
        )
        assert marked(trees.mark[:-1]) == []
        assert [found.pid for found in marked(trees.mark[:-1], prefix=True)] == [handle.pid]
        await handle.kill("the test is over")

    play(story())


def test_what_hides_its_mark_in_a_swept_session_is_swept_too(trees: Trees):
    """As programs do that write a title over their environment."""
    hidden = "env -i PIDS=$PIDS bash -c 'echo $$ > $PIDS/hidden; while :; do sleep 1000; done' & wait"

    async def story() -> None:
        handle = await start(trees.run(f"({hidden}) & wait"))
        pid = (await asyncio.to_thread(trees.recorded, "hidden"))["hidden"]
        assert process.MARK not in process._environ(pid)
        os.kill(parent(handle.pid), signal.SIGKILL)
        await handle.gone()
        assert not alive(pid)

    play(story())


def test_a_sweep_ends_what_a_killed_owner_and_a_killed_supervisor_left(trees: Trees, prefix: tuple[str, ...]):
    owner = Owner(trees.run(FAMILY + "trap '' TERM; wait; wait"), prefix=prefix)
    try:
        above = parent(owner.main_pid())
        pids = trees.recorded(*FAMILY_NAMES)
        owner.popen.send_signal(signal.SIGSTOP)
        os.kill(above, signal.SIGKILL)
        owner.kill()
        assert alive(pids["daemon"])
        assert sweep(trees.mark) >= 4
        assert marked(trees.mark) == []
        assert sweep(trees.mark) == 0
        if prefix or not HAS_CGROUPS:  # without rights it may have had no cgroup
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids.pop("unmarked"), signal.SIGKILL)
        assert trees.living(pids) == []
    finally:
        owner.close()


def test_what_has_cleared_its_environment_and_lost_everybody_is_known_by_its_cgroup(trees: Trees):
    if not HAS_CGROUPS:
        pytest.skip("needs the right to make cgroups of the second version")
    group = Path(supervisor.own_group()) / f"{supervisor.GROUP}{trees.mark}"
    hidden = "(env -i PIDS=$PIDS setsid bash -c '(echo $BASHPID > $PIDS/hidden; exec sleep 1000) &' &)"

    async def story() -> None:
        handle = await start(trees.run(f"{hidden}; sleep 1000"))
        pid = (await asyncio.to_thread(trees.recorded, "hidden"))["hidden"]
        assert process.MARK not in process._environ(pid)
        assert {found.pid for found in marked(trees.mark)} >= {handle.pid, pid}
        os.kill(parent(handle.pid), signal.SIGKILL)
        await handle.gone()
        assert not alive(pid)
        assert not group.exists()

    play(story())


def test_runs_of_an_attempt_share_its_cgroup_and_the_last_one_removes_it(trees: Trees):
    if not HAS_CGROUPS:
        pytest.skip("needs the right to make cgroups of the second version")
    group = Path(supervisor.own_group()) / f"{supervisor.GROUP}{trees.mark}"

    async def story() -> None:
        first, second = [await start(trees.run("sleep 1000")) for _ in range(2)]
        assert {first.pid, second.pid} <= set(map(int, (group / "cgroup.procs").read_text().split()))
        await first.kill("no longer needed")
        assert group.exists()
        (group / "of the job's own").mkdir()
        await second.kill("no longer needed")
        assert not group.exists()

    play(story())


def test_a_sweep_spares_what_has_a_living_supervisor_and_what_is_anothers(trees: Trees):
    async def story() -> None:
        supervised = await start(trees.run(FAMILY + "wait"))
        await asyncio.to_thread(trees.recorded, *FAMILY_NAMES)
        strays = [
            subprocess.Popen(["sleep", "1000"], env={**trees.environment, process.MARK: mark})
            for mark in (trees.mark, trees.mark + "0", trees.mark[:-1] + "1", "x" + trees.mark)
        ]
        await until(lambda: all(process._environ(stray.pid).get(process.MARK) for stray in strays))
        before = set(marked(trees.mark))
        assert await asyncio.to_thread(sweep, trees.mark) == 1
        assert strays[0].wait(10) == -signal.SIGKILL
        assert [stray.poll() for stray in strays[1:]] == [None, None, None]
        assert {found.pid for found in before - set(marked(trees.mark))} == {strays[0].pid}
        assert await asyncio.to_thread(sweep, trees.mark[:-1], prefix=True) == 2
        assert [stray.wait(10) for stray in strays[1:3]] == [-signal.SIGKILL] * 2
        assert strays[3].poll() is None
        strays[3].kill()
        strays[3].wait()
        assert alive(supervised.pid)
        await supervised.kill("the test is over")

    play(story())


def test_one_sweep_for_many_attempts(trees: Trees):
    marks = [f"{trees.mark}{number}" for number in range(3)]
    strays = [
        subprocess.Popen(["sleep", "1000"], env={**trees.environment, process.MARK: mark}) for mark in marks
    ]
    wait_until(lambda: len(marked(trees.mark, prefix=True)) == 3, what="three strays")
    assert process.sweep_all({*marks[:2], "unheard-of.0"}) == 2
    assert [stray.wait(10) for stray in strays[:2]] == [-signal.SIGKILL] * 2
    assert strays[2].poll() is None
    strays[2].kill()
    strays[2].wait()


def test_a_supervisor_of_another_attempt_protects_nobody(trees: Trees):
    """A job may itself run raycontrol: its inner attempts' strays come to the outer attempt's supervisor."""
    inner = trees.mark[:-1] + "inner"

    async def story() -> None:
        outer = await start(trees.run(f"{process.MARK}={inner} setsid sleep 1000 & wait"))
        await until(lambda: marked(inner))
        [stray] = marked(inner)
        assert await asyncio.to_thread(sweep, inner) == 1
        assert not alive(stray.pid)
        assert (await outer.wait()).code is not None

    play(story())


def test_runs_that_start_while_a_sweep_goes_on_are_spared(trees: Trees):
    async def story() -> None:
        sweeping = True

        def sweep_on() -> int:
            killed = 0
            while sweeping:
                killed += sweep(trees.mark)
            return killed

        sweeps = asyncio.create_task(asyncio.to_thread(sweep_on))
        for _ in range(6):
            handles = await asyncio.gather(
                *(
                    start(trees.run("(setsid bash -c '(true &)' &); for i in {1..20}; do (true &); done"))
                    for _ in range(3)
                )
            )
            outcomes = await asyncio.gather(*(handle.gone() for handle in handles))
            assert [(outcome.code, outcome.error) for outcome in outcomes] == [(0, None)] * 3
        sweeping = False
        assert await sweeps == 0

    play(story())


def test_a_sweep_takes_no_session_that_a_tree_did_not_make(trees: Trees):
    """A marked process in somebody's session, whose leader may have ended: the others there are not of the tree."""
    command = f"(sleep 1000 & {process.MARK}={trees.mark} sleep 1000 &)"
    with subprocess.Popen(["setsid", "bash", "-c", command], env=trees.environment) as leader:
        leader.wait()
    wait_until(lambda: marked(trees.mark), what="the marked process")
    [other] = [row for row in trees.left() if process.MARK not in process._environ(row.pid)]
    assert sweep(trees.mark) == 1
    assert supervisor.send(other, signal.SIGKILL) is True


def test_a_process_is_never_signalled_in_anothers_place():
    with subprocess.Popen(["sleep", "1000"]) as sleeper:
        row = supervisor.entry(sleeper.pid)
        row.start_time -= 1
        assert supervisor.send(row, signal.SIGKILL) is False
        row.start_time += 1
        assert supervisor.send(row, signal.SIGKILL) is True
        assert sleeper.wait() == -signal.SIGKILL
        assert supervisor.send(row, signal.SIGKILL) is False


C_LIBRARYS_OWN = 1 << 31 | 1 << 32
"""Signals 32 and 33, which the C library keeps for itself and no program can set."""

INHERITED = (
    "os.setpriority(os.PRIO_PROCESS, 0, 15); open('/proc/self/oom_score_adj', 'w').write('1000');"
    " signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGUSR1]); signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    " os.umask(0o077); os.dup2(1, 77); os.set_inheritable(77, True)"
)


def test_a_child_sheds_what_a_ray_worker_hands_down(trees: Trees, prefix: tuple[str, ...]):
    look = (
        "grep -E '^Sig(Blk|Ign)' /proc/self/status; echo oom $(cat /proc/self/oom_score_adj); umask; ls /proc/$$/fd > $FLAGS/fds; echo fds $(cat $FLAGS/fds);"
        " echo lock $(ulimit -Sl) $(ulimit -Hl); ps -o ni= -p $$ 2>/dev/null || nice; readlink /proc/$$/fd/0; cut -d' ' -f1,5,6,7 /proc/$$/stat"
    )
    run = trees.run(look)
    owner = Owner(run, before=INHERITED, prefix=prefix)
    try:
        pid = owner.main_pid()
        wait_until(lambda: read_status(run.folder), 10, "the outcome")
    finally:
        owner.close()
    lines = [" ".join(line.split()) for line in output(run).splitlines()]
    ignored = int(lines.pop(1).split()[1], 16)
    assert ignored & ~C_LIBRARYS_OWN == 0
    assert lines[:4] == [
        f"SigBlk: {0:016x}",
        "oom 0",
        "0022",
        "fds 0 1 2",
    ]
    locked = lines[4].split()
    assert locked[0] == "lock" and locked[1] == locked[2]
    assert lines[5] == ("15" if prefix or os.geteuid() else "0")
    assert lines[6:] == ["/dev/null", f"{pid} {pid} {pid} 0"]


def test_a_supervisor_is_a_worse_victim_than_its_job(trees: Trees):
    async def story() -> None:
        handle = await start(trees.run("sleep 1000"))
        scores = [
            int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (parent(handle.pid), handle.pid)
        ]
        assert scores[0] <= scores[1] == 0
        await handle.kill("the test is over")

    play(story())


def test_a_start_is_quick(trees: Trees):
    """About 10 ms of 20 are Python's own start; the limit is for a machine that has other things to do."""

    async def story() -> float:
        times = []
        for _ in range(10):
            begin = time.monotonic()
            handle = await start(trees.run(("true",)))
            times.append(time.monotonic() - begin)
            await handle.gone()
        return min(times)

    assert play(story()) < 0.25

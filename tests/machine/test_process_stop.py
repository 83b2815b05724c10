from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from raycontrol.process import marked, read_status, start
from tests.machine.process_trees import FAMILY, FAMILY_NAMES, Trees, alive, output, parent, play, trees, until

__all__ = ["trees"]


def test_a_stop_ends_a_polite_program_at_once_and_names_who_asked(trees: Trees):
    async def story() -> None:
        run = trees.run("sleep 1000")
        handle = await start(run)
        outcome = await handle.stop(40, "the user asked for it")
        assert (outcome.code, outcome.signal) == (None, signal.SIGTERM)
        assert outcome.sender == "raycontrol: the user asked for it"
        assert marked(trees.mark) == []
        assert read_status(run.folder) == outcome
        assert await handle.stop(40, "again") == outcome
        assert await handle.kill("again") == outcome

    play(story())


def test_a_program_that_ends_itself_on_term_keeps_its_code(trees: Trees):
    async def story() -> None:
        handle = await start(trees.run("trap 'exit 0' TERM; touch $FLAGS/ready; while :; do nap; done"))
        await trees.flagged("ready")
        outcome = await handle.stop(40, "time is over")
        assert (outcome.code, outcome.signal, outcome.sender) == (0, None, "raycontrol: time is over")

    play(story())


def test_a_program_that_ignores_term_is_killed_after_the_grace(trees: Trees):
    async def story() -> None:
        handle = await start(trees.run("trap '' TERM; touch $FLAGS/ready; while :; do sleep 1000; done"))
        await trees.flagged("ready")
        begin = time.monotonic()
        outcome = await handle.stop(0.5, "enough")
        assert 0.5 <= time.monotonic() - begin < 10
        assert (outcome.signal, outcome.sender) == (signal.SIGKILL, "raycontrol: enough")

    play(story())


def test_a_second_stop_shortens_the_grace_and_never_lengthens_it(trees: Trees):
    async def story() -> None:
        handle = await start(trees.run("trap '' TERM; touch $FLAGS/ready; while :; do sleep 1000; done"))
        await trees.flagged("ready")
        first = asyncio.create_task(handle.stop(600, "a peer failed"))
        await asyncio.sleep(0)
        second = asyncio.create_task(handle.stop(0.3, "the user insists"))
        third = asyncio.create_task(handle.stop(900, "too late"))
        outcomes = await asyncio.gather(first, second, third)
        assert {outcome.signal for outcome in outcomes} == {signal.SIGKILL}
        assert {outcome.sender for outcome in outcomes} == {"raycontrol: the user insists"}

    play(story())


@pytest.mark.parametrize("grace_s", [40 * 86400, float("inf")], ids=["40 days", "for ever"])
def test_a_grace_may_be_as_long_as_it_likes(trees: Trees, grace_s: float):
    saving = "touch $FLAGS/asked; until [ -e $FLAGS/go ]; do nap; done; exit 7"

    async def story() -> None:
        handle = await start(trees.run(f"trap '{saving}' TERM; touch $FLAGS/ready; while :; do nap; done"))
        await trees.flagged("ready")
        ending = asyncio.create_task(handle.stop(grace_s, "take your time"))
        await trees.flagged("asked")
        trees.flag("go")
        outcome = await ending
        assert (outcome.code, outcome.signal, outcome.error) == (7, None, None)

    play(story())


def test_a_stopped_program_can_be_stopped(trees: Trees):
    async def story() -> None:
        handle = await start(trees.run(("sleep", "1000")))
        os.kill(handle.pid, signal.SIGSTOP)
        assert (await handle.stop(40, "now")).signal == signal.SIGTERM

    play(story())


def test_every_process_of_a_tree_is_gone_after_a_stop(trees: Trees):
    async def story() -> None:
        handle = await start(trees.run(FAMILY + "wait"))
        pids = await asyncio.to_thread(trees.recorded, *FAMILY_NAMES)
        outcome = await handle.stop(0.5, "now")
        assert outcome.signal == signal.SIGTERM
        assert trees.living(pids) == []

    play(story())


def test_every_process_of_a_tree_is_gone_after_a_kill(trees: Trees):
    async def story() -> None:
        handle = await start(trees.run(FAMILY + "wait"))
        pids = await asyncio.to_thread(trees.recorded, *FAMILY_NAMES)
        outcome = await handle.kill("now")
        assert (outcome.signal, outcome.sender) == (signal.SIGKILL, "raycontrol: now")
        assert trees.living(pids) == []

    play(story())


def test_children_of_a_shell_get_the_signal_once_and_the_whole_grace_though_the_shell_is_gone(trees: Trees):
    child = trees.folder / "child.sh"
    child.write_text(
        "trap 'echo TERM; n=$((n+1))' TERM; touch $FLAGS/ready\n"
        "until [ -e $FLAGS/saved ]; do nap; done; echo saved after $n\n"
    )

    async def story() -> None:
        run = trees.run(f"bash {child}; exit 1")
        handle = await start(run)
        await trees.flagged("ready")
        ending = asyncio.create_task(handle.stop(30, "now"))
        assert (await handle.wait()).signal == signal.SIGTERM
        await until(lambda: "TERM" in output(run))
        trees.flag("saved")
        await ending
        assert output(run) == "TERM\nsaved after 1\n"

    play(story())


def test_a_program_in_a_session_of_its_own_hears_only_its_parent(trees: Trees):
    """As torchrun's workers: their parent passes the signal on in its own way and at its own time."""
    worker = trees.folder / "worker.sh"
    worker.write_text(
        "trap 'echo TERM; n=$((n+1))' TERM; touch $FLAGS/ready\n"
        "until [ -e $FLAGS/saved ]; do nap; done; echo saved after $n\n"
    )
    launcher = trees.folder / "launcher.sh"
    launcher.write_text(
        f"setsid bash {worker} & trap 'kill -TERM $!' TERM\nuntil [ -e $FLAGS/saved ]; do nap; done; wait\n"
    )

    async def story() -> None:
        run = trees.run(("bash", str(launcher)))
        handle = await start(run)
        await trees.flagged("ready")
        ending = asyncio.create_task(handle.stop(30, "now"))
        await until(lambda: "TERM" in output(run))
        trees.flag("saved")
        assert (await ending).code == 0
        assert output(run) == "TERM\nsaved after 1\n"

    play(story())


def test_what_a_main_process_leaves_behind_is_asked_and_then_killed(trees: Trees):
    polite = "trap 'echo bye; exit' TERM; touch $FLAGS/ready; while :; do nap; done"

    async def story() -> None:
        run = trees.run(f'{FAMILY} setsid bash -c "{polite}" & until [ -e $FLAGS/go ]; do nap; done; exit 6')
        handle = await start(run)
        pids = await asyncio.to_thread(trees.recorded, *FAMILY_NAMES)
        await trees.flagged("ready")
        trees.flag("go")
        outcome = await handle.wait()
        ended = time.monotonic()
        assert (outcome.code, outcome.sender) == (6, None)
        assert await handle.gone() == outcome
        assert 1.5 < time.monotonic() - ended < 10
        assert "bye" in output(run)
        assert trees.living(pids) == []

    play(story())


def test_a_kill_while_leftovers_end_is_obeyed_at_once_and_changes_no_outcome(trees: Trees):
    stubborn = "trap '' TERM; touch $FLAGS/ready; while :; do sleep 1000; done"

    async def story() -> None:
        handle = await start(
            trees.run(f'bash -c "{stubborn}" & until [ -e $FLAGS/ready ]; do nap; done; exit 0')
        )
        outcome = await handle.wait()
        begin = time.monotonic()
        assert await handle.kill("now") == outcome
        assert time.monotonic() - begin < 1.5
        assert (outcome.code, outcome.sender) == (0, None)

    play(story())


def test_a_program_that_restarts_what_dies_is_killed_all_the_same(trees: Trees):
    """Four shells that ignore SIGTERM, each starting a process of a short life every 10 ms or so."""
    restarting = trees.folder / "restarting.sh"
    restarting.write_text(
        "trap '' TERM\nwhile :; do (for i in {1..20}; do nap; done) & read -t 0.01 <> $FLAGS/never; done\n"
    )

    async def story() -> None:
        handle = await start(
            trees.run(f"trap '' TERM; for i in 1 2 3 4; do setsid bash {restarting} & done; wait")
        )
        await until(lambda: len(marked(trees.mark)) > 30)
        await handle.stop(0.2, "now")
        assert marked(trees.mark) == []

    play(story())


def test_a_stop_at_any_moment_of_the_start_leaves_nothing(trees: Trees):
    async def story() -> None:
        for moment in range(30):
            try:
                handle = await asyncio.wait_for(start(trees.run(FAMILY + "wait")), 0.002 * moment)
            except asyncio.TimeoutError:
                continue
            assert (await handle.kill("now")).sender == "raycontrol: now"

    play(story())


def test_a_cancelled_wait_leaves_the_run_and_the_other_waits_alone(trees: Trees):
    async def story() -> None:
        handle = await start(trees.run("sleep 1000"))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handle.gone(), 0.05)
        waits = asyncio.gather(handle.wait(), handle.gone())
        assert alive(handle.pid)
        outcome = await handle.stop(40, "now")
        assert await waits == [outcome, outcome]

    play(story())


def test_sigterm_to_the_supervisor_stops_the_run(trees: Trees):
    async def story() -> None:
        handle = await start(trees.run("sleep 1000"))
        above = parent(handle.pid)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            os.kill(above, number)
        outcome = await handle.gone()
        assert (outcome.signal, outcome.sender) == (15, "raycontrol: the run's supervisor got SIGTERM")

    play(story())

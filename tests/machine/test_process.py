from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from raycontrol import process
from raycontrol.process import Exit, read_status, start
from tests.machine.process_trees import Owner, Trees, marks_of, output, parent, play, trees, until
from tests.support import wait_until

__all__ = ["trees"]


def test_a_run_that_exits_0_at_once_has_its_outcome_on_disk(trees: Trees):
    before = time.time()
    outcome, run = trees.end_of("echo hello; echo there >&2")
    assert outcome == Exit(code=0, signal=None, at=outcome.at, sender=None, oom=False, error=None)
    assert before < outcome.at < time.time()
    assert output(run) == "hello\nthere\n"
    assert sorted(file.name for file in Path(run.folder).iterdir()) == ["output.log", "status.json"]


@pytest.mark.parametrize(
    ("command", "code", "number"),
    [
        ("exit 3", 3, None),
        ("exit 255", 255, None),
        ("false | cat", 1, None),
        ("kill -KILL $$", None, 9),
        ("kill -SEGV $$", None, 11),
        ("bash -c 'kill -KILL $$'; exit $?", 137, None),
    ],
)
def test_code_and_signal_are_the_main_processes_own(
    trees: Trees, command: str, code: int | None, number: int | None
):
    outcome, _ = trees.end_of(command)
    assert (outcome.code, outcome.signal, outcome.sender, outcome.error) == (code, number, None, None)


def test_a_command_that_does_not_exist_is_127_and_says_where_it_was_looked_for(trees: Trees):
    outcome, _ = trees.end_of(("trian.py",), env={"PATH": "/usr/bin:/bin"})
    assert (outcome.code, outcome.error) == (127, "trian.py: command not found in PATH /usr/bin:/bin")
    outcome, _ = trees.end_of(("/no/such/program",))
    assert (outcome.code, outcome.error) == (127, "/no/such/program: no such file")
    outcome, _ = trees.end_of("trian.py")
    assert (outcome.code, outcome.error) == (127, None)


def test_a_file_that_cannot_be_executed_is_126(trees: Trees, tmp_path: Path):
    plain = tmp_path / "plain"
    plain.write_text("echo hello\n")
    outcome, _ = trees.end_of((str(plain),))
    assert (outcome.code, outcome.error) == (126, f"{plain}: Permission denied")
    outcome, _ = trees.end_of(("plain",), env={"PATH": f"{tmp_path}:/usr/bin"})
    assert (outcome.code, outcome.error) == (126, "plain: Permission denied")
    plain.chmod(0o755)
    outcome, _ = trees.end_of((str(plain),))
    assert (outcome.code, outcome.error) == (
        126,
        f"{plain}: not a program; a script needs a first line such as #!/bin/bash",
    )
    plain.write_text("#!/no/such/shell\n")
    outcome, _ = trees.end_of((str(plain),))
    assert (outcome.code, outcome.error) == (
        127,
        f"{plain}: the interpreter in its first line does not exist",
    )


def test_the_program_is_looked_up_in_the_runs_own_path_and_cwd(trees: Trees, tmp_path: Path):
    tool = tmp_path / "bin" / "tool"
    tool.parent.mkdir()
    tool.write_text('#!/bin/bash\necho "$0" in "$PWD"\n')
    tool.chmod(0o755)
    _, run = trees.end_of(("tool",), env={"PATH": f"/nowhere:{tool.parent}:/usr/bin:/bin"})
    assert output(run) == f"{tool} in /\n"
    _, run = trees.end_of(("bin/tool",), cwd=str(tmp_path))
    assert output(run) == f"bin/tool in {tmp_path}\n"
    _, run = trees.end_of(("true",), env={})
    assert read_status(run.folder).code == 0


def test_a_missing_cwd_is_an_error_without_a_code(trees: Trees):
    outcome, _ = trees.end_of("true", cwd="/no/such/folder")
    assert (outcome.code, outcome.signal) == (None, None)
    assert (
        outcome.error == "its working directory /no/such/folder cannot be entered: No such file or directory"
    )


def test_a_folder_that_cannot_be_made_is_an_error_and_not_a_crash(trees: Trees, tmp_path: Path):
    (tmp_path / "run-1").write_text("a file is in the way")

    async def story() -> None:
        handle = await start(trees.run("true"))
        outcome = await handle.gone()
        assert outcome.error == f"its log {tmp_path}/run-1/output.log cannot be opened: File exists"
        assert handle.unsaved == "status.json could not be written: Not a directory"

    play(story())


def test_a_status_of_an_earlier_run_in_the_same_folder_is_not_taken_for_this_ones(trees: Trees):
    run = trees.run("sleep 1000")
    Path(run.folder).mkdir()
    (Path(run.folder) / "status.json").write_text(
        '{"code": 0, "signal": null, "at": 1.0, "sender": null, "oom": false, "error": null}'
    )
    assert read_status(run.folder) == Exit(code=0, signal=None, at=1.0)

    async def story() -> None:
        handle = await start(run)
        assert read_status(run.folder) is None
        await handle.kill("the test is over")

    play(story())


def test_a_status_that_is_absent_or_damaged_is_none(tmp_path: Path):
    assert read_status(tmp_path) is None
    for text in ("", "{", "[]", "{}", "\x00\xff"):
        (tmp_path / "status.json").write_text(text)
        assert read_status(tmp_path) is None


def test_an_environment_reaches_the_program_byte_by_byte(trees: Trees):
    env = {
        "PATH": "/usr/bin:/bin",
        "EMPTY": "",
        "LINES": "one\ntwo\n",
        "QUOTES": "\"a'; echo $HOME `id`",
        "WORDS": "zażółć 日本語 🚀",
        "BYTES": b"\xff\xfe\x80".decode("utf-8", "surrogateescape"),
        "NAME WITH SPACES": "=x=",
        "żółć": "y",
        "BASH_FUNC_f%%": "() { echo; }",
    }
    _, run = trees.end_of(("/usr/bin/env", "-0"), env=env)
    pairs = {pair for pair in (Path(run.folder) / "output.log").read_bytes().split(b"\0") if pair}
    expected = {**env, "RAYCONTROL_ATTEMPT_ID": trees.mark}
    assert pairs == {f"{name}={value}".encode("utf-8", "surrogateescape") for name, value in expected.items()}


def test_arguments_reach_the_program_byte_by_byte(trees: Trees):
    words = (
        "",
        "a b",
        "$HOME",
        '{"lr": "1e-3"}',
        "line\nline",
        "日本",
        b"\xff".decode("utf-8", "surrogateescape"),
    )
    _, run = trees.end_of(("/usr/bin/printf", "%s\\0", *words))
    assert (Path(run.folder) / "output.log").read_bytes().split(b"\0")[:-1] == [
        word.encode("utf-8", "surrogateescape") for word in words
    ]


def test_a_large_environment_passes_and_one_that_is_too_large_is_named_without_its_value(trees: Trees):
    many = {f"V{i}": "x" * 100_000 for i in range(12)}
    _, run = trees.end_of(("/usr/bin/env",), env=many)
    assert len(output(run)) > 1_200_000
    outcome, _ = trees.end_of(("/usr/bin/env",), env={"SMALL": "x", "HUGE": "s" * 140_000})
    assert outcome.code == 126
    assert outcome.error == (
        "/usr/bin/env: the environment variable HUGE is 140000 bytes long; the kernel takes 131071 in one string"
    )
    outcome, _ = trees.end_of(("/usr/bin/echo", "s" * 140_000))
    assert (
        outcome.error
        == "/usr/bin/echo: argument 1 is 140000 bytes long; the kernel takes 131071 in one string"
    )
    outcome, _ = trees.end_of(("/usr/bin/env",), env={f"V{i}": "x" * 100_000 for i in range(100)})
    assert outcome.error.endswith("bytes together, more than the kernel takes")


def test_names_and_values_no_environment_can_hold_are_errors(trees: Trees):
    for env in ({"A=B": "x"}, {"A": "x\0y"}, {"": "x"}):
        outcome, _ = trees.end_of(("/usr/bin/env",), env=env)
        assert (outcome.code, outcome.signal) == (None, None)
        assert "the environment variable" in outcome.error
    outcome, _ = trees.end_of(("/usr/bin/echo", "a\0b"))
    assert outcome.error == "could not be started: an argument has a zero byte in it"


def test_nothing_of_the_run_shows_on_the_supervisors_command_line_or_in_its_environment(trees: Trees):
    async def story() -> None:
        handle = await start(trees.run(("sleep", "1000"), env={**trees.environment, "TOKEN": "hunter2"}))
        above = parent(handle.pid)
        assert marks_of(above) == {"RAYCONTROL_SUPERVISOR": trees.mark, "": "", **_library_path()}
        assert b"sleep" not in Path(f"/proc/{above}/cmdline").read_bytes()
        assert "RAYCONTROL_SUPERVISOR" not in marks_of(handle.pid)
        await handle.kill("the test is over")

    play(story())


def _library_path() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}


def test_5_mb_without_a_newline_arrive(trees: Trees):
    _, run = trees.end_of("head -c 5000000 /dev/zero | tr '\\0' x")
    assert output(run) == "x" * 5_000_000


def test_a_log_goes_on_where_it_ended(trees: Trees):
    run = trees.run("echo again")
    Path(run.folder).mkdir()
    (Path(run.folder) / "output.log").write_text("before\n")

    async def story() -> None:
        await (await start(run)).gone()

    play(story())
    assert output(run) == "before\nagain\n"


def test_thousands_of_forks_and_orphans_do_no_harm(trees: Trees):
    outcome, _ = trees.end_of("for i in {1..1500}; do (true & ) ; done; exit 4")
    assert outcome.code == 4


def test_fifty_runs_at_once(trees: Trees):
    async def story() -> None:
        runs = [trees.run(f"echo {i}; exit {i}") for i in range(50)]
        handles = await asyncio.gather(*(start(run) for run in runs))
        outcomes = await asyncio.gather(*(handle.gone() for handle in handles))
        assert [outcome.code for outcome in outcomes] == list(range(50))
        assert [output(run) for run in runs] == [f"{i}\n" for i in range(50)]

    play(story())


def test_the_owner_keeps_no_zombie_no_handle_and_no_signal_handler(trees: Trees):
    async def story() -> None:
        await (await start(trees.run("true"))).gone()  # whatever is made once is made
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(5):
            await (await start(trees.run("true"))).gone()
            # The first run's own handle may have been open still when they were counted.
            await until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before, what="closed handles")
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        assert handlers == {number: signal.getsignal(number) for number in signal.valid_signals()}

    play(story())


def test_it_works_in_the_event_loop_of_any_thread(trees: Trees):
    outcomes: list[Exit] = []
    runs = [trees.run(f"exit {i}") for i in range(4)]

    def own(index: int) -> None:
        async def story() -> None:
            outcomes.append(await (await start(runs[index])).gone())

        asyncio.run(story())

    threads = [threading.Thread(target=own, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcome.code for outcome in outcomes) == [0, 1, 2, 3]


def test_a_run_whose_handle_was_dropped_goes_on(trees: Trees):
    run = trees.run("until [ -e $FLAGS/go ]; do nap; done; exit 5")

    async def story() -> None:
        await start(run)
        gc.collect()
        trees.flag("go")
        assert (await until(lambda: read_status(run.folder))).code == 5

    play(story())


def test_a_signal_goes_to_the_main_processs_group(trees: Trees):
    child = "trap 'echo child; exit 0' USR1; touch $FLAGS/ready; while :; do nap; done"

    async def story() -> None:
        run = trees.run(f'trap "echo main" USR1; bash -c "{child}"; echo $?')
        handle = await start(run)
        await trees.flagged("ready")
        await handle.signal(signal.SIGUSR1)
        await handle.gone()
        assert output(run) == "child\nmain\n0\n"

        handle = await start(trees.run("sleep 1000"))
        await handle.signal(signal.SIGHUP)
        outcome = await handle.gone()
        assert (outcome.signal, outcome.sender) == (1, "raycontrol: signal 1")
        await handle.signal(signal.SIGHUP)

    play(story())


def test_a_full_disk_stops_neither_the_program_nor_the_news(trees: Trees, tmp_path: Path):
    small = tmp_path / "small"
    small.mkdir()
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=64k none {small}") != 0:
        pytest.skip("needs root, to mount a small file system")
    try:
        run = process.Run(
            "start",
            ("bash", "-c", "head -c 200000 /dev/zero; exit 7"),
            trees.environment,
            "/",
            str(small),
            trees.mark,
        )

        async def story() -> None:
            handle = await start(run)
            outcome = await handle.gone()
            assert (outcome.code, outcome.error) == (7, None)
            assert handle.unsaved == "status.json could not be written: No space left on device"
            assert read_status(small) is None
            assert [file.name for file in small.iterdir()] == ["output.log"]

        play(story())
    finally:
        assert os.system(f"umount {small}") == 0


def test_out_of_memory_is_told_from_other_kills_by_the_cgroups_count(trees: Trees):
    group = Path("/sys/fs/cgroup/memory") / f"raycontrol-{trees.mark}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
    except OSError:
        pytest.skip("needs root and the first version of memory cgroups, to make one with a limit")
    enter = f"open('{group}/cgroup.procs', 'w').write(str(os.getpid()))"
    try:
        for command, oom in (("tail /dev/zero", b"True"), ("kill -9 $$", b"False")):
            owner = Owner(
                trees.run(command), before=enter, then="print((await process.gone()).oom, flush=True)"
            )
            try:
                assert owner.popen.stdout.read().split()[1] == oom
            finally:
                owner.close()
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), what="an empty cgroup")
        group.rmdir()

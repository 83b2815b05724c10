"""What MPI launchers and horovodrun say of a world that failed. Each file in ``reports`` is the output of a real run."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycontrol.backends import explain, world
from raycontrol.plan import Cause
from raycontrol.spec import Mode

HERE = Path(__file__).parent
LAUNCHER_FAULTS = (
    *("openmpi5-no-program", "openmpi5-few-slots", "openmpi5-bad-hostfile", "openmpi4-no-program"),
    *("mpich-no-program", "horovodrun-few-slots"),
)


def said(report: str) -> list[str]:
    return (HERE / "reports" / f"{report}.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("report", "cause"),
    [
        ("openmpi5-exit-3", Cause(rank=1, exit_code=3)),
        ("openmpi5-abort-3", Cause(rank=1, exit_code=3)),
        ("openmpi5-two-aborts", Cause(rank=1, exit_code=3)),
        ("openmpi5-sigkill", Cause(rank=1, exit_code=-9)),
        ("openmpi4-exit-3", Cause(rank=1, exit_code=3)),
        ("openmpi4-abort-3", Cause(rank=1, exit_code=3)),
        ("openmpi4-sigkill", Cause(rank=1, exit_code=-9)),
        ("mpich-abort-3", Cause(rank=1, exit_code=3)),
        ("horovodrun-exit-3", Cause(rank=1, exit_code=3)),
        ("horovodrun-sigkill", Cause(rank=1, exit_code=137)),
        ("horovodrun-mpi-exit-3", Cause(rank=1, exit_code=3)),
    ],
)
def test_the_rank_that_failed_and_its_code(report: str, cause: Cause) -> None:
    for mode in (Mode.MPI, Mode.HOROVOD):
        assert explain(mode, said(report)) == cause
        assert explain(mode, ["step 1", *said(report), "start.sh: the training has failed"]) == cause


@pytest.mark.parametrize("report", ["mpich-exit-3", "mpich-sigkill"])
def test_hydra_says_signal_9_whatever_happened_so_it_is_not_believed(report: str) -> None:
    lines = said(report)
    assert "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)" in lines
    assert explain(Mode.MPI, lines) is None


@pytest.mark.parametrize("report", LAUNCHER_FAULTS)
def test_a_launcher_that_failed_itself_names_no_rank(report: str) -> None:
    assert explain(Mode.MPI, said(report)) is None
    assert explain(Mode.HOROVOD, said(report)) is None


@pytest.mark.parametrize("lines", [[], ["Traceback (most recent call last):", "ValueError: loss is nan"]])
def test_other_last_lines_explain_nothing(lines: list[str]) -> None:
    assert explain(Mode.MPI, lines) is None


def test_half_a_report_explains_nothing() -> None:
    report = said("openmpi5-exit-3")
    assert explain(Mode.MPI, report[:-2]) is None
    assert explain(Mode.MPI, report[4:]) == Cause(rank=1, exit_code=3)


def test_of_several_worlds_the_last_counts() -> None:
    killed, exited, aborted = said("openmpi5-sigkill"), said("openmpi5-exit-3"), said("openmpi5-two-aborts")
    assert explain(Mode.MPI, [*killed, *exited]) == Cause(rank=1, exit_code=3)
    assert explain(Mode.MPI, [*exited, *killed]) == Cause(rank=1, exit_code=-9)
    assert explain(Mode.MPI, [*killed, *aborted]) == Cause(rank=1, exit_code=3)


def test_what_an_abort_brings_about_does_not_hide_it() -> None:
    aborted = said("mpich-abort-3")
    assert explain(Mode.MPI, [*aborted, "Abort(5) on node 2 (rank 2 in comm 0)"]) == Cause(
        rank=1, exit_code=3
    )
    assert explain(Mode.MPI, [*said("openmpi5-abort-3"), *said("openmpi5-sigkill")]) == Cause(
        rank=1, exit_code=3
    )


def test_a_rank_is_numbered_in_the_world_and_not_in_the_communicator_that_aborted() -> None:
    lines = [
        "MPI_ABORT was invoked on rank 0 in communicator MPI COMM 3 SPLIT FROM 0",
        "  Proc: [[25827,1],2]",
        "  Errorcode: 4",
    ]
    assert explain(Mode.MPI, lines) == Cause(rank=2, exit_code=4)


# What stand-ins say.

ADVICE = "mpirun: not found on the PATH of worker-0 (/usr/bin): install an MPI in the job's environment"


def test_the_advice_of_a_stand_in() -> None:
    assert explain(Mode.MPI, ["step 1", f"raycontrol: {ADVICE}"]) == Cause(advice=ADVICE)
    assert explain(Mode.MPI, [f"raycontrol: {ADVICE}", *said("openmpi5-exit-3")]) == Cause(
        rank=1, exit_code=3, advice=ADVICE
    )


def test_that_a_stand_in_waited_is_no_advice() -> None:
    waiting = "raycontrol: mpirun waits for worker-0, worker-1 and 3 more instances to call it too"
    assert explain(Mode.MPI, [waiting]) is None
    assert explain(Mode.MPI, [waiting, *said("openmpi5-exit-3")]) == Cause(rank=1, exit_code=3)
    assert explain(Mode.MPI, [f"raycontrol: {ADVICE}", waiting]) == Cause(advice=ADVICE)


def test_a_path_that_was_replaced_is_advised_about() -> None:
    lines = [
        'The value of the MCA parameter "plm_ssh_agent" was set to a path',
        "that could not be found:",
        "raycontrol-rsh",
    ]
    cause = world.explain(lines)
    assert cause is not None and cause.advice == world.LOST_PATH

"""What became of a command across nodes: names folded, outputs compared, statuses summed up."""

from __future__ import annotations

import pytest

from raycontrol.errors import UsageError
from raycontrol.execution import Began, Command, Over, Target, Wrote, command_of
from raycontrol.nodesets import folded, in_order
from raycontrol.outcomes import Outcomes


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["node1"], "node1"),
        (["node1", "node2", "node3"], "node[1-3]"),
        (["node10", "node2", "node1", "node7"], "node[1-2,7,10]"),
        (["host-0", "host-1", "host-2"], "host-[0-2]"),
        (["gpu01", "gpu02", "gpu10"], "gpu10,gpu[01-02]"),
        (["rack1-n1", "rack1-n2", "rack2-n1"], "rack1-n[1-2],rack2-n1"),
        (["10.0.0.5", "10.0.0.6"], "10.0.0.[5-6]"),
        (["n1-ib", "n2-ib"], "n[1-2]-ib"),
        (["head", "node1"], "head,node1"),
        (["gpu", "gpu5", "gpu0"], "gpu,gpu[0,5]"),
        (["worker-0", "worker-0"], "worker-0"),
        (["a\n1", "ü2"], "a\n1,ü2"),
        ([], ""),
    ],
)
def test_names_are_folded_by_their_last_number(names: list[str], text: str) -> None:
    assert folded(names) == text


def test_names_are_ordered_by_their_numbers() -> None:
    assert in_order(["node10", "node2", "a", "node1"]) == ["a", "node1", "node2", "node10"]


def test_places_that_wrote_the_same_are_together() -> None:
    with Outcomes(["n1", "n2", "n3", "n4"]) as outcomes:
        for news in (
            Began("n1", "root"),
            Wrote("n1", b"sa"),
            Wrote("n2", b"same\n"),
            Wrote("n1", b"me\n"),
            Wrote("n3", b"other\n"),
            *(Over(name, status, status) for name, status in (("n1", 0), ("n2", 0), ("n3", 7), ("n4", 0))),
        ):
            outcomes.take(news)
        assert outcomes.alike() == [["n1", "n2"], ["n3"]]
        assert (outcomes.status, outcomes.failed()) == (7, ["n3"])
        assert (outcomes["n1"].text, outcomes["n1"].user, outcomes["n4"].output) == ("same\n", "root", b"")
        folder = outcomes["n1"].file.parent
    assert not folder.exists()


def test_a_place_of_whose_end_nothing_was_heard_has_not_succeeded() -> None:
    with Outcomes(["n1", "n2"]) as outcomes:
        outcomes.take(Over("n1", 0, 0))
        assert outcomes.status == 125
        with pytest.raises(KeyError):
            outcomes["n3"]


def test_one_word_is_a_line_and_several_are_a_program() -> None:
    assert command_of(("echo $HOME | wc",)) == Command("echo $HOME | wc")
    assert command_of(("echo", "$HOME")) == Command(("echo", "$HOME"))
    assert command_of(("x",), b"echo $1") == Command(("x",), b"echo $1")


def test_a_choice_is_exactly_one() -> None:
    for wrong in ({}, {"nodes": ("a",), "all": True}, {"all": True, "job": "x"}, {"all": True, "group": "g"}):
        with pytest.raises(UsageError, match="either nodes, or all of them, or a group of them, or a job"):
            Target(**wrong)
    with pytest.raises(UsageError, match="name the job, too"):
        Target(all=True, instances=("worker-0",))
    with pytest.raises(UsageError, match="name a command or a script"):
        Command("")
    with pytest.raises(UsageError, match="command: must be text that UTF-8 can hold"):
        Command("echo \ud800")
    assert Command("ls caf\udce9").words == "ls caf\udce9"  # a name that is not UTF-8, as a shell gives it
    with pytest.raises(UsageError, match="timeout_s: must be above 0, got -1"):
        Command("true", timeout_s=-1)

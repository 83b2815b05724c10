"""A clock that steps of the wall clock do not move."""

from __future__ import annotations

import pytest

from raycontrol.steadyclock import SLEW, SteadyClock


class Machine:
    """Its clock, and how long it has been up."""

    def __init__(self) -> None:
        self.wall = 5000.0
        self.up = 70.0

    def pass_time(self, seconds: float) -> None:
        self.wall += seconds
        self.up += seconds

    def clock(self) -> SteadyClock:
        return SteadyClock(lambda: self.wall, lambda: self.up)


def test_it_says_what_the_wall_clock_says() -> None:
    machine = Machine()
    clock = machine.clock()
    assert clock() == 5000
    machine.pass_time(30)
    assert clock() == clock() == 5030


@pytest.mark.parametrize("step_s", [-3600, 3600])
def test_a_step_does_not_change_how_long_anything_takes(step_s: float) -> None:
    machine = Machine()
    clock = machine.clock()
    machine.wall += step_s
    assert clock() == 5000
    machine.pass_time(100)
    assert abs(clock() - 5100) <= 100 * SLEW


def test_after_a_step_it_comes_back_to_the_wall_clock_and_never_goes_back() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.wall -= 60
    seen = [clock()]
    for _ in range(60):
        machine.pass_time(30)
        seen.append(clock())
    assert seen == sorted(seen)
    assert clock() == machine.wall


@pytest.mark.parametrize(("last", "goes_on_from"), [(4990, 5000), (8600, 8600)])
def test_it_goes_on_from_where_an_earlier_one_was_that_was_ahead(last: float, goes_on_from: float) -> None:
    clock = Machine().clock()
    clock.go_on_from(last)
    assert clock() == goes_on_from


def test_a_moment_that_was_before_the_clock_went_on_from_another_is_seen_from_there() -> None:
    machine = Machine()
    clock = machine.clock()
    arrived = clock.moment()
    machine.pass_time(2)
    clock.go_on_from(8602)
    assert clock.seen_from_now(arrived.up_s) == (8600, 70)


def test_a_moment_also_tells_how_long_the_machine_has_been_up_whatever_is_set() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.wall += 3600
    machine.pass_time(100)
    assert clock.moment() == (5105, 170)


def test_a_small_difference_is_made_up_for_at_once() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.pass_time(10)
    machine.wall += 0.2
    assert clock() == machine.wall

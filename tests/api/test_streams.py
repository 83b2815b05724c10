"""An answer that takes long, against the limit that it ends with."""

from __future__ import annotations

import asyncio

import pytest

from raycontrol.api.streams import ended_before


async def for_ever() -> None:
    await asyncio.Event().wait()


async def at_once() -> None:
    pass


async def broken() -> None:
    raise OSError("the disk is gone")


async def broken_when_it_is_cut_off() -> None:
    try:
        await for_ever()
    finally:
        await broken()


def test_work_that_ends_first_is_whole() -> None:
    assert asyncio.run(ended_before(at_once(), for_ever()))


def test_work_that_goes_on_is_cut_off() -> None:
    assert not asyncio.run(ended_before(for_ever(), at_once()))


def test_an_error_of_the_work_is_raised_also_when_it_is_cut_off() -> None:
    for work in (broken(), broken_when_it_is_cut_off()):
        with pytest.raises(OSError, match="the disk is gone"):
            asyncio.run(ended_before(work, at_once()))


def test_who_waits_for_it_ends_it_too() -> None:
    cut = []

    async def work() -> None:
        try:
            await for_ever()
        finally:
            cut.append(True)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(ended_before(work(), for_ever()), 0.01))
    assert cut == [True]

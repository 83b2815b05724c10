from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import os
import tarfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raycontrol.api.files import Packed, log_members, output_members, tar
from raycontrol.api.logevents import MOST_LOGS, PORTION_BYTES, LogsCutter
from raycontrol.api.sse import LINE_BYTES, LineCutter
from raycontrol.logs import JobFolder, OutputFolders
from raycontrol.status import JobState, Reason
from tests.api.fakes import Api, adas_job, events_in, lost, until, write_log
from tests.fake_client import instance

LOGS = "/api/v1/jobs/digits-ab12cd/logs"
EVENTS = "/api/v1/jobs/digits-ab12cd/events"


def ended(api: Api, data: bytes = b"one\ntwo\nthree\n") -> Api:
    api.door.put(adas_job(JobState.SUCCEEDED, reason=Reason.COMPLETED))
    write_log(api.home, data)
    return api


def lines_of(text: str) -> list[tuple[str, str]]:
    """The lines of a stream with their ids, without the event that ends it."""
    return [(event["data"], event["id"]) for event in events_in(text) if event.get("event") != "end"]


# Bytes.


def test_a_log_comes_whole_with_its_size(api: Api) -> None:
    answer = ended(api).get(f"{LOGS}/worker-0", by="user")
    assert (answer.status_code, answer.content) == (200, b"one\ntwo\nthree\n")
    assert (answer.headers["x-offset"], answer.headers["x-size"]) == ("0", "14")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert api.get(LOGS).json() == {"worker-0": 14}


def test_a_part_of_a_log_is_chosen_by_offset_and_limit(api: Api) -> None:
    ended(api)
    for query, data, offset in (
        ("offset=4", b"two\nthree\n", "4"),
        ("offset=4&limit=3", b"two", "4"),
        ("limit=0", b"", "0"),
        ("offset=99", b"", "14"),
        ("tail=1", b"three\n", "8"),
        ("tail=0", b"", "14"),
    ):
        answer = api.get(f"{LOGS}/worker-0?{query}")
        assert (answer.content, answer.headers["x-offset"]) == (data, offset), query


def test_a_range_is_honoured(api: Api) -> None:
    ended(api)
    for header, status, data, span in (
        ("bytes=4-6", 206, b"two", "bytes 4-6/14"),
        ("bytes=8-", 206, b"three\n", "bytes 8-13/14"),
        ("bytes=-6", 206, b"three\n", "bytes 8-13/14"),
        ("bytes=8-999", 206, b"three\n", "bytes 8-13/14"),
        ("bytes=0-1,4-5", 200, b"one\ntwo\nthree\n", None),
        ("lines=1-2", 200, b"one\ntwo\nthree\n", None),
    ):
        answer = api.get(f"{LOGS}/worker-0", headers={"Range": header})
        assert (answer.status_code, answer.content) == (status, data), header
        assert answer.headers.get("content-range") == span
    past = api.get(f"{LOGS}/worker-0", headers={"Range": "bytes=14-"})
    assert (past.status_code, past.headers["content-range"]) == (416, "bytes */14")


def test_a_range_on_a_condition_that_nothing_can_meet_is_passed_over(api: Api) -> None:
    for validator in ('"etag"', "Mon, 30 Nov 2026 17:00:00 GMT"):
        answer = ended(api).get(f"{LOGS}/worker-0", headers={"Range": "bytes=4-6", "If-Range": validator})
        assert answer.status_code == 200
        assert answer.content.startswith(b"one\ntwo\nthree\n")


def test_a_log_of_an_earlier_attempt_is_there_too(api: Api) -> None:
    ended(api)
    api.door.put(adas_job(JobState.SUCCEEDED, attempt=1))
    write_log(api.home, b"again\n", attempt=1)
    assert api.get(f"{LOGS}/worker-0").content == b"again\n"
    assert api.get(f"{LOGS}/worker-0?attempt=0").content == b"one\ntwo\nthree\n"


def test_an_instance_that_wrote_nothing_has_an_empty_log_and_a_stranger_none(api: Api) -> None:
    ended(api)
    assert (api.get(f"{LOGS}/master-0").status_code, api.get(f"{LOGS}/master-0").content) == (200, b"")
    assert api.get(f"{LOGS}/worker-7").status_code == 404


def test_where_the_last_lines_begin_is_told(api: Api) -> None:
    assert ended(api).get(f"{LOGS}/worker-0/tail_offset?lines=2").json() == {"offset": 4}


def test_bytes_past_offsets_are_read_at_once(api: Api) -> None:
    ended(api)
    write_log(api.home, b"\xff\x00", "master-0")
    body = {"attempt": 0, "offsets": {"worker-0": 8}}
    found = {
        name: base64.b64decode(text) for name, text in api.post(f"{LOGS}/read", json=body).json().items()
    }
    assert found == {"master-0": b"\xff\x00", "worker-0": b"three\n"}
    only = api.post(f"{LOGS}/read", json={**body, "instances": ["worker-0"]}).json()
    assert list(only) == ["worker-0"]
    short = api.post(f"{LOGS}/read", json={**body, "max_bytes": 2}).json()
    assert {name: len(base64.b64decode(text)) for name, text in short.items()} == {
        "master-0": 1,
        "worker-0": 1,
    }


def test_a_reader_waits_for_bytes(api: Api) -> None:
    api.door.put(adas_job())
    body = {"attempt": 0, "wait_s": 0.3}
    assert api.post(f"{LOGS}/read", json=body).json() == {}
    with api.live(f"{LOGS}/read", body={**body, "wait_s": 20}) as answer:
        until(lambda: api.app._hub.watchers.followers == 1, "the reader to wait")
        write_log(api.home, b"late\n")
        until(lambda: answer.over, "the answer")
    assert json.loads(answer.body) == {"worker-0": base64.b64encode(b"late\n").decode()}


# Lines as events.


def test_lines_come_with_the_offset_of_the_next_one(api: Api) -> None:
    answer = ended(api).get(f"{LOGS}/worker-0?follow=1")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert lines_of(answer.text) == [("one", "0:4"), ("two", "0:8"), ("three", "0:14")]
    assert events_in(answer.text)[-1] == {"event": "end", "data": '{"state": "SUCCEEDED", "attempt": 0}'}


def test_a_follower_resumes_without_a_gap_or_a_repeat(api: Api) -> None:
    data = (
        b"first\n" + "caf\u00e9\n".encode() + b"\xff\xfe broken\r\n" + b"10%\r50%\r100%\n" + b"\n" + b"no end"
    )
    ended(api, data)
    whole = lines_of(api.get(f"{LOGS}/worker-0?follow=1").text)
    assert [text for text, _ in whole] == ["first", "caf\u00e9", "\ufffd\ufffd broken", "100%", "", "no end"]
    assert whole[-1][1] == f"0:{len(data)}"
    for number, (_, last_id) in enumerate(whole, start=1):
        rest = api.get(f"{LOGS}/worker-0?follow=1", headers={"Last-Event-ID": last_id})
        assert lines_of(rest.text) == whole[number:]


def test_an_id_is_of_its_attempt(api: Api) -> None:
    ended(api)
    api.door.put(adas_job(JobState.SUCCEEDED, attempt=1))
    write_log(api.home, b"other\nlines\n", attempt=1)
    rest = api.get(f"{LOGS}/worker-0?follow=1", headers={"Last-Event-ID": "0:4"})
    assert lines_of(rest.text) == [("two", "0:8"), ("three", "0:14")]
    assert json.loads(events_in(rest.text)[-1]["data"])["next_attempt"] == 1


def test_follow_can_begin_at_an_offset_or_with_the_last_lines(api: Api) -> None:
    ended(api)
    assert lines_of(api.get(f"{LOGS}/worker-0?follow=1&offset=4").text) == [("two", "0:8"), ("three", "0:14")]
    assert lines_of(api.get(f"{LOGS}/worker-0?follow=1&tail=1").text) == [("three", "0:14")]


@pytest.mark.parametrize(
    ("follow", "place"),
    [
        (f"{LOGS}/worker-0?follow=1", "0:0"),
        (f"{LOGS}/worker-0?follow=1&tail=1", "0:8"),
        (f"{LOGS}/stream", '{"attempt":0,"offsets":{}}'),
        (f"{LOGS}/stream?tail=1", '{"attempt":0,"offsets":{"worker-0":8}}'),
        (f"{EVENTS}/stream?after=1", "1"),
    ],
)
def test_who_is_cut_off_before_the_first_event_has_an_id_to_come_back_with(
    api: Api, follow: str, place: str
) -> None:
    whole = ended(api).get(follow).text
    assert whole.startswith(f"retry: 2000\nid: {place}\n\n")
    assert api.get(follow, headers={"Last-Event-ID": place}).text == whole


def test_a_line_of_any_length_comes_in_parts_that_can_be_resumed(api: Api) -> None:
    text = "\u20ac" * (LINE_BYTES // 2) + "end"
    ended(api, text.encode() + b"\nnext\n")
    events = events_in(api.get(f"{LOGS}/worker-0?follow=1").text)[:-1]
    assert "".join(event["data"] for event in events[:-1]) == text
    assert [event.get("event") for event in events] == ["part", None, None]
    rest = api.get(f"{LOGS}/worker-0?follow=1", headers={"Last-Event-ID": events[0]["id"]})
    assert events_in(rest.text)[:-1] == events[1:]


def test_a_cutter_is_fed_in_pieces_of_any_size() -> None:
    data = "ab\ncaf\u00e9\r\nx\ry\nlast".encode()
    for size in range(1, len(data) + 1):
        cutter = LineCutter(100)
        lines = [line for at in range(0, len(data), size) for line in cutter.feed(data[at : at + size])]
        lines += cutter.close()
        found = [(line.text, line.end - 100) for line in lines]
        assert found == [("ab", 3), ("caf\u00e9", 10), ("y", 14), ("last", 18)]


def test_lines_come_as_they_are_written_until_the_job_ends(api: Api) -> None:
    api.door.put(adas_job())
    with api.live(f"{LOGS}/worker-0?follow=1", by="user") as answer:
        write_log(api.home, b"one\nunfini")
        until(lambda: lines_of(answer.text) == [("one", "0:4")], "the first line")
        write_log(api.home, b"shed\n")
        until(lambda: lines_of(answer.text) == [("one", "0:4"), ("unfinished", "0:15")], "the second line")
        write_log(api.home, b"last")
        api.door.becomes("digits-ab12cd", JobState.SUCCEEDED)
        until(lambda: answer.over, "the end")
        assert lines_of(answer.text)[2:] == [("last", "0:19")]


def test_a_new_attempt_ends_what_follows_the_old_one(api: Api) -> None:
    api.door.put(adas_job())
    write_log(api.home, b"one\n")
    with api.live(f"{LOGS}/worker-0?follow=1") as answer:
        until(lambda: "one" in answer.text, "the first line")
        api.door.becomes("digits-ab12cd", JobState.RUNNING, attempt=1)
        until(lambda: answer.over, "the end")
    assert events_in(answer.text)[-1]["data"] == '{"state": "RUNNING", "attempt": 0, "next_attempt": 1}'


def test_all_instances_come_in_one_stream_that_can_be_resumed(api: Api) -> None:
    ended(api)
    write_log(api.home, b"a\nb", "master-0")
    text = api.get(f"{LOGS}/stream").text
    found = lines_of(text)
    assert [tuple(json.loads(data).values()) for data, _ in found] == [
        ("master-0", "a"),
        ("worker-0", "one"),
        ("worker-0", "two"),
        ("worker-0", "three"),
        ("master-0", "b"),
    ]
    assert found[2][1] == '{"attempt":0,"offsets":{"master-0":2,"worker-0":8}}'
    for number, (_, last_id) in enumerate(found, start=1):
        rest = lines_of(api.get(f"{LOGS}/stream", headers={"Last-Event-ID": last_id}).text)
        assert sorted(data for data, _ in rest) == sorted(data for data, _ in found[number:])
    assert len(lines_of(api.get(f"{LOGS}/stream?tail=1").text)) == 2


def test_a_stream_of_too_many_logs_is_refused(api: Api) -> None:
    api.door.put(adas_job(instances=tuple(instance(f"worker-{n}") for n in range(MOST_LOGS + 1))))
    answer = api.get(f"{LOGS}/stream", by="user")
    assert (answer.status_code, answer.json()["detail"]) == (
        409,
        "job 'digits-ab12cd' has 129 instances; the logs of at most 128 come in one stream: follow single ones",
    )


def test_logs_that_come_when_there_are_too_many_break_the_stream_off(api: Api) -> None:
    api.door.put(adas_job(instances=()))
    with api.live(f"{LOGS}/stream") as answer:
        for number in range(MOST_LOGS + 1):
            write_log(api.home, b"one\n", f"worker-{number}")
        until(lambda: answer.over, "the end")
    assert "event: end" not in answer.text
    assert api.get(f"{LOGS}/stream").status_code == 409


def test_lines_of_many_logs_come_in_portions_with_ids_of_those_that_have_moved() -> None:
    cutter = LogsCutter(0, {"still": 0, "moved": 7})
    first, *others = cutter.feed({"master-0": b"\n" * 5000})
    assert max(map(len, [first, *others])) < PORTION_BYTES + 200
    assert first.startswith(b'id: {"attempt":0,"offsets":{"moved":7,"master-0":1}}\n')
    assert sum(piece.count(b"data: ") for piece in [first, *others]) == 5000


# Events of jobs.


def test_events_come_as_they_happen_and_can_be_resumed(api: Api) -> None:
    api.door.put(adas_job(JobState.QUEUED))
    with api.live(f"{EVENTS}/stream", by="user") as answer:
        until(lambda: '"QUEUED"' in answer.text, "the first event")
        api.door.becomes("digits-ab12cd", JobState.RUNNING, "running")
        until(lambda: '"RUNNING"' in answer.text, "the second event")
        api.door.becomes("digits-ab12cd", JobState.FAILED, "ended")
        until(lambda: answer.over, "the end")
    whole = events_in(answer.text)
    assert [(event.get("id"), json.loads(event["data"])["state"]) for event in whole] == [
        ("1", "QUEUED"),
        ("2", "RUNNING"),
        ("3", "FAILED"),
        (None, "FAILED"),
    ]
    rest = api.get(f"{EVENTS}/stream", headers={"Last-Event-ID": "2"})
    assert events_in(rest.text) == whole[2:]


def test_a_long_poll_waits_for_an_event(api: Api) -> None:
    api.door.put(adas_job(JobState.QUEUED))
    assert [event["seq"] for event in api.get(EVENTS).json()] == [1]
    assert api.get(f"{EVENTS}?after=1&wait_s=0.3").json() == []
    with api.live(f"{EVENTS}?after=1&wait_s=20") as answer:
        write_log(api.home, b"bytes are no events\n")
        api.door.becomes("digits-ab12cd", JobState.RUNNING)
        until(lambda: answer.over, "the answer")
    assert [event["state"] for event in json.loads(answer.body)] == ["RUNNING"]


def test_a_long_poll_tells_that_the_controller_does_not_answer(make_api: Callable[..., Api]) -> None:
    api = make_api(glance_s=60)
    api.door.put(adas_job())
    assert api.get(f"{EVENTS}?after=1").json() == []
    api.door.error = lost()
    assert [api.get(f"{EVENTS}?after=1&wait_s={wait_s}").status_code for wait_s in (0, 0.1)] == [503, 503]
    api.door.error = None
    until(lambda: api.get(f"{EVENTS}?after=1&wait_s=0.1").status_code == 200, "an answer")


def test_one_watcher_serves_all_followers(api: Api) -> None:
    api.door.put(adas_job())
    with api.live(f"{EVENTS}/stream") as first:
        until(lambda: '"RUNNING"' in first.text, "the first event")
        asked = api.door.asked_for_events
        with api.live(f"{EVENTS}/stream") as second, api.live(f"{LOGS}/worker-0?follow=1") as third:
            until(lambda: '"RUNNING"' in second.text, "the first event again")
            write_log(api.home, b"one\n")
            until(lambda: "one" in third.text, "the line")
            assert api.app._hub.watchers.followers == 3
        assert api.door.asked_for_events <= asked + 1
    until(lambda: api.app._hub.watchers.followers == 0, "all followers gone")


def test_followers_are_counted_and_have_to_wait_when_there_are_too_many(make_api: Callable[..., Api]) -> None:
    api = make_api(followers_per_job=1, followers=2, watched_jobs=4)
    api.door.put(adas_job())
    with api.live(f"{LOGS}/worker-0?follow=1") as first:
        until(lambda: first.status == 200, "the first follower")
        second = api.get(f"{LOGS}/worker-0?follow=1")
        assert (second.status_code, second.headers["retry-after"]) == (503, "2")
        assert second.json()["detail"] == "too many follow this job; try again later"
        assert api.get(f"{LOGS}/worker-0").status_code == 200
    until(lambda: api.app._hub.watchers.followers == 0, "the first follower gone")


def test_an_error_that_nobody_foresaw_does_not_leave_followers_alone(api: Api) -> None:
    api.door.put(adas_job())
    with api.live(f"{EVENTS}/stream") as answer:
        until(lambda: '"RUNNING"' in answer.text, "the first event")
        api.door.error = RuntimeError("odd")
        api.door.becomes("digits-ab12cd", JobState.SUCCEEDED)
        until(lambda: api.door.refused, "the error")
        api.door.error = None
        until(lambda: answer.over, "the end")
    assert [json.loads(event["data"])["state"] for event in events_in(answer.text)] == [
        "RUNNING",
        "SUCCEEDED",
        "SUCCEEDED",
    ]


def test_a_watcher_that_has_died_is_replaced(api: Api) -> None:
    api.door.put(adas_job())
    watchers = api.app._hub.watchers
    with api.live(f"{EVENTS}/stream") as first:
        until(lambda: '"RUNNING"' in first.text, "the first event")
        _, task = watchers._watchers["digits-ab12cd"]
        api._loop.call_soon_threadsafe(task.cancel)
        until(task.done, "the watcher's death")
        with api.live(f"{EVENTS}/stream") as second:
            until(lambda: '"RUNNING"' in second.text, "the first event again")
            api.door.becomes("digits-ab12cd", JobState.SUCCEEDED)
            until(lambda: second.over, "the end")
    assert events_in(second.text)[-1]["event"] == "end"


def test_a_job_that_is_removed_ends_its_followers(api: Api) -> None:
    api.door.put(adas_job())
    with api.live(f"{EVENTS}/stream") as answer:
        until(lambda: '"RUNNING"' in answer.text, "the first event")
        api.door.prune(["digits-ab12cd"])
        api.door.put(adas_job().model_copy(update={"id": "other-1"}))
        until(lambda: answer.over, "the end")


# Archives.


def test_a_download_that_is_given_up_leaves_no_file_open(api: Api) -> None:
    ended(api)
    opened: list[Any] = []

    async def given_up(work: Callable[[], Any]) -> Any:
        found = work()
        if isinstance(found, Packed):
            return found
        opened.append(weakref.ref(found))
        raise asyncio.CancelledError

    async def download() -> None:
        with pytest.raises(asyncio.CancelledError):
            async for _ in tar(log_members(api.home, "digits-ab12cd"), given_up):
                pass

    asyncio.run(download())
    gc.collect()
    assert [reference() for reference in opened] == [None]


def test_a_folder_that_becomes_a_link_during_a_download_is_left_out(api: Api) -> None:
    outputs = JobFolder(api.home, "digits-ab12cd").outputs("worker-0")
    outputs.mkdir(parents=True)
    (outputs / "model.pt").write_bytes(b"weights")
    treasure = api.home / "treasure"
    treasure.mkdir()
    (treasure / "model.pt").write_bytes(b"gold")

    async def swapped(work: Callable[[], Any]) -> Any:
        found = work()
        if isinstance(found, Packed):
            outputs.rename(api.home / "old")
            outputs.symlink_to(treasure)
        return found

    async def download() -> bytes:
        members = output_members(api.home, "digits-ab12cd")
        return b"".join([piece async for piece in tar(members, swapped)])

    assert asyncio.run(download()).strip(b"\0") == b""


def test_all_logs_come_as_one_archive(api: Api) -> None:
    ended(api)
    write_log(api.home, b"x" * 600_000, "master-0", attempt=1)
    answer = api.get("/api/v1/jobs/digits-ab12cd/logs.tar", by="user")
    assert answer.headers["content-disposition"] == 'attachment; filename="digits-ab12cd-logs.tar"'
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        sizes = {member.name: member.size for member in archive.getmembers()}
        assert sizes == {"0/worker-0.log": 14, "1/master-0.log": 600_000}
        file = archive.extractfile("0/worker-0.log")
        assert file is not None
        assert file.read() == b"one\ntwo\nthree\n"


def test_outputs_come_as_one_archive_whatever_their_names(api: Api) -> None:
    ended(api)
    top = JobFolder(api.home, "digits-ab12cd").outputs("worker-0")
    names = ["deep/" * 40 + "model.pt", "caf\u00e9.txt", "new\nline", "x" * 200]
    for name in names:
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(name)
    os.mkfifo(top / "pipe")
    (top / os.fsdecode(b"latin-\xe9")).write_text("")
    content = api.get("/api/v1/jobs/digits-ab12cd/outputs.tar").content
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        found = {member.name for member in archive.getmembers()}
    assert found == {f"worker-0/{name}" for name in names} | {os.fsdecode(b"worker-0/latin-\xe9")}


def test_of_outputs_of_one_name_the_newer_is_downloaded_as_everywhere(api: Api, tmp_path: Path) -> None:
    ended(api)
    shared = tmp_path / "shared"
    (api.home / "settings.yaml").write_text(f"shared_dir: {shared}\n")
    for place, at in ((api.home, 1), (shared, 2)):
        model = OutputFolders(place, "digits-ab12cd").of("worker-0") / "model"
        model.parent.mkdir(parents=True)
        model.write_text(f"of {at}")
        os.utime(model, (at, at))
    content = api.get("/api/v1/jobs/digits-ab12cd/outputs.tar").content
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        (member,) = archive.getmembers()
        file = archive.extractfile(member)
        assert file is not None
        assert (member.name, file.read()) == ("worker-0/model", b"of 2")


def test_a_job_without_outputs_has_an_empty_archive(api: Api) -> None:
    content = ended(api).get("/api/v1/jobs/digits-ab12cd/outputs.tar").content
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        assert archive.getnames() == []


def test_an_instance_that_is_not_there_is_answered_with_those_that_are(api: Api) -> None:
    api.door.put(adas_job())
    answer = api.get(f"{LOGS}/master")
    assert answer.status_code == 404
    assert answer.json()["detail"] == (
        "job 'digits-ab12cd' has no log of an instance 'master'; there are master-0, worker-0"
    )


def test_an_attempt_that_never_was_is_not_there(api: Api) -> None:
    api.door.put(adas_job())
    detail = "job 'digits-ab12cd' has no attempt 7; they are counted from 0, and the last is 0"
    usage = LOGS.replace("/logs", "/usage")
    for path in (LOGS, f"{LOGS}/worker-0", f"{LOGS}/worker-0/tail_offset", usage):
        answer = api.get(f"{path}?attempt=7")
        assert (answer.status_code, answer.json()["detail"]) == (404, detail), path
    read = api.post(f"{LOGS}/read", json={"attempt": 7})
    assert (read.status_code, read.json()["detail"]) == (404, detail)
    for path, event_id in (
        (f"{LOGS}/worker-0?follow=1", "7:0"),
        (f"{LOGS}/stream", '{"attempt": 7, "offsets": {}}'),
    ):
        assert api.get(path, headers={"Last-Event-ID": event_id}).json()["detail"] == detail


def test_an_attempt_that_has_just_begun_is_there(api: Api) -> None:
    """What a guard knows of a job may be a moment old."""
    api.door.put(adas_job())
    assert api.get(LOGS).status_code == 200
    api.door.becomes("digits-ab12cd", JobState.RUNNING, attempt=1)
    write_log(api.home, b"again\n", attempt=1)
    assert api.get(f"{LOGS}?attempt=1").json() == {"worker-0": 6}


def test_who_comes_back_with_an_id_past_the_end_is_told(api: Api) -> None:
    api.door.put(adas_job(JobState.SUCCEEDED))
    write_log(api.home, b"one\ntwo\n")
    said = "last-event-id: 9 is past the end of the log of 'worker-0', which has 8 bytes"
    for path, event_id in (
        (f"{LOGS}/worker-0?follow=1", "0:9"),
        (f"{LOGS}/stream", '{"attempt": 0, "offsets": {"master-0": 0, "worker-0": 9}}'),
    ):
        answer = api.get(path, headers={"Last-Event-ID": event_id})
        assert (answer.status_code, answer.json()["detail"]) == (416, said)
    assert api.get(f"{LOGS}/worker-0?follow=1", headers={"Last-Event-ID": "0:8"}).status_code == 200
    last = api.get(EVENTS).json()[-1]["seq"]
    assert api.get(f"{EVENTS}/stream", headers={"Last-Event-ID": str(last)}).status_code == 200
    answer = api.get(f"{EVENTS}/stream", headers={"Last-Event-ID": str(last + 1)})
    assert (answer.status_code, answer.json()["detail"]) == (
        416,
        f"last-event-id: {last + 1} is past the last event of job 'digits-ab12cd'",
    )

"""What NCCL's log says of how it reaches other nodes. The lines are NCCL's own, of several versions."""

from __future__ import annotations

import pytest

from raycontrol.transports import TransportReader, usage

SOCKET = b"host-a:984:1257 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0\n"
IB = b"host-a:984:1257 [4] NCCL INFO Channel 06/0 : 36[4] -> 20[4] [send] via NET/IBext_v8/3\n"
GDRDMA = b"host-a:980:1265 [0] NCCL INFO Channel 14/0 : 8[0] -> 0[0] [send] via NET/IB/0/GDRDMA\n"
SHARED = b"host-a:980:1265 [0] NCCL INFO Channel 01/0 : 8[0] -> 1[1] [send] via NET/IB/0(1)/GDRDMA/Shared\n"
OFI = b"ip-10-0-0-5:71:99 [2] NCCL INFO Channel 00/0 : 2[2] -> 8[0] [send] via NET/AWS Libfabric/2/GDRDMA\n"
NOISE = b"host-a:984:1257 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\nepoch 3 via NET/IB\n"


@pytest.mark.parametrize(
    ("log", "named"),
    [
        (SOCKET, ["Socket"]),
        (IB, ["IBext_v8"]),
        (GDRDMA, ["IB/GDRDMA"]),
        (SHARED, ["IB/GDRDMA"]),
        (OFI, ["AWS Libfabric/GDRDMA"]),
        (NOISE, []),
        (NOISE + GDRDMA + SOCKET, ["IB/GDRDMA", "Socket"]),
    ],
)
def test_a_line_of_nccl_names_the_transport(log: bytes, named: list[str]) -> None:
    assert TransportReader().feed(log) == named


@pytest.mark.parametrize("cut", range(1, len(GDRDMA) - 1))
def test_a_line_that_comes_in_two_pieces_is_read_all_the_same(cut: int) -> None:
    reader = TransportReader()
    assert reader.feed(NOISE + GDRDMA[:cut]) + reader.feed(GDRDMA[cut:] + NOISE) == ["IB/GDRDMA"]


def test_each_transport_is_told_once() -> None:
    reader = TransportReader()
    assert reader.feed(GDRDMA) == ["IB/GDRDMA"]
    assert reader.feed(GDRDMA + SOCKET) == ["Socket"]
    assert reader.feed(GDRDMA + SOCKET) == []


def test_a_log_without_an_end_of_line_does_not_grow_in_memory() -> None:
    reader = TransportReader()
    for _ in range(100):
        reader.feed(b"x" * 100_000)
    assert len(reader._rest) <= 4096


def test_a_program_that_prints_such_lines_cannot_fill_the_store() -> None:
    reader = TransportReader()
    lines = b"".join(b"[send] via NET/K%d/0\n" % number for number in range(30_000))
    assert len(reader.feed(lines) + reader.feed(lines)) == 8
    assert TransportReader().feed(b"[send] via NET/%s/0\n" % (b"x" * 500)) == []


@pytest.mark.parametrize(
    ("transports", "text"),
    [
        ([], None),
        (["Socket"], "not in use: NET/Socket"),
        (["IB/GDRDMA"], "in use (GDRDMA)"),
        (["IBext_v8/GDRDMA", "IB/GDRDMA"], "in use (GDRDMA)"),
        (["IB"], "in use"),
        (["IB", "IB/GDRDMA"], "in use (GDRDMA in part)"),
        (["AWS Libfabric/GDRDMA"], "in use (NET/AWS Libfabric, GDRDMA)"),
        (["IB/GDRDMA", "Socket"], "in use (GDRDMA), but NET/Socket too"),
    ],
)
def test_what_is_in_use_in_words(transports: list[str], text: str | None) -> None:
    assert usage(transports) == text

"""Ports that are free, on machines with and without IPv6."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from raycontrol.ports import LEASED_PORTS, free_port


def all_but(*ports: int) -> set[int]:
    return set(LEASED_PORTS) - set(ports)


def listener(family: socket.AddressFamily, host: str) -> socket.socket:
    """Listens on a port of the range."""
    for port in LEASED_PORTS:
        server = socket.socket(family)
        try:
            server.bind((host, port))
            server.listen()
            return server
        except OSError as error:
            server.close()
            if error.errno != errno.EADDRINUSE:
                pytest.skip(f"no {host} here: {error}")
    raise AssertionError("every port is in use")


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")], ids=["IPv4", "IPv6"]
)
def test_a_port_in_use_on_one_address_of_either_family_is_not_free(
    family: socket.AddressFamily, host: str
) -> None:
    if family is socket.AF_INET6 and not socket.has_ipv6:
        pytest.skip("this Python has no IPv6")
    with listener(family, host) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match="no free port"):
            free_port(all_but(port))
    assert free_port(all_but(port)) == port


@pytest.mark.parametrize("where", ["socket", "bind"])
def test_a_system_without_ipv6_has_free_ports(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    class OnlyIPv4(socket.socket):
        def __init__(self, family: int = -1, *arguments: Any, **options: Any) -> None:
            if family == socket.AF_INET6 and where == "socket":
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *arguments, **options)

        def bind(self, address: Any) -> None:
            if self.family == socket.AF_INET6:
                raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
            super().bind(address)

    with listener(socket.AF_INET, "127.0.0.1") as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(socket, "socket", OnlyIPv4)
        assert free_port(set()) in LEASED_PORTS
        with pytest.raises(OSError, match="no free port"):
            free_port(all_but(taken))


def test_a_system_out_of_handles_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoMore(socket.socket):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", NoMore)
    with pytest.raises(OSError, match="Too many open files"):
        free_port(set())

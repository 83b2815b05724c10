"""RDMA devices of this machine, and the user-space libraries (libibverbs and its providers) that programs drive them with."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from raycontrol.hardware import UNKNOWN, Gid, RdmaPort
from raycontrol.sysfiles import exists, link_name, matching, names_in, on_the_node, text_of

# The user-space library (rdma-core calls it a provider) of each kernel driver of an RDMA device. Some devices hang on
# their network driver.
PROVIDERS = {
    "be2net": "ocrdma",
    "bnxt_en": "bnxt_re",
    "i40e": "irdma",
    "ice": "irdma",
    "hfi1": "hfi1verbs",
    "hns3": "hns",
    "hns_roce": "hns",
    "hns_roce_hw_v2": "hns",
    "mlx4_core": "mlx4",
    "mlx5_core": "mlx5",
    "qede": "qedr",
    "rdma_rxe": "rxe",
}
LIBRARIES = ("usr/lib64", "lib64", "usr/lib", "lib", "usr/local/lib")
"""Where libraries lie, after the folder of the machine's architecture."""


def verbs_library(root: Path, environ: Mapping[str, str]) -> Path | None:
    """Return the file of libibverbs that a program with this environment would load."""
    for folder in _library_folders(root, environ):
        library = folder / "libibverbs.so.1"
        if exists(library):
            return library
    return None


def _library_folders(root: Path, environ: Mapping[str, str]) -> list[Path]:
    named = [part for part in environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    architecture = f"{os.uname().machine}-linux-gnu"
    usual = [f"usr/lib/{architecture}", f"lib/{architecture}", *LIBRARIES]
    return [root / part.lstrip("/") for part in (*named, *usual)]


def rdma_ports(root: Path, verbs: Path | None) -> tuple[RdmaPort, ...]:
    devices = root / "sys/class/infiniband"
    names = names_in(devices)
    providers = _providers(root, verbs) if verbs and names else {}
    return tuple(
        _port(root, devices / name, number, providers)
        for name in names
        for number in matching(devices / name / "ports", r"\d+")
    )


def _port(root: Path, device: Path, number: str, providers: Mapping[str, str]) -> RdmaPort:
    folder = device / "ports" / number
    driver = link_name(device / "device/driver")
    gids = _gids(folder)
    interfaces = _netdevs(device, gids)
    return RdmaPort(
        device=device.name,
        port=int(number),
        state=(text_of(folder / "state") or "").rpartition(": ")[2] or UNKNOWN,
        link_layer=text_of(folder / "link_layer") or UNKNOWN,
        rate=text_of(folder / "rate"),
        gids=gids,
        interfaces=interfaces,
        bond=_bond(root, interfaces),
        driver=driver,
        provider=_provider(providers, device.name, driver),
    )


def _gids(port: Path) -> tuple[Gid, ...]:
    """Return the entries in use. The kernel answers EINVAL to questions about the others, some hundred."""
    table = port / "gids"
    used = ((number, text_of(table / number) or "") for number in matching(table, r"\d+"))
    return tuple(
        Gid(
            index=int(number),
            gid=gid,
            type=text_of(port / "gid_attrs/types" / number) or UNKNOWN,
            interface=text_of(port / "gid_attrs/ndevs" / number),
        )
        for number, gid in used
        if gid.strip("0:")
    )


def _netdevs(device: Path, gids: Sequence[Gid]) -> tuple[str, ...]:
    """Return the network interfaces of a port; InfiniBand names none in its table, but the device's if it has one port."""
    named = dict.fromkeys(gid.interface for gid in gids if gid.interface)
    if named or len(matching(device / "ports", r"\d+")) > 1:
        return tuple(named)
    return tuple(names_in(device / "device/net"))


def _bond(root: Path, interfaces: Sequence[str]) -> str | None:
    """Return the bond among the interfaces, or the one that they are part of."""
    folder = root / "sys/class/net"
    masters = (link_name(folder / name / "master") for name in interfaces)
    for name in (*interfaces, *masters):
        if name and exists(folder / name / "bonding"):
            return name
    return None


def _provider(providers: Mapping[str, str], device: str, driver: str | None) -> str | None:
    """Return the installed provider that a device's name begins with, else the one of its driver.

    A device that is only software (``rxe0``) has no driver, or that of the network card below it.
    """
    named = (path for name, path in providers.items() if device.startswith(name))
    return next(named, None) or providers.get(PROVIDERS.get(driver or "", driver or ""))


def _providers(root: Path, verbs: Path) -> dict[str, str]:
    """Return the installed providers by name: those beside libibverbs, and those that its configuration names."""
    found: dict[str, str] = {}
    folder = verbs.parent / "libibverbs"
    for library in matching(folder, r"lib.+-rdmav\d+\.so"):
        found[library[3:].rpartition("-rdmav")[0]] = on_the_node(root, folder / library)
    for configuration in matching(root / "etc/libibverbs.d", r".+\.driver"):
        said = (text_of(root / "etc/libibverbs.d" / configuration) or "").split()
        if len(said) == 2 and (name := _bare_name(said[1])) not in found:
            found.update(_configured(root, verbs, name, said[1]))
    return found


def _bare_name(value: str) -> str:
    """Return ``mlx5`` for ``mlx5`` and for ``/opt/lib/libmlx5``."""
    return value.rpartition("/")[2].removeprefix("lib") if "/" in value else value


def _configured(root: Path, verbs: Path, name: str, value: str) -> dict[str, str]:
    """Return the provider that a configuration names, by path or by name, if its library is there."""
    folder = root / value.lstrip("/").rpartition("/")[0] if "/" in value else verbs.parent
    for library in matching(folder, rf"lib{re.escape(name)}-rdmav\d+\.so"):
        return {name: on_the_node(root, folder / library)}
    return {}

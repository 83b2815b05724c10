"""Ray's own token: whether a cluster asks for it, and whether this process could show it.

``ray.init`` itself would ask for twenty seconds, tell of each refusal on stderr, and then say that there is no cluster.
"""

from __future__ import annotations

import os

from raycontrol.errors import UsageError

VARIABLE = "RAY_AUTH_MODE"
TOKEN = "token"
ASK_S = 5.0
WHERE = "~/.ray/auth_token as it is on the head, or RAY_AUTH_TOKEN"


def mode() -> str:
    """Return the mode that this process is in; in an actor it is that of its node's `ray start`."""
    return os.environ.get(VARIABLE, "").lower() or "disabled"


def check(address: str) -> None:
    """Raise UsageError when the cluster would refuse this process for its token, or for having none."""
    import grpc
    from ray.exceptions import RayError

    try:
        _ask(address)
    except RayError:  # before anything was asked: in this mode Ray needs a token, and finds none
        raise UsageError(f"{VARIABLE} is {TOKEN}, but there is no token of Ray here: have {WHERE}") from None
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise UsageError(refusal(address, mode())) from None
        # What else may be wrong, `ray.init` tells.


def _ask(address: str) -> None:
    """Ask for what every client asks for first."""
    try:
        from ray._private.grpc_utils import init_grpc_channel
        from ray.core.generated import gcs_service_pb2_grpc as services
        from ray.core.generated.gcs_service_pb2 import GetClusterIdRequest  # type: ignore[attr-defined]
    except ImportError:
        return  # they are no promise of Ray's; without them `ray.init` tells what is wrong, in its own way
    with init_grpc_channel(address) as channel:
        gcs = services.NodeInfoGcsServiceStub(channel)  # type: ignore[no-untyped-call]
        gcs.GetClusterId(GetClusterIdRequest(), timeout=ASK_S)


def refusal(address: str, own_mode: str) -> str:
    """Return what to do where the cluster wants another token than was shown to it, or any."""
    if own_mode != TOKEN:
        return f"the Ray cluster at {address} asks for Ray's token: set {VARIABLE}={TOKEN}, and have {WHERE}"
    return f"the Ray cluster at {address} refuses the token of Ray that is here: have {WHERE}"

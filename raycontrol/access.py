"""Who may do what over HTTP: roles, identities, and the one table that decides. Pure.

Over Ray there is no such thing: whoever can reach the cluster can do everything (SECURITY.md).
"""

from __future__ import annotations

from raycontrol.status import Model, Word

TOKEN_TTL_S = 90 * 86_400.0
"""How long a token lives of which nothing else was said."""


class Role(Word):
    """``viewer`` reads all jobs; ``user`` has jobs of his own; ``operator`` all jobs; ``admin`` nodes, tokens and the audit too."""

    VIEWER = "viewer"
    USER = "user"
    OPERATOR = "operator"
    ADMIN = "admin"


class Action(Word):
    """What a request wants to do."""

    READ_JOB = "read_job"
    SUBMIT = "submit"
    CHANGE_JOB = "change_job"
    READ_CLUSTER = "read_cluster"
    READ_NODE = "read_node"
    MANAGE_NODES = "manage_nodes"
    RUN_IN_JOB = "run_in_job"
    RUN_ON_NODES = "run_on_nodes"
    MANAGE_TOKENS = "manage_tokens"
    READ_AUDIT = "read_audit"


class Identity(Model):
    """Who a request comes from: the token's name, the user it stands for, its role."""

    token: str
    user: str
    role: Role


class TokenInfo(Model):
    """A token as it is shown; its secret is told once, when it is made, and kept as a hash. Times are epoch seconds."""

    name: str
    role: Role
    user: str
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None


class AuditEntry(Model):
    """One change that was asked for over HTTP: who, from where, what, on which object, and what became of it.

    ``seq`` is 0 before it is stored; ``status`` is the HTTP status of the answer.
    """

    seq: int = 0
    at: float
    token: str
    user: str
    role: Role
    origin: str
    action: str
    target: str
    status: int
    request_id: str


ALL = frozenset(Role)
OWN = frozenset({Role.USER})
"""Who may do it with jobs of his own only."""

RULES: dict[Action, frozenset[Role]] = {
    Action.READ_JOB: ALL,
    Action.SUBMIT: frozenset({Role.USER, Role.OPERATOR, Role.ADMIN}),
    Action.CHANGE_JOB: frozenset({Role.USER, Role.OPERATOR, Role.ADMIN}),
    Action.READ_CLUSTER: ALL,
    Action.READ_NODE: frozenset({Role.OPERATOR, Role.ADMIN}),
    Action.MANAGE_NODES: frozenset({Role.ADMIN}),
    Action.RUN_IN_JOB: frozenset({Role.USER, Role.OPERATOR, Role.ADMIN}),
    Action.RUN_ON_NODES: frozenset({Role.ADMIN}),
    Action.MANAGE_TOKENS: frozenset({Role.ADMIN}),
    Action.READ_AUDIT: frozenset({Role.ADMIN}),
}
ABOUT_JOBS = frozenset({Action.READ_JOB, Action.CHANGE_JOB, Action.RUN_IN_JOB})


def allowed(identity: Identity, action: Action, owner: str | None = None) -> bool:
    """Whether ``identity`` may do it; ``owner`` is the user whose job it is about."""
    if identity.role not in RULES[action]:
        return False
    if action in ABOUT_JOBS and identity.role in OWN:
        return owner == identity.user
    return True

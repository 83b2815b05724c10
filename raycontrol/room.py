"""What is free for jobs: of the nodes, and of what the site's limits allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from raycontrol.choosing import Choices
from raycontrol.placement import EPSILON, Assignment, Node, find, fits, reserve, with_free
from raycontrol.queuejobs import Job, Kind, Rules, Running, Waiting
from raycontrol.wording import counted


class Usage:
    """How many jobs and GPUs each user has, and all together, beside what is allowed."""

    def __init__(self, rules: Rules, holders: Iterable[Job] = ()) -> None:
        self._rules = rules
        self._jobs: Counter[str] = Counter()
        self._gpus: dict[str, float] = {}
        self._all_jobs = 0
        self._all_gpus = 0.0
        for job in holders if rules.limited else ():
            self.add(job)

    def add(self, job: Job, times: int = 1) -> None:
        self._jobs[job.user] += times
        self._gpus[job.user] = self._gpus.get(job.user, 0.0) + times * job.gpus
        self._all_jobs += times
        self._all_gpus += times * job.gpus

    def copy(self) -> Usage:
        other = Usage(self._rules)
        other._jobs, other._gpus = self._jobs.copy(), self._gpus.copy()
        other._all_jobs, other._all_gpus = self._all_jobs, self._all_gpus
        return other

    def allows(self, job: Job) -> bool:
        return self.limit_of_user(job) is None and self.limit_of_all(job) is None

    def never_allows(self, job: Job) -> str | None:
        """Return which limit holds the job back whoever else ends."""
        for most, who in ((self._rules.all_gpus, "all jobs together"), (self._rules.user_gpus, job.user)):
            if most is not None and job.gpus > most + EPSILON:
                return f"infeasible now: needs {counted(job.gpus, 'GPU')}; {who} may have {most:g}"
        return None

    def limit_of_user(self, job: Job) -> str | None:
        """Return which limit of its user holds the job back, until another job of that user ends."""
        rules, user = self._rules, job.user
        if rules.user_jobs is not None and self._jobs[user] + 1 > rules.user_jobs:
            return f"{user} has {counted(self._jobs[user], 'job')} with nodes, and may have {rules.user_jobs}"
        held = self._gpus.get(user, 0.0)
        if rules.user_gpus is not None and job.gpus and held + job.gpus > rules.user_gpus + EPSILON:
            return f"needs {counted(job.gpus, 'GPU')}; {user} has {held:g} and may have {rules.user_gpus:g}"
        return None

    def limit_of_all(self, job: Job) -> str | None:
        """Return which limit of all jobs together holds the job back until one of them ends."""
        rules, gpus = self._rules, self._all_gpus
        if rules.all_jobs is not None and self._all_jobs + 1 > rules.all_jobs:
            return f"{counted(self._all_jobs, 'job')} of all users have nodes, and {rules.all_jobs} may"
        if rules.all_gpus is not None and job.gpus and gpus + job.gpus > rules.all_gpus + EPSILON:
            return f"needs {counted(job.gpus, 'GPU')}; all jobs have {gpus:g} and may have {rules.all_gpus:g}"
        return None


class Room:
    """What is free. A copy costs little: a node is replaced, never changed."""

    def __init__(self, nodes: Iterable[Node], usage: Usage, choices: Choices) -> None:
        self.nodes = {node.id: node for node in nodes}
        self.usage = usage
        self._choices = choices
        self._able: dict[Kind, list[str]] = {}
        """Nodes that one instance of a kind fitted on: while nothing is given back, it fits on no others."""

    def copy(self) -> Room:
        return Room(self.nodes.values(), self.usage.copy(), self._choices)

    def find(self, item: Waiting) -> tuple[Assignment, ...] | None:
        """Return nodes that are free for a job, if there are any and no limit is in the way."""
        if not self.usage.allows(item):
            return None
        return find(item.gang, item.spec.placement, self.candidates(item))

    def candidates(self, item: Waiting) -> list[Node]:
        """Return the nodes that are worth a look for a job."""
        found = self.able(item.kinds[0]) if len(item.kinds) == 1 else list(self.nodes.values())
        found = self._choices.among(found, item.choice)
        return [node for node in found if node.id not in item.avoided] if item.avoided else found

    def able(self, kind: Kind) -> list[Node]:
        """Return the nodes on which one instance of a kind fits."""
        wanted = dict(kind)
        able = [
            self.nodes[node_id]
            for node_id in self._able.get(kind, self.nodes)
            if fits(wanted, self.nodes[node_id].free)
        ]
        self._able[kind] = [node.id for node in able]
        return able

    def take(self, job: Job, rooms: Sequence[Assignment]) -> None:
        self._put(reserve(self._nodes_of(rooms), job.gang, rooms))
        self.usage.add(job)

    def give_back(self, job: Running) -> None:
        """Add what a job holds to what is free: never more than there is."""
        for node in self._nodes_of(job.rooms):
            more = job.holding[node.id]
            free = {
                name: min(amount, node.free.get(name, 0.0) + more.get(name, 0.0))
                for name, amount in node.total.items()
            }
            self.nodes[node.id] = with_free(node, free)
        self.usage.add(job, -1)
        self._able.clear()

    def keep_within(self, other: Room, rooms: Sequence[Assignment]) -> None:
        """Let no more be free on the nodes of these rooms than ``other`` has free there."""
        for node in self._nodes_of(rooms):
            most = other.nodes[node.id].free
            free = {name: min(amount, most.get(name, 0.0)) for name, amount in node.free.items()}
            self.nodes[node.id] = with_free(node, free)

    def _nodes_of(self, rooms: Iterable[Assignment]) -> list[Node]:
        return [self.nodes[node_id] for node_id in {room.node_id for room in rooms} if node_id in self.nodes]

    def _put(self, nodes: Iterable[Node]) -> None:
        self.nodes.update((node.id, node) for node in nodes)

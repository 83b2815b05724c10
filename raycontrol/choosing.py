"""Which nodes a job may use, and why not the others. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raycontrol import conditions
from raycontrol.placement import Node
from raycontrol.spec import JobSpec
from raycontrol.wording import counted, some

OFFLINE = "offline"
NAMED = 5
"""So many nodes that are not in the cluster, or labels that are there, are named."""
RAY_S_OWN = "ray.io/"
"""Labels that every node has from Ray begin so."""


@dataclass(frozen=True)
class Choice:
    """What a job wants its nodes to be."""

    names: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    where: tuple[tuple[str, str], ...] = ()
    group: str | None = None

    @property
    def asks_for_facts(self) -> bool:
        return any(name in conditions.FACTS for name, _ in self.where)


ANY = Choice()


def choice_of(spec: JobSpec) -> Choice:
    if not (spec.node_names or spec.exclude or spec.where or spec.node_group):
        return ANY
    return Choice(spec.node_names, spec.exclude, tuple(spec.where.items()), spec.node_group)


def objection(choice: Choice, node: Node) -> str | None:
    """Return the first reason why a job may not use the node, so that it can be counted with others; None: it may."""
    if node.offline is not None:
        return OFFLINE
    if choice.names and not _is_named(node, choice.names):
        return "not in node_names"
    if _is_named(node, choice.excluded):
        return "by exclude"
    if choice.group is not None and choice.group not in node.groups:
        return f"not in node_group {choice.group}"
    for name, text in choice.where:
        holds = conditions.holds(name, text, node.labels, node.traits)
        if holds is None:
            return f"whose {name} is not known yet"
        if not holds:
            return f"by where {name}"
    return None


def _is_named(node: Node, names: Sequence[str]) -> bool:
    return node.name in names or node.ip in names


class Choices:
    """What each choice leaves of these nodes: worked out once."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self._nodes = tuple(nodes)
        self._found: dict[Choice, tuple[frozenset[str] | None, str]] = {}

    def among(self, nodes: Iterable[Node], choice: Choice) -> list[Node]:
        """Return those of the nodes that a job may use."""
        ids, _ = self._look(choice)
        return [*nodes] if ids is None else [node for node in nodes if node.id in ids]

    def told(self, choice: Choice, lacking: str) -> str:
        """Return what a job lacks together with why it may not use all nodes."""
        _, excluded = self._look(choice)
        return f"{lacking}; {excluded}" if excluded else lacking

    def _look(self, choice: Choice) -> tuple[frozenset[str] | None, str]:
        """Return the ids of the nodes that the choice leaves (None: all of them), and why not the others."""
        if choice not in self._found:
            objections = {node.id: objection(choice, node) for node in self._nodes}
            causes = Counter(why for why in objections.values() if why is not None)
            ids = frozenset(node_id for node_id, why in objections.items() if why is None)
            words = [*self._missing(choice), *self._excluded(causes)]
            self._found[choice] = (ids if causes else None), "; ".join(words)
        return self._found[choice]

    def _missing(self, choice: Choice) -> Iterable[str]:
        there = {name for node in self._nodes for name in (node.name, node.ip)}
        missing = [name for name in choice.names if name not in there]
        if missing:
            yield f"not in the cluster: {some(missing, NAMED)}"
        labels = {label for node in self._nodes for label in node.labels} if choice.where else set()
        for name, condition in choice.where:
            if conditions.needs_label(name, condition) and name not in labels:
                known = sorted(label for label in labels if not label.startswith(RAY_S_OWN))
                told = some(known, NAMED) or "none but Ray's own"
                yield f"no node has a label {name} (there are {told})"

    def _excluded(self, causes: Counter[str]) -> Iterable[str]:
        if causes:
            total, number = counted(len(self._nodes), "node"), causes.total()
            told = ", ".join(f"{count} {why}" for why, count in sorted(causes.items(), key=_most_first))
            yield f"{number} of {total} {'is' if number == 1 else 'are'} excluded: {told}"


def _most_first(one: tuple[str, int]) -> tuple[int, str]:
    return -one[1], one[0]

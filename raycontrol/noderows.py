"""The store's tables of nodes: which are offline, and in which groups they are. By name, for ids change when Ray starts anew."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import delete, insert, select
from sqlalchemy.engine import Connection

from raycontrol.database import Database, node_groups, offline_nodes
from raycontrol.hardware import OfflineNode


class NodeRows:
    """Reads and writes these tables. When a method returns, what it wrote is on disk; all raise StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def offline(self, cluster: str) -> list[OfflineNode]:
        """The nodes of a cluster that are to take no new job, by name."""
        query = select(offline_nodes).where(offline_nodes.c.cluster == cluster)
        with self._database.reading() as connection:
            found = connection.execute(query.order_by(offline_nodes.c.name))
            return [OfflineNode(name=row.name, reason=row.reason, by=row.by, at=row.at) for row in found]

    def set_offline(self, cluster: str, nodes: Iterable[OfflineNode]) -> None:
        """Note these nodes; of one that is offline already the new reason holds."""
        with self._database.writing() as connection:
            for node in nodes:
                _forget(connection, cluster, node.name)
                values = node.model_dump(exclude={"absent"})
                connection.execute(insert(offline_nodes).values(cluster=cluster, **values))

    def set_online(self, cluster: str, names: Iterable[str]) -> None:
        """Forget that these nodes are offline."""
        with self._database.writing() as connection:
            for name in names:
                _forget(connection, cluster, name)

    def groups(self, cluster: str) -> dict[str, tuple[str, ...]]:
        """The nodes of each group of a cluster, all by name."""
        query = select(node_groups).where(node_groups.c.cluster == cluster)
        found: dict[str, list[str]] = {}
        with self._database.reading() as connection:
            for row in connection.execute(query.order_by(node_groups.c.name, node_groups.c.node)):
                found.setdefault(row.name, []).append(row.node)
        return {name: tuple(nodes) for name, nodes in found.items()}

    def add_to_group(self, cluster: str, group: str, nodes: Iterable[str]) -> None:
        """Put nodes into a group, which there is as long as it has a node."""
        with self._database.writing() as connection:
            for node in nodes:
                values = {"cluster": cluster, "name": group, "node": node}
                connection.execute(insert(node_groups).prefix_with("OR IGNORE").values(**values))

    def remove_from_group(self, cluster: str, group: str, nodes: Iterable[str] | None) -> None:
        """Take nodes out of a group; None: all of them."""
        group_rows = delete(node_groups).where(node_groups.c.cluster == cluster, node_groups.c.name == group)
        with self._database.writing() as connection:
            if nodes is None:
                connection.execute(group_rows)
            else:
                connection.execute(group_rows.where(node_groups.c.node.in_([*nodes])))


def _forget(connection: Connection, cluster: str, name: str) -> None:
    connection.execute(
        delete(offline_nodes).where(offline_nodes.c.cluster == cluster, offline_nodes.c.name == name)
    )

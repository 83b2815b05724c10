"""Figures about all jobs of a cluster, by SQL over columns and small indexes: no job is read for them."""

from __future__ import annotations

from sqlalchemy.engine import Connection

from raycontrol.status import Histogram, JobState, Metrics, Reason

BOUNDS_S = (1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0, 86400.0)
"""Upper bounds of the histograms' buckets: a launch takes seconds, a wait for nodes may take a day."""

# The conditions are those of the partial indexes, word for word and without parameters: else SQLite does not use them.
# CROSS JOIN keeps its order: from the few events to their jobs.
_PLACED = """SELECT job_id, attempt, MIN(at) AS first_at, MAX(at) AS last_at FROM events
    WHERE kind = 'NodesChosen' GROUP BY job_id, attempt"""
_RAN_AT = """(SELECT MIN(at) FROM events WHERE kind = 'StagePassed' AND state = 'RUNNING'
    AND job_id = placed.job_id AND attempt = placed.attempt)"""
_WAITS = f"""SELECT MIN(placed.first_at) - jobs.submitted_at AS took_s
    FROM ({_PLACED}) AS placed CROSS JOIN jobs WHERE jobs.id = placed.job_id AND jobs.cluster = ? GROUP BY placed.job_id"""
_LAUNCHES = f"""SELECT ran_at - last_at AS took_s FROM (SELECT placed.last_at, {_RAN_AT} AS ran_at
    FROM ({_PLACED}) AS placed CROSS JOIN jobs WHERE jobs.id = placed.job_id AND jobs.cluster = ?)
    WHERE ran_at IS NOT NULL"""
_ATTEMPTS = f"""SELECT COUNT(*) FROM ({_PLACED}) AS placed CROSS JOIN jobs
    WHERE jobs.id = placed.job_id AND jobs.cluster = ?"""
_ENDINGS = """SELECT reason, COUNT(DISTINCT job_id) FROM events CROSS JOIN jobs
    WHERE jobs.id = events.job_id AND events.state IN ('SUCCEEDED', 'FAILED', 'STOPPED') AND jobs.cluster = ? GROUP BY reason"""


def read(connection: Connection, cluster: str) -> Metrics:
    """Return the figures of a cluster's jobs as they are stored."""
    states = connection.exec_driver_sql(
        "SELECT state, COUNT(*) FROM jobs WHERE cluster = ? GROUP BY state", (cluster,)
    )
    counted = {str(state): count for state, count in states}
    endings = connection.exec_driver_sql(_ENDINGS, (cluster,)).all()
    return Metrics(
        jobs={state: counted.get(state, 0) for state in JobState},
        queue_wait_s=_histogram(connection, _WAITS, cluster),
        launch_s=_histogram(connection, _LAUNCHES, cluster),
        attempts=connection.exec_driver_sql(_ATTEMPTS, (cluster,)).scalar_one(),
        endings={Reason(reason): count for reason, count in endings},
    )


def _histogram(connection: Connection, durations: str, cluster: str) -> Histogram:
    """Return how the durations of a query are spread; a clock that was set back makes none shorter than nothing."""
    sums = ", ".join(f"TOTAL(took_s <= {bound})" for bound in BOUNDS_S)
    # With the LIMIT a duration is a row, worked out once; else SQLite would work it out again for every bucket.
    query = f"SELECT COUNT(*), TOTAL(MAX(took_s, 0)), {sums} FROM ({durations} LIMIT -1)"
    count, sum_s, *counts = connection.exec_driver_sql(query, (cluster,)).one()
    buckets = tuple((bound, int(below)) for bound, below in zip(BOUNDS_S, counts, strict=True))
    return Histogram(buckets=buckets, count=count, sum_s=sum_s)

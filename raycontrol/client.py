"""The door for programs: submit jobs, watch them, read what they wrote.

>>> from raycontrol import Client, JobSpec
>>> job = Client().submit(JobSpec.from_yaml("job.yaml"))
>>> for line in job.logs(follow=True):
...     print(line)
>>> job.wait(timeout_s=600).state
"""

from __future__ import annotations

import builtins
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from raycontrol import extras, specmounts
from raycontrol.access import TOKEN_TTL_S, Role, TokenInfo
from raycontrol.arrayspec import array_of, index_of, ranges
from raycontrol.errors import ClusterUnreachable, JobNotFound, UsageError, WaitTimeout
from raycontrol.execution import Command, News, Target
from raycontrol.hardware import InstanceUsage, NodeGroup, NodeInfo, OfflineNode
from raycontrol.outcomes import Outcomes
from raycontrol.outputs import Fetched, lay_down
from raycontrol.packages import Package, pack, upload
from raycontrol.readers import ClusterDoor, Door, Execution, Reader, completed
from raycontrol.settings import Settings, process_environment
from raycontrol.spec import After, JobSpec
from raycontrol.status import Event, JobInfo, JobState, MemberInfo, QueueEntry, Wish

if TYPE_CHECKING:
    from raycontrol.remote import HttpDoor

PROGRESS_S = 2.0
EVENT_POLL_S = 10.0
QUIET_S = 0.5

Progress = Callable[[str], None]


class Client:
    """Speaks with the controller of one cluster; connects at the first verb that needs it.

    With ``url`` (default, where neither ``address`` nor ``embedded`` is given: RAYCONTROL_URL) it does so over HTTP,
    through the `raycontrol serve` that answers there, needs no Ray and reads nothing of this machine; the
    ``controller_…`` methods raise UsageError. ``token`` (default: RAYCONTROL_TOKEN, else what RAYCONTROL_TOKEN_FILE
    holds) says who asks, and jobs are submitted as its user.

    ``address`` is Ray's GCS address (default: RAY_ADDRESS, else the cluster of this machine). Where there is no
    cluster, ``submit`` and the ``controller_…`` methods raise UsageError, unless ``embedded``: that starts a Ray of
    this process's own, which ends with ``close`` and takes its unfinished jobs along. Reading and ``prune`` then work
    on the store in RAYCONTROL_HOME of this machine, also when the cluster that was named does not answer (``offline``
    says so); stopping a job that has not ended raises ControllerUnavailable. A client is a context manager.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        url: str | None = None,
        token: str | None = None,
        embedded: bool = False,
        settings: Settings | None = None,
    ) -> None:
        if address is not None and embedded:
            raise UsageError("an embedded client starts a cluster of its own; give no address")
        if url is not None and (address is not None or embedded):
            raise UsageError("a url is a way to a cluster by itself; give no address or embedded with it")
        self._settings = settings or Settings.load()
        is_open = url is None and address is None and not embedded
        self.url = self._settings.url if is_open else url
        """Where the server answers through which this client asks; None when it does not go over HTTP."""
        if token is not None and self.url is None:
            raise UsageError("a token is for a url; give one, or set RAYCONTROL_URL")
        self._token = token
        self._address = address
        self._embedded = embedded
        self._session: Any | None = None
        self._reader: Reader | None = None
        self._remote: HttpDoor | None = None
        self.offline: str | None = None
        """What is to be said of where this client reads: the store of this machine, although a cluster was named, or
        although nothing was ever stored there; None when there is nothing to say."""

    @property
    def home(self) -> Path:
        """RAYCONTROL_HOME on this machine."""
        return self._settings.home_path

    def submit(
        self, spec: JobSpec, *, job_id: str | None = None, progress: Progress | None = None
    ) -> JobHandle:
        """Submit a job; return when it is stored. ``progress`` is told of slow steps and warnings.

        Secrets that the spec leaves open (``secret_env: {NAME: null}``) are taken from the environment of this process.
        The same ``job_id`` again submits nothing and returns the job: make one yourself to retry safely. Raises
        UsageError (without a cluster), SpecError, PackageError, ClusterUnreachable, ControllerUnavailable,
        VersionMismatch, StoreError; over HTTP Unauthorized, Forbidden, ServerUnreachable.
        """
        from raycontrol import backends
        from raycontrol.job import Submission
        from raycontrol.version import __version__

        tell = progress or _silent
        if self.url is None:
            extras.require("ray")  # before a folder is packed that nobody will get
        spec = spec.named("job").with_secrets(process_environment())
        for warning in backends.plan_of(spec).warnings:
            tell(f"warning: {warning}")
        _refuse_missing_sources(spec)
        package = None if spec.working_dir is None else self._pack(spec.working_dir, tell)
        if self._embedded and self._session is None:
            tell("no Ray cluster found: starting one in this process for this run")
        door = self._open()
        spec = _with_whole_ids(spec, self.job)
        doubts = door.doubts(spec)
        if doubts is not None:
            tell(f"warning: {doubts}")
        if package is not None:
            with package:
                send(door, package, tell)
        submission = Submission(
            job_id=job_id or new_job_id(spec.name or "job"),
            spec=spec,
            user=self._settings.user,
            package=package.digest if package else None,
            version=__version__,
        )
        return JobHandle(self, door.submit(submission).id)

    def job(self, job_id: str) -> JobHandle:
        """Return the job of that id, or of the only id that begins so; raises JobNotFound.

        A member of an array has the array's id, ``~`` and its index.
        """
        array_id = array_of(job_id)
        if array_id is not None:
            return self.job(array_id).member(index_of(job_id))
        if not job_id:  # every id begins so
            raise UsageError("job id: must not be empty")
        found = self._read().find(job_id)
        if job_id in found:
            return JobHandle(self, job_id)
        # Before the name of one job goes that of another which begins so: dep-z3dnev9 is meant by dep, not dep2-vwid8er.
        named_so = [one for one in found if one.rpartition("-")[0] == job_id]
        found = named_so or found
        if len(found) != 1:
            raise JobNotFound(job_id, tuple(found))
        return JobHandle(self, found[0])

    def list(
        self,
        *,
        all: bool = False,
        states: Sequence[JobState] | None = None,
        user: str | None = None,
        limit: int | None = 100,
        labels: Mapping[str, str] | None = None,
        text: str | None = None,
        before: tuple[float, str] | None = None,
    ) -> builtins.list[JobInfo]:
        """Return jobs, newest first; ``all`` ignores ``limit``.

        ``labels``: that have all of these; ``text``: with this in their id or name. The next page comes with ``before``,
        the last job's ``(submitted_at, id)``.
        """
        count = None if all else limit
        return self._read().jobs(states, user, count, labels=labels, text=text, before=before)

    def nodes(self, names: Sequence[str] | None = None, *, check: bool = False) -> builtins.list[NodeInfo]:
        """Return the cluster's nodes, or those of these names, IPs or beginnings of ids, ordered by name.

        ``check`` measures clocks and name look-ups too, which takes some seconds where names are slow. Starts the
        cluster's controller if it has none. Raises UsageError without a cluster and for a name that no node has.
        """
        return self._open().nodes(names, check)

    def set_offline(self, names: Sequence[str], *, reason: str) -> builtins.list[OfflineNode]:
        """Let nodes take no new job, whatever becomes of Ray and the controller; jobs that run there go on.

        Nodes go by name, IP or the beginning of an id; a name that no node has now (``absent``) is kept for one that will.
        """
        return self._open().set_offline(names, reason, by=self._settings.user)

    def set_online(self, names: Sequence[str]) -> builtins.list[str]:
        """Let nodes take jobs again; return their names. Raises UsageError for a name that is neither there nor offline."""
        return self._open().set_online(names, by=self._settings.user)

    def offline_nodes(self) -> builtins.list[OfflineNode]:
        """Return the nodes that are offline, ordered by name; also such as no node of the cluster is now (``absent``)."""
        return self._open().offline_nodes()

    def node_groups(self) -> builtins.list[NodeGroup]:
        """Return the groups of nodes, ordered by name."""
        return self._open().node_groups()

    def add_to_group(self, group: str, names: Sequence[str]) -> NodeGroup:
        """Put nodes into a group, made if there is none; return it as it is then. Nodes as in ``set_offline``."""
        return self._open().add_to_group(group, names, by=self._settings.user)

    def remove_from_group(self, group: str, names: Sequence[str] | None = None) -> NodeGroup:
        """Take nodes out of a group (None: all, and there is no such group then). Raises UsageError where they are not in it."""
        return self._open().remove_from_group(group, names, by=self._settings.user)

    def exec(
        self,
        command: str | Sequence[str] = (),
        *,
        nodes: Sequence[str] = (),
        all: bool = False,
        job: str | None = None,
        instances: Sequence[str] = (),
        group: str | None = None,
        script: bytes | None = None,
        timeout_s: float | None = None,
        parallel: int | None = None,
        plain: bool = False,
        root: bool = False,
        on_news: Callable[[News], None] | None = None,
    ) -> Outcomes:
        """Run a command across nodes, or inside a job's instances, to its end everywhere; return what became of it.

        A string is a line for bash, a list a program without a shell; ``script`` holds the bytes of a script, to which
        ``command`` is a list of arguments. It takes no resources, and leaves nothing running. ``on_news`` is called with what
        happens, as it happens (``execution.News``). Statuses are as in ``Outcomes``, whose files go with ``close``. Raises
        UsageError, and nothing was started, for a name that fits nothing; what is wrong with one place is in its outcome.
        """
        words = command if isinstance(command, str) else tuple(command)
        target = Target(tuple(nodes), all, job, tuple(instances), group)
        wanted = Command(words, script, timeout_s, plain, root)
        with self.execute(target, wanted, parallel) as running:
            outcomes = Outcomes(running.places)
            try:
                for news in running:
                    outcomes.take(news)
                    if on_news is not None:
                        on_news(news)
            except BaseException:
                outcomes.close()
                raise
        return outcomes

    def execute(self, target: Target, command: Command, parallel: int | None = None) -> Execution:
        """Begin a command across nodes; see ``exec``. What is returned tells its news, and can stop it."""
        if target.job is not None:
            if command.root or command.plain:
                only = "root" if command.root else "plain"
                raise UsageError(f"{only} is for nodes: in a job a command runs as its start command does")
            target = replace(target, job=self.job(target.job).id)
        if parallel is not None and parallel < 1:
            raise UsageError(f"parallel: must be at least 1, got {parallel}")
        return self._open().execute(target, command, parallel)

    def queue(self) -> builtins.list[QueueEntry]:
        """Return the jobs that wait for nodes, in the order in which they are decided upon, with what each waits for."""
        return self._open().queue()

    def create_token(
        self, name: str, role: Role, *, user: str | None = None, ttl_s: float | None = TOKEN_TTL_S
    ) -> tuple[TokenInfo, str]:
        """Make a token of the HTTP interface; return it with its text, which nobody can tell again.

        It stands for ``user`` (default: you) for ``ttl_s`` seconds (None: until it is revoked). Raises UsageError when
        there is one of that name.
        """
        me = self._settings.user
        return self._open().create_token(name, role, me if user is None else user, ttl_s, by=me)

    def tokens(self) -> builtins.list[TokenInfo]:
        """Return all tokens, the expired and revoked ones too, oldest first."""
        return self._open().tokens()

    def revoke_token(self, name: str) -> TokenInfo:
        """End a token at once, and for good; raises UsageError when there was none of that name."""
        return self._open().revoke_token(name)

    def controller_status(self) -> dict[str, Any]:
        """Return who the controller is and what it has to do; ``running`` is False when there is none."""
        session = self._connected()
        controller = session.existing_controller(any_version=True)
        if controller is None:
            return {"running": False, "cluster": session.cluster_name}
        return {"running": True, **session.get(controller.describe.remote())}

    def controller_restart(self) -> dict[str, Any]:
        """End the controller and have it started again with the code installed now; jobs run on."""
        session = self._connected()
        status: dict[str, Any] = session.get(session.restart_controller().describe.remote())
        return status

    def prune(
        self, *, older_than_days: float | None = None, keep_gib: float | None = None, dry_run: bool = False
    ) -> builtins.list[JobInfo]:
        """Remove finished jobs with all they kept; return them. Defaults are ``keep_days`` and ``keep_gib`` of the settings."""
        from raycontrol.retention import expired

        reader = self._read()
        days = self._settings.keep_days if older_than_days is None else older_than_days
        gib = self._settings.keep_gib if keep_gib is None else keep_gib
        jobs = {info.id: info for info in reader.jobs(None, None, None)}
        doomed = expired(tuple(jobs.values()), reader.sizes_of_jobs(), time.time(), days, gib)
        if doomed and not dry_run:
            reader.prune(doomed)
        return [jobs[job_id] for job_id in doomed]

    def close(self) -> None:
        """Leave the cluster (and end it if it is embedded)."""
        if self._session is not None:
            self._session.close()
        if self._remote is not None:
            self._remote.close()
        self._session = None
        self._reader = None
        self._remote = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connected(self) -> Any:
        from raycontrol.connect import Session, find_address

        if self.url is not None:
            raise UsageError("not over HTTP: run it on a node of the cluster, with --address")
        extras.require("ray", "sqlalchemy")
        if self._session is None:
            address = None if self._embedded else find_address(self._settings, self._address)
            self._session = Session(self._settings, address, embedded=self._embedded)
        return self._session

    def _open(self) -> Door:
        """Return the way in to the cluster, whose controller is started if it has none."""
        if self.url is not None:
            return self._over_http(self.url)
        if not isinstance(self._reader, ClusterDoor):
            session = self._connected()
            self._reader = ClusterDoor(session, session.controller())
        return self._reader

    def _read(self) -> Reader:
        """Return the controller's view where there is a controller, else the store's of this machine.

        On a cluster without a controller it is looked for each time: the first job of anybody brings one.
        """
        if self._reader is not None:
            return self._reader
        if self.url is not None:
            return self._over_http(self.url)
        reader = self._find_reader()
        if self._session is None or isinstance(reader, ClusterDoor):
            self._reader = reader
        return reader

    def _over_http(self, url: str) -> HttpDoor:
        from raycontrol.remote import HttpDoor

        if self._remote is None:
            token = self._settings.http_token() if self._token is None else self._token
            self._remote = HttpDoor(url, token, insecure_http=self._settings.insecure_http)
        return self._remote

    def _find_reader(self) -> Reader:
        from raycontrol.connect import find_address

        if self._session is not None or find_address(self._settings, self._address) is not None:
            try:
                session = self._connected()
            except ClusterUnreachable as error:
                self.offline = f"{error.reason}; reading the store in {self._settings.home}"
            else:
                controller = session.existing_controller()
                if controller is not None:
                    return ClusterDoor(session, controller)
        return self._this_machine()

    def _this_machine(self) -> Reader:
        """Return the reader of the store here, and note when nobody ever stored anything: an empty list would not tell."""
        extras.require("sqlalchemy")
        from raycontrol.storereader import StoreReader

        reader = StoreReader(self._settings.home_path)
        if self.offline is None and self._session is None and not reader.has_store():
            self.offline = (
                f"no Ray cluster was found, and nothing is stored in {self._settings.home}; RAYCONTROL_URL names a "
                "server, RAY_ADDRESS a cluster, RAYCONTROL_HOME another folder"
            )
        return reader

    def _pack(self, folder: str, tell: Progress) -> Package:
        package = pack(folder, self._settings.package_cap_bytes, leave_out=[self._settings.home_path])
        tell(f"packed {folder}: {package.files} files, {package.size / 2**20:.1f} MiB")
        for warning in package.warnings:
            tell(f"warning: {warning}")
        return package


class JobHandle:
    """One job of a client."""

    def __init__(self, client: Client, job_id: str) -> None:
        self._client = client
        self.id = job_id

    def __repr__(self) -> str:
        return f"JobHandle({self.id!r})"

    def info(self) -> JobInfo:
        """Return the job as it is now."""
        return self._client._read().info(self.id)

    def members(self) -> list[MemberInfo]:
        """Return the members of an array, by their indices; raises UsageError for a job that is none."""
        return self._client._read().members(self.id)

    def member(self, index: int) -> JobHandle:
        """Return the job of a member; raises UsageError for one that is not there or has not begun."""
        found = {one.index: one for one in self.members()}
        if index not in found:
            raise UsageError(f"array {self.id} has no member {index}; it has {ranges(sorted(found))}")
        if (job_id := found[index].id) is None:
            raise UsageError(f"member {index} of {self.id} has not begun")
        return JobHandle(self._client, job_id)

    def events(self, after: int = 0) -> list[Event]:
        """Return what has happened to the job, oldest first, from the event after ``after``."""
        events: list[Event] = []
        while page := self._client._read().events(self.id, events[-1].seq if events else after, 0):
            events += page
        return events

    def usage(self, last: int = 1, *, attempt: int | None = None) -> dict[str, tuple[InstanceUsage, ...]]:
        """Return the last samples of what each instance uses, oldest first, in the attempt (default: the current one).

        Instances that have none (they are taken every 5 seconds) are not in it.
        """
        wanted = self.info().attempt if attempt is None else attempt
        return self._client._read().usage(self.id, wanted, last)

    def watch(self, after: int = 0) -> Iterator[Event]:
        """Yield events as they happen; end with the job."""
        over = False
        while True:
            events = self._news(after, 0 if over else EVENT_POLL_S)
            for event in events:
                after = event.seq
                yield event
            if (events and events[-1].state.terminal) or (over and not events):
                return
            # Looked at before the next events, so that those up to the end are among them.
            may_be = not events or events[-1].state is JobState.STOPPING
            over = over or (may_be and self.info().over)

    def wait(self, timeout_s: float | None = None) -> JobInfo:
        """Return the job once it has ended (also while a failed one keeps its nodes, ``kept_until``); raises WaitTimeout when it has not in ``timeout_s`` seconds."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        after = 0
        while True:
            info = self.info()
            if info.over:
                return info
            left = EVENT_POLL_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise WaitTimeout(self.id, timeout_s or 0.0)
            events = self._news(after, min(left, EVENT_POLL_S))
            after = events[-1].seq if events else after

    def _news(self, after: int, timeout_s: float) -> list[Event]:
        """Return the events after ``after``; wait up to ``timeout_s`` for the first.

        A controller does not wait for a job that is not its own (of an embedded run, say): then we do, a little.
        """
        asked = time.monotonic()
        events = self._client._read().events(self.id, after, timeout_s)
        if not events:
            time.sleep(max(0.0, min(timeout_s, QUIET_S) - (time.monotonic() - asked)))
        return events

    def exec(self, command: str | Sequence[str] = (), **options: Any) -> Outcomes:
        """Run a command inside the job's instances, with their environment and working directory; see ``Client.exec``."""
        return self._client.exec(command, job=self.id, **options)

    def stop(self, *, force: bool = False, why: str | None = None) -> JobInfo:
        """Ask the job to stop: TERM, its grace, KILL; ``force`` kills at once. Returns before it has stopped.

        A job that has ended stays as it is.
        """
        reason = why or f"stop requested by {self._client._settings.user}"
        return self._client._read().stop(self.id, reason, force)

    def shell(self, instance: str | None = None) -> int:
        """Sit at a shell in a running instance (default: with INDEX 0), on this process's terminal; return its exit status.

        Not over HTTP. Raises UsageError without a terminal, and where nothing of the job runs.
        """
        from raycontrol.shells import RayLine, sit

        session = self._client._connected()

        def open_line(rows: int, columns: int, term: str) -> RayLine:
            target = Target(job=self.id, instances=() if instance is None else (instance,))
            place = session.get(session.controller().places.remote(target))[0]
            return RayLine(session, session.actor_of(place), rows, columns, term)

        return sit(open_line)

    def get_outputs(self, folder: str | Path | None = None) -> Fetched:
        """Fetch what the job has left in $RAYCONTROL_OUTPUT_DIR, as ``<folder>/<instance>/<path>``; default: ``outputs-<id>`` here.

        Files of the same name are replaced. Raises OutputsError when ``folder`` cannot be written, and UsageError for an array,
        whose members have outputs.
        """
        if self.info().array is not None:
            raise UsageError(f"job {self.id} is an array: name a member of it, such as {self.id}~0")
        top = Path(f"outputs-{self.id}") if folder is None else Path(folder).expanduser()
        return lay_down(self._client._read().outputs(self.id), top)

    def hold(self) -> JobInfo:
        """Keep the waiting job from being started until it is released. Raises UsageError when it does not wait."""
        return self._wish(Wish.HOLD)

    def release(self) -> JobInfo:
        """Let a job go that was held or suspended; one that is not held stays as it is."""
        return self._wish(Wish.RELEASE)

    def suspend(self) -> JobInfo:
        """Stop the job (TERM, its grace, KILL) and keep it in the queue, held, until it is resumed; returns before it has stopped.

        Its next attempt finds the same code and output folders. Raises UsageError when it is ending.
        """
        return self._wish(Wish.SUSPEND)

    def resume(self) -> JobInfo:
        """Let a suspended job go on, with another attempt."""
        return self._wish(Wish.RESUME)

    def set_priority(self, priority: int) -> JobInfo:
        """Give the waiting job another priority, 0 (highest) to 9. Raises UsageError when it does not wait."""
        user = self._client._settings.user
        return self._client._open().set_priority(self.id, priority, f"priority {priority}, by {user}")

    def _wish(self, wish: Wish) -> JobInfo:
        return self._client._open().wish(self.id, wish, f"{wish.done} by {self._client._settings.user}")

    def logs(
        self,
        *,
        follow: bool = False,
        instance: str | None = None,
        group: str | None = None,
        tail: int | None = None,
        prefix: bool = True,
        attempt: int | None = None,
    ) -> Iterator[str]:
        """Yield lines of the job's log, each with its instance's name in front (``worker-0 | …``) unless ``prefix`` is False.

        ``instance`` (``worker-0``) and ``group`` (``worker``) narrow to what they name.
        ``tail`` begins with the last so many lines of each instance; it looks back 256 KiB at most, so that fewer may
        come. ``follow`` goes on until the job has ended and everything it wrote was yielded, its further attempts
        included; it begins with the current one. ``attempt`` is the only one to show. Of an array, the lines of all members
        come with their indices (``17 | …``), and only ``follow``, ``tail`` and ``prefix`` can be given. Lines are views: bytes that are not UTF-8 are replaced, very long lines cut. The files keep every byte.
        """
        from raycontrol.arraylogs import ArrayLogs
        from raycontrol.logview import LogView

        if self.info().array is not None:
            if (instance, group, attempt) != (None, None, None):
                raise UsageError("of an array choose a member (`--member 17`) to see one instance or attempt")
            yield from ArrayLogs(self._client._read(), self.id, prefix=prefix).lines(follow, tail)
            return
        view = LogView(
            self._client._read(), self.id, instance=instance, group=group, prefix=prefix, attempt=attempt
        )
        if tail is not None:
            yield from view.tail(tail)
        yield from view.follow() if follow else view.rest()


def send(door: Door, package: Package, tell: Progress) -> None:
    """Bring a packed working directory to the archive, unless it is there."""
    if door.has_package(package.digest):
        return
    said = time.monotonic()

    async def put(digest: str, offset: int, data: bytes, last: bool) -> int:
        nonlocal said
        if time.monotonic() - said > PROGRESS_S:
            said = time.monotonic()
            tell(f"uploading the working directory: {100 * offset // max(1, package.size)} %")
        return door.put_package(digest, offset, data, last)

    completed(upload(package, put))


def _refuse_missing_sources(spec: JobSpec) -> None:
    """Raise UsageError for a mount of the code's folder that is not in it: no node would find it either."""
    for mount in specmounts.wanted(spec.mounts):
        if mount.source.startswith("/"):
            continue
        if spec.working_dir is None:
            raise UsageError(
                f"mounts: {mount.target}: {mount.source} is of the code, and there is no working_dir"
            )
        if not (Path(spec.working_dir).expanduser() / mount.source).exists():
            raise UsageError(f"mounts: {mount.target}: there is no {mount.source} in {spec.working_dir}")


def _with_whole_ids(spec: JobSpec, find: Callable[[str], JobHandle]) -> JobSpec:
    """Return the spec with the ids of the jobs that it waits for written out; raises JobNotFound."""
    named: dict[str, tuple[str, ...]] = spec.after.model_dump()
    if not any(named.values()):
        return spec
    whole = {kind: tuple(find(job_id).id for job_id in ids) for kind, ids in named.items()}
    return spec.model_copy(update={"after": After(**whole)})


def new_job_id(name: str) -> str:
    """Return a fresh id that begins with the job's name."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:30].strip("-") or "job"
    alphabet = "abcdefghijkmnpqrstuvwxyz23456789"
    return f"{slug}-" + "".join(secrets.choice(alphabet) for _ in range(7))


def _silent(_: str) -> None:
    """Progress that nobody wants to hear of."""

"""Verdicts: why an attempt ended, in words for a person."""

from __future__ import annotations

from collections.abc import Sequence

from raycontrol.job import Broken, Ended, Instance, Job
from raycontrol.status import JobState, Reason, Verdict

VERDICT_LINES = 20
LONGEST_WORDS = 60
"""How many lines of a log's end a verdict keeps, and how many if a message began before them."""


def failure(job: Job, instance: Instance, ended: Ended) -> Verdict:
    broken = job.broken
    earlier = broken is not None and broken.at <= ended.at
    before = f"; before that on {broken.instance}: {broken.message}" if broken and earlier else ""
    return Verdict(
        reason=_reason(ended),
        summary=f"{instance.name} on {instance.node_name} {describe_end(ended)}{_valid(job, ended)}{before}",
        instance=instance.name,
        exit_code=ended.code,
        signal=ended.signal,
        signal_sender=ended.sender,
        rank=ended.cause.rank if ended.cause else None,
        rank_exit_code=ended.cause.exit_code if ended.cause else None,
        last_lines=ended.last_lines,
        hint=_hint(ended),
    )


def _valid(job: Job, ended: Ended) -> str:
    """Say which codes would have been a success, where that is not 0 alone."""
    codes = job.spec.valid_exit_codes
    return "" if codes == (0,) or ended.code is None else f"; valid_exit_codes: {', '.join(map(str, codes))}"


def service_failure(instance: Instance, run: str, ended: Ended) -> Verdict:
    """The service ``run`` ended although nobody had asked it to; its code is not the start command's."""
    return Verdict(
        reason=_reason(ended),
        summary=f"{instance.name} on {instance.node_name}: its {run} {describe_end(ended)}",
        instance=instance.name,
        signal=ended.signal,
        signal_sender=ended.sender,
        last_lines=ended.last_lines,
        hint=None if ended.code in (126, 127) else _hint(ended),
    )


def _reason(ended: Ended) -> Reason:
    if ended.oom:
        return Reason.OUT_OF_MEMORY
    return Reason.INSTANCE_LOST if ended.lost else Reason.INSTANCE_FAILED


def left_early(instance: Instance, ended: Ended) -> Verdict:
    """An instance that serves the others ended well although their work was not done."""
    return Verdict(
        reason=Reason.INSTANCE_FAILED,
        summary=f"{instance.name} on {instance.node_name} {describe_end(ended)} before the job's work was done",
        instance=instance.name,
        hint=f"a {instance.role} has to serve until the others have ended; raycontrol ends it then",
    )


def broken_world(broken: Broken) -> Verdict:
    return Verdict(
        reason=Reason.WORLD_BROKEN,
        summary=f"{broken.instance}: {broken.message}",
        instance=broken.instance,
        hint="mpirun may have exited 0 all the same: it does not notice every loss of its daemons",
    )


def describe_end(ended: Ended) -> str:
    """Return how a start command ended, as the rest of a sentence that begins with its instance."""
    if ended.error is not None:
        never_ran = ended.signal is None
        return f"could not run its start command: {ended.error}" if never_ran else f"was ended: {ended.error}"
    if ended.signal is not None:
        text = f"was ended by signal {ended.signal}"
        text += f" ({ended.sender})" if ended.sender else " (not sent by raycontrol)"
    else:
        text = f"exited {ended.code}"
    if ended.cause is not None and ended.cause.rank is not None:
        text += f"; its launcher names rank {ended.cause.rank}{_rank_end(ended.cause.exit_code)}"
    return text + ("; the kernel killed a process for want of memory" if ended.oom else "")


def _rank_end(code: int | None) -> str:
    if code is None:
        return ""
    return f", signal {-code}" if code < 0 else f", exit code {code}"


def _hint(ended: Ended) -> str | None:
    if ended.cause is not None and ended.cause.advice is not None:
        return ended.cause.advice
    if ended.oom:
        return (
            "let it use less memory (a smaller batch, fewer data workers), or run it on a node that has more"
        )
    if ended.code == 127:
        return "the command was not found: is it installed in this environment, or in `working_dir`?"
    if ended.code == 126:
        return "the command is not executable: `chmod +x` it, or call its interpreter"
    if ended.code == 137 or (ended.signal == 9 and ended.sender is None and not ended.lost):
        return "SIGKILL from outside: often the kernel's or the container's memory limit; see `dmesg` on the node"
    return None


def timeout(job: Job) -> Verdict:
    limits = job.spec.timeouts
    match job.state:
        case JobState.QUEUED:
            why = f" ({job.pending})" if job.pending else ""
            return Verdict(
                reason=Reason.QUEUE_TIMEOUT, summary=f"not started within queue_s = {limits.queue_s:g} s{why}"
            )
        case JobState.RUNNING:
            return Verdict(reason=Reason.RUN_TIMEOUT, summary=f"ran longer than run_s = {limits.run_s:g} s")
        case _:
            preparing = job.state is JobState.PREPARING
            waiting = ", ".join(
                item.name
                for item in job.instances
                if (item.facts is None if preparing else item.passed < job.stage)
            )
            summary = f"{job.state} took too long; no word from {waiting}"
            return Verdict(reason=Reason.START_TIMEOUT, summary=summary)


def last_words(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the end of a log: the last lines, and all of the message that they are part of.

    Open MPI puts its messages between rules of dashes, and what went wrong at their beginning.
    """
    said = [line.rstrip(" \0") for line in lines]
    while said and not said[-1]:
        said.pop()
    start = max(0, len(said) - VERDICT_LINES)
    rules = [number for number, line in enumerate(said) if line and not line.strip("-") and len(line) > 40]
    opening = [first for first, last in zip(rules[::2], rules[1::2], strict=False) if first < start <= last]
    return tuple(said[max(0, len(said) - LONGEST_WORDS, min([start, *opening])) :])

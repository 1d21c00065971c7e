"""Why a command elsewhere has ended: ssh, or what a container is entered with, says it on standard error."""

import re
import shlex
from dataclasses import dataclass

from paceline.observe.place import Place

_UNREACHABLE = re.compile(
    r"(could not resolve hostname|connection refused|connection timed out|operation timed out|no route to host|"
    r"network is unreachable|host is down|name or service not known)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended. `met`: the script on the far side had begun to answer."""

    status: int | None  # below 0: by a signal; None: it has only closed its output
    said: str
    met: bool


def explained(ended: Ended, place: Place) -> str:
    """Return a sentence: what failed, where, and what to do about it."""
    said, last = ended.said, _last_line(ended.said)
    where = f"{place.user}@{place.host}" if place.user else place.host
    by_hand = f"`ssh {f'-p {place.port} ' if place.port else ''}{where}`"
    if place.host is not None and _by_ssh(ended):
        if "REMOTE HOST IDENTIFICATION HAS CHANGED" in said:
            return (
                f"The host key of {place.host} is not the one that is known: somebody may be in between, or the host "
                f"was set up anew. Find out which, then correct known_hosts; {by_hand} names the line."
            )
        if "Host key verification failed" in said or "host key is known" in said:
            return f"The host key of {place.host} is not known yet: connect once with {by_hand} and compare it."
        if "Permission denied" in said:
            return f"{place.host} does not let {place.user or 'you'} in: {last}. Try {by_hand}; check user and key."
        if _UNREACHABLE.search(said):
            return f"{place.host} cannot be reached: {last}. Check the name, the port and the network."
        what = "broke" if ended.met else "could not be made"
        return f"The connection to {place.host} {what}: {last or 'ssh gave no reason'}."
    if ended.met:
        return f"Reading the run {place.whereabouts} ended with status {ended.status}: {last or 'no reason was given'}."
    command = f"`{shlex.join(place.via)}`" if place.via else "the login shell"
    return (
        f"No POSIX shell answered {place.whereabouts}: {command} ended with status {ended.status}, "
        f"{f'saying: {last}' if last else 'saying nothing'}. It must run what is put behind it; try it by hand."
    )


def is_final(ended: Ended) -> bool:
    """Whether trying again would only meet the same refusal."""
    return _by_ssh(ended) and any(
        text in ended.said for text in ("Permission denied", "Host key verification failed", "host key is known")
    )


def _by_ssh(ended: Ended) -> bool:
    """Whether ssh itself has ended; any other status is that of the command on the far side."""
    return ended.status is None or ended.status == 255 or ended.status < 0


def _last_line(said: str) -> str:
    lines = [" ".join(line.split()) for line in said.splitlines() if line.strip()]
    return lines[-1].rstrip(".")[:300] if lines else ""

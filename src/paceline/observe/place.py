"""Where a run is that somebody wants to look at: a folder here, one on another host, one inside a container.

What is run there is always an argument list. ssh alone hands the far side a string, for the shell of whoever logs in:
that string is made by shlex.join, so no path and no host can add a word to it.
"""

import re
import shlex
from dataclasses import dataclass

from paceline.records import UserError

_SSH = "ssh://"
# No leading dash, which would be an option, and nothing that a ProxyCommand in the user's configuration could run.
_HOST = re.compile(r"[A-Za-z0-9_.:%][A-Za-z0-9_.:%-]*")
_USER = re.compile(r"[A-Za-z0-9_.+][A-Za-z0-9_.+@-]*")
_SSH_OPTIONS = (
    "-T",  # no terminal there
    "-C",  # events shrink to a tenth
    "-o ConnectTimeout=20",
    "-o ClearAllForwardings=yes",  # a port that the user's configuration forwards may be in use by another ssh
    "-o ForwardAgent=no",
    "-o ForwardX11=no",
    "-o RemoteCommand=none",  # ours takes its place
)


@dataclass(frozen=True, slots=True)
class Place:
    """A run's folder. `path` is absolute, or relative to where a command begins there, and never begins with a dash."""

    text: str  # as it was typed
    path: str
    host: str | None = None
    user: str | None = None
    port: int | None = None
    via: tuple[str, ...] = ()  # what a command is put behind, such as docker exec NAME

    @property
    def local(self) -> bool:
        """Whether the folder can be opened from here."""
        return self.host is None and not self.via

    @property
    def whereabouts(self) -> str:
        """The host, or the command it is behind, for a sentence."""
        via = f"behind `{shlex.join(self.via)}`" if self.via else ""
        return " ".join(filter(None, [f"on {self.host}" if self.host else "", via]))

    def command(self, words: list[str], *, ask: bool) -> list[str]:
        """Return the argument list that runs a command where the folder is; with `ask`, ssh may ask for a password."""
        inner = [*self.via, *words]
        if self.host is None:
            return inner
        options = [word for option in _SSH_OPTIONS for word in option.split()]
        options += [] if ask else ["-o", "BatchMode=yes"]
        options += ["-p", str(self.port)] if self.port else []
        options += ["-l", self.user] if self.user else []
        return ["ssh", *options, "--", self.host, shlex.join(inner)]


def find_place(text: str, via: str | None = None) -> Place:
    """Read what was typed: a folder or ssh://[user@]host[:port]/path, and the prefix of --via.

    Of the path nothing is decoded: a space is a space. `/~/` begins in the home folder.

    Raises:
        UserError: it is neither, or --via cannot be taken apart.
    """
    prefix = _prefix(via)
    if not text or "\0" in text:
        raise UserError(f"RUN must be a folder or ssh://[user@]host[:port]/path, got {text!r}.")
    if text.startswith(_SSH):
        return _remote(text, prefix)
    if found := re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise UserError(f"RUN must be a folder or ssh://[user@]host[:port]/path, got {text}: {found[0]} is not read.")
    return Place(text, text if text.startswith("/") else f"./{text}", via=prefix)


def _prefix(via: str | None) -> tuple[str, ...]:
    if via is None:
        return ()
    try:
        words = tuple(shlex.split(via))
    except ValueError as error:
        raise UserError(f"--via must be a command as a shell would read it, got {via!r}: {error}.") from None
    if not words or "\0" in via:
        raise UserError(f"--via must be a command such as `docker exec NAME`, got {via!r}.")
    return words


def _remote(text: str, via: tuple[str, ...]) -> Place:
    where, slash, path = text.removeprefix(_SSH).partition("/")
    form = "the form is ssh://[user@]host[:port]/path"
    user, at, address = where.rpartition("@")
    if ":" in user:
        raise UserError("A password has no place in an ssh:// address: leave it out, ssh asks for it or takes a key.")
    if bracketed := re.fullmatch(r"\[([^\]]*)\](?::(.*))?", address):  # an IPv6 address
        host, port = bracketed[1], bracketed[2]
    else:
        host, colon, rest = address.partition(":")
        port = rest if colon else None
    if not _HOST.fullmatch(host):
        raise UserError(f"{text} names no host that ssh could reach, got {host!r}: {form}.")
    if at and not _USER.fullmatch(user):
        raise UserError(f"{text} names no user that ssh could be, got {user!r}: {form}.")
    if port is not None and not (re.fullmatch(r"[0-9]{1,5}", port) and 0 < int(port) < 65536):
        raise UserError(f"A port is a number from 1 to 65535, got {port!r} in {text}: {form}.")
    if not slash or not path.strip("/"):
        raise UserError(f"{text} names no folder: {form}.")
    there = f"./{path.removeprefix('~/')}" if path.startswith("~/") else f"/{path}"
    return Place(text, there, host, user or None, int(port) if port else None, via)

"""Where a run is, as it is typed, and the argument list that reaches it."""

import shlex

import pytest

from paceline.observe.place import Place, find_place
from paceline.records import UserError


@pytest.mark.parametrize(
    ("text", "path", "host", "user", "port"),
    [
        ("runs/one", "./runs/one", None, None, None),
        ("-rf", "./-rf", None, None, None),
        ("/runs/a b", "/runs/a b", None, None, None),
        ("ssh://gpu7/runs/one", "/runs/one", "gpu7", None, None),
        ("ssh://me@gpu7.example.org:2222/runs/one", "/runs/one", "gpu7.example.org", "me", 2222),
        ("ssh://me@here@gpu7/x", "/x", "gpu7", "me@here", None),
        ("ssh://[fe80::1%eth0]:22/x", "/x", "fe80::1%eth0", None, 22),
        ("ssh://[::1]/x", "/x", "::1", None, None),
        ("ssh://gpu7/~/runs/one", "./runs/one", "gpu7", None, None),
        ("ssh://gpu7/a%20b?c#d@e:f", "/a%20b?c#d@e:f", "gpu7", None, None),
    ],
)
def test_reading(text: str, path: str, host: str | None, user: str | None, port: int | None) -> None:
    assert find_place(text) == Place(text, path, host, user, port)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", r"RUN must be a folder or ssh://"),
        ("a\0b", r"RUN must be a folder or ssh://"),
        ("http://host/run", r"got http://host/run: http:// is not read\."),
        ("ssh:///run", r"names no host that ssh could reach, got ''"),
        ("ssh://-oProxyCommand=x/run", r"names no host .* got '-oProxyCommand=x'"),
        ("ssh://$(touch x)/run", r"names no host"),
        ("ssh://a b/run", r"names no host"),
        ("ssh://-l@host/run", r"names no user that ssh could be, got '-l'"),
        ("ssh://`x`@host/run", r"names no user"),
        ("ssh://@host/run", r"names no user that ssh could be, got ''"),
        ("ssh://me:secret@host/run", r"^A password has no place in an ssh:// address: leave it out"),
        ("ssh://host:/run", r"from 1 to 65535, got ''"),
        ("ssh://host:0/run", r"from 1 to 65535, got '0'"),
        ("ssh://host:65536/run", r"from 1 to 65535, got '65536'"),
        ("ssh://host:٢٢/run", r"from 1 to 65535"),
        ("ssh://::1/run", r"names no host"),
        ("ssh://[::1]x/run", r"names no host"),
        ("ssh://host", r"names no folder: the form is ssh://\[user@\]host\[:port\]/path\."),
        ("ssh://host/", r"names no folder"),
    ],
)
def test_refusing(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        find_place(text)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(("via", "sentence"), [("", "got ''"), ("  ", "got '  '"), ("a 'b", "No closing quotation")])
def test_refusing_a_prefix(via: str, sentence: str) -> None:
    with pytest.raises(UserError, match=f"--via must be a command .*{sentence}"):
        find_place("run", via)


WORDS = ["sh", "-c", "echo 'a'; exit", "$(touch x)", "two\nlines", "", "-x", "a b"]


def test_through_ssh_everything_is_one_quoted_string() -> None:
    command = find_place("ssh://me@gpu7:2222/run", "docker exec 'a b'").command(WORDS, ask=False)
    before, there = command[:-1], command[-1]
    assert shlex.split(there) == ["docker", "exec", "a b", *WORDS]
    assert before[0] == "ssh"
    assert before[-8:] == ["-o", "BatchMode=yes", "-p", "2222", "-l", "me", "--", "gpu7"]
    assert not [word for word in before if "HostKey" in word or "KnownHosts" in word]


def test_a_password_may_be_asked_for_where_somebody_sits() -> None:
    assert "BatchMode=yes" not in find_place("ssh://gpu7/run").command(WORDS, ask=True)


def test_a_prefix_alone_needs_no_quotes() -> None:
    assert find_place("run", "pct exec 200 --").command(WORDS, ask=True) == ["pct", "exec", "200", "--", *WORDS]

"""What runs where a run is: a shell script that hands out the events as they come and says who holds the folder.

It needs a POSIX shell with cat, date, ls, sleep, tail, uname and wc, which any host and almost any container has, and
no paceline: a run folder is often watched through a machine that only stores it, and where paceline is installed, it
is in an environment that a login without a terminal does not know.

Its answer is lines that begin with a random mark, each behind a line feed of its own, and between them bytes of the
files as they are:

    hello           it runs; what came before is noise of the login
    at N            the bytes behind this are of file N, the one that is, or will be, events-00000N.jsonl
    full N          file N is whole; the next one follows
    look O T P H    all there was is sent; before, the folder was held (O is held, free or unknown); time, process, host
    anew            the file that was read is another one now
    end             it has looked often enough
    trouble W ...   it cannot go on: missing, folder, closed, none, gap, lacks

A file stays open while it is read, so what is read of it is whole whatever its name becomes. Who holds the folder is
asked before it is read: if nobody does, all that its process had to say is in what follows.

The script becomes one line, which any login shell takes: in it are no comments, no single quotes, and no exclamation
mark that csh would take for one of its history.
"""

import re

from paceline.observe.place import Place

_SCRIPT = r"""
LC_ALL=C; export LC_ALL;
run=$1; n=$2; at=$3; pause=$4; rounds=$5; mark=$6; open=; full=; inode=;
say() { printf "\n%s %s\n" "$mark" "$*" || exit 0; };
fail() { say trouble "$@"; exit 0; };
say hello;
for tool in cat date ls sleep tail uname wc; do
    command -v $tool >/dev/null 2>&1 || fail lacks $tool;
done;

enter() {
    if cd "$run" 2>/dev/null; then [ -r . ] || fail closed; return; fi;
    [ -d "$run" ] && fail closed;
    [ -e "$run" ] && fail folder;
    case $(ls -d "$run" 2>&1) in *"Permission denied") fail closed;; esac;
    fail missing;
};
lowest() {
    for name in events-[0-9][0-9][0-9][0-9][0-9][0-9].jsonl; do
        [ -e "$name" ] || break;
        first=${name#events-}; first=${first%.jsonl};
        while [ "$first" != "${first#0}" ]; do first=${first#0}; done;
        [ "$first" ] && [ "$first" -ge "$1" ] && return 0;
    done;
    return 1;
};
ask() {
    process=; host=; owner=unknown;
    [ -e .lock ] || { owner=free; return; };
    [ -r .lock ] && [ -f .lock ] || return;
    read -r process host rest <.lock;
    [ "$host" ] || { process=; owner=free; return; };
    [ "$process" -gt 0 ] 2>/dev/null || { process=; host=; return; };
    asked=2;
    if command -v flock >/dev/null 2>&1; then flock -n -s .lock true 2>/dev/null; asked=$?; fi;
    if [ $asked = 1 ]; then owner=held; return; fi;
    [ "$host" = "$(uname -n)" ] || return;
    if [ $asked = 0 ]; then owner=free; return; fi;
    if kill -0 "$process" 2>/dev/null || [ -d "/proc/$process" ]; then owner=held; else owner=free; fi;
};
choose() {
    if [ "$n" = 0 ]; then if lowest 1; then n=$first; else n=1; fi; fi;
    full=$(printf events-%06d.jsonl "$n");
    file=events.jsonl; [ -e "$full" ] && file=$full;
    [ -e "$file" ] || return 1;
    [ -f "$file" ] && [ -r "$file" ] || fail closed "$file";
    exec 3<"$file";
    if [ $file = events.jsonl ]; then
        if [ -e "$full" ]; then file=$full; exec 3<"$file";
        elif lowest $((n + 1)); then fail gap "$full"; fi;
    fi;
    inode=$(ls -i "$file" 2>/dev/null);
    open=yes;
    say at "$n";
    if [ "$at" -gt 0 ]; then
        if [ "$(wc -c <"$file")" -lt "$at" ]; then say anew; exit 0; fi;
        tail -c +$((at + 1)) <&3;
        at=0;
    fi;
};
send() {
    while :; do
        [ "$open" ] || choose || return;
        cat <&3;
        [ -e "$full" ] || return;
        cat <&3;
        say full "$n";
        n=$((n + 1)); open=;
    done;
};

enter;
[ -e events.jsonl ] || [ -e settings.yaml ] || lowest 1 || fail none;
while :; do
    ask;
    if [ "$open" ] && [ ! -e "$full" ] && [ "$inode" != "$(ls -i events.jsonl 2>/dev/null)" ]; then
        [ -e "$full" ] || { say anew; exit 0; };
    fi;
    send;
    say look "$owner" "$(date +%s)" "$process" "$host";
    rounds=$((rounds - 1));
    [ $rounds -gt 0 ] || { say end; exit 0; };
    sleep "$pause" || sleep 1;
done
"""
SCRIPT = re.sub(r"\s*\n\s*", " ", _SCRIPT).strip()


def far_command(place: Place, *, number: int, at: int, pause_s: float, rounds: int, mark: str, ask: bool) -> list[str]:
    """Return the argument list that reads a run from byte `at` of its file `number` on (0: from the first there is).

    It looks `rounds` times, `pause_s` apart.
    """
    given = [place.path, str(number), str(at), f"{pause_s:g}", str(rounds), mark]
    return place.command(["sh", "-c", SCRIPT, "paceline-watch", *given], ask=ask)

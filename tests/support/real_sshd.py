"""A real sshd on loopback with keys of its own, and an `ssh` that knows them. Nothing of the user's is read or written.

Each connection has an sshd to itself, which gets the socket as inetd would hand it over: so the system chooses the
port, and a connection can be killed alone. The client's checks of host keys are as OpenSSH has them.
"""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import threading
from pathlib import Path


class Sshd:
    """Listens from its start to `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.user = folder, getpass.getuser()
        self.connections: list[subprocess.Popen[bytes]] = []
        self._arrived = threading.Condition()
        for name in ("host_key", "other_host_key", "user_key", "strange_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # which sshd asks for where it starts as root
        self._configure()
        self.listen()

    def listen(self, port: int = 0) -> None:
        """Begin to take connections."""
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        self.know("host_key")
        threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()

    def refuse(self) -> None:
        """Take no connections any more; those there are stay."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self) -> None:
        """End the listener and all connections."""
        self.refuse()
        for process in self.connections:
            process.kill()
            process.wait()

    def url(self, path: Path | str) -> str:
        return f"ssh://{self.user}@127.0.0.1:{self.port}{path}"

    def know(self, *names: str) -> None:
        """Let the client know these host keys and no others."""
        keys = [f"[127.0.0.1]:{self.port} {(self.folder / f'{name}.pub').read_text()}" for name in names]
        (self.folder / "known_hosts").write_text("".join(keys))

    def identify(self, name: str) -> None:
        """Let the client offer this key."""
        (self.folder / "ssh_config").write_text(
            f"Host *\n    IdentityFile {self.folder / name}\n    IdentitiesOnly yes\n"
            f"    UserKnownHostsFile {self.folder / 'known_hosts'}\n    GlobalKnownHostsFile /dev/null\n"
        )

    def kill_connection(self, number: int) -> None:
        """Kill the sshd of a connection, from 0, and all that it started."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.connections) > number, 20)
        process = self.connections[number]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _configure(self) -> None:
        (self.folder / "sshd_config").write_text(
            f"HostKey {self.folder / 'host_key'}\nAuthorizedKeysFile {self.folder / 'authorized_keys'}\n"
            "StrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            "PidFile none\nPermitRootLogin yes\nLogLevel ERROR\n"
        )
        self.identify("user_key")
        client = self.folder / "bin" / "ssh"
        client.parent.mkdir()
        client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder / "ssh_config"} "$@"\n')
        client.chmod(0o755)

    def _serve(self, listener: socket.socket) -> None:
        sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
        assert sshd, "sshd is not installed (Debian, Ubuntu: apt-get install openssh-server)"
        with (self.folder / "sshd.log").open("ab") as log:
            while True:
                try:
                    taken, _ = listener.accept()
                except OSError:
                    return
                with taken, self._arrived:
                    command = [sshd, "-i", "-f", str(self.folder / "sshd_config")]
                    how = {"stdin": taken.fileno(), "stdout": taken.fileno(), "stderr": log}
                    self.connections.append(subprocess.Popen(command, start_new_session=True, **how))
                    self._arrived.notify_all()

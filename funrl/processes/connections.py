"""Lines between jobs: authenticated messages and raw bytes over a socket; each wait has a limit.

A job listens and leaves its addresses and a secret in a file that its user alone can read. Whoever has read the file
calls. Both prove that they have the secret before anything is unpickled (`multiprocessing.connection`, HMAC); nothing
is encrypted, like all that ranks send each other. A connection is proved when it begins; its messages are not signed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, NamedTuple

SIZE_HEAD = struct.Struct("!Q")
GREETING_S = 10.0  # for both sides to prove the secret, altogether
SENT_AT_ONCE = 4 << 20  # bytes that the other side takes in the time of one wait
ACCEPT_PAUSE_S = 0.5  # after a caller could not be accepted, as where there are too many open files
SECRET_BYTES = 32
BACKLOG = 512


class PeerError(OSError):
    """The other side is gone, does not answer in time, or has no right to call."""


class Addresses(NamedTuple):
    """Addresses of a job's ranks.

    Attributes:
      hosts: host and port of each of its listeners, in the order of its ranks.
      secret: hexadecimal.
    """

    hosts: Sequence[tuple[str, int]]
    secret: str


class Connection:
    """One end of a connection. It is used by one thread at a time; `close` may be called by any."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        """Take over a connected socket.

        Args:
          timeout_s: bound on each wait for the other side to take or send some bytes of a message.
        """
        self.timeout_s = timeout_s
        self._deadline: float | None = None  # of the greeting
        self._socket = sock
        sock.settimeout(timeout_s)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that is gone says nothing

    def send(self, message: object) -> None:
        """Send any value that can be pickled. Raises: PeerError."""
        self.send_bytes(pickle.dumps(message))

    def receive(self, *, whenever: bool = False) -> Any:
        """Receive a message.

        Args:
          whenever: wait for its begin without a limit: the other side sends when it has something to say.

        Raises:
          PeerError: the connection has ended, nothing arrives in time, or another version of funrl has sent it.
        """
        data = self.recv_bytes(whenever=whenever)
        try:
            return pickle.loads(data)
        except Exception as error:  # whatever the constructors of another version raise
            problem = f"{type(error).__name__}: {error}"
            raise PeerError(
                f"a message cannot be read; is the other side another version of funrl? {problem}"
            ) from error

    def ask(self, message: object) -> Any:
        """Send a message and receive the answer. Raises: PeerError."""
        self.send(message)
        return self.receive()

    def send_raw(self, data: memoryview) -> None:
        """Send bytes whose count the other side knows. Raises: PeerError."""
        try:
            for begin in range(0, len(data), SENT_AT_ONCE):
                self._socket.settimeout(self._left_s())
                self._socket.sendall(data[begin : begin + SENT_AT_ONCE])
        except OSError as error:
            raise PeerError(f"sending failed: {error}") from error

    def receive_raw(self, into: memoryview, *, whenever: bool = False) -> None:
        """Fill a buffer; `whenever` as of `receive`. Raises: PeerError."""
        filled = 0
        try:
            while filled < len(into):
                self._socket.settimeout(None if whenever else self._left_s())
                count = self._socket.recv_into(into[filled:])
                if not count:
                    raise PeerError("the other side has closed the connection")
                filled += count
        except PeerError:
            raise
        except OSError as error:
            raise PeerError(f"receiving failed: {error}") from error

    def _left_s(self) -> float:
        """Seconds that the next wait may last. Raises: TimeoutError: the greeting has not ended in time."""
        if self._deadline is None:
            return self.timeout_s
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"the secret was not proved in {GREETING_S:.0f} s")
        return min(left_s, self.timeout_s)

    def greet(self, secret: bytes, *, calls: bool) -> None:
        """Prove to each other that both sides have a secret, within `GREETING_S`.

        Args:
          calls: whether this side has called the other.

        Raises:
          PeerError, AuthenticationError: the other side has another secret, or does not prove it in time.
        """
        self._deadline = time.monotonic() + GREETING_S
        steps = (answer_challenge, deliver_challenge) if calls else (deliver_challenge, answer_challenge)
        for prove in steps:
            prove(self, secret)  # type: ignore[arg-type]
        self._deadline = None

    def send_bytes(self, data: bytes) -> None:
        """Send bytes after their number; the name is that of `multiprocessing.connection`. Raises: PeerError."""
        self.send_raw(memoryview(SIZE_HEAD.pack(len(data)) + data))

    def recv_bytes(self, most: int | None = None, *, whenever: bool = False) -> bytes:
        """Receive what `send_bytes` has sent. Raises: PeerError, also if it is more than `most` bytes."""
        head = bytearray(SIZE_HEAD.size)
        self.receive_raw(memoryview(head)[:1], whenever=whenever)
        self.receive_raw(memoryview(head)[1:])
        (size,) = SIZE_HEAD.unpack(head)
        if most is not None and size > most:
            raise PeerError(f"{size} bytes were announced where {most} are the most")
        data = bytearray(size)
        self.receive_raw(memoryview(data))
        return bytes(data)

    def close(self) -> None:
        """End the connection; whoever waits in it gets a `PeerError`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class ConnectionServer:
    """A listener that serves each caller in a thread of its own."""

    def __init__(self, serve: Callable[[Connection], None], secret: str, timeout_s: float, host: str = "") -> None:
        """Listen on a free port.

        Args:
          serve: called in a thread with the connection of each caller who has the secret; it is closed afterwards.
          secret: hexadecimal.
          timeout_s: bound on each wait of a connection.
          host: address to listen on; "": all of this machine.
        """
        self._serve = serve
        self._secret = bytes.fromhex(secret)
        self._timeout_s = timeout_s
        self._lines: set[Connection] = set()
        self._closed = threading.Event()
        self._socket = socket.create_server((host, 0), backlog=BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="connections", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._socket.accept()
            except OSError:
                self._closed.wait(ACCEPT_PAUSE_S)
                continue
            threading.Thread(target=self._answer, args=(sock,), name="connection", daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        connection = Connection(sock, self._timeout_s)
        self._lines.add(connection)
        try:
            connection.greet(self._secret, calls=False)
            self._serve(connection)
        except (OSError, AuthenticationError, EOFError):  # it is gone, or has no right to be here
            pass
        finally:
            self._lines.discard(connection)
            connection.close()

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        for connection in list(self._lines):
            connection.close()
        self._thread.join(GREETING_S)


def connect_to(host: str, port: int, secret: str, timeout_s: float) -> Connection:
    """Connect to a `ConnectionServer`.

    Args:
      timeout_s: bound on each wait of the connection; it is there in `GREETING_S`.

    Raises:
      PeerError: nobody answers there, or the secret is another one.
    """
    connection = None
    try:
        connection = Connection(socket.create_connection((host, port), GREETING_S), timeout_s)
        connection.greet(bytes.fromhex(secret), calls=True)
    except (OSError, AuthenticationError, EOFError) as error:
        if connection is not None:
            connection.close()
        raise PeerError(f"{host}:{port} does not answer: {error or type(error).__name__}") from error
    return connection


def new_secret() -> str:
    """A random secret, hexadecimal."""
    return secrets.token_hex(SECRET_BYTES)


def write_addresses(file: Path, addresses: Addresses) -> None:
    """Write a file that only this user can read, at once."""
    temporary = file.with_name(f".{file.name}-{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        json.dump(addresses._asdict(), stream)
    temporary.rename(file)


def read_addresses(file: Path) -> Addresses | None:
    """The addresses in a file; None: there is no such file.

    Raises:
      PeerError: others can write it, or it is no such file.
    """
    try:
        with open(file) as stream:
            status = os.fstat(stream.fileno())
            record = json.load(stream)
        if status.st_mode & 0o077:
            raise PeerError(f"{file}: others may read or write it; chmod 600 it, or start the run again")
        hosts = [(str(host), int(port)) for host, port in record["hosts"]]
        return Addresses(hosts, str(record["secret"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise PeerError(f"{file}: these are no addresses of a run: {error}") from None

"""Connections between jobs."""

import contextlib
import os
import socket
import threading
from typing import Any, cast

import pytest

from funrl.processes.connections import (
    Addresses,
    Connection,
    ConnectionServer,
    PeerError,
    connect_to,
    new_secret,
    read_addresses,
    write_addresses,
)

HOST = "127.0.0.1"


def echo(connection):
    while True:
        message = connection.receive(whenever=True)
        connection.send(message)
        if message == "raw":
            data = bytearray(5)
            connection.receive_raw(memoryview(data))
            connection.send_raw(memoryview(data))


@pytest.fixture
def board():
    secret = new_secret()
    board = ConnectionServer(echo, secret, 5.0, HOST)
    yield board, secret
    board.close()


def test_messages_and_bytes_go_both_ways(board):
    connections = [connect_to(HOST, board[0].port, board[1], 5.0) for _ in range(3)]
    for number, connection in enumerate(connections):
        assert connection.ask({"number": number}) == {"number": number}
        assert connection.ask("raw") == "raw"
        connection.send_raw(memoryview(b"12345"))
        data = bytearray(5)
        connection.receive_raw(memoryview(data))
        assert data == b"12345"
        connection.close()


def test_who_has_another_secret_is_not_served(board):
    with pytest.raises(PeerError, match="does not answer"):
        connect_to(HOST, board[0].port, new_secret(), 5.0)
    with socket.create_connection((HOST, board[0].port), 5.0) as sock:  # and one who proves nothing
        connection = Connection(sock, 5.0)
        assert len(connection.recv_bytes()) > 0
        connection.send({"unpickled": True})
        with pytest.raises(PeerError):
            while True:
                connection.recv_bytes()
    assert connect_to(HOST, board[0].port, board[1], 5.0).ask(1) == 1


def test_a_connection_that_is_closed_or_silent_is_an_error(board):
    connection = connect_to(HOST, board[0].port, board[1], 5.0)
    connection.timeout_s = 0.2
    with pytest.raises(PeerError, match="receiving failed"):
        connection.receive()
    other = connect_to(HOST, board[0].port, board[1], 5.0)
    board[0].close()
    with pytest.raises(PeerError):
        other.ask(1)
        other.ask(2)
    with pytest.raises(PeerError, match="does not answer"):
        connect_to(HOST, board[0].port, board[1], 5.0)


def test_a_caller_who_proves_nothing_is_not_kept_by_a_byte_now_and_then(monkeypatch):
    monkeypatch.setattr("funrl.processes.connections.GREETING_S", 0.3)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"x" * 8)  # part of the answer that is waited for
        connection = Connection(ours, 600.0)
        ended = threading.Event()

        def drip():
            while not ended.wait(0.05):
                with contextlib.suppress(OSError):
                    theirs.send(b"\0")

        dripping = threading.Thread(target=drip)
        dripping.start()
        with pytest.raises(PeerError):
            connection.greet(b"secret", calls=False)
        ended.set()
        dripping.join()


def test_a_slow_peer_takes_pieces_each_in_a_time_of_its_own(monkeypatch):
    monkeypatch.setattr("funrl.processes.connections.SENT_AT_ONCE", 5)
    waits = []

    class Taken:
        def setsockopt(self, *option):
            pass

        def settimeout(self, timeout_s):
            waits.append(timeout_s)

        def sendall(self, data):
            waits.append(bytes(data))

    connection = Connection(cast(Any, Taken()), 7.0)
    waits.clear()
    connection.send_raw(memoryview(b"abcdefgh"))
    assert waits == [7.0, b"abcde", 7.0, b"fgh"]


def test_a_caller_who_cannot_be_accepted_does_not_end_the_listener(board, monkeypatch):
    monkeypatch.setattr("funrl.processes.connections.ACCEPT_PAUSE_S", 0.0)

    class Full:
        """A listener without a free descriptor, once."""

        def __init__(self, sock):
            self.sock = sock
            self.failed = threading.Event()

        def accept(self):
            if not self.failed.is_set():
                self.failed.set()
                raise OSError(24, "Too many open files")
            return self.sock.accept()

        def __getattr__(self, name):
            return getattr(self.sock, name)

    full = board[0]._socket = Full(board[0]._socket)
    for number in range(2):  # the first is accepted by the call that had begun
        assert connect_to(HOST, board[0].port, board[1], 5.0).ask(number) == number
    assert full.failed.is_set()


class OtherVersion:
    """What a constructor of another version does with the arguments of this one."""

    def __reduce__(self):
        return (int, ("no number",))


def test_a_message_of_another_version_is_an_error_of_the_peer():
    ours, theirs = (Connection(sock, 5.0) for sock in socket.socketpair())
    theirs.send(OtherVersion())
    with pytest.raises(PeerError, match="is the other side another version of funrl"):
        ours.receive()
    ours.close()
    theirs.close()


def test_nobody_waits_for_a_caller_who_says_nothing(board):
    with socket.create_connection((HOST, board[0].port), 5.0):
        assert connect_to(HOST, board[0].port, board[1], 5.0).ask(1) == 1


def test_only_the_user_can_read_the_addresses(tmp_path):
    file = tmp_path / "join.json"
    assert read_addresses(file) is None
    addresses = Addresses([("node", 1), ("other", 2)], new_secret())
    write_addresses(file, addresses)
    assert file.stat().st_mode & 0o777 == 0o600 and os.listdir(tmp_path) == ["join.json"]
    assert read_addresses(file) == addresses
    file.chmod(0o640)
    with pytest.raises(PeerError, match="others may read or write it"):
        read_addresses(file)
    file.chmod(0o600)
    file.write_text("{}")
    with pytest.raises(PeerError, match="these are no addresses of a run"):
        read_addresses(file)

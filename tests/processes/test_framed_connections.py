"""Connections between jobs."""

import os
import socket

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
    connection = connect_to(HOST, board[0].port, board[1], 0.2)
    with pytest.raises(PeerError, match="receiving failed"):
        connection.receive()
    other = connect_to(HOST, board[0].port, board[1], 5.0)
    board[0].close()
    with pytest.raises(PeerError):
        other.ask(1)
        other.ask(2)
    with pytest.raises(PeerError, match="does not answer"):
        connect_to(HOST, board[0].port, board[1], 0.5)


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

"""Lines between jobs."""

import os
import socket

import pytest

from funrl.processes.lines import (
    Addresses,
    Line,
    LineError,
    Switchboard,
    call,
    new_secret,
    read_addresses,
    write_addresses,
)

HOST = "127.0.0.1"


def echo(line):
    while True:
        message = line.receive(whenever=True)
        line.send(message)
        if message == "raw":
            data = bytearray(5)
            line.receive_raw(memoryview(data))
            line.send_raw(memoryview(data))


@pytest.fixture
def board():
    secret = new_secret()
    board = Switchboard(echo, secret, 5.0, HOST)
    yield board, secret
    board.close()


def test_messages_and_bytes_go_both_ways(board):
    lines = [call(HOST, board[0].port, board[1], 5.0) for _ in range(3)]
    for number, line in enumerate(lines):
        assert line.ask({"number": number}) == {"number": number}
        assert line.ask("raw") == "raw"
        line.send_raw(memoryview(b"12345"))
        data = bytearray(5)
        line.receive_raw(memoryview(data))
        assert data == b"12345"
        line.close()


def test_who_has_another_secret_is_not_served(board):
    with pytest.raises(LineError, match="does not answer"):
        call(HOST, board[0].port, new_secret(), 5.0)
    with socket.create_connection((HOST, board[0].port), 5.0) as sock:  # and one who proves nothing
        line = Line(sock, 5.0)
        assert len(line.recv_bytes()) > 0
        line.send({"unpickled": True})
        with pytest.raises(LineError):
            while True:
                line.recv_bytes()
    assert call(HOST, board[0].port, board[1], 5.0).ask(1) == 1


def test_a_line_that_is_closed_or_silent_is_an_error(board):
    line = call(HOST, board[0].port, board[1], 0.2)
    with pytest.raises(LineError, match="receiving failed"):
        line.receive()
    other = call(HOST, board[0].port, board[1], 5.0)
    board[0].close()
    with pytest.raises(LineError):
        other.ask(1)
        other.ask(2)
    with pytest.raises(LineError, match="does not answer"):
        call(HOST, board[0].port, board[1], 0.5)


def test_nobody_waits_for_a_caller_who_says_nothing(board):
    with socket.create_connection((HOST, board[0].port), 5.0):
        assert call(HOST, board[0].port, board[1], 5.0).ask(1) == 1


def test_only_the_user_can_read_the_addresses(tmp_path):
    file = tmp_path / "join.json"
    assert read_addresses(file) is None
    addresses = Addresses([("node", 1), ("other", 2)], new_secret())
    write_addresses(file, addresses)
    assert file.stat().st_mode & 0o777 == 0o600 and os.listdir(tmp_path) == ["join.json"]
    assert read_addresses(file) == addresses
    file.chmod(0o640)
    with pytest.raises(LineError, match="others may read or write it"):
        read_addresses(file)
    file.chmod(0o600)
    file.write_text("{}")
    with pytest.raises(LineError, match="these are no addresses of a run"):
        read_addresses(file)

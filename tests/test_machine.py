"""What a machine must offer is checked before anything starts, in one line that says what to do."""

import errno
import os
import socket
import threading

import pytest

from asyncspec import cli
from asyncspec.config import ConfigError, load
from asyncspec.errors import UserError
from asyncspec.launch import machine


def failing(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


def test_this_machine_can_run_the_default_job():
    assert machine.check_machine(load("tiny", [])) == "can start and watch 5 actors"


def test_a_node_needs_room_for_its_own_actors_only():
    config = load("tiny", ["deployment.generators=2", "deployment.nodes=trainer+logprob,2*generator"])
    offered = [machine.check_machine(config, node) for node in (None, 0, 1, 2)]
    assert offered == [f"can start and watch {count} actors" for count in (6, 4, 1, 1)]


def test_a_kernel_that_does_not_watch_processes_is_named(monkeypatch):
    monkeypatch.setattr(os, "pidfd_open", failing(errno.ENOSYS))
    with pytest.raises(UserError, match="^pidfd_open: Function not implemented; expected Linux 5.3 or later, [^\n]+$"):
        machine.check_machine(load("tiny", []))


def test_too_few_processes_are_named(monkeypatch):
    start, room = threading.Thread.start, iter(range(37))

    def start_if_there_is_room(thread):
        if next(room, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    before = threading.active_count()
    monkeypatch.setattr(threading.Thread, "start", start_if_there_is_room)
    with pytest.raises(UserError, match="^ulimit -u: only 37 more threads and processes can start here; expected 84, "):
        machine.check_machine(load("tiny", []))
    assert threading.active_count() == before


def test_a_host_that_cannot_reach_itself_is_named(monkeypatch):
    monkeypatch.setattr(socket, "create_connection", failing(errno.ENETUNREACH))
    with pytest.raises(
        ConfigError,
        match="^deployment.host='127.0.0.1': this host cannot connect to itself there: Network is unreachable; ",
    ):
        machine.check_host(load("tiny", []))


def test_a_working_directory_that_was_removed_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cli.main(["train", f"run_dir={tmp_path}/run"]) == 2
    assert capsys.readouterr().err == (
        "asyncspec: the working directory was removed; expected one that exists; change to another one\n"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["r" * 300, "r/" * 3000])
def test_a_run_directory_with_too_long_a_path_is_named(tmp_path, capsys, name):
    assert cli.main(["train", f"run_dir={tmp_path}/{name}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"asyncspec: run_dir='{tmp_path}/r") and said.count("\n") == 1
    assert said.endswith(": File name too long; expected a directory to write to\n")


def test_an_interrupt_before_the_start_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(cli.configuration, "load", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert cli.main(["train"]) == 130 and capsys.readouterr().err == "asyncspec train: interrupted\n"


def test_a_range_of_ports_with_too_few_for_the_actors_is_named():
    settings = ["deployment.generators=2", "deployment.nodes=trainer+logprob,2*generator", "deployment.ports=9000-9004"]
    expected = "^deployment.ports='9000-9004': 5 ports; .* nearest valid choice: deployment.ports=9000-9005$"
    with pytest.raises(ConfigError, match=expected):
        machine.check_machine(load("tiny", settings), 0)
    machine.check_machine(load("tiny", settings), 1)
    for text in ("9000", "9001-9000", "0-5", "9000-70000", "9000-"):
        with pytest.raises(ConfigError, match=f"^deployment.ports={text!r}: expected FIRST-LAST, .* 29600-29699$"):
            load("tiny", [f"deployment.ports={text}"])

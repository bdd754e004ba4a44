"""A process that is ended by force prints the stacks of its threads, if it was prepared and is not frozen."""

import os
import signal
import subprocess
import sys
import time

import pytest
from runs import SILENT, Running, outliving

from asyncspec.launch import ending

PROCESS = """
import ctypes, os, signal, sys, threading, time
from asyncspec.launch import ending

def waits():
    time.sleep(60)

def holds_the_interpreter():
    ctypes.PyDLL(None).usleep(60_000_000)

def stops():
    os.kill(os.getpid(), signal.SIGSTOP)

def is_new():
    time.sleep(60)

if sys.argv[1] != "is_new":
    ending.make_ready()
threading.Timer(0.2, globals()[sys.argv[1]]).start()
print("begun", flush=True)
waits()
"""


@pytest.mark.parametrize(
    "what,told", [("waits", True), ("holds_the_interpreter", True), ("stops", False), ("is_new", False)]
)
def test_a_process_ended_by_force_prints_the_stacks_of_its_threads(what, told):
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, what], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    time.sleep(0.5)
    descriptor = ending.pidfd(process.pid)
    ending.end(descriptor)
    assert not outliving([process.pid])
    said = process.communicate(timeout=60)[1]
    assert process.returncode == (-signal.SIGKILL if what == "stops" else -signal.SIGUSR2)
    assert (f"in {what}" in said) == ("in waits" in said) == told and bool(said) == told, said
    ending.end(descriptor)  # the process has ended already
    os.close(descriptor)
    ending.end(descriptor := ending.pidfd(process.pid))
    os.close(descriptor)


@pytest.mark.slow
def test_the_log_of_a_frozen_actor_names_the_function_that_it_is_in(tmp_path):
    faults = "deployment.faults=generator0:work:3:hold"
    output = Running.new(tmp_path / "run", "--steps", "2", SILENT, faults, "eval.every=0").end()
    assert "generator0 is frozen: no sign of life for" in output, output
    assert "in _hold" in (tmp_path / "run" / "logs" / "generator0.log").read_text()

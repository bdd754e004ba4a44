"""The controller: owns the prompt order, the policy clock, the ledger and the timeline of a run.

A launcher starts the class in this file. It opens the control channel and the run's records, and at the end of the run
it returns an exit code. conductor.py leads the run.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from pathlib import Path

from asyncspec.actors.base import LEFT_BEHIND, RAISED, RESTART, ActorSpec, redirect_output
from asyncspec.actors.conductor import Conductor
from asyncspec.actors.records import Records
from asyncspec.actors.run import Run
from asyncspec.config import from_yaml
from asyncspec.faults import Faults
from asyncspec.report.console import Console
from asyncspec.wire import transport
from asyncspec.wire.addresses import use_ports
from asyncspec.wire.control import ControlServer


class Controller:
    """The process that leads a run and keeps its records."""

    role = "controller"

    def __init__(self, spec: ActorSpec) -> None:
        self.spec, self.config = spec, from_yaml(spec.config_yaml)
        self.run_dir, self.resume = Path(spec.run_dir), spec.resume
        use_ports(self.config.deployment.ports)
        transport.use_keys(self.run_dir if self.config.deployment.encrypt else None)
        self.fault = Faults(self.config.deployment.faults, "controller", self.run_dir)
        self.server = ControlServer(self.config.deployment.host)
        self.address = self.server.address

    def run(self) -> int:
        """Run to the end. Return the exit code: 0 if all steps were trained, 1 after a failure, 130 after an interrupt,
        RESTART, LEFT_BEHIND, or RAISED if not even the records could be opened.
        """
        redirect_output(self.spec, [2])  # standard output is the console
        try:
            return self._lead()
        except Exception as error:
            self._log("".join(traceback.format_exception(error)))
            return RAISED
        finally:
            self.server.close()  # this process may play the next controller, which needs the ports
            gc.collect()  # the store of the broadcasts

    def _lead(self) -> int:
        self._log(f"{time.strftime('%H:%M:%S')} controller starts, pid {os.getpid()}")
        self.fault("start")
        first_step = max(0, self.resume)
        console = Console(self.config, self.run_dir, first_step)
        try:
            records = Records(self.run_dir, first_step, console)
        except OSError as error:
            console.line(f"failed: {error}")
            return 1
        run = Run(self.config, records, self.server, self.spec.may_restart)
        records.failed = run.fail
        conductor = Conductor(run, self.fault, self.resume, self._log)
        conductor.lead()
        console.end(run.failure, run.stop_reason, records.metrics, run.resuming)
        if conductor.left_behind:
            return LEFT_BEHIND
        return RESTART if run.resuming else 1 if run.failure else 0 if run.stop_reason == "finished" else 130

    def _log(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

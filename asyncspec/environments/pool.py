"""The open episodes of a generator, in processes that run the user's environments.

- Episodes run concurrently; a process holds many. Others are started while episodes are many.
- A turn has a deadline, and so has an episode. An episode whose environment fails or is late ends, and is counted. The
  run ends only if too many do.
- A process that does not answer at all is killed. The episode that it should have answered for has failed; the others
  that it held begin again, as they do if a process ends by itself:

    process     episode 3: step ... deadline, killed      new process
    episode 3   failed
    episode 4                        begins again         reset ...
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncspec.clock import now
from asyncspec.config import Config
from asyncspec.environments.protocol import Message
from asyncspec.errors import UserError
from asyncspec.tasks.json_process import JsonProcess, NoAnswer
from asyncspec.tasks.rewarder import LEAST_FAILURES

_PROGRAM = Path(__file__).with_name("environment_process.py")
_LATE_S = 1.0  # after a call's deadline, in which its process may say itself that it was late
_CROWD = 16  # episodes of a process, above which another one is started
MOST_SAID = 300  # characters of what went wrong
MOST_TRIES = 3  # that an episode begins; its process may end for a reason of its own


class EnvironmentFailed(UserError):
    """Environments cannot be run; the message is one line for the user."""


@dataclass(frozen=True)
class Answer:
    """What became of an episode's last call.

    Times are seconds of the run's clock. An answer with `error` is the last one of its episode. With `again` the
    episode has to begin again, from its start; it was given to another process already.
    """

    key: Hashable
    asked_at: float
    answered_at: float
    what: str  # "reset", "step" or "run"
    messages: list[Message] | None = None
    done: bool = False
    reward: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool: str | None = None  # that the step called; "": none; None: the environment does not name its tools
    error: str = ""
    again: bool = False


@dataclass
class _Process:
    process: JsonProcess
    deadline: float  # of loading
    loaded: bool = False
    stuck: bool = False  # it gets no further episodes
    held: dict[int, _Episode] = field(default_factory=dict)


@dataclass
class _Episode:
    key: Hashable
    row: Mapping[str, Any]
    deadline: float
    number: int = 0  # that its process knows it by
    tries: int = 0
    place: _Process | None = None
    excused: bool = False  # its end is no failure
    asked: str = ""  # "" while it is the policy's turn
    asked_at: float = 0.0
    due: float = 0.0


class Environments:
    """Runs episodes. All calls are from one thread, and none waits."""

    def __init__(
        self, name: str, *, turn_s: float, episode_s: float, most_failures: float, start_s: float, workers: int = 1
    ) -> None:
        """
        Args:
            name: as environment.name. It begins to load at once.
            turn_s, episode_s: time limits of a call, and of an episode with all its turns.
            most_failures: share of episodes that may fail.
            start_s: time limit of loading.
            workers: the most processes.
        """
        self.name, self.turn_s, self.episode_s = name, turn_s, episode_s
        self.most_failures, self.start_s, self.workers = most_failures, start_s, workers
        self.begun = self.failed = self.begun_again = 0
        self.first_failure = ""
        self.driven = False  # whether the episodes ask the policy themselves; known when the environment is loaded
        self.endpoint: Callable[[Hashable], dict[str, str]] | None = None  # how an episode that begins reaches it
        self.shut: Callable[[Hashable], None] | None = None  # takes that back, before the episode begins again
        self._loaded, self._not_loaded = False, 0  # whether a process has ever loaded it, and how many have not
        self._numbers = 0
        self._waiting: deque[_Episode] = deque()  # for a process
        self._open: dict[Hashable, _Episode] = {}
        self._answers: list[Answer] = []
        self._places = [self._start()]

    @classmethod
    def of(cls, config: Config) -> Environments:
        c = config.environment
        return cls(
            c.name,
            turn_s=c.turn_timeout_s,
            episode_s=c.episode_timeout_s,
            most_failures=c.failures,
            start_s=config.deployment.start_timeout_s,
            workers=c.workers,
        )

    @property
    def open(self) -> int:
        """The number of open episodes."""
        return len(self._open)

    @property
    def pids(self) -> list[int]:
        return [place.process.pid for place in self._places]

    def _start(self) -> _Process:
        return _Process(JsonProcess(_PROGRAM, {"environment": self.name}), time.monotonic() + self.start_s)

    def load(self) -> None:
        """Wait until the first process has loaded the environment.

        Raises:
            EnvironmentFailed: it cannot be loaded.
        """
        while not self._load(place := self._places[0]):
            place.process.wait(0.1)

    def close(self) -> None:
        """End the processes."""
        for place in self._places:
            place.process.close()

    def begin(self, key: Hashable, row: Mapping[str, Any]) -> None:
        """Begin an episode. Its first answer has the beginning of the conversation."""
        self.begun += 1
        episode = self._open[key] = _Episode(key, row, time.monotonic() + self.episode_s)
        self._waiting.append(episode)
        self._assign()

    def step(self, key: Hashable, message: Message) -> None:
        """Give an episode what the policy said."""
        episode = self._open[key]
        self._ask(episode, "step", message)

    def end(self, key: Hashable) -> None:
        """Close an episode. Not knowing it is no error."""
        if (episode := self._open.pop(key, None)) is not None:
            self._leave(episode)
            if episode in self._waiting:
                self._waiting.remove(episode)

    def excuse(self, key: Hashable) -> None:
        """Do not count how an open episode ends: it was told that it has reached a limit."""
        if (episode := self._open.get(key)) is not None:
            episode.excused = True

    def refuse(self, key: Hashable, why: str) -> None:
        """Count an open episode as one that failed, for a reason that its process does not know.

        Raises:
            EnvironmentFailed: more than the allowed share of episodes failed.
        """
        if (episode := self._open.pop(key, None)) is not None:
            self._leave(episode)
        self._count(why)

    def poll(self) -> list[Answer]:
        """Return the answers that have come.

        Raises:
            EnvironmentFailed: more than the allowed share of episodes failed, or the environment cannot be loaded
                again.
        """
        for place in list(self._places):
            self._tend(place)
        self._assign()
        answers, self._answers = self._answers, []
        return answers

    def _load(self, place: _Process) -> bool:
        if place.loaded:
            return True
        try:
            said = place.process.receive()
            if said is None and time.monotonic() > place.deadline:
                raise NoAnswer(f"took more than {self.start_s:g} s")
        except NoAnswer as none:
            self._not_loaded += 1
            if self._loaded or self._not_loaded < MOST_TRIES:  # it may have been killed
                self._drop(place)
                self._places.append(self._start())
                return False
            raise EnvironmentFailed(
                f"environment.name={self.name!r}: {none} while it was imported; expected a module that can be imported "
                f"within deployment.start_timeout_s={self.start_s:g}"
            ) from None
        if said is not None and said["error"]:
            raise EnvironmentFailed(said["error"])
        if said is not None:
            place.loaded, self.driven, self._loaded = True, said["driven"], True
        return place.loaded

    def _assign(self) -> None:
        """Give waiting episodes to the processes that hold the fewest; start another process if they hold many."""
        if not any(not place.stuck for place in self._places):
            self._places.append(self._start())
        while self._waiting and (ready := [p for p in self._places if p.loaded and not p.stuck]):
            place = min(ready, key=lambda each: len(each.held))
            if len(place.held) >= _CROWD and len([p for p in self._places if not p.stuck]) < self.workers:
                self._places.append(self._start())
            episode = self._waiting.popleft()
            self._numbers += 1
            episode.number, episode.place, episode.tries = self._numbers, place, episode.tries + 1
            place.held[episode.number] = episode
            if self.driven and self.endpoint is not None:
                self._ask(episode, "run", {"row": episode.row, "endpoint": self.endpoint(episode.key)})
            else:
                self._ask(episode, "reset", episode.row)

    def _ask(self, episode: _Episode, what: str, given: Mapping[str, Any]) -> None:
        episode.asked, episode.asked_at = what, now()
        if episode.place is None:  # its process has ended meanwhile: it begins again, which its answer says
            return
        most = self.episode_s if what == "run" else self.turn_s
        seconds = max(0.01, min(most, episode.deadline - time.monotonic()))
        episode.due = time.monotonic() + seconds + _LATE_S
        episode.place.process.send([what, episode.number, given, seconds])

    def _tend(self, place: _Process) -> None:
        """Take what a process has answered. Replace it if it has ended, or does not answer."""
        try:
            if not self._load(place):
                return
            while (found := place.process.receive()) is not None:
                self._take(place, found)
        except NoAnswer as none:
            self._lost(place, {}, str(none))
            return
        late = {number: e for number, e in place.held.items() if e.asked and time.monotonic() > e.due}
        if late:
            self._lost(place, late, "was late, and its process did not answer")
        elif place.stuck and not place.held:
            self._drop(place)

    def _take(self, place: _Process, found: dict[str, Any]) -> None:
        place.stuck = place.stuck or found["stuck"]
        if (episode := place.held.get(found["episode"])) is None:  # it was closed meanwhile
            return
        if found["error"]:
            self._fail(episode, _clean(found["error"]), found.get("tool"))
            return
        self._answers.append(
            Answer(
                episode.key,
                episode.asked_at,
                now(),
                episode.asked,
                found["messages"],
                found.get("done", False),
                found.get("reward"),
                found.get("tools"),
                found.get("tool"),
            )
        )
        episode.asked = ""

    def _lost(self, place: _Process, late: dict[int, _Episode], how: str) -> None:
        """Replace a process. Its late episodes have failed; the others begin again."""
        self._drop(place)
        for episode in list(place.held.values()):
            episode.place = None
            if episode.number in late:
                self._fail(episode, how)
            elif episode.tries >= MOST_TRIES:
                self._fail(episode, f"{how}, {episode.tries} times")
            else:
                self.begun_again += 1
                if self.shut is not None:
                    self.shut(episode.key)
                self._answers.append(Answer(episode.key, episode.asked_at or now(), now(), episode.asked, again=True))
                episode.deadline = time.monotonic() + self.episode_s
                self._waiting.append(episode)

    def _drop(self, place: _Process) -> None:
        place.process.kill()
        self._places.remove(place)

    def _fail(self, episode: _Episode, why: str, tool: str | None = None) -> None:
        asked_at = episode.asked_at or now()
        self._answers.append(Answer(episode.key, asked_at, now(), episode.asked, tool=tool, error=why))
        self._open.pop(episode.key, None)
        self._leave(episode)
        if not episode.excused:
            self._count(why)

    def _count(self, why: str) -> None:
        self.failed += 1
        self.first_failure = self.first_failure or why
        if self.failed > max(LEAST_FAILURES, self.most_failures * self.begun):
            raise EnvironmentFailed(
                f"environment.name={self.name}: failed for {self.failed} of {self.begun} episodes, more than "
                f"environment.failures={self.most_failures:g} allows; the last {why}"
            )

    def _leave(self, episode: _Episode) -> None:
        place, episode.place = episode.place, None
        if place is not None and place.held.pop(episode.number, None) is not None and place in self._places:
            place.process.send(["close", episode.number])


def row_of(prompt: str, answer: str, row: str) -> dict[str, Any]:
    """Return what an environment gets of a problem.

    Args:
        row: the row of the data as JSON; "" if prompt and answer say it all.
    """
    return {"prompt": prompt, "answer": answer, **(json.loads(row) if row else {})}


def _clean(text: str) -> str:
    """Return what a user's code has said as text that any console and file takes, in one line of some length."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    return shown.encode("utf-8", "replace").decode()[:MOST_SAID]

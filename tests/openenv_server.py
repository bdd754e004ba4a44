"""An OpenEnv server for tests, run with the Python of an environment that has openenv: openenv_server.py PORT.

Its environment counts: an episode begins with the number that `reset` is given, and each message adds its length.
"""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Said(Action):
    message: str


class Heard(Observation):
    message: str


class Counter(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(step_count=0)

    def reset(self, start: int = 0, seed=None, episode_id=None, **_) -> Heard:
        self.total, self._state = start, State(step_count=0)
        return Heard(message=f"count from {start}", done=False, reward=None)

    def step(self, action: Said, **_) -> Heard:
        self._state.step_count += 1
        self.total += len(action.message)
        done = self._state.step_count == 3
        return Heard(message=f"{self.total}", done=done, reward=float(self.total) if done else 0.0)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_app(Counter, Said, Heard, env_name="counter", max_concurrent_envs=16)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")

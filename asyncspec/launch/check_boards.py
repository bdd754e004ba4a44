"""Checks the back ends of logging.backends before anything starts."""

from __future__ import annotations

import importlib.util
import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

from asyncspec.config import Config
from asyncspec.errors import ConfigError

WANDB_URL = "https://api.wandb.ai"


def check_boards(config: Config) -> None:
    """Check that the packages of the back ends are installed, and that wandb will not ask for a key.

    Raises:
        ConfigError: one is not, or wandb has no key and is not offline.
    """
    names = config.logging.boards
    for name in names:
        if importlib.util.find_spec(name) is None:
            rest = ",".join(each for each in names if importlib.util.find_spec(each) is not None) or "none"
            raise ConfigError(
                f"logging.backends={config.logging.backends!r}: {name} is not installed; expected pip install "
                f"'asyncspec[{name}]'; nearest valid choice: logging.backends={rest}"
            )
    if config.logging.prometheus and importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(
            f"logging.prometheus={config.logging.prometheus!r}: prometheus_client is not installed; expected pip "
            "install 'asyncspec[prometheus]'; nearest valid choice: logging.prometheus="
        )
    if "wandb" in names and os.environ.get("WANDB_MODE", "online") == "online" and not _wandb_key():
        raise ConfigError(
            f"logging.backends={config.logging.backends!r}: wandb has no key; expected `wandb login`, or WANDB_API_KEY "
            "in the environment; nearest valid choice: WANDB_MODE=offline in the environment"
        )


def _wandb_key() -> bool:
    """Return whether wandb finds a key where it looks for one."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", WANDB_URL)).hostname or ""
    files = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for file in files:
        try:
            if netrc.netrc(str(Path(file).expanduser())).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False

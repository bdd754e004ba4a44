"""Pushes a Hugging Face directory to a repository on a hub.

huggingface_hub does the work. It honors HF_ENDPOINT and HF_TOKEN, and is imported only if something is pushed.
"""

from __future__ import annotations

import signal
from pathlib import Path

from asyncspec.config import Config
from asyncspec.config.hub import repository
from asyncspec.errors import ConfigError, UserError, first_line

EXPECTED = "OWNER/NAME of a model's repository, for example acme/sums-1"


def check_repository(field: str, text: str) -> None:
    """Refuse a name that no repository can have, and the lack of a token, before there is something to push.

    Args:
        field: what the user sets, for messages: "--push " or "checkpoint.push_to=".

    Raises:
        ConfigError: one line that says what was expected.
    """
    if not repository(text):
        raise ConfigError(f"{field}{text!r}: expected {EXPECTED}")
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{field}{text}: HF_HUB_OFFLINE is set; expected a network, and no HF_HUB_OFFLINE")
    if not get_token():
        raise ConfigError(
            f"{field}{text}: no token for {constants.ENDPOINT}; expected one that may write, in HF_TOKEN, or "
            "from `hf auth login`"
        )


def push(field: str, text: str, directory: Path, message: str, private: bool = False) -> str:
    """Push all files of a directory as one commit. Make the repository if it does not exist. Return its address.

    Args:
        field: see `check_repository`, which this calls.
        message: of the commit.
        private: whether a new repository is private. One that exists stays as it is.

    Raises:
        UserError: the hub cannot be reached, or refuses; one line.
    """
    check_repository(field, text)
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    api = HfApi()
    try:
        address = api.create_repo(text, private=private, exist_ok=True)
        api.upload_folder(repo_id=text, folder_path=directory, commit_message=message)
    except Exception as error:  # of huggingface_hub, of its HTTP library, and of the file system
        raise UserError(f"{field}{text}: {_why(error, constants.ENDPOINT)}") from None
    return str(address)


def push_result(config: Config, code: int) -> int:
    """Push the policy of a run that has ended, if `checkpoint.push_to` asks for it and all steps are trained. Whatever
    goes wrong is one line with the command that pushes again: the run has its result anyway.

    Args:
        code: the run's exit code.

    Returns:
        The same exit code.
    """
    if not config.checkpoint.push_to or code:
        return code
    directory, to = Path(config.run_dir) / "checkpoint" / "policy", config.checkpoint.push_to
    message = f"Version {config.steps} of the run {Path(config.run_dir).name}, trained with asyncspec"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # the run has counted interrupts
    try:
        if not directory.is_dir():
            raise UserError(f"checkpoint.push_to={to}: {directory} is not on this host")
        print(f"pushed to {push('checkpoint.push_to=', to, directory, message, private=True)}", flush=True)
    except (UserError, KeyboardInterrupt) as error:
        why = str(error) or f"checkpoint.push_to={to}: interrupted"
        print(f"not pushed: {why}; to push it: asyncspec export {config.run_dir} --push {to} --private", flush=True)
    finally:
        if before is not None:  # a library has its own
            signal.signal(signal.SIGINT, before)
    return code


def _why(error: BaseException, hub: str) -> str:
    """Say in a line what has gone wrong, and what to do."""
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        status = getattr(error.response, "status_code", None)
        if status in (401, 403) or isinstance(error, errors.RepositoryNotFoundError):
            return f"{hub} refuses the token (status {status}); expected one that may write there, in HF_TOKEN"
        said = error.server_message or first_line(error)
        return f"{hub} answers with status {status}: {said}"
    if isinstance(error, errors.OfflineModeIsEnabled) or type(error).__module__.startswith("http"):
        return f"{hub} cannot be reached: {first_line(error)}; expected a network, or HF_ENDPOINT of another hub"
    if "xet-write-token" in str(error):
        return f"{hub} does not take uploads by Xet; expected HF_HUB_DISABLE_XET=1, for uploads by Git LFS"
    return f"{type(error).__name__}: {first_line(error)}"

"""Names of what is on a Hugging Face hub, and where their files are on this host.

    HuggingFaceTB/SmolLM2-135M-Instruct                a model: OWNER/NAME
    HuggingFaceTB/SmolLM2-135M-Instruct@v1.0           at a branch, a tag or a commit
    hf://datasets/openai/gsm8k@main/main/train-*.parquet   files of a data set, as in huggingface_hub

download.py fetches the files once, before a run starts, and replaces the revision by its commit. A name with a commit
always means the same files. It leads to them in huggingface_hub's cache, without a look at the network.
"""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import NamedTuple

SCHEME = "hf://"
DATA_FORM = "hf://datasets/OWNER/NAME@REVISION/FILE"
DATA_ENDINGS = (".jsonl", ".json", ".parquet", ".csv")
_WORD = r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?"  # as huggingface_hub's validate_repo_id has it
_REPOSITORY = rf"(?P<repository>{_WORD}/{_WORD})"
_REVISION = r"(?P<revision>[\w.-]+(?:/[\w.-]+)*)"
_MODEL = re.compile(rf"{_REPOSITORY}(?:@{_REVISION})?", re.ASCII)
# Of revisions with a slash, only those that the hub itself makes can be told from a file's path.
_DATA = re.compile(
    rf"hf://datasets/{_REPOSITORY}(?:@(?P<revision>refs/convert/\w+|refs/pr/\d+|[\w.-]+))?/(?P<files>[^@]+)", re.ASCII
)
_COMMIT = re.compile("[0-9a-f]{40}")


class HubName(NamedTuple):
    """A model's repository on a hub, or files of a data set's repository."""

    repository: str
    revision: str  # a branch, a tag or a commit
    files: str = ""  # of a data set: a path in the repository, perhaps with wildcards; "": a model

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """Parse a name; None if the text does not have the form of one. Whether it exists is not looked up."""
        found = _DATA.fullmatch(text) or _MODEL.fullmatch(text)
        if found is None:
            return None
        parts = found.groupdict()
        repository, revision = parts["repository"], parts["revision"] or "main"
        if len(repository) > 96 or any(part in repository for part in ("--", "..")) or repository.endswith(".git"):
            return None
        files = parts.get("files") or ""
        return None if ".." in revision or ".." in files.split("/") else cls(repository, revision, files)

    def __str__(self) -> str:
        if self.files:
            return f"{SCHEME}datasets/{self.repository}@{self.revision}/{self.files}"
        return f"{self.repository}@{self.revision}"

    @property
    def kind(self) -> str:
        """The kind of repository, as huggingface_hub names it."""
        return "dataset" if self.files else "model"

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit."""
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def wild(self) -> bool:
        """Whether the name has wildcards."""
        return any(sign in self.files for sign in "*?[")

    @property
    def folder(self) -> Path:
        """Where huggingface_hub's cache keeps, or would keep, the files of this commit."""
        from huggingface_hub import constants

        repository = f"{self.kind}s--{self.repository.replace('/', '--')}"
        return Path(constants.HF_HUB_CACHE).expanduser().resolve() / repository / "snapshots" / self.revision

    def matches(self, path: str) -> bool:
        """Whether a path in the repository is one of the named files. "*" matches slashes, too."""
        return path == self.files or (self.wild and fnmatch.fnmatchcase(path, self.files))

    def held(self) -> list[Path]:
        """Return the named data files in the cache, in the order of their paths."""
        if not self.wild:
            return [self.folder / self.files]
        found = (file for file in self.folder.rglob("*") if file.is_file())
        return sorted(file for file in found if self.matches(file.relative_to(self.folder).as_posix()))


def repository(text: str) -> bool:
    """Whether a text names a model's repository to write to: OWNER/NAME."""
    name = HubName.parse(text)
    return name is not None and name.repository == text


def pinned(text: str) -> HubName | None:
    """Parse a name with a commit; None if the text is anything else."""
    name = HubName.parse(text)
    return name if name is not None and name.pinned else None

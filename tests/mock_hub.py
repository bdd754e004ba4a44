"""A Hugging Face hub on this host: as much of its protocol as huggingface_hub asks for."""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class MockHub:
    """Repositories by name; a data set's begins with datasets/."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}  # repository -> commit -> path -> content
        self.refs: dict[tuple[str, str], str] = {}  # (repository, branch or tag) -> commit
        self.gated: set[str] = set()
        self.down: set[str] = set()  # repositories whose requests fail
        self.asked: list[str] = []  # the paths of all requests
        self.tokens: dict[str, str] = {}  # token -> the owner whose repositories it may write
        self.pushed: list[dict] = []  # of each commit that came over the network: repository, summary, paths
        self.private: dict[str, bool] = {}  # repositories that were made over the network
        self.stored: dict[str, bytes] = {}  # what came as large files, by SHA-256
        self.slow_s = 0.0  # seconds before each file
        self.released = threading.Event()  # ends these waits

    def commit(self, repository: str, files: dict[str, bytes], *refs: str) -> str:
        """Add a commit to a repository, and let the branch main and these refs name it. Returns it."""
        names = json.dumps({path: hashlib.sha1(content).hexdigest() for path, content in files.items()})
        sha = hashlib.sha1(names.encode()).hexdigest()
        self.commits.setdefault(repository, {})[sha] = files
        for ref in ("main", *refs):
            self.refs[repository, ref] = sha
        return sha

    def fetched(self, repository: str) -> set[str]:
        """Return the files of a repository whose content was asked for."""
        parts = [path.partition(f"GET /{repository}/resolve/") for path in self.asked]
        return {rest.partition("/")[2] for _, found, rest in parts if found}

    @contextmanager
    def serving(self):
        """Answer requests. Yields the hub's address."""
        hub = self

        class Handler(_Handler):
            def answer(self) -> None:
                hub.asked.append(f"{self.command} {self.path}")
                if self.command == "GET" and "/resolve/" in self.path:
                    hub.released.wait(hub.slow_s)
                self.respond(*hub.answer(self.path.partition("?")[0]))

            def take(self) -> None:
                hub.asked.append(f"{self.command} {self.path}")
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                self.respond(*hub.take(self.path.partition("?")[0], body, hub.tokens.get(token), hub.url))

            do_GET = do_HEAD = answer
            do_POST = do_PUT = take

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            self.released.set()
            server.shutdown()
            server.server_close()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of the answer to a request."""
        api = path.startswith("/api/")
        path = path.removeprefix("/api/").removeprefix("/")
        path = path.removeprefix("models/")
        words = path.split("/")
        size = 3 if words[0] == "datasets" else 2
        repository, rest = "/".join(words[:size]), words[size:]
        if repository not in self.commits:
            return _error(404, "RepoNotFound")
        if repository in self.down:
            return _error(503, "")
        what, revision, file = rest[0], rest[1], "/".join(rest[2:])
        if api and what == "revision":
            revision = "/".join(rest[1:]).replace("%2F", "/")
        sha = self.refs.get((repository, revision), revision)
        if sha not in self.commits[repository]:
            return _error(404, "RevisionNotFound")
        files = self.commits[repository][sha]
        if api and what == "revision":
            return 200, {}, json.dumps({"id": repository.removeprefix("datasets/"), "sha": sha}).encode()
        if api and what == "tree":
            found = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            return 200, {}, json.dumps(found).encode()
        if repository in self.gated:
            return _error(403, "GatedRepo")
        if file not in files:
            return _error(404, "EntryNotFound")
        return 200, {"ETag": f'"{hashlib.sha1(files[file]).hexdigest()}"', "X-Repo-Commit": sha}, files[file]

    def take(self, path: str, body: bytes, owner: str | None, url: str) -> tuple[int, dict[str, str], bytes]:
        """Return the answer to a request that writes."""
        if path.startswith("/stored/"):  # its address is the permission
            self.stored[path.removeprefix("/stored/")] = body
            return 200, {}, b""
        if owner is None:
            return _error(401, "")
        lines = [json.loads(line) for line in body.splitlines()]
        if path == "/api/repos/create":
            repository = f"{lines[0].get('organization') or owner}/{lines[0]['name']}"
            if not repository.startswith(f"{owner}/"):
                return _error(403, "")
            if repository in self.down:
                return _error(503, "")
            made = repository not in self.private
            self.private.setdefault(repository, lines[0].get("visibility") == "private")
            return (200 if made else 409), {}, json.dumps({"url": f"{url}/{repository}"}).encode()
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {
                    "oid": each["oid"],
                    "size": each["size"],
                    "actions": {"upload": {"href": f"{url}/stored/{each['oid']}", "header": {}}},
                }
                for each in lines[0]["objects"]
            ]
            return 200, {}, json.dumps({"transfer": "basic", "objects": objects}).encode()
        *words, what, _ = path.removeprefix("/api/models/").split("/")
        repository = "/".join(words)
        if repository not in self.private:
            return _error(404, "RepoNotFound")
        if what == "preupload":
            modes = [
                {"path": file["path"], "shouldIgnore": False, "uploadMode": _mode(file["path"])}
                for file in lines[0]["files"]
            ]
            return 200, {}, json.dumps({"files": modes}).encode()
        assert what == "commit", path
        values = {kind: [line["value"] for line in lines if line["key"] == kind] for kind in ("file", "lfsFile")}
        files = {file["path"]: base64.b64decode(file["content"]) for file in values["file"]}
        for file in values["lfsFile"]:
            files[file["path"]] = content = self.stored[file["oid"]]
            assert file["oid"] == hashlib.sha256(content).hexdigest()
        before = self.commits.get(repository, {}).get(self.refs.get((repository, "main"), ""), {})
        sha = self.commit(repository, before | files)
        summary = lines[0]["value"]["summary"]
        self.pushed.append({"repository": repository, "summary": summary, "paths": sorted(files)})
        answer = {"success": True, "commitOid": sha, "commitUrl": f"{url}/{repository}/commit/{sha}"}
        return 200, {}, json.dumps(answer).encode()


def _mode(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"


class _Handler(BaseHTTPRequestHandler):
    def respond(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args) -> None:
        pass


def _error(status: int, code: str) -> tuple[int, dict[str, str], bytes]:
    return status, {"X-Error-Code": code, "X-Error-Message": code}, b"{}"


def files_of(directory: Path) -> dict[str, bytes]:
    """Return the files of a directory, for `MockHub.commit`."""
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}

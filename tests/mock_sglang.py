"""MockSglangServer: a test double for an SGLang 0.5.23 server. It runs our TorchEngine behind SGLang's HTTP interface.

It has the paths, the fields and the refusals that engine/sglang_server.py and sglang_engine.py rely on, as in the
sources of that version, and refuses what it does not imitate. Tokens, logprobs and their versions are real. So are
weights, which it loads from the given folders. Like the server, it ends if it cannot load them.
"""

import json
import queue
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from asyncspec.config import resolve_path
from asyncspec.drafters.make import drafter_maker
from asyncspec.engine.protocol import Request
from asyncspec.engine.torch_engine import TorchEngine
from asyncspec.models import policy
from asyncspec.speculation.verify import Sampling

POLICY = resolve_path("asset:tiny/policy")
URL = "http://127.0.0.1:30000"
SGLANG = (
    "engine.kind=sglang",
    "engine.kv_at_swap=recompute",
    "speculation.method=none",
    "sampling.max_response_tokens=64",
)
NEUTRAL = {  # what would come from the server's settings if it were not given
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}
SAMPLING = {"temperature", "max_new_tokens", "stop_token_ids", "sampling_seed", *NEUTRAL}
UPDATE = {"model_path", "load_format", "weight_version", "flush_cache"}


class Refusal(Exception):
    """Answer HTTP 400 with this message."""


class Ended(Exception):
    """The server ends."""


class MockSglangServer:
    def __init__(self, *, slots=8, temperature=1.0, max_response_tokens=64, method="none", draft_length=3, info=None):
        """
        Args:
            slots: sequences computed at a time, like --max-running-requests.
            method: none or ngram.
            info: fields of /server_info to replace.
        """
        model, self.shape = policy.load(POLICY)
        self.engine = TorchEngine(
            self.shape,
            drafter_maker(method, None, self.shape),
            slots=slots,
            max_prompt_tokens=96,
            max_response_tokens=max_response_tokens,
            draft_length=draft_length,
            sampling=Sampling(temperature),
            kv_at_swap="recompute",
        )
        self.engine.load_policy(dict(model.named_parameters()), 999)
        self.temperature, self.speculating, self.weight_version = temperature, method != "none", "default"
        self.info = {
            "version": "0.5.23",
            "model_path": str(POLICY),
            "tp_size": 1,
            "speculative_algorithm": "NGRAM" if self.speculating else None,
            "speculative_num_draft_tokens": draft_length + 1 if self.speculating else None,
            "speculative_accept_threshold_single": 1.0,
            "speculative_accept_threshold_acc": 1.0,
            "max_req_input_len": 96 + max_response_tokens + 2 - 6,
            "max_queued_requests": None,
            "enable_hierarchical_cache": False,
        } | (info or {})
        self.faults = {}  # path -> callable(handler) that answers instead
        self.change = lambda path, content: content  # applied to every answer
        self.most = self.swaps = 0  # most requests open at once; weight updates
        self._lock, self._paused, self._ended = threading.Lock(), False, False
        self._open, self._requests = {}, 0  # by request number, the queue for its answer
        self._pauses = {}  # by request number, how often a pause met it
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                server._handle(self, {})

            def do_POST(self):
                server._handle(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, *args):
                pass

        class Http(ThreadingHTTPServer):
            daemon_threads, request_queue_size, block_on_close = True, 128, False

        self._http = Http(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._threads = [
            threading.Thread(target=work, daemon=True)
            for work in (lambda: self._http.serve_forever(0.02), self._compute)
        ]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *args):
        self._ended = True
        self._http.shutdown()
        self._http.server_close()
        for thread in self._threads:
            thread.join()

    def _compute(self):
        while not self._ended:
            with self._lock:
                busy = not self._paused and (self.engine.live or self.engine.waiting)
                done = self.engine.poll() if busy else []
            for completion in done:
                if completion.request_id in self._open:
                    self._open[completion.request_id].put(completion)
            time.sleep(0.0005 if busy else 0.005)  # lets other threads take the lock

    def _handle(self, handler, body):
        if handler.path in self.faults:
            return self.faults[handler.path](handler)
        routes = {
            "/server_info": lambda body: self.info,
            "/generate": self._generate,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update,
            "/abort_request": self._abort,
        }
        if handler.path not in routes:
            return reply(handler, 404, b'{"detail": "Not Found"}')
        if (handler.command == "GET") != (handler.path == "/server_info"):
            return reply(handler, 405, b'{"detail": "Method Not Allowed"}')
        try:
            status, content = 200, routes[handler.path](body)
        except Ended:
            self._http.socket.close()
            return handler.connection.shutdown(socket.SHUT_RDWR)
        except Refusal as refusal:
            status, content = 400, {"success": False, "message": str(refusal)}
            if handler.path == "/generate":
                content = {"error": str(refusal) if "unknown field" in str(refusal) else {"message": str(refusal)}}
        reply(handler, status, json.dumps(self.change(handler.path, content)).encode() if content is not None else b"")

    def _generate(self, body):
        settings = body["sampling_params"]
        if unknown := set(settings) - SAMPLING:
            raise Refusal(f"unknown field {min(unknown)}")
        fixed = {"temperature": self.temperature, "stop_token_ids": [self.shape.eos_token_id], **NEUTRAL}
        if any(settings.get(name) != value for name, value in fixed.items()):
            raise Refusal(f"this double samples with {fixed}: {settings}")
        assert body["stream"] is False and body["return_logprob"] is True
        total, most = len(body["input_ids"]) + settings["max_new_tokens"], self.info["max_req_input_len"] + 6
        if total > most:
            raise Refusal(
                f"Requested token count exceeds the model's maximum context length of {most} tokens. You requested a "
                f"total of {total} tokens: {len(body['input_ids'])} tokens from the input messages and "
                f"{settings['max_new_tokens']} tokens for the completion. Please reduce the number of tokens in the "
                "input messages or the completion to fit within the limit."
            )
        arrived = queue.SimpleQueue()
        with self._lock:
            self._requests += 1
            number = self._requests
            self._open[number], self._pauses[number] = arrived, 0
            self.most = max(self.most, len(self._open))
            self.engine.submit(
                Request(number, body["input_ids"], [settings["sampling_seed"]], settings["max_new_tokens"])
            )
        done = arrived.get()
        with self._lock:
            del self._open[number]
            met = self._pauses.pop(number)
        return answer(number, body, done, self.weight_version, self.shape.eos_token_id, self.speculating, met)

    def _pause(self, body):
        if body != {"mode": "retract"}:
            raise Refusal(f"this double pauses only in mode retract: {body}")
        with self._lock:
            self._paused = True
            self._pauses = {number: count + 1 for number, count in self._pauses.items()}
        return {"message": "Generation paused successfully.", "status": "ok"}

    def _continue(self, body):
        if body not in ({}, {"torch_empty_cache": False}):
            raise Refusal(f"this double continues without more ado: {body}")
        with self._lock:
            self._paused = False
        return {"message": "Generation continued successfully.", "status": "ok"}

    def _update(self, body):
        if set(body) - UPDATE or body["load_format"] != "safetensors" or not self._paused or not body["flush_cache"]:
            raise Refusal(f"this double updates only while paused, from safetensors, with a flush: {body}")
        if not Path(body["model_path"]).is_dir():
            raise Refusal(f"Failed to get weights iterator: {body['model_path']}.")
        try:
            model, _ = policy.load(Path(body["model_path"]))
            with self._lock:
                self.engine.load_policy(dict(model.named_parameters()), int(body["weight_version"]))
        except Exception:
            raise Ended from None  # its rollback reads the same files
        self.weight_version, self.swaps = body["weight_version"], self.swaps + 1
        return {
            "success": True,
            "message": f"Succeeded to update model weights. Weight version updated to {self.weight_version}.",
            "num_paused_requests": 0,
        }

    def _abort(self, body):
        assert body == {"abort_all": True}
        with self._lock:
            for arrived in self._open.values():
                arrived.put(None)
        return None


def reply(handler, status, content):
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


def answer(number, body, done, weight_version, eos, speculating, pauses):
    """Return the answer of /generate.

    Args:
        done: the engine's Completion; None: aborted.
        pauses: how often a pause met the sample.
    """
    if done is None:
        return {
            "text": "",
            "output_ids": [],
            "meta_info": {
                "id": str(number),
                "finish_reason": {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": 0,
                "cached_tokens": 0,
                "num_retractions": pauses,
                "output_token_logprobs": [],
                "weight_versions": [{"version": weight_version, "start": 0, "end": 0}],
                "weight_version": weight_version,
            },
        }
    tokens, versions = done.tokens.tolist(), done.versions.tolist()
    stopped, spans = tokens[-1] == eos, []
    for at, version in enumerate(versions):
        if not spans or spans[-1]["version"] != str(version):
            spans.append({"version": str(version), "start": at, "end": at})
        spans[-1]["end"] = at + 1
    meta = {
        "id": str(number),
        "finish_reason": {"type": "stop", "matched": eos} if stopped else {"type": "length", "length": len(tokens)},
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": len(tokens),
        "cached_tokens": 0,
        "num_retractions": pauses,
        "output_token_logprobs": [[logprob, token, None] for logprob, token in zip(done.logprobs.tolist(), tokens)],
        "weight_versions": spans,
        "weight_version": spans[-1]["version"],
    }
    if speculating and done.verifications:
        meta |= {
            "spec_verify_ct": done.verifications,
            "spec_num_proposed_drafts": done.proposed,
            "spec_num_correct_drafts": done.accepted,
            "spec_correct_drafts_histogram": exactly(done),
        }
    return {"text": "", "output_ids": tokens, "meta_info": meta}


def exactly(done):
    """Return how many verifications of a sample accepted exactly 0, 1, 2, ... proposals."""
    least = [done.verifications, *done.accepted_at, 0]
    return [a - b for a, b in zip(least, least[1:])]


def one_line(error, *parts):
    assert "\n" not in str(error.value) and all(part in str(error.value) for part in parts), str(error.value)

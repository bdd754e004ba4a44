"""MockSglangServer: a test double for an SGLang 0.5.23 server. It runs our TorchEngine behind SGLang's HTTP interface.

It has the paths, the fields and the refusals that engine/sglang_server.py and sglang_engine.py rely on, as in the
sources of that version, and refuses every other field. Tokens, logprobs and their versions are real. So are weights,
which it loads from the given folders.
"""

import json
import queue
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
GENERATE = {"input_ids", "sampling_params", "return_logprob", "stream"}
SAMPLING = {"temperature", "max_new_tokens", "stop_token_ids", "sampling_seed"}
UPDATE = {"model_path", "load_format", "weight_version", "flush_cache"}


class Refusal(Exception):
    """Answer HTTP 400 with this message."""


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
        } | (info or {})
        self.faults = {}  # path -> callable(handler) that answers instead
        self.change = lambda path, content: content  # applied to every answer
        self.most = self.swaps = 0  # most requests open at once; weight updates
        self._lock, self._paused, self._ended = threading.Lock(), False, False
        self._open, self._requests = {}, 0  # by request number, the queue for its answer
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
        try:
            content = {
                "/server_info": lambda body: self.info,
                "/generate": self._generate,
                "/pause_generation": self._pause,
                "/continue_generation": self._continue,
                "/update_weights_from_disk": self._update,
                "/abort_request": self._abort,
            }[handler.path](body)
            status = 200
        except Refusal as refusal:
            status, content = (
                400,
                {"error": {"message": str(refusal)}}
                if handler.path == "/generate"
                else {"success": False, "message": str(refusal)},
            )
        except KeyError:
            status, content = 404, {"detail": "Not Found"}
        reply(handler, status, json.dumps(self.change(handler.path, content)).encode() if content is not None else b"")

    def _generate(self, body):
        settings = body["sampling_params"]
        if set(body) - GENERATE or set(settings) - SAMPLING:
            raise Refusal(f"unknown fields: {set(body) - GENERATE | set(settings) - SAMPLING}")
        if (settings["temperature"], settings["stop_token_ids"], body["stream"]) != (
            self.temperature,
            [self.shape.eos_token_id],
            False,
        ):
            raise Refusal(f"this double samples at {self.temperature} until {self.shape.eos_token_id}: {settings}")
        arrived = queue.SimpleQueue()
        with self._lock:
            self._requests += 1
            number = self._requests
            self._open[number] = arrived
            self.most = max(self.most, len(self._open))
            self.engine.submit(
                Request(number, body["input_ids"], [settings["sampling_seed"]], settings["max_new_tokens"])
            )
        done = arrived.get()
        with self._lock:
            del self._open[number]
        return answer(number, body, done, self.weight_version, self.shape.eos_token_id, self.speculating)

    def _pause(self, body):
        if body != {"mode": "retract"}:
            raise Refusal(f"this double pauses only in mode retract: {body}")
        with self._lock:
            self._paused = True
        return {"message": "Generation paused successfully.", "status": "ok"}

    def _continue(self, body):
        with self._lock:
            self._paused = False
        return {"message": "Generation continued successfully.", "status": "ok"}

    def _update(self, body):
        if set(body) - UPDATE or body["load_format"] != "safetensors" or not self._paused or not body["flush_cache"]:
            raise Refusal(f"this double updates only while paused, from safetensors, with a flush: {body}")
        try:
            model, _ = policy.load(Path(body["model_path"]))
            with self._lock:
                self.engine.load_policy(dict(model.named_parameters()), int(body["weight_version"]))
        except Exception as error:
            raise Refusal(f"Failed to update weights: {error}.\nRolling back to original weights.") from None
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


def answer(number, body, done, weight_version, eos, speculating):
    """Return the answer of /generate.

    Args:
        done: the engine's Completion; None: aborted.
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
                "num_retractions": 0,
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
        "num_retractions": 0,
        "output_token_logprobs": [[logprob, token, None] for logprob, token in zip(done.logprobs.tolist(), tokens)],
        "weight_versions": spans,
        "weight_version": spans[-1]["version"],
    }
    if speculating and done.verifications:
        meta |= {
            "spec_verify_ct": done.verifications,
            "spec_num_proposed_drafts": done.proposed,
            "spec_num_correct_drafts": done.accepted,
        }
    return {"text": "", "output_ids": tokens[:-1] if stopped else tokens, "meta_info": meta}

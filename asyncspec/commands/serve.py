"""`asyncspec serve`: answers OpenAI's requests with a policy, and with the draft that was trained for it."""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import shlex
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from asyncspec.commands.export import run_config
from asyncspec.config import Config, ConfigError, default_of, fetched_model, load, resolve_path
from asyncspec.config.fields import value_of
from asyncspec.errors import UserError, first_line
from asyncspec.models import CheckpointError

KEY = "ASYNCSPEC_API_KEY"
LEAST_KEY = 16  # characters of a key; a shorter one can be guessed
SLOTS, PROMPT_TOKENS, RESPONSE_TOKENS = 8, 1024, 1024  # of a server of a model that no run says more about
# The fields of a run that its server has, too.
CARRIED = (
    *("model.dtype", "sampling.temperature", "sampling.top_p", "sampling.top_k", "sampling.max_response_tokens"),
    *("engine.slots", "engine.max_prompt_tokens", "engine.threads", "speculation.method", "speculation.draft_length"),
    *("data.template_variables", "deployment.device"),
)


def add_parser(commands) -> None:
    serve = commands.add_parser(
        "serve",
        help="answer OpenAI's requests with a policy, speculating with its draft",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Serve a policy to OpenAI's clients: /v1/chat/completions, /v1/completions and /v1/models. The\n"
        "embedded engine generates, with speculation. CHECKPOINT is a run's directory, which also gives the\n"
        "adapted draft, the sampling and the limits; or a Hugging Face directory, a model on a hub, or\n"
        "asset:NAME. Fields set the rest: engine.slots, engine.max_prompt_tokens, sampling.max_response_tokens\n"
        "and speculation.method, for example. Needs pip install 'asyncspec[serve]'.",
    )
    serve.add_argument("checkpoint", metavar="CHECKPOINT", help="a run's directory, a model's, or a name on a hub")
    serve.add_argument("overrides", nargs="*", metavar="field=value", help="set fields, as with asyncspec train")
    serve.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1); any other needs a key"
    )
    serve.add_argument("--port", type=int, default=8000, metavar="N", help="port; 0: a free one (default: 8000)")
    serve.add_argument("--name", default="", help="the model's name for clients (default: from CHECKPOINT)")
    serve.add_argument(
        "--key-file", default="", metavar="FILE", help=f"file with the key that clients must show (default: ${KEY})"
    )
    serve.add_argument(
        "--max-waiting", type=int, default=64, metavar="N", help="samples that may wait for a slot (default: 64)"
    )
    serve.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="seconds that a request may take (default: 300)"
    )
    serve.set_defaults(run=_run, parser=serve)


def _run(args) -> int:
    for name, low, high in (("port", 0, 65535), ("max_waiting", 0, 10**6), ("timeout", 0.1, 1e6)):
        if not low <= (number := getattr(args, name)) <= high:
            flag = name.replace("_", "-")
            args.parser.error(f"--{flag} {number}: expected a number from {low:g} to {high:g}")
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(f"serve: {error.name} is not installed; expected pip install 'asyncspec[serve]'") from None
    key = _key(args.key_file)
    if not key and not _loopback(args.host):
        raise UserError(
            f"--host {args.host}: others reach it, so it needs a key; expected --key-file FILE or {KEY}; nearest "
            "valid choice: --host 127.0.0.1"
        )
    with _listening(args.host, args.port) as listener:
        config = configuration(args.checkpoint, args.overrides)
        for number in (signal.SIGTERM, signal.SIGHUP):  # they are interrupts, too, except under nohup
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.default_int_handler)
        name = args.name or _name(args.checkpoint)
        _serve(config, name, listener, args.host, key, args.max_waiting, args.timeout)


def configuration(checkpoint: str, overrides: list[str]) -> Config:
    """Return the configuration of a server's engine.

    Args:
        checkpoint: a run's directory, or what model.path may be.
        overrides: "field=value", applied last.

    Raises:
        UserError: the checkpoint cannot be served, or a field is wrong.
    """
    from asyncspec.launch.preflight import check_models
    from asyncspec.models.shape import PolicyShape

    run_dir = resolve_path(checkpoint).absolute()
    if (run_dir / "config.yaml").is_file():
        usual = _of_run(checkpoint, run_dir)
    else:
        path = fetched_model("CHECKPOINT ", checkpoint)
        usual = [f"model.path={path}", "deployment.device=auto", f"engine.slots={SLOTS}"]
        if checkpoint != default_of("model.path"):  # whose draft is shipped
            usual.append("speculation.method=ngram")
        with suppress(CheckpointError):  # `load` says what is wrong
            room = PolicyShape.from_hf(resolve_path(path)).longest - 32
            prompt = min(PROMPT_TOKENS, room // 2)
            usual.append(f"engine.max_prompt_tokens={prompt}")
            usual.append(f"sampling.max_response_tokens={min(RESPONSE_TOKENS, room - prompt)}")
    config = load("tiny", [*usual, *overrides])
    if config.engine.kind != "torch":
        raise ConfigError(
            f"engine.kind={config.engine.kind!r}: expected the embedded engine; vLLM and SGLang have servers of their "
            "own; nearest valid choice: engine.kind=torch"
        )
    check_models(config)
    return config


def _of_run(checkpoint: str, run_dir: Path) -> list[str]:
    """Return the overrides for the result of a run."""
    policy, draft, config = (
        run_dir / "checkpoint" / "policy",
        run_dir / "checkpoint" / "draft",
        run_config(checkpoint, run_dir),
    )
    if (policy / "adapter_config.json").is_file():
        raise UserError(
            f"CHECKPOINT {checkpoint}: checkpoint/policy has adapters alone; expected merged weights; nearest valid "
            f"choice: the directory that `asyncspec export {checkpoint}` makes"
        )
    if not (policy / "config.json").is_file():
        raise UserError(
            f"CHECKPOINT {checkpoint}: the run has no checkpoint/policy yet; expected one that has ended; `asyncspec "
            "export` makes a directory of its newest checkpoint"
        )
    carried = [f"{name}={value_of(config, name)}" for name in CARRIED]
    if config.draft_directory:
        if config.draft_trainer == "trainer":  # it stands beside the policy
            found = str(policy)
        else:
            found = str(draft) if (draft / "config.json").is_file() else config.draft_directory
        carried.append(f"speculation.draft_path={found}")
    return [f"model.path={policy}", *carried]


def _serve(
    config: Config, name: str, listener: socket.socket, host: str, key: str, waiting: int, timeout_s: float
) -> NoReturn:
    """Load the engine, and answer requests until an interrupt.

    Raises:
        KeyboardInterrupt: it was interrupted.
        UserError: the engine did not start, or has failed.
    """
    import uvicorn

    from asyncspec.actors.engines import make_engine
    from asyncspec.launch.roles import devices
    from asyncspec.loading import use_threads
    from asyncspec.models import tokenizer as tokenizers
    from asyncspec.models.chat import ChatTemplate, parse_variables
    from asyncspec.models.shape import PolicyShape
    from asyncspec.serve.app import Server, http_server
    from asyncspec.serve.asks import Limits, Model
    from asyncspec.serve.worker import Worker
    from asyncspec.speculation.verify import Sampling

    path, device = resolve_path(config.model.path), devices(config.deployment.device, ["generator"])[0]

    def make():
        use_threads(config.engine.threads)
        return make_engine(config, device)

    failures: list[Exception] = []
    server: uvicorn.Server | None = None

    def failed(error: Exception) -> None:
        failures.append(error)
        if server is not None:
            server.should_exit = True

    worker = Worker(make, failed)
    worker.start()
    try:
        tokenizer, template = tokenizers.load(path), None
        with suppress(CheckpointError):
            template = ChatTemplate(path)
        worker.wait_until_loaded()
    except CheckpointError as error:
        raise UserError(str(error)) from None
    except Exception as error:  # for example, a GPU has too little memory
        raise UserError(f"serve: the engine did not start: {type(error).__name__}: {first_line(error)}") from None
    slots, settings = config.engine.slots, config.sampling
    limits = Limits(
        config.engine.max_prompt_tokens, settings.max_response_tokens, min(slots + waiting, 128), waiting, timeout_s
    )
    shape = PolicyShape.from_hf(path)
    model = Model(
        name,
        tokenizer,
        template,
        parse_variables(config.data.template_variables),
        shape.vocab_size,
        Sampling(settings.temperature, settings.top_p, settings.top_k),
        limits,
        tuple(shape.eos_token_ids),
    )
    server = http_server(Server(model, worker, slots, host, key).app, limit_concurrency=4 * (slots + waiting) + 64)
    _tell(config, model, listener, host, key)
    try:
        server.run(sockets=[listener])
    finally:
        worker.stop()
    if failures:
        raise UserError(f"serve: the engine has failed: {type(failures[0]).__name__}: {first_line(failures[0])}")
    raise KeyboardInterrupt  # nothing else ends the server, and uvicorn does not always raise the signal again


def _tell(config: Config, model, listener: socket.socket, host: str, key: str) -> None:
    """Print what is served where, and how to ask."""
    port, limits = listener.getsockname()[1], model.limits
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    draft = f" from {config.draft_directory}" if config.draft_directory else ""
    speculation = (
        f"draft {config.speculation.method}{draft}, k={config.speculation.draft_length}"
        if config.drafting
        else "no speculation"
    )
    print(
        f"serving {model.name} at {address}: {speculation}; {config.engine.slots} slots and {limits.waiting} waiting; "
        f"prompts of up to {limits.prompt_tokens} tokens, responses of up to {limits.response_tokens}, "
        f"{limits.timeout_s:g} s a request; {'a key' if key else 'no key, this host only'}"
    )
    what, asked = "completions", {"model": model.name, "prompt": "12+34="}
    if model.template is not None:
        what, asked = "chat/completions", {"model": model.name, "messages": [{"role": "user", "content": "Hello"}]}
    shown = f'-H "Authorization: Bearer ${KEY}" ' if key else ""
    body = shlex.quote(json.dumps({**asked, "max_tokens": min(32, limits.response_tokens)}))
    print(f"  curl {address}/{what} {shown}-H 'Content-Type: application/json' -d {body}", flush=True)


def _key(file: str) -> str:
    """Return the key that clients must show; "" if there is none."""
    where, key = KEY, os.environ.get(KEY, "")
    if file:
        where = f"--key-file {file}"
        try:
            key = resolve_path(file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise UserError(f"{where}: {getattr(error, 'strerror', None) or 'not text'}; expected a file") from None
    if (file or key) and (len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key):
        raise UserError(f"{where}: expected a key of at least {LEAST_KEY} characters in ASCII, without spaces")
    return key


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens, so that a port that is taken is found before anything is loaded."""
    try:
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(where[:2], family=family)
    except (OSError, UnicodeError, OverflowError) as error:
        number = getattr(error, "errno", None) or 0
        why = os.strerror(number) if number > 0 else first_line(error)
        raise UserError(
            f"--host {host} --port {port}: {why}; expected an address of this host and a free port; --port 0 finds one"
        ) from None


def _name(checkpoint: str) -> str:
    """Return a model's name for clients: a run's or a directory's last part, or the name on a hub."""
    if checkpoint.startswith("asset:"):
        return checkpoint.removeprefix("asset:")
    path = resolve_path(checkpoint)
    return (path.resolve().name or "policy") if path.exists() else checkpoint.partition("@")[0]

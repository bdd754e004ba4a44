"""What an actor would refuse is refused before anything starts.

Each `raise` that an actor can reach stands in one of two tables: it has a twin at the start, which a test shows, or it
says something that only a running system can find out.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from asyncspec.launch.roles import CLASSES, MOCKED

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "asyncspec"
# What every launcher calls before it starts a process.
ROOTS = (
    "config.load:load",
    "config.check:check_values",
    "config.check:check_files",
    "launch.preflight:check_inputs",
    "launch.machine:check_host",
    "launch.roles:devices",
    "tasks.reward_process:main",  # the processes that `check_inputs` starts
    "rl.own:main",
)


# The syntax tree.
@cache
def tree(module: str) -> ast.Module:
    return ast.parse(path(module).read_text())


def path(module: str) -> Path:
    file = PACKAGE.joinpath(*module.split("."))
    return file.with_suffix(".py") if file.with_suffix(".py").is_file() else file / "__init__.py"


@cache
def imported(module: str) -> frozenset[str]:
    """Modules of the package that a module imports, anywhere in its text."""
    found = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("asyncspec"):
            base = node.module.removeprefix("asyncspec").removeprefix(".")
            names = [f"{base}.{alias.name}".strip(".") for alias in node.names]
            found |= {name for name in [base, *names] if name and path(name).is_file()}
    return frozenset(found)


def reachable() -> set[str]:
    """Modules that an actor can import."""
    waiting = [module.removeprefix("asyncspec.") for module, _ in [*CLASSES.values(), *MOCKED.values()]]
    found = set()
    while waiting:
        if (module := waiting.pop()) not in found:
            found.add(module)
            waiting += imported(module)
    return found


def functions(module: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield (qualified name, node) of every function of a module. One inside another belongs to the outer one."""

    def inside(node: ast.AST, names: tuple[str, ...]):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from inside(child, (*names, child.name))
            elif isinstance(child, ast.FunctionDef):
                yield ".".join((*names, child.name)), child

    yield from inside(tree(module), ())


def raised(function: ast.AST) -> set[str]:
    """Types that a function raises; "again" for an exception that was raised or kept before."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Raise):
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            name = error.id if isinstance(error, ast.Name) else "again"
            found.add(name if name[:1].isupper() else "again")
    return found


def raises() -> dict[str, set[str]]:
    """Every function of an actor's modules that raises -> the types, without those of RUNNING_TYPES."""
    found = {}
    for module in sorted(reachable()):
        for name, node in functions(module):
            if types := raised(node) - set(RUNNING_TYPES):
                found[f"{module}:{name}"] = types
    return found


RUNNING_TYPES = {
    "again": "it was raised before, and counts there",
    "StopRequested": "the run is ending",
    "WireError": "a message from the network is malformed",
    "BroadcastError": "a member of a broadcast group is gone",
    "PeersLost": "a rank is gone",
    "RanksDiffer": "the ranks of a generator have sampled different tokens",
    "LagError": "an invariant of the running system is broken",
    "ImpossibleTransition": "an invariant of the running system is broken",
    "TimeoutError": "another process did not answer in time",
    "FloatingPointError": "a gradient is not finite",
    "ServerError": "an SGLang server does not answer, or refuses what it accepted at the start",
    "RunFailed": "the controller ends the run, for a reason that is raised elsewhere",
    "NoAnswer": "a call of the user's function hangs or ended its process",
    "RewardError": "too many calls of the user's function failed",
    "Refused": "a service asks for what it may not have, and is told so",
    "EnvironmentFailed": "too many episodes of the user's environment failed",
    "NotStarted": "a process did not start",
}

# Functions that only an actor calls -> the function of the start that refuses the same, and a test that shows it.
TWINS = {
    "config.load:from_yaml": (
        "config.load:load",
        "test_config.py:test_the_resolved_configuration_loads_back_unchanged",
    ),
    "engine.protocol:check_request": (
        "tasks.prompts:encoded_prompts",
        "test_inputs.py:test_prompts_that_a_generator_would_refuse_are_refused_before_it_starts",
    ),
    "engine.vllm_engine:VllmEngine.__init__": (
        "launch.preflight:check_vllm",
        "test_vllm.py:test_a_vllm_for_another_kind_of_device_is_refused_before_the_start",
    ),
    "models.parallel:_interface": (
        "launch.machine:check_host",
        "test_launchers.py:test_a_launcher_that_does_not_fit_gives_one_line",
    ),
}
# Functions that refuse what only a running system meets -> why the start cannot know it.
RUNNING = {
    "actors.broadcasts:Broadcasts.broken": "members of a group fail again and again",
    "actors.driven:next_turn": "a service rewrites a conversation, and is told so",
    "actors.driven:_messages": "the same",
    "actors.episodes:Episodes.asked": "a service asks again before it was answered, and is told so",
    "actors.episodes:Episodes._ask_next": "a service asks for more than there is room for, and is told so",
    "actors.episodes:Episodes._check_beginning": "a beginning does not fit; its episode has failed",
    "actors.episodes:Episodes._begun": "the same",
    "environments.conversation:Conversation.sampled": "the generator would break its own rule",
    "environments.conversation:Conversation.answered": "the same",
    "environments.library:LibraryRenderer.follow": "the same",
    "environments.rendering:Renderer.follow": "the template refuses messages; their episode has failed",
    "engine.protocol:QueueingEngine.submit": "no generator asks for a sampling of a request's own",
    "engine.vllm_arguments:blamed": "only vLLM knows which values its options take, and importing it takes seconds",
    "engine.vllm_engine:VllmEngine._completion": "vLLM returns something else than it promises",
    "faults:_full": "a test asks for a full disk",
    "faults:_raise": "a test asks for an exception",
    "faults:Faults.__call__": "a benchmark asks for an exception",
    "ledger.checkpoint:load": "a checkpoint has changed, which only who reads it finds",
    "ledger.storage:Reader._checked": "the same",
    "files:LineFile.sync": "a file of the run was removed",
    "ledger.ledger:read": "a ledger was damaged; --resume reads it before anything starts",
    "ledger.ledger:_locked": "another process writes the ledger",
    "lock:Lock._take_owner": "another process writes the ledger",
    "lock:Lock._move_aside": "another process writes the ledger",
    "lock:_flock": "another process writes the ledger",
    "models.eagle3:load": "a value is not finite, which only who reads all values finds",
    "models.mtp:MTP.load_hf": "a value is not finite, which only who reads all values finds",
    "models.fill:fill": "a value is not finite, which only who reads all values finds",
    "models.foreign:fill": "the same, and the disk fails while a file is read",
    "models.foreign:check_head": "the family scales or caps its logits, which only a pass finds",
    "models.fill:_mapped": "the disk fails while a file is read",
    "models.gather:_Job.next": "another version is gathered before this one is sent",
    "models.parallel:Ranks.meet": "a rank was lost while it loaded",
    "models.hf_files:read_tensors": "the disk fails while a file is read",
    "rl.from_checkpoint:save_best": "a checkpoint has changed, which only who reads it finds",
    "speculation.drafter:NoDrafter.propose": "the engine would break its own rule",
    "timing.boards:Trackio._check": "trackio could not write, and has only warned of it",
    "wire.transport:use_keys": "the keys that the launcher has just written are gone",
}


# What the start calls.
@cache
def called(module: str) -> dict[str, frozenset[str]]:
    """Function of a module -> the names of the functions that it calls or passes on, methods included."""
    return {
        name: frozenset(
            part.attr if isinstance(part, ast.Attribute) else part.id
            for part in ast.walk(node)
            if isinstance(part, (ast.Attribute, ast.Name))
        )
        for name, node in functions(module)
    }


@cache
def from_the_start() -> frozenset[str]:
    """Functions that the start calls. A name counts in the modules that the caller's module imports."""
    waiting, found = list(ROOTS), set()
    while waiting:
        if (key := waiting.pop()) in found:
            continue
        found.add(key)
        module, _, name = key.partition(":")
        for other in {module, *imported(module)}:
            # Who names a class may make one of it.
            names = {one: one.removesuffix(".__init__").split(".")[-1] for one in called(other)}
            waiting += [f"{other}:{one}" for one, last in names.items() if last in called(module)[name]]
    return frozenset(found)


def test_what_an_actor_refuses_is_refused_at_the_start_or_only_a_running_system_can_meet_it():
    at_start = from_the_start()
    unknown = [key for key in raises() if key not in at_start and key not in TWINS and key not in RUNNING]
    assert unknown == []


def test_the_tables_name_functions_that_raise_and_that_the_start_does_not_call():
    at_start, raising = from_the_start(), raises()
    assert [key for key in [*TWINS, *RUNNING] if key not in raising or key in at_start] == []


@pytest.mark.parametrize("key", TWINS)
def test_a_twin_is_called_at_the_start_and_has_a_test(key):
    twin, test = TWINS[key]
    assert twin in from_the_start()
    file, _, name = test.partition(":")
    defined = {node.name for node in ast.walk(ast.parse((ROOT / "tests" / file).read_text())) if hasattr(node, "name")}
    assert name in defined


def test_the_start_is_told_apart_from_what_actors_do():
    """The call graph goes by names. It must not take everything for a part of the start."""
    at_start = from_the_start()
    assert {"models.contents:check_policy", "models.headers:_header", "tasks.reward:Reward.__init__"} <= at_start
    assert not {"models.policy:load", "rl.learner:Learner.load", "engine.torch_engine:TorchEngine.poll"} & at_start
    assert all(any(name == key.partition(":")[2] for name, _ in functions(key.partition(":")[0])) for key in ROOTS)

"""Ray as the launcher: the same runs, on a cluster of their own or on an existing one with three nodes."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
import yaml

pytest.importorskip("ray", reason='needs ray: pip install -e ".[ray]"')

from runs import ROOT, Running, alive, descendants, outliving, pid_of, rows

from asyncspec.config import topology
from asyncspec.launch import ray as launcher
from asyncspec.launch import ray_group
from asyncspec.ledger.audit import audit

pytestmark = pytest.mark.ray
SCRIPT = (sys.executable, str(ROOT / "launch" / "ray.py"))


@pytest.fixture(autouse=True)
def own_cluster(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")


@contextmanager
def three_nodes():
    """Run a Ray cluster of three nodes, all on this host."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def cluster():
    """A cluster for tests that leave its nodes alone."""
    with three_nodes() as cluster:
        yield cluster


@pytest.fixture
def cluster_to_break():
    """A cluster for a test that kills nodes."""
    with three_nodes() as cluster:
        yield cluster


def parent_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rsplit(")", 1)[1].split()[1])


def actors_of(run_dir):
    return {
        path.stem: pid_of(run_dir, path.stem)
        for path in (run_dir / "logs").glob("*.log")
        if path.stem != launcher.CONSOLE
    }


def test_dead_actors_are_replaced_and_ctrl_c_ends_every_process_with_a_checkpoint(tmp_path):
    run_dir = tmp_path / "run"
    run = Running.new(run_dir, "--steps", "10000", "checkpoint.every=3", launcher=SCRIPT)
    run.wait_for_steps(2)
    assert set(actors_of(run_dir).values()) <= set(descendants(run.process.pid)) and len(actors_of(run_dir)) == 5
    run.signal("generator0", signal.SIGKILL)
    run.wait_for(lambda: "generator0.1 has joined" in run.output, "a replacement")
    run.wait_for((run_dir / "checkpoints" / "trainer-000003").is_dir, "a checkpoint")
    run.signal("trainer", signal.SIGKILL)
    run.wait_for(lambda: "resuming from version " in run.output, "the restart")
    run.wait_for_steps((steps := len(rows(run_dir))) + 2)
    everyone = [run.process.pid, *descendants(run.process.pid)]
    os.killpg(run.process.pid, signal.SIGINT)
    assert not outliving(everyone), run.output
    output = run.end(130)
    assert (
        "generator0 died: its process ended" in output
        and "trainer died: its process ended: all actors restart from the last checkpoint" in output
    )
    assert "stopped early: interrupted" in output
    trained = [row["step"] for row in rows(run_dir)]
    assert trained == list(range(len(trained))) and len(trained) >= steps + 2
    assert max(row["lag/max"] for row in rows(run_dir)) <= 1 and audit(str(run_dir)) == 0
    assert (run_dir / "checkpoint" / "policy" / "model.safetensors").is_file()
    json.loads((run_dir / "trace.json").read_text())


def test_a_run_that_finds_no_room_on_the_cluster_gives_one_line(tmp_path, cluster, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    output = Running.new(
        tmp_path / "run",
        "deployment.nodes=trainer+logprob,3*generator",
        "deployment.start_timeout_s=1",
        launcher=SCRIPT,
    ).end(2)
    assert (
        "Ray found no room within 1 s (deployment.start_timeout_s); asked for 4 nodes, 4 with 1 CPU; the cluster has "
        "3: " in output
    )
    assert len(output.splitlines()) == 1, output
    output = Running.new(tmp_path / "other", "deployment.device=cuda", launcher=SCRIPT).end(2)
    assert "deployment.device='cuda': expected GPUs, the cluster has 3" in output and len(output.splitlines()) == 1, (
        output
    )


def test_nodes_are_placed_apart_and_replaced_and_no_actor_outlives_the_launcher(
    tmp_path, cluster_to_break, monkeypatch
):
    monkeypatch.setenv("RAY_ADDRESS", cluster_to_break.address)
    run_dir = tmp_path / "run"
    run = Running.new(
        run_dir,
        "--steps",
        "10000",
        "deployment.nodes=trainer+logprob,generator",
        "deployment.silent_timeout_s=15",
        "deployment.standby=0",
        launcher=SCRIPT,
    )
    run.wait_for_steps(1)
    actors = actors_of(run_dir)
    raylets = {name: parent_of(pid) for name, pid in actors.items()}
    assert len({raylets[name] for name in ("controller", "trainer", "logprob", "draft_adapter")}) == 1
    assert raylets["generator0"] != raylets["trainer"]
    assert "tcp://127.0.0.1" not in (run_dir / "config.yaml").read_text()
    run.signal("generator0", signal.SIGKILL)
    run.wait_for(lambda: "generator0.1 has joined" in run.output, "a replacement")
    replacement = pid_of(run_dir, "generator0.1")
    assert parent_of(replacement) == raylets["generator0"]  # on its node
    head = cluster_to_break.head_node.all_processes["raylet"][0].process.pid
    lost = next(raylets[name] for name in ("trainer", "generator0") if raylets[name] != head)
    for pid in [lost, *descendants(lost)]:  # a node, and every process on it
        os.kill(pid, signal.SIGKILL)
    steps = len(rows(run_dir))
    # The first replacement may still be placed on the dying node.
    run.wait_for(
        lambda: "resuming from version" in run.output or re.search(r"generator0\.[2-9] has joined", run.output),
        "the lost node's actors to restart on the third node",
    )
    run.wait_for_steps(steps + 2)
    everyone = {
        pid
        for log in (run_dir / "logs").glob("*.log")
        for pid in map(int, re.findall(r"starts, pid (\d+)", log.read_text()))
    }
    assert len(alive(everyone)) >= 5
    run.process.kill()
    run.process.wait()
    assert not outliving(everyone)
    assert alive([head])  # the cluster is not ours to end


def packed(shares, gpus):
    """Return where Ray puts these shares, in turn: on the GPU with the least free share that is still enough."""
    left, found = [1.0] * gpus, []
    for share in shares:
        found.append(min((gpu for gpu in range(gpus) if left[gpu] > share - 1e-6), key=left.__getitem__))
        left[found[-1]] -= share
    return found


def apart(played, found):
    """Whether no two actors of a role are on one GPU."""
    taken = [(role.removesuffix("_rank"), gpu) for role, gpu in zip(played, found)]
    return len(set(taken)) == len(taken)


@pytest.mark.parametrize("name", ["qwen3_8b_12plus4", "qwen3_8b_32gpu", "qwen3_8b_8gpu"])
def test_no_two_ranks_or_generators_of_a_shipped_topology_share_a_gpu(name):
    nodes = topology.parse(yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())["deployment"]["nodes"])
    totals = topology.total(nodes)
    names = topology.name_actors(totals["trainer"], totals["logprob"], 1, totals["generator"], 1, True)
    for here in topology.assign(nodes, {"controller": "controller", **names}):
        played = [names[actor] for actor in here if actor != "controller"]
        assert apart(played, packed(launcher._shares(played, 8), 8)) and apart(played, topology.deal(played, 8))


@pytest.mark.parametrize(
    "played, gpus",
    [
        (["trainer"] * 8, 8),
        (["trainer"] * 4 + ["generator"] * 4, 4),
        (["trainer"] * 4 + ["logprob"] * 4 + ["generator"] * 4 + ["draft_adapter"], 4),
        (["draft_adapter"] + ["trainer"] * 3, 3),
        (["trainer"] * 2 + ["logprob"] + ["generator"] * 8, 8),
    ],
)
def test_gpu_shares_keep_actors_of_a_role_apart_while_there_are_enough_gpus(played, gpus):
    shares = launcher._shares(played, gpus)
    assert apart(played, packed(shares, gpus)) and sum(shares) == pytest.approx(min(len(played), gpus))


def test_many_actors_may_share_a_gpu_and_there_may_be_no_gpu():
    assert launcher._shares(["trainer", "generator"], 0) == [0, 0]
    for actors, gpus in ((8, 1), (9, 1), (40, 2)):
        shares = launcher._shares(["generator"] * actors, gpus)
        assert min(shares) > 0 and len(packed(shares, gpus)) == actors


def test_ray_puts_no_two_actors_of_a_role_on_one_gpu():
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    class Asked:
        def gpus(self):
            return ray.get_gpu_ids()

    # Ray does not check that these GPUs exist.
    ray.init(address="local", num_cpus=1, num_gpus=2, include_dashboard=False, log_to_driver=False)
    try:
        for played in (
            ["trainer", "trainer_rank", "draft_adapter"],
            ["trainer", "trainer_rank", "generator", "generator"],
        ) * 2:
            group = placement_group([{"GPU": 2}])
            asked: list = []
            actors = [
                launcher._ask(Asked, ray_group.within(group, 0), share, asked, lambda: False)
                for share in launcher._shares(played, 2)
            ]
            found = ray.get([actor.gpus.remote() for actor in actors], timeout=60)
            assert all(len(gpus) == 1 for gpus in found) and apart(played, [gpu for (gpu,) in found])
            for actor in actors:
                ray.kill(actor)
            remove_placement_group(group)
    finally:
        ray.shutdown()


def test_an_actor_may_move_to_a_gpu_outside_the_group_if_one_is_free():
    import ray
    from ray.util.placement_group import placement_group

    class Asked:
        def gpus(self):
            return ray.get_gpu_ids()

    ray.init(address="local", num_cpus=1, num_gpus=2, include_dashboard=False, log_to_driver=False)
    try:
        ray.get((group := placement_group([{"GPU": 1}])).ready())
        here = ray.get_runtime_context().get_node_id()
        assert ray_group.with_free_gpu() == ray_group.with_free_gpu(here) == here
        assert ray_group.with_free_gpu("another node") == ""
        where = (ray_group.within(group, 0), ray_group.on(here))
        both = [launcher._ask(Asked, place, 1, [], lambda: False) for place in where]
        [first], [moved] = ray.get([actor.gpus.remote() for actor in both], timeout=60)
        assert first != moved and ray_group.with_free_gpu() == ""
    finally:
        ray.shutdown()


def test_a_missing_ray_package_gives_one_line(tmp_path):
    without = (
        "import sys; sys.modules['ray'] = None; from asyncspec.cli import main; "
        "sys.exit(main(['train', '--launcher', 'ray']))"
    )
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        'asyncspec: --launcher ray: ray is not installed; expected pip install -e ".[ray]"\n',
    )


def test_the_doctor_has_every_node_of_a_cluster_check_itself(tmp_path, cluster):
    command = [sys.executable, "-m", "asyncspec", "doctor", "--launcher", "ray"]
    environment = os.environ | {"RAY_ADDRESS": cluster.address}

    def doctor(layout):
        done = subprocess.run(
            [*command, f"deployment.nodes={layout}"],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout + done.stderr

    code, said = doctor("trainer+logprob,generator")
    assert code == 0 and "all checks passed" in said and "3 nodes have the same versions" in said, said
    assert len(re.findall(r"[+-]\d+\.\d ms", said)) == 3 and "nothing" in said, said
    code, said = doctor("trainer+logprob,3*generator")
    assert code == 1 and "WRONG 3 nodes; expected 4, as in deployment.nodes" in said, said

"""The sections of a configuration that say where and how a run's actors live: deployment, and mock for mocked GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from asyncspec.config.fields import knob


@dataclass
class MockConfig:
    time_scale: float = knob(
        0.05, "real seconds per simulated second; all other mock times are in simulated seconds", above=0
    )
    gpus: int = knob(8, "GPUs that one generator simulates", least=1)
    token_s: float = knob(
        0.003, "seconds a GPU needs to read the weights in one decoding step; each sequence adds mock.row_s", above=0
    )
    row_s: float = knob(0.0001, "seconds that each sequence adds to a decoding step of its GPU", least=0)
    acceptance: float = knob(2.77, "tokens that a verification emits on average (acceptance length)", above=0)
    draft_length: int = knob(3, "k, tokens proposed per verification; 0: no speculation", least=0)
    draft_share: float = knob(
        0.266, "time that each proposed token adds to a decoding step, as a share of the step", least=0
    )
    tokens_median: float = knob(6000.0, "median tokens of a response; lengths are log-normal", above=0)
    tokens_sigma: float = knob(0.6, "standard deviation of the logarithm of a response's tokens", above=0)
    tokens_max: int = knob(20480, "tokens after which a response is truncated", least=1)
    token_unit: int = knob(64, "one real token is sent for this many simulated ones", least=1)
    logprob_s: float = knob(17.9, "seconds that logprob takes for all groups of a step", least=0)
    train_s: float = knob(31.4, "seconds that the trainer takes for all groups of a step", least=0)
    prepare_s: float = knob(2.1, "seconds from a version's publication to its arrival in the generators", least=0)
    weights: int = knob(100_000, "elements of the weights that are really broadcast", least=1, most=10**9)


@dataclass
class DeploymentConfig:
    generators: int = knob(1, "number of generator actors, each of engine.tensor_parallel processes", least=1)
    logprobs: int = knob(
        1, "number of logprob actors, each of logprob.ranks processes; groups are dealt to them round-robin", least=1
    )
    nodes: str = knob(
        "",
        "actors of each node, for example 4*trainer:4+logprob:4,12*generator:8 (16 nodes); sets the numbers of actors "
        "and trainer ranks; empty: the launcher places the actors",
    )
    device: str = knob(
        "auto",
        "where actors compute; auto: on GPUs if there are any, else on the CPU; GPUs are dealt to the actors in turn",
        choices=("auto", "cpu", "cuda"),
    )
    host: str = knob(
        "auto",
        "address that this host's actors bind to; auto: loopback, or the address at which other hosts reach this one",
    )
    ports: str = knob(
        "",
        "ports that actors listen on, FIRST-LAST, for sites with a firewall between nodes; gloo and NCCL choose "
        "theirs by themselves; empty: any free port",
    )
    replacements: int = knob(
        8,
        "draft adapters, generators and one-rank logprob actors that a launcher replaces before all actors restart",
        least=0,
    )
    restarts: int = knob(
        3,
        "times that all actors may restart from the last checkpoint, after one that cannot be replaced died or failed",
        least=0,
    )
    standby: int = knob(
        1, "Ray only: spare processes per node with all libraries loaded, ready to replace a dead actor", least=0
    )
    encrypt: bool = knob(
        True, "encrypt the actors' sockets with keys made for the run; peers without the keys cannot connect"
    )
    start_timeout_s: float = knob(
        120.0,
        "seconds an actor may take to start, besides loading the policy, and again to join the broadcast groups",
        above=0,
    )
    stall_timeout_s: float = knob(
        300.0, "seconds without any progress after which the run stops and reports what it waited for", above=0
    )
    silent_timeout_s: float = knob(
        5.0, "seconds without a heartbeat after which a process counts as frozen, is killed and is replaced", least=1
    )
    turn_timeout_s: float = knob(
        180.0,
        "seconds one turn of an actor's main loop may take; an actor that takes longer counts as stuck and is killed",
        above=0,
    )
    stop_timeout_s: float = knob(
        20.0,
        "seconds that an interrupted run may take to stop, besides writing its checkpoint; then its processes are "
        "killed",
        above=0,
    )
    disk_mb_s: float = knob(
        0.0,
        "megabytes per second at which run_dir is written; deadlines of work that grows with the policy follow from "
        "it; 0: measured at the start",
        least=0,
    )
    record: bool = knob(True, "record the actors' activities over time in trace.json")
    faults: str = knob(
        "",
        "faults to inject, for tests of recovery: actor:place:count:kind, separated by commas; "
        "docs/reference/faults-and-delays.md lists the places and kinds; empty: none",
    )
    delays: str = knob(
        "",
        "delays to inject, for tests of the time measurement: place=seconds or actor:place=seconds, separated by "
        "commas; places: generate, reward, queue, logprob, broadcast, train, checkpoint, export; empty: none",
    )

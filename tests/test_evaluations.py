"""Evaluations beside training: the order of tickets, what is due, what a resumed run repeats, and the files."""

import json

import msgspec
import pytest
import torch
from groups import ticket_of
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.actors.base import ActorSpec
from asyncspec.actors.evaluations import Evaluations, due, missing
from asyncspec.actors.generator import Generator, _OpenGroup
from asyncspec.actors.pending import TRAINING_SHARE, Pending
from asyncspec.config import Config, load, to_yaml
from asyncspec.engine.protocol import Completion
from asyncspec.files import LineFiles
from asyncspec.ledger.evaluations import FILE, EvaluationFile
from asyncspec.wire import messages as m


def ticket(number, samples=1, evaluation=False, version=0, eval_set=""):
    made = ticket_of(number, seeds=range(samples), step=version)
    return msgspec.structs.replace(made, evaluation=evaluation, eval_set=eval_set)


def pending(training, evaluations, samples=1):
    found = Pending()
    for number in range(evaluations):
        found.add(ticket(1000 + number, samples, True))
    for number in range(training):
        found.add(ticket(number, samples))
    return found


def taken(found, count, **how):
    return [one.ticket_id if (one := found.take(**how)) is not None else None for _ in range(count)]


def test_training_goes_first_and_an_evaluation_gets_its_share_meanwhile():
    order = taken(pending(12, 3), 15)
    assert [number for number in order if number < 1000] == list(range(12))
    assert order[:5] == [0, 1, 2, 1000, 3]
    assert sorted(number for number in order if number >= 1000) == [1000, 1001, 1002]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(20, 60))
def test_the_share_is_of_samples_whatever_the_tickets_have(training, evaluation, count):
    found = Pending()
    for number in range(count):
        found.add(ticket(1000 + number, evaluation, True))
        found.add(ticket(number, training))
    sent = {True: 0, False: 0}
    while found._training and found._evaluation:
        one = found.take(room=False)
        sent[one.evaluation] += len(one.seeds)
        # it may run behind by a ticket of each kind, and never ahead
        assert 0 <= sent[False] - TRAINING_SHARE * sent[True] < TRAINING_SHARE * evaluation + training


def test_an_evaluation_alone_is_sent_where_there_is_room():
    found = pending(0, 2)
    assert found.take(room=False) is None and taken(found, 3) == [1000, 1001, None] and not found


def test_exact_evaluations_go_before_training():
    assert taken(pending(3, 2), 5, first=True) == [1000, 1001, 0, 1, 2]


def test_lost_tickets_go_before_those_of_their_kind():
    found = pending(2, 1)
    found.add_again([ticket(7), ticket(5), ticket(900, evaluation=True)])
    assert [one.ticket_id for one in found] == [5, 7, 0, 1, 900, 1000]


@pytest.mark.parametrize(
    "every, version, done, expected",
    [
        (5, 0, [], True),  # a new run
        (5, 10, [(0, 0), (5, 6), (10, 10)], False),  # complete
        (5, 10, [(0, 0), (5, 6)], True),
        (5, 12, [(0, 0), (5, 6)], True),  # that of version 10 was cut short
        (5, 12, [(0, 0), (10, 11)], False),
        (5, 7, [(0, 0), (6, 7)], False),  # that of version 5, which version 6 sampled
        (0, 7, [(0, 0)], False),
        (0, 7, [], True),
        (0, 9, [(0, 0)], True),  # the last version
    ],
)
def test_a_resumed_run_evaluates_if_an_evaluation_is_missing(every, version, done, expected):
    config = Config(steps=9 if not every else 100)
    config.eval.every = every
    found = [{"eval/policy_version": oldest, "eval/policy_version_max": newest} for oldest, newest in done]
    assert missing(config, version, found) is expected


def test_the_first_the_last_and_every_few_versions_are_evaluated():
    config = Config(steps=12)
    config.eval.every = 5
    assert [version for version in range(13) if due(config, version)] == [0, 5, 10, 12]


def fields(oldest, newest, score=0.5):
    return {"eval/score": score, "eval/policy_version": oldest, "eval/policy_version_max": newest}


def test_results_are_kept_until_a_rewind_undoes_a_version_that_sampled(tmp_path):
    files = LineFiles(tmp_path, pytest.fail)
    first = EvaluationFile(files, 0)
    for versions in ((0, 0), (4, 6), (8, 8)):
        first.write(fields(*versions))
    first.close()
    with open(tmp_path / FILE, "a") as file:
        file.write('{"eval/score": 0.')  # torn by a crash
    again = EvaluationFile(files, 7)
    assert [found["eval/policy_version"] for found in again.found] == [0, 4]
    again.write(fields(7, 7))
    again.close()
    assert [json.loads(line)["eval/policy_version"] for line in open(tmp_path / FILE)] == [0, 4, 7]
    assert EvaluationFile(files, 5).found == [fields(0, 0)]
    assert EvaluationFile(files, 0).found == [fields(0, 0)]


def test_an_evaluation_has_its_sets_and_says_which_versions_sampled():
    config = load("tiny", ["eval.samples=2"])
    evaluations = Evaluations(config)
    tickets = [ticket(i, 2, True, 5, name) for i, name in enumerate(("easy", "easy", "hard"))]
    evaluations.begin(5, tickets)
    assert evaluations.add(tickets[2], m.EvalDone(2, [0.0, None], 6, 7)) is None
    assert evaluations.add(tickets[0], m.EvalDone(0, [1.0, 0.0], 5, 5)) is None and evaluations
    found, rollouts = evaluations.add(tickets[1], m.EvalDone(1, [1.0, 1.0], 5, 6))
    assert rollouts == 6 and not evaluations
    assert (found["eval/easy/score"], found["eval/hard/score"], found["eval/score"]) == (0.75, 0.0, 0.5)
    assert (found["eval/easy/pass@2"], found["eval/hard/pass@2"], found["eval/failed"]) == (1.0, None, 1)
    assert (found["eval/policy_version"], found["eval/policy_version_max"]) == (5, 7)


class Rewarded:
    """A rewarder one of whose rewards failed."""

    failed, first_failure = 0, ""

    def found(self):
        return [(0, [1.0, None, 0.0])]


@pytest.mark.parametrize("evaluation, expected", [(True, [1.0, None, 0.0]), (False, [1.0, 0.5, 0.0])])
def test_a_failed_reward_is_no_sample_of_an_evaluation_and_teaches_nothing_in_training(evaluation, expected):
    generator, sent = Generator(ActorSpec("generator", "generator0", "", to_yaml(load("tiny")))), []
    numbers = torch.zeros(1, dtype=torch.int32)
    done = [Completion(0, i, numbers, numbers.float(), numbers, False, 1, 0, 0, 0.0) for i in range(3)]
    generator.rewarder, generator.rewarding = Rewarded(), {0: _OpenGroup(ticket(0, 3, evaluation), 0.0, 0.0, done)}
    generator._send = sent.append
    generator._send_rewarded()
    assert [group.rewards for group in sent] == [expected]


class Weights:
    """A receiver that has a newer version."""

    def __init__(self):
        self.complete = [1]

    def check(self):
        pass

    def take(self, version):
        self.complete.remove(version)
        return version, {}


@pytest.mark.parametrize("exact, evaluation, taken", [(True, True, 0), (True, False, 1), (False, True, 1)])
def test_new_weights_wait_for_the_groups_of_an_exact_evaluation(exact, evaluation, taken):
    generator, loaded = (
        Generator(ActorSpec("generator", "generator0", "", to_yaml(load("tiny", [f"eval.exact={exact}"])))),
        [],
    )

    class Engine:
        def load_policy(self, tensors, version):
            loaded.append(version)

    generator.engine, generator.receivers = Engine(), {"policy": Weights()}
    generator.open_groups = {0: _OpenGroup(ticket(0, 1, evaluation), 0.0, 0.0)}
    generator._swap_weights()
    assert len(loaded) == taken
    generator.open_groups.clear()
    generator._swap_weights()
    assert loaded == [1]

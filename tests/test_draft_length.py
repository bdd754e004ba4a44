"""The draft length that is chosen for each step: the one that pays, found out at little cost."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.speculation import draft_length
from asyncspec.speculation.calibration import calibration
from asyncspec.speculation.draft_length import LONGEST, AutoLength, Emitted, Survival
from asyncspec.speculation.drafter import Slots
from asyncspec.speculation.lookup_length import LookupLength


def costs(*seconds):
    """Of a step of each draft length, float [LONGEST + 2]: the first, then as many more as it takes, each longer as the
    last two differ; drafts cost nothing, and what is read of them alone.
    """
    return np.array(
        [
            *seconds,
            *(seconds[-1] + (seconds[-1] - seconds[-2]) * n for n in range(1, LONGEST + 2 - len(seconds))),
            seconds[-1],
        ]
    )


def observe(lengths, k, seconds, kept_B, run_B, **more):
    """Tell of a step, and go on with the runs of its rows."""
    lengths.observe(len(kept_B), k, seconds, kept_B, run_B[: len(kept_B)].copy(), **more)
    run_B[: len(kept_B)] = np.where(kept_B == k, run_B[: len(kept_B)] + k + 1, 0) if k else 0


def none(live):
    """Rows that have emitted nothing."""
    return np.zeros(live, dtype=np.int64)


@pytest.mark.parametrize("acceptance,best", [(0.0, 0), (0.95, LONGEST), (0.6, 3)])
def test_auto_learns_which_length_pays(acceptance, best):
    seconds = np.array([costs(1.0, 1.3, 1.4)] * 2)
    lengths, rng = AutoLength([1, 64], seconds * 1e-3), np.random.default_rng(0)
    chosen, run_B = [], none(8)
    for _ in range(4000):
        k = lengths.choose(8)
        kept = (rng.random((8, LONGEST)) < acceptance).cumprod(1)[:, :k].sum(1)
        chosen.append(k)
        observe(lengths, k, seconds[0, k] * 1e-3 * rng.lognormal(0, 0.05), kept, run_B)
    late = np.array(chosen[2000:])
    rate = (1 + np.cumsum(acceptance ** np.arange(1, LONGEST + 1))) / seconds[0, 1:-1]
    rate = np.concatenate([[1 / seconds[0, 0]], rate])
    assert int(rate.argmax()) == best
    time_spent, tokens = seconds[0, late].sum(), (rate[late] * seconds[0, late]).sum()
    assert tokens / time_spent > 0.98 * rate.max()  # what it explores included
    assert (late != best).any()  # it goes on looking


@pytest.mark.parametrize("scale", [1e-3, 2.0])  # of a step's seconds
@pytest.mark.parametrize("first", [1.3, 1.8])  # what the first proposal costs
def test_auto_finds_out_that_a_draft_has_become_good(scale, first):
    seconds = np.array([costs(1.0, first, first + 0.1)] * 2)
    lengths, rng = AutoLength([1, 64], seconds * scale), np.random.default_rng(0)
    chosen, run_B = [], none(8)
    for step in range(16000):
        k = lengths.choose(8)
        kept = (rng.random((8, LONGEST)) < (0.0 if step < 3000 else 0.9)).cumprod(1)[:, :k].sum(1)
        chosen.append(k)
        observe(lengths, k, seconds[0, k] * scale, kept, run_B)
    assert np.mean(np.array(chosen[2000:3000]) > 0) < 0.05
    assert np.mean(np.array(chosen[15000:]) >= 3) > 0.9


def test_auto_finds_out_also_while_the_number_of_live_sequences_never_stays():
    seconds = np.array([costs(1.0, 1.3, 1.4)] * 2) * 1e-3
    lengths, rng, chosen, run_B = AutoLength([1, 64], seconds), np.random.default_rng(0), [], none(16)
    for step in range(8000):
        live = int(rng.integers(8, 17))
        k = lengths.choose(live)
        chosen.append(k)
        observe(
            lengths,
            k,
            seconds[0, k],
            (rng.random((live, LONGEST)) < (0.0 if step < 3000 else 0.9)).cumprod(1)[:, :k].sum(1),
            run_B,
        )
    assert np.mean(np.array(chosen[2000:3000]) > 0) < 0.01
    assert np.mean(np.array(chosen[7000:]) >= 3) > 0.9


@pytest.mark.parametrize("left", [4, 12, 400])
def test_auto_knows_that_rows_end(left):
    """With at most `left` tokens left of each row, evenly spread, what a longer draft would emit behind the end is not
    counted, and not paid for either.
    """
    first, drafted, each = 1.0, 0.05, 0.1  # seconds of a verification, of each proposal, and of each that is read
    rng = np.random.default_rng(0)
    seconds = np.array(
        [first + (drafted + each) * k for k in range(LONGEST + 1)] + [first + (drafted + each / 2) * LONGEST]
    )
    lengths, run_B = AutoLength([1, 64], np.array([seconds] * 2) * 1e-3), none(8)
    for _ in range(4000):
        k = lengths.choose(8)
        found_B = np.minimum(k, rng.integers(1, left + 1, 8) - 1)
        kept_B = np.minimum((rng.random((8, LONGEST)) < 0.97).cumprod(1)[:, :k].sum(1), found_B)
        observe(
            lengths,
            k,
            (first + drafted * k + each * found_B.mean() if k else first) * 1e-3,
            kept_B,
            run_B,
            found_B=found_B if k else None,
        )
    spent = np.array(lengths._costs(8)) / lengths._costs(8)[0]
    assert lengths._emitted()[3] == pytest.approx(
        1 + sum(0.97**j * max(0, 1 - j / left) for j in range(1, 4)), rel=0.05
    )
    assert spent[3] == pytest.approx(
        first + 3 * drafted + each * sum(max(0, 1 - j / left) for j in range(1, 4)), rel=0.05
    )


def test_auto_stands_thousands_of_rows_of_which_none_is_accepted():
    lengths = AutoLength([1, 64], np.full((2, LONGEST + 2), 1e-3))
    for _ in range(2000):
        lengths.choose(5000)
        lengths.observe(5000, 3, 1e-3, none(5000), none(5000))
    assert lengths._emitted()[1] == pytest.approx(1.0, abs=1e-3)


def test_a_position_not_tried_is_taken_for_like_those_before_it():
    survival = Survival(4, 0.3)
    # 3 in 4 go beyond the first, all of those further
    survival.add(none(1024), np.tile([1, 2, 2, 2], 256), np.tile([True, False, False, False], 256), 4096)
    # 1 in 7 ended of those before
    assert survival.beyond() == pytest.approx([0.75, 0.75, 0.75 * 6 / 7, 0.75 * 36 / 49], rel=0.02)
    survival.add(none(512), np.full(512, 3), np.tile([True, False], 256), 4096)  # of those behind the second half
    assert survival.beyond()[3] == pytest.approx(survival.beyond()[2] / 2, rel=0.02)


TEXT = 100000  # tokens


def simulated(keeps, k):
    """Verifications of k proposals each along a text: tokens of a run before each, and proposals kept. keeps(at): of
    those at `at`.
    """
    run_V, kept_V, run, at = [], [], 0, 0
    while at < TEXT:
        kept = min(k, keeps(at))
        run_V.append(run)
        kept_V.append(kept)
        run, at = run + k + 1 if kept == k else 0, at + kept + 1
    return np.array(run_V), np.array(kept_V)


@pytest.mark.parametrize("held", [1, 3, 7, LONGEST])
def test_what_one_length_emits_tells_of_all_where_tokens_are_hard_wherever_a_draft_begins(held):
    """In easy stretches one token in fifty is hard, in others one in four."""
    rng = np.random.default_rng(0)
    hard_at = np.append(
        np.flatnonzero(rng.random(TEXT) < np.repeat(np.where(rng.random(TEXT // 40) < 0.5, 0.02, 0.25), 40)), TEXT
    )
    next_hard, emitted = hard_at[np.searchsorted(hard_at, np.arange(TEXT))], Emitted()
    emitted.add(*simulated(lambda at: int(next_hard[at]) - at, held), held, 10**9)
    for k, tokens in enumerate(emitted.tokens()):
        true = 1 + simulated(lambda at: int(next_hard[at]) - at, k)[1].mean()
        assert tokens == pytest.approx(true, rel=0.01 if k == held else 0.03 if k < held else 0.1), k


@pytest.mark.parametrize("held", [1, 3, 7, LONGEST])
def test_what_one_length_emits_tells_of_all_where_only_the_place_in_the_draft_counts(held):
    rng, acceptance_J = np.random.default_rng(0), np.array([0.7 - 0.03 * j for j in range(LONGEST)])

    def keeps(at):
        return int((rng.random(LONGEST) < acceptance_J).cumprod().sum())

    emitted = Emitted()
    emitted.add(*simulated(keeps, held), held, 10**9)
    for k, tokens in enumerate(emitted.tokens()):
        true = 1 + acceptance_J[:k].cumprod().sum()
        assert tokens == pytest.approx(true, rel=0.02 if k == held else 0.08 if k < held else 0.2), k


def test_features_are_kept_only_to_try_and_auto_still_finds_out():
    seconds = np.array([costs(1.0, 1.3, 1.4)] * 2) * 1e-3
    lengths, rng, chosen, kept, run_B = AutoLength([1, 64], seconds), np.random.default_rng(0), [], [], none(8)
    missed_B = np.zeros(8, dtype=bool)
    for step in range(16000):
        chosen.append(k := lengths.choose(8, missed_B))
        kept.append(k > 0 or lengths.keeps)
        missed_B |= not kept[-1]
        kept_B = (rng.random((8, LONGEST)) < (0.0 if step < 8000 else 0.9)).cumprod(1)[:, :k].sum(1)
        if k and step < 8000 and 2000 < step:
            assert missed_B.sum() <= 4
        observe(lengths, k, seconds[0, k], kept_B[~missed_B] if k else kept_B, run_B)
        missed_B &= rng.random(8) > 1 / 50  # a sequence ends, another takes its row
    assert 0.005 < np.mean(kept[2000:8000]) < 0.4
    assert 0 < np.mean(np.array(chosen[2000:8000]) > 0) < 0.01
    assert np.mean(np.array(chosen[12000:]) >= 3) > 0.9


def test_what_is_tried_is_judged_by_rows_that_miss_nothing():
    lengths = AutoLength([1, 64], np.full((2, LONGEST + 2), 1e-3))
    missed_B, kept_B = np.array([True, False, False, False]), np.array([0, 3, 3, 3])
    lengths._exploring = True
    lengths._live = 4
    lengths.observe(4, 3, 1e-3, kept_B, none(4), None, True, missed_B)
    assert [step[2].tolist() for step in lengths._seen] == [[3, 3, 3]]


def test_a_length_that_costs_more_than_can_be_saved_up_is_tried_all_the_same():
    seconds, rng, chosen = np.array([costs(1.0, 2.3, 3.2, 3.4)] * 2) * 0.06, np.random.default_rng(0), []
    lengths, run_B = AutoLength([1, 64], seconds), none(8)
    for step in range(40000):
        chosen.append(k := lengths.choose(8))
        observe(
            lengths,
            k,
            seconds[0, k],
            (rng.random((8, LONGEST)) < (0.0 if step < 10000 else 0.95)).cumprod(1)[:, :k].sum(1),
            run_B,
        )
    assert np.mean(np.array(chosen[35000:]) >= 5) > 0.9


@given(st.integers(0, 2**32 - 1), st.floats(0.0, 0.5))
def test_a_calibration_without_noise_is_taken_as_it_is(seed, bend):
    """Straight or not; the rounds may differ in the machine's speed."""
    lengths, rng = [0, 1, 2, 3, 5, LONGEST], np.random.default_rng(seed)
    seconds = np.array([1.0, *(2.0 + 0.3 * k + bend * max(0, k - 3) for k in lengths[1:]), 7.0])
    speeds = rng.uniform(0.5, 2.0, 7)
    result = calibration(lengths, speeds[:, None] * seconds) / np.median(speeds)
    assert np.allclose(result[[*lengths, -1]], seconds) and len(result) == LONGEST + 2


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0, 30.0]), min_size=6, max_size=6), min_size=2, max_size=6))
def test_a_calibration_gives_times_whatever_disturbs_it(rounds):
    result = calibration([0, 1, 2, 3, 5, LONGEST], np.array(rounds))
    assert np.isfinite(result).all() and (result > 0).all()


def test_a_calibration_leaves_less_of_the_noise_than_its_medians_do():
    lengths, rng, before, after = [0, 1, 2, 3, 5, LONGEST], np.random.default_rng(0), [], []
    seconds = np.array([1.0, *(2.0 + 0.3 * k for k in lengths[1:])])
    for _ in range(400):
        rounds = seconds * rng.lognormal(0.0, 0.05, (6, len(lengths))) * rng.lognormal(0.0, 0.3, (6, 1))
        medians, result = np.median(rounds, 0), calibration(lengths, rounds)
        before.append(np.log(medians[5] / medians[4] / (seconds[5] / seconds[4])))
        after.append(np.log(result[LONGEST] / result[5] / (seconds[5] / seconds[4])))
    assert np.std(after) < 0.6 * np.std(before), (np.std(after), np.std(before))


# by what factor a calibration errs
@pytest.mark.parametrize(
    "wrong", [{2: 1.25}, {2: 1.15, 1: 0.95}, {2: 1.1, 1: 0.85}, {2: 1.15, 3: 0.9}, {3: 0.8}], ids=str
)
def test_a_calibration_that_was_wrong_is_found_out_within_hundreds_of_steps(wrong):
    seconds = costs(1.0, 1.4, 1.6) * 3e-3
    # k=2 pays best: 8% more than k=1, 4% more than k=3
    acceptance, late = (0.66, 0.61, 0.42, *[0.4] * (LONGEST - 3)), []
    emitted = np.concatenate([[1.0], 1 + np.cumprod(acceptance).cumsum()])
    for seed in range(20):
        lengths, rng, chosen = (
            AutoLength([1, 64], np.array([[s * wrong.get(k, 1.0) for k, s in enumerate(seconds)]] * 2)),
            np.random.default_rng(seed),
            [],
        )
        run_B = none(16)
        for _ in range(600):
            chosen.append(k := lengths.choose(16))
            observe(
                lengths,
                k,
                seconds[k] * rng.lognormal(0, 0.05),
                (rng.random((16, LONGEST)) < acceptance).cumprod(1)[:, :k].sum(1),
                run_B,
            )
        # tries included
        late.append(emitted[chosen[-200:]].sum() / seconds[chosen[-200:]].sum() / max(emitted / seconds[:-1]))
    assert np.mean(late) > 0.985 and min(late) > 0.95, late


def test_a_calibration_in_which_no_speculation_is_the_slower_does_not_keep_a_useless_draft():
    seconds, wrong = costs(1.0, 1.2, 1.3, 1.45) * 0.033, np.array([1.37, 1.0, 1.0, 0.72, 0.86, *[1.0] * (LONGEST - 3)])
    for seed in range(10):  # as it was measured on a processor that was shared
        lengths, rng, spent = AutoLength([1, 64], np.array([seconds * wrong] * 2)), np.random.default_rng(seed), []
        run_B = none(64)
        for _ in range(1500):
            k = lengths.choose(64)
            spent.append(seconds[k])
            observe(
                lengths,
                k,
                seconds[k] * rng.lognormal(0, 0.05),
                (rng.random((64, LONGEST)) < 0.02).cumprod(1)[:, :k].sum(1),
                run_B,
            )
        assert np.mean(spent[500:]) < 1.01 * seconds[0]


@pytest.mark.parametrize("wrong", [{1: 0.7, 2: 1.2, 3: 1.1, 4: 1.1, 5: 1.2}, {3: 0.75}], ids=str)
def test_what_was_calibrated_too_fast_does_not_stay_because_all_others_seem_slow_beside_it(wrong):
    seconds, late = costs(1.0, 1.45, 1.7) * 6e-3, []
    emitted = np.concatenate([[1.0], 1 + (0.93 ** np.arange(1, LONGEST + 1)).cumsum()])
    for seed in range(30):
        lengths, rng, chosen = (
            AutoLength([1, 64], np.array([[s * wrong.get(k, 1.0) for k, s in enumerate(seconds)]] * 2)),
            np.random.default_rng(seed),
            [],
        )
        run_B = none(1)
        for _ in range(300):
            chosen.append(k := lengths.choose(1))
            observe(
                lengths,
                k,
                seconds[k] * rng.lognormal(0, 0.05),
                (rng.random((1, LONGEST)) < 0.93).cumprod(1)[:, :k].sum(1),
                run_B,
            )
        late.append(emitted[chosen[100:300]].sum() / seconds[chosen[100:300]].sum() / max(emitted / seconds[:-1]))
    assert min(late) > 0.95, late


@given(
    st.lists(
        st.tuples(st.integers(0, LONGEST), st.integers(0, LONGEST), st.floats(-0.05, 0.05), st.integers(1, 8)),
        min_size=1,
        max_size=12,
    )
)
def test_comparisons_correct_a_calibration_by_bayes_rule(compared):
    """That of errors that are normal and independent, of the calibration and of the comparisons; beside what was held
    last.
    """
    compared = [one for one in compared if one[0] != one[1]]
    seconds = np.linspace(1.0, 3.0, LONGEST + 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_length, "FORGETTING", 0.0)
        lengths = AutoLength([1, 64], np.array([seconds] * 2))
        bucket = lengths._bucket(8)
        for entry, beside, log_ratio, steps in compared:
            row = lengths._table[bucket]
            level = row[beside] / seconds[beside]  # a table tells only how entries compare
            lengths._correct(bucket, entry, seconds[entry] * np.exp(log_ratio) * level, steps, 1.0, beside)
    eye = np.eye(LONGEST + 2)
    compared_NE = np.array([eye[entry] - eye[beside] for entry, beside, *_ in compared]).reshape(-1, LONGEST + 2)
    weight_N = np.array([steps / draft_length.CALIBRATED_STEPS for *_, steps in compared])
    covariance_EE = np.linalg.inv(eye + compared_NE.T @ (weight_N[:, None] * compared_NE))
    error_E = covariance_EE @ compared_NE.T @ (weight_N * np.array([log_ratio for _, _, log_ratio, _ in compared]))
    found_E = np.log(np.array(lengths._table[bucket]) / seconds)
    assert found_E - found_E[0] == pytest.approx(error_E - error_E[0], abs=1e-9)
    assert lengths._deviations(bucket, 5)[3] == pytest.approx(
        np.sqrt((eye[3] - eye[5]) @ covariance_EE @ (eye[3] - eye[5])), abs=1e-9
    )


@given(st.lists(st.floats(0.1, 10), min_size=LONGEST + 1, max_size=LONGEST + 2))
def test_a_calibration_is_read_as_the_nearest_times_that_rise_with_the_draft(measured):
    found = AutoLength([1], np.array([measured]))._seconds(1)
    rising, asked = np.array(found[: LONGEST + 1]), np.array(measured[: LONGEST + 1])
    assert (np.diff(rising) >= -1e-9).all() and all(s >= found[0] for s in found[LONGEST + 1 :])
    np.testing.assert_allclose(rising.sum(), asked.sum())
    # The projection onto a convex cone: what is left is orthogonal to it, and turned away from all that rises.
    np.testing.assert_allclose((asked - rising) @ rising, 0, atol=1e-6)
    assert all((asked - rising)[j:].sum() <= 1e-6 for j in range(LONGEST + 1))


def test_what_is_read_of_drafts_costs_what_was_measured_however_much_that_was():
    """A step takes 1, 0.1 for each proposal that is made, 0.2 for each that is read."""
    for usual in (1.0, 0.8):
        read_K = np.array([*(usual * k for k in range(LONGEST + 1)), LONGEST * usual / 2])
        seconds = 1 + 0.1 * np.array([*range(LONGEST + 1), LONGEST]) + 0.2 * read_K
        lengths = AutoLength([1, 64], np.array([seconds] * 2), np.array([read_K] * 2))
        for left in (1.0, 0.5):  # of rows, that do not end before the third proposal
            lengths._read = draft_length.Survival(LONGEST, 0.0)
            lengths._read.add(
                none(4000), np.where(np.arange(4000) < 4000 * left, LONGEST, 3), np.arange(4000) >= 4000 * left, 10**9
            )
            for k, cost in enumerate(lengths._costs(8)):
                assert cost == pytest.approx(1 + 0.1 * k + 0.2 * (k if k < 3 else 2 + left * (k - 2)), rel=0.01), (
                    usual,
                    left,
                    k,
                )


def test_rows_attend_to_as_many_positions_as_the_longest_of_their_group_has():
    slots = Slots(6, 64, "cpu")
    slots.length_S[:5] = torch.tensor([10, 8, 3, 2, 40])
    assert slots.attended(4) == 10 and slots.attended(5) == 40
    slots.ends = [2]
    assert slots.attended(4) == (2 * 10 + 2 * 3) / 4 and slots.attended(2) == 10


@pytest.mark.parametrize("lookups", [False, True])
def test_positions_cost_what_each_token_takes_to_attend_to_them(lookups):
    """A step takes 1, 0.2 for each proposal, 0.001 for each token and position it attends to; calibrated with 50 of
    these, and 150.
    """

    def seconds(k, span):
        return 1 + 0.2 * k + 0.001 * (k + 1) * span

    calibrated = np.array(
        [[*(seconds(k, 50) for k in range(LONGEST + 1)), seconds(0, 50) if lookups else seconds(LONGEST, 50)]] * 2
    )
    farther = np.array([[seconds(LONGEST, 150), 150, 50]] * 2)
    read = np.array([[*range(LONGEST + 1), LONGEST - 1.0]] * 2)
    lengths = (
        LookupLength([1, 64], calibrated, True, farther) if lookups else AutoLength([1, 64], calibrated, read, farther)
    )
    for span in (50, 100, 400):
        lengths._span = span
        assert lengths._costs(8)[: LONGEST + 1] == pytest.approx([seconds(k, span) for k in range(LONGEST + 1)])
    # What a step took says of the table what it took less for its positions.
    lengths._live, lengths._best, bucket = 8, 3, lengths._bucket(8)
    found = [np.full(8, 3)] * 8
    lengths._learn_from(
        [3] * 8, [2 * seconds(3, 400)] * 8, [np.full(8, 3)] * 8, found, [True] * 8, [none(8)] * 8, [400] * 8
    )
    lengths._span = 50
    assert lengths._drift[bucket] == pytest.approx(2.0 ** (1 - 0.9**8), rel=1e-6)


def test_lookups_are_made_while_they_pay():
    seconds = np.array([[*costs(1.0, 1.3, 1.4)[:-1], 1.1]] * 2) * 1e-3
    lengths, rng, chosen = LookupLength([1, 64], seconds, False), np.random.default_rng(0), []
    for step in range(8000):
        # Good, then no more, then told to be good again, which it is not.
        good, told = 2000 <= step < 4000, 2000 <= step < 4000 or step >= 6000
        if step % 10 == 0:  # finished rollouts tell now and then, looked up or not
            count_R = (rng.random(100) < 0.5) * 3
            lengths.learn(count_R, count_R * told)
        chosen.append(k := lengths.choose(4))
        found_B = np.minimum((rng.random(4) < 0.5) * 3, k)
        lengths.observe(
            4,
            k,
            seconds[0, found_B.max() or -1] if k else seconds[0, 0],
            found_B * good,
            none(4),
            found_B if k else None,
        )
    looked = (np.array(chosen) > 0).reshape(-1, 1000).mean(1)
    assert looked[1] < 0.05 and looked[3] > 0.95 and looked[5] < 0.05 and looked[7] < 0.2, looked
    assert np.mean(np.array(chosen)[3000:4000] >= 3) > 0.9  # no more than three are ever found


def test_looking_back_counts_the_verifications_of_each_length():
    """Three proposals always, all right but in every third response: a step of k emits min(k, 3) + 1 tokens, or 1."""
    lengths = LookupLength([1], np.arange(1.0, LONGEST + 3)[None], False)
    for kept in (3, 3, 0) * 3:
        lengths.learn(np.full(12, 3), np.full(12, kept))
    assert lengths._emitted() == pytest.approx(
        [1, *(3 / (1 + 2 / (min(k, 3) + 1)) for k in range(1, LONGEST + 1))], rel=0.05
    )
    assert lengths._costs(1) == pytest.approx([1, 2, 3, *[4] * (LONGEST - 2)])  # never more than three to verify


def test_the_more_rows_the_likelier_is_one_that_has_found_something():
    lengths = LookupLength([1, 4], np.tile([1.0, *[3.0] * LONGEST, 2.0], (2, 1)), False)
    lengths.learn(np.tile([0, 0, 0, 5], 64), np.zeros(256, dtype=np.int64))  # one in four
    for live in (1, 4):
        assert lengths._costs(live)[1:] == pytest.approx([2 + (1 - 0.75**live)] * LONGEST)


def test_where_rows_are_packed_as_much_is_read_as_they_have_found_together():
    seconds = np.array([[1.0, *(2.0 + m for m in range(1, LONGEST + 1)), 2.0]] * 2)
    lengths, rng = LookupLength([1, 8], seconds, True), np.random.default_rng(0)
    lengths.learn(np.tile([0, 0, 0, 4], 64), np.zeros(256, dtype=np.int64))  # one in four
    for live in (1, 8):
        assert lengths._costs(live)[1:] == pytest.approx([2 + min(k, 4) / 4 for k in range(1, LONGEST + 1)])
    for _ in range(400):  # no step finds anything that a whole number of proposals a row would be
        k, found_B = lengths.choose(8), np.minimum(rng.integers(0, 2, 8) * 4, 3)
        lengths.observe(8, k, 3 * (2 + found_B.mean() if k else 1.0), none(8), none(8), found_B if k else None)
    assert lengths._costs(8)[4] / lengths._costs(8)[0] == pytest.approx(3.0, rel=0.03)


def test_all_rows_attend_as_widely_as_the_one_that_has_found_most():
    """A step takes 1, 0.1 for each proposal that is read of a row on average, 0.001 for each position and place of the
    rectangle that holds them.
    """

    def seconds(read, widest, span):
        return 1 + 0.1 * read + 0.001 * (widest + 1) * span

    calibrated = np.array([[*(seconds(k, k, 50) for k in range(LONGEST + 1)), seconds(0, 0, 50)]] * 2)
    lengths = LookupLength([1, 64], calibrated, True, np.array([[seconds(LONGEST, LONGEST, 150), 150, 50]] * 2))
    lengths.learn(np.tile([0, 0, 0, 4], 64), np.zeros(256, dtype=np.int64))  # one in four
    lengths._span = 100
    for live in (1, 8):
        some = 1 - 0.75**live
        expected = [seconds(min(k, 4) / 4, some * min(k, 4), 100) for k in range(1, LONGEST + 1)]
        assert lengths._costs(live) == pytest.approx([seconds(0, 0, 100), *expected])
    # A step that took what is expected of it says that the table is right.
    lengths._live, lengths._best, found_B = 8, 7, np.array([7, *[0] * 7])
    lengths._learn_from(
        [7] * 8, [seconds(7 / 8, 7, 100)] * 8, [none(8)] * 8, [found_B] * 8, [True] * 8, [none(8)] * 8, [100] * 8
    )
    assert lengths._drift[lengths._bucket(8)] == pytest.approx(1.0)


def test_what_verifications_keep_corrects_what_looking_back_promises_position_by_position():
    lengths = LookupLength([1], np.arange(1.0, LONGEST + 3)[None], False)
    lengths.learn(np.full(1200, 3), np.full(1200, 3))  # three more are always right, it says
    assert lengths._emitted()[1:4] == pytest.approx([2, 3, 4], rel=0.01)
    lengths.choose(50)
    # the first is
    lengths._learn_from(
        [3] * 100,
        [1.0] * 100,
        [np.ones(50, dtype=np.int64)] * 100,
        [np.full(50, 3)] * 100,
        [True] * 100,
        [None] * 100,
        [None] * 100,
    )
    assert lengths._emitted() == pytest.approx([1, *[2] * LONGEST], abs=0.1)


def test_what_one_length_keeps_is_not_taken_for_what_another_would():
    """Every fourth token is never proposed. k=2 is wrong at every second first proposal, since it begins before that
    token; k=1 and k=3 never are.
    """
    lengths = LookupLength([1], np.arange(1.0, LONGEST + 3)[None], False)
    lengths.learn(np.full(1200, LONGEST), np.tile([3, 2, 1, 0], 300))
    lengths.choose(2)
    lengths._learn_from(
        [2] * 500,
        [1.0] * 500,
        [np.array([2, 0])] * 500,
        [np.full(2, 2)] * 500,
        [True] * 500,
        [None] * 500,
        [None] * 500,
    )
    assert lengths._emitted()[1:4] == pytest.approx([2, 2, 4], rel=0.05)


@pytest.mark.parametrize("seed", range(4))
def test_times_are_compared_whatever_slows_all_alike_for_a_while(seed):
    """As longer sequences do: steps get half as slow again within 100, then begin anew."""
    seconds = costs(1.0, 1.2) * 1e-3
    lengths, rng = AutoLength([1, 64], np.array([seconds] * 2)), np.random.default_rng(seed)
    held, run_B = np.zeros(LONGEST + 1), none(8)
    for step in range(20000):
        k = lengths.choose(8)
        held[k] += 1
        kept_B = (rng.random((8, LONGEST)) < 0.8).cumprod(1)[:, :k].sum(1)
        observe(lengths, k, seconds[k] * (1 + 0.5 * (step % 100) / 100), kept_B, run_B)
    row = np.array(lengths._seconds(8))
    often = np.flatnonzero(held > 100)
    assert len(often) >= 3
    assert row[often] / row[lengths._best] == pytest.approx(seconds[often] / seconds[lengths._best], rel=0.03)


@pytest.mark.parametrize("slower", [1.5, 2.0, 3.0])
def test_no_speculation_is_found_where_all_else_takes_longer_than_calibrated(slower):
    """All that is held then seems slow alike, as on a machine that became slow."""
    calibrated = costs(1.0, 1.3, 1.4) * 6e-3
    seconds = np.where(np.arange(len(calibrated)) > 0, slower, 1.0) * calibrated
    emitted = np.concatenate([[1.0], 1 + (0.6 ** np.arange(1, LONGEST + 1)).cumsum()])
    for seed in range(2):
        lengths, rng, chosen, run_B = (
            AutoLength([1, 64], np.array([calibrated] * 2)),
            np.random.default_rng(seed),
            [],
            none(8),
        )
        for _ in range(6000):
            chosen.append(k := lengths.choose(8))
            observe(
                lengths,
                k,
                seconds[k] * rng.lognormal(0, 0.05),
                (rng.random((8, LONGEST)) < 0.6).cumprod(1)[:, :k].sum(1),
                run_B,
            )
        assert emitted[chosen[5000:]].sum() / seconds[chosen[5000:]].sum() > 0.97 * max(emitted / seconds[:-1])

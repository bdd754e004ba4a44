"""The states of an actor's life, and the transitions between them."""

import pytest

from asyncspec.actors.crew import NEXT, ImpossibleTransition, Life, Member
from asyncspec.wire import messages as m

WAY = {  # the transitions that bring an actor into each state
    Life.STARTING: [],
    Life.UP: [Life.UP],
    Life.READY: [Life.UP, Life.READY],
    Life.CONDEMNED: [Life.CONDEMNED],
    Life.CUT_OFF: [Life.CONDEMNED, Life.CUT_OFF],
    Life.GIVEN_UP: [Life.CONDEMNED, Life.GIVEN_UP],
    Life.GONE: [Life.GONE],
}
LEGAL = {
    "starting": "up, condemned, gone",
    "up": "ready, condemned, gone",
    "ready": "condemned, gone",
    "condemned": "cut off, given up, gone",
    "cut off": "starting, up, ready, given up, gone",
    "given up": "",
    "gone": "",
}


@pytest.mark.parametrize("to", Life)
@pytest.mark.parametrize("life", Life)
def test_an_actor_makes_only_the_transitions_in_the_table(life, to):
    member = Member("generator0", "generator")
    for state in WAY[life]:
        member.transition(state)
    assert member.life is life
    if to.value in LEGAL[life.value].split(", "):
        member.transition(to)
        assert member.life is to and to in NEXT[life]
    else:
        with pytest.raises(ImpossibleTransition, match=f"generator0 is {life.value}: it cannot become {to.value}"):
            member.transition(to)
        assert member.life is life


@pytest.mark.parametrize("life", Life)
def test_hello_and_ready_are_recorded_in_every_state_of_an_actor(life):
    member = Member("logprob", "logprob")
    for state in WAY[life]:
        member.transition(state)
    before = member.life
    member.said_hello(m.Hello("logprob", "tcp://127.0.0.1:1", "cpu"))
    assert member.life is (Life.UP if before is Life.STARTING else before)
    member.said_ready()
    assert member.life is (Life.READY if before in (Life.STARTING, Life.UP, Life.READY) else before)
    assert member.reached is Life.READY

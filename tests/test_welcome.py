"""The addresses that the controller tells each actor."""

from types import SimpleNamespace

from crews import recovery_of

from asyncspec.wire import messages as m


def test_an_actor_is_told_all_addresses_that_it_sends_to_once_and_then_what_changes():
    """Also one that the first message may not have reached."""
    sent = []
    recovery, _ = recovery_of("deployment.generators=3", "deployment.logprobs=2", "logprob.ranks=2", sent=sent)
    run, crew, lost = recovery.run, recovery.crew, set()
    send = run.server.send
    run.server.send = lambda name, message: (send(name, message), name not in lost)[1]
    run.broadcasts = SimpleNamespace(port=1, versions={"policy": 0})

    def welcomed():
        sent.clear()
        run.welcome()
        return {name: set(message.addresses) for name, message in sent if isinstance(message, m.Welcome)}

    for number, member in enumerate(crew.present):
        crew.arrived(m.Hello(member.name, f"tcp://127.0.0.1:{number + 1}", "cpu"))
    lost.add("generator1")
    everyones = {"trainer", "logprob", "logprob1", "draft_adapter"}
    found = welcomed()
    assert found.keys() == {member.name for member in crew.present}
    assert found["generator0"] == everyones | {"generator0"}
    assert found["logprob1_rank1"] == everyones | {"logprob1_rank1"} and "logprob1_rank1" not in found["logprob"]
    assert welcomed() == {"generator1": everyones | {"generator1"}}
    lost.clear()
    assert welcomed().keys() == {"generator1"} and welcomed() == {}
    crew.died(crew.members["draft_adapter"])
    crew.enlist("draft_adapter.1", "draft_adapter", True)
    crew.arrived(m.Hello("draft_adapter.1", "tcp://127.0.0.1:99", "cpu"))
    found = welcomed()
    assert found.pop("draft_adapter.1") == everyones
    assert found == {member.name: {"draft_adapter"} for member in crew.present if member.name != "draft_adapter.1"}

"""Hints and calls as data: shown, stored, applied."""

from engine.core.errors import UserError
from engine.core.hints import Call, Change, Hint

PUSH = Call("push_env", {"path": "x", "install": True})


def test_an_agent_reads_the_sentence_and_the_call():
    assert str(Hint("Push again.", PUSH)) == 'Push again. push_env(path="x", install=true)'
    assert str(Hint("", PUSH)) == 'push_env(path="x", install=true)'
    assert str(Hint("Wait.")) == "Wait."
    assert str(Call("f", {"a": None, "b": [1, "ü"]})) == 'f(a=null, b=[1, "ü"])'
    assert not Hint() and Hint("x") and Hint("", PUSH)


def test_a_hint_is_read_as_it_was_stored_and_old_ones_as_text():
    for hint in (Hint("Push again.", PUSH), Hint("Wait."), Hint()):
        assert Hint.load(hint.dump()) == hint == Hint.from_json(hint.to_json())
    old = 'submit_train(resume="r-1") continues from step_000020.'
    assert Hint.load(old) == Hint(old)
    assert Hint.load('{"text": broken') == Hint('{"text": broken')
    assert Hint.from_json(None) == Hint() and Hint.from_json({"call": 3}) == Hint()


def test_what_a_result_shows_can_be_read_back():
    hint = Hint("Push again.", PUSH)
    fields = hint.as_fields()
    assert fields == {"hint": str(hint), "call": PUSH.to_json()}
    assert Hint.from_fields(str(fields["hint"]), fields["call"]) == hint
    assert Hint("Wait.").as_fields("fix") == {"fix": "Wait."}
    assert Hint.from_fields("Wait.", None) == Hint("Wait.")


def test_a_change_is_made_in_the_call_that_was_refused_and_nothing_else():
    refused = Call("submit_train", {"env_id": "a", "lr": 1, "settings": {"steps": 2, "bad": 3}})
    change = Change({"note": "n"}, {"seed": 4}, without=("bad",), without_arguments=("lr",))
    made = {"env_id": "a", "settings": {"steps": 2, "seed": 4}, "note": "n"}
    assert change.applied_to(refused).arguments == made
    assert refused.arguments["settings"] == {"steps": 2, "bad": 3}
    assert Change(settings={"seed": 1}).applied_to(Call("t")).arguments == {"settings": {"seed": 1}}
    error = UserError("BUDGET", "too dear", hint=Hint("Change that.", change=change))
    assert "call" not in error.payload() and error.hint == "Change that."
    assert error.of_call(refused).payload()["call"] == {"tool": "submit_train", "arguments": made}


def test_a_call_that_needs_more_of_its_caller_says_what():
    call = Call("chat", {"model": "pebble"}, needs=("message",))
    assert call.to_json() == {
        "tool": "chat",
        "arguments": {"model": "pebble"},
        "needs": ["message"],
    }
    assert "needs" not in Call("chat", {"model": "pebble", "message": "Hello"}).to_json()

"""Where a model comes from, as whoever asks sees it."""

from engine.evidence.compare.settings_diff import ancestors, making_of_run
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.home.team.owners import Share, Viewer


def test_the_chain_of_a_model_ends_before_a_run_that_is_not_shared(home: Home, make_run):
    first = make_run()
    second = make_run(model=f"{first.id}@best")
    third = make_run(model=second.id)
    bobs = Home(home.root, Viewer("bob"))
    with Store(home) as store:
        for run in (second, third):
            store.add_share(Share("run", run.id, "", "bob", "read"))
    whole = ancestors(home, making_of_run(home, third.id))
    assert whole == [third.id, second.id, first.id, "pebble"]
    assert ancestors(bobs, making_of_run(bobs, third.id)) == [third.id, second.id]
    with Store(home) as store:
        store.add_share(Share("run", first.id, "", "bob", "read"))
    assert ancestors(bobs, making_of_run(bobs, third.id)) == whole


def test_how_a_run_was_made_is_not_told_to_whoever_does_not_see_it(home: Home, make_run):
    run = make_run(settings={"learning_rate": 3e-4})
    assert making_of_run(home, run.id).setting_values["learning_rate"] == 3e-4
    assert making_of_run(Home(home.root, Viewer("bob")), run.id).config is None

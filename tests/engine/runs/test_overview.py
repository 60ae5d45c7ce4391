"""What a look at the home tells beside its lists."""

from engine.home.run_dir import Home
from engine.runs import lifecycle


def test_a_list_of_models_says_how_the_packaged_ones_are_fetched(home: Home):
    assert "honesmith models add smollm2" in lifecycle.overview(home, "models")["about"]["models"]
    assert "about" not in lifecycle.overview(home, "runs")

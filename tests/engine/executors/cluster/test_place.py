"""Where a launch of a cluster lies."""

from pathlib import Path

from engine.executors.cluster.place import Place, places


def test_the_launches_of_a_home_are_found_by_their_folders(tmp_path: Path):
    for run_id, launch in (("a-1", 2), ("a-1", 10), ("b-2.1", 1)):
        Place(tmp_path, "0a1b2c3d4e5f", run_id, launch).path.mkdir(parents=True)
    (tmp_path / "homes/0a1b2c3d4e5f/envs").mkdir()
    launches = [(place.run_id, place.launch) for place in places(tmp_path, "0a1b2c3d4e5f")]
    assert launches == [("a-1", 2), ("a-1", 10), ("b-2.1", 1)]
    assert [place.launch for place in places(tmp_path, "0a1b2c3d4e5f", "a-1")] == [2, 10]
    assert places(tmp_path, "ffffffffffff") == []


def test_two_launches_of_a_run_share_nothing_but_environments(tmp_path: Path):
    one, two = (Place(tmp_path, "0a1b2c3d4e5f", "a-1", launch) for launch in (1, 2))
    assert one.path != two.path and one.run.id == two.run.id == "a-1"
    assert one.run.home.root == one.path
    assert one.envs == two.envs

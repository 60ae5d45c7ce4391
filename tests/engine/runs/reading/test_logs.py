"""Reading what a run wrote: curves thinned, text by the page, cursors that hold."""

import itertools
import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.errors import UserError
from engine.core.files import append_line
from engine.core.paging import complete_size, page_after, page_before
from engine.records.lines.curves import load_metrics, spark, thin
from engine.runs.reading import logs
from engine.runs.reading.search import matcher
from tests.helpers.env_versions import write_version


def read_logs(*args, **asked):
    return logs.read_logs(*args, **asked).to_json()


def size(result):
    return len(json.dumps(result, ensure_ascii=False, separators=(",", ":")))


# --- metrics ----------------------------------------------------------------------------------


def test_curves_come_thinned_with_their_extremes(home, learned_run):
    result = read_logs(home, learned_run.id)
    assert result["columns"][:3] == ["step", "heldout_success", "heldout_reward"]
    assert len(result["rows"]) <= 30 and result["steps_logged"] == 61
    column = result["columns"].index("reward_mean")
    shown = [row[column] for row in result["rows"] if row[column] is not None]
    whole = result["curves"]["reward_mean"]
    assert (min(shown), max(shown)) == (whole["min"], whole["max"])
    steps = [row[0] for row in result["rows"]]
    assert steps == sorted(steps) and steps[0] == 0 and steps[-1] == 60
    heldout = [row[1] for row in result["rows"] if row[1] is not None]
    assert heldout == [0.35, 0.45, 0.68, 0.62]  # an evaluation now and then is kept whole
    assert result["next_cursor"] == "" and "format" in result["columns"] + result["available"]
    assert "heldout_success 0.35 to 0.62" in result["summary"]
    assert size(result) < 10_000


@given(st.lists(st.floats(-1e6, 1e6) | st.none(), min_size=1, max_size=400), st.integers(4, 40))
@settings(max_examples=60)
def test_thinning_always_keeps_first_lowest_highest_and_last(values, points):
    lines = [{"step": i} | ({} if v is None else {"x": v}) for i, v in enumerate(values)]
    kept = thin(lines, ["x"], points)
    assert len(kept) <= max(points, 6)
    assert [line["step"] for line in kept] == sorted({line["step"] for line in kept})
    known = [v for v in values if v is not None]
    left = [line["x"] for line in kept if "x" in line]
    if known:
        assert (left[0], left[-1]) == (known[0], known[-1])
        assert (min(left), max(left)) == (min(known), max(known))


def test_a_single_spike_in_ten_thousand_steps_is_seen(home, make_run):
    run = make_run()
    run.metrics({"step": i, "loss": 1e6 if i == 7777 else 1.0} for i in range(10_000))
    result = read_logs(home, run.id, keys=["loss"])
    assert [7777, 1e6] in result["rows"]
    assert result["curves"]["loss"]["max_step"] == 7777


def test_asked_columns_are_shown_and_unknown_ones_refused_with_a_guess(home, learned_run):
    result = read_logs(home, learned_run.id, keys=["kl", "format"])
    assert result["columns"] == ["step", "kl", "format"]
    with pytest.raises(UserError) as caught:
        read_logs(home, learned_run.id, keys=["reward_meen"])
    assert "Did you mean reward_mean?" in caught.value.hint


def test_a_known_metric_that_is_not_logged_yet_is_empty(home, make_run):
    run = make_run().metrics([{"step": 1, "reward_mean": 0.5}])
    result = read_logs(home, run.id, keys=["heldout_success"])
    assert result["rows"] == [] and result["summary"].endswith("heldout_success not measured yet.")


def test_steps_at_which_nothing_asked_for_was_measured_are_no_rows_of_nulls(home, make_run):
    lines = [
        {"step": step, "loss": 1.0} | ({"heldout_success": step / 100} if step % 20 == 0 else {})
        for step in range(101)
    ]
    run = make_run().metrics(lines)
    asked = read_logs(home, run.id, keys=["heldout_success"])
    assert asked["rows"] == [[step, step / 100] for step in range(0, 101, 20)]
    assert "points)" not in asked["summary"] and asked["steps_logged"] == 101
    run.metrics([{"step": 101, "loss": 1.0}, {"step": 120, "heldout_success": 0.9}])
    later = read_logs(home, run.id, keys=["heldout_success"], cursor=asked["next_cursor"])
    assert later["rows"] == [[120, 0.9]]
    again = read_logs(home, run.id, keys=["heldout_success"], cursor=later["next_cursor"])
    assert again["rows"] == []


def test_grep_chooses_the_columns_of_metrics(home, learned_run):
    result = read_logs(home, learned_run.id, grep="^groups")
    groups = ["groups_effective", "groups_too_easy", "groups_too_hard", "groups_flat_partial"]
    assert result["columns"] == ["step", *groups]


def test_new_steps_of_a_living_run_come_by_cursor(home, make_run):
    run = make_run().metrics({"step": i, "loss": 1 / (i + 1)} for i in range(5))
    first = read_logs(home, run.id)
    assert first["next_cursor"]
    assert read_logs(home, run.id, cursor=first["next_cursor"])["rows"] == []
    run.metrics([{"step": 5, "loss": 0.1}, {"step": 6, "loss": 0.05}])
    second = read_logs(home, run.id, cursor=first["next_cursor"])
    assert second["rows"] == [[5, 0.1], [6, 0.05]]
    assert second["columns"] == ["step", "loss"]
    run.finish()
    end = read_logs(home, run.id, cursor=second["next_cursor"])
    assert end["rows"] == [] and end["next_cursor"] == ""


def test_a_cursor_beyond_a_rewound_file_starts_over_with_a_warning(home, make_run):
    run = make_run().metrics({"step": i, "loss": 1.0} for i in range(50))
    cursor = read_logs(home, run.id)["next_cursor"]
    run.run.metrics.write_text('{"step":0,"loss":1.0}\n')
    result = read_logs(home, run.id, cursor=cursor)
    assert result["rows"] == [[0, 1.0]] and "went back" in result["warnings"][0]


def test_steps_written_twice_by_a_resumed_run_appear_once(home, make_run):
    run = make_run()
    run.metrics({"step": i, "loss": 1.0} for i in (1, 2, 3))
    run.metrics({"step": i, "loss": 2.0} for i in (2, 3, 4))
    assert read_logs(home, run.id)["rows"] == [[1, 1.0], [2, 2.0], [3, 2.0], [4, 2.0]]


def test_a_run_without_a_step_says_so(home, make_run):
    result = read_logs(home, make_run().id)
    assert result["rows"] == [] and "no step yet" in result["summary"]


def test_two_hundred_named_metrics_still_fit(home, make_run):
    run = make_run()
    names = [f"a_rather_long_metric_name_number_{i}" for i in range(200)]
    run.metrics({"step": s} | {name: random.random() * 1e-7 for name in names} for s in range(60))
    assert size(read_logs(home, run.id)) < 10_000
    asked = read_logs(home, run.id, keys=names)
    assert size(asked) < 10_000 and "first 14 of 200" in asked["warnings"][0]
    assert size(read_logs(home, run.id, limit=200, cursor="metrics:0")) < 10_000


def test_not_a_number_is_an_empty_cell(home, make_run):
    run = make_run().metrics([{"step": 1, "loss": float("nan")}, {"step": 2, "loss": 0.5}])
    assert read_logs(home, run.id)["rows"] == [[1, None], [2, 0.5]]


def test_evaluations_show_which_model_a_line_is(home, make_run):
    run = make_run("evaluate", kind="evaluate", models=[{"ref": "pebble"}])
    run.metrics([{"step": 1, "model": "pebble", "heldout_success": 0.5}])
    result = read_logs(home, run.id)
    assert result["columns"] == ["step", "model", "heldout_success"]
    assert result["rows"] == [[1, "pebble", 0.5]]


def test_a_very_long_metrics_file_is_sampled_and_its_end_is_exact(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.records.lines.curves._EXACT_BYTES", 400_000)
    path = tmp_path / "long.jsonl"
    with path.open("w") as file:
        for i in range(12_000):
            file.write(json.dumps({"step": i, "loss": i / 10, "pad": "x" * 60}) + "\n")
    metrics = load_metrics(path)
    assert metrics.sampled and metrics.end == path.stat().st_size
    steps = [line["step"] for line in metrics.lines]
    assert steps[0] == 0 and steps[-1] == 11_999
    assert steps[-1000:] == list(range(11_000, 12_000))
    assert max(b - a for a, b in itertools.pairwise(steps)) < 100


def test_sparklines_show_rise_and_flatness():
    assert spark([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert spark([5.0] * 3) == "▁▁▁" and spark([]) == ""
    assert len(spark(list(range(1000)))) == 24


def test_damaged_lines_are_left_out_and_counted(home, make_run):
    run = make_run().metrics([{"step": 1, "loss": 1.0}])
    cursor = read_logs(home, run.id)["next_cursor"]
    run.events({"event": "started"})
    for path, row in (
        (run.run.metrics, {"step": 2, "loss": 0.5}),
        (run.run.events, {"event": "x"}),
    ):
        with path.open("a") as file:
            file.write(f'[1, 2]\n{{"step": 2, "lo\n{json.dumps(row)}\n{{"step": 3, "lo')
    says = ["2 damaged lines could not be read and are left out."]
    page = read_logs(home, run.id)
    assert page["rows"] == [[1, 1.0], [2, 0.5]] and page["warnings"] == says
    new = read_logs(home, run.id, cursor=cursor)
    assert new["rows"] == [[2, 0.5]] and new["warnings"] == says
    events = read_logs(home, run.id, "events")
    assert [event["event"] for event in events["events"]] == ["started", "x"]
    assert events["warnings"] == says


# --- console and events -----------------------------------------------------------------------


def test_the_console_ends_with_the_newest_line_and_leads_back_to_the_first(home, make_run):
    run = make_run().log("".join(f"line {i}\n" for i in range(120)))
    run.finish()
    seen, cursor = [], ""
    for _ in range(9):
        page = read_logs(home, run.id, "console", limit=50, cursor=cursor)
        seen = page["lines"] + seen
        cursor = page["next_cursor"]
        if not cursor:
            break
    assert seen == [f"line {i}" for i in range(120)]


def test_a_cursor_of_a_living_console_brings_only_what_is_new(home, make_run):
    run = make_run().log("one\ntwo\n")
    page = read_logs(home, run.id, "console")
    assert page["lines"] == ["one", "two"]
    with run.run.log(1).open("a") as file:
        file.write("three\nfour, not yet compl")
    fresh = read_logs(home, run.id, "console", cursor=page["next_cursor"])
    assert fresh["lines"] == ["three"]
    assert read_logs(home, run.id, "console", limit=1)["lines"] == ["three", "four, not yet compl"]
    with run.run.log(1).open("a") as file:
        file.write("ete\n")
    last = read_logs(home, run.id, "console", cursor=fresh["next_cursor"])
    assert last["lines"] == ["four, not yet complete"]


def test_reading_goes_on_into_the_next_attempt_and_back(home, make_run):
    run = make_run().log("a1\na2\n", 1).log("b1\nb2\n", 2)
    run.finish("failed", attempt=2)
    newest = read_logs(home, run.id, "console")
    assert newest["lines"] == ["b1", "b2"] and newest["attempt"] == 2
    older = read_logs(home, run.id, "console", cursor=newest["next_cursor"])
    assert older["lines"] == ["a1", "a2"] and older["attempt"] == 1
    onward = read_logs(home, run.id, "console", cursor="console:1:0")
    assert read_logs(home, run.id, "console", cursor=onward["next_cursor"])["lines"] == ["b1", "b2"]


def test_progress_bars_and_terminal_escapes_come_out_as_plain_text(home, make_run):
    run = make_run().log("\x1b[32mok\x1b[0m\n 1%\r 50%\r100%\r\n\x1b]0;title\x07done \u202eevil\n")
    assert read_logs(home, run.id, "console")["lines"] == ["ok", "100%", "done evil"]


def test_long_lines_and_many_lines_fit_into_a_page(home, make_run):
    run = make_run().log("".join(f"{i} " + 'é"x' * 3000 + "\n" for i in range(300)))
    for _ in range(2):
        page = read_logs(home, run.id, "console", limit=200)
        assert size(page) < 10_000 and page["older_cursor"]
        assert page["lines"][-1].startswith("299 ") and "characters cut" in page["lines"][-1]


def test_pages_cut_by_size_lose_no_line(home, make_run):
    run = make_run().log("".join(f"{i:04d} {'x' * 400}\n" for i in range(100)))
    run.finish()
    seen, cursor = [], ""
    while True:
        page = read_logs(home, run.id, "console", limit=60, cursor=cursor)
        assert size(page) < 10_000
        seen = [line[:4] for line in page["lines"]] + seen
        cursor = page["next_cursor"]
        if not cursor:
            break
    assert seen == [f"{i:04d}" for i in range(100)]
    forward, cursor = [], "console:1:0"
    while cursor and not cursor.endswith("older"):
        page = read_logs(home, run.id, "console", limit=60, cursor=cursor)
        forward += [line[:4] for line in page["lines"]]
        cursor = page["next_cursor"]
    assert forward == seen


def test_grep_finds_lines_anywhere_and_hides_secrets_first(home, make_run, monkeypatch):
    monkeypatch.setenv("ARITH_KEY", "hunter2hunter2")
    folder = home.env("arith", "0123456789ab")
    folder.mkdir(parents=True)
    write_version(folder / "env.json", secrets=("ARITH_KEY",))
    run = make_run().log(
        "".join(f"step {i}\n" for i in range(2000)) + "Error: key hunter2hunter2 refused\nend\n"
    )
    page = read_logs(home, run.id, "console", grep="error|step 777$")
    assert page["lines"] == ["step 777", "Error: key [secret ARITH_KEY] refused"]
    assert read_logs(home, run.id, "console", grep="hunter2")["lines"] == []


@pytest.mark.parametrize(
    ("pattern", "line", "found"),
    [
        ("loss", "the LOSS is 3", True),
        ("a.*b", "xx a yy b", True),
        ("a.*b", "xx b yy a", False),
        ("^start", "a start", False),
        ("end$", "the end", True),
        ("^only$", "only more only", False),
        ("nan|inf", "loss inf", True),
        ("(a+)+$", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab", False),
        ("[error]", "an [error] here", True),
        ("|", "anything", False),
    ],
)
def test_grep_is_plain_text_with_gaps_alternatives_and_ends(pattern, line, found):
    assert matcher(pattern)(line) is found


def test_no_pattern_takes_long():
    wanted = matcher("|".join([".*".join("ab" * 10)] * 4)[:200])
    began = time.process_time()
    for _ in range(50):
        wanted("a" * 5000)
    assert time.process_time() - began < 1.0


def test_events_are_objects_and_keys_choose_among_them(home, learned_run):
    page = read_logs(home, learned_run.id, "events")
    names = [event["event"] for event in page["events"]]
    assert names == ["started", "evaluated", "alert", "finished"]
    alerts = read_logs(home, learned_run.id, "events", keys=["alert"])["events"]
    assert [event["id"] for event in alerts] == ["entropy"]
    last = read_logs(home, learned_run.id, "events", limit=1)
    assert last["events"][0]["event"] == "finished"
    before = read_logs(home, learned_run.id, "events", limit=1, cursor=last["next_cursor"])
    assert before["events"][0]["event"] == "alert"


def test_a_torn_event_is_not_shown_before_it_is_whole(home, make_run):
    run = make_run().events({"event": "started", "message": "go"})
    page = read_logs(home, run.id, "events")
    with run.run.events.open("a") as file:
        file.write('{"event": "che')
    assert read_logs(home, run.id, "events", cursor=page["next_cursor"])["events"] == []
    append_line(run.run.events, {"event": "checkpoint", "message": "saved"})
    fresh = read_logs(home, run.id, "events", cursor=page["next_cursor"])["events"]
    assert [event["event"] for event in fresh] == ["checkpoint"]


def test_the_error_view_names_kind_evidence_checkpoint_and_the_way_on(home, make_run):
    run = make_run().log("loading\nTraceback\nMemoryError: 3 GB\n").checkpoint(20)
    run.run.failure.write_text(
        json.dumps({"kind": "oom", "message": "Memory ran out.", "evidence": "3 GB at line 7"})
    )
    run.run.exit_record.write_text(json.dumps({"rc": 3, "signal": None}))
    run.finish("failed", reason_kind="oom", reason="Memory ran out.", hint="Lower max_length.")
    page = read_logs(home, run.id, "error")
    assert page["error"] == {
        "kind": "oom",
        "message": "Memory ran out.",
        "evidence": "3 GB at line 7",
        "hint": "Lower max_length.",
        "last_checkpoint": "step_000020",
        "exit": {"rc": 3},
    }
    assert page["lines"][-1] == "MemoryError: 3 GB"
    assert page["next"] == [{"tool": "submit_train", "arguments": {"resume": run.id}}]
    assert "failed (oom): Memory ran out." in page["summary"]


def test_the_error_view_of_a_healthy_run_says_it_has_not_failed(home, learned_run):
    page = read_logs(home, learned_run.id, "error")
    assert page["error"] == {} and "has not failed" in page["summary"]
    older = read_logs(home, learned_run.id, "error", limit=2)
    assert read_logs(home, learned_run.id, "error", limit=2, cursor=older["next_cursor"])["lines"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"view": "all"}, "BAD_ARGUMENT"),
        ({"limit": 0}, "BAD_ARGUMENT"),
        ({"limit": 201}, "BAD_ARGUMENT"),
        ({"view": "console", "grep": "x" * 201}, "BAD_ARGUMENT"),
        ({"view": "console", "cursor": "events:5"}, "BAD_CURSOR"),
        ({"view": "console", "cursor": "console:1:-5"}, "BAD_CURSOR"),
        ({"view": "events", "cursor": "events:²"}, "BAD_CURSOR"),
        ({"cursor": "metrics:" + "9" * 20}, "BAD_CURSOR"),
        ({"cursor": "nonsense"}, "BAD_CURSOR"),
        ({"view": "metrics", "run_id": "no-such-run"}, "RUN_NOT_FOUND"),
    ],
)
def test_wrong_arguments_are_refused(home, learned_run, arguments, code):
    with pytest.raises(UserError) as caught:
        read_logs(home, **({"run_id": learned_run.id} | arguments))
    assert caught.value.code == code and caught.value.hint


# --- pages by seeking -------------------------------------------------------------------------


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=40)),
    st.integers(1, 9),
)
@settings(max_examples=50)
def test_pages_back_and_forth_give_every_line_once(tmp_path_factory, lines, limit):
    path = tmp_path_factory.mktemp("pages") / "log"
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    back, end = [], complete_size(path)
    while end > 0:
        page = page_before(path, end, limit)
        back = [line.text for line in page.lines] + back
        assert page.start < end
        end = page.start
    forth, start = [], 0
    while True:
        page = page_after(path, start, limit)
        forth += [line.text for line in page.lines]
        if page.end == start:
            break
        start = page.end
    assert back == forth == lines


def test_a_line_longer_than_any_block_is_taken_apart_not_lost(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"first\n" + b"x" * 3_000_000 + b"\nlast\n")
    page = page_before(path, complete_size(path), 1)
    assert page.lines[0].text == "last"
    start, texts = page.start, []
    while start > 0:
        page = page_before(path, start, 1)
        texts.append(page.lines[0].text)
        start = page.start
    assert texts[-1] == "first" and sum(len(text) for text in texts[:-1]) == 3_000_000


def test_a_page_of_a_million_lines_reads_no_more_than_one_of_a_thousand(
    tmp_path, home, make_run, monkeypatch
):
    reads = []
    original = open

    def counting(path, mode="r", *args, **kwargs):
        file = original(path, mode, *args, **kwargs)
        if "b" in mode and str(path).endswith(".log"):
            read = file.read
            counted = _Counting(file, read, reads)
            return counted
        return file

    costs = []
    for lines in (1000, 1_000_000):
        run = make_run()
        with run.run.log(1).open("w") as file:
            for block in range(lines // 1000):
                file.write("".join(f"line {block * 1000 + i} of the log\n" for i in range(1000)))
        with monkeypatch.context() as patch:
            patch.setattr("engine.core.paging.open", counting, raising=False)
            reads.clear()
            page = read_logs(home, run.id, "console")
            read_logs(home, run.id, "console", cursor=page["older_cursor"])
        assert page["lines"][-1] == f"line {lines - 1} of the log" and len(page["lines"]) == 50
        costs.append(sum(reads))
    assert 0 < costs[1] <= costs[0] * 12 and costs[1] < 500_000


class _Counting:
    """A binary file that notes how many bytes were read from it."""

    def __init__(self, file, read, reads):
        self.file = file
        self.reads = reads

    def read(self, *args):
        data = self.file.read(*args)
        self.reads.append(len(data))
        return data

    def readline(self, *args):
        data = self.file.readline(*args)
        self.reads.append(len(data))
        return data

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

"""The database: ids, states, leases, idempotency, damage."""

import os
import sqlite3
import subprocess
import sys
import threading
from itertools import product

import pytest

from engine.core.errors import UserError
from engine.core.files import share_lock, take_lock
from engine.home import database
from engine.home.rows import STATES, TRANSITIONS, NewRun
from engine.home.run_dir import Home
from engine.home.store import MOST_WITHOUT_DEVICE, Store


def new(name="arith-grpo", **values) -> NewRun:
    defaults = {"kind": "train", "algorithm": "grpo", "env_id": "arith@01", "model": "pebble"}
    return NewRun(name=name, **(defaults | values))


def in_state(store: Store, state: str) -> str:
    """A run that was forced into a state."""
    run_id = store.insert_run(new()).run_id
    store._db.execute("UPDATE runs SET state = ? WHERE run_id = ?", (state, run_id))
    return run_id


def test_ids_are_readable_and_count_per_name(home):
    with Store(home) as store:
        ids = [store.insert_run(new(name)).run_id for name in ("a-grpo", "b-sft", "a-grpo")]
    assert ids == ["a-grpo-1", "b-sft-1", "a-grpo-2"]


def test_an_id_whose_folder_exists_is_never_given_again(home):
    home.run("a-grpo-1").create()
    with Store(home) as store:
        assert store.insert_run(new("a-grpo")).run_id == "a-grpo-2"


def test_a_run_that_cannot_be_prepared_does_not_exist(home):
    def fail(run_id: str) -> None:
        home.run(run_id).create()
        raise OSError("no space")

    with Store(home) as store:
        with pytest.raises(OSError, match="no space"):
            store.insert_run(new(), fail)
        assert store.list_runs() == [] and list(home.runs.iterdir()) == []
        assert store.insert_run(new()).run_id == "arith-grpo-1"


@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_plan_that_cannot_be_prepared_leaves_neither_rows_nor_folders(home, fails_at: int):
    def make(plan_id: str, ids: list[str]):
        def prepare(run_id: str) -> None:
            home.run(run_id).create()
            if len(ids) == fails_at - 1:
                raise OSError("no space")

        return new(plan=plan_id), prepare

    home.run("arith-grpo-9").create()  # of somebody else
    with Store(home) as store:
        with pytest.raises(OSError, match="no space"):
            store.insert_plan("arith", "try-1", {}, [make] * 3)
        assert store.list_runs() == []
        assert [folder.name for folder in home.runs.iterdir()] == ["arith-grpo-9"]
        fails_at = 0
        rows = store.insert_plan("arith", "try-1", {}, [make] * 3)
    assert [row.run_id for row in rows] == [f"arith-grpo-{number}" for number in (1, 2, 3)]
    assert all(home.run(row.run_id).path.is_dir() for row in rows)


def test_the_same_request_gives_the_same_run_and_another_body_a_conflict(home):
    with Store(home) as store:
        first = store.insert_run(new(request_id="try-1", body={"steps": 5}))
        again = store.insert_run(new(request_id="try-1", body={"steps": 5}))
        assert again == first
        with pytest.raises(UserError) as caught:
            store.insert_run(new(request_id="try-1", body={"steps": 6}))
        assert caught.value.code == "REQUEST_CONFLICT" and first.run_id in caught.value.message
        assert len(store.list_runs()) == 1


def test_32_processes_with_one_request_id_make_one_run(home):
    gate_reads, gate_writes = os.pipe()
    out_reads, out_writes = os.pipe()
    children = []
    for _ in range(32):
        pid = os.fork()  # a fork starts at once, an interpreter takes a second of this machine
        if pid == 0:
            os.close(gate_writes)
            os.read(gate_reads, 1)
            try:
                with Store(home) as store:
                    request = new(request_id="one", body={"x": 1})
                    row = store.insert_run(request, lambda run_id: home.run(run_id).path.mkdir())
                os.write(out_writes, row.run_id.encode() + b"\n")
            finally:
                os._exit(0)
        children.append(pid)
    os.close(gate_writes)
    os.close(out_writes)
    with os.fdopen(out_reads) as out:
        said = out.read().split()
    for pid in children:
        os.waitpid(pid, 0)
    assert said == ["arith-grpo-1"] * 32
    assert os.listdir(home.runs) == ["arith-grpo-1"]
    with Store(home) as store:
        assert len(store.list_runs()) == 1


@pytest.mark.parametrize(("origin", "to"), list(product(STATES, STATES)))
def test_every_change_of_state_is_allowed_or_refused_by_the_table(home, origin, to):
    with Store(home) as store:
        run_id = in_state(store, origin)
        if to in TRANSITIONS[origin]:
            assert store.set_state(run_id, to, only_from={origin})
            assert store.get_run(run_id).state == to
            assert store.history(run_id)[-1][1:] == (origin, to)
        else:
            with pytest.raises(ValueError, match="no transition"):
                store.set_state(run_id, to, only_from={origin})
            assert store.get_run(run_id).state == origin


@pytest.mark.parametrize("state", STATES)
def test_a_change_is_made_only_from_the_states_named(home, state):
    with Store(home) as store:
        run_id = in_state(store, state)
        changed = store.set_state(run_id, "stopping", only_from={"preparing", "running"})
        assert changed == (state in ("preparing", "running"))
        assert store.get_run(run_id).state == ("stopping" if changed else state)


@pytest.mark.parametrize("state", STATES)
def test_only_what_failed_was_cancelled_or_interrupted_is_resumed(home, state):
    with Store(home) as store:
        run_id = in_state(store, state)
        store.update_run(run_id, only_in={state}, spent_hours=1.5, reason_kind="killed", reason="x")
        again = {"max_gpu_hours": 3.0, "request_id": "again", "body": {"resume": run_id}}
        if state not in ("failed", "cancelled", "interrupted"):
            with pytest.raises(UserError) as caught:
                store.resume_run(run_id, **again)
            assert caught.value.code == "RUN_STATE" and state in caught.value.message
            return
        row = store.resume_run(run_id, **again)
        assert (row.state, row.attempt, row.max_gpu_hours) == ("queued", 2, 3.0)
        assert (row.spent_hours, row.spent_before, row.reason) == (1.5, 1.5, "")
        assert store.resume_run(run_id, **again).attempt == 2  # the same request


def test_unknown_fields_and_states_are_faults_of_the_caller(home):
    with Store(home) as store:
        run_id = in_state(store, "running")
        with pytest.raises(ValueError, match="fields"):
            store.set_state(run_id, "done", only_from={"running"}, colour="red")
        with pytest.raises(KeyError):
            store.set_state(run_id, "done", only_from={"flying"})
        with pytest.raises(ValueError, match="fields"):
            store.update_run(run_id, only_in={"running"}, state="done")


def test_runs_are_found_by_a_unique_beginning_and_missed_in_words(home):
    with Store(home) as store:
        for _ in range(11):
            store.insert_run(new("arith-grpo"))
        store.insert_run(new("json-sft"))
        assert store.get_run("json").run_id == "json-sft-1"
        assert store.get_run("arith-grpo-1").run_id == "arith-grpo-1"
        with pytest.raises(UserError) as caught:
            store.get_run("arith-grpo")
        assert "11 runs" in caught.value.message
        with pytest.raises(UserError) as caught:
            store.get_run("jsn-sft-1")
        assert caught.value.code == "RUN_NOT_FOUND" and "json-sft-1" in caught.value.hint
        with pytest.raises(UserError):
            store.get_run("%")
        with pytest.raises(UserError):
            store.get_run("")


def test_lists_page_from_the_newest_down(home):
    with Store(home) as store:
        ids = [store.insert_run(new()).run_id for _ in range(5)]
        first = store.list_runs(limit=2)
        rest = store.list_runs(limit=9, before_rowid=first[-1].rowid)
        assert [row.run_id for row in first + rest] == ids[::-1]
        assert store.list_runs(states=["done"]) == [] == store.list_runs(kind="probe")


def test_a_device_is_leased_to_one_run_and_the_oldest_goes_first(home):
    with Store(home) as store:
        ids = [store.insert_run(new()).run_id for _ in range(3)]
        row = store.lease_next(["cuda:0", "cuda:1"])
        assert row is not None and (row.run_id, row.device, row.state) == (
            ids[0],
            "cuda:0",
            "preparing",
        )
        second = store.lease_next(["cuda:0", "cuda:1"])
        assert second is not None and (second.run_id, second.device) == (ids[1], "cuda:1")
        assert store.lease_next(["cuda:0", "cuda:1"]) is None
        assert [store.queue_position(run_id) for run_id in ids] == [0, 0, 1]
        store.set_state(ids[0], "failed", only_from={"preparing"})
        third = store.lease_next(["cuda:0", "cuda:1"])
        assert third is not None and (third.run_id, third.device) == (ids[2], "cuda:0")


def leased(store: Store, **arguments: object) -> tuple[str, list[str]] | None:
    """What the next lease on a machine of four GPUs gives: the run and its devices."""
    row = store.lease_next([f"cuda:{i}" for i in range(4)], **arguments)
    return (row.run_id, row.devices) if row else None


def test_a_run_on_several_gpus_gets_all_of_them_or_none(home):
    with Store(home) as store:
        small, large, after = (store.insert_run(new(gpus=n)).run_id for n in (1, 4, 1))
        assert leased(store) == (small, ["cuda:0"])
        # Three are free, which is too few: they are kept, or small runs would always go first.
        assert leased(store) is None and leased(store) is None
        assert store.get_run(large).device == "" and store.get_run(after).state == "queued"
        store.set_state(small, "failed", only_from={"preparing"})
        assert leased(store) == (large, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"])
        assert leased(store) is None
        store.set_state(large, "failed", only_from={"preparing"})
        assert leased(store) == (after, ["cuda:0"])


def test_nothing_is_kept_for_a_run_that_could_not_start_anyway(home):
    with Store(home) as store:
        small, large, after = (store.insert_run(new(gpus=n)).run_id for n in (1, 4, 1))
        assert leased(store) == (small, ["cuda:0"])
        found = leased(store, can_start=lambda row: row.run_id != large)  # its secrets are missing
        assert found == (after, ["cuda:1"])


def test_a_run_for_more_gpus_than_the_machine_has_left_takes_all_of_them(home):
    with Store(home) as store:
        run = store.insert_run(new(gpus=8)).run_id
        assert leased(store) == (run, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"])


def test_a_run_on_no_device_starts_at_once_and_takes_no_hours(home):
    with Store(home) as store:
        first, waits, free = (store.insert_run(new(gpus=n)).run_id for n in (1, 1, 0))
        assert store.lease_next(["cpu"]).run_id == free  # it is in nobody's way
        assert store.lease_next(["cpu"]).run_id == first
        assert store.lease_next(["cpu"]) is None and store.get_run(waits).state == "queued"
        row = store.get_run(free)
        assert (row.device, row.devices, row.device_hours(3600)) == ("", [], 0.0)


def test_only_so_many_runs_on_no_device_are_under_way_at_once(home):
    with Store(home) as store:
        runs = [store.insert_run(new(gpus=0)).run_id for _ in range(MOST_WITHOUT_DEVICE + 1)]
        assert [store.lease_next(["cpu"]).run_id for _ in runs[1:]] == runs[:-1]
        assert store.lease_next(["cpu"]) is None
        store.set_state(runs[0], "failed", only_from={"preparing"})
        assert store.lease_next(["cpu"]).run_id == runs[-1]


def test_hours_count_on_every_device(home):
    with Store(home) as store:
        store.insert_run(new(gpus=4))
        store.insert_run(new())
        (row,) = (store.lease_next([f"cuda:{i}" for i in range(4)]),)
        assert row is not None and row.device_hours(1800) == 2.0
        assert store.list_runs()[0].device_hours(1800) == 0.5  # not started: as on one


def test_a_run_that_cannot_be_claimed_is_passed_over(home):
    with Store(home) as store:
        ids = [store.insert_run(new()).run_id for _ in range(2)]
        row = store.lease_next(["cpu"], lambda row: row.run_id != ids[0])
        assert row is not None and row.run_id == ids[1]
        assert store.get_run(ids[0]).state == "queued"


def test_threads_that_race_for_one_device_lease_it_once(home):
    with Store(home) as store:
        for _ in range(8):
            store.insert_run(new())
    won, ready = [], threading.Barrier(8)

    def race() -> None:
        with Store(home) as store:
            ready.wait()
            won.append(store.lease_next(["cpu"]))

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([row for row in won if row is not None]) == 1


def test_hours_are_summed_over_all_runs_and_promised_ones_added(home):
    with Store(home) as store:
        ids = [store.insert_run(new(estimated_hours=2.0)).run_id for _ in range(3)]
        store.update_run(ids[0], only_in={"queued"}, spent_hours=1.5)
        store.set_state(ids[1], "cancelled", only_from={"queued"}, spent_hours=0.25)
        assert store.spent_hours() == 1.75
        assert store.spent_hours(excluding=ids[0]) == 0.25
        assert store.committed_hours() == pytest.approx(1.75 + 0.5 + 2.0)


def test_envs_are_found_by_id_name_or_beginning_newest_first(home):
    with Store(home) as store:
        for hash12 in ("aa11", "bb22"):
            store.add_env("arith", hash12, kind="single", info={"rows": 3})
        store.add_env("arithmetic", "cc33", kind="sft", info={})
        assert [row.env_id for row in store.find_env("arith")] == ["arith@bb22", "arith@aa11"]
        store.add_env("arith", "aa11", kind="single", info={"rows": 4})
        assert [row.env_id for row in store.find_env("arith")] == ["arith@aa11", "arith@bb22"]
        assert store.find_env("arith@aa11")[0].info == {"rows": 4}
        assert [row.env_id for row in store.find_env("arith@b")] == ["arith@bb22"]
        assert len(store.find_env("ari")) == 3
        assert store.find_env("") == [] == store.find_env("%")
        assert len(store.list_envs()) == 3
        assert store.delete_env("arith@aa11") and not store.delete_env("arith@aa11")


def test_deployments_are_recorded_and_changed(home):
    with Store(home) as store:
        row = store.add_deployment(
            base_name="org/Tiny-1B",
            base_path="/models/tiny",
            adapters=[{"name": "r", "path": "/p"}],
            serve_base=False,
            memory_bytes=5,
        )
        assert (row.deployment_id, row.state) == ("Tiny-1B-1", "starting")
        store.update_deployment("Tiny-1B-1", state="ready", url="http://x", adapters=[])
        changed = store.get_deployment("Tiny-1B-1")
        assert (changed.state, changed.url, changed.adapters) == ("ready", "http://x", [])
        assert store.list_deployments(states=("stopped",)) == []
        with pytest.raises(ValueError, match="fields"):
            store.update_deployment("Tiny-1B-1", base_path="/other")
        with pytest.raises(UserError) as caught:
            store.get_deployment("none")
        assert caught.value.code == "DEPLOYMENT_NOT_FOUND"


def test_estimates_are_kept_for_calibration_newest_first(home):
    with Store(home) as store:
        store.record_estimate("grpo", {"steps": 5}, 1.0, 1.2)
        store.record_estimate("grpo", {"steps": 6}, 2.0, 2.2)
        store.record_estimate("sft", {}, 9.0, 9.0)
        rows = store.calibration("grpo")
        assert [row["features"]["steps"] for row in rows] == [6, 5]
        assert rows[0]["predicted"] == 2.0 and rows[0]["actual"] == 2.2


def test_a_commit_survives_kill_9_of_its_process(home):
    code = (
        "import sys; from engine.home.run_dir import Home; from engine.home.rows import NewRun; "
        "from engine.home.store import Store\n"
        "with Store(Home.locate(sys.argv[1])) as store:\n"
        "  while True:\n"
        "    row = store.insert_run(NewRun('a','train','grpo','e','m')); print(row.run_id, flush=1)"
    )
    argv = [sys.executable, "-P", "-c", code, str(home.root)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    acked = [process.stdout.readline().strip() for _ in range(20)]
    process.kill()
    acked += [line for line in process.stdout.read().splitlines() if line.startswith("a-")][:-1]
    process.wait()
    with Store(home) as store:
        store.check()
        stored = {row.run_id for row in store.list_runs(limit=10_000)}
    assert len(acked) >= 20 and set(acked) <= stored


def test_only_the_holder_of_the_checkpoint_lock_moves_the_log(home):
    from engine.core.files import take_lock

    with Store(home) as store:
        store.insert_run(new())
        wal = os.stat(f"{home.db}-wal").st_size
        lock = take_lock(home.checkpoint_lock)
        assert lock is not None
        assert not store.checkpoint() and os.stat(f"{home.db}-wal").st_size == wal > 0
        os.close(lock)
        assert store.checkpoint() and os.stat(f"{home.db}-wal").st_size == 0
        assert store._db.execute("PRAGMA wal_autocheckpoint").fetchone() == (0,)


def test_a_long_log_is_moved_without_being_asked(home, monkeypatch):
    monkeypatch.setattr("engine.home.store_connection._WAL_LIMIT", 50_000)
    with Store(home) as store:
        for _ in range(40):
            store.insert_run(new())
        assert os.stat(f"{home.db}-wal").st_size < 150_000


def test_processes_that_open_a_new_home_at_once_agree_on_its_schema(tmp_path):
    code = (
        "import sys; from engine.home.run_dir import Home; from engine.home.store import Store\n"
        "sys.stdin.readline()\n"
        "with Store(Home.locate(sys.argv[1])) as s: print(len(s.list_runs()))"
    )
    argv = [sys.executable, "-P", "-c", code, str(tmp_path / "home")]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(8)
    ]
    said = [process.communicate("\n") for process in processes]
    assert [out.strip() for out, _ in said] == ["0"] * 8, said


def test_a_home_with_every_older_schema_is_migrated_in_place(home, monkeypatch):
    with Store(home) as store:
        kept = store.insert_run(new()).run_id

    def m_next(db: sqlite3.Connection) -> None:
        db.execute("ALTER TABLE runs ADD COLUMN colour TEXT NOT NULL DEFAULT 'blue'")

    monkeypatch.setattr(database, "MIGRATIONS", [*database.MIGRATIONS, m_next])
    with Store(home) as store:
        assert store.get_run(kept).run_id == kept
        assert store._db.execute("SELECT colour FROM runs").fetchone() == ("blue",)
        version = store._db.execute("PRAGMA user_version").fetchone()
        assert version == (len(database.MIGRATIONS),)


def test_a_migration_that_fails_changes_nothing(home, monkeypatch):
    with Store(home) as store:
        store.insert_run(new())

    def m_broken(db: sqlite3.Connection) -> None:
        db.execute("ALTER TABLE runs ADD COLUMN colour TEXT")
        raise RuntimeError("half way")

    before = list(database.MIGRATIONS)
    monkeypatch.setattr(database, "MIGRATIONS", [*before, m_broken])
    with pytest.raises(RuntimeError, match="half way"):
        Store(home)
    monkeypatch.setattr(database, "MIGRATIONS", before)
    with Store(home) as store:
        columns = [row[1] for row in store._db.execute("PRAGMA table_info(runs)")]
        assert "colour" not in columns and len(store.list_runs()) == 1


def test_a_home_of_a_newer_version_is_refused(home):
    with Store(home) as store:
        store._db.execute("PRAGMA user_version = 99")
    with pytest.raises(UserError) as caught:
        Store(home)
    assert caught.value.code == "HOME_UNUSABLE" and "newer" in caught.value.message


def damage(home: Home, how: str) -> None:
    with Store(home) as store:
        for _ in range(300):
            store.insert_run(new(note="x" * 200))
        store.checkpoint()
        home.run("arith-grpo-1").create()
        home.run("arith-grpo-1").config.write_text("{}")
    data = home.db.read_bytes()
    match how:
        case "header":
            home.db.write_bytes(b"not a database, sorry" + data[21:])
        case "half":
            home.db.write_bytes(data[: len(data) // 2])
        case "scribble":
            middle = len(data) // 2
            home.db.write_bytes(data[:middle] + b"\x5a" * 4096 + data[middle + 4096 :])
        case "empty":
            home.db.write_bytes(b"")


@pytest.mark.parametrize("how", ["header", "half", "scribble", "empty"])
def test_a_damaged_database_is_found_said_so_and_not_written_while_a_run_lives(
    home, how, monkeypatch
):
    monkeypatch.setattr(database, "_MEND_S", 0.05)
    damage(home, how)
    before = home.db.read_bytes()
    lock, living = take_lock(home.run("arith-grpo-1").lock), share_lock(home.db_lock, 1)
    with pytest.raises(UserError) as caught, Store(home) as store:
        store.check()
    assert lock is not None and living is not None
    os.close(lock)
    os.close(living)
    assert caught.value.code == "HOME_UNUSABLE" and caught.value.retryable
    assert "damaged" in caught.value.message and str(home.db) in caught.value.message
    assert "arith-grpo-1" in caught.value.message
    assert home.db.read_bytes() == before and home.damaged_databases() == []

BEGIN TRANSACTION;
CREATE TABLE deployments (
        deployment_id TEXT PRIMARY KEY,
        base_name TEXT NOT NULL,
        base_path TEXT NOT NULL,
        state TEXT NOT NULL DEFAULT 'starting',
        url TEXT NOT NULL DEFAULT '',
        adapters TEXT NOT NULL,
        serve_base INTEGER NOT NULL,
        memory_bytes INTEGER NOT NULL,
        created REAL NOT NULL,
        ended REAL,
        message TEXT NOT NULL DEFAULT ''
    );
CREATE TABLE envs (
        env_id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        hash TEXT NOT NULL,
        kind TEXT NOT NULL,
        created REAL NOT NULL,
        pushed REAL NOT NULL,
        info TEXT NOT NULL
    );
INSERT INTO "envs" VALUES('sums@0123456789ab','sums','0123456789ab','single',1.7953091746056826115e+09,1.79530917461386656762e+09,'{"rows": {"train": 40, "heldout": 20}}');
CREATE TABLE estimates (
        at REAL NOT NULL,
        kind TEXT NOT NULL,
        features TEXT NOT NULL,
        predicted REAL NOT NULL,
        actual REAL NOT NULL
    );
INSERT INTO "estimates" VALUES(1.79530917558337950708e+09,'grpo','{"run_id": "sums-grpo-1", "device": "cpu", "model": "pebble"}',0.004835,8.83333333333333301125e-05);
CREATE TABLE history (
        run_id TEXT NOT NULL REFERENCES runs (run_id),
        at REAL NOT NULL,
        came_from TEXT NOT NULL,
        went_to TEXT NOT NULL
    );
INSERT INTO "history" VALUES('sums-grpo-1',1.79530917484535050389e+09,'','queued');
INSERT INTO "history" VALUES('sums-grpo-1',1.79530917487493896483e+09,'queued','preparing');
INSERT INTO "history" VALUES('sums-grpo-1',1.79530917516957139968e+09,'preparing','running');
INSERT INTO "history" VALUES('sums-grpo-1',1.79530917535746884338e+09,'running','done');
INSERT INTO "history" VALUES('sums-grpo-2',1.79530917569334602353e+09,'','queued');
INSERT INTO "history" VALUES('sums-grpo-2',1.7953091757148411274e+09,'queued','preparing');
INSERT INTO "history" VALUES('sums-grpo-3',1.79530917577732968331e+09,'','queued');
INSERT INTO "history" VALUES('sums-grpo-4',1.79530917585295414929e+09,'','queued');
INSERT INTO "history" VALUES('sums-grpo-4',1.7953091758713941574e+09,'queued','cancelled');
INSERT INTO "history" VALUES('sums-grpo-2',1.79530917592153954499e+09,'preparing','running');
CREATE TABLE requests (
        request_id TEXT PRIMARY KEY,
        body_hash TEXT NOT NULL,
        run_id TEXT NOT NULL REFERENCES runs (run_id),
        at REAL NOT NULL
    );
INSERT INTO "requests" VALUES('golden-done','0c38810fa9235360492d1769f50cf1ac66530a37a70e1a56b91a33e76e0acce3','sums-grpo-1',1.79530917484533929827e+09);
INSERT INTO "requests" VALUES('golden-in flight','50500a6a576eb724b752c0de580d42f3f3850d686fee8b41eab65d606e0f5379','sums-grpo-2',1.79530917569333291054e+09);
INSERT INTO "requests" VALUES('golden-waiting','0c465a187008d14acf9656a915699f3b94858ad7478139e683f6a7a39f541a88','sums-grpo-3',1795309175.77732);
INSERT INTO "requests" VALUES('golden-unwanted','56f43ec58eb78d309f3b00a51d45de5eb1c4e3360eb4420281e00368fddb8a56','sums-grpo-4',1.79530917585294198983e+09);
CREATE TABLE runs (
        rowid INTEGER PRIMARY KEY AUTOINCREMENT,
        run_id TEXT NOT NULL UNIQUE,
        name TEXT NOT NULL,
        number INTEGER NOT NULL,
        kind TEXT NOT NULL,
        algorithm TEXT NOT NULL,
        state TEXT NOT NULL,
        created REAL NOT NULL,
        queued REAL NOT NULL,
        started REAL,
        ended REAL,
        attempt INTEGER NOT NULL,
        device TEXT NOT NULL DEFAULT '',
        request_id TEXT NOT NULL DEFAULT '',
        env_id TEXT NOT NULL DEFAULT '',
        model TEXT NOT NULL DEFAULT '',
        note TEXT NOT NULL DEFAULT '',
        expect TEXT NOT NULL DEFAULT '',
        parent TEXT NOT NULL DEFAULT '',
        max_gpu_hours REAL NOT NULL DEFAULT 0,
        estimated_hours REAL NOT NULL DEFAULT 0,
        spent_hours REAL NOT NULL DEFAULT 0,
        spent_before REAL NOT NULL DEFAULT 0,
        continuations INTEGER NOT NULL DEFAULT 0,
        reason_kind TEXT NOT NULL DEFAULT '',
        reason TEXT NOT NULL DEFAULT '',
        hint TEXT NOT NULL DEFAULT '',
        verdict TEXT NOT NULL DEFAULT '',
        UNIQUE (name, number)
    );
INSERT INTO "runs" VALUES(1,'sums-grpo-1','sums-grpo',1,'train','grpo','done',1.79530917484519076344e+09,1.79530917484519076344e+09,1.79530917516951417922e+09,1.79530917534824419022e+09,1,'cpu','golden-done','sums@0123456789ab','pebble','done','','',2.0,0.004835,8.83333333333333301125e-05,0.0,0,'','','','better');
INSERT INTO "runs" VALUES(2,'sums-grpo-2','sums-grpo',2,'train','grpo','running',1.79530917569319367404e+09,1.79530917569319367404e+09,1.79530917592148375511e+09,NULL,1,'cpu','golden-in flight','sums@0123456789ab','pebble','in flight','','',2.0,0.0334,0.0,0.0,0,'','','','');
INSERT INTO "runs" VALUES(3,'sums-grpo-3','sums-grpo',3,'train','grpo','queued',1.79530917577718901632e+09,1.79530917577718901632e+09,NULL,NULL,1,'','golden-waiting','sums@0123456789ab','pebble','waiting','','',2.0,0.004807,0.0,0.0,0,'','','','');
INSERT INTO "runs" VALUES(4,'sums-grpo-4','sums-grpo',4,'train','grpo','cancelled',1.7953091758527648449e+09,1.7953091758527648449e+09,NULL,1.79530917587132525436e+09,1,'','golden-unwanted','sums@0123456789ab','pebble','unwanted','','',2.0,0.004807,0.0,0.0,0,'cancelled','not wanted','No checkpoint is complete: submit_train(resume="sums-grpo-4") starts again from step 0.','');
CREATE INDEX runs_by_state ON runs (state, queued);
CREATE INDEX history_by_run ON history (run_id);
CREATE INDEX envs_by_name ON envs (name, pushed);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('runs',4);
COMMIT;
PRAGMA user_version = 1;

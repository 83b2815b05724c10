-- A store as schema version 1 wrote it. Never edited: what was released must open for ever.
BEGIN TRANSACTION;
CREATE TABLE events (
            seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
            job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
            at REAL NOT NULL, kind TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
            attempt INTEGER NOT NULL, instance TEXT, message TEXT NOT NULL);
INSERT INTO "events" VALUES(1,'digits-1',1000.0,'JobSubmitted','QUEUED','SUBMITTED',0,NULL,'submitted by ann');
INSERT INTO "events" VALUES(2,'digits-2',1010.0,'JobSubmitted','QUEUED','SUBMITTED',0,NULL,'submitted by bo');
INSERT INTO "events" VALUES(3,'digits-1',1060.5,'JobEnded','SUCCEEDED','COMPLETED',0,NULL,'all instances exited 0');
INSERT INTO "events" VALUES(4,'digits-2',1061.0,'InstanceStarted','RUNNING','PLACED',0,'master-0','it''s running');
CREATE TABLE jobs (
            id TEXT NOT NULL PRIMARY KEY, cluster TEXT NOT NULL, name TEXT NOT NULL, user TEXT NOT NULL,
            mode TEXT NOT NULL, state TEXT NOT NULL, priority INTEGER NOT NULL, submitted_at REAL NOT NULL,
            ended_at REAL, doc TEXT NOT NULL, labels TEXT NOT NULL);
INSERT INTO "jobs" VALUES('digits-1','10.0.0.1:6379','digits','ann','ddp','SUCCEEDED',5,1000.0,1060.5,'{"attempt": 0}','{"team": "vision"}');
INSERT INTO "jobs" VALUES('digits-2','10.0.0.1:6379','digits','bo','ddp','RUNNING',5,1010.0,NULL,'{}','{}');
CREATE TABLE leases (
            cluster TEXT NOT NULL PRIMARY KEY, host TEXT NOT NULL, pid INTEGER NOT NULL, token TEXT NOT NULL,
            acquired_at REAL NOT NULL, heartbeat_at REAL NOT NULL, lease_s REAL NOT NULL);
INSERT INTO "leases" VALUES('10.0.0.1:6379','head',4711,'b74e8b0a190649fc810fca6637f9f2ed',990.0,990.0,30.0);
CREATE TABLE schema_version (version INTEGER NOT NULL);
INSERT INTO "schema_version" VALUES(1);
CREATE INDEX jobs_by_time ON jobs (submitted_at, id);
CREATE INDEX jobs_by_cluster ON jobs (cluster, state);
CREATE TRIGGER jobs_end_for_ever BEFORE UPDATE ON jobs
            WHEN OLD.state IN ('SUCCEEDED', 'FAILED', 'STOPPED')
            BEGIN SELECT RAISE(ABORT, 'a terminal state never changes'); END;
CREATE INDEX events_by_job ON events (job_id, seq);
CREATE TRIGGER events_stay BEFORE UPDATE ON events
            BEGIN SELECT RAISE(ABORT, 'an event never changes'); END;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('events',4);
COMMIT;

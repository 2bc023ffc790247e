BEGIN TRANSACTION;
CREATE TABLE latimer_items (
            conversation TEXT NOT NULL,
            position BIGINT NOT NULL,
            id TEXT NOT NULL,
            size BIGINT NOT NULL,
            media TEXT,
            item TEXT NOT NULL,
            PRIMARY KEY (conversation, position)
        );
INSERT INTO "latimer_items" VALUES('conv_0660f8553a428886a87bef627275e551bab1964a81ed5760',1,'msg_1',413,NULL,'{"id":"msg_1","type":"message","role":"user","content":"Hello"}');
CREATE TABLE latimer_media (
            hash TEXT NOT NULL PRIMARY KEY,
            size BIGINT NOT NULL,
            data BLOB
        );
CREATE TABLE latimer_metadata (
            owner TEXT NOT NULL,
            kind TEXT NOT NULL,
            key TEXT NOT NULL,
            value TEXT NOT NULL,
            created_at BIGINT NOT NULL,
            id TEXT NOT NULL,
            PRIMARY KEY (owner, kind, key, value, created_at, id)
        ) WITHOUT ROWID;
INSERT INTO "latimer_metadata" VALUES('','chat.completion','a','b',1795469558301254,'chatcmpl-0660f8553a42460bbbdb7928');
INSERT INTO "latimer_metadata" VALUES('','conversation','c','d',1795469558301320,'conv_0660f8553a428886a87bef627275e551bab1964a81ed5760');
INSERT INTO "latimer_metadata" VALUES('','response','a','b',1795469558301301,'resp_0660f8553a4275c18fbcac15');
INSERT INTO "latimer_metadata" VALUES('','response','a','b',1795469558301310,'resp_0660f8553a427e3fff3482ce');
CREATE TABLE latimer_object_media (
            hash TEXT NOT NULL,
            id TEXT NOT NULL,
            PRIMARY KEY (hash, id)
        ) WITHOUT ROWID;
CREATE TABLE latimer_objects (
            id TEXT NOT NULL PRIMARY KEY,
            kind TEXT NOT NULL,
            owner TEXT NOT NULL,
            created_at BIGINT NOT NULL,
            used_at BIGINT NOT NULL,
            parent TEXT,
            chain TEXT,
            model TEXT NOT NULL,
            request_id TEXT NOT NULL,
            size BIGINT NOT NULL,
            metadata TEXT NOT NULL,
            media TEXT,
            request TEXT NOT NULL,
            reply TEXT NOT NULL,
            input TEXT NOT NULL
        );
INSERT INTO "latimer_objects" VALUES('conv_0660f8553a428886a87bef627275e551bab1964a81ed5760','conversation','',1795469558301320,1795469559677607,NULL,NULL,'','req_2',1157,'{"c":"d"}',NULL,'{}','{"id":"conv_0660f8553a428886a87bef627275e551bab1964a81ed5760","object":"conversation","created_at":1795469558,"metadata":{"c":"d"}}','{}');
INSERT INTO "latimer_objects" VALUES('chatcmpl-0660f8553a42460bbbdb7928','chat.completion','',1795469558301254,1795469558301254,NULL,NULL,'demo','req_1',820,'{"a":"b"}',NULL,'{"store":true,"temperature":0.5}','{"id":"chatcmpl-0660f8553a42460bbbdb7928","object":"chat.completion","metadata":{"a":"b"},"choices":[{"message":{"content":"Hi"}}]}','{"messages":[{"role":"user","content":"Hello"}]}');
INSERT INTO "latimer_objects" VALUES('resp_0660f8553a4275c18fbcac15','response','',1795469558301301,1795469558301301,NULL,'resp_0660f8553a4275c18fbcac15','demo','req_1',765,'{"a":"b"}',NULL,'{"temperature":0.5}','{"id":"resp_0660f8553a4275c18fbcac15","object":"response","metadata":{"a":"b"},"choices":[{"message":{"content":"Hi"}}]}','{"input":"Hello"}');
INSERT INTO "latimer_objects" VALUES('resp_0660f8553a427e3fff3482ce','response','',1795469558301310,1795469558301310,'resp_0660f8553a4275c18fbcac15','resp_0660f8553a4275c18fbcac15','demo','req_1',765,'{"a":"b"}',NULL,'{"temperature":0.5}','{"id":"resp_0660f8553a427e3fff3482ce","object":"response","metadata":{"a":"b"},"choices":[{"message":{"content":"Hi"}}]}','{"input":"Hello"}');
CREATE TABLE latimer_schema (version INTEGER NOT NULL);
INSERT INTO "latimer_schema" VALUES(1);
CREATE TABLE latimer_totals (
            name TEXT NOT NULL PRIMARY KEY,
            value BIGINT NOT NULL
        );
INSERT INTO "latimer_totals" VALUES('objects',4);
INSERT INTO "latimer_totals" VALUES('bytes',3507);
CREATE INDEX latimer_objects_by_time
            ON latimer_objects (owner, kind, created_at, id);
CREATE INDEX latimer_objects_by_model
            ON latimer_objects (owner, kind, model, created_at, id);
CREATE INDEX latimer_objects_by_age ON latimer_objects (created_at, id);
CREATE INDEX latimer_objects_by_use ON latimer_objects (used_at, id);
CREATE INDEX latimer_objects_by_chain
            ON latimer_objects (chain) WHERE chain IS NOT NULL;
CREATE INDEX latimer_items_by_id ON latimer_items (conversation, id);
CREATE INDEX latimer_object_media_by_object ON latimer_object_media (id);
COMMIT;

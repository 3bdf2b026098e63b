-- Tenants take turns (see src/request/turns.rs). A parked job waits for its next attempt, a breaker or a callback; it has no place
-- among its tenant's jobs until it is due. An express job may be claimed out of turn.
ALTER TABLE request_record ADD COLUMN is_parked INTEGER NOT NULL DEFAULT 0;
ALTER TABLE request_record ADD COLUMN is_express INTEGER NOT NULL DEFAULT 0;
CREATE INDEX request_record_turn ON request_record (downstream, tenant_id, claimable_at)
    WHERE claimable_at IS NOT NULL AND is_parked = 0;
CREATE INDEX request_record_parked ON request_record (downstream, claimable_at) WHERE is_parked = 1;
CREATE INDEX request_record_express ON request_record (downstream, claimable_at) WHERE is_express = 1;

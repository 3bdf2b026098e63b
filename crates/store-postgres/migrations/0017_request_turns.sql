-- Whose job it is, while it has a place among its tenant's jobs, and whether it may be claimed out of turn (see
-- src/request/turns.rs). Without a tenant are parked jobs, and those of servers of the version before, which name the columns that
-- they write: both get their tenant when they are due. The indexes are created outside of the migrations.
ALTER TABLE request_job ADD COLUMN waiting_tenant text COLLATE "C", ADD COLUMN is_express boolean;

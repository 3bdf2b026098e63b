#!/bin/bash
# Fills a store with many requests, messages, slots, purchases and users, and measures the audit of it.
#
#   bench/audit.sh postgres|sqlite [millions] [weir]
#
# It needs Postgres' binaries or sqlite3, curl, jq, and about 2 GB of disk for a million of each. Nothing runs it but you. Rows are
# written in SQL, in batches: through the API it would take hours. Everything is deleted at the end.
set -euo pipefail

engine=${1:?postgres or sqlite} millions=${2:-10} weir=${3:-target/release/weir}
work=$(mktemp -d "${TMPDIR:-/tmp}/weir-audit-XXXXXX")
port=$((20000 + RANDOM % 20000))
data=$work/data
# Recent, so that nothing is purged, and one request a millisecond.
began=$(($(date +%s%3N) - millions * 1000000))
mkdir -m 700 "$data"

stop() {
    [[ -z ${server:-} ]] || { kill "$server" 2>/dev/null; wait "$server" 2>/dev/null; } || true
    [[ $engine != postgres ]] || as_postgres "$bin/pg_ctl" -D "$work/pg" -m immediate stop >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap stop EXIT

as_postgres() { if [[ $(id -u) == 0 ]]; then runuser -u postgres -- "$@"; else "$@"; fi; }
bin=$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -V | tail -1)

start_postgres() {
    chmod 755 "$work"
    [[ $(id -u) != 0 ]] || { mkdir -p "$work/pg" && chown postgres "$work/pg"; }
    [[ -f $work/pg/PG_VERSION ]] || as_postgres "$bin/initdb" -N -D "$work/pg" -U weir -A trust -E UTF8 >/dev/null
    as_postgres "$bin/pg_ctl" -D "$work/pg" -w -l "$work/pg/log" -o "-p $((port + 1)) -k '' -c shared_buffers=256MB \
        -c max_wal_size=4GB ${1:-}" start >/dev/null
    store="postgres://weir@127.0.0.1:$((port + 1))/postgres"
}

start_weir() {
    WEIR_LISTEN=127.0.0.1:$port WEIR_GRPC_LISTEN=127.0.0.1:0 WEIR_DATA=$data WEIR_STORE=${store:-embedded} WEIR_ADMIN_KEY=audit-audit-audit-audit \
        WEIR_ROLES=${1:-api,reconciler} "$weir" serve >"$work/weir.log" 2>&1 &
    server=$!
    for _ in $(seq 6000); do
        curl -sf "http://127.0.0.1:$port/readyz" >/dev/null && return
        kill -0 "$server" || { cat "$work/weir.log"; exit 1; }
        sleep 0.1
    done
}

stop_weir() { kill "$server"; wait "$server" || true; server=; }
audit() { curl -sS -w '%{stderr}%{http_code} in %{time_total} s\n' -H 'x-admin-key: audit-audit-audit-audit' \
    "http://127.0.0.1:$port/admin/audit${1:-}"; }

# A batch of 100,000 of each, the n-th.
fill_postgres() {
    cat <<SQL
SET synchronous_commit = off;
INSERT INTO request_record (request_id, tenant_id, request_type, status, payload, payload_key_id, created_at, updated_at)
SELECT (lpad(to_hex($began + $1 * 100000 + n), 12, '0') || '7000' || '8000' || lpad(to_hex(n), 12, '0'))::uuid,
       'tenant-' || n % 100, 'payment', (ARRAY['COMPLETED','COMPLETED','COMPLETED','FAILED_PERMANENT','FAILED_RETRY_EXHAUSTED'])[1 + n % 5],
       decode(repeat('ab', 100), 'hex'), 'key', now(), now() FROM generate_series(1, 100000) AS n;
UPDATE request_ledger SET accepted = accepted + 100000;
INSERT INTO queue_pack (topic, shard, first_id, count, messages)
SELECT 'sms-outbound', n % 16, ($1 * 10000 + n::bigint) * 1024, 10, decode(repeat('cd', 1000), 'hex') FROM generate_series(1, 10000) AS n;
UPDATE queue_ledger SET accepted = accepted + 100000;
INSERT INTO rate_limit_event_slot (event_id, config_name, requested_time, window_start, scheduled_time)
SELECT 'event-' || $1 * 100000 + n, 'default', 'epoch'::timestamptz + (w || ' s')::interval, 'epoch'::timestamptz + (w || ' s')::interval,
       'epoch'::timestamptz + (w || ' s')::interval + n % 100 * interval '1 ms'
FROM (SELECT n, $1 * 1000 + n / 100 AS w FROM generate_series(0, 99999) AS n) AS slots;
INSERT INTO rate_limit_window_counter (config_name, window_start, slot_count, status)
SELECT 'default', 'epoch'::timestamptz + (($1 * 1000 + n) || ' s')::interval, 100, 'OPEN' FROM generate_series(0, 999) AS n;
INSERT INTO purchases (product_id, user_id, number, purchased_at, created_by)
SELECT 1, 'buyer-' || $1 * 100000 + n, $1 * 100000 + n, now(), 'weir' FROM generate_series(1, 100000) AS n;
UPDATE products SET sold = sold + 100000;
INSERT INTO rate_limit_store (user_id, rate_limit, time_window, current_count, last_refresh_time)
SELECT 'user-' || $1 * 100000 + n, 5, 60, 3, now() FROM generate_series(1, 100000) AS n;
SQL
}
prepare_postgres="INSERT INTO request_ledger (slot) VALUES (1);
INSERT INTO queue_ledger (topic, slot) VALUES ('sms-outbound', 1);
INSERT INTO rate_limit_config VALUES ('default', 1, 1000, 'PT1S', 1000, true, now());
INSERT INTO products (sku, product_name, initial_stock, start_time, end_time, created_by)
VALUES ('TICKET', 'ticket', 2000000000, now() + interval '1 day', now() + interval '2 days', 'admin');"

fill_sqlite() {
    cat <<SQL
BEGIN;
WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < 100000)
INSERT INTO request_record (request_id, tenant_id, request_type, status, payload, payload_key_id, created_at, updated_at)
SELECT printf('%08x-%04x-7000-8000-%012x', ($began + $1 * 100000 + n) >> 16, ($began + $1 * 100000 + n) & 65535, n),
       'tenant-' || n % 100, 'payment', CASE n % 5 WHEN 3 THEN 'FAILED_PERMANENT' WHEN 4 THEN 'FAILED_RETRY_EXHAUSTED' ELSE 'COMPLETED' END,
       zeroblob(100), 'key', 1, 1 FROM s;
UPDATE request_ledger SET accepted = accepted + 100000;
WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < 10000)
INSERT INTO queue_pack SELECT 'sms-outbound', ($1 * 10000 + n) * 1024, 10, zeroblob(1000) FROM s;
UPDATE queue_ledger SET accepted = accepted + 100000;
WITH RECURSIVE s (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM s WHERE n < 99999)
INSERT INTO rate_limit_event_slot
SELECT 'event-' || ($1 * 100000 + n), 'default', ($1 * 1000 + n / 100) * 1000000, ($1 * 1000 + n / 100) * 1000000,
       ($1 * 1000 + n / 100) * 1000000 + n % 100 * 1000 FROM s;
UPDATE row_count SET amount = amount + 100000 WHERE table_name = 'rate_limit_event_slot';
WITH RECURSIVE s (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM s WHERE n < 999)
INSERT INTO rate_limit_window_counter SELECT 'default', 0, ($1 * 1000 + n) * 1000000, 100, 'OPEN' FROM s;
WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < 100000)
INSERT INTO purchases (product_id, user_id, number, purchased_at, created_at, created_by)
SELECT 1, 'buyer-' || ($1 * 100000 + n), $1 * 100000 + n, 1, 1, 'weir' FROM s;
UPDATE products SET sold = sold + 100000;
WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < 100000)
INSERT INTO rate_limit_store SELECT 'user-' || ($1 * 100000 + n), 5, 60, 3, 1 FROM s;
COMMIT;
SQL
}
prepare_sqlite="INSERT INTO queue_ledger (topic) VALUES ('sms-outbound');
INSERT INTO rate_limit_config (config_name, version, max_per_window, window_size, window_size_ms, is_active, created_at)
VALUES ('default', 1, 1000, 'PT1S', 1000, 1, 1);
INSERT INTO products (sku, product_name, initial_stock, start_time, end_time, created_at, created_by)
VALUES ('TICKET', 'ticket', 2000000000, 4102444800000000, 4102444900000000, 1, 'admin');"

sql() {
    if [[ $engine == postgres ]]; then
        psql -q -v ON_ERROR_STOP=1 -h 127.0.0.1 -p $((port + 1)) -U weir postgres >/dev/null
    else
        { echo 'PRAGMA synchronous = OFF; PRAGMA cache_size = -200000;' && cat; } | sqlite3 -bail "$data/weir.db" >/dev/null
    fi
}

sizes() {
    if [[ $engine == postgres ]]; then
        psql -At -h 127.0.0.1 -p $((port + 1)) -U weir postgres -c "SELECT relname || ' ' || (pg_total_relation_size(oid) / 1000000) || ' MB'
            FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace AND pg_total_relation_size(oid) > 10000000 ORDER BY 1"
    else
        sqlite3 "$data/weir.db" "SELECT coalesce((SELECT tbl_name FROM sqlite_schema s WHERE s.name = d.name), d.name) || ' ' || (sum(pgsize) / 1000000) || ' MB'
            FROM dbstat d WHERE aggregate = 1 GROUP BY coalesce((SELECT tbl_name FROM sqlite_schema s WHERE s.name = d.name), d.name)
            HAVING sum(pgsize) > 10000000" 2>/dev/null || du -m "$data/weir.db"
    fi
}

# Without indexes and triggers rows are written in a tenth of the time. The indexes are created afterwards; Weir creates the
# triggers, and counts the rows, as on a database of the version before.
dump() { pg_dump -h 127.0.0.1 -p $((port + 1)) -U weir -s --section="$1" -t 'request_record' -t 'rate_limit_event_slot' -t 'purchases' \
    -t 'rate_limit_store' -t 'queue_pack' -t 'rate_limit_window_counter' postgres | grep -v weir_count_; }
if [[ $engine == postgres ]]; then
    start_postgres
    start_weir && stop_weir
    dump pre-data >"$work/pre.sql" && dump post-data >"$work/post.sql"
    echo 'DROP TABLE request_record, rate_limit_event_slot, purchases, rate_limit_store, queue_pack, rate_limit_window_counter' | sql
    sql <"$work/pre.sql"
    as_postgres "$bin/pg_ctl" -D "$work/pg" -w stop >/dev/null
    start_postgres '-c fsync=off -c wal_level=minimal -c max_wal_senders=0 -c autovacuum=off -c maintenance_work_mem=512MB'
else
    start_weir && stop_weir
fi
prepare=prepare_$engine
echo "${!prepare}" | sql
echo "filling with $millions million of each"
time (for n in $(seq 0 $((millions * 10 - 1))); do "fill_$engine" "$n"; done | sql)
if [[ $engine == postgres ]]; then
    sql <"$work/post.sql"
    echo 'VACUUM ANALYZE; CHECKPOINT;' | sql
    as_postgres "$bin/pg_ctl" -D "$work/pg" -w stop >/dev/null
    start_postgres
fi
sizes
time start_weir
[[ $engine != postgres ]] || time (until grep -q 'counted from now on.*rate_limit_store\|rate_limit_store.*counted from now on' "$work/weir.log"; do sleep 0.2; done)
for _ in 1 2 3 4 5; do audit >/dev/null; done
audit '?full=true' | jq -c '{ok, ofRows, request, slot, quota, recounting}'
for _ in $(seq 1200); do
    sleep 1
    [[ $(audit 2>/dev/null | jq .recounting) == null ]] && break
done
audit | jq -c '{ok, ofRows, recount}'

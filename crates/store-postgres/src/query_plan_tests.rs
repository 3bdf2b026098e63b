//! Checks one rule for the query plans of all statements: their cost must not depend on Postgres's statistics of a table. A
//! connection caches its plans, and a table that was empty when a plan was made may hold a million rows when it runs.
//!
//! A join of an array with a table that seems empty reads the table, and the whole array again for each row. Three forms have
//! only one plan, an index look-up for each element:
//!
//! - `CROSS JOIN LATERAL (SELECT … FROM t WHERE t.key = new.key OFFSET 0)`, where nothing is changed;
//! - `WHERE t.key = ANY(ARRAY[new.key])` in an update: unlike `=` it cannot use a sorted scan of `t`, so the only alternative to
//!   the look-up is a sequential scan, which sessions have switched off;
//! - `t.ctid = …` of the row that such a `LATERAL` finds, for keys of several columns. Only for rows that nobody else may be
//!   changing: a version that is newer than the statement is not found.

use std::path::{Path, PathBuf};

use serde_json::Value;
use weir_testkit::postgres::Server;

use crate::Postgres;

/// Files whose statements run on connections of their own, outside of the pool.
const NOT_CACHED: [&str; 7] = [
    "migrate.rs",
    "query_plan_tests.rs",
    "requirements.rs",
    "listener.rs",
    "book/recount.rs",
    "book/tests.rs",
    "book/triggers.rs",
];

/// States of the tables: new, after a vacuum while they were empty, and with rows that are in the statistics.
const STATES: [(&str, &str); 3] =
    [("never vacuumed", ""), ("vacuumed while empty", "VACUUM ANALYZE"), ("filled", FILL)];
const FILL: &str = "
    INSERT INTO request_record (request_id, tenant_id, request_type, status, payload, payload_key_id, created_at, updated_at)
    SELECT gen_random_uuid(), n % 10, 'payment', 'ACCEPTED', '', 'key', now(), now() FROM generate_series(1, 2000) AS n;
    INSERT INTO request_job (request_id, downstream, claimable_at, waiting_tenant, is_express)
    SELECT request_id, 'default', now(), tenant_id, false FROM request_record;
    INSERT INTO idempotency_record (tenant_id, idempotency_key, payload_hash, request_id, expires_at)
    SELECT tenant_id, request_id, '', request_id, now() FROM request_record;
    INSERT INTO rate_limit_store SELECT n, 1, 1, 0, now() FROM generate_series(1, 2000) AS n;
    ANALYZE";

/// Statements that may read a whole table, and why.
const EXCEPTIONS: &[(&str, &str, &str)] = &[
    ("quota.rs", "AUDIT", BOOKS),
    ("slot.rs", "AUDIT", BOOKS),
    ("request/upkeep.rs", "BOOKS", BOOKS),
    ("sale.rs", "AUDIT", BOOKS),
    ("tier/hold.rs", "AUDIT", BOOKS),
    ("request/upkeep.rs", "COUNT", "dead letters are counted every five seconds at most"),
    // Tables that stay small whatever callers do.
    ("book.rs", "COUNTS", "folding keeps some hundred rows, and one for each topic and product"),
    ("book.rs", "LEDGERS", "there are 64 rows for each topic"),
    ("book.rs", "PRODUCTS", "products are made by operators"),
    ("book.rs", "COMPLETE", "there is a row for each table that is counted"),
    ("book.rs", "DIFFERENCES", "a recount names ten differences of a kind"),
    ("quota.rs", "RAISE_EPOCH", ONE_ROW),
    ("quota.rs", "PROBE", ONE_ROW),
    ("request/upkeep.rs", "ROLLOUT", ONE_ROW),
    ("request/tenants.rs", "LIMITS", FEW_TENANTS),
    ("request/tenants.rs", "PUT_LIMIT", FEW_TENANTS),
    ("request/sealing.rs", "KEYS", "there is a row for each key that anything is sealed with"),
    ("request/sealing.rs", "HASH_KEYS", FEW_KEYS),
    ("request/sealing.rs", "ADD_HASH_KEY", FEW_KEYS),
    ("request/sealing.rs", "ADD_FIRST_HASH_KEY", FEW_KEYS),
    ("request/sealing.rs", "REMOVE_HASH_KEY", FEW_KEYS),
    ("request/sealing.rs", "BEGIN_HASHING", "it reads one row, once in the life of a database"),
    ("tier.rs", "TIERS", "there are four tiers"),
    ("tier/policy.rs", "ALL", "there are POLICIES_MAX policies at most"),
    ("tier/policy.rs", "PUT", "there are POLICIES_MAX policies at most"),
    ("tier/permit.rs", "ALL", "there are POLICIES_MAX policies at most"),
    ("tier/permit.rs", "PUT", "there are POLICIES_MAX policies at most"),
    ("clock.rs", "LOCK_SHARDS", "a topic has sixteen shards"),
    ("queue.rs", "LEASE", "a topic has sixteen shards"),
    ("sale/record.rs", "RECORD", "what is read again is a count, for one product"),
    ("queue.rs", "REPLAY", "an operator replays one dead letter, or all"),
    ("clock.rs", "RESCHEDULE_MESSAGES", CLOCK_STEP),
    ("clock.rs", "RESCHEDULE_REQUESTS", CLOCK_STEP),
];
const BOOKS: &str = "books are read whole";
const FEW_TENANTS: &str = "there are TENANT_LIMITS_MAX rows at most";
const FEW_KEYS: &str = "there is a row for each request key that opens the key of the hashes";
const ONE_ROW: &str = "the table has one row";
const CLOCK_STEP: &str = "read a page at a time, at the start and when the clock was set back";

/// Statements that must find the rows of a table by this index, and by these columns of it. Others find them, too, but read through
/// all jobs of a downstream, of which one tenant may have a million.
const REQUIRED_INDEXES: &[(&str, &str, &str, &[&str])] = &[
    ("request/turns.rs", "FIRST", "request_job_claimable", &["downstream"]),
    ("request/turns.rs", "HAS_PARKED", "request_job_parked", &["downstream", "claimable_at"]),
    ("request/turns.rs", "UNPARK", "request_job_parked", &["downstream", "claimable_at"]),
    ("request/turns.rs", "TURNS", "request_job_turn", &["downstream", "waiting_tenant"]),
    (
        "request/turns.rs",
        "CLAIM_GRANTED",
        "request_job_turn",
        &["downstream", "waiting_tenant", "claimable_at"],
    ),
    ("request/turns.rs", "HAS_EXPRESS", "request_job_express", &["downstream", "claimable_at"]),
    ("request/turns.rs", "CLAIM_EXPRESS", "request_job_express", &["downstream", "claimable_at"]),
    ("request/submit.rs", "INSERT", "request_job_turn", &["downstream", "waiting_tenant"]),
    ("request/submit/first_use.rs", "INSERT", "request_job_turn", &["downstream", "waiting_tenant"]),
];

/// One statement, by the file and the name it has there.
struct Statement {
    file: String,
    name: String,
    sql: String,
}

impl Statement {
    fn is_excepted(&self) -> bool {
        EXCEPTIONS.iter().any(|(file, name, _)| self.file == *file && self.name == *name)
    }
}

#[tokio::test]
async fn no_query_plan_depends_on_the_statistics_of_a_table() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let database = Server::shared().database("plans").await;
    let engine = Postgres::open(database.url().parse().expect("a Postgres URL"), 1).await.expect("it opens");
    let statements = statements();
    let (mut faults, mut excepted) = (Vec::new(), Vec::new());
    for (state, prepare) in STATES {
        database.execute(prepare).await;
        for statement in &statements {
            let Statement { file, name, sql } = statement;
            let plan = explain(&engine, sql).await;
            let Err(fault) = examine(&plan, false) else { continue };
            if statement.is_excepted() {
                excepted.push((file.as_str(), name.as_str()));
            } else {
                faults.push(format!("{state}: {file} {name}: {fault}\n{plan:#}\n"));
            }
        }
    }
    assert!(faults.is_empty(), "{} plans:\n{}", faults.len(), faults.concat());
    for (file, name, reason) in EXCEPTIONS {
        let is_needed = excepted.contains(&(*file, *name));
        assert!(is_needed && !reason.is_empty(), "{file} {name} needs no exception");
    }
}

#[tokio::test]
async fn claims_read_no_more_jobs_than_they_take() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let database = Server::shared().database("plans").await;
    let engine = Postgres::open(database.url().parse().expect("a Postgres URL"), 1).await.expect("it opens");
    let (statements, mut faults) = (statements(), Vec::new());
    for (state, prepare) in STATES {
        database.execute(prepare).await;
        for (file, name, index, columns) in REQUIRED_INDEXES {
            let statement = statements.iter().find(|it| it.file == *file && it.name == *name);
            let plan = explain(&engine, &statement.expect("the statement").sql).await;
            let mut scans = Vec::new();
            scans_of(&plan, "request_job", &mut scans);
            // Rows that are found by their primary key are few.
            scans.retain(|scan| scan["Index Name"] != "request_job_pkey");
            let is_right = |scan: &&Value| {
                let found_by = scan["Index Cond"].as_str().unwrap_or_default();
                scan["Index Name"] == *index && columns.iter().all(|column| found_by.contains(column))
            };
            let is_sorted = is_sorted_again(&plan, "request_job");
            if scans.is_empty() || !scans.iter().all(is_right) || is_sorted {
                faults.push(format!("{state}: {file} {name} should use {index}:\n{plan:#}\n"));
            }
        }
    }
    assert!(faults.is_empty(), "{} plans:\n{}", faults.len(), faults.concat());
}

/// Whether rows of a table are sorted by one column of it: the index should have them in order.
fn is_sorted_again(plan: &Value, table: &str) -> bool {
    let children = plan["Plans"].as_array().map(Vec::as_slice).unwrap_or_default();
    let is_sort = plan["Node Type"] == "Sort" && children.iter().any(|child| child["Relation Name"] == table);
    is_sort || children.iter().any(|child| is_sorted_again(child, table))
}

/// Collects the nodes that read a table.
fn scans_of<'a>(plan: &'a Value, table: &str, scans: &mut Vec<&'a Value>) {
    let is_read = plan["Relation Name"] == table
        && plan["Node Type"].as_str().is_some_and(|node| node.ends_with("Scan"));
    if is_read {
        scans.push(plan);
    }
    for child in plan["Plans"].as_array().map(Vec::as_slice).unwrap_or_default() {
        scans_of(child, table, scans);
    }
}

/// Returns all statements of this crate: every string literal that begins like one. Each must be a constant.
fn statements() -> Vec<Statement> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    rust_files(&sources, &mut files);
    let mut statements = Vec::new();
    for path in files {
        let file = path.strip_prefix(&sources).expect("it is in there").to_str().expect("UTF-8").to_owned();
        if NOT_CACHED.contains(&file.as_str()) {
            continue;
        }
        let text = std::fs::read_to_string(&path).expect("a source");
        let product = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
        for (before, sql) in texts(product).filter(|(_, sql)| is_statement(sql)) {
            let declared = before.trim_end().strip_suffix(": &str =").and_then(|it| it.rsplit_once("const "));
            let (_, name) =
                declared.unwrap_or_else(|| panic!("{file} has a statement without a name: {sql}"));
            statements.push(Statement { file: file.clone(), name: name.to_owned(), sql });
        }
    }
    assert!(statements.len() > 100, "{} were found", statements.len());
    statements
}

/// Returns the string literals of a source, each with all text before it. Quotation marks in comments must come in pairs.
fn texts(source: &str) -> impl Iterator<Item = (&str, String)> {
    let mut from = 0;
    std::iter::from_fn(move || {
        let start = from + source[from..].find('"')? + 1;
        let mut end = start;
        while !source[end..].starts_with('"') {
            let escaped = source[end..].starts_with('\\');
            end += source[end..].chars().take(1 + usize::from(escaped)).map(char::len_utf8).sum::<usize>();
        }
        from = end + 1;
        Some((&source[..start - 1], source[start..end].replace("\\\"", "\"")))
    })
}

fn is_statement(sql: &str) -> bool {
    let verbs = ["SELECT ", "(SELECT ", "INSERT ", "UPDATE ", "DELETE ", "WITH "];
    verbs.iter().any(|verb| sql.trim_start().starts_with(verb))
}

fn rust_files(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            rust_files(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// Returns the generic plan that a session with the usual settings caches.
async fn explain(engine: &Postgres, sql: &str) -> Value {
    let session = engine.inner.pool.session().await.expect("a session");
    let count = session.client().prepare(sql).await.expect("it can be prepared").params().len();
    let values = vec!["NULL"; count].join(", ");
    let values = if count == 0 { values } else { format!("({values})") };
    session.client().batch_execute(&format!("PREPARE examined AS {sql}")).await.expect("it can be prepared");
    let text =
        session.client().simple_query(&format!("EXPLAIN (FORMAT JSON) EXECUTE examined{values}")).await;
    let text = text.expect("it can be explained");
    let plan = text.iter().find_map(|message| match message {
        tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0),
        _ => None,
    });
    let plan: Value = serde_json::from_str(plan.expect("a plan")).expect("JSON");
    session.client().batch_execute("DEALLOCATE examined").await.expect("it can be forgotten");
    session.keep();
    plan[0]["Plan"].clone()
}

/// Checks that no table is read whole except below a limit, and none repeatedly for the rows of another except through an index.
fn examine(plan: &Value, is_limited: bool) -> Result<(), String> {
    let is_limited = is_limited || plan["Node Type"] == "Limit";
    if reads_whole(plan) && !is_limited {
        return Err(format!("all of {} is read", plan["Relation Name"]));
    }
    let children = plan["Plans"].as_array().map(Vec::as_slice).unwrap_or_default();
    if plan["Node Type"] == "Nested Loop" {
        let inner = children.iter().find(|child| child["Parent Relationship"] == "Inner");
        let again = first_read(inner.expect("a loop has an inner side"));
        if !is_lookup(again) {
            return Err(format!("{} is read again for every row", again["Node Type"]));
        }
    }
    // A limit ends what its own rows are read from, and not what is evaluated for each of them.
    let is_source = |child: &Value| {
        child["Parent Relationship"] != "SubPlan" && child["Parent Relationship"] != "InitPlan"
    };
    children.iter().try_for_each(|child| examine(child, is_limited && is_source(child)))
}

/// Returns the node that a node reads first, beside what is evaluated once before.
fn first_read(plan: &Value) -> &Value {
    let is_read_again = |child: &&Value| child["Parent Relationship"] != "InitPlan";
    match plan["Plans"].as_array().and_then(|children| children.iter().find(is_read_again)) {
        Some(child) => first_read(child),
        None => plan,
    }
}

fn reads_whole(plan: &Value) -> bool {
    plan["Relation Name"].is_string()
        && plan["Node Type"].as_str().is_some_and(|node| node.ends_with("Scan"))
        && !is_lookup(plan)
}

fn is_lookup(plan: &Value) -> bool {
    plan["Index Cond"].is_string() || plan["TID Cond"].is_string()
}

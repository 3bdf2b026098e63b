//! Checks the query plans of all statements: none scans a whole table, and none sorts rows that an index has in order.
//! There is only one writer, so every write waits for a statement whose cost grows with a table.
//!
//! Statements are found in the sources: every constant that begins like one. Statements that are composed at run time are
//! listed in [`composed`].

use std::path::{Path, PathBuf};

use rusqlite::{Connection, params_from_iter, types::Null};

use crate::{migrate, multi_insert, request};

/// Statements that may scan a whole table or sort, and why.
const EXCEPTIONS: &[(&str, &str, &str)] = &[
    // Audits read whole tables on a read connection, while the writer continues.
    ("quota.rs", "COUNT", AUDIT),
    ("quota.rs", "OVER_LIMIT", AUDIT),
    ("slot.rs", "TOTALS", AUDIT),
    ("slot.rs", "DIFFERENT", AUDIT),
    ("request/maintenance.rs", "AUDIT", AUDIT),
    ("sale.rs", "TOTALS", AUDIT),
    ("sale.rs", "DIFFERENT", AUDIT),
    ("sale.rs", "ITEMS", AUDIT),
    ("tier/hold.rs", "AUDIT", AUDIT),
    (
        "clock.rs",
        "REQUESTS_AHEAD",
        "a read connection scans open requests, at the start and when a clock has stepped",
    ),
    ("request/maintenance.rs", "COUNT", "a read connection counts dead letters, every five seconds at most"),
    // Tables that are small whatever callers do.
    ("book.rs", "COUNTS", BOOKS),
    ("book.rs", "COUNTED_SLOTS", BOOKS),
    ("book.rs", "LEDGERS", BOOKS),
    ("book.rs", "PRODUCTS", BOOKS),
    ("book.rs", "HAS_EMPTY", BOOKS),
    ("book.rs", "DELETE_EMPTY", "only when there are many, of products, topics and configs that are gone"),
    ("book.rs", "DIFFERENCES", "a recount names ten differences of a kind"),
    ("tier.rs", "TIERS", "there are four tiers"),
    ("request/tenants.rs", "NEXT", "there is a row for each tenant that is erased at this moment"),
    ("request/tenants.rs", "LIMITS", FEW_TENANTS),
    ("request/tenants.rs", "PUT_LIMIT", FEW_TENANTS),
    ("request/sealing.rs", "KEYS", "there is a row for each encryption key in use"),
    ("request/sealing.rs", "HASH_KEYS", FEW_KEYS),
    ("request/sealing.rs", "REMOVE_HASH_KEY", FEW_KEYS),
    (
        "tier/policy.rs",
        "ALL",
        "there are POLICIES_MAX policies at most; read when the server starts and after a change",
    ),
    (
        "tier/permit.rs",
        "ALL",
        "there are POLICIES_MAX policies at most; read when the server starts and after a change",
    ),
    ("tier/policy.rs", "COUNT_OTHERS", "there are POLICIES_MAX policies at most"),
    ("quota.rs", "READ", JOURNAL),
    ("request/idempotency_journal.rs", "READ", JOURNAL),
    ("tier/spent.rs", "READ", JOURNAL),
    // The first rows of an index.
    ("quota/send_keys.rs", "PURGE", "the first of the table, as many as the limit says"),
    ("request/maintenance.rs", "DELETE_KEYS", "the first of the table, as many as the limit says"),
    ("request/jobs.rs", "DOWNSTREAMS", "the scan is of the names found so far, one for each downstream"),
    (
        "slot/retention.rs",
        "OLD",
        "a read connection looks through the configs, once a minute while none has anything old",
    ),
    ("slot/due.rs", "LIST_DUE", "only one batch is sorted, which an index has selected"),
    (
        "sale.rs",
        "PURCHASES_BY_TIME",
        "only purchases of one microsecond are sorted, which an index has selected",
    ),
    (
        "slot/recount.rs",
        "UNUSED",
        "read when the engine opens; there is a row for each recount that a crash interrupted",
    ),
];
const JOURNAL: &str = "read when the engine opens; FOLD_AT bounds the number of rows";
const BOOKS: &str = "a read connection reads a row for each topic, product and config";
const FEW_TENANTS: &str = "there are TENANT_LIMITS_MAX rows at most";
const FEW_KEYS: &str = "there is a row for each request key that decrypts the key of the index";
const AUDIT: &str = "audits read whole tables, on a read connection";

/// Statements that must use this index. The primary key finds their rows, too, but scans many others.
const REQUIRED_INDEXES: &[(&str, &str, &str)] = &[
    ("slot/assign.rs", "NEXT_OPEN", "rate_limit_window_counter_status"),
    ("request/jobs.rs", "FIRST", "request_record_claimable"),
    ("request/jobs.rs", "DUE_OF_TENANT", "request_record_turn"),
    ("request/jobs.rs", "EXPRESS", "request_record_express"),
    ("request/turns.rs", "HAS_EXPRESS", "request_record_express"),
    ("request/turns.rs", "NEXT_TENANT", "request_record_turn"),
    ("request/turns.rs", "FIRST_OF_TENANT", "request_record_turn"),
    ("request/turns.rs", "COUNT_UNFINISHED", "request_record_turn"),
    ("request/jobs.rs", "DOWNSTREAMS", "request_record_claimable"),
    ("request/jobs.rs", "COUNT_DUE", "request_record_claimable"),
    ("request/jobs.rs", "COUNT_LATER", "request_record_claimable"),
    ("queue.rs", "COUNT_DEAD", "dead_letter_key"),
    ("request/tenants.rs", "DELETE_WEBHOOKS", "dead_letter_key"),
    ("request/maintenance.rs", "PENDING", "request_record_pending"),
    ("request.rs", "SCAN_END", "request_record_tenant"),
    ("request.rs", "list", "request_record_tenant"),
    ("request.rs", "unfinished", "request_record_claimable"),
];

/// Constants that are only parts of statements.
const PARTS: &[(&str, &str)] = &[("request/jobs.rs", "CLAIM")];

struct Statement {
    file: String,
    name: String,
    sql: String,
}

impl Statement {
    fn is(&self, file: &str, name: &str) -> bool {
        self.file == file && self.name == name
    }
}

#[test]
fn no_statement_reads_a_table_whole_or_sorts_what_an_index_has_in_order() {
    let connection = database();
    let mut faults = Vec::new();
    let mut excepted = Vec::new();
    for statement in statements() {
        let Statement { file, name, sql } = &statement;
        let plan = explain(&connection, sql);
        let is_bad = |line: &&String| {
            line.starts_with("SCAN ") && !is_of_no_table(line) || line.contains("TEMP B-TREE")
        };
        let bad: Vec<&String> = plan.iter().filter(is_bad).collect();
        if bad.is_empty() {
            continue;
        }
        if EXCEPTIONS.iter().any(|(file, name, _)| statement.is(file, name)) {
            excepted.push((file.clone(), name.clone()));
        } else {
            faults.push(format!("{file} {name}: {bad:?}\n"));
        }
    }
    assert!(faults.is_empty(), "{} plans:\n{}", faults.len(), faults.concat());
    for (file, name, reason) in EXCEPTIONS {
        let is_needed = excepted.iter().any(|(other, others)| other == file && others == name);
        assert!(is_needed && !reason.is_empty(), "{file} {name} needs no exception");
    }
}

#[test]
fn statements_with_an_index_of_their_own_use_it() {
    let connection = database();
    let statements = statements();
    for (file, name, index) in REQUIRED_INDEXES {
        let statement = statements.iter().find(|statement| statement.is(file, name));
        let statement = statement.unwrap_or_else(|| panic!("there is no {name} in {file}"));
        let plan = explain(&connection, &statement.sql);
        let reads: Vec<_> = plan.iter().filter(|line| line.contains("USING")).collect();
        assert!(!reads.is_empty() && reads.iter().all(|line| line.contains(index)), "{name}: {plan:?}");
    }
}

/// Whether a scan in a query plan is of no table: of constants, or of what a subquery returns. How the subquery reads its tables is a
/// line of its own.
fn is_of_no_table(line: &str) -> bool {
    line == "SCAN CONSTANT ROW" || line.ends_with("-ROW VALUES CLAUSE") || line.starts_with("SCAN (subquery-")
}

fn database() -> Connection {
    let mut connection = Connection::open_in_memory().unwrap();
    migrate::run(&mut connection).unwrap();
    connection
}

fn explain(connection: &Connection, sql: &str) -> Vec<String> {
    let mut statement = connection.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).unwrap();
    let values = params_from_iter((0..statement.parameter_count()).map(|_| Null));
    statement.query_map(values, |row| row.get(3)).unwrap().collect::<rusqlite::Result<_>>().unwrap()
}

/// All statements of this crate.
fn statements() -> Vec<Statement> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    rust_files(&sources, &mut files);
    let mut statements = composed();
    for path in files {
        let file = path.strip_prefix(&sources).unwrap().to_str().unwrap().to_owned();
        let text = std::fs::read_to_string(&path).unwrap();
        for (name, sql) in constants(&text) {
            if is_statement(&sql) && !PARTS.contains(&(&file, &name)) {
                statements.push(Statement { file: file.clone(), name, sql });
            }
        }
    }
    assert!(statements.len() > 100, "{} were found", statements.len());
    statements
}

/// Statements that are composed at run time.
fn composed() -> Vec<Statement> {
    let statement =
        |file: &str, name: &str, sql: String| Statement { file: file.to_owned(), name: name.to_owned(), sql };
    let inserts = multi_insert::all_inserts();
    let inserts = inserts.into_iter().map(|sql| statement("multi_insert.rs", "insert", sql));
    let request = request::composed_sql().into_iter().map(|(file, name, sql)| statement(file, name, sql));
    inserts.chain(request).collect()
}

fn is_statement(sql: &str) -> bool {
    ["SELECT ", "INSERT ", "UPDATE ", "DELETE ", "WITH "]
        .iter()
        .any(|verb| sql.trim_start().starts_with(verb))
}

/// The names and values of a source's string constants. No statement contains a quotation mark or an escape.
fn constants(source: &str) -> Vec<(String, String)> {
    let declarations = source.split("const ").skip(1);
    let read = |declaration: &str| {
        let declaration = declaration.replace("&'static str", "&str");
        let (name, rest) = declaration.split_once(": &str =")?;
        let text = rest.trim_start().strip_prefix('"')?;
        Some((name.to_owned(), text.split_once('"')?.0.to_owned()))
    };
    declarations.filter_map(read).collect()
}

fn rust_files(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") && !path.ends_with("tests.rs") {
            files.push(path);
        }
    }
}

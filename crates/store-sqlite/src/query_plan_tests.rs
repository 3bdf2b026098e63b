//! Holds the plans of all statements to one rule: nothing is read whole, and what comes in order comes from an index. The
//! writer has nobody beside it, so a statement whose cost grows with a table is everybody's wait.
//!
//! Statements are found in the sources: every constant that begins like one. Those that are put together when they are used
//! are listed in [`composed`].

use std::path::{Path, PathBuf};

use rusqlite::{Connection, params_from_iter, types::Null};

use crate::{migrate, multi_insert, request};

/// Statements that may read a table whole or sort, and why.
const EXCEPT: &[(&str, &str, &str)] = &[
    // Books are read whole, by a reader: the writer goes on beside it.
    ("quota.rs", "COUNT", BOOKS),
    ("quota.rs", "OVER_LIMIT", BOOKS),
    ("slot.rs", "TOTALS", BOOKS),
    ("slot.rs", "DIFFERENT", BOOKS),
    ("queue.rs", "BOOKS", BOOKS),
    ("request/upkeep.rs", "BOOKS", BOOKS),
    ("sale.rs", "TOTALS", BOOKS),
    ("sale.rs", "DIFFERENT", BOOKS),
    ("sale.rs", "ITEMS", BOOKS),
    ("tier/hold.rs", "AUDIT", BOOKS),
    (
        "clock.rs",
        "REQUESTS_AHEAD",
        "open requests are looked at by a reader, at the start and when a clock has stepped",
    ),
    ("request/upkeep.rs", "COUNT", "dead letters are counted by a reader, every five seconds at most"),
    // Tables that are small whatever callers do.
    ("tier.rs", "TIERS", "there are four tiers"),
    ("request/sealing.rs", "KEYS", "there is a row for each key that anything is sealed with"),
    (
        "tier/policy.rs",
        "ALL",
        "there are POLICIES_MAX policies at most; read when the server starts and after a change",
    ),
    ("tier/policy.rs", "COUNT_OTHERS", "there are POLICIES_MAX policies at most"),
    ("quota_journal.rs", "READ", JOURNAL),
    ("request/idempotency_journal.rs", "READ", JOURNAL),
    ("tier/spent.rs", "READ", JOURNAL),
    // The first few of what is in order already.
    ("request/upkeep.rs", "DEAD_IDS", "the first of the table, as many as the limit says"),
    ("request/upkeep.rs", "FORGET_KEYS", "the first of the table, as many as the limit says"),
    (
        "request/work.rs",
        "DOWNSTREAMS",
        "what is read whole are the names found so far, one for each downstream",
    ),
    ("slot/due.rs", "TAKE", "what is sorted is one batch, which an index has picked"),
    (
        "slot/recount.rs",
        "UNUSED",
        "read when the engine opens; there is a row for each change that a crash broke off",
    ),
];
const JOURNAL: &str = "read when the engine opens; FOLD_AT bounds what is there";
const BOOKS: &str = "books are read whole, by a reader";

/// Statements that must go by this index: the primary key finds their rows too, and many others that they do not want.
const GO_BY: &[(&str, &str, &str)] = &[
    ("slot/assign.rs", "NEXT_OPEN", "rate_limit_window_counter_status"),
    ("request/work.rs", "FIRST", "request_record_claimable"),
    ("request/work.rs", "DUE", "request_record_claimable"),
    ("request/work.rs", "DOWNSTREAMS", "request_record_claimable"),
    ("request/upkeep.rs", "PENDING", "request_record_pending"),
    ("request.rs", "LAST_LOOKED_AT", "request_record_tenant"),
    ("request.rs", "list", "request_record_tenant"),
];

/// Constants that are only parts of statements.
const PARTS: &[(&str, &str)] = &[("request/work.rs", "TASK")];

/// One statement, by the file and the name it has there.
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
        let is_bad =
            |line: &&String| line.starts_with("SCAN ") && !is_constant(line) || line.contains("TEMP B-TREE");
        let bad: Vec<&String> = plan.iter().filter(is_bad).collect();
        if bad.is_empty() {
            continue;
        }
        if EXCEPT.iter().any(|(file, name, _)| statement.is(file, name)) {
            excepted.push((file.clone(), name.clone()));
        } else {
            faults.push(format!("{file} {name}: {bad:?}\n"));
        }
    }
    assert!(faults.is_empty(), "{} plans:\n{}", faults.len(), faults.concat());
    for (file, name, reason) in EXCEPT {
        let is_needed = excepted.iter().any(|(other, others)| other == file && others == name);
        assert!(is_needed && !reason.is_empty(), "{file} {name} needs no exception");
    }
}

#[test]
fn what_has_an_index_of_its_own_goes_by_it() {
    let connection = database();
    let statements = statements();
    for (file, name, index) in GO_BY {
        let statement = statements.iter().find(|statement| statement.is(file, name));
        let statement = statement.unwrap_or_else(|| panic!("there is no {name} in {file}"));
        let plan = explain(&connection, &statement.sql);
        let reads: Vec<_> = plan.iter().filter(|line| line.contains("USING")).collect();
        assert!(!reads.is_empty() && reads.iter().all(|line| line.contains(index)), "{name}: {plan:?}");
    }
}

/// Whether what is read whole is no table.
fn is_constant(line: &str) -> bool {
    line == "SCAN CONSTANT ROW" || line.ends_with("-ROW VALUES CLAUSE")
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

/// Statements that are put together when they are used.
fn composed() -> Vec<Statement> {
    let statement =
        |file: &str, name: &str, sql: String| Statement { file: file.to_owned(), name: name.to_owned(), sql };
    let inserts = multi_insert::all_inserts();
    let inserts = inserts.into_iter().map(|sql| statement("rows.rs", "insert", sql));
    let request = request::composed_sql().into_iter().map(|(file, name, sql)| statement(file, name, sql));
    inserts.chain(request).collect()
}

fn is_statement(sql: &str) -> bool {
    ["SELECT ", "INSERT ", "UPDATE ", "DELETE ", "WITH "]
        .iter()
        .any(|verb| sql.trim_start().starts_with(verb))
}

/// The constants of a source that are texts, each by its name. No statement has a quotation mark or an escape in it.
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

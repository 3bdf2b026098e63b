//! The triggers that count rows. Each statement that changes a table adds a row to `row_count` for each kind that it has changed.

use weir_store::book::CountedTable;

/// The statements that create the function and the triggers of a table.
pub(crate) fn create_triggers(table: &CountedTable) -> String {
    let CountedTable { name, .. } = table;
    let (kind, amount) = (table.kind_of(""), table.amount_of(""));
    let add = |sign: &str, rows: &str| {
        format!(
            "INSERT INTO row_count (table_name, kind, amount)
             SELECT '{name}', kind, {sign}sum(amount) FROM (SELECT ({kind})::text AS kind, {amount} AS amount FROM {rows}) AS rows
             GROUP BY kind HAVING sum(amount) <> 0;"
        )
    };
    let both = format!(
        "(SELECT ({kind})::text AS kind, {amount} AS amount FROM changed
          UNION ALL SELECT ({kind})::text, -({amount}) FROM former)"
    );
    let update = format!(
        "INSERT INTO row_count (table_name, kind, amount)
         SELECT '{name}', kind, sum(amount) FROM {both} AS rows GROUP BY kind HAVING sum(amount) <> 0;"
    );
    let (insert, delete) = (add("", "changed"), add("-", "former"));
    let function = format!(
        "CREATE OR REPLACE FUNCTION weir_count_{name}() RETURNS trigger LANGUAGE plpgsql AS $function$
         BEGIN
             IF TG_OP = 'INSERT' THEN {insert}
             ELSIF TG_OP = 'DELETE' THEN {delete}
             ELSE {update}
             END IF;
             RETURN NULL;
         END $function$;"
    );
    let trigger = |event: &str, referencing: &str| {
        let lower = event.to_lowercase();
        format!(
            "CREATE OR REPLACE TRIGGER weir_count_{lower} AFTER {event} ON {name} REFERENCING {referencing}
             FOR EACH STATEMENT EXECUTE FUNCTION weir_count_{name}();"
        )
    };
    let mut statements = function + &trigger("INSERT", "NEW TABLE AS changed");
    statements += &trigger("DELETE", "OLD TABLE AS former");
    if table.changing.is_some() {
        statements += &trigger("UPDATE", "NEW TABLE AS changed OLD TABLE AS former");
    }
    statements
}

//! Formats dead letters for people: as a table, or one of them field by field.

use std::io::Write;

use serde_json::Value;

/// The fields of a row and their headings. The last column is not cut.
const COLUMNS: [(&str, &str); 6] = [
    ("id", "ID"),
    ("topic", "TOPIC"),
    ("key", "KEY"),
    ("attempts", "ATTEMPTS"),
    ("diedAt", "DIED AT"),
    ("reason", "REASON"),
];
/// The maximum width of the other columns.
const WIDTH_MAX: usize = 40;

/// Writes a row per dead letter.
pub(super) fn write(out: &mut impl Write, letters: &[Value]) -> std::io::Result<()> {
    if letters.is_empty() {
        return Ok(());
    }
    let head = COLUMNS.map(|(_, head)| head.to_owned());
    let rows: Vec<_> = letters.iter().map(|letter| COLUMNS.map(|(field, _)| text(&letter[field]))).collect();
    let widths: Vec<usize> = (0..COLUMNS.len())
        .map(|column| rows.iter().chain([&head]).map(|row| row[column].chars().count()).max().unwrap_or(0))
        .map(|width| width.min(WIDTH_MAX))
        .collect();
    for row in [&head].into_iter().chain(&rows) {
        let (last, cells) = row.split_last().map_or((String::new(), &[][..]), |(l, c)| (l.clone(), c));
        for (cell, width) in cells.iter().zip(&widths) {
            let cell: String = cell.chars().take(WIDTH_MAX).collect();
            write!(out, "{cell:width$}  ")?;
        }
        writeln!(out, "{last}")?;
    }
    Ok(())
}

/// Writes all fields of one dead letter.
pub(super) fn write_one(out: &mut impl Write, letter: &Value) -> std::io::Result<()> {
    let Some(fields) = letter.as_object() else { return Ok(()) };
    let width = fields.keys().map(String::len).max().unwrap_or(0);
    for (name, value) in fields.iter().filter(|(name, value)| *name != "payload" && !value.is_null()) {
        writeln!(out, "{name:width$}  {}", text(value))?;
    }
    writeln!(out, "{:width$}  {}", "payload", text(&fields.get("payload").cloned().unwrap_or_default()))
}

/// Formats a value on one line. Callers choose its content, so control characters are replaced: they could steer a
/// terminal.
fn text(value: &Value) -> String {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn columns_are_aligned_with_their_headings() {
        let letters = [
            json!({"id": "1", "topic": "requests", "key": "acme", "attempts": 5, "diedAt": "now", "reason": "a\u{1b}[31m"}),
            json!({"id": "22", "topic": "t", "key": "k", "attempts": 1, "diedAt": "then", "reason": "b"}),
        ];
        let mut out = Vec::new();
        write(&mut out, &letters).unwrap();
        let expected = "\
ID  TOPIC     KEY   ATTEMPTS  DIED AT  REASON
1   requests  acme  5         now      a [31m
22  t         k     1         then     b
";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }

    #[test]
    fn the_payload_is_shown_last() {
        let mut out = Vec::new();
        write_one(&mut out, &json!({"id": "1", "payload": "{}", "topic": "t", "callbackUrl": null})).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "id           1\ntopic        t\npayload      {}\n");
    }
}

//! Reads events from a file: NDJSON unchanged, CSV by the column names in its first line.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use anyhow::{Context, bail};
use serde_json::json;

/// Values for columns that a CSV file does not have.
#[derive(Clone, Debug, Default)]
pub(super) struct CsvDefaults {
    pub(super) config: Option<String>,
    pub(super) time: Option<String>,
}

/// An iterator over events as NDJSON lines, with its position in the file.
pub(super) struct Events {
    source: EventSource,
    line: u64,
    bytes: u64,
}

enum EventSource {
    Ndjson(BufReader<Box<dyn Read + Send>>),
    Csv { records: Box<csv::Reader<Box<dyn Read + Send>>>, columns: CsvColumns, defaults: CsvDefaults },
}

#[derive(Clone, Copy, Debug)]
struct CsvColumns {
    event: usize,
    config: Option<usize>,
    time: Option<usize>,
}

impl Events {
    /// Opens a file by its extension; `-` is NDJSON from standard input. Also returns the size, which is known for
    /// files only.
    pub(super) fn open(path: &Path, defaults: CsvDefaults) -> anyhow::Result<(Self, Option<u64>)> {
        if path == Path::new("-") {
            let input: Box<dyn Read + Send> = Box::new(std::io::stdin());
            return Ok((
                Self { source: EventSource::Ndjson(BufReader::new(input)), line: 0, bytes: 0 },
                None,
            ));
        }
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        let size = file.metadata().ok().map(|metadata| metadata.len());
        let kind = path.extension().and_then(|end| end.to_str()).unwrap_or_default().to_ascii_lowercase();
        let source = match kind.as_str() {
            "ndjson" | "jsonl" => EventSource::Ndjson(BufReader::with_capacity(1 << 16, Box::new(file))),
            "csv" => csv_source(Box::new(file), defaults)?,
            _ => bail!("{} is neither .ndjson (or .jsonl) nor .csv", path.display()),
        };
        Ok((Self { source, line: 0, bytes: 0 }, size))
    }

    /// Appends the next event as a line, and returns its line number in the file, or `None` at the end.
    pub(super) fn next_line(&mut self, lines: &mut Vec<u8>) -> anyhow::Result<Option<u64>> {
        match &mut self.source {
            EventSource::Ndjson(reader) => loop {
                let start = lines.len();
                let read = reader.read_until(b'\n', lines).context("cannot read the next line")?;
                self.bytes += read as u64;
                if read == 0 {
                    return Ok(None);
                }
                self.line += 1;
                if lines[start..].trim_ascii().is_empty() {
                    lines.truncate(start);
                    continue;
                }
                if lines.last() != Some(&b'\n') {
                    lines.push(b'\n');
                }
                return Ok(Some(self.line));
            },
            EventSource::Csv { records, columns, defaults } => {
                let mut record = csv::StringRecord::new();
                if !records.read_record(&mut record).context("cannot read the next record of the CSV file")? {
                    return Ok(None);
                }
                self.bytes = records.position().byte();
                self.line = record.position().map_or(self.line + 1, csv::Position::line);
                let field = |column: Option<usize>, default: &Option<String>| {
                    column
                        .and_then(|column| record.get(column))
                        .map(str::to_owned)
                        .or_else(|| default.clone())
                };
                let event = json!({
                    "eventId": record.get(columns.event),
                    "configName": field(columns.config, &defaults.config),
                    "requestedTime": field(columns.time, &defaults.time),
                });
                serde_json::to_writer(&mut *lines, &event)?;
                lines.push(b'\n');
                Ok(Some(self.line))
            }
        }
    }

    /// Returns the number of bytes read.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }
}

fn csv_source(file: Box<dyn Read + Send>, defaults: CsvDefaults) -> anyhow::Result<EventSource> {
    let mut records = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(file);
    let names = records.headers().context("cannot read the first line of the CSV file")?.clone();
    let column = |name: &str| names.iter().position(|other| other == name);
    let Some(event) = column("eventId") else {
        bail!("the first line of the CSV file must name its columns: eventId, configName, requestedTime");
    };
    let columns = CsvColumns { event, config: column("configName"), time: column("requestedTime") };
    anyhow::ensure!(
        columns.config.is_some() || defaults.config.is_some(),
        "the CSV file has no column configName: pass the config with --config"
    );
    anyhow::ensure!(
        columns.time.is_some() || defaults.time.is_some(),
        "the CSV file has no column requestedTime: pass the time with --time"
    );
    Ok(EventSource::Csv { records: Box::new(records), columns, defaults })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(name: &str, text: &str, defaults: CsvDefaults) -> anyhow::Result<String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        let (mut events, _) = Events::open(&path, defaults)?;
        let mut lines = Vec::new();
        while events.next_line(&mut lines)?.is_some() {}
        Ok(String::from_utf8(lines).unwrap())
    }

    #[test]
    fn events_have_their_line_number_in_the_file() {
        let line_numbers = |name: &str, text: &str| {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join(name);
            std::fs::write(&path, text).unwrap();
            let (mut events, _) = Events::open(&path, CsvDefaults::default()).unwrap();
            std::iter::from_fn(|| events.next_line(&mut Vec::new()).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(line_numbers("a.ndjson", "{}\n\n{}\n{}"), [1, 3, 4]);
        let csv = "eventId,configName,requestedTime\na,c,t\n\"b\nb\",c,t\nd,c,t\n";
        assert_eq!(line_numbers("a.csv", csv), [2, 3, 5], "a quoted field may have lines of its own");
    }

    #[test]
    fn ndjson_lines_are_unchanged() {
        let text = lines("a.ndjson", "{\"a\":1}\n\n{\"b\":2}", CsvDefaults::default()).unwrap();
        assert_eq!(text, "{\"a\":1}\n{\"b\":2}\n");
    }

    #[test]
    fn csv_columns_are_found_by_name() {
        let defaults = CsvDefaults { config: Some("c".into()), time: Some("t".into()) };
        let text = lines("a.csv", "requestedTime,eventId\nnoon,\"a,b\"\n", defaults).unwrap();
        assert_eq!(text, "{\"configName\":\"c\",\"eventId\":\"a,b\",\"requestedTime\":\"noon\"}\n");
        let error = lines("a.csv", "id\n1\n", CsvDefaults::default()).unwrap_err();
        assert!(error.to_string().contains("eventId"), "{error}");
        let error = lines("a.csv", "eventId,requestedTime\n1,2\n", CsvDefaults::default()).unwrap_err();
        assert!(error.to_string().contains("--config"), "{error}");
        assert!(lines("a.txt", "", CsvDefaults::default()).is_err());
    }
}

//! Reads how long Redis itself took for scripts from the reply of `LATENCY HISTOGRAM`.

use redis::Value;

/// Scripts that took longer are slow, in microseconds. Redis counts by powers of two, and this edge is the nearest to 1 ms.
pub const SLOW_SCRIPT: u64 = 1_056;

/// Numbers of executed scripts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScriptCounts {
    pub executed: u64,
    /// Those that took longer than [`SLOW_SCRIPT`].
    pub slow: u64,
}

/// Reads `[command, [calls, N, histogram_usec, [edge, count up to it, …]]]`. The reply of a server that has executed no
/// script is empty.
pub(super) fn read_reply(reply: &Value) -> Option<ScriptCounts> {
    let commands = pairs(reply)?;
    let Some((_command, figures)) = commands.first() else { return Some(ScriptCounts::default()) };
    let (mut executed, mut fast) = (None, 0);
    for (name, value) in pairs(figures)? {
        match text(name)? {
            "calls" => executed = Some(number(value)?),
            "histogram_usec" => {
                let edges =
                    pairs(value)?.into_iter().map(|(edge, count)| Some((number(edge)?, number(count)?)));
                let edges = edges.collect::<Option<Vec<_>>>()?;
                fast = edges
                    .iter()
                    .take_while(|(edge, _)| *edge <= SLOW_SCRIPT)
                    .map(|(_, count)| *count)
                    .last()
                    .unwrap_or(0);
            }
            _ => {}
        }
    }
    let executed = executed?;
    Some(ScriptCounts { executed, slow: executed.saturating_sub(fast) })
}

/// The pairs of a map, which is an array in the older protocol.
fn pairs(value: &Value) -> Option<Vec<(&Value, &Value)>> {
    match value {
        Value::Map(pairs) => Some(pairs.iter().map(|(key, value)| (key, value)).collect()),
        Value::Array(items) => Some(items.chunks_exact(2).map(|pair| (&pair[0], &pair[1])).collect()),
        _ => None,
    }
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}

fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(calls: i64, histogram: &[(i64, i64)]) -> Value {
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let edges = histogram.iter().flat_map(|(edge, count)| [Value::Int(*edge), Value::Int(*count)]);
        let figures =
            [text("calls"), Value::Int(calls), text("histogram_usec"), Value::Array(edges.collect())];
        Value::Array(vec![text("evalsha"), Value::Array(figures.to_vec())])
    }

    #[test]
    fn scripts_beyond_the_edge_at_a_millisecond_are_slow() {
        for (calls, histogram, slow) in [
            (9_i64, &[(33, 5), (528, 9)][..], 0),
            (9, &[(33, 5), (1_056, 9)], 0),
            (9, &[(33, 5), (1_056, 7), (2_113, 9)], 2),
            (3, &[(2_113, 3)], 3),
            (0, &[], 0),
        ] {
            let counts = ScriptCounts { executed: calls.unsigned_abs(), slow };
            assert_eq!(read_reply(&reply(calls, histogram)), Some(counts), "{histogram:?}");
        }
    }

    #[test]
    fn a_server_without_scripts_has_none_and_another_reply_is_unknown() {
        assert_eq!(read_reply(&Value::Array(Vec::new())), Some(ScriptCounts::default()));
        assert_eq!(read_reply(&Value::Nil), None);
        assert_eq!(
            read_reply(&Value::Array(vec![Value::Nil, Value::Array(vec![Value::Nil, Value::Nil])])),
            None
        );
    }
}

//! W3C Trace Context: reads `traceparent` headers, begins traces, and names the spans of outgoing calls.
//!
//! Only the sampled flag is passed on, unchanged; the specification reserves the others. Higher versions are read as version
//! 00, which is what Weir writes.

use std::fmt;

/// The length of a `traceparent` of version 00.
pub const TRACEPARENT_BYTES: usize = 55;

/// The longest `tracestate` that is passed on: as much as the specification asks for.
pub const TRACESTATE_BYTES_MAX: usize = 512;

const SAMPLED: u8 = 1;

/// The id of a trace: 32 hexadecimal digits in logs and headers, never all zeros.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceId([u8; 16]);

/// The id of one span, never all zeros.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SpanId([u8; 8]);

/// A `traceparent`: a trace, the span that a call comes from, and whether the trace is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TraceParent {
    /// The trace.
    pub trace_id: TraceId,
    /// The span that a call comes from.
    pub span_id: SpanId,
    /// Whether the caller may have recorded it.
    pub is_sampled: bool,
}

/// A trace as it is kept with a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// The span that accepted the request.
    pub parent: TraceParent,
    /// The caller's `tracestate`.
    pub state: Option<Box<str>>,
}

impl TraceId {
    /// Turns a number into an id; 0, which is no id, becomes 1.
    #[must_use]
    pub const fn from_number(number: u128) -> Self {
        let number = if number == 0 { 1 } else { number };
        Self(number.to_be_bytes())
    }

    #[must_use]
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0
    }

    fn parse(digits: &[u8]) -> Option<Self> {
        read_hex(digits).filter(|bytes| *bytes != [0; 16]).map(Self)
    }
}

impl SpanId {
    /// Turns a number into an id; 0, which is no id, becomes 1.
    #[must_use]
    pub const fn from_number(number: u64) -> Self {
        let number = if number == 0 { 1 } else { number };
        Self(number.to_be_bytes())
    }

    #[must_use]
    pub const fn to_bytes(self) -> [u8; 8] {
        self.0
    }

    fn parse(digits: &[u8]) -> Option<Self> {
        read_hex(digits).filter(|bytes| *bytes != [0; 8]).map(Self)
    }
}

impl TraceParent {
    /// Begins a trace. It is sampled, as traces that services behind Weir begin are by default: unsampled, it would keep them
    /// from recording theirs.
    #[must_use]
    pub const fn begin(trace_id: TraceId, span_id: SpanId) -> Self {
        Self { trace_id, span_id, is_sampled: true }
    }

    /// The same trace in another span.
    #[must_use]
    pub const fn in_span(self, span_id: SpanId) -> Self {
        Self { span_id, ..self }
    }

    /// Reads the value of a header; `None` if the specification has it ignored.
    #[must_use]
    pub fn parse(value: &[u8]) -> Option<Self> {
        let (known, rest) = value.split_at_checked(TRACEPARENT_BYTES)?;
        let (version, known) = field(known, 2)?;
        let (trace_id, known) = field(known, 32)?;
        let (span_id, flags) = field(known, 16)?;
        match read_hex(version)? {
            [0xff] => return None,
            [0] if !rest.is_empty() => return None,
            // What a higher version adds begins with a hyphen.
            _ if rest.first().is_some_and(|byte| *byte != b'-') => return None,
            _ => {}
        }
        let [flags] = read_hex(flags)?;
        Some(Self {
            trace_id: TraceId::parse(trace_id)?,
            span_id: SpanId::parse(span_id)?,
            is_sampled: flags & SAMPLED != 0,
        })
    }

    /// The value of the header.
    #[must_use]
    pub fn to_bytes(self) -> [u8; TRACEPARENT_BYTES] {
        let mut value = *b"00-................................-................-00";
        write_hex(&mut value[3..35], &self.trace_id.0);
        write_hex(&mut value[36..52], &self.span_id.0);
        write_hex(&mut value[53..], &[if self.is_sampled { SAMPLED } else { 0 }]);
        value
    }
}

impl TraceContext {
    /// Reads a stored context; `None` if there is none.
    #[must_use]
    pub fn stored(parent: Option<&str>, state: Option<&str>) -> Option<Self> {
        Some(Self { parent: TraceParent::parse(parent?.as_bytes())?, state: state.map(Into::into) })
    }
}

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut digits = [0; 32];
        write_hex(&mut digits, &self.0);
        write_ascii(f, &digits)
    }
}

impl fmt::Debug for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Debug for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut digits = [0; 16];
        write_hex(&mut digits, &self.0);
        write_ascii(f, &digits)
    }
}

impl fmt::Display for TraceParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_ascii(f, &self.to_bytes())
    }
}

/// Splits off a field and the hyphen behind it.
fn field(value: &[u8], length: usize) -> Option<(&[u8], &[u8])> {
    let (field, rest) = value.split_at_checked(length)?;
    Some((field, rest.strip_prefix(b"-")?))
}

/// Reads lower-case hexadecimal digits, the only ones that the specification allows.
fn read_hex<const N: usize>(digits: &[u8]) -> Option<[u8; N]> {
    let digit = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit.wrapping_sub(b'0')),
        b'a'..=b'f' => Some(digit.wrapping_sub(b'a').wrapping_add(10)),
        _ => None,
    };
    let (pairs, rest) = digits.as_chunks::<2>();
    if pairs.len() != N || !rest.is_empty() {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = (digit(*high)? << 4) | digit(*low)?;
    }
    Some(bytes)
}

/// The digit of a number below 16.
const fn hex_digit(number: u8) -> u8 {
    match number {
        0..10 => number.wrapping_add(b'0'),
        _ => number.wrapping_sub(10).wrapping_add(b'a'),
    }
}

fn write_hex(digits: &mut [u8], bytes: &[u8]) {
    for (pair, byte) in digits.chunks_exact_mut(2).zip(bytes) {
        pair.copy_from_slice(&[byte >> 4, byte & 15].map(hex_digit));
    }
}

fn write_ascii(f: &mut fmt::Formatter<'_>, text: &[u8]) -> fmt::Result {
    f.write_str(std::str::from_utf8(text).map_err(|_not_ascii| fmt::Error)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALID: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn parse(value: &str) -> Option<TraceParent> {
        TraceParent::parse(value.as_bytes())
    }

    #[test]
    fn a_valid_header_is_read_and_written_unchanged() {
        let parent = parse(VALID).unwrap();
        assert_eq!(parent.to_string(), VALID);
        assert_eq!(parent.trace_id.to_string(), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert!(parent.is_sampled);
        let unsampled = VALID.replace("-01", "-00");
        assert_eq!(parse(&unsampled).unwrap().to_string(), unsampled);
    }

    #[test]
    fn every_malformed_header_is_ignored() {
        let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
        let span = "00f067aa0ba902b7";
        let malformed = [
            String::new(),
            "00".to_owned(),
            // Versions.
            format!("ff-{trace}-{span}-01"),
            format!("0-{trace}-{span}-01"),
            format!("000-{trace}-{span}-01"),
            format!("0g-{trace}-{span}-01"),
            format!("0A-{trace}-{span}-01"),
            format!("FF-{trace}-{span}-01"),
            // Lengths of the ids and flags.
            format!("00-{}-{span}-01", &trace[1..]),
            format!("00-{trace}0-{span}-01"),
            format!("00-{trace}-{}-01", &span[1..]),
            format!("00-{trace}-{span}0-01"),
            format!("00-{trace}-{span}-1"),
            format!("00-{trace}-{span}-"),
            format!("00-{trace}-{span}"),
            format!("00-{trace}-{span}-010"),
            // Version 00 has nothing behind the flags.
            format!("{VALID}-"),
            format!("{VALID}-00"),
            format!("{VALID} "),
            format!(" {VALID}"),
            // Upper case.
            VALID.to_uppercase(),
            format!("00-{}-{span}-01", trace.to_uppercase()),
            format!("00-{trace}-{}-01", span.to_uppercase()),
            format!("00-{trace}-{span}-0A"),
            // All zeros.
            format!("00-{}-{span}-01", "0".repeat(32)),
            format!("00-{trace}-{}-01", "0".repeat(16)),
            // Other characters.
            format!("00_{trace}_{span}_01"),
            format!("00-{}-{span}-01", trace.replace('4', "g")),
            format!("00-{trace}-{}-01", span.replace('7', "x")),
            format!("00-{trace}-{span}-0x"),
            format!("00-{trace}-{span}-.1"),
            // Higher versions that do not begin like version 00.
            format!("01-{trace}-{span}-01."),
            format!("cc-{trace}-{span}-01what"),
        ];
        for value in malformed {
            assert_eq!(parse(&value), None, "{value:?}");
        }
        assert_eq!(TraceParent::parse(&[0xff; TRACEPARENT_BYTES]), None);
    }

    #[test]
    fn a_higher_version_is_read_as_the_present_one() {
        for value in [VALID.replacen("00", "cc", 1), VALID.replacen("00", "01", 1) + "-what-comes-later"] {
            assert_eq!(parse(&value).unwrap().to_string(), VALID, "{value}");
        }
    }

    #[test]
    fn only_the_sampled_flag_is_passed_on() {
        for (flags, passed) in [("00", "00"), ("01", "01"), ("02", "00"), ("ff", "01"), ("fe", "00")] {
            let value = format!("{}{flags}", &VALID[..53]);
            assert_eq!(&parse(&value).unwrap().to_string()[53..], passed, "{flags}");
        }
    }

    #[test]
    fn ids_are_never_zero_and_the_next_span_keeps_the_trace_and_its_flag() {
        let begun = TraceParent::begin(TraceId::from_number(0), SpanId::from_number(0));
        assert_eq!(parse(&begun.to_string()), Some(begun));
        for value in [VALID.to_owned(), VALID.replace("-01", "-00")] {
            let parent = parse(&value).unwrap();
            let next = parent.in_span(SpanId::from_number(7));
            assert_eq!((next.trace_id, next.is_sampled), (parent.trace_id, parent.is_sampled));
            assert_ne!(next.span_id, parent.span_id);
        }
    }

    #[test]
    fn a_stored_context_is_read_again_and_anything_else_is_none() {
        let state = Some("vendor=1,other=2");
        let stored = TraceContext::stored(Some(VALID), state).unwrap();
        assert_eq!((stored.parent.to_string().as_str(), stored.state.as_deref()), (VALID, state));
        assert_eq!(TraceContext::stored(None, state), None);
        assert_eq!(TraceContext::stored(Some("no trace"), None), None);
    }
}

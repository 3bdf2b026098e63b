//! Parses just enough of an HTTP/1.1 response to find its status and its end.
//!
//! Bodies are skipped, never stored. The buffer belongs to the link, which passes slices of it.

use httparse::{EMPTY_HEADER, Header, Status};

const MAX_HEADERS: usize = 48;

/// A parsed response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) keep_alive: bool,
}

/// Bytes that are not an HTTP/1.1 response.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("not an HTTP/1.1 response: {0}")]
pub(super) struct Malformed(&'static str);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Head,
    Body { left: u64 },
    ChunkSize,
    ChunkData { left: u64 },
    ChunkEnd,
    Trailers,
    UntilClose,
}

/// The result of one parsing step.
enum Step {
    /// Consumed this many bytes; parsing continues.
    Used(usize),
    /// Consumed this many bytes, and the response is complete.
    Last(usize),
    /// Consumed none: the next part is incomplete.
    Starved,
}

/// The parser's position in the current response.
#[derive(Debug)]
pub(super) struct Parser {
    state: State,
    answer: Answer,
}

impl Parser {
    pub(super) fn new() -> Self {
        Self { state: State::Head, answer: Answer { status: 0, keep_alive: true } }
    }

    /// Parses as much of `input` as possible. Returns how many bytes were consumed, and the response if it is complete.
    ///
    /// Bytes it did not use must be shown again with more behind them.
    pub(super) fn advance(&mut self, input: &[u8]) -> Result<(usize, Option<Answer>), Malformed> {
        let mut used = 0;
        loop {
            match self.step(&input[used..])? {
                Step::Used(count) => used += count,
                Step::Starved => return Ok((used, None)),
                Step::Last(count) => {
                    self.state = State::Head;
                    return Ok((used + count, Some(self.answer)));
                }
            }
        }
    }

    /// Handles the end of the connection, which completes a response without a length and truncates any other.
    pub(super) fn close(&mut self) -> Option<Answer> {
        let whole = self.state == State::UntilClose;
        self.state = State::Head;
        whole.then_some(self.answer)
    }

    fn step(&mut self, input: &[u8]) -> Result<Step, Malformed> {
        if input.is_empty() {
            return Ok(Step::Starved);
        }
        match self.state {
            State::Head => self.head(input),
            State::Body { left } => {
                let (count, left) = skip(input, left);
                self.state = State::Body { left };
                Ok(if left == 0 { Step::Last(count) } else { Step::Used(count) })
            }
            State::ChunkSize => self.chunk_size(input),
            State::ChunkData { left } => {
                let (count, left) = skip(input, left);
                self.state = if left == 0 { State::ChunkEnd } else { State::ChunkData { left } };
                Ok(Step::Used(count))
            }
            State::ChunkEnd => self.chunk_end(input),
            State::Trailers => trailers(input),
            State::UntilClose => Ok(Step::Used(input.len())),
        }
    }

    fn head(&mut self, input: &[u8]) -> Result<Step, Malformed> {
        let mut headers = [EMPTY_HEADER; MAX_HEADERS];
        let mut response = httparse::Response::new(&mut headers);
        let parsed = response.parse(input).map_err(|_error| Malformed("bad head"))?;
        let Status::Complete(length) = parsed else {
            return Ok(Step::Starved);
        };
        let status = response.code.ok_or(Malformed("no status"))?;
        if (100..200).contains(&status) {
            // An interim response: the real one follows on the same connection.
            return Ok(Step::Used(length));
        }
        let framing = Framing::read(response.headers)?;
        let persistent = framing.keep_alive.unwrap_or(response.version == Some(1));
        self.answer = Answer { status, keep_alive: persistent };
        if matches!(status, 204 | 304) || (framing.length == Some(0) && !framing.chunked) {
            return Ok(Step::Last(length));
        }
        self.state = match framing.length {
            _ if framing.chunked => State::ChunkSize,
            Some(left) => State::Body { left },
            None => {
                self.answer.keep_alive = false;
                State::UntilClose
            }
        };
        Ok(Step::Used(length))
    }

    fn chunk_size(&mut self, input: &[u8]) -> Result<Step, Malformed> {
        match httparse::parse_chunk_size(input) {
            Ok(Status::Partial) => Ok(Step::Starved),
            Ok(Status::Complete((count, left))) => {
                self.state = if left == 0 { State::Trailers } else { State::ChunkData { left } };
                Ok(Step::Used(count))
            }
            Err(_) => Err(Malformed("bad chunk size")),
        }
    }

    fn chunk_end(&mut self, input: &[u8]) -> Result<Step, Malformed> {
        if !b"\r\n".starts_with(&input[..input.len().min(2)]) {
            return Err(Malformed("chunk longer than its size"));
        }
        if input.len() < 2 {
            return Ok(Step::Starved);
        }
        self.state = State::ChunkSize;
        Ok(Step::Used(2))
    }
}

/// Returns how many of the bytes belong to the `left` remaining ones, and how many remain afterwards.
fn skip(input: &[u8], left: u64) -> (usize, u64) {
    let count = usize::try_from(left).unwrap_or(usize::MAX).min(input.len());
    (count, left - count as u64)
}

fn trailers(input: &[u8]) -> Result<Step, Malformed> {
    let mut headers = [EMPTY_HEADER; MAX_HEADERS];
    match httparse::parse_headers(input, &mut headers) {
        Ok(Status::Complete((count, _))) => Ok(Step::Last(count)),
        Ok(Status::Partial) => Ok(Step::Starved),
        Err(_) => Err(Malformed("bad trailer")),
    }
}

/// The headers that determine the end of the body and whether the connection stays open.
#[derive(Default)]
struct Framing {
    length: Option<u64>,
    chunked: bool,
    keep_alive: Option<bool>,
}

impl Framing {
    fn read(headers: &[Header<'_>]) -> Result<Self, Malformed> {
        let mut framing = Self::default();
        for header in headers {
            // The lengths of the three names differ from most others', so most headers cost one comparison.
            match header.name.len() {
                10 if header.name.eq_ignore_ascii_case("connection") => {
                    framing.keep_alive = Some(!header.value.eq_ignore_ascii_case(b"close"));
                }
                14 if header.name.eq_ignore_ascii_case("content-length") => {
                    let length = parse_length(header.value)?;
                    if framing.length.is_some_and(|earlier| earlier != length) {
                        return Err(Malformed("two lengths"));
                    }
                    framing.length = Some(length);
                }
                17 if header.name.eq_ignore_ascii_case("transfer-encoding") => {
                    framing.chunked = header.value.to_ascii_lowercase().ends_with(b"chunked");
                }
                _ => {}
            }
        }
        Ok(framing)
    }
}

fn parse_length(value: &[u8]) -> Result<u64, Malformed> {
    if value.is_empty() || value.len() > 18 || !value.iter().all(u8::is_ascii_digit) {
        return Err(Malformed("bad content-length"));
    }
    Ok(value.iter().fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0')))
}

#[cfg(test)]
mod tests;

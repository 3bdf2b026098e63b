//! An upstream that parses all bytes it gets strictly, records the requests and answers each; and a parser of responses
//! that is as strict.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// A request or a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Message {
    /// The first line.
    line: String,
    headers: Vec<(String, String)>,
    pub(super) body: Vec<u8>,
    pub(super) trailers: Vec<(String, String)>,
}

impl Message {
    /// All values of a header, one per line.
    pub(super) fn all(&self, name: &str) -> Vec<&str> {
        let lines = self.headers.iter().filter(|(found, _)| found.eq_ignore_ascii_case(name));
        lines.map(|(_, value)| value.as_str()).collect()
    }

    /// The target of a request.
    pub(super) fn target(&self) -> &str {
        self.line.split(' ').nth(1).unwrap_or_default()
    }

    /// The status of an answer.
    pub(super) fn status(&self) -> u16 {
        self.line.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_default()
    }

    /// Parses the first message of these bytes, and returns it with its length, or `None` if it is incomplete. `has_body`
    /// decides by the first line whether a body may follow.
    fn read(bytes: &[u8], has_body: impl Fn(&str) -> bool) -> Result<Option<(Self, usize)>, String> {
        let Some(end) = find(bytes, b"\r\n\r\n") else { return Ok(None) };
        let head = std::str::from_utf8(&bytes[..end]).map_err(|error| error.to_string())?;
        let (line, lines) = head.split_once("\r\n").unwrap_or((head, ""));
        if line.split(' ').count() < 3 || line.bytes().any(|byte| byte.is_ascii_control()) {
            return Err(format!("{line:?} is not a valid first line"));
        }
        let mut message =
            Self { line: line.to_owned(), headers: fields(lines)?, body: Vec::new(), trailers: Vec::new() };
        let start = end + 4;
        let length = match (&message.all("content-length")[..], &message.all("transfer-encoding")[..]) {
            _ if !has_body(line) => 0,
            ([], []) => 0,
            ([length], []) if length.bytes().all(|byte| byte.is_ascii_digit()) => {
                length.parse().map_err(|error| format!("{length:?}: {error}"))?
            }
            ([], ["chunked"]) => return message.read_chunks(bytes, start),
            framing => return Err(format!("ambiguous or invalid length: {framing:?}")),
        };
        let Some(body) = bytes.get(start..start + length) else { return Ok(None) };
        message.body = body.to_vec();
        Ok(Some((message, start + length)))
    }

    fn read_chunks(mut self, bytes: &[u8], mut at: usize) -> Result<Option<(Self, usize)>, String> {
        loop {
            let rest = &bytes[at..];
            let Some(end) = find(rest, b"\r\n") else { return Ok(None) };
            let line = String::from_utf8_lossy(&rest[..end]).into_owned();
            if line.is_empty() || !line.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Err(format!("{line:?} is not a chunk size"));
            }
            let size = usize::from_str_radix(&line, 16).map_err(|error| format!("{line:?}: {error}"))?;
            at += end + 2;
            if size == 0 {
                break;
            }
            let Some(chunk) = bytes.get(at..at + size + 2) else { return Ok(None) };
            let Some(chunk) = chunk.strip_suffix(b"\r\n") else {
                return Err("a chunk has no end".to_owned());
            };
            self.body.extend_from_slice(chunk);
            at += size + 2;
        }
        if bytes[at..].starts_with(b"\r\n") {
            return Ok(Some((self, at + 2)));
        }
        let Some(end) = find(&bytes[at..], b"\r\n\r\n") else { return Ok(None) };
        let text = std::str::from_utf8(&bytes[at..at + end]).map_err(|error| error.to_string())?;
        self.trailers = fields(text)?;
        Ok(Some((self, at + end + 4)))
    }
}

fn find(bytes: &[u8], part: &[u8]) -> Option<usize> {
    bytes.windows(part.len()).position(|window| window == part)
}

/// Parses header lines. An ambiguous line is an error.
fn fields(text: &str) -> Result<Vec<(String, String)>, String> {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    let field = |line: &str| {
        let (name, value) = line.split_once(':').ok_or_else(|| format!("{line:?} is not a header"))?;
        let is_plain = !name.is_empty()
            && name.bytes().all(is_token)
            && value.bytes().all(|byte| byte == b'\t' || !byte.is_ascii_control());
        if is_plain {
            Ok((name.to_owned(), value.trim().to_owned()))
        } else {
            Err(format!("{line:?} is an ambiguous header"))
        }
    };
    text.split("\r\n").filter(|line| !line.is_empty()).map(field).collect()
}

/// Parses all responses, and skips interim ones (1xx). Incomplete or surplus bytes are an error.
pub(super) fn read_answers(mut bytes: &[u8]) -> Result<Vec<Message>, String> {
    let has_body = |line: &str| !line.contains(" 204 ") && !line.contains(" 304 ") && !line.contains(" 1");
    let mut answers = Vec::new();
    while !bytes.is_empty() {
        let (answer, length) = Message::read(bytes, has_body)?.ok_or("a response is incomplete")?;
        if !answer.line.starts_with("HTTP/1.1 ") && !answer.line.starts_with("HTTP/1.0 ") {
            return Err(format!("{:?} is not a response", answer.line));
        }
        bytes = &bytes[length..];
        if answer.status() >= 200 {
            answers.push(answer);
        }
    }
    Ok(answers)
}

/// The requests of one connection.
#[derive(Debug, Default)]
struct Recording {
    requests: Vec<Message>,
    /// Why the bytes behind these requests could not be parsed.
    problem: Option<String>,
}

pub(super) struct Recorder {
    address: SocketAddr,
    recordings: Arc<Mutex<Vec<Recording>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Recorder {
    /// Starts an upstream that answers each request with `answer`.
    pub(super) async fn start(answer: fn(&Message) -> Vec<u8>) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let recordings = Arc::new(Mutex::new(Vec::new()));
        let all = Arc::clone(&recordings);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let number = {
                    let mut all = all.lock();
                    all.push(Recording::default());
                    all.len() - 1
                };
                tokio::spawn(record(stream, Arc::clone(&all), number, answer));
            }
        });
        Self { address, recordings, task }
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// All complete requests with this path.
    pub(super) fn requests_of(&self, path: &str) -> Vec<Message> {
        let recordings = self.recordings.lock();
        let requests = recordings.iter().flat_map(|recording| &recording.requests);
        requests.filter(|request| request.target() == path).cloned().collect()
    }

    /// The paths of all complete requests.
    pub(super) fn paths(&self) -> Vec<String> {
        let recordings = self.recordings.lock();
        let requests = recordings.iter().flat_map(|recording| &recording.requests);
        requests.map(|request| request.target().to_owned()).collect()
    }

    /// Why requests could not be parsed strictly.
    pub(super) fn problems(&self) -> Vec<String> {
        let recordings = self.recordings.lock();
        recordings.iter().filter_map(|recording| recording.problem.clone()).collect()
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn record(
    mut stream: TcpStream,
    recordings: Arc<Mutex<Vec<Recording>>>,
    number: usize,
    answer: fn(&Message) -> Vec<u8>,
) {
    let mut bytes = Vec::new();
    while let Ok(1..) = stream.read_buf(&mut bytes).await {
        loop {
            match Message::read(&bytes, |_line| true) {
                Ok(None) => break,
                Ok(Some((request, length))) => {
                    bytes.drain(..length);
                    let answer = answer(&request);
                    recordings.lock()[number].requests.push(request);
                    if stream.write_all(&answer).await.is_err() {
                        return;
                    }
                }
                Err(problem) => {
                    let text = String::from_utf8_lossy(&bytes).into_owned();
                    recordings.lock()[number].problem = Some(format!("{problem} in {text:?}"));
                    return;
                }
            }
        }
    }
}

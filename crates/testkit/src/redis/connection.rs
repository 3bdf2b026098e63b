//! The part of Redis's protocol that tests need: one command and one reply per connection.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::ServerName;
use url::Url;

use crate::certificates;

/// Timeout of each read and write: a paused or starting server accepts connections but does not respond.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);

/// The reply of a server. An error reply is an `Err` instead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    Nil,
    Integer(i64),
    Text(String),
    List(Vec<Self>),
}

impl Reply {
    /// A number or text as text, `nil` as an empty one; panics for a list.
    pub fn text(&self) -> String {
        match self {
            Self::Nil => String::new(),
            Self::Integer(number) => number.to_string(),
            Self::Text(text) => text.clone(),
            Self::List(_) => panic!("a list is not a text: {self:?}"),
        }
    }

    pub fn integer(&self) -> i64 {
        match self {
            Self::Integer(number) => *number,
            _ => panic!("not an integer: {self:?}"),
        }
    }

    /// The [`text`](Self::text) of each member, in order; panics for anything but a list.
    pub fn texts(&self) -> Vec<String> {
        match self {
            Self::List(members) => members.iter().map(Self::text).collect(),
            _ => panic!("not a list: {self:?}"),
        }
    }
}

/// Address and credentials of a server.
#[derive(Debug, Clone)]
pub(super) struct Endpoint {
    pub(super) addr: SocketAddr,
    pub(super) ca_file: Option<PathBuf>,
    pub(super) user: Option<String>,
    pub(super) password: Option<String>,
    pub(super) database: Option<String>,
}

trait ReadWrite: Read + Write {}
impl<T: Read + Write> ReadWrite for T {}

type Connection = BufReader<Box<dyn ReadWrite>>;

impl Endpoint {
    /// Parses `redis://user:password@host:port/database`.
    pub(super) fn from_url(url: &Url) -> Self {
        let filled = |text: &str| (!text.is_empty()).then(|| percent_decode(text));
        Self {
            addr: super::resolve(url),
            ca_file: None,
            user: filled(url.username()),
            password: url.password().and_then(filled),
            database: filled(url.path().trim_start_matches('/')),
        }
    }

    /// Makes one blocking attempt; the error says why it failed.
    pub(super) fn probe(&self) -> Result<(), String> {
        self.run(&["PING".to_owned()]).map(drop)
    }

    pub(super) fn run(&self, words: &[String]) -> Result<Reply, String> {
        let mut connection = self.connect().map_err(|error| error.to_string())?;
        if let Some(password) = &self.password {
            let user = self.user.clone().unwrap_or_else(|| "default".to_owned());
            exchange(&mut connection, &["AUTH".to_owned(), user, password.clone()])?;
        }
        if let Some(database) = &self.database {
            exchange(&mut connection, &["SELECT".to_owned(), database.clone()])?;
        }
        exchange(&mut connection, words)
    }

    fn connect(&self) -> io::Result<Connection> {
        let stream = TcpStream::connect_timeout(&self.addr, RESPONSE_TIMEOUT)?;
        stream.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
        stream.set_write_timeout(Some(RESPONSE_TIMEOUT))?;
        let Some(ca_file) = &self.ca_file else {
            return Ok(BufReader::new(Box::new(stream)));
        };
        let config = Arc::new(certificates::client_config(ca_file));
        let name = ServerName::try_from("localhost").expect("localhost is a valid name");
        let session = rustls::ClientConnection::new(config, name).map_err(io::Error::other)?;
        Ok(BufReader::new(Box::new(rustls::StreamOwned::new(session, stream))))
    }
}

fn exchange(connection: &mut Connection, words: &[String]) -> Result<Reply, String> {
    let mut request = format!("*{}\r\n", words.len());
    for word in words {
        request.push_str(&format!("${}\r\n{word}\r\n", word.len()));
    }
    let sent = connection.get_mut().write_all(request.as_bytes()).and_then(|()| connection.get_mut().flush());
    sent.map_err(|error| error.to_string())?;
    read(connection).map_err(|error| error.to_string())?
}

/// Reads one reply; `Ok(Err(…))` is an error reply.
fn read(from: &mut impl BufRead) -> io::Result<Result<Reply, String>> {
    let mut line = String::new();
    from.read_line(&mut line)?;
    let Some(line) = line.strip_suffix("\r\n").filter(|line| !line.is_empty()) else {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "Redis closed the connection"));
    };
    let (kind, rest) = line.split_at_checked(1).ok_or_else(|| not_a_reply(line))?;
    let number = || rest.parse::<i64>().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error));
    Ok(Ok(match kind {
        "-" => return Ok(Err(rest.to_owned())),
        "+" => Reply::Text(rest.to_owned()),
        ":" => Reply::Integer(number()?),
        "$" => match usize::try_from(number()?) {
            Ok(length) => Reply::Text(read_text(from, length)?),
            Err(_negative) => Reply::Nil,
        },
        "*" => match usize::try_from(number()?) {
            // An error within a list is that of one step of a script or transaction; it is returned as text.
            Ok(count) => Reply::List(
                (0..count).map(|_| Ok(read(from)?.unwrap_or_else(Reply::Text))).collect::<io::Result<_>>()?,
            ),
            Err(_negative) => Reply::Nil,
        },
        _ => return Err(not_a_reply(line)),
    }))
}

fn read_text(from: &mut impl BufRead, length: usize) -> io::Result<String> {
    let mut bytes = vec![0; length + "\r\n".len()];
    from.read_exact(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes[..length]).into_owned())
}

fn not_a_reply(line: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("not a reply of Redis: {line}"))
}

/// Decodes `%40` and the like in parts of a URL.
fn percent_decode(text: &str) -> String {
    let query = format!("x={}", text.replace('+', "%2B"));
    let mut pairs = url::form_urlencoded::parse(query.as_bytes());
    pairs.next().map(|(_, value)| value.into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_reply_is_read() {
        let mut bytes: &[u8] =
            b"*5\r\n:-7\r\n$4\r\na\r\nb\r\n$-1\r\n+OK\r\n*1\r\n-ERR no\r\n-MOVED 1 h:2\r\n";
        let text = |text: &str| Reply::Text(text.to_owned());
        let nested = Reply::List(vec![text("ERR no")]);
        let expected = vec![Reply::Integer(-7), text("a\r\nb"), Reply::Nil, text("OK"), nested];
        assert_eq!(read(&mut bytes).unwrap(), Ok(Reply::List(expected)));
        assert_eq!(read(&mut bytes).unwrap(), Err("MOVED 1 h:2".to_owned()));
        assert!(read(&mut bytes).is_err(), "the end of a connection is not a reply");
    }

    #[test]
    fn a_url_is_parsed() {
        let url = Url::parse("redis://u:a+b%40%2F%25@127.0.0.1:7000/3").unwrap();
        let endpoint = Endpoint::from_url(&url);
        assert_eq!(endpoint.addr, SocketAddr::from(([127, 0, 0, 1], 7000)));
        assert_eq!(endpoint.user.as_deref(), Some("u"));
        assert_eq!(endpoint.password.as_deref(), Some("a+b@/%"));
        assert_eq!(endpoint.database.as_deref(), Some("3"));
        let bare = Endpoint::from_url(&Url::parse("redis://127.0.0.1").unwrap());
        assert_eq!((bare.addr.port(), bare.user, bare.password, bare.database), (6379, None, None, None));
    }
}

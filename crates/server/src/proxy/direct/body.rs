//! The bodies of answers: where they end, and what is theirs of what was read.
//!
//! What comes is looked at once, byte by byte where it has to do with chunks, so it may come in any pieces. Whatever has no
//! honest reading breaks the answer off.

use std::io;

use bytes::{Buf, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue};
use hyper::body::Frame;

/// How much an answer may say about its chunks besides their lengths.
const EXTENSIONS_MAX: u32 = 16 << 10;
/// How long all trailers together may be.
const TRAILERS_BYTES_MAX: usize = 16 << 10;
/// How many trailers there may be.
const TRAILERS_MAX: usize = 100;

/// Why an answer cannot be read to its end.
#[derive(Debug, thiserror::Error)]
pub(in crate::proxy) enum Broken {
    #[error("the connection ended before it")]
    Closed,
    #[error("its chunks cannot be told apart")]
    Chunks,
    #[error("its trailers cannot be read")]
    Trailers,
    #[error("the connection was lost")]
    Lost(#[source] io::Error),
}

/// The body of an answer, as far as it has not come yet.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::proxy) enum Body {
    /// So much more.
    Length(u64),
    /// Chunks up to one of no length.
    Chunked(Box<Chunks>),
    /// All there is.
    UntilClosed,
    /// Nothing more.
    Ended,
}

/// Where within its chunks a body is.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::proxy) struct Chunks {
    at: At,
    /// What is left of this chunk.
    left: u64,
    extensions: u32,
    trailers: Vec<u8>,
}

/// What comes next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum At {
    /// The first digit of a length.
    #[default]
    Start,
    /// More of a length, or what ends it.
    Size,
    /// Spaces after a length.
    Space,
    /// Something else after a length.
    Extension,
    SizeLf,
    Data,
    DataCr,
    DataLf,
    /// A trailer, or the end.
    Line,
    Trailer,
    TrailerLf,
    EndLf,
    End,
}

impl Body {
    /// Chunks of which none has come.
    pub(in crate::proxy) fn chunked() -> Self {
        Self::Chunked(Box::default())
    }

    /// Takes the next piece out of what was read. None when the body has ended, or more has to come first; all that was read
    /// is taken then.
    pub(in crate::proxy) fn next(&mut self, read: &mut Bytes) -> Result<Option<Frame<Bytes>>, Broken> {
        match self {
            Self::Length(left) => {
                let piece = take(read, left);
                if *left == 0 {
                    *self = Self::Ended;
                }
                Ok(piece.map(Frame::data))
            }
            Self::Chunked(chunks) => {
                let piece = chunks.next(read)?;
                if chunks.at == At::End {
                    *self = Self::Ended;
                }
                Ok(piece)
            }
            Self::UntilClosed => {
                let all = std::mem::take(read);
                Ok((!all.is_empty()).then(|| Frame::data(all)))
            }
            Self::Ended => Ok(None),
        }
    }

    /// Nothing more will come.
    pub(in crate::proxy) fn close(&mut self) -> Result<(), Broken> {
        match self {
            Self::Length(_) | Self::Chunked(_) => Err(Broken::Closed),
            Self::UntilClosed | Self::Ended => {
                *self = Self::Ended;
                Ok(())
            }
        }
    }
}

/// As much as there is and may be.
fn take(read: &mut Bytes, left: &mut u64) -> Option<Bytes> {
    let count = usize::try_from(*left).map_or(read.len(), |left| left.min(read.len()));
    *left -= count as u64;
    (count > 0).then(|| read.split_to(count))
}

impl Chunks {
    fn next(&mut self, read: &mut Bytes) -> Result<Option<Frame<Bytes>>, Broken> {
        loop {
            if self.at == At::Data {
                let piece = take(read, &mut self.left);
                if self.left == 0 {
                    self.at = At::DataCr;
                }
                return Ok(piece.map(Frame::data));
            }
            let mut looked = 0;
            for byte in read.iter() {
                if matches!(self.at, At::Data | At::End) {
                    break;
                }
                self.at = self.step(*byte)?;
                looked += 1;
            }
            read.advance(looked);
            match self.at {
                At::Data if !read.is_empty() => {}
                At::End if !self.trailers.is_empty() => return self.trailers().map(Some),
                _ => return Ok(None),
            }
        }
    }

    /// What comes after this byte.
    fn step(&mut self, byte: u8) -> Result<At, Broken> {
        match (self.at, byte) {
            (At::Start | At::Size, b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') => {
                let digit = char::from(byte).to_digit(16).map_or(0, u64::from);
                let longer = self.left.checked_mul(16).and_then(|size| size.checked_add(digit));
                self.left = longer.ok_or(Broken::Chunks)?;
                Ok(At::Size)
            }
            (At::Size | At::Space, b' ' | b'\t') => Ok(At::Space),
            (At::Size | At::Space, b';') => Ok(At::Extension),
            (At::Size | At::Space | At::Extension, b'\r') => Ok(At::SizeLf),
            (At::Extension, byte) if byte != b'\n' && self.extensions < EXTENSIONS_MAX => {
                self.extensions += 1;
                Ok(At::Extension)
            }
            (At::SizeLf, b'\n') => Ok(if self.left == 0 { At::Line } else { At::Data }),
            (At::DataCr, b'\r') => Ok(At::DataLf),
            (At::DataLf, b'\n') => Ok(At::Start),
            (At::Line, b'\r') => Ok(At::EndLf),
            (At::EndLf, b'\n') => Ok(At::End),
            (At::Line | At::Trailer | At::TrailerLf, byte) => self.step_trailer(byte),
            _ => Err(Broken::Chunks),
        }
    }

    fn step_trailer(&mut self, byte: u8) -> Result<At, Broken> {
        if self.trailers.len() >= TRAILERS_BYTES_MAX {
            return Err(Broken::Trailers);
        }
        self.trailers.push(byte);
        match (self.at, byte) {
            (At::TrailerLf, b'\n') => Ok(At::Line),
            (At::TrailerLf, _) => Err(Broken::Trailers),
            (_, b'\r') => Ok(At::TrailerLf),
            _ => Ok(At::Trailer),
        }
    }

    fn trailers(&mut self) -> Result<Frame<Bytes>, Broken> {
        let mut text = std::mem::take(&mut self.trailers);
        text.extend_from_slice(b"\r\n");
        let mut lines = [httparse::EMPTY_HEADER; TRAILERS_MAX];
        let Ok(httparse::Status::Complete((_, lines))) = httparse::parse_headers(&text, &mut lines) else {
            return Err(Broken::Trailers);
        };
        let mut trailers = HeaderMap::with_capacity(lines.len());
        for line in lines {
            let name = HeaderName::from_bytes(line.name.as_bytes());
            let (Ok(name), Ok(value)) = (name, HeaderValue::from_bytes(line.value)) else {
                return Err(Broken::Trailers);
            };
            trailers.append(name, value);
        }
        Ok(Frame::trailers(trailers))
    }
}

#[cfg(test)]
mod tests;

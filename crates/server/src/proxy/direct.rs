//! The direct way: a call whose whole request is there is written, and its answer read, without hyper.
//!
//! What hyper's client costs such a call is mostly moving it from hand to hand. Here it is bytes that are written at once, and an
//! answer that came whole is passed on whole. Uploads that are still coming, and calls that ask something of their connection,
//! are hyper's. Both take an answer for the same; `tests/it/ai/answers.rs` holds them to it.

mod ask;
mod body;
mod flow;
mod head;

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{HeaderMap, Method};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

pub(super) use self::ask::write as write_ask;
pub(super) use self::body::{Body, Broken};
pub(super) use self::flow::{Around, Flow};
pub(super) use self::head::Head;
use super::alarm::Over;
use super::pool::Line;
use super::{HEAD_BYTES_MAX, Problem, headers};

/// The most that is read at once.
const ROOM_SIZE: usize = 64 << 10;

/// Whether a call with such a head can go this way.
pub(super) fn takes(method: &Method, given: &HeaderMap) -> bool {
    method != Method::CONNECT && headers::asks_nothing_of_its_connection(given)
}

/// A call and its answer.
pub(super) struct Talk {
    pub(super) line: Line,
    /// The request, as it is written.
    ask: Vec<u8>,
    /// How much of it was.
    written: usize,
    /// Why no more of it can be.
    unwritable: Option<io::Error>,
    /// What was read and not looked at yet.
    pub(super) read: Bytes,
    /// How much was read before there was a head.
    heard: usize,
}

/// Why there is no answer.
pub(super) enum Failure {
    /// Nothing of the request was sent, over a connection that had waited. Here it is.
    Unsent(Vec<u8>),
    /// Anything else.
    Final(Problem),
}

impl Talk {
    pub(super) const fn new(line: Line, ask: Vec<u8>) -> Self {
        Self { line, ask, written: 0, unwritable: None, read: Bytes::new(), heard: 0 }
    }

    /// Sends the request and waits for the head of the answer, until `poll_over` says that there is no point in it.
    pub(super) async fn head(
        &mut self,
        is_bodiless: bool,
        mut poll_over: impl FnMut(&mut Line, &mut Context<'_>) -> Poll<Problem>,
    ) -> Result<Head, Failure> {
        let mut partial = 0;
        poll_fn(|context| {
            if let Poll::Ready(answered) = self.poll_head(context, is_bodiless, &mut partial) {
                return Poll::Ready(answered);
            }
            poll_over(&mut self.line, context).map(|problem| Err(Failure::Final(problem)))
        })
        .await
    }

    /// `partial` is how much was read when it was found to be no whole head yet.
    fn poll_head(
        &mut self,
        context: &mut Context<'_>,
        is_bodiless: bool,
        partial: &mut usize,
    ) -> Poll<Result<Head, Failure>> {
        self.write(context);
        if self.unwritable.is_some() && self.is_unsent() {
            return Poll::Ready(Err(Failure::Unsent(std::mem::take(&mut self.ask))));
        }
        loop {
            match ready!(self.line.poll_read(context, &mut self.read)) {
                Ok(0) => return Poll::Ready(Err(self.closed())),
                Ok(more) => self.heard += more,
                Err(error) => return Poll::Ready(Err(unreadable(&error))),
            }
            if *partial > 0 && !may_be_whole(&self.read, *partial) {
                *partial = self.read.len();
            } else {
                match head::take(&mut self.read, is_bodiless) {
                    Ok(Some(head)) => return Poll::Ready(Ok(head)),
                    Ok(None) => *partial = self.read.len(),
                    Err(malformed) => return Poll::Ready(Err(unreadable(&malformed))),
                }
            }
            // Heads that only announce an answer count as well: there may be no end to them.
            if self.heard >= HEAD_BYTES_MAX {
                return Poll::Ready(Err(unreadable(&"its head is too long")));
            }
        }
    }

    /// Whether it is certain that the upstream has nothing of the request, and another connection can be tried.
    const fn is_unsent(&self) -> bool {
        // Encrypted, more may have gone out than is known.
        self.written == 0 && self.line.is_used && self.line.stream.is_plain()
    }

    /// The connection ended before there was an answer.
    fn closed(&mut self) -> Failure {
        match self.unwritable.take() {
            Some(error) => unreadable(&error),
            None => unreadable(&"the connection ended before it"),
        }
    }

    /// Writes what there is room for. An upstream that takes no more may have answered already.
    pub(super) fn write(&mut self, context: &mut Context<'_>) {
        if self.unwritable.is_none()
            && let Poll::Ready(Err(error)) = self.poll_write(context)
        {
            self.unwritable = Some(error);
        }
    }

    fn poll_write(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let Some(rest @ [_, ..]) = self.ask.get(self.written..) {
            match ready!(Pin::new(&mut self.line.stream).poll_write(context, rest))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                count => self.written += count,
            }
        }
        Pin::new(&mut self.line.stream).poll_flush(context)
    }

    /// The body, if all of it has come.
    pub(super) fn take_whole(&mut self, body: &mut Body) -> Option<Bytes> {
        let is_whole = match body {
            Body::Length(left) => self.read.len() as u64 >= *left,
            Body::Ended => true,
            Body::Chunked(_) | Body::UntilClosed => false,
        };
        if !is_whole {
            return None;
        }
        let frame = body.next(&mut self.read).ok().flatten();
        Some(frame.and_then(|frame| frame.into_data().ok()).unwrap_or_default())
    }

    /// Keeps no room for a request that was written.
    fn forget_ask(&mut self) {
        if self.written == self.ask.len() {
            self.ask = Vec::new();
            self.written = 0;
        }
    }

    /// The connection, if all was said and nothing is left of what was heard.
    pub(super) fn into_line(self) -> Option<Line> {
        let is_over = self.written == self.ask.len() && self.unwritable.is_none() && self.read.is_empty();
        is_over.then_some(self.line)
    }
}

impl Line {
    /// Adds what has come to what was read; nothing, when no more will.
    fn poll_read(&mut self, context: &mut Context<'_>, read: &mut Bytes) -> Poll<io::Result<usize>> {
        thread_local! {
            static ROOM: RefCell<Box<[u8]>> = RefCell::new(vec![0; ROOM_SIZE].into());
        }
        ROOM.with_borrow_mut(|room| {
            let mut room = ReadBuf::new(room);
            ready!(Pin::new(&mut self.stream).poll_read(context, &mut room))?;
            let more = room.filled();
            if read.is_empty() {
                *read = Bytes::copy_from_slice(more);
            } else {
                let mut longer = Vec::from(std::mem::take(read));
                longer.extend_from_slice(more);
                *read = longer.into();
            }
            Poll::Ready(Ok(more.len()))
        })
    }
}

/// Whether a head may end behind the bytes that were looked at before.
fn may_be_whole(read: &[u8], looked: usize) -> bool {
    let fresh = read.get(looked.saturating_sub(3)..).unwrap_or_default();
    fresh.windows(2).any(|end| end == b"\n\n") || fresh.windows(3).any(|end| end == b"\n\r\n")
}

fn unreadable(problem: &dyn std::fmt::Display) -> Failure {
    Failure::Final(Problem::Unreadable(problem.to_string()))
}

/// Why a call comes to nothing when a wait is over before its answer has begun.
pub(super) const fn late(over: Over) -> Problem {
    match over {
        Over::Late => Problem::TimedOut,
        Over::Stopping => Problem::Stopping,
    }
}

#[cfg(test)]
mod tests;

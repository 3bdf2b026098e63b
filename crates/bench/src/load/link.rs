//! One keep-alive connection: sends prepared bytes and reads responses, within a timeout.
//!
//! Each request takes one write and one read system call, no allocation, and no timer of its own.

use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep, timeout};

use super::response::{Answer, Parser};
use super::stats::Failure;

/// The size of the buffer. A response head must fit; bodies may have any length.
const BUFFER: usize = 16 * 1024;

pub(super) struct Link {
    stream: TcpStream,
    parser: Parser,
    buffer: Box<[u8]>,
    /// The part of the buffer that was read and not consumed yet.
    unread: std::ops::Range<usize>,
}

impl Link {
    pub(super) async fn connect(address: SocketAddr, limit: Duration) -> Result<Self, Failure> {
        let connected = timeout(limit, TcpStream::connect(address)).await;
        let Ok(Ok(stream)) = connected else {
            return Err(Failure::Connect);
        };
        stream.set_nodelay(true).map_err(|_error| Failure::Connect)?;
        Ok(Self { stream, parser: Parser::new(), buffer: vec![0; BUFFER].into(), unread: 0..0 })
    }

    /// Sends one request and waits for its answer.
    pub(super) async fn exchange(&mut self, request: &[u8]) -> Result<Answer, Failure> {
        self.send(request).await?;
        let answer = self.receive().await?;
        // Bytes after the response would be parsed as the next one.
        if self.unread.is_empty() { Ok(answer) } else { Err(Failure::Protocol) }
    }

    pub(super) async fn send(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.stream.write_all(bytes).await.map_err(failure)
    }

    pub(super) async fn receive(&mut self) -> Result<Answer, Failure> {
        loop {
            let shown = &self.buffer[self.unread.clone()];
            let (used, answer) = self.parser.advance(shown).map_err(|_error| Failure::Protocol)?;
            self.unread.start += used;
            if let Some(answer) = answer {
                return Ok(answer);
            }
            if self.fill().await? == 0 {
                return self.parser.close().ok_or(Failure::Reset);
            }
        }
    }

    /// Reads behind what is left of the last read, moved to the front of the buffer.
    async fn fill(&mut self) -> Result<usize, Failure> {
        if self.unread.start > 0 {
            self.buffer.copy_within(self.unread.clone(), 0);
            self.unread = 0..self.unread.len();
        }
        if self.unread.end == self.buffer.len() {
            return Err(Failure::Protocol);
        }
        let count = self.stream.read(&mut self.buffer[self.unread.end..]).await.map_err(failure)?;
        self.unread.end += count;
        Ok(count)
    }
}

fn failure(_error: io::Error) -> Failure {
    Failure::Reset
}

/// The timeout of an exchange, with one timer that is reset only when it fires.
///
/// Setting a timer for each request would cost more than parsing its response.
pub(super) struct ReusableTimeout {
    limit: Duration,
    timer: Pin<Box<Sleep>>,
}

impl ReusableTimeout {
    pub(super) fn new(limit: Duration) -> Self {
        Self { limit, timer: Box::pin(sleep(limit)) }
    }

    /// Returns the outcome of `work`, or a timeout when the limit has passed since `started`.
    pub(super) async fn bound<T>(
        &mut self,
        started: Instant,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let mut work = pin!(work);
        poll_fn(|context| match work.as_mut().poll(context) {
            Poll::Ready(done) => Poll::Ready(done),
            Poll::Pending => self.poll_expired(context, started).map(|()| Err(Failure::Timeout)),
        })
        .await
    }

    fn poll_expired(&mut self, context: &mut Context<'_>, started: Instant) -> Poll<()> {
        loop {
            ready!(self.timer.as_mut().poll(context));
            let deadline = started + self.limit;
            if deadline <= Instant::now() {
                return Poll::Ready(());
            }
            self.timer.as_mut().reset(deadline.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_timer_bounds_one_exchange_after_another() {
        let mut timeout = ReusableTimeout::new(Duration::from_millis(5));
        for _ in 0..3 {
            let stuck = timeout.bound(Instant::now(), std::future::pending::<Result<(), Failure>>()).await;
            assert_eq!(stuck, Err(Failure::Timeout));
            assert_eq!(timeout.bound(Instant::now(), async { Ok(1) }).await, Ok(1));
        }
    }
}

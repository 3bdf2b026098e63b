//! The short way: the few routes that are called all the time are answered without hyper and the router.
//!
//! It takes only requests that are as plain as such requests are (see `short/plain.rs`). At the first one that is not, or that
//! does not come in time, the connection goes to hyper with all that was read of it, and stays there. So one place knows the
//! whole of HTTP, and nothing here has to refuse anything.

mod plain;
pub(crate) mod write;

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use http::Request;
use tokio::io::AsyncWriteExt;
use tokio::sync::watch;
use tokio::time::{Instant, Sleep};

use self::plain::Not;
use super::caller::{Bytes, Caller};
use super::envelope;
use super::router::{Routes, Short};
use crate::telemetry::metrics::Metrics;

/// A request that comes in more parts is hyper's: each time a part comes, all of them are looked at.
const PARTS_MAX: usize = 8;

/// How it ended.
#[derive(Debug)]
pub(super) enum End {
    /// The connection is over.
    Over,
    /// The rest is hyper's, beginning with what was read.
    Handed(bytes::Bytes),
}

/// What a connection waited for.
enum Event {
    /// More has come.
    Read,
    /// No more will come.
    Closed,
    /// The server is to stop.
    Stopping,
    /// Nothing came in time.
    Late,
}

/// What the requests of a connection are answered with.
pub(super) struct Way<'a> {
    pub(super) caller: &'a Caller,
    pub(super) routes: &'a Routes,
    pub(super) metrics: &'a Metrics,
    pub(super) read_timeout: Duration,
}

impl Way<'_> {
    /// Answers requests until the connection ends, or one comes that is not for here.
    ///
    /// # Errors
    /// When an answer could not be written.
    pub(super) async fn serve(&self, connection: &mut Bytes, stop: &watch::Receiver<()>) -> io::Result<End> {
        let mut told = stop.clone();
        let mut stopping = pin!(told.changed());
        let mut late = pin!(tokio::time::sleep(self.read_timeout));
        let (mut read, mut parts, mut due) = (bytes::Bytes::new(), 0, Instant::now());
        loop {
            match plain::take(&mut read, |method, path| self.routes.short(method, path)) {
                Ok((request, short)) => {
                    parts = 0;
                    let is_last = stop.has_changed().unwrap_or(true);
                    self.answer(short, request, connection, is_last).await?;
                    if is_last {
                        connection.shutdown().await?;
                        return Ok(End::Over);
                    }
                }
                Err(Not::Whole) if parts < PARTS_MAX => {
                    parts += 1;
                    if read.is_empty() {
                        // The parts of a request together have as long as its first one alone.
                        due = Instant::now() + self.read_timeout;
                    }
                    match wait(connection, &mut read, stopping.as_mut(), late.as_mut(), due).await? {
                        Event::Read => {}
                        Event::Closed | Event::Stopping | Event::Late if read.is_empty() => {
                            return Ok(End::Over);
                        }
                        Event::Closed | Event::Stopping | Event::Late => return Ok(End::Handed(read)),
                    }
                }
                Err(Not::Whole | Not::Plain) => return Ok(End::Handed(read)),
            }
        }
    }

    async fn answer(
        &self,
        short: &Short,
        request: Request<bytes::Bytes>,
        connection: &mut Bytes,
        is_last: bool,
    ) -> io::Result<()> {
        let call = |request| self.routes.call_short(short, request, self.caller);
        let response = envelope::wrap(short.path, self.metrics, request, call).await;
        write::answer(response, is_last, connection).await
    }
}

/// Waits for the next part. The timer is set anew when it has run out and not for every request: most are answered long
/// before.
async fn wait(
    connection: &mut Bytes,
    read: &mut bytes::Bytes,
    mut stopping: Pin<&mut impl Future>,
    mut late: Pin<&mut Sleep>,
    due: Instant,
) -> io::Result<Event> {
    poll_fn(|context| {
        if let Poll::Ready(count) = connection.poll_more(context, read) {
            let event = |count| if count == 0 { Event::Closed } else { Event::Read };
            return Poll::Ready(count.map(event));
        }
        if stopping.as_mut().poll(context).is_ready() {
            return Poll::Ready(Ok(Event::Stopping));
        }
        while late.as_mut().poll(context).is_ready() {
            if due <= Instant::now() {
                return Poll::Ready(Ok(Event::Late));
            }
            late.as_mut().reset(due);
        }
        Poll::Pending
    })
    .await
}

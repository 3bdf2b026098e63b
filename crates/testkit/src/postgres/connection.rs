//! Opens client connections, with TLS when the server has a certificate authority.

use std::future::Future;
use std::path::Path;
use std::time::Duration;

use tokio_postgres::{Client, Error, NoTls};
use tokio_postgres_rustls::MakeRustlsConnect;
use url::Url;

use crate::certificates;

/// Timeout of one attempt: a paused or starting server accepts connections but does not respond.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) async fn open(url: &Url, ca_file: Option<&Path>) -> Result<Client, Error> {
    match ca_file {
        None => {
            let (client, connection) = tokio_postgres::connect(url.as_str(), NoTls).await?;
            tokio::spawn(connection);
            Ok(client)
        }
        Some(ca_file) => {
            let tls = MakeRustlsConnect::new(certificates::client_config(ca_file));
            let (client, connection) = tokio_postgres::connect(url.as_str(), tls).await?;
            tokio::spawn(connection);
            Ok(client)
        }
    }
}

/// Makes one blocking attempt; the error says why it failed.
pub(super) fn probe(url: &Url, ca_file: Option<&Path>) -> Result<(), String> {
    let attempt = async {
        let client = open(url, ca_file).await.map_err(|error| describe(&error))?;
        client.batch_execute("SELECT 1").await.map_err(|error| describe(&error))
    };
    block_on(async { tokio::time::timeout(ATTEMPT_TIMEOUT, attempt).await.map_err(|late| late.to_string())? })
}

/// The error with its cause, which contains the server's message.
pub(super) fn describe(error: &Error) -> String {
    match std::error::Error::source(error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

/// Runs a future in its own thread, because a runtime does not allow blocking on another one.
pub(super) fn block_on<T: Send>(work: impl Future<Output = T> + Send) -> T {
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime needs only a few file descriptors; see `ulimit -n`").block_on(work)
    };
    std::thread::scope(|scope| match scope.spawn(run).join() {
        Ok(output) => output,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

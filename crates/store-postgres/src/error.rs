//! Which of Postgres's errors pass by themselves, and which do not.

use std::error::Error as _;

use tokio_postgres::error::SqlState;
use tokio_postgres::types::{WasNull, WrongType};
use weir_store::Error;

use crate::ENGINE;

/// Everything but a statement that was rejected on its merits, here or there, may pass by itself.
pub(crate) fn classify(error: tokio_postgres::Error) -> Error {
    let fault = match error.code() {
        Some(code) => !is_transient(code),
        None => error.source().is_some_and(|cause| cause.is::<WrongType>() || cause.is::<WasNull>()),
    };
    if fault { Error::failed(ENGINE, error) } else { Error::unavailable(ENGINE, error) }
}

fn is_transient(code: &SqlState) -> bool {
    // By class: connections, resources, operators stopping it, deadlocks, locks held, a standby that cannot write,
    // and credentials or a database that somebody is just changing.
    let transient = ["08", "53", "57", "58", "40", "55", "25", "28", "3D"];
    transient.iter().any(|class| code.code().starts_with(class))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_operator_or_time_mends_is_transient_and_a_fault_is_not() {
        use SqlState as S;
        for passing in [
            S::ADMIN_SHUTDOWN,
            S::CANNOT_CONNECT_NOW,
            S::T_R_DEADLOCK_DETECTED,
            S::LOCK_NOT_AVAILABLE,
            S::QUERY_CANCELED,
            S::TOO_MANY_CONNECTIONS,
            S::READ_ONLY_SQL_TRANSACTION,
            S::IDLE_IN_TRANSACTION_SESSION_TIMEOUT,
            S::INVALID_PASSWORD,
            S::DISK_FULL,
        ] {
            assert!(is_transient(&passing), "{passing:?}");
        }
        for fault in [S::UNDEFINED_TABLE, S::CHECK_VIOLATION, S::SYNTAX_ERROR, S::NUMERIC_VALUE_OUT_OF_RANGE]
        {
            assert!(!is_transient(&fault), "{fault:?}");
        }
    }
}

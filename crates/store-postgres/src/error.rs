//! Classifies Postgres's errors as transient or permanent.

use std::error::Error as _;

use tokio_postgres::error::SqlState;
use tokio_postgres::types::{WasNull, WrongType};
use weir_store::Error;

use crate::ENGINE;

/// An error is transient unless the server or the driver has rejected the statement itself.
pub(crate) fn classify(error: tokio_postgres::Error) -> Error {
    let is_permanent = match error.code() {
        Some(code) => !is_transient(code),
        None => error.source().is_some_and(|cause| cause.is::<WrongType>() || cause.is::<WasNull>()),
    };
    if is_permanent { Error::failed(ENGINE, error) } else { Error::unavailable(ENGINE, error) }
}

fn is_transient(code: &SqlState) -> bool {
    // By class: connections (08), resources (53), operator intervention (57), system errors (58), deadlocks (40), locks (55),
    // a read-only standby (25), and credentials (28) or a database (3D) that an operator may be changing.
    let classes = ["08", "53", "57", "58", "40", "55", "25", "28", "3D"];
    classes.iter().any(|class| code.code().starts_with(class))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_time_or_an_operator_fixes_are_transient() {
        use SqlState as S;
        for transient in [
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
            assert!(is_transient(&transient), "{transient:?}");
        }
        for permanent in
            [S::UNDEFINED_TABLE, S::CHECK_VIOLATION, S::SYNTAX_ERROR, S::NUMERIC_VALUE_OUT_OF_RANGE]
        {
            assert!(!is_transient(&permanent), "{permanent:?}");
        }
    }
}

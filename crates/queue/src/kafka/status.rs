//! Whether a message that failed may be in its topic nevertheless.

use rdkafka::bindings::{rd_kafka_message_status, rd_kafka_msg_status_t};
use rdkafka::message::BorrowedMessage;

/// Whether a message certainly never reached its topic. The error code cannot show it, since it is that of the last
/// attempt only; librdkafka tracks all attempts.
#[expect(unsafe_code, reason = "rdkafka does not wrap rd_kafka_message_status")]
pub(super) fn certainly_absent(message: &BorrowedMessage<'_>) -> bool {
    // SAFETY: `ptr` is the message of a delivery report and lives as long as `message`, which is borrowed here. The
    // function only reads it.
    let status = unsafe { rd_kafka_message_status(message.ptr()) };
    status == rd_kafka_msg_status_t::RD_KAFKA_MSG_STATUS_NOT_PERSISTED
}

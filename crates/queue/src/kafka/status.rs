//! What librdkafka knows of a failed message: whether it may be in the topic all the same.

use rdkafka::bindings::{rd_kafka_message_status, rd_kafka_msg_status_t};
use rdkafka::message::BorrowedMessage;

/// Whether a message certainly never reached its topic. A retry that failed says nothing of the attempt before it, so
/// the code of an error cannot tell; librdkafka keeps count.
#[expect(unsafe_code, reason = "rdkafka does not wrap rd_kafka_message_status")]
pub(super) fn certainly_absent(message: &BorrowedMessage<'_>) -> bool {
    // SAFETY: `ptr` is the message of a delivery report and lives as long as `message`, which is borrowed here. The
    // function only reads it.
    let status = unsafe { rd_kafka_message_status(message.ptr()) };
    status == rd_kafka_msg_status_t::RD_KAFKA_MSG_STATUS_NOT_PERSISTED
}

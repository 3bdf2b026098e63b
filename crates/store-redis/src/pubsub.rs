//! A subscription to a Redis channel. It reconnects after every loss and pings once a second, since a broken connection can
//! look like a quiet channel.

use std::time::Duration;

use futures_util::StreamExt;
use redis::aio::{PubSubSink, PubSubStream};
use redis::{ErrorKind, RedisError, RedisResult, Value};

use crate::client::Redis;
use crate::node::ReconnectBackoff;

const PING_EVERY: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChannelEvent<'a> {
    /// Every message from now on is received; earlier ones may have been missed.
    Subscribed,
    /// The payload of a message.
    Message(&'a [u8]),
    /// No message is received until `Subscribed` follows.
    Lost,
}

impl Redis {
    /// Subscribes to a channel until the future is dropped. On a cluster every server receives the messages of all, so this
    /// connects to one, and after a loss to another.
    pub(crate) async fn subscribe(&self, channel: &str, mut on_event: impl FnMut(ChannelEvent<'_>) + Send) {
        let (mut backoff, mut is_loss_logged) = (ReconnectBackoff::default(), false);
        for round in 0_usize.. {
            backoff.pause().await;
            let mut is_subscribed = false;
            let Err(error) = self
                .subscribe_once(channel, round, |event| {
                    if event == ChannelEvent::Subscribed {
                        is_subscribed = true;
                        backoff.connected();
                        if std::mem::take(&mut is_loss_logged) {
                            tracing::info!(channel, "subscribed to the Redis channel again");
                        }
                    }
                    on_event(event);
                })
                .await;
            if is_subscribed {
                on_event(ChannelEvent::Lost);
            }
            if !std::mem::replace(&mut is_loss_logged, true) {
                tracing::warn!(channel, %error, "cannot subscribe to the Redis channel; retrying");
            }
        }
    }

    /// Subscribes once and returns the error that ended the subscription.
    async fn subscribe_once(
        &self,
        channel: &str,
        round: usize,
        mut on_event: impl FnMut(ChannelEvent<'_>) + Send,
    ) -> RedisResult<std::convert::Infallible> {
        let (client, timeout) = self.any_client(round)?;
        let subscribed = async {
            let mut channels = client.get_async_pubsub().await?;
            channels.subscribe(channel).await?;
            Ok::<_, RedisError>(channels.split())
        };
        let subscribed = tokio::time::timeout(timeout * 2, subscribed);
        let (sink, mut messages) = subscribed.await.map_err(|_elapsed| timed_out())??;
        on_event(ChannelEvent::Subscribed);
        let error = tokio::select! {
            error = receive_all(&mut messages, on_event) => error,
            error = ping_until_lost(sink, timeout) => error,
        };
        Err(error)
    }
}

async fn receive_all(messages: &mut PubSubStream, mut on_event: impl FnMut(ChannelEvent<'_>)) -> RedisError {
    while let Some(message) = messages.next().await {
        on_event(ChannelEvent::Message(message.get_payload_bytes()));
    }
    RedisError::from((ErrorKind::Io, "the connection was closed"))
}

/// Pings the connection until a ping fails or times out.
async fn ping_until_lost(mut sink: PubSubSink, timeout: Duration) -> RedisError {
    loop {
        tokio::time::sleep(PING_EVERY).await;
        match tokio::time::timeout(timeout, sink.ping::<Value>()).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return error,
            Err(_elapsed) => return timed_out(),
        }
    }
}

fn timed_out() -> RedisError {
    RedisError::from((ErrorKind::Io, "timed out"))
}

//! A channel of Redis that is listened to: subscribed again after every loss, and asked once a second whether anything would
//! still be heard, since a connection that is lost without a word is silent, too.

use std::time::Duration;

use futures_util::StreamExt;
use redis::aio::{PubSubSink, PubSubStream};
use redis::{ErrorKind, RedisError, RedisResult, Value};

use crate::client::Redis;
use crate::node::Backoff;

const ASK_EVERY: Duration = Duration::from_secs(1);

/// What is heard of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChannelEvent<'a> {
    /// From now on everything; what was said before was perhaps not.
    Begun,
    /// What somebody said.
    Said(&'a [u8]),
    /// Nothing more until it begins again.
    Lost,
}

impl Redis {
    /// Listens to a channel for as long as this is waited for. On a cluster any server hears what is said on all of them, so
    /// one is taken, and another one after a loss.
    pub(crate) async fn listen(&self, channel: &str, mut hear: impl FnMut(ChannelEvent<'_>) + Send) {
        let (mut backoff, mut is_told) = (Backoff::default(), false);
        for round in 0_usize.. {
            backoff.pause().await;
            let mut is_begun = false;
            let Err(error) = self
                .listen_once(channel, round, |heard| {
                    if heard == ChannelEvent::Begun {
                        is_begun = true;
                        backoff.succeeded();
                        if std::mem::take(&mut is_told) {
                            tracing::info!(channel, "Redis is listened to again");
                        }
                    }
                    hear(heard);
                })
                .await;
            if is_begun {
                hear(ChannelEvent::Lost);
            }
            if !std::mem::replace(&mut is_told, true) {
                tracing::warn!(channel, %error, "Redis is not listened to; trying again");
            }
        }
    }

    /// Listens until the connection is lost.
    async fn listen_once(
        &self,
        channel: &str,
        round: usize,
        mut hear: impl FnMut(ChannelEvent<'_>) + Send,
    ) -> RedisResult<std::convert::Infallible> {
        let (client, patience) = self.any_client(round)?;
        let subscribed = async {
            let mut channels = client.get_async_pubsub().await?;
            channels.subscribe(channel).await?;
            Ok::<_, RedisError>(channels.split())
        };
        let subscribed = tokio::time::timeout(patience * 2, subscribed);
        let (sink, mut said) = subscribed.await.map_err(|_late| silent())??;
        hear(ChannelEvent::Begun);
        let error = tokio::select! {
            error = hear_all(&mut said, hear) => error,
            error = keep_asking(sink, patience) => error,
        };
        Err(error)
    }
}

async fn hear_all(said: &mut PubSubStream, mut hear: impl FnMut(ChannelEvent<'_>)) -> RedisError {
    while let Some(message) = said.next().await {
        hear(ChannelEvent::Said(message.get_payload_bytes()));
    }
    RedisError::from((ErrorKind::Io, "the connection was closed"))
}

/// Asks whether anything would still be heard, until nothing would.
async fn keep_asking(mut sink: PubSubSink, patience: Duration) -> RedisError {
    loop {
        tokio::time::sleep(ASK_EVERY).await;
        match tokio::time::timeout(patience, sink.ping::<Value>()).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return error,
            Err(_late) => return silent(),
        }
    }
}

fn silent() -> RedisError {
    RedisError::from((ErrorKind::Io, "it did not answer in time"))
}

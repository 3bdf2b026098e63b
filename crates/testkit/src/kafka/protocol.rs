//! The part of Kafka's protocol that shows whether a broker is ready: a Metadata request, version 1.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Timeout of each read and write: a paused or starting broker accepts connections but does not respond.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
const METADATA: i16 = 3;
const VERSION: i16 = 1;

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Metadata {
    /// The advertised addresses.
    pub(super) brokers: Vec<(String, i32)>,
    pub(super) controller: i32,
    pub(super) topics: Vec<String>,
}

/// Makes one blocking attempt; the error says why it failed.
pub(super) fn probe(address: SocketAddr) -> Result<(), String> {
    let metadata = metadata(address, None).map_err(|error| error.to_string())?;
    // A broker that responds but is not in the list has not joined its cluster yet.
    if metadata.brokers.is_empty() || metadata.controller < 0 {
        return Err(format!("the cluster is not complete: {metadata:?}"));
    }
    Ok(())
}

/// Requests the metadata of one topic, which is created if it does not exist, or of all topics.
pub(super) fn metadata(address: SocketAddr, topic: Option<&str>) -> io::Result<Metadata> {
    let mut stream = TcpStream::connect_timeout(&address, RESPONSE_TIMEOUT)?;
    stream.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
    stream.set_write_timeout(Some(RESPONSE_TIMEOUT))?;
    stream.write_all(&request(topic))?;
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let mut response = vec![0; usize::try_from(i32::from_be_bytes(length)).map_err(io::Error::other)?];
    stream.read_exact(&mut response)?;
    parse(&mut response.as_slice())
}

fn request(topic: Option<&str>) -> Vec<u8> {
    let mut body = Vec::new();
    body.extend(METADATA.to_be_bytes());
    body.extend(VERSION.to_be_bytes());
    let correlation: i32 = 0;
    body.extend(correlation.to_be_bytes());
    string(&mut body, "weir-testkit");
    let topics: i32 = if topic.is_some() { 1 } else { -1 };
    body.extend(topics.to_be_bytes());
    if let Some(topic) = topic {
        string(&mut body, topic);
    }
    let length = i32::try_from(body.len()).expect("a request of a few bytes");
    [length.to_be_bytes().as_slice(), &body].concat()
}

fn string(into: &mut Vec<u8>, text: &str) {
    let length = i16::try_from(text.len()).expect("a name of a few bytes");
    into.extend(length.to_be_bytes());
    into.extend(text.as_bytes());
}

fn parse(response: &mut &[u8]) -> io::Result<Metadata> {
    let _correlation = read_i32(response)?;
    let brokers = read_list(response, |broker| {
        let _id = read_i32(broker)?;
        let address = (read_string(broker)?, read_i32(broker)?);
        let _rack = read_string(broker)?;
        Ok(address)
    })?;
    let controller = read_i32(response)?;
    let topics = read_list(response, |topic| {
        let _error = read_i16(topic)?;
        let name = read_string(topic)?;
        let _internal: [u8; 1] = read_bytes(topic)?;
        read_list(topic, skip_partition)?;
        Ok(name)
    })?;
    Ok(Metadata { brokers, controller, topics })
}

fn skip_partition(partition: &mut &[u8]) -> io::Result<()> {
    let _error = read_i16(partition)?;
    let _index = read_i32(partition)?;
    let _leader = read_i32(partition)?;
    let _replicas = read_list(partition, read_i32)?;
    let _in_sync = read_list(partition, read_i32)?;
    Ok(())
}

fn read_list<T>(from: &mut &[u8], read: impl Fn(&mut &[u8]) -> io::Result<T>) -> io::Result<Vec<T>> {
    let count = read_i32(from)?;
    (0..count).map(|_| read(from)).collect()
}

/// Reads a string; null reads as empty.
fn read_string(from: &mut &[u8]) -> io::Result<String> {
    let mut text = vec![0; usize::try_from(read_i16(from)?).unwrap_or(0)];
    from.read_exact(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn read_i32(from: &mut &[u8]) -> io::Result<i32> {
    read_bytes(from).map(i32::from_be_bytes)
}

fn read_i16(from: &mut &[u8]) -> io::Result<i16> {
    read_bytes(from).map(i16::from_be_bytes)
}

fn read_bytes<const N: usize>(from: &mut &[u8]) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}
